"""How often somebody who has not answered is asked again: the more mail waits with them, the later."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from api.coordinator.schedule import LONGEST_PAUSE_S
from feature_store.mailbox import Mailbox

_COUNTED_S = 0.5


class Pace:
    """When who was last asked what. All of it may be lost: then everybody is asked once more.

    Args:
        mailbox: where mail waits.
        ask_again_s: the shortest pause.
        now: seconds that never run backwards.
    """

    def __init__(self, mailbox: Mailbox, *, ask_again_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._mailbox = mailbox
        self._ask_again_s = ask_again_s
        self._now = now
        self._asked: dict[tuple[str, ...], float] = {}
        self._mail: dict[str, tuple[float, int]] = {}

    def is_due(self, what: tuple[str, ...], *, through: Collection[str] = ()) -> bool:
        """Whether to ask, for the first time or again; where it is, it counts as asked.

        The more mail waits with the parties it goes through, the longer the pause: they are busy, and every repetition
        is work for all of them, so that repeating at a fixed pace would keep a service under load from catching up.
        """
        now = self._now()
        before, pause_s = self._asked.get(what), self._ask_again_s
        if before is not None and pause_s:
            if now - before < pause_s:
                return False
            waiting = max((self._waiting(party_id) for party_id in through), default=0)
            if now - before < min(pause_s * (1 + waiting), max(pause_s, LONGEST_PAUSE_S)):
                return False
        self._asked[what] = now
        return True

    def forget(self, names: Collection[str]) -> None:
        """Nobody will be asked any more about anything of these names: rounds, and a job."""
        self._asked = {what: when for what, when in self._asked.items() if not set(what) & set(names)}

    def _waiting(self, party_id: str) -> int:
        """How many messages lie in a party's mail, as counted within the last half second."""
        counted_at, count = self._mail.get(party_id, (-_COUNTED_S, 0))
        if self._now() - counted_at >= _COUNTED_S:
            count = self._mailbox.pending(party_id)
            self._mail[party_id] = (self._now(), count)
        return count
