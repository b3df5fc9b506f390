"""Tasks for a price: the noise, the queries or the neighbors that a target epsilon allows.

**Noise by agents or talliers** (`noise_choices`): the one that costs less accuracy under the stated trust. Noise that
nobody can subtract has variance sigma^2 either way, and the price of the sums is the same. The additional noise
differs. N agents of whom c may collude and d be missing add N / (N - c - d) of it in all (labeler.planning). Three
talliers of whom t may be dishonest add 3 / (3 - t) (labeler.noise). Winners have a lower price if agents add the noise,
so the noise is compared at one price. mu^2 falls with the square of sigma, so the charge times the variance in the sum
is the same for every sigma (for winners nearly so).

**Wanted tasks** (`WantedTask`): a task as people ask for it, in a task file or over REST, before the answering parties
have decided their part. There is one model for both: a new setting is a field of `labeler.task.Terms`. So is the choice
of questions (`QuestionChoice`), which several files and requests share. Participants, the backbone and the number of
queries come from the answering parties; `settled` adds them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from labeler.accounting.gaussian import mu_of_epsilon
from labeler.batching import round_sizes, total_charges
from labeler.budget import UNBOUNDED_NANO, epsilon_left, say_epsilon_left
from labeler.errors import InvalidSetting, InvalidTask, UnsafeGrid
from labeler.methods.sensitivity import largest_distance
from labeler.noise import TALLIERS, NoiseBy
from labeler.planning import NO_BOUND, PrivacyStatement, price, statement
from labeler.rounds.effects import MOST_SPECTRAL_GROUPS, AskedStrategy
from labeler.setting import MOST_LIFE_NANO
from labeler.settings import PlainNumbers, describe_validation
from labeler.task import (
    MOST_CLASSES,
    Classes,
    Level,
    NamedTerms,
    PositiveFinite,
    Printable,
    Queries,
    Sigma,
    StatedLevel,
    Task,
    Terms,
    parse_task,
)

MOST_QUERIES = 100_000_000


def solve_sigma(task: Task, epsilon: float, *, level: StatedLevel = "instance", queries: int | None = None) -> float:
    """Return the smallest sigma_votes, to six significant digits, whose price is at most epsilon.

    Args:
        task: the setting; its own sigma_votes is ignored, its grid_scale (if given) is kept.
        epsilon: the target, positive and finite.
        level: the guarantee that shall meet the target.
        queries: number of queries; all `max_queries` when absent.

    Raises:
        InvalidSetting: the target is malformed, or no sigma meets it.
        UnsafeGrid: the task gives a grid_scale too coarse for the sigma needed.
    """
    _check_target(epsilon)
    asked = task.max_queries if queries is None else queries
    distance = largest_distance(task, level, asked)
    if distance is None:
        raise InvalidSetting(
            f"no sigma_votes gives epsilon {epsilon:g} at {level} level: {NO_BOUND.format(caps=task.traits.caps)}"
        )
    if task.ballot_radius is not None:
        # The rounding error depends on the grid, which depends on the noise: use an estimate of the noise.
        nearly = distance / mu_of_epsilon(epsilon, task.delta)
        distance = largest_distance(_changed(task, sigma_votes=nearly), level, asked) or distance
    start = distance / mu_of_epsilon(epsilon, task.delta)
    exponent = math.floor(math.log10(start)) - 5

    def sigma(units: int) -> float:
        return float(f"{units}e{exponent}")

    def priced(units: int) -> float:
        if sigma(units) > 1e9 * start:
            raise InvalidSetting(f"no sigma_votes gives epsilon {epsilon:g} at {level} level with delta {task.delta:g}")
        return statement(_changed(task, sigma_votes=sigma(units)), level, asked).epsilon

    return sigma(_first_priced(priced, epsilon, max(1, math.floor(start / 10.0**exponent))))


def at_price(task: Task, epsilon: float, *, offset_share: float | None, level: StatedLevel = "instance") -> Task:
    """Return a task with the least noise for a price, and its sites' offset.

    Args:
        task: the setting; its own sigma_votes is ignored.
        epsilon, level: as for `solve_sigma`.
        offset_share: as asked for; where it is None, public facts choose it (`labeler.expectation.offset_for`).

    Raises:
        InvalidSetting, UnsafeGrid: as for `solve_sigma`.
    """
    from labeler.expectation import offset_for

    solved = _changed(task, sigma_votes=solve_sigma(task, epsilon, level=level))
    share = offset_for(solved) if offset_share is None else None
    if share is None:
        return solved
    shared = _changed(task, offset_share=share)
    return _changed(shared, sigma_votes=solve_sigma(shared, epsilon, level=level))


def solve_queries(task: Task, epsilon: float, *, level: StatedLevel = "instance") -> int:
    """Return the largest number of queries whose price is at most epsilon.

    Args:
        task: the setting; its own max_queries is ignored.
        epsilon: the target, positive and finite.
        level: the guarantee that shall meet the target.

    Raises:
        InvalidSetting: the target is malformed, or one query already costs more.
    """
    _check_target(epsilon)
    return _largest(lambda queries: statement(task, level, queries), MOST_QUERIES, task, epsilon, level, "queries")


def solve_k(task: Task, epsilon: float, *, level: StatedLevel = "agent", queries: int | None = None) -> int:
    """Return the largest number of neighbors k whose price is at most epsilon.

    Args:
        task: the setting; its own k is ignored.
        epsilon: the target, positive and finite.
        level: the guarantee that shall meet the target.
        queries: number of queries; all `max_queries` when absent.

    Raises:
        InvalidSetting: the target is malformed, k = 1 already costs more, or k does not change this price.
    """
    _check_target(epsilon)
    asked = task.max_queries if queries is None else queries
    most = task.traits.most_k(task, level, asked)
    return _largest(lambda k: statement(_changed(task, k=k), level, asked), most, task, epsilon, level, "k")


def epsilon_within(task: Task, queries: int, *, level: StatedLevel, left_nano: int) -> float | None:
    """Return an instance-level epsilon for which the same job takes no more than this at a level.

    Charges at all levels fall with the square of sigma, so all fall together. Each round is rounded up by less than a
    nano-unit. The price of winners and of sampled steps is no closed form: their charges fall nearly so, and are looked
    at again.

    Returns:
        The epsilon, rounded down to three digits; None where nothing fits, or where the votes are paid for life.
    """
    if task.lifetime_budget is not None or left_nano <= 0:
        return None
    if task.release == "winner" or task.sampled is not None:
        return _certified_within(task, queries, level, left_nano)
    sizes = round_sizes(task, queries)
    instance = total_charges(task, sizes).get("instance")
    there = statement(task, level, queries).charge_nano
    if instance is None or there is None:
        return None
    room = left_nano + 1 if level == "instance" else math.floor(Fraction(instance, there) * left_nano)
    return float(say_epsilon_left(epsilon_left(room - len(sizes), task.delta)).replace(",", "")) or None


@lru_cache(maxsize=256)
def _certified_within(task: Task, queries: int, level: StatedLevel, left_nano: int) -> float | None:
    """Return `epsilon_within` where prices are certified, from the noise that fits; it takes as long as a new price.

    Cached, because a program may submit what was refused again and again.
    """

    def charge(one: Task) -> int | None:
        if level == "person":
            return statement(one, level, queries).charge_nano
        return total_charges(one, round_sizes(one, queries)).get(level)

    there = charge(task)
    if there is None:
        return None
    sigma = task.sigma_votes * max(1.0, math.sqrt(there / left_nano))
    with suppress(InvalidSetting):  # no task may have so much noise
        for margin in _MARGINS:
            fitting = _changed(task, sigma_votes=sigma * margin)
            found = charge(fitting)
            if found is not None and found <= left_nano:
                epsilon = statement(fitting, "instance", queries).epsilon
                return float(say_epsilon_left(epsilon).replace(",", "")) or None
    return None


_MARGINS = (1.001, 1.02, 1.2)


def queries_that_fit(task: Task, queries: int, *, level: Level, left_nano: int) -> int:
    """Return how many of a job's queries the rest of a budget pays for; 0 if fewer queries would not help."""

    def charge(count: int) -> int:
        return total_charges(task, round_sizes(task, count)).get(level, UNBOUNDED_NANO)

    if task.traits.least_asked(task) > 1 or charge(1) > left_nano:
        return 0
    fits, too_many = 1, queries
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if charge(middle) <= left_nano else (fits, middle)
    return fits


