"""The exact privacy of Gaussian noise: delta as a function of epsilon and mu, and its two inverses.

A mechanism is mu-GDP if telling two neighboring inputs apart is no easier than telling N(0, 1)
from N(mu, 1). That is worth (epsilon, delta) exactly when

    delta >= Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2)

(Balle, Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 2.13). As written the formula overflows
for large epsilon and cancels to nothing for small mu. Let x = epsilon/mu - mu/2, y = x + mu, phi the
normal density and R(t) = Phi(-t)/phi(t) Mills' ratio. Then exp(epsilon) = phi(x)/phi(y). Hence

    delta = phi(x) * (R(x) - R(y)) = phi(x) * integral of (1 - t R(t)) dt from x to y,

because R'(t) = t R(t) - 1. `labeler.accounting.gaussian` computes the difference without cancellation. Many deltas at
once use scipy's functions, and for mu below 1/2 a Gauss-Legendre rule for the integral. Measured against 50 digits, the
relative error of delta is below 1e-11 for mu in [1e-6, 1e4] as long as delta is above 1e-300. Callers that promise an
upper bound add a margin of 1e-6.

**Zeros.** `crossing` finds the zero of a function between two points of opposite sign by Brent's method.
`scipy.optimize.brentq` takes the same steps and returns the same number, bit for bit (a test compares them). But
loading it takes a quarter of a second of a core, which would delay every `labeler plan` and every start of an agent. No
guarantee depends on the precision of a zero: the callers here then step to the safe side of it.

References:
    Brent 1973, Algorithms for Minimization without Derivatives, chapter 4.

**Mills' ratio** R(t) = Phi(-t) / phi(t), the normal law's upper tail over its density, and its decrease, with `math`
alone. Every price needs these. Loading `scipy.special` for them takes longer than everything else that `labeler plan`
does. R'(t) = t R(t) - 1 < 0.

**Below 4** the C library's erfc is exact to an ulp or two: R(t) = sqrt(pi/2) exp(t^2/2) erfc(t/sqrt(2)). The loss is
the rounding of exponent and argument, t^2/2 and t^2 ulps of the result: below 1e-14. And -R' = 1 - t R(t) loses another
factor of t^2: below 1e-13.

**From 4 on** Laplace's continued fraction R(t) = 1/(t + K_1), K_n = n/(t + K_{n+1}) is used, in which nothing cancels.
Its ends K_N = 0 and K_N = N/t enclose R, because each step reverses the order of two values (all terms are positive).
With N = `TERMS` they enclose R, and K_1, to a relative 1e-14 at t = 4 and closer beyond (a test computes both ends).
Derivatives come from the same terms: R' = -K_1 R, and if R^(n) = -K_n R^(n-1), then R^(n+1) = t R^(n) + n R^(n-1) =
R^(n) (t - n/K_n) = -K_{n+1} R^(n). So Taylor's series R(t) - R(t + d) = d |R'| - d^2/2! |R''| + ... alternates, its
terms fall by d K_n/n <= d/t <= 1/8, and the remainder after n of them is less than 8^-n of the first.

References:
    Laplace 1805, Traite de mecanique celeste, volume 4. Gautschi 1967, Computational aspects of three-term recurrence
    relations. SIAM Review 9. Nodes: Abramowitz, Stegun 1964, table 25.4.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Final

from labeler.errors import InvalidSetting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST, MOST = 1e-100, 1e100
"""Range of mu, besides 0, and the largest epsilon: their squares and quotients stay ordinary numbers. No task comes
near either end."""

LEAST_DELTA_OF_MU = 1e-200
"""Smallest delta for which a mu is searched: for a smaller one it may be no ordinary number."""

_SMALL_MU = 0.5
_SMALLEST = 5e-324
_REFINE = 2e-15


def delta_of_epsilon(epsilon: float, mu: float) -> float:
    """Return the least delta for which mu-GDP implies (epsilon, delta).

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
    """Return `delta_of_epsilon` of many at once, to a relative error below 1e-10 if delta is above 1e-200.

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
    """Return the least epsilon for which mu-GDP implies (epsilon, delta); 0 if delta alone suffices.

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
    """Return the largest mu for which mu-GDP implies (epsilon, delta): the mu of a budget in (epsilon, delta).

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
    """Return epsilon / mu - mu / 2, rounded once, since terms of size mu cancel and a tail multiplies errors by x."""
    return float(Fraction(epsilon) / Fraction(mu) - Fraction(mu) / 2)


def _delta(x: float, mu: float) -> float:
    """Return phi(x) * (R(x) - R(x + mu)) for x >= -mu/2."""
    density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if mu >= _SMALL_MU and x < 0:
        # R(x) overflows far to the left of zero; use Phi(-x), which it represents.
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


MOST_STEPS = 500


def crossing(function: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-15) -> float:
    """Return a zero of a continuous function between two points.

    A step is the secant through the last two points, or the inverse quadratic through three, if it at least halves
    the step before the last. Otherwise it bisects the bracket.

    Args:
        function: of one number.
        low, high: points at which the function has opposite signs.
        tolerance: of the result, absolute plus relative to it.

    Raises:
        ArithmeticError: the signs are equal, or 500 steps do not suffice; no caller here lets either happen.
    """
    before, now = low, high
    at_before, at_now = function(before), function(now)
    if at_before == 0:
        return before
    if at_now == 0:
        return now
    if math.copysign(1.0, at_before) == math.copysign(1.0, at_now):
        raise ArithmeticError(f"no change of sign between {low!r} and {high!r}")
    opposite, at_opposite = before, at_before
    step_before = step = now - before
    for _ in range(MOST_STEPS):
        if at_before != 0 and at_now != 0 and math.copysign(1.0, at_before) != math.copysign(1.0, at_now):
            opposite, at_opposite = before, at_before
            step_before = step = now - before
        if abs(at_opposite) < abs(at_now):
            before, now, opposite = now, opposite, now
            at_before, at_now, at_opposite = at_now, at_opposite, at_now
        delta = (tolerance + tolerance * abs(now)) / 2
        half = (opposite - now) / 2
        if at_now == 0 or abs(half) < delta:
            return now
        tried = math.inf
        if abs(step_before) > delta and abs(at_now) < abs(at_before):
            # If values differ too little to divide by, skip the interpolation.
            with contextlib.suppress(ZeroDivisionError):
                tried = _interpolated(before, now, opposite, at_before, at_now, at_opposite)
        if 2 * abs(tried) < min(abs(step_before), 3 * abs(half) - delta):
            step_before, step = step, tried
        else:
            step_before = step = half
        before, at_before = now, at_now
        now += step if abs(step) > delta else math.copysign(delta, half)
        at_now = function(now)
    raise ArithmeticError(f"no zero found in {MOST_STEPS} steps between {low!r} and {high!r}")


def _interpolated(
    before: float, now: float, opposite: float, at_before: float, at_now: float, at_opposite: float
) -> float:
    """Return the step from `now` to the zero of the secant, or of the inverse quadratic through three points."""
    if before == opposite:
        return -at_now * (now - before) / (at_now - at_before)
    slope = (at_before - at_now) / (before - now)
    slope_opposite = (at_opposite - at_now) / (opposite - now)
    reach = at_opposite * slope_opposite - at_before * slope
    return -at_now * reach / (slope_opposite * slope * (at_opposite - at_before))


TERMS: Final = 32
"""Number of terms of the continued fraction, at 4 and above."""

_FAR: Final = 4.0
_LONG: Final = 0.5
_OF_SERIES: Final = 17
_ROOT_OF_TWO: Final = math.sqrt(2)
_AT_ZERO: Final = math.sqrt(math.pi / 2)

_RULE: Final = (
    (0.1834346424956498, 0.3626837833783620),
    (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745),
    (0.9602898564975363, 0.1012285362903763),
)
"""Gauss-Legendre rule of 8 points on [-1, 1]: nodes of one sign, weights. On an interval of 1/2 its error is
below 1e-16 of -R', which has no singularity anywhere."""


