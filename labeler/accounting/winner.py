"""The certified price of winners: less than that of the histogram they are read from, without a look at the data.

A release of winners is post-processing of noisy sums, so the price of the sums holds for it. Winners reveal less. This
module proves how much less, for the integer noise that runs and against participants that choose their noise.

**One query.** Let neighboring inputs differ in one coordinate of a query, by one vote. Fix everything else: the other
sums, the noise of colluders, earlier answers. The changed class wins, or an abstaining threshold is reached, if its
noisy sum is at or above some integer: one bit. If a vote is *swapped* between classes a and b, fix also X_a + X_b,
whose law the swap does not change, and the best of the others. Then a wins if X_a is at or above one integer, b wins if
it is at or below another, and a third class c wins between them.

A vote that only arrives or leaves is no worse than a swap: it is one threshold on a smaller shift, which is a
threshold on the larger one blurred by noise.

With two classes and no abstaining threshold the winner is the sign of their difference alone (`is_duel`). That is one
bit, read from noise of variance 2 v, which one vote moves by S and a swap by 2 S.

**Void.** The talliers open nothing if a difference of sums leaves its range (`workers.winner.tournament`). Honest noise
never does that. A participant that chooses its noise can move the edge of the range next to the changed sum, so void is
one more outcome. Let x be the changed sum (for a swap x = X_a, which moves against X_b; for a duel the difference).

*Void lies at the ends of the line, or amid one third class.* Each step of the tournament compares the largest sum so
far with the next one, and the larger goes on. For one bit the largest so far grows with x, so each difference is in
range for an interval of x. The intersection of intervals is an interval. On it the opened class is the true winner. For
a swap the same holds until a's and b's parts of the tournament meet, and for the step at which they meet. After that
the largest so far falls and then grows with x. It can be too small only in the middle: void then splits the values at
which c wins. But each part of them is longer than the range, more than 45 standard deviations (the range holds 12.5
standard deviations of every noise share on both sides; with one agent only that agent adds noise). So all but a mass of
2 Phi(-17) < `_FAR` lies in a window that holds no more than c, void and c, or one part and void at its end. The former
are three stretches of the line, which take the places of b, c and a. Void counts no more there than a class would
(W_j >= W_0 below), and c as two classes counts no less than as one (the sum below is convex and homogeneous). Sums are
shared modulo p: a sum near the talliers' random mask may be read as less by p. Modulo 2^64 this is either a jump out of
every range, on one side of which a's own first comparison is void, or a step of +189, which keeps the order
(`labeler.sharing`). A duel is compared as one shared difference, so that the same holds for it.

So for one bit no outcome tells more than a cut of the line into void, b, a, void. For a swap no outcome tells more than
a cut into void, b, c, a, void. Stretches may be empty.
Other reasons to open nothing follow from public facts or from a dishonest agent's own rows. They are unequal
contributors, a tallier that declines, a row with a wrong sum (an honest row has the right one), a missing tallier.

**Integers.** The noise of h honest shares is, up to errors that `labeler.accounting.integer` bounds, a discrete
Gaussian of variance v, and X_a given the sum one of variance v/2 around any center. Step 2 there writes it as x drawn
around y ~ N(center, variance - 3), by the same rule whatever the integer shift. x grows with y (monotone likelihood
ratio), so for each value of the coin that chooses x given y each outcome is an interval of y. The outcome is a mixture
of cuts of a normal variable that the neighbor shifts. These are the shifts in units of its standard deviation.

    mu = S / sqrt(v - 3)    one coordinate (`ONE_BIT`),        mu = S / sqrt(v/2 - 3)    a swap (`SWAP`),

    mu = S / sqrt(2 v - 3) and 2 S / sqrt(2 v - 3)    of two classes.

**Many queries**, each chosen after the answers before it. Let P_t, Q_t be the laws of the outcome for cuts t in order.
Define

    W_0(y) = max(0, 1 - y).

    W_j(y) = sup_t [ sum of P_t(o) W_{j-1}(y Q_t(o) / P_t(o)) over the classes o
                     + sum of max(0, P_t(v) - y Q_t(v)) over the two stretches v of void ].

The hockey-stick divergence at e^epsilon of any adaptive choice of j queries is at most W_j(e^epsilon). The last query's
best event is chosen knowing the answers before it, and so backwards. After void the round has ended, and an event holds
it or not. (An event that leaves void out gains most: void on the neighbor's side makes the class next to it likelier.
For two queries at once, mu = 1 and y = 60 it reaches 0.00356, where two outcomes reach 0.00257.) The bound does not
need that all voids look alike. A mixture is no better than the best of what it mixes, since the divergence is convex.

Swapping P and Q maps t to mu - t and void to void. So one W serves both directions, and
W_j(1/y) = 1 - 1/y + W_j(y)/y: only y >= 1 is kept. W_j is convex, decreasing and at most 1, so chords between points of
a grid are above it, and the value at a point above it holds beyond the grid's end.

**Between cuts.** phi(p, q) = p W(y q/p) and max(0, p - y q) are convex and homogeneous. So the supremand F is a convex
function of the points (Phi(t), Phi(t - mu)) on the curve, one for each cut. Divide the curve at t_1 < ... < t_n. Its
piece between neighbors A and B lies in the triangle of A, B and the crossing T of its tangents there. The tangents'
slopes are the likelihood ratios; beyond the ends, tangents have slope 0 and infinity. Points that share a piece are
ordered along it. Take the coordinates (u, w) along A's and B's tangents, from A = (0, 0) over T = (1, 0) to B = (1, 1).
The points satisfy w_1 <= u_1 <= u_2, w_1 <= w_2 <= u_2 and so on, an order polytope. Its corners are monotone 0-1
vectors (Stanley 1986): ordered chains of A, T and B. A lies between the crossings on both sides of it, on its own
tangent. So all points of a chain that are at A move together to one of them or the other without losing their order. A
convex function is largest in a corner. So the supremum over all cuts is at most the largest F over the ordered chains
of the finitely many T, and no gap remains between grid points. Tangents cost an error of second order in the distance
of cuts. F adds up over stretches, so the largest chain is found from left to right (`_largest`).

**A pair that adds up.** A Gaussian that is above W everywhere saves nothing: "every answer the likelier one" decays as
the Gaussian itself does. `winner_pair` finds the least mu'^2 with W(e^epsilon) <= delta_mu'(epsilon) + delta_0 for
every epsilon >= 0: a `labeler.accounting.losses.Pair`, both numbers of which add up. More than `BLOCK` queries are
priced as several blocks: a block in which something is void is followed by blocks that say nothing. mu' hardly depends
on delta_0, so delta_0 is chosen small enough to need no adding up: at most `SPILL` = 1e-28 per unit of mu'^2.

The idea of conditioning on the other sums, and accounting that uses it, are in Koskela, Redberg, Wang (2024) and Chadha
et al. (2024); the certificate by tangents and the price of void are this project's.

References:
    Koskela, Redberg, Wang 2024, Privacy profiles for private selection. ICML.
    Chadha, Jagielski, Papernot, Choquette-Choo, Nasr 2024, Auditing private prediction. ICML.
    Stanley 1986, Two poset polytopes. Discrete & Computational Geometry 1.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal

import numpy as np

from labeler.accounting.events import SMOOTHING_VARIANCE, SPILL, IntegerSum
from labeler.accounting.losses import Floats, Losses, Pair, check_may_certify, in_nano_units, least_gaussian
from labeler.errors import InvalidSetting

Change = Literal["one-bit", "swap"]

ONE_BIT: Final[Change] = "one-bit"
"""One count changes by one vote: one-hot ballots at agent level."""

SWAP: Final[Change] = "swap"
"""One vote moves from one class to another, arrives or leaves: records of top-k votes and of ensembles."""

BLOCK: Final = {ONE_BIT: 512, SWAP: 256}
"""Queries that are priced together, a second's work; more are priced as the sum of blocks."""

