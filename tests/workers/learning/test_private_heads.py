"""Both private heads of a client and the public map in front of them: neighbors, independent oracles, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from benchmarks.papers.fedauxfdp import solve_noise
from labeler.errors import InvalidSetting
from labeler.methods.aux_distill import FEATURE_ROUNDING, LocalHeadTerms
from labeler.randomness import ByteSource, os_source, seeded_source
from labeler.records import Array
from workers.learning.private_heads import (
    CONSTANT_SHARE,
    PrivateHeads,
    PublicMap,
    certainty,
    fit_certainty,
    fit_heads,
    fit_public_map,
    plain_map,
)

CLASSES, STORED, NEGATIVES = 4, 12, 40

TERMS = LocalHeadTerms(
    num_classes=CLASSES,
    head_dimension=7,
    score_dimension=6,
    min_records=30,
    num_negatives=NEGATIVES,
    sigma_head=3.0,
    sigma_scores=8.0,
    head_regularisation=0.05,
    score_regularisation=0.05,
)


def photographs(seed: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features of norm one around four centers, on the grid of a shard."""
    rng = np.random.default_rng(seed)
    centres = np.abs(np.random.default_rng(0).normal(size=(CLASSES, STORED)))
    labels = rng.integers(0, CLASSES, count)
    rows = np.abs(centres[labels] + 0.2 * rng.normal(size=(count, STORED)))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return (np.rint(2048 * rows) / 2048).astype(np.float32), labels


NEGATIVE_ROWS = photographs(99, NEGATIVES)[0]


# Neighbors.


def with_kind(kind: str, features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    """Make records the worst for whatever has to converge."""
    if kind == "ties":
        features[:] = features[:1]
    if kind == "one class":
        labels[:] = 2
    if kind == "opposites":
        features[1::2] *= -1


@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 40),
    kind=st.sampled_from(["any", "ties", "one class", "opposites"]),
    change=st.sampled_from(["replace", "remove", "add"]),
    bounds=st.sampled_from(
        [(0.05, 1.0), (0.02, 1.0), (3.0, 1.0), (10.0, 0.1), (1e-6, 1e-3), (1e-6, 1e-2), (1e6, 1.0), (0.05, 1e-6)]
    ),
    least=st.integers(1, 45),
    is_kept=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_one_record_moves_both_heads_by_at_most_their_sensitivity(
    seed: int, count: int, kind: str, change: str, bounds: tuple[float, float], least: int, is_kept: bool
) -> None:
    """Fewer records than the least number and more, over their own number and over a public one.

    A regularisation of 1e-6 with a norm of 1e-3 converged for some records and not for others.
    """
    features, labels = photographs(seed, count + 1)
    with_kind(kind, features, labels)
    own, other = slice(0, count), slice(0, count + 1)
    if change == "remove":
        other = slice(1, count)
    if change == "replace" and not is_kept:
        other = slice(1, count + 1)
    regularisation, clip_norm = bounds
    terms = replace(
        TERMS, min_records=least, max_records=max(least, count + 1) if is_kept else None, clip_norm=clip_norm,
        head_regularisation=regularisation, score_regularisation=regularisation,
    )  # fmt: skip
    one, two = (fit_heads(features[rows], labels[rows], NEGATIVE_ROWS, terms=terms) for rows in (own, other))
    assert one.scores is not None
    assert two.scores is not None
    assert np.linalg.norm(one.head - two.head) <= terms.head_sensitivity
    assert np.linalg.norm(one.scores - two.scores) <= terms.score_sensitivity
    assert np.linalg.norm(one.head) <= terms.head_descent.largest_norm
    assert np.linalg.norm(one.scores) <= terms.score_descent.largest_norm
    assert np.isfinite(one.released(terms, source=seeded_source(b"x")).head).all()


def test_a_bound_that_is_kept_halves_both_sensitivities() -> None:
    kept = replace(TERMS, max_records=30)
    assert kept.head_sensitivity == pytest.approx(TERMS.head_sensitivity / 2, rel=1e-3)
    assert kept.score_sensitivity == pytest.approx(TERMS.score_sensitivity / 2, rel=1e-3)


def certainty_terms(least: int, negatives: int, dimension: int, regularisation: float) -> LocalHeadTerms:
    return replace(
        TERMS, score_dimension=dimension, min_records=least, num_negatives=negatives,
        score_regularisation=regularisation,
    )  # fmt: skip


def certainty_head(own: Array, public: Array, of: LocalHeadTerms) -> Array:
    """The certainty head of rows in memory, read in blocks of five."""
    parts = [(rows[at : at + 5], rows is own) for rows in (own, public) for at in range(0, len(rows), 5)]
    return fit_certainty(lambda: parts, num_records=len(own), terms=of)


