"""Numerical composition: closed forms, an accountant written here from scratch, and products of small curves.

Of federated f-DP: what local training costs, and what a theorem of the paper leaves out.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from benchmarks.accounting.composition import LocalTraining, operator, poisson
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta


@given(mu=st.floats(0.02, 0.5), times=st.integers(1, 400))
@settings(max_examples=6, deadline=None)
def test_composing_gaussians_is_the_closed_form_and_never_below_it(mu: float, times: int) -> None:
    composed, total = operator(mu, 1.0, times, interval=1e-3), mu * math.sqrt(times)
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
        (True, operator(1 / sigma, p, times, interval=1e-3)),
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
        assert 0 <= one_order <= operator(1 / sigma, p, times, interval=2e-3).epsilon(delta) + 2e-3
        assert one_order <= epsilon_of_delta(delta, math.sqrt(times) / sigma) * 1.001 + 2e-3


def test_two_rounds_are_less_private_than_theorem_1_prints() -> None:
    """What client 0 sends in round 1 reaches client 1 in round 2 through client 2.

    Client 0 sends its record as it is; whoever takes part in a round gets a helper model that passes on what its
    senders knew. Theorem 1 leaves 1 - (1 - p^2)^2 for the probability that client 1 comes to know the record.
    """
    p, knows_it = 0.5, 0.0
    for rounds in itertools.product(itertools.product([False, True], repeat=3), repeat=2):
        known, chance = {0}, 1.0
        for taking_part in rounds:
            chance *= math.prod(p if one else 1 - p for one in taking_part)
            senders = {client for client, one in enumerate(taking_part) if one}
            known |= senders if senders & known else set()
        knows_it += chance * (1 in known)
    assert knows_it == pytest.approx(1 - (1 - p**2) ** 2 + p**4 * (1 - p) ** 2)


def test_theorem_2_is_what_the_exact_composition_tends_to() -> None:
    """With B/n sqrt(KR) fixed and more and more steps, the mu of the exact composition approaches the printed limit."""
    gaps = []
    for steps in (100, 2_500, 40_000):
        training = LocalTraining(
            records=int(8 * math.sqrt(steps)), batch=8, noise_multiplier=1.0, iterations=steps, rounds=1
        )
        exact = training.as_printed(interval=5e-4).mu_at(1e-2)
        gaps.append(abs(training.clt_mu / exact - 1))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.015


def test_the_limit_is_no_bound() -> None:
    """One round of the first row of table 1: 38 steps are too few, and the limit promises too much."""
    one_round = LocalTraining(records=600, batch=16, noise_multiplier=1.0, iterations=38, rounds=1)
    assert one_round.clt_mu == pytest.approx(0.281, abs=1e-3)
    assert one_round.as_printed().mu_at(1e-5) == pytest.approx(0.374, abs=1e-3)
    assert one_round.exact().mu_at(1e-5) > 1.2 * one_round.clt_mu


def test_whole_batches_compose_to_a_gaussian() -> None:
    training = LocalTraining(records=100, batch=100, noise_multiplier=5.0, iterations=5, rounds=5)
    for composition in (training.exact(), training.as_printed()):
        assert composition.delta(1.0) == pytest.approx(delta_of_epsilon(1.0, 1.0), rel=1e-4)
    assert training.replaced().mu_at(1e-5) == pytest.approx(2.0, rel=1e-4)
