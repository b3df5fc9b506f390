"""The words for a job that everybody shares: its states, how questions are chosen, why one has the label it has."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, get_args

JobState = Literal["queued", "collecting", "tallying", "completed", "failed", "refused", "cancelled", "expired"]
"""How far a job is; see ARCHITECTURE."""

UNFINISHED: Final[tuple[JobState, ...]] = ("queued", "collecting", "tallying")

FINISHED: Final[frozenset[JobState]] = frozenset({"completed", "failed", "refused", "cancelled", "expired"})
"""From which no job goes on."""

RoundState = Literal["waiting", "asked", "agreed", "posted", "opened"]
"""How far one round of a job is, in this order."""

AskedStrategy = Literal["all", "random", "clustered", "spectral"]
"""How a requester may have questions chosen among public images; see `feature_store.query_selection`."""

Strategy = Literal["all", "random", "clustered", "spectral", "weights"]
"""How questions are chosen: as asked, or as a method that asks for a model needs it."""

StudentKind = Literal["planned", "followed", "pooled", "blended"]
"""What learns from the answers; see `feature_store.students.student`."""

STUDENT_KINDS: Final[tuple[StudentKind, ...]] = get_args(StudentKind)

MOST_SPECTRAL_GROUPS: Final = 500
"""As many groups as strategy `spectral` makes: each takes an eigenvector, and time grows with their square."""


def check_selection(strategy: AskedStrategy, count: int | None) -> None:
    """Refuse a choice of questions that cannot be made, whatever the images are.

    Raises:
        ValueError: no count where one is needed, or more groups than the strategy makes.
    """
    if strategy != "all" and count is None:
        raise ValueError(f"strategy {strategy!r} needs count, how many questions to ask")
    if strategy == "spectral" and count is not None and count > MOST_SPECTRAL_GROUPS:
        raise ValueError(
            f"strategy 'spectral' makes at most {MOST_SPECTRAL_GROUPS} groups, found count {count}; strategy "
            "'clustered' makes more"
        )


class AnswerStatus(StrEnum):
    """Why a query has the label it has."""

    ANSWERED = "answered"
    ABSTAINED = "abstained"
    REFUSED_BUDGET = "refused_budget"
    FAILED_QUORUM = "failed_quorum"


ABSTAINED_LABEL: Final = -1
"""The label of a query without an answer."""
