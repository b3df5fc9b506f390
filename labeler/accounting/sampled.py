"""Certified prices of sums in which records or agents take part at random and in secret, as in sampled training.

In each of T rounds every record (instance level) or every agent (agent level) takes part with probability q,
independently of everything else (Poisson sampling). Then it adds a clipped integer vector, otherwise zero. The sample
stays hidden inside the shares: an agent that is not sampled sends a vector and its noise share all the same. Only the
noisy sum of a round is opened. This is noisy SGD, and at agent level DP-FedAvg.

**Neighbors** add or remove one record, or one agent's vectors (its noise stays). Replacing one is adding and removing:
no pair is proved of it here, and none is returned. Samples of a fixed size, shuffled batches and samples that are made
known are other mechanisms.

**From vectors to numbers.** Fix the coins and vectors of all others, whose law is the same on both inputs; knowing them
only helps the adversary. Given all rounds before, the contributor's own coin is fresh. Let A be the sum's law without
the contributor and B with it, for a vector that may depend on everything opened so far. Then a round opens A on one
input and (1-q)A + qB on the other. With normal noise of variance v in every coordinate, A and B are the same normal law
around points at some distance d <= D. After a rotation, only the coordinate along the difference tells anything: N(0,
1) and (1-q) N(0, 1) + q N(d/sqrt(v), 1). Scaling by d/D and adding noise makes this of the same pair for D. So T rounds
are dominated by T independent draws of

    P = N(0, 1),    Q = (1-q) N(0, 1) + q N(mu, 1),    mu = D / sqrt(v).

All are against P if the record was added, all against Q if it was removed (Zhu, Dong, Wang 2022, theorems 10, 11).

**Integers.** By steps 1 and 2 of `labeler.accounting.integer` integer sums with h shares are, within e^(+-c) pointwise,
made by one randomized map of the same sums with noise N(0, v - 3) in every coordinate, v = h s^2. That map commutes
with integer shifts in any direction, and vectors on a grid differ by integers. It does not distinguish A from B, so it
makes mixtures, too, and mu = D S / sqrt(v - 3). c and the sampler's error are those of all rounds together: an event's
`coordinates` count every number opened.

**The pair.** `labeler.accounting.losses` bounds the profile of T rounds for both orders; `sampled_pair` finds the least
mu'^2 whose Gaussian is above both but for mass delta_0 (`labeler.accounting.losses`). By the central limit theorem
mu'^2 is near T q^2 (e^(mu^2) - 1) while mu is below 1/2 or so. If a few samples tell much, mu above 1 and T q below
some tens, the profile has a long tail, no Gaussian fits, and mu'^2 depends on delta_0. At (q, mu, T) = (0.01, 1, 1000)
it is 1.8 times that limit for 1e-12 and 3.6 times at a ledger's 1e-28. A mu' below 1e-3 is charged as 1e-3.
`sampled_epsilon` states the profile itself.

References:
    Zhu, Dong, Wang 2022, Optimal accounting of differential privacy via characteristic function. AISTATS.
    McMahan, Ramage, Talwar, Zhang 2018, Learning differentially private recurrent language models. ICLR.
    Dong, Roth, Su 2022, Gaussian differential privacy, section 5 (the limit).

**Replacement.** In some sampled sums a contributor's vector is replaced by another: a removal and an addition, as one
pair. With an agent as the unit that is sampled, one of its records changes its vector u to another, u'. `sampled_pair`
proves (mu^2, delta_0) for T rounds with u and without it, for any u, and so for those without it and with u'.

**Claim.** T rounds with u and with u' are (4 mu^2, delta_1), delta_1 = Phi(Phi^-1(delta_0) + mu) + delta_0.

*Proof.* Write M, M0, M' for the three, and h(x) = Phi(Phi^-1(x) + mu), which is concave and increasing with h(0) = 0.
That H_y <= G_y + delta_0 for every y >= 0 (`labeler.accounting.losses`) says of any test f that

    E_M0 f  <=  inf_y (y E_M f + G_y) + delta_0  =  h(E_M f) + delta_0,

as the infimum is the Gaussian's own trade-off. Likewise E_M' f <= h(E_M0 f) + delta_0. So with a = E_M f

    E_M' f  <=  h(h(a) + delta_0) + delta_0  <=  h(h(a)) + h(delta_0) + delta_0.

A concave function from zero is subadditive, and h(h(a)) = Phi(Phi^-1(a) + 2 mu). QED. u and u' change places for
the other order.

h(delta_0) is far above delta_0, so delta_0 is chosen as small as profiles are computed. If delta_1 is above what a
ledger may leave over (`SPILL` of 4 mu^2), or sampling saves nothing, T (2 mu_1)^2 is charged, mu_1 that of one round.
That holds because with all coins fixed, two vectors of one ball are at most twice its radius apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import numpy as np

from labeler.accounting.events import SPILL, IntegerSum
from labeler.accounting.gaussian import LEAST, MOST
from labeler.accounting.losses import (
    MOST_MU,
    MOST_ROUNDS,
    Losses,
    Order,
    Pair,
    check_may_certify,
    composed,
    in_nano_units,
    least_gaussian,
)
from labeler.errors import InvalidSetting

LEAST_DELTA = 1e-30
"""Smallest delta for which an epsilon is stated."""

_ORDERS: tuple[Order, Order] = ("remove", "add")
_MOST_EPSILON = 600.0
_LEAST_MASS = 1e-35
_LEAST_MU, _MOST_MU = 1e-3, 10.0  # less is charged as that; epsilons of 50 and more are not looked at
_LEAST_RATE = 1e-12  # less is charged as that: its losses are beyond what doubles tell apart
_ROUND_UP = Fraction(1, 10**6)


@dataclass(frozen=True, kw_only=True)
class IntegerSampled(IntegerSum):
    """T openings of noisy integer sums, each over a fresh, secret Poisson sample; see this module.

    `squared_sensitivity`, `largest_change` and the noise are those of one round, for a record or agent that was
    sampled; its `level` says which of the two is sampled. `coordinates` count the numbers of all rounds. Its mu^2 is
    that of `sampled_pair`. The mass outside the Gaussian is at most `SPILL` of it, for which accounts at a delta of
    `labeler.budget.LEAST_DELTA_OF_WINNERS` or more have room.

    Attributes:
        sampling_rate: q, in (0, 1], exactly.
        rounds: T, fixed beforehand.
    """

    only_plain: ClassVar[bool] = True
    spills: ClassVar[bool] = True
    is_sampled: ClassVar[bool] = True

    sampling_rate: Fraction
    rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.mu, self.sampling_rate, self.rounds)
        if self.coordinates % self.rounds:
            raise InvalidSetting(
                f"coordinates count the numbers of all rounds, found {self.coordinates} for {self.rounds} rounds"
            )

    @property
    def mu(self) -> float:
        """Return a sampled contributor's shift of the sum, in standard deviations of a round's noise; rounded up."""
        return math.nextafter(math.sqrt(super().mu_squared), math.inf)

    @property
    def mu_squared(self) -> Fraction:
        """Return that of the Gaussian part, in whole nano-units; never more than without sampling."""
        return sampled_pair(self.mu, self.sampling_rate, self.rounds).mu_squared


@lru_cache(maxsize=4096)
def sampled_pair(mu: float, sampling_rate: Fraction, rounds: int, *, delta_0: float | None = None) -> Pair:
    """Return the charge of T rounds of sampled sums; takes a tenth of a second or two, once for each setting.

    Args:
        mu: 1 / noise multiplier; for integer noise D S / sqrt(v - 3), rounded up (`IntegerSampled.mu`).
        sampling_rate: q, in (0, 1].
        rounds: T, at most `MOST_ROUNDS`, fixed beforehand.
        delta_0: the mass that may remain, at least 1e-35; by default what a ledger allows, `SPILL` mu'^2. A
            ledger is charged the default only.

    Returns:
        The pair; that of T sums in which everybody takes part, (T mu^2, 0), if sampling saves nothing.

    Raises:
        InvalidSetting: an argument is outside its range, or nothing is proved for it.
    """
    _check(mu, sampling_rate, rounds)
    if delta_0 is not None and not _LEAST_MASS <= delta_0 < 1:
        raise InvalidSetting(f"delta_0 must be at least {_LEAST_MASS:g} and below 1, found {delta_0}")
    whole = Fraction(mu) ** 2 * rounds
    low = max(math.nextafter(mu * float(sampling_rate) * math.sqrt(rounds / 2), 0.0), _LEAST_MU)
    high = min(math.nextafter(math.sqrt(whole), math.inf), _MOST_MU)
    rest = SPILL * low * low if delta_0 is None else delta_0
    if low < high and (profiles := _profiles(mu, sampling_rate, rounds, rest)) is not None:
        found = [least_gaussian(one.epsilons, one.deltas, rest, low, high) for one in profiles]
        squares = [Fraction(one) ** 2 * (1 + _ROUND_UP) for one in found if one is not None]
        if len(squares) == len(found) and max(squares) < whole:
            return Pair(in_nano_units(max(squares)), rest)
    return Pair(in_nano_units(whole), 0.0)


def sampled_epsilon(mu: float, sampling_rate: Fraction, rounds: int, delta: float) -> float:
    """Return the least epsilon that the profile of T rounds proves for delta; never below the exact one.

    For a statement about these rounds alone: a sum of charges has the epsilon of its mu^2.

    Args:
        mu, sampling_rate, rounds: as in `sampled_pair`.
        delta: at least `LEAST_DELTA`, below 1.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    from labeler.accounting.gaussian import epsilon_of_delta

    _check(mu, sampling_rate, rounds)
    if not LEAST_DELTA <= delta < 1:
        raise InvalidSetting(f"delta must be at least {LEAST_DELTA:g} and below 1, found {delta}")
    everybody = epsilon_of_delta(delta, math.nextafter(mu * math.sqrt(rounds), math.inf)) * (1 + 1e-9)
    profiles = _profiles(mu, sampling_rate, rounds, delta * 1e-3)
    return everybody if profiles is None else min(everybody, max(_epsilon(one, delta) for one in profiles))


