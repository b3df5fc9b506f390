"""Telling the agents of a round that nobody misses anything of it any more, so that they erase what they kept.

Said once, when the round is opened (every tallier has fixed its sum by then) or its job has ended otherwise. It is a
courtesy that may be lost: an agent that never hears it erases at the deadline of the ask by itself, and one that hears
it too early cannot answer again, which a coordinator achieves by not asking as well (labeler.bodies.Settled).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from api.coordinator.post_office import PostOffice
from feature_store.journal.jobs import RoundRecord
from feature_store.journal.tasks import TaskRecord
from labeler.bodies import Settled
from labeler.errors import TryAgain

log = logging.getLogger("labeler.conductor")


def tell_settled(rounds: Iterable[RoundRecord], task: TaskRecord, *, post_office: PostOffice) -> None:
    """Tell every agent that took part in one of these rounds; nobody of a round that was not asked."""
    body = Settled().encode()
    try:
        for one in rounds:
            if one.state != "waiting":
                for agent in sorted(one.participants):
                    post_office.send("answered", agent, one, task, body)
    except TryAgain as error:
        log.warning("agents will erase at the deadline by themselves", extra={"problem": error.problem_type})
