"""A proven upper bound on epsilon for the integer noise that really runs.

The formulas of `labeler.accounting.gaussian` are about real numbers. The service runs an `IntegerSum`: counts on a grid
of S units per vote, plus shares drawn by a sampler of finite precision. This module connects the two, and a price
reports the number it returns.

Q is the law of everything released on one input and P that of its neighbor. m is the number of coordinates released,
h the number of shares the adversary does not know, s the parameter of a share in grid units, and v = h s^2. D is the
largest change of one coordinate in grid units. Laws of the real sampler carry a hat. "A is within e^(+-c) of B" means
every probability is, both ways.

**Step 1, sums of shares.** With exact shares, the sum of h of them is within e^(+-tau) of the discrete Gaussian
N_Z(0, v). Here tau = 10 * sum_{j=1}^{h-1} exp(-2 pi^2 s^2 j/(j+1)), which is at most 10 (h-1) exp(-pi^2 s^2)
(Kairouz, Liu, Steinke 2021, Proposition 14, for s >= 1/2). Honest shares beyond h are independent of the input:
post-processing.

**Step 2, from integers to real numbers** (Peikert 2010 in one dimension). Let e = 3 be a variance with v >= 2e. Draw y
from N(a, v - e) with an integer a. Then draw x from the discrete Gaussian on Z centered at y:
P[x | y] = g(x - y) / sum_z g(z - y) with g(t) = exp(-t^2/(2e)). By Poisson summation the denominator is
sqrt(2 pi e) (1 + theta(y)) with |theta| <= kappa = 2 sum_{j>=1} exp(-2 pi^2 e j^2). The convolution of two normal
densities is the normal density of variance v. So P[x] is that density at x - a times an average of 1/(1 + theta). The
density is N_Z(a, v) times 1 + kappa_v, with kappa_v the same sum for v, at most kappa/4. Hence x is within
e^(+-2 kappa) of N_Z(a, v). The map from y to x commutes with integer shifts. So integer sums plus N_Z(0, v) are, within
e^(+-2 kappa) per coordinate, a post-processing of the same sums plus N(0, v - e). That is a mu-GDP mechanism with
mu^2 = D2^2 S^2 / (v - e), exactly. `IntegerSum.charge_nano` is this mu^2 rounded up; the bound is computed from the
rounded value, so a ledger and a price agree.

Let c = m (tau + 2 kappa). If mu-GDP implies (e0, d0), both steps together give (e0 + 2c, e^c d0) for exact shares.
Indeed P(E) <= e^c P'(E) <= e^c (e^e0 Q'(E) + d0) <= e^(e0 + 2c) Q(E) + e^c d0. Ratios multiply along a transcript, so
queries may be chosen after seeing earlier answers.

**Step 3, the sampler.** Each of the M = m h unknown shares is within total variation t of exact. Two
bounds hold; the smaller one is returned.

*Plain.* P^(E) <= P(E) + M t and Q(E) <= Q^(E) + M t, so delta grows by (1 + e^epsilon) M t. Best for
ordinary epsilon; useless when e^epsilon reaches 1/(M t).

*Bulk.* Let B be the event that all unknown shares lie in [-w, w]. There a share's probability is at least
p(w) = exp(-w^2/(2 s^2)) / (1 + s sqrt(2 pi)), and the sampler's differs from it by at most t. So with r = t / p(w) < 1
the sampler's is at least (1 - r) times it, and Q restricted to B is at most (1 - r)^-M Q^. Given the sums, draw the
shares from their conditional law under Q. Applied to P, this gives a joint law P~ of shares and sums with the sums of
P. As a post-processing it satisfies the same (epsilon, delta). So P(E) <= e^epsilon Q(E, B) + delta + P~(not B). In P~,
let z be a share of a coordinate that changes by d, and l = d / (h s^2). By step 1,
P~[z = a] <= e^(2 tau) p(a) exp(l a - l^2 s^2 / 2). The other h - 1 shares integrate to at most exp(l^2 s^2 / 2) each,
because discrete Gaussians are subgaussian (Canonne, Kamath, Steinke 2020, Corollary 17). By Chernoff,
P~(not B) <= 2 M e^(2 tau) exp(-(w - D/h)^2 / (2 s^2)) for w >= D/h. So epsilon grows by -M log(1 - r) and delta by M t
plus this tail. If D/h is many s, as when an agent casts far more votes than its noise is wide, no w works. Then the
sampler's finite reach really can reveal the agent, and the bound is infinite.

**Winners** (`labeler.accounting.winner`) are read from the sums. Their Gaussian is that module's, with a mass of at
most SPILL mu^2 outside it, which is subtracted from delta. c is counted twice and with the tau of 2 h shares, since the
outcome of two classes is read from a difference of twice as many. Only the plain bound of step 3 holds for them: the
bulk's draws shares from their law given the sums.

**Sampled sums** (`labeler.accounting.sampled`) also have such a mass outside their Gaussian, and only the plain bound.

**Step 4, rounding.** Epsilon is enlarged by one part in a million, which is more than every
floating-point error on the way (below 1e-10, measured against 50 digits).

**Epsilon by Renyi divergences**, as the papers compute it, and the best known bound of that kind. Gaussian noise on a
composition of squared sensitivity D2^2 has Renyi divergence alpha * rho at every order alpha > 1, with
rho = D2^2 / (2 sigma^2). Turning that curve into (epsilon, delta) loses: both conversions here are valid upper bounds
above the exact value of `labeler.accounting.gaussian`. They are only shown for comparison with papers, never charged.
"""

