"""What an attack is prepared from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.methods import METHODS
from labeler.setting import StatedLevel
from labeler.task import Task

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
