"""Laws of integer noise, and divergences between them, by adding up every probability: nothing is sampled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Law = NDArray[np.float64]


def discrete_gaussian(sigma: float, reach: int) -> Law:
    """Probabilities of -reach to reach, shape (2 reach + 1,)."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum())


def mass_beyond(sigma: float, reach: int) -> float:
    """The mass that a discrete Gaussian has outside -reach to reach."""
    far = np.arange(reach + 1, reach + 400)
    return 2 * float(np.exp(-(far**2) / (2 * sigma**2)).sum()) / (sigma * math.sqrt(2 * math.pi))


def sum_of(law: Law, count: int) -> Law:
    """The law of the sum of so many independent draws."""
    total, power = np.array([1.0]), law
    while count:
        total = np.convolve(total, power) if count & 1 else total
        count >>= 1
        power = np.convolve(power, power) if count else power
    return total


def shifted(law: Law, by: int) -> tuple[Law, Law]:
    """P and Q on common points: the law shifted by `by` grid units, and the law itself."""
    return np.pad(law, (by, 0)), np.pad(law, (0, by))


def hockey_stick(p: Law, q: Law, epsilon: float) -> float:
    """The sum of max(P - e^epsilon Q, 0): the exact delta at epsilon, in this direction."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def delta_of(p: Law, q: Law, epsilon: float) -> float:
    """The exact delta at epsilon, of the worse direction."""
    return max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))
