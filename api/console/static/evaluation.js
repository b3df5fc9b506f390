// What an evaluation found: how good a released model is on the sites' records, each number with its two intervals.

import { byId, el, fill, forget, setText } from "./dom.js";
import { cell, head, row, table } from "./tables.js";
import { sentence, whole } from "./words.js";

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const interval = ([low, high]) => `${percent(low)} to ${percent(high)}`;
const AGAIN_MS = 1000;

export class EvaluationBox {
  #api;
  #place;
  #found = byId("evaluation-found");
  #jobId = "";

  constructor(api, place) {
    this.#api = api;
    this.#place = place;
  }

  /** Reads a job's evaluation once, and asks again while the service is making it. */
  async open({ job_id: jobId }) {
    if (this.#jobId === jobId) return;
    this.#jobId = jobId;
    this.#place.hidden = false;
    forget(this.#found);
    setText(this.#found, "Reading the evaluation ...");
    while (this.#jobId === jobId) {
      try {
        const found = await this.#api.evaluation(jobId);
        if (this.#jobId === jobId) fill(this.#found, jobId, () => shown(found));
        return;
      } catch (error) {
        if (this.#jobId !== jobId) return;
        setText(this.#found, sentence(error.message));
        if (error.status !== 503) return;
        await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      }
    }
  }

  close() {
    this.#jobId = "";
    this.#place.hidden = true;
  }
}

function shown(found) {
  const rows = [["Right", found.accuracy], ["Balanced accuracy", found.balanced_accuracy], ["AUROC", found.auroc]];
  rows.push(...found.recall.map((one) => [`Found of ${one.class}`, one]));
  rows.push(...found.bands.map((one) => [`Right where ${percent(one.from)} to ${percent(one.to)} was stated`, one]));
  const headings = [{ name: "Number" }, { name: "Value" }, { name: "Of these records" }, { name: "Of images like them" }];
  const { node, body } = table("What the evaluation found", headings);
  for (const [name, one] of rows) {
    if (!one) continue;
    body.append(
      row(
        head(name),
        cell("Value", "", one.drowned ? "drowned by noise" : percent(one.value)),
        cell("Of these records", "", one.drowned ? "" : interval(one.noise)),
        cell("Of images like them", "", one.drowned ? "" : interval(one.sampling)),
      ),
    );
  }
  const drowned = found.confusion.filter((one) => one.drowned).length;
  const cells = drowned ? ` Noise drowns ${whole(drowned)} of ${whole(found.confusion.length)} cells of true and predicted class.` : "";
  return [
    el("p", { class: "small" }, `About ${whole(found.records.value)} records were scored. Each interval holds 95 % of the time: the first for the noise alone, the second for noise and chance together.${cells}`),
    node,
    el("p", { class: "small" }, found.speaks_for),
  ];
}
