"""The discrete Gaussian sampler against its definition, an exact twin and an independent sampler; sums of vectors.

Statistical tests on our own samples use fixed seeds, so they pass or fail for ever; each would
reject a right sampler for one seed in a million. The comparison with opendp, whose randomness cannot
be fixed, rejects a right pair once in 10^9 runs.
"""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from benchmarks.sums import private_sum
from labeler import noise
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.integer import epsilon_bound
from labeler.errors import InvalidSetting, PrivacyRefusal, UnsafeGrid
from labeler.noise import DiscreteGaussian, VectorSum, noise_share, sampler_distance
from labeler.randomness import seeded_source
from tests.labeler.tasks import make_task

ALARM = 1e-6

KNOWN_ANSWERS = [948, 509, -66, 9, -391, 239, -461, -144]


class ScriptedSource:
    """Hands out the words it was given, in order, and knows how many are left."""

    is_seeded = True

    def __init__(self, words: list[int]) -> None:
        self.words = words

    def uint64(self, count: int) -> NDArray[np.uint64]:
        drawn, self.words = self.words[:count], self.words[count:]
        assert len(drawn) == count, "the sampler asked for more words than the script has"
        return np.array(drawn, dtype=np.uint64)

    def bytes(self, count: int) -> bytes:
        raise NotImplementedError


def exact_sample(thresholds: list[int], first: int, second: int) -> int:
    """The slow twin: one sample from 128 bits, by bisection over Python integers."""
    magnitude = bisect.bisect_right(thresholds, (first >> 1) << 64 | second)
    return -magnitude if first & 1 else magnitude


task_with = partial(make_task, k=5, sigma_votes=10.0, agents=4)


def pvalue_against_pmf(samples: NDArray[np.int64], sigma: float, *, bins: int = 400) -> float:
    """Chi-square of samples against the exact pmf, cells of at least 10 expected samples."""
    reach = math.ceil(12.5 * sigma)
    values = np.arange(-reach, reach + 1)
    pmf = np.exp(-0.5 * (values / sigma) ** 2)
    pmf /= pmf.sum()
    counts = np.bincount(samples + reach, minlength=len(values))
    width = max(1.0 / bins, 10 / len(samples))
    cells = np.unique(np.floor(np.cumsum(pmf) / width * (1 - 1e-12)), return_inverse=True)[1]
    expected = np.bincount(cells, weights=pmf) * len(samples)
    observed = np.bincount(cells, weights=counts)
    # Gaps in the numbering join neighbors; the last cell may still be small.
    if expected[-1] < 5:
        expected = np.append(expected[:-2], expected[-2:].sum())
        observed = np.append(observed[:-2], observed[-2:].sum())
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.7, 10.0, 400.0])
def test_thresholds_are_the_exact_distribution_to_the_last_bit(sigma: float) -> None:
    """Against mpmath's exponential of every entry at 600 bits, summed there."""
    context = mpmath.MPContext()
    context.prec = 600
    two_variance = 2 * context.mpf(sigma) ** 2
    reach = math.ceil(12.5 * sigma)
    weights = [context.exp(-(context.mpf(m) ** 2) / two_variance) * (2 if m else 1) for m in range(reach + 1)]
    total = context.fsum(weights)
    sums, running = [], context.mpf(0)
    for weight in weights[:-1]:
        running += weight
        sums.append(int(context.floor(context.ldexp(running / total, 127))))
    assert noise._thresholds(sigma) == sums


@pytest.mark.parametrize("sigma", [0.5, 3.0, 100.0, 400.0, 1000.0])
def test_total_variation_bounds_the_true_distance(sigma: float) -> None:
    """The distance, from the thresholds in use, summed over magnitudes at 400 bits."""
    context = mpmath.MPContext()
    context.prec = 400
    gaussian = DiscreteGaussian(sigma)
    thresholds = [0, *noise._thresholds(sigma), 1 << 127]
    two_variance = 2 * context.mpf(sigma) ** 2
    weights = [context.exp(-(context.mpf(m) ** 2) / two_variance) * (2 if m else 1) for m in range(gaussian.reach + 1)]
    beyond = gaussian.reach + 1
    while weights[-1] * sigma > context.mpf(2) ** -300:
        weights.append(2 * context.exp(-(context.mpf(beyond) ** 2) / two_variance))
        beyond += 1
    total = context.fsum(weights)
    drawn = [context.mpf(high - low) / 2**127 for low, high in itertools.pairwise(thresholds)]
    drawn += [context.mpf(0)] * (len(weights) - len(drawn))
    distance = context.fsum(abs(p - w / total) for p, w in zip(drawn, weights, strict=True)) / 2
    assert 0 < distance <= sampler_distance(sigma) <= 2.0**-100


