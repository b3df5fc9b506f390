// A job's labels with the images they belong to: filters by class and by confidence, the doubtful ones first.

import { Problem, Unreachable } from "./api.js";
import { byId, el, fill, icon, setText } from "./dom.js";
import { Pictures } from "./pictures.js";
import { count, sentence, whole } from "./words.js";

const AT_ONCE = 24;
/** Methods that release a model, which says by itself how sure it is (docs/labels.md). */
const MODELS = ["blind-average", "federated"];
const LEVELS = {
  all: () => true,
  sure: (row) => row.confidence !== null && row.confidence >= 0.95,
  likely: (row) => row.confidence !== null && row.confidence >= 0.8 && row.confidence < 0.95,
  doubtful: (row) => row.confidence === null || row.confidence < 0.8,
};

export class Gallery {
  #api;
  #place;
  #jobId = "";
  #rows = [];
  #shown = AT_ONCE;
  #isCalibrated = true;
  #pictures;

  constructor(api, place) {
    this.#api = api;
    this.#place = place;
    this.#pictures = new Pictures(api, (words) => this.#noPictures(words));
    for (const id of ["gallery-class", "gallery-confidence", "gallery-order"]) byId(id).addEventListener("change", () => this.#restart());
    byId("gallery-more").addEventListener("click", () => {
      const first = this.#shown;
      this.#shown += AT_ONCE;
      this.#render();
      byId("gallery-list").children[first]?.focus();
    });
    byId("gallery-files").addEventListener("change", (event) => {
      this.#pictures.take(event.target.files);
      this.#noPictures("");
    });
  }

  /** Reads a job's labels once; again for another job. */
  async open(job) {
    if (this.#jobId === job.job_id) return;
    this.close();
    this.#jobId = job.job_id;
    this.#place.hidden = false;
    this.#pictures.open(job.job_id);
    setText(byId("gallery-words"), "Reading the labels ...");
    await this.#read(job);
  }

  /** Asks for the labels until they are there: the service may still be labeling the images that were not asked about. */
  async #read({ job_id: jobId, task_id: taskId }) {
    while (this.#jobId === jobId) {
      try {
        const task = await this.#api.task(taskId).catch(() => null); // not shared any more
        this.#isCalibrated = !MODELS.includes(task?.task.method);
        const rows = (await this.#api.labelRows(jobId)).map(rowOf);
        if (this.#jobId !== jobId) return;
        this.#rows = rows;
        this.#fillFilters();
        this.#restart();
        return;
      } catch (error) {
        if (this.#jobId !== jobId) return;
        const isBusy = error instanceof Unreachable || (error instanceof Problem && (error.status === 503 || error.status === 429));
        setText(byId("gallery-words"), isBusy ? `${sentence(error.message)}. Trying again ...` : `The labels did not come: ${error.message}`);
        if (!isBusy) return;
        await new Promise((resolve) => setTimeout(resolve, 1000 * Math.max(2, error.retryAfterS ?? 0)));
      }
    }
  }

  close() {
    if (!this.#jobId) return;
    this.#jobId = "";
    this.#rows = [];
    this.#place.hidden = true;
    this.#pictures.close();
    fill(byId("gallery-list"), "", () => []);
  }

  #fillFilters() {
    const numbers = new Map();
    for (const name of this.#rows.flatMap((row) => row.names)) numbers.set(name, (numbers.get(name) ?? 0) + 1);
    const names = [...numbers.keys()].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    byId("gallery-class").replaceChildren(
      el("option", { value: "" }, `all classes (${whole(this.#rows.length)})`),
      ...names.map((name) => el("option", { value: name }, `${name} (${whole(numbers.get(name))})`)),
    );
    const knows = this.#rows.some((row) => row.confidence !== null);
    byId("gallery-confidence").parentElement.hidden = !knows;
    byId("gallery-confidence").value = "all";
    byId("gallery-order").value = knows ? "doubtful" : "sent";
    byId("gallery-order").parentElement.hidden = !knows;
  }

  #restart() {
    this.#shown = AT_ONCE;
    this.#render();
  }

  #found() {
    const wanted = byId("gallery-class").value;
    const reaches = LEVELS[byId("gallery-confidence").value];
    const found = this.#rows.filter((row) => (wanted === "" || row.names.includes(wanted)) && reaches(row));
    const order = byId("gallery-order").value;
    if (order === "sent") return found;
    const sign = order === "doubtful" ? 1 : -1;
    return [...found].sort((a, b) => sign * ((a.confidence ?? -1) - (b.confidence ?? -1)));
  }

  #render() {
    const found = this.#found();
    const shown = found.slice(0, this.#shown);
    const inferred = this.#rows.filter((row) => row.origin === "inferred").length;
    const asked = this.#rows.length - inferred;
    const from = !inferred ? "" : `${asked ? `${count(asked, "image was", "images were")} asked about, and ${whole(inferred)} labels` : `All ${whole(inferred)} labels were`} inferred from the answers, at no further price. `;
    setText(byId("gallery-words"), `${from}${whole(shown.length)} of ${count(found.length, "label")} shown.${this.#isCalibrated ? "" : " How sure a label is, public images alone suggest, since a released model shows no votes; it may be far too high. An evaluation measures it."}`);
    fill(byId("gallery-list"), JSON.stringify([this.#jobId, shown]), () => shown.map((row) => this.#figure(row)));
    byId("gallery-more").hidden = shown.length === found.length;
    setText(byId("gallery-more"), `Show ${whole(Math.min(AT_ONCE, found.length - shown.length))} more`);
    this.#pictures.want(shown.map((row) => row.source));
  }

  #figure(row) {
    const sure = row.confidence === null ? "" : `${Math.floor(row.confidence * 100)} % sure`;
    const how = [sure, row.origin === "inferred" ? "inferred" : ""].filter(Boolean).join(", ");
    const isDoubtful = row.status !== "answered" || (row.confidence !== null && row.confidence < 0.8);
    return el(
      "li",
      { class: isDoubtful ? "doubtful" : null, tabindex: "-1" },
      el("figure", {}, this.#pictures.frame(row.source), el("figcaption", {}, el("strong", {}, isDoubtful ? icon("alarm", "low") : null, isDoubtful ? " " : "", row.name), how ? el("span", { class: "block" }, how) : null, el("span", { class: "small block source", title: row.source }, row.source))),
    );
  }

  #noPictures(words) {
    setText(byId("gallery-none-words"), words);
    byId("gallery-none").hidden = words === "";
  }
}

/** A label of any of the service's two lists: of every image, or of the questions alone. */
function rowOf(row) {
  if (Array.isArray(row.labels)) return withAttributes(row);
  const isAnswered = row.label >= 0;
  const name = isAnswered ? (row.label_name ?? `class ${row.label}`) : "no label";
  return {
    source: row.source ?? row.query_id,
    name,
    names: [name],
    confidence: typeof row.confidence === "number" ? row.confidence : null,
    origin: row.origin ?? "asked",
    status: row.status ?? (isAnswered ? "answered" : "abstained"),
  };
}

/** An image that may have any number of labels: as sure as the least sure of its attributes. */
function withAttributes(row) {
  const sure = Object.entries(row).filter(([name]) => name.startsWith("confidence.")).map(([, value]) => value);
  return {
    source: row.source,
    name: row.labels.join(", ") || "none of them",
    names: row.labels.length ? row.labels : ["none of them"],
    confidence: sure.length ? Math.min(...sure) : null,
    origin: row.origin,
    status: "answered",
  };
}
