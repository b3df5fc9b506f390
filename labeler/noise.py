"""Discrete Gaussian noise, drawn exactly and fast.

The privacy proof is about integers with an exactly stated distribution, so noise must not pass
through floating point: rounded continuous noise leaks through its low bits (Mironov 2012). Here a
sample is the inverse of a cumulative distribution whose thresholds are integers of 127 bits, built
in 256-bit fixed point; no float touches it. A table over the first bits of the uniform (Chen and
Asau 1974) answers nearly every draw with one look-up, so a core draws tens of millions a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.grid import THRESHOLD_BITS, check_sampled, noise_reach, sampler_distance
from labeler.randomness import ByteSource
from labeler.setting import Setting

_FRACTION_BITS = 256
_CHUNK = 1 << 15


@dataclass(frozen=True)
class DiscreteGaussian:
    """The discrete Gaussian on the integers: P(x) proportional to exp(-x^2 / (2 sigma^2)), mean zero.

    **What is drawn.** Let R = ceil(12.5 sigma), F(m) the probability of |x| <= m given |x| <= R, and
    T_m = floor(2^127 F(m)). One uniform 128-bit number gives a sign (one bit) and U (127 bits); the
    magnitude is the number of T_0 .. T_{R-1} that are <= U. The 128 bits are two words: the first
    holds the sign in its lowest bit and the upper 63 bits of U; the second, the lower 64 bits of U,
    is drawn only where the first leaves the comparison open (once in about 2^50 samples).

    **Distance from the exact distribution**: `labeler.grid.sampler_distance`, with its proof. It assumes uniform words;
    see labeler.randomness. The sampler's running time depends slightly on what it draws, so it must not be timed by an
    adversary sample by sample.

    Args:
        sigma_grid: the parameter sigma, in grid units, from 0.5 to 100,000. The standard deviation
            is sigma up to a factor 1 - 10^-6 for sigma >= 1, and exactly sigma to double precision from 3 on.

    Raises:
        InvalidSetting: sigma_grid is out of bounds or not finite.

    References:
        Canonne, Kamath, Steinke 2020, definition 1. Chen, Asau 1974. Mironov 2012.
    """

    sigma_grid: float

    def __post_init__(self) -> None:
        check_sampled(self.sigma_grid)
        object.__setattr__(self, "sigma_grid", float(self.sigma_grid))

    @property
    def reach(self) -> int:
        """The largest magnitude a sample can have, in grid units."""
        return noise_reach(self.sigma_grid)

    @property
    def variance(self) -> float:
        """Variance of the exact distribution, in squared grid units; never above sigma_grid^2."""
        magnitudes = np.arange(1, self.reach + 1, dtype=np.float64)
        weights = np.exp(-0.5 * np.square(magnitudes / self.sigma_grid))
        return float(2 * (np.square(magnitudes) * weights).sum() / (1 + 2 * weights.sum()))

    @property
    def total_variation(self) -> float:
        """Upper bound on the total variation distance of one sample from the exact distribution."""
        return sampler_distance(self.sigma_grid)

    def sample(self, source: ByteSource, shape: int | tuple[int, ...]) -> NDArray[np.int64]:
        """Draw independent samples.

        The same stream gives the same samples on every machine: that is how a retry replays noise.

        Args:
            source: where the bits come from; one 64-bit word per sample is consumed.
            shape: of the result.

        Returns:
            Noise in grid units, int64, of the shape asked for, each within `reach` of zero.

        Raises:
            InvalidSetting: a dimension is negative.
        """
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(dimension < 0 for dimension in dimensions):
            raise InvalidSetting(f"the shape of noise must not be negative, found {dimensions}")
        table = _table(self.sigma_grid)
        noise = np.empty(math.prod(dimensions), dtype=np.int64)
        # In chunks, so that words, look-ups and results stay in the processor's cache.
        for start in range(0, noise.size, _CHUNK):
            part = noise[start : start + _CHUNK]
            words = source.uint64(part.size)
            part[:] = table.magnitudes(words, source)
            part *= 1 - 2 * (words & np.uint64(1)).view(np.int64)
        return noise.reshape(dimensions)


def noise_share(task: Setting, source: ByteSource, num_queries: int) -> NDArray[np.int64]:
    """Draw one agent's share of the noise for a batch.

    Every agent draws one for every query, also where it has nobody near and no vote to cast: without
    it, the absence of a record would show.

    Args:
        task: its `share_sigma_grid`, S * sigma / sqrt(h), is the parameter of each sample.
        source: the agent's secret source for this batch; the same source on a retry gives the same noise.
        num_queries: queries in the batch.

    Returns:
        Noise in grid units, int64, shape (num_queries, num_classes).

    Raises:
        InvalidSetting: num_queries is less than 1, or the task's grid is finer than the sampler takes.
        UnsafeGrid: the task's grid is too coarse to prove anything.
    """
    if num_queries < 1:
        raise InvalidSetting(f"a batch has at least one query, found {num_queries}")
    return DiscreteGaussian(task.share_sigma_grid).sample(source, (num_queries, task.num_classes))


@dataclass(frozen=True, eq=False)
class _Table:
    """Thresholds T_m as two words, and for each prefix of U the magnitude where the prefix alone decides it.

    Attributes:
        high: upper 63 bits of each threshold, uint64, shape (reach,), ascending.
        low: lower 64 bits of each threshold, uint64, shape (reach,).
        guide: int32, shape (2^b,): the magnitude of every U with that b-bit prefix, or -1 where the
            prefix leaves it open.
        guide_shift: by how much a word is shifted to give its prefix.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    guide: NDArray[np.int32]
    guide_shift: np.uint64

    def magnitudes(self, words: NDArray[np.uint64], source: ByteSource) -> NDArray[np.int32]:
        magnitudes = self.guide[(words >> self.guide_shift).view(np.int64)]
        undecided = np.flatnonzero(magnitudes < 0)
        upper = words[undecided] >> np.uint64(1)
        found = self.high.searchsorted(upper, side="right")
        # Where nothing is below (found 0), index -1 is the largest threshold, which then is not equal either.
        for place in np.flatnonzero(self.high[found - 1] == upper):
            # The first word equals a threshold's: the second word decides. Almost never entered.
            first = self.high.searchsorted(upper[place], side="left")
            lower = source.uint64(1)[0]
            found[place] = first + self.low[first : found[place]].searchsorted(lower, side="right")
        magnitudes[undecided] = found
        return magnitudes


