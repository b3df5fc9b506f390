"""Sampled sums in which a contributor's vector is replaced by another: a removal and an addition, as one pair.

With an agent as the unit that is sampled, one of its records changes its vector u to another, u'. `sampled_pair` proves
(mu^2, delta_0) for T rounds with u and without it, whatever u is, and so for those without it and with u'.

**Claim.** T rounds with u and with u' are (4 mu^2, delta_1), delta_1 = Phi(Phi^-1(delta_0) + mu) + delta_0.

*Proof.* Write M, M0, M' for the three, and h(x) = Phi(Phi^-1(x) + mu), which is concave and increasing with h(0) = 0.
That H_y <= G_y + delta_0 for every y >= 0 (`labeler.accounting.pair`) says of any test f that

    E_M0 f  <=  inf_y (y E_M f + G_y) + delta_0  =  h(E_M f) + delta_0,

as the infimum is the Gaussian's own trade-off. Likewise E_M' f <= h(E_M0 f) + delta_0, so with a = E_M f

    E_M' f  <=  h(h(a) + delta_0) + delta_0  <=  h(h(a)) + h(delta_0) + delta_0,

since a concave function from zero is subadditive; and h(h(a)) = Phi(Phi^-1(a) + 2 mu). QED. u and u' change places for
the other order.

h(delta_0) is far above delta_0, so delta_0 is chosen as small as profiles are computed, and where delta_1 is above what
a ledger may leave over (`SPILL` of 4 mu^2), or sampling saves nothing, T (2 mu_1)^2 is charged, mu_1 that of one round:
with all coins fixed, two vectors of one ball are at most twice its radius apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from labeler.accounting.events import SPILL
from labeler.accounting.pair import in_nano_units
from labeler.accounting.sampled import IntegerSampled, sampled_pair

LEAST_REST = 1e-35
"""delta_0: the smallest that `labeler.accounting.sampled` proves anything for."""


@dataclass(frozen=True, kw_only=True)
class IntegerReplaced(IntegerSampled):
    """T openings of noisy integer sums over secret samples, in which a contributor's vectors are others on neighbouring
    data; `squared_sensitivity` is that of a vector against none, and what a vector has to do with another is not asked.
    `largest_change` is that of one vector against another.
    """

    @property
    def mu_squared(self) -> Fraction:
        """Of the Gaussian part, in whole nano-units; see this module."""
        from scipy.special import ndtr, ndtri

        whole = 4 * self.rounds * Fraction(self.mu) ** 2
        pair = sampled_pair(self.mu, self.sampling_rate, self.rounds, delta_0=LEAST_REST)
        twice = 4 * pair.mu_squared
        # Twice the rest is a margin for two special functions, which are exact to 1e-12 of themselves or so.
        rest = 2 * float(ndtr(ndtri(LEAST_REST) + math.sqrt(pair.mu_squared))) + LEAST_REST
        if pair.delta_0 == 0 or twice >= whole or rest > SPILL * twice:
            return in_nano_units(whole)
        return twice
