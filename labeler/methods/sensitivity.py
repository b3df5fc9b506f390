"""Sensitivities: the largest change of the sum of all answers by one record, one person or one agent, and prices.

The price of a task that counts votes is a function of two numbers. One is the squared L2 norm of the largest change of
the **whole composition** of queries (`squared_sensitivity`). The other is the largest change of a single coordinate
(`largest_change`), which matters only for how far into the tail of the noise a proof has to look. Both are integers:
votes are counted, never divided by k. If agents answer with real numbers, the price is a function of the noisy vector
`answer_sum`.

Neighbors (docs/math/index.md, "What a guarantee is about"):

* instance level: one agent gains or loses one record, all other agents' records stay.
* person level: one agent gains or loses **all** records of one person, all other records stay. Only if the
  task has `records_per_person`.
* agent level, zero-out: the ballots of one agent become zero while its noise share stays.

The squared norm of the change of all sums, and (in brackets) of the change of one coordinate:

| method      | instance                        | person                             | agent             |
|-------------|---------------------------------|------------------------------------|-------------------|
| knn         | 2 Q (1)                         | 2 Q min(m, k)^2 (min(m, k))        | Q k^2 (k)         |
| ensemble    | 2 Q (1)                         | 2 Q (1)                            | Q (1)             |
| reverse-knn | min(k, Q), doubled by a cap (1) | g^2 min(k, Q), doubled by n (g)    | n^2 min(k, Q) (n) |
| evaluate    | 1, doubled by a cap (1)         | g^2, doubled by n (g)              | n^2 (n)           |

and, if a record or a model votes for t attributes, w = min(2 t, C) for the 2 of knn and ensemble, and t times their
agents' numbers (`labeler.methods.knn`). Q are the queries, k the neighbors that vote, n = `max_agent_records`,
m = `records_per_person` and g = min(m, n). A cap is either of n and m. On a ball of `ballot_radius` R
(`labeler.methods.reverse_knn`) an agent of reverse-knn changes at most R^2, a record the table's number and rounding.
With `offset_share` a record also changes its site's noisy mean (`labeler.methods.site_offset`).
Each method's module holds its proof. A winner is computed from the histogram, so these bounds hold for it, too;
`_as_winners` says when a smaller one is proved (`labeler.accounting.winner`).

A method whose traits state nothing has no price: it is refused, never charged as another.

Neighbors are defined by records, not by files: of identical images one is a record, or none if their labels differ. The
rule looks at one person's files alone, so neighbors in files are neighbors in records, at both levels
(feature_store.same_images).

**Caps per person.** Of each person an agent answers with the m records of the smallest ids and with no
other. Whether a record is among them depends on its person's records alone.
*Instance level.* A record that is not among the m changes nothing when it leaves. One that is lets the person's next
record in. So the records that the agent answers with change by at most one **replacement**, for which every method's
bound at instance level must hold. For numbers both sensitivities do (`labeler.methods.blind_average`, fact 1). With a
cap per person, models are trained and priced for replacing, whatever bound on all records sites keep (`kept_bound`).
*Person level.* When all records of a person leave, at most m of the answering records leave, and no other person's
record enters. So the answering records change by a removal of at most m records, and by no replacement. For numbers
these are m removals one after the other, each within the sensitivity whatever the others are. By the triangle
inequality that is m times the sensitivity. It is at most twice the norm bound of one agent's vector, within which both
vectors lie (`VectorSum.group_distance`).

**Ballots and noise shared apart (winner, if rows have a total).** Talliers add up S * ballots + noise from two
sharings. Any two of them hold uniform numbers, and the sum they compute on is the same random variable
as with one sharing, so the same bounds hold. The column of votes not cast is in no sum.

A guarantee at instance level is about one record. A person with several records is protected as a group of that size,
and without `records_per_person` nothing bounds that size. A person with records at two agents changes the ballots of
both: the norms of the two changes add up, and so do their mus. The same holds if one person has two ids.

`Method` describes a method: its properties, its proofs, and how an agent answers. Every system of the papers is one sum
of bounded contributions. They differ in the meaning of a row of the sum, in the parties that add the noise, and in
whether a job can be cut into rounds. Outside their modules no code has to know more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import IntegerSum
from labeler.accounting.integer import epsilon_bound
from labeler.accounting.lifetime import lifetime_event
from labeler.accounting.winner import ONE_BIT, SWAP, IntegerWinner
from labeler.budget import LEAST_DELTA_OF_WINNERS
from labeler.descent import MOST_RECORDS
from labeler.errors import InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.records import Learner, Records, RunnerContext
from labeler.setting import StatedLevel, Training

if TYPE_CHECKING:
    from labeler.noise import VectorSum
    from labeler.tally import QueryBatch
    from labeler.task import Task


def squared_sensitivity(task: Task, level: StatedLevel, queries: int) -> Fraction | int | None:
    """Return the squared L2 sensitivity of the sums of a whole batch of `queries` queries, in votes squared.

    Args:
        level: the unit whose presence is protected.
        queries: Q, number of queries of the composition; at least 1.

    Returns:
        The bound, or None if there is none (reverse-knn at agent level without `max_agent_records` or
        `ballot_radius`). Whole votes squared, except for ballots on a ball, whose rounding counts in grid units.

    Raises:
        InvalidSetting: queries is not a positive integer, the task's method does not count votes, or the level is a
            person's and the task has no `records_per_person`.
        PrivacyRefusal: the task's method has no stated sensitivity.
    """
    if not task.traits.counts:
        raise InvalidSetting(f"method {task.method} does not count votes; its price is that of its `answer_sum`")
    if type(queries) is not int or queries < 1:
        raise InvalidSetting(f"queries must be a whole number of at least 1, found {queries!r}")
    if level == "person":
        records_of_a_person(task)
    return counted_votes(task).squared(task, level, queries)


def largest_change(task: Task, level: StatedLevel) -> int | None:
    """Return the most votes by which any one coordinate of the sum can change; None if unbounded."""
    if level == "person":
        records_of_a_person(task)
    return counted_votes(task).largest(task, level)


def records_of_a_person(task: Task) -> int:
    """Return m, the most records of one person with which an agent answers.

    Raises:
        InvalidSetting: the task does not bound them, so there is no statement about a person.
    """
    if task.records_per_person is None:
        raise InvalidSetting(
            "a price is stated for a person only where the task says with how many records of one person an agent "
            "answers at most; give the task records_per_person"
        )
    return task.records_per_person


def training_of(task: Task) -> Training:
    """Return how agents train.

    Raises:
        InvalidSetting: the price of the task's method depends on no training.
    """
    if task.training is None:
        raise InvalidSetting(f"a task of method {task.method} does not say how agents train")
    return task.training


def kept_bound(task: Task) -> int | None:
    """Return n_max: the public bound on every agent's records, with which a leaving record lets none in and so moves a
    model half as far (`labeler.descent`, "With a public denominator").

    None if the task names no bound that sites keep, or if it caps the records of a person. Such a cap may bind, so
    that one record replaces another, and the price is that of replacing for everybody.
    """
    training = training_of(task)
    return None if task.a_record_may_be_replaced else training.max_records


def most_trained(task: Task) -> int:
    """Return the most records with which an agent trains.

    If the task counts on a bound that sites keep, that bound; no shard that an agent answers such a task from
    holds more, so that it never binds.
    """
    return kept_bound(task) or MOST_RECORDS


def sums_means(task: Task) -> bool:
    """Return whether agents sum records by class (`labeler.methods.blind_average`) instead of training a model."""
    return task.training is not None and task.training.learner == "means"


def answers_with_a_model(task: Task) -> bool:
    """Return whether agents answer with numbers of a model, so that the price depends on how they train it."""
    return task.training is not None and not task.traits.counts


def integer_event(task: Task, level: StatedLevel, queries: int) -> IntegerSum | None:
    """Return the composition of `queries` queries of a task as an event; None if its sensitivity is unbounded.

    For votes for life: everything that is ever asked, for any number of queries. Without vote counts: everything that
    the task opens, rounding included.

    Raises:
        InvalidSetting: the level is a person's, and the task has no `records_per_person`.
        PrivacyRefusal: the task's method has no stated sensitivity.
    """
    if not task.traits.counts:
        stated = bounded_numbers(task)
        if stated.event is not None:
            return stated.event(task, level)
        return stated.answer_sum(task).event(level, records=records_of_a_person(task) if level == "person" else 1)
    if task.lifetime_budget is not None:
        return lifetime_event(task) if level == "instance" else None
    sums = summed_votes(task, level, queries)
    if sums is None or task.release != "winner":
        return sums
    return _as_winners(task, queries, sums, one=summed_votes(task, level, 1))


def summed_votes(task: Task, level: StatedLevel, queries: int) -> IntegerSum | None:
    """Return the noisy histograms of `queries` queries as an event, whatever part is opened; None if unbounded."""
    squared = squared_sensitivity(task, level, queries)
    largest = largest_change(task, level)
    if squared is None or largest is None:
        return None
    return IntegerSum(
        squared_sensitivity=squared,
        largest_change=largest,
        grid_scale=task.scale,
        share_sigma_grid=task.share_sigma_grid,
        noise_contributors=task.noise_contributors,
        coordinates=queries * task.num_classes + counted_votes(task).beside(task, queries),
        level=level,
    )


def group_event(task: Task, queries: int) -> IntegerSum | None:
    """Return `queries` queries as an event for any `group_size` records of all agents (`IntegerSum.of_group`).

    Winners are computed from the histogram, so for two records or more they have its bound. None: no `group_size`.
    """
    event = None if task.group_size is None else integer_event(task, "instance", queries)
    if event is None or task.group_size in (None, 1):
        return event
    sums = event if event.opens_sums else summed_votes(task, "instance", queries)
    has_own_noise = task.traits.has_local_noise or task.offset_share is not None
    releases = min(task.group_size, task.agents) if has_own_noise else 1
    return None if sums is None else sums.of_group(task.group_size, releases=releases)


def largest_distance(task: Task, level: StatedLevel, queries: int) -> float | None:
    """Return how far neighboring data move the sums of a batch before rounding, in units of `sigma_votes`; for real
    noise. None if there is no bound.
    """
    if task.traits.counts:
        squared = squared_sensitivity(task, level, queries)
        return None if squared is None else math.sqrt(squared)
    spec = bounded_numbers(task).answer_sum(task)
    if level == "agent":
        return spec.largest_norm * task.sigma_votes / spec.sigma
    records = records_of_a_person(task) if level == "person" else 1
    return spec.group_distance(records) * task.sigma_votes / spec.sigma


def counted_votes(task: Task) -> CountedVotes:
    """Return what is proved of the task's method, for one that counts votes.

    Raises:
        PrivacyRefusal: no bound for a record, a person or an agent is stated. Charging it as another method would
            promise what was never proved, so no price is computed.
    """
    if isinstance(task.traits.stated, CountedVotes):
        return task.traits.stated
    raise _without_sensitivity(task.method)


def bounded_numbers(task: Task) -> BoundedNumbers:
    """Return what is proved of a method whose agents answer with real numbers; see `counted_votes`."""
    if isinstance(task.traits.stated, BoundedNumbers):
        return task.traits.stated
    raise _without_sensitivity(task.method)


def _without_sensitivity(method: str) -> PrivacyRefusal:
    return PrivacyRefusal(
        f"method {method!r} has no stated sensitivity, so it has no price; state and prove what one record, one person "
        "and one agent change, in its module of labeler.methods"
    )


def _as_winners(task: Task, queries: int, sums: IntegerSum, *, one: IntegerSum | None) -> IntegerSum:
    """Return the winners of noisy sums as a separate event, if its bound is smaller than that of the sums.

    If rows have a total (top-k votes, one vote of a model), each query is bounded separately. Squared by votes, a
    change of 1 is one vote that arrives or leaves. A change of 2 in which no count moves by more than one vote is one
    vote here and one there. That is a vote that moves, since no record adds two votes to a row. More votes at once, or
    reverse-knn, whose bound is of all queries together, have no such proof, and pay for the sums. So does a task whose
    noise the talliers add: a dishonest one may add any number, and an answer is not a threshold on the changed count
    any more if the sum wraps around in the field (`labeler.noise`). So does a task whose guarantee is too large, or its
    delta too small, for the bounds that winners have (`labeler.accounting.integer`).

    Args:
        queries: number of winners.
        sums: the event of the histograms of as many queries.
        one: the event of a single histogram, at the same level; None if it has no bound.
    """
    if (
        task.traits.row_total is None
        or task.dishonest_talliers is not None
        or task.delta < LEAST_DELTA_OF_WINNERS
        or one is None
        or one.largest_change != 1
        or one.squared_sensitivity not in (1, 2)
    ):
        return sums
    winners = IntegerWinner(
        **vars(sums),
        change=ONE_BIT if one.squared_sensitivity == 1 else SWAP,
        queries=queries,
        is_duel=task.num_classes == 2 and task.abstain_below is None,
    )
    return winners if math.isfinite(epsilon_bound(winners, task.delta)) else sums


S = TypeVar("S", bound=str)
T = TypeVar("T")

MOST_NEIGHBORS = 1_000_000
"""The largest k of a task."""


ReleaseKind = Literal["histogram", "winner"]
"""The opened part of a sum: all of it, or the largest of each row."""


ShareKind = Literal["each", "running", "shared", "life"]
"""What a question's share of its job's charge is (`labeler.query_budgets`)."""


def share_of_a_row(task: Task) -> ShareKind:
    """Return the kind of share of a question whose sums are released: a winner's price grows with the number asked."""
    return "running" if task.release == "winner" else "each"


