"""Votes for life, worked out apart from the product: which images vote, what each has spent, and that none spends more
than its budget, whatever is asked and whoever dies meanwhile.

An agent's journal says which rounds have spent, in which order. Which version of its records answered each it does not
say, so every version is followed: what images have spent must be, to the last nano-unit, what one sequence of versions
gives, and the votes that leave are those of such a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.task import Task

Votes = NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """A round that has spent: its digest, its task and its questions, int16 of shape (questions, numbers)."""

    digest: str
    task: Task
    questions: NDArray[np.int16]


@dataclass(frozen=True)
class _Course:
    """One sequence of versions: what each image has spent by then, and the votes of each round."""

    spent: Mapping[bytes, int]
    votes: Mapping[str, Votes]


class Lives:
    """The possible spends of the images of one agent.

    Args:
        versions: of its records.
    """

    def __init__(self, versions: Sequence[Path]) -> None:
        self._versions = tuple(versions)
        self._courses: tuple[_Course, ...] = (_Course({}, {}),)
        self.rounds = 0

    def follow(self, rounds: Sequence[Asked], spent: Mapping[bytes, int]) -> str:
        """Rounds that have spent since the last time, in their order, and what is spent now.

        Returns:
            What is wrong with it; empty where nothing is.
        """
        for one in rounds:
            self._courses = tuple(_next(course, one, path) for course in self._courses for path in self._versions)
        self.rounds += len(rounds)
        self._courses = tuple(course for course in self._courses if course.spent == spent)
        if not self._courses:
            return f"after {self.rounds} rounds its images have spent what no version of its records would have"
        return ""

    def votes(self, digest: str) -> tuple[Votes, ...]:
        """Return what the agent may have voted in a round; nothing where that has not spent."""
        return tuple(course.votes[digest] for course in self._courses if digest in course.votes)


def _next(course: _Course, asked: Asked, path: Path) -> _Course:
    task = asked.task
    if task.lifetime_budget is None:
        raise TypeError("only a task of votes for life spends")
    named = tuple(task.classes) if task.lifetime_budget.asked_classes is None else task.lifetime_budget.asked_classes
    wishes = _wishes(
        path, asked.questions.tobytes(), task.k, task.lifetime_budget.least_similarity, task.classes, named
    )
    price, spent = price_of_a_vote(task), dict(course.spent)
    votes = np.zeros((len(asked.questions), task.num_classes), np.int64)
    for image, label, places in wishes:
        before = spent.get(image, 0)
        can_pay = before + price * len(places) <= task.lifetime_budget.budget_nano
        spent[image] = before + (price * len(places) if can_pay else 0)
        if can_pay:
            votes[list(places), label] += 1
    return _Course(spent, dict(course.votes) | {asked.digest: votes})


def price_of_a_vote(task: Task) -> int:
    """Nano-units of mu^2, rounded up: S^2 / (v - 3), v the variance of the noise that nobody can subtract."""
    variance = task.noise_contributors * Fraction(task.share_sigma_grid) ** 2
    return -int(-(10**9) * Fraction(task.scale) ** 2 // (variance - 3))


@lru_cache(maxsize=4096)
def _wishes(
    path: Path, asked: bytes, k: int, least: float, classes: tuple[str, ...], named: tuple[str, ...]
) -> tuple[tuple[bytes, int, tuple[int, ...]], ...]:
    """Of each image, by its row of the smallest record id: its digest, its label, and where it would vote."""
    shard = Shard.open(path, verify=False)
    if shard.image_digests is None:
        raise TypeError("records that vote for life know their images again")
    queries = np.frombuffer(asked, dtype=np.int16).reshape(-1, shard.dimension).astype(np.int64)
    found: dict[bytes, tuple[bytes, int, tuple[int, ...]]] = {}
    for row in sorted(shard.rows.tolist(), key=lambda one: int(shard.record_ids[one])):
        image = shard.image_digests[row].astype("<i8").tobytes()
        if image in found:
            continue
        label = int(shard.labels[row])
        products = queries @ shard.features[row].astype(np.int64)
        nearest = sorted(range(len(queries)), key=lambda one: (-int(products[one]), one))[:k]
        near = (one for one in nearest if int(products[one]) >= Fraction(least) * 2048**2)
        found[image] = image, label, tuple(near) if classes[label] in named else ()
    return tuple(found.values())
