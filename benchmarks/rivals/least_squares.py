"""Least squares with public covariance (Mehta et al., TMLR 2023, DP-LS; here the covariance costs nothing).

The classifier W minimises sum |y - W phi(x)|^2 + lambda |W|^2: W = B (A + lambda)^-1 with A = sum phi phi^T and B =
sum e_y phi^T. Scored by the largest entry of W phi(x). Mehta et al. release A and B; here A is estimated on public
images, whose covariance differs by the domain but costs no privacy, so all of the price buys B.

phi(x) is the feature less the public mean, along the first `axes` principal axes of the public images, each divided
by its standard deviation to the power `whiten`, brought to norm 1. Everything in phi is public. So |phi| <= 1, B
moves by at most 1 when a record comes or goes (e_y phi^T has the norm of phi), and the price is that of one sum of
`world`; dividing by A + lambda is post-processing. `whiten = 0, ridge = inf` is a nearest class mean on public
axes: DPPL-Mean with the map that our linear learners use.

Rows of W are brought to one norm before scoring: agents hold more records of one class than of another, and with
noise a class of few records would else never be named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.world import Predict, World, class_sums, noisy_sum, unit


@dataclass(frozen=True)
class LeastSquares:
    """Private class sums, divided by a public covariance; see the module.

    Attributes:
        axes: public principal axes.
        ridge: lambda, as a share of the mean variance of phi along an axis; infinite for class means.
        whiten: power of the standard deviations that phi is divided by.
    """

    axes: int = 32
    ridge: float = 0.1
    whiten: float = 0.5

    @property
    def name(self) -> str:
        return "class means on public axes" if math.isinf(self.ridge) else "least squares, public covariance"

    def vectors(self, world: World) -> list[NDArray[np.float64]]:
        """What agents send, before noise: B of each."""
        map_ = public_axes(world, axes=self.axes, whiten=self.whiten)
        return [class_sums(one, map_(one.inputs), world.num_classes) for one in world.holdings]

    def fit(self, world: World) -> Predict:
        """phi of everything, each agent's B, the public A."""
        map_ = public_axes(world, axes=self.axes, whiten=self.whiten)
        sums = self.vectors(world)
        public, seen = map_(world.public), map_(world.asked)
        solve = np.eye(public.shape[1])
        if not math.isinf(self.ridge):
            covariance = public.T @ public / len(public)
            least = self.ridge * np.trace(covariance) / len(covariance)
            solve = np.linalg.inv(covariance + least * np.eye(len(covariance)))

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            weights = unit(noisy_sum(world, sums, epsilon, draw=draw) @ solve)
            return np.asarray((seen @ weights.T).argmax(axis=1), dtype=np.int64)

        return predict


@dataclass(frozen=True, eq=False)
class PublicAxes:
    """phi of the module: a map fitted on public features alone."""

    mean: NDArray[np.float64]
    matrix: NDArray[np.float64]

    def __call__(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        return unit((unit(features) - self.mean) @ self.matrix)


def public_axes(world: World, *, axes: int, whiten: float = 0.0) -> PublicAxes:
    """Fit the map on the public images."""
    mean, deviations, components = world.principal_axes
    kept = min(axes, len(world.public) - 1)
    return PublicAxes(mean, components[:kept].T / np.maximum(deviations[:kept], 1e-6) ** whiten)
