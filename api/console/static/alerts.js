// What needs a person now, before anything else on the page: each says what happened, what it means and what to do.

import { byId, el, fill, icon } from "./dom.js";
import { standing } from "./meters.js";
import { nextStep } from "./refusal_words.js";
import { percentWords, sharesOf } from "./shares.js";
import { FINISHED, accountName, count, jobTitle, levelName, listed, sentence, timeAgo, utc } from "./words.js";

const SEEN = "labeler-alerts-seen"; // digests alone, in this browser alone
const RECENT_MS = 7 * 86_400_000;
const SEEN_MOST = 200;
const SHOWN = 4;
const STOPPED = new Set(["failed", "refused", "expired"]);
const CHECKS = {
  journal: ["The ledger cannot be trusted as it is, so no job is taken.", "Restore the newest journal; docs/backup.md says how."],
  storage: ["Nothing more can be kept, so uploads are refused and rounds wait.", "Make room on the disk of the coordinator."],
  redis: ["Messages do not reach the sites, so jobs wait. Nothing is lost.", "Start Redis again, or correct its address in the settings."],
  embedder: ["Jobs with images wait before their first question.", "Start labeler embedder on the coordinator's machine."],
  talliers: ["Without all talliers nothing is opened. Jobs wait until their deadline.", "Ask the missing tallier's people to start it again."],
  service: ["Jobs wait, or are refused.", "Ask an administrator, whose token is told why."],
  agents: ["Nobody is there to answer. Jobs wait until their deadline.", "Ask the sites to start their agents again."],
};

/** Asks the service for what the alerts are made of, and shows them. */
export class Alerts {
  #api;
  #jobs;
  #showAll = false;
  #last = null;
  #seen = new Set(JSON.parse(localStorage.getItem(SEEN) ?? "[]"));

  constructor(api, jobs) {
    this.#api = api;
    this.#jobs = jobs;
  }

  /** The list of jobs may be too long to hold those that stopped, so they are asked for by themselves. */
  async refresh() {
    const page = await this.#api.jobs({ limit: 25, states: [...STOPPED] });
    for (const job of page.items) this.#jobs.put(job);
  }

  show(readiness, parties, budget) {
    this.#last = [readiness, parties, budget];
    this.render();
  }

