// What is spent, what was answered, what was decided, what is allowed.

import { el, fill } from "./dom.js";
import { epsilon, many, method, moment, names, small } from "./words.js";

const LOW = 0.1;

/** One card for each account. A budget adds up in units, so its parts are shares of it; the epsilons stand below. */
export function accounts(parent, budget, one) {
  fill(parent, JSON.stringify([budget, one]), () => {
    const cards = [...budget].sort((a, b) => b.level.localeCompare(a.level)).map(account);
    return one ? [cards[0], person(one), ...cards.slice(1)].filter(Boolean) : cards;
  });
}

/** What all jobs together say of one patient. It is no account: it follows from what was answered. */
function person(one) {
  const none = one.person_epsilon === null;
  return el(
    "div",
    { class: "card account" },
    el("h3", {}, "About one patient"),
    el("p", { class: "total" }, el("span", { class: none ? "figure none" : "figure" }, none ? "no bound" : `epsilon ${epsilon(one.person_epsilon)}`), none ? null : el("span", { class: "of" }, " so far, all jobs together")),
    el("p", { class: "small" }, one.words),
    el("p", { class: "small" }, "A patient may cost less than one image: if one image leaves, the patient's next one votes in its place; if the patient leaves, nothing does. Where several images of one patient vote, a patient costs more."),
  );
}

function account(one) {
  const what = one.level === "instance" ? "About one private image" : "About this site as a whole";
  const none = one.spent_epsilon === null;
  const worth = none
    ? "Something was answered that has no finite price at this level, so nothing bounds what it told."
    : `Epsilon ${one.words} (delta ${small(one.delta)}).${one.life_nano > 0 ? " What is set aside for votes for life is in it, whether or not it was asked for." : ""}`;
  if (one.cap_nano === null) {
    return el("div", { class: "card account" }, el("h3", {}, what), el("p", { class: "total" }, el("span", { class: none ? "figure none" : "figure" }, none ? "no bound" : `epsilon ${epsilon(one.posted_epsilon)}`)), el("p", { class: "standing" }, "No limit is set: it is recorded, and nothing is refused."), el("p", { class: "small" }, worth));
  }
  const used = one.cap_nano ? one.spent_nano / one.cap_nano : 1;
  const waits = one.spent_nano > one.posted_nano;
  const left = 1 - used;
  const percent = `${(100 * used).toFixed(used > 0.1 || used === 0 ? 0 : 1)} %`;
  return el(
    "div",
    { class: left < LOW ? "card account low" : "card account" },
    el("h3", {}, what),
    el("p", { class: "total" }, el("span", { class: "figure" }, percent), el("span", { class: "of" }, waits ? " of the budget is spent, or set aside for jobs that wait" : " of the budget is spent")),
    el("progress", { class: "share", max: "1000", value: String(Math.round(1000 * used)), "aria-label": `${what}: used part of the budget` }),
    el("p", { class: "small" }, `${worth} The whole budget is epsilon ${epsilon(one.cap_epsilon)}. Budgets add up in units of mu squared, of which the share is stated; epsilons do not add up.`),
  );
}

/** Every job that was answered. */
export function jobs(parent, list) {
  fill(parent, JSON.stringify(list), () => {
    if (!list.length) return el("p", { class: "card empty" }, "Nothing was answered yet.");
    const rows = list.map((job) =>
      el("tr", {},
        el("th", { scope: "row", class: "name" }, job.name || "a task of an earlier version", el("span", { class: "small block" }, [names(job.requesters, 3), job.job_id || job.task_id.slice(0, 16)].filter(Boolean).join(", "))),
        cell("When", moment(job.last_at)),
        cell("Classes", names(job.classes, 6) || "not kept"),
        cell("Answered", `${many(job.queries, "question", "questions")}`, el("span", { class: "small" }, method(job.method))),
        cell("Epsilon per image", epsilon(job.instance_epsilon), null, "num"),
        cell("Per patient", epsilon(job.person_epsilon), job.person_nano === null ? null : el("span", { class: "small" }, `at most ${many(job.records_per_person, "image votes", "images vote")}`), "num"),
        cell("For this site", epsilon(job.agent_epsilon), null, "num"),
      ),
    );
    return table("Every job, the newest first. The epsilon is of each job by itself.", ["Task", "When", "Classes", "Answered", "Epsilon per image", "Per patient", "For this site"], rows);
  });
}

