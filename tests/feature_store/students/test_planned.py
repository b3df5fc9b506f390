"""What `planned` reads of a release: how far votes stand out, whether groups are pure, which classes noise has drowned.

Noise is numpy's, of fixed seeds: no release is made here.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.query_selection import QuerySet, select_queries
from feature_store.rows import quantize
from feature_store.students import Learners, NoisyAnswers, fit_student
from feature_store.students.answers import half_whitened
from feature_store.students.members import votes_of_classes
from feature_store.students.student import LEAST, SHARES

CLASSES = 6
PLAIN = np.full(CLASSES, 200.0)
UNEQUAL = 400 * 0.01 ** (np.arange(CLASSES) / (CLASSES - 1))
"""From 400 records of the first class down to 4 of the last."""


@dataclasses.dataclass(frozen=True)
class World:
    answers: NoisyAnswers
    public: NDArray[np.int16]
    truth: NDArray[np.int64]


def _released(
    chosen: QuerySet,
    votes: NDArray[np.float64],
    sigma: float,
    rng: np.random.Generator,
    public: NDArray[np.int16],
    truth: NDArray[np.int64],
) -> World:
    noisy = votes + sigma * rng.standard_normal(votes.shape)
    answers = NoisyAnswers(
        features=chosen.features,
        labels=noisy.argmax(axis=1),
        noisy_votes=noisy,
        total_sigma_votes=sigma,
        num_classes=CLASSES,
        assignment=chosen.assignment,
    )
    return World(answers, public, truth)


def _world(sigma: float, records: NDArray[np.float64], *, width: float = 0.7, seed: int = 0) -> World:
    """Public images of all classes alike, private records of some more than of others; two questions a class."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((CLASSES, 40))
    truth = rng.integers(0, CLASSES, 600)
    public = quantize(3.0 + centres[truth] + width * rng.standard_normal((600, 40)))
    chosen = select_queries(public, strategy="clustered", count=2 * CLASSES, seed=seed)
    private = rng.choice(CLASSES, 4000, p=records / records.sum())
    held = quantize(3.0 + centres[private] + width * rng.standard_normal((4000, 40)))
    nearest = (held.astype(np.int64) @ chosen.features.astype(np.int64).T).argmax(axis=1)
    votes = np.zeros((2 * CLASSES, CLASSES))
    np.add.at(votes, (nearest, private), records.sum() / 4000)
    return _released(chosen, votes, sigma, rng, public, truth)


def _right(kind: str, world: World, classes: int = CLASSES) -> float:
    student = fit_student(kind, world.answers, world.public, num_classes=CLASSES)
    asked = world.truth < classes
    return float((student.predict(world.public[asked]) == world.truth[asked]).mean())


def test_a_class_that_noise_has_drowned_takes_no_other_class_with_it() -> None:
    worlds = [_world(12.0, UNEQUAL, width=2.2, seed=seed) for seed in range(4)]
    # These have 400 and 159 records, and noise of a class's sum is 42; the last has 4.
    assert np.mean([_right("discriminant", world, classes=2) for world in worlds]) > 0.65


def test_where_few_records_stand_behind_some_classes_planned_keeps_the_student_that_takes_them_to_be_alike() -> None:
    worlds = [_world(12.0, UNEQUAL, width=1.5, seed=seed) for seed in range(4)]
    chosen = [fit_student("planned", world.answers, world.public, num_classes=CLASSES).kind for world in worlds]
    assert set(chosen) <= {"followed", "pooled"}
    assert np.mean([_right("planned", world) for world in worlds]) > np.mean(
        [_right("discriminant", world) for world in worlds]
    )


def test_votes_are_alike_where_noise_hides_that_they_differ_and_the_sums_where_it_does_not() -> None:
    sums = np.array([[400.0, 159.0, 63.0, 25.0, 10.0, 4.0]])
    np.testing.assert_allclose(votes_of_classes(sums, 0.0), sums[0])
    hidden = votes_of_classes(sums, 1e6)
    np.testing.assert_allclose(hidden, hidden[0])
    below = votes_of_classes(np.array([[400.0, 159.0, 63.0, -30.0, -90.0, 4.0]]), 42.0**2)
    assert below.min() > 0
    assert (np.argsort(-below) == [0, 1, 2, 5, 3, 4]).all()


def test_votes_below_zero_become_the_mean_of_a_normal_law_above_zero() -> None:
    sums = np.array([[400.0, 159.0, 63.0, 25.0, -90.0, 4.0]])
    noise = 42.0**2
    found = votes_of_classes(sums, noise)
    between = ((sums[0] - sums.mean()) ** 2).mean() - noise
    draws = np.random.default_rng(1).normal(sums.mean(), np.sqrt(between), 2_000_000)
    for place in (2, 4):
        weights = np.where(draws > 0, np.exp(-((sums[0, place] - draws) ** 2) / (2 * noise)), 0.0)
        assert found[place] == pytest.approx(np.average(draws, weights=weights), rel=0.02)


