"""Linear learners: trained on neighboring sets, against a twin by automatic differentiation, together and alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.learning.linear_users import NO_RECORD, linear_scores, train_linear, train_users
from labeler.methods.blind_average import HUBER_WIDTH, Learner, LinearTerms

SVM = LinearTerms("svm", 5, regularisation=1.2, clip_norm=1.0, radius=1.0, iterations=60, min_records=20)
SOFTMAX = LinearTerms("softmax", 5, regularisation=0.3, clip_norm=1.0, radius=0.5, iterations=60, min_records=20)
BOTH = pytest.mark.parametrize("terms", [SVM, SOFTMAX], ids=["svm", "softmax"])


def _records(rng: np.random.Generator, users: int, records: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    features = rng.standard_normal((users, records, 6)).astype(np.float32)
    return features, rng.integers(0, 5, (users, records))


@settings(max_examples=500, deadline=None)
@given(
    learner=st.sampled_from(["softmax", "svm"]),
    classes=st.integers(2, 6),
    records=st.integers(1, 20),
    min_records=st.integers(1, 15),
    room=st.none() | st.integers(0, 20),
    regularisation=st.floats(0.01, 5),
    clip_norm=st.floats(0.2, 4),
    radius=st.floats(0.02, 500),
    iterations=st.integers(1, 80),
    change=st.sampled_from(["replace", "mirror", "remove"]),
    planted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_record_moves_the_trained_weights_at_most_by_the_sensitivity(
    learner: Learner,
    classes: int,
    records: int,
    min_records: int,
    room: int | None,
    regularisation: float,
    clip_norm: float,
    radius: float,
    iterations: int,
    change: str,
    planted: bool,
    seed: int,
) -> None:
    """The real trainer on neighboring sets of any size, at the norm bound, converged or not.

    With room above the records there is a public bound: the denominator is public, a record only comes or goes, and
    the sensitivity is half as large.
    """
    most = None if room is None else max(records, min_records) + room
    terms = LinearTerms(learner, classes, regularisation, clip_norm, radius, iterations, min_records, most)
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((records, 3)) * rng.choice([0.1, 10.0])
    labels = rng.integers(0, classes, records)
    if planted:
        # All on one line: nothing but the record itself decides where the weights go.
        features = 10 * rng.choice([-1.0, 1.0], records)[:, None] * np.eye(3)[:1]
    other_features, other_labels = features.copy(), labels.copy()
    if change == "remove" or most is not None:
        other_features, other_labels = features[1:], labels[1:]
    elif change == "mirror":
        other_features[0] = -features[0]
    else:
        other_features[0], other_labels[0] = 100 * rng.standard_normal(3), rng.integers(0, classes)
    one = train_linear(features, labels, terms=terms)
    other = train_linear(other_features, other_labels, terms=terms)
    assert np.linalg.norm(one - other) <= terms.sensitivity
    assert max(np.linalg.norm(one), np.linalg.norm(other)) <= terms.largest_norm


@pytest.mark.parametrize("most", [None, 20])
@pytest.mark.parametrize(
    "terms", [SVM, replace(SOFTMAX, regularisation=3.0, radius=0.05)], ids=["svm", "softmax of a small norm"]
)
def test_a_planted_record_nearly_reaches_the_bound(terms: LinearTerms, most: int | None) -> None:
    """A bound three percent smaller would be false: of one record against its mirror image, among empty ones; or,
    under a public bound, of one against none.

    The svm pays sqrt(K): without it the bound is passed by far.
    """
    terms = replace(terms, max_records=most, iterations=200)
    features = np.zeros((20, 6))
    features[0] = 5, 0, 0, 0, 0, 0
    one, other = (features, -features) if most is None else (features[:1], features[:0])
    moved = [train_linear(rows, np.arange(len(rows)) % 5, terms=terms) for rows in (one, other)]
    distance = float(np.linalg.norm(moved[0] - moved[1]))
    assert 0.97 * terms.sensitivity < distance <= terms.sensitivity
    if terms.learner == "svm":
        assert distance > 2 * terms.sensitivity / math.sqrt(terms.num_classes)


def test_users_reach_the_norm_that_is_charged_for_them() -> None:
    """Corollary 10: two users whose records are each other's mirror image lie nearly 2R apart."""
    terms = replace(SVM, radius=0.2)
    features = np.tile([[7.0, 0, 0]], (20, 1))
    labels = np.zeros(20, dtype=np.int64)
    one, other = (train_linear(sign * features, labels, terms=terms) for sign in (1, -1))
    assert np.linalg.norm(one) == pytest.approx(terms.largest_norm)
    assert 1.98 * terms.largest_norm < np.linalg.norm(one - other) <= 2 * terms.largest_norm


