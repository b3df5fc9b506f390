"""Which class each component of the public images is: the exact posterior given noisy counts and their known noise.

Public images fall into components k = 1..C (feature_store.students.members). With S_qk the share of component k's
images that question q stands for, records of class c, if c is component k, cast M S_qk votes at question q. So with
pi(k) the class of component k the released counts are

    n_qc = M sum_k S_qk [pi(k) = c] + noise of known variance sigma^2 + misfit,

and, up to what is the same for every pi,

    log P(n | pi) = sum_k L[k, pi(k)],     L[k, c] = (M <S_k, n_c> - M^2 |S_k|^2 / 2) / s^2,     s^2 = sigma^2 + misfit.

Two public priors, each half beforehand:

* **balanced**: every class is one component, all C! bijections alike. What all counts of a class have in common then
  cancels. P(pi(k) = c | n) is a ratio of permanents of exp(L), computed exactly by sums over sets of classes, in
  2^C C^2 steps, up to EXACT_CLASSES classes. Beyond, exp(L) is scaled to the doubly stochastic matrix, the least
  assuming one with these odds, and its permanent taken as small as it can be (C! / C^C);
* **free**: each component is each class alike, whatever the others are: a class may have several or none. Then
  P(pi(k) = c | n) is the softmax of row k, exactly where no question stands for images of two components (where one
  does, two components of one class explain its counts together, which is left out: they are trusted a little too much).

Their evidences log P(n) weigh them against each other. All of it is a function of what was released, of public images
and of the stated noise: post-processing. It speaks of the noiseless votes, and of labels as far as the components are
classes.

References:
    Ryser 1963 and Bellman 1962 (sums over subsets); Sinkhorn 1964; Egorychev 1981, Falikman 1981 (least permanent of a
    doubly stochastic matrix).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

EXACT_CLASSES: Final = 12
_SCALINGS: Final = 200
_NEWTON_STEPS: Final = 8


@dataclass(frozen=True, eq=False)
class Matching:
    """What a release says about the classes of components.

    Attributes:
        chances: shape (components, classes), P(component k is class c | release); rows sum to one.
        log_evidence: of the release under both priors, up to what is the same for every choice of components.
    """

    chances: NDArray[np.float64]
    log_evidence: float


def match(log_likelihood: NDArray[np.float64], supported: NDArray[np.bool_]) -> Matching:
    """The posterior under both priors together; see the module.

    Args:
        log_likelihood: shape (C, C), L, finite.
        supported: shape (C,), classes that something released speaks for; where some are not, no component is one of
            them, and only the second prior is left.
    """
    if not supported.all():
        # Where nothing speaks for any, nothing speaks against any either.
        possible = supported | (not supported.any())
        return _free(np.where(possible, log_likelihood, -np.inf))
    balanced, free = _balanced(log_likelihood), _free(log_likelihood)
    evidence = float(np.logaddexp(balanced.log_evidence, free.log_evidence))
    weight = math.exp(balanced.log_evidence - evidence)
    return Matching(weight * balanced.chances + (1 - weight) * free.chances, evidence - math.log(2))


def _free(log_likelihood: NDArray[np.float64]) -> Matching:
    totals = logsumexp(log_likelihood, axis=1)
    evidence = float(totals.sum()) - len(log_likelihood) * math.log(log_likelihood.shape[1])
    return Matching(np.exp(log_likelihood - totals[:, None]), evidence)


def _balanced(log_likelihood: NDArray[np.float64]) -> Matching:
    exact = len(log_likelihood) <= EXACT_CLASSES
    chances, log_permanent = (_permanents if exact else _scaled)(log_likelihood)
    return Matching(chances, log_permanent - float(gammaln(len(log_likelihood) + 1)))


def _permanents(log_likelihood: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Marginals of P(pi) ~ exp(sum_k L[k, pi(k)]) over bijections, and the log of the permanent of exp(L).

    before[set] sums over the ways in which the first |set| components take just these classes, after[set] over those
    in which the others take the rest; sets are bit masks.
    """
    size = len(log_likelihood)
    sets = np.arange(1 << size)
    members = np.array([mask.bit_count() for mask in range(1 << size)])
    steps = []
    for component in range(size):
        here = sets[members == component]
        steps.append([(here[here >> one & 1 == 0], one) for one in range(size)])
    before, after = np.full((2, 1 << size), -np.inf)
    before[0] = after[-1] = 0.0
    for component, step in enumerate(steps):
        for start, one in step:
            end = start | 1 << one
            before[end] = np.logaddexp(before[end], before[start] + log_likelihood[component, one])
    for component in reversed(range(size)):
        for start, one in steps[component]:
            after[start] = np.logaddexp(after[start], after[start | 1 << one] + log_likelihood[component, one])
    log_permanent = float(before[-1])
    chances = np.empty((size, size))
    for component, step in enumerate(steps):
        for start, one in step:
            ways = before[start] + after[start | 1 << one]
            chances[component, one] = math.exp(
                np.logaddexp.reduce(ways) + log_likelihood[component, one] - log_permanent
            )
    return chances / chances.sum(axis=1, keepdims=True), log_permanent


def _log_sums(logs: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """What scipy's `logsumexp` finds for finite numbers of two axes, seven times as fast for the few there are here."""
    largest = logs.max(axis=axis, keepdims=True)
    found: NDArray[np.float64] = np.log(np.exp(logs - largest).sum(axis=axis)) + largest.squeeze(axis)
    return found


def _scaled(log_likelihood: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """exp(L) scaled to row and column sums of one, and the least that the log of its permanent can then be."""
    size = len(log_likelihood)
    rows, columns = np.zeros((2, size))
    for _ in range(_SCALINGS):
        rows = -_log_sums(log_likelihood + columns, axis=1)
        columns = -_log_sums(log_likelihood + rows[:, None], axis=0)
    for _ in range(_NEWTON_STEPS):  # turns are slow where a matrix nearly falls apart; from here Newton's are few
        found = np.exp(log_likelihood + rows[:, None] + columns)
        over_rows, over_columns = found.sum(axis=1), found.sum(axis=0)
        slope = np.block([[np.diag(over_rows), found], [found.T, np.diag(over_columns)]])
        # Adding to rows what columns lose changes nothing, so the shortest of all solutions is as good as any.
        step = np.linalg.lstsq(slope, 1.0 - np.concatenate([over_rows, over_columns]), rcond=None)[0]
        step /= max(1.0, float(np.abs(step).max()))
        rows, columns = rows + step[:size], columns + step[size:]
    chances = np.exp(log_likelihood + rows[:, None] + columns)
    least = float(gammaln(size + 1)) - size * math.log(size)
    return chances / chances.sum(axis=1, keepdims=True), least - float(rows.sum() + columns.sum())