@pytest.mark.parametrize("sigma", [0.5, 2.5, 400.0, 5000.0])
def test_the_sampler_inverts_the_thresholds_exactly(sigma: float) -> None:
    """Random words, and first words equal to, just below and just above every kind of threshold."""
    thresholds = noise._thresholds(sigma)
    table = noise._table(sigma)
    generator = np.random.default_rng(1)
    firsts = [int(word) for word in generator.integers(0, 2**64, 2000, dtype=np.uint64)]
    places = generator.integers(0, len(thresholds), 200)
    for place in {0, 1, len(thresholds) // 3, len(thresholds) - 1, *places.tolist()}:
        high = thresholds[place] >> 64
        firsts += [(upper << 1) | sign for upper in (high - 1, high, high + 1) for sign in (0, 1) if 0 <= upper < 2**63]
    edges = (np.arange(64, dtype=np.uint64) << np.uint64(58)).tolist()
    firsts += edges + [(edge - 1) % 2**64 for edge in edges]
    uppers = set((table.high << np.uint64(1)).tolist())
    ties = 0
    for first in firsts:
        # A tie takes a second word: one of the threshold's own lower half, one less, and the two ends.
        is_tie = first & ~1 in uppers
        ties += is_tie
        at = bisect.bisect_left(thresholds, (first >> 1) << 64)
        low = thresholds[min(at, len(thresholds) - 1)] & (2**64 - 1)
        for second in {0, low, (low - 1) % 2**64, 2**64 - 1} if is_tie else {0}:
            source = ScriptedSource([first, second] if is_tie else [first])
            drawn = DiscreteGaussian(sigma).sample(source, 1)
            assert drawn[0] == exact_sample(thresholds, first, second)
            assert source.words == []
    assert ties > 10


def test_several_ties_in_one_chunk_each_get_a_word_of_their_own() -> None:
    thresholds = noise._thresholds(400.0)
    firsts = [(thresholds[place] >> 64) << 1 for place in (0, 7, 500)]
    words = [*firsts, 2**63, 0, 2**64 - 1, 0]
    source = ScriptedSource(list(words))
    drawn = DiscreteGaussian(400.0).sample(source, 4)
    expected = [exact_sample(thresholds, first, second) for first, second in zip(words, [*words[4:], 0], strict=False)]
    assert drawn.tolist() == expected[:4]
    assert source.words == []


@pytest.mark.parametrize(("sigma", "seed"), [(0.5, 11), (1.0, 12), (3.3, 13), (400.0, 14), (20_000.0, 15)])
def test_samples_follow_the_exact_distribution(sigma: float, seed: int) -> None:
    samples = DiscreteGaussian(sigma).sample(seeded_source(seed), 1_000_000)
    assert pvalue_against_pmf(samples, sigma) > ALARM


@pytest.mark.parametrize(("sigma", "count"), [(4.0, 40_000), (400.0, 25_000)])
def test_our_samples_and_opendps_are_of_one_distribution(sigma: float, count: int) -> None:
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    theirs = np.array(dp.m.make_gaussian(*space, scale=sigma)([0] * count))
    ours = DiscreteGaussian(sigma).sample(seeded_source(19), count)
    edges = np.unique(np.rint(stats.norm.ppf(np.linspace(0.01, 0.99, 50)) * sigma)) + 0.5
    table = np.array([np.bincount(np.searchsorted(edges, drawn), minlength=len(edges) + 1) for drawn in (ours, theirs)])
    assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > 1e-9


def test_a_seeded_source_gives_known_samples() -> None:
    """Known answers, recorded from this implementation: stored noise must replay under every later version."""
    drawn = DiscreteGaussian(400.0).sample(seeded_source(0), 8)
    assert drawn.tolist() == KNOWN_ANSWERS
    thresholds = noise._thresholds(400.0)
    words = seeded_source(0).uint64(8).tolist()
    assert drawn.tolist() == [exact_sample(thresholds, word, 0) for word in words]


def test_a_shape_is_only_a_view_of_the_same_samples() -> None:
    flat = DiscreteGaussian(10.0).sample(seeded_source(1), 100_000)
    np.testing.assert_array_equal(flat.reshape(250, 400), DiscreteGaussian(10.0).sample(seeded_source(1), (250, 400)))
    source = seeded_source(1)
    halves = [DiscreteGaussian(10.0).sample(source, count) for count in (33_333, 66_667)]
    np.testing.assert_array_equal(flat, np.concatenate(halves))
    with pytest.raises(InvalidSetting, match="negative"):
        DiscreteGaussian(10.0).sample(seeded_source(1), (-1, 2))


@pytest.mark.parametrize("sigma", [0.0, -1.0, 0.49, 100_001.0, math.inf, -math.inf, math.nan, 5e-324])
def test_a_sigma_out_of_bounds_is_refused(sigma: float) -> None:
    with pytest.raises(InvalidSetting, match="sigma_grid"):
        DiscreteGaussian(sigma)


def test_a_noise_share_has_the_tasks_shape_and_standard_deviation() -> None:
    task = task_with(colluding_agents=1)
    share = noise_share(task, seeded_source(21), 20_000)
    assert share.shape == (20_000, 3)
    assert share.dtype == np.int64
    assert pvalue_against_pmf(share.ravel(), task.share_sigma_grid) > ALARM


def test_noise_shares_of_the_certain_contributors_add_up_to_the_promised_sigma() -> None:
    """Two of four may collude or drop out: the noise of the other two has sigma_votes. False alarm one in a million."""
    task = task_with(colluding_agents=1, max_dropouts=1, sigma_votes=25.0)
    total = noise_share(task, seeded_source(22), 50_000) + noise_share(task, seeded_source(23), 50_000)
    variance = (total / task.scale).var()
    assert variance == pytest.approx(625, rel=stats.norm.isf(ALARM / 2) * math.sqrt(2 / total.size))


def test_a_batch_without_queries_or_a_grid_too_fine_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="at least one query"):
        noise_share(task_with(), seeded_source(1), 0)
    with pytest.raises(InvalidSetting, match="grid_scale"):
        noise_share(task_with(grid_scale=10**6), seeded_source(1), 1)


