"""The price of a setting before anything is paid, and whom it protects against.

More than 400 lines: each number of a plan, and the sentence that says it.

Against whom a price holds: how many participants may know their own noise, and what a number is worth if more do.

**Who knows what.** Every contributor adds an independent share of variance s^2 = sigma^2 / h to the sum, with
h = N - colluding_agents - max_dropouts (labeler.task), and a contributor knows its own share. A reader of the release
who takes part subtracts it, without colluding with anybody. So with c = `colluding_agents` a price holds against c
participants who read the release: one reader who takes part *or* one colluder of a reader who does not needs c = 1, a
reader who takes part and has a colluder needs c = 2.

**What is left.** Let m participants know their shares, and ask about a record of somebody else. A release is a sum over
at least q = N - max_dropouts contributors, or nothing. If the record's owner is not among them, nothing of the record
is in it. If it is, its own share is unknown, and so are those of all contributors but the m: at least
max(1, q - m) shares of variance s^2, independent of the record and of what the m know. Replacing h by this number in
the event (labeler.accounting) therefore gives a certified price against m participants; for noise of real numbers mu
grows by sqrt(h / max(1, q - m)), which for c = max_dropouts = 0 and m = 1 is sqrt(N / (N - 1)).

**Where the talliers add the noise** (labeler.noise) no participant knows any of it: the number is the same
against all participants together, and against as many talliers as the task says.

Where each agent adds all the noise that its price needs by itself (h = 1, or a method with noise of its own), the
number is the same against all other participants together.

What a task costs before anybody pays. Which setting has a given cost says `labeler.solving`.

A price is a function of the task alone: it touches no private data and charges nothing. Per level (one image,
one person where the task has `records_per_person`, one agent) it states the certified epsilon of the integer
mechanism that runs (`labeler.accounting.integer`) and the ledger's charge; beside it, for comparison only, the
continuous exact value and the papers' conversion.

The price depends on `sigma_votes` alone, not on how many agents there are: sigma is the noise that is left when
colluding agents pool theirs and dropouts add none. What collusion and dropouts cost is accuracy: with
everybody there the noise is sigma * sqrt(N / h), which `Price.total_sigma_votes` shows, and `Price.noise_factors`
says what each of the two makes of it. Shares sized as in the papers (sigma^2 / N each) would cost privacy
instead: with c agents colluding and d gone, (N - c - d) / N of the variance is unknown, and
`PrivacyStatement.paper_shares_epsilon` is what would then be guaranteed.

For whom a price holds follows from `colluding_agents` (labeler.planning): `Price.holds_against` says it in words, and
`PrivacyStatement.participant_epsilon` is what the same release is worth against a participant that reads it.

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
from labeler.errors import InvalidSetting, InvalidTask
from labeler.methods import METHODS, MethodName
from labeler.methods.sensitivity import integer_event, one_record_in_words, summed_votes
from labeler.noise import NoiseBy, sampler_distance
from labeler.task import Level, StatedLevel, Task


def resolve_colluding_agents(
    given: int | None,
    *,
    agents: int,
    max_dropouts: int = 0,
    method: MethodName = "knn",
    dishonest_talliers: int | None = None,
) -> int:
    """The number of colluding agents of a new task: what was said, else 1 where there are two agents or more.

    Where the talliers add the noise: else all but the one that a number is about, since it costs nothing there.

    For the doors at which tasks are made. A task that is stored keeps what it says.

    Args:
        given: what the user said; None for nothing. 0 is kept: the price then says for whom it does not hold.
        agents: N, how many take part.
        max_dropouts: how many of them may fail to answer.
        method: how they answer.
        dishonest_talliers: where the talliers add the noise; None where agents do.

    Raises:
        InvalidTask: the default leaves nobody whose noise is unknown (two agents, one of which may be missing).
    """
    if given is not None:
        return given
    if dishonest_talliers is not None:
        return max(0, agents - 1)
    usual = 1 if agents >= 2 else 0
    if usual == 0 or max_dropouts != agents - 1:
        return usual
    if METHODS[method].has_local_noise:
        return 0
    raise InvalidTask(
        f"of {agents} agents {max_dropouts} may be missing, and unless the task says otherwise one participant may "
        "know its own noise, because it reads the release or colludes: that leaves nobody whose noise is unknown. "
        "Let more agents take part, lower max_dropouts, or say colluding_agents = 0: a single agent may then be all "
        "that answers, so each adds all the noise that the price counts on"
    )


def shares_left(task: Task, participants: int) -> int:
    """Fewest noise shares unknown to so many participants in any sum that holds a ballot of somebody else.

    See the module for the proof.
    """
    if task.traits.has_local_noise:
        return 1
    if task.noise_by == "talliers":
        return task.noise_contributors
    return max(1, task.quorum - participants)


def holds_against(
    task: Task,
    participant_epsilon: float | None,
    histogram_epsilon: float | None = None,
    *,
    two_talliers_epsilon: float | None = None,
) -> str:
    """For whom a price holds, in plain words.

    Args:
        task: whose price.
        participant_epsilon: the instance-level price against one participant who reads the release; None where there
            is none.
        histogram_epsilon: the instance-level price of the sums that winners are read from, where winners cost less.
        two_talliers_epsilon: the instance-level price against two dishonest talliers, where the task counts on one at
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
    bare = "the votes" if task.traits.counts else f"every agent's {task.traits.sums}"
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
"""How a certified epsilon is computed, of whatever is a Gaussian's post-processing; printed with it."""

