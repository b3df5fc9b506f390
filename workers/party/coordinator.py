"""The coordinator as a party sees it: over HTTP, with the furthest state of its journal that the party has seen.

Requests are bounded, end at once when the party stops, and are encrypted except on this machine.

A coordinator whose journal was replaced by an older copy believes that copy. It also believes what its own key has
signed. So a party sends, with every poll, the signed answer that stated the furthest head. A head in it that the
journal does not hold stops the service until the newest journal is back (api.coordinator.mailroom.Witnesses). The
answer is public to every party that may poll, and holds nothing of any record.

    coordinator.head    the head (labeler.ledger.chain)
    coordinator.proof   one answer to a poll, as received

Both are overwritten in place, because a new file under the old name would cost a disk write at every answer. A kill
loses nothing of them. They are synced at most once a second, when this party turns to the next mail, so that no sync
delays an answer. What was seen within a second of the last sync is synced after the poll that then waits. So after a
power cut they may be as old as one poll, which only makes them milder. A half-written proof counts as none, and the
next answer is kept in its place.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import httpx2

from labeler.errors import (
    Forged,
    Interrupted,
    InvalidSetting,
    JournalBehind,
    LabelerError,
    NotEnrolled,
    ProtocolViolation,
    Replayed,
    TooLarge,
    Unavailable,
    WrongVersion,
)
from labeler.ledger.chain import EMPTY, Anchor, Head, read_small
from labeler.messages import MAX_MESSAGE_BYTES, Message, frame, frame_sizes, read_frames
from labeler.messages.envelope import FRAME_HEAD_BYTES, SIGNATURE_BYTES
from labeler.system.http_client import http_client, is_loopback, read_whole
from workers.party.home import PROOF_FILE

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024
"""Largest answer that is read: one of the largest messages, or many that are no larger together, plus the coordinator's
own message.
"""

_MAX_PROBLEM_BYTES = 64 * 1024
_LONGEST_RETRY_AFTER_S = 30.0
_WATCH_S = 5.0
"""Seconds between checks, by the thread that waits for the end, that it is still needed; the end itself wakes it."""

_PROBLEM = "urn:labeler:problem:"


class Unreachable(Unavailable):
    """The coordinator did not answer, or says that it cannot now.

    Attributes:
        retry_after_s: how long it asks the party to wait.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CoordinatorDoor(Protocol):
    """A way to the coordinator: `CoordinatorHttp`, or a twin inside one process."""

    def post(self, path: str, data: bytes) -> bytes:
        """Send bytes once; see `CoordinatorHttp.post`."""

    def close(self) -> None:
        """Close what is open."""


class CoordinatorHttp:
    """Requests to one coordinator; used by one thread.

    When this party stops, a running request ends: a separate thread waits for the stop and shuts the connection through
    a second handle.

    Args:
        url: https, or http to this machine only.
        ca_file: certificates to check the coordinator's against; the system's where absent.
        read_timeout_s: longest silence while waiting for an answer.
        stop: ends a request that is under way.

    Raises:
        InvalidSetting: the address is not valid, or would send messages over a network in clear.
    """

    def __init__(self, url: str, *, ca_file: str | None, read_timeout_s: float, stop: threading.Event) -> None:
        self._stop = stop
        self._is_closed = threading.Event()
        try:
            self._http = http_client(check_url(url), ca_file=ca_file, read_s=read_timeout_s)
        except OSError:  # of TLS, too
            raise InvalidSetting("ca_file cannot be read, or holds no certificates (PEM)") from None
        except (ImportError, ValueError):
            raise InvalidSetting(
                "HTTPS_PROXY or ALL_PROXY names a proxy of a kind that is not spoken to; name one by http://, or the "
                "coordinator's host in NO_PROXY"
            ) from None
        self._guard = threading.Lock()
        self._handle: socket.socket | None = None
        threading.Thread(target=self._watch, name="end of a request", daemon=True).start()

    def close(self) -> None:
        """Close every connection."""
        self._is_closed.set()
        self._http.close()
        self._hold(None)

    def post(self, path: str, data: bytes, *, media_type: str = "application/octet-stream") -> bytes:
        """Send bytes once; return the body of an answer that accepts them.

        Raises:
            Unreachable: nobody answers, or not now.
            NotEnrolled, Forged, Replayed, TooLarge, ProtocolViolation: what the coordinator says about them.
            JournalBehind: its journal, or this party's, is older than what the other has seen of it.
            Interrupted: told to stop.
        """
        headers = {"Content-Type": media_type}
        try:
            if self._stop.is_set():
                raise Interrupted("stopped while talking to the coordinator")
            with self._http.stream(
                "POST", path, content=data, headers=headers, extensions={"trace": self._traced}
            ) as response:
                is_accepted = response.status_code in (200, 202)
                body = read_whole(response, MAX_ANSWER_BYTES if is_accepted else _MAX_PROBLEM_BYTES)
        except (httpx2.RequestError, OSError) as error:
            if self._stop.is_set():
                raise Interrupted("stopped while talking to the coordinator") from None
            raise Unreachable(f"{type(error).__name__}: {str(error)[:300]}") from None
        if is_accepted:
            return body
        raise _problem(response.status_code, response.headers.get("Retry-After", ""), body)

    def _traced(self, name: str, info: Mapping[str, Any]) -> None:
        """Keep a second handle of every new connection, to shut it at the end."""
        if name == "connection.connect_tcp.complete":
            connection = info["return_value"].get_extra_info("socket")
            self._hold(socket.socket(fileno=os.dup(connection.fileno())))
            if self._stop.is_set():  # made while the watcher ended the previous one, it would otherwise be waited on
                self._end()

    def _hold(self, handle: socket.socket | None) -> None:
        with self._guard:
            before, self._handle = self._handle, handle
        if before is not None:
            before.close()

    def _end(self) -> None:
        with self._guard, suppress(OSError):  # it was closed by the other side
            if self._handle is not None:
                self._handle.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_S):
            if self._is_closed.is_set():
                return
        self._end()


