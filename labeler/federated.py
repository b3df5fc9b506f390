"""Training in steps over secret samples: what an agent answers in one step.

    theta_t, public  -->  every agent: a secret sample, clipped, summed  -->  one noisy `VectorSum`  -->  theta_(t+1)

With unit "record" (DP-FedSGD) each record of an agent takes part in a step with chance q, by a coin of its own; the
agent sums the gradients of those that do, each cut to norm c, draws the sum onto the ball of radius R c, and answers
with it in units of c. With unit "agent" (DP-FedAvg) the agent tosses one coin, makes its local steps from theta_t in
any case, and answers with the change of the model cut to norm c, or with zero. An agent always answers: a zero vector
gets its noise as any other does.

**The coins** are words of the round's own key (`workers.agent.agent`), compared with floor(q 2^64): each record's
chance is that number over 2^64, at most q, and no coin hangs on another record. A price for q holds for less. The key
is drawn with the charge and erased with the round, and the answer is stored before a byte of it leaves: there is one
sample for a round, or none, and nobody but the agent can ever know it. The model is part of the round's digest
(`labeler.batch.QueryBatch`): asked again from another one, a step is another round, with coins and noise of its own,
and one more of the T that were paid for.

**Fact 1, the gradient of a record is a function of the record and theta alone, to the last bit, and at most c long.**
A row z = (phi(x), 1) is cut to whole UNIT-ths number by number; theta is whole THETA_UNIT-ths, no column of it longer
than LONGEST_COLUMN. Every partial sum of z theta is then a whole number below
sqrt(2) UNIT LONGEST_COLUMN THETA_UNIT < 2^53: exact in double precision in any order and any block. What makes scores a
vector d = p - e_y is a fixed sequence of operations on single numbers, each correctly rounded
(`workers.learning.sampled_steps`); that it resembles a softmax matters to nobody's privacy. d is shortened to c / |z|
and cut towards zero to whole UNIT-ths, which lengthens nothing. So |z d| = |z| |d| <= c: the margin 2^-40 with which c
is taken covers the few roundings of the two norms.

**Fact 2, one record added or removed moves the sum by its own gradient or not at all**: sums of whole numbers are
exact, and the samples of the others do not know of it. So by at most c; the ball moves no two vectors further apart (it
is convex). Reading whole numbers as doubles and the ball's own rounding are off by R (D + 10) 2^-53 at most, as in
`labeler.class_means`, fact 4: they are in `sensitivity`.

**Fact 3, with unit "agent"** the answer is zero or a vector of norm at most c, which becomes zero where the agent goes.
Whatever a record changes, both vectors lie in one ball: at most 2 c apart.

What follows from what steps have opened is post-processing (`labeler.linear_model`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from labeler.class_means import ball_rounding
from labeler.errors import BadData, InvalidSetting

if TYPE_CHECKING:
    from labeler.task import Task

UNIT: Final = 2**20
"""Whole numbers per 1 of a coordinate of a row, and of a slope."""

THETA_UNIT: Final = 2**16
"""Whole numbers per 1 of a coordinate of the public model."""

LONGEST_COLUMN: Final = 2.0**15
"""The most that the weights of one class may be long."""

MARGIN: Final = 2.0**-40
"""Relative, for the rounding of two norms and a quotient (Fact 1)."""


@dataclass(frozen=True)
class StepTerms:
    """One step as a mechanism; see the module.

    Attributes:
        num_classes: K.
        rows: rows of the model: one per number of a row, and one for the constant.
        clip: c.
        unit: whose part is clipped and sampled.
        radius: R, the most that an agent's sum may be long, in clips; with unit "agent" it is 1.
        rate: q, exactly.

    Raises:
        InvalidSetting: a value is out of bounds.
    """

    num_classes: int
    rows: int
    clip: float
    unit: Literal["record", "agent"]
    radius: float
    rate: Fraction

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.rows < 2 or not 0 < self.clip < math.inf:
            raise InvalidSetting("a step has at least two classes and rows, and clips at a positive finite norm")
        if not 0 < self.rate <= 1 or not self.radius >= 1:
            raise InvalidSetting(f"a step samples at a rate up to 1 into a ball of at least 1 clip, found {self}")

    @property
    def numbers(self) -> int:
        """D."""
        return self.rows * self.num_classes

    @property
    def feature_norm(self) -> float:
        """What rows are cut to, but for their constant."""
        return 1.0

    @property
    def bias_feature(self) -> float:
        """The constant beside a row."""
        return 1.0

    @property
    def reach(self) -> float:
        """R, in clips."""
        return self.radius if self.unit == "record" else 1.0

    @property
    def largest_norm(self) -> float:
        """Bound on an agent's vector in clips, rounding included: what one agent changes."""
        return self.reach + ball_rounding(self.reach, self.numbers)

    @property
    def sensitivity(self) -> float:
        """By how much the presence of the unit that is sampled moves an agent's vector, in clips, rounding included."""
        return min(1 + MARGIN + 2 * ball_rounding(self.reach, self.numbers), 2 * self.largest_norm)

    @property
    def threshold(self) -> int:
        """Of 2^64: below it a coin says yes."""
        return math.floor(self.rate * 2**64)


def on_grid(theta: NDArray[np.float64]) -> NDArray[np.float64]:
    """A model as it is asked about: no column too long, and whole THETA_UNIT-ths, cut towards zero."""
    squares = np.zeros(theta.shape[1])
    for row in theta:
        squares += row * row
    lengths = np.sqrt(squares) * (1 + MARGIN)
    # A little shorter than the longest, so that a model that was shortened is not shortened again.
    factors = np.where(lengths > LONGEST_COLUMN, LONGEST_COLUMN * (1 - 2.0**-20) / np.maximum(lengths, 1.0), 1.0)
    shorter = theta * factors
    return np.asarray(np.trunc(shorter * THETA_UNIT) / THETA_UNIT)


def check_model(theta: NDArray[np.float64], task: Task) -> None:
    """Refuse what is no public model of a task.

    Raises:
        BadData: another shape, a number that is not finite or not on the grid, or a column that is too long.
    """
    if theta.dtype != np.float64 or theta.shape != (task.rows, task.num_classes) or not np.isfinite(theta).all():
        raise BadData(f"the public model of a step has shape ({task.rows}, {task.num_classes}), finite float64")
    if np.abs(theta).max() > LONGEST_COLUMN or not np.array_equal(on_grid(theta), theta):
        raise BadData("the public model of a step is not on its grid, or too long")
