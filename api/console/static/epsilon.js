// What an amount of spent budget is worth in epsilon, for charts and previews only: the service decides in whole numbers.
//
// Charges add up as mu^2 (nano-units). mu-GDP is (epsilon, delta)-DP exactly when
//   delta >= Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2)      (Balle, Wang 2018, Theorem 8),
// written here as phi(x) (R(x) - R(y)) with x = epsilon/mu - mu/2, y = x + mu and R the Mills ratio Phi(-t)/phi(t).

export const NANO = 1e9;
const ROOT_TWO_PI = Math.sqrt(2 * Math.PI);
const SERIES_BELOW = 2.5;
const FRACTION_TERMS = 160;

const density = (t) => Math.exp(-(t * t) / 2) / ROOT_TWO_PI;

/** Phi(-t) / phi(t) for t >= 0: a series near 0, Laplace's continued fraction beyond. */
function mills(t) {
  if (t < SERIES_BELOW) {
    let term = t;
    let sum = t;
    for (let n = 3; term > 1e-17 * sum; n += 2) {
      term *= (t * t) / n;
      sum += term;
    }
    return 0.5 / density(t) - sum;
  }
  let tail = t;
  for (let n = FRACTION_TERMS; n >= 1; n -= 1) tail = t + n / tail;
  return 1 / tail;
}

/** Phi(-t). */
function upperTail(t) {
  return t >= 0 ? density(t) * mills(t) : 1 - density(t) * mills(-t);
}

/** The least delta at which mu-GDP gives this epsilon. */
export function deltaOf(epsilon, mu) {
  const x = epsilon / mu - mu / 2;
  const y = x + mu;
  if (x >= 0) return density(x) * (mills(x) - mills(y));
  // exp(epsilon) Phi(-y) = phi(x) R(y), which cannot overflow
  return upperTail(x) - density(x) * mills(y);
}

/** What a charge without a finite price is recorded as; see UNBOUNDED_NANO in api/coordinator/budgets.py. */
export const UNBOUNDED_NANO = 1e13;

/** The least epsilon that everything spent together is worth at `delta`: 0 where nothing is spent, null without bound. */
export function epsilonOf(spentNano, delta) {
  if (!(spentNano > 0)) return 0;
  if (spentNano >= UNBOUNDED_NANO) return null;
  const mu = Math.sqrt(spentNano / NANO);
  if (deltaOf(0, mu) <= delta) return 0;
  let low = 0;
  let high = 1;
  while (deltaOf(high, mu) > delta) {
    low = high;
    high *= 2;
  }
  for (let step = 0; step < 60; step += 1) {
    const middle = (low + high) / 2;
    if (deltaOf(middle, mu) > delta) low = middle;
    else high = middle;
  }
  return high;
}