def check_url(url: str) -> str:
    """Return the coordinator's address, if messages may be sent there.

    Raises:
        InvalidSetting: no URL, one with a password or a query, or plain http to another machine.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        raise InvalidSetting("the coordinator's URL cannot be read; it looks like https://labels.example.org") from None
    if parsed.scheme not in ("https", "http") or not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise InvalidSetting("the coordinator's URL is https://HOST or https://HOST:PORT, with a path at most")
    if parsed.scheme == "http" and not is_loopback(parsed.host):
        raise InvalidSetting(
            f"the coordinator's URL sends messages to {parsed.host!r} in clear; use https:// (plain http:// is for "
            "127.0.0.1 only)"
        )
    return str(parsed)


def _problem(status: int, retry_after: str, body: bytes) -> LabelerError:
    """Return the error for a refusal of the coordinator; only its printable words are shown."""
    try:
        document = json.loads(body)
        kind, detail = str(document["type"]).removeprefix(_PROBLEM), str(document["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        kind, detail = "", ""
    said = "".join(letter if letter.isprintable() else "?" for letter in detail)[:500]
    sentence = f"the coordinator answered {status}" + (f": {said}" if said else "")
    if kind == JournalBehind.problem_type:
        return JournalBehind(sentence)
    if status == 429 or status >= 500:
        pause_s = min(float(retry_after), _LONGEST_RETRY_AFTER_S) if retry_after.isdecimal() else 0.0
        return Unreachable(sentence, retry_after_s=pause_s)
    for known in (NotEnrolled, Forged, Replayed, TooLarge, WrongVersion):
        if kind == known.problem_type:
            return known(sentence)
    if status in (401, 403):
        return NotEnrolled(sentence)
    return ProtocolViolation(sentence)


MAX_PROOF_BYTES: Final = 16 * 1024
SYNC_EVERY_S: Final = 1.0


class SeenState:
    """The furthest state seen; see the module. Used by one thread; a person's edits to the files count from the next
    read.

    Args:
        path: of the head; the proof is in the same folder, which must exist.
    """

    def __init__(self, path: Path) -> None:
        self._anchor = Anchor(path, sync_every_s=math.inf)
        self._path = path.with_name(PROOF_FILE)
        self._proven = 0
        self._is_synced = True
        self._synced_at = -math.inf

    def head(self) -> Head:
        """Return the furthest head that was seen.

        Raises:
            JournalBehind: the file holds none.
        """
        return self._anchor.read() or EMPTY

    def proof(self) -> bytes:
        """Return the coordinator's signed answer as a frame; empty where none is kept, or a damaged one."""
        try:
            return _sound(read_small(self._path, MAX_PROOF_BYTES))
        except OSError:
            return b""

    def keep(self, head: Head, signed: Message) -> None:
        """Keep a head that goes further than the one that was seen, or for which this process has kept no proof yet.

        Args:
            signed: the answer that states it; its signature was checked.

        Raises:
            Unavailable: a file cannot be written.
        """
        if head.seq > self._proven:
            # Before the head, so that this party can prove what it says it has seen.
            self._keep_proof(frame([signed]))
            self._proven = head.seq
        if head.seq > self.head().seq:
            self._anchor.remember(head)
            self._is_synced = False

    def rest(self) -> None:
        """Sync what was kept to disk, unless that happened within the last second; nobody waits for an answer now.

        Raises:
            Unavailable: it cannot be synced.
        """
        if self._is_synced or time.monotonic() - self._synced_at < SYNC_EVERY_S:
            return
        for path in (self._path, self._anchor.path):
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unwritten(path, error) from error
        self._is_synced = True
        self._synced_at = time.monotonic()

    def _keep_proof(self, data: bytes) -> None:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.pwrite(handle, data, 0) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if os.fstat(handle).st_size > len(data):
                    os.ftruncate(handle, len(data))
            finally:
                os.close(handle)
        except OSError as error:
            raise _unwritten(self._path, error) from error
        self._is_synced = False


def _sound(data: bytes) -> bytes:
    """Return the frame that bytes begin with: the end of a longer, overwritten one may follow it."""
    try:
        header, body = frame_sizes(data[:FRAME_HEAD_BYTES])
        end = FRAME_HEAD_BYTES + header + SIGNATURE_BYTES + body
        if end > MAX_PROOF_BYTES:
            return b""
        [message] = read_frames(data[:end], max_messages=1)
    except LabelerError:
        return b""
    return data[:end] if message.is_whole else b""


def _unwritten(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{path.name} cannot be written ({error.strerror}); make room")
