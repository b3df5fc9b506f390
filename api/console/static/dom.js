// Building the page from words that come from strangers: every value becomes text or an attribute, never markup.

const FORBIDDEN = new Set(["style", "innerHTML", "outerHTML", "srcdoc"]);

/** One element. `on` + event adds a listener; null, false and undefined attributes and children are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (FORBIDDEN.has(name)) throw new Error(`the attribute ${name} is not set from data`);
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.replace(/^on/, ""), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Writes only where something changed, so that a reader's selection and a screen reader's place stay. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Replaces the content only when `signature` differs from the last one. Says whether it did. */
const signatures = new WeakMap();
export function fill(parent, signature, make) {
  if (signatures.get(parent) === signature) return false;
  signatures.set(parent, signature);
  parent.replaceChildren(...[make()].flat(Infinity).filter(Boolean));
  return true;
}

/** Drops what `fill` remembers, after somebody else changed the content. */
export function forget(parent) {
  signatures.delete(parent);
}

/**
 * Keeps one node per item, in order, without touching nodes that stay, so that focus stays where it is.
 * `make(item)` returns {node, update(item)}.
 */
const lists = new WeakMap();
export function keyed(parent, items, keyOf, make) {
  const known = lists.get(parent) ?? new Map();
  const next = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    const row = known.get(key) ?? make(item);
    row.update(item);
    next.set(key, row);
    if (row.node === place) place = place.nextSibling;
    else parent.insertBefore(row.node, place);
  }
  for (const [key, row] of known) if (!next.has(key)) row.node.remove();
  lists.set(parent, next);
}

/** Says something to screen readers, once. */
let lastWords = "";
export function announce(words) {
  if (words === lastWords) return;
  lastWords = words;
  byId("announcer").textContent = words;
}

/** Waits until nothing was asked for `ms`, then does the last thing asked. */
export function debounced(ms, action) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), ms);
  };
}

/** Hands bytes to the reader as a file. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const SHAPES = {
  yes: "M5.5 10.5l3 3 6-6.5",
  no: "M6.5 6.5l7 7m0-7l-7 7",
  busy: "M10 5.5V10l3 2",
  stop: "M6 10h8",
  alarm: "M10 5v6m0 3.2v.1",
};

/** A small round mark; the words beside it say the same. */
export function icon(shape, kind) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", `icon ${kind}`);
  svg.setAttribute("aria-hidden", "true");
  const disc = document.createElementNS(svg.namespaceURI, kind === "bad" || kind === "low" ? "rect" : "circle");
  const size = kind === "bad" || kind === "low" ? { x: 1, y: 1, width: 18, height: 18, rx: 4 } : { cx: 10, cy: 10, r: 9.5 };
  for (const [name, value] of Object.entries(size)) disc.setAttribute(name, value);
  const line = document.createElementNS(svg.namespaceURI, "path");
  line.setAttribute("d", SHAPES[shape]);
  svg.append(disc, line);
  return svg;
}
