"""Prices of sampled sums: the certified profile against oracles, the pair above it, the integer mechanism itself.

Where a contributor's vector is replaced, the pair is above the exact divergence, which is found without it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import norm

from benchmarks.accounting.composition import poisson
from labeler.accounting.events import SPILL
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.accounting.integer import epsilon_bound
from labeler.accounting.losses import Floats, Order, composed
from labeler.accounting.sampled import IntegerReplaced, IntegerSampled, sampled_epsilon, sampled_pair
from labeler.errors import InvalidSetting
from tests.oracles.integers import discrete_gaussian

_SETTINGS = [
    (Fraction(1, 100), 1.0, 1000),
    (Fraction(1, 100), 0.5, 1000),
    (Fraction(1, 10), 0.2, 100),
    (Fraction(1, 50), 1 / 1.1, 3000),
    (Fraction(1, 5), 1 / 3, 50),
    (Fraction(1, 100), 1.25, 500),
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


PAGE = Path(__file__).parents[3] / "docs" / "math" / "sampled-training.md"
PRINTED = re.findall(r"(?m)^\| (\d[\d/,]*) \| ([\d.]+) \| ([\d,]+) \| (.*) \|$", PAGE.read_text())


@pytest.mark.parametrize(("rate", "sigma", "rounds", "printed"), PRINTED)
def test_the_page_prints_what_a_ledger_pays_more(rate: str, sigma: str, rounds: str, printed: str) -> None:
    assert len(PRINTED) == 10
    q, mu, times = Fraction(rate.replace(",", "")), 1 / float(sigma), int(rounds.replace(",", ""))
    limit = float(q) ** 2 * times * math.expm1(mu**2)
    pair, loose = sampled_pair(mu, q, times), sampled_pair(mu, q, times, delta_0=1e-12)
    epsilons = sampled_epsilon(mu, q, times, 1e-5), epsilon_of_delta(1e-5, math.sqrt(pair.mu_squared))
    found = (pair.mu_squared / limit, loose.mu_squared / limit, *epsilons)
    assert [float(cell.replace(",", "")) for cell in printed.split(" | ")] == pytest.approx(found, rel=1e-3, abs=5e-4)


@pytest.mark.parametrize("order", ["remove", "add"])
@pytest.mark.parametrize(("rate", "mu"), [(0.01, 1.0), (0.3, 0.4), (0.9, 2.0), (0.002, 3.0)])
def test_one_round_is_above_its_closed_form_and_close_to_it(rate: float, mu: float, order: Order) -> None:
    losses = composed(mu, rate, 1, order, 1e-32)
    exact = _closed_form(losses.epsilons, mu, rate, order)
    is_clear = exact > 1e-13
    assert np.count_nonzero(is_clear) > 30
    assert np.all(exact[is_clear] * (1 - 1e-2 * 1e-13 / exact[is_clear]) <= losses.deltas[is_clear])
    assert np.all(losses.deltas <= _closed_form(losses.epsilons * 0.98, mu, rate, order) * 1.02 + 1e-12)


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


@pytest.mark.parametrize(("mu", "rounds"), [(1e-4, 500), (1.0, 100), (5.0, 1)])
def test_a_rate_below_what_doubles_tell_apart_is_charged_as_the_least_that_they_do(mu: float, rounds: int) -> None:
    least = sampled_pair(mu, Fraction(1, 10**12), rounds)
    of_least = sampled_epsilon(mu, Fraction(1, 10**12), rounds, 1e-5)
    for rate in (2**-64, 5e-324):
        assert sampled_pair(mu, Fraction(rate), rounds) == least
        assert sampled_epsilon(mu, Fraction(rate), rounds, 1e-5) == of_least < math.inf


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


def _closed_form(epsilon: Floats, mu: float, rate: float, order: str) -> Floats:
    """H of one round: where the likelihood ratio exceeds e^epsilon is a half-line of x."""
    y = np.exp(epsilon)
    ratio = (y - 1 + rate) / rate if order == "remove" else (1 / y - 1 + rate) / rate
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(ratio > 0, np.log(np.maximum(ratio, 0)) / mu + mu / 2, -np.inf)
    side = -1 if order == "remove" else 1
    p, q = ndtr(side * x), ndtr(side * (x - mu))
    mixed = (1 - rate) * p + rate * q
    return np.asarray(np.maximum(mixed - y * p if order == "remove" else p - y * mixed, 0.0))


@pytest.mark.parametrize("order", ["remove", "add"])
@pytest.mark.parametrize(("rate", "mu", "least"), [(0.01, 1.0, 1e-26), (0.3, 0.7, 1e-24), (0.002, 2.5, 1e-26)])
def test_two_rounds_are_certified_far_into_the_tail(rate: float, mu: float, least: float, order: Order) -> None:
    """The second round's closed form under an integral over the first, which no grid of losses takes part in."""
    losses = composed(mu, rate, 2, order, 1e-33)
    x = np.arange(-14.0, 14.0 + mu, 1e-3)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    loss = np.log1p(rate * np.expm1(mu * x - mu * mu / 2))
    law, loss = (density * np.exp(loss), loss) if order == "remove" else (density, -loss)
    checked = 0
    for epsilon, delta in list(zip(losses.epsilons, losses.deltas, strict=True))[::10]:
        exact, nearer = (
            float((law * _below_one_too(at - loss, mu, rate, order)).sum() * 1e-3) for at in (epsilon, 0.95 * epsilon)
        )
        if exact > least:
            checked += 1
            assert exact * (1 - 1e-7) <= delta <= nearer * 1.02 + 1e-12
    assert checked > 5


