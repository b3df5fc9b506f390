"""Epsilon by Renyi divergences: what the papers compute, and the best that is known by that way.

Gaussian noise on a composition of squared sensitivity D2^2 has Renyi divergence alpha * rho at every
order alpha > 1, rho = D2^2 / (2 sigma^2). Turning that curve into (epsilon, delta) loses: both
conversions here are valid upper bounds above the exact value of `labeler.accounting.gaussian`. They
are shown beside it so that a price can be compared with a paper, and never charged.
"""

from __future__ import annotations

import math

from labeler.accounting.events import GaussianSum
from labeler.errors import InvalidSetting


def papers_epsilon(event: GaussianSum, delta: float) -> float:
    """min over real alpha > 1 of alpha*rho + log(1/delta)/(alpha - 1): "as in the paper".

    The minimum is at alpha = 1 + sqrt(log(1/delta)/rho) and equals rho + 2 sqrt(rho log(1/delta)).

    References:
        Mironov 2017, Proposition 3; the form used by Zhu et al. 2021 for kNN-DPFL and AE-DPFL.
    """
    rho = _rho(event, delta)
    return rho + 2 * math.sqrt(-rho * math.log(delta))


def improved_epsilon(event: GaussianSum, delta: float) -> float:
    """min over real alpha > 1 of alpha*rho + log(1 - 1/alpha) - (log delta + log alpha)/(alpha - 1), at least 0.

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
    # Loaded where it is wanted: it takes longer than the rest of an agent's start.
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(bound, bounds=(start - 6, start + 3), method="bounded", options={"xatol": 1e-10})
    return max(0.0, float(found.fun))


def _rho(event: GaussianSum, delta: float) -> float:
    if not 0 < delta < 1:
        raise InvalidSetting(f"delta must be strictly between 0 and 1, found {delta}")
    return float(event.mu_squared / 2)
