"""Who takes part, with which settings, and how a setting is chosen elsewhere than where it is reported."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from benchmarks.rivals.dppl import ClassMeans, PublicPrototypes
from benchmarks.rivals.evolution import Evolution
from benchmarks.rivals.least_squares import LeastSquares
from benchmarks.rivals.reading import READINGS, Reader, Reading
from benchmarks.rivals.voting import CentredVotes, ProductVotes
from benchmarks.rivals.world import Rival, World

OURS: Final = ProductVotes().name

ENTRANTS: Final[dict[str, tuple[Rival, ...]]] = {
    OURS: tuple(ProductVotes(clusters) for clusters in (10, 15, 20, 50)),
    "reverse-knn, votes x centred centres": tuple(CentredVotes(clusters) for clusters in (10, 12, 15, 20, 50)),
    "class means on public axes": tuple(LeastSquares(axes, math.inf, 0.0) for axes in (8, 10, 16, 32)),
    "least squares, public covariance": tuple(
        LeastSquares(axes, ridge, 0.0) for axes in (10, 16, 32) for ridge in (0.3, 3.0)
    ),
    "DPPL-Mean": tuple(ClassMeans(pool) for pool in (1, 16)),
    "DPPL-Public": (PublicPrototypes(), *(PublicPrototypes(low, low + 0.4) for low in (0.2, 0.3, 0.4))),
    "Private Evolution, public pool": tuple(
        Evolution(rounds, population, 1.0) for rounds in (2, 3) for population in (20, 40)
    ),
}
"""Every method by its name, with the settings it may take."""

Scores = dict[tuple[Rival, float | None, Reading], list[float]]
"""Accuracies in percent of a setting at an epsilon and a reading, one per world and draw."""

Wanted = Mapping[Rival, Collection[float | None]]
"""Which epsilons to measure each setting at."""


def every_setting(epsilons: Sequence[float | None], names: Collection[str] = tuple(ENTRANTS)) -> Wanted:
    """All settings of these methods, each at all epsilons."""
    return {setting: epsilons for name in names for setting in ENTRANTS[name]}


def scores(worlds: Iterable[World], wanted: Wanted, *, draws: int) -> Scores:
    """Accuracy on test images of every setting, world by world; without noise one draw is enough."""
    found: Scores = {}
    for world in worlds:
        reader = Reader(world)
        for setting, epsilons in wanted.items():
            predict = setting.fit(world)
            for epsilon in epsilons:
                for draw in range(1 if epsilon is None else draws):
                    for reading, labels in reader.predictions(predict(epsilon, draw)).items():
                        right = 100 * float((labels == world.test.labels).mean())
                        found.setdefault((setting, epsilon, reading), []).append(right)
    return found


@dataclass(frozen=True)
class Choice:
    """Which setting each method takes at each epsilon, for each reading."""

    taken: Mapping[tuple[str, float | None, Reading], Rival]

    @classmethod
    def best(cls, tried: Sequence[Scores], epsilons: Sequence[float | None], names: Collection[str]) -> Choice:
        """The setting of best mean over these tables, each table (a server) counting alike."""

        def mean(setting: Rival, epsilon: float | None, reading: Reading) -> float:
            return float(np.mean([np.mean(table[setting, epsilon, reading]) for table in tried]))

        return cls(
            {
                (name, epsilon, reading): max(ENTRANTS[name], key=partial(mean, epsilon=epsilon, reading=reading))
                for name in names
                for epsilon in epsilons
                for reading in READINGS
            }
        )

    @property
    def wanted(self) -> Wanted:
        """What has to be measured to report it."""
        found: dict[Rival, set[float | None]] = {}
        for (_, epsilon, _), setting in self.taken.items():
            found.setdefault(setting, set()).add(epsilon)
        return found
