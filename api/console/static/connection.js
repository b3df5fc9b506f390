// Asking again and again: at ease while all is well, with growing pauses while the service does not answer.

import { Problem, Unreachable } from "./api.js";
import { announce, byId, setText } from "./dom.js";

const EVERY_MS = 4_000;
const HIDDEN_MS = 30_000;
const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 30;

export class Connection {
  #round;
  #timer = 0;
  #count = 0;
  #failures = 0;
  #running = false;
  #again = false;
  #retryAt = 0;
  #problemWords = "";

  /** `round()` reads everything once; it throws where the service does not answer or says no. */
  constructor(round) {
    this.#round = round;
    byId("try-now").addEventListener("click", () => this.now());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && !this.#running) this.now();
    });
    setInterval(() => this.#banner(), 1_000);
  }

  /** Runs a round at once; during one, another follows it. */
  now() {
    clearTimeout(this.#timer);
    if (this.#running) {
      this.#again = true;
      return;
    }
    void this.#run();
  }

  stop() {
    clearTimeout(this.#timer);
  }

  async #run() {
    this.#running = true;
    let pauseS = 0;
    try {
      await this.#round(this.#count);
      this.#count += 1;
      if (this.#failures > 0 && this.#retryAt > 0) announce("The service answers again.");
      this.#failures = 0;
      this.#retryAt = 0;
      this.#problemWords = "";
    } catch (error) {
      this.#failures += 1;
      pauseS = Math.min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (this.#failures - 1)) * (0.8 + 0.4 * Math.random());
      if (error instanceof Problem) pauseS = Math.max(pauseS, error.retryAfterS);
      this.#retryAt = Date.now() + pauseS * 1000;
      this.#problemWords = wordsOf(error);
      if (this.#failures === 1) announce(this.#problemWords);
    }
    this.#running = false;
    this.#banner();
    const again = this.#again;
    this.#again = false;
    this.#timer = setTimeout(() => this.now(), again ? 0 : pauseS ? pauseS * 1000 : document.hidden ? HIDDEN_MS : EVERY_MS);
  }

  #banner() {
    const banner = byId("banner");
    banner.hidden = this.#retryAt === 0;
    if (banner.hidden) return;
    const seconds = Math.max(0, Math.ceil((this.#retryAt - Date.now()) / 1000));
    setText(byId("banner-words"), `${this.#problemWords} ${seconds > 0 ? `Trying again in ${seconds} s.` : "Trying again ..."} What is shown may be out of date.`);
  }
}

function wordsOf(error) {
  if (error instanceof Unreachable) return "The service cannot be reached.";
  if (error instanceof Problem && error.status === 429) return "Too many requests were made with this token.";
  if (error instanceof Problem) return `The service said: ${error.message}.`.replace("..", ".");
  console.error(error); // a mistake of this page; the tests look for it
  return "This page made a mistake.";
}
