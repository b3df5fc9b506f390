// The folder of images: how far it is embedded, what has changed in it since, and the button that embeds it.

import { el, fill } from "./dom.js";
import { many } from "./words.js";

export function images(parent, found, decide) {
  fill(parent, JSON.stringify(found), () => (found ? card(found, decide) : []));
}

function card(found, decide) {
  const waits = found.state !== "embedding" && (changes(found).length > 0 || found.state === "interrupted" || !found.is_embedded);
  return el(
    "div",
    { class: waits && found.is_embedded ? "card folder changed" : "card folder" },
    el("div", { class: "words-of" },
      el("p", { class: "state" }, sentence(found)),
      waits && found.is_embedded ? el("p", { class: "small" }, "The agent answers from what was embedded, until you embed the folder again.") : null,
      el("p", { class: "small name" }, found.folder),
      found.state === "idle" ? null : bar(found),
      found.deleted ? el("p", { class: "small" }, `The records of ${many(found.deleted, "file", "files")} were deleted, and the files still lie there. Take them out of the folder, with their copies; then embed.`) : null,
      found.problem ? el("p", { class: "trouble", role: "alert" }, found.problem) : null,
    ),
    waits && !found.deleted ? el("button", { type: "button", class: "first", onclick: () => decide("/v1/images/embed", {}, "Embedding the folder") }, found.state === "interrupted" ? "Go on embedding" : "Embed now") : null,
  );
}

function changes(found) {
  return [
    found.is_embedded && found.new ? many(found.new, "file is new", "files are new") : "",
    found.changed ? many(found.changed, "file has changed", "files have changed") : "",
    found.removed ? many(found.removed, "file is gone", "files are gone") : "",
    found.deleted ? many(found.deleted, "record was deleted", "records were deleted") : "",
  ].filter(Boolean);
}

function sentence(found) {
  if (found.state === "embedding") return found.is_embedded ? "Embedding what has changed" : "Embedding, before the first answer";
  const what = changes(found);
  if (found.state === "interrupted") return "The embedding was interrupted; it goes on where it stopped";
  if (!found.is_embedded) return `${many(found.files, "file", "files")}, not embedded yet. The agent embeds them when it starts`;
  if (what.length) return `Changed since it was embedded: ${what.join(", ")}`;
  return found.files ? `All of ${many(found.files, "file", "files")} are embedded` : "The agent answers from what was embedded";
}

function bar(found) {
  const share = found.files ? Math.min(1, found.done / found.files) : 0;
  return [
    el("progress", { class: "share", max: "1000", value: String(Math.round(1000 * share)), "aria-label": "Files of the folder that are done" }),
    el("p", { class: "small" }, `${found.done.toLocaleString("en")} of ${many(found.files, "file", "files")}`),
  ];
}
