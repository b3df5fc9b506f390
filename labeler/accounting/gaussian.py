"""The exact privacy of Gaussian noise: delta as a function of epsilon and mu, and its two inverses.

A mechanism is mu-GDP when telling two neighbouring inputs apart is no easier than telling N(0, 1)
from N(mu, 1). That is worth (epsilon, delta) exactly when

    delta >= Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2)

(Balle, Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 2.13). As written the formula overflows
for large epsilon and cancels to nothing for small mu. With x = epsilon/mu - mu/2, y = x + mu, phi the
normal density and R(t) = Phi(-t)/phi(t) Mills' ratio, exp(epsilon) = phi(x)/phi(y), hence

    delta = phi(x) * (R(x) - R(y)) = phi(x) * integral of (1 - t R(t)) dt from x to y,

because R'(t) = t R(t) - 1. `labeler.accounting.tail` has the difference without cancellation. Many deltas at once
take scipy's functions, and for mu below 1/2 a Gauss-Legendre rule for the integral. Measured against 50 digits: the
relative error of delta is below 1e-11 for mu in [1e-6, 1e4] wherever delta is above 1e-300. Callers that promise an
upper bound add a margin of 1e-6.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

from labeler.accounting.root import crossing
from labeler.accounting.tail import fallen, mills, upper
from labeler.errors import InvalidSetting

if TYPE_CHECKING:
    # A price of sums needs neither library, and loading them would take longer than all else of `labeler plan`.
    import numpy as np
    from numpy.typing import NDArray

LEAST, MOST = 1e-100, 1e100
"""The range of mu, beside 0, and the largest epsilon: their squares and quotients stay ordinary numbers. No task comes
near either end."""

LEAST_DELTA_OF_MU = 1e-200
"""The smallest delta for which a mu is looked for: of a smaller one it may be no ordinary number."""

_SMALL_MU = 0.5
_SMALLEST = 5e-324
_REFINE = 2e-15


def delta_of_epsilon(epsilon: float, mu: float) -> float:
    """The least delta for which mu-GDP implies (epsilon, delta).

    Args:
        epsilon: from 0 to MOST.
        mu: from LEAST to MOST, or 0: a mechanism that ignores its input.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    _check_epsilon(epsilon)
    _check_mu(mu)
    return _delta(_place(epsilon, mu), mu) if mu > 0 else 0.0


def deltas_of_epsilons(epsilons: NDArray[np.float64], mu: float) -> NDArray[np.float64]:
    """`delta_of_epsilon` of many at once, to a relative error below 1e-10 where delta is above 1e-200.

    Args:
        epsilons: at least 0, finite.
        mu: from LEAST to MOST.

    Raises:
        InvalidSetting: mu is outside its range.
    """
    _check_mu(mu)
    if mu == 0:
        raise InvalidSetting("of many epsilons at once mu must be above 0")
    import numpy as np
    from scipy.special import erfcx, ndtr

    def ratios(t: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2)))

    x = np.minimum(epsilons / mu - mu / 2, 1e150)  # its square is a number, and the density long 0
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if mu < _SMALL_MU:
        nodes, weights = _rule()
        t = x[:, None] + mu / 2 * (1 + nodes)
        return np.asarray(density * (mu / 2 * ((1 - t * ratios(t)) @ weights)))
    left = np.minimum(x, 0.0)
    lower = np.where(x < 0, ndtr(-left), density * ratios(np.maximum(x, 0.0)))
    return np.asarray(lower - density * ratios(x + mu))


def epsilon_of_delta(delta: float, mu: float) -> float:
    """The least epsilon for which mu-GDP implies (epsilon, delta); 0 where delta alone suffices.

    Args:
        delta: in (0, 1).
        mu: from LEAST to MOST, or 0.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    _check_delta(delta)
    _check_mu(mu)
    if mu == 0 or _delta(-mu / 2, mu) <= delta:
        return 0.0
    target = math.log(delta)
    # delta(x) <= Phi(-x) <= exp(-x^2 / 2) / 2: the upper end of the bracket always satisfies delta.
    x = crossing(lambda at: math.log(max(_delta(at, mu), _SMALLEST)) - target, -mu / 2, math.sqrt(-2 * target))
    while _delta(x, mu) > delta:
        x += _REFINE * max(1.0, abs(x))
    return max(0.0, mu * (x + mu / 2))


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP implies (epsilon, delta): what a budget stated in (epsilon, delta) buys.

    Args:
        epsilon: from 0 to MOST.
        delta: from LEAST_DELTA_OF_MU, below 1.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    _check_epsilon(epsilon)
    _check_delta(delta)
    if delta < LEAST_DELTA_OF_MU:
        raise InvalidSetting(f"delta must be at least {LEAST_DELTA_OF_MU:g} where a mu is looked for, found {delta}")
    target = math.log(delta)

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        return math.log(max(_delta(epsilon / mu - mu / 2, mu), _SMALLEST)) - target

    low, high = -1.0, 1.0
    while excess(low) > 0:
        low *= 2
    while excess(high) < 0:
        high *= 2
    mu = math.exp(crossing(excess, low, high))
    while _delta(_place(epsilon, mu), mu) > delta:
        mu *= 1 - _REFINE
    return mu


@cache
def _rule() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    import numpy as np

    return np.polynomial.legendre.leggauss(16)


def _place(epsilon: float, mu: float) -> float:
    """epsilon / mu - mu / 2, rounded once at the end: terms of size mu cancel, and a tail moves by x times the rest."""
    return float(Fraction(epsilon) / Fraction(mu) - Fraction(mu) / 2)


def _delta(x: float, mu: float) -> float:
    """phi(x) * (R(x) - R(x + mu)) for x >= -mu/2."""
    density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if mu >= _SMALL_MU and x < 0:
        # R(x) overflows far to the left of zero, where Phi(-x) is what it stands for.
        return upper(x) - density * mills(x + mu)
    return density * fallen(x, mu)


def _check_epsilon(epsilon: float) -> None:
    if not 0 <= epsilon <= MOST:
        raise InvalidSetting(f"epsilon must be a finite number of at least 0, and at most {MOST:g}, found {epsilon}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InvalidSetting(f"delta must be strictly between 0 and 1, found {delta}")


def _check_mu(mu: float) -> None:
    if not (mu == 0 or LEAST <= mu <= MOST):
        raise InvalidSetting(f"mu must be a finite number of at least 0, from {LEAST:g} to {MOST:g} or 0, found {mu}")