def on_the_ball(rng: np.random.Generator, count: int, dimension: int) -> Array:
    rows = rng.normal(size=(count, dimension))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_a_record_can_use_up_more_than_half_of_the_bound() -> None:
    """Negatives drive the intercept down, so that both records of the replacement are as wrong as can be."""
    of = certainty_terms(2, 400, 2, 0.003)
    public = np.tile([[0.1, 0.99]], (400, 1))
    own = [np.array([[0.0, 0.0], [sign, 0.6]]) * [[0.8, 1.0]] for sign in (1.0, -1.0)]
    heads = [certainty_head(rows, public, of) for rows in own]
    assert 0.51 * of.score_sensitivity < np.linalg.norm(heads[0] - heads[1]) <= of.score_sensitivity


# The certainty head.


@pytest.mark.parametrize(("count", "least"), [(30, 30), (3, 1000)])
def test_the_head_is_scikit_learns_on_records_against_negatives(
    rng: np.random.Generator, count: int, least: int
) -> None:
    """Few records are divided by the public least number."""
    own, public = on_the_ball(rng, count, 4), on_the_ball(rng, 50, 4)
    found = certainty_head(own, public, certainty_terms(least, 50, 4, 0.02))
    oracle = LogisticRegression(C=1 / (0.02 * (least + 50)), fit_intercept=False, tol=1e-10, max_iter=10_000)
    oracle.fit(np.vstack([own, public]), np.arange(count + 50) < count)
    assert np.linalg.norm(found - oracle.coef_[0]) < 1e-4


def test_a_client_is_surest_of_what_it_has_seen(rng: np.random.Generator) -> None:
    own = np.hstack([np.full((40, 1), 0.9), 0.1 * rng.normal(size=(40, 2))])
    public = np.hstack([np.full((40, 1), -0.9), 0.1 * rng.normal(size=(40, 2))])
    fitted = certainty_head(own, public, certainty_terms(40, 40, 3, 0.02))
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


# What is released.


def private_heads(
    features: Any, labels: Any, negatives: Any, *, terms: LocalHeadTerms, source: ByteSource, **maps: Any
) -> PrivateHeads:
    """Both heads of a client, released once."""
    return fit_heads(features, labels, negatives, terms=terms, **maps).released(terms, source=source)


def test_soft_votes_are_certainty_times_probability() -> None:
    features, labels = photographs(5, 60)
    heads = private_heads(features, labels, NEGATIVE_ROWS, terms=TERMS, source=seeded_source(b"x"))
    votes = heads.soft_votes(features, head_sharpness=2.0, score_sharpness=3.0)
    assert heads.is_seeded
    assert heads.scores is not None
    logits = 2.0 * heads.head_map(features) @ heads.head.T
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    sure = 1 / (1 + np.exp(-3.0 * heads.score_map(features) @ heads.scores))
    assert votes == pytest.approx(probabilities * sure[:, None])
    assert votes.sum(axis=1) == pytest.approx(sure)
    assert votes.min() >= 0
    assert votes.sum(axis=1).max() <= 1 + 1e-12


@given(seed=st.integers(0, 2**31), count=st.integers(0, 40), is_kept=st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_head_is_the_same_without_scores_and_no_scores_are_fitted(seed: int, count: int, is_kept: bool) -> None:
    features, labels = photographs(seed, count)
    both = replace(TERMS, max_records=45) if is_kept else TERMS
    alone = replace(both, sigma_scores=None)
    one, two = (fit_heads(features, labels, NEGATIVE_ROWS, terms=terms) for terms in (both, alone))
    assert np.array_equal(one.head, two.head)
    assert one.scores is not None
    assert two.scores is None
    assert alone.head_sensitivity == both.head_sensitivity


def test_without_certainty_every_row_is_one_vote() -> None:
    features, labels = photographs(6, 60)
    terms = solve_noise(TERMS, epsilon=1.0, delta=1e-5, scores_share=0.0)
    heads = private_heads(features, labels, NEGATIVE_ROWS, terms=terms, source=seeded_source(b"x"))
    assert heads.scores is None
    assert heads.soft_votes(features).sum(axis=1) == pytest.approx(1.0)


def test_little_noise_leaves_labels_right() -> None:
    features, labels = photographs(7, 200)
    quiet = replace(TERMS, min_records=200, sigma_head=0.01, sigma_scores=0.01, head_regularisation=0.01)
    heads = private_heads(features, labels, NEGATIVE_ROWS, terms=quiet, source=os_source())
    queries, truth = photographs(8, 100)
    assert (heads.soft_votes(queries).argmax(axis=1) == truth).mean() > 0.9
    assert not heads.is_seeded


def test_fitted_heads_do_not_print() -> None:
    features, labels = photographs(10, 40)
    fitted = fit_heads(features, labels, NEGATIVE_ROWS, terms=TERMS)
    assert str(fitted.head[0, 0]) not in repr(fitted)


# The public map.


def stored(rng: np.random.Generator, count: int, dimension: int = 24) -> NDArray[np.float32]:
    """Positive features of norm about one on the int16 grid, as a shard holds them."""
    rows = np.abs(rng.normal(size=(count, dimension)))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return (np.rint(2048 * rows) / 2048).astype(np.float32)


@given(
    seed=st.integers(0, 2**31), size=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e6]), norm=st.sampled_from([0.5, 1.0, 3.0])
)
@settings(max_examples=60, deadline=None)
def test_no_row_is_longer_than_the_public_norm(seed: int, size: float, norm: float) -> None:
    rng = np.random.default_rng(seed)
    public = stored(rng, 40)
    private = (size * rng.normal(size=(15, 24))).astype(np.float32)
    for made in (plain_map(24, clip_norm=norm), fit_public_map(public, dimensions=6, clip_norm=norm)):
        rows = made(private)
        assert rows.dtype == np.float64
        assert rows.shape == (15, made.dimension)
        assert np.linalg.norm(rows, axis=1).max() <= norm
        assert rows[:, -1] == pytest.approx(CONSTANT_SHARE * norm)


