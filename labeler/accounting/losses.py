"""Pairs (mu^2, delta) and certified sums of privacy losses.

A pair (mu^2, delta_0) is the charge of a mechanism that no Gaussian above it prices well.

**Definition.** A mechanism costs the pair if for every epsilon >= 0, and both orders of neighbors, it is
(epsilon, delta_mu(epsilon) + delta_0)-DP, delta_mu that of N(0, 1) against N(mu, 1).

**Fact: pairs add up.** Write H_y(Q, P) for the hockey-stick divergence, the integral of (dQ - y dP)^+. Both orders cost
the pair: H_y(Q, P) <= G_y + delta_0 for every y >= 0, where G is that of the Gaussians. For y below 1 this follows from
H_y(Q, P) = 1 - y + y H_{1/y}(P, Q). Let a second mechanism, chosen after the first one's outcome, cost (nu^2, delta_1).
Write G' for nu^2 and G'' for mu^2 + nu^2. Both together have at most

    E_Q [ H'_{y P/Q} ]  <=  E_Q [ G'_{y P/Q} ] + delta_1  <=  G''_y + delta_0 + delta_1.

G'_{yr} is convex and falls from 1 to 0 in r, so it is a mixture of functions (1 - r z)^+ of weight 1 in all. The
expectation of each is H_z(Q, P). Mixing G_z instead gives the Gaussian pair of both. (Zhu, Dong, Wang 2022, theorem 10,
prove this for dominating pairs without a remainder.)

**What ledgers keep** is mu^2 alone: delta_0 is at most `SPILL` mu^2, so a ledger of mu^2 bounds it, too. Every
epsilon that is stated for a sum of charges leaves room for it (`labeler.budget`, `labeler.accounting.integer`).

References:
    Zhu, Dong, Wang 2022, Optimal accounting of differential privacy via characteristic function. AISTATS.

**Privacy losses** of one sampled sum, and of many: upper bounds on their hockey-stick divergences, down to 1e-40.

P = N(0, 1) and Q = (1-q) N(0, 1) + q N(mu, 1) are one round without and with a contributor who takes part with
probability q. With x drawn from Q the loss is l(x) = log(1 - q + q exp(mu x - mu^2/2)), which increases; with x from P,
for the other order, it is -l(x). For T rounds the divergence at e^epsilon is E[(1 - e^(epsilon - l_1 - ... - l_T))^+].

**Atoms instead of a law.** Let w be numbers >= 0 at the losses k h (k whole), and one at infinity, and
H_y(w) = sum_k w_k (1 - y e^(-kh))^+ + w_inf. If H_y(w) is at least the divergence of one round for every y >= 0, then
the T-fold convolution of w is above that of T rounds. Conditional on the first, the rest is convex and decreasing
in e^-loss, so a mixture of functions (1 - y e^-loss)^+ (as above; w need not sum to one). H grows with every w_k, so
**a result that is too large is safe**, and every error below is answered by enlarging.

**One round.** Mass m at a loss l between grid points a < b becomes m (1 - e^(a-l)) / (1 - e^(a-b)) at b, and the rest
at a. Masses under Q and under P stay as they are, and the chord of a convex function is above it ("connect the dots",
Doroshenko et al. 2022). Far from 0, points are 1/128 to 1/64 of the loss apart. Integrals over cells are Gauss-Legendre
sums over pieces of at most 1/4 in x. The integrands, Q - e^a P and the like, are sums of normal densities, and 8 nodes
err by less than 1e-13 of the piece's mass for |x| <= 14 + mu. The loss at a node is known to some 1e-16 times its
terms. That, over h, bounds the error of a split, and is added to the atoms around. All atoms are enlarged by a relative
1e-12 a round. The mass beyond x = -14 or 14 + mu, below 1e-43, counts as infinite.

**T rounds** are a power of the Fourier transform of w_k e^(theta k h) / M, M the sum, for relative accuracy where the
tilted law lies. T-fold weights are the result times M^T e^(-theta k h). On a ring of N cells, weights from further
away wrap around and add up: too large again. Errors: a transform's is at most eta = 16 u log2 N in the norm of L2
relative to its input (Higham 2002, theorem 24.2, gives less than 7 u log2 N for radix 2). A power adds 3 u T, and
values of the spectrum are at most 1. So every weight of the result is within 2 (T + 1) (eta + 3 u) ||w||_2 of the exact
one; twice that is added. This is repeated for tilts a few standard deviations apart, up to where the Chernoff bound
M^T e^(-theta l) falls below what is asked for. Each gives an upper bound of every weight, and the smallest counts.
The mass further right, at most that bound, counts as infinite.

References:
    Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, Connect the dots. PoPETs.
    Koskela, Jälkö, Honkela 2020, Computing tight differential privacy guarantees using FFT. AISTATS.
    Higham 2002, Accuracy and stability of numerical algorithms, section 24.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import NANO, nano_units
from labeler.accounting.gaussian import deltas_of_epsilons
from labeler.errors import InvalidSetting

Floats = NDArray[np.float64]

OF_FORMULA = 1e-9
"""Relative margin: a hundred times the error of `labeler.accounting.gaussian`."""

_MAY_CERTIFY: ContextVar[bool] = ContextVar("may certify", default=True)


class NotCertified(Exception):
    """A price would have to be certified, and the caller wanted only what is known."""


@contextmanager
def only_certified() -> Iterator[None]:
    """Stop with NotCertified where a price would take seconds; what was certified before is at hand."""
    before = _MAY_CERTIFY.set(False)
    try:
        yield
    finally:
        _MAY_CERTIFY.reset(before)


def check_may_certify() -> None:
    """Begin to certify a price; called where no cache has it.

    Raises:
        NotCertified: within `only_certified`.
    """
    if not _MAY_CERTIFY.get():
        raise NotCertified


_CUTS = 8
_CLOSE = 1e-7


@dataclass(frozen=True)
class Pair:
    """A charge (mu^2, delta_0): for every epsilon >= 0 the mechanism is (epsilon, delta_mu(epsilon) + delta_0)-DP.

    Attributes:
        mu_squared: of the Gaussian part, rounded up to whole nano-units.
        delta_0: the rest; in a ledger's charge at most `SPILL` times mu_squared. Both add up under adaptive
            composition, with any Gaussian charge too.
    """

    mu_squared: Fraction
    delta_0: float


def least_gaussian(epsilons: Floats, deltas: Floats, delta_0: float, low: float, high: float) -> float | None:
    """Return a mu in [low, high], least up to rounding, with profile <= delta_mu + delta_0 at every epsilon >= 0.

    Between points the profile is at most its chord and delta_mu at least its value at the right. So chords are cut
    into eight, and each piece's left end is compared with its right. Beyond the last point the profile must be within
    delta_0.

    Args:
        epsilons: [points], ascending, from 0.
        deltas: [points], an upper bound on the profile, convex in e^epsilon and not increasing; the last one holds for
            everything above.
        delta_0: the mass that may remain.
        low, high: bounds of the search for mu; it is checked that `high` suffices.

    Returns:
        mu; None if `high` does not suffice.
    """
    if not (deltas[-1] <= delta_0 and np.isfinite(deltas).all()):
        return None
    points = np.arange(len(epsilons))
    every = np.interp(np.linspace(0, points[-1], _CUTS * points[-1] + 1), points, epsilons)
    left = np.interp(np.exp(every), np.exp(epsilons), deltas)[:-1] - delta_0
    right, left = every[1:][left > 0], left[left > 0] * (1 + OF_FORMULA)

    def suffices(mu: float) -> bool:
        return bool(np.all(deltas_of_epsilons(right, mu) / left >= 1))

    if not suffices(high):
        return None
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def in_nano_units(mu_squared: Fraction) -> Fraction:
    """mu^2, rounded up to whole nano-units."""
    return Fraction(nano_units(mu_squared), NANO)


Order = Literal["remove", "add"]

MOST_ROUNDS = 1_000_000
"""The errors of the transforms are bounded up to this number."""

MOST_MU = 4.0
"""Largest shift of one round in which the contributor certainly takes part: beyond, sampling hides little."""

_SIGNS: Final[dict[Order, int]] = {"remove": 1, "add": -1}
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_PIECE = 0.25
_REACH = 14.0
_BEYOND = 1e-42
_ROUNDING = 1e-12
_UNIT = 2.0**-53
_SCALED = 1e-13  # relative, of an exponent that is a few products and sums
_SUMMED = 1e-9  # relative: a sum of at most half a million positive terms, twice
_LOSS_ERROR = 16 * _UNIT
_TRANSFORM = 16 * _UNIT

_CELLS_PER_DEVIATION = 10.0
_MOST_CELLS, _LEAST_CELLS = 2**18, 2**12
_RELATIVE = 128
_TILTS_APART = 4.0
_MOST_TILT = 1e9
_HALVED = 6
_BISECTED = 30
_POINTS = 800


@dataclass(frozen=True)
class Losses:
    """An upper bound on a hockey-stick divergence: of many sampled sums in one order of the neighbors, or of winners.

    Attributes:
        epsilons: [points], from 0, evenly spaced.
        deltas: [points], not increasing; chords in e^epsilon hold between them, the last one for everything above.
    """

    epsilons: Floats
    deltas: Floats


def composed(mu: float, probability: float, rounds: int, order: Order, least: float) -> Losses:
    """Return the profile of `rounds` rounds, up to the epsilon at which it is below `least`.

    Args:
        mu: how far the contributor moves the sum, in standard deviations of its noise; in (0, MOST_MU].
        probability: q, in (0, 1).
        rounds: T, at most MOST_ROUNDS.
        order: "remove" for Q against P, "add" for P against Q.
        least: the delta that may remain beyond the last point; above 0.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    if not (0 < mu <= MOST_MU and 0 < probability < 1 and 1 <= rounds <= MOST_ROUNDS and 0 < least < 1):
        raise InvalidSetting(f"no profile is computed of mu {mu}, probability {probability} and {rounds} rounds")
    finest = _deviation(mu, probability) / _CELLS_PER_DEVIATION
    one = _Round.of(mu, probability, order, finest)
    tilts, top = _tilts(one, rounds, least)
    mean, variance = one.moments(0.0)
    bottom = min(0.0, rounds * mean - 10 * math.sqrt(rounds * variance))
    cells = min(max(2 ** math.ceil(math.log2((top - bottom) / finest)), _LEAST_CELLS), _MOST_CELLS)
    width = (top - bottom) / (cells - 8)
    one = _Round.of(mu, probability, order, width)
    first = math.floor(bottom / width)
    weights = np.min([one.power(rounds, tilt, first, cells) for tilt in tilts], axis=0)[-first:]
    stride = math.ceil(len(weights) / _POINTS)
    deltas = _deltas(weights, width, stride)
    beyond = math.exp(min(0.0, min(one.chernoff(rounds, tilt, width * (first + cells - 1)) for tilt in tilts)))
    # Where an exponent overflowed nothing is known, and 1 holds.
    found = np.nan_to_num(np.minimum((deltas + beyond + rounds * one.infinite) * (1 + _SUMMED), 1.0), nan=1.0)
    return Losses(stride * width * np.arange(len(found)), np.maximum.accumulate(found[::-1])[::-1])


