"""A proven upper bound on epsilon for rounds with random participation that nobody sees.

Each round every record (instance level) or every agent (agent level) takes part with probability q, independently of
the others (Poisson sampling), and otherwise adds zero to the sum. Participation stays inside the secret shares: an
agent that is not sampled still sends a vector and its noise share. That hidden coin is worth privacy, and this module
says how much, for the integer noise that really runs.

`labeler.accounting.sampled` has the proof that equally many one-dimensional rounds dominate T such rounds, for real
numbers and for integers on a grid. It also has the certified profile that is read here: P, Q of T rounds in either
order. Exact shares are within e^(+-Tc) of them, c = m (tau + 2 kappa) for m coordinates a round (there, and
`labeler.accounting.integer`). If P, Q satisfy (e0, d0), then exact shares satisfy (e0 + 2Tc, e^(Tc) d0).

**The sampler.** Every one of the T m h unknown shares is within total variation t of exact. Replacing the real
transcript by the ideal one costs r = T m h t in total variation on either side, so delta grows by at most (1 +
e^epsilon) r. A millionth of delta is set aside for r; a bound that needs more is reported as infinite. Epsilon is
enlarged by one part in a million.

A task is charged `labeler.accounting.sampled.IntegerSampled` instead, whose mu^2 adds up with everything else that a
ledger holds; the bound here is about these rounds alone.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp

from labeler.accounting.events import IntegerSum
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.accounting.integer import SAMPLER_TOTAL_VARIATION, smoothing_error, sum_of_shares_error
from labeler.accounting.sampled import LEAST_DELTA, sampled_epsilon

_ROUND_UP = 1e-6
_SET_ASIDE = 1e-6
_ORDERS = (*range(2, 64), *range(64, 513, 8))


def noise_multiplier(event: IntegerSum) -> float:
    """Return the standard deviation of the noise over the distance a sampled contributor makes; rounded down."""
    return (1 - 1e-12) / math.sqrt(event.mu_squared)


def epsilon_bound(
    event: IntegerSum,
    probability: float,
    rounds: int,
    delta: float,
    *,
    total_variation: float = SAMPLER_TOTAL_VARIATION,
) -> float:
    """Return an epsilon such that T openings of one sum, each over a fresh hidden sample, are (epsilon, delta)-DP.

    For adding or removing a record of one agent (instance level), or for one agent whose vectors all become zero while
    its noise stays (agent level).

    Args:
        event: one round, for a record or agent that was sampled; its level says which of the two is sampled.
        probability: q, in (0, 1]. Fixed-size samples, shuffled batches and published samples are other mechanisms, and
            are not covered.
        rounds: T, at least 1, fixed beforehand.
        delta: in (0, 1).
        total_variation: bound on the distance of one sampled share from the exact discrete Gaussian.

    Returns:
        The bound, rounded up; infinity where nothing can be proved.
    """
    shares_error = sum_of_shares_error(event.share_sigma_grid, event.noise_contributors)
    error = rounds * event.coordinates * (shares_error + smoothing_error())
    unknown = event.coordinates * event.noise_contributors
    drift = rounds * unknown * total_variation
    left = delta * (1 - _SET_ASIDE) * math.exp(-error) if error < 700 else 0.0
    if left < LEAST_DELTA:
        return math.inf
    epsilon = sampled_epsilon(1 / noise_multiplier(event), Fraction(probability), rounds, left) + 2 * error
    spent = (1 + math.exp(epsilon)) * drift if epsilon < 600 else math.inf
    return (1 + _ROUND_UP) * epsilon if spent <= _SET_ASIDE * delta else math.inf


def noise_multiplier_of(epsilon: float, delta: float, *, sampling_probability: float, rounds: int) -> float:
    """Return the noise multiplier that a budget asks for, for continuous noise; slightly too large rather than too
    small.

    A starting point for choosing a sigma: `epsilon_bound` says what the integer mechanism then costs.
    """

    def excess(log_multiplier: float) -> float:
        rate = Fraction(sampling_probability)
        return sampled_epsilon(math.exp(-log_multiplier), rate, rounds, delta * (1 - _SET_ASIDE)) - epsilon

    # The central limit theorem of Dong, Roth, Su 2022, mu = q sqrt(T (exp(1/z^2) - 1)), is a first guess.
    mu = mu_of_epsilon(epsilon, delta)
    low = high = -0.5 * math.log(math.log1p((mu / sampling_probability) ** 2 / rounds))
    while excess(high) > 0:
        high += 0.05
    while excess(low) < 0 and low > high - 1:
        low -= 0.05
    found = low if excess(low) < 0 else float(brentq(excess, low, high, xtol=1e-4))
    return math.exp(found) * (1 + 3e-4)


def renyi_epsilon(noise_multiplier: float, delta: float, *, sampling_probability: float, rounds: int) -> float:
    """Return min over whole orders of T rdp(alpha) + log(1/delta)/(alpha - 1): "as in the paper", never charged.

    rdp(alpha) = log(sum over k of binom(alpha, k) (1-q)^(alpha-k) q^k exp(k(k-1)/(2 z^2))) / (alpha - 1), with z the
    noise multiplier.

    References:
        Mironov, Talwar, Zhang 2019, section 3.3; conversion of Mironov 2017, Proposition 3.
    """
    best = math.inf
    for order in _ORDERS:
        total = rounds * _renyi(order, sampling_probability, noise_multiplier)
        best = min(best, total - math.log(delta) / (order - 1))
    return best


def _renyi(order: int, probability: float, noise_multiplier: float) -> float:
    if probability == 1:
        return order / (2 * noise_multiplier * noise_multiplier)
    k = np.arange(order + 1)
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = log_binomial + k * math.log(probability) + (order - k) * math.log1p(-probability)
    return float(logsumexp(terms + k * (k - 1) / (2 * noise_multiplier**2))) / (order - 1)
