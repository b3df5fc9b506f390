"""What an attack is prepared from, and the task that is attacked.

The task comes from a task file, from the folder of a run, or as JSON of a job's task.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, InvalidTask
from labeler.methods import METHODS
from labeler.setting import StatedLevel
from labeler.system.files import read_named
from labeler.task import Task, parse_task
from workers.audit.poison import DIMENSION
from workers.run.task_file import read_task_file

View = Literal["release", "student"]
"""What is looked at: what was opened, or the labels of a student that learnt from it."""


def check_attackable(task: Task, level: StatedLevel, view: View) -> None:
    """Refuse what no adversary here was made for.

    Raises:
        InvalidSetting: the method is not known here, or no attack on a whole agent of it, or on a student, is.
    """
    if not task.traits.is_attacked:
        attacked = sorted(name for name, method in METHODS.items() if method.is_attacked)
        raise InvalidSetting(
            f"no adversary of an audit was made for method {task.method}, so what it proved would say nothing; add one "
            f"to workers.audit, or audit a task of {', '.join(attacked)}"
        )
    if level == "agent" and task.traits.has_local_noise:
        raise InvalidSetting(
            "an agent whose noise is in what it answers cannot be silenced under that noise, so no attack on a whole "
            f"agent is known for method {task.method}; audit it at level instance or person"
        )
    sampled = None if task.training is None else task.training.sampled
    if sampled is not None and (level != "instance" or view != "release" or sampled.unit != "record"):
        raise InvalidSetting(
            "of training in steps an audit attacks one record in the release of steps that sample records (unit = "
            '"record"); no adversary was made for other levels, units or views'
        )
    if view == "student" and task.attributes_per_record is not None:
        raise InvalidSetting("no student is looked at that learnt attributes; audit the release (--view release)")


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What an attack is prepared from.

    Attributes:
        task: the task; its fingerprint is that of the audit's records.
        features, labels: natural records, quantised.
        folder: empty, for its files.
        seed: of everything public; the same for the same audit.
        noise_seed: of all noise; None draws it as the product does.
    """

    task: Task
    level: StatedLevel
    features: NDArray[np.int16]
    labels: NDArray[np.int16]
    view: View
    folder: Path
    seed: int
    noise_seed: int | None

    def __post_init__(self) -> None:
        check_attackable(self.task, self.level, self.view)

    def rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])


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