# Distance of grid points and cuts, in units of mu and of one: each error is of second order.
_STEP = 0.13
_WIDTH = 0.12
_GROWTH = 1.0
_OUTCOMES = {ONE_BIT: 2, SWAP: 3}
_FAR = 1e-60
"""Mass that a window of 44 standard deviations may leave out, per query."""
_REACH = 14.0  # cuts in units of one, beyond which the last tangent is horizontal: 1e-44 of the mass
_ROUNDING = 1e-11  # relative, for every step: ten thousand times what its few sums of positive terms lose
_MANY_BLOCKS = 64
_MOST_MU_SQUARED = 100  # epsilons beyond 50 are not looked at closely: the sums' price holds
_LEAST_MASS = 1e-32  # where the grid ends: a Gaussian of the sums' own mu has no more beyond
_NOTHING = 1e-40  # where it ends for the first few queries: their Gaussian has no more beyond


@dataclass(frozen=True, kw_only=True)
class IntegerWinner(IntegerSum):
    """The largest of each row of noisy integer sums, and nothing else of them.

    The attributes of `IntegerSum` are those of the sums that winners are read from. Its mu^2 is that of `winner_pair`
    (*Proof*: this module); the mass outside the Gaussian is at most `SPILL` of it, and statements leave room for it.

    Attributes:
        change: how neighboring inputs differ in one query.
        queries: number of winners.
        is_duel: there are two classes and no abstaining threshold, so that the winner is the sign of their difference.
    """

    opens_sums: ClassVar[bool] = False
    spills: ClassVar[bool] = True

    change: Change
    queries: int
    is_duel: bool = False

    @property
    def mu(self) -> float:
        """Return the neighbor's shift, in standard deviations, of the variable that decides the outcome of one query.

        Raises:
            InvalidSetting: the noise is too small for any proof.
        """
        variance, votes = self.variance_grid, 1
        if self.is_duel:
            variance, votes = 2 * variance, 2 if self.change == SWAP else 1
        elif self.change == SWAP:
            variance /= 2
        left = variance - SMOOTHING_VARIANCE
        if left <= 0:
            raise InvalidSetting(f"a variance of {float(variance):.3g} grid units^2 is too small for any proof")
        return math.nextafter(math.sqrt(votes**2 * self.grid_scale**2 / left), math.inf)

    @property
    def mu_squared(self) -> Fraction:
        """Return that of the Gaussian part, in whole nano-units; never more than that of the sums."""
        pair = winner_pair(ONE_BIT if self.is_duel else self.change, self.mu, self.queries)
        return min(pair.mu_squared, super().mu_squared)


