"""The task that an audit is of: from a task file, from the folder of a run, or as JSON of a job's task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from feature_store.named_files import read_named
from labeler.errors import InvalidTask
from labeler.methods import METHODS
from labeler.task import Task, parse_task
from workers.audit.poison import DIMENSION
from workers.jobs.task_file import read_task_file

AGENTS: Final = 3
QUERIES: Final = 100


def read_task(
    path: Path, *, agents: int | None, queries: int | None, classes: tuple[str, ...], fingerprint: str = "audit"
) -> Task:
    """A task.

    Args:
        path: a task file (TOML); the output folder of `labeler run`; or a JSON file with a task, or with one under
            "task", as `GET /v1/tasks/{id}` answers.
        agents, queries: for a task file, which leaves them open; AGENTS and what it says, or QUERIES, where None.
        classes: for a task file that names none.
        fingerprint: for a task file.

    Raises:
        InvalidTask: there is no task there, or it is out of bounds.
    """
    if path.is_dir():
        return _stored(path / ".job" / "plan.json", "the folder of a run", agents, queries)
    if path.suffix == ".json":
        return _stored(path, "a task", agents, queries)
    file = read_task_file(path)
    asked = queries or file.queries.count
    if asked is None:
        asked = DIMENSION + 1 if METHODS[file.task.method].asks_for_a_model else QUERIES
    return file.resolve(
        classes=classes,
        agents=agents or AGENTS,
        num_queries=asked * file.steps,
        fingerprint=fingerprint,
        nonce="audit",
        has_attributes=file.task.attributes_per_record is not None,
    )


def _stored(path: Path, what: str, agents: int | None, queries: int | None) -> Task:
    if agents is not None or queries is not None:
        raise InvalidTask("a stored task says how many agents and queries it has; leave --agents and --queries out")
    try:
        found = json.loads(read_named(path))
    except (OSError, ValueError, RecursionError):
        raise InvalidTask(
            f"{path} cannot be read as {what}; name a task file, a run's folder or a task as JSON"
        ) from None
    for key in ("plan", "task"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    return parse_task(found)
