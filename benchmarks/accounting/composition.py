"""Exact numerical composition of many mechanisms one after another, by their privacy losses.

T(P, Q)(alpha) is the least type II error of all tests of P against Q with type I error at most alpha. A mechanism is
f-DP if T of its outputs on any two neighbors is at least f. Composing T(P, Q) and T(P', Q') gives T(P x P', Q x Q').
This holds also if the second mechanism is chosen after seeing the output of the first. Under Q the privacy losses
log(q/p) of the parts are independent and add up. So the law of the whole loss is a convolution, and

    delta(epsilon) = E_Q [ (1 - e^(epsilon - loss))^+ ]

is the dual of the curve. Convolutions run on a grid of losses by fast Fourier transform (dp-accounting).

**Rounding never flatters.** Take a part of the pair with masses (p, q) and loss between two neighbors a < b of the
grid. It is split into two parts with losses a and b, the same total p and the same total q. The old pair is a function
of the new one (a part forgets which half it was), so the new curve lies below the old one. Before and after composing,
every delta is an upper bound and every curve a lower one. A loss beyond the grid counts as infinity. The variance of
the loss grows by at most interval^2 / 4 a step, which is the whole error ("connect the dots": Doroshenko, Ghazi,
Kamath, Kumar, Manurangsi 2022).

That holds up to the transforms' own error, about 1e-15 in delta; what is charged is certified, errors of transforms
included (`labeler.accounting.losses`). dp-accounting is imported when called: it takes a second to load.

References:
    Dong, Roth, Su 2022, theorem 3.2. Koskela, Jälkö, Honkela 2020. Zheng, Chen, Long, Su 2021, theorem 2.

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

1. Its theorem 1 claims g^(R) with g = max(f_j, 1 - alpha - p^2) in the weak sense, because in a round in which i and j
are not both sampled, i learns nothing new about j. That holds for one round and fails for two: what j sends in round 1
to a third client k reaches i in round 2 through k's model. Take R = 2, no noise and m = 3. Then i knows the record with
probability 1 - (1 - p^2)^2 + p^4 (1 - p)^2, more than the 1 - (1 - p^2)^2 that the theorem leaves
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
`benchmarks.papers.prifedsync` is Poisson sampling, neighbors by adding or removing a record: `exact`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from labeler.accounting.gaussian import mu_of_epsilon
from labeler.accounting.losses import Pair
from labeler.accounting.sampled import sampled_pair

Floats = NDArray[np.float64]

LOSS_INTERVAL = 2e-4
"""Width of a cell of loss: the variance of one step's loss, s^2, grows by at most a relative (interval / s)^2 / 4."""

_REACH = 9.5


