"""Numerical composition: closed forms, an accountant written here from scratch, and products of small curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from benchmarks.accounting.composition import SampledGaussian, compose, poisson
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.errors import InvalidSetting


@given(mu=st.floats(0.02, 0.5), times=st.integers(1, 400))
@settings(max_examples=6, deadline=None)
def test_composing_gaussians_is_the_closed_form_and_never_below_it(mu: float, times: int) -> None:
    composed, total = compose(SampledGaussian(mu), times, interval=1e-3), mu * math.sqrt(times)
    for delta in (1e-3, 1e-5):
        exact = epsilon_of_delta(delta, total)
        assert exact - 1e-9 <= composed.epsilon(delta) <= exact * 1.001 + 1e-5
        assert composed.mu_at(delta) == pytest.approx(total, rel=1e-3)


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


def test_whole_batches_are_SampledGaussian() -> None:
    assert poisson(8.0, 1.0, 64).delta(1.0) == pytest.approx(delta_of_epsilon(1.0, 1.0), rel=1e-5)


def test_a_finer_grid_lowers_the_bound_and_barely() -> None:
    coarse = compose(SampledGaussian(1.0, 16 / 600), 3534, interval=1e-3).epsilon(1e-5)
    fine = compose(SampledGaussian(1.0, 16 / 600), 3534, interval=2e-4).epsilon(1e-5)
    assert fine < coarse < 1.0001 * fine


def test_numbers_out_of_bounds_are_refused() -> None:
    for times in (0, -1, 2.5, True):
        with pytest.raises(InvalidSetting, match="times"):
            compose(SampledGaussian(1.0), times)  # type: ignore[arg-type]
    for sigma in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidSetting, match="noise multiplier"):
            poisson(sigma, 0.5, 3)
    with pytest.raises(InvalidSetting, match="probability"):
        poisson(1.0, 0.0, 3)
    with pytest.raises(InvalidSetting, match="cell"):
        compose(SampledGaussian(1.0), 1, interval=0.0)
    composed = compose(SampledGaussian(1.0), 1, interval=1e-2)
    with pytest.raises(InvalidSetting, match="delta"):
        composed.epsilon(0.0)
    with pytest.raises(InvalidSetting, match="epsilon"):
        composed.delta(-1.0)
