// Tables that stay tables for a screen reader when a narrow screen shows their rows as cards.

import { el } from "./dom.js";

/**
 * An empty table with a caption and column heads; rows go into `body`.
 * Roles are written out because browsers drop them once a stylesheet changes how rows are displayed.
 */
export function table(caption, columns, { cards = true, hideCaption = false } = {}) {
  const body = el("tbody", { role: "rowgroup" });
  const heads = columns.map((column) =>
    el("th", { scope: "col", role: "columnheader", class: column.num ? "num" : null }, column.name),
  );
  const words = el("caption", { class: hideCaption ? "visually-hidden" : null }, caption);
  const node = el(
    "div",
    { class: `card scroll${cards ? " as-cards" : ""}`, role: "region", "aria-label": caption, tabindex: "0" },
    el(
      "table",
      { role: "table" },
      words,
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads)),
      body,
    ),
  );
  return { node, body, caption: words };
}

/** The first cell of a row, which names it. */
export function head(...children) {
  return el("th", { scope: "row", role: "rowheader" }, ...children);
}

/** A cell; `label` is its column's name, shown on narrow screens. */
export function cell(label, kind, ...children) {
  return el("td", { role: "cell", "data-label": label, class: kind || null }, el("div", {}, ...children));
}

export function row(...cells) {
  return el("tr", { role: "row" }, ...cells);
}

/** Nothing to show yet: why, and what to do next, with the command. */
export function empty(words, command = "", after = "") {
  return el(
    "div",
    { class: "card empty" },
    el("p", {}, words),
    command ? el("pre", { tabindex: "0" }, el("code", {}, command)) : null,
    after ? el("p", { class: "small" }, after) : null,
  );
}
