// Why something was refused or failed: the problem document in words, and what to do next.

import { el } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { percentWords, percentages } from "./shares.js";
import { accountName, levelName, listed, sentence, worth } from "./words.js";

const NEXT = {
  "budget-exceeded": "Ask fewer questions, or make a task with more noise. Raising a limit is for whoever answers for privacy to decide; the change stays in the ledger.",
  "quorum-not-reached": "Bring enough agents back (see Sites) and submit the job again.",
  "refused-by-person": "Ask the people of that site; if they approve the task after all, submit the job again.",
  "policy-refusal": "The site's own policy decides; talk to the people who own the records there.",
  "awaiting-approval": "A person at the site has to approve it: labeler agent approve.",
  "not-enrolled": "An administrator has to enrol the party, or its new keys.",
  "unreadable-image": "Leave the image that is named out, or repair it, and submit the job again.",
  "mixed-shards": "The sites have to agree on classes and backbone before this task can be answered.",
  "storage-full": "The operator has to make room on the disk.",
};
const OTHERWISE = "Open the job to see what each agent said; submit it again when the reason is gone.";

export const slug = (problem) => String(problem?.type ?? "").replace(/^urn:labeler:problem:/, "");

/** What to do about a problem; where agents are there and refuse, bringing back more of them would not help. */
export function nextStep(problem, refusals = []) {
  if (slug(problem) === "quorum-not-reached" && refusals.length > 0) return "The agents that refused say why in the job: change what they refuse, then submit it again.";
  return NEXT[slug(problem)] ?? OTHERWISE;
}

/** The whole story of one refusal: in plain words first; the service's own sentence, with its units, one click away. */
export function explain(problem, at, refusals = []) {
  const plain = inShares(problem);
  const said = sentence(problem.detail || problem.title);
  return el(
    "div",
    { class: "refusal" },
    el("p", { class: "reason" }, plain || said),
    el("p", {}, el("strong", {}, "What to do: "), nextStep(problem, refusals)),
    plain ? el("details", { class: "quiet" }, el("summary", {}, "In nano-units, and who spent last"), el("p", { class: "small" }, said), facts(problem, problem.delta ?? at), spenders(problem, problem.delta ?? at)) : null,
  );
}

/** What was asked of a budget and what was left of it, in shares; "" where it was refused for another reason. */
function inShares(problem) {
  if (!problem.account || !(problem.cap_nano > 0)) return "";
  const who = `${accountName(problem.account)}, ${levelName(problem.level)}`;
  return `${who}: ${problem.asked_nano ? `the job asks for ${shareWords(problem.asked_nano / problem.cap_nano)} of the budget` : "the job has no finite price"}, and ${leftWords(problem.left_nano, problem.cap_nano)} is left.`;
}

/** A share of a budget that may be more than all of it, rounded up. */
export const shareWords = (share) => percentWords(Math.ceil(share * 1000) / 10);

/** What is left, as every page says it. */
export const leftWords = (left, cap) => percentWords(percentages([cap - left, left])[1]);

function facts(problem, at) {
  const rows = [];
  if (problem.account) rows.push(["Account", accountName(problem.account)]);
  if (problem.level) rows.push(["Protects", levelName(problem.level)]);
  for (const [name, key] of [["Asked", "asked"], ["Left", "left"], ["Limit", "cap"]]) {
    const nano = problem[`${key}_nano`];
    if (problem.account && nano !== undefined) rows.push([name, worth(problem[`${key}_epsilon`] ?? epsilonOf(nano ?? Infinity, at))]);
  }
  if (rows.length === 0) return null;
  return el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function spenders(problem, at) {
  const list = Array.isArray(problem.last_spenders) ? problem.last_spenders : [];
  if (list.length === 0) return null;
  const words = list.map((one) => `${one.reservation_id} (${worth(epsilonOf(one.amount_nano, at))} on its own)`);
  return el("p", { class: "small" }, `Last spenders: ${listed(words, 5)}.`);
}
