// The ledger by job: what each cost, as a share of the budget and as an epsilon, in rows that add up to what is spent.

import { BudgetPlot } from "./budget_plot.js";
import { byId, el, fill, setText } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { entriesTable, entryRow } from "./ledger_entries.js";
import { newest } from "./ledger_pages.js";
import { percentWords, percentages, placesFor } from "./shares.js";
import { cell, empty, head, row, table } from "./tables.js";
import { LEVELS, count, jobTitle, levelName, questionWords, taskWords, time, worth, worthNode } from "./words.js";

const ENTRIES = 200;
const MOST_SHOWN = 20;
const CHANGE = { reserve: 1, void: -1 };

export class LedgerJobs {
  #api;
  #budget;
  #jobs;
  #entries = [];
  #below = 0;
  #head = -1;
  #shown = MOST_SHOWN;
  #plots = LEVELS.map((level) => ({ level, plot: new BudgetPlot(level) }));

  constructor(api, budget, jobs, onFailure) {
    byId("ledger-plots").append(...this.#plots.map(({ plot }) => plot.node));
    this.#api = api;
    this.#budget = budget;
    this.#jobs = jobs;
    byId("ledger-jobs-more").addEventListener("click", () => {
      this.#shown += MOST_SHOWN;
      this.#older().catch(onFailure);
    });
  }

  /** Reads what was written since. */
  async refresh() {
    const head = this.#budget.view?.head_seq ?? 0;
    if (head !== this.#head) {
      const { entries, below } = await this.#read(head, Math.max(0, this.#head));
      this.#entries = [...entries, ...this.#entries];
      if (this.#head < 0) this.#below = below;
      this.#head = head;
    }
    this.#render();
  }

  /** The federation's entries with low < seq <= high, newest first: all of them, or one page at the first time. */
  async #read(high, low) {
    const filter = { account: "federation", search: "", keep: (entry) => entry.seq > low };
    const isFirst = low === 0;
    let found = [];
    let top = high;
    while (top > low) {
      const page = await newest(this.#api, top, ENTRIES, filter, undefined);
      found = found.concat(page.entries);
      top = page.below;
      if (isFirst || page.entries.length === 0) break;
    }
    return { entries: found, below: Math.max(top, low) };
  }

  async #older() {
    if (this.#below > 0 && groupsOf(this.#entries).jobs.length < this.#shown) {
      const { entries, below } = await newest(this.#api, this.#below, ENTRIES, { account: "federation", search: "", keep: () => true }, undefined);
      this.#entries.push(...entries);
      this.#below = below;
    }
    this.#render();
  }

  #render() {
    const groups = groupsOf(this.#entries);
    const jobs = groups.jobs.slice(0, this.#shown);
    byId("ledger-jobs-more").hidden = jobs.length === groups.jobs.length && this.#below === 0;
    const balances = LEVELS.map((level) => this.#budget.balance("federation", level)).filter(Boolean);
    const known = jobs.map((one) => this.#jobs.get(one.id)?.version ?? 0);
    const isNew = fill(byId("ledger-jobs"), JSON.stringify([jobs, known, balances]), () => {
      if (jobs.length === 0 && !balances.some((one) => one.posted_nano + one.reserved_nano > 0)) return empty("No job has been charged yet.");
      return this.#table(jobs, balances);
    });
    if (isNew) for (const { level, plot } of this.#plots) plot.show(groups.jobs, this.#budget.balance("federation", level), (id) => this.#jobs.get(id));
    const settings = groups.settings;
    fill(byId("ledger-limits"), JSON.stringify(settings.map((entry) => entry.seq)), () => {
      if (settings.length === 0) return el("p", { class: "small" }, "None among the entries that were read.");
      const { node, body } = entriesTable("Limits set and changed");
      body.append(...settings.map((entry) => entryRow(entry, this.#budget)));
      return node;
    });
    setText(byId("ledger-head"), this.#budget.view ? `${count(this.#budget.view.head_seq, "entry", "entries")} in the chain.` : "");
  }

  #table(jobs, balances) {
    const { node, body } = table("Charges of the federation by job", [{ name: "Job" }, { name: "Charge" }, ...balances.map((one) => ({ name: sentenceOf(one.level), num: true }))], { hideCaption: true });
    const columns = balances.map((balance) => columnOf(balance, jobs));
    body.append(
      ...jobs.map((job, place) => this.#jobRow(job, columns.map((column) => column.jobs[place]))),
      columns.some((column) => column.hasRest) ? sumRow("Earlier and others", "jobs that are not listed here, and jobs of other requesters", columns.map((column) => column.rest)) : "",
      sumRow("All that is spent or reserved", "the same as under Budget", columns.map((column) => column.all)),
    );
    return node;
  }

  #jobRow(job, cells) {
    const known = this.#jobs.get(job.id);
    const place = el("div", {});
    const entries = el("details", { class: "quiet" }, el("summary", {}, "Entries, nano-units and hashes", el("span", { class: "visually-hidden" }, ` of ${known ? jobTitle(known) : job.id}`)), place);
    entries.addEventListener("toggle", () => entries.open && void this.#showEntries(job, place));
    const name = known ? el("a", { href: `#jobs/${encodeURIComponent(job.id)}` }, jobTitle(known)) : el("span", { class: "mono" }, job.id);
    const about = known ? [taskWords(known), ...(job.state === "void" ? [] : [`${count(known.queries, "question")}: ${questionWords(known.price)}`])] : [];
    const lines = [...about, time(job.at)].map((words) => el("span", { class: "small block" }, words));
    return row(head(name, lines, entries), cell("Charge", "", STATES[job.state]), ...cells.map((one) => cell(one.name, "num", one.node())));
  }

  async #showEntries(job, place) {
    if (place.firstChild) return;
    try {
      const page = await this.#api.ledger({ after: job.first - 1, search: job.id, limit: ENTRIES });
      const { node, body } = entriesTable("Entries of this job");
      body.append(...page.items.map((entry) => entryRow(entry, this.#budget)));
      place.replaceChildren(node, page.items.length === ENTRIES ? el("p", { class: "small" }, "There are more; find them under Every entry.") : "");
    } catch (error) {
      place.replaceChildren(el("p", { class: "error" }, `They did not come: ${error.message}`));
    }
  }
}

const STATES = { posted: "charged for good", reserved: "reserved: the job runs", void: "given back: nobody was asked", mixed: "charged in part, the rest given back" };

/**
 * Entries of one account, newest first, by job. A job is listed once all its reservations have been read, so that no
 * charge is shown that is not its whole one; what is not listed is in the line of the rest.
 */
export function groupsOf(entries) {
  const jobs = new Map();
  const settings = [];
  for (const entry of entries) {
    if (entry.kind === "open" || entry.kind === "cap" || entry.kind === "write-off") {
      settings.push(entry);
      continue;
    }
    const id = entry.reservation_id.split("/")[0];
    if (!id.startsWith("job-")) continue;
    const job = jobs.get(id) ?? { id, at: entry.at, nano: {}, reserved: new Set(), ended: new Set(), posted: new Set(), given: new Set() };
    jobs.set(id, job);
    job.at = entry.at;
    job.first = entry.seq; // newest first, so the last is the first
    if (entry.kind === "reserve") job.reserved.add(entry.reservation_id);
    else job.ended.add(entry.reservation_id);
    if (entry.kind === "post") job.posted.add(entry.reservation_id);
    if (entry.kind === "void") job.given.add(entry.reservation_id);
    job.nano[entry.level] = (job.nano[entry.level] ?? 0) + (CHANGE[entry.kind] ?? 0) * entry.amount_nano;
  }
  const whole = [...jobs.values()].filter((job) => [...job.ended].every((id) => job.reserved.has(id)));
  return { jobs: whole.map((job) => ({ id: job.id, first: job.first, at: job.at, nano: job.nano, state: stateOf(job) })), settings };
}

/** The reservation of the proposal gives way to one for each batch; only those say what became of the job. */
function stateOf(job) {
  const batches = [...job.reserved].filter((id) => !id.endsWith("/proposed"));
  const of = batches.length > 0 ? batches : [...job.reserved];
  const posted = of.filter((id) => job.posted.has(id)).length;
  const given = of.filter((id) => job.given.has(id)).length;
  if (posted + given < of.length) return "reserved";
  return given === of.length ? "void" : posted === of.length ? "posted" : "mixed";
}

const sentenceOf = (level) => ({ instance: "One image", agent: "A whole agent" })[level] ?? levelName(level);

/** One level's cells: each job's share of the budget and epsilon alone, what is not listed, and all of it. */
function columnOf(balance, jobs) {
  const name = sentenceOf(balance.level);
  const spent = balance.posted_nano + balance.reserved_nano;
  const amounts = jobs.map((job) => Math.max(0, job.nano[balance.level] ?? 0));
  const rest = Math.max(0, spent - amounts.reduce((sum, amount) => sum + amount, 0));
  const left = balance.cap_nano === null ? 0 : Math.max(0, balance.cap_nano - spent);
  const parts = [...amounts, rest, left];
  const places = placesFor(parts);
  const shares = balance.cap_nano ? percentages(parts, places) : null;
  const node = (amount, share) => () => {
    const bound = epsilonOf(amount, balance.delta);
    if (amount === 0) return share === null ? "nothing" : percentWords(0, places);
    const words = el("span", { class: "small block" }, worthNode(bound, bound === null ? "no bound" : `${worth(bound)} alone`));
    return share === null ? worthNode(bound, bound === null ? "no bound" : `${worth(bound)} alone`) : el("span", {}, percentWords(share, places), words);
  };
  const total = shares ? 100 - shares.at(-1) : null;
  return {
    hasRest: rest > 0,
    jobs: amounts.map((amount, place) => ({ name, node: node(amount, shares ? shares[place] : null) })),
    rest: { name, node: () => (shares ? percentWords(shares.at(-2), places) : rest === 0 ? "nothing" : worthNode(epsilonOf(rest, balance.delta), `${worth(epsilonOf(rest, balance.delta))} alone`)) },
    all: { name, node: () => el("strong", {}, shares ? `${percentWords(total, places)} of the budget` : "", el("span", { class: shares ? "small block" : "" }, worthNode(balance.spent_epsilon))) },
  };
}

function sumRow(name, words, cells) {
  return row(head(name, el("span", { class: "small block" }, words)), cell("", "", ""), ...cells.map((one) => cell(one.name, "num", one.node())));
}
