"""The bound for integer noise against exact enumeration: no sampling, so no false alarms.

The oracle adds up probabilities: laws of sums of discrete Gaussians by convolution, and the exact
delta at a given epsilon as the hockey-stick divergence sum max(P - e^epsilon Q, 0), in both directions.
The Renyi conversions are checked against opendp and against the exact value that they must exceed.
"""

from __future__ import annotations

import math

import numpy as np
import opendp.prelude as dp
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labeler.accounting.events import GaussianSum, IntegerSum
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.accounting.integer import (
    epsilon_bound,
    improved_epsilon,
    papers_epsilon,
    smoothing_error,
    sum_of_shares_error,
)
from labeler.errors import InvalidSetting, UnsafeGrid
from labeler.task import Task
from tests.oracles.integers import delta_of, discrete_gaussian, mass_beyond, shifted, sum_of


def _event(squared: int, change: int, scale: int, sigma: float, shares: int, coordinates: int = 1) -> IntegerSum:
    return IntegerSum(squared, change, scale, sigma, shares, coordinates)


@pytest.mark.parametrize(("sigma", "shares"), [(0.6, 3), (0.8, 7), (1.0, 2), (1.0, 40), (1.3, 5), (2.0, 4)])
def test_a_sum_of_shares_is_one_discrete_gaussian_up_to_tau(sigma: float, shares: int) -> None:
    law = sum_of(discrete_gaussian(sigma, 14), shares)
    centre = len(law) // 2
    # Where truncating the shares at 14 cannot matter.
    y = np.arange(-7, 8)
    whole = np.exp(-(np.arange(-400, 401) ** 2) / (2 * shares * sigma**2)).sum()
    one = np.exp(-(y**2) / (2 * shares * sigma**2)) / whole
    assert np.abs(np.log(law[centre + y] / one)).max() <= sum_of_shares_error(sigma, shares) + 1e-9


@given(sigma=st.floats(0.5, 3), shares=st.integers(1, 300))
def test_tau_bounds_the_series_of_proposition_14(sigma: float, shares: int) -> None:
    j = np.arange(1, shares)
    series = 10 * np.exp(-2 * np.pi**2 * sigma**2 * j / (j + 1)).sum()
    assert series <= sum_of_shares_error(sigma, shares) * (1 + 1e-12)


@pytest.mark.parametrize("variance", [6.0, 10.0, 40.0])
@pytest.mark.parametrize("smoothing", [0.3, 0.5, 0.75])
def test_smoothing_continuous_noise_gives_the_discrete_gaussian_up_to_twice_kappa(
    variance: float, smoothing: float
) -> None:
    # With small smoothing variances the error is large enough to be seen; the formula is the same at 3.
    kappa = 2 * sum(math.exp(-2 * math.pi**2 * smoothing * j**2) for j in range(1, 20))
    y = np.linspace(-80, 80, 80_001)
    density = np.exp(-(y**2) / (2 * (variance - smoothing))) / math.sqrt(2 * math.pi * (variance - smoothing))
    nearby = np.rint(y)[None, :] + np.arange(-12, 13)[:, None]
    normaliser = np.exp(-((nearby - y) ** 2) / (2 * smoothing)).sum(axis=0)
    points = np.arange(-9, 10)
    kernel = np.exp(-((points[:, None] - y) ** 2) / (2 * smoothing)) / normaliser
    law = (kernel * density).sum(axis=1) * (y[1] - y[0])
    z = np.arange(-400, 401)
    expected = np.exp(-(points**2) / (2 * variance)) / np.exp(-(z**2) / (2 * variance)).sum()
    error = np.abs(np.log(law / expected)).max()
    assert error <= 2 * kappa + 1e-9
    assert smoothing_error() < 1e-24


@settings(max_examples=60)
@given(
    sigma=st.floats(3, 15),
    shares=st.integers(1, 4),
    shift=st.integers(1, 30),
    delta=st.floats(-9, -1).map(lambda exponent: 10.0**exponent),
)
def test_the_bound_holds_for_one_count(sigma: float, shares: int, shift: int, delta: float) -> None:
    epsilon = epsilon_bound(_event(1, 1, shift, sigma, shares), delta)
    assert math.isfinite(epsilon) or shift > 4 * sigma
    law = sum_of(discrete_gaussian(sigma, math.ceil(13 * sigma)), shares)
    if math.isfinite(epsilon):
        assert delta_of(*shifted(law, shift), epsilon) <= delta * (1 + 1e-9)
    continuous = epsilon_of_delta(delta, shift / (sigma * math.sqrt(shares)))
    assert epsilon >= continuous


