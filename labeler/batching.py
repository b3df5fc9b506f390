"""Number of queries per round, and the charge of each round.

A job is asked in rounds: large enough that searching is one matrix product, small enough that a crash repeats
little. For knn and ensemble every query is priced by itself, so cutting a job into rounds is free. The other
methods are one composition per round (see labeler.planning), so all their queries go into one. A model that is trained
in steps takes one round per step, each of all its rows. They are one composition, too, which the first of them pays
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from labeler.accounting.events import NANO
from labeler.budget import UNBOUNDED_NANO, epsilon_spent, say_epsilon
from labeler.errors import InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.methods.sensitivity import integer_event
from labeler.planning import OfKind, has_finite_price
from labeler.setting import LEVELS
from labeler.sharing import words_per_query
from labeler.task import Level, Task

BATCH_QUERIES = 4096
"""Most queries of one round, for methods that may be cut and if their features' size is unknown."""

LARGEST_BATCH_QUERIES = 4 * BATCH_QUERIES
"""The same if features are known to be short; see `batch_queries_of`."""

_MAX_ASK_BYTES = MAX_MESSAGE_BYTES // 2

MAX_ROUND_ENTRIES = (MAX_MESSAGE_BYTES - 1024 * 1024) // 8
"""Most entries (queries times classes) of one round: a tallier's sum, 8 bytes each, shares one message with the names
of up to 5,000 agents."""


