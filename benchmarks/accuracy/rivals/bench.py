"""Rivals at the same price: `labeler bench rivals` on Office-Caltech10.

**Choosing settings.** On Office-Caltech10 each of the four domains is in turn the server. A method uses there the
setting of best mean student accuracy on the three others at that epsilon, on splits and noise that are not reported.

**The same free reading for all methods.** What a method releases labels public images too. Whatever is computed from
these labels and public features is post-processing, for a rival as for us. So every method is shown twice: as its
authors read it, and with the product's prototypes (`feature_store.students.members`) refined over the public images
from its labels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import DELTA, DOMAINS, PUBLIC_SHARE, data_folder, embed_domains
from benchmarks.accuracy.rivals.methods import (
    ClassMeans,
    Evolution,
    LeastSquares,
    ProductVotes,
    PublicPrototypes,
)
from benchmarks.accuracy.rivals.world import Rival, World
from benchmarks.data import Split, ordered
from feature_store.students.members import PrototypeLearner
from workers.progress import ProgressCallback, silent

OURS: Final = ProductVotes().name

ENTRANTS: Final[dict[str, tuple[Rival, ...]]] = {
    OURS: tuple(ProductVotes(clusters) for clusters in (10, 15, 20, 50)),
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

Reading = Literal["plain", "refined"]
READINGS: Final[tuple[Reading, ...]] = ("plain", "refined")
SURE: Final = 0.82
"""The initial probability of the class that a method names in a refined label; the others share the rest equally."""

OFFICE_EPSILONS: Final = (0.05, 0.1, 0.3, 1.0)
TUNING_SPLITS, REPORTED_SPLITS = range(100, 104), range(10)
COLLUDING: Final = 1
"""Agents that may pool what they know, as in a new task."""

DRAWS: Final = 3

Scores = dict[tuple[Rival, float | None, Reading], list[float]]
"""Accuracies in percent of a setting at an epsilon and a reading, one per world and draw."""

Wanted = Mapping[Rival, Collection[float | None]]
"""The epsilons at which to measure each setting."""


def every_setting(epsilons: Sequence[float | None], names: Collection[str] = tuple(ENTRANTS)) -> Wanted:
    """Return all settings of these methods, each at all epsilons."""
    return {setting: epsilons for name in names for setting in ENTRANTS[name]}


def scores(worlds: Iterable[World], wanted: Wanted, *, draws: int) -> Scores:
    """Return the accuracy on test images of every setting, world by world; without noise one draw is enough."""
    found: Scores = {}
    for world in worlds:
        reader = Reader(world)
        for setting, epsilons in wanted.items():
            predict = setting.fit(world)
            for epsilon in epsilons:
                for draw in range(1 if epsilon is None else draws):
                    for reading, labels in reader.predictions(predict(epsilon, draw).argmax(axis=1)).items():
                        right = 100 * float((labels == world.test.labels).mean())
                        found.setdefault((setting, epsilon, reading), []).append(right)
    return found


class Reader:
    """A reader of one world's labels in both ways; see the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._learner = PrototypeLearner(world.public, num_classes=world.num_classes, seed=0)

    def predictions(self, labels: NDArray[np.int64]) -> dict[Reading, NDArray[np.int64]]:
        """Return labels of the test images, by reading.

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


@dataclass(frozen=True)
class Choice:
    """The setting of each method at each epsilon, for each reading."""

    taken: Mapping[tuple[str, float | None, Reading], Rival]

    @classmethod
    def best(cls, tried: Sequence[Scores], epsilons: Sequence[float | None], names: Collection[str]) -> Choice:
        """Return the setting of best mean over these tables, each table (a server) counting alike."""

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
        """Return the measurements that the report needs."""
        found: dict[Rival, set[float | None]] = {}
        for (_, epsilon, _), setting in self.taken.items():
            found.setdefault(setting, set()).add(epsilon)
        return found


def bench_rivals(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return every rival's student accuracy on every server of Office-Caltech10; see the module."""
    domains = office_domains(data, progress)
    tuning, reported = (TUNING_SPLITS, REPORTED_SPLITS) if full else (TUNING_SPLITS[:1], REPORTED_SPLITS[:1])
    draws = DRAWS if full else 1
    epsilons: tuple[float | None, ...] = (*OFFICE_EPSILONS, None)
    tried: dict[str, Scores] = {}
    for server in in_turn(progress, "Choosing settings", DOMAINS):
        worlds = (office_world(domains, server, split) for split in tuning)
        tried[server] = scores(worlds, every_setting(epsilons), draws=draws)
    rows: list[BenchRow] = []
    for server in in_turn(progress, "Rivals", DOMAINS):
        choice = Choice.best([tried[one] for one in tried if one != server], epsilons, ENTRANTS)
        found = scores((office_world(domains, server, split) for split in reported), choice.wanted, draws=draws)
        for (name, epsilon, reading), setting in choice.taken.items():
            method = name if reading == "plain" else f"{name}; refined"
            metric = "student accuracy on unseen images, %"
            rows.append(_row(server, method, metric, found[setting, epsilon, reading], epsilon, DELTA, repr(setting)))
    return rows + _means(rows)


def _row(
    case: str, method: str, metric: str, found: Sequence[float], epsilon: float | None, delta: float, setting: str
) -> BenchRow:
    return mean_row(
        case,
        method,
        metric,
        found,
        epsilon=epsilon,
        delta=None if epsilon is None else delta,
        level=None if epsilon is None else "instance",
        settings={"colluding_agents": COLLUDING, "setting": setting, "runs": len(found)},
    )


def _means(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the mean over servers of each method at each epsilon, and the mean of the servers' deviations."""
    groups: dict[tuple[str, float | None], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault((row.method, row.epsilon), []).append(row)
    return [
        replace(
            several[0],
            case="mean of four servers",
            value=float(np.mean([row.value for row in several])),
            sd=float(np.mean([row.sd or 0.0 for row in several])),
            settings={"colluding_agents": COLLUDING},
        )
        for several in groups.values()
    ]


def office_domains(data: Path | None, progress: ProgressCallback) -> dict[str, Split]:
    """Return the four domains as MobileNetV2 features, in the order of file names."""
    found = {domain: ordered(shard) for domain, shard in embed_domains(data_folder(data), progress).items()}
    return {
        domain: Split(rows.astype(np.float32) / np.float32(2048), labels) for domain, (rows, labels) in found.items()
    }


def office_world(domains: Mapping[str, Split], server: str, split: int, *, colluding_agents: int = COLLUDING) -> World:
    """Return the world of `labeler bench office-caltech`: the same split of the server's images."""
    asked = domains[server]
    order = np.random.default_rng([split, DOMAINS.index(server)]).permutation(len(asked))
    public, test = np.split(order, [int(PUBLIC_SHARE * len(order))])
    return World(
        name=f"office {server} {split}",
        holdings=[domains[domain] for domain in DOMAINS if domain != server],
        public=asked.inputs[public],
        test=_part(asked, test),
        num_classes=10,
        colluding_agents=colluding_agents,
    )


def _part(split: Split, rows: NDArray[np.int64]) -> Split:
    return Split(split.inputs[rows], split.labels[rows])
