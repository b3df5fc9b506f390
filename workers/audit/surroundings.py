"""What an attack is prepared from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from labeler.setting import StatedLevel
from labeler.task import Task

View = Literal["release", "student"]
"""What is looked at: what was opened, or the labels of a student that learnt from it."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What an attack is prepared from.

    Attributes:
        task: the task; its fingerprint is that of the audit's records.
        level: "instance" or "person": what a canary is.
        features, labels: natural records, quantised.
        view: what the adversary looks at.
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

    def rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])
