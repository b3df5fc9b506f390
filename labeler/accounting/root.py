"""The zero of a function between two points of opposite sign, by Brent's method, without a library to load.

`scipy.optimize.brentq` takes the same steps and returns the same number, bit for bit (a test compares them); loading
it takes a quarter of a second of a core, which every `labeler plan` and every start of an agent would wait for. No
guarantee rests on how exact a zero is: whoever looks for one then steps to the safe side of it
(`labeler.accounting.gaussian`).

References:
    Brent 1973, Algorithms for Minimization without Derivatives, chapter 4.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

MOST_STEPS = 500


def crossing(function: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-15) -> float:
    """Where a continuous function crosses zero between two points.

    A step is the secant through the last two points, or the inverse quadratic through three, as long as it at least
    halves the step before the last; the bisection of the bracket otherwise.

    Args:
        function: of one number.
        low, high: at which the function has opposite signs.
        tolerance: of the result, absolute plus relative to it.

    Raises:
        ArithmeticError: the signs are equal, or there is no end after 500 steps; what calls this makes neither happen.
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
            # Where values differ too little to divide by, no line is drawn through them.
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
    """The step from `now` to the zero of the secant, or of the inverse quadratic where there are three points."""
    if before == opposite:
        return -at_now * (now - before) / (at_now - at_before)
    slope = (at_before - at_now) / (before - now)
    slope_opposite = (at_opposite - at_now) / (opposite - now)
    reach = at_opposite * slope_opposite - at_before * slope
    return -at_now * reach / (slope_opposite * slope * (at_opposite - at_before))