@dataclass(frozen=True)
class CountedVotes:
    """The proved bounds of a method whose agents count votes, at every level.

    Attributes:
        squared: (task, level, queries): the squared L2 norm of the largest change of the sums of one batch of
            `queries` queries; None if there is no bound. The function's docstring is the proof.
        largest: (task, level): the most whole votes by which one coordinate changes; None if there is no bound.
        per_cell: (task): the most votes that one agent may cast for one class at one query, before it is clipped.
        beside: (task, queries): further noisy coordinates that are paid for. They never leave their agent.
    """

    squared: Callable[[Task, StatedLevel, int], Fraction | int | None]
    largest: Callable[[Task, StatedLevel], int | None]
    per_cell: Callable[[Task], int]
    beside: Callable[[Task, int], int] = lambda *_: 0


@dataclass(frozen=True)
class BoundedNumbers:
    """The proved bounds of a method whose agents answer with real numbers on a grid.

    Attributes:
        answer_sum: (task): the noisy vector that prices the task, in units of one record's change: the sum of all
            agents, or each agent's own. The function's docstring and that of `VectorSum` are the proof.
        longest: (task): the largest magnitude of one number of one agent on the grid, grid units.
        check: (numbers, task): refuse numbers of one agent beyond what the price covers; int64, grid units.
        event: (task, level): everything that a task opens, if that is more than `answer_sum` once; None: once.
    """

    answer_sum: Callable[[Task], VectorSum]
    longest: Callable[[Task], int]
    check: Callable[[NDArray[np.int64], Task], None]
    event: Callable[[Task, StatedLevel], IntegerSum] | None = None

    @classmethod
    def of_vectors(
        cls,
        answer_sum: Callable[[Task], VectorSum],
        refusal: str,
        event: Callable[[Task, StatedLevel], IntegerSum] | None = None,
    ) -> BoundedNumbers:
        """Return the bounds of agents that add one vector each; longer ones are refused with this sentence."""
        return cls(
            answer_sum,
            lambda task: answer_sum(task).longest_grid,
            lambda numbers, task: answer_sum(task).check(numbers, refusal),
            event,
        )


