"""Federated f-differential privacy, and what its local training costs: the printed limit, exact and certified prices.

T(P, Q)(alpha) is the least type II error of all tests of P against Q with type I error at most alpha. A mechanism is
f-DP if T of its outputs on any two neighbors is at least f. Composing T(P, Q) and T(P', Q') gives T(P x P', Q x Q').
This holds also if the second mechanism is chosen after seeing the output of the first. Under Q the privacy losses
log(q/p) of the parts are independent and add up, so the law of the whole loss is a convolution. It runs on a grid of
losses by dp-accounting, whose rounding never flatters ("connect the dots": Doroshenko, Ghazi, Kamath, Kumar,
Manurangsi 2022). That holds up to the transforms' own error, about 1e-15 in delta; what is charged is certified, errors
of transforms included (`labeler.accounting.losses`).

**Federated f-differential privacy** bounds what clients learn about one record of another client, alone and all
together. m clients train in rounds. In a round some of them send a model to the server and get a helper model back,
made from what was sent. S and S' differ in one record of client j. M_i are the helper models that client i sees, M_-j
what all others than j see together. (Zheng, Chen, Long, Su 2021, definitions 3.5 and 3.6.) Then training satisfies

    weak   federated f-DP if T(M_i(S), M_i(S')) >= f for all j and each single i other than j.
    strong federated f-DP if T(M_-j(S), M_-j(S')) >= f for all j.

Strong implies weak: one view is a function of all of them. Weak does not imply strong, whatever the number of clients.
For example, one client sees x + z and another z, with the noise z wide: each alone learns nothing and both together
learn x.

**The guarantee here.** Let the local training of client j be f_j-DP in each round it takes part in, given all that it
was sent before. Let R_j be the number of these rounds, known to everybody and chosen without looking at data. By
composition the models that j sends, together with everything anybody else has, are f_j composed R_j times. Every helper
model of every client, and what the server sees, is a function of these. So **the same f holds in the weak sense, in the
strong sense and against the server**. Client j adds noise itself, before anything leaves it; it relies on no other
client's noise.

**Differences from the paper.**

1. Its theorem 1 claims g^(R) with g = max(f_j, 1 - alpha - p^2) in the weak sense. Its reason: where i and j are not
both sampled in a round, i learns nothing new about j. That holds for one round and fails for two: what j sends in round
1 to a third client k reaches i in round 2 through k's model. Take R = 2, no noise and m = 3. Then i knows the record
with probability 1 - (1 - p^2)^2 + p^4 (1 - p)^2, more than the 1 - (1 - p^2)^2 that the theorem leaves
(`test_composition.py` counts it). Theorem 2 does not use the p^2.

2. Its strong bound, sqrt(m - 1) mu, multiplies trade-off functions of different clients as if their views were
independent. They are not (see x + z above). The bound still holds, because strong f = weak f is better.

3. It charges R rounds where a client takes part in p R of them on average. A client's participation is public here, so
it is charged for the rounds it took part in. The largest R_j counts, and is a fixed number for a fixed schedule.

4. Its mu is a limit and no bound. For many steps it is too high: 2.71 in the first row of table 1, where the
composition it is the limit of is worth 2.60, and 37.51 in the last of table 3 for 20.2. For few steps it is too low:
0.28 for one round of the first row, which is worth 0.37 (all at delta 1e-5).

5. Its published code (federated-fdp, sampler.py) draws batches of a fixed size without replacement. Then neighbors
replace a record and a clipped sum moves by 2 C, so C_p(G_{1/sigma}) needs noise of 2 sigma C. With noise sigma C, which
libraries for add-or-remove neighbors add, a step is C_p(G_{2/sigma}): `replaced`. What runs in
`benchmarks.papers.prifedsync` is Poisson sampling, neighbors by adding or removing one record: `exact`.

References:
    Dong, Roth, Su 2022, theorem 3.2. Koskela, Jälkö, Honkela 2020. Zheng, Chen, Long, Su 2021, theorem 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.special import ndtr

from labeler.accounting.gaussian import mu_of_epsilon
from labeler.accounting.losses import Pair
from labeler.accounting.sampled import sampled_pair

LOSS_INTERVAL = 2e-4
"""Width of a cell of loss: the variance of one step's loss, s^2, grows by at most a relative (interval / s)^2 / 4."""


