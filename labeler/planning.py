"""The price of a setting before anything is paid, and whom it protects against.

**Adversaries**: how many participants may know their own noise, and what a number is worth if more do.

**Who knows what.** Every contributor adds an independent share of variance s^2 = sigma^2 / h to the sum, with
h = N - colluding_agents - max_dropouts (labeler.task), and a contributor knows its own share. A reader of the release
that takes part subtracts it, without colluding with anybody. So with c = `colluding_agents` a price holds against c
participants that read the release. One reader that takes part, *or* one colluder of a reader that does not, needs
c = 1. A reader that takes part and has a colluder needs c = 2.

**What is left.** Let m participants know their shares, and ask about a record of another agent. A release is a sum over
at least q = N - max_dropouts contributors, or nothing. If the record's owner is not among them, nothing of the record
is in it. If it is, its own share is unknown, and so are those of all contributors but the m. These are at least
max(1, q - m) shares of variance s^2, independent of the record and of what the m know. Replacing h by this number in
the event (labeler.accounting) therefore gives a certified price against m participants. For noise of real numbers mu
grows by sqrt(h / max(1, q - m)). For c = max_dropouts = 0 and m = 1 that is sqrt(N / (N - 1)).

**If the talliers add the noise** (labeler.noise) no participant knows any of it: the number is the same
against all participants together, and against as many talliers as the task says.

If each agent alone adds all the noise that its price needs (h = 1, or a method with a separate noise), the
number is the same against all other participants together.

**The price** of a task, before anybody pays. (`labeler.solving` finds the setting with a given cost.)

A price is a function of the task alone: it touches no private data and charges nothing. Per level (one image, one
person if the task has `records_per_person`, one agent) it states the certified epsilon of the integer mechanism that
runs (`labeler.accounting.integer`) and the ledger's charge. For comparison only, it adds the continuous exact value and
the papers' conversion. With `group_size` it also states the same for any g records of all agents together, which
no ledger is charged (Kirschte et al., corollary 9, with the exact event in place of their conversion).

The price depends on `sigma_votes` alone, not on the number of agents: sigma is the noise that is left when colluding
agents pool theirs and dropouts add none. Collusion and dropouts cost accuracy. If all agents contribute, the noise is
sigma * sqrt(N / h), which `Price.total_sigma_votes` shows, and `Price.noise_factors` shows the part of each. Shares
sized as in the papers (sigma^2 / N each) would cost privacy instead. With c agents colluding and d gone,
(N - c - d) / N of the variance is unknown, and `PrivacyStatement.paper_shares_epsilon` is the remaining guarantee.

`colluding_agents` (labeler.planning) decides against whom a price holds. `Price.holds_against` says it in words, and
`PrivacyStatement.participant_epsilon` is the epsilon of the same release against a participant that reads it.

For methods that are asked at once (labeler.methods) a price is for all queries in **one batch**; every further batch is
a further price.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from labeler.accounting.events import GaussianSum, IntegerSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.integer import epsilon_bound, papers_epsilon
from labeler.accounting.lifetime import vote_nano
from labeler.budget import say_epsilon
from labeler.errors import InvalidSetting
from labeler.methods import DEFAULT_METHOD, METHODS, MethodName
from labeler.methods.grid import squared_in_sigma_units
from labeler.methods.sensitivity import group_event, integer_event, summed_votes
from labeler.noise import NoiseBy, sampler_distance
from labeler.task import Level, StatedLevel, Task


def resolve_colluding_agents(
    given: int | None,
    *,
    agents: int,
    max_dropouts: int = 0,
    method: MethodName = DEFAULT_METHOD,
    dishonest_talliers: int | None = None,
) -> int:
    """Return the number of colluding agents of a new task: the user's number, else 1 if there are two agents or more.

    If the talliers add the noise, the default is all agents but the one that a number is about, since it costs nothing.

    For the places at which tasks are made. A stored task keeps its number.

    Args:
        given: the user's number; None for nothing. 0 is kept: the price then says against whom it does not hold.
        agents: N, number of participants.
        max_dropouts: how many of them may fail to answer.
        method: how they answer.
        dishonest_talliers: as in the task, if the talliers add the noise; None if agents do.

    Raises:
        InvalidTask: the default leaves no agent whose noise is unknown (two agents, one of which may be missing).
    """
    if given is not None:
        return given
    if dishonest_talliers is not None:
        return max(0, agents - 1)
    return METHODS[method].colluders_counted_on(agents, max_dropouts)


def holds_against(
    task: Task,
    participant_epsilon: float | None,
    histogram_epsilon: float | None = None,
    *,
    two_talliers_epsilon: float | None = None,
) -> str:
    """Say in plain words against whom a price holds.

    Args:
        task: the priced task.
        participant_epsilon: the instance-level price against one participant that reads the release; None if there
            is none.
        histogram_epsilon: the instance-level price of the sums that winners are read from, if winners cost less.
        two_talliers_epsilon: the instance-level price against two dishonest talliers, if the task counts on one at
            most and there is a bound.
    """
    if task.dishonest_talliers is not None:
        return _of_talliers_noise(task, task.dishonest_talliers, two_talliers_epsilon)
    return _readers(task, participant_epsilon) + (
        ""
        if histogram_epsilon is None
        else " It counts on talliers that keep to the computation and do not pool what they hold; those that do not "
        f"learn at most the noisy sums, and then epsilon is {say_epsilon(histogram_epsilon)} per private image."
    )


def _of_talliers_noise(task: Task, dishonest: int, two_talliers_epsilon: float | None) -> str:
    many = "one of the three talliers" if dishonest == 1 else "two of the three talliers"
    bare = task.traits.bare
    worse = "there is no bound" if two_talliers_epsilon is None else f"epsilon is {say_epsilon(two_talliers_epsilon)}"
    return (
        f"Holds against whoever reads the release, together with all other participants and {many}, who add the noise: "
        "agents add none. "
        + (f"Should two talliers pool what they know, {worse} per private image; " if dishonest == 1 else "")
        + f"{'should' if dishonest == 1 else 'Should'} all three, they read {bare}."
    )


def _readers(task: Task, participant_epsilon: float | None) -> str:
    if task.agents == 1:
        return "Holds against whoever reads the release; one agent takes part, and nobody else knows any of its noise."
    if task.noise_contributors == 1:
        return (
            "Holds against whoever reads the release, together with all other participants: each agent adds all the "
            "noise that the price counts on."
        )
    match task.colluding_agents:
        case 0:
            then = (
                "there is no bound" if participant_epsilon is None else f"epsilon is {say_epsilon(participant_epsilon)}"
            )
            return (
                "Holds against a reader who takes part in no way. A participant who reads the release subtracts its "
                f"own noise: then {then} per private image."
            )
        case 1:
            return "Holds against whoever reads the release and any one participant, who may be the reader."
        case many:
            return f"Holds against whoever reads the release and any {many:,} participants, who may be readers."


METHOD = "exact Gaussian DP, integer noise"
"""Method of a certified epsilon for a Gaussian's post-processing; printed with it."""

