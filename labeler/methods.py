"""The ways in which agents answer, and what is publicly known of each: what other modules ask instead of its name.

Every system of the papers is one sum of bounded contributions. They differ in what a row of the sum is about, in who
adds the noise, and in whether a job can be cut into rounds; outside the modules that vote nobody has to know more.
What one record or one agent can change is in `labeler.sensitivity`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Method = Literal["knn", "reverse-knn", "ensemble", "blind-average", "aux-distill"]
"""How agents answer; see METHODS."""

ReleaseKind = Literal["histogram", "winner"]
"""What is opened of a sum: all of it, or the largest of each row."""


@dataclass(frozen=True)
class MethodTraits:
    """What is publicly known of a way to answer.

    Attributes:
        system: its name in the papers.
        answer: what an agent contributes, in words for people.
        sums: what is added up, in words for people.
        asked_at_once: whether all queries of a task are one composition, so that a job is asked in one round.
        rows_have_a_total: whether talliers can check what the rows of a ballot sum to (labeler.wellformed).
        counts: whether contributions are whole votes, counted; else they are real numbers on a fixed-point grid.
        asks_for_a_model: whether the sum is a model's weights; then its rows are no queries, and the public images are
            labelled with it afterwards.
        has_local_noise: whether each agent's noise is in what it answers already, enough of it for its own price; then
            no share of noise is added to the sum, and nobody's collusion weakens the guarantee.
    """

    system: str
    answer: str
    sums: str = "votes"
    asked_at_once: bool = False
    rows_have_a_total: bool = False
    counts: bool = True
    asks_for_a_model: bool = False
    has_local_noise: bool = False

    @property
    def releases(self) -> tuple[ReleaseKind, ...]:
        """What may be opened: a winner only where a row of the sum counts votes."""
        return ("histogram", "winner") if self.counts else ("histogram",)

    @property
    def is_priced_by_training(self) -> bool:
        """Whether the price depends on how agents train, so that the task has to say it: a vote is worth one whatever
        cast it, a number as much as a record can move it."""
        return not self.counts


METHODS: Final[dict[Method, MethodTraits]] = {
    "knn": MethodTraits("kNN-DPFL", "the labels of its k records nearest to each question", rows_have_a_total=True),
    "reverse-knn": MethodTraits(
        "reverse kNN", "each record's label, at the k questions nearest to it", asked_at_once=True
    ),
    "ensemble": MethodTraits(
        "AE-DPFL", "one vote per question, of a model trained on its records", rows_have_a_total=True
    ),
    "blind-average": MethodTraits(
        "DP-Helmet",
        "the weights of a linear model trained on its records",
        sums="weights",
        asked_at_once=True,
        counts=False,
        asks_for_a_model=True,
    ),
    "aux-distill": MethodTraits(
        "FedAUXfdp",
        "soft labels of a model with noise of its own, weighted by how certain it may be",
        sums="soft labels",
        asked_at_once=True,
        counts=False,
        has_local_noise=True,
    ),
}
"""Every way to answer, by the name a task gives it."""

METHOD_NAMES: Final[tuple[Method, ...]] = tuple(METHODS)
"""For help and refusals, in the order of introduction."""
