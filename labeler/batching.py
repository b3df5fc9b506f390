"""Number of queries per round, and the charge of each round.

A job is asked in rounds: large enough that searching is one matrix product, small enough that a crash repeats
little. For knn and ensemble every query is priced by itself, so cutting a job into rounds is free. The other
methods are one composition per round (see labeler.planning), so all their queries go into one. A model that is trained
in steps takes one round per step, each of all its rows. They are one composition, too, which the first of them pays
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from labeler.accounting.events import NANO
from labeler.errors import InvalidSetting, InvalidTask
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
        queries: at least 1.
        batch_queries: most queries of one round, at least 1.

    Raises:
        InvalidSetting: a number below 1.
    """
    if queries < 1 or batch_queries < 1:
        raise InvalidSetting(f"a job has at least 1 query per round, found {min(queries, batch_queries)}")
    if task.traits.single_round:
        each, rest = divmod(queries, task.steps)
        return (each,) * task.steps if each and not rest else (queries,)
    words = words_per_query(task.winner_terms, num_classes=task.num_classes, agents=task.agents)
    most = max(1, min(batch_queries, MAX_ROUND_ENTRIES // words))
    full, rest = divmod(queries, most)
    return (most,) * full + ((rest,) if rest else ())


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
    entries = queries // task.steps * task.num_classes
    if task.traits.single_round and entries > MAX_ROUND_ENTRIES:
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


def due(task: Task, charges: Mapping[Level, int], *, answered: int) -> dict[Level, int]:
    """Return the remaining charge for a round of this price, after `answered` queries of its task were charged."""
    if task.traits.is_sampled and answered:
        return dict.fromkeys(charges, LATER_STEP_NANO)
    return dict(charges)


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
