"""One HTTP connection that stays open, by the standard library: a party's requests are small, and many.

A client of more features takes three to five times the CPU of each request. What a party needs of one is little: TLS
against given certificates, a proxy of the environment on the way out, one request after the other, and that another
thread can end the one that is under way.
"""

from __future__ import annotations

import base64
import os
import select
import socket
import ssl
import threading
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead

import httpx2

from labeler.errors import InvalidSetting, TooLarge

_CONNECT_S, _WRITE_S = 5.0, 30.0
_AT_ONCE = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """What came back, with its body as far as it was allowed to be long.

    Attributes:
        retry_after: the header of that name; empty where there is none.
    """

    status: int
    retry_after: str
    body: bytes


class Connection:
    """Requests to one address; used by one thread, but for `end`.

    Args:
        address: http or https, checked.
        read_timeout_s: longest silence while waiting for an answer.
        is_near: whether it is this machine, to which no proxy leads.

    Raises:
        InvalidSetting: the environment names a proxy that cannot be used.
    """

    def __init__(self, address: str, *, certificates: ssl.SSLContext, read_timeout_s: float, is_near: bool) -> None:
        url = httpx2.URL(address)
        self._is_encrypted = url.scheme == "https"
        self._host, self._port = url.raw_host.decode("ascii"), url.port or (443 if self._is_encrypted else 80)
        self._prefix = url.raw_path.decode("ascii").rstrip("/")
        self._certificates = certificates
        self._read_timeout_s = read_timeout_s
        self._proxy = None if is_near else _proxy_to(self._host)
        self._open: HTTPConnection | None = None
        self._guard = threading.Lock()
        self._handle: socket.socket | None = None
        self._is_ended = False

    def close(self) -> None:
        """Close what is open."""
        self._hold(None)
        if self._open is not None:
            self._open.close()
            self._open = None

    def end(self) -> None:
        """Have the request that is under way, in another thread, fail at once; one that comes after it fails, too.

        Else a request that was about to begin would find the connection closed, make a new one, and wait on that.
        """
        with self._guard:
            self._is_ended = True
            if self._handle is not None:
                with suppress(OSError):  # it was closed by the other side
                    self._handle.shutdown(socket.SHUT_RDWR)

    def post(self, path: str, data: bytes, *, media_type: str, most: int, most_of_refusal: int) -> Answer:
        """Send bytes once.

        Args:
            most: longest body of an answer that accepts (200 or 202).
            most_of_refusal: longest body of any other.

        Raises:
            TooLarge: the answer is longer.
            OSError, http.client.HTTPException: nobody answers, or not in HTTP; or `end` was called.
        """
        is_whole = False
        try:
            connection = self._connected()
            connection.sock.settimeout(_WRITE_S)
            with suppress(BrokenPipeError, ConnectionResetError):
                # Who refuses a request may close before all of it was sent: its answer is there to be read.
                headers = {"Content-Type": media_type, "Accept-Encoding": "identity"}
                connection.request("POST", self._prefix + path, body=data, headers=headers)
            connection.sock.settimeout(self._read_timeout_s)
            response = connection.getresponse()
            is_accepted = response.status in (200, 202)
            body = _bounded(response, most if is_accepted else most_of_refusal)
            is_whole = True
            return Answer(response.status, response.headers.get("Retry-After", ""), body)
        finally:
            if not is_whole:
                self.close()

    def _connected(self) -> HTTPConnection:
        """The connection that is open, or a new one where the other side has closed it meanwhile."""
        if self._open is not None and self._open.sock is not None and not _has_ended(self._open.sock):
            return self._open
        self.close()
        to_host, to_port = (self._host, self._port) if self._proxy is None else self._proxy[:2]
        made: HTTPConnection
        if self._is_encrypted:
            made = HTTPSConnection(to_host, to_port, timeout=_CONNECT_S, context=self._certificates)
        else:
            made = HTTPConnection(to_host, to_port, timeout=_CONNECT_S)
        if self._proxy is not None:
            made.set_tunnel(self._host, self._port, headers=self._proxy[2])
        made.connect()
        self._open = made
        self._hold(socket.socket(fileno=os.dup(made.sock.fileno())))
        return made

    def _hold(self, handle: socket.socket | None) -> None:
        """Keep a second handle of the connection, for `end`."""
        with self._guard:
            before, self._handle = self._handle, handle
            is_late = self._is_ended and handle is not None
        if before is not None:
            before.close()
        if is_late:
            raise ConnectionAbortedError("told to stop")


def _has_ended(connection: socket.socket) -> bool:
    """Between two requests nothing comes but the end."""
    return bool(select.select([connection], [], [], 0)[0])


def _bounded(response: HTTPResponse, most: int) -> bytes:
    parts: list[bytes] = []
    stated, size = response.length, 0
    while part := response.read(_AT_ONCE):
        size += len(part)
        if size > most:
            raise TooLarge(f"the coordinator's answer has more than {most} bytes; is the URL right?")
        parts.append(part)
    if stated is not None and size < stated:
        raise IncompleteRead(b"", stated - size)
    return b"".join(parts)


def _proxy_to(host: str) -> tuple[str, int, dict[str, str]] | None:
    """Host, port and headers of the proxy that the environment names for https; None where it names none."""
    proxies = urllib.request.getproxies()
    named = proxies.get("https") or proxies.get("all")
    if not named or urllib.request.proxy_bypass(host):
        return None
    url = httpx2.URL(named if "://" in named else f"http://{named}")
    if url.scheme != "http" or not url.host:
        raise InvalidSetting(
            "HTTPS_PROXY or ALL_PROXY names a proxy that is not spoken to by http://; name one that is, or the "
            "coordinator's host in NO_PROXY"
        )
    headers = {}
    if url.userinfo:
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(f"{url.username}:{url.password}".encode()).decode(
            "ascii"
        )
    return url.raw_host.decode("ascii"), url.port or 80, headers
