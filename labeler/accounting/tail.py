"""The normal law's upper tail over its density, R(t) = Phi(-t) / phi(t), and by how much it falls, with `math` alone.

Every price needs these, and every command that says a price would wait for whichever library had them: loading
`scipy.special` takes longer than all else that `labeler plan` does. R is Mills' ratio; R'(t) = t R(t) - 1 < 0.

**Below 4** the C library's erfc is exact to an ulp or two: R(t) = sqrt(pi/2) exp(t^2/2) erfc(t/sqrt(2)). What is lost
is the rounding of exponent and argument, t^2/2 and t^2 ulps of the result: below 1e-14; and -R' = 1 - t R(t) loses a
factor of t^2 more: below 1e-13.

**From 4 on** Laplace's continued fraction R(t) = 1/(t + K_1), K_n = n/(t + K_{n+1}), in which nothing cancels. Its ends
K_N = 0 and K_N = N/t enclose R, because each step turns the order of two values round (all terms are positive); with
N = `TERMS` they enclose it, and K_1, to 1e-14 of themselves at t = 4 and closer beyond (a test computes both ends).
Derivatives come from the same terms: R' = -K_1 R, and if R^(n) = -K_n R^(n-1), then R^(n+1) = t R^(n) + n R^(n-1) =
R^(n) (t - n/K_n) = -K_{n+1} R^(n). So Taylor's series R(t) - R(t + d) = d |R'| - d^2/2! |R''| + ... alternates, its
terms fall by d K_n/n <= d/t <= 1/8, and what is left out after n of them is less than 8^-n of the first.

References:
    Laplace 1805, Traite de mecanique celeste, volume 4. Gautschi 1967, Computational aspects of three-term recurrence
    relations. SIAM Review 9. Nodes: Abramowitz, Stegun 1964, table 25.4.
"""

from __future__ import annotations

import math
from typing import Final

TERMS: Final = 32
"""Of the continued fraction, at 4 and above."""

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
"""Gauss and Legendre's rule of 8 points on [-1, 1]: nodes of one sign, weights. On an interval of 1/2 its error is
below 1e-16 of -R', which has no singularity anywhere."""


def upper(t: float) -> float:
    """Phi(-t): the mass above t, without cancellation on either side."""
    return 0.5 * math.erfc(t / _ROOT_OF_TWO)


def mills(t: float) -> float:
    """R(t), to a relative error below 1e-14.

    Args:
        t: at least -1/4; finite or not.
    """
    return 1 / (t + _terms(t, 1)[0]) if t >= _FAR else _near(t)


def fallen(t: float, by: float) -> float:
    """R(t) - R(t + by), to a relative error below 1e-12 where t is at most 40.

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
    """K_1 to K_most; the last of them from `TERMS` further ones, so that each is as exact as the first."""
    term = 0.0
    for n in range(most + TERMS, most, -1):
        term = n / (t + term)
    found = []
    for n in range(most, 0, -1):
        term = n / (t + term)
        found.append(term)
    found.reverse()
    return found
