// Reading the ledger in either direction over an interface that only goes forward from a sequence number.

import { PAGE } from "./api.js";

/** All entries with low < seq <= high that match, oldest first. */
async function between(api, low, high, { account, search, keep }, signal) {
  const found = [];
  let after = low;
  while (after < high) {
    const page = await api.ledger({ after, account, search, limit: Math.min(PAGE, Math.max(1, high - after)) }, signal);
    const inside = page.items.filter((entry) => entry.seq <= high);
    found.push(...inside.filter(keep));
    if (page.next === null || inside.length < page.items.length) break;
    after = Number(page.next); // a search may have looked through many entries and found none
  }
  return found;
}

/**
 * The newest `wanted` matching entries at or below `high`, newest first, and where to go on (0 = the beginning).
 * Looks through ever wider stretches of the past, so a rare match costs a few requests, not one per page.
 */
export async function newest(api, high, wanted, filter, signal) {
  let found = [];
  let top = high;
  let width = wanted;
  while (top > 0 && found.length < wanted) {
    const low = Math.max(0, top - width);
    found = found.concat((await between(api, low, top, filter, signal)).reverse());
    top = low;
    width *= 4;
  }
  if (found.length > wanted) {
    found = found.slice(0, wanted);
    top = found.at(-1).seq - 1;
  }
  return { entries: found, below: top };
}

/** The oldest `wanted` matching entries after `low`, and where to go on (null = that was the end). */
export async function oldest(api, low, wanted, { account, search, keep }, signal) {
  const found = [];
  let after = low;
  for (;;) {
    const page = await api.ledger({ after, account, search }, signal);
    for (const entry of page.items) {
      if (!keep(entry)) continue;
      found.push(entry);
      if (found.length === wanted) return { entries: found, above: entry.seq };
    }
    if (page.next === null) return { entries: found, above: null };
    after = Number(page.next);
  }
}