# Sums of real vectors: rounding is charged for, the noise is what the price was told, bad input is refused.


SPEC = VectorSum(dimension=40, largest_norm=3.0, sensitivity=0.2, sigma=0.5, agents=12, colluding_agents=3)

lengths = st.floats(0, 1, exclude_max=False)
vectors = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(size=SPEC.dimension))


def of_norm(vector: np.ndarray, norm: float) -> np.ndarray:
    return vector * (norm / np.linalg.norm(vector))


@given(at=vectors, step=vectors, inside=lengths, moved=lengths)
@settings(max_examples=300)
def test_vectors_on_neighbouring_data_round_to_integers_within_the_charge(at, step, inside, moved) -> None:
    """However x lies on the grid: |rint(S x) - rint(S x')| is at most what the event was told."""
    x = of_norm(at, inside * (SPEC.largest_norm - SPEC.sensitivity))
    y = x + of_norm(step, moved * SPEC.sensitivity)
    difference = SPEC.quantize(x) - SPEC.quantize(y)
    event = SPEC.event("instance")
    assert int(difference @ difference) <= event.squared_sensitivity
    assert int(np.abs(difference).max()) <= event.largest_change


@given(at=vectors, inside=lengths)
@settings(max_examples=100)
def test_a_vector_that_becomes_zero_moves_the_sum_within_the_agent_level_charge(at, inside) -> None:
    integers = SPEC.quantize(of_norm(at, inside * SPEC.largest_norm))
    event = SPEC.event("agent")
    assert int(integers @ integers) <= event.squared_sensitivity
    assert int(np.abs(integers).max()) <= event.largest_change


