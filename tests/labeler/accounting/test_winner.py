"""Prices of winners: certificates above every adversary, goldens, and the integer mechanism by brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom

from labeler.accounting.events import SPILL
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.accounting.integer import epsilon_bound
from labeler.accounting.losses import Pair
from labeler.accounting.winner import (
    BLOCK,
    ONE_BIT,
    SWAP,
    Change,
    IntegerWinner,
    _cuts,
    _largest,
    _stretches,
    _void,
    winner_pair,
)
from labeler.errors import InvalidSetting
from tests.oracles.integers import delta_of, discrete_gaussian
from tests.oracles.profiles import winner_profile

Floats = NDArray[np.float64]


def _epsilon(pair: Pair, delta: float) -> float:
    return epsilon_of_delta(delta - pair.delta_0, math.sqrt(pair.mu_squared))


@pytest.mark.parametrize(
    ("change", "mu", "queries", "delta", "most", "histogram"),
    [
        pytest.param(ONE_BIT, 1 / 25, 500, 1e-3, 2.14, 2.735, marks=pytest.mark.long),
        (ONE_BIT, 1 / 10, 50, 1e-5, 2.61, 2.943),
        (SWAP, math.sqrt(2) / 25, 206, 1e-4, 2.69, 2.976),
    ],
)
def test_winners_of_the_papers_settings_cost_less_than_their_histograms(
    change: Change, mu: float, queries: int, delta: float, most: float, histogram: float
) -> None:
    pair = winner_pair(change, mu, queries)
    assert epsilon_of_delta(delta, mu * math.sqrt(queries)) == pytest.approx(histogram, abs=1e-3)
    assert winner_profile(change, mu, queries).epsilon(delta) <= _epsilon(pair, delta) <= most
    assert 0 < pair.delta_0 <= SPILL * pair.mu_squared


def _of_one_threshold(mu: float, queries: int, threshold: float, epsilon: float) -> float:
    """The divergence of as many independent bits, exactly: counts of ones are sufficient."""
    ones = np.arange(queries + 1)
    p, q = (binom.pmf(ones, queries, ndtr(at)) for at in (threshold, threshold - mu))
    return delta_of(p, q, epsilon)


@given(
    mu=st.floats(0.01, 2.0),
    queries=st.integers(1, 60),
    threshold=st.floats(-6, 6),
    epsilon=st.floats(0, 12),
)
@settings(max_examples=30)
def test_no_threshold_tells_neighbours_apart_better_than_the_profile_says(
    mu: float, queries: int, threshold: float, epsilon: float
) -> None:
    bound = winner_profile(ONE_BIT, mu, queries).delta(epsilon)
    assert _of_one_threshold(mu, queries, threshold, epsilon) <= bound * (1 + 1e-9) + 1e-13
    assert bound <= delta_of_epsilon(epsilon, mu * math.sqrt(queries)) * (1 + 1e-6)


@pytest.mark.long
def test_the_profile_is_close_to_what_one_threshold_reaches() -> None:
    """Five hundred bits at the best fixed threshold: the certificate, void included, is one per cent above."""
    reached = _of_one_threshold(1 / 25, 500, 0.0, 2.0757)
    assert reached == pytest.approx(1e-3, rel=1e-3)
    assert winner_profile(ONE_BIT, 1 / 25, 500).epsilon(1e-3) <= 2.0757 * 1.01


def _adaptive(pairs: list[tuple[Floats, Floats]], y: float, queries: int) -> float:
    """W by its definition, without void, over finitely many choices: no grid of y, no chord, no tangent."""
    if queries == 0:
        return max(0.0, 1 - y)
    return max(
        sum(float(a) * _adaptive(pairs, y * float(b / a), queries - 1) for a, b in zip(p, q, strict=True) if a > 0)
        for p, q in pairs
    )


@pytest.mark.parametrize(("change", "mu"), [(ONE_BIT, 0.3), (ONE_BIT, 1.0), (SWAP, 0.3), (SWAP, 1.0)])
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_no_adaptive_choice_of_thresholds_is_above_the_profile(change: Change, mu: float, queries: int) -> None:
    at = mu / 2 + np.linspace(-2, 2, 9)
    cuts = itertools.combinations_with_replacement(at, 2) if change == SWAP else ((one,) for one in at)
    pairs = []
    for cut in cuts:
        edges = np.array([-np.inf, *cut, np.inf])
        pairs.append((np.diff(ndtr(edges)), np.diff(ndtr(edges - mu))))
    pairs = pairs if change == ONE_BIT or queries < 3 else pairs[::3]
    profile = winner_profile(change, mu, queries)
    for epsilon in (0.0, 0.2, 0.7, 1.5, 3.0):
        reached = _adaptive(pairs, math.exp(epsilon), queries)
        assert reached <= profile.delta(epsilon) * (1 + 1e-9)
        assert profile.delta(epsilon) <= delta_of_epsilon(epsilon, mu * math.sqrt(queries)) * (1 + 1e-6)


def _law_of_the_winner(counts: tuple[int, ...], noise: Floats, threshold: int | None) -> Floats:
    """P of each class, ties to the lowest, and of no answer: by the distributions of maxima, exactly."""
    reach = len(noise) // 2
    lowest, highest = min(counts) - reach, max(counts) + reach
    values = np.arange(lowest, highest + 1)
    laws = []
    for count in counts:
        law = np.zeros(len(values))
        law[count - reach - lowest : count + reach + 1 - lowest] = noise
        laws.append(law)
    below = [np.cumsum(law) - law for law in laws]
    up_to = [np.cumsum(law) for law in laws]
    reaches = np.ones(len(values)) if threshold is None else (values >= threshold).astype(float)
    won = []
    for c in range(len(counts)):
        beaten = np.prod([*below[:c], *up_to[c + 1 :]], axis=0)
        won.append(float((laws[c] * reaches * beaten).sum()))
    return np.array([*won, max(0.0, 1 - sum(won))])


SCALE, VARIANCE = 3, 16.0
_NOISE = discrete_gaussian(math.sqrt(VARIANCE), 40)


def _event(
    change: Change,
    classes: int,
    queries: int,
    *,
    is_duel: bool,
    scale: int = SCALE,
    sigma_grid: float = math.sqrt(VARIANCE),
    shares: int = 1,
) -> IntegerWinner:
    return IntegerWinner(
        squared_sensitivity=queries * (2 if change == SWAP else 1),
        largest_change=1,
        grid_scale=scale,
        share_sigma_grid=sigma_grid,
        noise_contributors=shares,
        coordinates=queries * classes,
        change=change,
        queries=queries,
        is_duel=is_duel,
    )


@given(
    others=st.lists(st.integers(0, 6), min_size=2, max_size=5),
    change=st.sampled_from([ONE_BIT, SWAP]),
    threshold=st.none() | st.integers(0, 20),
    epsilon=st.floats(0, 4),
    data=st.data(),
)
@settings(max_examples=150)
def test_the_winner_of_integer_sums_is_within_its_price_for_every_configuration(
    others: list[int], change: Change, threshold: int | None, epsilon: float, data: st.DataObject
) -> None:
    """Ballots of the others, a vote that arrives or moves, ties, an abstaining threshold: law by law, both ways."""
    classes = len(others)
    to = data.draw(st.integers(0, classes - 1))
    with_vote = [SCALE * one + (SCALE if c == to else 0) for c, one in enumerate(others)]
    origin = data.draw(st.integers(0, classes - 1)) if change == SWAP else None
    without = [SCALE * one + (SCALE if c == origin else 0) for c, one in enumerate(others)]
    p, q = (_law_of_the_winner(tuple(one), _NOISE, threshold) for one in (with_vote, without))
    is_duel = classes == 2 and threshold is None
    event = _event(change, classes, 1, is_duel=is_duel)
    bound = winner_profile(ONE_BIT if is_duel else change, event.mu, 1).delta(epsilon)
    assert delta_of(p, q, epsilon) <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.long
@pytest.mark.parametrize(("change", "classes"), [(ONE_BIT, 2), (ONE_BIT, 3), (SWAP, 2), (SWAP, 3), (SWAP, 4)])
def test_two_winners_chosen_adaptively_from_integer_sums_are_within_their_price(change: Change, classes: int) -> None:
    """The best second configuration for every outcome of the best first one, both over all small ballots."""
    pairs = []
    for others in itertools.product(range(0, 7, 3), repeat=classes):
        counts = [SCALE * one for one in others]
        moved = list(counts)
        moved[0] += SCALE
        if change == SWAP:
            counts[1] += SCALE
        pairs.append((_law_of_the_winner(tuple(moved), _NOISE, None), _law_of_the_winner(tuple(counts), _NOISE, None)))
    pairs += [(q, p) for p, q in pairs]
    is_duel = classes == 2
    event = _event(change, classes, 2, is_duel=is_duel)
    profile = winner_profile(ONE_BIT if is_duel else change, event.mu, 2)
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        assert _adaptive(pairs, math.exp(epsilon), 2) <= profile.delta(epsilon) * (1 + 1e-9) + 1e-12


@given(
    change=st.sampled_from([ONE_BIT, SWAP]),
    mu=st.floats(0.02, 1.5),
    queries=st.integers(1, 60),
    epsilon=st.floats(0, 60),
)
@settings(max_examples=12)
def test_the_pair_is_above_the_profile_everywhere_and_never_above_the_sums(
    change: Change, mu: float, queries: int, epsilon: float
) -> None:
    pair = winner_pair(change, mu, queries)
    gaussian = delta_of_epsilon(epsilon, math.sqrt(pair.mu_squared))
    assert winner_profile(change, mu, queries).delta(epsilon) <= gaussian * (1 + 1e-7) + pair.delta_0
    assert pair.mu_squared <= mu * mu * queries * (1 + 1e-9) + 1e-9


@pytest.mark.long
def test_many_queries_are_the_sum_of_blocks() -> None:
    mu, size = 0.01, BLOCK[ONE_BIT]
    one, three, rest, many = (winner_pair(ONE_BIT, mu, n) for n in (size, 3 * size, 3 * size + 1, 200 * size + 1))
    assert three == Pair(3 * one.mu_squared, pytest.approx(3 * one.delta_0))
    assert three.mu_squared < rest.mu_squared <= three.mu_squared + 2 * Fraction(mu) ** 2
    assert many.mu_squared == 201 * one.mu_squared
    assert float(one.mu_squared) < 0.67 * mu * mu * size


def _published(change: Change, queries: int, classes: int = 10) -> IntegerWinner:
    """As a task of three agents, one of whom may collude, would ask: 25 votes of noise."""
    sigma_grid = 100 * 25 / math.sqrt(2)
    return _event(change, classes, queries, is_duel=classes == 2, scale=100, sigma_grid=sigma_grid, shares=2)


@pytest.mark.parametrize(("change", "mu"), [(ONE_BIT, 1 / 25), (SWAP, math.sqrt(2) / 25)])
def test_the_integer_mechanism_has_the_certified_price(change: Change, mu: float) -> None:
    certified = _epsilon(winner_pair(change, mu, 40), 1e-4)
    assert certified <= epsilon_bound(_published(change, 40), 1e-4) <= 1.001 * certified


def test_the_winner_of_two_classes_is_the_sign_of_their_difference_and_costs_less_again() -> None:
    two, ten = (epsilon_bound(_published(ONE_BIT, 100, classes), 1e-5) for classes in (2, 10))
    assert two < 0.75 * ten
    assert two < 0.6 * epsilon_of_delta(1e-5, math.sqrt(100) / 25)


def test_what_cannot_be_priced_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="queries"):
        winner_profile(ONE_BIT, 0.1, 0)
    with pytest.raises(InvalidSetting, match="mu must be"):
        winner_profile(ONE_BIT, math.nan, 1)
    with pytest.raises(InvalidSetting, match="no winner is known"):
        winner_profile("all", 0.1, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="queries"):
        winner_pair(ONE_BIT, 0.1, 0)


@given(
    mu=st.floats(0.05, 3.0),
    change=st.sampled_from([ONE_BIT, SWAP]),
    kinks=st.lists(st.tuples(st.floats(0.01, 20.0), st.floats(0.01, 1.0)), min_size=1, max_size=6),
    at=st.lists(st.floats(-8, 8), min_size=4, max_size=4),
    y=st.floats(0.05, 20.0),
)
@settings(max_examples=200)
def test_no_cuts_are_above_the_best_crossings_of_tangents(
    mu: float, change: Change, kinks: list[tuple[float, float]], at: list[float], y: float
) -> None:
    """For whatever convex, decreasing W: so no cut between those of the grid is forgotten, of classes or of void."""
    ends, weights = np.array(kinks).T

    def after(p: Floats, q: Floats) -> Floats:
        safe = np.where(p > 0, p, 1.0)
        inner = np.maximum(0.0, 1 - y * (q / safe)[..., None] / ends) @ (weights / weights.sum())
        return np.asarray(np.where(p > 0, p * inner, 0.0))

    edges = np.array([-np.inf, *sorted(at[: 4 if change == SWAP else 3]), np.inf])
    p, q = np.diff(ndtr(edges)), np.diff(ndtr(edges - mu))
    reached = after(p[1:-1], q[1:-1]).sum() + np.maximum(0.0, p - y * q)[[0, -1]].sum()
    cuts = _cuts(mu)
    before, behind = _void(cuts, np.array([y]))
    bound = _largest(change, (after(*one)[:, None] for one in _stretches(cuts)), before, behind)
    assert reached <= bound[0] * (1 + 1e-12) + 1e-15


def test_the_largest_chain_is_that_of_all_chains_one_by_one() -> None:
    rng = np.random.default_rng(5)
    for change, outcomes in ((ONE_BIT, 2), (SWAP, 3)):
        size = 6
        table = rng.random((size, size, 4))
        before, after = rng.random((2, size, 4))
        found = _largest(change, (table[i, i + 1 :] for i in range(size)), before, after)
        chains = itertools.combinations_with_replacement(range(size), outcomes + 1)
        every = [
            before[chain[0]] + sum(table[i, k] for i, k in itertools.pairwise(chain) if i < k) + after[chain[-1]]
            for chain in chains
        ]
        np.testing.assert_allclose(found, np.max(every, axis=0), rtol=1e-12)
