"""Curves at the edges of what they may be: every refusal word for word, tolerances on both sides, known numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from benchmarks.accounting.tradeoff import (
    Curve,
    SampledGaussian,
    conjugate,
    distance,
    envelope,
    epsilon_delta,
    gaussian,
    identity,
    lower_hull,
    mix,
    of_pair,
    product,
    subsample,
)
from labeler.errors import InvalidSetting

CORNERS = "a trade-off curve needs at least two corners, one alpha and one beta each"
FINITE = "the corners of a trade-off curve must be finite numbers"
ASCEND = "the alphas of a trade-off curve must ascend from 0 to 1"
BETWEEN = "a trade-off curve lies between 0 and 1 - alpha; a beta found lies outside"
PAIRS = "a trade-off function needs two distributions over the same outcomes"
CONVEX = "a trade-off curve falls and is convex; the corners found do not"


@pytest.mark.parametrize(
    ("alphas", "betas", "said"),
    [
        ([0.0], [1.0], CORNERS),
        (0.0, 1.0, CORNERS),
        ([[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]], CORNERS),
        ([0.0, 1.0], [1.0, 0.5, 0.0], CORNERS),
        ([0.0, 0.5, 1.0], [1.0, 0.0], CORNERS),
        ([0.0, math.nan, 1.0], [1.0, 0.5, 0.0], FINITE),
        ([0.0, 0.5, 1.0], [1.0, math.nan, 0.0], FINITE),
        ([0.0, 0.5, math.inf], [1.0, 0.5, 0.0], FINITE),
        ([0.0, 0.5, 1.0], [math.inf, 0.5, 0.0], FINITE),
        ([0.1, 1.0], [0.5, 0.0], ASCEND),
        ([-0.1, 1.0], [0.5, 0.0], ASCEND),
        ([0.0, 0.9], [0.5, 0.0], ASCEND),
        ([0.0, 1.1], [0.5, 0.0], ASCEND),
        ([0.0, 0.5, 0.5, 1.0], [0.5, 0.3, 0.2, 0.0], ASCEND),
        ([0.0, 0.6, 0.4, 1.0], [0.5, 0.3, 0.2, 0.0], ASCEND),
        ([0.0, 0.5, 1.0], [0.5, -2e-9, 0.0], BETWEEN),
        ([0.0, 1.0], [0.5, 2e-9], BETWEEN),
        ([0.0, 0.5, 1.0], [1.0, 0.5 + 2e-9, 0.0], BETWEEN),
        ([0.0, 0.5, 1.0], [1.0 + 2e-9, 0.3, 0.0], BETWEEN),
        ([0.0, 0.5, 1.0], [0.3, 0.3 + 2e-9, 0.0], CONVEX),
        ([0.0, 0.3, 0.6, 1.0], [0.5, 0.45, 0.1, 0.0], CONVEX),
        ([0.0, 0.25, 1.0], [0.8, 0.6 + 2e-9, 0.0], CONVEX),
        ([0.0, 0.75, 1.0], [0.8, 0.2 + 2e-9, 0.0], CONVEX),
    ],
)
def test_corners_that_make_no_curve_are_refused_word_for_word(alphas: Any, betas: Any, said: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        Curve(np.array(alphas), np.array(betas))
    assert str(refusal.value) == said


def test_rounding_within_a_billionth_is_taken_and_corrected() -> None:
    curve = Curve(np.array([0.0, 0.25, 0.75, 1.0]), np.array([1 + 5e-10, 0.75 + 5e-10, 0.25 + 5e-10, 5e-10]))
    assert (curve.betas[0], curve.betas[-1]) == (1.0, 0.0)
    flat = Curve(np.array([0.0, 0.5, 1.0]), np.array([0.3, -5e-10, -6e-10]))
    assert flat.betas.tolist() == [0.3, 0.0, 0.0]
    rising = Curve(np.array([0.0, 0.5, 1.0]), np.array([0.3, 0.1, 0.0]))
    assert rising.alphas.tolist() == [0.0, 0.5, 1.0]


def test_corners_are_kept_as_floats_that_nobody_can_change() -> None:
    whole = np.array([0, 1]), np.array([1, 0])
    curve = Curve(*whole)
    assert curve.alphas.dtype == curve.betas.dtype == np.float64
    for part in (curve.alphas, curve.betas):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0.5
    whole[1][0] = 7
    assert curve.betas.tolist() == [1.0, 0.0]


PAIR = of_pair([0.5, 0.25, 0.25], [0.125, 0.375, 0.5])
"""Ratios 1/4, 3/2 and 2: corners by hand below."""


def test_the_curve_of_a_pair_has_the_corners_of_the_lemma_of_neyman_and_pearson() -> None:
    assert PAIR.alphas.tolist() == [0.0, 0.25, 0.5, 1.0]
    assert PAIR.betas.tolist() == [1.0, 0.5, 0.125, 0.0]
    alone = of_pair([1.0, 0.0], [0.25, 0.75])
    assert (alone.alphas.tolist(), alone.betas.tolist()) == ([0.0, 1.0], [0.25, 0.0])
    never = of_pair([0.25, 0.75], [1.0, 0.0])
    assert (never.alphas.tolist(), never.betas.tolist()) == ([0.0, 0.25, 1.0], [1.0, 0.0, 0.0])
    apart = of_pair([1.0, 0.0], [0.0, 1.0])
    assert (apart.alphas.tolist(), apart.betas.tolist()) == ([0.0, 1.0], [0.0, 0.0])


def test_pair_and_inverse_undo_what_made_the_curve() -> None:
    p, q = PAIR.pair()
    assert (p.tolist(), q.tolist()) == ([0.0, 0.25, 0.25, 0.5], [0.0, 0.5, 0.375, 0.125])
    back = PAIR.inverse()
    assert (back.alphas.tolist(), back.betas.tolist()) == ([0.0, 0.125, 0.5, 1.0], [1.0, 0.5, 0.25, 0.0])
    alone = of_pair([1.0, 0.0], [0.25, 0.75])
    assert [part.tolist() for part in alone.pair()] == [[0.0, 1.0], [0.75, 0.25]]
    mirrored = alone.inverse()
    assert (mirrored.alphas.tolist(), mirrored.betas.tolist()) == ([0.0, 0.25, 1.0], [1.0, 0.0, 0.0])
    assert (mirrored.inverse().alphas.tolist(), mirrored.inverse().betas.tolist()) == ([0.0, 1.0], [0.25, 0.0])


@pytest.mark.parametrize(
    "epsilon", [-800.0, -3.0, -1.0, math.log(0.25), 0.0, 0.3, math.log(1.5), 0.5, math.log(2), 1.0, 699.0, 701.0, 1e6]
)
def test_delta_of_a_curve_is_the_sum_over_its_outcomes(epsilon: float) -> None:
    p, q = PAIR.pair()
    factor = math.exp(min(epsilon, 700.0))
    assert float(PAIR.delta(epsilon)) == pytest.approx(np.maximum(q - factor * p, 0).sum(), abs=1e-15)
    assert float(of_pair([1.0, 0.0], [0.25, 0.75]).delta(max(epsilon, 0))) == 0.75


def test_a_curve_between_its_corners_is_a_line() -> None:
    assert PAIR([0.0, 0.125, 0.25, 0.375, 0.75, 1.0]).tolist() == [1.0, 0.75, 0.5, 0.3125, 0.0625, 0.0]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: PAIR(-1e-9), "a type I error must lie in [0, 1]"),
        (lambda: PAIR([0.5, 1 + 1e-9]), "a type I error must lie in [0, 1]"),
        (lambda: PAIR(math.nan), "a type I error must lie in [0, 1]"),
        (lambda: SampledGaussian(-1.0), "mu must be a finite number of at least 0, found -1.0"),
        (lambda: SampledGaussian(math.inf), "mu must be a finite number of at least 0, found inf"),
        (lambda: SampledGaussian(1.0, 0.0), "a sampling probability must lie in (0, 1], found 0.0"),
        (lambda: mix(PAIR, 1.5), "a sampling probability must lie in (0, 1], found 1.5"),
        (lambda: epsilon_delta(-1.0, 0.5), "epsilon must be at least 0 and delta in [0, 1], found -1.0 and 0.5"),
        (lambda: of_pair([0.5, 0.5], [1.0]), PAIRS),
        (lambda: of_pair([0.5, 0.6], [0.5, 0.5]), PAIRS),
        (lambda: of_pair([0.5, 0.5], [0.5, 0.6]), PAIRS),
        (lambda: of_pair([1.5, -0.5], [0.5, 0.5]), PAIRS),
        (lambda: of_pair([0.5, 0.5], [1.5, -0.5]), PAIRS),
        (lambda: subsample(PAIR, 0.5),
         "C_p(f) is defined for a symmetric f: take envelope([f, f.inverse()]) first"),
    ],
)  # fmt: skip
def test_what_has_no_curve_is_refused_word_for_word(step: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        step()
    assert str(refusal.value) == said


def test_the_ends_of_what_is_allowed_are_allowed() -> None:
    assert PAIR([0, 1]).tolist() == [1.0, 0.0]
    assert SampledGaussian(0, 1).mu == 0
    assert mix(PAIR, 1.0).betas.tolist() == PAIR.betas.tolist()
    assert identity().betas.tolist() == [1.0, 0.0]
    near = of_pair([0.5, 0.5 + 5e-10], [0.5, 0.5])
    assert distance(near, identity()) < 1e-8
    with pytest.raises(InvalidSetting):
        of_pair([0.5, 0.5 + 2e-9], [0.5, 0.5])


def test_mixing_subsampling_and_products_have_the_corners_that_one_computes_by_hand() -> None:
    half = mix(PAIR, 0.5)
    assert half.betas.tolist() == [1.0, 0.625, 0.3125, 0.0]
    both = envelope([PAIR, PAIR.inverse()])
    part = subsample(both, 0.5)
    alphas = np.linspace(0, 1, 4001)
    mixed = 0.5 * both(alphas) + 0.5 * (1 - alphas)
    hull = lower_hull(np.concatenate([alphas, mixed]), np.concatenate([mixed, alphas]))
    assert distance(part, hull) < 1e-6
    one = epsilon_delta(math.log(3), 0.0)
    assert one.alphas.tolist() == pytest.approx([0.0, 0.25, 1.0])
    twice = product(one, one)
    assert twice.alphas.tolist() == pytest.approx([0.0, 1 / 16, 7 / 16, 1.0])
    assert twice.betas.tolist() == pytest.approx([1.0, 7 / 16, 1 / 16, 0.0])
    assert conjugate(one, [-3.0, -1.0, -1 / 3]).tolist() == pytest.approx([-1.0, -0.5, -1 / 3])


def test_distance_is_found_between_and_at_both_ends() -> None:
    assert distance(identity(), identity()) == 0.0
    assert distance(identity(), of_pair([1.0, 0.0], [0.25, 0.75])) == pytest.approx(0.75)
    assert distance(identity(), lower_hull([0.5], [0.25])) == 0.25
    for corner in (1e-7, 1 - 1e-7):
        steep = lower_hull([corner], [0.0 if corner < 0.5 else 1 - corner - 5e-8])
        found = distance(steep, identity(), points=11)
        wanted = max(1 - corner - steep(corner).item() for corner in [corner, *np.linspace(0, 1, 11)])
        assert found == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize(("mu", "p"), [(0.3, 1.0), (1.0, 0.25), (2.0, 0.03), (5.0, 0.6)])
def test_a_sampled_gaussian_is_its_three_pieces(mu: float, p: float) -> None:
    """Definition 4.1 in other words: f_p until its slope is -1, its mirror image from there, and a line between."""
    f = SampledGaussian(mu, p)

    def mixed(alpha: float) -> float:
        return float(p * norm.cdf(norm.isf(alpha) - mu) + (1 - p) * (1 - alpha))

    fixed = float(norm.cdf(-mu / 2))
    corner = mixed(fixed)
    for alpha in (1e-12, fixed / 3, fixed):
        assert f(alpha) == pytest.approx(mixed(alpha), abs=1e-14)
        assert f(mixed(alpha)) == pytest.approx(alpha, abs=1e-12)
    for part in (0.25, 0.5, 0.75):
        alpha = fixed + part * (corner - fixed)
        assert f(alpha) == pytest.approx(fixed + corner - alpha, abs=1e-14)
    assert f([0.0, 1.0]).tolist() == pytest.approx([1.0, 0.0], abs=1e-15)


@pytest.mark.parametrize(("mu", "p", "interval"), [(0.3, 1.0, 0.01), (1.0, 0.25, 0.05), (2.0, 0.03, 0.002)])
def test_the_masses_of_a_sampled_gaussian_are_those_of_its_cells(mu: float, p: float, interval: float) -> None:
    f = SampledGaussian(mu, p)
    of_p, of_q = f.pair(interval)
    assert of_p.sum() == pytest.approx(1, abs=1e-12)
    assert of_q.sum() == pytest.approx(1, abs=1e-12)
    assert (of_p >= 0).all()
    assert (of_q >= 0).all()
    assert of_p[-1] == 0 < of_q[-1] < 1e-20
    masses = of_pair(of_p / of_p.sum(), of_q / of_q.sum())
    alphas = np.linspace(0, 1, 501)
    above = masses(alphas) - f(alphas)
    assert above.min() > -1e-9
    assert above.max() < interval
    inner = (of_p > 1e-300) & (of_q > 1e-300)
    losses = np.log(of_q[inner] / of_p[inner])
    edges = np.arange(len(losses) // 2 + 2) * interval
    up = losses[losses > 1e-12]
    assert (up >= edges[: len(up)] - 1e-6).all()
    assert (up <= edges[1 : len(up) + 1] + 1e-6).all()
    assert np.count_nonzero(of_p == 0) + 1 >= 1
    z = f.loss_quantile(edges)
    assert np.log1p(p * np.expm1(mu * z - mu * mu / 2)) == pytest.approx(edges, abs=1e-9)


def test_a_gaussian_that_tells_nothing_has_one_outcome() -> None:
    assert [part.tolist() for part in SampledGaussian(0.0, 0.5).pair(0.1)] == [[1.0], [1.0]]
    assert gaussian(1.5) == SampledGaussian(1.5, 1.0)
