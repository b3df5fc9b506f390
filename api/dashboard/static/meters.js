// The bar of one account: spent solid, reserved hatched, what a job would take in outline, the rest empty.

import { el, setText } from "./dom.js";
import { epsilon, percent } from "./words.js";

const LOW = 0.1;

/** A bar whose parts are fractions of the cap; `words` is what a screen reader says instead. */
export function meter() {
  const posted = el("i", { class: "posted" });
  const reserved = el("i", { class: "reserved" });
  const asked = el("i", { class: "asked" });
  const node = el("div", { class: "meter", role: "img" }, posted, reserved, asked);
  return {
    node,
    update(parts, words) {
      const shares = [
        [posted, parts.posted ?? 0],
        [reserved, parts.reserved ?? 0],
        [asked, parts.asked ?? 0],
      ];
      let room = 1;
      for (const [part, fraction] of shares) {
        const shown = Math.max(0, Math.min(fraction, room));
        room -= shown;
        // A sliver stays visible: something spent must not look like nothing.
        part.style.width = shown > 0 ? `max(3px, ${(shown * 100).toFixed(3)}%)` : "0";
      }
      if (node.getAttribute("aria-label") !== words) node.setAttribute("aria-label", words);
    },
  };
}

/** A bar for how much of something is done. */
export function progress(label) {
  const done = el("i", { class: "done" });
  const node = el("div", { class: "meter", role: "progressbar", "aria-label": label, "aria-valuemin": "0" }, done);
  return {
    node,
    update(value, most) {
      node.setAttribute("aria-valuemax", String(most));
      node.setAttribute("aria-valuenow", String(value));
      done.style.width = `${most > 0 ? Math.min(100, (100 * value) / most) : 0}%`;
    },
  };
}

/** How an account stands: a word for its look, and what to say about it ("" where the numbers say it all). */
export function standing(balance) {
  if (balance.cap_nano === null) return { kind: "open", words: "not limited: charges are recorded, none is refused" };
  if (balance.cap_nano === 0) return { kind: "empty", words: "nothing may be spent: every job is refused" };
  if (balance.left_nano <= 0) return { kind: "empty", words: "empty: every further job is refused" };
  if (balance.left_fraction < LOW) return { kind: "low", words: "nearly empty" };
  return { kind: "fine", words: "" };
}

export function shares(balance) {
  if (!balance.cap_nano) return { posted: balance.cap_nano === 0 ? 1 : 0 };
  return { posted: balance.posted_nano / balance.cap_nano, reserved: balance.reserved_nano / balance.cap_nano };
}

/** "epsilon 0.812 of 2.00" */
export function spentWords(balance) {
  const spent = `epsilon ${epsilon(balance.spent_epsilon)}`;
  return balance.cap_nano === null ? spent : `${spent} of ${epsilon(balance.cap_epsilon)}`;
}

export function leftWords(balance) {
  return balance.cap_nano === null ? "not limited" : `${percent(balance.left_fraction ?? 0)} left`;
}

/** Everything about one account at one level, in one sentence. */
export function inWords(balance) {
  const reserved = balance.reserved_nano > 0 ? ", part of it reserved for jobs that run now" : "";
  const note = standing(balance).words;
  return `${spentWords(balance)} spent${reserved}; ${leftWords(balance)}${note && balance.cap_nano !== null ? `; ${note}` : ""}`;
}

/** The bar with its numbers, for tables. */
export function compactMeter() {
  const bar = meter();
  const spent = el("span", { class: "spent" });
  const left = el("span", { class: "left" });
  const node = el("div", { class: "compact" }, bar.node, el("p", { class: "numbers" }, spent, left));
  return {
    node,
    update(balance) {
      const look = standing(balance);
      node.className = `compact ${look.kind}`;
      bar.node.hidden = balance.cap_nano === null;
      bar.update(shares(balance), inWords(balance));
      setText(spent, spentWords(balance));
      setText(left, look.kind === "low" || look.kind === "empty" ? `${leftWords(balance)}, ${look.words.split(":")[0]}` : leftWords(balance));
    },
  };
}
