// The price beside a button: asked while somebody types, charged to nobody, in shares of the budget that add up.

import { Problem } from "./api.js";
import { debounced, el, fill, forget, icon } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { meter } from "./meters.js";
import { leftWords, shareWords } from "./refusal_words.js";
import { percentWords, sharesAfter } from "./shares.js";
import { cell, head, row, table } from "./tables.js";
import { accountName, count, delta, epsilon, levelName, priceWords, sentence, statesGroup, statesPerson, whole, worth, worthNode } from "./words.js";

const WAIT_MS = 300;
const SHOWN = 8;
/** Above this share of an image's life in one job sites may refuse; `labeler up` writes it into policies. */
const MUCH_OF_A_LIFE = 0.25;

export class PriceBox {
  #api;
  #budget;
  #place;
  #onFailure;
  #onPrice;
  #running = null;
  #question = "";
  #ask = debounced(WAIT_MS, () => this.#price());

  /** `onPrice(view)` hears of each price that is shown. */
  constructor(api, budget, place, onFailure, onPrice = () => {}) {
    this.#onPrice = onPrice;
    this.#api = api;
    this.#budget = budget;
    this.#place = place;
    this.#onFailure = onFailure;
  }

  /** Asks for a price; of several questions in a moment only the last. Null: there is nothing to ask yet, and why. */
  ask(body, words = "") {
    this.#question = body === null ? "" : JSON.stringify(body);
    if (body === null) {
      this.#running?.abort();
      this.#place.setAttribute("aria-busy", "false");
      fill(this.#place, `none ${words}`, () => el("p", { class: "small" }, words));
      return;
    }
    this.#place.setAttribute("aria-busy", "true");
    this.#ask();
  }

  /** The budget moved: the same question may have another answer. */
  again() {
    if (this.#question) this.#ask();
  }

  async #price() {
    this.#running?.abort();
    if (!this.#question) return;
    const running = new AbortController();
    this.#running = running;
    try {
      const view = await this.#api.estimate(JSON.parse(this.#question), running.signal);
      if (running.signal.aborted) return;
      fill(this.#place, JSON.stringify([view, this.#budget.view]), () => this.#parts(view));
      this.#onPrice(view);
    } catch (error) {
      if (running.signal.aborted) return;
      if (error instanceof Problem && error.status !== 401 && error.status !== 429) {
        forget(this.#place);
        this.#place.replaceChildren(el("p", { class: "verdict bad-words" }, icon("no", "bad"), el("span", {}, sentence(error.message))));
      } else {
        this.#onFailure(error);
      }
    } finally {
      if (this.#running === running) this.#place.setAttribute("aria-busy", "false");
    }
  }

  #parts(view) {
    const { price } = view;
    const left = price.life ? "Each further such job costs nothing more." : view.jobs_left === null ? "Nothing limits how many such jobs are asked." : `After it, ${count(Math.max(0, view.jobs_left - 1), "more such job")} would be covered.`;
    const words = view.affordable
      ? el("p", { class: "verdict good-words" }, icon("yes", "good"), el("span", {}, `The budgets cover it: ${priceWords(price)}. ${left}`))
      : el("p", { class: "verdict bad-words" }, icon("no", "bad"), el("span", {}, this.#refusal(view)));
    const reason = price.agent_epsilon === null || price.instance_epsilon === null ? el("p", { class: "small" }, sentence(price.reason)) : null;
    return [
      words,
      view.warning ? el("p", { class: "note drowned" }, icon("alarm", "low"), el("span", {}, ` ${sentence(view.warning)}`)) : null,
      el(
        "dl",
        { class: "cards" },
        figure(`for one image; ${count(price.queries, "question")}, delta ${delta(price.delta)}`, worthNode(price.instance_epsilon), "first"),
        statesPerson(price) ? figure(`for one person, of whose images at most ${whole(price.records_per_person)} vote at each agent`, worthNode(price.person_epsilon ?? null)) : null,
        statesGroup(price) ? figure(`for any ${count(price.group_size, "image")} of all agents together`, worthNode(price.group_epsilon ?? null)) : null,
        figure("for a whole agent", worthNode(price.agent_epsilon)),
        this.#shareFigure(view),
        expected(view.expected_accuracy),
      ),
      reason,
      ...forLife(price),
      price.dishonest_talliers ? el("p", { class: "small" }, sentence(price.holds_against)) : null,
      el(
        "details",
        { class: "quiet" },
        el("summary", {}, "Every account after it, noise, and for whom the price holds"),
        view.affordable ? null : el("p", { class: "small" }, sentence(view.refusal)),
        this.#accounts(view),
        el("p", { class: "small" }, `Noise in a full sum${price.dishonest_talliers ? ", added by the talliers" : ""}: ${epsilon(view.total_sigma_votes)} votes (sigma); ${count(view.quorum, "agent")} must answer. ${price.dishonest_talliers ? "" : (price.holds_against ?? "")}`),
        view.noise_hint ? el("p", { class: "small" }, sentence(view.noise_hint)) : null,
      ),
    ];
  }

  /** Which budget is too small, in shares; the service's sentence, with its units, is folded away. */
  #refusal(view) {
    const short = view.accounts.filter((one) => !one.enough);
    const first = short.find((one) => one.account === "federation") ?? short[0];
    const cap = first ? this.#budget.balance(first.account, first.level)?.cap_nano : null;
    if (!cap || first.asked_nano === null) return `It would be refused. ${sentence(view.refusal)}`;
    const others = short.length > 1 ? ` (and of ${count(short.length - 1, "more account")})` : "";
    return `It would be refused: it asks for ${shareWords(first.asked_nano / cap)} of the budget of ${accountName(first.account)}, ${levelName(first.level)}${others}, and ${leftWords(first.left_nano, cap)} is left. ${view.queries_that_fit ? `Ask at most ${count(view.queries_that_fit, "question")}` : "Ask fewer questions"}, or make a task with more noise.`;
  }

  #shareFigure(view) {
    const asked = view.accounts.find((one) => one.account === "federation" && one.level === "instance");
    const balance = this.#budget.balance("federation", "instance");
    if (!asked || !balance?.cap_nano || asked.asked_nano === null || !asked.enough) return null;
    const shares = sharesAfter(balance, asked.asked_nano);
    return figure(`of the federation's budget; ${percentWords(shares.spent + shares.reserved + shares.asked)} would be spent or reserved`, percentWords(shares.asked));
  }

  #accounts(view) {
    const order = [...view.accounts].sort((a, b) => a.enough - b.enough || (b.account === "federation") - (a.account === "federation"));
    const { node, body } = table("Every account after this job", [{ name: "Account" }, { name: "Share of its budget" }, { name: "Bound after it", num: true }]);
    body.append(...order.slice(0, SHOWN).map((one) => this.#accountRow(one, view.price.delta)));
    const rest = order.length - SHOWN;
    return [node, rest > 0 ? el("p", { class: "small" }, `and ${count(rest, "more account")}, each charged the same or covered as well.`) : null];
  }

  #accountRow(account, at) {
    const balance = this.#budget.balance(account.account, account.level);
    const asked = account.asked_nano ?? Infinity;
    const after = balance ? epsilonOf(balance.posted_nano + balance.reserved_nano + asked, balance.delta ?? at) : null;
    const bar = meter();
    let words = "no limit is set";
    if (!account.enough) words = "not enough is left";
    else if (balance?.cap_nano) {
      const shares = sharesAfter(balance, asked);
      words = `${percentWords(shares.spent + shares.reserved)} spent or reserved + ${percentWords(shares.asked)} this job + ${percentWords(shares.left)} left = 100 %`;
      bar.update(shares, words);
    }
    bar.node.hidden = !(account.enough && balance?.cap_nano);
    return row(
      head(accountName(account.account), el("span", { class: "small block" }, levelName(account.level))),
      cell("Share of its budget", `wide ${account.enough ? "" : "bad-words"}`, bar.node, words),
      cell("Bound after it", "num", account.enough ? worth(after) : "–"),
    );
  }
}

/** Of votes for life: how far an image's budget goes, and whether one job may take much of it. */
function forLife(price) {
  if (!price.life) return [];
  const { votes, most_votes: most, vote_nano: vote, budget_nano: budget, means } = price.life;
  const share = (most * vote) / budget;
  const words = `An image has ${count(votes, "vote")} under this noise for its whole life, and casts up to ${whole(most)} in a job where it is similar enough.`;
  if (share <= MUCH_OF_A_LIFE) return [el("p", { class: "small" }, `${words} ${means}`)];
  const warning = share > 1 ? "That is more than it has, so none could vote" : `One job may take ${percentWords(100 * share)} of its life, and sites may refuse that`;
  return [el("p", { class: "note" }, icon("alarm", "low"), el("span", {}, ` ${words} ${warning}: lower k, or raise the noise.`)), el("p", { class: "small" }, means)];
}

/** How many labels should be right: least where private images are of another kind than the public ones, most where alike. */
function expected(accuracy) {
  if (!accuracy) return null;
  if (accuracy.low === null || accuracy.high === null) return figure(`of the images labeled right: ${accuracy.reason}`, "not known");
  const [low, high] = [accuracy.low, accuracy.high].map((share) => Math.floor(100 * share));
  const assumed = accuracy.records ? `; ${whole(accuracy.records)} private images are assumed` : "";
  return figure(`of the images labeled right, as far as public facts and the noise tell${assumed}`, low === high ? `${low} %` : `${low} to ${high} %`);
}

function figure(unit, value, kind = "") {
  return el("div", { class: kind || null }, el("dd", { class: "figure" }, value), el("dt", { class: "unit" }, unit));
}
