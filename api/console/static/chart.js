// Spent and reserved epsilon over time, one step chart for each level of one account, with the same numbers as a table.

import { byId, el, setText } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { newest } from "./ledger_pages.js";
import { cell, head, row, table } from "./tables.js";
import { LEVELS, accountName, delta, epsilon, levelName, time, utc } from "./words.js";

const MOST_ENTRIES = 1500;
const TABLE_ROWS = 200;
const HEIGHT = 200;
const CHANGES = new Set(["reserve", "void", "write-off"]);

export class Charts {
  #api;
  #budget;
  #account = "federation";
  #entries = [];
  #read = 0;
  #isCut = false;
  #loading = Promise.resolve();
  #panels = new Map();

  constructor(api, budget, onFailure) {
    this.#api = api;
    this.#budget = budget;
    byId("chart").addEventListener("toggle", () => this.refresh().catch(onFailure));
    byId("chart-account").addEventListener("change", (event) => {
      this.#account = event.target.value;
      this.#entries = [];
      this.#read = 0;
      this.refresh().catch(onFailure);
    });
    document.addEventListener("themechange", () => this.#draw());
  }

  /** Reads what was written since the last time; nothing while the ledger's head stays, or nobody looks. */
  async refresh() {
    if (!byId("chart").open) return undefined;
    this.#loading = this.#loading.catch(() => {}).then(() => this.#load());
    return this.#loading;
  }

  async #load() {
    const view = this.#budget.view;
    if (!view?.accounts.length) return;
    this.#fillSelect();
    if (view.head_seq > this.#read || this.#read === 0) {
      const account = this.#account;
      const filter = { account, search: "", keep: (entry) => entry.account === account };
      const fresh = [];
      let below = view.head_seq;
      while (below > this.#read && fresh.length < MOST_ENTRIES) {
        const page = await newest(this.#api, below, 100, { ...filter, keep: (entry) => filter.keep(entry) && entry.seq > this.#read }, undefined);
        if (account !== this.#account) return;
        fresh.push(...page.entries);
        below = page.below;
      }
      this.#isCut = this.#read === 0 ? below > 0 : this.#isCut;
      this.#entries = this.#entries.concat(fresh.reverse());
      this.#read = view.head_seq;
    }
    this.#draw();
  }

  #fillSelect() {
    const select = byId("chart-account");
    const names = this.#budget.accounts();
    if (select.options.length === names.length) return;
    select.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === this.#account }, accountName(name))));
  }

  #draw() {
    const place = byId("charts");
    for (const level of LEVELS) {
      const balance = this.#budget.balance(this.#account, level);
      let panel = this.#panels.get(level);
      if (!panel) {
        panel = new Panel(level);
        this.#panels.set(level, panel);
        place.append(panel.node);
      }
      panel.node.hidden = !balance;
      if (balance) panel.show(balance, this.#points(level, balance), this.#isCut);
    }
  }

  /** [{at, spent}] in epsilon at the account's delta: everything reserved or posted up to then. */
  #points(level, balance) {
    const points = [];
    let running = 0;
    for (const entry of this.#entries) {
      if (entry.level !== level) continue;
      if (CHANGES.has(entry.kind)) running += entry.kind === "void" ? -entry.amount_nano : entry.amount_nano;
      const spent = entry.spent_after_nano ?? (this.#isCut ? null : running);
      if (spent === null) continue;
      points.push({ seq: entry.seq, at: entry.at, kind: entry.kind, reservation: entry.reservation_id, nano: spent });
    }
    return points.map((point) => ({ ...point, spent: epsilonOf(point.nano, balance.delta) }));
  }
}

class Panel {
  #level;
  #chart = null;
  #signature = "";
  #holder = el("div", { class: "plot", role: "img" });
  #readout = el("p", { class: "readout", "aria-hidden": "true" });
  #words = el("figcaption", {});
  #table;
  #width = 0;
  #data = null;
  #last = null;