def ways_to_fit(task: Task, queries: int, *, level: Level, asked_nano: int, left_nano: int) -> list[str]:
    """Return what a requester can change so that a refused job fits into the rest of a budget.

    Args:
        task: of the job.
        queries: of the job.
        level: at which the budget does not cover it.
        asked_nano: its charge there; 0 if it has none.
        left_nano: the rest.
    """
    if not asked_nano:
        return ["give the task `ballot_radius` or `max_agent_records`"] if level == "agent" else []
    ways = []
    epsilon = epsilon_within(task, queries, level=level, left_nano=left_nano)
    if epsilon is not None:
        ways.append(f"ask for epsilon {epsilon:g} or less")
    elif left_nano > 0 and task.lifetime_budget is None:
        ways.append("ask for a smaller epsilon")
    count = queries_that_fit(task, queries, level=level, left_nano=left_nano)
    if count:
        ways.append(f"ask at most {count} {'query' if count == 1 else 'queries'}")
    return ways


def _changed(task: Task, **changes: Any) -> Task:
    try:
        return task.model_copy(update=changes)
    except ValidationError as error:
        raise InvalidSetting(f"what would be needed is no task: {describe_validation(error, 'task')}") from None


def _check_target(epsilon: float) -> None:
    # A Python integer may be larger than any float.
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon <= sys.float_info.max:
        raise InvalidSetting(f"the target epsilon must be a positive finite number, found {repr(epsilon)[:40]}")


