"""Whose turn it is: talliers find the winners of one round at a time, and one that fails goes to the end of the line.

Three talliers have to come to one job together, so they are all asked at once, and asked again, all of them, where one
has answered and another has not: who died has nobody left to compute with. A round whose turn fails or takes too long
makes room for the next, so that one that cannot be computed holds up nobody else. All of this may be lost: talliers
answer the same however often they are asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection


class WinnerTurns:
    """The line of rounds that wait for their winners. Used by several threads.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._line: list[str] = []
        self._jobs: dict[str, str] = {}
        self._failed_at: dict[str, float] = {}
        self._asked_at: float | None = None
        self._answered_at: float | None = None
        self._limit_s = 0.0

    def should_ask(
        self, round_digest: str, *, job_id: str, num_answers: int, limit_s: float, ask_again_s: float
    ) -> bool:
        """Whether the talliers are to be asked for the winners of this round now, all of them.

        Args:
            round_digest: a round whose charge is posted and whose winners are not all there.
            job_id: its job.
            num_answers: talliers that have answered.
            limit_s: how long its turn lasts at most.
            ask_again_s: pause after a failure, and patience with who has not answered when others have.
        """
        now = self._clock()
        with self._lock:
            if round_digest not in self._jobs:
                self._line.append(round_digest)
                self._jobs[round_digest] = job_id
            if self._asked_at is not None and now - self._asked_at > self._limit_s:
                self._rotate(now)
            if self._line[0] != round_digest:
                return False
            if self._asked_at is None:
                if now - self._failed_at.get(round_digest, now - ask_again_s) < ask_again_s:
                    return False
            elif not num_answers:
                return False
            else:
                self._answered_at = now if self._answered_at is None else self._answered_at
                if now - self._answered_at < ask_again_s:
                    return False
            self._asked_at, self._answered_at, self._limit_s = now, None, limit_s
            return True

    def failed(self, round_digest: str) -> str | None:
        """A tallier could not compute the winners of a round this time.

        Returns:
            The job whose round has its turn now, where the failed one had it; None where it had not.
        """
        with self._lock:
            if not self._line or self._line[0] != round_digest or self._asked_at is None:
                return None
            self._rotate(self._clock())
            return self._jobs[self._line[0]]

    def ended(self, round_digests: Collection[str]) -> str | None:
        """These rounds need no winners any more.

        Returns:
            The job whose round has its turn now, where one of these had it; None where none had.
        """
        with self._lock:
            had_turn = bool(self._line) and self._line[0] in round_digests
            self._line = [digest for digest in self._line if digest not in round_digests]
            for digest in round_digests:
                self._jobs.pop(digest, None)
                self._failed_at.pop(digest, None)
            if not had_turn:
                return None
            self._asked_at = self._answered_at = None
            return self._jobs[self._line[0]] if self._line else None

    def _rotate(self, now: float) -> None:
        first = self._line.pop(0)
        self._line.append(first)
        self._failed_at[first] = now
        self._asked_at = self._answered_at = None
