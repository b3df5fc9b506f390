"""Prices of sampled sums: the certified profile against oracles, the pair above it, the integer mechanism itself."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from labeler.accounting.events import SPILL
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.accounting.losses import composed
from labeler.accounting.sampled import IntegerSampled, sampled_epsilon, sampled_pair
from labeler.errors import InvalidSetting
from workers.studies.accounting.composition import poisson

_SETTINGS = [
    (Fraction(1, 100), 1.0, 1000),
    (Fraction(1, 100), 0.5, 1000),
    (Fraction(1, 10), 0.2, 100),
    (Fraction(1, 50), 1 / 1.1, 3000),
    (Fraction(1, 5), 1 / 3, 50),
    (Fraction(1, 1000), 1.25, 10_000),
    (Fraction(1, 2), 1.0, 10),
]


@pytest.mark.parametrize(("rate", "mu", "rounds"), _SETTINGS)
def test_the_certified_epsilon_is_that_of_privacy_loss_distributions_and_the_pair_lies_above(
    rate: Fraction, mu: float, rounds: int
) -> None:
    oracle = poisson(1 / mu, float(rate), rounds, interval=min(5e-4, 0.02 * float(rate) * mu))
    for delta in (1e-3, 1e-5, 1e-7):
        certified = sampled_epsilon(mu, rate, rounds, delta)
        assert certified == pytest.approx(oracle.epsilon(delta), rel=3e-3, abs=2e-3)
    pair = sampled_pair(mu, rate, rounds)
    assert 0 < pair.delta_0 <= SPILL * pair.mu_squared
    for delta in (1e-3, 1e-5, 1e-7, 1e-9):
        assert oracle.epsilon(delta) <= epsilon_of_delta(delta, math.sqrt(pair.mu_squared))


@pytest.mark.parametrize("order", ["remove", "add"])
@pytest.mark.parametrize(("rate", "mu"), [(0.01, 1.0), (0.3, 0.4), (0.9, 2.0), (0.002, 3.0)])
def test_one_round_is_above_its_closed_form_at_every_epsilon_and_close_to_it(
    rate: float, mu: float, order: str
) -> None:
    from scipy.special import log_ndtr

    losses = composed(mu, rate, 1, order, 1e-32)  # type: ignore[arg-type]
    for epsilon, delta in list(zip(losses.epsilons, losses.deltas, strict=True))[::7]:
        y = math.exp(epsilon)
        ratio = (y - 1 + rate) / rate if order == "remove" else (1 / y - 1 + rate) / rate
        if ratio <= 0:
            continue
        x = math.log(ratio) / mu + mu / 2
        side = -1 if order == "remove" else 1
        p, q = math.exp(log_ndtr(side * x)), math.exp(log_ndtr(side * (x - mu)))
        mixed = (1 - rate) * p + rate * q
        exact = mixed - y * p if order == "remove" else p - y * mixed
        if exact < 1e-9 * p:
            continue  # the closed form has cancelled
        assert exact <= delta * (1 + 1e-6 * p / exact)
        assert delta <= exact * 1.05 + 1e-12


def test_everybody_taking_part_costs_what_unsampled_sums_cost() -> None:
    pair = sampled_pair(0.25, Fraction(1), 16)
    assert (pair.mu_squared, pair.delta_0) == (1, 0.0)


def test_a_price_is_cached_grows_with_every_argument_and_never_exceeds_the_unsampled_one() -> None:
    base = sampled_pair(0.5, Fraction(1, 20), 100).mu_squared
    assert base <= sampled_pair(0.55, Fraction(1, 20), 100).mu_squared
    assert base <= sampled_pair(0.5, Fraction(1, 18), 100).mu_squared
    assert base <= sampled_pair(0.5, Fraction(1, 20), 110).mu_squared
    assert sampled_pair(5.0, Fraction(1, 20), 10).mu_squared == 250
    assert sampled_pair(0.5, Fraction(1, 20), 100) is sampled_pair(0.5, Fraction(1, 20), 100)


def test_an_event_states_the_mu_of_one_round_and_the_price_of_all() -> None:
    event = IntegerSampled(
        squared_sensitivity=1,
        largest_change=1,
        grid_scale=64,
        share_sigma_grid=64.0,
        noise_contributors=2,
        coordinates=10 * 100,
        level="agent",
        sampling_rate=Fraction(1, 10),
        rounds=100,
    )
    assert event.mu == pytest.approx(64 / math.sqrt(2 * 64**2 - 3))
    assert (
        event.mu_squared == sampled_pair(event.mu, Fraction(1, 10), 100).mu_squared < 100 * Fraction(event.mu) ** 2 / 10
    )
    from labeler.accounting.integer import epsilon_bound

    assert epsilon_bound(event, 1e-5) >= epsilon_of_delta(1e-5, math.sqrt(event.mu_squared))


_REFUSED: list[tuple[float, object, object]] = [
    (0.0, Fraction(1, 2), 1),
    (math.inf, Fraction(1, 2), 1),
    (1.0, Fraction(0), 1),
    (1.0, Fraction(3, 2), 1),
    (1.0, 0.5, 1),
    (1.0, Fraction(1, 2), 0),
    (1.0, Fraction(1, 2), 10**7),
    (1.0, Fraction(1, 2), True),
]


@pytest.mark.parametrize(("mu", "rate", "rounds"), _REFUSED)
def test_what_cannot_be_certified_is_refused(mu: float, rate: Any, rounds: Any) -> None:
    with pytest.raises(InvalidSetting):
        sampled_pair(mu, rate, rounds)


@pytest.mark.parametrize(("rate", "mu", "rounds"), _SETTINGS)
def test_the_pair_is_above_the_profile_of_both_orders(rate: Fraction, mu: float, rounds: int) -> None:
    pair = sampled_pair(mu, rate, rounds)
    root = math.sqrt(pair.mu_squared)
    for order in ("remove", "add"):
        losses = composed(mu, float(rate), rounds, order, 1e-34)  # type: ignore[arg-type]
        for epsilon, delta in list(zip(losses.epsilons, losses.deltas, strict=True))[::3]:
            assert delta <= delta_of_epsilon(float(epsilon), root) * (1 + 1e-6) + pair.delta_0 + 1e-34


def test_deltas_do_not_increase() -> None:
    losses = composed(1.0, 0.05, 20, "remove", 1e-30)
    assert np.all(np.diff(losses.deltas) <= 0)