METHOD_FOR_LIFE = "fully adaptive Gaussian filter per record, integer noise"
"""Method for votes for life (`labeler.accounting.lifetime`): everything that is ever asked."""

METHOD_OF_SAMPLES = "certified pair of sums over secret samples, integer noise"
"""Method if the unit of privacy is sampled (`labeler.accounting.sampled`)."""

METHOD_OF_WINNERS = "certified recursion over winners, integer noise"
"""Method if winners have a separate price (`labeler.accounting.winner`)."""

NO_BOUND = "no finite guarantee: an agent may vote with any number of records; set {caps} in the task to get one"
NO_BOUND_FOR_LIFE = (
    "no finite guarantee: votes for life promise something about one image, however many of them an agent has"
)
_OUT_OF_REACH = (
    "no finite guarantee can be proved: one agent can move a number by more than the noise sampler's reach; "
    "raise sigma_votes, or lower the votes of one agent or the length of its model"
)
_GROUP_OUT_OF_REACH = (
    "no finite guarantee can be proved: so many records can move a number by more than the noise sampler's reach; "
    "raise sigma_votes, or lower group_size"
)


@dataclass(frozen=True)
class PrivacyStatement:
    """The guarantee of a task at one level, and its charge.

    Attributes:
        level: "instance" (one record of one agent added or removed), "person" (all records of one person at one agent)
            or "agent" (one agent's ballots zeroed).
        epsilon: certified for the integer mechanism, rounded up; infinity if nothing can be proved.
        continuous_epsilon: the exact value for real-valued noise of the same sigma; a comparison, not a claim.
        as_in_paper_epsilon: the papers' Renyi conversion for the same sigma; a comparison, not a claim.
        paper_shares_epsilon: the epsilon of noise shares sized as in the papers, of variance sigma^2 / N, with
            this many agents colluding and gone; a warning, not a claim. Exact, for real-valued noise.
        participant_epsilon: certified against one participant that reads the release and subtracts its own noise; equal
            to epsilon if the task counts on one colluding agent or more.
        squared_sensitivity: of the whole composition, votes^2; None if unbounded. A whole number of votes except for
            models, whose unit is the change by one record.
        mu: the Gaussian-DP parameter of continuous_epsilon.
        charge_nano: the ledger's charge, nano-units of mu^2 rounded up; None if unbounded. No ledger is charged
            for a person: there it only states mu^2 of the composition.
        reason: why epsilon is infinite, if it is.
        method: how epsilon is computed.
        histogram_epsilon: certified for the noisy sums that winners are read from. Talliers that deviate from the
            computation or pool what they hold may learn these. None if winners are charged no less.
    """

    level: StatedLevel
    epsilon: float
    continuous_epsilon: float
    as_in_paper_epsilon: float
    paper_shares_epsilon: float
    participant_epsilon: float
    squared_sensitivity: float | None
    mu: float
    charge_nano: int | None
    reason: str | None = None
    method: str = METHOD
    histogram_epsilon: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON, which has no infinity: an infinite number is null, and `reason` says why."""
        return {
            "epsilon": finite(self.epsilon),
            "participant_epsilon": finite(self.participant_epsilon),
            "continuous": finite(self.continuous_epsilon),
            "mu": finite(self.mu),
            "squared_sensitivity": self.squared_sensitivity,
            "charge_nano": self.charge_nano,
            "method": self.method,
            **({} if self.histogram_epsilon is None else {"histogram_epsilon": finite(self.histogram_epsilon)}),
            **({} if self.reason is None else {"reason": self.reason}),
        }


@dataclass(frozen=True)
class LifePrice:
    """The price of a vote for life to a record's own budget, whose use only the record's site sees.

    Attributes:
        budget_nano: B, the most that a record may ever spend, nano-units of mu^2.
        vote_nano: the cost of one vote under the task's noise.
        votes: number of such votes in its life.
        most_votes: number that it casts in one job of the task, if it is near enough: all of them or none.
        least_similarity: how near a query has to be.
    """

    budget_nano: int
    vote_nano: int
    votes: int
    most_votes: int
    least_similarity: float

    def to_json(self) -> dict[str, Any]:
        """Return its numbers, as JSON types, and their meaning."""
        jobs = self.votes // self.most_votes
        after = f"{jobs} such jobs" if jobs != 1 else "1 such job"
        last = f"An image that is near enough each time falls silent after {after}, whoever asks."
        return asdict(self) | {"means": f"{FOR_LIFE} {last}"}


FOR_LIFE = (
    "Epsilon is of all jobs of votes for life that were ever asked and will ever be asked, together; each further one "
    "costs nothing more. A record that has spent its budget votes no more, and nobody is told which have."
)


@dataclass(frozen=True)
class NoiseFactors:
    """The ratio of the noise in a release to sigma, and its causes.

    With N agents, c colluding and d dropouts each share has variance sigma^2 / h, h = N - c - d. N of them have a
    standard deviation of sigma times `total`, the product of the two others.

    Attributes:
        total: sqrt(N / h).
        collusion: sqrt(N / (N - c)): the cost of c agents who could subtract their own noise, without dropouts.
        dropouts: sqrt((N - c) / h): the additional cost of d agents who may fail to answer.

    If the talliers add the noise, `total` and `collusion` are sqrt(3 / h), h the honest ones, and `dropouts` is 1.
    """

    total: float
    collusion: float
    dropouts: float


@dataclass(frozen=True)
class Price:
    """The price of a task at every level, with the noise it is for.

    Attributes:
        instance: the guarantee for one record.
        agent: the guarantee for one agent.
        delta: the failure probability of each.
        queries: number of queries that the price covers.
        sigma_votes: standard deviation of the noise on one count that nobody can subtract.
        noise_share_sigma_votes: standard deviation of the share each agent (or tallier) adds, sigma / sqrt(h).
        total_sigma_votes: standard deviation if all agents contribute, sigma * sqrt(N / h): the noise in labels.
        noise_factors: the factors of collusion and of dropouts.
        grid_scale: grid units per vote.
        quorum: fewest agents for which anything is opened.
        colluding_agents: how many participants may know their own noise, and pool it, without weakening the guarantee.
        holds_against: the same in words: against whom the guarantee holds.
        dishonest_talliers: how many talliers may be dishonest, if the talliers add the noise.
        person: the guarantee for one person's records at one agent; None if the task does not bound how many vote.
        records_per_person: that bound, m.
        group: the guarantee for any `group_size` records of all agents together; its level names the unit, one record.
        group_size: that number, g.
        life: the scope of the guarantee for one record, if it covers everything that is ever asked.
        one_record: what one record of an agent changes in its answer, in words (`Method.one_record`).
    """

    instance: PrivacyStatement
    agent: PrivacyStatement
    delta: float
    queries: int
    sigma_votes: float
    noise_share_sigma_votes: float
    total_sigma_votes: float
    noise_factors: NoiseFactors
    grid_scale: int
    quorum: int
    method: str
    release: str
    colluding_agents: int
    holds_against: str
    noise_by: NoiseBy = "agents"
    dishonest_talliers: int | None = None
    person: PrivacyStatement | None = None
    records_per_person: int | None = None
    group: PrivacyStatement | None = None
    group_size: int | None = None
    life: LifePrice | None = None
    one_record: str | None = None

    def statement(self, level: Level) -> PrivacyStatement:
        """Return the guarantee at one of the levels that ledgers account for."""
        return self.instance if level == "instance" else self.agent

    @property
    def stated(self) -> tuple[PrivacyStatement, ...]:
        """Return every guarantee, the smallest unit first."""
        return (self.instance, *(() if self.person is None else (self.person,)), self.agent)

    def to_json(self) -> dict[str, Any]:
        """Return the shape of `labeler plan --json`; only JSON types, no infinity, no NaN."""
        uncharged: dict[str, Any] = {}
        if self.person is not None:
            uncharged["person"] = self.person.to_json() | {"records_per_person": self.records_per_person}
        if self.group is not None:
            uncharged["group"] = self.group.to_json() | {"group_size": self.group_size}
        for stated in uncharged.values():
            # No account is charged this number, so it must not look like a charge.
            del stated["charge_nano"]
        return {
            "instance": self.instance.to_json(),
            "agent": self.agent.to_json(),
            **uncharged,
            "delta": self.delta,
            "as_in_paper": {one.level: {"epsilon": finite(one.as_in_paper_epsilon)} for one in self.stated},
            "as_in_paper_shares": {one.level: {"epsilon": finite(one.paper_shares_epsilon)} for one in self.stated},
            "noise_factors": asdict(self.noise_factors),
            "noise_share_sigma": self.noise_share_sigma_votes,
            "total_sigma_votes": self.total_sigma_votes,
            "sigma_votes": self.sigma_votes,
            "queries": self.queries,
            "grid_scale": self.grid_scale,
            "quorum": self.quorum,
            "method": self.method,
            "release": self.release,
            "colluding_agents": self.colluding_agents,
            "holds_against": self.holds_against,
            **({} if self.life is None else {"life": self.life.to_json()}),
            "noise_by": self.noise_by,
            **({} if self.dishonest_talliers is None else {"dishonest_talliers": self.dishonest_talliers}),
            **({} if self.one_record is None else {"one_record": self.one_record}),
        }


def price(task: Task, *, queries: int | None = None) -> Price:
    """Return the price of a task at every level.

    Args:
        queries: number of the task's queries that are asked; all `max_queries` when absent.

    Returns:
        The price. Winners cost less than the histogram they are read from if that is proved
        (`labeler.methods.sensitivity`).

    Raises:
        InvalidSetting: queries is not between 1 and `task.max_queries`.
        UnsafeGrid: the task's grid is too coarse for its noise (see Task.scale).
    """
    asked = task.max_queries if queries is None else queries
    if type(asked) is not int or not 1 <= asked <= task.max_queries:
        raise InvalidSetting(
            f"queries must be between 1 and the task's max_queries {task.max_queries}, found {asked!r}"
        )
    instance = statement(task, "instance", asked)
    life = None
    if task.lifetime_budget is not None:
        vote, budget = vote_nano(task), task.lifetime_budget.budget_nano
        life = LifePrice(
            budget, vote, budget // vote, min(task.k, task.max_queries), task.lifetime_budget.least_similarity
        )
    pooled = None
    if task.dishonest_talliers == 1 and (event := integer_event(task, "instance", asked)) is not None:
        # One private image's price if two talliers pool what they know and the task counted on one.
        pooled = finite(_certified(replace(event, noise_contributors=1), task.delta))
    return Price(
        instance=instance,
        agent=statement(task, "agent", asked),
        delta=task.delta,
        queries=asked,
        sigma_votes=task.sigma_votes,
        noise_share_sigma_votes=task.sigma_votes / math.sqrt(task.noise_contributors),
        total_sigma_votes=task.total_sigma_votes,
        noise_factors=_noise_factors(task),
        grid_scale=task.scale,
        quorum=task.quorum,
        method=task.method,
        release=task.release,
        colluding_agents=task.colluding_agents,
        holds_against=holds_against(
            task, finite(instance.participant_epsilon), instance.histogram_epsilon, two_talliers_epsilon=pooled
        )
        # These words are shown with the number, so they also state its scope.
        + ("" if task.lifetime_budget is None else f" {FOR_LIFE}"),
        noise_by=task.noise_by,
        dishonest_talliers=task.dishonest_talliers,
        person=None if task.records_per_person is None else statement(task, "person", asked),
        records_per_person=task.records_per_person,
        group=None if task.group_size is None else group_statement(task, asked),
        group_size=task.group_size,
        life=life,
        one_record=task.traits.one_record(task),
    )


def has_finite_price(task: Task, level: StatedLevel) -> bool:
    """Return whether anything is proved of all the task's queries together, so that a charge at this level has meaning.

    A finite squared sensitivity is not enough. If one agent can move a number beyond the reach of the noise sampler
    no epsilon holds, whatever mu^2 is.
    """
    return _is_finite(OfKind(task), level)


@dataclass(frozen=True)
class OfKind:
    """A task that equals every other of its kind, so that results for a kind are computed once."""

    task: Task = field(compare=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.task.kind)


@lru_cache(maxsize=4096)
def _is_finite(one: OfKind, level: StatedLevel) -> bool:
    event = integer_event(one.task, level, one.task.max_queries)
    return event is not None and math.isfinite(_certified(event, one.task.delta))


def _certified(event: IntegerSum, delta: float) -> float:
    return epsilon_bound(event, delta, total_variation=sampler_distance(event.share_sigma_grid))


def price_of_paper_shares(
    squared_sensitivity: Fraction | int,
    sigma_votes: float,
    delta: float,
    *,
    agents: int,
    colluding_agents: int,
    max_dropouts: int = 0,
) -> float:
    """Return the true epsilon of noise sized as in the papers: shares of variance sigma^2 / N, some of them known.

    The papers size shares so that all N together have variance sigma^2. Agents that pool their shares subtract
    them, those that drop out add none, and (N - c - d) / N of the variance is left. This project sizes shares
    with h instead, so that its price holds.

    Args:
        squared_sensitivity: of the whole composition, votes^2.
        sigma_votes: the papers' sigma, votes.
        delta: in (0, 1).
        agents: N.
        colluding_agents: c.
        max_dropouts: d; c + d must be below N.

    Returns:
        The exact epsilon for continuous noise.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    left = agents - colluding_agents - max_dropouts
    if colluding_agents < 0 or max_dropouts < 0 or left < 1:
        raise InvalidSetting(
            f"colluding_agents and max_dropouts must be at least 0, and together at most {agents - 1} of {agents} "
            f"agents; found {colluding_agents} and {max_dropouts}"
        )
    known = GaussianSum(squared_sensitivity, sigma_votes)
    return epsilon_of_delta(delta, math.sqrt(known.mu_squared * agents / left))