from __future__ import annotations

import math

from labeler.accounting.events import NANO, SMOOTHING_VARIANCE, SPILL, GaussianSum, IntegerSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.errors import InvalidSetting

SAMPLER_TOTAL_VARIATION = 2.0**-100
"""Bound on a sample's distance from the exact discrete Gaussian; `labeler.noise` promises less for every scale."""

_ROUND_UP = 1e-6
# Parts of delta that may be set aside for the sampler. Every choice gives a valid bound.
_SPLITS = (1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 0.1)


def sum_of_shares_error(share_sigma_grid: float, noise_contributors: int) -> float:
    """Return tau of step 1: the distance of a sum of h shares from one discrete Gaussian, per coordinate and pointwise.

    Args:
        share_sigma_grid: s, at least 1/2, grid units.
        noise_contributors: h, at least 1.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    if not 0.5 <= share_sigma_grid < math.inf or not 1 <= noise_contributors <= 10**100:
        raise InvalidSetting("a share has a parameter of at least 1/2 grid units, and at least one of them is unknown")
    reach = math.pi * share_sigma_grid
    return 10.0 * (noise_contributors - 1) * math.exp(-reach * reach)


def smoothing_error() -> float:
    """Return 2 kappa of step 2, per coordinate."""
    first = math.exp(-2 * math.pi**2 * SMOOTHING_VARIANCE)
    # The terms of the sum fall faster than a geometric series of ratio `first`.
    return 4 * first / (1 - first)


def epsilon_bound(event: IntegerSum, delta: float, *, total_variation: float = SAMPLER_TOTAL_VARIATION) -> float:
    """Return an epsilon such that the integer mechanism is (epsilon, delta)-DP at the event's level.

    Holds under adaptive composition of the event's queries, for adversaries who know every share but h.

    Args:
        event: the composition.
        delta: in (0, 1).
        total_variation: bound on the distance of one sampled share from the exact discrete Gaussian.

    Returns:
        The bound, rounded up; infinity if nothing can be proved.

    Raises:
        InvalidSetting: delta or total_variation is outside its range.
    """
    if not 0 < delta < 1:
        raise InvalidSetting(f"delta must be strictly between 0 and 1, found {delta}")
    if not 0 <= total_variation < 1:
        raise InvalidSetting(f"total_variation must be at least 0 and below 1, found {total_variation}")
    drift = event.coordinates * event.noise_contributors * total_variation
    best = math.inf
    for split in _SPLITS:
        plain = _plain(event, delta, split, drift)
        if plain < math.inf and split <= 1e-6:
            best = plain
            break  # No other split can improve it by more than a millionth.
        best = min(best, plain)
        if event.opens_sums and not event.only_plain:
            best = min(best, _bulk(event, delta, split, drift, total_variation))
    return (1 + _ROUND_UP) * best


def _plain(event: IntegerSum, delta: float, split: float, drift: float) -> float:
    epsilon = _exact_shares(event, delta * (1 - split))
    # Beyond 600 the exponential overflows, long after this bound has stopped being useful.
    return epsilon if epsilon < 600 and (1 + math.exp(epsilon)) * drift <= split * delta else math.inf


def _bulk(event: IntegerSum, delta: float, split: float, drift: float, total_variation: float) -> float:
    sigma = event.share_sigma_grid
    shares = event.coordinates * event.noise_contributors
    tau = sum_of_shares_error(sigma, event.noise_contributors)
    shift = event.largest_change * event.grid_scale / event.noise_contributors
    tail = split * delta
    if tail == 0:
        return math.inf  # a delta so small that no part of it is a float
    # The w, in units of s, beyond which the tail has this mass.
    width = shift / sigma + math.sqrt(2 * (math.log(2 * shares / tail) + 2 * tau))
    log_ratio = math.log(max(total_variation, 5e-324)) + width * width / 2 + math.log1p(sigma * math.sqrt(2 * math.pi))
    left = delta * (1 - split) - drift
    if log_ratio > -1e-9 or left <= 0:
        return math.inf
    return _exact_shares(event, left) - shares * math.log1p(-math.exp(log_ratio))


def _exact_shares(event: IntegerSum, delta: float) -> float:
    """Return the bound of steps 1 and 2, for a perfect sampler."""
    times, shares = (1, event.noise_contributors) if event.opens_sums else (2, 2 * event.noise_contributors)
    error = times * event.coordinates * (sum_of_shares_error(event.share_sigma_grid, shares) + smoothing_error())
    mu_squared = event.charge_nano / NANO
    left = delta * math.exp(-error) if error < 700 else 0.0
    if event.spills:
        left -= SPILL * mu_squared
    if left <= 0:
        return math.inf
    return epsilon_of_delta(left, math.sqrt(mu_squared)) + 2 * error


def papers_epsilon(event: GaussianSum, delta: float) -> float:
    """Return min over real alpha > 1 of alpha*rho + log(1/delta)/(alpha - 1): "as in the paper".

    The minimum is at alpha = 1 + sqrt(log(1/delta)/rho) and equals rho + 2 sqrt(rho log(1/delta)).

    References:
        Mironov 2017, Proposition 3; the form used by Zhu et al. 2021 for kNN-DPFL and AE-DPFL.
    """
    rho = _rho(event, delta)
    return rho + 2 * math.sqrt(-rho * math.log(delta))


def improved_epsilon(event: GaussianSum, delta: float) -> float:
    """Return min over real alpha > 1 of alpha*rho + log(1 - 1/alpha) - (log delta + log alpha)/(alpha - 1), at least 0.

    Every alpha gives a valid bound, so a search that stops early is loose but never wrong.

    References:
        Canonne, Kamath, Steinke 2020, Proposition 12.
    """
    rho = _rho(event, delta)

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)
        alpha = 1 + excess
        return alpha * rho + math.log(excess / alpha) - (math.log(delta) + math.log(alpha)) / excess

    start = math.log(-math.log(delta) / rho) / 2
    # Imported only here: it takes longer than the rest of an agent's start.
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(bound, bounds=(start - 6, start + 3), method="bounded", options={"xatol": 1e-10})
    return max(0.0, float(found.fun))


def _rho(event: GaussianSum, delta: float) -> float:
    if not 0 < delta < 1:
        raise InvalidSetting(f"delta must be strictly between 0 and 1, found {delta}")
    return float(event.mu_squared / 2)
