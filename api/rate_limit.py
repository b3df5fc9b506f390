"""How often one token may call, how often one address may fail, and how much may be under way at once; in memory.

The limits protect the service from a loop in somebody's script. They are no part of the privacy bound, so it harms
nobody that a restart forgets them. A failure never locks out a neighbour that shows a good token.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from labeler.errors import InvalidSetting, RateLimited

SLOT_WAIT_S = 5
WINDOW_S = 60.0


class TooManyRequests(RateLimited):
    """Too many requests came; `retry_after_s` says when the next is taken."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimits:
    """Counts requests by token, failures and enrolments by address.

    Written here because it stands before every request: the library that was here scans all names, in a thread that it
    starts for every few of them.

    Args:
        requests_per_minute: of one token.
        failures_per_minute: requests of one client address without a good token or signature.
        enrolments_per_minute: attempts of one client address to use an invitation; a site needs one in its life.
        steady: seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int,
        failures_per_minute: int = 600,
        enrolments_per_minute: int = 30,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(requests_per_minute, failures_per_minute, enrolments_per_minute) < 1:
            raise InvalidSetting("a rate limit must be at least one request a minute")
        self._requests = _Windows(requests_per_minute, steady)
        self._enrolments = _Windows(enrolments_per_minute, steady)
        self._failures = _Windows(failures_per_minute, steady)

    def spend(self, token_id: str) -> None:
        """Count one request of a token.

        Raises:
            TooManyRequests: the token has used up its minute.
        """
        self._requests.hit(token_id, "one token may send")

    def failed(self, address: str) -> None:
        """Count one request without a good token or signature.

        Raises:
            TooManyRequests: the address has failed too often within a minute.
        """
        self._failures.hit(address, "one address may fail to show a good token or signature for")

    def enrol(self, address: str) -> None:
        """Count one attempt to use an invitation.

        Raises:
            TooManyRequests: the address has tried too often within a minute.
        """
        self._enrolments.hit(address, "one address may try to enrol with")


@dataclass
class _Window:
    """When the last requests of one name came: as many as are taken a minute, the oldest overwritten by the newest."""

    times: array[float] = field(default_factory=lambda: array("d"))
    oldest: int = 0
    newest_s: float = 0.0


class _Windows:
    """At most so many requests of one name within any minute; a refused one is not counted."""

    def __init__(self, most: int, steady: Callable[[], float]) -> None:
        self._most = most
        self._steady = steady
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._swept_s = steady()

    def hit(self, name: str, words: str) -> None:
        """Count one.

        Raises:
            TooManyRequests: there is no room for it before a request of a minute ago is forgotten.
        """
        now_s = self._steady()
        with self._lock:
            if now_s - self._swept_s >= WINDOW_S:
                self._sweep(now_s)
            window = self._windows.get(name)
            if window is None:
                window = self._windows[name] = _Window()
            times = window.times
            if len(times) < self._most:
                times.append(now_s)
            else:
                free_s = times[window.oldest] + WINDOW_S
                if now_s < free_s:
                    wait_s = max(1, math.ceil(free_s - now_s))
                    raise TooManyRequests(
                        f"{words} {self._most} requests a minute; send the next in {wait_s} s", retry_after_s=wait_s
                    )
                times[window.oldest] = now_s
                window.oldest = (window.oldest + 1) % self._most
            window.newest_s = now_s

    def _sweep(self, now_s: float) -> None:
        """Forget names that have sent nothing for a minute: what is remembered stays as small as what comes."""
        self._swept_s = now_s
        for name in [name for name, window in self._windows.items() if now_s - window.newest_s >= WINDOW_S]:
            del self._windows[name]


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
                    f"one token may have {self._each} {self._what}s under way; wait for one, or end it",
                    retry_after_s=SLOT_WAIT_S,
                )
            if self._held.total() >= self._total:
                raise TooManyRequests(
                    f"{self._total} {self._what}s are under way, which is as many as are served; try again in "
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
