// Signed evidence, for whoever answers for privacy: of one task, or of a period. The service makes and signs it; this only asks.

import { byId, el, fill, save, setText } from "./dom.js";

const KINDS = [
  ["json", "Evidence, signed file"],
  ["html", "Evidence, page to print"],
];

export class Evidence {
  #api;
  #may;

  /** `may()` says whether the reader's role gets evidence; the service decides it again. */
  constructor(api, may) {
    this.#api = api;
    this.#may = may;
    byId("evidence-form").addEventListener("submit", (event) => event.preventDefault());
  }

  /** The buttons beside a job: of its whole task, which is what was agreed on and paid for. */
  ofJob(job) {
    fill(byId("job-evidence"), JSON.stringify([job.task_id, this.#may()]), () => (this.#may() ? this.#buttons(byId("job-message"), () => ({ task: job.task_id }), "Evidence of this job's task") : null));
  }

  /** The form of the ledger's view: of a period, in whole days of UTC. */
  ofPeriod() {
    byId("evidence").hidden = !this.#may();
    fill(byId("evidence-buttons"), "", () => this.#buttons(byId("evidence-words"), period, "Evidence of the period"));
  }

  #buttons(place, wanted, name) {
    return el(
      "div",
      { class: "buttons", role: "group", "aria-label": name },
      KINDS.map(([format, words]) => el("button", { type: "button", onclick: (event) => void this.#download(event.target, place, wanted(), format) }, words)),
    );
  }

  async #download(button, place, wanted, format) {
    button.disabled = true;
    setText(place, "The journal is verified from its first entry, and the evidence signed ...");
    try {
      save(await this.#api.evidence({ ...wanted, format }), `evidence${wanted.task ? `-${wanted.task.slice(0, 8)}` : ""}.${format}`);
      setText(place, format === "json" ? "Saved. labeler evidence verify checks it." : "Saved: open it to print.");
    } catch (error) {
      setText(place, `No evidence came: ${error.message}`);
    } finally {
      button.disabled = false;
      button.focus();
    }
  }
}

/** From the first moment of one day to the last of another; either may be left out. */
function period() {
  const since = byId("evidence-since").value;
  const until = byId("evidence-until").value;
  const after = until ? new Date(Date.parse(`${until}T00:00:00Z`) + 86_400_000).toISOString() : "";
  return { since: since ? `${since}T00:00:00Z` : "", until: after };
}
