"""A small task, for tests that are about some of its fields, and the bounds that its price covers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.batching import round_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.methods.sensitivity import largest_change, squared_sensitivity
from labeler.query_budgets import ChargedRounds, query_budgets, running_prices
from labeler.setting import LEVELS
from labeler.task import StatedLevel, Task, parse_task

FIELDS: dict[str, Any] = {
    "name": "t", "method": "knn", "classes": ("a", "b", "c"), "sigma_votes": 5.0, "delta": 1e-4, "max_queries": 100,
    "agents": 3,
}  # fmt: skip


def make_task(**changes: Any) -> Task:
    return parse_task(FIELDS | changes)


def budgets_of(task: Task, rows: int) -> dict[str, list[Any]]:
    """The columns of a job of one round that a ledger charged."""
    paid = dict.fromkeys(LEVELS, UNBOUNDED_NANO) | (round_charges(task, rows) if rows else {})
    charged = [ChargedRounds((rows,), paid, paid)]
    return query_budgets(task, charged, rows=rows, prices=running_prices(task, rows)).columns("job", task.delta)


def check_change(task: Task, level: StatedLevel, queries: int, change: NDArray[np.int64], *, scale: int = 1) -> None:
    """A change of ballots, in units of which a vote has `scale`, is within what the task is charged for."""
    squared, largest = squared_sensitivity(task, level, queries), largest_change(task, level)
    assert squared is not None
    assert largest is not None
    assert int(np.square(change).sum()) <= squared * scale**2
    assert np.abs(change).max(initial=0) <= largest * scale
