"""Numerical composition: closed forms, an accountant written here from scratch, and products of small curves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from benchmarks.accounting.composition import compose, compose_all, from_profile, poisson
from benchmarks.accounting.tradeoff import (
    SampledGaussian,
    distance,
    envelope,
    epsilon_delta,
    gaussian,
    identity,
    of_pair,
    product,
)
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.errors import InvalidSetting

GRID = np.linspace(0, 1, 1001)


@given(mu=st.floats(0.02, 0.5), times=st.integers(1, 400))
@settings(max_examples=6, deadline=None)
def test_composing_gaussians_is_the_closed_form_and_never_below_it(mu: float, times: int) -> None:
    composed, total = compose(gaussian(mu), times, interval=1e-3), mu * math.sqrt(times)
    for delta in (1e-3, 1e-5):
        exact = epsilon_of_delta(delta, total)
        assert exact - 1e-9 <= composed.epsilon(delta) <= exact * 1.001 + 1e-5
        assert composed.mu_at(delta) == pytest.approx(total, rel=1e-3)
    curve = composed.curve()
    assert (curve(GRID) <= gaussian(total)(GRID) + 1e-6).all()
    assert distance(curve, gaussian(total)) < 5e-4


def test_different_gaussians_add_their_squares() -> None:
    composed = compose_all([gaussian(0.3), gaussian(0.4), gaussian(1.2)], interval=1e-3)
    assert composed.mu_at(1e-5) == pytest.approx(1.3, rel=1e-4)


def test_one_mechanism_is_itself() -> None:
    for f in (gaussian(1.0), SampledGaussian(1.0, 0.1), epsilon_delta(0.5, 0.01)):
        composed = compose(f, 1, interval=1e-3)
        for epsilon in (0.0, 0.2, 1.0, 2.5):
            assert float(f.delta(epsilon)) - 1e-12 <= composed.delta(epsilon)
            assert composed.delta(epsilon) == pytest.approx(float(f.delta(epsilon)), abs=2e-4)


def test_composing_with_the_identity_changes_nothing() -> None:
    f = SampledGaussian(1.0, 0.1)
    assert compose_all([f, identity()]).epsilon(1e-4) == pytest.approx(compose(f, 1).epsilon(1e-4), rel=1e-9)
    assert compose(identity(), 50).epsilon(1e-9) < 1e-6
    assert compose(SampledGaussian(0.0, 0.1), 50).epsilon(1e-9) < 1e-6


@pytest.mark.parametrize("f", [epsilon_delta(0.4, 0.02), of_pair([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])])
def test_small_curves_compose_as_their_exact_product(f: object) -> None:
    exact = product(product(f, f), f)  # type: ignore[arg-type]
    exact = envelope([exact, exact.inverse()])
    composed = compose(f, 3, interval=1e-4)  # type: ignore[arg-type]
    assert distance(composed.curve(), exact) < 2e-3
    assert composed.delta(0.7) == pytest.approx(float(exact.delta(0.7)), abs=1e-6)


def test_a_curve_that_is_not_symmetric_counts_in_its_worse_order() -> None:
    skew = of_pair([0.7, 0.3, 0.0], [0.6, 0.3, 0.1])
    assert compose(skew, 1).delta(5.0) == pytest.approx(0.1)
    assert compose(skew.inverse(), 1).delta(5.0) == pytest.approx(0.1)


def _loss_by_fourier(mu: float, p: float, times: int, *, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """Losses and masses under Q of C_p(G_mu) (both) or of the mixture against the plain law, composed.

    No code in common with the module: masses are a quadrature of densities, losses are interpolated linearly.
    """
    interval, size = 1e-3, 1 << 18
    z = np.linspace(mu / 2 if both else -12, mu + 12, 400_001)
    loss = np.log1p(p * np.expm1(mu * z - mu * mu / 2))
    plain = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    masses = np.zeros(size)
    parts = [(loss, plain * np.exp(loss))] + ([(-loss, plain)] if both else [])
    for where, mass in parts:
        cell = np.floor(where / interval).astype(int)
        upper = where / interval - cell
        np.add.at(masses, cell % size, mass * (1 - upper))
        np.add.at(masses, (cell + 1) % size, mass * upper)
    masses[0] += 1 - masses.sum()
    composed = np.fft.irfft(np.fft.rfft(masses) ** times, size)
    places = np.arange(size)
    return np.where(places < 0.75 * size, places, places - size) * interval, composed


@pytest.mark.parametrize(("sigma", "p", "times"), [(1.0, 16 / 600, 3534), (0.75, 16 / 600, 38 * 127), (2.0, 0.25, 200)])
def test_sampled_compositions_agree_with_an_accountant_written_here(sigma: float, p: float, times: int) -> None:
    for both, composed in [
        (True, compose(SampledGaussian(1 / sigma, p), times, interval=1e-3)),
        (False, poisson(sigma, p, times, interval=1e-3)),
    ]:
        losses, masses = _loss_by_fourier(1 / sigma, p, times, both=both)

        def delta(epsilon: float, losses: np.ndarray = losses, masses: np.ndarray = masses) -> float:
            return float((masses * np.maximum(0, -np.expm1(np.minimum(epsilon - losses, 0)))).sum())

        for target in (1e-3, 1e-5):
            oracle = brentq(lambda epsilon, target=target, delta=delta: delta(epsilon) - target, 0, 120)
            assert composed.epsilon(target) == pytest.approx(oracle, rel=5e-4)


@given(sigma=st.floats(0.7, 4), p=st.floats(0.01, 0.9), times=st.integers(1, 200))
@settings(max_examples=10, deadline=None)
def test_poisson_sampling_costs_no_more_than_the_operator_and_no_less_than_nothing(
    sigma: float, p: float, times: int
) -> None:
    for delta in (1e-3, 1e-5):
        one_order = poisson(sigma, p, times, interval=2e-3).epsilon(delta)
        assert 0 <= one_order <= compose(SampledGaussian(1 / sigma, p), times, interval=2e-3).epsilon(delta) + 2e-3
        assert one_order <= epsilon_of_delta(delta, math.sqrt(times) / sigma) * 1.001 + 2e-3


def test_whole_batches_are_gaussian() -> None:
    assert poisson(8.0, 1.0, 64).delta(1.0) == pytest.approx(delta_of_epsilon(1.0, 1.0), rel=1e-5)


def test_a_finer_grid_lowers_the_bound_and_barely() -> None:
    coarse = compose(SampledGaussian(1.0, 16 / 600), 3534, interval=1e-3).epsilon(1e-5)
    fine = compose(SampledGaussian(1.0, 16 / 600), 3534, interval=2e-4).epsilon(1e-5)
    assert fine < coarse < 1.0001 * fine


def test_numbers_out_of_bounds_are_refused() -> None:
    for times in (0, -1, 2.5, True):
        with pytest.raises(InvalidSetting, match="times"):
            compose(gaussian(1.0), times)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="nothing"):
        compose_all([])
    for sigma in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidSetting, match="noise multiplier"):
            poisson(sigma, 0.5, 3)
    with pytest.raises(InvalidSetting, match="probability"):
        poisson(1.0, 0.0, 3)
    with pytest.raises(InvalidSetting, match="cell"):
        compose(gaussian(1.0), 1, interval=0.0)
    composed = compose(gaussian(1.0), 1, interval=1e-2)
    with pytest.raises(InvalidSetting, match="delta"):
        composed.epsilon(0.0)
    with pytest.raises(InvalidSetting, match="epsilon"):
        composed.delta(-1.0)


@given(mu=st.floats(0.1, 3.0), gaps=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), is_from_zero=st.booleans())
def test_a_profile_is_the_highest_of_its_lines_and_of_their_mirror_images(
    mu: float, gaps: list[float], is_from_zero: bool
) -> None:
    """f(alpha) = max over (epsilon, delta) of 0, 1 - delta - e^epsilon alpha and e^-epsilon (1 - delta - alpha)."""
    epsilons = np.cumsum([0.0, *gaps] if is_from_zero else gaps)
    deltas = np.array([delta_of_epsilon(epsilon, mu) for epsilon in epsilons])
    curve = from_profile(epsilons, deltas)
    alphas = np.linspace(0, 1, 401)
    lines = [1 - d - np.exp(e) * alphas for e, d in zip(epsilons, deltas, strict=True)]
    mirrored = [np.exp(-e) * (1 - d - alphas) for e, d in zip(epsilons, deltas, strict=True)]
    expected = np.maximum(0, np.max([*lines, *mirrored], axis=0))
    assert np.abs(np.interp(alphas, curve.alphas, curve.betas) - expected).max() < 1e-12
    assert (curve.alphas[0], curve.alphas[-1]) == (0.0, 1.0)
    assert curve.betas[-1] == 0.0


@pytest.mark.parametrize(
    ("epsilons", "deltas"),
    [
        ([0.5, 1.0, 2.0], [0.2, 0.199, 0.0]),
        ([0.5, 1.0, 2.0, 3.0], [0.3, 0.295, 0.29, 0.0]),
        ([0.0, 0.5, 1.0, 2.0, 3.0], [0.5, 0.2, 0.19, 0.18, 0.0]),
        ([0.0, 1.0, 2.0, 3.0, 4.0], [0.6, 0.59, 0.1, 0.099, 0.0]),
        ([0.1, 0.2, 0.3], [0.1, 0.3, 0.5]),
        ([0.1, 0.2, 3.0], [1.0, 1.0, 1.0]),
    ],
)
def test_what_says_less_than_its_neighbours_leaves_no_mark_on_a_profile(
    epsilons: list[float], deltas: list[float]
) -> None:
    """By definition again, with lines among them that lie below the others everywhere."""
    alphas = np.linspace(0, 1, 2001)
    lines = [1 - d - np.exp(e) * alphas for e, d in zip(epsilons, deltas, strict=True)]
    mirrored = [np.exp(-e) * (1 - d - alphas) for e, d in zip(epsilons, deltas, strict=True)]
    expected = np.maximum(0, np.max([*lines, *mirrored], axis=0))
    assert np.abs(from_profile(epsilons, deltas)(alphas) - expected).max() < 1e-12


def test_an_epsilon_that_is_no_finite_number_is_refused() -> None:
    for bad in (math.inf, math.nan, -1.0):
        with pytest.raises(InvalidSetting, match="epsilon must be a finite number of at least 0"):
            compose(gaussian(1.0), 2).delta(bad)


def test_of_two_epsilons_at_one_delta_the_smaller_counts() -> None:
    """Far out all deltas are one number in double precision, and the largest epsilon would say nearly nothing."""
    assert distance(from_profile([1.0, 2.0, 30.0], [0.0, 0.0, 0.0]), epsilon_delta(1.0, 0.0)) < 1e-12
    assert distance(from_profile([1.0, 2.0], [0.2, 0.2]), epsilon_delta(1.0, 0.2)) < 1e-12


def test_a_mechanism_that_tells_everything_has_the_curve_that_is_zero() -> None:
    """All the mass is lost beyond every epsilon, so none is looked for."""
    composed = compose(of_pair([1.0, 0.0], [0.0, 1.0]), 1)
    assert composed.delta(500.0) == 1.0
    assert composed.curve()(GRID).max() == 0.0


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: compose(gaussian(1.0), 0), "times must be a whole number of at least 1, found 0"),
        (lambda: poisson(1.0, 0.5, True), "times must be a whole number of at least 1, found True"),
        (lambda: compose_all([]), "there is nothing to compose"),
        (lambda: poisson(math.inf, 0.5, 3), "a noise multiplier must be positive and finite, found inf"),
        (lambda: poisson(0, 0.5, 3), "a noise multiplier must be positive and finite, found 0"),
        (lambda: poisson(1.0, 1.5, 3), "a sampling probability must lie in (0, 1], found 1.5"),
        (lambda: compose(gaussian(1.0), 1, interval=0.0),
         "a cell of loss must be positive and at most 0.1 wide, found 0.0"),
        (lambda: compose(gaussian(1.0), 1, interval=0.11),
         "a cell of loss must be positive and at most 0.1 wide, found 0.11"),
        (lambda: compose(gaussian(1.0), 1, interval=0.1).delta(-1.0),
         "epsilon must be a finite number of at least 0, found -1.0"),
        (lambda: compose(gaussian(1.0), 1, interval=0.1).epsilon(1), "delta must be strictly between 0 and 1, found 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_composed_is_refused_word_for_word(step: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        step()
    assert str(refusal.value) == said
