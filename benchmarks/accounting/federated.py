"""Federated f-differential privacy: what clients learn about one record of another client, alone and all together.

m clients train in rounds. In a round some of them send a model to the server and get a helper model back, made from
what was sent. S and S' differ in one record of client j. With M_i the helper models that client i sees (Zheng, Chen,
Long, Su 2021, definitions 3.5 and 3.6), training satisfies

    weak   federated f-DP if T(M_i(S), M_i(S')) >= f for all j and each single i other than j,
    strong federated f-DP if T(M_-j(S), M_-j(S')) >= f for all j, M_-j what all others see together.

Strong implies weak: one view is a function of all of them. Weak does not imply strong, whatever the number of
clients: if one client sees x + z and another z, with the noise z wide, each alone learns nothing and both together
learn x.

**What is guaranteed here.** Let the local training of client j be f_j-DP in each round it takes part in, given all
that it was sent before, and let R_j be the number of these rounds, known to everybody and chosen without looking at
data. By composition the models that j sends, together with everything anybody else has, are f_j composed R_j times.
Every helper model of every client, and what the server sees, is a function of these: so **the same f holds in the
weak sense, in the strong sense and against the server**. Noise is added by j itself, before anything leaves it;
nobody else's is relied on.

**Where this differs from the paper.**

1. Its theorem 1 claims g^(R) with g = max(f_j, 1 - alpha - p^2) in the weak sense, because in a round in which i and
   j are not both sampled, i learns nothing new about j. That holds for one round and fails for two: what j sends in
   round 1 to a third client k reaches i in round 2 through k's model. With R = 2, no noise and m = 3, i knows the
   record with probability 1 - (1 - p^2)^2 + p^4 (1 - p)^2, more than the 1 - (1 - p^2)^2 that the theorem leaves
   (`test_federated.py` counts it). Theorem 2 does not use the p^2.
2. Its strong bound, sqrt(m - 1) mu, multiplies trade-off functions of different clients as if their views were
   independent. They are not (see x + z above). The bound still holds, because strong f = weak f is better.
3. It charges R rounds where a client takes part in p R of them on average. A client's participation is public here,
   so it is charged what it took part in: the largest R_j is what counts, and is a fixed number for a fixed schedule.
4. Its mu is a limit and no bound. For many steps it is too high: 2.71 in the first row of table 1, where the
   composition it is the limit of is worth 2.60, and 37.51 in the last of table 3 for 20.2. For few steps it is too
   low: 0.28 for one round of the first row, which is worth 0.37 (all at delta 1e-5).
5. Its published code (federated-fdp, sampler.py) draws batches of a fixed size without replacement. Then neighbours
   replace a record and a clipped sum moves by 2 C, so noise of 2 sigma C is needed for C_p(G_{1/sigma}); with noise
   sigma C, what libraries for add-or-remove neighbours add, a step is C_p(G_{2/sigma}): `replaced`. What runs in
   `benchmarks.learning.personalised` is Poisson sampling, neighbours by adding or removing a record: `exact`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from scipy.special import ndtr

from benchmarks.accounting.composition import LOSS_INTERVAL, Composition, SampledGaussian, compose, poisson
from labeler.accounting.losses import Pair
from labeler.accounting.sampled import sampled_pair
from labeler.errors import InvalidSetting


@dataclass(frozen=True)
class LocalTraining:
    """Noisy SGD or noisy Adam at one client, over all rounds in which it takes part.

    Each of `iterations * rounds` steps sums the gradients of a random batch, each clipped to norm C, and adds noise
    of standard deviation noise_multiplier * C. Momentum, Adam's moments and the models sent are functions of the
    noisy sums.

    Attributes:
        records: n, the client's records; public.
        batch: B, the (mean) size of a batch; each record's rate is B / n.
        noise_multiplier: sigma, in units of C.
        iterations: K, steps between two synchronisations.
        rounds: R, rounds in which the client takes part.

    Raises:
        InvalidSetting: a number is out of bounds.
    """

    records: int
    batch: int
    noise_multiplier: float
    iterations: int
    rounds: int

    def __post_init__(self) -> None:
        if min(self.records, self.batch, self.iterations, self.rounds) < 1 or self.batch > self.records:
            raise InvalidSetting("local training needs at least one record, iteration and round, and batches within n")
        if not 0 < self.noise_multiplier < math.inf:
            raise InvalidSetting(f"a noise multiplier must be positive and finite, found {self.noise_multiplier}")

    @property
    def rate(self) -> float:
        """B / n: the probability with which one record is in one batch."""
        return self.batch / self.records

    @property
    def steps(self) -> int:
        """K R: how many noisy sums are taken of the client's records."""
        return self.iterations * self.rounds

    @property
    def clt_mu(self) -> float:
        """Theorem 2 of the paper: the limit of C_{B/n}(G_{1/sigma}) composed K R times. Shown, never charged."""
        s = self.noise_multiplier
        spread = math.exp(s**-2) * float(ndtr(1.5 / s)) + 3 * float(ndtr(-0.5 / s)) - 2
        return math.sqrt(2) * self.rate * math.sqrt(self.steps) * math.sqrt(spread)

    def as_printed(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """C_{B/n}(G_{1/sigma}) composed K R times, exactly: what theorem 2 takes the limit of."""
        return compose(SampledGaussian(1 / self.noise_multiplier, self.rate), self.steps, interval=interval)

    def exact(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Poisson sampling with rate B / n, neighbours by adding or removing one record: what runs here."""
        return poisson(self.noise_multiplier, self.rate, self.steps, interval=interval)

    @property
    def charged(self) -> Pair:
        """What a ledger is charged for what `exact` composes, certified."""
        return sampled_pair(1 / self.noise_multiplier, Fraction(self.batch, self.records), self.steps)

    def replaced(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Batches of exactly B without replacement, neighbours by replacing a record, noise sigma C for a 2 C move."""
        return compose(SampledGaussian(2 / self.noise_multiplier, self.rate), self.steps, interval=interval)


def strong_mu_as_printed(weak_mu: float, clients: int) -> float:
    """Theorem 2's sqrt(m - 1) mu. The guarantee in the strong sense is weak_mu itself: see the module."""
    return math.sqrt(clients - 1) * weak_mu
