// One job in full: its rounds, who answered and who is awaited, refusals, downloads, stopping it, and deleting what it leaves.

import { byId, el, icon, save } from "./dom.js";
import { progress } from "./meters.js";
import { explain } from "./refusal_words.js";
import { cell, head, row, table } from "./tables.js";
import { FINISHED, count, epsilon, jobTitle, listed, personWords, sentence, stateLook, statesPerson, time, whole } from "./words.js";

const FORMATS = [
  ["jsonl", "JSONL", "jsonl"],
  ["parquet", "Parquet", "parquet"],
  ["label-studio", "Label Studio", "json"],
  ["image-folder-csv", "CSV for an image folder", "csv"],
];

const ROUND_WORDS = {
  waiting: "not asked yet",
  asked: "agents are asked",
  agreed: "talliers agreed on who takes part",
  posted: "charged, being opened",
  opened: "opened",
  "not-asked": "never asked",
  "given-up": "asked, then given up",
};

const ENDINGS = {
  cancel: {
    offer: "Cancel this job",
    question: "Cancel this job?",
    means: "What agents were already asked stays charged; only rounds nobody was asked come back to the budget.",
    yes: "Yes, cancel it",
    no: "Keep it",
    failed: "It was not cancelled",
  },
  forget: {
    offer: "Delete its data",
    question: "Delete what this job sent and got?",
    means: "Images, questions and labels are deleted for good, and cannot be downloaded any more. Its charge and the digests of its batches stay in the ledger.",
    yes: "Yes, delete it",
    no: "Keep it",
    failed: "Nothing is known to be deleted",
  },
};

export class JobDialog {
  #api;
  #jobs;
  #mayCancel;
  #id = null;
  #node = byId("job-dialog");
  #signature = "";
  #asking = null;
  #message = "";