def _noise_factors(task: Task) -> NoiseFactors:
    if not task.agents_add_shares:
        every = task.total_sigma_votes / task.sigma_votes
        return NoiseFactors(total=every, collusion=every, dropouts=1.0)
    honest = task.agents - task.colluding_agents
    return NoiseFactors(
        total=task.total_sigma_votes / task.sigma_votes,
        collusion=math.sqrt(task.agents / honest),
        dropouts=math.sqrt(honest / task.noise_contributors),
    )


def instance_epsilon(task: Task, queries: int) -> float:
    """Return `price(task, queries=queries).instance.epsilon` alone, for callers that need it a hundred times."""
    event = integer_event(task, "instance", queries)
    return math.inf if event is None else _certified(event, task.delta)


def statement(task: Task, level: StatedLevel, queries: int) -> PrivacyStatement:
    """Return the guarantee of `queries` queries of a task at one level."""
    return _statement_of(integer_event(task, level, queries), task, level, queries)


def group_statement(task: Task, queries: int) -> PrivacyStatement:
    """Return the guarantee for any `group_size` records of all agents together, which no ledger is charged."""
    stated = _statement_of(group_event(task, queries), task, "instance", queries)
    return stated if stated.reason is None else replace(stated, reason=_GROUP_OUT_OF_REACH)


