"""The mailbox inside one process: for `labeler run`, for tests and for simulated federations.

The twin of `feature_store.mailbox.redis`: the same positions, leases, bounds and waiting, without a server. Any number
of threads and event loops may use one at once. Everything is gone when the process ends, which a mailbox may do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from feature_store.mailbox.protocol import (
    CHANGED,
    ENDED,
    MAIL_SEEN_S,
    MAIL_UNUSED_S,
    MAX_EVENTS,
    MAX_MAIL,
    MAX_MAIL_BYTES,
    PROGRESS_UNUSED_S,
    Letter,
    Work,
    check_mail,
    check_wait,
    check_work,
    format_position,
    parse_position,
)
from labeler.errors import NotReady
from labeler.untrusted import canonical_json, check_party_id, check_text

_START: Final = (0, 0)
_SWEEP_EVERY: Final = 4096
"""Sends between two looks for what has expired: the cost of forgetting is spread, and what is kept stays bounded."""


@dataclass
class _Stream:
    """Entries in order of their positions, and who waits for the next."""

    expires: float
    last: tuple[int, int] = _START
    entries: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass
class _Piece:
    """One piece of work: who holds it since when, and how often it was handed out."""

    work_id: str
    consumer: str | None = None
    since: float = 0.0
    attempt: int = 0


@dataclass
class _Queue:
    last: tuple[int, int] = _START
    pieces: dict[tuple[int, int], _Piece] = field(default_factory=dict)
    entry_of: dict[str, tuple[int, int]] = field(default_factory=dict)


class MemoryMailbox:
    """The `feature_store.mailbox.protocol.Mailbox` of one process; see the module.

    Args:
        now: seconds since 1970, from which positions and expiries follow. A simulation gives its own; then calls that
            wait still wait by the real clock, so it does not let them wait.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._queues: dict[str, _Queue] = {}
        self._alive: dict[str, float] = {}
        self._waiting: dict[tuple[str, str], set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._sends = 0

    def check(self) -> None:
        """See the protocol: memory always answers and throws nothing away."""

    def empty(self) -> None:
        """Forget everything, as a Redis does that is emptied or started anew. Whoever waits goes on waiting."""
        with self._changed:
            self._streams.clear()
            self._seen.clear()
            self._queues.clear()
            self._alive.clear()

    # Mail

    def send(self, recipient: str, data: bytes, *, message_id: str) -> None:
        """See the protocol."""
        check_mail(recipient, data, message_id)
        with self._changed:
            now = self._now()
            if self._seen.get((recipient, message_id), now) > now:
                return
            self._seen[recipient, message_id] = now + MAIL_SEEN_S
            self._append(("mail", recipient), bytes(data), most=MAX_MAIL, unused_s=MAIL_UNUSED_S)
            self._sends += 1
            if self._sends % _SWEEP_EVERY == 0:
                self._seen = {key: until for key, until in self._seen.items() if until > now}
                self._streams = {key: stream for key, stream in self._streams.items() if stream.expires > now}

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """See the protocol."""
        for letter in letters:
            check_mail(letter.recipient, letter.data, letter.message_id)
        for letter in letters:
            self.send(letter.recipient, letter.data, message_id=letter.message_id)
        for job_id in tell:
            self.publish(job_id, ENDED if job_id in ended else CHANGED)

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

    def pending(self, recipient: str) -> int:
        """See the protocol."""
        with self._changed:
            stream = self._stream(("mail", check_party_id(recipient, "recipient of mail")))
            return 0 if stream is None else len(stream.entries)

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """See the protocol."""
        return {recipient: self.pending(recipient) for recipient in recipients}

    # Work

    def add_work(self, queue: str, work_id: str) -> None:
        """See the protocol."""
        check_work(queue, work_id)
        with self._changed:
            waiting = self._queues.setdefault(queue, _Queue())
            if work_id in waiting.entry_of:
                return
            waiting.last = self._next(waiting.last)
            waiting.pieces[waiting.last] = _Piece(work_id)
            waiting.entry_of[work_id] = waiting.last
            self._changed.notify_all()

    def claim(self, queue: str, consumer: str, *, lease_s: float, wait_s: float) -> Work | None:
        """See the protocol."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                waiting = self._queues.get(queue, _Queue())
                now = self._now()
                free = (entry for entry, piece in waiting.pieces.items() if piece.consumer is None)
                overdue = (
                    entry
                    for entry, piece in waiting.pieces.items()
                    if piece.consumer is not None and now - piece.since >= lease_s
                )
                entry = next(overdue, None) or next(free, None)
                if entry is not None:
                    piece = waiting.pieces[entry]
                    piece.consumer, piece.since, piece.attempt = consumer, now, piece.attempt + 1
                    return Work(queue, piece.work_id, format_position(entry), consumer, piece.attempt)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                leases = [piece.since + lease_s - now for piece in waiting.pieces.values()]
                self._changed.wait(min(left_s, *leases) if leases else left_s)

    def heartbeat(self, work: Work) -> None:
        """See the protocol."""
        with self._changed:
            piece = self._piece(work)
            if piece is None or piece.consumer != work.consumer:
                raise NotReady(
                    f"work {work.work_id!r} is no longer held by {work.consumer!r}: its lease ran out, or the mailbox "
                    "was emptied"
                )
            piece.since = self._now()

    def done(self, work: Work) -> None:
        """See the protocol."""
        with self._changed:
            if self._piece(work) is not None:
                waiting = self._queues[work.queue]
                del waiting.pieces[parse_position(work.entry)]
                del waiting.entry_of[work.work_id]

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

    def publish(self, job_id: str, event: Mapping[str, Any]) -> None:
        """See the protocol."""
        key = ("progress", check_text(job_id, "job_id", most=200))
        data = canonical_json(dict(event))
        with self._changed:
            self._append(key, data, most=MAX_EVENTS, unused_s=PROGRESS_UNUSED_S)

    async def watch(
        self, job_id: str, after: str, wait_s: float, max_events: int = 100
    ) -> list[tuple[str, dict[str, Any]]]:
        """See the protocol."""
        key = ("progress", check_text(job_id, "job_id", most=200))
        found = await self._read(key, after, wait_s, max_events, max_bytes=MAX_MAIL_BYTES, drop=False)
        return [(position, json.loads(data)) for position, data in found]

    # Ends

    def close(self) -> None:
        """See the protocol: nothing is open."""

    async def aclose(self) -> None:
        """See the protocol: nothing is open."""

    def __repr__(self) -> str:
        return "MemoryMailbox(<redacted>)"

    # With `_changed` held

    def _next(self, last: tuple[int, int]) -> tuple[int, int]:
        """The position after `last`: of now, or one more where the clock stands or went back."""
        now_ms = int(self._now() * 1000)
        return (now_ms, 0) if now_ms > last[0] else (last[0], last[1] + 1)

    def _stream(self, key: tuple[str, str]) -> _Stream | None:
        stream = self._streams.get(key)
        if stream is not None and stream.expires <= self._now():
            del self._streams[key]
            return None
        return stream

    def _append(self, key: tuple[str, str], data: bytes, *, most: int, unused_s: float) -> None:
        expires = self._now() + unused_s
        stream = self._stream(key)
        if stream is None:
            stream = self._streams[key] = _Stream(expires)
        stream.expires = expires
        stream.last = self._next(stream.last)
        stream.entries[stream.last] = data
        if len(stream.entries) > most:
            del stream.entries[next(iter(stream.entries))]
        for loop, event in self._waiting.get(key, ()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def _piece(self, work: Work) -> _Piece | None:
        queue = self._queues.get(work.queue)
        piece = None if queue is None else queue.pieces.get(parse_position(work.entry))
        return piece if piece is not None and piece.work_id == work.work_id else None

    def _found(
        self, key: tuple[str, str], position: tuple[int, int], count: int, max_bytes: int, *, drop: bool
    ) -> list[tuple[str, bytes]]:
        stream = self._stream(key)
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
        self, key: tuple[str, str], after: str, wait_s: float, count: int, *, max_bytes: int, drop: bool
    ) -> list[tuple[str, bytes]]:
        check_wait(wait_s)
        position = parse_position(after)
        if not wait_s:  # nor is there an event loop to wait in, where nobody ever waits
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
