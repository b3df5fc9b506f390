from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from labeler.convex import logistic_regression_sensitivity
from labeler.errors import InvalidSetting, PrivacyRefusal
from workers.learning.regression import Array, fit_binary, fit_multinomial

TOLERANCE = 1e-5


def records(rng: np.random.Generator, count: int, dimension: int, classes: int) -> tuple[Array, Array]:
    """Records on the ball, half of them on its edge: where bounds are reached."""
    features = rng.normal(size=(count, dimension))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    features *= np.where(rng.random(count) < 0.5, 1.0, rng.random(count))[:, None]
    return features, np.eye(classes)[rng.integers(0, classes, count)]


def test_softmax_weights_are_scikit_learns_where_its_c_is_one_over_lambda_n(rng: np.random.Generator) -> None:
    features, targets = records(rng, 60, 5, 3)
    fit = fit_multinomial(features, targets, regularisation=0.05, records=60)
    oracle = LogisticRegression(C=1 / (0.05 * 60), fit_intercept=False, tol=1e-10, max_iter=10_000)
    found = oracle.fit(features, targets.argmax(axis=1)).coef_
    assert np.linalg.norm(fit.weights - found) < 1e-4
    forgotten = LogisticRegression(C=1 / 0.05, fit_intercept=False, tol=1e-10, max_iter=10_000)
    # Without the 1/N it is another problem, sixty times as sensitive.
    assert np.linalg.norm(forgotten.fit(features, targets.argmax(axis=1)).coef_) > 2 * np.linalg.norm(fit.weights)


def test_binary_weights_are_scikit_learns(rng: np.random.Generator) -> None:
    features, targets = records(rng, 60, 5, 2)
    positive = targets[:, 1] > 0
    fit = fit_binary(features, positive, regularisation=0.02, records=60)
    oracle = LogisticRegression(C=1 / (0.02 * 60), fit_intercept=False, tol=1e-10, max_iter=10_000)
    assert np.linalg.norm(fit.weights - oracle.fit(features, positive).coef_[0]) < 1e-4


def test_the_certified_distance_is_true(rng: np.random.Generator) -> None:
    features, targets = records(rng, 40, 4, 3)
    best = fit_multinomial(features, targets, regularisation=0.1, records=40, tolerance=1e-8)
    for tolerance in (1.0, 1e-2, 1e-4):
        rough = fit_multinomial(features, targets, regularisation=0.1, records=40, tolerance=tolerance)
        assert np.linalg.norm(rough.weights - best.weights) <= rough.distance + best.distance
        assert rough.distance <= tolerance
        assert rough.iterations <= best.iterations


def test_an_optimiser_that_cannot_prove_its_distance_is_refused(rng: np.random.Generator) -> None:
    features, targets = records(rng, 40, 4, 3)
    with pytest.raises(PrivacyRefusal, match="no sensitivity is proved"):
        fit_multinomial(features, targets, regularisation=0.1, records=40, tolerance=1e-14)
    with pytest.raises(PrivacyRefusal, match="no sensitivity is proved"):
        fit_binary(features, targets[:, 0] > 0, regularisation=0.1, records=40, tolerance=1e-14)


def test_hard_problems_of_every_size_converge_to_the_default_tolerance(rng: np.random.Generator) -> None:
    for count, regularisation in ((1, 1e-3), (10, 1e-3), (300, 1e-3), (300, 0.3)):
        features, targets = records(rng, count, 20, 4)
        # Separable: the loss alone would drive weights to infinity.
        features[:, :4] = targets
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        assert fit_multinomial(features, targets, regularisation=regularisation, records=count).distance <= TOLERANCE


def test_nobody_gives_zero_weights() -> None:
    fit = fit_multinomial(np.zeros((0, 4)), np.zeros((0, 3)), regularisation=0.1, records=10)
    assert fit.weights.shape == (3, 4)
    assert not fit.weights.any()
    assert not fit_binary(np.zeros((0, 4)), np.zeros(0, dtype=bool), regularisation=0.1, records=10).weights.any()


