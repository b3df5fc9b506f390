"""DPPL (Wahdany, Jagielski, Dziedzic, Boenisch, AAAI 2025), from its definition: one private prototype for each class.

**DPPL-Mean.** Features, made shorter by averaging runs of `pool` neighbouring numbers, normalised; their sum over
each class is released with Gaussian noise; an image belongs to the class whose sum it has the largest cosine with.
A record enters the sum of its own class with norm at most 1 and no other: a vector of `world`, sensitivity 1. (The
authors release a mean under pure or zero-concentrated privacy; a cosine needs no count, so this rival pays for
none, and the analytic price of the Gaussian is lower than theirs.)

**DPPL-Public.** For each class y the exponential mechanism draws one public image z with probability proportional
to exp(eta u_y(z)), u_y(z) = sum over the records of class y of s(x, z), s the cosine cut to [low, high] and brought
to [0, 1].

*Price.* Let D' be D with a record x of class y. Only u_y changes, and u'_y(z) - u_y(z) = s(x, z) is in [0, 1] for
every z. With Z, Z' the two normalisers the log-ratio of the probabilities of z is eta s(x, z) - log(Z'/Z): the
first term is in [0, eta] and the second is one number of [0, eta], so ratios lie in an interval of length eta that
holds 0 (bounded range), which is eta-DP without the factor 2 of scores that may fall. Draws for the C classes are
independent and a record touches one, so all of them cost what one does. With delta: where ratios lie in [t - eta,
t], the hockey-stick divergence is largest for two outcomes at the ends, of which the upper has the probability p =
(1 - e^(t - eta)) / (1 - e^-eta); so delta(epsilon) = max over t of p (1 - e^(epsilon - t)) (Dong, Durfee, Rogers
2020, Lemma 3.2, in both directions by symmetry of the interval). eta is the largest whose delta(epsilon) is at most
delta. Given to this rival: one curator holds all scores and draws in double precision. Federated, it would need
exponentials inside secure computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.world import Predict, World, class_sums, noisy_sum, unit

_STEPS = 2_000


@dataclass(frozen=True)
class ClassMeans:
    """DPPL-Mean; see the module.

    Attributes:
        pool: how many neighbouring numbers of a feature are averaged into one.
    """

    pool: int = 1

    @property
    def name(self) -> str:
        return "DPPL-Mean"

    def fit(self, world: World) -> Predict:
        """Each agent's sums."""
        sums = self.vectors(world)
        seen = unit(self._pooled(world.asked))

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            prototypes = unit(noisy_sum(world, sums, epsilon, draw=draw))
            return np.asarray((seen @ prototypes.T).argmax(axis=1), dtype=np.int64)

        return predict

    def vectors(self, world: World) -> list[NDArray[np.float64]]:
        """What agents send, before noise."""
        return [class_sums(one, unit(self._pooled(one.inputs)), world.num_classes) for one in world.holdings]

    def _pooled(self, features: NDArray[np.floating]) -> NDArray[np.floating]:
        return np.asarray(features.reshape(len(features), features.shape[1] // self.pool, self.pool).mean(axis=2))


@dataclass(frozen=True)
class PublicPrototypes:
    """DPPL-Public; see the module.

    Attributes:
        low, high: to which cosines are cut.
    """

    low: float = 0.0
    high: float = 1.0

    @property
    def name(self) -> str:
        return "DPPL-Public"

    def fit(self, world: World) -> Predict:
        """The scores of all public images for each class, summed over agents: what a curator would hold."""
        candidates = unit(world.public)
        scores = np.sum(
            [
                class_sums(one, self.scores(near), world.num_classes)
                for one, near in zip(world.holdings, world.similarities, strict=True)
            ],
            axis=0,
        )
        seen = unit(world.asked)

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            chosen = scores
            if epsilon is not None:
                random = np.random.default_rng([draw, 7])
                chosen = range_at(epsilon, world.delta) * scores + random.gumbel(size=np.shape(scores))
            prototypes = candidates[np.argmax(chosen, axis=1)]
            return np.asarray((seen @ prototypes.T).argmax(axis=1), dtype=np.int64)

        return predict

    def scores(self, cosines: NDArray[np.floating]) -> NDArray[np.float64]:
        """s(x, z) in [0, 1], shape (records, candidates)."""
        cut = np.clip(cosines.astype(np.float64), self.low, self.high)
        return np.asarray((cut - self.low) / (self.high - self.low))


def delta_of_range(epsilon: float, eta: float) -> float:
    """delta(epsilon) of one mechanism of range eta; see the module."""
    if eta <= epsilon:
        return 0.0
    t = np.linspace(epsilon, eta, _STEPS)
    # Between two points of the grid the first factor is at most its left end's, the second at most its right end's.
    upper = -np.expm1(t[:-1] - eta) / -math.expm1(-eta)
    return float(np.max(upper * -np.expm1(epsilon - t[1:])))


def range_at(epsilon: float, delta: float) -> float:
    """The largest eta (to a millionth) whose mechanism is (epsilon, delta)-DP."""
    low, high = epsilon, 2 * epsilon + 1
    while high - low > 1e-6 * epsilon:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of_range(epsilon, middle) <= delta else (low, middle)
    return low
