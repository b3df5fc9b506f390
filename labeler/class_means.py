"""Class means as a model: how far one record moves an agent's sums along public axes, with the proof.

    record (x, y)  --public axes-->  phi(x), |phi| <= 1  -->  g(x, y) = phi(x) tensor e_y
    agent: u = sum of g over its records, drawn onto the ball of radius R  -->  one `VectorSum`  -->  class means

Nothing is trained and nothing is divided by a private count: what is opened is the noisy sum. Whoever reads it brings
the sum of each class to one length and names the class of the largest cosine (`labeler.linear_model`); that is
post-processing, as are the labels and the student refined on public images from them.

**Fact 1, g depends on its record alone, to the last bit.** A (x - m) is a row of whole numbers, exact in any order
(`labeler.linear_model`). Its squares are added one axis after the other, number by number, so that neither the order
nor the size of a block of rows enters (`workers.learning.class_means`); the root and the division are correctly
rounded. Then phi is cut, towards zero, to whole 2^-30ths. Sums of whole numbers are exact in every order.

**Fact 2, |g| <= 1 + (k + 4) 2^-52** for k axes: the sum of squares is off by at most (k + 1) 2^-53 of itself, the root
by half of that and its own rounding, the division by one more; cutting towards zero lengthens nothing.

**Fact 3, one record added or removed moves u by g**: by at most 1, whatever the others are and however many. Replaced,
which is what a cap on the records of a person may do, by g - g': at most 2, attained by opposite rows of one class.

**Fact 4, the ball moves no two vectors further apart**: it is convex, and the nearest point of a convex set is a
1-Lipschitz function. In double precision the vector that leaves is within R (D + 10) 2^-53 of that point, D its
numbers: reading whole numbers as doubles turns and lengthens u by 2^-53 of itself, which the ball makes 2 * 2^-53 R at
most; a norm of D numbers is off by (D + 3) 2^-53 of itself; a quotient and a product. So

    sensitivity  =  r (1 + (k + 4) 2^-52) + R (D + 10) 2^-52,       r = 1, or 2 where a cap may replace,

and never more than two vectors of the ball are apart. **Agent level**: a vector of norm at most R becomes zero, and
where every site keeps at most `max_records`, R is at most that. **Person level**: `labeler.methods.sensitivity`.

At instance level the radius moves no price; it bounds what an agent that lies can do, and what a whole agent costs. The
ball shortens the sum of an agent with more than R records that agree, and never turns it.

References:
    Wahdany et al. 2025 (DPPL-Mean) sum records as they are, Mehta et al. 2023 divide by a covariance; both are measured
    in docs/math/rivals.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labeler.errors import InvalidSetting

FINE = 2**30
"""Whole numbers per 1 of a coordinate of phi: fewer than 2^33 records add up within 64 bits."""


def ball_rounding(radius: float, numbers: int) -> float:
    """How far a vector that was drawn onto a ball in double precision may be from the exact one; fact 4."""
    return radius * (numbers + 10) * 2.0**-53


@dataclass(frozen=True)
class MeanTerms:
    """Class sums as a mechanism; see the module.

    Attributes:
        num_classes: K, from the task, never from labels.
        axes: k, public axes that features are looked at along.
        radius: R, the most that an agent's sums may be long, records.
        max_records: the most records an agent may have, as a public fact; None where there is none.
        may_replace: whether a cap may let one record replace another.

    Raises:
        InvalidSetting: a value is out of bounds.
    """

    num_classes: int
    axes: int
    radius: float
    max_records: int | None = None
    may_replace: bool = False

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.axes < 1 or not 0 < self.radius < math.inf:
            raise InvalidSetting("class means have at least two classes, one axis and a positive finite radius")
        if self.max_records is not None and self.max_records < 1:
            raise InvalidSetting(f"max_records must be at least 1, found {self.max_records}")

    @property
    def numbers(self) -> int:
        """D: one row of K per axis, and one that stays zero, for the centre that is asked about."""
        return (self.axes + 1) * self.num_classes

    @property
    def feature_norm(self) -> float:
        """What a mapped row is cut to when it is scored: it is no longer."""
        return 1.0

    @property
    def bias_feature(self) -> float:
        """There is no intercept."""
        return 0.0

    @property
    def reach(self) -> float:
        """R: what an agent's sums are drawn to."""
        return self.radius if self.max_records is None else min(self.radius, float(self.max_records))

    @property
    def largest_norm(self) -> float:
        """Bound on the norm of an agent's vector, rounding included; the agent-level sensitivity."""
        return self.reach + ball_rounding(self.reach, self.numbers)

    @property
    def sensitivity(self) -> float:
        """Bound on the distance of one agent's vectors on neighbouring sets, instance level, rounding included."""
        one = (2 if self.may_replace else 1) * (1 + (self.axes + 4) * 2.0**-52)
        return min(one + 2 * ball_rounding(self.reach, self.numbers), 2 * self.largest_norm)