def _epsilon(losses: Losses, delta: float) -> float:
    """Return the epsilon at which the chord reaches delta; its last point lies below."""
    above = int(np.count_nonzero(losses.deltas > delta))
    if above == 0:
        return 0.0
    if above == len(losses.deltas):
        return math.inf
    y, d = np.exp(losses.epsilons[above - 1 : above + 1]), losses.deltas[above - 1 : above + 1]
    return float(math.log(y[0] + (y[1] - y[0]) * (d[0] - delta) / (d[0] - d[1]))) * (1 + 1e-9)


@lru_cache(maxsize=16)
def _profiles(mu: float, sampling_rate: Fraction, rounds: int, least: float) -> tuple[Losses, Losses] | None:
    """Return both orders; None if the price without sampling holds. q is rounded up, as the divergence grows with q."""
    probability = max(math.nextafter(float(sampling_rate), 1.0), _LEAST_RATE)
    if probability > 1 - 1e-3 or mu > MOST_MU:
        return None
    check_may_certify()
    remove, add = (composed(mu, probability, rounds, order, least) for order in _ORDERS)
    return (remove, add) if max(remove.epsilons[-1], add.epsilons[-1]) < _MOST_EPSILON else None


def _check(mu: float, sampling_rate: Fraction, rounds: int) -> None:
    if not LEAST <= mu <= MOST:
        raise InvalidSetting(f"mu must lie between {LEAST:g} and {MOST:g}, found {mu}")
    if not isinstance(sampling_rate, int | Fraction) or not 0 < sampling_rate <= 1:
        raise InvalidSetting(f"a sampling rate must be an exact fraction in (0, 1], found {sampling_rate!r}")
    if type(rounds) is not int or not 1 <= rounds <= MOST_ROUNDS:
        raise InvalidSetting(
            f"rounds must be a whole number from 1 to {MOST_ROUNDS:,}, found {rounds!r}: no price is proved for more"
        )


LEAST_REST = 1e-35
"""Smallest delta_0 for which `labeler.accounting.sampled` proves anything."""


@dataclass(frozen=True, kw_only=True)
class IntegerReplaced(IntegerSampled):
    """T openings of noisy integer sums over secret samples, in which neighboring data change a contributor's vectors.

    `squared_sensitivity` is that of a vector against none; the relation of two vectors does not matter.
    `largest_change` is that of one vector against another.
    """

    @property
    def mu_squared(self) -> Fraction:
        """Return that of the Gaussian part, in whole nano-units; see this module."""
        from scipy.special import ndtr, ndtri

        whole = 4 * self.rounds * Fraction(self.mu) ** 2
        pair = sampled_pair(self.mu, self.sampling_rate, self.rounds, delta_0=LEAST_REST)
        twice = 4 * pair.mu_squared
        # Twice the rest is a margin for two special functions with a relative error of about 1e-12.
        rest = 2 * float(ndtr(ndtri(LEAST_REST) + math.sqrt(pair.mu_squared))) + LEAST_REST
        if pair.delta_0 == 0 or twice >= whole or rest > SPILL * twice:
            return in_nano_units(whole)
        return twice
