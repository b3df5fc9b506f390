"""Slopes: to which power of a size the cost grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Slope:
    """Cost at several sizes, fitted by cost = factor * size^exponent (least squares of logarithms).

    Attributes:
        exponent: 1 where twice the size costs twice as much.
        at: size -> seconds, as measured.
    """

    exponent: float
    at: Mapping[int, float]

    @classmethod
    def of(cls, at: Mapping[int, float]) -> Slope:
        sizes, seconds = np.log(list(at)), np.log(list(at.values()))
        return cls(float(np.polyfit(sizes, seconds, 1)[0]), dict(at))

    @property
    def per_unit_s(self) -> float:
        """Seconds for one more, at the largest size."""
        largest = max(self.at)
        return self.at[largest] / largest