@settings(max_examples=25)
@given(
    sigma=st.floats(3, 9),
    shares=st.integers(1, 3),
    scale=st.integers(1, 16),
    delta=st.floats(-7, -1).map(lambda exponent: 10.0**exponent),
)
def test_the_bound_holds_when_a_vote_moves_between_two_classes(
    sigma: float, shares: int, scale: int, delta: float
) -> None:
    epsilon = epsilon_bound(_event(2, 1, scale, sigma, shares, coordinates=2), delta)
    assume(math.isfinite(epsilon))
    # The reach leaves room for the shift: truncating the oracle itself must not show.
    reach = math.ceil(8 * sigma) + scale
    p, q = shifted(sum_of(discrete_gaussian(sigma, reach), shares), scale)
    assert delta_of(np.outer(p, q), np.outer(q, p), epsilon) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(("queries", "sigma", "scale"), [(1, 20.0, 10), (50, 60.0, 10), (206, 100.0, 4)])
def test_dp_accounting_agrees_on_compositions_of_the_discrete_gaussian(queries: int, sigma: float, scale: int) -> None:
    loss = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        sigma, sensitivity=scale, value_discretization_interval=1e-5
    )
    theirs = loss.self_compose(queries).get_epsilon_for_delta(1e-4)
    ours = epsilon_bound(_event(queries, 1, scale, sigma, 1, queries), 1e-4)
    # Theirs is itself an upper bound with a discretisation error of its own; ours pays 3 grid units of variance.
    assert theirs * (1 - 1e-4) <= ours <= theirs * (1 + 4 / sigma**2 + 1e-4)


@settings(max_examples=40)
@given(
    queries=st.integers(1, 40),
    shift=st.integers(1, 40),
    reach_sigmas=st.floats(5, 10),
    delta=st.floats(-6, -1).map(lambda exponent: 10.0**exponent),
)
def test_the_bound_holds_for_a_truncated_sampler_and_many_queries(
    queries: int, shift: int, reach_sigmas: float, delta: float
) -> None:
    # One share per coordinate: the privacy loss of noise x under P is (2 x shift + shift^2) / (2 sigma^2), affine in
    # x, so queries compose by convolving x. Cutting the law at a reach adds an infinite loss beyond it, nothing else.
    sigma = 20.0
    reach = math.floor(reach_sigmas * sigma)
    law = discrete_gaussian(sigma, reach)
    variation = mass_beyond(sigma, reach)
    epsilon = epsilon_bound(_event(queries, 1, shift, sigma, 1, queries), delta, total_variation=variation)
    if not math.isfinite(epsilon):
        assert reach_sigmas < 9.6
        return
    kept = law[: max(0, len(law) - shift)]  # noise small enough that Q could have produced the sum too
    composed = sum_of(kept, queries)
    total = -reach * queries + np.arange(len(composed))  # the sum of the noises under P
    loss = (2 * total * shift + queries * shift**2) / (2 * sigma**2)
    finite = float((composed * np.maximum(-np.expm1(np.minimum(epsilon - loss, 0)), 0)).sum())
    assert finite + (1 - float(kept.sum()) ** queries) <= delta * (1 + 1e-6)


@settings(max_examples=60)
@given(
    sigma=st.floats(4, 12),
    shares=st.integers(1, 3),
    moved=st.floats(0.5, 8),
    reach_sigmas=st.floats(5, 11),
    delta=st.floats(-9, -1).map(lambda exponent: 10.0**exponent),
)
def test_the_bound_holds_for_few_truncated_shares_and_a_change_near_their_reach(
    sigma: float, shares: int, moved: float, reach_sigmas: float, delta: float
) -> None:
    """The largest change decides how far into the tails a proof looks: taken for half of what it is, this fails."""
    shift, reach = math.ceil(moved * sigma * shares), math.floor(reach_sigmas * sigma)
    variation = mass_beyond(sigma, reach)
    epsilon = epsilon_bound(_event(1, 1, shift, sigma, shares), delta, total_variation=variation)
    assume(epsilon < 600)
    p, q = shifted(sum_of(discrete_gaussian(sigma, reach), shares), shift)
    assert delta_of(p, q, epsilon) <= delta * (1 + 1e-6)


def test_a_large_epsilon_is_still_certified_when_no_single_answer_gives_the_agent_away() -> None:
    # Q = 206, k = 50, sigma = 25 at agent level: e^epsilon is 1e224, far beyond what total variation alone could cover.
    event = _event(206 * 50**2, 50, 23, 23 * 25 / math.sqrt(2), 2, 2060)
    continuous = epsilon_of_delta(1e-4, math.sqrt(206) * 50 / 25)
    assert continuous < epsilon_bound(event, 1e-4) < continuous * 1.0001


def test_nothing_is_promised_when_an_agent_outvotes_the_reach_of_the_sampler() -> None:
    # 1000 votes against a noise of 25: beyond the reach of the sampler the truncated laws do not even overlap.
    assert epsilon_bound(_event(206 * 1000**2, 1000, 16, 400.0, 1, 2060), 1e-4) == math.inf