def upper(t: float) -> float:
    """Return Phi(-t): the mass above t, without cancellation on either side."""
    return 0.5 * math.erfc(t / _ROOT_OF_TWO)


def mills(t: float) -> float:
    """Return R(t), to a relative error below 1e-14.

    Args:
        t: at least -1/4; finite or not.
    """
    return 1 / (t + _terms(t, 1)[0]) if t >= _FAR else _near(t)


def fallen(t: float, by: float) -> float:
    """Return R(t) - R(t + by), to a relative error below 1e-12 if t is at most 40.

    Args:
        t: at least -1/4; 0 where `by` is 1/2 or more.
        by: above 0.
    """
    if by >= _LONG:
        return mills(t) - mills(t + by)
    if t < _FAR:
        half = by / 2
        middle = t + half
        return half * math.fsum(
            weight * (1 - at * _near(at))
            for node, weight in _RULE
            for at in (middle - half * node, middle + half * node)
        )
    terms = _terms(t, _OF_SERIES)
    left = 0.0
    for n in range(_OF_SERIES, 0, -1):
        left = terms[n - 1] * by / n * (1 - left)
    return left / (t + terms[0])


def _near(t: float) -> float:
    return _AT_ZERO * math.exp(t * t / 2) * math.erfc(t / _ROOT_OF_TWO)


def _terms(t: float, most: int) -> list[float]:
    """Return K_1 to K_most; the last of them from `TERMS` further ones, so that all are equally exact."""
    term = 0.0
    for n in range(most + TERMS, most, -1):
        term = n / (t + term)
    found = []
    for n in range(most, 0, -1):
        term = n / (t + term)
        found.append(term)
    found.reverse()
    return found
