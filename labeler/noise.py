"""Noise on a grid of integers: the grid, the exact sampler, noise of talliers, and noisy sums of real vectors.

**The grid.** Contributions and noise lie on an integer grid: here is how fine it must be, and how large sums may
become.

**The sampler** draws discrete Gaussian noise exactly and fast. The privacy proof is about integers with an exactly
stated distribution, so noise must not pass through floating point: rounded continuous noise leaks through its low bits
(Mironov 2012). Here a sample is the inverse of a cumulative distribution whose thresholds are integers of 127 bits,
built in 256-bit fixed point; no float touches it. A table over the first bits of the uniform (Chen and Asau 1974)
answers nearly every draw with one look-up, so a core draws tens of millions a second.

**Noise of talliers.** The talliers may add the noise instead of the agents, once for each round and set of
contributors.

**What runs.** In a task with `dishonest_talliers = d` (1 or 2 of its three) the agents share their bare ballots. Each
tallier adds, to its share of the sum over the contributors, its own independent draw of the discrete Gaussian of
parameter s = S sigma / sqrt(3 - d) per number. Its variance is sigma^2 / 2 each if at most one tallier is dishonest,
sigma^2 each against two. In all it is 3 sigma^2 / (3 - d), however many agents collude or drop out.

**Theorem.** Suppose an attacker controls or reads d talliers, all agents but the one asked about, the coordinator and
every wire. The attacker learns of that agent no more than from the sum with h = 3 - d such draws in it: the
`IntegerSum` of the task. Its proof (`labeler.accounting.integer`) is about any h independent shares and does not depend
on who draws them.

*Proof.* Let D be the dishonest talliers and H the honest ones. The adversary knows what controlled agents send: leave
it out, so that x is the sum over the other contributors, on the grid. Each of these splits its ballot once, into three
words uniform but for their sum (`labeler.sharing`), so what D holds is uniform, whatever the ballots are. An honest
tallier sends one array of numbers per round, a_i + n_i, with a_i its share of the sum over one set of contributors.
Suppose first that all of H have one set. Then the a_i of H are uniform except that they add up to x less what D holds.
So the a_i + n_i of H are uniform except that they add up to x + sum_H n_i less what D holds. All of it can be made,
without the ballots, from uniform words and from y = x + sum_H n_i modulo the number of words. y is the integer sum with
h draws, reduced: post-processing. Suppose now that two of H were asked for different sets (h = 2). Then a share in one
of the a_i has its counterpart in no other, and is uniform given all else. So what H sends is uniform and says nothing.
What D sends (an offset of any size, chosen after seeing everything) is a function of what it knows: post-processing of
y, and so are sums that wrap around. QED

**Models.** The proof uses of x only that it is a sum of one integer vector per agent, fixed before anything is drawn.
It uses of the price only that it is the integer sum's for the distance such vectors move: nothing of counts. So the
weights of blind-average, on their grid (`labeler.noise`), are covered at the same price. aux-distill is not. There an
agent's noise is in its heads, and its answer is a function of them that is not linear. So no noise added to a sum of
answers has the law of what it sends, nor covers what bare heads would tell.

**Once.** A second draw over the same set would let two sums be averaged, and a sum over another set would differ from
the first by single ballots. So a tallier sums a round over one set only, permanently (`labeler.rounds.tallier`). Its
noise is a function of the contributors and of a key of the round, which is durable before the first share is. The sum
is durable with its noise before a byte of it leaves. Asked again it sends the stored bytes; killed between adding and
storing, it draws the same noise again. The key is the one that encrypts the round's shares (erased once the sum is
stored), so a tallier that lost it can neither add nor draw.

**Winners.** They are computed from the three noisy shares and are post-processing of y. So the price of the sums
covers them, whatever a dishonest tallier adds and whether or not a sum wraps around in the field. The certified price
of winners (`labeler.accounting.winner`) needs an answer to be a threshold on the changed count. With offsets of any
size the counts that answer a class are an arc of the field. It may begin and end within the count's reach, so that the
answer is two thresholds at once. No range check can prevent this: only a party that sees the sums can tell that one is
out of range, and no party does. So winners of such a task are charged as the sums they are read from
(`labeler.methods.sensitivity`).

References: PRIVACY section 12; Dwork, Kenthapadi, McSherry, Mironov, Naor 2006 (noise by the parties that compute).

**Vectors** (`VectorSum`). The private sum of real vectors: weights of models and updates of training, on the same
integers as votes.

    x  --quantize-->  rint(S x)  --+ noise share-->  shares to the talliers  -->  sum, opened, divided by S

A vector of real numbers of bounded norm replaces the histogram of votes of kNN-DPFL. Everything after rounding is
the mechanism of `labeler.accounting.integer`: integers, discrete Gaussian shares, secret sharing modulo 2^64.

**Rounding costs at most sqrt(D).** Let x and x' be one agent's vectors on neighboring data, |x - x'| <= s, and
q = rint(S x), q' = rint(S x'). Each coordinate of S x - q and of S x' - q' lies within 1/2 of zero, so their difference
within 1, and |q - q'| <= S s + sqrt(D). One coordinate moves by at most S s + 1. When the agent's vector becomes zero,
|q| <= S R + sqrt(D)/2 for |x| <= R. S is chosen so that sqrt(D) is about a thousandth of S s; the price contains it.

**Double precision costs at most 2^-50 S R.** S x is off by at most 2^-53 |S x_i| per coordinate, and so is x itself
if its caller has divided by the sensitivity. As a vector that is 2^-52 S R, for two vectors 2^-51 S R together. It
grows with R, whatever s is; twice as much is added to every bound (`OF_PRODUCTS`). `ROUNDING_MARGIN` is for the
arithmetic of the bounds, and for the norm that `quantize` compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import IntegerSum
from labeler.errors import InvalidSetting, PrivacyRefusal, UnsafeGrid
from labeler.randomness import ByteSource, derive_key, keyed_source
from labeler.setting import StatedLevel

if TYPE_CHECKING:
    from labeler.task import Task

MIN_SHARE_SIGMA_GRID: Final = 100.0
"""Least standard deviation of one agent's noise share, in grid units (PRIVACY section 2)."""

