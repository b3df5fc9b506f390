"""The integer grid on which contributions and noise lie: how fine it must be, and how large sums may become."""

from __future__ import annotations

import math
from typing import Final

MIN_SHARE_SIGMA_GRID: Final = 100.0
"""Least standard deviation of one agent's noise share, in grid units (PRIVACY section 2)."""

DEFAULT_SHARE_SIGMA_GRID: Final = 1600.0
"""What a task without `grid_scale` aims at: fine enough that epsilon is the continuous one to five digits."""

MAX_SHARE_SIGMA_GRID: Final = 100_000.0
"""Largest standard deviation of a noise share, in grid units, that the exact sampler of labeler.noise tabulates."""

MAX_GRID_SUM = 2**62
"""Sums stay below this, so that addition modulo 2^64 never wraps (the noise is truncated far below it)."""

NOISE_TAIL_CUT = 12.5
"""Noise samples are cut off this many standard deviations from zero (see labeler.noise)."""

LEAST_VECTOR_SIGMA_GRID = 1600.0
MOST_VECTOR_SIGMA_GRID = 65_536.0
"""For vectors of real numbers, the standard deviation of a noise share lies between these, as far as rounding asks for;
finer only makes the sampler's table larger."""

_ROUNDING_SHARE = 1e-3


def noise_reach(sigma_grid: float) -> int:
    """No noise sample is further from zero (labeler.noise.DiscreteGaussian.reach)."""
    return math.ceil(NOISE_TAIL_CUT * sigma_grid)


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
