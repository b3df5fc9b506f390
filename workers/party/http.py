"""HTTP from a party to its coordinator: encrypted except on this machine, bounded, ended at once when told to stop."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

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
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.system.http_client import http_client, is_loopback

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024
"""Largest answer that is read: one of the largest messages or many that are no larger together, and the coordinator's
own."""

_MAX_PROBLEM_BYTES = 64 * 1024
_LONGEST_RETRY_AFTER_S = 30.0
_WATCH_S = 5.0
"""How often the thread that waits for the end looks whether it is still needed; the end itself wakes it."""

_PROBLEM = "urn:labeler:problem:"


class Unreachable(Unavailable):
    """The coordinator did not answer, or says that it cannot now.

    Attributes:
        retry_after_s: how long it asks to be left alone.
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

    A request that is under way ends when this party is told to stop: a thread of its own waits for that and shuts the
    connection, of which it holds a second handle.

    Args:
        url: https, or http to this machine only.
        ca_file: certificates to check the coordinator's against; the system's where absent.
        read_timeout_s: longest silence while waiting for an answer.
        stop: ends a request that is under way.

    Raises:
        InvalidSetting: the address is none, or would send messages over a network in clear.
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
        """Send bytes once; the body of an answer that accepts them.

        Raises:
            Unreachable: nobody answers, or not now.
            NotEnrolled, Forged, Replayed, TooLarge, ProtocolViolation: what the coordinator says about them.
            JournalBehind: its journal, or this party's, is older than what the other has seen of it.
            Interrupted: told to stop.
        """
        headers = {"Content-Type": media_type, "Accept-Encoding": "identity"}
        try:
            if self._stop.is_set():
                raise Interrupted("stopped while talking to the coordinator")
            with self._http.stream(
                "POST", path, content=data, headers=headers, extensions={"trace": self._traced}
            ) as response:
                is_accepted = response.status_code in (200, 202)
                body = _bounded(response, MAX_ANSWER_BYTES if is_accepted else _MAX_PROBLEM_BYTES)
        except (httpx2.RequestError, OSError) as error:
            if self._stop.is_set():
                raise Interrupted("stopped while talking to the coordinator") from None
            raise Unreachable(f"{type(error).__name__}: {str(error)[:300]}") from None
        if is_accepted:
            return body
        raise _problem(response.status_code, response.headers.get("Retry-After", ""), body)

    def _traced(self, name: str, info: Mapping[str, Any]) -> None:
        """Keep a second handle of every connection that is made, for the end."""
        if name == "connection.connect_tcp.complete":
            connection = info["return_value"].get_extra_info("socket")
            self._hold(socket.socket(fileno=os.dup(connection.fileno())))
            if self._stop.is_set():  # else it would be waited on, made as the watcher had ended the one before
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


def _bounded(response: httpx2.Response, most: int) -> bytes:
    parts: list[bytes] = []
    for part in response.iter_raw():
        parts.append(part)
        if sum(map(len, parts)) > most:
            raise TooLarge(f"the coordinator's answer has more than {most} bytes; is the URL right?")
    return b"".join(parts)


def check_url(url: str) -> str:
    """The coordinator's address, if messages may be sent there.

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
    """The error that a refusal of the coordinator stands for; its words are shown only as far as they print."""
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
        return Unreachable(sentence, retry_after_s=_retry_after(retry_after))
    for known in (NotEnrolled, Forged, Replayed, TooLarge, WrongVersion):
        if kind == known.problem_type:
            return known(sentence)
    if status in (401, 403):
        return NotEnrolled(sentence)
    return ProtocolViolation(sentence)


def _retry_after(text: str) -> float:
    return min(float(text), _LONGEST_RETRY_AFTER_S) if text.isdecimal() else 0.0