def _below_one_too(epsilon: Floats, mu: float, rate: float, order: str) -> Floats:
    """H_y for y on both sides of 1: the other order's, mirrored."""
    other = "add" if order == "remove" else "remove"
    mirrored = -np.expm1(epsilon) + np.exp(epsilon) * _closed_form(-epsilon, mu, rate, other)
    return np.where(epsilon >= 0, _closed_form(np.maximum(epsilon, 0.0), mu, rate, order), mirrored)


def _hockey_stick(p: Floats, q: Floats, y: Floats) -> Floats:
    """sum (p - y q)^+ for many y, exactly, outcomes sorted by their ratio."""
    order = np.argsort(np.arctan2(p, q))
    ratios = np.tan(np.arctan2(p, q)[order])
    left_p, left_q = (np.append(np.cumsum(one[order][::-1])[::-1], 0.0) for one in (p, q))
    first = np.searchsorted(ratios, y, "right")
    return np.asarray(np.maximum(left_p[first] - y * left_q[first], 0.0))


@pytest.mark.parametrize("rate", [Fraction(1, 10), Fraction(1, 2)])
def test_vectors_of_integers_moved_in_any_direction_are_within_the_price_of_two_adaptive_rounds(rate: Fraction) -> None:
    """Two coordinates, shifts that no axis has, the second chosen by the adversary for each outcome of the first."""
    sigma, q = 5.0, float(rate)
    noise = discrete_gaussian(sigma, math.ceil(9 * sigma))
    reach = 9

    def laws(shift: tuple[int, int]) -> tuple[Floats, Floats]:
        still, moved = ([np.pad(noise, (reach + d, reach - d)) for d in by] for by in ((0, 0), shift))
        without, with_it = (np.multiply.outer(*one).ravel() for one in (still, moved))
        return without, (1 - q) * without + q * with_it

    shifts = [(3, 4), (-4, 3), (5, 0), (1, -2)]
    mu = 5 / math.sqrt(sigma**2 - 3)
    pair = sampled_pair(mu, rate, 2)
    without, with_it = laws((3, 4))
    for order, (p, r) in {"remove": (with_it, without), "add": (without, with_it)}.items():
        losses = composed(mu, q, 2, order, 1e-33)  # type: ignore[arg-type]
        for epsilon in losses.epsilons[5:-1:90]:
            there = p > 0
            y = math.exp(epsilon) * r[there] / p[there]
            seconds = [laws(shift) for shift in shifts]
            best = np.max([_hockey_stick(*(one[::-1] if order == "remove" else one), y) for one in seconds], axis=0)
            exact = float(p[there] @ best)
            at = int(np.searchsorted(losses.epsilons, epsilon))
            assert exact <= losses.deltas[at] * (1 + 1e-9) + 1e-15
            assert exact <= delta_of_epsilon(float(epsilon), math.sqrt(pair.mu_squared)) * (1 + 1e-9) + 1e-15


@settings(max_examples=40)
@given(
    others=st.lists(st.integers(-4, 4), max_size=4),
    mine=st.integers(-6, 6).filter(bool),
    rate=st.fractions(Fraction(1, 50), Fraction(9, 10), max_denominator=50),
    epsilon=st.floats(0.0, 3.0),
)
def test_neighbouring_worlds_with_hidden_coins_are_within_the_profile(
    others: list[int], mine: int, rate: Fraction, epsilon: float
) -> None:
    """Every coin of everybody is enumerated, two rounds, integer noise: adding and removing one record."""
    sigma, q = 4.0, float(rate)
    reach = 4 * len(others) + 6
    law = np.pad(discrete_gaussian(sigma, math.ceil(9 * sigma)), reach)
    for one in others:
        law = (1 - q) * law + q * np.roll(law, one)
    without, with_it = law, (1 - q) * law + q * np.roll(law, mine)
    mu = abs(mine) / math.sqrt(sigma**2 - 3)
    for order, (p, r) in {"remove": (with_it, without), "add": (without, with_it)}.items():
        there = p > 0
        exact = float(p[there] @ _hockey_stick(p, r, math.exp(epsilon) * r[there] / p[there]))
        losses = composed(mu, q, 2, order, 1e-20)  # type: ignore[arg-type]
        assert exact <= np.interp(math.exp(epsilon), np.exp(losses.epsilons), losses.deltas) * (1 + 1e-9) + 1e-14