@lru_cache(maxsize=4096)
def winner_pair(change: Change, mu: float, queries: int) -> Pair:
    """Return the charge of `queries` winners: below the sums' own mu^2, or equal to it if nothing can be saved.

    Args:
        change: how neighboring inputs differ in one query.
        mu: the shift of one query (`IntegerWinner.mu`).
        queries: chosen one after another, or at once.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    _check(change, mu, queries)
    size = BLOCK[change]
    whole, rest = divmod(queries, size)
    if rest and whole >= _MANY_BLOCKS:
        whole, rest = whole + 1, 0  # a little more, to avoid computing every possible number of queries
    parts = [(times, _gaussian_part(change, mu, many)) for times, many in ((whole, size), (1, rest)) if times and many]
    mu_squared = sum((times * one.mu_squared for times, one in parts), Fraction(0))
    return Pair(mu_squared, math.fsum(times * one.delta_0 for times, one in parts))


def winner_profile(change: Change, mu: float, queries: int) -> Losses:
    """Return W_Q of this module's docstring, from above, on a grid.

    Args:
        change, mu: as in `winner_pair`.
        queries: at least 1, at most a block.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    _check(change, mu, queries)
    if queries > BLOCK[change]:
        raise InvalidSetting(f"queries must be at most {BLOCK[change]}, found {queries}; more are priced in blocks")
    ladder = _ladder(change, mu)
    return Losses(ladder.epsilons, ladder.deltas(queries))


def _end(mu: float, mass: float) -> float:
    """Return the epsilon beyond which a Gaussian has no more than that mass."""
    return mu * mu / 2 + mu * math.sqrt(-2 * math.log(mass))


def _check(change: Change, mu: float, queries: int) -> None:
    if type(queries) is not int or queries < 1:
        raise InvalidSetting(f"queries must be a whole number of at least 1, found {queries!r}")
    if not 0 < mu < math.inf:
        raise InvalidSetting(f"mu must be a positive finite number, found {mu}")
    if change not in (ONE_BIT, SWAP):
        raise InvalidSetting(f"no winner is known to change by {change!r}")


