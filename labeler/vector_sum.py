"""The private sum of real vectors: weights of models and updates of training, on the same integers as votes.

    x  --quantize-->  rint(S x)  --+ noise share-->  shares to the talliers  -->  sum, opened, divided by S

What is a histogram of votes for kNN-DPFL is here a vector of real numbers of bounded norm. Everything after rounding is
the mechanism of `labeler.accounting.integer`: integers, discrete Gaussian shares, secret sharing modulo 2^64.

**Rounding costs at most sqrt(D).** Let x and x' be one agent's vectors on neighbouring data, |x - x'| <= s, and
q = rint(S x), q' = rint(S x'). Each coordinate of S x - q and of S x' - q' lies within 1/2 of zero, so their difference
within 1, and |q - q'| <= S s + sqrt(D); one coordinate moves by at most S s + 1. When the agent's vector becomes zero,
|q| <= S R + sqrt(D)/2 for |x| <= R. S is chosen so that sqrt(D) is about a thousandth of S s; the price contains it.

**Double precision costs at most 2^-50 S R.** S x is off by at most 2^-53 |S x_i| per coordinate, and so is x itself
where its caller has divided by the sensitivity: as a vector by 2^-52 S R, of two vectors by 2^-51 S R together. That
grows with R, whatever s is; twice as much is added to every bound (`OF_PRODUCTS`). `ROUNDING_MARGIN` is for the
arithmetic of the bounds, and for the norm that `quantize` compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import IntegerSum
from labeler.errors import InvalidSetting, PrivacyRefusal, UnsafeGrid
from labeler.grid import MAX_GRID_SUM, MAX_SHARE_SIGMA_GRID, MIN_SHARE_SIGMA_GRID, vector_scale
from labeler.noise import DiscreteGaussian
from labeler.randomness import ByteSource
from labeler.setting import StatedLevel
from labeler.tallier_noise import TALLIERS

ROUNDING_MARGIN = 1e-9
"""Relative margin on every bound, for the double precision in which it is computed."""

OF_PRODUCTS = 2.0**-50
"""Of the longest vector on the grid: by how much products and quotients move two vectors apart at most, twice over."""


@dataclass(frozen=True)
class VectorSum:
    """The sum of one real vector per agent; its docstring is the mechanism, its `event` the price.

    Each of N agents holds x_i in R^D, |x_i| <= largest_norm. It contributes rint(S x_i) + n_i, where n_i is D
    independent draws of the discrete Gaussian of parameter S sigma / sqrt(h), h = N - colluding_agents - max_dropouts.
    Opened is the sum over the contributors, divided by S. With `dishonest_talliers` it contributes rint(S x_i) alone,
    in secret shares, and each of three talliers adds such draws to its share of the sum, with
    h = 3 - dishonest_talliers (`labeler.tallier_noise`): the same sum of integers with h unknown draws in it.

    Attributes:
        dimension: D, numbers per vector.
        largest_norm: public bound R on the L2 norm of one agent's vector; larger ones are refused at the agent.
        sensitivity: L2 distance between one agent's vectors on neighbouring data, same unit; at most 2 R.
        sigma: standard deviation, per coordinate of the sum, of the noise that nobody can subtract, same unit.
        agents: N.
        colluding_agents: how many may pool what they know.
        max_dropouts: how many may fail to contribute before nothing is opened.
        dishonest_talliers: where the talliers add the noise, how many of the three may be dishonest; None: agents do.

    Raises:
        InvalidSetting: a number is out of bounds.
        UnsafeGrid: no grid serves these numbers (noise far below rounding, or sums beyond 2^62).
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
        largest += parties * DiscreteGaussian(self.share_sigma_grid).reach
        if not MIN_SHARE_SIGMA_GRID <= self.share_sigma_grid <= MAX_SHARE_SIGMA_GRID or largest >= MAX_GRID_SUM:
            raise UnsafeGrid(
                f"no grid serves vectors of norm {self.largest_norm:g} under noise of {self.sigma:g}: a noise share "
                f"would have {self.share_sigma_grid:.3g} grid units and a sum could reach {largest:.3g}; use more noise"
            )

    @property
    def noise_contributors(self) -> int:
        """h: shares of noise that are certainly unknown to the adversary."""
        if self.dishonest_talliers is not None:
            return TALLIERS - self.dishonest_talliers
        return self.agents - self.colluding_agents - self.max_dropouts

    @property
    def quorum(self) -> int:
        """Fewest contributors for which anything is opened."""
        return self.agents - self.max_dropouts

    @cached_property
    def scale(self) -> int:
        """S, grid units per unit of the vectors."""
        share = self.sigma / math.sqrt(self.noise_contributors)
        return vector_scale(dimension=self.dimension, sensitivity=self.sensitivity, share_sigma=share)

    @property
    def share_sigma_grid(self) -> float:
        """The parameter of one party's noise share, grid units."""
        return self.scale * self.sigma / math.sqrt(self.noise_contributors)

    def event(self, level: StatedLevel = "instance", *, records: int = 1) -> IntegerSum:
        """One opening of this sum as an event, rounding included; see the module.

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
        """How far the vectors move when so many records of one agent come or go together, before they are rounded.

        One record after the other, by the triangle inequality, and never further than two vectors of the largest norm
        lie apart. Rounded once, not once per record.
        """
        return min(records * self.sensitivity, 2 * self.largest_norm)

    def quantize(self, vector: NDArray[np.floating]) -> NDArray[np.int64]:
        """rint(S x), for a vector within the public bound.

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
        """The largest norm of one agent's numbers, grid units, rounding to the grid included."""
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
        """The quantised vector plus this agent's noise share. Secret: one share alone protects too little.

        Bare where the talliers add the noise: it must leave in secret shares alone.
        """
        if self.dishonest_talliers is not None:
            return self.quantize(vector)
        return self.quantize(vector) + DiscreteGaussian(self.share_sigma_grid).sample(source, self.dimension)

    def open(self, total: NDArray[np.int64]) -> NDArray[np.float64]:
        """The noisy sum in the vectors' unit."""
        return total / np.float64(self.scale)