def _largest(
    of: Callable[[int], PrivacyStatement], most: int, task: Task, epsilon: float, level: StatedLevel, what: str
) -> int:
    """Return the largest value in 1..most whose price meets the target; the price grows with the value."""

    def too_much(value: int) -> bool:
        try:
            return of(value).epsilon > epsilon
        except UnsafeGrid:
            if value == 1:
                raise
            return True  # Sums of this many votes would exceed the range of the secret sharing on this grid.

    if too_much(1):
        least = of(1)
        raise InvalidSetting(
            f"already {what} = 1 costs epsilon {least.epsilon:.6g} at {level} level, more than the target {epsilon:g}: "
            f"raise sigma_votes ({task.sigma_votes:g}), delta ({task.delta:g}) or the target"
            + (f" ({least.reason})" if least.reason else "")
        )
    if not too_much(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if too_much(middle) else (middle, high)
    return low


def _first_priced(priced: Callable[[int], float], epsilon: float, start: int) -> int:
    """Return the least value, at least 1, whose price meets the target; the price falls as the value grows.

    It falls nearly as a power of the value, so the power through the last two prices leads there in a handful of steps.
    Otherwise the remaining range is halved.
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
        # Never further than four times: beyond its reach the sampler raises an error.
        wanted = math.ceil(math.exp(min(here[0] - here[1] / slope, here[0] + math.log(4))))
        at = max(low + 1, min(wanted, high - 1) if high else wanted)
    return high


@dataclass(frozen=True)
class NoiseChoice:
    """One way to add a task's noise.

    Attributes:
        task: with that choice.
        variance: of all noise in a sum of all agents, in units of sigma^2; nobody can subtract 1 of it.
        cost: that variance times the charge for one private image, votes^2: to compare choices of one task.
    """

    task: Task
    variance: float
    cost: float

    @property
    def by(self) -> NoiseBy:
        """Return "agents" or "talliers", whichever add it."""
        return self.task.noise_by

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for `labeler plan --json`."""
        return {
            "noise_by": self.by,
            "dishonest_talliers": self.task.dishonest_talliers,
            "variance": self.variance,
            "total_sigma_votes": self.task.total_sigma_votes,
        }


def noise_choices(fields: Mapping[str, Any], dishonest_talliers: int) -> tuple[NoiseChoice, ...]:
    """Return every way to add the noise of a task that its stated trust allows, the one with the best accuracy first.

    On a tie the agents come first: then talliers need to be trusted only for secrecy.

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
            task = parse_task({**fields, **choice})
            variance = (task.total_sigma_votes / task.sigma_votes) ** 2
            charge = price(task).instance.charge_nano
            # If nothing is bounded, the noise alone decides.
            found.append(NoiseChoice(task, variance, task.total_sigma_votes**2 * (1 if charge is None else charge)))
        except InvalidTask as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return tuple(sorted(found, key=lambda one: one.cost))


def hint(task: Task) -> str:
    """Return a sentence if the other way would leave less noise at the same price; else "".

    It assumes two honest talliers, unless the task says otherwise. It says nothing about winners, whose price depends
    on the party that adds the noise: `noise_choices` compares those.
    """
    if task.release == "winner" or not task.agents_add_shares or task.talliers != TALLIERS:
        return ""
    now, then = task.agents / task.noise_contributors, TALLIERS / (TALLIERS - 1)
    if now <= then:
        return ""
    return (
        "Added by the three talliers (dishonest_talliers = 1), of whom two must then be honest, the noise in a sum "
        f"would be {math.sqrt(then):.3g} times sigma and not {math.sqrt(now):.3g} times, at the same epsilon."
    )


ClassName = Annotated[Printable, Field(max_length=200)]


class LifeRequest(PlainNumbers):
    """Votes for life: what an image may ever spend, and how near a query has to be for it to vote."""

    model_config = Terms.model_config

    least_similarity: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    """An image votes only at questions whose cosine with it is at least this, and pays only for those."""
    budget_nano: Annotated[int, Field(ge=1, le=MOST_LIFE_NANO)] | None = None
    """Nano-units of mu^2; all that the federation has set aside, when neither this nor `epsilon` is given."""
    epsilon: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """The same as what all votes of an image may ever cost, at the task's delta; in place of `budget_nano`."""
    asked_classes: Annotated[tuple[ClassName, ...], Field(min_length=1, max_length=MOST_CLASSES)] | None = None
    """Only images of these classes vote, and pay for it; of all, when absent."""

    @model_validator(mode="after")
    def _said_once(self) -> LifeRequest:
        if self.epsilon is not None and self.budget_nano is not None:
            raise ValueError("give budget_nano or epsilon, not both: both say what an image may ever spend")
        return self


class QuestionChoice(PlainNumbers):
    """The choice of public images to ask about; choosing costs no privacy."""

    model_config = Terms.model_config

    strategy: AskedStrategy = "all"
    """Which images: every one, random ones, or one question per cluster of them: clustered, or spectral along the graph
    of nearest neighbors."""
    count: Queries | None = None
    """How many questions; required except for all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Public seed of the choice of questions."""

    @model_validator(mode="after")
    def _count_is_given(self) -> Self:
        if self.strategy != "all" and self.count is None:
            raise ValueError(f"strategy {self.strategy!r} needs count, how many questions to ask")
        if self.strategy == "spectral" and self.count is not None and self.count > MOST_SPECTRAL_GROUPS:
            raise ValueError(
                f"strategy 'spectral' makes at most {MOST_SPECTRAL_GROUPS} groups, found count {self.count}; strategy "
                "'clustered' makes more"
            )
        return self


class WantedTask(NamedTerms):
    """A task as people ask for it, in a task file or over REST."""

    classes: Classes | None = None
    """Public class names in label order; those of the answering parties when absent."""
    sigma_votes: Sigma | None = None
    """The noise that nobody can subtract, in votes; or give epsilon instead."""
    epsilon: PositiveFinite | None = None
    """The wanted price per private image; the least noise for it is computed."""
    lifetime_budget: LifeRequest | None = None
    """Votes for life (reverse-knn); only in a service, whose agents remember."""

    @model_validator(mode="after")
    def _noise_or_price(self) -> WantedTask:
        if (self.sigma_votes is None) == (self.epsilon is None):
            raise ValueError("give exactly one of sigma_votes (the noise) and epsilon (the price to solve it for)")
        if self.lifetime_budget is not None and self.epsilon is not None:
            raise ValueError(
                "give sigma_votes with lifetime_budget, not epsilon: whatever the noise, all votes for life together "
                "cost one price; the noise decides how many votes an image has"
            )
        return self

    def settled(self, decided: Mapping[str, Any], *, agents: int) -> Task:
        """Return the task with the fields that others decide, and sigma solved for a given price.

        Whether each site finds its own offset, public facts decide where a price is given and nobody says.

        Args:
            decided: fields of the task that are not asked for, or that replace those.
            agents: number of participants.

        Raises:
            InvalidTask: a field is out of bounds, no noise reaches the price, or a round does not fit into a message.
            UnsafeGrid: see Task.scale.
        """
        # Imported only here, since a client loads this model without the arithmetic of prices.
        from labeler.batching import check_round_fits
        from labeler.planning import resolve_colluding_agents

        fields = self.model_dump(exclude={"epsilon"}, exclude_none=True) | {
            **decided,
            "agents": agents,
            "colluding_agents": resolve_colluding_agents(
                self.colluding_agents,
                agents=agents,
                max_dropouts=self.max_dropouts,
                method=self.method,
                dishonest_talliers=self.dishonest_talliers,
            ),
        }
        task = parse_task({"sigma_votes": 1.0} | fields)
        check_round_fits(task, task.max_queries)
        if self.epsilon is None:
            return task
        return at_price(task, self.epsilon, offset_share=self.offset_share)
