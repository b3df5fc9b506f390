"""Trade-off functions: what makes a curve one, and that each operation is what its definition says."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from benchmarks.accounting.composition import from_profile
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
from labeler.accounting.gaussian import delta_of_epsilon
from labeler.errors import InvalidSetting

GRID = np.linspace(0, 1, 501)
probabilities = st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(lambda weights: sum(weights) > 0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """T(P, Q) of two small distributions."""
    first = draw(probabilities)
    second = draw(st.lists(st.integers(0, 20), min_size=len(first), max_size=len(first)).filter(lambda w: sum(w) > 0))
    return of_pair(np.array(first) / sum(first), np.array(second) / sum(second))


def symmetric(f: Curve) -> Curve:
    return envelope([f, f.inverse()])


def assert_trade_off(values: np.ndarray) -> None:
    assert (np.diff(values) <= 1e-12).all()
    assert (values <= 1 - GRID + 1e-12).all()
    assert (values >= 0).all()
    assert (np.diff(values, 2) >= -1e-9).all()


@given(f=curves(), g=curves(), p=st.floats(0.01, 1))
@settings(max_examples=150, deadline=None)
def test_every_operation_gives_a_convex_falling_curve_below_the_identity(f: Curve, g: Curve, p: float) -> None:
    for curve in (f, f.inverse(), mix(f, p), envelope([f, g]), product(f, g), subsample(symmetric(f), p)):
        assert_trade_off(curve(GRID))


@pytest.mark.parametrize("p", [1e-3, 0.0267, 0.3, 1.0])
@pytest.mark.parametrize("mu", [0.0, 0.2, 1.0, 4.0])
def test_sampled_gaussians_are_symmetric_trade_off_functions(mu: float, p: float) -> None:
    f = SampledGaussian(mu, p)
    values = f(GRID)
    assert_trade_off(values)
    inner = (values > 1e-9) & (GRID > 1e-9)
    assert f(values[inner]) == pytest.approx(GRID[inner], abs=1e-7)


@given(f=curves())
@settings(max_examples=100, deadline=None)
def test_a_curve_is_the_least_error_of_all_tests_on_its_pair(f: Curve) -> None:
    """Brute force over all rejection regions of the canonical pair: none is below, and each corner is one of them."""
    p, q = f.pair()
    regions = np.array(np.meshgrid(*[[0, 1]] * len(p))).reshape(len(p), -1).T
    type_1, type_2 = regions @ p, 1 - regions @ q
    assert (f(np.clip(type_1, 0, 1)) <= type_2 + 1e-9).all()
    for alpha, beta in zip(f.alphas, f.betas, strict=True):
        assert np.min(np.abs(type_1 - alpha) + np.abs(type_2 - beta)) < 1e-9


@given(f=curves(), epsilon=st.floats(-4, 4))
@settings(max_examples=150, deadline=None)
def test_delta_is_the_hockey_stick_divergence_and_the_conjugate(f: Curve, epsilon: float) -> None:
    p, q = f.pair()
    hockey_stick = np.maximum(q - math.exp(epsilon) * p, 0).sum()
    assert float(f.delta(epsilon)) == pytest.approx(hockey_stick, abs=1e-9)
    slope = -math.exp(epsilon)
    fine = np.union1d(np.linspace(0, 1, 2001), f.alphas)
    assert float(conjugate(f, slope)) == pytest.approx(float(np.max(slope * fine - f(fine))), abs=1e-9)


@given(f=curves())
@settings(max_examples=100, deadline=None)
def test_the_double_conjugate_of_a_curve_is_the_curve(f: Curve) -> None:
    """f**(alpha) = sup over y of alpha y - f*(y); the slopes of its edges suffice."""
    slopes = np.minimum(np.diff(f.betas) / np.diff(f.alphas), -1e-12)
    slopes = np.union1d(slopes, [-1e-12, -1e9])
    twice = np.max(GRID[:, None] * slopes - conjugate(f, slopes), axis=1)
    assert np.maximum(twice[1:], 0) == pytest.approx(f(GRID)[1:], abs=1e-6)


@given(f=curves(), p=st.floats(0.01, 1))
@settings(max_examples=100, deadline=None)
def test_subsampling_is_symmetric_and_never_less_private(f: Curve, p: float) -> None:
    whole = symmetric(f)
    part = subsample(whole, p)
    assert distance(part, part.inverse()) < 1e-9
    assert (part(GRID) >= whole(GRID) - 1e-9).all()


@given(f=curves())
@settings(max_examples=60, deadline=None)
def test_looking_at_everything_changes_nothing_and_composing_with_the_identity_neither(f: Curve) -> None:
    whole = symmetric(f)
    assert distance(subsample(whole, 1.0), whole) < 1e-9
    assert distance(product(f, identity()), f) < 1e-9


def test_subsampling_of_a_gaussian_is_the_double_conjugate_of_its_definition() -> None:
    """min{f_p, f_p^-1}** by a hull over a fine grid, independently of the closed form."""
    for mu, p in [(1.0, 0.2), (2.0, 0.032), (0.5, 0.9)]:
        alphas = np.concatenate([np.logspace(-9, -2, 4000), np.linspace(0.01, 1, 20_000)])
        mixed = p * norm.cdf(norm.isf(alphas) - mu) + (1 - p) * (1 - alphas)
        hull = lower_hull(np.concatenate([alphas, mixed]), np.concatenate([mixed, alphas]))
        assert distance(SampledGaussian(mu, p), hull) < 2e-7
        assert distance(SampledGaussian(mu, p), subsample(from_gaussian_grid(mu), p)) < 2e-4


def from_gaussian_grid(mu: float) -> Curve:
    alphas = np.linspace(0, 1, 4001)
    return symmetric(lower_hull(alphas, gaussian(mu)(alphas)))


@pytest.mark.parametrize("epsilon", [-3.0, -0.4, 0.0, 0.1, 1.0, 6.0])
@pytest.mark.parametrize(("mu", "p"), [(1.0, 1.0), (1.0, 0.0267), (2.0, 0.032), (0.1, 0.5)])
def test_delta_of_a_sampled_gaussian_is_its_integral(mu: float, p: float, epsilon: float) -> None:
    """The worse of both orders of the mixture and the plain normal law, by quadrature."""

    def divergence(top: Callable[[float], float], bottom: Callable[[float], float]) -> float:
        def excess(z: float) -> float:
            return max(0.0, top(z) - math.exp(epsilon) * bottom(z))

        return math.fsum(quad(excess, a, a + 1, limit=200)[0] for a in range(-12, 14))

    def plain(z: float) -> float:
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    def mixture(z: float) -> float:
        return (1 - p) * plain(z) + p * plain(z - mu)

    worse = max(divergence(mixture, plain), divergence(plain, mixture))
    assert float(SampledGaussian(mu, p).delta(epsilon)) == pytest.approx(worse, abs=1e-7)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 8.0])
def test_delta_of_a_gaussian_is_the_closed_form(epsilon: float) -> None:
    for mu in (0.05, 1.0, 3.0):
        assert float(gaussian(mu).delta(epsilon)) == pytest.approx(delta_of_epsilon(epsilon, mu), rel=1e-9, abs=1e-15)


def test_epsilon_delta_is_the_four_lines_of_its_definition() -> None:
    f = epsilon_delta(1.2, 0.05)
    lines = np.maximum(0, np.maximum(0.95 - math.exp(1.2) * GRID, math.exp(-1.2) * (0.95 - GRID)))
    assert f(GRID) == pytest.approx(lines, abs=1e-12)
    assert float(f.delta(1.2)) == pytest.approx(0.05)
    assert float(f.delta(3.0)) == pytest.approx(0.05)
    assert distance(f, f.inverse()) < 1e-12


def test_a_profile_gives_back_the_curve_from_below() -> None:
    for f in (gaussian(1.3), SampledGaussian(2.0, 0.1)):
        epsilons = np.append(0.0, np.geomspace(1e-4, 40, 3000))
        back = from_profile(epsilons, f.delta(epsilons))
        assert (back(GRID) <= f(GRID) + 1e-9).all()
        assert distance(back, f) < 1e-4


@pytest.mark.parametrize(
    ("alphas", "betas"),
    [
        ([0.0, 0.5, 1.0], [1.0, 0.6, 0.0]),  # above 1 - alpha
        ([0.0, 0.3, 0.6, 1.0], [0.5, 0.45, 0.1, 0.0]),  # not convex
        ([0.0, 0.5, 1.0], [0.5, 0.2, 0.3]),  # rises
        ([0.1, 1.0], [0.5, 0.0]),
        ([0.0, 1.0], [math.nan, 0.0]),
    ],
)
def test_what_is_no_trade_off_function_is_refused(alphas: list[float], betas: list[float]) -> None:
    with pytest.raises(InvalidSetting):
        Curve(np.array(alphas), np.array(betas))


def test_numbers_out_of_bounds_are_refused() -> None:
    skew = of_pair([0.5, 0.5, 0.0], [0.2, 0.2, 0.6])
    with pytest.raises(InvalidSetting, match="symmetric"):
        subsample(skew, 0.5)
    for p in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(InvalidSetting, match="probability"):
            SampledGaussian(1.0, p)
    for mu in (-1.0, math.inf, math.nan):
        with pytest.raises(InvalidSetting, match="mu"):
            SampledGaussian(mu)
    with pytest.raises(InvalidSetting, match="type I"):
        gaussian(1.0)([1.2])
    with pytest.raises(InvalidSetting, match="two distributions"):
        of_pair([0.5, 0.6], [0.5, 0.5])
    with pytest.raises(InvalidSetting, match="epsilon"):
        epsilon_delta(-1.0, 0.1)


def test_a_mechanism_that_tells_nothing_costs_nothing_and_its_profile_is_that_of_the_identity() -> None:
    levels = np.array([-2.0, -0.5, 0.0, 0.5, 3.0])
    assert SampledGaussian(0.0, 0.5).delta(levels).tolist() == np.maximum(0.0, 1 - np.exp(levels)).tolist()
    assert identity().delta(levels) == pytest.approx(np.maximum(0.0, 1 - np.exp(levels)))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.0, 0.3), (2.0, 0.0), (2.0, 1.0), (0.5, 0.25)])
def test_the_curve_of_a_pair_is_its_definition_up_to_the_ends_of_its_range(epsilon: float, delta: float) -> None:
    expected = np.maximum(0, np.maximum(1 - delta - math.exp(epsilon) * GRID, math.exp(-epsilon) * (1 - delta - GRID)))
    assert np.abs(epsilon_delta(epsilon, delta)(GRID) - expected).max() < 1e-12
    assert epsilon_delta(epsilon, delta).delta(int(epsilon) + 3) == pytest.approx(delta)


@pytest.mark.parametrize(("epsilon", "delta"), [(math.inf, 0.1), (-0.1, 0.1), (1.0, -0.1), (1.0, 1.5), (math.nan, 0.1)])
def test_a_pair_outside_its_range_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidSetting, match="epsilon must be at least 0 and delta in"):
        epsilon_delta(epsilon, delta)
