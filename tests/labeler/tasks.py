"""A small task, for tests that are about some of its fields."""

from __future__ import annotations

from typing import Any

from labeler.task import Task, parse_task

FIELDS: dict[str, Any] = {
    "name": "t", "classes": ("a", "b", "c"), "sigma_votes": 5.0, "delta": 1e-4, "max_queries": 100, "agents": 3,
}  # fmt: skip


def make_task(**changes: Any) -> Task:
    return parse_task(FIELDS | changes)