@dataclass(frozen=True)
class SampledGaussian:
    """C_p(G_mu): a mu-GDP mechanism run on a random part of the records; p = 1 is G_mu itself.

    G_mu = T(N(0, 1), N(mu, 1)), G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu). With f_p = p f + (1 - p) Id, C_p(f) =
    min{f_p, f_p^-1}** (Dong, Roth, Su 2022, definition 4.1). Let x* = Phi(-mu/2) be the fixed point of G_mu. Then f_p
    has slope -1 at x*, f_p^-1 has slope -1 at f_p(x*), and the hull joins the two points by a line:

        C_p(G_mu)(alpha) = f_p(alpha)                 for alpha <= x*,
                           x* + f_p(x*) - alpha       for alpha between x* and f_p(x*),
                           f_p^-1(alpha)              for alpha >= f_p(x*).

    **The loss.** C_p(G_mu) is T(P, Q) for a pair with three parts. On one side the privacy loss is l(z) = log(1 - p + p
    e^(mu z - mu^2/2)), z > mu/2, where P has the mass of N(0, 1) and Q that of (1 - p) N(0, 1) + p N(mu, 1). On the
    other it is -l, with P and Q exchanged. An atom at loss 0 is the line in the middle. So for epsilon >= 0

        delta(epsilon)  = p delta_mu(log(1 + (e^epsilon - 1) / p)),
        delta(-epsilon) = 1 - e^-epsilon (1 - delta(epsilon)).

    **It bounds two kinds of sampling.** (a) A batch of fixed size B = p n drawn without replacement, neighbors that
    differ by replacing one record, and a mechanism that is mu-GDP under replacement (a sum clipped at c moves by 2 c):
    theorem 4.2. (b) Poisson sampling with rate p, and neighbors by adding or removing one record (the sum moves by c).
    There T(M(S), M(S')) is f_p or f_p^-1, both at least C_p(f); composing them apart is tighter (`poisson`). Sampling
    *with* replacement is neither.

    Attributes:
        mu: at least 0, finite.
        probability: p, in (0, 1].
    """

    mu: float
    probability: float = 1.0

    def loss_quantile(self, losses: ArrayLike) -> Floats:
        """Return the z >= mu/2 at which the loss is `losses` >= 0: l(z) = log(1 - p + p e^(mu z - mu^2/2)); mu > 0."""
        values = np.asarray(losses, dtype=np.float64)
        # log((e^l - 1 + p) / p), with e^l taken out so that it cannot overflow.
        scaled = values + np.log1p((self.probability - 1) * np.exp(-values)) - math.log(self.probability)
        z: Floats = scaled / self.mu + self.mu / 2
        return z

    def pair(self, interval: float) -> tuple[Floats, Floats]:
        """Return masses (P, Q) of cells of loss, each of at most this width: finite distributions that say a little
        less.

        A cell merges many outcomes into one, so T of these masses lies above this curve. Users of the masses must round
        each cell up again, as `_rounded` does. The last outcome is the far end of the loss, with a mass below 1e-20,
        which only Q has.
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


def compose(f: SampledGaussian, times: int, *, interval: float = LOSS_INTERVAL) -> Composition:
    """Compose f with itself: `times` mechanisms, each f-DP, one after another.

    Args:
        f: one of them.
        times: at least 1.
        interval: width of a cell of loss.
    """
    return Composition(_loss(f, interval).self_compose(times))


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


def _loss(f: SampledGaussian, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.PrivacyLossDistribution(_rounded(*f.pair(interval), interval))


def _rounded(p: Floats, q: Floats, interval: float) -> Any:
    """Return the law under Q of log(q/p), each part split between its two neighbors on the grid; see the module."""
    from dp_accounting.pld import pld_pmf

    is_finite = (p > 0) & (q > 0)
    infinity = float(q[p <= 0].sum())
    p, q = p[is_finite], q[is_finite]
    if not len(q):
        return pld_pmf.create_pmf({0: 0.0}, interval, infinity, True)
    below = np.floor(np.log(q / p) / interval)
    # w_a + w_b = q and w_a e^-a + w_b e^-b = p.
    upper = np.clip((q - p * np.exp(below * interval)) / -np.expm1(-interval), 0.0, q)
    cells = below.astype(np.int64)
    lowest = int(cells.min())
    masses = np.bincount(cells - lowest, q - upper, minlength=int(cells.max()) - lowest + 2)
    masses += np.bincount(cells - lowest + 1, upper, minlength=len(masses))
    return pld_pmf.create_pmf(
        dict(zip(range(lowest, lowest + len(masses)), masses.tolist(), strict=True)), interval, infinity, True
    )


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
        return compose(SampledGaussian(1 / self.noise_multiplier, self.rate), self.steps, interval=interval)

    def exact(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Compose Poisson sampling with rate B / n, neighbors by adding or removing one record: this is what runs
        here.
        """
        return poisson(self.noise_multiplier, self.rate, self.steps, interval=interval)

    @property
    def charged(self) -> Pair:
        """Return the certified price that a ledger is charged for what `exact` composes."""
        return sampled_pair(1 / self.noise_multiplier, Fraction(self.batch, self.records), self.steps)

    def replaced(self, *, interval: float = LOSS_INTERVAL) -> Composition:
        """Compose batches of exactly B without replacement, neighbors by replacing a record, noise sigma C for a 2 C
        move.
        """
        return compose(SampledGaussian(2 / self.noise_multiplier, self.rate), self.steps, interval=interval)


def strong_mu_as_printed(weak_mu: float, clients: int) -> float:
    """Return theorem 2's sqrt(m - 1) mu. The guarantee in the strong sense is weak_mu itself: see the module."""
    return math.sqrt(clients - 1) * weak_mu