DEFAULT_SHARE_SIGMA_GRID: Final = 1600.0
"""Target of a task without `grid_scale`: fine enough that epsilon is the continuous one to five digits."""

MIN_SAMPLED_SIGMA_GRID: Final = 0.5
"""Smallest standard deviation that the sampler accepts."""

MAX_SHARE_SIGMA_GRID: Final = 100_000.0
"""Largest standard deviation of a noise share, in grid units, that the exact sampler of labeler.noise tabulates: its
table then has 1.25 million thresholds, built in a few seconds."""

MAX_GRID_SUM = 2**62
"""Sums stay below this, so that addition modulo 2^64 never wraps (the noise is truncated far below it)."""

NOISE_TAIL_CUT = 12.5
"""Noise samples are cut off this many standard deviations from zero (see labeler.noise)."""

THRESHOLD_BITS: Final = 127
"""Precision of the sampler's thresholds, as fractions of one."""

LEAST_VECTOR_SIGMA_GRID = 1600.0
MOST_VECTOR_SIGMA_GRID = 65_536.0
"""For vectors of real numbers, the standard deviation of a noise share lies between these, depending on rounding; a
finer grid only makes the sampler's table larger."""

ROOM_BITS: Final = 43
"""Bits of a prime field's modulus beyond those of the widest difference (labeler.sharing); part of the wire, since
agents share in these fields."""

MAX_COMPARISON_BITS: Final = 64 - ROOM_BITS
"""Bits of the widest difference that fits into a word with that room."""

_ROUNDING_SHARE = 1e-3


