// The page: who is signed in, and what is read when.

import { Api, Problem } from "./api.js";
import { Budget } from "./budget.js";
import { Charts } from "./chart.js";
import { Connection } from "./connection.js";
import { byId, el, fill, icon, setText } from "./dom.js";
import { Estimate } from "./estimate.js";
import { JobDialog } from "./job_dialog.js";
import { Jobs } from "./jobs.js";
import { Ledger } from "./ledger.js";
import { Parties } from "./parties.js";
import { Refusals } from "./refusals.js";
import { tick } from "./words.js";

const api = new Api();
takeTokenFromAddress();

let role = "";
const budget = new Budget();
const charts = new Charts(api, budget, failed);
const jobs = new Jobs(api);
const dialog = new JobDialog(api, jobs, () => role !== "viewer");
const refusals = new Refusals(api, jobs);
const parties = new Parties();
const connection = new Connection(round);
const estimate = new Estimate(api, budget, failed);
const ledger = new Ledger(api, budget, failed);

jobs.onOpen = refusals.onOpen = (id) => void dialog.open(id);
jobs.onFailure = (error, { quiet = false } = {}) => failed(error, { quiet });
jobs.onChange((job, before) => {
  refusals.render();
  // A reservation, a charge or a refusal moved the budget: do not wait for the next round to say so.
  if (before && before.state !== job.state) connection.now();
});

byId("host").textContent = `· ${location.host}`;
byId("sign-out").addEventListener("click", () => signOut("You signed out; the token is forgotten."));
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    byId("sign-in-error").textContent = "A token is one word without spaces, like lab_...";
    return;
  }
  api.signIn(token);
  show();
  connection.now();
});
window.addEventListener("hashchange", () => {
  if (takeTokenFromAddress()) {
    show();
    connection.now();
  }
});
setInterval(tick, 1_000);
show();
connection.now();

/** `#token=...` signs in. It leaves the address bar and the history at once, so that nobody copies it by mistake. */
function takeTokenFromAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  history.replaceState(null, "", location.pathname + location.search);
  if (/^[\x21-\x7e]+$/.test(token)) api.signIn(token);
  return true;
}

function show() {
  const isIn = api.hasToken;
  byId("sign-in").hidden = isIn;
  byId("signed-in").hidden = !isIn;
  byId("nav").hidden = !isIn;
  byId("who").hidden = !isIn;
  if (!isIn) setText(byId("headline"), "Sign in to see the privacy budget");
  else if (!budget.view) setText(byId("headline"), "Privacy budget");
  byId("sign-in-error").textContent = "";
}

function signOut(reason) {
  api.signOut();
  // Everything read with the token goes with it.
  sessionStorage.setItem("labeler.said", reason);
  location.reload();
}

function failed(error, { quiet = false } = {}) {
  if (error instanceof Problem && error.status === 401) {
    if (api.hasToken) signOut("The token is not known here, or was revoked. Paste another one.");
    return;
  }
  if (!quiet) connection.now(); // meets the same failure, and shows it
}

async function round(count) {
  showReadiness(await api.readiness());
  if (!api.hasToken) return;
  // One part that fails does not keep the others from showing; what went wrong is said once, at the end.
  const failures = [];
  const attempt = (work) => work.catch((error) => failures.push(error));
  if (role === "") await attempt(learnWhoIAm());
  const before = budget.view?.head_seq;
  await Promise.all([
    attempt(api.budget().then((view) => budget.show(view))),
    attempt(api.parties().then((view) => parties.show(view))),
    attempt(jobs.refresh()),
  ]);
  const moved = before !== budget.view?.head_seq;
  if (moved || count % 5 === 0) {
    await Promise.all([attempt(api.tasks().then((page) => estimate.showTasks(page.items))), attempt(refusals.refresh())]);
  }
  if (moved && before !== undefined) estimate.budgetChanged();
  await Promise.all([attempt(ledger.refresh()), attempt(charts.refresh())]);
  const refused = failures.find((error) => error instanceof Problem && error.status === 401);
  if (refused) failed(refused);
  else if (failures.length > 0) throw failures[0];
}

async function learnWhoIAm() {
  let words = "signed in";
  try {
    const me = await api.whoami();
    role = me.role;
    words = `${me.name} (${me.role})`;
  } catch (error) {
    // A service that does not say: all controls show, and it refuses what the token may not do.
    if (!(error instanceof Problem && (error.status === 403 || error.status === 404))) throw error;
    role = "unknown";
  }
  setText(byId("who-words"), words);
  if (role === "admin") jobs.nameTokens((await api.tokens()).items);
}

function showReadiness(view) {
  const place = byId("readiness");
  place.hidden = false;
  fill(place, JSON.stringify(view), () => {
    const bad = view.checks.filter((check) => !check.ok);
    if (!view.ready) {
      return el(
        "div",
        { class: "note alarm", role: "status" },
        el("p", {}, el("strong", {}, "Not ready: jobs cannot be answered now.")),
        el("ul", { class: "plain" }, bad.map((check) => el("li", {}, el("strong", {}, check.name), `: ${check.detail || "does not hold"}`))),
      );
    }
    return el(
      "details",
      { class: "ready" },
      el("summary", {}, icon("yes", "good"), ` Ready: all ${view.checks.length} checks hold`),
      el("ul", { class: "plain" }, view.checks.map((check) => el("li", {}, el("strong", {}, check.name), check.detail ? `: ${check.detail}` : ""))),
    );
  });
}

const said = sessionStorage.getItem("labeler.said");
if (said && !api.hasToken) byId("sign-in-error").textContent = said;
sessionStorage.removeItem("labeler.said");
