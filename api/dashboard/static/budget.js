// What is spent and what is left: the federation first, then every agent, at both levels.

import { byId, el, icon, keyed, setText } from "./dom.js";
import { compactMeter, inWords, leftWords, meter, shares, standing } from "./meters.js";
import { empty, cell, head, row, table } from "./tables.js";
import { LEVELS, accountName, delta, epsilon, levelName, percent, whole } from "./words.js";

const SHOWN_AGENTS = 12;

const PROTECTS = {
  instance: "What everybody together could learn about any one private image",
  agent: "What everybody together could learn about all that one agent holds",
};

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
    keyed(byId("budget-federation"), federation, (balance) => balance.level, federationCard);
    this.#renderAgents();
    setText(byId("headline"), this.#headline());
  }

  #headline() {
    const balance = this.balance("federation", "instance");
    if (!balance) return "Privacy budget";
    if (balance.spent_epsilon === 0) return "Nothing has been asked of any private image yet.";
    if (balance.spent_epsilon === null) return "What was spent for one private image has no finite bound.";
    const left = balance.cap_nano === null ? "that budget is not limited" : `${percent(balance.left_fraction)} of that budget is left`;
    return (
      `So far nobody outside could learn more than epsilon ${epsilon(balance.spent_epsilon)} about any one private image ` +
      `(delta ${delta(balance.delta)}); ${left}.`
    );
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
      place.replaceChildren(
        empty(
          "No agent has an account yet. Make keys at the agent's site, then enrol its public keys here:",
          `labeler keys --help\ncurl -X POST ${location.origin}/v1/parties -H "Authorization: Bearer $LABELER_TOKEN" \\\n  -H "Content-Type: application/json" -d @public-keys.json`,
        ),
      );
      return;
    }
    if (this.#agents === null) {
      this.#agents = table("Spent and left of each agent's account", [
        { name: "Agent" },
        { name: "One image" },
        { name: "The whole agent" },
      ]);
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
    const caption = found.length === names.length ? "Spent and left of each agent's account" : `${whole(found.length)} of ${whole(names.length)} agents match`;
    setText(this.#agents.caption, caption);
  }

  #leastLeft(account) {
    return Math.min(...LEVELS.map((level) => this.balance(account, level)?.left_fraction ?? 2));
  }

  #agentRow(account) {
    const meters = LEVELS.map(() => compactMeter());
    const cells = meters.map((one, place) => cell(place === 0 ? "One image" : "The whole agent", "", one.node));
    return {
      node: row(head(accountName(account)), ...cells),
      update: () => {
        LEVELS.forEach((level, place) => {
          const balance = this.balance(account, level);
          cells[place].hidden = balance === null;
          if (balance) meters[place].update(balance);
        });
      },
    };
  }
}

function federationCard(first) {
  const bar = meter();
  const spent = el("span", { class: "figure" });
  const cap = el("span", { class: "of" });
  const left = el("span", { class: "left" });
  const note = el("p", { class: "standing", hidden: true });
  const posted = el("span", {});
  const reserved = el("span", {});
  const legend = el(
    "ul",
    { class: "legend" },
    el("li", {}, el("i", { class: "chip posted" }), posted),
    el("li", {}, el("i", { class: "chip reserved" }), reserved),
    el("li", {}, el("i", { class: "chip free" }), left),
  );
  const node = el(
    "article",
    { class: "card account" },
    el("h3", {}, `Federation, ${levelName(first.level)}`),
    el("p", { class: "small" }, PROTECTS[first.level]),
    el("p", { class: "total" }, spent, " ", cap),
    bar.node,
    legend,
    note,
  );
  return {
    node,
    update(balance) {
      const look = standing(balance);
      node.className = `card account ${look.kind}`;
      const unbounded = balance.spent_epsilon === null;
      setText(spent, unbounded ? "No bound" : epsilon(balance.spent_epsilon));
      const limit = balance.cap_nano === null ? "epsilon spent" : `of epsilon ${epsilon(balance.cap_epsilon)} spent`;
      setText(cap, unbounded ? "was spent that any epsilon could name" : `${limit} (delta ${delta(balance.delta)})`);
      setText(left, leftWords(balance));
      setText(posted, `${percent(shares(balance).posted)} spent`);
      setText(reserved, balance.reserved_nano > 0 ? `${percent(balance.cap_nano ? balance.reserved_nano / balance.cap_nano : 0)} reserved` : "nothing reserved");
      bar.update(shares(balance), inWords(balance));
      bar.node.hidden = balance.cap_nano === null;
      legend.hidden = balance.cap_nano === null;
      note.hidden = look.words === "";
      if (note.dataset.words !== look.words) {
        note.dataset.words = look.words;
        note.replaceChildren(icon(look.kind === "open" ? "busy" : "alarm", look.kind === "open" ? "calm" : "low"), ` ${look.words}`);
      }
    },
  };
}