METHOD_FOR_LIFE = "fully adaptive Gaussian filter per record, integer noise"
"""How it is computed for votes for life (`labeler.accounting.lifetime`): of everything that is ever asked."""

METHOD_OF_SAMPLES = "certified pair of sums over secret samples, integer noise"
"""How it is computed where whoever comes or goes is sampled (`labeler.accounting.sampled`)."""

METHOD_OF_WINNERS = "certified recursion over winners, integer noise"
"""How it is computed where winners have a price of their own (`labeler.accounting.winner`)."""

NO_BOUND = (
    "no finite guarantee: an agent may vote with any number of records; set ballot_radius, or max_agent_records, in "
    "the task to get one"
)
NO_BOUND_FOR_LIFE = (
    "no finite guarantee: votes for life promise something about one image, however many of them an agent has"
)
_OUT_OF_REACH = (
    "no finite guarantee can be proved: one agent can move a number by more than the noise sampler's reach; "
    "raise sigma_votes, or lower the votes of one agent or the length of its model"
)


@dataclass(frozen=True)
class PrivacyStatement:
    """The guarantee of a task at one level, and what it is charged as.

    Attributes:
        level: "instance" (one record of one agent added or removed), "person" (all records of one person at one agent)
            or "agent" (one agent's ballots zeroed).
        epsilon: certified for the integer mechanism, rounded up; infinity where nothing can be proved.
        continuous_epsilon: the exact value for real-valued noise of the same sigma; a comparison, not a claim.
        as_in_paper_epsilon: the papers' Renyi conversion for the same sigma; a comparison, not a claim.
        paper_shares_epsilon: what noise shares sized as in the papers, of variance sigma^2 / N, would be worth with
            this many agents colluding and gone; a warning, not a claim. Exact, for real-valued noise.
        participant_epsilon: certified against one participant that reads the release and subtracts its own noise; equal
            to epsilon where the task counts on one colluding agent or more.
        squared_sensitivity: of the whole composition, votes^2; None where unbounded. A whole number of votes but for
            models, whose unit is what one record changes.
        mu: the Gaussian-DP parameter of continuous_epsilon.
        charge_nano: what a ledger is charged, nano-units of mu^2 rounded up; None where unbounded. No ledger is charged
            for a person: there it is only what the composition amounts to.
        reason: why epsilon is infinite, where it is.
        method: how epsilon is computed.
        histogram_epsilon: certified for the noisy sums that winners are read from, which talliers who deviate from the
            computation or pool what they hold may learn; None where no less is charged than for them.
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
        """JSON has no infinity: an infinite number is null, and `reason` says why."""
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
    """What a task of votes for life means for a record: its own, whose use nobody but the record's site sees.

    Attributes:
        budget_nano: B, what a record may ever spend, nano-units of mu^2.
        vote_nano: what one vote under the task's noise costs it.
        votes: how many such votes it has in its life.
        most_votes: how many it casts in one job of the task, where it is near enough: all of them or none.
        least_similarity: how near a query has to be.
    """

    budget_nano: int
    vote_nano: int
    votes: int
    most_votes: int
    least_similarity: float

    def to_json(self) -> dict[str, Any]:
        """Only JSON types, and what it means."""
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
    """By how much the noise in a release is larger than sigma, and what it is for.

    With N agents, c colluding and d dropouts each share has variance sigma^2 / h, h = N - c - d. N of them have a
    standard deviation of sigma times `total`, the product of the two others.

    Attributes:
        total: sqrt(N / h).
        collusion: sqrt(N / (N - c)): what c agents who could subtract their own noise cost, were nobody to drop out.
        dropouts: sqrt((N - c) / h): what d agents who may fail to answer cost on top.

    Where the talliers add the noise, `total` and `collusion` are sqrt(3 / h), h the honest ones, and `dropouts` is 1.
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
        queries: how many queries the price is for.
        sigma_votes: standard deviation of the noise on one count that nobody can subtract.
        noise_share_sigma_votes: standard deviation of the share each agent (or tallier) adds, sigma / sqrt(h).
        total_sigma_votes: standard deviation with every agent there, sigma * sqrt(N / h): what labels suffer from.
        noise_factors: what collusion and dropouts each make of sigma.
        grid_scale: grid units per vote.
        quorum: fewest agents for which anything is opened.
        colluding_agents: how many participants may know their own noise, and pool it, without weakening the guarantee.
        holds_against: the same in words: against whom the guarantee holds.
        dishonest_talliers: where the talliers add it, how many of them may be dishonest.
        person: the guarantee for one person's records at one agent; None where the task does not bound how many vote.
        records_per_person: that bound, m.
        life: what the guarantee for one record is of, where it is of everything that is ever asked.
        one_record: for methods that train, which bound on what a record changes the price is for, in words.
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
    life: LifePrice | None = None
    one_record: str | None = None

    def statement(self, level: Level) -> PrivacyStatement:
        """The guarantee at one of the levels that ledgers account for."""
        return self.instance if level == "instance" else self.agent

    @property
    def stated(self) -> tuple[PrivacyStatement, ...]:
        """Every guarantee there is, the smallest presence first."""
        return (self.instance, *(() if self.person is None else (self.person,)), self.agent)

    def to_json(self) -> dict[str, Any]:
        """The shape of `labeler plan --json`; only JSON types, no infinity, no NaN."""
        return {
            "instance": self.instance.to_json(),
            "agent": self.agent.to_json(),
            **self._person(),
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

    def _person(self) -> dict[str, Any]:
        if self.person is None:
            return {}
        statement = self.person.to_json()
        # Nobody is charged it, and it must not be taken for what somebody is.
        del statement["charge_nano"]
        return {"person": statement | {"records_per_person": self.records_per_person}}


def price(task: Task, *, queries: int | None = None) -> Price:
    """What a task costs at every level.

    Args:
        queries: how many of the task's queries are asked; all `max_queries` when absent.

    Returns:
        The price. Winners cost less than the histogram they are read from where that is proved
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
            task,
            finite(instance.participant_epsilon),
            instance.histogram_epsilon,
            two_talliers_epsilon=_against_two_talliers(task, asked),
        )
        # Wherever the number is shown these words stand beside it, so what it is of is said here.
        + ("" if task.life is None else f" {FOR_LIFE}"),
        noise_by=task.noise_by,
        dishonest_talliers=task.dishonest_talliers,
        person=None if task.records_per_person is None else statement(task, "person", asked),
        records_per_person=task.records_per_person,
        life=_life_price(task),
        one_record=one_record_in_words(task),
    )


def _life_price(task: Task) -> LifePrice | None:
    if task.life is None:
        return None
    vote = vote_nano(task)
    budget = task.life.budget_nano
    return LifePrice(budget, vote, budget // vote, min(task.k, task.max_queries), task.life.least_similarity)


def _against_two_talliers(task: Task, queries: int) -> float | None:
    """What one private image's price becomes where two talliers pool what they know and one was counted on."""
    event = integer_event(task, "instance", queries) if task.dishonest_talliers == 1 else None
    return None if event is None else finite(_certified(replace(event, noise_contributors=1), task.delta))


def person_guarantee(price: Price) -> dict[str, Any]:
    """What travels with released labels of a person's guarantee: nothing where the task states none."""
    if price.person is None:
        return {}
    epsilon = finite(price.person.epsilon)
    return {
        "person": {"epsilon": epsilon, "method": price.person.method, "records_per_person": price.records_per_person}
    }


def has_finite_price(task: Task, level: StatedLevel) -> bool:
    """Whether anything is proved of all the task's queries together, so that a charge at this level means something.

    A squared sensitivity alone is not enough: where one agent can move a number beyond the reach of the noise sampler
    no epsilon holds, whatever mu^2 is.
    """
    return _is_finite(OfKind(task), level)


@dataclass(frozen=True)
class OfKind:
    """A task that equals every other of its kind, so that what follows from a kind is worked out once."""

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
    """What noise sized as in the papers is really worth: shares of variance sigma^2 / N, some of them known.

    The papers size shares so that all N together have variance sigma^2. Agents who pool their shares subtract
    them, those who drop out add none, and (N - c - d) / N of the variance is left. This project sizes shares
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
            "colluding_agents and max_dropouts must be at least 0 and together "
            f"below agents {agents}, found {colluding_agents} and {max_dropouts}"
        )
    known = GaussianSum(squared_sensitivity, sigma_votes)
    return epsilon_of_delta(delta, math.sqrt(known.mu_squared * agents / left))


def _noise_factors(task: Task) -> NoiseFactors:
    if task.traits.has_local_noise:
        return NoiseFactors(1.0, 1.0, 1.0)
    if task.noise_by == "talliers":
        every = task.total_sigma_votes / task.sigma_votes
        return NoiseFactors(total=every, collusion=every, dropouts=1.0)
    honest = task.agents - task.colluding_agents
    return NoiseFactors(
        total=task.total_sigma_votes / task.sigma_votes,
        collusion=math.sqrt(task.agents / honest),
        dropouts=math.sqrt(honest / task.noise_contributors),
    )


def instance_epsilon(task: Task, queries: int) -> float:
    """`price(task, queries=queries).instance.epsilon` alone, for who asks it for a hundred numbers of queries."""
    event = integer_event(task, "instance", queries)
    return math.inf if event is None else _certified(event, task.delta)


def statement(task: Task, level: StatedLevel, queries: int) -> PrivacyStatement:
    """The guarantee of so many queries of a task at one level."""
    event = integer_event(task, level, queries)
    if event is None:
        none = math.inf
        reason = NO_BOUND if "ballot_radius" in task.traits.takes else NO_BOUND.replace("ballot_radius, or ", "")
        reason = reason if task.life is None else NO_BOUND_FOR_LIFE
        return PrivacyStatement(level, none, none, none, none, none, None, none, None, reason)
    squared = Fraction(event.squared_sensitivity)
    if not task.traits.counts:
        # In units of what one record changes, of which sigma_votes is the noise; the event is in a grid's.
        squared *= (Fraction(task.sigma_votes) * event.grid_scale) ** 2 / event.variance_grid
    if event.is_sampled:
        # Of a sampled sum it is the Gaussian of its pair that is stated, in the same unit.
        squared = event.mu_squared * Fraction(task.sigma_votes) ** 2
    continuous = GaussianSum(squared, task.sigma_votes, level)
    mu = math.sqrt(continuous.mu_squared)
    exact = epsilon_of_delta(task.delta, mu)
    certified = _certified(event, task.delta)
    left = min(event.noise_contributors, shares_left(task, 1))
    return PrivacyStatement(
        level=level,
        epsilon=certified,
        continuous_epsilon=exact,
        as_in_paper_epsilon=papers_epsilon(continuous, task.delta),
        # Noise of an agent's own is no share, and of the talliers' none is an agent's: nobody could subtract any of it.
        paper_shares_epsilon=exact
        if task.traits.has_local_noise or task.noise_by == "talliers"
        else price_of_paper_shares(
            squared,
            task.sigma_votes,
            task.delta,
            agents=task.agents,
            colluding_agents=task.colluding_agents,
            max_dropouts=task.max_dropouts,
        ),
        participant_epsilon=certified
        if left == event.noise_contributors
        else _certified(replace(event, noise_contributors=left), task.delta),
        squared_sensitivity=int(squared) if squared.denominator == 1 else float(squared),
        mu=mu,
        charge_nano=event.charge_nano,
        reason=None if math.isfinite(certified) else _OUT_OF_REACH,
        method=_method(task, event),
        histogram_epsilon=None if event.opens_sums else _of_sums(task, level, queries),
    )


def _method(task: Task, event: IntegerSum) -> str:
    if task.life is not None:
        return METHOD_FOR_LIFE
    if not event.opens_sums:
        return METHOD_OF_WINNERS
    return METHOD_OF_SAMPLES if event.is_sampled else METHOD


def _of_sums(task: Task, level: StatedLevel, queries: int) -> float | None:
    sums = summed_votes(task, level, queries)
    return None if sums is None else _certified(sums, task.delta)


def finite(value: float) -> float | None:
    """As JSON has it, which knows no infinity."""
    return value if math.isfinite(value) else None