def noise_reach(sigma_grid: float) -> int:
    """Return the largest distance of a noise sample from zero (labeler.noise.DiscreteGaussian.reach)."""
    return math.ceil(NOISE_TAIL_CUT * sigma_grid)


def check_sampled(sigma_grid: float) -> None:
    """Refuse a standard deviation, in grid units, that the sampler does not accept.

    Raises:
        InvalidSetting: it is out of bounds or not finite.
    """
    if not MIN_SAMPLED_SIGMA_GRID <= sigma_grid <= MAX_SHARE_SIGMA_GRID:
        raise InvalidSetting(
            f"sigma_grid must lie between {MIN_SAMPLED_SIGMA_GRID:g} and {MAX_SHARE_SIGMA_GRID:,.0f} grid units, "
            f"found {sigma_grid:g}; choose grid_scale so that a share has a few hundred grid units"
        )


def sampler_distance(sigma_grid: float) -> float:
    """Return an upper bound on the total variation distance of one sample of labeler.noise from the exact distribution.

    1. Cutting at R = ceil(12.5 sigma). The sum over x > R of exp(-x^2 / 2 sigma^2) is at most the integral from R. By
       Poisson summation the normalizer is at least sigma sqrt(2 pi). So the part cut off is at most twice the upper
       normal tail at 12.5, that is below 2 phi(12.5) / 12.5 < 2^-116.
    2. Rounding. The fixed-point recurrences lose at most 7 units of 2^-256 per step in the ratio, so fewer than
       8 (R+1)^3 units in the sums: with R <= 2^20.3 less than 2^-190 of the whole. Each threshold is then cut to
       2^-127. So each of the R+1 magnitudes has a probability off by at most 2^-127 + 2^-189, and the distance is at
       most (R+1) 2^-127.

    Together below 2^-106 for every sigma allowed, and below 2^-114 at the usual sigma of 400.

    Raises:
        InvalidSetting: the sampler does not accept this sigma.
    """
    check_sampled(sigma_grid)
    return 2.0**-116 + (noise_reach(sigma_grid) + 1) * 2.0**-THRESHOLD_BITS


def vector_scale(*, dimension: int, sensitivity: float, share_sigma: float) -> int:
    """Return S for vectors of real numbers: so fine that rounding adds about a thousandth to the sensitivity.

    Rounding D coordinates can move two vectors apart by sqrt(D) grid units (labeler.noise). So S * sensitivity is
    made a thousand times that, as far as the sampler's table allows.

    Args:
        dimension: D.
        sensitivity: L2 distance of neighboring vectors, in the vectors' unit.
        share_sigma: standard deviation of one noise share, same unit.
    """
    wanted = math.sqrt(dimension) / (_ROUNDING_SHARE * sensitivity) * share_sigma
    return max(1, math.ceil(min(max(wanted, LEAST_VECTOR_SIGMA_GRID), MOST_VECTOR_SIGMA_GRID) / share_sigma))


_FRACTION_BITS = 256
_CHUNK = 1 << 15


@dataclass(frozen=True)
class DiscreteGaussian:
    """The discrete Gaussian on the integers: P(x) proportional to exp(-x^2 / (2 sigma^2)), mean zero.

    **What is drawn.** Let R = ceil(12.5 sigma), F(m) the probability of |x| <= m given |x| <= R, and
    T_m = floor(2^127 F(m)). One uniform 128-bit number gives a sign (one bit) and U (127 bits); the
    magnitude is the number of T_0 .. T_{R-1} that are <= U. The 128 bits are two words. The first
    holds the sign in its lowest bit and the upper 63 bits of U. The second, the lower 64 bits of U,
    is drawn only if the first leaves the comparison open (once in about 2^50 samples).

    **Distance from the exact distribution**: `labeler.noise.sampler_distance`, with its proof. It assumes uniform
    words; see labeler.randomness. The sampler's running time depends slightly on what it draws, so it must not be timed
    by an adversary sample by sample.

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
        """Return the largest magnitude a sample can have, in grid units."""
        return noise_reach(self.sigma_grid)

    def sample(self, source: ByteSource, shape: int | tuple[int, ...]) -> NDArray[np.int64]:
        """Draw independent samples.

        The same stream gives the same samples on every machine, so a retry replays its noise.

        Args:
            source: of the bits; one 64-bit word per sample is consumed.
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