def test_pairs_add_up_also_with_a_gaussian_charge() -> None:
    """Two kinds of rounds and an unsampled release, composed by dp-accounting, lie below the sum of the charges."""
    kinds = [(Fraction(1, 20), 1.0, 100), (Fraction(1, 5), 0.3, 40)]
    total = Fraction(sum(sampled_pair(mu, rate, rounds).mu_squared for rate, mu, rounds in kinds)) + Fraction(1, 4)
    losses = [poisson(1 / mu, float(rate), rounds, interval=1e-3).loss for rate, mu, rounds in kinds]
    whole = losses[0].compose(losses[1]).compose(poisson(2.0, 1.0, 1, interval=1e-3).loss)
    for delta in (1e-3, 1e-6, 1e-9):
        assert whole.get_epsilon_for_delta(delta) <= epsilon_of_delta(delta, math.sqrt(total)) + 1e-3


# A contributor whose vector is replaced.


def _event(kind: type[IntegerSampled], mu: float, rate: Fraction, rounds: int) -> IntegerSampled:
    """A sum of one share whose step moves by mu of its noise, as nearly as whole numbers do."""
    return kind(
        squared_sensitivity=round((mu * 1600) ** 2),
        largest_change=round(mu * 1600) + 1,
        grid_scale=1,
        share_sigma_grid=1600.0,
        noise_contributors=1,
        coordinates=rounds,
        sampling_rate=rate,
        rounds=rounds,
    )


def _replaced_divergence(mu: float, rate: float, rounds: int, epsilons: Floats) -> Floats:
    """Hockey-stick divergence of T rounds with u = mu against u' = -mu, by convolving losses on a fine grid.

    Atoms keep their mass and round their loss down, so what is found is at most the divergence (but for 1e-9 of mass).
    """
    width = 2e-3
    x = np.linspace(-12, 12, 400_001)
    p = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - mu)
    q = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x + mu)
    loss = np.floor(np.log(p / q) / width).astype(int)
    first = loss.min()
    one = np.bincount(loss - first, weights=p * (x[1] - x[0]))
    law = np.array([1.0])
    for _ in range(rounds):
        law = np.maximum(np.real(np.fft.irfft(np.fft.rfft(law, 2**17) * np.fft.rfft(one, 2**17), 2**17)), 0)
    losses = (np.arange(2**17) + rounds * first) * width
    return np.array([law @ np.maximum(0, -np.expm1(np.minimum(0, at - losses))) for at in epsilons])


@pytest.mark.parametrize(
    ("mu", "rate", "rounds"), [(0.3, Fraction(1, 5), 20), (0.5, Fraction(1, 4), 8), (0.2, Fraction(1, 10), 40)]
)
def test_the_pair_of_a_replacement_is_above_the_exact_divergence(mu: float, rate: Fraction, rounds: int) -> None:
    replaced = _event(IntegerReplaced, mu, rate, rounds)
    epsilons = np.linspace(0, 1.5, 16)
    exact = _replaced_divergence(mu, float(rate), rounds, epsilons)
    stated = math.sqrt(replaced.mu_squared)
    claimed = np.array([delta_of_epsilon(at, stated) for at in epsilons])
    assert (exact <= claimed + 1e-8).all()
    # And it says something: not half of it would do at zero, and sampling saves most of what all rounds would cost.
    assert exact[0] > 0.5 * claimed[0]
    assert replaced.mu_squared < 0.8 * 4 * rounds * Fraction(replaced.mu) ** 2


def test_it_is_four_times_a_removal_with_a_rest_that_a_ledger_may_leave_over() -> None:
    replaced, removed = (
        _event(IntegerReplaced, 0.4, Fraction(1, 10), 50),
        _event(IntegerSampled, 0.4, Fraction(1, 10), 50),
    )
    assert 4 * removed.mu_squared <= replaced.mu_squared < Fraction(44, 10) * removed.mu_squared
    pair = sampled_pair(replaced.mu, Fraction(1, 10), 50, delta_0=1e-35)
    rest = norm.cdf(norm.ppf(1e-35) + math.sqrt(pair.mu_squared)) + 1e-35
    assert rest < SPILL * replaced.mu_squared


@pytest.mark.parametrize(("mu", "rounds"), [(1.5, 40), (3.0, 12)])
def test_where_the_rest_is_too_large_two_vectors_of_a_ball_are_charged_without_sampling(mu: float, rounds: int) -> None:
    replaced = _event(IntegerReplaced, mu, Fraction(1, 2), rounds)
    whole = 4 * rounds * Fraction(replaced.mu) ** 2
    assert whole <= replaced.mu_squared < whole + Fraction(1, 10**8)
