"""The right answers of an agent of `aux-distill`, worked out apart from the product: heads by Newton's method until
they stand still, the noise of its key on their grid, and soft labels of what comes out.

    z = (x - mean) A, brought to one length, and a constant              A: principal axes of the public negatives
    J(B) = (1/N) sum -log softmax(B z)_y + lambda/2 |B|^2                N = max(records, n)
    K(b) = (1/M) (sum log(1 + exp(-b.z)) + sum log(1 + exp(b.z)))  + lambda/2 |b|^2      private, then negative rows
    soft label = softmax(3 B z) / (1 + exp(-8 b.z))                      of the noisy B and b
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.methods.aux_distill import head_terms
from labeler.noise import DiscreteGaussian
from labeler.randomness import ByteSource
from labeler.task import Task
from tests.simulation.ways import softmax

Floats = NDArray[np.float64]

_EVERY = 5
"""Every so many-th question is a public negative."""

_CONSTANT = 0.1
_LEAST = 0.1
_WHITENING = 0.5
_STEPS = 60


def soft_labels(task: Task, path: Path, asked: NDArray[np.int16], *, source: ByteSource) -> NDArray[np.int64]:
    """Grid units, shape (questions, classes).

    Args:
        path: the records.
        asked: the questions of the round, all of the task.
        source: what the agent draws the noise of its heads from.
    """
    terms = head_terms(task)
    heads, scores = _fitted(task, path, asked.tobytes())
    mechanism = terms.mechanism
    told = np.concatenate([heads.ravel() / terms.head_noise, scores / terms.score_noise])
    noise = DiscreteGaussian(mechanism.share_sigma_grid).sample(source, told.size)
    noisy = (np.rint(told * mechanism.scale) + noise) / mechanism.scale
    heads = (noisy[: heads.size] * terms.head_noise).reshape(heads.shape)
    rows = _map_of(asked.astype(np.float64) / 2048.0, task)(asked.astype(np.float64) / 2048.0)
    chances = softmax(3.0 * rows @ heads.T)
    certain = 1 / (1 + np.exp(-8.0 * rows @ (noisy[heads.size :] * terms.score_noise)))
    labels: NDArray[np.int64] = np.floor(chances * certain[:, None] * task.scale).astype(np.int64)
    return labels


@lru_cache(maxsize=1024)
def _fitted(task: Task, path: Path, asked: bytes) -> tuple[Floats, Floats]:
    """Both heads without noise: shape (classes, numbers), and (numbers,)."""
    queries = np.frombuffer(asked, dtype=np.int16).reshape(task.max_queries, -1).astype(np.float64) / 2048.0
    training = task.training
    if training is None:
        raise TypeError("a task of aux-distill says how its agents train")
    shard = Shard.open(path, verify=False)
    rows_of = _map_of(queries, task)
    mine = rows_of(shard.features[shard.rows].astype(np.float64) / 2048.0)
    public = rows_of(queries[::_EVERY])
    truth = np.eye(task.num_classes)[shard.labels[shard.rows]]
    count, decay = max(len(mine), training.min_records), training.regularisation
    heads = np.zeros((mine.shape[1], task.num_classes))
    for _ in range(_STEPS):
        said = softmax(mine @ heads)
        slope = mine.T @ (said - truth) / count + decay * heads
        bend = decay * np.eye(heads.size)
        for row, chance in zip(mine, said, strict=True):
            bend += np.kron(np.outer(row, row), np.diag(chance) - np.outer(chance, chance)) / count
        heads -= np.linalg.solve(bend, slope.ravel()).reshape(heads.shape)
    both, sign = np.vstack([mine, public]), np.repeat([1.0, -1.0], [len(mine), len(public)])
    count = max(len(both), training.min_records + len(public))
    scores = np.zeros(both.shape[1])
    for _ in range(_STEPS):
        wrong = 1 / (1 + np.exp(sign * (both @ scores)))
        slope = -(both.T @ (sign * wrong)) / count + decay * scores
        bend = (both * (wrong * (1 - wrong))[:, None]).T @ both / count + decay * np.eye(len(scores))
        scores -= np.linalg.solve(bend, slope)
    return heads.T, scores


def _map_of(queries: Floats, task: Task) -> Callable[[Floats], Floats]:
    """From features to what a head sees; every number of it is public."""
    public, axes = queries[::_EVERY], 0 if task.training is None else task.training.dimension
    clip = 1.0 if task.training is None else task.training.clip_norm
    mean = public.mean(axis=0)
    spreads, directions = np.linalg.eigh((public - mean).T @ (public - mean) / len(public))
    basis = directions[:, ::-1][:, :axes] * spreads[::-1][:axes] ** (-_WHITENING / 2)
    least = _LEAST * np.sqrt((((public - mean) @ basis) ** 2).sum() / len(public))

    def rows(features: Floats) -> Floats:
        seen = (features - mean) @ basis
        length = np.maximum(np.linalg.norm(seen, axis=1), least)[:, None]
        whole = np.sqrt(1 - _CONSTANT**2) * clip
        return np.hstack([seen * whole / length, np.full((len(seen), 1), _CONSTANT * clip)])

    return rows
