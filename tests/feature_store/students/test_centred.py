"""Prototypes of noisy counts: what all images or all counts of a class have in common moves nothing, and noise little.

Noise is numpy's, of fixed seeds: no release is made here.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from feature_store.quantize import quantize
from feature_store.query_selection import select_queries
from feature_store.students import NoisyAnswers, fit_student
from feature_store.students.centred import CentredLearner, group_means, half_whitened

CLASSES = 6


def _world(
    sigma: float, seed: int, *, questions: int = CLASSES
) -> tuple[NoisyAnswers, NDArray[np.int16], NDArray[np.int64]]:
    """Two hundred private records a class; features with a large part in common, as a backbone's have."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((CLASSES, 40))
    truth = rng.integers(0, CLASSES, 300)
    public = quantize(6.0 + centres[truth] + 0.7 * rng.standard_normal((300, 40)))
    chosen = select_queries(public, strategy="clustered", count=questions, seed=seed)
    votes = np.zeros((questions, CLASSES))
    np.add.at(votes, (chosen.assignment, truth), 200 * CLASSES / 300)
    noisy = votes + sigma * rng.standard_normal(votes.shape)
    answers = NoisyAnswers(
        features=chosen.features,
        labels=noisy.argmax(axis=1),
        noisy_votes=noisy,
        total_sigma_votes=sigma,
        num_classes=CLASSES,
        agents=3,
        assignment=chosen.assignment,
    )
    return answers, public, truth


def test_where_noise_is_as_large_as_the_votes_counts_say_more_than_their_winners() -> None:
    counts, winners = [], []
    for seed in range(12):
        answers, public, truth = _world(60.0, seed, questions=3 * CLASSES)
        for found, release in ((counts, answers), (winners, dataclasses.replace(answers, noisy_votes=None))):
            student = fit_student("centred", release, public, num_classes=CLASSES)
            found.append(float((student.predict(public) == truth).mean()))
    assert np.mean(counts) > np.mean(winners) + 0.05


def test_records_that_a_class_has_more_of_everywhere_move_no_prototype() -> None:
    answers, public, _ = _world(40.0, 3)
    assert answers.noisy_votes is not None
    assert answers.assignment is not None
    shift = np.zeros(CLASSES)
    shift[2] = 1000.0
    sizes = np.bincount(answers.assignment, minlength=CLASSES) / len(public)
    more = dataclasses.replace(answers, noisy_votes=answers.noisy_votes + sizes[:, None] * shift * CLASSES)
    learner = CentredLearner.of(public, num_classes=CLASSES, seed=0)
    # Rows are of unit length after centring, so that the weighted mean of their groups is small and not nothing.
    rows = half_whitened(public, dimensions=40, seed=0)(public)
    common = sizes @ group_means(rows, answers.assignment, CLASSES)
    assert np.linalg.norm(common) < 0.1
    first, second = (learner.learn(one, answers.assignment) for one in (answers, more))
    assert (first.prototypes * second.prototypes).sum(axis=1).min() > 0.99


def test_what_was_not_answered_is_not_read() -> None:
    answers, public, _ = _world(10.0, 1)
    assert answers.noisy_votes is not None
    labels = np.where(np.arange(CLASSES) == 0, -1, answers.labels)
    spoilt = answers.noisy_votes.copy()
    spoilt[0] = np.nan
    first, second = (
        fit_student("centred", dataclasses.replace(answers, labels=labels, noisy_votes=votes), public, num_classes=6)
        for votes in (answers.noisy_votes, spoilt)
    )
    np.testing.assert_array_equal(first.predict_proba(public), second.predict_proba(public))


def test_axes_are_those_of_the_public_images_each_divided_by_the_root_of_its_deviation() -> None:
    _, public, _ = _world(0.0, 5)
    axes = half_whitened(public, dimensions=8, seed=0)
    unit = public / np.linalg.norm(public.astype(float), axis=1, keepdims=True)
    along = (unit - unit.mean(axis=0)) @ axes.components
    plain = np.linalg.svd(unit - unit.mean(axis=0), compute_uv=False)[:8] / np.sqrt(len(unit))
    np.testing.assert_allclose(along.std(axis=0), np.sqrt(plain * plain[0]), rtol=1e-6)
