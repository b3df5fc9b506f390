"""What the tasks of a schedule ask for: votes of neighbours, of attributes, of records, and a model trained in steps.

Of each, what an agent must have added up is computed here apart from the product, in the plainest way there is: by
sorting, by counting, and by gradients in floating point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from feature_store.quantize import quantize
from feature_store.shard import Shard
from labeler.randomness import seeded_source
from labeler.task import Task

Way = Literal["neighbours", "attributes", "records", "steps"]

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

_RATE: Final = 3.0
_SHRINK: Final = 0.01
_RECORDS: Final = 4
_OFF: Final = 3
"""Grid units by which a gradient in floating point may differ from the one in whole numbers."""

_FIELDS: Final[dict[Way, dict[str, Any]]] = {
    "neighbours": {"method": "knn", "k": NEIGHBOURS},
    "attributes": {"method": "knn", "k": NEIGHBOURS, "attributes_per_record": MOST_ATTRIBUTES},
    "records": {"method": "reverse-knn", "k": 1},
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
    """What a task of it says."""
    return {"sigma_votes": SIGMA_VOTES, "max_queries": MAX_QUERIES} | _FIELDS[way]


def sizes_of(way: Way, wished: Sequence[int]) -> tuple[int, ...]:
    """Queries of each round of a job: of training all steps, each with all rows of the model; where records choose
    their queries, all of the task at once."""
    if way == "steps":
        return (ROWS,) * STEPS
    return (MAX_QUERIES,) if way == "records" else tuple(wished)


def points(count: int, seed: str) -> NDArray[np.int16]:
    """So many features, always the same."""
    numbers = np.frombuffer(seeded_source(f"simulated {seed}".encode()).bytes(8 * count * DIMENSION), dtype=np.uint64)
    unit = (numbers >> np.uint64(11)).astype(np.float64) / 2.0**53
    return quantize(unit.reshape(count, DIMENSION) - 0.5 + 1e-3)


def questions(way: Way, job_number: int, sizes: Sequence[int]) -> NDArray[np.int16]:
    """What a job asks about; of training the rows of the model, in each step the same, and as good as any."""
    return points(ROWS if way == "steps" else sum(sizes), f"job {job_number}")


def attributes_of(name: str, count: int) -> NDArray[np.int16]:
    """Which attributes so many records have, shape (count, classes)."""
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
    return _votes(way, path, asked.tobytes()) * np.int64(task.scale)


def is_same(way: Way, one: NDArray[np.int64], other: NDArray[np.int64]) -> bool:
    """Whether what was sent is what was computed."""
    return bool(np.abs(one - other).max(initial=0) <= (_OFF if way == "steps" else 0))


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
