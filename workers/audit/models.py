"""Neighbouring sets on which a trained model moves far: what an adversary of a model poisons it with.

A vote moves by one whatever the others are; a model moves as far as the other records let it. `labeler.descent` bounds
that by L/(n lambda), or by twice as much where one record may replace another, and sets that come close are special:

* **The canary's gradient is as long as it can be**: the others have taught the model that it is certainly wrong.
* **Nothing pulls back.** The curvature of the others' losses stands against the move. Where they are spread over m
  directions and the canary is their sum, its score is sqrt(m) times theirs: each of them is still unsure, so that
  together they push hard, and each is curved along the canary by 1/m of what it would be beside it.
* **Where a mean is taken over all records** (no public denominator), one that comes besides takes weight from the
  others, which pushes further where they pushed the other way: at most to the bound for a replacement, and there only
  where gradients do not fade (the svm while every margin is violated).

How many directions, how many records, which labels: `worst_sets` tries them and measures without noise, which costs the
adversary nothing, because all of it is public to it. What no set that was tried reaches is the bound's slack, or a
better adversary's: an audit says how far its canary moves (`labeler.auditing.Attempt.moved_mu`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from feature_store.quantize import FEATURE_SCALE, quantize
from labeler.methods.aux_distill import head_terms
from labeler.methods.blind_average import linear_terms
from labeler.methods.sensitivity import kept_bound, records_of_a_person, training_of
from labeler.records import Rows
from labeler.setting import StatedLevel
from labeler.task import NEGATIVES_EVERY, Task
from workers.audit.worlds import Records
from workers.learning.linear import train_rows
from workers.learning.private_heads import fit_rows, public_maps

MOST_RECORDS: Final = 1_000
"""Of one agent in a set that is tried: a whole job trains on them."""

_SPREADS: Final = (1, 4, 16, 32, 64)

Measure = Callable[[Records], NDArray[np.float64]]
"""What an agent with these records adds without noise, as one row, in units of the noise that is charged for."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """An agent's records that stay, and the canary's.

    Attributes:
        stay: of the agent; none where the agent is the canary.
        moved: how far the canary moves the model without noise, in units of sigma.
    """

    stay: Records = field(repr=False)
    unit: Records = field(repr=False)
    moved: float


def worst_sets(
    task: Task, level: StatedLevel, *, copies: int, dimension: int, queries: NDArray[np.int16]
) -> Neighbours:
    """Of the sets that are tried, the one whose canary moves the agent's model furthest.

    Args:
        task: of a method that trains what it is priced by.
        copies: how many records it has, but for an agent.
    """
    measure = _measure(task, queries)
    votes = copies if level != "person" else min(copies, records_of_a_person(task))
    best = Neighbours(_of(np.zeros((0, dimension)), []), _of(np.eye(dimension)[:1], [0]), -1.0)
    for stay, canaries in _candidates(task, level, dimension):
        without = np.zeros(1) if level == "agent" else measure(stay)
        for one in canaries:
            moved = float(np.linalg.norm(measure(one if level == "agent" else _joined(stay, one, votes)) - without))
            if moved > best.moved:
                best = Neighbours(stay, one if level == "agent" else _repeated(one, copies), moved)
    return best


def _measure(task: Task, queries: NDArray[np.int16]) -> Measure:
    if task.traits.asks_for_a_model:
        terms = linear_terms(task)
        return lambda records: train_rows(_rows(records), terms=terms).ravel() / (terms.sensitivity * task.sigma_votes)
    heads = head_terms(task)
    negatives = queries[::NEGATIVES_EVERY].astype(np.float32) / FEATURE_SCALE
    maps = public_maps(negatives, terms=heads)

    def both(records: Records) -> NDArray[np.float64]:
        fitted = fit_rows(_rows(records), negatives, terms=heads, maps=maps)
        parts = [fitted.head.ravel() / heads.head_noise]
        return np.concatenate(parts if fitted.scores is None else [*parts, fitted.scores / heads.score_noise])

    return both


def _candidates(task: Task, level: StatedLevel, dimension: int) -> Iterator[tuple[Records, list[Records]]]:
    """Sets of records, each with canaries to try beside it; for an agent, whole agents."""
    training, most = training_of(task), kept_bound(task)
    reach = dimension if task.traits.asks_for_a_model else training.dimension
    nobody = _of(np.zeros((0, dimension)), [])
    room = MOST_RECORDS if most is None else min(MOST_RECORDS, most)
    if level == "agent":
        for count in sorted({min(training.min_records, room), room}):
            yield nobody, [_of(np.repeat(np.eye(dimension)[:1], count, axis=0), np.zeros(count))]
        return
    own = 1 if level == "instance" else records_of_a_person(task)
    # Where no public bound is kept, more records than the least number only dilute one.
    wanted = [1, training.min_records - own, training.min_records, *([] if most is None else [most - own])]
    counts = sorted({max(1, min(one, room - own)) for one in wanted})
    for spread in sorted({min(one, reach) for one in _SPREADS}):
        directions = np.eye(dimension)[:spread]
        canary = directions.sum(axis=0)[None] / math.sqrt(spread)
        # One that is called by another name, and one on the other side that is called the same.
        canaries = [_of(canary, [1]), _of(-canary, [0])]
        for count in counts:
            for opposed in (False, True):
                place = np.arange(count)
                signs = np.where(opposed & ((place // spread) % 2 == 1), -1.0, 1.0)
                yield _of(signs[:, None] * directions[place % spread], signs < 0), canaries


def _of(rows: NDArray[np.float64], labels: ArrayLike) -> Records:
    return Records(quantize(rows), np.asarray(labels, dtype=np.int16))


def _repeated(one: Records, copies: int) -> Records:
    return Records(np.repeat(one.features, copies, axis=0), np.repeat(one.labels, copies))


def _joined(stay: Records, one: Records, copies: int) -> Records:
    more = _repeated(one, copies)
    return Records(np.concatenate([stay.features, more.features]), np.concatenate([stay.labels, more.labels]))


def _rows(records: Records) -> Rows:
    return Rows.of(records.features.astype(np.float32) / np.float32(FEATURE_SCALE), records.labels)
