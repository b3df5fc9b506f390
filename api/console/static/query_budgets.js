// The budget of every query: what each took of the federation's budget, as a table and as a plot of the total after it.

import { Problem } from "./api.js";
import { resolved, stepUnder } from "./chart.js";
import { el, icon, setText } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { cell, head, row, table } from "./tables.js";
import { count, delta, jobTitle, muSquared, sentence, whole, worth } from "./words.js";

const HEIGHT = 180;
const FEW = 10;
const MORE = 50;

const KINDS = {
  each: () => "Every question of a round costs the same.",
  running: () => "A question's share is what it added to the price of its round: winners cost less together, so later ones add less.",
  shared: (charge) => `A share is an attribution: the job is priced once (${muSquared(charge)}), divided evenly here. Its first question alone would have cost the whole.`,
  life: () => "Each image pays for its own votes. A share is the most that one image could pay for this question, of its own budget for life; the ledger is charged a nano-unit a round.",
};

const STATUSES = {
  answered: ["yes", "good", "answered"],
  abstained: ["no", "calm", "no clear answer"],
  refused_budget: ["no", "stopped", "refused"],
  failed_quorum: ["no", "stopped", "not opened"],
};

export class QueryBudgets {
  #api;
  #jobOf;
  #deltaOf;
  #of = null;
  #job = null;
  #rows = [];
  #next = null;
  #shown = FEW;
  #ofOneJob;
  #words = el("p", { class: "small" });
  #state = el("p", { class: "small", role: "status" });
  #readout = el("p", { class: "readout", "aria-hidden": "true" });
  #holder = el("div", { class: "plot", role: "img" });
  #caption = el("figcaption", {});
  #figure = el("figure", { class: "card chart" }, this.#readout, this.#holder, this.#caption);
  #more = el("button", { type: "button", onclick: () => void this.#showMore() }, "Show more");
  #table;
  #chart = null;
  #width = 0;

