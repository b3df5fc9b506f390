"""Exact numerical composition: the trade-off function of many mechanisms one after another.

Composing T(P, Q) and T(P', Q') gives T(P x P', Q x Q'), also when the second mechanism is chosen after seeing the
output of the first. Under Q the privacy losses log(q/p) of the parts are independent and add up, so the law of the
whole loss is a convolution, and

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

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.accounting.tradeoff import Curve, Floats, SampledGaussian, check_probability, distance, lower_hull
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting

LOSS_INTERVAL = 2e-4
"""Width of a cell of loss: the variance of one step's loss, s^2, grows by at most a relative (interval / s)^2 / 4."""

_CURVE_POINTS = 4_000
_STEEPEST = 600.0


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

    def curve(self) -> Curve:
        """The trade-off function, made symmetric: min{f, f^-1}**. Never above the exact one."""
        # Steeper lines than those within 1e-13 of the mass that is lost for certain move no curve visibly.
        lost = self.delta(_STEEPEST)
        far = self.epsilon(lost + 1e-13) if lost < 1 - 1e-12 else 1.0
        epsilons = np.append(0.0, np.geomspace(1e-4, min(max(1e-3, far), _STEEPEST), _CURVE_POINTS))
        deltas = np.asarray(self.loss.get_delta_for_epsilon(epsilons), dtype=np.float64)
        return from_profile(epsilons, np.clip(deltas, 0.0, 1.0))


def compose(f: Curve | SampledGaussian, times: int, *, interval: float = LOSS_INTERVAL) -> Composition:
    """f composed with itself: `times` mechanisms, each f-DP, one after another.

    Args:
        f: the trade-off function of one of them.
        times: at least 1.
        interval: width of a cell of loss.

    Raises:
        InvalidSetting: a number is out of bounds.
    """
    _check_times(times)
    return Composition(_loss(f, interval).self_compose(times))


def compose_all(functions: list[Curve | SampledGaussian], *, interval: float = LOSS_INTERVAL) -> Composition:
    """Different mechanisms one after another; the order does not matter.

    Raises:
        InvalidSetting: there is none.
    """
    if not functions:
        raise InvalidSetting("there is nothing to compose")
    total = _loss(functions[0], interval)
    for f in functions[1:]:
        total = total.compose(_loss(f, interval))
    return Composition(total)


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
    check_probability(probability)
    if not 0 < noise_multiplier < np.inf:
        raise InvalidSetting(f"a noise multiplier must be positive and finite, found {noise_multiplier}")
    from dp_accounting.pld import privacy_loss_distribution

    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier, sampling_prob=probability, value_discretization_interval=interval
    )
    return Composition(step.self_compose(times))


def from_profile(epsilons: ArrayLike, deltas: ArrayLike) -> Curve:
    """The largest symmetric curve that some (epsilon, delta) leave possible: the maximum of all f_{epsilon,delta}.

    Each pair gives two lines below f. Any selection of pairs gives a valid lower bound of f, a denser one a tighter
    one.

    Args:
        epsilons: ascending, at least 0.
        deltas: the delta of each, in [0, 1], for both orders of the neighbours.
    """
    slopes, heights = np.exp(np.asarray(epsilons, dtype=np.float64)), 1 - np.asarray(deltas, dtype=np.float64)
    # Lines b - e^eps a, steep ones first: the maximum's corners are where neighbours on the upper envelope meet.
    kept: list[int] = []
    for line in range(len(slopes) - 1, -1, -1):
        # A line that is flatter and no lower lies above everywhere; far out all deltas are one in double precision.
        while kept and heights[line] >= heights[kept[-1]]:
            kept.pop()
        while len(kept) > 1 and _meet(slopes, heights, kept[-1], line) <= _meet(slopes, heights, kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    corners = np.array([_meet(slopes, heights, *pair) for pair in pairwise(kept)])
    values = heights[kept[1:]] - slopes[kept[1:]] * corners
    start = (0.0, float(heights[kept[0]]))
    # Beyond the point where alpha = beta, which the highest falling line meets last, the curve is its own mirror image.
    middle = float((heights[kept] / (1 + slopes[kept])).max())
    is_left = corners < middle
    x = np.concatenate([[start[0]], corners[is_left], [middle]])
    y = np.concatenate([[start[1]], values[is_left], [middle]])
    return lower_hull(np.concatenate([x, y, [1.0]]), np.concatenate([y, x, [0.0]]))


def _loss(f: Curve | SampledGaussian, interval: float) -> Any:
    if not 0 < interval <= 0.1:
        raise InvalidSetting(f"a cell of loss must be positive and at most 0.1 wide, found {interval}")
    from dp_accounting.pld import privacy_loss_distribution

    if isinstance(f, SampledGaussian):
        return privacy_loss_distribution.PrivacyLossDistribution(_rounded(*f.pair(interval), interval))
    forth, back = f, f.inverse()
    if distance(forth, back) < 1e-12:
        return privacy_loss_distribution.PrivacyLossDistribution(_rounded(*forth.pair(), interval))
    return privacy_loss_distribution.PrivacyLossDistribution(
        _rounded(*forth.pair(), interval), _rounded(*back.pair(), interval)
    )


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


def _meet(slopes: Floats, heights: Floats, steep: int, flat: int) -> float:
    return float((heights[steep] - heights[flat]) / (slopes[steep] - slopes[flat]))
