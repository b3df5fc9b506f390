// One job in full: why it stopped, its labels with their images, downloads, stopping it, deleting what it leaves, who answered.

import { byId, el, fill, icon, save, setText } from "./dom.js";
import { EvaluationBox } from "./evaluation.js";
import { Gallery } from "./gallery.js";
import { progress } from "./meters.js";
import { QueryBudgets } from "./query_budgets.js";
import { explain } from "./refusal_words.js";
import { cell, head, row, table } from "./tables.js";
import { FINISHED, count, jobTitle, listed, muSquared, questionWords, sentence, stateLook, statesGroup, statesPerson, taskWords, time, wasFree, whole, worth, worthNode } from "./words.js";

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

export class JobPage {
  #api;
  #jobs;
  #evidence;
  #maySee;
  #id = "";
  #bar = progress("Questions answered");
  #gallery;
  #evaluation;
  #queries;
  #asking = null;

  /** `maySee()` says whether the reader's role reaches a job's labels; the service decides it again. `deltaOf()` is the account's. */
  constructor(api, jobs, evidence, maySee, deltaOf) {
    this.#api = api;
    this.#evidence = evidence;
    this.#jobs = jobs;
    this.#maySee = maySee;
    this.#gallery = new Gallery(api, byId("job-gallery"));
    this.#evaluation = new EvaluationBox(api, byId("job-evaluation"));
    this.#queries = new QueryBudgets(api, byId("job-queries"), { jobOf: (id) => jobs.get(id), deltaOf, ofOneJob: true });
    byId("job-bar").append(this.#bar.node);
    for (const button of byId("job-actions").querySelectorAll("button")) button.addEventListener("click", () => void this.#download(button.dataset));
    jobs.onChange((job) => {
      if (job.job_id === this.#id) this.#render();
    });
  }

  /** Shows a job, or none. */
  async open(id) {
    this.#id = id;
    this.#asking = null;
    this.#say("");
    this.#jobs.focus(id || null);
    if (!id) {
      this.#gallery.close();
      this.#evaluation.close();
      this.#queries.close();
      return;
    }
    byId("job-body").hidden = !this.#jobs.get(id);
    setText(byId("job-title"), this.#jobs.get(id) ? jobTitle(this.#jobs.get(id)) : "Job");
    this.#render();
    try {
      const job = await this.#api.job(id);
      if (this.#id !== id) return;
      this.#jobs.put(job);
      this.#render();
    } catch (error) {
      if (this.#id === id) this.#say(error.message);
    }
  }

  #render() {
    const job = this.#jobs.get(this.#id);
    if (!job) return;
    byId("job-body").hidden = false;
    setText(byId("job-title"), jobTitle(job));
    setText(byId("job-task-name"), `of ${taskWords(job)}`);
    fill(byId("job-state"), job.state, () => [icon(...stateLook(job.state)), ` ${job.state}`]);
    byId("job-bar").hidden = FINISHED.has(job.state);
    this.#bar.update(job.queries_done, job.queries);
    const stage = FINISHED.has(job.state) ? (job.state === "completed" ? "" : `${sentence(job.ledger)}.`) : `${sentence(job.stage)}.`;
    const asked = job.evaluates ? (job.state === "completed" ? "A released model was scored" : "A released model is to be scored") : `${whole(job.queries_done)} of ${count(job.queries, "question")} answered`;
    setText(byId("job-stage"), `${asked}${wasFree(job) ? "; nothing was charged." : `, for ${worth(job.price.instance_epsilon)} about one image.`} ${stage}`);
    const problem = job.problem;
    fill(byId("job-problem"), JSON.stringify(problem), () => (problem ? el("section", { class: "note alarm", "aria-label": "Why" }, el("h3", {}, problem.title), explain(problem, job.price.delta, job.refusals)) : null));
    this.#showDownloads(job);
    this.#evidence.ofJob(job);
    this.#renderEnding(job);
    fill(byId("job-facts"), JSON.stringify(job), () => facts(job, this.#jobs.by(job)));
    fill(byId("job-rounds"), JSON.stringify([job.rounds, job.declined, job.state]), () => rounds(job));
    void this.#queries.open(job.job_id, `${job.version} ${job.state} ${job.forgotten_at}`);
    const hasResult = job.state === "completed" && !job.forgotten_at && this.#maySee();
    for (const [box, wanted] of [[this.#gallery, !job.evaluates], [this.#evaluation, job.evaluates]]) {
      if (hasResult && wanted) box.open(job);
      else box.close();
    }
  }

  #say(message) {
    setText(byId("job-message"), message);
  }

  /** The page has a button for each file; those of what this job found are shown. */
  #showDownloads(job) {
    const isThere = job.state === "completed" && !job.forgotten_at && this.#maySee();
    setText(byId("job-forgotten"), job.forgotten_at ? "What this job sent and got was deleted. Its charge stays in the ledger." : "");
    byId("job-labels").hidden = !isThere || job.evaluates;
    byId("job-found").hidden = !isThere || !job.evaluates;
  }

  async #download({ what, format, of }) {
    this.#say("Downloading ...");
    try {
      const { data, name } = await this.#api.file(this.#id, what, { format, of });
      save(data, name);
      this.#say("");
    } catch (error) {
      this.#say(`It did not come: ${error.message}`);
    }
  }

  /** Stopping a job that runs, or deleting what one that has ended leaves: each is asked twice, because neither comes back. */
  #renderEnding(job) {
    const kind = !FINISHED.has(job.state) ? "cancel" : job.forgotten_at ? null : "forget";
    fill(byId("job-ending"), JSON.stringify([job.job_id, kind, this.#asking, this.#maySee()]), () => {
      if (kind === null || !this.#maySee()) return null;
      const words = ENDINGS[kind];
      if (this.#asking !== kind) return el("button", { type: "button", class: "danger", onclick: () => this.#confirm(kind) }, words.offer);
      return el(
        "section",
        { class: "note", "aria-label": words.question, onkeydown: (event) => event.key === "Escape" && (event.preventDefault(), this.#confirm(null)) },
        el("p", {}, `${words.question} ${words.means}`),
        el(
          "div",
          { class: "buttons" },
          el("button", { type: "button", class: "danger", onclick: () => this.#end(job, kind) }, words.yes),
          el("button", { type: "button", onclick: () => this.#confirm(null) }, words.no),
        ),
      );
    });
  }

  #confirm(asking) {
    this.#asking = asking;
    this.#render();
    byId("job-ending").querySelector("button")?.focus();
  }

  async #end(job, kind) {
    try {
      this.#jobs.put(await this.#api[kind](job.job_id));
      this.#asking = null;
      this.#say("");
      this.#render();
      byId("job-title").focus();
    } catch (error) {
      this.#say(`${ENDINGS[kind].failed}: ${error.message}`);
    }
  }
}

function facts(job, by) {
  const how = job.selection.strategy === "all" ? "every image is asked about" : `${whole(job.selection.count)} asked about, ${job.selection.strategy}`;
  const rows = [
    [wasFree(job) ? "Price asked, one image" : "Price, one image", worthNode(job.price.instance_epsilon)],
    ...(statesPerson(job.price) ? [["Price, one person", el("span", {}, worthNode(job.price.person_epsilon ?? null), `, at most ${count(job.price.records_per_person, "image")} of whom vote`)]] : []),
    ...(statesGroup(job.price) ? [[`Price, any ${count(job.price.group_size, "image")}`, worthNode(job.price.group_epsilon ?? null)]] : []),
    [wasFree(job) ? "Price asked, a whole agent" : "Price, a whole agent", worthNode(job.price.agent_epsilon)],
    ...costs(job),
    ["Questions take", questionWords(job.price)],
    job.evaluates ? ["Question", "a released model, scored on the sites' records"] : ["Images", `${whole(job.images)}; ${how}`],
    ["Created", el("span", {}, time(job.created_at), ` by ${by}`)],
    ["Last change", time(job.updated_at, { seconds: true })],
    [FINISHED.has(job.state) ? "Deadline was" : "Deadline", time(job.expires_at)],
    ["Ledger", sentence(job.ledger)],
    ["Job", el("span", { class: "mono" }, job.job_id)],
    ["Task", el("span", {}, `${job.task_name} `, el("span", { class: "mono" }, job.task_id))],
  ];
  // Sentences take the whole width: beside short facts they would make a row as high as themselves.
  const sentences = [
    ["For whom the price holds", job.price.holds_against],
    ["Why a level has no price", sentence(job.price.reason)],
  ].filter(([, words]) => words);
  const entry = (kind) => ([name, value]) => el("div", { class: kind }, el("dt", {}, name), el("dd", {}, value));
  return el("dl", { class: "facts wide" }, rows.map(entry("")), sentences.map(entry("whole")));
}

/** What was charged for good so far: for one image and for a whole agent, with the share of mu squared where there is one. */
function costs(job) {
  if (!job.cost || job.cost.questions === 0) return [];
  return [["instance", "one image"], ["agent", "a whole agent"]].map(([level, name]) => {
    const nano = job.cost[`${level}_nano`];
    return [`Cost so far, ${name}`, el("span", {}, worthNode(job.cost[`${level}_epsilon`]), nano === null ? "" : `, ${muSquared(nano)}`)];
  });
}

function rounds(job) {
  const declined = Object.entries(job.declined);
  // A reason is told once: in the problem above, else here, and in the table only where a round was refused.
  const told = job.problem?.detail ?? "";
  const before = declined.length ? el("ul", { class: "plain" }, declined.map(([agent, reason]) => el("li", {}, el("strong", {}, agent), ` took no part, and was not charged${told.includes(reason) ? "" : `: ${reason}`}`))) : null;
  if (job.rounds.length === 0) return before ?? el("p", {}, "Nobody was asked.");
  const { node, body } = table("Rounds of this job", [{ name: "Round" }, { name: "State" }, { name: "Answered" }, { name: "Awaited" }, { name: "Refused" }]);
  for (const round of job.rounds) {
    const said = Object.entries(round.refused).filter(([agent]) => !(agent in job.declined));
    const reasons = el("ul", { class: "plain" }, said.map(([agent, reason]) => el("li", {}, el("strong", {}, agent), `: ${reason}`)));
    const awaited = FINISHED.has(job.state) || round.waiting_for.length === 0 ? "nobody" : listed(round.waiting_for);
    body.append(
      row(
        head(`${round.number}`, el("span", { class: "small block" }, count(round.queries, "question"))),
        cell("State", "", ROUND_WORDS[round.state] ?? round.state),
        cell("Answered", "", round.answered.length ? `${whole(round.answered.length)}: ${listed(round.answered)}` : round.state === "asked" ? "told when the round ends" : "nobody"),
        cell("Awaited", "", awaited),
        cell("Refused", "", said.length ? reasons : Object.keys(round.refused).length ? "see above" : "nobody"),
      ),
    );
  }
  return [before, node];
}