@lru_cache(maxsize=4096)
def _gaussian_part(change: Change, mu: float, queries: int) -> Pair:
    """Return the least mu'^2 with W <= delta_mu' + delta_0 at every epsilon >= 0, in nano-units, for one block.

    delta_0 is `SPILL` times a third of mu^2 Q, and mu'^2 no less than that third, so that delta_0 <= SPILL mu'^2.
    (mu'^2 is about two thirds for one bit, four fifths for a swap.)
    """
    whole = Fraction(mu) ** 2 * queries
    if whole <= _MOST_MU_SQUARED:
        check_may_certify()
        delta_0 = SPILL * float(whole) / 3
        profile = winner_profile(change, mu, queries)
        low, high = math.sqrt(whole / 3), math.sqrt(whole)
        found = least_gaussian(profile.epsilons, profile.deltas, delta_0, low, high)
        if found is not None and (part := Fraction(found) ** 2 * (1 + Fraction(1, 10**6))) < whole:
            return Pair(in_nano_units(part), delta_0)
    return Pair(in_nano_units(whole), 0.0)


def _thresholds(mu: float) -> Floats:
    """Return thresholds symmetric around mu/2, where an outcome tells most; wider apart further out."""
    at = [0.0]
    while at[-1] < _REACH:
        at.append(at[-1] + _WIDTH * (1 + _GROWTH * at[-1]))
    right = np.array(at)
    return mu / 2 + np.concatenate([-right[:0:-1], right])


def _cuts(mu: float) -> Floats:
    """Return [cuts, 4]: all cuts of the supremum, as Phi(t) and Phi(t - mu) with their complements, in order.

    The cuts are the crossings of tangents, between the two ends of the line. Complements are sums from their own side,
    so that no tail is lost.
    """
    from scipy.special import ndtr

    t = _thresholds(mu)
    on_curve = np.column_stack([ndtr(t), ndtr(-t), ndtr(t - mu), ndtr(mu - t)])
    slope = np.concatenate([[0.0], np.exp(mu * t - mu * mu / 2)])
    a, b = np.concatenate([[[0.0, 1.0, 0.0, 1.0]], on_curve[:-1]]), on_curve
    # The mass between neighbors, from the side on which nothing cancels.
    p, q = np.where(b[:, 0::2] < 0.5, b[:, 0::2] - a[:, 0::2], a[:, 1::2] - b[:, 1::2]).T
    run = np.clip((slope[1:] * p - q) / (slope[1:] - slope[:-1]), 0.0, p)  # along A's tangent to T
    rise = np.minimum(run * slope[:-1], q)
    crossings = np.column_stack([a[:, 0] + run, b[:, 1] + (p - run), a[:, 2] + rise, b[:, 3] + (q - rise)])
    _, left_p, last_q, left_q = on_curve[-1]
    beyond = [1.0, 0.0, last_q + slope[-1] * left_p, max(0.0, left_q - slope[-1] * left_p)]
    return np.concatenate([[[0.0, 1.0, 0.0, 1.0]], crossings, [beyond], [[1.0, 0.0, 1.0, 0.0]]])


def _stretches(cuts: Floats) -> list[tuple[Floats, Floats]]:
    """Return for every cut the probabilities (P, Q) of the stretch up to each cut after it, both [cuts after it]."""
    found = []
    for i in range(len(cuts)):
        after = cuts[i + 1 :]
        between = np.where(after[:, 0::2] < 0.5, after[:, 0::2] - cuts[i, 0::2], cuts[i, 1::2] - after[:, 1::2])
        p, q = np.maximum(between, 0.0).T
        found.append((p, q))
    return found


