// Whether this agent answers, with the button that stops it or lets it go on.

import { el, fill, icon } from "./dom.js";
import { moment } from "./words.js";

export function answering(parent, site, decide) {
  fill(parent, JSON.stringify([site.stopped, site.coordinator_url]), () => (site.stopped ? halted(site.stopped, decide) : open(site, decide)));
}

function open(site, decide) {
  const why = el("input", { id: "stop-reason", maxlength: "300", autocomplete: "off" });
  const form = el(
    "form",
    { onsubmit: (event) => {
      event.preventDefault();
      decide("/v1/stop", { reason: why.value.trim() }, "Stopped: nothing new is answered");
    } },
    el("p", { class: "why" }, el("label", { for: "stop-reason" }, "Reason, told to whoever asks"), why),
    el("button", { type: "submit", class: "danger" }, "Stop answering now"),
  );
  return el(
    "div",
    { class: "card answering" },
    el("div", {}, el("p", { class: "state" }, icon("yes", "good"), " Answering"), el("p", { class: "small" }, `within the policy, to ${site.coordinator_url}`)),
    form,
  );
}

function halted(no, decide) {
  const since = moment(no.at);
  const words = [since ? `since ${since}` : "", no.reason ? `reason: ${no.reason}` : ""].filter(Boolean).join("; ");
  return el(
    "div",
    { class: "card answering halted" },
    el("div", {}, el("p", { class: "state" }, icon("no", "bad"), " Stopped"), el("p", { class: "small name" }, words), el("p", { class: "small" }, "What was charged before is still answered.")),
    el("button", { type: "button", class: "first", onclick: () => decide("/v1/resume", {}, "Answering again") }, "Answer again"),
  );
}