def test_products_of_long_vectors_are_rounded_and_charged_for() -> None:
    """Found by search: at R/s = 1e7 two products are rounded apart by more than a billionth of S s."""
    x, y = np.array([9994135.7896875]), np.array([9994134.7865625])
    sensitivity = 1.003124998882413
    assert Fraction(x[0]) - Fraction(y[0]) <= Fraction(sensitivity)
    spec = VectorSum(1, largest_norm=1e7, sensitivity=sensitivity, sigma=1.0, agents=1)
    moved = int(spec.quantize(x)[0] - spec.quantize(y)[0])
    assert moved == 1606 > spec.scale * sensitivity + 1
    event = spec.event("instance")
    assert moved <= event.largest_change
    assert moved**2 <= event.squared_sensitivity


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    ratio=st.floats(0, 12).map(lambda exponent: 10.0**exponent),
    dimension=st.integers(1, 5),
    unit=st.floats(1e-3, 1e3),
)
def test_the_bounds_hold_for_every_ratio_of_norm_and_sensitivity(
    seed: int, ratio: float, dimension: int, unit: float
) -> None:
    """By fractions: vectors of doubles whose exact distance is within the bound, divided by it in double precision."""
    rng = np.random.default_rng(seed)
    spec = VectorSum(dimension, largest_norm=ratio, sensitivity=1.0, sigma=1.0, agents=1)
    x = of_norm(rng.normal(size=dimension), (ratio - 1) * unit * rng.choice([0.0, 0.5, 1.0]))
    # The step is what doubles can tell apart at that length.
    y = x + of_norm(rng.normal(size=dimension) * rng.choice([0.0, 1.0], size=dimension) + 1e-9, unit * (1 - 2e-4))
    exact = sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(x, y, strict=True))
    assume(exact <= Fraction(unit) ** 2 and max(np.linalg.norm(x), np.linalg.norm(y)) <= ratio * unit)
    change = spec.quantize(x / unit) - spec.quantize(y / unit)
    event = spec.event("instance")
    assert sum(int(one) ** 2 for one in change) <= event.squared_sensitivity
    assert int(np.abs(change).max()) <= event.largest_change
    away, agent = spec.quantize(x / unit), spec.event("agent")
    assert sum(int(one) ** 2 for one in away) <= agent.squared_sensitivity
    assert int(np.abs(away).max()) <= agent.largest_change
    spec.check(away, "not within its own bound")


def test_the_grid_is_so_fine_that_rounding_adds_a_thousandth_to_the_sensitivity() -> None:
    for dimension in (7, 40, 1000):
        spec = VectorSum(dimension, largest_norm=3.0, sensitivity=0.2, sigma=0.5, agents=12)
        rounded = math.sqrt(spec.event().squared_sensitivity) / (spec.scale * spec.sensitivity)
        assert 1 < rounded < 1.00101
        assert 1600 <= spec.share_sigma_grid < 65_600


def test_the_certified_price_is_the_closed_form_and_a_little_above_it() -> None:
    for spec in (SPEC, VectorSum(12_810, 40.0, 1.9, 8.0, 1000, 500), VectorSum(10, 1.0, 2.0, 1.0, 2)):
        exact = epsilon_of_delta(1e-5, spec.sensitivity / spec.sigma)
        assert exact < epsilon_bound(spec.event(), 1e-5) < 1.01 * exact


def test_the_noise_that_colluders_cannot_subtract_is_the_sigma_that_was_priced() -> None:
    """40,000 numbers: a standard deviation off by more than 2 % has probability below 1e-7."""
    spec = VectorSum(dimension=40_000, largest_norm=1.0, sensitivity=1.0, sigma=0.7, agents=5, colluding_agents=2)
    zeros = [np.zeros(spec.dimension)] * spec.agents
    total = private_sum(spec, zeros, sources=[seeded_source(agent) for agent in range(5)])
    assert total.std() == pytest.approx(0.7 * math.sqrt(5 / 3), rel=0.02)
    known = sum(
        DiscreteGaussian(spec.share_sigma_grid).sample(seeded_source(agent), spec.dimension) for agent in range(2)
    )
    assert (total - known / spec.scale).std() == pytest.approx(0.7, rel=0.02)


@pytest.mark.parametrize("bad", [np.full(40, 1.0), np.full(40, np.nan), np.r_[np.inf, np.zeros(39)]])
def test_a_vector_beyond_the_bound_is_refused_without_its_norm(bad: np.ndarray) -> None:
    with pytest.raises(PrivacyRefusal, match="not finite or longer than 3") as refused:
        SPEC.quantize(bad)
    assert "6.3" not in str(refused.value)


def test_what_cannot_be_proved_is_not_made() -> None:
    with pytest.raises(InvalidSetting, match="more than twice the largest norm"):
        VectorSum(3, 1.0, 2.1, 1.0, 2)
    with pytest.raises(InvalidSetting, match="nobody whose noise"):
        VectorSum(3, 1.0, 1.0, 1.0, 2, colluding_agents=1, max_dropouts=1)
    with pytest.raises(InvalidSetting, match="sigma"):
        VectorSum(3, 1.0, 1.0, math.nan, 2)
    with pytest.raises(UnsafeGrid, match="no grid serves"):
        VectorSum(3, 1e12, 1.0, 1e-9, 2)
    with pytest.raises(UnsafeGrid, match="use less noise, or a larger epsilon"):
        VectorSum(3, 1.0, 1.0, 1e6, 2)  # nobody can set the grid of a vector
