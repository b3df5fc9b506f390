"""A certificate of winners (`labeler.accounting.winner`) read at any epsilon or delta."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labeler.accounting import winner
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.accounting.losses import OF_FORMULA


@dataclass(frozen=True)
class Profile:
    """An upper bound on a divergence at points, and by chords in e^epsilon between them.

    Attributes:
        epsilons, deltas: [points]; the last delta holds for everything above.
        mu: of the sums that winners are read from, whose Gaussian is above the divergence, too.
    """

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]
    mu: float

    def delta(self, epsilon: float) -> float:
        chord = float(np.interp(math.exp(min(epsilon, self.epsilons[-1])), np.exp(self.epsilons), self.deltas))
        return min(chord, delta_of_epsilon(epsilon, self.mu) * (1 + OF_FORMULA))

    def epsilon(self, delta: float) -> float:
        of_sums = epsilon_of_delta(delta / (1 + OF_FORMULA), self.mu)
        above = int(np.count_nonzero(self.deltas > delta))
        if above in (0, len(self.deltas)):
            return of_sums if above else 0.0
        y, d = np.exp(self.epsilons[above - 1 : above + 1]), self.deltas[above - 1 : above + 1]
        return min(of_sums, float(math.log(y[0] + (y[1] - y[0]) * (d[0] - delta) / (d[0] - d[1]))))


def winner_profile(change: winner.Change, mu: float, queries: int) -> Profile:
    found = winner.winner_profile(change, mu, queries)
    return Profile(found.epsilons, found.deltas, mu * math.sqrt(queries))