@settings(max_examples=40)
@given(queries=st.integers(1, 1000), delta=st.floats(-8, -2).map(lambda exponent: 10.0**exponent))
def test_the_bound_grows_with_queries_and_shrinks_with_delta(queries: int, delta: float) -> None:
    def bound(asked: int, at: float) -> float:
        return epsilon_bound(_event(2 * asked, 1, 16, 400.0, 1, 10 * asked), at)

    assert bound(queries, delta) <= bound(queries + 1, delta)
    assert bound(queries, delta) >= bound(queries, delta * 2)


def test_a_delta_of_which_no_part_is_a_number_buys_no_finite_bound() -> None:
    smallest = 5e-324
    for delta in (smallest, 2 * smallest, 1e-320):
        assert epsilon_bound(_event(10, 1, 16, 400.0, 1), delta) == math.inf
    assert epsilon_bound(_event(10, 1, 16, 400.0, 1), 1e-20) < math.inf


def test_a_coarse_grid_loses_the_guarantee_and_is_refused() -> None:
    # 1000 shares of variance 0.5 were meant to give a variance of 500, worth 0.016 (Renyi divergence of order 16).
    # What can be proved for 10 classes is an additional 10 tau = 6.4, on either side.
    j = np.arange(1, 1000)
    tau = 10 * np.exp(-2 * np.pi**2 * 0.5 * j / (j + 1)).sum()
    assert 16 / (2 * 500) == 0.016
    assert round(10 * tau, 1) == 6.4
    assert epsilon_bound(_event(1, 1, 1, math.sqrt(0.5), 1000, 10), 0.02) > 6.4

    # On a still coarser grid the loss is real, not only unproved: shares of variance 0.05 are nearly always 0.
    law = sum_of(discrete_gaussian(math.sqrt(0.05), 6), 1000)
    points = np.arange(len(law)) - len(law) // 2
    assert (points**2 * law).sum() < 0.1  # where 50 was meant
    assert delta_of(*shifted(law, 1), 1.0) > 0.8
    assert delta_of_epsilon(1.0, 1 / math.sqrt(50)) < 1e-10

    with pytest.raises(UnsafeGrid, match="Leave grid_scale out"):
        _ = Task(
            name="coarse",
            method="knn",
            classes=("a", "b"),
            sigma_votes=math.sqrt(500),
            delta=1e-4,
            max_queries=1,
            agents=1000,
            grid_scale=1,
        ).scale


def test_the_subgaussian_step_of_the_bulk_bound_holds() -> None:
    # E exp(l X) <= exp(l^2 s^2 / 2) for the discrete Gaussian, at scales small enough for the difference to show.
    for sigma in (0.5, 0.9, 2.0):
        law, x = discrete_gaussian(sigma, 60), np.arange(-60, 61)
        slopes = np.linspace(0, 3, 61)
        moments = (law * np.exp(slopes[:, None] * x)).sum(axis=1)
        assert (moments <= np.exp(slopes**2 * sigma**2 / 2) * (1 + 1e-12)).all()


# The papers' conversions, by way of Renyi divergence.


@settings(max_examples=60)
@given(
    sigma=st.floats(-1, 3).map(lambda exponent: 10.0**exponent),
    delta=st.floats(-12, -1).map(lambda exponent: 10.0**exponent),
)
def test_each_conversion_is_looser_than_the_next_and_all_exceed_the_exact_value(sigma: float, delta: float) -> None:
    event = GaussianSum(2, sigma)
    exact = epsilon_of_delta(delta, math.sqrt(event.mu_squared))
    improved = improved_epsilon(event, delta)
    assert exact <= improved * (1 + 1e-9) + 1e-12
    assert improved <= papers_epsilon(event, delta)


@pytest.mark.parametrize(("queries", "sigma", "delta"), [(206, 25.0, 1e-4), (109, 15.0, 1e-4), (500, 30.0, 1e-3)])
def test_opendp_converts_the_same_noise_to_the_same_improved_epsilon(queries: int, sigma: float, delta: float) -> None:
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=dp.i64)), dp.l2_distance(T=dp.i64)
    measurement = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=sigma))
    # One change of L2 norm sqrt(queries) is the same zCDP as `queries` changes of norm 1; 14 and 10 keep it an integer.
    norm = math.isqrt(queries)
    theirs = measurement.map(norm).epsilon(delta)
    ours = improved_epsilon(GaussianSum(norm**2, sigma), delta)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert epsilon_of_delta(delta, norm / sigma) < theirs


@pytest.mark.parametrize("bad", [0.0, 1.0, math.nan, -1.0])
def test_a_malformed_delta_is_refused(bad: float) -> None:
    steps = (
        lambda: epsilon_bound(_event(1, 1, 16, 400.0, 1), bad),
        lambda: papers_epsilon(GaussianSum(1, 1.0), bad),
        lambda: improved_epsilon(GaussianSum(1, 1.0), bad),
    )
    for step in steps:
        with pytest.raises(InvalidSetting, match="delta"):
            step()
