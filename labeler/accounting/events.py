"""Operations on private data, as frozen values that an accountant can add up.

An event's docstring is its definition: the accountant can be written from it alone. Events compose by adding mu^2
(Gaussian differential privacy; Dong, Roth, Su 2022, Corollary 3.3), also if later queries depend on earlier answers.
The next mu may even be chosen after seeing them, while the sum stays under a bound fixed beforehand (Smith, Thakurta
2022). Sums are exact: fractions and integers only. An unknown event is refused, never approximated.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from labeler.errors import InvalidSetting
from labeler.setting import StatedLevel

NANO = 10**9
"""Ledger units per unit of mu^2."""

SMOOTHING_VARIANCE = 3
"""Variance, grid units squared, that the proof in `labeler.accounting.integer` spends on the step to integer noise."""

MOST_MU_SQUARED = 10**200
"""Largest mu^2 of one event; the smallest is its inverse. Beyond, no mechanism is real and floats overflow."""

_MOST_COUNT = 10**100

SPILL = 1e-28
"""Largest delta per unit of mu^2 that a charge may hold outside its Gaussian (`labeler.accounting.losses`)."""


@dataclass(frozen=True)
class GaussianSum:
    """Vectors of counts, released with independent N(0, sigma^2) noise on every coordinate.

    The whole composition is (squared_sensitivity / sigma^2)^(1/2)-GDP, exactly. *Proof.* Dong, Roth, Su, Theorem 2.7.

    Attributes:
        squared_sensitivity: squared L2 norm of the largest change of all the sums together, votes^2.
        sigma_votes: standard deviation of the noise on one coordinate, votes.
        level: the unit whose presence the sensitivity is about. Levels never mix in one composition.
    """

    squared_sensitivity: Fraction | int
    sigma_votes: float
    level: StatedLevel = "instance"

    def __post_init__(self) -> None:
        _check_exact("squared_sensitivity", self.squared_sensitivity)
        _check_positive("sigma_votes", self.sigma_votes)
        _check_size(self.mu_squared)

    @property
    def mu_squared(self) -> Fraction:
        return Fraction(self.squared_sensitivity) / Fraction(self.sigma_votes) ** 2


@dataclass(frozen=True)
class IntegerSum:
    """Vectors of counts on a grid, released with a sum of discrete Gaussian shares on every coordinate.

    A count c is the integer S*c. Each contributor adds an independent draw of the discrete Gaussian N_Z(0, s^2),
    with P[x] proportional to exp(-x^2 / (2 s^2)). The adversary knows all shares but h. Contributors, their number
    and the grid do not depend on private data. With v = h s^2 the composition is, up to errors that are bounded, mu-GDP
    with mu^2 = squared_sensitivity * S^2 / (v - SMOOTHING_VARIANCE). *Proof*, and errors: `labeler.accounting.integer`.

    Attributes:
        squared_sensitivity: squared L2 norm of the largest change of all the sums together, votes^2.
        largest_change: the most votes by which one coordinate can change.
        grid_scale: S, grid units per vote.
        share_sigma_grid: s, the parameter of one noise share, grid units: the sampler's argument.
        noise_contributors: h, the number of shares that the adversary certainly does not know.
        coordinates: how many numbers are released: queries times classes.
        level: the unit whose presence the sensitivity is about.
    """

    opens_sums: ClassVar[bool] = True
    """True if the sums themselves are released, rather than something read from them."""

    only_plain: ClassVar[bool] = False
    """True if only the plain bound on the sampler's error holds (`labeler.accounting.integer`, step 3)."""

    spills: ClassVar[bool] = False
    """True if up to `SPILL` mu^2 of delta lies outside the Gaussian (`labeler.accounting.losses`)."""

    is_sampled: ClassVar[bool] = False
    """True if each sum is over a secret sample, so that mu^2 is that of a pair (`labeler.accounting.sampled`)."""

    squared_sensitivity: Fraction | int
    largest_change: int
    grid_scale: int
    share_sigma_grid: float
    noise_contributors: int
    coordinates: int
    level: StatedLevel = "instance"

    def __post_init__(self) -> None:
        _check_exact("squared_sensitivity", self.squared_sensitivity)
        for name in ("largest_change", "grid_scale", "noise_contributors", "coordinates"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise InvalidSetting(f"{name} must be a whole number of at least 1, found {value!r}")
            if value > _MOST_COUNT:
                raise InvalidSetting(f"{name} must be at most 10^100, which no task comes near")
        _check_positive("share_sigma_grid", self.share_sigma_grid)
        if self.share_sigma_grid < 0.5 or self.variance_grid < 2 * SMOOTHING_VARIANCE:
            raise InvalidSetting(
                f"{self.noise_contributors} noise shares of {self.share_sigma_grid:.3g} grid units are too small for "
                f"any proof: each needs at least 0.5 grid units and all together a variance of {2 * SMOOTHING_VARIANCE}"
            )
        _check_size(self._of_all_sums)

    @property
    def variance_grid(self) -> Fraction:
        """Return v = h s^2, exactly, for the binary number s that the sampler uses."""
        return self.noise_contributors * Fraction(self.share_sigma_grid) ** 2

    @property
    def _of_all_sums(self) -> Fraction:
        """Return mu^2 of the sums, whatever part of them is opened."""
        return Fraction(self.squared_sensitivity) * self.grid_scale**2 / (self.variance_grid - SMOOTHING_VARIANCE)

    @property
    def mu_squared(self) -> Fraction:
        return self._of_all_sums

    def of_group(self, records: int, *, releases: int = 1) -> IntegerSum:
        """Return the event of any g records of all agents together, from that of one record: squared_sensitivity times
        g^2, largest_change times g.

        *Proof.* Two worlds that differ in g records are joined by g steps between neighbors, of which each changes one
        record. Those that go, go first, so that no set on the way is larger than both ends, and a public bound on
        records is kept. This event bounds every step, whatever the other records are, also one that lets another record
        in. Sums are whole vectors on the grid after rounding, clipping and projection, so by the triangle inequality
        they differ by at most g times the norm, and g times the largest change, of one step.

        Args:
            records: g.
            releases: if each agent adds its own noise to its own numbers, how many agents g records may belong
                to: the coordinates of all these change. With g_i records of agent i their changes are at right angles,
                so that their squares add up to at most sum g_i^2 <= g^2 times that of one record.

        Raises:
            InvalidSetting: records are sampled, fall silent, or are seen through winners alone: no step of those is a
                change of sums that adds up.
        """
        if type(self) is not IntegerSum:
            raise InvalidSetting("a group of records is priced for sums alone: this event is not proved for one")
        return replace(
            self,
            squared_sensitivity=self.squared_sensitivity * records**2,
            largest_change=self.largest_change * records,
            coordinates=self.coordinates * releases,
        )

    @property
    def charge_nano(self) -> int:
        """Return the charge in a ledger: mu^2 in nano-units, rounded up."""
        return nano_units(self.mu_squared)

    @property
    def round_nano(self) -> int:
        """Return the charge in a ledger for each round of the composition: all of it, except for votes for life."""
        return self.charge_nano


Event = GaussianSum | IntegerSum


def nano_units(mu_squared: Fraction | int) -> int:
    """Return mu^2 in whole nano-units, rounded up, by exact arithmetic.

    Raises:
        InvalidSetting: mu_squared is not an exact positive number.
    """
    _check_exact("mu_squared", mu_squared)
    return math.ceil(mu_squared * NANO)


def _check_exact(name: str, value: object) -> None:
    if type(value) not in (int, Fraction) or value <= 0:  # type: ignore[operator]  # the type was just checked
        raise InvalidSetting(f"{name} must be an exact positive number (int or Fraction), found {value!r}")


def _check_positive(name: str, value: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise InvalidSetting(f"{name} must be a positive finite number, found {value!r}")


def _check_size(mu_squared: Fraction) -> None:
    if not Fraction(1, MOST_MU_SQUARED) <= mu_squared <= MOST_MU_SQUARED:
        raise InvalidSetting(
            "noise and sensitivity are so far apart that no price is computed for them: mu^2 lies "
            "between 1e-200 and 1e200"
        )