def test_a_class_without_records_has_weights_all_the_same(rng: np.random.Generator) -> None:
    features, targets = records(rng, 30, 4, 3)
    wide = np.hstack([targets, np.zeros((30, 2))])
    fit = fit_multinomial(features, wide, regularisation=0.1, records=30)
    assert fit.weights.shape == (5, 4)
    assert np.abs(fit.weights[3:]).min() > 0


def test_soft_labels_are_learned(rng: np.random.Generator) -> None:
    features, _ = records(rng, 200, 4, 3)
    truth = rng.normal(size=(3, 4))
    exponentials = np.exp(features @ truth.T)
    targets = exponentials / exponentials.sum(axis=1, keepdims=True)
    fit = fit_multinomial(features, targets, regularisation=1e-4, records=200, tolerance=1e-2)
    found = np.exp(features @ fit.weights.T)
    assert np.abs(found / found.sum(axis=1, keepdims=True) - targets).max() < 0.02


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 14),
    least=st.integers(1, 16),
    dimension=st.integers(1, 4),
    classes=st.integers(2, 6),
    regularisation=st.sampled_from([1e-3, 0.01, 0.1, 1.0, 10.0]),
    change=st.sampled_from(["replace", "remove", "add"]),
)
@settings(max_examples=80, deadline=None)
def test_one_record_moves_the_head_by_at_most_its_sensitivity(
    seed: int, count: int, least: int, dimension: int, classes: int, regularisation: float, change: str
) -> None:
    rng = np.random.default_rng(seed)
    features, targets = records(rng, count, dimension, classes)
    extra, target = records(rng, 1, dimension, classes)
    if rng.random() < 0.5:
        extra, target = -features[-1:], targets[-1:]
    kept = slice(None) if change == "add" else slice(None, -1)
    neighbour = (features[kept], targets[kept])
    if change != "remove":
        neighbour = (np.vstack([features[kept], extra]), np.vstack([targets[kept], target]))
    heads = [
        fit_multinomial(rows, of, regularisation=regularisation, records=max(len(rows), least), tolerance=TOLERANCE)
        for rows, of in ((features, targets), neighbour)
    ]
    bound = logistic_regression_sensitivity(
        clip_norm=1.0, regularisation=regularisation, num_records=least, gradient_norm=regularisation * TOLERANCE
    )
    assert np.linalg.norm(heads[0].weights - heads[1].weights) <= bound


def test_a_record_can_use_up_two_thirds_of_the_bound(rng: np.random.Generator) -> None:
    """So half the bound would be wrong, and the property above does not hold for nothing."""
    classes, regularisation = 50, 10.0
    features, targets = records(rng, 4, 3, classes)
    features[-1] = (1.0, 0.0, 0.0)
    mirrored = features.copy()
    mirrored[-1] *= -1
    heads = [
        fit_multinomial(rows, targets, regularisation=regularisation, records=4).weights
        for rows in (features, mirrored)
    ]
    bound = logistic_regression_sensitivity(clip_norm=1.0, regularisation=regularisation, num_records=4)
    assert 0.66 * bound < np.linalg.norm(heads[0] - heads[1]) <= bound


def test_weights_do_not_print() -> None:
    fit = fit_binary(np.ones((1, 2)), np.array([True]), regularisation=0.1, records=1)
    assert str(fit.weights[0]) not in repr(fit)
    assert "redacted" in repr(fit)


def test_rows_that_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    features, targets = records(rng, 5, 3, 2)
    for rows, of, regularisation, count in (
        (features, targets[:4], 0.1, 5),
        (features.astype(np.float32), targets, 0.1, 5),
        (features, targets, 0.0, 5),
        (features, targets, 0.1, 0),
    ):
        with pytest.raises(InvalidSetting):
            fit_multinomial(rows, of, regularisation=regularisation, records=count)  # type: ignore[arg-type]
