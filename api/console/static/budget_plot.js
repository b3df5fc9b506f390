// The budget over jobs: how much of it was spent after each of them, a step for each job, the oldest first.

import { resolved, stepUnder } from "./chart.js";
import { el, setText } from "./dom.js";
import { percentWords, percentages } from "./shares.js";
import { count, jobTitle, levelName } from "./words.js";

const HEIGHT = 180;

export class BudgetPlot {
  #level;
  #chart = null;
  #width = 0;
  #steps = [];
  #title = el("h3", {});
  #readout = el("p", { class: "readout", "aria-hidden": "true" });
  #holder = el("div", { class: "plot", role: "img" });
  node = el("figure", { class: "card chart", hidden: true }, this.#title, this.#readout, this.#holder);

  constructor(level) {
    this.#level = level;
    setText(this.#title, `Budget over jobs, ${levelName(level)}`);
    new ResizeObserver(() => {
      const width = Math.floor(this.#holder.clientWidth);
      if (width > 0 && Math.abs(width - this.#width) > 1) this.#draw();
    }).observe(this.#holder);
    document.addEventListener("themechange", () => this.#draw());
  }

  /** Args: jobs, the newest first, each with its charge by level; balance of the account; how to look a job up. */
  show(jobs, balance, known) {
    const charged = jobs.filter((job) => (job.nano[this.#level] ?? 0) > 0).reverse();
    this.node.hidden = charged.length === 0 || !balance || !(balance.cap_nano > 0);
    if (this.node.hidden) return;
    let spent = balance.posted_nano + balance.reserved_nano - charged.reduce((sum, job) => sum + job.nano[this.#level], 0);
    this.#steps = [{ name: "before these jobs", nano: spent }];
    for (const job of charged) {
      spent += job.nano[this.#level];
      this.#steps.push({ name: `after ${known(job.id) ? jobTitle(known(job.id)) : job.id}`, nano: spent });
    }
    for (const step of this.#steps) [step.share] = percentages([Math.max(0, step.nano), Math.max(0, balance.cap_nano - step.nano)]);
    const words = this.#words(this.#steps.length - 1);
    this.#holder.setAttribute("aria-label", `Step chart of the spent budget over ${count(charged.length, "job")}: ${words}. The table below has the same numbers.`);
    this.#draw();
  }

  #words(place) {
    const step = this.#steps[Math.min(place, this.#steps.length - 1)];
    return `${percentWords(step.share)} spent or reserved ${step.name}`;
  }

  #draw() {
    this.#chart?.destroy();
    this.#chart = null;
    this.#width = Math.floor(this.#holder.clientWidth);
    if (this.node.hidden || this.#width <= 0 || typeof uPlot === "undefined") return;
    const shares = this.#steps.map((step) => step.share);
    const data = [[...shares, 0].map((_, place) => place), [...shares, shares.at(-1)], [...shares, 0].map(() => 100)];
    const color = (name) => resolved(this.node, name);
    const axis = { stroke: color("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    const jobLabel = (tick) => (tick === 0 || tick >= shares.length ? "" : `job ${tick}`);
    this.#chart = new uPlot(
      {
        width: this.#width,
        height: HEIGHT,
        padding: [8, 12, 0, 0],
        legend: { show: false },
        cursor: { dataIdx: stepUnder, y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: { x: { time: false }, y: { range: [0, 105] } },
        axes: [
          { ...axis, grid: { show: false }, size: 28, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500], values: (_, ticks) => ticks.map(jobLabel) },
          { ...axis, size: 52, space: 36, values: (_, ticks) => ticks.map((tick) => `${tick} %`) },
        ],
        series: [
          {},
          { stroke: color("--accent"), width: 2, fill: color("--accent-tint"), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
          { stroke: color("--wrong"), width: 1.5, dash: [6, 4], points: { show: false } },
        ],
        hooks: { setLegend: [(chart) => setText(this.#readout, this.#words(chart.cursor.idxs?.[1] ?? shares.length - 1))] },
      },
      data,
      this.#holder,
    );
    setText(this.#readout, this.#words(shares.length - 1));
  }
}
