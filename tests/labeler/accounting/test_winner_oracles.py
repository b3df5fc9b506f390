"""The price of winners against two accountants of other origin, for noisy argmax as it is: no thresholds, no tangents.

The law of the winner of given counts is a quadrature. Of it are computed

* exact Renyi divergences, as Chadha et al. (2024) audit private prediction with them: they add up over questions, and a
  privacy profile implies a bound on each of them,

    E_Q[(P/Q)^a] <= 1 + a (a - 1) (int_1^inf y^(a - 2) W(y) dy + int_1^inf y^(-a - 1) W(y) dy);

* privacy profiles of many questions, as Koskela, Redberg and Wang (2024) account for private selection with them:
  exactly, by enumeration of how often each winner comes, which the privacy loss distributions of `dp_accounting` must
  confirm, optimistic as they are here.

Both are about given configurations and must lie below the certificate, which is about the worst of all.

References:
    Chadha, Jagielski, Papernot, Choquette-Choo, Nasr 2024, Auditing private prediction. ICML.
    Koskela, Redberg, Wang 2024, Privacy profiles for private selection. ICML.
    Sason, Verdu 2016, f-divergence inequalities. IEEE Transactions on Information Theory 62 (the integral).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_two_probability_mass_functions
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr

from labeler.accounting.gaussian import deltas_of_epsilons
from labeler.accounting.winner import ONE_BIT, SWAP, Change
from tests.oracles.profiles import Profile, winner_profile

Floats = NDArray[np.float64]
_AT = np.linspace(-9, 9, 2001)
_DENSITY = np.exp(-(_AT**2) / 2) * (_AT[1] - _AT[0]) / math.sqrt(2 * math.pi)


def law_of_the_winner(counts: Floats) -> Floats:
    """P(class c has the largest of counts + N(0, 1)): integral of phi(t) prod_j Phi(t + c - j), by the trapezoid rule.

    Of analytic functions that vanish at both ends the rule is exact to machine precision.
    """
    # Equal counts win equally often.
    each, which = np.unique(counts, return_inverse=True)
    won = []
    for count in each:
        others = np.delete(counts, int(np.argmax(counts == count)))
        won.append(float((_DENSITY * np.exp(log_ndtr(_AT[:, None] + count - others).sum(axis=1))).sum()))
    return np.array(won)[which]


def neighbours(change: Change, mu: float, others: Floats) -> tuple[Floats, Floats]:
    """Laws of the winner where one vote of the first class is there or not, or went to the second class."""
    with_vote, without = others.astype(float).copy(), others.astype(float).copy()
    vote = mu if change == ONE_BIT else mu / math.sqrt(2)
    with_vote[0] += vote
    if change == SWAP:
        without[1] += vote
    return law_of_the_winner(with_vote), law_of_the_winner(without)


def moment(p: Floats, q: Floats, order: float) -> float:
    """E_Q[(P/Q)^order] of one winner, exactly: exp((order - 1) D_order)."""
    return float((p**order * q ** (1 - order)).sum())


def moment_of(profile: Profile, order: float) -> float:
    """The most that a profile allows, by its integral with the left end of each step: from above, W not increasing."""
    # Beyond the profile's grid the Gaussian of the sums is above the divergence; there its moments have ended, too.
    epsilons = np.linspace(0, profile.mu**2 * order + 12 * profile.mu, 4000)
    y = np.exp(epsilons)
    chords = np.interp(y, np.exp(profile.epsilons), profile.deltas)
    deltas = np.minimum(chords, deltas_of_epsilons(epsilons, profile.mu) * (1 + 1e-9))
    steps = [np.diff(y ** (order - 1)) / (order - 1), -np.diff(y**-order) / order]
    assert deltas[-1] * y[-1] ** order < 1e-12
    return 1 + order * (order - 1) * sum(float((step * deltas[:-1]).sum()) for step in steps)


@given(
    change=st.sampled_from([ONE_BIT, SWAP]),
    mu=st.floats(0.05, 0.3),
    others=st.lists(st.floats(-2, 2), min_size=2, max_size=6),
    queries=st.integers(1, 40),
    order=st.sampled_from([1.5, 2.0, 3.0]),
)
@settings(max_examples=40)
def test_no_exact_renyi_divergence_of_noisy_argmax_is_above_what_the_profile_allows(
    change: Change, mu: float, others: list[float], queries: int, order: float
) -> None:
    """Both directions, the same configuration at every question: moments multiply."""
    p, q = neighbours(change, mu, np.array(others))
    most = moment_of(winner_profile(change, mu, queries), order)
    for one, other in ((p, q), (q, p)):
        assert moment(one, other, order) ** queries <= most * (1 + 1e-7)


RACES = (
    [0.0] * 3,
    [0.0, -9.0, 0.0],
    [0.0, 0.0, -9.0],
    [1.0, 0.0, 0.0],
    [-1.0, 0.0, -1.0],
    [0.0] * 10,
    [2.5] + [0.0] * 99,
)
"""Close ones and clear ones; the best of a hundred rivals is nearly a fixed threshold, the worst for one bit."""

EPSILONS = (0.0, 0.5, 1.0, 2.0)


def composed_deltas(p: Floats, q: Floats, queries: int) -> list[float]:
    """delta(epsilon) of so many questions, exactly: over how often winners of each ratio p / q come."""
    _, group = np.unique(np.round(np.log(p / q), 10), return_inverse=True)
    laws = [np.log(np.bincount(group, law / law.sum())) for law in (p, q)]
    assert len(laws[0]) in (2, 3)
    times = np.indices((queries + 1,) * (len(laws[0]) - 1)).reshape(len(laws[0]) - 1, -1)
    times = np.vstack([times, queries - times.sum(axis=0)])[:, times.sum(axis=0) <= queries]
    ways = gammaln(queries + 1) - gammaln(times + 1).sum(axis=0)
    here, there = (ways + law @ times for law in laws)
    return [float(np.maximum(np.exp(here) - np.exp(there + epsilon), 0).sum()) for epsilon in EPSILONS]


def deltas_of_distributions(p: Floats, q: Floats, queries: int) -> list[float]:
    composed = from_two_probability_mass_functions(
        {number: math.log(chance) for number, chance in enumerate(q / q.sum())},
        {number: math.log(chance) for number, chance in enumerate(p / p.sum())},
        pessimistic_estimate=False,
        value_discretization_interval=1e-5,
    ).self_compose(queries)
    return [float(composed.get_delta_for_epsilon(epsilon)) for epsilon in EPSILONS]


COMPOSED = pytest.mark.parametrize(
    ("change", "mu", "queries"), [(ONE_BIT, 0.06, 200), (ONE_BIT, 0.2, 50), (SWAP, 0.12, 100)]
)


@COMPOSED
def test_composed_profiles_of_noisy_argmax_are_below_the_certificate_and_the_worst_is_near(
    change: Change, mu: float, queries: int
) -> None:
    profile, nearest = winner_profile(change, mu, queries), 0.0
    for others in RACES:
        for p, q in (laws := neighbours(change, mu, np.array(others))), laws[::-1]:
            for epsilon, reached in zip(EPSILONS, composed_deltas(p, q, queries), strict=True):
                certified = profile.delta(epsilon)
                assert reached <= certified * (1 + 1e-6) + 1e-10
                nearest = max(nearest, reached / certified if certified > 1e-8 else 0.0)
    assert nearest > (0.8 if change == ONE_BIT else 0.6)


@COMPOSED
def test_privacy_loss_distributions_confirm_what_is_enumerated(change: Change, mu: float, queries: int) -> None:
    """They round losses down to a hundred-thousandth, so epsilon by at most one of these per question."""
    p, q = neighbours(change, mu, np.array(RACES[3]))
    found, exact = deltas_of_distributions(p, q, queries), composed_deltas(p, q, queries)
    assert max(found) > 0.1
    for one, other in zip(found, exact, strict=True):
        assert other - 1e-5 * queries <= one <= other + 1e-9