def test_a_plain_map_keeps_directions_and_brings_rows_to_one_length(rng: np.random.Generator) -> None:
    private = stored(rng, 20)
    rows = plain_map(24)(3 * private)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0)
    units = private / np.linalg.norm(private, axis=1, keepdims=True)
    assert rows[:, :-1] == pytest.approx(np.sqrt(1 - CONSTANT_SHARE**2) * units, abs=1e-6)


def test_the_centre_and_the_axes_are_those_of_the_public_rows(rng: np.random.Generator) -> None:
    public = stored(rng, 300)
    made = fit_public_map(public, dimensions=5)
    assert made.mean == pytest.approx(public.astype(np.float64).mean(axis=0))
    assert made.basis is not None
    projected = (public - made.mean) @ made.basis
    # Whitened by half: uncorrelated, and each variance is the root of that of its principal axis.
    largest = np.linalg.eigvalsh(np.cov(public.T, bias=True))[-5:]
    assert projected.T @ projected / 300 == pytest.approx(np.diag(np.sqrt(largest[::-1])), rel=1e-4, abs=1e-6)
    # A row at the mean is not blown up.
    nearly = (made.mean + 1e-9 * rng.normal(size=24))[None]
    assert np.linalg.norm(made(nearly)[:, :-1]) < 1e-6


def test_a_row_does_not_depend_on_the_rows_beside_it_beyond_the_margin(rng: np.random.Generator) -> None:
    public = stored(rng, 400, 300)
    made = fit_public_map(public, dimensions=40)
    private = stored(rng, 50, 300)
    together = made(private)
    alone = np.vstack([made(private[row : row + 1]) for row in range(50)])
    assert np.linalg.norm(together - alone, axis=1).max() <= made.rounding <= FEATURE_ROUNDING


# Refusals.


def test_settings_of_a_map_out_of_bounds_are_refused(rng: np.random.Generator) -> None:
    public = stored(rng, 10)
    for dimensions in (0, 11):
        with pytest.raises(InvalidSetting):
            fit_public_map(public, dimensions=dimensions)
    with pytest.raises(InvalidSetting, match="all the same"):
        fit_public_map(np.ones((10, 4)), dimensions=2)
    with pytest.raises(InvalidSetting):
        plain_map(4, clip_norm=0.0)
    with pytest.raises(InvalidSetting):
        plain_map(4)(np.ones((3, 5)))


def test_what_the_price_does_not_cover_is_refused() -> None:
    features, labels = photographs(12, 40)
    magnifier = PublicMap(np.zeros(STORED), 1e6 * np.eye(STORED, 6), least_length=1.0)
    for given_labels, negatives, maps, says in (
        (labels, NEGATIVE_ROWS[1:], {}, "negatives"),
        (labels + 1, NEGATIVE_ROWS, {}, "labels"),
        (labels, NEGATIVE_ROWS, {"head_map": magnifier}, "magnify rounding"),
        (labels, NEGATIVE_ROWS, {"head_map": plain_map(STORED)}, "terms price"),
        (labels, NEGATIVE_ROWS, {"score_map": plain_map(5, clip_norm=2.0)}, "terms price"),
    ):
        with pytest.raises(InvalidSetting, match=says):
            fit_heads(features, given_labels, negatives, terms=TERMS, **maps)
