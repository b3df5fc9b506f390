from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from labeler.methods.aux_distill import LocalHeadTerms
from labeler.records import Array
from workers.learning.private_heads import certainty, fit_certainty


def terms(least: int, negatives: int, dimension: int, regularisation: float) -> LocalHeadTerms:
    return LocalHeadTerms(
        num_classes=2,
        head_dimension=dimension,
        score_dimension=dimension,
        min_records=least,
        num_negatives=negatives,
        sigma_head=5.0,
        sigma_scores=5.0,
        score_regularisation=regularisation,
    )


def head(own: Array, public: Array, of: LocalHeadTerms) -> Array:
    """The certainty head of rows in memory, read in blocks of five."""
    parts = [(rows[at : at + 5], rows is own) for rows in (own, public) for at in range(0, len(rows), 5)]
    return fit_certainty(lambda: parts, num_records=len(own), terms=of)


def on_the_ball(rng: np.random.Generator, count: int, dimension: int) -> Array:
    rows = rng.normal(size=(count, dimension))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


CASES = given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 12),
    least=st.integers(1, 14),
    negatives=st.integers(1, 12),
    dimension=st.integers(1, 4),
    regularisation=st.sampled_from([1e-6, 1e-3, 0.01, 0.1, 1.0, 10.0]),
    change=st.sampled_from(["replace", "remove", "add"]),
)


@CASES
@settings(max_examples=30, deadline=None)
def test_one_private_record_moves_the_certainty_head_by_at_most_its_sensitivity(**case: Any) -> None:
    moves_by_at_most_its_sensitivity(**case)


@pytest.mark.long
@CASES
@settings(max_examples=100, deadline=None)
def test_one_private_record_moves_the_certainty_head_by_no_more_in_many_cases(**case: Any) -> None:
    moves_by_at_most_its_sensitivity(**case)


def moves_by_at_most_its_sensitivity(
    seed: int, count: int, least: int, negatives: int, dimension: int, regularisation: float, change: str
) -> None:
    rng = np.random.default_rng(seed)
    own, public = on_the_ball(rng, count, dimension), on_the_ball(rng, negatives, dimension)
    extra = -own[-1:] if rng.random() < 0.5 else on_the_ball(rng, 1, dimension)
    kept = own if change == "add" else own[:-1]
    neighbour = kept if change == "remove" else np.vstack([kept, extra])
    of = terms(least, negatives, dimension, regularisation)
    heads = [head(rows, public, of) for rows in (own, neighbour)]
    assert np.linalg.norm(heads[0] - heads[1]) <= of.score_sensitivity


def test_a_record_can_use_up_more_than_half_of_the_bound() -> None:
    """Negatives drive the intercept down, so that both records of the replacement are as wrong as can be."""
    of = terms(2, 400, 2, 0.003)
    public = np.tile([[0.1, 0.99]], (400, 1))
    own = [np.array([[0.0, 0.0], [sign, 0.6]]) * [[0.8, 1.0]] for sign in (1.0, -1.0)]
    heads = [head(rows, public, of) for rows in own]
    assert 0.51 * of.score_sensitivity < np.linalg.norm(heads[0] - heads[1]) <= of.score_sensitivity


def test_the_head_is_scikit_learns_on_records_against_negatives(rng: np.random.Generator) -> None:
    own, public = on_the_ball(rng, 30, 4), on_the_ball(rng, 50, 4)
    found = head(own, public, terms(30, 50, 4, 0.02))
    oracle = LogisticRegression(C=1 / (0.02 * 80), fit_intercept=False, tol=1e-10, max_iter=10_000)
    oracle.fit(np.vstack([own, public]), np.arange(80) < 30)
    assert np.linalg.norm(found - oracle.coef_[0]) < 1e-4


def test_few_records_are_divided_by_the_public_least_number(rng: np.random.Generator) -> None:
    own, public = on_the_ball(rng, 3, 4), on_the_ball(rng, 50, 4)
    few = head(own, public, terms(1000, 50, 4, 0.02))
    oracle = LogisticRegression(C=1 / (0.02 * 1050), fit_intercept=False, tol=1e-10, max_iter=10_000)
    assert np.linalg.norm(few - oracle.fit(np.vstack([own, public]), np.arange(53) < 3).coef_[0]) < 1e-4


def test_a_client_is_surest_of_what_it_has_seen(rng: np.random.Generator) -> None:
    own = np.hstack([np.full((40, 1), 0.9), 0.1 * rng.normal(size=(40, 2))])
    public = np.hstack([np.full((40, 1), -0.9), 0.1 * rng.normal(size=(40, 2))])
    fitted = head(own, public, terms(40, 40, 3, 0.02))
    sure, unsure = certainty(fitted, own), certainty(fitted, public)
    assert sure.min() > 0.8
    assert unsure.max() < 0.2
    assert certainty(fitted, own, sharpness=10.0).min() > sure.min()


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_certainty_stays_between_zero_and_one_however_loud_a_head(size: float) -> None:
    found = certainty(np.array([size, 0.0]), np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]), sharpness=10.0)
    assert found.min() >= 0
    assert found.max() <= 1
    assert found[2] == 0.5