def _deltas(weights: Floats, width: float, stride: int) -> Floats:
    """Return the sum over j > k of w_j (1 - e^((k-j)h)) for every stride-th k, by sums of positive terms.

    It is (1 - e^-h) times the sum over j > k of e^((k+1-j)h) t_j, with t_j the sum of w from j on. It is computed by
    blocks of a stride, each of which adds the next block's result, discounted.
    """
    blocks = -(-len(weights) // stride)
    tails = np.zeros(1 + blocks * stride)
    tails[: len(weights)] = np.cumsum(weights[::-1])[::-1]
    within = tails[1:].reshape(blocks, stride) @ np.exp(-width * np.arange(stride))
    shrunk, carried, found = math.exp(-stride * width), 0.0, [0.0]
    for block in within[::-1]:
        carried = float(block) + shrunk * carried
        found.append(carried)
    return -math.expm1(-width) * np.array(found[::-1])


@dataclass(frozen=True, eq=False)
class _Round:
    """The atoms of one round: weights at the losses width * cells, and `infinite` at infinity."""

    width: float
    cells: NDArray[np.int64]
    weights: Floats
    infinite: float

    @classmethod
    def of(cls, mu: float, probability: float, order: Order, width: float) -> _Round:
        """Return atoms above the pair; see this module."""
        low, high = -_REACH, _REACH + mu
        ends = sorted(_SIGNS[order] * float(one) for one in _loss(np.array([low, high]), mu, probability))
        lines = _lines(math.floor(ends[0] / width) - 1, math.ceil(ends[1] / width) + 1)
        ratios = np.expm1(_SIGNS[order] * width * lines) / probability
        crossed = (np.log1p(ratios[ratios > -1]) + mu * mu / 2) / mu
        cuts = np.concatenate([crossed[(crossed > low) & (crossed < high)], np.arange(low, high, _PIECE), [high]])
        cuts = np.unique(cuts)
        half = np.diff(cuts)[:, None] / 2
        x = cuts[:-1, None] + half * (1 + _NODES)
        loss = _loss(x, mu, probability)
        mass = half * _WEIGHTS * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        ratio = np.exp(loss)
        slope = 1 - (1 - probability) / ratio
        steps = np.abs(np.expm1(mu * x - mu * mu / 2)) * probability / ratio
        error = np.abs(loss) + steps + slope * mu * (np.abs(x) + mu)
        if order == "remove":
            mass = mass * ratio
        loss = _SIGNS[order] * loss
        cell = np.clip(np.searchsorted(lines * width, loss[:, len(_NODES) // 2], "right") - 1, 1, len(lines) - 3)
        wide = ((lines[cell + 1] - lines[cell]) * width)[:, None]
        above = np.clip(loss - (lines[cell] * width)[:, None], 0.0, wide)
        up = (mass * np.expm1(-above) / np.expm1(-wide)).sum(axis=1)
        down = (mass * np.expm1(wide - above) / np.expm1(wide)).sum(axis=1)
        spread = (mass * (_LOSS_ERROR * (error + wide) / width + _ROUNDING)).sum(axis=1)
        weights = np.zeros(len(lines))
        for offset, part in ((-1, spread), (0, down + spread), (1, up + spread), (2, spread)):
            weights += np.bincount(cell + offset, part, minlength=len(lines))
        is_there = weights > 0
        return cls(width, lines[is_there], weights[is_there] * (1 + _ROUNDING), _BEYOND)

    def moments(self, tilt: float) -> tuple[float, float]:
        """Return mean and variance of the loss, tilted by e^(tilt loss)."""
        losses = self.width * self.cells
        tilted = self._tilted(tilt)[0]
        mean = float(tilted @ losses)
        return mean, float(tilted @ (losses - mean) ** 2)

    def chernoff(self, rounds: int, tilt: float, loss: float) -> float:
        """Return log of a bound on the weight of `rounds` rounds at and above a loss: M^T e^(-tilt loss)."""
        _, log_total, error = self._tilted(tilt)
        return rounds * (log_total + error) - tilt * loss + _SCALED * (rounds * abs(log_total) + abs(tilt * loss) + 1)

    def power(self, rounds: int, tilt: float, first: int, cells: int) -> Floats:
        """Return the weights of `rounds` rounds at the losses first, first + 1, ..., none below the exact one."""
        tilted = self._tilted(tilt)[0]
        ring = np.bincount(self.cells % cells, tilted, minlength=cells)
        spectrum = np.fft.rfft(ring)
        power = np.ones_like(spectrum)
        left = rounds
        while left:
            if left & 1:
                power = power * spectrum
            left >>= 1
            if left:
                spectrum = spectrum * spectrum
        found = np.roll(np.fft.irfft(power, cells), -first % cells)
        norm = float(np.sqrt(ring @ ring))
        error = 4 * (rounds + 1) * (_TRANSFORM * math.log2(cells) + 3 * _UNIT) * norm
        # The exponent is linear: check both of its ends with their margins.
        low, high = (self.chernoff(rounds, tilt, self.width * at) for at in (first, first + cells - 1))
        scale = np.exp(np.minimum(np.linspace(low, high, cells), 600.0))
        return np.asarray((np.maximum(found, 0.0) + error) * scale * (1 + 1e-12))

    def _tilted(self, tilt: float) -> tuple[Floats, float, float]:
        """Return weights times e^(tilt loss) over their sum M, log M, and the relative error of one round of both."""
        masses, exponents = np.log(self.weights), tilt * self.width * self.cells
        logs = masses + exponents
        most = float(logs.max())
        tilted = np.exp(logs - most)
        total = float(tilted.sum())
        error = _ROUNDING + 8 * _UNIT * float(np.max(np.abs(masses)) + np.max(np.abs(exponents)) + abs(most))
        return tilted / total, most + math.log(total), error


def _lines(lowest: int, highest: int) -> NDArray[np.int64]:
    """Return every grid point near 0; further out, `_RELATIVE` to each doubling."""
    reach = max(abs(lowest), abs(highest), _RELATIVE) + 1
    positive = [np.arange(0, _RELATIVE)]
    step = 1
    while positive[-1][-1] <= reach:
        positive.append(np.arange(_RELATIVE * step, 2 * _RELATIVE * step, step))
        step *= 2
    every = np.concatenate(positive)
    both = np.concatenate([-every[:0:-1], every])
    inside = np.nonzero((both >= lowest) & (both <= highest))[0]
    return np.asarray(both[max(0, inside[0] - 2) : inside[-1] + 3], dtype=np.int64)


def _loss(x: Floats, mu: float, probability: float) -> Floats:
    return np.asarray(np.log1p(probability * np.expm1(mu * x - mu * mu / 2)))


def _deviation(mu: float, probability: float) -> float:
    """Return roughly the standard deviation of one round's loss: q sqrt(e^(mu^2) - 1) if that is small."""
    return min(probability * math.sqrt(math.expm1(min(mu * mu, 1.0))), mu)


def _tilts(one: _Round, rounds: int, least: float) -> tuple[list[float], float]:
    """Return tilts, and a loss that they reach: above it there is less than about `least` / 100.

    By Chernoff at most that mass lies above (T log M - log(least / 100)) / theta, for any theta > 0. The smallest such
    loss equals the tilted mean. Below it, tilts are halved apart until means are close in terms of deviations.
    """
    goal = math.log(least) - math.log(100)
    last = 1 / math.sqrt(rounds * one.moments(0.0)[1])

    def is_enough(tilt: float) -> bool:
        return one.chernoff(rounds, tilt, rounds * one.moments(tilt)[0]) <= goal

    first = 0.0
    while not is_enough(last) and last < _MOST_TILT:
        first, last = last, 2 * last
    for _ in range(_BISECTED):
        middle = (first + last) / 2
        first, last = (first, middle) if is_enough(middle) else (middle, last)
    top = (one.chernoff(rounds, last, 0.0) - goal) / last
    tilts = [0.0]
    stack = [(0.0, one.moments(0.0), last, one.moments(last), 0)]
    while stack:
        low, at_low, high, at_high, depth = stack.pop()
        apart = rounds * (at_high[0] - at_low[0])
        if apart > _TILTS_APART * math.sqrt(rounds * min(at_low[1], at_high[1])) and depth < _HALVED:
            middle = (low + high) / 2
            at_middle = one.moments(middle)
            stack += [(middle, at_middle, high, at_high, depth + 1), (low, at_low, middle, at_middle, depth + 1)]
        else:
            tilts.append(high)
    return tilts, max(top, 16 * one.width)
