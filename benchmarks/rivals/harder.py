"""Harder and fairer sets, one trouble at a time: how each method degrades, and what clipping saves.

`labeler bench harder`. CIFAR-10 (EfficientNet-Lite2, ten agents of 400 records, epsilon 0.3, delta 1e-5, one colluding
agent), each case the plain world but for one thing:

* **imbalance 1:100**: class c keeps a share 100^(-c/9) of its private records; public and scored images stay balanced;
* **a class nobody holds**: no private record of the last class; what is scored has it all the same;
* **disjoint classes**: each agent holds records of one class, another one each;
* **10 % wrong labels**: that share of every agent's records has a label drawn at random from the others;
* **one agent poisons its data**: all its records carry the next class's label. It keeps to the protocol;
* **one agent lies**: it sends a vector of length R the other way. Secret sharing hides a vector from everybody, so a
  lie is bounded by what talliers can check of a sum or by nothing: R is 16,384 (no bound that binds), or `CLIPPED`, to
  which every agent is clipped and which is about the length of an honest vector. That the liar is clipped too takes a
  check of norms on shares, which the service has for rows of votes (`labeler.tally`), not for norms.

And Office-Caltech10 with **no domain twin**: webcam is labelled by amazon and caltech10 alone, dslr (the same objects
by another camera) being left out; beside it the same server with its twin.

Settings are chosen at the same epsilon on the plain world of other CIFAR-10 images, for Office on its other servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.data_sets import DataSet, Split, cifar10_features, data_root
from benchmarks.rivals.cifar10_worlds import AGENTS, cifar10_world
from benchmarks.rivals.contest import ENTRANTS, Choice, every_setting, scores
from benchmarks.rivals.office_worlds import office_domains, office_world
from benchmarks.rivals.reading import Reader, Reading
from benchmarks.rivals.world import Rival, World
from benchmarks.rows import BenchRow
from workers.progress import ProgressCallback, silent

EPSILON: Final = 0.3
RECORDS: Final = 400
CLIPPED: Final = 64.0
SEEDS, DRAWS, TUNING_SEED = (0, 1, 2), 2, 100
LEAST_SHARE: Final = 0.01
WRONG: Final = 0.1


def imbalanced(world: World, random: np.random.Generator) -> World:
    """1:100 from the first class to the last, at every agent."""
    share = LEAST_SHARE ** (np.arange(world.num_classes) / (world.num_classes - 1))
    return _kept(world, lambda one: random.random(len(one)) < share[one.labels])


def without_last_class(world: World, _: np.random.Generator) -> World:
    """No private record of the last class."""
    return _kept(world, lambda one: one.labels != world.num_classes - 1)


def disjoint(world: World, _: np.random.Generator) -> World:
    """All private records, divided again: each agent has one class."""
    inputs = np.concatenate([one.inputs for one in world.holdings])
    labels = np.concatenate([one.labels for one in world.holdings])
    return replace(world, holdings=[Split(inputs[labels == c], labels[labels == c]) for c in range(world.num_classes)])


def mislabelled(world: World, random: np.random.Generator) -> World:
    """A tenth of all labels is another class, at random."""

    def changed(one: Split) -> Split:
        other = (one.labels + random.integers(1, world.num_classes, len(one))) % world.num_classes
        return Split(one.inputs, np.where(random.random(len(one)) < WRONG, other, one.labels))

    return replace(world, holdings=[changed(one) for one in world.holdings])


def poisoned(world: World, _: np.random.Generator) -> World:
    """The first agent calls every class by the name of the next."""
    first, *others = world.holdings
    return replace(world, holdings=[Split(first.inputs, (first.labels + 1) % world.num_classes), *others])


TROUBLES: Final[Mapping[str, Callable[[World, np.random.Generator], World]]] = {
    "plain": lambda world, _: world,
    "imbalance 1:100": imbalanced,
    "a class nobody holds": without_last_class,
    "disjoint classes": disjoint,
    "10 % wrong labels": mislabelled,
    "one agent poisons its data": poisoned,
    "plain, clipped": lambda world, _: replace(world, radius=CLIPPED),
    "one agent lies": lambda world, _: replace(world, liar=0),
    "one agent lies, all clipped": lambda world, _: replace(world, liar=0, radius=CLIPPED),
}


def bench_harder(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Every trouble, every method; see the module.

    Args:
        data: folder of the real data sets.
        full: both seeds and both draws.

    Raises:
        InvalidSetting: the data are not there.
    """
    root = data_root(data)
    features = cifar10_features(root, backbone="efficientnet-lite2", progress=progress)
    draws, seeds = (DRAWS, SEEDS) if full else (1, SEEDS[:1])
    tuning = cifar10_world(features, TUNING_SEED, records=RECORDS, tuning=True)
    chosen = best_settings([tuning], draws)
    rows: list[BenchRow] = []
    for number, (trouble, change) in enumerate(TROUBLES.items()):
        progress("Harder sets", number, len(TROUBLES) + 1)
        worlds = [_troubled(features, seed, change) for seed in seeds]
        rows += _measured(f"CIFAR-10, {AGENTS} agents x {RECORDS}: {trouble}", worlds, chosen, draws)
    progress("Harder sets", len(TROUBLES), len(TROUBLES) + 1)
    domains = office_domains(data, progress)
    others = [office_world(domains, server, 100) for server in ("amazon", "caltech10", "dslr")]
    chosen = best_settings(others, draws)
    twins = [office_world(domains, "webcam", split) for split in range(3 if full else 1)]
    alone = [replace(one, name=f"{one.name} alone", holdings=one.holdings[:2]) for one in twins]
    rows += _measured("Office-Caltech10, webcam: with its twin dslr", twins, chosen, draws)
    rows += _measured("Office-Caltech10, webcam: no domain twin", alone, chosen, draws)
    progress("Harder sets", len(TROUBLES) + 1, len(TROUBLES) + 1)
    return rows


