// What the next job would cost, and what would be left: a slider, answered by the service's own price.

import { Problem } from "./api.js";
import { byId, debounced, el, fill, forget, icon } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { meter } from "./meters.js";
import { cell, empty, head, row, table } from "./tables.js";
import { accountName, count, delta, epsilon, levelName, percent, personWords, priceWords, sentence, statesPerson, whole } from "./words.js";

const WAIT_MS = 250;
const SHOWN_ACCOUNTS = 4;
const SHOWN_SHORT = 12;

export class Estimate {
  #api;
  #budget;
  #onFailure;
  #tasks = [];
  #task = null;
  #running = null;
  #last = null;
  #ask = debounced(WAIT_MS, () => this.#price());

  constructor(api, budget, onFailure) {
    this.#api = api;
    this.#budget = budget;
    this.#onFailure = onFailure;
    byId("estimate-form").addEventListener("submit", (event) => event.preventDefault());
    byId("estimate-task").addEventListener("change", (event) => this.#choose(event.target.value));
    byId("estimate-slider").addEventListener("input", (event) => this.#setQueries(event.target.value));
    byId("estimate-number").addEventListener("input", (event) => this.#setQueries(event.target.value, { typed: true }));
    byId("estimate-number").addEventListener("change", (event) => this.#setQueries(event.target.value));
  }

  showTasks(tasks) {
    const isSame = JSON.stringify(tasks) === JSON.stringify(this.#tasks);
    this.#tasks = tasks;
    byId("estimate-form").hidden = tasks.length === 0;
    byId("estimate-empty").hidden = tasks.length > 0;
    if (tasks.length === 0) {
      fill(byId("estimate-empty"), "none", () =>
        empty(
          "There is no task yet. A task is what all agents agree on before anything is asked: the classes, how they vote, how much noise.",
          `curl -X POST ${location.origin}/v1/tasks -H "Authorization: Bearer $LABELER_TOKEN" \\\n  -H "Content-Type: application/json" \\\n  -d '{"name": "digits", "k": 5, "epsilon": 1.0, "delta": 1e-5, "max_queries": 200}'`,
        ),
      );
      return;
    }
    if (isSame) return;
    const select = byId("estimate-task");
    const chosen = tasks.some((task) => task.task_id === select.value) ? select.value : (tasks.find((task) => task.queries_left > 0) ?? tasks[0]).task_id;
    select.replaceChildren(...tasks.map((task) => el("option", { value: task.task_id }, taskTitle(task))));
    select.value = chosen;
    this.#choose(chosen);
  }

  /** The budget moved: the same question may have another answer. */
  budgetChanged() {
    if (this.#task) this.#ask();
  }

  #choose(taskId) {
    const known = this.#task?.task_id === taskId;
    this.#task = this.#tasks.find((task) => task.task_id === taskId) ?? null;
    if (!this.#task) return;
    const most = Math.max(1, this.#task.queries_left);
    const least = askedAtOnce(this.#task) ? most : 1;
    for (const id of ["estimate-slider", "estimate-number"]) {
      byId(id).max = String(most);
      byId(id).min = String(least);
      byId(id).disabled = least === most;
    }
    byId("estimate-task-words").textContent = taskWords(this.#task);
    this.#setQueries(known ? Math.min(most, Number(byId("estimate-slider").value)) : Math.min(most, 100));
  }

  #setQueries(value, { typed = false } = {}) {
    const { min, max } = byId("estimate-slider");
    const [least, most] = [Number(min), Number(max)];
    const wanted = Math.round(Number(value));
    if (typed && !(wanted >= least && wanted <= most)) return; // still typing; put right when the field is left
    const queries = Math.min(most, Math.max(least, wanted || least));
    byId("estimate-slider").value = String(queries);
    byId("estimate-slider").setAttribute("aria-valuetext", count(queries, "question"));
    if (!typed || byId("estimate-number").value !== String(queries)) byId("estimate-number").value = String(queries);
    byId("estimate-result").setAttribute("aria-busy", "true");
    this.#ask();
  }

  async #price() {
    if (!this.#task) return;
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    const queries = Number(byId("estimate-slider").value);
    const place = byId("estimate-result");
    if (this.#task.queries_left === 0) {
      place.setAttribute("aria-busy", "false");
      fill(place, "used up", () => el("p", { class: "note" }, "All questions of this task have been asked. Make a new task; its noise is drawn anew."));
      return;
    }
    try {
      const view = await this.#api.estimate({ task_id: this.#task.task_id, queries }, running.signal);
      if (running.signal.aborted) return;
      this.#last = view;
      this.#show(view);
    } catch (error) {
      if (running.signal.aborted) return;
      if (error instanceof Problem && error.status !== 401 && error.status !== 429) {
        forget(place);
        place.replaceChildren(el("p", { class: "note alarm" }, error.message));
      } else {
        this.#onFailure(error);
      }
    } finally {
      if (this.#running === running) place.setAttribute("aria-busy", "false");
    }
  }

  #show(view) {
    const place = byId("estimate-result");
    fill(place, JSON.stringify([view, this.#budget.view]), () => [verdict(view), this.#accounts(view)]);
  }

  #accounts(view) {
    const rows = view.accounts
      .map((account) => this.#after(account))
      .sort((a, b) => a.enough - b.enough || (b.account === "federation") - (a.account === "federation") || a.leftAfter - b.leftAfter);
    const missing = rows.filter((one) => !one.enough).length;
    const length = Math.min(SHOWN_SHORT, Math.max(SHOWN_ACCOUNTS, missing));
    const shown = rows.slice(0, length);
    const { node, body } = table("What each account would stand at after this job", [
      { name: "Account" },
      { name: "Spent now, and after", num: true },
      { name: "Left after", num: true },
      { name: "" },
    ]);
    body.append(
      ...shown.map((one) =>
        row(
          head(accountName(one.account), el("span", { class: "small block" }, levelName(one.level))),
          cell("Spent now, and after", "num", `${epsilon(one.spentBefore)} → ${epsilon(one.spentAfter)}${one.cap === null ? "" : ` of ${epsilon(one.cap)}`}`),
          cell("Left after", `num ${one.enough ? "" : "bad-words"}`, one.enough ? one.leftWords : "not enough"),
          cell("", "meter-cell", one.bar),
        ),
      ),
    );
    const rest = rows.slice(length);
    const short = rest.filter((one) => !one.enough).length;
    const words = short ? `${count(short, "more account")} would not cover it.` : `${count(rest.length, "more account")}, none with less left than these.`;
    return [node, rest.length ? el("p", { class: "small" }, words) : null];
  }

  #after(account) {
    const balance = this.#budget.balance(account.account, account.level);
    const cap = account.left_nano === null ? null : (balance?.cap_nano ?? null);
    const spentNano = balance ? balance.posted_nano + balance.reserved_nano : 0;
    const at = balance?.delta ?? this.#last.price.delta;
    const after = epsilonOf(spentNano + account.asked_nano, at);
    const leftAfter = account.left_nano === null ? 2 : cap ? Math.max(0, account.left_nano - account.asked_nano) / cap : 0;
    const bar = meter();
    const leftWords = account.left_nano === null ? "not limited" : `${percent(leftAfter)} left`;
    if (cap) {
      const parts = { posted: balance.posted_nano / cap, reserved: balance.reserved_nano / cap, asked: account.asked_nano / cap };
      bar.update(parts, account.enough ? `this job would take ${percent(parts.asked)} of the cap; ${leftWords}` : "more than is left");
      bar.node.classList.toggle("over", !account.enough);
    }
    bar.node.hidden = !cap;
    return {
      account: account.account,
      level: account.level,
      enough: account.enough,
      cap: balance?.cap_nano === null ? null : (balance?.cap_epsilon ?? null),
      spentBefore: epsilonOf(spentNano, at),
      spentAfter: after,
      leftAfter,
      leftWords,
      bar: bar.node,
    };
  }
}

function verdict(view) {
  const { price } = view;
  const left = view.jobs_left === null ? "Nothing limits how many such jobs are asked." : `${count(view.jobs_left, "such job")} left.`;
  const figures = el(
    "dl",
    { class: "cards" },
    figure("epsilon, one image", epsilon(price.instance_epsilon), `for ${count(price.queries, "question")}, delta ${delta(price.delta)}`, "first"),
    statesPerson(price) ? figure("epsilon, one person", personWords(price), `of whose images at most ${whole(price.records_per_person)} vote at each agent`) : null,
    figure("epsilon, a whole agent", price.agent_epsilon === null ? "none" : epsilon(price.agent_epsilon), price.agent_epsilon === null ? price.reason || "no finite bound" : `delta ${delta(price.delta)}`),
    figure(view.jobs_left === 1 ? "such job left" : "such jobs left", view.jobs_left === null ? "any" : whole(view.jobs_left), view.jobs_left === null ? "not limited" : "in the tightest account"),
    figure("noise in a full sum", epsilon(view.total_sigma_votes), `votes (sigma); ${count(view.quorum, "agent")} must answer`),
  );
  const words = view.affordable
    ? el("p", { class: "verdict good-words" }, icon("yes", "good"), el("span", {}, `The budgets cover it: ${priceWords(price)}. ${left}`))
    : el("p", { class: "verdict bad-words" }, icon("no", "bad"), el("span", {}, `It would be refused. ${sentence(view.refusal)}`));
  words.setAttribute("role", "status");
  const holds = price.holds_against ? el("p", { class: "small" }, price.holds_against) : null;
  return [words, figures, holds].filter(Boolean);
}

function figure(name, value, unit, kind = "") {
  return el("div", { class: kind || null }, el("dt", {}, name), el("dd", { class: "figure" }, value), el("dd", { class: "unit" }, unit));
}

/** Each record votes once among all questions of such a task, so they are asked together or not at all. */
function askedAtOnce(task) {
  return task.task.method === "reverse-knn";
}

function taskTitle(task) {
  return `${task.task.name ?? "task"} · ${task.task_id.slice(0, 8)}`;
}

function taskWords(task) {
  const inside = task.task;
  const opened = inside.release === "winner" ? "only the winning class is opened" : "the noisy sum of votes is opened";
  const classes = inside.num_classes ? `${count(inside.num_classes, "class", "classes")}; ` : "";
  return (
    `${count(task.participants.length, "agent")}; ${classes}${opened}; ${whole(task.queries_left)} questions of this task left${askedAtOnce(task) ? ", asked all at once" : ""}. ` +
    `All its questions together: ${priceWords(task.price)}.`
  );
}
