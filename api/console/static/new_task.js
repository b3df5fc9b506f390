// Making a task: what all sites agree on before anything is asked, with the price of all its questions beside the button.

import { Problem } from "./api.js";
import { byId, setText } from "./dom.js";
import { clearErrors, forgive, showProblem } from "./form_errors.js";
import { PriceBox } from "./price.js";

/** Field of the request -> id of its control, for numbers that are left out when empty. */
const NUMBERS = {
  k: "task-k",
  max_queries: "task-queries",
  delta: "task-delta",
  dishonest_talliers: "task-noise-by",
  colluding_agents: "task-colluding",
  max_dropouts: "task-dropouts",
  records_per_person: "task-person",
  attributes_per_record: "task-attributes",
  abstain_below: "task-abstain",
  ballot_radius: "task-radius",
};
const LIFE = { least_similarity: "task-similarity", epsilon: "task-life-epsilon" };
const IDS = { ...NUMBERS, lifetime_budget: "task-life", "lifetime_budget.least_similarity": "task-similarity", "lifetime_budget.epsilon": "task-life-epsilon", "lifetime_budget.asked_classes": "task-asked", name: "task-name", classes: "task-classes", method: "task-method", release: "task-release", epsilon: "task-noise", sigma_votes: "task-noise" };

const EPSILON = 0.5;

export class NewTask {
  #api;
  #box;
  #onMade;
  /** Whether the epsilon is still the form's own: then it is one that is left. */
  #isOurs = true;
  #isNoise = false;
  #sigma = 20;
  #budget;

  /** `onMade(task)` hears of a task that was made. */
  constructor(api, budget, onFailure, onMade) {
    this.#api = api;
    this.#onMade = onMade;
    this.#budget = budget;
    this.#box = new PriceBox(api, budget, byId("task-price"), onFailure, (view) => (this.#sigma = view.sigma_votes));
    const form = byId("task-form");
    form.addEventListener("input", (event) => {
      forgive(event.target);
      setText(byId("task-error"), "");
      if (event.target === byId("task-noise")) this.#isOurs = false;
      this.#changed();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#make();
    });
  }

  /** The first price, once somebody looks, of an epsilon that every account has left. */
  open(delta) {
    if (byId("task-delta").value === "" && delta) byId("task-delta").value = String(delta);
    if (this.#isOurs && !this.#isNoise) byId("task-noise").value = this.#epsilon();
    this.#changed();
  }

  #epsilon() {
    const left = (this.#budget.view?.accounts ?? []).filter((one) => one.level === "instance" && one.left_epsilon > 0).map((one) => threeDigits(one.left_epsilon, Math.floor));
    return String(Math.min(EPSILON, ...left));
  }

  again() {
    this.#box.again();
  }

  #changed() {
    // A ball, and a budget for life, are of records that choose where they vote; the two do not go together.
    const choose = byId("task-method").value === "reverse-knn";
    const isForLife = choose && byId("task-life").value !== "";
    byId("task-life").parentElement.hidden = !choose;
    byId("task-radius").parentElement.hidden = !choose || isForLife;
    for (const id of [...Object.values(LIFE), "task-asked"]) byId(id).parentElement.hidden = !isForLife;
    byId("task-person").parentElement.hidden = isForLife;
    // Whatever the noise, votes for life cost one price: the noise decides how many votes an image has.
    if (isForLife) byId("task-measure").value = "sigma_votes";
    byId("task-measure").disabled = isForLife;
    const isNoise = byId("task-measure").value === "sigma_votes";
    if (this.#isOurs && isNoise !== this.#isNoise) byId("task-noise").value = isNoise ? String(threeDigits(this.#sigma, Math.ceil)) : this.#epsilon();
    this.#isNoise = isNoise;
    // What is left empty the service decides, as for every other way to ask.
    byId("task-k").placeholder = byId("task-method").selectedOptions[0].dataset.k;
    setText(byId("task-k").labels[0], choose ? "Questions an image votes at (k)" : "Votes of an agent on a question (k)");
    setText(byId("task-noise-words"), isNoise ? "Noise, in votes (sigma)" : "Epsilon of all its questions, for one image");
    const isWinner = byId("task-release").value === "winner";
    byId("task-abstain").parentElement.hidden = !isWinner;
    // A winner is the one class with most votes, and of attributes any number may hold.
    byId("task-attributes").parentElement.hidden = byId("task-method").value !== "knn" || isWinner;
    // Talliers' noise is known to no agent, however many collude.
    byId("task-colluding").parentElement.hidden = byId("task-noise-by").value !== "";
    const request = this.#request();
    if (!(request.max_queries >= 1) || !(request[byId("task-measure").value] > 0) || !(request.delta > 0)) {
      this.#box.ask(null, "Fill in how many questions, and the epsilon or the noise; the price appears here. Asking for it is free.");
      return;
    }
    if (isForLife && request.lifetime_budget.least_similarity === undefined) {
      this.#box.ask(null, "Say how similar a question has to be to an image for it to vote, from -1 (always) to 1 (never but for its own features); the price appears here.");
      return;
    }
    this.#box.ask({ task: { ...request, name: request.name || "a task" }, queries: request.max_queries });
  }

  #request() {
    const request = { name: byId("task-name").value.trim(), method: byId("task-method").value, release: byId("task-release").value };
    const classes = lines("task-classes");
    if (classes.length > 0) request.classes = classes;
    for (const [name, id] of Object.entries(NUMBERS)) {
      const text = byId(id).value.trim();
      if (text !== "" && !byId(id).parentElement.hidden) request[name] = Number(text);
    }
    if (!byId("task-similarity").parentElement.hidden) {
      request.lifetime_budget = {};
      for (const [name, id] of Object.entries(LIFE)) {
        const text = byId(id).value.trim();
        if (text !== "") request.lifetime_budget[name] = Number(text);
      }
      const asked = lines("task-asked");
      if (asked.length > 0) request.lifetime_budget.asked_classes = asked;
    }
    const noise = byId("task-noise").value.trim();
    if (noise !== "") request[byId("task-measure").value] = Number(noise);
    return request;
  }

  async #make() {
    const form = byId("task-form");
    clearErrors(form);
    setText(byId("task-error"), "");
    byId("task-make").disabled = true;
    try {
      const task = await this.#api.makeTask(this.#request());
      setText(byId("task-error"), "");
      this.#onMade(task);
    } catch (error) {
      byId("task-make").disabled = false;
      showProblem(form, byId("task-error"), error, (name) => IDS[name] ?? "");
      if (!(error instanceof Problem)) console.warn(error.message);
    }
    byId("task-make").disabled = false;
  }
}

/** A number in three digits, rounded to the side that costs less: an epsilon down, noise up. */
function threeDigits(value, rounded) {
  const scale = 10 ** (2 - Math.floor(Math.log10(value)));
  return Number((rounded(value * scale) / scale).toPrecision(3));
}

const lines = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);
