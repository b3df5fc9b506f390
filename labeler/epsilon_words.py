"""An epsilon as people read it: a bound is rounded up, so that what is printed still holds."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal

_HUGE = 1_000_000


def say_epsilon(epsilon: float | None, *, digits: int = 3) -> str:
    """An epsilon as an upper bound: rounded up to so many significant digits, never below its value."""
    return _say(epsilon, digits, ROUND_CEILING)


def say_estimate(epsilon: float | None, *, digits: int = 5) -> str:
    """An epsilon that nobody relies on, rounded to nearest, for comparison with printed tables."""
    return _say(epsilon, digits, ROUND_HALF_EVEN)


def _say(epsilon: float | None, digits: int, rounding: str) -> str:
    if epsilon is None:
        return "none"
    if epsilon > _HUGE:
        return "over a million"
    exact = Decimal(repr(float(epsilon)))
    if not exact:
        return "0"
    places = max(0, digits - 1 - exact.adjusted())
    if exact.adjusted() < -6:
        return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), rounding=rounding):.1e}"
    text = f"{exact.quantize(Decimal(1).scaleb(-places), rounding=rounding):,f}"
    return text.rstrip("0").rstrip(".") if places > digits else text
