"""Forecasts from public images alone: how many labels a job can get right, and which ball to draw ballots onto.

**Expectation.** A rehearsal without any private record. The public images are cut into as many natural groups as
there are classes, which play the classes; private records like them vote; noise of the task's size is added; a
student learns from it and labels all images. What share falls into its own group is what can be expected where the
classes are the natural groups of the images. They seldom are exactly, so it is an upper estimate; the lower one lets
a quarter of the votes land anywhere, as where private images are of another kind (labeler.expectation). Public and
simulated throughout: nothing is charged.

**Radius** (`Task.ballot_radius`). At agent level the noise is R / mu votes. Below the length of an agent's centred
ballot (`labeler.ball`) the radius R says nothing: votes and noise shrink together, and every agent counts alike.
Above it noise grows and votes do not. At instance level the noise is worth the more the larger R is. So R is half of
the length that a ballot has in rehearsal: as large as it may be and still, in all likelihood, below the length of
every agent's.

In rehearsal an agent holds public images, drawn at random, and the natural groups of the public images, as many as
there are classes, are their classes. Real records lie less well in groups, which makes ballots a little shorter: the
half is for them. How many records an agent holds is for whoever asks to say; nothing private is read.
"""

from __future__ import annotations

import dataclasses
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import build_index
from feature_store.query_selection import QuerySet, select_queries
from feature_store.students.answers import NoisyAnswers
from feature_store.students.student import fit_student
from labeler.ballots import reverse_knn_ballots
from labeler.errors import InvalidSetting
from labeler.expectation import ALIKE, UNLIKE, Expectation, assumed_records, expect, votes_per_question
from labeler.task import Task

REHEARSALS: Final = 3
RADIUS_REHEARSALS: Final = 5
MOST_IMAGES: Final = 5000
"""Of more images a public sample is taken."""


def expect_on(task: Task, features: NDArray[np.int16], *, records: int | None = None, seed: int = 0) -> Expectation:
    """What a job of a task can be expected to get right on these images, all of the task's questions asked.

    Args:
        features: int16, shape (num_images, dimension), of the public images.
        records: see `labeler.expectation.expect`.
        seed: public.

    Raises:
        InvalidSetting: there are fewer images than questions or classes.
    """
    known = expect(task, records=records)
    if known.low is None:
        return known
    if len(features) < max(task.max_queries, task.num_classes + 1):
        raise InvalidSetting(
            f"{len(features)} public images are too few for {task.max_queries} questions, {task.num_classes} classes"
        )
    rng = np.random.default_rng(seed)
    if len(features) > max(MOST_IMAGES, task.max_queries):
        features = features[np.sort(rng.choice(len(features), max(MOST_IMAGES, task.max_queries), replace=False))]
    groups = select_queries(features, strategy="clustered", count=task.num_classes, seed=seed).assignment
    strategy = "all" if task.max_queries == len(features) else "clustered"
    questions = select_queries(features, strategy=strategy, count=task.max_queries, seed=seed)  # type: ignore[arg-type]
    low, high = (
        float(np.mean([_rehearse(task, features, groups, questions, share, records, rng) for _ in range(REHEARSALS)]))
        for share in (UNLIKE, ALIKE)
    )
    return dataclasses.replace(known, low=round(min(low * UNLIKE / ALIKE, high), 3), high=round(high * ALIKE, 3))


def _rehearse(
    task: Task,
    features: NDArray[np.int16],
    groups: NDArray[np.int64],
    questions: QuerySet,
    share: float,
    records: int | None,
    rng: np.random.Generator,
) -> float:
    """The share of images that a student puts into their own group."""
    cells = np.zeros((len(questions), task.num_classes))
    np.add.at(cells, (questions.assignment, groups), 1.0)
    assumed = assumed_records(task, records) if task.traits.records_choose else None
    each = votes_per_question(task, len(questions), assumed)
    sizes = np.maximum(cells.sum(axis=1, keepdims=True), 1.0)
    # Where records choose, more of them meet where more images lie; else each question gets its votes.
    votes = each * (cells / sizes) * (sizes / sizes.mean() if task.traits.records_choose else 1.0)
    smeared = share * votes + (1 - share) * votes.sum(axis=1, keepdims=True) / task.num_classes
    noisy = rng.poisson(smeared) + rng.normal(0.0, task.total_sigma_votes, smeared.shape)
    answers = NoisyAnswers.of(
        task,
        features=questions.features,
        labels=noisy.argmax(axis=1).astype(np.int16),
        noisy_votes=noisy,
        assignment=questions.assignment,
    )
    student = fit_student("prototypes", answers, features, num_classes=task.num_classes)
    return float((student.predict(features) == groups).mean())


def propose_radius(
    features: NDArray[np.int16], *, questions: int, num_classes: int, k: int, records: int, seed: int = 0
) -> int:
    """R, in whole votes, at least 1.

    Args:
        features: int16, shape (num_images, dimension), of the public images.
        questions: Q; clusters of them, or all images where it is their number.
        num_classes: C.
        k: questions at which a record votes.
        records: of one agent, as far as anybody may know; rather too few than too many.
        seed: public.

    Raises:
        InvalidSetting: there are fewer images than questions or classes, or no record.
    """
    if len(features) < max(questions, num_classes) or records < 1:
        raise InvalidSetting(
            f"a radius is proposed from at least one record and {max(questions, num_classes)} public images (as many "
            f"as questions and classes), found {records} and {len(features)}"
        )
    groups = select_queries(features, strategy="clustered", count=num_classes, seed=seed).assignment
    strategy = "all" if questions == len(features) else "clustered"
    asked = select_queries(features, strategy=strategy, count=questions, seed=seed).features  # type: ignore[arg-type]
    index = build_index(asked, np.arange(questions))
    rng = np.random.default_rng(seed)
    squares = []
    for _ in range(RADIUS_REHEARSALS):
        own = rng.integers(0, len(features), records)
        nearest = index.search(features[own], min(k, questions)).record_ids
        ballot = reverse_knn_ballots(nearest, groups[own], num_queries=questions, num_classes=num_classes)
        centred = num_classes * ballot - ballot.sum(axis=1, keepdims=True)
        squares.append(int((centred**2).sum()))
    return max(1, isqrt(sorted(squares)[RADIUS_REHEARSALS // 2] // (2 * num_classes) ** 2))
