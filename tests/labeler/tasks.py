"""A small task, for tests that are about some of its fields, and the bounds that its price covers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.methods.sensitivity import largest_change, squared_sensitivity
from labeler.task import StatedLevel, Task, parse_task

FIELDS: dict[str, Any] = {
    "name": "t", "method": "knn", "classes": ("a", "b", "c"), "sigma_votes": 5.0, "delta": 1e-4, "max_queries": 100,
    "agents": 3,
}  # fmt: skip


def make_task(**changes: Any) -> Task:
    return parse_task(FIELDS | changes)


def check_change(task: Task, level: StatedLevel, queries: int, change: NDArray[np.int64], *, scale: int = 1) -> None:
    """A change of ballots, in units of which a vote has `scale`, is within what the task is charged for."""
    squared, largest = squared_sensitivity(task, level, queries), largest_change(task, level)
    assert squared is not None
    assert largest is not None
    assert int(np.square(change).sum()) <= squared * scale**2
    assert np.abs(change).max(initial=0) <= largest * scale
