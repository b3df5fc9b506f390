"""Where an agent keeps what it trains while a task is answered, so that its rounds need one training.

Nothing depends on its being kept: an answer is stored before it leaves and never computed a second time after that
(labeler.rounds.agent). So models, which hold private records and no noise, live in memory only, and end with the round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.task import Task

Made = NDArray[np.int64]


class ModelStore(Protocol):
    """Keeps integers under (version of the records, name), for one agent."""

    def once(self, version: str, name: str, make: Callable[[], Made], *, task: Task | None = None) -> Made:
        """What is kept under the name; made and kept where there is nothing yet.

        What was made of another version of the records is forgotten: a deleted record must not live on in a model.

        Args:
            task: for which it is made, where further rounds of the task need it again.
        """
        ...

    def tasks(self) -> tuple[Task, ...]:
        """For which tasks something is kept that their further rounds need."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class InMemoryModels:
    """Kept as long as this object, and no longer than the records they were trained on."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[Made, Task | None]] = {}

    def once(self, version: str, name: str, make: Callable[[], Made], *, task: Task | None = None) -> Made:
        """See ModelStore."""
        if (version, name) not in self._kept:
            self._kept = {key: made for key, made in self._kept.items() if key[0] == version}
            self._kept[version, name] = make(), task
        return self._kept[version, name][0]

    def tasks(self) -> tuple[Task, ...]:
        """See ModelStore."""
        return tuple(task for _, task in list(self._kept.values()) if task is not None)

    def clear(self) -> None:
        """See ModelStore."""
        self._kept.clear()

    def __repr__(self) -> str:
        return "InMemoryModels(<private>)"
