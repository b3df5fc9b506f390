"""Who should add a task's noise: the agents or the talliers, whichever costs less accuracy under the stated trust.

Noise that nobody can subtract has variance sigma^2 either way, and the price of the sums is the same. What is on top
differs: N agents of whom c may collude and d be missing add N / (N - c - d) of it in all (labeler.collusion), three
talliers of whom t may be dishonest 3 / (3 - t) (labeler.tallier_noise). Winners have a lower price where agents add
the noise, so what is compared is the noise at one price: mu^2 falls with the square of sigma, so that the charge times
the variance in the sum is the same for every sigma (for winners nearly so).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labeler.errors import InvalidTask
from labeler.planning import price
from labeler.tallier_noise import TALLIERS, NoiseBy
from labeler.task import Task, parse_task


@dataclass(frozen=True)
class NoiseChoice:
    """One way to add a task's noise.

    Attributes:
        task: with that choice.
        variance: of all noise in a sum with everybody there, in units of sigma^2; what nobody can subtract is 1 of it.
        cost: that variance times the charge for one private image, votes^2: to compare choices of one task with.
    """

    task: Task
    variance: float
    cost: float

    @property
    def by(self) -> NoiseBy:
        """Who adds it."""
        return self.task.noise_by

    def to_json(self) -> dict[str, Any]:
        """For `labeler plan --json`."""
        return {
            "noise_by": self.by,
            "dishonest_talliers": self.task.dishonest_talliers,
            "variance": self.variance,
            "total_sigma_votes": self.task.total_sigma_votes,
        }


def noise_choices(fields: Mapping[str, Any], dishonest_talliers: int) -> tuple[NoiseChoice, ...]:
    """Every way to add the noise of a task that its stated trust allows, the one that costs least accuracy first.

    On a tie the agents come first: then nobody has to trust a tallier for more than secrecy.

    Args:
        fields: of the task, without `dishonest_talliers`.
        dishonest_talliers: how many of three talliers may be dishonest; 1 or 2.

    Raises:
        InvalidTask: no way is allowed, or a field is out of bounds.
        UnsafeGrid: see `Task.scale`.
    """
    found, problems = [], []
    for choice in ({}, {"dishonest_talliers": dishonest_talliers}):
        try:
            found.append(_choice(parse_task({**fields, **choice})))
        except InvalidTask as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return tuple(sorted(found, key=lambda one: one.cost))


def hint(task: Task) -> str:
    """Where the other way would leave less noise at the same price: a sentence that says so; else empty.

    Of talliers it counts on two honest ones, unless the task says otherwise. Nothing is said of winners, whose price
    moves with who adds the noise: `noise_choices` compares those.
    """
    if task.release == "winner" or task.traits.has_local_noise or task.talliers != TALLIERS or task.dishonest_talliers:
        return ""
    now, then = task.agents / task.noise_contributors, TALLIERS / (TALLIERS - 1)
    if now <= then:
        return ""
    return (
        "Added by the three talliers (dishonest_talliers = 1), of whom two must then be honest, the noise in a sum "
        f"would be {math.sqrt(then):.3g} times sigma and not {math.sqrt(now):.3g} times, at the same epsilon."
    )


def _choice(task: Task) -> NoiseChoice:
    variance = (task.total_sigma_votes / task.sigma_votes) ** 2
    charge = price(task).instance.charge_nano
    # Where nothing is bounded, the noise alone decides.
    return NoiseChoice(task, variance, task.total_sigma_votes**2 * (1 if charge is None else charge))
