"""How often one token may call, how often one address may fail, and how much may be under way at once; in memory.

The limits protect the service from a loop in somebody's script. They are no part of the privacy bound, so it harms
nobody that a restart forgets them. A failure never locks out a neighbour that shows a good token.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from labeler.errors import InvalidSetting, RateLimited

SLOT_WAIT_S = 5


class TooManyRequests(RateLimited):
    """Too many requests came; `retry_after_s` says when the next is taken."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimits:
    """Counts requests by token, failures and enrolments by address.

    Args:
        requests_per_minute: of one token.
        failures_per_minute: requests of one client address without a good token or signature.
        enrolments_per_minute: attempts of one client address to use an invitation; a site needs one in its life.
    """

    def __init__(
        self, *, requests_per_minute: int, failures_per_minute: int = 600, enrolments_per_minute: int = 30
    ) -> None:
        if min(requests_per_minute, failures_per_minute, enrolments_per_minute) < 1:
            raise InvalidSetting("a rate limit must be at least one request a minute")
        self._requests = RateLimitItemPerMinute(requests_per_minute)
        self._enrolments = RateLimitItemPerMinute(enrolments_per_minute)
        self._failures = RateLimitItemPerMinute(failures_per_minute)
        self._window = MovingWindowRateLimiter(MemoryStorage())

    def spend(self, token_id: str) -> None:
        """Count one request of a token.

        Raises:
            TooManyRequests: the token has used up its minute.
        """
        self._hit(self._requests, "token", token_id, "one token may send")

    def failed(self, address: str) -> None:
        """Count one request without a good token or signature.

        Raises:
            TooManyRequests: the address has failed too often within a minute.
        """
        self._hit(self._failures, "address", address, "one address may fail to show a good token or signature for")

    def enrol(self, address: str) -> None:
        """Count one attempt to use an invitation.

        Raises:
            TooManyRequests: the address has tried too often within a minute.
        """
        self._hit(self._enrolments, "enrolment", address, "one address may try to enrol with")

    def _hit(self, item: RateLimitItem, kind: str, name: str, words: str) -> None:
        if self._window.hit(item, kind, name):
            return
        reset_at, _ = self._window.get_window_stats(item, kind, name)
        wait_s = max(1, math.ceil(reset_at - time.time()))
        raise TooManyRequests(
            f"{words} {item.amount} requests a minute; send the next in {wait_s} s", retry_after_s=wait_s
        )


class Slots:
    """How many of something that lasts may be under way at once, for one name and for all together.

    Args:
        what: in words, singular.
        each: most of one name.
        total: most of all.
    """

    def __init__(self, what: str, *, each: int, total: int) -> None:
        if each < 1 or total < 1:
            raise InvalidSetting("a bound on what may be under way at once must be at least one")
        self._what = what
        self._each = each
        self._total = total
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold one slot until the block ends.

        Raises:
            TooManyRequests: none is free for this name, or for anybody.
        """
        with self._lock:
            if self._held[name] >= self._each:
                raise TooManyRequests(
                    f"one token may keep {self._each} {self._what}s open; close one first", retry_after_s=SLOT_WAIT_S
                )
            if self._held.total() >= self._total:
                raise TooManyRequests(
                    f"{self._total} {self._what}s are open, which is as many as are served; try again in "
                    f"{SLOT_WAIT_S} s",
                    retry_after_s=SLOT_WAIT_S,
                )
            self._held[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]
