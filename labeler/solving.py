"""Which setting has a given cost: the noise, the queries or the neighbours that a target epsilon allows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting, UnsafeGrid
from labeler.methods.sensitivity import largest_distance, squared_sensitivity
from labeler.planning import NO_BOUND, PrivacyStatement, statement
from labeler.refused_fields import describe_validation
from labeler.task import StatedLevel, Task

MOST_QUERIES = 100_000_000


MOST_NEIGHBORS = 1_000_000


def solve_sigma(task: Task, epsilon: float, *, level: StatedLevel = "instance", queries: int | None = None) -> float:
    """The smallest sigma_votes, to six significant digits, whose price is at most epsilon.

    Args:
        task: the setting; its own sigma_votes is ignored, its grid_scale (if given) is kept.
        epsilon: the target, positive and finite.
        level: which guarantee shall meet the target.
        queries: how many queries are asked; all `max_queries` when absent.

    Raises:
        InvalidSetting: the target is malformed, or no sigma meets it.
        UnsafeGrid: the task gives a grid_scale too coarse for the sigma needed.
    """
    _check_target(epsilon)
    asked = task.max_queries if queries is None else queries
    if task.traits.counts:
        squared = squared_sensitivity(task, level, asked)
        if squared is None:
            raise InvalidSetting(f"no sigma_votes gives epsilon {epsilon:g} at {level} level: {NO_BOUND}")
        if task.ballot_radius is not None:
            # What rounding adds hangs on the grid, which hangs on the noise: that of the noise nearly wanted.
            nearly = math.sqrt(squared) / mu_of_epsilon(epsilon, task.delta)
            squared = squared_sensitivity(_changed(task, sigma_votes=nearly), level, asked) or squared
        distance = math.sqrt(squared)
    else:
        distance = largest_distance(task, level)
    start = distance / mu_of_epsilon(epsilon, task.delta)
    exponent = math.floor(math.log10(start)) - 5

    def sigma(units: int) -> float:
        return float(f"{units}e{exponent}")

    def priced(units: int) -> float:
        if sigma(units) > 1e9 * start:
            raise InvalidSetting(f"no sigma_votes gives epsilon {epsilon:g} at {level} level with delta {task.delta:g}")
        return statement(_changed(task, sigma_votes=sigma(units)), level, asked).epsilon

    return sigma(_first_priced(priced, epsilon, max(1, math.floor(start / 10.0**exponent))))


def solve_queries(task: Task, epsilon: float, *, level: StatedLevel = "instance") -> int:
    """The largest number of queries whose price is at most epsilon.

    Args:
        task: the setting; its own max_queries is ignored.
        epsilon: the target, positive and finite.
        level: which guarantee shall meet the target.

    Raises:
        InvalidSetting: the target is malformed, or one query already costs more.
    """
    _check_target(epsilon)
    return _largest(lambda queries: statement(task, level, queries), MOST_QUERIES, task, epsilon, level, "queries")


def solve_k(task: Task, epsilon: float, *, level: StatedLevel = "agent", queries: int | None = None) -> int:
    """The largest number of neighbours k whose price is at most epsilon.

    Args:
        task: the setting; its own k is ignored.
        epsilon: the target, positive and finite.
        level: which guarantee shall meet the target.
        queries: how many queries are asked; all `max_queries` when absent.

    Raises:
        InvalidSetting: the target is malformed, k = 1 already costs more, or k does not change this price.
    """
    _check_target(epsilon)
    asked = task.max_queries if queries is None else queries
    if not task.traits.has_k:
        raise InvalidSetting(f"method {task.method} has no k, because no neighbours vote")
    if not task.traits.records_choose and level == "instance":
        raise InvalidSetting(
            f"k does not change the instance-level price of {task.method}: one record moves one vote per query "
            "whatever k is. Solve for sigma or queries, or choose the agent level"
        )

    def of(k: int) -> PrivacyStatement:
        return statement(_changed(task, k=k), level, asked)

    most = min(MOST_NEIGHBORS, asked) if task.traits.records_choose else MOST_NEIGHBORS
    return _largest(of, most, task, epsilon, level, "k")


def _changed(task: Task, **changes: Any) -> Task:
    try:
        return task.model_copy(update=changes)
    except ValidationError as error:
        raise InvalidSetting(f"what would be needed is no task: {describe_validation(error, 'task')}") from None


def _check_target(epsilon: float) -> None:
    # A whole number of Python may be larger than any float is.
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon <= sys.float_info.max:
        raise InvalidSetting(f"the target epsilon must be a positive finite number, found {str(epsilon)[:40]}")


def _largest(
    of: Callable[[int], PrivacyStatement], most: int, task: Task, epsilon: float, level: StatedLevel, what: str
) -> int:
    """The largest value in 1..most whose price meets the target; the price grows with the value."""

    def too_much(value: int) -> bool:
        try:
            return of(value).epsilon > epsilon
        except UnsafeGrid:
            if value == 1:
                raise
            return True  # Sums of so many votes would leave the range of the secret sharing on this grid.

    if too_much(1):
        least = of(1)
        raise InvalidSetting(
            f"already {what} = 1 costs epsilon {least.epsilon:.6g} at {level} level, more than the target {epsilon:g}: "
            f"raise sigma_votes ({task.sigma_votes:g}), delta ({task.delta:g}) or the target"
            + (f" ({least.reason})" if least.reason else "")
        )
    return most if not too_much(most) else _first(too_much, 1, most) - 1


def _first_priced(priced: Callable[[int], float], epsilon: float, start: int) -> int:
    """Least value, at least 1, whose price meets the target; the price falls as the value grows.

    It falls nearly as a power of the value, so the power through the last two prices leads there in a handful of steps.
    Where it does not, what is left is halved.
    """
    low, high, at, slope, steps = 0, 0, start, -1.0, 0
    last: tuple[float, float] | None = None
    while high - low != 1:
        price, steps = priced(at), steps + 1
        low, high = (low, at) if price <= epsilon else (at, high)
        middle = (low + high) // 2 if high else 2 * low
        if not 0 < price < math.inf or steps > 8:
            at = middle
            continue
        here = (math.log(at), math.log(price / epsilon))
        if last is not None and last[0] != here[0] and last[1] != here[1]:
            slope = min((here[1] - last[1]) / (here[0] - last[0]), -0.1)
        last = here
        # Never further than four times: beyond what a sampler reaches it says so itself.
        wanted = math.ceil(math.exp(min(here[0] - here[1] / slope, here[0] + math.log(4))))
        at = max(low + 1, min(wanted, high - 1) if high else wanted)
    return high


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Least value in (low, high] at which a monotone property holds, given that it holds at high and not at low."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
