// One task that waits: what is asked, by whom, for which classes, at which price; approve it, or refuse it with a reason.

import { el, fill } from "./dom.js";
import { epsilon, many, method, moment, names, small } from "./words.js";

function price(label, value, unit) {
  const none = value === null || value === undefined;
  return el(
    "div",
    {},
    el("dt", {}, label),
    el("dd", { class: none ? "figure none" : "figure" }, none ? "no bound" : epsilon(value)),
    el("dd", { class: "unit" }, unit),
  );
}

function person(task) {
  if (task.records_per_person === null) return price("per person", null, "the task does not limit how many images of one person vote");
  return price("per person", task.person_epsilon, `at most ${many(task.records_per_person, "image", "images")} of one person ${task.records_per_person === 1 ? "votes" : "vote"}`);
}

/** Says what an approval takes of each budget and leaves of it, or why there can be none. */
function standing(task) {
  if (task.unpayable) return el("p", { class: "note alarm" }, el("strong", {}, "Your budget cannot pay this task: "), `${task.unpayable}.`);
  return el("p", { class: "takes" }, task.takes.length ? `This task ${task.takes.map((one) => one.words).join("; it ")}.` : "No budget of this site limits this task.");
}

/** The card of one task. A task never changes; what it takes of the budget does. */
export function taskCard(task, url, decide) {
  const id = `why-${task.task_id.slice(0, 12)}`;
  const title = `task-${task.task_id.slice(0, 12)}`;
  const why = el("input", { id, maxlength: "300", autocomplete: "off", required: true });
  const by = task.requesters.length ? `${names(task.requesters)}, through ${url}` : url;
  const budget = el("div", {});
  const approve = el("button", { type: "button", class: "first", "aria-describedby": title, onclick: () => decide(`/v1/tasks/${task.task_id}/approve`, {}, `${task.name} is approved`) }, "Approve");
  const node = el(
    "article",
    { class: "card task", "aria-labelledby": title },
    el("h3", { id: title }, task.name),
    el("p", { class: "small name" }, `asked by ${by}, ${moment(task.asked_at)}`),
    el("dl", { class: "prices" },
      price("per image", task.instance_epsilon, "epsilon, about one private image"),
      person(task),
      price("for this site", task.agent_epsilon, "epsilon, about all images here together"),
    ),
    budget,
    el("p", { class: "classes" }, el("strong", {}, `${task.attributes_per_record ? many(task.classes.length, "attribute", "attributes") : many(task.classes.length, "class", "classes")}: `), names(task.classes)),
    el("dl", { class: "facts wide" },
      fact("Questions", `at most ${task.queries.toLocaleString("en")}`),
      fact("Answered by", method(task.method)),
      task.attributes_per_record ? fact("An image votes for", `at most ${many(Math.min(task.attributes_per_record, task.classes.length), "attribute", "attributes")} that it has`) : null,
      fact("Opened", task.release === "winner" ? "the winning class of each question" : "the noisy sums of votes"),
      fact("Noise", `${Number(task.sigma_votes.toPrecision(4))} votes, from ${task.noise_contributors} of ${task.noise_by === "talliers" ? "3 talliers; this site adds none" : many(task.agents, "agent", "agents")}`),
      fact("Except with chance (delta)", small(task.delta)),
      fact("Task", task.task_id.slice(0, 16)),
      task.holds_against ? fact("The prices hold", task.holds_against.replace(/^Holds /, "").replace(/\.$/, ""), "whole") : null,
    ),
    el("form", { class: "decide", onsubmit: (event) => {
      event.preventDefault();
      decide(`/v1/tasks/${task.task_id}/refuse`, { reason: why.value.trim() }, `${task.name} is refused`);
    } },
      approve,
      el("p", { class: "why" }, el("label", { for: id }, "Reason for a refusal, told to whoever asks"), why),
      el("button", { type: "submit", class: "danger", "aria-describedby": title }, "Refuse"),
    ),
  );
  const update = (now) => {
    fill(budget, JSON.stringify([now.takes, now.unpayable]), () => standing(now));
    approve.disabled = Boolean(now.unpayable);
  };
  update(task);
  return { node, update };
}

function fact(label, text, kind = null) {
  return el("div", { class: kind }, el("dt", {}, label), el("dd", {}, text));
}
