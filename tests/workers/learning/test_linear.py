"""Linear learners: trained on neighboring sets, against a twin by automatic differentiation, together and alone.

Over a public denominator the sensitivity is half as large: against minimizers found independently and worst cases.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression

from benchmarks.learning.linear_users import NO_RECORD, linear_scores, train_linear, train_users
from labeler.descent import MOST_RECORDS, Descent
from labeler.errors import InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.methods.aux_distill import head_terms
from labeler.methods.blind_average import HUBER_WIDTH, LinearTerms, linear_terms, weight_sum
from labeler.planning import price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.task import Task
from tests.labeler.tasks import make_task
from workers.learning.linear import SLOPES, augmented

SVM = LinearTerms("svm", 5, regularisation=1.2, clip_norm=1.0, radius=1.0, iterations=60, min_records=20)
SOFTMAX = LinearTerms("softmax", 5, regularisation=0.3, clip_norm=1.0, radius=0.5, iterations=60, min_records=20)
LOGISTIC = LinearTerms("logistic", 5, regularisation=0.3, clip_norm=1.0, radius=0.5, iterations=60, min_records=20)
EACH = pytest.mark.parametrize("terms", [SVM, SOFTMAX, LOGISTIC], ids=lambda terms: terms.learner)


def _records(rng: np.random.Generator, users: int, records: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    features = rng.standard_normal((users, records, 6)).astype(np.float32)
    return features, rng.integers(0, 5, (users, records))


@settings(max_examples=500, deadline=None)
@given(
    terms=st.builds(
        LinearTerms,
        learner=st.sampled_from(["softmax", "svm", "logistic"]),
        num_classes=st.integers(2, 6),
        regularisation=st.floats(0.01, 5),
        clip_norm=st.floats(0.2, 4),
        radius=st.floats(0.02, 500),
        iterations=st.integers(1, 80),
        min_records=st.integers(1, 15),
    ),
    records=st.integers(1, 20),
    room=st.none() | st.integers(0, 20),
    change=st.sampled_from(["replace", "mirror", "remove"]),
    planted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_record_moves_the_trained_weights_at_most_by_the_sensitivity(
    terms: LinearTerms, records: int, room: int | None, change: str, planted: bool, seed: int
) -> None:
    """The real trainer on neighboring sets of any size, at the norm bound, converged or not.

    With room above the records there is a public bound: the denominator is public, a record only comes or goes, and
    the sensitivity is half as large.
    """
    most = None if room is None else max(records, terms.min_records) + room
    terms, classes = replace(terms, max_records=most), terms.num_classes
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
    "terms",
    [SVM, *(replace(one, regularisation=3.0, radius=r) for one, r in ((SOFTMAX, 0.05), (LOGISTIC, 0.02)))],
    ids=["svm", "softmax of a small norm", "logistic of a small norm"],
)
def test_a_planted_record_nearly_reaches_the_bound(terms: LinearTerms, most: int | None) -> None:
    """A bound three percent smaller would be false: of one record against its mirror image, among empty ones; or,
    under a public bound, of one against none.

    What sets one class against the rest pays sqrt(K): without it the bound is passed by far.
    """
    terms = replace(terms, max_records=most, iterations=200)
    features = np.zeros((20, 6))
    features[0] = 5, 0, 0, 0, 0, 0
    one, other = (features, -features) if most is None else (features[:1], features[:0])
    moved = [train_linear(rows, np.arange(len(rows)) % 5, terms=terms) for rows in (one, other)]
    distance = float(np.linalg.norm(moved[0] - moved[1]))
    assert 0.97 * terms.sensitivity < distance <= terms.sensitivity
    if terms.learner != "softmax":
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
        elif terms.learner == "logistic":
            signs = 2 * torch.nn.functional.one_hot(truth, terms.num_classes) - 1
            losses = torch.log(1 + torch.exp(-signs * scores)).sum()
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
@EACH
def test_training_is_what_the_terms_define(
    terms: LinearTerms, radius: float, records: int, rng: np.random.Generator
) -> None:
    terms = replace(terms, radius=radius, regularisation=0.1, iterations=20)
    features, labels = _records(rng, 1, records)
    found = train_linear(features[0], labels[0], terms=terms)
    assert found.dtype == np.float64
    assert np.allclose(found, _twin(features[0], labels[0], terms), rtol=0, atol=1e-10)


@EACH
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


@EACH
def test_learners_learn(terms: LinearTerms, rng: np.random.Generator) -> None:
    features, labels = _records(rng, 1, 200)
    features += 3 * np.eye(6, dtype=np.float32)[labels]
    weights = train_linear(features[0, :100], labels[0, :100], terms=terms)
    found = linear_scores(features[0, 100:], weights, terms=terms).argmax(axis=1)
    assert (found == labels[0, 100:]).mean() > 0.8


@EACH
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


@pytest.mark.parametrize(("records", "least"), [(30, 20), (5, 20)])
def test_a_logistic_model_is_scikit_learns_for_each_class_against_the_rest(records: int, least: int) -> None:
    """An oracle that descends otherwise: L-BFGS, each class alone, C = 1 / (lambda N) for the mean over N."""
    features, labels = _records(np.random.default_rng(records), 1, records)
    terms = replace(LOGISTIC, radius=1e6, iterations=2000, min_records=least)
    found = train_linear(features[0], labels[0], terms=terms)
    rows = augmented(features[0], terms)
    inverse = 1 / (terms.regularisation * max(records, least))
    oracle = LogisticRegression(C=inverse, fit_intercept=False, tol=1e-12, max_iter=10_000)
    for one in range(terms.num_classes):
        if len(set(labels[0] == one)) == 2:
            assert np.allclose(found[:, one], oracle.fit(rows, labels[0] == one).coef_[0], atol=1e-6)


@settings(max_examples=100)
@given(
    classes=st.integers(2, 12),
    radius=st.floats(1e-3, 30),
    clip_norm=st.floats(0.1, 5),
    regularisation=st.floats(0.01, 5),
    room=st.none() | st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_gradient_of_a_logistic_model_is_longer_than_its_bound(
    classes: int, radius: float, clip_norm: float, regularisation: float, room: int | None, seed: int
) -> None:
    """Every class as wrong as its norm allows, which attains the bound, and models at random."""
    most = None if room is None else 5 + room
    terms = LinearTerms("logistic", classes, regularisation, clip_norm, radius, 10, 5, most)
    reached = min(radius, (1 if most is None else most / 5) * clip_norm / regularisation)
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(4)
    row *= clip_norm / np.linalg.norm(row)
    is_class = np.arange(classes) == rng.integers(0, classes)
    worst = np.outer(row, np.where(is_class, -1.0, 1.0))
    found = []
    for weights in (worst, rng.standard_normal((4, classes))):
        weights *= reached / np.linalg.norm(weights, axis=0)
        found.append(float(np.linalg.norm(np.outer(row, SLOPES["logistic"](row @ weights, is_class)))))
    assert found[0] == pytest.approx(terms.lipschitz)
    assert found[1] <= terms.lipschitz * (1 + 1e-12)


Array = NDArray[np.float64]
TRAINING = {"min_records": 200, "regularisation": 0.05, "dimension": 10}


def task(method: str = "blind-average", **fields: Any) -> Task:
    given_fields = {"name": "m", "sigma_votes": 4.0, "delta": 1e-5, "max_queries": 65, "agents": 5}
    return make_task(method=method, **given_fields | {"training": TRAINING} | fields)


def _minimiser(rows: Array, labels: NDArray[np.int64], classes: int, n: int, regularisation: float) -> Array:
    """Of the sum of losses over n and the regulariser, by scipy's BFGS, not by our steps."""
    truth = np.eye(classes)[labels]

    def objective(flat: Array) -> tuple[float, Array]:
        scores = rows @ flat.reshape(rows.shape[1], classes)
        loss = -(log_softmax(scores, axis=1) * truth).sum() / n + regularisation / 2 * (flat @ flat)
        gradient = rows.T @ (softmax(scores, axis=1) - truth) / n
        return float(loss), gradient.ravel() + regularisation * flat

    start = np.zeros(rows.shape[1] * classes)
    return np.asarray(minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-10}).x)


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(2, 4),
    records=st.integers(1, 20),
    n=st.integers(1, 8),
    regularisation=st.floats(0.1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_exact_minimiser_keeps_the_bound_and_is_where_the_steps_end(
    classes: int, records: int, n: int, regularisation: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    signs, places = rng.choice([-1.0, 1.0], records), rng.integers(0, 2, records)
    rows, labels = signs[:, None] * np.eye(3)[places], rng.integers(0, classes, records)
    most = max(records, n)
    terms = LinearTerms("softmax", classes, regularisation, 1.0, 1e9, 1000, n, most)
    bias = np.full((records, 1), terms.bias_feature)
    seen = np.concatenate([rows * terms.feature_norm, bias], axis=1)
    one, other = (_minimiser(seen[at:], labels[at:], classes, n, regularisation) for at in (0, 1))
    assert np.linalg.norm(one - other) <= terms.sensitivity + 1e-6
    trained = train_linear(rows, labels, terms=terms)
    assert np.linalg.norm(trained.ravel() - one) < 1e-4 * max(1.0, float(np.linalg.norm(one)))


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
def test_a_kept_bound_halves_the_noise_of_the_same_price_and_a_cap_per_person_takes_that_back(method: str) -> None:
    plain, kept = task(method), task(method, training=TRAINING | {"max_records": 300})
    capped = task(method, training=TRAINING | {"max_records": 300}, records_per_person=2)

    def unit(one: Task) -> float:
        return linear_terms(one).sensitivity if method == "blind-average" else head_terms(one).head_noise

    assert unit(kept) == pytest.approx(unit(plain) / 2, rel=1e-3)
    assert unit(capped) == unit(plain)
    assert price(kept).instance.epsilon == pytest.approx(price(plain).instance.epsilon, rel=1e-3)
    said = [price(one).to_json()["one_record"] for one in (plain, kept, capped)]
    assert "2 L / (n lambda)" in said[0]
    assert "half the noise would do" in said[0]
    assert "L / (n lambda): it comes or goes" in said[1]
    assert "300 records" in said[1]
    assert "records_per_person may let one record replace another" in said[2]
    assert "one_record" not in price(task("ensemble", training=None)).to_json()


def test_a_card_says_which_bound_was_used_and_one_without_is_as_it_was() -> None:
    kept = task(training=TRAINING | {"max_records": 300})
    card = privacy_card(kept, price(kept), is_seeded=False)
    assert card["training"]["max_records"] == 300
    assert "at most 300 records" in card_in_words(card)
    plain = privacy_card(task(), price(task()), is_seeded=False)
    assert "one_record" not in plain
    assert "max_records" not in plain["training"]


def test_at_agent_level_the_whole_model_is_paid_for_which_may_be_as_many_times_longer() -> None:
    loose = task(training=TRAINING | {"max_records": 800, "radius": 1e9})
    tight = task(training=TRAINING | {"max_records": 200, "radius": 1e9})
    assert linear_terms(loose).largest_norm == pytest.approx(4 * linear_terms(tight).largest_norm, rel=1e-3)
    assert weight_sum(loose).largest_norm == pytest.approx(800, rel=1e-3)


def test_a_task_without_the_bound_has_the_digest_it_had_before_there_was_one() -> None:
    fields = task().model_dump(mode="json")
    assert "max_records" not in fields["training"]
    assert task().digest == "3d348987f94e045f877f2f832ed77e1614e1a4be78a2ff5907a784ab432a4da3"
    assert task(training=TRAINING | {"max_records": 300}).digest != task().digest


def test_bounds_without_meaning_are_refused() -> None:
    with pytest.raises(InvalidTask, match="at least the min_records 200"):
        task(training=TRAINING | {"max_records": 199})
    with pytest.raises(InvalidTask, match="max_records"):
        task(training=TRAINING | {"max_records": MOST_RECORDS + 1})
    with pytest.raises(InvalidSetting, match="at least the 20"):
        Descent(1.0, 0.25, 0.1, 20, 1, 1, most=19)


def test_more_records_than_the_bound_are_never_trained_on() -> None:
    terms = LinearTerms("softmax", 3, 0.5, 1.0, 1.0, 5, 4, 6)
    rows, labels = np.ones((7, 2)), np.arange(7) % 3
    with pytest.raises(PrivacyRefusal, match="declared to be the most") as refusal:
        train_linear(rows, labels, terms=terms)
    assert "7" not in str(refusal.value)
    users = np.stack([rows, rows])
    with pytest.raises(PrivacyRefusal):
        train_users(users, np.stack([labels, labels]), terms=terms)
    short = np.where(np.arange(7) < 6, labels, NO_RECORD)
    together = train_users(users, np.stack([short, short]), terms=terms)
    assert np.allclose(together[0], train_linear(rows[:6], labels[:6], terms=terms), rtol=0, atol=1e-12)
