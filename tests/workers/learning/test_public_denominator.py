"""Models over a public denominator: half the sensitivity, against minimizers found independently and worst cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from benchmarks.learning.linear_users import NO_RECORD, train_linear, train_users
from labeler.descent import MOST_RECORDS, Descent
from labeler.errors import InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.methods.aux_distill import head_terms
from labeler.methods.blind_average import LinearTerms, linear_terms, weight_sum
from labeler.planning import price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.task import Task, parse_task

Array = NDArray[np.float64]
TRAINING = {"min_records": 200, "regularisation": 0.05, "dimension": 10}


def task(method: str = "blind-average", **fields: Any) -> Task:
    given_fields = {
        "name": "m", "classes": ["a", "b", "c"], "method": method, "sigma_votes": 4.0, "delta": 1e-5,
        "max_queries": 65, "agents": 5, "training": TRAINING,
    }  # fmt: skip
    return parse_task(given_fields | fields)


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


def test_a_step_that_forgets_how_many_records_there_may_be_is_no_contraction() -> None:
    """Five times n records, old step length: neighbors part further than the bound. With n_max in it they do not."""
    n, most, regularisation = 4, 20, 0.05
    good = Descent(math.sqrt(2), 0.5, regularisation, n, 2, 400, most=most)
    forgets = Descent(math.sqrt(2), 0.5, regularisation, n, 2, 400).learning_rate
    assert good.learning_rate < forgets
    rng = np.random.default_rng(3)
    found = {"good": 0.0, "forgets": 0.0}
    for _ in range(30):
        rows = rng.standard_normal((most, 2))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        truth = np.eye(2)[rng.integers(0, 2, most)]
        for name, step in (("good", good.learning_rate), ("forgets", 2.5 * forgets)):
            paths = []
            for kept in (slice(0, None), slice(1, None)):
                weights = np.zeros((2, 2))
                for _ in range(400):
                    slopes = softmax(rows[kept] @ weights, axis=1) - truth[kept]
                    weights = weights - step * (rows[kept].T @ slopes / n + regularisation * weights)
                paths.append(weights)
            found[name] = max(found[name], float(np.linalg.norm(paths[0] - paths[1])))
    assert found["good"] <= good.sensitivity < found["forgets"]


@settings(max_examples=60, deadline=None)
@given(
    regularisation=st.sampled_from([1e-3, 0.05, 1.0, 30.0]),
    clip_norm=st.sampled_from([1e-3, 1.0, 20.0]),
    n=st.integers(1, 4),
    public=st.integers(0, 3),
    places=st.lists(st.integers(-3, 3), min_size=1, max_size=9),
    steps=st.integers(1, 30),
)
def test_logistic_descent_in_fifty_digits_keeps_the_bound_after_every_step(
    regularisation: float, clip_norm: float, n: int, public: int, places: list[int], steps: int
) -> None:
    """The certainty head on a line, with public negatives; an oracle that rounds nothing."""
    most = max(n, len(places)) + public
    terms = Descent(clip_norm, clip_norm**2 / 4, regularisation, n + public, 1, iterations=steps, most=most)

    def path(own: list[int]) -> list[mpf]:
        rows = [mpf(clip_norm) * place / 3 for place in own]
        weight, found = mpf(0), []
        for _ in range(steps):
            slopes = sum((-row / (1 + mp.exp(weight * row)) for row in rows), mpf(0))
            slopes += sum((mpf(clip_norm) / (1 + mp.exp(-weight * clip_norm)) for _ in range(public)), mpf(0))
            weight -= mpf(terms.learning_rate) * (slopes / (n + public) + mpf(regularisation) * weight)
            found.append(weight)
        return found

    with mp.workdps(50):
        for one, two in zip(path(places), path(places[1:]), strict=True):
            assert abs(one - two) <= terms.sensitivity
            assert max(abs(one), abs(two)) <= terms.largest_norm


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
