// Why something was refused: the problem document in words, with account, level, asked, left and the last spenders.

import { el } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { accountName, epsilon, levelName, listed, sentence } from "./words.js";

const NEXT = {
  "budget-exceeded":
    "Raising a cap is a decision of whoever answers for privacy; the change stays in the ledger.",
  "quorum-not-reached": "Bring enough agents back (see Agents and talliers) and submit the job again.",
  "policy-refusal": "The site's policy decides; talk to the people who own the records there.",
  "awaiting-approval": "A person at the site has to run: labeler agent approve.",
  "not-enrolled": "An administrator has to enrol the party, or its new keys.",
};

export const slug = (problem) => String(problem?.type ?? "").replace(/^urn:labeler:problem:/, "");

/** The whole story of one refusal. */
export function explain(problem, at) {
  const next = NEXT[slug(problem)];
  return el(
    "div",
    { class: "refusal" },
    el("p", { class: "reason" }, sentence(problem.detail || problem.title)),
    facts(problem, problem.delta ?? at),
    spenders(problem, problem.delta ?? at),
    next ? el("p", { class: "small" }, next) : null,
  );
}

function facts(problem, at) {
  const rows = [];
  if (problem.account) rows.push(["Account", accountName(problem.account)]);
  if (problem.level) rows.push(["Protects", levelName(problem.level)]);
  for (const [name, key] of [["Asked", "asked"], ["Left", "left"], ["Cap", "cap"]]) {
    const nano = problem[`${key}_nano`];
    if (problem.account && nano !== undefined) rows.push([name, worth(problem[`${key}_epsilon`] ?? epsilonOf(nano ?? Infinity, at))]);
  }
  if (rows.length === 0) return null;
  return el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

const worth = (value) => (value === null ? "no finite epsilon" : `epsilon ${epsilon(value)}`);

function spenders(problem, at) {
  const list = Array.isArray(problem.last_spenders) ? problem.last_spenders : [];
  if (list.length === 0) return null;
  const words = list.map((one) => `${one.reservation_id} (${worth(epsilonOf(one.amount_nano, at))} on its own)`);
  return el("p", { class: "small" }, `Last spenders: ${listed(words, 5)}.`);
}
