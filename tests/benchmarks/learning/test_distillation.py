from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.learning.heads import distil, grid_votes, soft_labels, student_features, sum_votes
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.randomness import seeded_source


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1, 7, 1 << 16, 1 << 30]), classes=st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_votes_on_the_grid_never_exceed_one_vote_per_query(seed: int, scale: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    soft = rng.dirichlet(np.full(classes, 0.3), size=20) * rng.random((20, 1)) ** 0.2
    soft[0] = 1 / classes
    votes = grid_votes(soft, scale=scale)
    assert votes.dtype == np.int64
    assert votes.min() >= 0
    assert votes.sum(axis=1).max() <= scale
    assert np.abs(votes - scale * soft).max() <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1, 1.1])
def test_votes_that_are_no_votes_are_refused(bad: float) -> None:
    soft = np.full((3, 2), 0.4)
    soft[1, 1] = bad
    with pytest.raises(PrivacyRefusal):
        grid_votes(soft)


def test_the_sum_through_shares_is_the_sum(rng: np.random.Generator) -> None:
    votes = [rng.integers(0, 1 << 16, (30, 4)) for _ in range(5)]
    sources = [seeded_source(number) for number in range(5)]
    assert np.array_equal(sum_votes(votes, sources=sources), np.sum(votes, axis=0))
    assert np.array_equal(sum_votes(votes[:1], sources=sources[:1], talliers=3), votes[0])


def test_a_sum_of_nobody_is_refused() -> None:
    with pytest.raises(InvalidSetting):
        sum_votes([], sources=[])


def test_soft_labels_are_the_papers_equation_1(rng: np.random.Generator) -> None:
    certainties = rng.random((3, 20))
    answers = rng.dirichlet(np.ones(4), size=(3, 20))
    scale = 1 << 30
    total = sum(grid_votes(f[:, None] * g, scale=scale) for f, g in zip(certainties, answers, strict=True))
    expected = (certainties[:, :, None] * answers).sum(axis=0) / certainties.sum(axis=0)[:, None]
    assert soft_labels(np.asarray(total)) == pytest.approx(expected, abs=1e-6)


def test_where_nobody_is_certain_all_classes_are_alike() -> None:
    labels = soft_labels(np.array([[0, 0, 0, 0], [3, 1, 0, 0]]))
    assert labels[0] == pytest.approx(0.25)
    assert labels[1] == pytest.approx([0.75, 0.25, 0, 0])


def test_those_who_know_lead_those_who_do_not() -> None:
    knows, guesses = np.array([[0.9, 0.0]]), np.array([[0.0, 0.05]])
    votes = [grid_votes(knows), *(grid_votes(guesses) for _ in range(10))]
    total = sum_votes(votes, sources=[seeded_source(number) for number in range(11)])
    assert soft_labels(total).argmax() == 0


def test_a_server_model_learns_from_soft_labels(rng: np.random.Generator) -> None:
    centres = rng.normal(size=(3, 10))
    truth = rng.integers(0, 3, 400)
    public = (centres[truth] + 0.3 * rng.normal(size=(400, 10))).astype(np.float32)
    labels = 0.5 * np.eye(3)[truth] + 0.5 / 3
    model = distil(public[:300], labels[:300])
    predicted = model.predict_proba(public[300:])
    assert predicted.sum(axis=1) == pytest.approx(1.0)
    assert (predicted.argmax(axis=1) == truth[300:]).mean() > 0.95
    again = distil(public[:300], labels[:300], features=student_features(public[:300]))
    assert np.array_equal(again.weights, model.weights)
