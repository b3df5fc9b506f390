"""The bound for hidden Poisson sampling: closed form, another accountant of dp-accounting, exact enumeration, Renyi."""

from __future__ import annotations

import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant

from benchmarks.accounting.sampled import _renyi, epsilon_bound, noise_multiplier, noise_multiplier_of, renyi_epsilon
from labeler.accounting import integer
from labeler.accounting.events import IntegerSum
from labeler.accounting.sampled import sampled_epsilon
from labeler.errors import InvalidSetting


def _event(
    noise_multiplier: float, *, sensitivity: int = 4000, coordinates: int = 1000, level="instance"
) -> IntegerSum:
    share = sensitivity * noise_multiplier / math.sqrt(10)
    return IntegerSum(sensitivity**2, sensitivity, 1, share, 10, 1000, level)


@pytest.mark.parametrize(
    ("noise_multiplier", "probability", "rounds", "delta"),
    [
        (1.0, 0.05, 100, 1e-3),
        (2.0, 0.2, 200, 1e-3),
        (0.8, 0.05, 50, 1e-3),
        (1.0, 0.02, 1000, 1e-5),
        (8.0, 0.5, 300, 1e-4),
    ],
)
def test_two_accountants_of_dp_accounting_agree(noise_multiplier, probability, rounds, delta) -> None:
    """PLD directly is the same number; Renyi divergences are an upper bound that loses something."""
    bound = epsilon_bound(_event(noise_multiplier), probability, rounds, delta)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise_multiplier)), rounds
    )
    direct = pld_privacy_accountant.PLDAccountant(value_discretization_interval=2e-4).compose(event).get_epsilon(delta)
    renyi = rdp_privacy_accountant.RdpAccountant().compose(event).get_epsilon(delta)
    assert bound == pytest.approx(direct, rel=1e-3)
    assert bound <= renyi
    paper = renyi_epsilon(noise_multiplier, delta, sampling_probability=probability, rounds=rounds)
    assert bound <= renyi <= paper * (1 + 1e-9)


def test_renyi_orders_are_those_of_dp_accounting() -> None:
    for probability in (0.05, 1.0):
        event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(1.3))
        for order in (2, 7, 40):
            accountant = rdp_privacy_accountant.RdpAccountant(orders=[order]).compose(event, 9)
            expected = float(accountant._rdp[0])
            assert 9 * _renyi(order, probability, 1.3) == pytest.approx(expected, rel=1e-9)


def test_coarse_noise_is_paid_for_or_refused() -> None:
    event = _event(2.0)
    price = epsilon_bound(event, 0.1, 100, 1e-5)
    assert price < math.inf
    assert epsilon_bound(event, 0.1, 100, 1e-5, total_variation=1e-15) == math.inf
    # Shares of half a grid unit: their sum is far from one discrete Gaussian.
    coarse = IntegerSum(1, 1, 1, 0.5, 100, 1)
    assert epsilon_bound(coarse, 0.1, 10, 1e-5) == math.inf


@pytest.mark.parametrize(("epsilon", "delta", "probability", "rounds"), [(2.7, 1e-3, 0.5, 60), (1.0, 1e-4, 1.0, 30)])
def test_the_noise_multiplier_of_a_budget_costs_that_budget(epsilon, delta, probability, rounds) -> None:
    multiplier = noise_multiplier_of(epsilon, delta, sampling_probability=probability, rounds=rounds)
    price = epsilon_bound(_event(multiplier), probability, rounds, delta)
    assert epsilon * (1 - 2e-3) <= price <= epsilon


def test_what_is_not_covered_is_refused() -> None:
    for probability, rounds in ((0.0, 5), (1.5, 5), (0.5, 0)):
        with pytest.raises(InvalidSetting):
            epsilon_bound(_event(2.0), probability, rounds, 1e-3)
    assert epsilon_bound(_event(2.0), 0.5, 5, 0.0) == math.inf
    with pytest.raises(InvalidSetting):
        noise_multiplier_of(math.inf, 1e-3, sampling_probability=0.5, rounds=3)


def coarse(shares: int, *, share: float = 0.8) -> IntegerSum:
    """A round on a grid so coarse that the sum of shares is visibly no discrete Gaussian."""
    return IntegerSum(1, 1, 1, share, shares, 7)


@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_the_errors_of_all_rounds_are_added_and_paid_for(delta: float) -> None:
    """The module's formula, term by term: tau and kappa per coordinate and round, in delta and twice in epsilon."""
    event = coarse(12)
    kappa = 2 * sum(math.exp(-6 * math.pi**2 * j**2) for j in range(1, 9))
    tau = 10 * 11 * math.exp(-((math.pi * 0.8) ** 2))
    error = 3 * 7 * (tau + 2 * kappa)
    assert error > 1.0
    left = delta * (1 - 1e-6) * math.exp(-error)
    exact = sampled_epsilon(1 / noise_multiplier(event), Fraction(1, 4), 3, left) + 2 * error
    assert epsilon_bound(event, 0.25, 3, delta, total_variation=0.0) == pytest.approx(exact * (1 + 1e-6), rel=1e-9)


def test_smoothing_is_paid_for_in_every_round_and_coordinate() -> None:
    """One share, so no tau: what is left of the difference to a perfect Gaussian is twice kappa, everywhere."""
    event = IntegerSum(1, 1, 1, 3.0, 1, 10**24)
    error = 1e24 * integer.smoothing_error()
    assert 0.01 < error < 1.0
    loss = epsilon_bound(event, 0.25, 1, 1e-3, total_variation=0.0)
    assert loss > epsilon_bound(coarse(1, share=3.0), 0.25, 1, 1e-3, total_variation=0.0) + 1.9 * error


def test_what_may_fail_is_weighed_against_what_is_set_aside() -> None:
    """(1 + e^epsilon) times all that may fail is at most a millionth of delta; a little more proves nothing."""
    delta = 1e-3
    event = coarse(2, share=9.0)
    epsilon = epsilon_bound(event, 0.25, 7, delta, total_variation=0.0)
    room = 1e-6 * delta / (1 + math.exp(epsilon / (1 + 1e-6)))
    for variation, fits in ((room / (2 * 7 * 7), True), (1.0001 * room / (2 * 7 * 7), False)):
        found = epsilon_bound(event, 0.25, 7, delta, total_variation=variation * 0.99999)
        assert found == (pytest.approx(epsilon, rel=1e-12) if fits else math.inf), variation


@pytest.mark.parametrize(("multiplier", "rounds", "delta"), [(4.0, 5, 1e-5), (20.0, 100, 1e-3), (1.0, 1, 1e-9)])
def test_without_sampling_renyi_is_the_least_of_its_lines(multiplier: float, rounds: int, delta: float) -> None:
    """alpha T / (2 z^2) + log(1 / delta) / (alpha - 1), over the whole orders that are tried."""
    orders = np.array([*range(2, 64), *range(64, 513, 8)])
    lines = orders * rounds / (2 * multiplier**2) - math.log(delta) / (orders - 1)
    found = renyi_epsilon(multiplier, delta, sampling_probability=1.0, rounds=rounds)
    assert found == pytest.approx(float(lines.min()), rel=1e-12)
    assert 0 < lines.argmin() < len(orders) - 1
