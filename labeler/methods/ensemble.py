"""AE-DPFL (Zhu et al. 2021, Algorithm 2): an agent trains a model on its records, which casts one vote per query.

Whatever the learner is, and whatever it learns, the proof is about one vote per query alone. How it is cast:
`labeler.ballots.one_hot_ballots`, `workers.voting.ensemble`.
"""

from __future__ import annotations

from typing import Final

from labeler.methods.terms import CountedVotes, MethodTraits
from labeler.setting import Setting, StatedLevel


def squared(setting: Setting, level: StatedLevel, queries: int) -> int:  # noqa: ARG001  # as every method's
    """Squared L2 sensitivity of the sums of Q queries: 2 Q for a record or a person, Q for an agent.

    **Instance.** The record may change the model and so every prediction; each costs one
    vote here and one there: 2 Q, whether it comes, goes or takes another's place.

    **Person.** Whatever the model learns without them, it casts one vote per query: 2 Q, as for one record.

    **Agent.** The one vote of each row disappears: Q.
    """
    return queries if level == "agent" else 2 * queries


def largest(setting: Setting, level: StatedLevel) -> int:  # noqa: ARG001  # as every method's
    """One vote, whoever comes or goes: an agent casts no more than one per query."""
    return 1


def per_cell(setting: Setting) -> int:  # noqa: ARG001  # as every method's
    """One vote per query."""
    return 1


TRAITS: Final = MethodTraits(
    "AE-DPFL",
    "one vote per question, of a model trained on its records",
    rows_have_a_total=True,
    stated=CountedVotes(squared, largest, per_cell),
)