  constructor(api, jobs, mayCancel) {
    this.#api = api;
    this.#jobs = jobs;
    this.#mayCancel = mayCancel;
    this.#node.addEventListener("close", () => {
      this.#id = null;
      jobs.focus(null);
    });
    // A click on the backdrop lands on the dialog itself.
    this.#node.addEventListener("click", (event) => {
      if (event.target === this.#node) this.#node.close();
    });
    jobs.onChange((job) => {
      if (job.job_id === this.#id) this.#render();
    });
  }

  async open(id) {
    this.#id = id;
    this.#signature = "";
    this.#asking = null;
    this.#message = "";
    this.#render();
    if (!this.#node.open) this.#node.showModal();
    this.#jobs.focus(id);
    try {
      this.#jobs.put(await this.#api.job(id));
      this.#render();
    } catch (error) {
      this.#say(error.message);
    }
  }

  #render() {
    const job = this.#jobs.get(this.#id);
    if (!job) return;
    const signature = JSON.stringify([job, this.#asking, this.#message, this.#mayCancel()]);
    if (signature === this.#signature) return;
    this.#signature = signature;
    const focused = this.#node.contains(document.activeElement) ? document.activeElement.dataset.part : null;
    this.#node.replaceChildren(
      el(
        "div",
        { class: "dialog-head" },
        el("h2", { id: "job-dialog-title", tabindex: "-1", "data-part": "title" }, jobTitle(job)),
        el("button", { type: "button", class: "quiet", "data-part": "close", onclick: () => this.#node.close() }, "Close"),
      ),
      ...[summary(job), job.problem ? this.#problem(job) : null, facts(job, this.#jobs.by(job)), rounds(job), this.#downloads(job), this.#endings(job)].filter(Boolean),
      el("p", { class: "error", role: "status" }, this.#message),
    );
    if (focused) (this.#node.querySelector(`[data-part="${CSS.escape(focused)}"]`) ?? byId("job-dialog-title")).focus();
  }

  #say(message) {
    this.#message = message;
    this.#render();
  }

  #problem(job) {
    return el("section", { class: "note alarm", "aria-label": "Why" }, el("h3", {}, job.problem.title), explain(job.problem, job.price.delta));
  }

  #downloads(job) {
    if (job.forgotten_at) return el("p", {}, "What this job sent and got was deleted. Its charge stays in the ledger.");
    if (job.state !== "completed" || !this.#mayCancel()) return null;
    return el(
      "section",
      {},
      el("h3", {}, "Labels"),
      el(
        "div",
        { class: "buttons" },
        FORMATS.map(([format, name, ending]) =>
          el("button", { type: "button", "data-part": format, onclick: () => this.#download(job, format, ending) }, name),
        ),
      ),
    );
  }

  async #download(job, format, ending) {
    this.#say("Downloading ...");
    try {
      save(await this.#api.labels(job.job_id, format), `${job.job_id}.${ending}`);
      this.#say("");
    } catch (error) {
      this.#say(`The labels did not come: ${error.message}`);
    }
  }

  /** Stopping a job that runs, or deleting what one that has ended leaves: each is asked twice, because neither comes back. */
  #endings(job) {
    const kind = !FINISHED.has(job.state) ? "cancel" : job.forgotten_at ? null : "forget";
    if (kind === null || !this.#mayCancel()) return null;
    const words = ENDINGS[kind];
    if (this.#asking !== kind) {
      return el("p", { class: "buttons" }, el("button", { type: "button", class: "danger", "data-part": kind, onclick: () => this.#confirm(kind, kind) }, words.offer));
    }
    return el(
      "section",
      { class: "note", "aria-label": words.question },
      el("p", {}, `${words.question} ${words.means}`),
      el(
        "div",
        { class: "buttons" },
        el("button", { type: "button", class: "danger", "data-part": `${kind}-yes`, onclick: () => this.#end(job, kind) }, words.yes),
        el("button", { type: "button", "data-part": kind, onclick: () => this.#confirm(null, kind) }, words.no),
      ),
    );
  }

  #confirm(asking, kind) {
    this.#asking = asking;
    this.#render();
    this.#node.querySelector(`[data-part="${asking ? `${kind}-yes` : kind}"]`)?.focus();
  }

  async #end(job, kind) {
    try {
      this.#jobs.put(await this.#api[kind](job.job_id));
      this.#asking = null;
      this.#say("");
      byId("job-dialog-title").focus();
    } catch (error) {
      this.#say(`${ENDINGS[kind].failed}: ${error.message}`);
    }
  }
}

function summary(job) {
  const bar = progress("Questions answered");
  bar.update(job.queries_done, job.queries);
  return el(
    "div",
    { class: "summary" },
    el("p", { class: "state big" }, icon(...stateLook(job.state)), ` ${job.state}`),
    bar.node,
    el("p", {}, `${whole(job.queries_done)} of ${count(job.queries, "question")} answered. ${sentence(job.stage)}`),
  );
}

function facts(job, by) {
  const how = job.selection.strategy === "all" ? "every image is asked about" : `${whole(job.selection.count)} asked about, ${job.selection.strategy}`;
  const rows = [
    ["Price, one image", `epsilon ${epsilon(job.price.instance_epsilon)}`],
    ...(statesPerson(job.price) ? [["Price, one person", `epsilon ${personWords(job.price)}, at most ${count(job.price.records_per_person, "image")} of whom vote`]] : []),
    ["Price, a whole agent", job.price.agent_epsilon === null ? "no finite bound" : `epsilon ${epsilon(job.price.agent_epsilon)}`],
    ["Images", `${whole(job.images)}; ${how}`],
    ["Created", el("span", {}, time(job.created_at), ` by ${by}`)],
    ["Last change", time(job.updated_at, { seconds: true })],
    [FINISHED.has(job.state) ? "Deadline was" : "Deadline", time(job.expires_at)],
    ["Ledger", sentence(job.ledger)],
    ["Job", el("span", { class: "mono" }, job.job_id)],
    ["Task", el("span", { class: "mono" }, job.task_id)],
  ];
  // Sentences take the whole width: beside short facts they would make a row as high as themselves.
  const sentences = [
    ["For whom the price holds", job.price.holds_against],
    ["Why a level has no price", sentence(job.price.reason)],
  ].filter(([, words]) => words);
  const entry = (kind) => ([name, value]) => el("div", { class: kind }, el("dt", {}, name), el("dd", {}, value));
  return el("dl", { class: "facts wide" }, sentences.map(entry("whole")), rows.map(entry("")));
}

function rounds(job) {
  if (job.rounds.length === 0) return null;
  const { node, body } = table("Rounds of this job", [{ name: "Round" }, { name: "State" }, { name: "Answered" }, { name: "Awaited" }, { name: "Refused" }]);
  for (const round of job.rounds) {
    const said = Object.entries(round.refused);
    const reasons = el("ul", { class: "plain" }, said.map(([agent, reason]) => el("li", {}, el("strong", {}, agent), `: ${reason}`)));
    const awaited = FINISHED.has(job.state) || round.waiting_for.length === 0 ? "nobody" : listed(round.waiting_for);
    body.append(
      row(
        head(`${round.number}`, el("span", { class: "small block" }, count(round.queries, "question"))),
        cell("State", "", ROUND_WORDS[round.state] ?? round.state),
        cell("Answered", "", round.answered.length ? `${whole(round.answered.length)}: ${listed(round.answered)}` : "nobody"),
        cell("Awaited", "", awaited),
        cell("Refused", "", said.length ? reasons : "nobody"),
      ),
    );
  }
  return el("section", {}, el("h3", {}, "Who answered"), node);
}