def _unanswered(*_: object) -> NDArray[np.int64]:
    raise InvalidSetting("this method says nothing of how agents answer; give it ballots")


def _accepts(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Method:
    """A method: its properties, its proofs, and how an agent answers by it.

    Attributes:
        system: its name in the papers.
        answer: an agent's contribution, in words for people.
        sums: what is added up, in words for people.
        ballots: (task, batch, records, context): an agent's answers, int64, shape (num_queries, num_classes); private.
        stated: its proved bounds. None: no bound on one record's change is stated, so it has no price.
        attributes: the same where classes are attributes, followed by how many of each; empty if it takes none.
        takes: optional fields of a task that have a meaning for it; others are refused.
        learners: what agents train, by the names of `Training.learner`; with PLAIN a task may leave training out.
        single_round: all queries of a task, or of a step, are one composition, asked in one round.
        row_total: (task): the sum of the rows of a ballot with the votes not cast, which talliers check
            (`labeler.tally`); None if rows have no total.
        labels: what gets a label: the "questions"; or all public "images", by the model whose weights are the sum, and
            whose rows are asked about; or nothing, where agents score a public model (`labeler.methods.evaluate`).
        has_local_noise: each agent's answer already contains its noise, enough for its own price. Then no share of
            noise is added to the sum, and no collusion weakens the guarantee.
        searched: what an answer is found in: each query looks for its k nearest "records", or each record for its k
            nearest "questions". Then k is at most the number of queries, and any number of votes of one agent may meet
            in a cell. The sum of the counts reveals approximately how many records there are. None: it has no k.
        votes: (task, queries, records of all agents): M, the number of votes in one question if all agents answer.
        share_kind: (task): what one question's share of the job's charge is.
        is_attacked: `labeler audit` has adversaries made for it. Without them, adversaries of another method would
            prove nothing and make it look safe, so its audit is refused.
        check_room: (task, dimension of features): refuse what an agent has no room to answer, before the charge and by
            public facts alone.
        check_questions: (task, batch, learner): refuse questions that it cannot be asked, likewise.
        negatives: (task): its queries that are public negative examples, which agents learn from.
        default_k: k of a task that names none.
        one_record: (task): what one record of an agent changes in its answer, a sentence for people; None where no
            short one is true.
    """

    system: str
    answer: str
    sums: str = "votes"
    ballots: Callable[[Task, QueryBatch, Records, RunnerContext], NDArray[np.int64]] = _unanswered
    stated: CountedVotes | BoundedNumbers | None = None
    attributes: str = ""
    takes: frozenset[str] = frozenset()
    learners: tuple[str, ...] = ()
    single_round: bool = False
    row_total: Callable[[Task], int] | None = None
    labels: Literal["questions", "images"] | None = "questions"
    has_local_noise: bool = False
    searched: Literal["records", "questions"] | None = None
    votes: Callable[[Task, int, int], float] = lambda task, *_: float(task.agents * task.k)
    share_kind: Callable[[Task], ShareKind] = lambda _: "shared"
    is_attacked: bool = False
    check_room: Callable[[Task, int], None] = _accepts
    check_questions: Callable[[Task, QueryBatch, Learner], None] = _accepts
    negatives: Callable[[Task], range] = lambda _: range(0)  # one line says it
    default_k: int = 1
    one_record: Callable[[Task], str | None] = _accepts

    @property
    def counts(self) -> bool:
        """Return whether contributions are whole votes, counted; else they are real numbers on a fixed-point grid."""
        return not isinstance(self.stated, BoundedNumbers)

    @property
    def releases(self) -> tuple[ReleaseKind, ...]:
        """Return what may be opened: a winner only if a row of the sum counts votes."""
        return ("histogram", "winner") if self.counts and self.labels else ("histogram",)

    @property
    def secret(self) -> str:
        """Return what of an agent is never revealed, in words."""
        return "how any agent voted on any question" if self.counts else "what any agent learned, without noise"

    @property
    def bare(self) -> str:
        """Return what three talliers read if all of them pool what they know, in words."""
        return "the votes" if self.counts else f"every agent's {self.sums}"

    @property
    def told_beside(self) -> tuple[str, ...]:
        """Return what a release reveals besides what was asked, in words."""
        return ("about how many records all agents hold together",) if self.searched == "questions" else ()

    @property
    def no_choice(self) -> str | None:
        """Return why a requester chooses no questions, in words; None where it chooses them."""
        evaluates = "the question is a released model, and no image gets a label"
        why = self.rows_about(None, "agents are asked for a model, which labels every public image")
        return why if self.labels else evaluates

    @property
    def caps(self) -> str:
        """Return the fields of a task that bound what one agent changes, in words that signed evidence repeats."""
        return "ballot_radius, or max_agent_records," if "ballot_radius" in self.takes else "max_agent_records"

    def model_rows(self, task: Task) -> int | None:
        """Return the rows of the linear model that a task asks for; None where it asks for none."""
        return task.rows if self.labels == "images" else None

    def rows_about(self, questions: T, images: T) -> T:
        """Return what a job's rows of labels are about: its questions, or all images where it asks for a model."""
        return images if self.labels == "images" else questions

    def claim_confidence(self, claim: str, instead: str = "") -> str:
        """Return a claim about the confidence that labels state, in words; of a released model's it proves nothing."""
        return self.rows_about(claim, instead)

    def with_k(self, task: Task) -> str:
        """Return the method's name, with its k if it has one, for people."""
        return f"{task.method}, k = {task.k:,}" if self.searched else task.method

    def check_k(self, k: int, queries: int) -> None:
        """Raise InvalidTask if each record should vote at more questions than there are."""
        if self.searched == "questions" and k > queries:
            raise InvalidTask(f"k is {k} queries per record, but only {queries} queries are asked (max_queries)")

    def searches(self, queries: int) -> int:
        """Return how often a number of queries searches an agent's records; 0 where records search, or nothing does."""
        return queries if self.searched == "records" else 0

    def reach(self, task: Task) -> int:
        """Return the most queries at which one record votes."""
        return min(task.k, task.max_queries) if self.searched == "questions" else task.max_queries

    def choosing(self, records: int) -> int | None:
        """Return the records, where they choose the questions at which they vote; None where all get equally many."""
        return records if self.searched == "questions" else None

    def is_quick(self, task: Task) -> bool:
        """Return whether an answer is counted alone; others train or score a model, or wait for what a record spent."""
        return self.searched is not None and task.lifetime_budget is None

    def most_k(self, task: Task, level: StatedLevel, queries: int) -> int:
        """Return the largest k that a price may be solved for.

        Raises:
            InvalidSetting: k does not change this price.
        """
        if self.searched is None:
            raise InvalidSetting(f"method {task.method} has no k, because no neighbours vote")
        if self.searched == "records" and level == "instance":
            raise InvalidSetting(
                f"k does not change the instance-level price of {task.method}: one record moves one vote per query "
                "whatever k is. Solve for sigma or queries, or choose the agent level"
            )
        return MOST_NEIGHBORS if self.searched == "records" else min(MOST_NEIGHBORS, queries)

    def noise_of(self, plan: Mapping[str, Any]) -> str:
        """Return the noise of a plan (`labeler plan --json`), in words."""
        unit = "votes" if self.counts else plan.get("unit", "times what one record can change")
        added = (
            "each agent adds all of it to what it learnt"
            if self.has_local_noise
            else f"each {plan['noise_by'].removesuffix('s')} adds noise of {plan['noise_share_sigma']:.4g}"
            f"{' votes' * self.counts}, the sum carries {plan['total_sigma_votes']:.4g}"
        )
        return f"sigma {plan['sigma_votes']:.6g} {unit}, delta {plan['delta']:g}; {added}"

    def grid_units(self, task: Task) -> int:
        """Return the grid units of a ballot's one: those of a vote; 1 if its numbers are on the grid already."""
        return task.scale if self.counts else 1

    def selection(
        self, strategy: S, count: int | None, *, axes: int | None
    ) -> tuple[S | Literal["weights"], int | None]:
        """Return how the questions are chosen, and how many: as the requester says, or the rows of a model."""
        return ("weights", axes) if self.labels == "images" else (strategy, count)

    def round_sizes(self, task: Task, queries: int, most: int) -> tuple[int, ...]:
        """Return the queries of each round of a job: at most `most`, or all of a step that is one composition."""
        each, rest = divmod(queries, task.steps if self.single_round else most)
        if self.single_round:
            return (each,) * task.steps if each and not rest else (queries,)
        return (most,) * each + ((rest,) if rest else ())

    def least_asked(self, task: Task) -> int:
        """Return the fewest queries that a job may have: 1, or all of a task whose price is for all together."""
        return task.max_queries if self.single_round else 1

    def check_sizes(self, task: Task, sizes: Sequence[int]) -> None:
        """Refuse rounds of these numbers of queries if each would cost the whole price without being all of a step."""
        if self.single_round and any(size != task.rows for size in sizes):
            raise PrivacyRefusal(
                f"a {task.method} task is answered in one batch of all its {task.rows} queries; every batch costs the "
                f"whole price, and this one has {sizes[0]}"
            )

    def colluders_counted_on(self, agents: int, max_dropouts: int) -> int:
        """Return how many agents may know noise that they added, where nobody says: the one who reads the release.

        Raises:
            InvalidTask: that leaves no agent whose noise is unknown.
        """
        usual = 1 if agents >= 2 else 0
        if usual == 0 or max_dropouts != agents - 1:
            return usual
        if self.has_local_noise:
            return 0
        raise InvalidTask(
            f"of {agents} agents {max_dropouts} may be missing, and unless the task says otherwise one participant may "
            "know its own noise, because it reads the release or colludes: that leaves nobody whose noise is unknown. "
            f"Let more agents take part, lower max_dropouts to {agents - 2}, or say colluding_agents = 0: a single "
            "agent may then be all that answers, so each adds all the noise that the price counts on"
        )

    def most_votes(self, task: Task) -> float:
        """Return the most votes of all agents for one class of a question; infinite where records choose it."""
        return math.inf if self.searched == "questions" else task.k * task.agents

    def noise_shares(self, task: Task, contributors: int) -> int:
        """Return the number of noise shares in a sum over some agents; 0 if each agent's noise is in its answer."""
        if self.has_local_noise:
            return 0
        return contributors if task.noise_by == "agents" else task.talliers
