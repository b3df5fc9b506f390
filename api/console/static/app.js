// The page: who is signed in, and what is read when.

import { Alerts } from "./alerts.js";
import { Api, Problem } from "./api.js";
import { Budget } from "./budget.js";
import { Charts } from "./chart.js";
import { Connection } from "./connection.js";
import { byId, el, fill, icon, setText } from "./dom.js";
import { Evidence } from "./evidence.js";
import { JobPage } from "./job_page.js";
import { Jobs } from "./jobs.js";
import { LedgerEntries } from "./ledger_entries.js";
import { LedgerJobs } from "./ledger_jobs.js";
import { NewJob } from "./new_job.js";
import { NewTask } from "./new_task.js";
import { Parties } from "./parties.js";
import { QueryBudgets } from "./query_budgets.js";
import { Tokens } from "./tokens.js";
import { Views } from "./views.js";
import { tick } from "./words.js";

const api = new Api();
takeTokenFromAddress();

let me = { role: "", token_id: "" };
let readiness = null;
const budget = new Budget();
const charts = new Charts(api, budget, failed);
const jobs = new Jobs(api);
const alerts = new Alerts(api, jobs);
const evidence = new Evidence(api, () => me.role === "viewer" || me.role === "admin");
const jobPage = new JobPage(api, jobs, evidence, () => me.role !== "viewer", () => budget.view?.delta);
const queryBudgets = new QueryBudgets(api, byId("budget-queries"), { jobOf: (id) => jobs.get(id), deltaOf: () => budget.view?.delta, ofOneJob: false });
byId("queries").addEventListener("toggle", () => readQueries());
const parties = new Parties();
const connection = new Connection(round);
const newTask = new NewTask(api, budget, failed, (task) => void taskMade(task));
const newJob = new NewJob(api, budget, failed, (job) => jobTaken(job));
const ledgerJobs = new LedgerJobs(api, budget, jobs, failed);
const ledgerEntries = new LedgerEntries(api, budget, failed);
const tokens = new Tokens(api, () => me.token_id, (items) => jobs.nameTokens(items));
const views = new Views(shown);

jobs.onFailure = (error, { quiet = false } = {}) => failed(error, { quiet });
jobs.onChange((job, before) => {
  alerts.render();
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
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would be taken for a view's
  byId("main").focus();
});
window.addEventListener("hashchange", () => {
  if (takeTokenFromAddress()) {
    show();
    connection.now();
  } else {
    views.follow();
  }
});
setInterval(tick, 1_000);
views.follow({ isStart: true });
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

/** What a view needs when somebody comes to it. */
function shown(view, rest) {
  byId("jobs-index").hidden = view === "jobs" && rest !== "";
  byId("job-page").hidden = !(view === "jobs" && rest !== "");
  if (me.role) void jobPage.open(view === "jobs" ? rest : "");
  if (view === "new") newTask.open(budget.view?.delta);
  if (view === "tokens" && me.role === "admin") tokens.refresh().catch(failed);
}

async function taskMade(task) {
  newJob.showTasks((await api.tasks()).items);
  newJob.choose(task.task_id);
  byId("new-task").open = false;
  setText(byId("announcer"), "The task was made, and is chosen for the next job.");
  byId("job-task").focus();
}

function jobTaken(job) {
  jobs.put(job);
  connection.now();
  location.hash = `#jobs/${encodeURIComponent(job.job_id)}`;
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
  try {
    await refreshAll(count);
  } catch (error) {
    failed(error, { quiet: true }); // a refused token signs out; all else is the connection's to tell
    throw error;
  }
}

async function refreshAll(count) {
  readiness = await api.readiness();
  showReadiness(readiness);
  if (!api.hasToken) return;
  // One part that fails does not keep the others from showing; what went wrong is said once, at the end.
  const failures = [];
  const attempt = (work) => work.catch((error) => failures.push(error));
  if (me.role === "") await attempt(learnWhoIAm());
  const before = budget.view?.head_seq;
  await Promise.all([
    attempt(api.budget().then((view) => budget.show(view))),
    attempt(api.parties().then((view) => parties.show(view))),
    attempt(jobs.refresh()),
  ]);
  const moved = before !== budget.view?.head_seq;
  if (moved || count % 5 === 0) {
    await Promise.all([attempt(api.tasks().then((page) => newJob.showTasks(page.items))), attempt(alerts.refresh())]);
  }
  alerts.show(readiness, parties.view, budget.view);
  if (views.shown === "new" && moved) {
    newTask.open(budget.view?.delta);
    newTask.again();
    newJob.again();
  }
  await Promise.all([attempt(ledgerJobs.refresh()), attempt(ledgerEntries.refresh()), attempt(charts.refresh()), readQueries()]);
  if (failures.length > 0) throw failures.find((error) => error instanceof Problem && error.status === 401) ?? failures[0];
}

/** Read while somebody looks, and again once the ledger has moved. */
async function readQueries() {
  if (byId("queries").open && budget.view) await queryBudgets.open(null, budget.view.head_seq);
}

async function learnWhoIAm() {
  me = await api.whoami();
  setText(byId("who-words"), `${me.name} (${me.role})`);
  const isViewer = me.role === "viewer";
  byId("nav-tokens").hidden = me.role !== "admin";
  byId("new-viewer").hidden = !isViewer;
  byId("new-task").hidden = isViewer;
  byId("job-submit").disabled = isViewer;
  evidence.ofPeriod();
  if (me.role === "admin") await tokens.refresh();
  views.follow();
  if (views.rest) shown(views.shown, views.rest);
}

/** Checks that fail are alerts; that all hold is said at the end, for whoever asks. */
function showReadiness(view) {
  const place = byId("readiness");
  place.hidden = !view.ready;
  fill(place, JSON.stringify(view), () =>
    el(
      "details",
      { class: "ready" },
      el("summary", {}, icon("yes", "good"), view.checks.length > 1 ? ` Ready: all ${view.checks.length} checks hold` : " Ready"),
      el("ul", { class: "plain" }, view.checks.map((check) => el("li", {}, el("strong", {}, check.name), check.detail ? `: ${check.detail}` : ""))),
    ),
  );
}

const said = sessionStorage.getItem("labeler.said");
if (said && !api.hasToken) byId("sign-in-error").textContent = said;
sessionStorage.removeItem("labeler.said");
