// Shares of a budget that add up on the page: what is charged adds up (squares of mu), epsilon does not.

const PLACES = 1;

/**
 * Parts of a whole as percentages that add up to exactly 100: no part that is there shows as 0, so what is left never
 * looks like all of it. What rounding moves is taken from or given to the largest part.
 *
 * Args: amounts, not negative; the last of them may be what is left. Returns one number of percent for each.
 */
export function percentages(amounts, places = PLACES) {
  const whole = amounts.reduce((sum, amount) => sum + amount, 0);
  if (!(whole > 0)) return amounts.map(() => 0);
  const units = 100 * 10 ** places;
  const exact = amounts.map((amount) => (amount / whole) * units);
  const shown = exact.map((value, place) => (amounts[place] > 0 ? Math.max(1, Math.floor(value)) : 0));
  const byRest = exact.map((value, place) => [value - Math.floor(value), place]).sort((a, b) => b[0] - a[0]);
  let missing = units - shown.reduce((sum, value) => sum + value, 0);
  for (const [, place] of byRest) {
    if (missing <= 0) break;
    if (exact[place] < 1) continue;
    shown[place] += 1;
    missing -= 1;
  }
  shown[exact.indexOf(Math.max(...exact))] += missing;
  return shown.map((value) => value / 10 ** places);
}

/** So many places that the smallest part that is there still has two digits, within reason: of many small jobs each shows. */
export function placesFor(amounts) {
  const whole = amounts.reduce((sum, amount) => sum + amount, 0);
  const least = Math.min(...amounts.filter((amount) => amount > 0)) / whole;
  return least >= 0.01 ? 1 : least >= 0.001 ? 2 : 3;
}

export const percentWords = (value, places = PLACES) => `${value.toFixed(places)} %`;

/** One account: {spent, reserved, left} in percent, adding up to 100; null where the account has no limit. */
export function sharesOf(balance) {
  if (balance.cap_nano === null) return null;
  if (balance.cap_nano === 0) return { spent: 100, reserved: 0, left: 0 };
  const left = Math.max(0, balance.cap_nano - balance.posted_nano - balance.reserved_nano);
  const [spent, reserved, rest] = percentages([balance.posted_nano, balance.reserved_nano, left]);
  return { spent, reserved, left: rest };
}

/** One account after a job: {spent, reserved, asked, left} in percent. */
export function sharesAfter(balance, asked) {
  const left = Math.max(0, balance.cap_nano - balance.posted_nano - balance.reserved_nano - asked);
  const [spent, reserved, job, rest] = percentages([balance.posted_nano, balance.reserved_nano, asked, left]);
  return { spent, reserved, asked: job, left: rest };
}