@lru_cache(maxsize=8)
def _table(sigma_grid: float) -> _Table:
    return _index(_thresholds(sigma_grid))


def _index(thresholds: list[int]) -> _Table:
    raw = b"".join(threshold.to_bytes(16, "little") for threshold in thresholds)
    words = np.frombuffer(raw, dtype="<u8").astype(np.uint64).reshape(-1, 2)
    low, high = np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])
    # A guide that is much longer than the table decides most draws; one beyond the cache decides them slowly.
    guide_bits = 16 if len(high) < 1 << 15 else 20
    first = np.arange(1 << guide_bits, dtype=np.uint64) << np.uint64(63 - guide_bits)
    last = first + np.uint64((1 << (63 - guide_bits)) - 1)
    below = high.searchsorted(first, side="left")
    # Both ends count as inside: a word equal to a threshold's must never be answered by the guide.
    is_open = below != high.searchsorted(last, side="right")
    guide = np.where(is_open, -1, below).astype(np.int32)
    for array in (low, high, guide):
        array.setflags(write=False)
    return _Table(high=high, low=low, guide=guide, guide_shift=np.uint64(64 - guide_bits))


def _thresholds(sigma_grid: float) -> list[int]:
    """T_0 .. T_{R-1} of `DiscreteGaussian` as exact integers.

    With q = exp(-1 / (2 sigma^2)): exp(-(m+1)^2 / (2 sigma^2)) = exp(-m^2 / (2 sigma^2)) * q^(2m+1),
    so two multiplications of 256-bit integers give the next weight. Each rounds down by less than one unit.
    """
    import mpmath  # here: a price is stated without a table

    context = mpmath.MPContext()
    context.prec = _FRACTION_BITS + 64
    exact = context.exp(-1 / (2 * context.mpf(sigma_grid) ** 2))
    ratio = int(context.floor(context.ldexp(exact, _FRACTION_BITS)))
    ratio_step = ratio * ratio >> _FRACTION_BITS
    weight = 1 << _FRACTION_BITS
    total = weight
    cumulative = []
    for _ in range(noise_reach(sigma_grid)):
        cumulative.append(total)
        weight = weight * ratio >> _FRACTION_BITS
        ratio = ratio * ratio_step >> _FRACTION_BITS
        total += 2 * weight
    return [(part << THRESHOLD_BITS) // total for part in cumulative]