def _twin(features: NDArray[np.float32], labels: NDArray[np.int64], terms: LinearTerms) -> NDArray[np.float64]:
    """The definition in `LinearTerms`, its gradient by automatic differentiation."""
    rows = torch.tensor(features, dtype=torch.float64)
    rows = rows * torch.clamp(terms.feature_norm / rows.norm(dim=1, keepdim=True), max=1)
    rows = torch.cat([rows, torch.full((len(rows), 1), terms.bias_feature, dtype=torch.float64)], dim=1)
    truth = torch.tensor(labels)
    weights = torch.zeros(rows.shape[1], terms.num_classes, dtype=torch.float64)
    for _ in range(terms.iterations):
        weights.requires_grad_(True)
        scores = rows @ weights
        if terms.learner == "softmax":
            losses = torch.nn.functional.cross_entropy(scores, truth, reduction="sum")
        else:
            margins = scores * (2 * torch.nn.functional.one_hot(truth, terms.num_classes) - 1)
            short = 1 + HUBER_WIDTH - margins
            curved = torch.where(short < 2 * HUBER_WIDTH, short.clamp(min=0) ** 2 / (4 * HUBER_WIDTH), 1 - margins)
            losses = curved.sum()
        objective = losses / max(len(rows), terms.min_records) + terms.regularisation / 2 * weights.square().sum()
        (gradient,) = torch.autograd.grad(objective, weights)
        with torch.no_grad():
            weights = weights - terms.learning_rate * gradient
            dims = (0, 1) if terms.learner == "softmax" else 0
            weights = weights * torch.clamp(terms.radius / weights.norm(dim=dims, keepdim=True), max=1)
    return np.asarray(weights.detach().numpy())


@pytest.mark.parametrize("records", [7, 20, 33])
@pytest.mark.parametrize("radius", [0.1, 50.0])
@BOTH
def test_training_is_what_the_terms_define(
    terms: LinearTerms, radius: float, records: int, rng: np.random.Generator
) -> None:
    terms = replace(terms, radius=radius, regularisation=0.1, iterations=20)
    features, labels = _records(rng, 1, records)
    found = train_linear(features[0], labels[0], terms=terms)
    assert found.dtype == np.float64
    assert np.allclose(found, _twin(features[0], labels[0], terms), rtol=0, atol=1e-10)


@BOTH
def test_users_trained_together_are_users_trained_alone(terms: LinearTerms, rng: np.random.Generator) -> None:
    features, labels = _records(rng, 30, 25)
    labels[3, 10:] = NO_RECORD
    labels[4] = NO_RECORD
    together = train_users(features, labels, terms=terms)
    for user in range(30):
        mine = labels[user] != NO_RECORD
        alone = train_linear(features[user, mine], labels[user, mine], terms=terms)
        assert np.allclose(together[user], alone, rtol=0, atol=1e-12)
    assert not together[4].any()
    assert np.array_equal(together, train_users(features, labels, terms=terms))


def test_the_average_svm_is_the_svm_of_all_records_whoever_holds_them(rng: np.random.Generator) -> None:
    """Theorem 14's condition holds for lambda > c^2 / (1 - h): no margin leaves the line."""
    features, labels = _records(rng, 20, 20)
    features += 3 * np.eye(6, dtype=np.float32)[labels]
    central = replace(SVM, min_records=400)
    whole = train_linear(features.reshape(400, 6), labels.reshape(400), terms=central)
    order = np.argsort(labels.ravel(), kind="stable")
    by_class = train_users(
        features.reshape(400, 6)[order].reshape(20, 20, 6), labels.ravel()[order].reshape(20, 20), terms=SVM
    )
    assert np.allclose(train_users(features, labels, terms=SVM).mean(axis=0), whole, atol=1e-9)
    assert np.allclose(by_class.mean(axis=0), whole, atol=1e-9)


@BOTH
def test_learners_learn(terms: LinearTerms, rng: np.random.Generator) -> None:
    features, labels = _records(rng, 1, 200)
    features += 3 * np.eye(6, dtype=np.float32)[labels]
    weights = train_linear(features[0, :100], labels[0, :100], terms=terms)
    found = linear_scores(features[0, 100:], weights, terms=terms).argmax(axis=1)
    assert (found == labels[0, 100:]).mean() > 0.8


def test_nobody_is_refused_for_having_no_records() -> None:
    empty = train_linear(np.zeros((0, 6), dtype=np.float32), np.zeros(0, dtype=np.int64), terms=SOFTMAX)
    assert empty.shape == (7, 5)
    assert not empty.any()


@BOTH
def test_records_read_in_blocks_train_the_same_model(
    terms: LinearTerms, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, labels = _records(rng, 1, 100)
    whole = train_linear(features[0], labels[0], terms=terms)
    monkeypatch.setattr("workers.learning.linear.block_rows", lambda _: 7)
    for most in (2**25, 0):
        monkeypatch.setattr("labeler.records.KEPT_NUMBERS", most)
        assert np.allclose(train_linear(features[0], labels[0], terms=terms), whole, rtol=0, atol=1e-12)
        assert np.allclose(train_users(features, labels, terms=terms)[0], whole, rtol=0, atol=1e-12)
