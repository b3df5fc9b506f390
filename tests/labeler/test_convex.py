"""Sensitivities of linear models: the papers' numbers, minimizers found independently, gradients by brute force.

What training on neighboring sets really does is measured in tests/workers/learning/test_linear.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from benchmarks.papers.dp_helmet import sensitivity_as_in_paper
from labeler.descent import (
    BLOCK_ROWS,
    DEPTH,
    LEAST_BLOCK_ROWS,
    MOST_PUBLIC_ROWS,
    MOST_RECORDS,
    MOST_WEIGHTS,
    Descent,
    steps_to_converge,
)
from labeler.errors import InvalidSetting
from labeler.methods.blind_average import LinearTerms, softmax_lipschitz

SVM = LinearTerms("svm", 10, regularisation=1.2, clip_norm=1.0, radius=1.0, iterations=60, min_records=50)
SOFTMAX = LinearTerms("softmax", 10, regularisation=1.0, clip_norm=1.0, radius=100.0, iterations=30, min_records=50)


def logistic_regression_sensitivity(
    *, clip_norm: float, regularisation: float, num_records: int, gradient_norm: float = 0.0
) -> float:
    """How far one record moves the minimizer of regularized multinomial logistic regression: 2 sqrt(2) c / (lambda n).

    F_D' is lambda-strongly convex, so lambda |w - w'| <= |grad F_D'(w) - grad F_D(w)| <= 2L/n with L = sqrt(2) c.
    Weights at which the gradient has norm g lie within g/lambda of the minimizer, on either side.
    """
    return 2 * (math.sqrt(2) * clip_norm / num_records + gradient_norm) / regularisation


def test_the_papers_bounds_at_the_papers_settings() -> None:
    """Kirschte et al., appendices B and E: c = 34.854, 50 records, CIFAR-10."""
    svm = replace(SVM, clip_norm=34.854, radius=0.06, regularisation=100)
    assert sensitivity_as_in_paper(svm) == pytest.approx(math.sqrt(10) * 2 * 40.854 / 5000)
    softmax_ = replace(SOFTMAX, clip_norm=34.854, radius=1.0, regularisation=3)
    assert sensitivity_as_in_paper(softmax_) == pytest.approx(2 * (3 + 34.854 * 2**0.5) / 150)


def test_terms_charge_the_bound_of_the_minimiser_and_less_than_the_paper() -> None:
    assert SVM.sensitivity == pytest.approx(2 * math.sqrt(10) / (50 * 1.2), rel=1e-4)
    assert sensitivity_as_in_paper(SVM) == pytest.approx(math.sqrt(10) * 2 * (1 + 1.2) / (50 * 1.2))
    assert replace(SOFTMAX, regularisation=0.01).sensitivity == pytest.approx(
        logistic_regression_sensitivity(clip_norm=1, regularisation=0.01, num_records=50), rel=1e-4
    )
    logistic = replace(SVM, learner="logistic")
    # At the same terms the slopes of a logistic loss are shorter: 1 / (1 + e^-(1/1.2)) of a hinge's.
    assert logistic.sensitivity == pytest.approx(SVM.sensitivity / (1 + math.exp(-1 / 1.2)), rel=1e-4)
    assert replace(logistic, radius=1e-9).lipschitz == pytest.approx(math.sqrt(10) / 2)
    for terms in (SVM, SOFTMAX, logistic, replace(SOFTMAX, radius=0.1), replace(logistic, radius=0.1)):
        assert terms.sensitivity < sensitivity_as_in_paper(terms)
        assert terms.sensitivity <= 2 * terms.largest_norm
    assert SVM.largest_norm == pytest.approx(math.sqrt(10) / 1.2)
    assert replace(SVM, radius=0.1).largest_norm == pytest.approx(math.sqrt(10) * 0.1)


def test_the_margin_for_rounding_grows_with_what_it_covers_and_is_never_left_out() -> None:
    assert 0 < SVM.rounding_margin < 1e-6 * 50
    assert SVM.sensitivity > 2 * math.sqrt(10) / (50 * 1.2)
    assert replace(SVM, min_records=5000).rounding_margin > 50 * SVM.rounding_margin
    with pytest.raises(InvalidSetting, match="too weak for 50000 records"):
        replace(SVM, min_records=50_000, regularisation=1e-4)


@settings(max_examples=200)
@given(
    classes=st.integers(2, 12),
    radius=st.floats(1e-3, 30),
    clip_norm=st.floats(0.1, 5),
    seed=st.integers(0, 2**32 - 1),
    push=st.floats(0, 1),
)
def test_no_gradient_of_a_softmax_is_longer_than_its_bound(
    classes: int, radius: float, clip_norm: float, seed: int, push: float
) -> None:
    """Random models, and models that put all their norm against the label, the worst there are."""
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(4)
    row *= clip_norm / np.linalg.norm(row)
    against = np.outer(row, rng.dirichlet(np.full(classes, 0.1)) - np.eye(classes)[0])
    weights = push * against / max(float(np.linalg.norm(against)), 1e-12)
    weights += (1 - push) * rng.standard_normal((4, classes)) / 10
    weights *= radius / np.linalg.norm(weights)
    slope = softmax(row @ weights) - np.eye(classes)[0]
    bound = softmax_lipschitz(clip_norm=clip_norm, radius=radius, num_classes=classes)
    assert np.linalg.norm(np.outer(row, slope)) <= bound * (1 + 1e-12)
    assert bound <= math.sqrt(2) * clip_norm * (1 + 1e-12)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_bound_on_gradients_is_exact_for_tiny_models_and_close_for_large_ones(classes: int) -> None:
    tiny = softmax_lipschitz(clip_norm=1, radius=1e-12, num_classes=classes)
    assert tiny == pytest.approx(math.sqrt(1 - 1 / classes))
    assert softmax_lipschitz(clip_norm=1, radius=1e6, num_classes=classes) == pytest.approx(math.sqrt(2))
    # All the norm on two classes, label 0 against label 1: a real gradient, near the bound at R = 5.
    scores = np.zeros(classes)
    scores[:2] = -5 / math.sqrt(2), 5 / math.sqrt(2)
    real = np.linalg.norm(softmax(scores) - np.eye(classes)[0])
    assert 0.7 < real / softmax_lipschitz(clip_norm=1, radius=5, num_classes=classes) <= 1


def _minimiser(
    rows: NDArray[np.float64], labels: NDArray[np.int64], classes: int, regularisation: float
) -> tuple[NDArray[np.float64], float]:
    """By scipy's BFGS, not by our code: the weights and the norm of the gradient where it stopped."""
    truth = np.eye(classes)[labels]

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(rows.shape[1], classes)
        scores = rows @ weights
        loss = -(log_softmax(scores, axis=1) * truth).sum() / len(rows) + regularisation / 2 * (flat @ flat)
        gradient = rows.T @ (softmax(scores, axis=1) - truth) / len(rows) + regularisation * weights
        return float(loss), gradient.ravel()

    found = minimize(objective, np.zeros(rows.shape[1] * classes), jac=True, method="BFGS", options={"gtol": 1e-9})
    return found.x, float(np.linalg.norm(objective(found.x)[1]))