def _statement_of(event: IntegerSum | None, task: Task, level: StatedLevel, queries: int) -> PrivacyStatement:
    if event is None:
        none = math.inf
        reason = NO_BOUND.format(caps=task.traits.caps) if task.lifetime_budget is None else NO_BOUND_FOR_LIFE
        return PrivacyStatement(level, none, none, none, none, none, None, none, None, reason)
    squared = squared_in_sigma_units(task, event)
    continuous = GaussianSum(squared, task.sigma_votes, level)
    mu = math.sqrt(continuous.mu_squared)
    exact = epsilon_of_delta(task.delta, mu)
    certified = _certified(event, task.delta)
    # The fewest shares that one participant who reads does not know; see the module for the proof.
    left = (
        min(event.noise_contributors, max(1, task.quorum - 1)) if task.agents_add_shares else event.noise_contributors
    )
    method = METHOD_OF_SAMPLES if event.is_sampled else METHOD
    if not event.opens_sums:
        method = METHOD_OF_WINNERS
    sums = None if event.opens_sums else summed_votes(task, level, queries)
    return PrivacyStatement(
        level=level,
        epsilon=certified,
        continuous_epsilon=exact,
        as_in_paper_epsilon=papers_epsilon(continuous, task.delta),
        # Noise within an agent's answer is not a share, and the talliers' is no agent's: nobody could subtract any of
        # it.
        paper_shares_epsilon=price_of_paper_shares(
            squared,
            task.sigma_votes,
            task.delta,
            agents=task.agents,
            colluding_agents=task.colluding_agents,
            max_dropouts=task.max_dropouts,
        )
        if task.agents_add_shares
        else exact,
        participant_epsilon=certified
        if left == event.noise_contributors
        else _certified(replace(event, noise_contributors=left), task.delta),
        squared_sensitivity=int(squared) if squared.denominator == 1 else float(squared),
        mu=mu,
        charge_nano=event.charge_nano,
        reason=None if math.isfinite(certified) else _OUT_OF_REACH,
        method=METHOD_FOR_LIFE if task.lifetime_budget is not None else method,
        histogram_epsilon=None if sums is None else _certified(sums, task.delta),
    )


def finite(value: float) -> float | None:
    """Return a value as JSON has it, which knows no infinity."""
    return value if math.isfinite(value) else None
