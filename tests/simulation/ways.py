"""The questions of a schedule's tasks: votes of neighbors, of attributes, of records, of records for life, of trained
models; a model trained in steps, one whose weights are added up at once, and soft labels of heads that carry noise.

Of each, what an agent must have added up is computed here apart from the product, in the plainest way there is: by
sorting, by counting, and by gradients in floating point. Votes for life, which hang on all that came before, are in
`lives`, soft labels in `soft_heads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from feature_store.rows import quantize
from feature_store.shard import Shard
from labeler.randomness import seeded_source
from labeler.task import Task

Way = Literal["neighbours", "attributes", "records", "steps", "models", "weights", "lives", "heads"]

CLASSES: Final = ("cat", "dog", "eel")
DIMENSION: Final = 6
NEIGHBOURS: Final = 2
MOST_ATTRIBUTES: Final = 2
ROWS: Final = DIMENSION + 1
"""Of a model: one per number of a feature, and one for the constant."""

STEPS: Final = 3
MAX_QUERIES: Final = 6
"""Of a task whose questions are independent: few, so that jobs have to wait for what others give back."""

SIGMA_VOTES: Final = 0.09
"""So little noise that the exact votes can be read off every sum, and compared: no promise, but the same code."""

LIFE_NANO: Final = 2_500_000_000
"""What an image may ever spend on votes for life: two votes under a noise of one vote, and half a third."""

HEAD_QUERIES: Final = 16

_RATE: Final = 3.0
_SHRINK: Final = 0.01
_RECORDS: Final = 4
_DECAY: Final = 0.2
_DESCENTS: Final = 5
_RADIUS: Final = 3.0
_FIT: Final = 10.0
"""How much more a record says than the length of an ensemble's weights (`workers.learning.linear`)."""

_OFF: Final = 3
"""Grid units by which a gradient in floating point may differ from the one in whole numbers."""

_OFF_SOFT: Final = 2**24 // 10_000
"""The same of soft labels: heads trained until a millionth is left, made four to eight times as loud."""

_FIELDS: Final[dict[Way, dict[str, Any]]] = {
    "neighbours": {"method": "knn", "k": NEIGHBOURS},
    "attributes": {"method": "knn", "k": NEIGHBOURS, "attributes_per_record": MOST_ATTRIBUTES},
    "records": {"method": "reverse-knn", "k": 1},
    "lives": {
        "method": "reverse-knn",
        "k": 2,
        "sigma_votes": 1.0,
        "lifetime_budget": {"budget_nano": LIFE_NANO, "least_similarity": 0.2, "asked_classes": CLASSES[:2]},
    },
    "models": {"method": "ensemble"},
    "heads": {
        "method": "aux-distill",
        "sigma_votes": 0.2,
        "max_queries": HEAD_QUERIES,
        "training": {"min_records": _RECORDS, "regularisation": _DECAY, "dimension": 2},
    },
    "weights": {
        "method": "blind-average",
        "sigma_votes": 0.2,
        "max_queries": ROWS,
        "training": {"min_records": _RECORDS, "regularisation": _DECAY, "iterations": _DESCENTS, "radius": _RADIUS},
    },
    "steps": {
        "method": "federated",
        # With less its price is none that a ledger could hold.
        "sigma_votes": 0.2,
        "max_queries": STEPS * ROWS,
        "training": {
            "min_records": _RECORDS,
            "regularisation": _SHRINK,
            "iterations": STEPS,
            "radius": 20.0,
            # Everybody takes part: coins are no business of a schedule.
            "sampled": {"rate": 1.0, "learning_rate": _RATE},
        },
    },
}


def fields_of(way: Way) -> dict[str, Any]:
    """Return what a task of it says."""
    return {"sigma_votes": SIGMA_VOTES, "max_queries": MAX_QUERIES} | _FIELDS[way]


def sizes_of(way: Way, wished: Sequence[int]) -> tuple[int, ...]:
    """Queries of each round of a job: of training all steps, each with all rows of the model, of weights one; where
    records choose their queries, or learn from them, all of the task at once."""
    if way in ("steps", "weights"):
        return (ROWS,) * (STEPS if way == "steps" else 1)
    if way == "heads":
        return (HEAD_QUERIES,)
    return (MAX_QUERIES,) if way in ("records", "lives") else tuple(wished)


