from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from benchmarks.learning.heads import Array, fit_multinomial
from labeler.errors import InvalidSetting


def records(rng: np.random.Generator, count: int, dimension: int, classes: int) -> tuple[Array, Array]:
    features = rng.normal(size=(count, dimension))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features, np.eye(classes)[rng.integers(0, classes, count)]


def test_softmax_weights_are_scikit_learns_where_its_c_is_one_over_lambda_n(rng: np.random.Generator) -> None:
    features, targets = records(rng, 60, 5, 3)
    fit = fit_multinomial(features, targets, regularisation=0.05)
    oracle = LogisticRegression(C=1 / (0.05 * 60), fit_intercept=False, tol=1e-10, max_iter=10_000)
    found = oracle.fit(features, targets.argmax(axis=1)).coef_
    assert np.linalg.norm(fit.weights - found) < 1e-4


def test_a_tolerance_that_double_precision_cannot_reach_is_no_error(rng: np.random.Generator) -> None:
    features, targets = records(rng, 40, 4, 3)
    best = fit_multinomial(features, targets, regularisation=0.1, tolerance=1e-8)
    beyond = fit_multinomial(features, targets, regularisation=0.1, tolerance=1e-300)
    assert np.linalg.norm(best.weights - beyond.weights) < 1e-7
    rough = fit_multinomial(features, targets, regularisation=0.1, tolerance=1.0)
    assert rough.iterations <= best.iterations


def test_a_class_without_records_has_weights_all_the_same(rng: np.random.Generator) -> None:
    features, targets = records(rng, 30, 4, 3)
    fit = fit_multinomial(features, np.hstack([targets, np.zeros((30, 2))]), regularisation=0.1)
    assert fit.weights.shape == (5, 4)
    assert np.abs(fit.weights[3:]).min() > 0


def test_soft_labels_are_learned(rng: np.random.Generator) -> None:
    features, _ = records(rng, 200, 4, 3)
    truth = rng.normal(size=(3, 4))
    exponentials = np.exp(features @ truth.T)
    targets = exponentials / exponentials.sum(axis=1, keepdims=True)
    fit = fit_multinomial(features, targets, regularisation=1e-4, tolerance=1e-2)
    found = np.exp(features @ fit.weights.T)
    assert np.abs(found / found.sum(axis=1, keepdims=True) - targets).max() < 0.02


def test_rows_that_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    features, targets = records(rng, 5, 3, 2)
    for rows, of, regularisation in (
        (features, targets[:4], 0.1),
        (features[:0], targets[:0], 0.1),
        (features, targets, 0.0),
    ):
        with pytest.raises(InvalidSetting):
            fit_multinomial(rows, of, regularisation=regularisation)