def test_planned_takes_the_steadiest_student_in_noise_and_all_three_where_votes_stand_out() -> None:
    for sigma, kind in ((60.0, "followed"), (5.0, "pooled")):
        world = _world(sigma, PLAIN, seed=2)
        assert fit_student("planned", world.answers, world.public, num_classes=CLASSES).kind == kind


def test_planned_takes_what_needs_no_pure_groups_where_votes_show_that_they_are_impure() -> None:
    world = _scattered()
    student = fit_student("planned", world.answers, world.public, num_classes=CLASSES)
    assert student.kind == "blended"
    assert student.contradicted["blended"] < 0.85 * student.contradicted["steady"]
    assert _right("planned", world) > _right("matched", world)


def test_labels_that_follow_nearest_neighbours_are_right_more_often_than_what_they_start_from() -> None:
    """Each class is a thin arc, which no single direction describes."""
    before, after = [], []
    for seed in range(4):
        world = _arcs(seed)
        assert world.answers.assignment is not None
        steady = Learners(world.public, num_classes=CLASSES).steady(world.answers, world.answers.assignment)
        before.append(float((steady.argmax(axis=1) == world.truth).mean()))
        after.append(_right("followed", world))
    assert np.mean(after) > np.mean(before) + 0.005


def test_a_student_is_the_geometric_mean_of_its_members_by_their_shares() -> None:
    world = _world(12.0, PLAIN)
    for kind, shares in SHARES.items():
        student = fit_student(kind, world.answers, world.public, num_classes=CLASSES)
        product = np.ones((len(world.public), CLASSES))
        for name, share in shares.items():
            said = student.members[name].predict_proba(world.public)
            product *= np.maximum(said, LEAST) ** share
        plain = dataclasses.replace(student, temperature=1.0).predict_proba(world.public)
        np.testing.assert_allclose(plain, product / product.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_where_noise_is_as_large_as_the_votes_counts_say_more_than_their_winners() -> None:
    counts, winners = [], []
    for seed in range(6):
        world = _world(60.0, PLAIN, seed=seed)
        counts.append(_right("matched", world))
        alone = dataclasses.replace(world.answers, noisy_votes=None)
        winners.append(_right("matched", dataclasses.replace(world, answers=alone)))
    assert np.mean(counts) > np.mean(winners) + 0.02


def test_a_query_that_was_not_answered_is_not_read() -> None:
    world = _world(10.0, PLAIN, seed=1)
    assert world.answers.noisy_votes is not None
    labels = np.where(np.arange(2 * CLASSES) == 0, -1, world.answers.labels)
    spoiled = world.answers.noisy_votes.copy()
    spoiled[0] = np.nan
    for kind in SHARES:
        first, second = (
            fit_student(
                kind,
                dataclasses.replace(world.answers, labels=labels, noisy_votes=votes),
                world.public,
                num_classes=CLASSES,
            ).predict_proba(world.public)
            for votes in (world.answers.noisy_votes, spoiled)
        )
        np.testing.assert_array_equal(first, second)


def test_axes_are_those_of_the_public_images_each_divided_by_the_root_of_its_deviation() -> None:
    public = _world(0.0, PLAIN, seed=5).public
    axes = half_whitened(public, dimensions=8, seed=0)
    unit = public / np.linalg.norm(public.astype(float), axis=1, keepdims=True)
    along = (unit - unit.mean(axis=0)) @ axes.components
    plain = np.linalg.svd(unit - unit.mean(axis=0), compute_uv=False)[:8] / np.sqrt(len(unit))
    np.testing.assert_allclose(along.std(axis=0), np.sqrt(plain * plain[0]), rtol=1e-6)


def _scattered() -> World:
    """Each class in four places far apart: no six groups of images are the classes."""
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((4 * CLASSES, 40))
    place = rng.integers(0, 4 * CLASSES, 600)
    public = quantize(centres[place] + 0.5 * rng.standard_normal((600, 40)))
    chosen = select_queries(public, strategy="clustered", count=4 * CLASSES, seed=0)
    votes = np.zeros((4 * CLASSES, CLASSES))
    np.add.at(votes, (chosen.assignment, place % CLASSES), 2.0)
    return _released(chosen, votes, 3.0, rng, public, place % CLASSES)


def _arcs(seed: int) -> World:
    """Classes along arcs, one question each, noise as large as half of the votes."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, CLASSES, 600)
    along = rng.uniform(0, np.pi / 2, 600)
    ends = rng.standard_normal((CLASSES, 2, 5))
    on = np.cos(along)[:, None] * ends[truth, 0] + np.sin(along)[:, None] * ends[truth, 1]
    public = quantize(on + 0.12 * rng.standard_normal((600, 5)))
    chosen = select_queries(public, strategy="clustered", count=2 * CLASSES, seed=0)
    votes = np.zeros((2 * CLASSES, CLASSES))
    np.add.at(votes, (chosen.assignment, truth), 1.0)
    return _released(chosen, votes, 25.0, rng, public, truth)
