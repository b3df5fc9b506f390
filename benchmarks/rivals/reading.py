"""The same free reading for everybody: what a method says of the public images, refined over them by our student.

What a method releases labels public images too, and whatever is computed from these labels and public features is
post-processing, for a rival as for us. So every method is shown twice: as its authors read it, and with the
product's prototypes (`feature_store.students.members`) refined over the public images from its labels.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.world import World
from feature_store.students.members import PrototypeLearner

SURE: Final = 0.82
"""What a refined label starts from: so much for the class a method names, the rest alike for the others."""

Reading = Literal["plain", "refined"]
READINGS: Final[tuple[Reading, ...]] = ("plain", "refined")


class Reader:
    """Reads one world's labels in both ways; see the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._learner = PrototypeLearner(world.public, num_classes=world.num_classes, seed=0)

    def predictions(self, labels: NDArray[np.int64]) -> dict[Reading, NDArray[np.int64]]:
        """Labels of the test images, by reading.

        Args:
            labels: of `World.asked`, as a method gave them.
        """
        scored, classes = len(self._world.test), self._world.num_classes
        said = labels[scored:]
        evidence = np.full((len(said), classes), (1 - SURE) / (classes - 1))
        evidence[np.arange(len(said)), said] = SURE
        student = self._learner.fit(evidence, np.ones(len(said)))
        refined = student.predict_proba(self._world.test.inputs).argmax(axis=1)
        return {"plain": labels[:scored], "refined": np.asarray(refined, dtype=np.int64)}
