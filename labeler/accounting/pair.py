"""A pair (mu^2, delta_0): what a mechanism is charged as that no Gaussian above it prices well.

**Definition.** A mechanism costs the pair if for every epsilon >= 0, and both orders of neighbours, it is
(epsilon, delta_mu(epsilon) + delta_0)-DP, delta_mu that of N(0, 1) against N(mu, 1).

**Pairs add up.** Write H_y(Q, P) for the hockey-stick divergence, the integral of (dQ - y dP)^+. As both orders cost
the pair, H_y(Q, P) <= G_y + delta_0 for every y >= 0, G of the Gaussians: below 1, H_y(Q, P) = 1 - y + y H_{1/y}(P, Q).
Let a second mechanism, chosen after the first one's outcome, cost (nu^2, delta_1). Both together have at most

    E_Q [ H'_{y P/Q} ]  <=  E_Q [ G'_{y P/Q} ] + delta_1  <=  G''_y + delta_0 + delta_1,        G'' of mu^2 + nu^2:

G'_{yr} is convex and falls from 1 to 0 in r, so it is a mixture of functions (1 - r z)^+ of weight 1 in all, the
expectation of each is H_z(Q, P), and mixing G_z instead gives the Gaussian pair of both (Zhu, Dong, Wang 2022, theorem
10, says so of dominating pairs without a rest).

**What ledgers keep** is mu^2 alone: delta_0 is at most `SPILL` mu^2, so a ledger of mu^2 bounds it, too, and every
epsilon that is stated for a sum of charges leaves room for it (`labeler.budget`, `labeler.accounting.integer`).

References:
    Zhu, Dong, Wang 2022, Optimal accounting of differential privacy via characteristic function. AISTATS.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import NANO, nano_units
from labeler.accounting.gaussian import deltas_of_epsilons

Floats = NDArray[np.float64]

OF_FORMULA = 1e-9
"""Relative: a hundred times the error of `labeler.accounting.gaussian`."""

_CUTS = 8
_CLOSE = 1e-7


@dataclass(frozen=True)
class Pair:
    """What a mechanism is charged as: for every epsilon >= 0 it is (epsilon, delta_mu(epsilon) + delta_0)-DP.

    Attributes:
        mu_squared: of the Gaussian part, rounded up to whole nano-units.
        delta_0: the rest; where a ledger is charged, at most `SPILL` times mu_squared. Both add up under adaptive
            composition, with any Gaussian charge too.
    """

    mu_squared: Fraction
    delta_0: float


def least_gaussian(epsilons: Floats, deltas: Floats, delta_0: float, low: float, high: float) -> float | None:
    """A mu in [low, high], the least but for rounding, with profile <= delta_mu + delta_0 at every epsilon >= 0.

    Between points the profile is at most its chord and delta_mu at least its value at the right, so chords are cut into
    eight and each piece's left end is compared with its right. Beyond the last point the profile must be within
    delta_0.

    Args:
        epsilons: [points], ascending, from 0.
        deltas: [points], an upper bound on the profile, convex in e^epsilon and not increasing; the last one holds for
            everything above.
        delta_0: what may be left over.
        low, high: between them mu is looked for; that `high` suffices is checked.

    Returns:
        mu; None where `high` does not suffice.
    """
    if not (deltas[-1] <= delta_0 and np.isfinite(deltas).all()):
        return None
    points = np.arange(len(epsilons))
    every = np.interp(np.linspace(0, points[-1], _CUTS * points[-1] + 1), points, epsilons)
    left = np.interp(np.exp(every), np.exp(epsilons), deltas)[:-1] - delta_0
    right, left = every[1:][left > 0], left[left > 0] * (1 + OF_FORMULA)

    def reached(mu: float, at: list[int] | slice) -> Floats:
        """From 1 on delta_mu suffices at these points."""
        return np.asarray(deltas_of_epsilons(right[at], mu) / left[at])

    if not np.all(reached(high, slice(None)) >= 1):
        return None

    def halved(at: list[int] | slice) -> float:
        below, found = low, high
        while found - below > _CLOSE * found:
            middle = (below + found) / 2
            below, found = (below, middle) if np.all(reached(middle, at) >= 1) else (middle, found)
        return found

    # delta_mu grows with mu, so halving over a few points ends where halving over all would, if all hold there.
    watched: list[int] = []
    while True:
        found = halved(watched)
        every = reached(found, slice(None))
        if np.all(every >= 1):
            return found
        worst = int(np.argmin(every))
        if worst in watched:
            return halved(slice(None))  # a sum may be rounded otherwise beside other points: this would go on for ever
        watched.append(worst)


def in_nano_units(mu_squared: Fraction) -> Fraction:
    """mu^2, rounded up to whole nano-units."""
    return Fraction(nano_units(mu_squared), NANO)
