"""The common world of all rivals: agents, public images, a price, and the one noisy sum that most of them use.

A method of this package is a frozen value. `fit(world)` computes once what needs no noise, and returns a function of
(epsilon, draw) that labels test and public images. All methods pay for the same promise: one record of one agent is
added or removed (instance level), (epsilon, delta), against any `colluding_agents` of the agents as well.

**The sum and its price.** Agent i computes a vector v_i = sum over its records of g(x, y) with |g| <= 1 for every
record, g fixed by public things. Adding or removing a record moves v_i by g(x, y), so by at most 1; projecting v_i on a
ball of public radius R moves two vectors nowhere further apart. So the sum has L2 sensitivity 1 whatever g is. The
integer mechanism of `labeler.noise` releases it, rounding priced, sigma the least whose certified bound
(`labeler.accounting.integer`) is at most epsilon. T sums one after the other, each of such vectors chosen after seeing
the sums before, move by at most sqrt(T) together: T times the squared sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import Split
from benchmarks.sums import private_sum
from labeler.accounting.events import IntegerSum
from labeler.accounting.integer import epsilon_bound
from labeler.errors import InvalidSetting
from labeler.noise import VectorSum
from labeler.randomness import seeded_source

Predict = Callable[[float | None, int], NDArray[np.float64]]
"""Returns a score of each class, the largest of which is the label, for `World.asked`: shape (n, num_classes), at an
epsilon (None: without noise), for one draw of noise."""

WHOLE: Final = 2.0**20
"""Radius of the ball that holds every honest agent's vector: no agent has more records."""

_SHARE_GRID: Final = 65_536.0
_UNIT: Final = 1 - 1e-12


@dataclass(frozen=True, eq=False)
class World:
    """One division of one data set.

    Attributes:
        name: enters the seeds of the noise.
        holdings: each agent's labeled features, rows of L2 norm 1 up to rounding.
        public: features without labels: float32, shape (n, d).
        test: what predictions are scored on; no method sees it.
        num_classes: C, public.
        colluding_agents: agents that may pool what they know.
        delta: of the promise.
        radius: R, to which every agent's vector is clipped.
    """

    name: str
    holdings: Sequence[Split]
    public: NDArray[np.float32]
    test: Split
    num_classes: int
    colluding_agents: int = 1
    delta: float = 1e-4
    radius: float = WHOLE

    @cached_property
    def asked(self) -> NDArray[np.float32]:
        """The features that methods label: the test images, then the public ones."""
        return np.concatenate([self.test.inputs, self.public])

    @cached_property
    def similarities(self) -> list[NDArray[np.float32]]:
        """The cosine of every record of each agent with every public image."""
        public = unit(self.public).astype(np.float32).T
        return [np.asarray(unit(one.inputs).astype(np.float32) @ public) for one in self.holdings]

    @cached_property
    def principal_axes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The mean, deviations and axes of the public images, leading axes first."""
        rows = unit(self.public)
        mean = rows.mean(axis=0)
        _, deviations, components = np.linalg.svd(rows - mean, full_matrices=False)
        return mean, deviations, components

    @cached_property
    def memory(self) -> dict[object, Any]:
        """A cache, by name, that methods of several settings share; it goes with the world."""
        return {}


class Rival(Protocol):
    """One way to learn from a world under a price."""

    @property
    def name(self) -> str:
        """The name in words, for the table."""

    def fit(self, world: World) -> Predict:
        """Compute what costs no noise, once."""


@dataclass(frozen=True)
class FineSum(VectorSum):
    """A VectorSum on a given grid: every share has 65,536 grid units, so that all draws read one table of the sampler.

    Attributes:
        grid: S, grid units per unit of the vectors; sigma is 65,536 sqrt(h) / S.
    """

    grid: int = 1

    @property
    def scale(self) -> int:
        """S."""
        return self.grid

    @property
    def share_sigma_grid(self) -> float:
        """The parameter of one agent's noise share, grid units."""
        return _SHARE_GRID


def composed(spec: VectorSum, releases: int) -> IntegerSum:
    """Return `releases` sums of one spec, each chosen after the ones before, as one event."""
    once = spec.event()
    return replace(
        once,
        squared_sensitivity=releases * once.squared_sensitivity,
        coordinates=releases * once.coordinates,
    )


@lru_cache(maxsize=1024)
def sum_at(
    epsilon: float,
    *,
    delta: float,
    dimension: int,
    agents: int,
    colluding_agents: int,
    radius: float = WHOLE,
    releases: int = 1,
) -> FineSum:
    """Return the sum of least noise whose `releases` openings together cost at most epsilon; see the module."""

    def spec(grid: int) -> FineSum:
        sigma = _SHARE_GRID * float(np.sqrt(agents - colluding_agents)) / grid
        return FineSum(dimension, radius, 1.0, sigma, agents, colluding_agents, 0, grid=grid)

    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        fits = epsilon_bound(composed(spec(middle), releases), delta) <= epsilon
        low, high = (middle, high) if fits else (low, middle)
    if low == 0:
        raise InvalidSetting(f"no sum of {dimension} numbers costs as little as epsilon {epsilon:g}; ask for more")
    return spec(low)


def noisy_sum(
    world: World,
    vectors: Sequence[NDArray[np.float64]],
    epsilon: float | None,
    *,
    draw: int,
    releases: int = 1,
    opening: int = 0,
) -> NDArray[np.float64]:
    """Return the released sum of every agent's vector, in the vectors' shape; see the module for what they may be.

    Args:
        epsilon: of all openings together; None adds no noise.
        draw: which noise.
        releases: how many sums this price is for.
        opening: which of them this is.
    """
    shape = vectors[0].shape
    sent = [_within(vector.ravel(), world.radius) for vector in vectors]
    if epsilon is None:
        return np.asarray(np.sum(sent, axis=0)).reshape(shape)
    spec = _spec(world, epsilon, sent[0].size, releases)
    sources = [seeded_source(f"rivals {world.name} {draw} {opening} {agent}".encode()) for agent in range(len(sent))]
    return private_sum(spec, sent, sources=sources).reshape(shape)


def total_sigma(world: World, epsilon: float | None, *, dimension: int, releases: int = 1) -> float:
    """Return the standard deviation of all the noise in one number of `noisy_sum`, that of colluders included."""
    if epsilon is None:
        return 0.0
    spec = _spec(world, epsilon, dimension, releases)
    return float(spec.sigma * np.sqrt(spec.agents / spec.noise_contributors))


def _spec(world: World, epsilon: float, dimension: int, releases: int) -> FineSum:
    return sum_at(
        epsilon,
        delta=world.delta,
        dimension=dimension,
        agents=len(world.holdings),
        colluding_agents=world.colluding_agents,
        radius=world.radius,
        releases=releases,
    )


def class_sums(holding: Split, rows: NDArray[np.float64], num_classes: int) -> NDArray[np.float64]:
    """Return sums of `rows` over the records of each class, shape (C, d); rows have norm at most 1."""
    sums = np.zeros((num_classes, rows.shape[1]))
    np.add.at(sums, holding.labels, rows)
    return sums


def unit(rows: NDArray[np.generic]) -> NDArray[np.float64]:
    """Scale rows to a norm just below 1 (whatever double precision does, not above); a row of zeros stays."""
    floats = rows.astype(np.float64)
    norms = np.linalg.norm(floats, axis=1, keepdims=True)
    return np.asarray(_UNIT * floats / np.where(norms > 1e-12, norms, 1.0))


def _within(vector: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    norm = float(np.linalg.norm(vector))
    return vector if norm <= radius * _UNIT else vector * (radius * _UNIT / norm)
