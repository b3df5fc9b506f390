// The bar of one account: spent solid, reserved hatched, what a job would take in outline, the rest empty.

import { el, setText } from "./dom.js";
import { percentWords, sharesOf } from "./shares.js";
import { delta, epsilon, worth } from "./words.js";

const LOW = 0.1;

/** A bar whose parts are percent of the cap; `words` is what a screen reader says instead. */
export function meter() {
  const posted = el("i", { class: "posted" });
  const reserved = el("i", { class: "reserved" });
  const asked = el("i", { class: "asked" });
  const node = el("div", { class: "meter", role: "img" }, posted, reserved, asked);
  return {
    node,
    update(shares, words) {
      let room = 100;
      for (const [part, percent] of [[posted, shares.spent ?? 0], [reserved, shares.reserved ?? 0], [asked, shares.asked ?? 0]]) {
        const shown = Math.max(0, Math.min(percent, room));
        room -= shown;
        // A sliver stays visible: something spent must not look like nothing.
        part.style.width = `max(3px, ${shown.toFixed(3)}%)`;
        part.hidden = shown === 0; // nor nothing like something: a border has a width of its own
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
  if (balance.spent_epsilon === null && balance.cap_nano === null) return { kind: "open", words: "No limit is set here, so jobs without a bound at this level are answered. The operator chose it: coordinator.toml." };
  if (balance.spent_epsilon === null) return { kind: "unbound", words: "No bound: something was charged that has no finite epsilon, so nothing limits what could be learnt." };
  if (balance.cap_nano === null) return { kind: "open", words: "No limit is set: charges are recorded, and none is refused." };
  if (balance.cap_nano === 0) return { kind: "empty", words: "Nothing may be spent: every job is refused." };
  if (balance.left_nano <= 0) return { kind: "empty", words: "Empty: every further job is refused." };
  if (balance.life_nano > 0 && balance.left_fraction < LOW) return { kind: "fine", words: "" };
  if (balance.left_fraction < LOW) return { kind: "low", words: "Nearly empty." };
  return { kind: "fine", words: "" };
}

/** "spent 7.6 % + reserved 0.0 % + left 92.4 % = 100 %"; "" where there is no limit to have shares of. */
export function sumWords(balance) {
  const shares = sharesOf(balance);
  if (!shares) return "";
  return `spent ${percentWords(shares.spent)} + reserved ${percentWords(shares.reserved)} + left ${percentWords(shares.left)} = 100 %`;
}

/** What the account means: the bound now, and the bound once everything is spent. */
export function boundWords(balance) {
  if (balance.spent_epsilon === null) return "";
  const most = balance.cap_nano === null ? "no limit is set on how far it may grow" : `at most ${worth(balance.cap_epsilon)} once all of it is spent`;
  const life = balance.life_nano > 0 ? ` Of it ${worth(balance.life_epsilon)} is set aside for votes for life: all such jobs that were ever asked and will be, together, so they are answered on and on.` : "";
  return `Epsilon ${balance.words}; ${most} (delta ${delta(balance.delta)}).${life}`;
}

/** Everything about one account at one level, in one sentence. */
export function inWords(balance) {
  return [sumWords(balance), boundWords(balance), standing(balance).words].filter(Boolean).join("; ");
}

/** The bar with its numbers, for tables. */
export function compactMeter() {
  const bar = meter();
  const sum = el("span", { class: "spent" });
  const bound = el("span", { class: "left" });
  const node = el("div", { class: "compact" }, bar.node, el("p", { class: "numbers" }, sum, bound));
  return {
    node,
    update(balance) {
      const look = standing(balance);
      const shares = sharesOf(balance);
      node.className = `compact ${look.kind}`;
      bar.node.hidden = shares === null;
      if (shares) bar.update(shares, inWords(balance));
      const parts = shares ? `${percentWords(shares.spent)} spent${shares.reserved > 0 ? `, ${percentWords(shares.reserved)} reserved` : ""}, ${percentWords(shares.left)} left` : "no limit is set";
      setText(sum, parts);
      setText(bound, balance.spent_epsilon === null ? "no bound is stated" : `epsilon ${balance.words}`);
    },
  };
}