@settings(max_examples=60)
@given(
    classes=st.integers(2, 4),
    records=st.integers(2, 12),
    regularisation=st.floats(0.02, 2),
    change=st.sampled_from(["replace", "remove"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_record_moves_the_exact_minimiser_at_most_by_the_bound(
    classes: int, records: int, regularisation: float, change: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Few directions, so that records pull together or against each other.
    rows = 2.0 * rng.choice([-1.0, 1.0], records)[:, None] * np.eye(3)[rng.integers(0, 2, records)]
    labels = rng.integers(0, classes, records)
    other_rows, other_labels = rows.copy(), labels.copy()
    other_rows[-1], other_labels[-1] = -rows[-1], rng.integers(0, classes)
    if change == "remove":
        other_rows, other_labels = rows[:-1], labels[:-1]
    one, gap = _minimiser(rows, labels, classes, regularisation)
    other, other_gap = _minimiser(other_rows, other_labels, classes, regularisation)
    bound = logistic_regression_sensitivity(
        clip_norm=2, regularisation=regularisation, num_records=records, gradient_norm=max(gap, other_gap)
    )
    assert np.linalg.norm(one - other) <= bound


def test_a_bound_a_third_smaller_would_be_wrong_for_the_minimiser() -> None:
    """Two opposite records of one class: without sqrt(2) the bound is 0.95 true at ten classes and strong lambda."""
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((10, 3)) / 10, rng.integers(0, 10, 10)
    rows[0] = 1, 0, 0
    other = rows.copy()
    other[0] = -1, 0, 0
    one, _ = _minimiser(rows, labels, 10, 20.0)
    two, _ = _minimiser(other, labels, 10, 20.0)
    bound = logistic_regression_sensitivity(clip_norm=1, regularisation=20, num_records=10)
    assert 0.66 * bound < np.linalg.norm(one - two) <= bound


def test_a_softmax_of_one_class_has_no_bound() -> None:
    with pytest.raises(InvalidSetting, match="two classes"):
        softmax_lipschitz(clip_norm=1, radius=1, num_classes=1)


# Descent in exact numbers: the bound after every number of steps, and what its margins cover.


PLAIN = Descent(lipschitz=1.0, smoothness=0.25, regularisation=0.1, least=20, columns=3, iterations=50)


@settings(max_examples=100)
@given(
    regularisation=st.sampled_from([1e-6, 1e-3, 0.05, 1.0, 30.0]),
    clip_norm=st.sampled_from([1e-3, 0.3, 1.0, 20.0]),
    least=st.integers(1, 6),
    public=st.integers(0, 3),
    places=st.lists(st.integers(-3, 3), min_size=1, max_size=9),
    steps=st.integers(1, 40),
    change=st.sampled_from(["add", "remove", "replace", "remove under a bound"]),
    value=st.integers(-3, 3),
)
def test_logistic_descent_in_fifty_digits_keeps_the_bound_after_every_step(
    regularisation: float,
    clip_norm: float,
    least: int,
    public: int,
    places: list[int],
    steps: int,
    change: str,
    value: int,
) -> None:
    """An oracle that rounds nothing: one weight, records on a line, the mean over max(|D|, n) + m.

    Under a public bound on records it is over n + m, and a record comes or goes at half the sensitivity.
    """
    most = max(least, len(places)) + public if change.endswith("bound") else None
    try:
        terms = Descent(clip_norm, clip_norm**2 / 4, regularisation, least + public, 1, iterations=steps, most=most)
    except InvalidSetting:
        assert regularisation == 1e-6  # which double precision does not carry for long rows
        return

    def path(own: list[int]) -> list[mpf]:
        rows = [mpf(clip_norm) * place / 3 for place in own]
        weight, found = mpf(0), []
        for _ in range(steps):
            slopes = sum((-row / (1 + mp.exp(weight * row)) for row in rows), mpf(0))
            slopes += sum((mpf(clip_norm) / (1 + mp.exp(-weight * clip_norm)) for _ in range(public)), mpf(0))
            mean = slopes / ((max(len(own), least) if most is None else least) + public)
            weight -= mpf(terms.learning_rate) * (mean + mpf(regularisation) * weight)
            found.append(weight)
        return found

    other = places[1:] if change.startswith("remove") else [*places[change == "replace" :], value]
    with mp.workdps(50):
        for one, two in zip(path(places), path(other), strict=True):
            assert abs(one - two) <= terms.sensitivity
            assert max(abs(one), abs(two)) <= terms.largest_norm


def test_a_planted_record_uses_up_half_of_the_bound() -> None:
    """Opposite records, alone in the mean, regularized so strongly that slopes stay: the margins hide nothing."""
    terms = Descent(1.0, 0.25, 30.0, 1, 1, iterations=200)
    with mp.workdps(30):
        ends = []
        for sign in (1, -1):
            weight = mpf(0)
            for _ in range(terms.iterations):
                weight -= mpf(terms.learning_rate) * (-sign / (1 + mp.exp(weight * sign)) + 30 * weight)
            ends.append(weight)
    # A slope at zero is a half; the other half of L is what a confident mistake would add.
    assert 0.49 * terms.sensitivity < abs(ends[0] - ends[1]) <= 0.51 * terms.sensitivity


def test_blocks_and_weights_leave_no_sum_deeper_than_the_margin_covers() -> None:
    most_blocks = (MOST_RECORDS + MOST_PUBLIC_ROWS) // LEAST_BLOCK_ROWS
    assert BLOCK_ROWS + most_blocks + MOST_WEIGHTS < DEPTH


def test_the_bound_holds_its_margin_and_grows_with_what_it_covers() -> None:
    exact = 2 / (20 * 0.1)
    assert exact < PLAIN.sensitivity < exact * 1.001
    assert 1 / 0.1 < PLAIN.largest_norm < 10.001
    assert replace(PLAIN, feature_rounding=2.0**-32).rounding_margin > PLAIN.rounding_margin
    assert replace(PLAIN, least=40).rounding_margin == 2 * PLAIN.rounding_margin
    assert replace(PLAIN, radius=0.01).sensitivity == 2 * replace(PLAIN, radius=0.01).largest_norm
    assert replace(PLAIN, radius=0.5, balls=4).largest_norm == pytest.approx(1.0)
    assert replace(PLAIN, radius=0.5).reach == 0.5
    assert PLAIN.reach == 10


@pytest.mark.parametrize(
    ("terms", "change"),
    [
        (SVM, {"learner": "perceptron"}),
        (SVM, {"num_classes": 1}),
        (SVM, {"num_classes": True}),
        (SVM, {"regularisation": 0.0}),
        (SVM, {"regularisation": math.nan}),
        (SVM, {"clip_norm": math.inf}),
        (SVM, {"radius": -1.0}),
        (SVM, {"iterations": 0}),
        (SVM, {"min_records": 0}),
        (SVM, {"min_records": 2.5}),
        (PLAIN, {"regularisation": 1e-7, "least": 10**6}),
        (PLAIN, {"lipschitz": 1e-200}),
        (PLAIN, {"lipschitz": math.inf}),
        (PLAIN, {"lipschitz": math.nan}),
        (PLAIN, {"radius": 1e-200}),
        (PLAIN, {"regularisation": 1e101}),
        (PLAIN, {"iterations": 0}),
        (PLAIN, {"least": 0}),
        (PLAIN, {"feature_rounding": 1.0}),
        (PLAIN, {"smoothness": math.nan}),
    ],
)
def test_terms_out_of_bounds_or_beyond_double_precision_are_refused(terms: Any, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        replace(terms, **change)


def test_steps_are_enough_to_converge_or_the_most() -> None:
    for smoothness, regularisation in ((0.5, 0.1), (0.5, 0.01), (1e-12, 5.0)):
        steps = steps_to_converge(smoothness, regularisation, most=10**6)
        shrink = 1 - 2 * regularisation / (smoothness + 2 * regularisation)
        assert shrink**steps <= 1e-6
    assert steps_to_converge(0.5, 1e-6, most=2000) == 2000
    assert steps_to_converge(1e300, 1e-300, most=2000) == 2000