def _void(cuts: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return max(0, P - y Q) of all that lies before each cut, and of all that lies after it, both [cuts, points]."""
    before, after = (np.maximum(0.0, p[:, None] - y * q[:, None]) for p, q in (cuts[:, 0::2].T, cuts[:, 1::2].T))
    return before, after


def _largest(change: Change, stretches: Iterable[Floats], before: Floats, after: Floats) -> Floats:
    """Return the supremum F: void before the first cut, then one outcome after the other, and void after the last cut.

    Args:
        stretches: for every cut phi of the stretch up to each cut after it, [cuts after it, points].
        before, after: of void, before and after each cut, [cuts, points].
    """
    # best[n][c]: the most that is reached up to cut c with n outcomes, some of which may be empty.
    best = [before, *(before.copy() for _ in range(_OUTCOMES[change]))]
    for i, reached in enumerate(stretches):
        for shorter, longer in pairwise(best):
            np.maximum(longer[i], shorter[i], out=longer[i])
            np.maximum(longer[i + 1 :], shorter[i] + reached, out=longer[i + 1 :])
    return np.asarray((best[-1] + after).max(axis=0))


class _Ladder:
    """W_1, W_2, ... on the grid exp(step * i), i = 0, 1, ..., computed as far as requested; shared by threads.

    On a geometric grid y Q/P is the same shift for every y. Each stretch is a weighted sum of two shifted copies of W
    (a chord). All stretches from one cut are a sparse matrix times the matrix of all shifts.
    """

    def __init__(self, change: Change, mu: float) -> None:
        step = _STEP * mu
        most = min(mu * math.sqrt(BLOCK[change]), max(mu, math.sqrt(_MOST_MU_SQUARED)))
        points = max(3, math.ceil(_end(most, _LEAST_MASS) / step) + 1)
        self.epsilons: Floats = np.asarray(step * np.arange(points), dtype=np.float64)
        cuts = _cuts(mu)
        self._weighing, reach = _weighing(_stretches(cuts), step, 2 * points)
        self._mirror = np.minimum(np.arange(reach, 0, -1), points - 1)
        self._shrunk = np.exp(-step * np.arange(reach, 0, -1))
        self._void = _void(cuts, np.exp(self.epsilons))
        self._known: list[Floats] = [np.maximum(0.0, -np.expm1(self.epsilons))]
        self._change, self._mu, self._step = change, mu, step
        self._lock = threading.Lock()

    def deltas(self, queries: int) -> Floats:
        """Return W after this number of queries, not increasing."""
        with self._lock:
            while len(self._known) <= queries:
                # Further out there is next to nothing yet, and W decreases: the value at the last point is above it.
                points = math.ceil(_end(self._mu * math.sqrt(len(self._known)), _NOTHING) / self._step) + 1
                self._known.append(self._next(self._known[-1], min(points, len(self.epsilons))))
            return self._known[queries]

    def _next(self, deltas: Floats, points: int) -> Floats:
        below = 1 - self._shrunk + self._shrunk * deltas[self._mirror]
        lattice = np.concatenate([below, deltas, np.full(len(below) + 1, deltas[-1])])
        shifted = np.empty((self._weighing[0].shape[1], points))
        shifted[-1] = 1.0  # above W, for every shift
        shifted[:-1] = np.lib.stride_tricks.sliding_window_view(lattice, points)[: len(shifted) - 1]
        before, after = self._void
        reached = (weights @ shifted for weights in self._weighing)
        largest = _largest(self._change, reached, before[:, :points], after[:, :points])
        found = np.minimum(largest * (1 + _ROUNDING) + _FAR, 1.0)
        found = np.pad(found, (0, len(deltas) - points), mode="edge")
        return np.asarray(np.maximum.accumulate(found[::-1])[::-1])


@lru_cache(maxsize=4)
def _ladder(change: Change, mu: float) -> _Ladder:
    return _Ladder(change, mu)


def _weighing(stretches: list[tuple[Floats, Floats]], step: float, most: int) -> tuple[list[Any], int]:
    """Per cut, return the matrix [stretches, shifts and ones] that makes phi of shifted copies of W, and reach."""
    from scipy.sparse import csr_array

    with np.errstate(divide="ignore", invalid="ignore"):
        shifts = [np.where(p > 0, np.log(q / p) / step, 0.0) for p, q in stretches]
    finite = np.concatenate(shifts)
    reach = int(np.ceil(np.max(np.abs(finite[np.isfinite(finite)]), initial=1.0))) + 1
    reach = min(reach, most)
    ones, found = 2 * reach + 2, []
    for (p, _), shift in zip(stretches, shifts, strict=True):
        is_far = shift < -reach
        low = np.clip(np.floor(np.where(is_far, 0.0, shift)), -reach, reach)
        share = np.expm1(np.clip(shift - low, 0.0, 1.0) * step) / math.expm1(step)
        share = np.where(shift > reach, 0.0, share)  # W decreases: the value at the last shift is above it
        columns = np.concatenate([np.where(is_far, ones, low + reach), np.where(is_far, ones, low + 1 + reach)])
        weights = np.concatenate([p * (1 - share), p * share])
        rows = np.tile(np.arange(len(p)), 2)
        found.append(csr_array((weights, (rows, columns)), shape=(len(p), ones + 1)))
    return found, reach