  /** `jobOf(id)` returns a job that is known here, or nothing; `deltaOf()` the account's delta. */
  constructor(api, place, { jobOf, deltaOf, ofOneJob }) {
    this.#api = api;
    this.#jobOf = jobOf;
    this.#deltaOf = deltaOf;
    this.#ofOneJob = ofOneJob;
    const title = ofOneJob ? "Each question's share of the budget, the last first" : "Each query's share of the budget, the newest first";
    this.#table = table(title, [{ name: "Query" }, { name: "Answer" }, { name: "One image", num: true }, { name: "A whole agent", num: true }, { name: "Total after it", num: true }]);
    place.classList.add("by-query");
    place.append(this.#state, this.#words, this.#figure, this.#table.node, el("p", { class: "more" }, this.#more));
    new ResizeObserver(() => {
      const width = Math.floor(this.#holder.clientWidth);
      if (width > 0 && Math.abs(width - this.#width) > 1) this.#draw();
    }).observe(this.#holder);
    document.addEventListener("themechange", () => this.#draw());
    this.#render();
  }

  /** Reads the newest rows of a job, or of all jobs; the same `version` again reads nothing. */
  async open(jobId, version) {
    const of = `${jobId ?? ""} ${version}`;
    if (this.#of === of) return;
    const isSame = this.#job === (jobId ?? "");
    this.#of = of;
    this.#job = jobId ?? "";
    if (!isSame) {
      this.#rows = [];
      this.#shown = FEW;
      setText(this.#state, "Reading the budget of every query ...");
      this.#render();
    }
    try {
      const page = await this.#api.queryBudgets({ job: jobId ?? "" });
      if (this.#of !== of) return;
      this.#rows = page.items;
      this.#next = page.next;
      const waits = page.waiting.length ? `Prices of winners are being computed for ${page.waiting.join(", ")}.` : "";
      const nothing = page.next === null ? "Nothing has a final charge yet: a question has a row once its round is charged, or given back." : "The newest jobs were charged nothing.";
      setText(this.#state, waits || (page.items.length ? "" : nothing));
      if (waits) this.#of = null; // the next round asks again
    } catch (error) {
      if (this.#of !== of) return;
      this.#of = null; // the next round asks again
      setText(this.#state, error instanceof Problem && error.status === 503 ? `${sentence(error.message)}.` : `The budget of every query did not come: ${error.message}`);
    }
    this.#render();
  }

  close() {
    this.#of = null;
    this.#job = null;
    this.#rows = [];
    this.#next = null;
    this.#shown = FEW;
    setText(this.#state, "");
    this.#render();
  }

  async #showMore() {
    const first = this.#shown;
    this.#shown += MORE;
    const of = this.#of;
    if (this.#shown > this.#rows.length && this.#next !== null) {
      try {
        const page = await this.#api.queryBudgets({ job: this.#job, after: this.#next });
        if (this.#of !== of) return;
        this.#rows = this.#rows.concat(page.items);
        this.#next = page.next;
      } catch (error) {
        setText(this.#state, `More did not come: ${error.message}`);
      }
    }
    this.#render();
    this.#table.body.children[first]?.querySelector("th")?.scrollIntoView({ block: "nearest" });
  }

  #render() {
    const rows = this.#rows;
    for (const node of [this.#words, this.#figure, this.#table.node]) node.hidden = rows.length === 0;
    this.#more.parentElement.hidden = this.#shown >= rows.length && this.#next === null;
    const kinds = [...new Map(rows.map((one) => [one.share_kind, one])).values()];
    const charge = new Set(rows.map((one) => one.job_id)).size === 1 ? (one) => one.charge_nano : () => null;
    setText(this.#words, kinds.map((one) => KINDS[one.share_kind](charge(one) ?? one.charge_nano)).join(" "));
    this.#table.body.replaceChildren(...rows.slice(0, this.#shown).map((one) => this.#row(one)));
    this.#draw();
  }

  #row(one) {
    const job = this.#jobOf(one.job_id);
    const about = !this.#ofOneJob ? el("a", { class: "small block", href: `#jobs/${encodeURIComponent(one.job_id)}` }, job ? jobTitle(job) : one.job_id) : null;
    const [name, look, words] = STATUSES[one.status];
    const share = (nano) => (nano === null ? "no bound" : nano === 0 ? "0" : muSquared(nano));
    const named = one.source === null || one.source === one.query_id ? null : el("span", { class: "small block" }, one.query_id);
    return row(
      head(one.source ?? one.query_id, named, about),
      cell("Answer", "", el("span", { class: "state" }, icon(name, look), ` ${words}`)),
      cell("One image", "num", share(one.share_nano), el("span", { class: "small block" }, one.share_kind)),
      cell("A whole agent", "num", share(one.agent_share_nano)),
      cell("Total after it", "num", worth(one.total_epsilon)),
    );
  }

  /** Oldest first, as the account was charged: jobs that ran at once took turns. */
  #steps() {
    return this.#rows.filter((one) => one.total_epsilon !== null).sort((a, b) => a.total_nano - b.total_nano || a.number - b.number);
  }

  #tell(place) {
    const steps = this.#steps();
    const one = steps[Math.min(place, steps.length) - 1]; // the first place is before all of them
    setText(this.#readout, one ? `${worth(one.total_epsilon)} after ${one.source ?? one.query_id}, which took ${one.share_nano === null ? "no bound" : muSquared(one.share_nano)}` : "before these queries");
  }

  #draw() {
    this.#chart?.destroy();
    this.#chart = null;
    this.#width = Math.floor(this.#holder.clientWidth);
    const steps = this.#steps();
    if (steps.length === 0 || !this.#deltaOf() || this.#width <= 0 || typeof uPlot === "undefined") return;
    const before = steps[0].share_kind === "life" ? steps[0].total_nano : steps[0].total_nano - steps[0].share_nano;
    const spent = [epsilonOf(before, this.#deltaOf()), ...steps.map((one) => one.total_epsilon)];
    const words = `The federation's epsilon about one image after each of ${this.#ofOneJob ? count(steps.length, "question") : `the newest ${count(steps.length, "query", "queries")}`}, at delta ${delta(this.#deltaOf())}`;
    setText(this.#caption, `${words}${this.#next === null ? "" : "; show more to draw earlier ones"}.`);
    this.#holder.setAttribute("aria-label", `Step chart. ${words}: from ${worth(spent[0])} to ${worth(spent.at(-1))}. The table below has the same numbers.`);
    // Where earlier jobs spent most of it the axis begins above 0, or these steps would be a flat line.
    const top = Math.max(...spent) || 1;
    const low = spent[0] > top / 2 ? spent[0] - (top - spent[0]) / 4 : 0;
    const numbered = (tick) => (tick === 0 || tick >= spent.length || !this.#ofOneJob ? "" : whole(steps[tick - 1].number + 1));
    const color = (name) => resolved(this.#figure, name);
    const axis = { stroke: color("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    this.#chart = new uPlot(
      {
        width: this.#width,
        height: HEIGHT,
        padding: [8, 12, 0, 0],
        legend: { show: false },
        cursor: { dataIdx: stepUnder, y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: { x: { time: false, range: [0, spent.length] }, y: { range: [low, top + (top - low) * 0.08] } },
        axes: [
          { ...axis, grid: { show: false }, size: 28, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500], values: (_, ticks) => ticks.map(numbered) },
          { ...axis, size: 56, space: 36, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(3)))) },
        ],
        series: [{}, { stroke: color("--accent"), width: 2, fill: low > 0 ? undefined : color("--accent-tint"), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }],
        hooks: { setLegend: [(chart) => this.#tell(chart.cursor.idxs?.[1] ?? steps.length)] },
      },
      [[...spent, 0].map((_, place) => place), [...spent, spent.at(-1)]],
      this.#holder,
    );
    this.#tell(steps.length);
  }
}