/** What people decided, with the way back. */
export function decisions(parent, list, decide) {
  fill(parent, JSON.stringify(list), () => {
    if (!list.length) return el("p", { class: "card empty" }, "Nothing was decided yet.");
    const rows = list.map((one) => {
      const words = { approved: "approved", refused: "refused", withdrawn: "approval taken back" }[one.decision];
      const again = one.decision === "approved"
        ? el("button", { type: "button", class: "quiet danger", onclick: () => decide(`/v1/tasks/${one.task_id}/refuse`, { reason: "the approval was taken back" }, `${one.name} is refused`) }, `Refuse from now on`)
        : el("button", { type: "button", class: "quiet", onclick: () => decide(`/v1/tasks/${one.task_id}/approve`, {}, `${one.name} is approved`) }, "Approve after all");
      again.setAttribute("aria-label", `${again.textContent}: ${one.name}`);
      return el("tr", {},
        el("th", { scope: "row", class: "name" }, one.name, el("span", { class: "small block" }, one.task_id.slice(0, 16))),
        cell("Decision", el("span", { class: `decision is-${one.decision}` }, words), one.reason ? el("span", { class: "small name" }, one.reason) : null),
        cell("When", moment(one.decided_at)),
        cell("Epsilon per image", epsilon(one.instance_epsilon), null, "num"),
        cell("", again),
      );
    });
    return table("The last decision first. What was charged before a refusal is still answered.", ["Task", "Decision", "When", "Epsilon per image", ""], rows);
  });
}

/** What policy and budget refused without asking a person: it was asked of this site, too. */
export function refusals(parent, list) {
  fill(parent, JSON.stringify(list), () => {
    if (!list.length) return el("p", { class: "card empty" }, "Policy and budget refused nothing yet.");
    const rows = list.map((one) =>
      el("tr", {},
        el("th", { scope: "row", class: "name" }, one.name, el("span", { class: "small block" }, [one.requester, one.job_id || one.task_id.slice(0, 16)].filter(Boolean).join(", "))),
        cell("When", moment(one.at)),
        cell("What was said", el("span", { class: "name" }, one.sentence)),
      ),
    );
    return table("Refused by the policy or the budget, without asking a person; the last first. Nothing was computed, and nothing was charged. At most 100 a day are kept, and 25 of one requester.", ["Task", "When", "What was said"], rows);
  });
}

/** When records were deleted; never which, nor how many. */
export function deletions(parent, list) {
  fill(parent, JSON.stringify(list), () => {
    if (!list.length) return el("p", { class: "card empty" }, "No record was deleted.");
    const rows = list.map((one) => el("tr", {}, el("th", { scope: "row", class: "name" }, moment(one.at)), cell("Answered before", many(one.rounds_before, "round", "rounds"))));
    return table("The last deletion first. Rounds after it are answered without these records, which cast no more votes for life. What was answered before stays released and charged.", ["Deleted", "Answered before"], rows);
  });
}

export function policy(parent, words) {
  fill(parent, JSON.stringify(words), () => (words.length ? words : ["It cannot be read, so everything is refused."]).map((line) => el("li", {}, line)));
}

function cell(label, content, more = null, kind = null) {
  return el("td", { "data-label": label, class: kind }, el("div", {}, content, more));
}

function table(caption, headings, rows) {
  const head = headings.map((words) => (words ? el("th", { scope: "col", class: words.startsWith("Epsilon") || words.startsWith("For") || words.startsWith("Per") ? "num" : null }, words) : el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "Change"))));
  return el("div", { class: "card scroll as-cards" }, el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}