@dataclass(frozen=True, eq=False)
class Composition:
    """Many mechanisms as one, for both orders of the neighbors: each answer holds for the worse order.

    Attributes:
        loss: the law of the whole privacy loss, of dp-accounting.
    """

    loss: Any = field(repr=False)

    def delta(self, epsilon: float) -> float:
        """Return the least delta at this epsilon of at least 0; never below the exact one."""
        return float(self.loss.get_delta_for_epsilon(epsilon))

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon at this delta; never below the exact one."""
        return float(self.loss.get_epsilon_for_delta(delta))

    def mu_at(self, delta: float) -> float:
        """Return the mu whose Gaussian mechanism has the same epsilon at this delta: for comparison with a limit
        theorem.
        """
        return mu_of_epsilon(self.epsilon(delta), delta)


def operator(mu: float, probability: float, times: int, *, interval: float = LOSS_INTERVAL) -> Composition:
    """Compose C_p(G_mu): a mu-GDP mechanism run on a random part p of the records, `times` times.

    With f_p = p G_mu + (1 - p) Id, C_p(G_mu) = min{f_p, f_p^-1}** (Dong, Roth, Su 2022, definition 4.1): f_p up to its
    point of slope -1, its inverse beyond, a line between. So for epsilon >= 0 its delta(epsilon) is that of f_p, and
    delta(-epsilon) = 1 - e^-epsilon (1 - delta(epsilon)). In masses of loss: those of f_p above 0, each with its mirror
    image e^-loss times as large, and the rest at 0.

    **It bounds two kinds of sampling.** (a) A batch of fixed size B = p n drawn without replacement, neighbors that
    differ by replacing one record, and a mechanism that is mu-GDP under replacement (a sum clipped at c moves by 2 c):
    theorem 4.2. (b) Poisson sampling with rate p, and neighbors by adding or removing one record (the sum moves by c).
    There T(M(S), M(S')) is f_p or f_p^-1, both at least C_p(f); composing them apart is tighter (`poisson`). Sampling
    *with* replacement is neither.

    Args:
        mu: positive, finite.
        probability: p, in (0, 1].
        times: at least 1.
        interval: width of a cell of loss.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=1 / mu, sampling_prob=probability, value_discretization_interval=interval
    )
    # The library names no public way to a step's masses; its version is pinned, and closed forms test this.
    of_step = step._pmf_remove.to_dense_pmf()
    cells = of_step._lower_loss + np.arange(len(of_step._probs))
    cells, masses = cells[cells > 0], of_step._probs[cells > 0]
    mirrored, infinity = masses * np.exp(-interval * cells), float(of_step._infinity_mass)
    found = dict(zip((-cells).tolist(), mirrored.tolist(), strict=True))
    found |= {0: max(0.0, 1 - infinity - float(masses.sum() + mirrored.sum()))}
    found |= dict(zip(cells.tolist(), masses.tolist(), strict=True))
    loss = privacy_loss_distribution.PrivacyLossDistribution(pld_pmf.create_pmf(found, interval, infinity, True))
    return Composition(loss.self_compose(times))


def poisson(noise_multiplier: float, probability: float, times: int, *, interval: float = LOSS_INTERVAL) -> Composition:
    """Compose sums over Poisson samples with Gaussian noise: noisy SGD, neighbors by adding or removing one record.

    Each record is in each sum independently with this probability; the sum moves by at most c with a record and gets
    noise of standard deviation noise_multiplier * c. One such step is f_p or f_p^-1 with f = G_{1/noise_multiplier}, by
    which of the neighbors has the record; either order is composed by itself. C_p(f) covers both orders in every step,
    so this never exceeds its composition.

    Args:
        noise_multiplier: positive; for an integer sum 1 / sqrt(event.mu_squared), see `labeler.accounting.events`.
        probability: in (0, 1]; at 1 the whole is G_mu, mu = sqrt(times) / noise_multiplier.
        times: at least 1.
    """
    from dp_accounting.pld import privacy_loss_distribution

    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier, sampling_prob=probability, value_discretization_interval=interval
    )
    return Composition(step.self_compose(times))


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
        iterations: K, steps between two synchronizations.
        rounds: R, rounds in which the client takes part.
    """

    records: int
    batch: int
    noise_multiplier: float
    iterations: int
    rounds: int

    @property
    def rate(self) -> float:
        """B / n: the probability with which one record is in one batch."""
        return self.batch / self.records

    @property
    def steps(self) -> int:
        """K R: the number of noisy sums of the client's records."""
        return self.iterations * self.rounds

    @property
    def clt_mu(self) -> float:
        """Theorem 2 of the paper: the limit of C_{B/n}(G_{1/sigma}) composed K R times. Shown, never charged."""
        s = self.noise_multiplier
        spread = math.exp(s**-2) * float(ndtr(1.5 / s)) + 3 * float(ndtr(-0.5 / s)) - 2
        return math.sqrt(2) * self.rate * math.sqrt(self.steps) * math.sqrt(spread)

    def as_printed(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Compose C_{B/n}(G_{1/sigma}) K R times, exactly: theorem 2 takes the limit of this."""
        return operator(1 / self.noise_multiplier, self.rate, self.steps, interval=interval)

    def replaced(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Compose batches of exactly B without replacement, neighbors by replacing a record, noise sigma C for a 2 C
        move.
        """
        return operator(2 / self.noise_multiplier, self.rate, self.steps, interval=interval)

    def exact(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Compose Poisson sampling with rate B / n, neighbors by adding or removing one record: this is what runs
        here.
        """
        return poisson(self.noise_multiplier, self.rate, self.steps, interval=interval)

    @property
    def charged(self) -> Pair:
        """Return the certified price that a ledger is charged for what `exact` composes."""
        return sampled_pair(1 / self.noise_multiplier, Fraction(self.batch, self.records), self.steps)