def round_sizes(task: Task, queries: int, *, batch_queries: int = BATCH_QUERIES) -> tuple[int, ...]:
    """Return queries per round of a job; they add up to `queries`.

    A round of a method that may be cut is small enough for its votes to fit into one message. For the others
    `check_round_fits` checks their one round.

    Args:
        task: says how agents vote.
        queries: at least 1.
        batch_queries: most queries of one round, at least 1.

    Raises:
        InvalidSetting: a number below 1.
    """
    if queries < 1 or batch_queries < 1:
        raise InvalidSetting(f"a job has at least 1 query per round, found {min(queries, batch_queries)}")
    words = words_per_query(task.winner_terms, num_classes=task.num_classes, agents=task.agents)
    most = max(1, min(batch_queries, MAX_ROUND_ENTRIES // words))
    return task.traits.round_sizes(task, queries, most)


def batch_queries_of(task: Task, dimension: int | None) -> int:
    """Return the most queries of a round whose features, two bytes a number, fill at most half of the largest message.

    Every round waits for commits and messages of all parties, so few large ones are faster than many small ones. If
    winners are found, rounds take turns, and a large one would keep others waiting.

    Args:
        dimension: numbers of one feature; None if it is not known before the images are embedded.
    """
    if dimension is None or task.release == "winner":
        return BATCH_QUERIES
    return max(BATCH_QUERIES, min(LARGEST_BATCH_QUERIES, _MAX_ASK_BYTES // (2 * dimension)))


def check_round_fits(task: Task, queries: int) -> None:
    """Refuse a job that could be priced but never asked: one round whose votes do not fit into a message.

    Args:
        task: says how agents vote.
        queries: of a job of the task.

    Raises:
        InvalidTask: the one round of such a job has more than `MAX_ROUND_ENTRIES` entries.
    """
    entries = max(round_sizes(task, queries)) * task.num_classes
    if entries > MAX_ROUND_ENTRIES:
        raise InvalidTask(
            f"a {task.method} job is asked in one round, and {queries // task.steps} queries of "
            f"{task.num_classes} classes are "
            f"{entries} numbers in it; at most {MAX_ROUND_ENTRIES} travel in one message. Make a task of at most "
            f"{MAX_ROUND_ENTRIES // task.num_classes} queries, or use method knn"
        )


LATER_STEP_NANO = 1
"""Charge of each step after a task's first: the least possible."""


def round_charges(task: Task, queries: int, *, answered: int = 0) -> dict[Level, int]:
    """Return the cost of one round, in nano-units of mu^2 rounded up, at levels at which the task has a finite price.

    A round of votes for life costs the least possible: their whole promise was set aside once. Of steps that train
    one model, the first answered one, whichever it is, costs as much as all together. Each further one costs the
    least possible; no ledger answers more of them than the task has.

    At other levels there is no charge: a number would look like a guarantee. Coordinator and agents use this function,
    so that an agent refuses by itself what a coordinator would.

    Args:
        queries: in this round.
        answered: queries of the task that the payer was charged for before.

    Raises:
        PrivacyRefusal: the task's method has no stated sensitivity.
    """
    return due(task, dict(_charges(OfKind(task), queries)), answered=answered)


def check_queries(answered: int, max_queries: int) -> None:
    """Refuse a round that asks more of a task than a person approved, and than its price covers.

    Args:
        answered: queries of the task, with those of this round.

    Raises:
        PrivacyRefusal: there are more than it has.
    """
    if answered > max_queries:
        raise PrivacyRefusal(
            f"the task has {max_queries} queries, and with this round {answered} of it would be answered; ask in a new "
            "task"
        )


def due(task: Task, charges: Mapping[Level, int], *, answered: int) -> dict[Level, int]:
    """Return the remaining charge for a round of this price, after `answered` queries of its task were charged."""
    if task.sampled is not None and answered:
        return dict.fromkeys(charges, LATER_STEP_NANO)
    return dict(charges)


def person_charge(task: Task, queries: int) -> int | None:
    """Return what one round costs one person, nano-units of mu^2 rounded up; None where nothing is proved.

    It is the price at person level that a task states (`labeler.planning`), of this number of queries. No ledger is
    charged it: accounts count images and sites.
    """
    return _person_charge(OfKind(task), queries)


@lru_cache(maxsize=4096)
def _person_charge(one: OfKind, queries: int) -> int | None:
    task = one.task
    if task.records_per_person is None or task.lifetime_budget is not None or task.sampled is not None:
        return None
    event = integer_event(task, "person", queries) if has_finite_price(task, "person") else None
    return None if event is None or event.round_nano >= UNBOUNDED_NANO else event.round_nano


@dataclass(frozen=True)
class PersonSpent:
    """The cost of all answered rounds for one person at one site.

    Attributes:
        nano: nano-units of mu^2 of all rounds together; None where no bound is proved.
        records_per_person: the most images of one person that any of these rounds let vote; None without a bound,
            and where nothing was answered.
        reason: why there is no bound; empty where there is one.
    """

    nano: int | None
    records_per_person: int | None = None
    reason: str = ""

    def epsilon(self, delta: float) -> float | None:
        """Return the epsilon of all of it at a delta, rounded up; None without a bound."""
        return None if self.nano is None else epsilon_spent(self.nano, delta)

    def to_json(self, delta: float) -> dict[str, int | float | str | None]:
        """Return its numbers, and the sentence that people read."""
        return {
            "person_nano": self.nano,
            "person_epsilon": self.epsilon(delta),
            "records_per_person": self.records_per_person,
            "reason": self.reason,
            "delta": delta,
            "words": self.in_words(delta),
        }

    def in_words(self, delta: float) -> str:
        """Return it as one sentence."""
        if self.nano is None:
            return f"One patient: no bound is proved, since {self.reason}."
        if self.records_per_person is None:
            return "One patient: nothing was answered, so nothing was learned."
        many = f"{self.records_per_person} voting image{'' if self.records_per_person == 1 else 's'}"
        told = say_epsilon(self.epsilon(delta))
        return f"One patient with at most {many}: at most epsilon {told} so far (delta {delta:g})."


_FORGOTTEN: Final = (
    "charges may have been forgotten (an account was written off), and nobody knows what they cost a person"
)
_UNKNOWN_TASK: Final = "{} of {} answered rounds are of tasks that are not kept here"
_FOR_LIFE: Final = "{} of {} answered rounds are votes for life, which promise something about one image alone"
_NO_LIMIT: Final = "{} of {} answered rounds do not limit how many images of one person vote (records_per_person)"
_NOT_PROVED: Final = "{} of {} answered rounds have no finite price for a person"


def person_spent(rounds: Iterable[tuple[Task | None, int, int]], *, is_complete: bool = True) -> PersonSpent:
    """Add up what answered rounds cost one person at one site, over all tasks and jobs.

    **Claim.** Let x and x' differ in all records of one person at one agent. If round i costs p_i nano-units
    (`person_charge`), everything that the rounds released is mu-GDP for x and x' with mu^2 = sum p_i / 1e9.

    *Proof.* Fix all other records, and what was released before round i. Task, questions and noise of round i are then
    the same for x and x', since they follow from the release and public things. A record's vote depends on the records
    of its site, the task and the batch. (Votes for life have a memory, and get no bound here.) The
    method's person-level theorem bounds the change of the round's sums when a person's records come or go, of which
    at most m = `records_per_person` vote. So round i is mu_i-GDP with mu_i^2 <= p_i / 1e9, given all before. m may
    be another one in each task: the theorem takes the m of its own task, and x, x' are the same pair throughout. GDP
    composes adaptively by adding mu^2 (Dong, Roth, Su 2022). Each p_i is rounded up, and so is the epsilon
    (`labeler.budget.epsilon_spent`, which also holds back what sampler and winners need). QED

    It is the sum of prices of persons, not m times an image's. For reverse-knn with m = 1 a person costs less than an
    image: if one image goes, the person's next one comes in; if the person goes, none does.

    A person at two sites: the two mus add. Tasks that are chosen after seeing answers: like the spending of an account
    without a cap, the number then says what these rounds cost, and is no promise fixed beforehand. Such a promise is m
    times the mu of the image account's cap, by group privacy.

    **Fail closed.** One answered round without a bound for a person makes the sum None. The bound for a whole site does
    not replace it. Other people's records take the places of those that leave. That can move a sum further than a site
    whose ballots become zero (knn: 2 Q min(m, k)^2 against Q k^2).

    Args:
        rounds: the task (None where it is not kept), the queries of a round, and how many such rounds were charged.
        is_complete: False where charges may have been forgotten.
    """
    total, most, every = 0, 0, 0
    missing: dict[str, int] = {}
    for task, queries, count in rounds:
        every += count
        charge = None if task is None else person_charge(task, queries)
        if task is None or charge is None:
            reason = _why_no_person(task)
            missing[reason] = missing.get(reason, 0) + count
            continue
        total += charge * count
        most = max(most, task.records_per_person or 0)
    if not is_complete:
        return PersonSpent(None, reason=_FORGOTTEN)
    if missing:
        # By number and not by name: who reads an account need not know the names of all tasks.
        return PersonSpent(None, reason="; ".join(why.format(many, every) for why, many in missing.items()))
    return PersonSpent(total, most or None)


def _why_no_person(task: Task | None) -> str:
    if task is None:
        return _UNKNOWN_TASK
    if task.lifetime_budget is not None:
        return _FOR_LIFE
    return _NO_LIMIT if task.records_per_person is None else _NOT_PROVED


@lru_cache(maxsize=4096)
def _charges(one: OfKind, queries: int) -> tuple[tuple[Level, int], ...]:
    """Return charges; cached, since they follow from the task and the number, and every job needs the same few."""
    task = one.task
    events = {level: integer_event(task, level, queries) for level in LEVELS if has_finite_price(task, level)}
    return tuple((level, event.round_nano) for level, event in events.items() if event is not None)


def total_charges(task: Task, sizes: Iterable[int], *, answered: int = 0) -> dict[Level, int]:
    """Return the cost of rounds of these sizes together, each rounded up as it will be charged.

    Args:
        answered: queries of the task that the payer was charged for before.
    """
    total: dict[Level, int] = {}
    for size in sizes:
        for level, charge in round_charges(task, size, answered=answered).items():
            total[level] = total.get(level, 0) + charge
        answered += size
    return total


def question_charges(task: Task, queries: int) -> dict[Level, int]:
    """Return each question's share of a job's mu^2, nano-units rounded up; empty if there is no such share.

    For histograms of knn and ensemble every query has the same, separate price. Other methods are one composition,
    and so are winners, because a job's winners are proved to cost less together: the price is for the whole job. With
    votes for life each image pays for its own votes, and nobody learns how many. All of it follows from the task and
    the number alone, never from a vote.
    """
    if task.traits.share_kind(task) != "each":
        return {}
    return {level: -(-nano // queries) for level, nano in total_charges(task, round_sizes(task, queries)).items()}


def mu_squared_of(task: Task, queries: int) -> dict[str, dict[Level, float] | None]:
    """Return the mu^2 of a job, and of each of its questions; None if there is no such share.

    For votes for life: the total of all such jobs together.
    """
    whole = total_charges(task, round_sizes(task, queries))
    if task.lifetime_budget is not None:
        whole = {"instance": task.lifetime_budget.budget_nano}
    each = question_charges(task, queries)
    return {
        "job": {level: nano / NANO for level, nano in whole.items()},
        "question": {level: nano / NANO for level, nano in each.items()} or None,
    }
