// Whether this agent answers, with the button that stops it or lets it go on.

import { el, fill, icon } from "./dom.js";
import { moment } from "./words.js";

export function answering(parent, site, decide) {
  const waits = Boolean(site.images && !site.images.is_embedded);
  fill(parent, JSON.stringify([site.stopped, site.coordinator_url, waits]), () => (site.stopped ? halted(site.stopped, decide) : open(site, waits, decide)));
}

function open(site, waits, decide) {
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
    el("div", {}, el("p", { class: "state" }, waits ? "Silent until the images are embedded" : [icon("yes", "good"), " Answering"]), el("p", { class: "small" }, `${waits ? "then " : ""}within the policy, to ${site.coordinator_url}`)),
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
