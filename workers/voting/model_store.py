"""Where an agent keeps what it trains while a task is answered, so that its rounds need one training.

Nothing depends on its being kept: an answer is stored before it leaves and never computed a second time after that
(labeler.answered). So models, which hold private records and no noise, live in memory only, and end with the round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Made = NDArray[np.int64]


class ModelStore(Protocol):
    """Keeps integers under (version of the records, name), for one agent."""

    def once(self, version: str, name: str, make: Callable[[], Made]) -> Made:
        """What is kept under the name; made and kept where there is nothing yet.

        What was made of another version of the records is forgotten: a deleted record must not live on in a model.
        """
        ...


class InMemoryModels:
    """Kept as long as this object, and no longer than the records they were trained on."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Made] = {}

    def once(self, version: str, name: str, make: Callable[[], Made]) -> Made:
        """See ModelStore."""
        if (version, name) not in self._kept:
            self._kept = {key: made for key, made in self._kept.items() if key[0] == version}
            self._kept[version, name] = make()
        return self._kept[version, name]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __repr__(self) -> str:
        return "InMemoryModels(<private>)"