def points(count: int, seed: str) -> NDArray[np.int16]:
    """Features, always the same."""
    numbers = np.frombuffer(seeded_source(f"simulated {seed}".encode()).bytes(8 * count * DIMENSION), dtype=np.uint64)
    unit = (numbers >> np.uint64(11)).astype(np.float64) / 2.0**53
    return quantize(unit.reshape(count, DIMENSION) - 0.5 + 1e-3)


def questions(way: Way, job_number: int, sizes: Sequence[int]) -> NDArray[np.int16]:
    """Return what a job asks about; of training the rows of the model, in each step the same, and as good as any."""
    return points(ROWS if way in ("steps", "weights") else sum(sizes), f"job {job_number}")


def attributes_of(name: str, count: int) -> NDArray[np.int16]:
    """The attributes of some records, shape (count, classes)."""
    drawn = seeded_source(f"attributes {name}".encode()).uint64(count * len(CLASSES))
    return (drawn % np.uint64(2)).astype(np.int16).reshape(count, len(CLASSES))


def numbers_of(task: Task, way: Way, path: Path, asked: NDArray[np.int16], model: bytes) -> NDArray[np.int64]:
    """What an agent with these records adds to a sum before its noise, in grid units, and how far that may be off.

    Args:
        task: the task.
        way: of it.
        path: the records.
        asked: the questions of the round.
        model: theta, float64, before the step; empty elsewhere.
    """
    if way == "steps":
        return np.rint(_gradient(path, model) * task.scale).astype(np.int64)
    if way == "weights":
        return np.rint(_weights(path) / _moved_by_one() * task.scale).astype(np.int64)
    return _votes(way, path, asked.tobytes()) * np.int64(task.scale)


def is_same(way: Way, one: NDArray[np.int64], other: NDArray[np.int64]) -> bool:
    """Return whether what was sent is what was computed."""
    most = _OFF_SOFT if way == "heads" else _OFF if way in ("steps", "weights") else 0
    return bool(np.abs(one - other).max(initial=0) <= most)


def next_model(theta: NDArray[np.float64], opened: NDArray[np.float64], contributors: int) -> NDArray[np.float64]:
    """The public model after a step: a gradient step on what was opened, and a little shorter.

    Args:
        theta: before it.
        opened: the noisy sum, in clips.
        contributors: how many were summed.
    """
    step: NDArray[np.float64] = theta - _RATE * (opened / (contributors * _RECORDS) + _SHRINK * theta)
    return step


# Records that a schedule may use stay as they were made, so what they say is computed once for all schedules.


@lru_cache(maxsize=4096)
def _votes(way: Way, path: Path, asked: bytes) -> NDArray[np.int64]:
    """Votes by sorting: most similar first, among equals the lower id; shape (queries, classes)."""
    shard = Shard.open(path, verify=False)
    rows = shard.rows
    features, ids, labels = shard.features[rows].astype(np.int64), shard.record_ids[rows], shard.labels[rows]
    queries = np.frombuffer(asked, dtype=np.int16).reshape(-1, DIMENSION).astype(np.int64)
    votes = np.zeros((len(queries), len(CLASSES)), dtype=np.int64)
    if way == "models":
        votes[np.arange(len(queries)), _classes_of(path, asked)] = 1
        return votes
    if way == "records":
        for feature, label in zip(features, labels, strict=True):
            votes[int(np.argmax(queries @ feature)), int(label)] += 1  # the first of those that are equally near
        return votes
    for number, query in enumerate(queries):
        for row in np.lexsort((ids, -(features @ query)))[:NEIGHBOURS]:
            mine = np.flatnonzero(labels[row])[:MOST_ATTRIBUTES] if way == "attributes" else [labels[row]]
            for place in mine:
                votes[number, int(place)] += 1
    return votes


