"""Exact numerical composition of many mechanisms one after another, by their privacy losses.

T(P, Q)(alpha) is the least type II error of all tests of P against Q with type I error at most alpha; a mechanism is
f-DP if T of its outputs on any two neighbours is at least f. Composing T(P, Q) and T(P', Q') gives T(P x P', Q x Q'),
also when the second mechanism is chosen after seeing the output of the first. Under Q the privacy losses log(q/p) of
the parts are independent and add up, so the law of the whole loss is a convolution, and

    delta(epsilon) = E_Q [ (1 - e^(epsilon - loss))^+ ]

is the dual of the curve. Convolutions run on a grid of losses by fast Fourier transform (dp-accounting).

**Rounding never flatters.** A part of the pair with masses (p, q) and loss between two neighbours a < b of the grid
is split into two with the same total p and the same total q and losses a and b. The old pair is a function of the new
one (a part forgets which half it was), so the new curve lies below the old one: every delta is an upper bound, every
curve a lower one, before and after composing. What lies beyond the grid counts as loss infinity. The variance of the
loss grows by at most interval^2 / 4 a step, which is the whole error ("connect the dots": Doroshenko, Ghazi, Kamath,
Kumar, Manurangsi 2022).

That holds up to the transforms' own error, about 1e-15 in delta; what is charged is certified, errors of transforms
included (`labeler.accounting.losses`). dp-accounting is imported when called: it takes a second to load.

References:
    Dong, Roth, Su 2022, theorem 3.2. Koskela, Jälkö, Honkela 2020. Zheng, Chen, Long, Su 2021, theorem 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting

Floats = NDArray[np.float64]

LOSS_INTERVAL = 2e-4
"""Width of a cell of loss: the variance of one step's loss, s^2, grows by at most a relative (interval / s)^2 / 4."""

_REACH = 9.5


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
    (`poisson`). Sampling *with* replacement is neither.

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
        _check_probability(self.probability)

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
        must round each cell up again, as `_rounded` does. The last outcome is the far end
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


@dataclass(frozen=True, eq=False)
class Composition:
    """Many mechanisms as one, for both orders of the neighbours: what is asked of it holds for the worse order.

    Attributes:
        loss: the law of the whole privacy loss, of dp-accounting.
    """

    loss: Any = field(repr=False)

    def delta(self, epsilon: float) -> float:
        """The least delta at this epsilon of at least 0; never below the exact one."""
        _check_epsilon(epsilon)
        return float(self.loss.get_delta_for_epsilon(epsilon))

    def epsilon(self, delta: float) -> float:
        """The least epsilon at this delta; never below the exact one."""
        _check_delta(delta)
        return float(self.loss.get_epsilon_for_delta(delta))

    def mu_at(self, delta: float) -> float:
        """The mu whose Gaussian mechanism has the same epsilon at this delta: what to compare a limit theorem with."""
        return mu_of_epsilon(self.epsilon(delta), delta)


def compose(f: SampledGaussian, times: int, *, interval: float = LOSS_INTERVAL) -> Composition:
    """f composed with itself: `times` mechanisms, each f-DP, one after another.

    Args:
        f: one of them.
        times: at least 1.
        interval: width of a cell of loss.

    Raises:
        InvalidSetting: a number is out of bounds.
    """
    _check_times(times)
    return Composition(_loss(f, interval).self_compose(times))


def poisson(noise_multiplier: float, probability: float, times: int, *, interval: float = LOSS_INTERVAL) -> Composition:
    """Sums over Poisson samples with Gaussian noise: noisy SGD, neighbours by adding or removing one record.

    Each record is in each sum independently with this probability; the sum moves by at most c with a record and gets
    noise of standard deviation noise_multiplier * c. One such step is f_p or f_p^-1 with f = G_{1/noise_multiplier},
    by which of the neighbours has the record; either order is composed by itself. C_p(f) covers both orders in every
    step, so this never exceeds its composition.

    Args:
        noise_multiplier: positive; for an integer sum 1 / sqrt(event.mu_squared), see `labeler.accounting.events`.
        probability: in (0, 1]; at 1 the whole is G_mu, mu = sqrt(times) / noise_multiplier.
        times: at least 1.

    Raises:
        InvalidSetting: a number is out of bounds.
    """
    _check_times(times)
    _check_probability(probability)
    if not 0 < noise_multiplier < np.inf:
        raise InvalidSetting(f"a noise multiplier must be positive and finite, found {noise_multiplier}")
    from dp_accounting.pld import privacy_loss_distribution

    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier, sampling_prob=probability, value_discretization_interval=interval
    )
    return Composition(step.self_compose(times))


def _loss(f: SampledGaussian, interval: float) -> Any:
    if not 0 < interval <= 0.1:
        raise InvalidSetting(f"a cell of loss must be positive and at most 0.1 wide, found {interval}")
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.PrivacyLossDistribution(_rounded(*f.pair(interval), interval))


def _rounded(p: Floats, q: Floats, interval: float) -> Any:
    """The law under Q of log(q/p), each part split between its two neighbours on the grid; see the module."""
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


def _check_times(times: int) -> None:
    if type(times) is not int or times < 1:
        raise InvalidSetting(f"times must be a whole number of at least 1, found {times!r}")


def _check_epsilon(epsilon: float) -> None:
    if not 0 <= epsilon < np.inf:
        raise InvalidSetting(f"epsilon must be a finite number of at least 0, found {epsilon}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InvalidSetting(f"delta must be strictly between 0 and 1, found {delta}")


def _check_probability(probability: float) -> None:
    if not 0 < probability <= 1:
        raise InvalidSetting(f"a sampling probability must lie in (0, 1], found {probability}")
