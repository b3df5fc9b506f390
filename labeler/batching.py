"""How many queries go into one round, and what each round is charged.

A job is asked in rounds: large enough that searching is one matrix product, small enough that a crash repeats
little. For knn every query is priced by itself, so cutting a job into rounds is free. Reverse-knn is one
composition per round (see labeler.planning), so all its queries go into one.
"""

from __future__ import annotations

from collections.abc import Iterable

from labeler.errors import InvalidSetting
from labeler.planning import integer_event
from labeler.task import Level, Task

BATCH_QUERIES = 4096
"""Most queries asked in one round, for methods that may be cut."""

LEVELS: tuple[Level, Level] = ("instance", "agent")


def round_sizes(task: Task, queries: int, *, batch_queries: int = BATCH_QUERIES) -> tuple[int, ...]:
    """Queries per round of a job of so many queries; they add up to `queries`.

    Args:
        task: says how agents vote.
        queries: at least 1.
        batch_queries: most queries of one round, at least 1.

    Raises:
        InvalidSetting: a number below 1.
    """
    if queries < 1 or batch_queries < 1:
        raise InvalidSetting(f"a job has at least 1 query per round, found {min(queries, batch_queries)}")
    if task.method == "reverse-knn":
        return (queries,)
    full, rest = divmod(queries, batch_queries)
    return (batch_queries,) * full + ((rest,) if rest else ())


def round_charges(task: Task, queries: int) -> dict[Level, int]:
    """What one round costs, in nano-units of mu^2 rounded up, at the levels at which its sensitivity is bounded."""
    events = {level: integer_event(task, level, queries) for level in LEVELS}
    return {level: event.charge_nano for level, event in events.items() if event is not None}


def total_charges(task: Task, sizes: Iterable[int]) -> dict[Level, int]:
    """What rounds of these sizes cost together, each rounded up as it will be charged."""
    total: dict[Level, int] = {}
    for size in sizes:
        for level, charge in round_charges(task, size).items():
            total[level] = total.get(level, 0) + charge
    return total
