"""The mailbox inside one process: for `labeler run`, for tests and for simulations.

The in-process twin of `labeler.driver.mail_redis`: the same positions, limits and waiting, without a server. Any number
of threads and event loops may use one at once. Everything is lost when the process ends, as the protocol allows.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from labeler.driver.mail import (
    CHANGED,
    ENDED,
    EVENTS_AT_ONCE,
    MAX_EVENTS,
    MAX_MAIL,
    MAX_MAIL_BYTES,
    Letter,
    check_mail,
    check_wait,
    format_position,
    parse_position,
)
from labeler.untrusted import check_party_id, check_text

_START: Final = (0, 0)

MOST_SEEN: Final = 4096
"""Most message ids remembered to detect repeats, so that memory does not grow."""

_Key = tuple[str, str]
_Position = tuple[int, int]


@dataclass
class _Stream:
    """Entries in order of their positions."""

    last: _Position = _START
    entries: dict[_Position, bytes] = field(default_factory=dict)


class MemoryMailbox:
    """The `labeler.driver.mail.Mailbox` of one process; see the module.

    Args:
        now: seconds since 1970, from which positions follow. A simulation passes its own clock, but waiting calls still
            use the real one, so a simulation must not wait.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._streams: dict[_Key, _Stream] = {}
        self._seen: dict[tuple[str, str], None] = {}
        self._alive: dict[str, float] = {}
        self._waiting: dict[_Key, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def check(self) -> None:
        """See the protocol: memory always answers and throws nothing away."""

    def empty(self) -> None:
        """Forget everything, like a Redis that is emptied or restarted. Waiting readers go on waiting."""
        with self._changed:
            self._streams.clear()
            self._seen.clear()
            self._alive.clear()

    # Mail

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """See the protocol. One step for all other threads, so that a waiting reader gets all of its messages."""
        for letter in letters:
            check_mail(letter.recipient, letter.data, letter.message_id)
        with self._changed:
            for letter in letters:
                self._put(letter)
            for job_id in tell:
                key = ("progress", check_text(job_id, "job_id", most=200))
                self._append(key, ENDED if job_id in ended else CHANGED, most=MAX_EVENTS)
            # Each reader once, however many messages it got.
            self._wake(dict.fromkeys(("mail", letter.recipient) for letter in letters))
            self._wake([("progress", job_id) for job_id in tell])

    async def receive(
        self,
        recipient: str,
        after: str,
        wait_s: float,
        max_messages: int = 16,
        *,
        max_bytes: int = MAX_MAIL_BYTES,
    ) -> list[tuple[str, bytes]]:
        """See the protocol."""
        key = ("mail", check_party_id(recipient, "recipient of mail"))
        return await self._read(key, after, wait_s, max_messages, max_bytes=max_bytes, drop=True)

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """See the protocol."""
        with self._changed:
            keys = {one: ("mail", check_party_id(one, "recipient of mail")) for one in recipients}
            return {one: len(self._streams[key].entries) if key in self._streams else 0 for one, key in keys.items()}

    # Signs of life

    def show_life(self, role: str, *, for_s: float) -> None:
        """See the protocol."""
        with self._changed:
            self._alive[check_text(role, "role", most=100)] = self._now() + for_s

    def is_alive(self, role: str) -> bool:
        """See the protocol."""
        with self._changed:
            return self._alive.get(check_text(role, "role", most=100), 0.0) > self._now()

    # Progress

    async def watch(self, job_id: str, after: str, wait_s: float) -> list[tuple[str, bool]]:
        """See the protocol."""
        key = ("progress", check_text(job_id, "job_id", most=200))
        found = await self._read(key, after, wait_s, EVENTS_AT_ONCE, max_bytes=MAX_MAIL_BYTES, drop=False)
        return [(position, data == ENDED) for position, data in found]

    # Ends

    def close(self) -> None:
        """See the protocol: nothing is open."""

    async def aclose(self) -> None:
        """See the protocol: nothing is open."""

    def __repr__(self) -> str:
        return "MemoryMailbox(<redacted>)"

    # Call these with `_changed` held

    def _next(self, last: _Position) -> _Position:
        """Return the position after `last`: of now, or one more if the clock stands still or went back."""
        now_ms = int(self._now() * 1000)
        return (now_ms, 0) if now_ms > last[0] else (last[0], last[1] + 1)

    def _put(self, letter: Letter) -> None:
        name = (letter.recipient, letter.message_id)
        if name in self._seen:
            return
        self._seen[name] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._append(("mail", letter.recipient), bytes(letter.data), most=MAX_MAIL)

    def _append(self, key: _Key, entry: bytes, *, most: int) -> None:
        stream = self._streams.setdefault(key, _Stream())
        stream.last = self._next(stream.last)
        stream.entries[stream.last] = entry
        if len(stream.entries) > most:
            del stream.entries[next(iter(stream.entries))]

    def _wake(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            for loop, event in self._waiting.get(key, ()):
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    def _found(
        self, key: _Key, position: _Position, count: int, max_bytes: int, *, drop: bool
    ) -> list[tuple[str, bytes]]:
        stream = self._streams.get(key)
        if stream is None:
            return []
        if position > stream.last:
            position = _START
        elif drop:
            for old in list(itertools.takewhile(lambda entry: entry <= position, stream.entries)):
                del stream.entries[old]
        found: list[tuple[str, bytes]] = []
        size = 0
        for entry, data in stream.entries.items():
            if entry <= position:
                continue
            size += len(data)
            if len(found) == count or (found and size > max_bytes):
                break
            found.append((format_position(entry), data))
        return found

    async def _read(
        self, key: _Key, after: str, wait_s: float, count: int, *, max_bytes: int, drop: bool
    ) -> list[tuple[str, bytes]]:
        check_wait(wait_s)
        position = parse_position(after)
        if not wait_s:  # without a wait there may be no event loop
            with self._changed:
                return self._found(key, position, count, max_bytes, drop=drop)
        loop = asyncio.get_running_loop()
        waiter = (loop, asyncio.Event())
        until = loop.time() + wait_s
        try:
            while True:
                with self._changed:
                    waiter[1].clear()
                    found = self._found(key, position, count, max_bytes, drop=drop)
                    if found or loop.time() >= until:
                        return found
                    self._waiting.setdefault(key, set()).add(waiter)
                try:
                    async with asyncio.timeout_at(until):
                        await waiter[1].wait()
                except TimeoutError:
                    continue
        finally:
            with self._changed:
                left = self._waiting.get(key, set())
                left.discard(waiter)
                if not left:
                    self._waiting.pop(key, None)
