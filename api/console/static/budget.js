// What is spent and what is left: the federation first, then every agent, at both levels, in shares that add up. A person
// has no account: what one cost follows from the answered jobs (records_per_person of their tasks).

import { byId, el, icon, keyed, setText } from "./dom.js";
import { boundWords, compactMeter, inWords, meter, standing } from "./meters.js";
import { percentWords, sharesOf } from "./shares.js";
import { cell, empty, head, row, table } from "./tables.js";
import { LEVELS, accountName, count, delta, epsilon, levelName, sentence, whole } from "./words.js";

const SHOWN_AGENTS = 6;
const CAPTION = "Shares of each agent's budget";

export class Budget {
  #view = null;
  #showAll = false;
  #agents = null;
  #more = el("button", { type: "button", onclick: () => this.#toggleAll() });

  constructor() {
    byId("budget-search").addEventListener("input", () => this.#renderAgents());
  }

  get view() {
    return this.#view;
  }

  balance(account, level) {
    return this.#view?.accounts.find((one) => one.account === account && one.level === level) ?? null;
  }

  /** Names of all accounts, federation first. */
  accounts() {
    const names = [...new Set(this.#view?.accounts.map((one) => one.account) ?? [])];
    return names.sort((a, b) => (b === "federation") - (a === "federation") || a.localeCompare(b, undefined, { numeric: true }));
  }

  show(view) {
    this.#view = view;
    const federation = LEVELS.map((level) => this.balance("federation", level)).filter(Boolean);
    setText(byId("budget-person"), view.persons?.find((one) => one.account === "federation")?.words ?? "");
    keyed(byId("budget-federation"), federation, (balance) => balance.level, federationCard);
    this.#renderAgents();
    setText(byId("headline"), this.#headline());
  }

  #headline() {
    const balance = this.balance("federation", "instance");
    if (!balance) return "Privacy budget";
    if (balance.spent_epsilon === null) return "No bound is stated about one private image.";
    if (balance.spent_epsilon === 0) return "Nothing has been asked of any private image yet.";
    if (balance.posted_epsilon === 0) return `Nothing was answered of any private image yet: ${balance.words}.`;
    const shares = sharesOf(balance);
    const spent = shares ? `${percentWords(100 - shares.left)} of the budget is ${shares.reserved > 0 ? "spent or reserved" : "spent"}` : "that budget has no limit";
    return `So far nobody outside could learn more than epsilon ${epsilon(balance.posted_epsilon ?? balance.spent_epsilon)} about any one private image (delta ${delta(balance.delta)}); ${spent}.`;
  }

  #toggleAll() {
    this.#showAll = !this.#showAll;
    this.#renderAgents();
  }

  #renderAgents() {
    const place = byId("budget-agents");
    const names = this.accounts().filter((name) => name !== "federation");
    byId("budget-filter").hidden = names.length <= SHOWN_AGENTS;
    if (names.length === 0) {
      this.#agents = null;
      place.replaceChildren(empty("No agent has an account yet. An agent gets one when its public keys are enrolled."));
      return;
    }
    if (this.#agents === null) {
      this.#agents = table(CAPTION, [{ name: "Agent" }, { name: "One image" }, { name: "One patient" }, { name: "The whole agent" }]);
      place.replaceChildren(this.#agents.node, el("p", { class: "more" }, this.#more));
    }
    const wanted = byId("budget-search").value.trim().toLowerCase();
    const found = names.filter((name) => accountName(name).toLowerCase().includes(wanted));
    // The accounts that need attention first, where not all are shown.
    const order = found.length > SHOWN_AGENTS ? [...found].sort((a, b) => this.#leastLeft(a) - this.#leastLeft(b)) : found;
    const shown = this.#showAll ? order : order.slice(0, SHOWN_AGENTS);
    keyed(this.#agents.body, shown, (name) => name, (name) => this.#agentRow(name));
    this.#more.parentElement.hidden = found.length <= SHOWN_AGENTS;
    setText(this.#more, this.#showAll ? `Show the ${SHOWN_AGENTS} with least left` : `Show all ${whole(found.length)} agents`);
    setText(this.#agents.caption, found.length === names.length ? CAPTION : `${whole(found.length)} of ${whole(names.length)} agents match`);
  }

  #leastLeft(account) {
    return Math.min(...LEVELS.map((level) => this.balance(account, level)?.left_fraction ?? 2));
  }

  #agentRow(account) {
    const meters = LEVELS.map(() => compactMeter());
    const cells = meters.map((one, place) => cell(place === 0 ? "One image" : "The whole agent", "", one.node));
    const bound = el("strong", {});
    const why = el("span", { class: "small block" });
    const [image, agent] = cells;
    return {
      node: row(head(accountName(account)), image, cell("One patient", "person", bound, why), agent),
      update: () => {
        LEVELS.forEach((level, place) => {
          const balance = this.balance(account, level);
          cells[place].hidden = balance === null;
          if (balance) meters[place].update(balance);
        });
        const person = this.#view.persons?.find((one) => one.account === account);
        setText(bound, !person ? "not stated" : person.person_epsilon === null ? "no bound" : `epsilon ${epsilon(person.person_epsilon)}`);
        setText(why, personWords(person));
      },
    };
  }
}

/** What the figure for a person counts, or why there is none. */
function personWords(person) {
  if (!person) return "";
  if (person.person_epsilon === null) return `${sentence(person.reason)}.`;
  if (person.records_per_person === null) return "nothing was answered yet";
  return `so far; at most ${count(person.records_per_person, "image votes", "images vote")}`;
}

function federationCard(first) {
  const bar = meter();
  const figure = el("span", { class: "figure" });
  const of = el("span", { class: "of" });
  const note = el("p", { class: "standing", hidden: true });
  const bound = el("p", { class: "bound" });
  const parts = { spent: el("span", {}), reserved: el("span", {}), left: el("span", {}) };
  const legend = el(
    "ul",
    { class: "legend" },
    el("li", {}, el("i", { class: "chip posted" }), parts.spent),
    el("li", {}, el("span", { "aria-hidden": "true" }, "+"), el("i", { class: "chip reserved" }), parts.reserved),
    el("li", {}, el("span", { "aria-hidden": "true" }, "+"), el("i", { class: "chip free" }), parts.left),
    el("li", {}, "= 100 % of the budget"),
  );
  const node = el("article", { class: "card account" }, el("h3", {}, `Federation, ${levelName(first.level)}`), el("p", { class: "total" }, figure, " ", of), bar.node, legend, bound, note);
  return {
    node,
    update(balance) {
      const look = standing(balance);
      const shares = sharesOf(balance);
      node.className = `card account ${look.kind}`;
      if (balance.spent_epsilon === null) {
        setText(figure, look.kind === "open" ? "No limit" : "No bound");
        setText(of, "");
      } else if (shares) {
        setText(figure, percentWords(shares.spent));
        setText(of, "of the budget is spent");
        setText(parts.spent, `spent ${percentWords(shares.spent)}`);
        setText(parts.reserved, `reserved ${percentWords(shares.reserved)}`);
        setText(parts.left, `left ${percentWords(shares.left)}`);
        bar.update(shares, inWords(balance));
      } else {
        setText(figure, `epsilon ${epsilon(balance.posted_epsilon ?? balance.spent_epsilon)}`);
        setText(of, "so far");
      }
      bar.node.hidden = legend.hidden = shares === null || balance.spent_epsilon === null;
      setText(bound, shares ? boundWords(balance) : "");
      bound.hidden = bound.textContent === "";
      note.hidden = look.words === "";
      if (note.dataset.words !== look.words) {
        note.dataset.words = look.words;
        note.replaceChildren(...(look.kind === "open" ? [] : [icon("alarm", "low"), " "]), look.words);
      }
    },
  };
}
