"""Rivals at the same price: `labeler bench rivals` on Office-Caltech10, and, `full`, on CIFAR-10.

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import DOMAINS, data_folder, embed_domains, office_split
from benchmarks.accuracy.rivals.methods import (
    ClassMeans,
    Evolution,
    LeastSquares,
    ProductVotes,
    PublicPrototypes,
)
from benchmarks.accuracy.rivals.world import Rival, World
from benchmarks.data import Split, cifar10_features, split_of
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

Choice = dict[tuple[str, float | None, Reading], Rival]
"""The setting of each method at each epsilon, for each reading."""


def scores(worlds: Iterable[World], wanted: Mapping[Rival, Collection[float | None]], *, draws: int) -> Scores:
    """Return the accuracy on test images of every setting at its epsilons; without noise one draw is enough."""
    found: Scores = {}
    for world in worlds:
        learner = PrototypeLearner(world.public, num_classes=world.num_classes, seed=0)
        for setting, epsilons in wanted.items():
            predict = setting.fit(world)
            for epsilon in epsilons:
                for draw in range(1 if epsilon is None else draws):
                    for reading, labels in readings(world, learner, predict(epsilon, draw).argmax(axis=1)).items():
                        right = 100 * float((labels == world.test.labels).mean())
                        found.setdefault((setting, epsilon, reading), []).append(right)
    return found


def readings(world: World, learner: PrototypeLearner, labels: NDArray[np.int64]) -> dict[Reading, NDArray[np.int64]]:
    """Return labels of the test images, read in both ways of the module from a method's labels of `World.asked`."""
    scored, classes = len(world.test), world.num_classes
    said = labels[scored:]
    evidence = np.full((len(said), classes), (1 - SURE) / (classes - 1))
    evidence[np.arange(len(said)), said] = SURE
    student = learner.fit(evidence, np.ones(len(said))).model
    refined = student.predict_proba(world.test.inputs).argmax(axis=1)
    return {"plain": labels[:scored], "refined": np.asarray(refined, dtype=np.int64)}


def best(tried: Sequence[Scores], epsilons: Sequence[float | None]) -> Choice:
    """Return the setting of best mean over these tables, each table (a server) counting alike."""

    def mean(setting: Rival, epsilon: float | None, reading: Reading) -> float:
        return float(np.mean([np.mean(table[setting, epsilon, reading]) for table in tried]))

    return {
        (name, epsilon, reading): max(settings, key=partial(mean, epsilon=epsilon, reading=reading))
        for name, settings in ENTRANTS.items()
        for epsilon in epsilons
        for reading in READINGS
    }


def bench_rivals(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return every rival's student accuracy on every server of Office-Caltech10; see the module."""
    domains = {name: split_of(shard) for name, shard in embed_domains(data_folder(data), progress).items()}
    tuning, reported = (TUNING_SPLITS, REPORTED_SPLITS) if full else (TUNING_SPLITS[:1], REPORTED_SPLITS[:1])
    draws = DRAWS if full else 1
    epsilons: tuple[float | None, ...] = (*OFFICE_EPSILONS, None)
    every = {setting: epsilons for several in ENTRANTS.values() for setting in several}
    tried: dict[str, Scores] = {}
    for server in in_turn(progress, "Choosing settings", DOMAINS):
        tried[server] = scores((office_world(domains, server, split) for split in tuning), every, draws=draws)
    rows: list[BenchRow] = []
    for server in in_turn(progress, "Rivals", DOMAINS):
        choice = best([tried[one] for one in tried if one != server], epsilons)
        rows += _reported(server, [office_world(domains, server, split) for split in reported], choice, draws)
    rows += _means(rows)
    return rows + (_on_cifar10(data_folder(data), every, epsilons, progress) if full else [])


def _reported(case: str, worlds: Sequence[World], choice: Choice, draws: int) -> list[BenchRow]:
    """Measure every method with its chosen setting."""
    wanted: dict[Rival, set[float | None]] = {}
    for (_, epsilon, _), setting in choice.items():
        wanted.setdefault(setting, set()).add(epsilon)
    found = scores(worlds, wanted, draws=draws)
    return [
        mean_row(
            case,
            name if reading == "plain" else f"{name}; refined",
            "student accuracy on unseen images, %",
            found[setting, epsilon, reading],
            epsilon=epsilon,
            delta=None if epsilon is None else worlds[0].delta,
            level=None if epsilon is None else "instance",
            settings={
                "colluding_agents": COLLUDING,
                "setting": repr(setting),
                "splits": len(worlds),
                "draws": 1 if epsilon is None else draws,
            },
        )
        for (name, epsilon, reading), setting in choice.items()
    ]


def _on_cifar10(
    root: Path,
    every: Mapping[Rival, Collection[float | None]],
    epsilons: Sequence[float | None],
    progress: ProgressCallback,
) -> list[BenchRow]:
    """Measure the same on CIFAR-10, with settings chosen on training images that are at no agent of the rows."""
    images = cifar10_features(root, progress=progress)
    first, second = np.split(np.random.default_rng(7).permutation(len(images.train)), 2)
    chosen_on = images.train[first]
    chosen = scores([cifar10_world(chosen_on, chosen_on, 0)], every, draws=1)
    worlds = [cifar10_world(images.train[second], images.test, seed) for seed in range(1, 1 + DRAWS)]
    return _reported("CIFAR-10, 10 agents x 400", worlds, best([chosen], epsilons), DRAWS)


def cifar10_world(private: Split, asked: Split, seed: int) -> World:
    """Return ten agents of 400 images each, 2,500 public images and 5,000 that score, no image twice."""
    held = np.random.default_rng([seed, 1]).permutation(len(private))
    shown = np.random.default_rng([seed, 2]).permutation(len(asked))
    if asked is private:
        shown = held[4_000:]
    return World(
        name=f"cifar10 {seed}",
        holdings=[private[rows] for rows in np.split(held[:4_000], 10)],
        public=asked.inputs[shown[:2_500]],
        test=asked[shown[2_500:7_500]],
        num_classes=10,
        colluding_agents=COLLUDING,
        delta=1e-5,
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
            settings={name: several[0].settings[name] for name in ("colluding_agents", "splits", "draws")},
        )
        for several in groups.values()
    ]


def office_world(domains: Mapping[str, Split], server: str, split: int) -> World:
    """Return the world of `labeler bench office-caltech`: the same split of the server's images."""
    asked = domains[server]
    public, test = office_split(len(asked), server, split)
    return World(
        name=f"office {server} {split}",
        holdings=[domains[domain] for domain in DOMAINS if domain != server],
        public=asked.inputs[public],
        test=asked[test],
        num_classes=10,
        colluding_agents=COLLUDING,
    )
