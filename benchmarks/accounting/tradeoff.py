"""Trade-off functions: how hard it is to tell two neighbouring inputs apart, as a curve of two error rates.

A test that is to find out whether an output came from P or from Q errs in two ways: it cries Q though it was P
(type I, rate alpha), or it stays with P though it was Q (type II). The trade-off function T(P, Q)(alpha) is the least
type II error of all tests with type I error at most alpha. It is convex, does not increase, and lies below
Id(alpha) = 1 - alpha, where outputs tell nothing. A mechanism is f-DP if T(M(S), M(S')) >= f for all neighbours.
Everything else follows from the curve: (epsilon, delta)-DP holds exactly for

    delta(epsilon) = sup over alpha of 1 - f(alpha) - e^epsilon alpha = 1 + f*(-e^epsilon),

f* the convex conjugate f*(y) = sup_x (x y - f(x)); so (epsilon, delta) for all epsilon is f again, as f** = f.

Two kinds of curve are here: `Curve`, convex and piecewise linear, which is what pairs of finite distributions have
and on which every operation is exact; and `SampledGaussian`, C_p(G_mu) in closed form, with G_mu itself at p = 1.
Composing many of them numerically is `benchmarks.accounting.composition`.

References:
    Dong, Roth, Su 2022 (definitions 2.1 to 2.6, propositions 2.5 and 2.12, theorem 4.2).
    Zheng, Chen, Long, Su 2021, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from labeler.errors import InvalidSetting

Floats = NDArray[np.float64]

_TOLERANCE = 1e-9
_REACH = 9.5


class TradeOff(Protocol):
    """A trade-off function and its dual."""

    def __call__(self, alpha: ArrayLike) -> Floats:
        """The least type II error at each type I error `alpha` in [0, 1]."""
        ...

    def delta(self, epsilon: ArrayLike) -> Floats:
        """1 + f*(-e^epsilon): the least delta for each real `epsilon`."""
        ...


@dataclass(frozen=True, eq=False)
class Curve:
    """A convex, piecewise linear trade-off function, given by its corners.

    Attributes:
        alphas: type I errors of the corners, ascending from 0 to 1.
        betas: type II errors there, from at most 1 down to 0.

    Raises:
        InvalidSetting: the corners do not make a trade-off function.
    """

    alphas: Floats = field(repr=False)
    betas: Floats = field(repr=False)

    def __post_init__(self) -> None:
        alphas, betas = (np.array(part, dtype=np.float64) for part in (self.alphas, self.betas))
        if alphas.ndim != 1 or alphas.shape != betas.shape or len(alphas) < 2:
            raise InvalidSetting("a trade-off curve needs at least two corners, one alpha and one beta each")
        if not (np.isfinite(alphas).all() and np.isfinite(betas).all()):
            raise InvalidSetting("the corners of a trade-off curve must be finite numbers")
        if alphas[0] != 0 or alphas[-1] != 1 or (np.diff(alphas) <= 0).any():
            raise InvalidSetting("the alphas of a trade-off curve must ascend from 0 to 1")
        if (betas < -_TOLERANCE).any() or betas[-1] > _TOLERANCE or (betas > 1 - alphas + _TOLERANCE).any():
            raise InvalidSetting("a trade-off curve lies between 0 and 1 - alpha; a beta found lies outside")
        # A chord must not lie below the corner between its ends.
        left, right = np.diff(alphas)[:-1], np.diff(alphas)[1:]
        chord = (betas[:-2] * right + betas[2:] * left) / (left + right)
        if (np.diff(betas) > _TOLERANCE).any() or (betas[1:-1] > chord + _TOLERANCE).any():
            raise InvalidSetting("a trade-off curve falls and is convex; the corners found do not")
        betas = np.clip(betas, 0.0, 1.0)
        betas[-1] = 0.0
        for name, part in (("alphas", alphas), ("betas", betas)):
            part.setflags(write=False)
            object.__setattr__(self, name, part)

    def __call__(self, alpha: ArrayLike) -> Floats:
        return np.interp(_rates(alpha), self.alphas, self.betas)

    def delta(self, epsilon: ArrayLike) -> Floats:
        """1 + f*(-e^epsilon); the supremum is taken in a corner, which is found by its slopes."""
        # Beyond e^700 the supremum stays where it is, at alpha = 0.
        slope = np.exp(np.minimum(np.asarray(epsilon, dtype=np.float64), 700.0))
        steepness = -np.diff(self.betas) / np.diff(self.alphas)
        corner = len(steepness) - np.searchsorted(steepness[::-1], slope, side="left")
        return np.clip(1 - self.betas[corner] - slope * self.alphas[corner], 0.0, 1.0)

    def inverse(self) -> Curve:
        """f^-1(alpha) = inf {t : f(t) <= alpha}: T(Q, P) where this is T(P, Q)."""
        # Mirrored corners; a flat end at zero becomes the jump that an inverse has at alpha = 0.
        first_zero = int(np.argmax(self.betas <= 0))
        alphas, betas = self.betas[first_zero::-1], self.alphas[first_zero::-1]
        if alphas[-1] < 1:
            alphas, betas = np.append(alphas, 1.0), np.append(betas, 0.0)
        return lower_hull(alphas, betas)

    def pair(self) -> tuple[Floats, Floats]:
        """Finite distributions (P, Q) with T(P, Q) = this: one outcome per edge, and one that only Q has."""
        p, q = np.diff(self.alphas), -np.diff(self.betas)
        return np.append(0.0, p), np.append(max(0.0, 1 - float(self.betas[0])), q)


@dataclass(frozen=True)
class SampledGaussian:
    """C_p(G_mu): a mu-GDP mechanism run on a random part of the records; p = 1 is G_mu itself.

    G_mu = T(N(0, 1), N(mu, 1)), G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu). With f_p = p f + (1 - p) Id,
    C_p(f) = min{f_p, f_p^-1}** (Dong, Roth, Su 2022, definition 4.1). Let x* = Phi(-mu/2) be the fixed point of G_mu.
    Then f_p has slope -1 at x*, f_p^-1 has slope -1 at f_p(x*), and the hull joins the two points by a line:

        C_p(G_mu)(alpha) = f_p(alpha)                 for alpha <= x*,
                           x* + f_p(x*) - alpha       for alpha between x* and f_p(x*),
                           f_p^-1(alpha)              for alpha >= f_p(x*).

    **The loss.** It is T(P, Q) for a pair with privacy loss l(z) = log(1 - p + p e^(mu z - mu^2/2)), z > mu/2, on one
    side, where P has the mass of N(0, 1) and Q that of (1 - p) N(0, 1) + p N(mu, 1); -l on the other, with P and Q
    exchanged; and an atom at loss 0, the line in the middle. So for epsilon >= 0

        delta(epsilon)  = p delta_mu(log(1 + (e^epsilon - 1) / p)),
        delta(-epsilon) = 1 - e^-epsilon (1 - delta(epsilon)).

    **What it bounds.** (a) A batch of fixed size B = p n drawn without replacement, neighbours that differ by
    replacing one record, a mechanism that is mu-GDP under replacement (a sum clipped at c moves by 2 c): theorem 4.2.
    (b) Poisson sampling with rate p, neighbours by adding or removing one record (the sum moves by c): there T(M(S),
    M(S')) is f_p or f_p^-1, both at least C_p(f); composing them apart is tighter
    (`benchmarks.accounting.composition.poisson`). Sampling *with* replacement is neither.

    Attributes:
        mu: at least 0, finite.
        probability: p, in (0, 1].

    Raises:
        InvalidSetting: a number is out of bounds.
    """

    mu: float
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise InvalidSetting(f"mu must be a finite number of at least 0, found {self.mu}")
        check_probability(self.probability)

    def __call__(self, alpha: ArrayLike) -> Floats:
        rates = _rates(alpha)
        p, fixed = self.probability, float(ndtr(-self.mu / 2))
        corner = p * fixed + (1 - p) * (1 - fixed)
        left = self._mixed(np.minimum(rates, fixed))
        right = self._mixed_inverse(np.maximum(rates, corner))
        return np.where(rates <= fixed, left, np.where(rates >= corner, right, fixed + corner - rates))

    def delta(self, epsilon: ArrayLike) -> Floats:
        levels = np.asarray(epsilon, dtype=np.float64)
        if self.mu == 0:
            return np.maximum(0.0, -np.expm1(levels))
        z, above = self.loss_quantile(np.abs(levels)), np.abs(levels)
        # p (Phi(mu - z) - e^x Phi(-z)) with e^x p = e^epsilon - 1 + p, in logarithms: both terms may be tiny.
        first = math.log(self.probability) + log_ndtr(self.mu - z)
        second = above + np.log1p((self.probability - 1) * np.exp(-above)) + log_ndtr(-z)
        delta = np.maximum(0.0, np.exp(first) - np.exp(second))
        both: Floats = np.where(levels >= 0, delta, 1 - np.exp(-above) * (1 - delta))
        return both

    def loss_quantile(self, losses: ArrayLike) -> Floats:
        """The z >= mu/2 at which the loss is `losses` >= 0: l(z) = log(1 - p + p e^(mu z - mu^2/2)); mu > 0."""
        values = np.asarray(losses, dtype=np.float64)
        # log((e^l - 1 + p) / p), with e^l taken out so that it cannot overflow.
        scaled = values + np.log1p((self.probability - 1) * np.exp(-values)) - math.log(self.probability)
        z: Floats = scaled / self.mu + self.mu / 2
        return z

    def pair(self, interval: float) -> tuple[Floats, Floats]:
        """Masses (P, Q) of cells of loss, each of this width at most: finite distributions that say a little less.

        A cell is one outcome that stands for many, so T of these masses lies above this curve; what is made of them
        must round each cell up again, as `benchmarks.accounting.composition` does. The last outcome is the far end
        of the loss, with a mass below 1e-20, which only Q has.
        """
        if self.mu == 0:
            return np.ones(1), np.ones(1)
        p, far = self.probability, self.mu + _REACH
        reach = math.log1p(p * math.expm1(self.mu * far - self.mu**2 / 2))
        z = self.loss_quantile(np.arange(math.ceil(reach / interval) + 1) * interval)
        beyond_p = ndtr(-z)
        beyond_q = p * ndtr(self.mu - z) + (1 - p) * beyond_p
        of_p, of_q = -np.diff(beyond_p), -np.diff(beyond_q)
        atom = max(0.0, 1 - float(beyond_p[0]) - float(beyond_q[0]))
        end_p, end_q = float(beyond_p[-1]), float(beyond_q[-1])
        return np.concatenate([of_q, [atom], of_p, [0.0]]), np.concatenate([of_p, [atom + end_p], of_q, [end_q]])

    def _mixed(self, alpha: Floats) -> Floats:
        mixed: Floats = self.probability * ndtr(-ndtri(alpha) - self.mu) + (1 - self.probability) * (1 - alpha)
        return mixed

    def _mixed_inverse(self, alpha: Floats) -> Floats:
        """f_p^-1 by bisection: f_p falls, so this is its only root; exact to the last bits of double precision."""
        low, high = np.zeros_like(alpha), np.ones_like(alpha)
        for _ in range(60):
            middle = (low + high) / 2
            is_above = self._mixed(middle) > alpha
            low, high = np.where(is_above, middle, low), np.where(is_above, high, middle)
        return high


def gaussian(mu: float) -> SampledGaussian:
    """G_mu = T(N(0, 1), N(mu, 1)): Gaussian differential privacy."""
    return SampledGaussian(mu)


def identity() -> Curve:
    """Id(alpha) = 1 - alpha: perfect privacy, and the neutral element of composition."""
    return Curve(np.array([0.0, 1.0]), np.array([1.0, 0.0]))


def epsilon_delta(epsilon: float, delta: float) -> Curve:
    """f_{epsilon,delta}(alpha) = max{0, 1 - delta - e^epsilon alpha, e^-epsilon (1 - delta - alpha)}.

    (epsilon, delta)-DP is f-DP for exactly this f (Wasserman, Zhou 2010; Dong, Roth, Su 2022, proposition 2.4).

    Raises:
        InvalidSetting: epsilon is negative or not finite, or delta outside [0, 1].
    """
    if not (0 <= epsilon < math.inf and 0 <= delta <= 1):
        raise InvalidSetting(f"epsilon must be at least 0 and delta in [0, 1], found {epsilon} and {delta}")
    fixed = (1 - delta) / (1 + math.exp(epsilon))
    return lower_hull(np.array([0.0, fixed, 1 - delta, 1.0]), np.array([1 - delta, fixed, 0.0, 0.0]))


def of_pair(p: ArrayLike, q: ArrayLike) -> Curve:
    """T(P, Q) of two finite distributions, by the lemma of Neyman and Pearson: outcomes by falling ratio q / p.

    Args:
        p, q: probabilities of the same outcomes in the same order, of any shape.

    Raises:
        InvalidSetting: they are not two distributions over the same outcomes.
    """
    first, second = (np.asarray(part, dtype=np.float64).ravel() for part in (p, q))
    if first.shape != second.shape or min(first.min(), second.min()) < 0 or not _sum_to_one(first, second):
        raise InvalidSetting("a trade-off function needs two distributions over the same outcomes")
    order = np.argsort(-np.arctan2(second, first), kind="stable")
    alphas = np.concatenate([[0.0], np.cumsum(first[order])])
    betas = np.concatenate([[1.0], 1 - np.cumsum(second[order])])
    alphas[-1], betas[-1] = 1.0, 0.0
    return lower_hull(np.clip(alphas, 0.0, 1.0), np.clip(betas, 0.0, 1.0))


def lower_hull(alphas: ArrayLike, betas: ArrayLike) -> Curve:
    """The largest convex curve below some points: the double conjugate of any function that joins them.

    Args:
        alphas, betas: points of error rates, in any order; the points (0, 1) and (1, 0) are always among them.
    """
    x = np.concatenate([np.asarray(alphas, dtype=np.float64), [0.0, 1.0]])
    y = np.concatenate([np.asarray(betas, dtype=np.float64), [1.0, 0.0]])
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    is_lowest = np.append(True, np.diff(x) > 0)
    hull: list[tuple[float, float]] = []
    for point in zip(x[is_lowest].tolist(), y[is_lowest].tolist(), strict=True):
        while len(hull) > 1 and _turns_right(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    corners = np.array(hull)
    return Curve(corners[:, 0], np.minimum.accumulate(corners[:, 1]))


def envelope(curves: Iterable[Curve]) -> Curve:
    """min{f, g, ...}**: the largest trade-off function below all of the curves."""
    every = list(curves)
    return lower_hull(np.concatenate([f.alphas for f in every]), np.concatenate([f.betas for f in every]))


def mix(f: Curve, probability: float) -> Curve:
    """f_p = p f + (1 - p) Id: the record is looked at with probability p, and one cannot see whether it was."""
    check_probability(probability)
    return Curve(f.alphas, probability * f.betas + (1 - probability) * (1 - f.alphas))


def subsample(f: Curve, probability: float) -> Curve:
    """C_p(f) = min{f_p, f_p^-1}**, exactly, for a piecewise linear f; see `SampledGaussian` for what it bounds.

    Raises:
        InvalidSetting: f is not symmetric (then the operator is not defined), or p is out of bounds.
    """
    if distance(f, f.inverse()) > 1e-7:
        raise InvalidSetting("C_p(f) is defined for a symmetric f: take envelope([f, f.inverse()]) first")
    mixed = mix(f, probability)
    return envelope([mixed, mixed.inverse()])


def product(f: Curve, g: Curve) -> Curve:
    """The composition f x g = T(P x P', Q x Q'), exactly; as many corners as pairs of edges, so for small curves."""
    (p, q), (other_p, other_q) = f.pair(), g.pair()
    return of_pair(np.outer(p, other_p), np.outer(q, other_q))


def conjugate(f: TradeOff, slopes: ArrayLike) -> Floats:
    """f*(y) = sup over x in [0, 1] of (x y - f(x)) for slopes y < 0: by duality delta(log(-y)) - 1."""
    return f.delta(np.log(-np.asarray(slopes, dtype=np.float64))) - 1


def distance(f: TradeOff, g: TradeOff, *, points: int = 20_001) -> float:
    """The largest vertical distance of two curves over a grid that is dense at both ends."""
    even = np.linspace(0.0, 1.0, points)
    alphas = np.concatenate([even, np.logspace(-12, -1, 2001), 1 - np.logspace(-12, -1, 2001)])
    return float(np.abs(f(alphas) - g(alphas)).max())


def check_probability(probability: float) -> None:
    """Raise InvalidSetting unless this is a number in (0, 1]."""
    if not 0 < probability <= 1:
        raise InvalidSetting(f"a sampling probability must lie in (0, 1], found {probability}")


def _rates(alpha: ArrayLike) -> Floats:
    rates = np.asarray(alpha, dtype=np.float64)
    if not ((rates >= 0) & (rates <= 1)).all():
        raise InvalidSetting("a type I error must lie in [0, 1]")
    return rates


def _sum_to_one(*distributions: NDArray[Any]) -> bool:
    return all(abs(float(part.sum()) - 1) < 1e-9 for part in distributions)


def _turns_right(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    along = (middle[0] - first[0]) * (last[1] - first[1])
    return along - (middle[1] - first[1]) * (last[0] - first[0]) <= 0