@lru_cache(maxsize=1024)
def _gradient(path: Path, model: bytes) -> NDArray[np.float64]:
    """The sum of the gradients of the records' log-losses, each cut to length 1; shape (rows, classes)."""
    shard = Shard.open(path, verify=False)
    features = shard.features[shard.rows].astype(np.float64) / 2048.0
    features /= np.maximum(np.linalg.norm(features, axis=1), 1.0)[:, None]
    rows = np.hstack([features, np.ones((len(features), 1))])
    scores = rows @ np.frombuffer(model, dtype=np.float64).reshape(ROWS, len(CLASSES))
    slopes = np.exp(scores - scores.max(axis=1, keepdims=True))
    slopes /= slopes.sum(axis=1, keepdims=True)
    slopes[np.arange(len(rows)), shard.labels[shard.rows].astype(np.int64)] -= 1.0
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(slopes, axis=1)
    slopes /= np.maximum(lengths, 1.0)[:, None]
    total: NDArray[np.float64] = rows.T @ slopes
    return total


@lru_cache(maxsize=1024)
def _weights(path: Path) -> NDArray[np.float64]:
    """A softmax model after some steps down the mean loss, as `labeler.methods.blind_average.LinearTerms` defines
    them."""
    shard = Shard.open(path, verify=False)
    features, labels = shard.features[shard.rows].astype(np.float64) / 2048.0, shard.labels[shard.rows]
    features *= np.minimum(1.0, np.sqrt(0.99) / np.linalg.norm(features, axis=1))[:, None]
    rows, truth = np.hstack([features, np.full((len(features), 1), 0.1)]), np.eye(len(CLASSES))[labels]
    theta, stride = np.zeros((ROWS, len(CLASSES))), 2 / (0.5 + 2 * _DECAY)
    for _ in range(_DESCENTS):
        mean = rows.T @ (softmax(rows @ theta) - truth) / max(len(rows), _RECORDS)
        theta = theta - stride * (mean + _DECAY * theta)
        theta *= min(1.0, _RADIUS / max(float(np.linalg.norm(theta)), 1e-9))
    return theta


def _moved_by_one() -> float:
    """Return how far one record moves such a model: 2 L / (n lambda), with L from fact 4 of
    `labeler.methods.blind_average`."""
    others, likely = len(CLASSES) - 1, np.exp(np.sqrt(2) * _RADIUS)
    wrong, most = others / (others + 1 / likely), 1 / (1 + others / likely)
    longest = np.sqrt(wrong**2 + wrong * min(wrong, most))
    return float(2 * longest / (_RECORDS * _DECAY))


@lru_cache(maxsize=1024)
def _classes_of(path: Path, asked: bytes) -> NDArray[np.int64]:
    """What a logistic regression on these records says of each query, by Newton's method until it stands still."""
    shard = Shard.open(path, verify=False)
    rows = np.hstack([shard.features[shard.rows].astype(np.float64) / 2048.0, np.ones((len(shard.rows), 1))])
    truth, count = np.eye(len(CLASSES))[shard.labels[shard.rows]], len(CLASSES)
    short = np.kron(np.diag([1.0] * DIMENSION + [0.0]), np.eye(count))
    theta = np.zeros((ROWS, count))
    for _ in range(40):
        said = softmax(rows @ theta)
        slope = _FIT * rows.T @ (said - truth) + np.vstack([theta[:-1], np.zeros((1, count))])
        bend = short.copy()
        for row, chance in zip(rows, said, strict=True):
            bend += _FIT * np.kron(np.outer(row, row), np.diag(chance) - np.outer(chance, chance))
        step = np.linalg.lstsq(bend, slope.ravel(), rcond=1e-12)[0].reshape(theta.shape)
        theta = theta - step * min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-9))
    queries = np.frombuffer(asked, dtype=np.int16).reshape(-1, DIMENSION).astype(np.float64) / 2048.0
    scores = np.hstack([queries, np.ones((len(queries), 1))]) @ theta
    return np.asarray(scores.argmax(axis=1), dtype=np.int64)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chances of classes, along the last axis of two."""
    grown = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances: NDArray[np.float64] = grown / grown.sum(axis=1, keepdims=True)
    return chances
