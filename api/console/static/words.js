// Numbers, times and states in words, the same everywhere on the page.

import { el, icon, setText } from "./dom.js";

const THREE = new Intl.NumberFormat(undefined, { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
const WHOLE = new Intl.NumberFormat();
const MINUTES = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short", timeZone: "UTC", hourCycle: "h23" });
const SECONDS = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", timeZone: "UTC", hourCycle: "h23" });

/** Three significant digits; null is what has no finite bound, and must never look like a number. */
export function epsilon(value) {
  if (value === null || value === undefined) return "no bound";
  if (value === 0) return "0";
  if (value < 1e-3 || value >= 1e6) return value.toExponential(2);
  return THREE.format(value);
}

export function delta(value) {
  return value < 0.01 ? String(Number(value.toPrecision(3)).toExponential()) : String(Number(value.toPrecision(3)));
}

export const whole = (value) => WHOLE.format(value);

export function count(number, noun, plural = `${noun}s`) {
  return `${whole(number)} ${number === 1 ? noun : plural}`;
}

/** The first letter large, as a sentence begins. */
export const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

/** Names in a sentence, cut short where there are many. */
export function listed(names, most = 8) {
  if (names.length === 0) return "nobody";
  if (names.length <= most) return names.join(", ");
  return `${names.slice(0, most).join(", ")} and ${whole(names.length - most)} more`;
}

/** A moment in words, always in UTC and saying so: the same for everybody who reads the page. */
export function utc(moment, { seconds = false } = {}) {
  return `${(seconds ? SECONDS : MINUTES).format(moment)} UTC`;
}

export function time(iso, options = {}) {
  const moment = new Date(iso);
  if (Number.isNaN(moment.getTime())) return el("span", {}, String(iso));
  return el("time", { datetime: moment.toISOString() }, utc(moment, options));
}

export function ago(iso) {
  const seconds = Math.max(0, (Date.now() - new Date(iso).getTime()) / 1000);
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 36 * 3600) return `${Math.round(seconds / 3600)} h ago`;
  return `${whole(Math.round(seconds / 86400))} days ago`;
}

/** How long ago something was; `tick` keeps these current. */
export function timeAgo(iso) {
  const moment = new Date(iso);
  return el("time", { datetime: iso, title: utc(moment, { seconds: true }), "data-ago": iso }, ago(iso));
}

export function tick() {
  for (const node of document.querySelectorAll("time[data-ago]")) setText(node, ago(node.dataset.ago));
}

export const LEVELS = ["instance", "agent"];
export const levelName = (level) => ({ instance: "one image", agent: "a whole agent" })[level] ?? level;

export function accountName(account) {
  if (account === "federation") return "Federation";
  return account.startsWith("agent:") ? account.slice("agent:".length) : account;
}

export const FINISHED = new Set(["completed", "failed", "refused", "cancelled", "expired"]);
export const UNFINISHED = ["queued", "collecting", "tallying"];

/** How a job's state looks: [icon, kind]. */
export function stateLook(state) {
  return (
    {
      queued: ["busy", "calm"],
      collecting: ["busy", "going"],
      tallying: ["busy", "going"],
      completed: ["yes", "good"],
      refused: ["stop", "bad"],
      failed: ["no", "bad"],
      expired: ["no", "low"],
      cancelled: ["stop", "calm"],
    }[state] ?? ["busy", "calm"]
  );
}

export const jobTitle = (job) => job.name || `Job ${job.job_id.slice(0, 8)}`;
/** Which task a job asks in; the job's own name may be empty. */
export const taskWords = (job) => `task ${job.task_name || short(job.task_id)}`;
export const short = (digest, length = 12) => (digest.length > length ? `${digest.slice(0, length)}…` : digest);

/** A price as words: every level. */
export function priceWords(price) {
  const person = statesPerson(price) ? `${worth(price.person_epsilon ?? null)} for one person, ` : "";
  const group = statesGroup(price) ? `${worth(price.group_epsilon ?? null)} for any ${count(price.group_size, "image")}, ` : "";
  return `${worth(price.instance_epsilon)} for one image, ${person}${group}${worth(price.agent_epsilon)} for a whole agent`;
}

/** An amount of mu squared, from nano-units. */
export const muSquared = (nano) => `${epsilon(nano / 1e9)} of mu²`;

/** What one question of a job takes of one image's budget; where the method has no such share, that it is priced once. */
export function questionWords(price) {
  if (price.instance_question_nano === null || price.instance_question_nano === undefined) return "the job is priced once, as a whole";
  return `${muSquared(price.instance_question_nano)} each, about one image`;
}

/** Whether a job ended without a charge; what has ended another way than "completed" may have one. */
export const wasFree = (job) => FINISHED.has(job.state) && job.state !== "completed" && job.ledger_seq === null;

/** "epsilon 0.5", or that there is no bound. */
export const worth = (value) => (value === null || value === undefined ? "no bound" : `epsilon ${epsilon(value)}`);

/** The same for a page: what has no bound is marked as a warning. */
export function worthNode(value, words = worth(value)) {
  if (value !== null && value !== undefined) return el("span", {}, words);
  return el("span", { class: "no-bound" }, icon("alarm", "low"), ` ${words}`);
}

/** Whether a price is stated for any g images of all agents together. */
export const statesGroup = (price) => typeof price.group_size === "number";

/** Whether the task bounds how many images of one person vote, so that a price is stated for a person. */
export const statesPerson = (price) => typeof price.records_per_person === "number";