def _troubled(features: DataSet, seed: int, change: Callable[[World, np.random.Generator], World]) -> World:
    return change(cifar10_world(features, seed, records=RECORDS), np.random.default_rng([seed, 5]))


def best_settings(worlds: Sequence[World], draws: int) -> dict[str, tuple[Rival, Reading]]:
    """Setting and reading of each method, of best mean accuracy on these worlds."""
    tried = [scores([world], every_setting((EPSILON,)), draws=draws) for world in worlds]
    choice = Choice.best(tried, (EPSILON,), ENTRANTS)

    def mean(name: str, reading: Reading) -> float:
        return float(
            np.mean([np.mean(table[choice.taken[name, EPSILON, reading], EPSILON, reading]) for table in tried])
        )

    found: dict[str, tuple[Rival, Reading]] = {}
    for name in ENTRANTS:
        reading: Reading = "plain" if mean(name, "plain") >= mean(name, "refined") else "refined"
        found[name] = (choice.taken[name, EPSILON, reading], reading)
    return found


def _measured(
    case: str, worlds: Sequence[World], chosen: Mapping[str, tuple[Rival, Reading]], draws: int
) -> list[BenchRow]:
    """Accuracy, and the recall of the class that fares worst."""
    rows: list[BenchRow] = []
    for name, (setting, reading) in chosen.items():
        right: list[float] = []
        worst: list[float] = []
        for world in worlds:
            predict, reader, truth = setting.fit(world), Reader(world), world.test.labels
            for draw in range(draws):
                hit = reader.predictions(predict(EPSILON, draw))[reading] == truth
                right.append(100 * float(hit.mean()))
                worst.append(100 * min(float(hit[truth == c].mean()) for c in range(world.num_classes)))
        for metric, values in (("test accuracy, %", right), ("recall of the worst class, %", worst)):
            rows.append(
                BenchRow(
                    case=case,
                    method=name,
                    metric=metric,
                    value=float(np.mean(values)),
                    sd=float(np.std(values, ddof=1)) if len(values) > 1 else None,
                    epsilon=EPSILON,
                    delta=worlds[0].delta,
                    level="instance",
                    settings={"setting": repr(setting), "reading": reading, "colluding_agents": 1},
                )
            )
    return rows


def _kept(world: World, which: Callable[[Split], np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]) -> World:
    masks = [which(one) for one in world.holdings]
    held = [Split(one.inputs[mask], one.labels[mask]) for one, mask in zip(world.holdings, masks, strict=True)]
    return replace(world, holdings=held)
