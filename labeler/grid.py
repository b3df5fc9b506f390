"""The integer grid on which contributions and noise lie: how fine it must be, and how large sums may become."""

from __future__ import annotations

import math
from typing import Final

from labeler.errors import InvalidSetting

MIN_SHARE_SIGMA_GRID: Final = 100.0
"""Least standard deviation of one agent's noise share, in grid units (PRIVACY section 2)."""

DEFAULT_SHARE_SIGMA_GRID: Final = 1600.0
"""What a task without `grid_scale` aims at: fine enough that epsilon is the continuous one to five digits."""

MIN_SAMPLED_SIGMA_GRID: Final = 0.5
"""Smallest standard deviation that the sampler takes."""

MAX_SHARE_SIGMA_GRID: Final = 100_000.0
"""Largest standard deviation of a noise share, in grid units, that the exact sampler of labeler.noise tabulates: its
table then has 1.25 million thresholds, built in a few seconds."""

MAX_GRID_SUM = 2**62
"""Sums stay below this, so that addition modulo 2^64 never wraps (the noise is truncated far below it)."""

NOISE_TAIL_CUT = 12.5
"""Noise samples are cut off this many standard deviations from zero (see labeler.noise)."""

THRESHOLD_BITS: Final = 127
"""Of the sampler's thresholds, as fractions of one."""

LEAST_VECTOR_SIGMA_GRID = 1600.0
MOST_VECTOR_SIGMA_GRID = 65_536.0
"""For vectors of real numbers, the standard deviation of a noise share lies between these, as far as rounding asks for;
finer only makes the sampler's table larger."""

ROOM_BITS: Final = 43
"""Bits of a prime field's modulus beside those of the widest difference (labeler.field); part of the wire, since agents
share in these fields."""

MAX_COMPARISON_BITS: Final = 64 - ROOM_BITS
"""Bits of the widest difference that fits into a word beside the room."""

_ROUNDING_SHARE = 1e-3


def noise_reach(sigma_grid: float) -> int:
    """No noise sample is further from zero (labeler.noise.DiscreteGaussian.reach)."""
    return math.ceil(NOISE_TAIL_CUT * sigma_grid)


def check_sampled(sigma_grid: float) -> None:
    """Refuse a standard deviation, in grid units, that the sampler does not take.

    Raises:
        InvalidSetting: it is out of bounds or not finite.
    """
    if not MIN_SAMPLED_SIGMA_GRID <= sigma_grid <= MAX_SHARE_SIGMA_GRID:
        raise InvalidSetting(
            f"sigma_grid must lie between {MIN_SAMPLED_SIGMA_GRID:g} and {MAX_SHARE_SIGMA_GRID:,.0f} grid units, "
            f"found {sigma_grid:g}; choose grid_scale so that a share has a few hundred grid units"
        )


def sampler_distance(sigma_grid: float) -> float:
    """Upper bound on the total variation distance of one sample of labeler.noise from the exact discrete Gaussian.

    1. Cutting at R = ceil(12.5 sigma). The sum over x > R of exp(-x^2 / 2 sigma^2) is at most the integral from R, and
       by Poisson summation the normaliser is at least sigma sqrt(2 pi). So the part cut off is at most twice the upper
       normal tail at 12.5, that is below 2 phi(12.5) / 12.5 < 2^-116.
    2. Rounding. The fixed-point recurrences lose at most 7 units of 2^-256 per step in the ratio, so fewer than
       8 (R+1)^3 units in the sums: with R <= 2^20.3 less than 2^-190 of the whole. Each threshold is then cut to
       2^-127. So each of the R+1 magnitudes has a probability off by at most 2^-127 + 2^-189, and the distance is at
       most (R+1) 2^-127.

    Together below 2^-106 for every sigma allowed, and below 2^-114 at the usual sigma of 400.

    Raises:
        InvalidSetting: the sampler does not take such a sigma.
    """
    check_sampled(sigma_grid)
    return 2.0**-116 + (noise_reach(sigma_grid) + 1) * 2.0**-THRESHOLD_BITS


def vector_scale(*, dimension: int, sensitivity: float, share_sigma: float) -> int:
    """S for vectors of real numbers: so fine that rounding adds about a thousandth to the sensitivity.

    Rounding D coordinates can move two vectors apart by sqrt(D) grid units (labeler.vector_sum), so S * sensitivity is
    made a thousand times that, as far as the sampler's table allows.

    Args:
        dimension: D.
        sensitivity: L2 distance of neighbouring vectors, in the vectors' unit.
        share_sigma: standard deviation of one noise share, same unit.
    """
    wanted = math.sqrt(dimension) / (_ROUNDING_SHARE * sensitivity) * share_sigma
    return max(1, math.ceil(min(max(wanted, LEAST_VECTOR_SIGMA_GRID), MOST_VECTOR_SIGMA_GRID) / share_sigma))
