// Jobs, newest first, with live progress: streams for a few that run, the list every few seconds for all.

import { announce, byId, el, fill, icon, keyed, setText } from "./dom.js";
import { progress } from "./meters.js";
import { cell, empty, head, row, table } from "./tables.js";
import { FINISHED, UNFINISHED, jobTitle, short, stateLook, taskWords, timeAgo, wasFree, whole, worthNode } from "./words.js";

const PAGE = 25;
const MOST_STREAMS = 3; // a browser opens six connections to one host; the rest of the page needs some
const RETRY_MS = 5_000;

const FILTERS = { all: [], unfinished: UNFINISHED, completed: ["completed"], refused: ["refused"], stopped: ["failed", "cancelled", "expired"] };

export class Jobs {
  #api;
  #jobs = new Map();
  #table = null;
  #streams = new Map();
  #next = null;
  #older = false;
  #filter = "all";
  #focused = null;
  #listeners = [];
  #names = new Map();
  onFailure = () => {};

  constructor(api) {
    this.#api = api;
    byId("jobs-filter").addEventListener("change", (event) => {
      this.#filter = event.target.value;
      this.#older = false;
      this.#next = null;
      this.refresh().catch(this.onFailure);
    });
    byId("jobs-more").addEventListener("click", () => this.#loadOlder().catch(this.onFailure));
  }

  /** `listener(job, before)` hears of every change of a job. */
  onChange(listener) {
    this.#listeners.push(listener);
  }

  /** Names of the tokens, for administrators. */
  nameTokens(tokens) {
    this.#names = new Map(tokens.map((token) => [token.token_id, token.name]));
  }

  by(job) {
    return this.#names.get(job.created_by) ?? short(job.created_by, 16);
  }

  get(id) {
    return this.#jobs.get(id) ?? null;
  }

  all() {
    return [...this.#jobs.values()].sort(newestFirst);
  }

  /** The job that is looked at is watched first. */
  focus(id) {
    this.#focused = id;
    this.#keepStreams();
  }

  async refresh() {
    const page = await this.#api.jobs({ limit: PAGE, states: FILTERS[this.#filter] });
    if (!this.#older) this.#next = page.next;
    for (const job of page.items) this.put(job);
    this.#render();
    this.#keepStreams();
  }

  /** Takes a job as the service shows it now; an older view of it changes nothing. */
  put(job) {
    const before = this.#jobs.get(job.job_id);
    if (before && before.version > job.version) return;
    this.#jobs.set(job.job_id, job);
    if (before?.version === job.version) return;
    if (before && before.state !== job.state) announce(`${jobTitle(job)}: ${job.state}`);
    for (const listener of this.#listeners) listener(job, before ?? null);
  }

  stop() {
    for (const controller of this.#streams.values()) controller.abort();
    this.#streams.clear();
  }

  async #loadOlder() {
    if (!this.#next) return;
    const page = await this.#api.jobs({ limit: PAGE, after: this.#next, states: FILTERS[this.#filter] });
    this.#older = true;
    this.#next = page.next;
    for (const job of page.items) this.put(job);
    this.#render();
  }

  #keepStreams() {
    const open = this.all().filter((job) => !FINISHED.has(job.state));
    open.sort((a, b) => (b.job_id === this.#focused) - (a.job_id === this.#focused) || newestFirst(a, b));
    const wanted = new Set(open.slice(0, MOST_STREAMS).map((job) => job.job_id));
    for (const [id, controller] of this.#streams) {
      if (wanted.has(id)) continue;
      controller.abort();
      this.#streams.delete(id);
    }
    for (const id of wanted) if (!this.#streams.has(id)) void this.#stream(id);
  }

  async #stream(id) {
    const controller = new AbortController();
    this.#streams.set(id, controller);
    try {
      await this.#api.watch(
        id,
        (job) => {
          this.put(job);
          this.#render();
        },
        controller.signal,
      );
    } catch (error) {
      if (!controller.signal.aborted) this.onFailure(error, { quiet: true });
    }
    // A slot stays taken for a while after its stream ended, so that a failing one is not asked again at once.
    setTimeout(() => {
      if (this.#streams.get(id) === controller) this.#streams.delete(id);
    }, RETRY_MS);
  }

  #render() {
    const states = FILTERS[this.#filter];
    const shown = this.all().filter((job) => states.length === 0 || states.includes(job.state));
    const place = byId("jobs-list");
    byId("jobs-more").hidden = this.#next === null;
    if (shown.length === 0) {
      this.#table = null;
      place.replaceChildren(
        this.#filter === "all"
          ? empty("No job has been submitted yet. Begin with New job above, or in a shell:", `export LABELER_URL=${location.origin} LABELER_TOKEN=YOUR_TOKEN\nlabeler submit IMAGES --task TASK.toml --wait --out labels.parquet`)
          : empty("No job is in this state."),
      );
      return;
    }
    if (this.#table === null) {
      this.#table = table("Jobs, newest first", [{ name: "Job" }, { name: "State" }, { name: "Answered" }, { name: "Price, one image", num: true }], { hideCaption: true });
      place.replaceChildren(this.#table.node);
    }
    keyed(this.#table.body, shown, (job) => job.job_id, (job) => this.#row(job));
  }

  #row(first) {
    const name = el("a", { class: "name", href: `#jobs/${encodeURIComponent(first.job_id)}` });
    const by = el("span", {});
    const mark = el("span", { class: "state" });
    const stage = el("span", { class: "small block" });
    const bar = progress("Questions answered");
    const done = el("span", {});
    const price = el("span", {});
    const node = row(
      head(name, el("span", { class: "small block" }, taskWords(first)), el("span", { class: "small block" }, timeAgo(first.created_at), " ", by)),
      cell("State", "wide", mark, stage),
      cell("Answered", "", done, bar.node),
      cell("Price, one image", "num", price),
    );
    let shownState = "";
    return {
      node,
      update: (job) => {
        setText(name, jobTitle(job));
        if (shownState !== job.state) {
          shownState = job.state;
          mark.replaceChildren(icon(...stateLook(job.state)), ` ${job.state}`);
        }
        bar.node.hidden = FINISHED.has(job.state);
        bar.update(job.queries_done, job.queries);
        setText(done, `${whole(job.queries_done)} of ${whole(job.queries)}`);
        setText(stage, job.problem ? job.problem.title : job.state === "completed" ? "" : job.stage);
        const isFree = wasFree(job);
        fill(price, `${isFree} ${job.price.instance_epsilon}`, () => (isFree ? el("span", { class: "small" }, "nothing charged") : worthNode(job.price.instance_epsilon)));
        setText(by, `by ${this.by(job)}`);
      },
    };
  }
}

function newestFirst(a, b) {
  return b.created_at.localeCompare(a.created_at) || b.job_id.localeCompare(a.job_id);
}
