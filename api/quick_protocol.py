"""The guarded protocol over httptools: llhttp, the parser of Node, in place of h11 (api.guarded_protocol).

llhttp refuses what makes two readers of one stream disagree: a Content-Length beside a Transfer-Encoding or a second
one, sizes that are no plain numbers, lines that end in one character or are folded, names with blanks. It is made
without leniencies. What it takes and h11 does not is refused here: another Transfer-Encoding than "chunked", none or
several Host, other versions than 1.0 and 1.1. So are heads, and what stands between the data of chunks, of more than
`MAX_HEAD_BYTES`, which llhttp does not count. Left are ends of lines before a request line and blanks around its
target: both parsers read the same request where h11 would read none.

uvicorn would feed llhttp whatever has come, and keep a request object for each that a peer sends ahead. Here it is fed
to the end of one request at most, and the rest waits until that one is answered: a head ends at its first empty line, a
body after its length, and a body in chunks at an empty line as well. So a peer that sends ahead costs its bytes, and
what is malformed behind a good request is found after the good one's answer and spoils nothing of it.
"""

from __future__ import annotations

from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.guarded_protocol import NO_REQUEST, Watched, as_bytes

MAX_HEAD_BYTES: Final = 16 * 1024
"""As h11 takes."""

_END: Final = b"\r\n\r\n"


class Malformed(Exception):
    """A request that llhttp takes and we do not; raised within its callbacks."""


class QuickProtocol(Watched, HttpToolsProtocol):  # type: ignore[misc]  # uvicorn never stays half open
    """One connection, read by llhttp; see the module."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser = httptools.HttpRequestParser(self)  # without uvicorn's leniencies
        self._ahead = b""
        """What has come."""
        self._at = 0
        """As much of it was fed to the parser."""
        self._tail = b""
        """The last bytes that were fed: an empty line may have begun there."""
        self._in_body = False
        self._left: int | None = 0
        """Of a body of known length; None for one in chunks."""
        self._uncounted = 0
        """Bytes of a head, or between the data of chunks."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._ahead, self._at = b"", 0
        super().connection_lost(exc)

    # What the peer sends.

    def data_received(self, data: bytes) -> None:
        self._guard.received += len(data)
        self._ahead, self._at = self._ahead[self._at :] + data, 0
        self._read_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read_on()
        self.close_if_half()

    def _read_on(self) -> None:
        if self._at < len(self._ahead):
            self._unset_keepalive_if_required()
        while self._at < len(self._ahead) and not self.transport.is_closing():
            if not self._in_body and self.cycle is not None and not self.cycle.response_complete:
                self.flow.pause_reading()  # what comes next waits until this one is answered
                break
            self._feed()
        is_ahead = self._at < len(self._ahead)
        if not is_ahead:
            self._ahead, self._at = b"", 0
        in_head = not self._in_body and (is_ahead or self._uncounted > 0)
        self._guard.look(self, in_body=self._in_body, in_head=in_head)

    def _feed(self) -> None:
        """Feed what cannot reach beyond the end of a request."""
        begin, end = self._at, self._end_of_next()
        data = self._ahead[begin:end]
        self._at = end
        self._tail = b"" if data.endswith(_END) else (self._tail + data)[-3:]
        if not self._in_body or self._left is None:
            self._uncounted += len(data)
        # A whole head is looked at before it is fed; nothing is fed only where the parser has lost count.
        is_refused = not data or (not self._in_body and self._uncounted > MAX_HEAD_BYTES)
        try:
            if not is_refused:
                self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # To nothing that we speak: it is answered as if it had not asked.
            self._at = begin + upgrade.args[0]
        except httptools.HttpParserError:
            is_refused = True
        if is_refused or (self._in_body and self._uncounted > MAX_HEAD_BYTES):
            self._refuse()

    def _end_of_next(self) -> int:
        """Where what may be fed at once ends: at the end of a request, or before."""
        if self._in_body and self._left is not None:
            return min(self._at + self._left, len(self._ahead))
        if self._at == 0 and self._tail:
            # An empty line may have begun in what was fed before.
            found = (self._tail + self._ahead[:3]).find(_END)
            if found >= 0:
                return found + len(_END) - len(self._tail)
        found = self._ahead.find(_END, self._at)
        return len(self._ahead) if found < 0 else found + len(_END)

    def _refuse(self) -> None:
        self._ahead, self._at = b"", 0
        self.logger.warning("Invalid HTTP request received.")
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way already, which another one would only spoil
        else:
            self.send_400_response("Invalid HTTP request received.")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words, of which ours take the place
        self.transport.write(as_bytes(b"400 Bad Request", NO_REQUEST))
        self.transport.close()

    # What the parser finds.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # else it stands behind a body in chunks, and nobody asks for it
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        said: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            if name in (b"host", b"transfer-encoding", b"content-length"):
                said.setdefault(name, []).append(value)
        hosts, codings = said.get(b"host", []), said.get(b"transfer-encoding", [])
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise Malformed
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise Malformed
        if codings and (version == "1.0" or [one.lower() for one in codings] != [b"chunked"]):
            raise Malformed
        self._left = None if codings else int(said.get(b"content-length", [b"0"])[0])
        if self.parser.should_upgrade() and self._left != 0:
            raise Malformed  # llhttp would take its body for what comes after the upgrade
        self._in_body, self._uncounted, self._tail = True, 0, b""
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._uncounted = 0
        if self._left is not None:
            self._left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._left, self._uncounted, self._tail = False, 0, 0, b""
        super().on_message_complete()
