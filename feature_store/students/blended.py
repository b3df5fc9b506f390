"""Several students as one: the geometric mean of what each says of an image.

Students err in different places. `spreading` follows the public images wherever a class lies and is lost where too few
answers reach them; `discriminant` draws straight lines, right between overlapping classes and blunt elsewhere;
`followed` takes every class to be as many images and nearly in one place, so that a class whose votes noise has drowned
still gets the images that no other class claims. What one of them is sure of and the others do not deny is right more
often than what any of them says:

* **blended**: `spreading` and `discriminant`, where released votes show that groups of images hold several classes;
* **pooled**: these and, counted twice, `followed`, where they do not, or where few records stand behind some class.

    P(c | x) proportional to the product of P_m(c | x)^(share of m),      each at least LEAST.

Post-processing of one release, as each member is.

References:
    Hinton 2002, "Training products of experts by minimizing contrastive divergence" (products of experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

SHARES: Final[dict[str, dict[str, float]]] = {
    "blended": {"spreading": 1 / 2, "discriminant": 1 / 2},
    "pooled": {"followed": 1 / 2, "spreading": 1 / 4, "discriminant": 1 / 4},
}
"""Which kinds of student each of these is made of, and how much each counts."""

LEAST: Final = 1e-6
"""Probability of a class that a member rules out: the others may overrule it, at a price."""


class Speaks(Protocol):
    """A fitted student."""

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""


Member = TypeVar("Member", bound=Speaks, covariant=True)


@dataclass(frozen=True, eq=False)
class Blended(Generic[Member]):
    """See the module.

    Attributes:
        members: fitted to the same release.
        shares: how much each counts, summing to one.
    """

    members: Sequence[Member]
    shares: Sequence[float]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        said = [np.log(np.maximum(one.predict_proba(features), LEAST)) for one in self.members]
        scores = np.average(said, axis=0, weights=self.shares)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
        return probabilities
