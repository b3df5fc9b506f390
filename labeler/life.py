"""What a task says that lets each record vote for life: how much a record may ever spend, and how near it has to be.

Both are public and the same for every agent. What they promise is proved in `labeler.accounting.lifetime`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from labeler.plain_numbers import PlainNumbers

MOST_LIFE_NANO: Final = 10**10
"""The largest B: mu^2 = 10, which promises little (epsilon 17 at delta 1e-5), and for which the corrections of integer
noise are still far below any delta in use."""


class Life(PlainNumbers):
    """Votes for life: each record carries a spend through all tasks, and votes only while it stays within B.

    Attributes:
        budget_nano: B, what one record may ever spend on votes, nano-units of mu^2. All tasks of this kind together are
            sqrt(B)-GDP for one record, however many are asked; B is the largest of any task that the agent answers.
        asked_classes: only records of these classes vote, by their own label; all where None. What a job is not about
            costs the records of other classes nothing.
        least_similarity: a record votes only at queries whose cosine with it is at least this. So what is far from
            everything that a record knows costs that record nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    budget_nano: Annotated[int, Field(ge=1, le=MOST_LIFE_NANO)]
    least_similarity: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    asked_classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    def least_product(self, one: int) -> int:
        """The smallest inner product of integer features that reaches the similarity: exact, whatever the machine.

        Args:
            one: what a feature of length 1 is long as integers.
        """
        return math.ceil(Fraction(self.least_similarity) * one**2)
