"""What talliers hold of a round: whose shares all of them have, and whether those agreed on are still there."""

from __future__ import annotations

from collections.abc import Collection

from feature_store.journal.jobs import RoundRecord
from labeler.errors import ProtocolViolation


def held_by_all(current: RoundRecord, tallier_ids: Collection[str]) -> set[str]:
    """Agents of which every tallier holds a share of the same split; nobody while a tallier has not reported."""
    reports = [current.holdings.get(tallier_id) for tallier_id in tallier_ids]
    if not reports or any(report is None for report in reports):
        return set()
    common = set((reports[0] or {}).items())
    for report in reports[1:]:
        common &= set((report or {}).items())
    return {agent for agent, _ in common}


def check_still_held(current: RoundRecord, tallier_ids: Collection[str]) -> None:
    """End a round whose sum can never be made: a tallier that reported a contributor has shut it out since.

    That is what an agent achieves that sends a second, different share behind its first. The contributors are fixed
    for ever, so waiting would not help anybody.
    """
    for tallier_id in tallier_ids:
        report = current.holdings.get(tallier_id)
        lost = [] if report is None else [agent for agent in current.contributors if agent not in report]
        if lost:
            raise ProtocolViolation(
                f"{tallier_id} shut out {', '.join(lost[:5])}, who sent it two different shares after the contributors "
                "were agreed on, so their sum cannot be made. What was charged stands; ask that site what happened, or "
                "revoke its keys, then submit the job again"
            )