  render() {
    if (!this.#last) return;
    const all = alertsOf(...this.#last, this.#jobs.all(), Date.now());
    const found = all.filter((alert) => !this.#seen.has(keyOf(alert)));
    const seen = all.length - found.length;
    const signature = JSON.stringify([found, seen, this.#showAll]);
    fill(byId("alerts-list"), signature, () => {
      const again = seen > 0 ? el("p", { class: "more" }, el("button", { type: "button", onclick: () => this.#showSeen() }, `Show ${count(seen, "acknowledged alert")}`)) : null;
      if (found.length === 0 && seen > 0) return [el("p", { class: "verdict" }, "Nothing new."), again];
      if (found.length === 0) return el("p", { class: "verdict good-words" }, icon("yes", "good"), el("span", {}, "Nothing needs you now: all parts answer, every budget has room, and no job failed in the last 7 days."));
      const shown = this.#showAll ? found : found.slice(0, SHOWN);
      const rest = found.length - shown.length;
      return [
        el("ul", { class: "alerts" }, shown.map((alert) => item(alert, () => this.#acknowledge(alert)))),
        rest > 0 ? el("p", { class: "more" }, el("button", { type: "button", onclick: () => this.#all() }, `Show ${count(rest, "more alert")}`)) : null,
        again,
      ];
    });
  }

  /** Hide an alert in this browser until its cause shows itself anew. */
  #acknowledge(alert) {
    this.#keep([...this.#seen, keyOf(alert)]);
  }

  #showSeen() {
    this.#keep([]);
  }

  #keep(keys) {
    this.#seen = new Set(keys.slice(-SEEN_MOST));
    localStorage.setItem(SEEN, JSON.stringify([...this.#seen]));
    this.render();
  }

  #all() {
    this.#showAll = true;
    this.render();
  }
}

/** Every alert, the worst first: {kind: bad | low, title, means, todo, at, href, link}. */
export function alertsOf(readiness, parties, budget, jobs, now) {
  const found = [
    ...(readiness?.checks ?? []).filter((check) => !check.ok && !isOfTallier(check, parties)).map(ofCheck),
    ...ofAccounts(budget?.accounts ?? []),
    ...(parties?.parties ?? []).flatMap((party) => ofParty(party)),
    ...ofKeys(parties?.key_changes ?? [], now),
    ...jobs.flatMap((job) => ofJob(job, now)),
  ].filter(Boolean);
  return found.sort((a, b) => (b.kind === "bad") - (a.kind === "bad"));
}

/** A tallier that is away has its own alert, which names it; that jobs wait for it is not said a second time. */
function isOfTallier(check, parties) {
  const talliers = (parties?.parties ?? []).filter((party) => party.role === "tallier" && party.state === "active");
  const isOneAway = talliers.length >= (parties?.talliers_needed ?? 0) && talliers.some((party) => !party.is_live);
  return isOneAway && ["talliers", "service"].includes(check.name);
}

function ofCheck(check) {
  const [means, todo] = CHECKS[check.name] ?? ["Jobs cannot be answered while this does not hold.", "Look into the coordinator's log."];
  return { kind: "bad", title: `Not ready: ${check.name}`, detail: sentence(check.detail), means, todo };
}

const ACCOUNTS = {
  unbound: {
    kind: "bad",
    title: (level, names) => `No bound for ${level}: ${names}`,
    means: "Something was charged that has no finite epsilon, so nothing limits what could be learnt here.",
    todo: "Find the charge in the ledger. What was released cannot be taken back; set a limit on the account to refuse such jobs from now on.",
    href: "#ledger",
    link: "Ledger",
  },
  empty: {
    kind: "bad",
    title: (level, names) => `The budget for ${level} is used up: ${names}`,
    means: "Every further job that touches this account is refused.",
    todo: "Decide whether more may be told about these images. A higher limit is set in coordinator.toml and stays in the ledger; budgets do not renew by themselves.",
  },
  low: {
    kind: "low",
    title: (level, names) => `The budget for ${level} is nearly spent: ${names}`,
    means: "Soon jobs that touch this account will be refused.",
    todo: "Decide whether more may be told about these images. A higher limit is set in coordinator.toml and stays in the ledger; budgets do not renew by themselves.",
  },
};

/** One alert for all accounts that stand alike at a level: a job charges many of them at once. */
function ofAccounts(balances) {
  const alike = new Map();
  for (const balance of balances) {
    const look = standing(balance).kind;
    if (!(look in ACCOUNTS)) continue;
    const left = look === "low" ? ` (${percentWords(sharesOf(balance).left)} left)` : "";
    const key = `${look} ${balance.level}`;
    alike.set(key, [...(alike.get(key) ?? []), { balance, name: `${accountName(balance.account)}${left}` }]);
  }
  return [...alike].map(([key, found]) => {
    const { title, ...rest } = ACCOUNTS[key.split(" ")[0]];
    found.sort((a, b) => (b.balance.account === "federation") - (a.balance.account === "federation"));
    return { ...rest, title: title(levelName(found[0].balance.level), listed(found.map((one) => one.name), 5)) };
  });
}

function ofParty(party) {
  if (party.state !== "active") return [];
  const found = [];
  if (party.claim) {
    found.push({ kind: "bad", title: `${party.party_id} has seen entries that are missing here`, means: `${sentence(party.claim)} It may be right, and then this ledger is an older copy; its messages are refused meanwhile.`, todo: "Compare both journals (labeler journal verify) before any further job.", href: "#sites", link: "Sites" });
  }
  if (!party.is_live) {
    const isTallier = party.role === "tallier";
    found.push({
      kind: isTallier ? "bad" : "low",
      title: `${party.party_id} is away`,
      at: party.last_contact,
      detail: party.last_contact ? "" : "It was never heard of.",
      means: isTallier ? "Without every tallier nothing is opened: jobs wait until their deadline." : "Jobs wait for its word, and go on without it where enough others are there.",
      todo: `Ask its people to start it again. If it does not come back, an administrator revokes it.`,
      href: "#sites",
      link: "Sites",
    });
  }
  return found;
}

/** Keys decide who speaks in a site's name, so that they change is never silent; all that joined lately in one. */
function ofKeys(changes, now) {
  const used = changes.filter((change) => change.used_at);
  const open = changes.filter((change) => !change.used_at && new Date(change.expires_at).getTime() > now);
  const names = (isRotation) => used.filter((change) => change.is_rotation === isRotation).map((change) => change.party_id);
  return [
    ...[`New keys: ${listed(names(true))}`, `Joined: ${listed(names(false))}`].filter((title) => !title.endsWith(": nobody")).map((title) => ({
      kind: "low",
      title,
      at: used.at(-1).used_at,
      means: "Whoever holds these keys speaks in that name, and what is meant for it is sealed to them.",
      todo: "Ask by telephone whether the fingerprint is the one that the site shows.",
      href: "#sites",
      link: "Fingerprints",
    })),
    ...open.map((change) => ({
      kind: "low",
      title: change.is_rotation ? `The keys of ${change.party_id} are about to change` : `${change.party_id} is invited`,
      detail: `The invitation may be used until ${utc(new Date(change.expires_at))}.`,
      means: "Whoever has its file enrols keys in that name, once.",
      todo: `If nobody there asked for it, an administrator withdraws it: labeler invite ${change.party_id} --withdraw.`,
    })),
  ];
}

function ofJob(job, now) {
  const link = { href: `#jobs/${encodeURIComponent(job.job_id)}`, link: "Open the job" };
  if (!FINISHED.has(job.state)) {
    const people = job.waiting_for.filter((one) => one.reason === "approval").map((one) => one.agent_id);
    if (people.length === 0) return [];
    return [{ kind: "low", title: `${quoted(job)} waits for a person at ${listed(people)}`, at: job.updated_at, means: "Nobody is asked and nothing is charged before they decide; after the deadline the job ends at no charge.", todo: "Ask them to approve or refuse it at their site (labeler agent approve).", ...link }];
  }
  const isRecent = now - new Date(job.updated_at).getTime() < RECENT_MS;
  if (!isRecent || job.forgotten_at) return [];
  if (STOPPED.has(job.state)) {
    const why = job.problem?.title ?? "";
    return [{ kind: job.state === "failed" ? "bad" : "low", title: `${quoted(job)} ${{ failed: "failed", refused: "was refused", expired: "ran out of time" }[job.state]}${why ? `: ${why}` : ""}`, at: job.updated_at, detail: declinedWords(job), means: ledgerWords(job), todo: job.problem ? nextStep(job.problem, job.refusals) : "Submit it again with a later deadline.", ...link }];
  }
  const said = [...new Set(job.refusals.map((one) => one.party_id))];
  if (job.state !== "completed" || said.length === 0) return [];
  return [{ kind: "low", title: `${listed(said)} refused ${quoted(job)}`, at: job.updated_at, means: "The others answered, and the answer holds the same guarantee.", todo: "Open the job for the reason it gave; its own policy or budget decides.", ...link }];
}

/** Who would not take part, in its own words; as many as are read at a glance. */
const declinedWords = (job) =>
  Object.entries(job.declined ?? {})
    .slice(0, 3)
    .map(([agent, reason]) => `${agent}: ${sentence(reason)}`)
    .join(" ");
const quoted = (job) => (job.name ? `“${job.name}”` : jobTitle(job));
const ledgerWords = (job) => (job.ledger_seq === null ? "No labels came of it, and nothing was charged for good." : `No labels came of it; what agents were asked stays charged (${job.ledger}).`);

/** The same alert of the same cause; what happens again later has another time. */
function keyOf(alert) {
  let digest = 0xcbf29ce484222325n; // FNV-1a of 64 bits: no name of a job or a site stays in the browser
  for (const letter of new TextEncoder().encode(`${alert.title} ${alert.at ?? ""}`)) digest = BigInt.asUintN(64, (digest ^ BigInt(letter)) * 0x100000001b3n);
  return digest.toString(36);
}

function item(alert, acknowledge) {
  return el(
    "li",
    { class: `alert ${alert.kind}` },
    el("h3", {}, icon("alarm", alert.kind), ` ${alert.title}`, alert.at ? el("span", { class: "small" }, " ", timeAgo(alert.at)) : null),
    alert.detail ? el("p", { class: "detail" }, alert.detail) : null,
    el("p", {}, alert.means),
    el("p", {}, el("strong", {}, "What to do: "), alert.todo, alert.href ? " " : null, alert.href ? el("a", { href: alert.href }, alert.link) : null),
    el("p", {}, el("button", { type: "button", class: "quiet", onclick: acknowledge }, "Acknowledge")),
  );
}
