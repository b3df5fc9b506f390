"""The wait before a turn for those who are about to say the same: five answers make one turn, and not five.

Where a job has asked everybody at once and the first have answered, the turn waits for the others
(`labeler.rounds.awaited`), for a few hundredths of a second and only while nobody else wants anything of the driver.
Who has sent something has its answer when that turn is durable, as ever. With many jobs under way it does not wait:
turns fill by themselves then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from feature_store.driving.inbox import Inbox
from feature_store.driving.intake import Delivery
from feature_store.driving.live_jobs import LiveJobs
from labeler.rounds.awaited import expects_more
from labeler.rounds.effects import MessageEvent, Now

GAP_S: Final = 0.03
"""For how long nothing may come; parties of one machine answer within a few hundredths of a second of each other."""

LONGEST_S: Final = 0.12
"""For how long in all; nothing beside the patience with a party that is silent."""

FEW_JOBS: Final = 8
"""With more under way a turn begins at once."""


class Gatherer:
    """See the module."""

    def __init__(self, inbox: Inbox, live: LiveJobs, now: Callable[[], Now]) -> None:
        self._inbox = inbox
        self._live = live
        self._now = now
        self.gap_s = GAP_S
        self.longest_s = LONGEST_S

    def gather(self) -> None:
        """Wait for others where what is there waits for them."""
        if len(self._live.jobs) <= FEW_JOBS:
            self._inbox.gather(self._is_part_of_more, gap_s=self.gap_s, longest_s=self.longest_s)

    def _is_part_of_more(self, deliveries: Sequence[Delivery]) -> bool:
        now, live = self._now(), self._live.jobs
        due_s = self._live.next_due_s()
        if self._live.stored or (due_s is not None and due_s <= now.steady_s):
            return False
        if any(delivery.error is not None for delivery in deliveries):
            return False
        events: dict[str, list[MessageEvent]] = {}
        for incoming in (one for delivery in deliveries for one in delivery.messages):
            job_id = incoming.job_id or self._live.of_round.get(incoming.message.header.round_digest, "")
            events.setdefault(job_id, []).append(incoming.event)
        return all(job in live and expects_more(live[job].run, said, wall_s=now.wall_s) for job, said in events.items())