def noise_share(task: Task, source: ByteSource, num_queries: int) -> NDArray[np.int64]:
    """Draw one agent's share of the noise for a batch.

    Every agent draws a share for every query, even without a neighbor and a vote to cast: otherwise the absence of a
    record would show.

    Args:
        task: its `share_sigma_grid`, S * sigma / sqrt(h), is the parameter of each sample.
        source: the agent's secret source for this batch; the same source on a retry gives the same noise.
        num_queries: queries in the batch.

    Returns:
        Noise in grid units, int64, shape (num_queries, num_classes).

    Raises:
        InvalidSetting: num_queries is less than 1, or the task's grid is finer than the sampler accepts.
        UnsafeGrid: the task's grid is too coarse to prove anything.
    """
    if num_queries < 1:
        raise InvalidSetting(f"a batch has at least one query, found {num_queries}")
    return DiscreteGaussian(task.share_sigma_grid).sample(source, (num_queries, task.num_classes))


@dataclass(frozen=True, eq=False)
class _Table:
    """Thresholds T_m as two words, and for each prefix of U the magnitude if the prefix alone decides it.

    Attributes:
        high: upper 63 bits of each threshold, uint64, shape (reach,), ascending.
        low: lower 64 bits of each threshold, uint64, shape (reach,).
        guide: int32, shape (2^b,): the magnitude of every U with that b-bit prefix, or -1 if the prefix
            leaves it open.
        guide_shift: shift of a word that gives its prefix.
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
        # If no threshold is below (found 0), index -1 is the largest threshold, which then is not equal either.
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
    # A guide that is much longer than the table decides most draws; one larger than the cache decides them slowly.
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
    """Return T_0 .. T_{R-1} of `DiscreteGaussian` as exact integers.

    With q = exp(-1 / (2 sigma^2)): exp(-(m+1)^2 / (2 sigma^2)) = exp(-m^2 / (2 sigma^2)) * q^(2m+1),
    so two multiplications of 256-bit integers give the next weight. Each rounds down by less than one unit.
    """
    import mpmath  # here, because a price is computed without a table

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


TALLIERS: Final = 3
"""Required number of talliers: with two, one of them dishonest, the other would add all the noise."""

NoiseBy = Literal["agents", "talliers"]


def noise_source(key: bytes, round_digest: str, contributors: Collection[str], *, is_seeded: bool) -> ByteSource:
    """Return the source of one tallier's noise in a round: the same for the same contributors, else independent.

    Args:
        key: of the round at this tallier; 32 bytes, secret, different at each tallier.
        contributors: the agents summed.
        is_seeded: True if the key came from a known seed.
    """
    names = json.dumps(sorted(contributors)).encode()
    return keyed_source(derive_key(key, b"tallier noise", round_digest.encode(), names), is_seeded=is_seeded)


ROUNDING_MARGIN = 1e-9
"""Relative margin on every bound, for the double precision in which it is computed."""

OF_PRODUCTS = 2.0**-50
"""Relative to the longest grid vector: a bound on how far products and quotients move two vectors apart, doubled."""


@dataclass(frozen=True)
class VectorSum:
    """The sum of one real vector per agent; its docstring is the mechanism, its `event` the price.

    Each of N agents holds x_i in R^D, |x_i| <= largest_norm. It contributes rint(S x_i) + n_i, where n_i is D
    independent draws of the discrete Gaussian of parameter S sigma / sqrt(h), h = N - colluding_agents - max_dropouts.
    The opened result is the sum over the contributors, divided by S. With `dishonest_talliers` an agent contributes
    rint(S x_i) alone, in secret shares, and each of three talliers adds such draws to its share of the sum, with
    h = 3 - dishonest_talliers (`labeler.noise`): the same sum of integers with h unknown draws in it.

    Attributes:
        dimension: D, numbers per vector.
        largest_norm: public bound R on the L2 norm of one agent's vector; larger ones are refused at the agent.
        sensitivity: L2 distance between one agent's vectors on neighboring data, same unit; at most 2 R.
        sigma: standard deviation, per coordinate of the sum, of the noise that nobody can subtract, same unit.
        agents: N.
        colluding_agents: how many may pool what they know.
        max_dropouts: how many may fail to contribute before nothing is opened.
        dishonest_talliers: how many of the three may be dishonest if the talliers add the noise; None: agents do.

    Raises:
        InvalidSetting: a number is out of bounds.
        UnsafeGrid: no grid fits these numbers (noise far below rounding, or sums beyond 2^62).
    """

    dimension: int
    largest_norm: float
    sensitivity: float
    sigma: float
    agents: int
    colluding_agents: int = 0
    max_dropouts: int = 0
    dishonest_talliers: int | None = None

    def __post_init__(self) -> None:
        for name in ("largest_norm", "sensitivity", "sigma"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InvalidSetting(f"{name} of a sum of vectors must be positive and finite, found {value!r}")
        if self.sensitivity > 2 * self.largest_norm * (1 + ROUNDING_MARGIN):
            raise InvalidSetting(
                f"sensitivity {self.sensitivity:g} is more than twice the largest norm {self.largest_norm:g}; "
                "two vectors of that norm cannot be so far apart, so one of the two is wrong"
            )
        if self.dimension < 1 or self.agents < 1 or min(self.colluding_agents, self.max_dropouts) < 0:
            raise InvalidSetting("a sum of vectors has at least one coordinate and one agent, and no negative counts")
        if self.dishonest_talliers is not None and self.quorum < 1:
            raise InvalidSetting(f"{self.max_dropouts} dropouts of {self.agents} agents leave nobody who contributes")
        if self.noise_contributors < 1:
            raise InvalidSetting(
                f"{self.agents} agents less {self.colluding_agents} colluding and {self.max_dropouts} dropouts leave "
                "nobody whose noise is certainly unknown"
            )
        parties = self.agents if self.dishonest_talliers is None else TALLIERS
        largest = self.agents * (self.scale * self.largest_norm + 1)
        largest += parties * noise_reach(self.share_sigma_grid)
        if not MIN_SHARE_SIGMA_GRID <= self.share_sigma_grid <= MAX_SHARE_SIGMA_GRID or largest >= MAX_GRID_SUM:
            is_large = self.share_sigma_grid > MAX_SHARE_SIGMA_GRID
            raise UnsafeGrid(
                f"no grid serves vectors of norm {self.largest_norm:g} under noise of {self.sigma:g}: a noise share "
                f"would have {self.share_sigma_grid:.3g} grid units and a sum could reach {largest:.3g}; "
                + ("use less noise, or a larger epsilon" if is_large else "use more noise")
            )

    @property
    def noise_contributors(self) -> int:
        """Return h, the number of noise shares that are certainly unknown to the adversary."""
        if self.dishonest_talliers is not None:
            return TALLIERS - self.dishonest_talliers
        return self.agents - self.colluding_agents - self.max_dropouts

    @property
    def quorum(self) -> int:
        """Return the fewest contributors for which anything is opened."""
        return self.agents - self.max_dropouts

    @cached_property
    def scale(self) -> int:
        """Return S, grid units per unit of the vectors."""
        share = self.sigma / math.sqrt(self.noise_contributors)
        return vector_scale(dimension=self.dimension, sensitivity=self.sensitivity, share_sigma=share)

    @property
    def share_sigma_grid(self) -> float:
        """Return the parameter of one party's noise share, grid units."""
        return self.scale * self.sigma / math.sqrt(self.noise_contributors)

    def event(self, level: StatedLevel = "instance", *, records: int = 1) -> IntegerSum:
        """Return one opening of this sum as an event, rounding included; see the module.

        Args:
            level: "instance": the vectors move by `sensitivity`. "person": by `group_distance`. "agent": one agent's
                vector becomes zero.
            records: of one person, for that level.
        """
        root, off = math.sqrt(self.dimension), OF_PRODUCTS * self.scale * self.largest_norm
        if level != "agent":
            moved = self.group_distance(records if level == "person" else 1)
            distance, most = self.scale * moved + root + off, self.scale * moved + 1 + off
        else:
            reach = self.scale * self.largest_norm + off
            distance, most = reach + root / 2, reach + 0.5
        # Integer vectors: their squared distance is a whole number.
        return IntegerSum(
            squared_sensitivity=max(1, math.floor((distance * (1 + ROUNDING_MARGIN)) ** 2)),
            largest_change=max(1, math.floor(most * (1 + ROUNDING_MARGIN))),
            grid_scale=1,
            share_sigma_grid=self.share_sigma_grid,
            noise_contributors=self.noise_contributors,
            coordinates=self.dimension,
            level=level,
        )

    def group_distance(self, records: int) -> float:
        """Return how far the vectors move if `records` records of one agent come or go together, before rounding.

        One record after the other, by the triangle inequality, and never further than two vectors of the largest norm
        lie apart. Rounded once, not once per record.
        """
        return min(records * self.sensitivity, 2 * self.largest_norm)

    def quantize(self, vector: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return rint(S x), for a vector within the public bound.

        Raises:
            InvalidSetting: another number of coordinates.
            PrivacyRefusal: a number is not finite, or the norm exceeds `largest_norm`; the norm itself is not told.
        """
        values = np.asarray(vector, dtype=np.float64).ravel()
        if values.size != self.dimension:
            raise InvalidSetting(f"a vector of this sum has {self.dimension} numbers, found {values.size}")
        norm = math.sqrt(float(values @ values))
        if not norm <= self.largest_norm * (1 + ROUNDING_MARGIN / 2):
            raise PrivacyRefusal(
                f"an agent's vector is not finite or longer than {self.largest_norm:g}, which the price does not "
                "cover; clip it to that norm"
            )
        return np.rint(values * self.scale).astype(np.int64)

    @property
    def longest_grid(self) -> int:
        """Return the largest norm of one agent's numbers, grid units, rounding to the grid included."""
        reach = self.scale * self.largest_norm * (1 + OF_PRODUCTS)
        return math.ceil((reach + math.sqrt(self.dimension) / 2) * (1 + ROUNDING_MARGIN))

    def check(self, numbers: NDArray[np.int64], refusal: str) -> None:
        """Refuse numbers beyond what the price covers; their own length is private and not told.

        Raises:
            PrivacyRefusal: with that sentence.
        """
        floats = numbers.astype(np.float64)
        if np.abs(floats).max() > self.longest_grid or np.linalg.norm(floats) > self.longest_grid:
            raise PrivacyRefusal(refusal)

    def contribution(self, vector: NDArray[np.floating], *, source: ByteSource) -> NDArray[np.int64]:
        """Return the quantized vector plus this agent's noise share. Secret: one share alone protects too little.

        Without noise if the talliers add it: then it must leave only in secret shares.
        """
        if self.dishonest_talliers is not None:
            return self.quantize(vector)
        return self.quantize(vector) + DiscreteGaussian(self.share_sigma_grid).sample(source, self.dimension)

    def open(self, total: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the noisy sum in the vectors' unit."""
        return total / np.float64(self.scale)