  constructor(level) {
    this.#level = level;
    const name = levelName(level);
    this.#table = table(`Epsilon spent or reserved for ${name}, newest first`, [{ name: "When" }, { name: "What" }, { name: "Spent or reserved after it", num: true }], {
      cards: false,
    });
    this.node = el(
      "figure",
      { class: "card chart" },
      el("h4", {}, `Epsilon, ${name}`),
      this.#readout,
      this.#holder,
      this.#words,
      el("details", {}, el("summary", {}, "The same as a table", el("span", { class: "visually-hidden" }, ` (epsilon, ${name})`)), this.#table.node),
    );
    new ResizeObserver(() => {
      const width = Math.floor(this.#holder.clientWidth);
      if (width > 0 && Math.abs(width - this.#width) > 1) {
        this.#width = width;
        this.#chart?.setSize({ width, height: HEIGHT });
        if (!this.#chart && this.#last) this.#plot();
      }
    }).observe(this.#holder);
  }

  show(balance, points, isCut) {
    const cap = balance.cap_nano === null ? null : balance.cap_epsilon;
    const theme = getComputedStyle(this.node).color + getComputedStyle(document.documentElement).colorScheme;
    const signature = JSON.stringify([balance.account, cap, points.length, points.at(-1)?.seq, points[0]?.seq, theme]);
    if (signature === this.#signature) return;
    this.#signature = signature;
    this.#last = { balance, points, cap };
    this.#describe(balance, points, cap, isCut);
    this.#plot();
  }

  #describe(balance, points, cap, isCut) {
    const who = accountName(balance.account);
    const limit = cap === null ? "No limit is set on it." : `The dashed line is its limit, epsilon ${epsilon(cap)}.`;
    const part = isCut ? " Only the latest entries are drawn." : "";
    const grown =
      balance.spent_epsilon === null
        ? "no bound, so no line is drawn"
        : points.length
          ? `epsilon ${epsilon(points.at(-1).spent)} now`
          : "nothing spent or reserved yet";
    setText(this.#words, `${who}: ${grown} (delta ${delta(balance.delta)}), reserved included; times in UTC. ${limit}${part}`);
    this.#holder.setAttribute("aria-label", `Step chart of epsilon spent or reserved over time for ${levelName(this.#level)}: ${this.#words.textContent}`);
    const newestFirst = points.slice(-TABLE_ROWS).reverse();
    this.#table.body.replaceChildren(
      ...newestFirst.map((point) =>
        row(
          head(time(point.at, { seconds: true })),
          cell("What", "", `${point.kind}${point.reservation ? ` ${point.reservation}` : ""}`),
          cell("Spent or reserved after it", "num", epsilon(point.spent)),
        ),
      ),
    );
    this.#table.node.hidden = newestFirst.length === 0;
  }

  #plot() {
    const { points, cap } = this.#last;
    this.#chart?.destroy();
    this.#chart = null;
    this.#holder.hidden = points.every((point) => !point.spent);
    this.#readout.hidden = this.#holder.hidden;
    this.#width = Math.floor(this.#holder.clientWidth);
    if (this.#holder.hidden || this.#width <= 0 || typeof uPlot === "undefined") return;
    const seconds = points.map((point) => new Date(point.at).getTime() / 1000);
    const spent = points.map((point) => point.spent);
    // Up to now nothing more was spent; and a first moment before anything was.
    const now = Math.max(Date.now() / 1000, seconds.at(-1) + 1);
    this.#data = [
      [...seconds, now],
      [...spent, spent.at(-1)],
      [...spent, 0].map(() => cap),
    ];
    this.#chart = new uPlot(this.#options(this.#data[0], cap), this.#data, this.#holder);
    this.#tell(null);
  }

  #tell(index) {
    const last = this.#data[0].length - 1;
    const place = index ?? last;
    const when = place === last ? "now" : utc(new Date(this.#data[0][place] * 1000), { seconds: true });
    setText(this.#readout, place === last ? `epsilon ${epsilon(this.#data[1][place])} now` : `epsilon ${epsilon(this.#data[1][place])} from ${when} on`);
  }

  #options(seconds, cap) {
    const color = (name) => resolved(this.node, name);
    const ink = color("--muted");
    const line = color("--line");
    const top = Math.max(cap ?? 0, ...this.#data[1].filter((value) => value !== null)) * 1.08 || 1;
    const axis = { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: this.#width,
      height: HEIGHT,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      cursor: { dataIdx: stepUnder, y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: { x: { time: true }, y: { range: [0, top] } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 84, values: (_, ticks) => ticks.map((tick) => timeLabel(tick, seconds.at(-1) - seconds[0])) },
        { ...axis, size: 48, space: 36, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(4)))) },
      ],
      series: [
        {},
        { stroke: color("--accent"), width: 2, fill: color("--accent-tint"), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
        { stroke: color("--wrong"), width: 1.5, dash: [6, 4], points: { show: false }, show: cap !== null },
      ],
      hooks: { setLegend: [(chart) => this.#tell(chart.cursor.idxs?.[1] ?? null)] },
    };
  }
}

/** The step that holds under the cursor, on the line of what was spent and on no other. */
export function stepUnder(chart, series, closest, x) {
  if (series !== 1) return null;
  return chart.data[0][closest] > x && closest > 0 ? closest - 1 : closest;
}

/** A colour of the stylesheet as the current theme has it: a canvas does not follow variables. */
export function resolved(near, name) {
  const probe = el("span", { class: "probe", hidden: true });
  probe.style.color = `var(${name})`;
  near.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function timeLabel(seconds, span) {
  const moment = new Date(seconds * 1000);
  if (span < 600) return moment.toLocaleTimeString(undefined, { timeStyle: "medium", timeZone: "UTC", hourCycle: "h23" });
  if (span < 36 * 3600) return moment.toLocaleTimeString(undefined, { timeStyle: "short", timeZone: "UTC", hourCycle: "h23" });
  return moment.toLocaleDateString(undefined, { day: "numeric", month: "short", timeZone: "UTC" });
}
