// Pictures for the gallery: small ones from the service while it has them, or from files of the reader's own machine.

import { Problem } from "./api.js";
import { el } from "./dom.js";

const AT_ONCE = 24;

export class Pictures {
  #api;
  #onNone;
  #jobId = "";
  #urls = new Map();
  #frames = new Map();
  #asked = new Set();
  #queue = [];
  #running = false;
  #local = new Map();

  /** `onNone(words)` hears why there are no pictures. */
  constructor(api, onNone) {
    this.#api = api;
    this.#onNone = onNone;
  }

  open(jobId) {
    this.close();
    this.#jobId = jobId;
    this.#onNone("");
  }

  close() {
    for (const url of this.#urls.values()) if (url) URL.revokeObjectURL(url);
    this.#jobId = "";
    this.#urls.clear();
    this.#frames.clear();
    this.#asked.clear();
    this.#local.clear();
    this.#queue = [];
  }

  /** The place of one picture; what is inside comes later. */
  frame(source) {
    const node = el("div", { class: "picture" });
    this.#frames.set(source, node);
    this.#put(source);
    return node;
  }

  /** These are looked at now. */
  want(sources) {
    const fresh = sources.filter((source) => !this.#asked.has(source));
    for (const source of fresh) this.#asked.add(source);
    this.#queue.push(...fresh);
    void this.#run();
  }

  /** Files of the reader's own machine, found by their names; nothing of them is sent. */
  take(files) {
    for (const file of files) {
      const path = file.webkitRelativePath || file.name;
      for (const name of [path, path.split("/").slice(1).join("/"), file.name]) if (name && !this.#local.has(name)) this.#local.set(name, file);
    }
    for (const source of this.#frames.keys()) this.#put(source);
  }

  async #run() {
    if (this.#running) return;
    this.#running = true;
    const jobId = this.#jobId;
    while (this.#queue.length > 0 && jobId === this.#jobId) {
      const batch = this.#queue.splice(0, AT_ONCE);
      try {
        const view = await this.#api.thumbnails(jobId, [...new Set(batch)]);
        if (jobId !== this.#jobId) break;
        for (const one of view.items) {
          this.#urls.set(one.source, one.jpeg ? urlOf(one.jpeg) : "");
          this.#put(one.source);
        }
      } catch (error) {
        if (jobId !== this.#jobId) break;
        if (error instanceof Problem && error.status === 429) {
          this.#queue.unshift(...batch);
          await new Promise((resolve) => setTimeout(resolve, 1000 * Math.max(1, error.retryAfterS)));
          continue;
        }
        this.#queue = [];
        this.#onNone(sentenceOf(error));
      }
    }
    this.#running = false;
    if (this.#queue.length > 0) void this.#run();
  }

  #put(source) {
    const node = this.#frames.get(source);
    if (!node) return;
    const file = this.#local.get(source);
    let url = this.#urls.get(source);
    if (!url && file) {
      url = URL.createObjectURL(file);
      this.#urls.set(source, url);
    }
    if (!url || node.dataset.url === url) return;
    node.dataset.url = url;
    // The caption beside it names the image and its label.
    node.replaceChildren(el("img", { src: url, alt: "", width: "128", height: "128", loading: "lazy" }));
  }
}

function urlOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: "image/jpeg" }));
}

function sentenceOf(error) {
  if (error instanceof Problem && error.status === 410) return "The service has deleted these images, as it does soon after a job has ended; the labels stay.";
  if (error instanceof Problem && error.status === 404) return "This job was sent as feature vectors, so the service never had its images.";
  return `No pictures came: ${error.message}.`;
}
