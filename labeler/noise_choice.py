"""Who should add a task's noise: the agents or the talliers, whichever costs less accuracy under the stated trust.

Noise that nobody can subtract has variance sigma^2 either way, and the price of the sums is the same. What is on top
differs: N agents of whom c may collude and d be missing add N / (N - c - d) of it in all (labeler.collusion), three
talliers of whom t may be dishonest 3 / (3 - t) (labeler.tallier_noise). Winners have a lower price where agents add
the noise, so what is compared is the noise at one price: mu^2 falls with the square of sigma, so that the charge times
the variance in the sum is the same for every sigma (for winners nearly so).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labeler.errors import InvalidTask
from labeler.planning import price
from labeler.tallier_noise import NoiseBy
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


def _choice(task: Task) -> NoiseChoice:
    variance = (task.total_sigma_votes / task.sigma_votes) ** 2
    charge = price(task).instance.charge_nano
    # Where nothing is bounded, the noise alone decides.
    return NoiseChoice(task, variance, task.total_sigma_votes**2 * (1 if charge is None else charge))
