// The desk: reads the site every few seconds, shows it, and sends what a person decides.

import { announce, byId, el, fill, keyed, save, setText } from "./dom.js";
import { ask, download, Refused } from "./link.js";
import { accounts, decisions, deletions, jobs, policy, refusals } from "./lists.js";
import { answering } from "./answering.js";
import { images } from "./images.js";
import { taskCard } from "./task.js";
import { many } from "./words.js";

const EVERY_MS = 4000;
let busy = 0;

/** Sends a decision, shows what is then, and says so. */
async function decide(path, body, words) {
  busy += 1;
  try {
    show(await ask(path, body));
    announce(words);
  } catch (error) {
    trouble([error.message]);
    announce(error.message);
  } finally {
    busy -= 1;
  }
}

function trouble(sentences) {
  fill(byId("problems"), JSON.stringify(sentences), () =>
    sentences.map((sentence) => el("div", { class: "note alarm", role: "alert" }, el("p", {}, sentence))),
  );
}

function headline(site) {
  if (site.stopped) return "Stopped: nothing new is answered";
  if (site.images && !site.images.is_embedded) return site.images.state === "embedding" ? "Embedding your images, then answering" : "Your images wait to be embedded";
  if (site.waiting.length) return `${many(site.waiting.length, "task waits", "tasks wait")} for you`;
  return "Answering, and nothing waits for you";
}

function show(site) {
  byId("shown").hidden = false;
  setText(byId("who"), site.agent_id);
  document.title = `${site.waiting.length ? `(${site.waiting.length}) ` : ""}Desk of ${site.agent_id}`;
  setText(byId("headline"), headline(site));
  trouble(site.problems);
  answering(byId("stopping"), site, decide);
  byId("images").hidden = !site.images;
  images(byId("folder"), site.images, decide);
  byId("waiting").hidden = false;
  const list = byId("waiting-list");
  if (site.waiting.length) {
    if (list.dataset.empty) list.replaceChildren();
    delete list.dataset.empty;
    keyed(list, site.waiting, (task) => task.task_id, (task) => taskCard(task, site.coordinator_url, decide));
  } else {
    keyed(list, [], String, String);
    if (!list.dataset.empty) list.replaceChildren(el("p", { class: "card empty" }, "No task waits for approval. What is asked next appears here by itself."));
    list.dataset.empty = "yes";
  }
  accounts(byId("budget"), site.budget, site.person);
  jobs(byId("jobs"), site.jobs);
  byId("csv").disabled = byId("json").disabled = !site.jobs.length;
  decisions(byId("decisions"), site.decided, decide);
  refusals(byId("refusals"), site.refused);
  deletions(byId("deletions"), site.deleted);
  policy(byId("policy-words"), site.policy);
}

async function look() {
  if (busy || document.hidden) return;
  try {
    const site = await ask("/v1/site");
    if (!busy) show(site);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      byId("shown").hidden = true;
      setText(byId("headline"), "This address is not complete");
    }
    trouble([error.message]);
  }
}

for (const kind of ["csv", "json"]) {
  byId(kind).addEventListener("click", async () => {
    try {
      save(await download(`/v1/rounds.${kind}`), `answered.${kind}`);
    } catch (error) {
      trouble([error.message]);
    }
  });
}
document.addEventListener("visibilitychange", look);
setInterval(look, EVERY_MS);
look();
