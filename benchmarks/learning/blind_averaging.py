"""Blind averaging (DP-Helmet; Kirschte et al. 2022): everybody trains alone, one private sum later there is one model.

    records --train_linear--> weights --VectorSum: grid, noise share, secret shares--> talliers: sum, opened / users

One message per user, no second round. The sum is a `labeler.noise.VectorSum` with the norm and the sensitivity of
`LinearTerms`; dividing by the number of contributors, which is public, divides sensitivity and noise alike (lemma 6).
With an honest fraction t and d dropouts that the plan allows for, h = floor(t U) - d shares of noise are certainly
unknown, so a share has variance sigma^2 / h: what nobody can subtract is sigma in the sum, even when everybody else
pools what they know and the d are honest. (The paper sizes shares by t U alone.) Only the sum is noised enough: one
user's share of noise alone protects too little, which is why weights leave a user as secret shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.sums import private_sum
from labeler.accounting.events import IntegerSum
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.accounting.integer import epsilon_bound
from labeler.convex import LinearTerms
from labeler.errors import InvalidSetting
from labeler.noise import OF_PRODUCTS, ROUNDING_MARGIN, VectorSum
from labeler.randomness import ByteSource
from labeler.task import Level

_SMALL_STEP = 1 + 1e-5


def blind_sum(
    terms: LinearTerms,
    *,
    dimension: int,
    users: int,
    sigma: float,
    honest_fraction: float = 1.0,
    max_dropouts: int = 0,
) -> VectorSum:
    """The private sum of U users' weights.

    Args:
        terms: how each of them trains.
        dimension: features of a record, without the constant.
        users: U.
        sigma: noise on one coordinate of the **sum** that nobody can subtract, in the unit of weights.
        honest_fraction: t in (0, 1]; floor(t U) users keep their noise to themselves.
        max_dropouts: how many of those may fail to contribute.

    Raises:
        InvalidSetting: t is out of range, nobody honest is left, or no grid serves the numbers.
    """
    if not 0 < honest_fraction <= 1:
        raise InvalidSetting(f"the honest fraction lies above 0 and at most at 1, found {honest_fraction!r}")
    return VectorSum(
        dimension=(dimension + 1) * terms.num_classes,
        largest_norm=terms.largest_norm,
        sensitivity=terms.sensitivity,
        sigma=sigma,
        agents=users,
        # A product like 0.3 * 10 must not lose an honest user, nor gain one, to its last bit.
        colluding_agents=users - math.floor(honest_fraction * users + 1e-9),
        max_dropouts=max_dropouts,
    )


def blind_sum_for(
    terms: LinearTerms,
    *,
    dimension: int,
    users: int,
    epsilon: float,
    delta: float,
    level: Level = "instance",
    honest_fraction: float = 1.0,
    max_dropouts: int = 0,
) -> VectorSum:
    """The sum with the least noise, within a hundredth of a percent, whose certified price is at most epsilon.

    The grid costs a little, so sigma starts at what the continuous mechanism needs (Balle and Wang 2018) and grows.
    """
    norm = terms.sensitivity if level == "instance" else terms.largest_norm
    sigma = norm / mu_of_epsilon(epsilon, delta)
    while True:
        spec = blind_sum(
            terms,
            dimension=dimension,
            users=users,
            sigma=sigma,
            honest_fraction=honest_fraction,
            max_dropouts=max_dropouts,
        )
        price = epsilon_bound(spec.event(level), delta)
        if price <= epsilon:
            return spec
        # Nine tenths of the way, so as not to overshoot: epsilon falls at least as fast as 1/sigma.
        sigma *= max(_SMALL_STEP, 1 + 0.9 * min(1.0, price / epsilon - 1))


def group_event(spec: VectorSum, records: int) -> IntegerSum:
    """One opening, for a group of records that change together, with whatever users (Kirschte et al., Corollary 9).

    One record after the other, on the grid: the distance is at most their number times that of one.
    """
    if type(records) is not int or records < 1:
        raise InvalidSetting(f"a group has at least one record, found {records!r}")
    one = spec.event("instance")
    return replace(
        one,
        squared_sensitivity=one.squared_sensitivity * records**2,
        largest_change=one.largest_change * records,
    )


def replaced_user_event(spec: VectorSum) -> IntegerSum:
    """One opening, when all records of one user become others (Kirschte et al., Corollary 10: s = 2R).

    Two vectors within R lie at most 2R apart, on the grid S 2R + sqrt(D). That a user's vector becomes zero is half of
    this, and what `spec.event("agent")` is about.
    """
    apart = 2 * spec.scale * spec.largest_norm * (1 + OF_PRODUCTS)
    return replace(
        spec.event("instance"),
        squared_sensitivity=math.floor(((apart + math.sqrt(spec.dimension)) * (1 + ROUNDING_MARGIN)) ** 2),
        largest_change=math.floor((apart + 1) * (1 + ROUNDING_MARGIN)),
    )


def blind_average(
    spec: VectorSum,
    models: Sequence[NDArray[np.float64]] | NDArray[np.float64],
    *,
    sources: Iterable[ByteSource],
    talliers: int = 2,
) -> NDArray[np.float64]:
    """The noisy mean of the models of those who contribute, by the steps that run in the service.

    Args:
        spec: the sum, from `blind_sum`.
        models: per contributing user, shape (dimension + 1, num_classes); a dropout is left out, with its noise.
        sources: one secret source per contributing user.
        talliers: 2 or 3.

    Returns:
        float64, shape (dimension + 1, num_classes): public.

    Raises:
        QuorumNotReached: more dropouts than the sum allows for; nothing is opened.
        PrivacyRefusal: a model beyond the public norm.
    """
    if not len(models):
        raise InvalidSetting("nobody contributes a model")
    total = private_sum(spec, models, sources=sources, talliers=talliers)
    return total.reshape(models[0].shape) / len(models)
