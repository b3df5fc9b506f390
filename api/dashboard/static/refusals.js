// What was not answered, and why: refused, failed and expired jobs, and agents that said no.

import { byId, el, fill, icon } from "./dom.js";
import { explain } from "./refusal_words.js";
import { cell, empty, head, row, table } from "./tables.js";
import { count, jobTitle, levelName, stateLook, timeAgo } from "./words.js";

const STATES = ["refused", "failed", "expired"];
const SHOWN = 6;

export class Refusals {
  #api;
  #jobs;
  #showAll = false;
  onOpen = () => {};

  constructor(api, jobs) {
    this.#api = api;
    this.#jobs = jobs;
  }

  /** The list of jobs may be too long to hold the refused ones, so they are asked for by themselves. */
  async refresh() {
    const page = await this.#api.jobs({ limit: 25, states: STATES });
    for (const job of page.items) this.#jobs.put(job);
    this.render();
  }

  render() {
    const all = this.#jobs.all();
    const stopped = all.filter((job) => STATES.includes(job.state) && job.problem);
    const said = all.flatMap((job) => job.refusals.map((refusal) => ({ job, ...refusal })));
    const signature = JSON.stringify([stopped.map((job) => [job.job_id, job.version]), said.map((one) => [one.job.job_id, one.rounds, one.party_id, one.reason]), this.#showAll]);
    fill(byId("refusals-list"), signature, () => {
      if (stopped.length === 0 && said.length === 0) return empty("Nothing was refused. A job whose price is higher than what is left would be listed here, with its account, what it asked and what was left.");
      const shown = this.#showAll ? stopped : stopped.slice(0, SHOWN);
      return [
        el("div", { class: "two" }, shown.map((job) => this.#card(job))),
        stopped.length > SHOWN && !this.#showAll ? el("p", { class: "more" }, el("button", { type: "button", onclick: () => this.#all() }, `Show all ${stopped.length}`)) : null,
        said.length ? this.#agents(said) : null,
      ];
    });
  }

  #all() {
    this.#showAll = true;
    this.render();
  }

  #card(job) {
    const where = job.problem.account ? `, ${levelName(job.problem.level)}` : "";
    return el(
      "article",
      { class: "card refused" },
      el("h3", {}, icon(...stateLook(job.state)), ` ${jobTitle(job)}: ${job.problem.title}`),
      el("p", { class: "small" }, `${job.state}${where}, ${count(job.queries, "question")}, by ${this.#jobs.by(job)}, `, timeAgo(job.updated_at)),
      explain(job.problem, job.price.delta),
      job.ledger ? el("p", { class: "small" }, `Ledger: ${job.ledger}.`) : null,
      el("p", {}, el("button", { type: "button", class: "quiet", "aria-haspopup": "dialog", "aria-label": `Details of ${jobTitle(job)}`, onclick: () => this.onOpen(job.job_id) }, "Details")),
    );
  }

  #agents(said) {
    const { node, body } = table("Agents that refused", [{ name: "Agent" }, { name: "Job" }, { name: "Its reason" }]);
    body.append(
      ...said.slice(0, 50).map((one) =>
        row(head(one.party_id), cell("Job", "", `${jobTitle(one.job)}, round ${one.rounds.join(", ")}`), cell("Its reason", "wide", one.reason)),
      ),
    );
    return node;
  }
}
