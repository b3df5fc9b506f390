"""Worlds of CIFAR-10: ten agents hold training images; the server's public and the scored ones are test images.

Two halves that share no labelled image: settings are chosen on one and reported on the other. Of the test images
2,500 are public in both (their labels are never looked at), 2,500 score while settings are chosen, 5,000 score what
is reported; of the training images 10,000 are for choosing, 40,000 for what is reported.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks.data_sets import DataSet, Split
from benchmarks.rivals.world import World

AGENTS: Final = 10
DELTA: Final = 1e-5
PUBLIC, TUNING_TEST, TUNING_TRAIN = 2_500, 2_500, 10_000


def cifar10_world(data: DataSet, seed: int, *, records: int, tuning: bool = False) -> World:
    """Ten agents of so many records each.

    Args:
        data: features; see `benchmarks.data_sets.cifar10_features`.
        seed: who holds what.
        records: of each agent; while settings are chosen at most 1,000.
        tuning: whether settings are chosen with it.
    """
    always = np.random.default_rng(10)
    test, train = always.permutation(len(data.test)), always.permutation(len(data.train))
    public, choosing, scored = np.split(test, [PUBLIC, PUBLIC + TUNING_TEST])
    pool = train[:TUNING_TRAIN] if tuning else train[TUNING_TRAIN:]
    rows = np.random.default_rng([seed, records]).permutation(pool)
    size = min(records, len(pool) // AGENTS)
    return World(
        name=f"cifar10 {seed} {records} {tuning}",
        holdings=[_part(data.train, rows[agent * size : (agent + 1) * size]) for agent in range(AGENTS)],
        public=data.test.inputs[public],
        test=_part(data.test, choosing if tuning else scored),
        num_classes=data.num_classes,
        delta=DELTA,
    )


def _part(split: Split, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Split:
    return Split(split.inputs[rows], split.labels[rows])
