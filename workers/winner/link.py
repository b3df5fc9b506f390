"""One connection between two talliers during a job: its certificate says whose it is, and it carries words only.

    hello (length, JSON)  ->  key (16 bytes, from the lower number to the higher)  ->  messages (label, size, residues)

A message is a label of 64 bits and residues of 64 bits each, checked as they arrive; nothing that arrives is
ever interpreted in another way. The part of `Link` that MPyC uses is that of its own `MessageExchanger`: send,
receive, bytes sent, close.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from labeler.errors import Forged, LabelerError, ProtocolViolation

if TYPE_CHECKING:
    from workers.winner.links import Links

KEY_BYTES: Final = 16
"""Each pair of talliers shares one key, chosen by the one with the lower number."""

DONE: Final = -1
"""Label of the last message of a party; MPyC's labels are hashes, and a hash is never -1."""

_HEADER = struct.Struct("<qI")
_LENGTH = struct.Struct("<I")
_MAX_HELLO_BYTES = 1 << 26
"""A hello names every contributor of a round; who sends one has proved to be a pinned tallier."""

_WORD_BYTES = 8


class Link(asyncio.Protocol):
    """One connection. `peer` is None until the certificate of who came in has said whose it is."""

    def __init__(self, links: Links, expected: int | None) -> None:
        self._links = links
        self._expected = expected
        self._stage = "hello"
        self._data = bytearray()
        self._waiting: dict[int, bytes | asyncio.Future[bytes]] = {}
        self._transport: asyncio.Transport | None = None
        self.peer: int | None = None
        self.is_done = False
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.nbytes_sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection if its certificate is that of a tallier who belongs at this end."""
        self._transport = cast(asyncio.Transport, transport)
        encrypted = transport.get_extra_info("ssl_object")
        peer = self._links.party_of(encrypted.getpeercert(binary_form=True) or b"")
        if peer is None or (peer != self._expected if self._expected is not None else not self._links.awaits(peer)):
            if self._expected is not None:
                self._links.fail(another_certificate(self._expected))
            self._transport.abort()
            return
        self.peer = peer
        self._links.arrived(peer, self)
        self._write(_LENGTH.pack(len(self._links.hello)) + self._links.hello)

    def send(self, label: int, payload: bytes) -> None:
        """Send residues under a label."""
        self._write(_HEADER.pack(label, len(payload)) + payload)

    def receive(self, label: int) -> bytes | asyncio.Future[bytes]:
        """The residues sent under a label, or a future of them."""
        payload = self._waiting.pop(label, None)
        if payload is None:
            payload = self._waiting[label] = asyncio.get_running_loop().create_future()
        return payload

    def close_connection(self) -> None:
        """Close, once everything sent is on its way."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take bytes apart; whatever the protocol does not allow ends the job."""
        if self.peer is None:
            return
        if self._links.record is not None:
            self._links.record(self.peer, data)
        self._data += data
        try:
            while self._take():
                pass
        except LabelerError as error:
            self._links.fail(error)
            self._data.clear()
            self.close_connection()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the job, unless the peer had finished."""
        for future in (self.ended, self.closed):
            if not future.done():
                future.set_result(None)
        if self.peer is not None and not self.is_done:
            self._links.left(self.peer, self._stage, exc)

    def _take(self) -> bool:
        """Take one message off the data; False where it is not all there yet."""
        data = self._data
        if self._stage == "hello":
            if len(data) < _LENGTH.size:
                return False
            (size,) = _LENGTH.unpack_from(data)
            if size > _MAX_HELLO_BYTES:
                raise ProtocolViolation(f"tallier {self.peer} opened with something that is no hello")
            if len(data) < _LENGTH.size + size:
                return False
            hello = bytes(data[_LENGTH.size : _LENGTH.size + size])
            del data[: _LENGTH.size + size]
            self._greeted(hello)
            return True
        if self._stage == "key":
            if len(data) < KEY_BYTES:
                return False
            self._open(bytes(data[:KEY_BYTES]))
            del data[:KEY_BYTES]
            return True
        if len(data) < _HEADER.size:
            return False
        label, size = _HEADER.unpack_from(data)
        if size > self._links.max_payload_bytes or size % _WORD_BYTES:
            raise ProtocolViolation(
                f"tallier {self.peer} sent a message that is not made of words of {_WORD_BYTES} bytes"
            )
        if len(data) < _HEADER.size + size:
            return False
        payload = bytes(data[_HEADER.size : _HEADER.size + size])
        del data[: _HEADER.size + size]
        self._deliver(label, payload)
        return True

    def _greeted(self, hello: bytes) -> None:
        peer = cast(int, self.peer)
        self._links.compare(peer, hello)
        if self._links.party < peer:
            key = self._links.key_for(peer)
            self._write(key)
            self._stage = "open"
            self._links.opened(peer)
        else:
            self._stage = "key"

    def _open(self, key: bytes) -> None:
        peer = cast(int, self.peer)
        self._links.take_key(peer, key)
        self._stage = "open"
        self._links.opened(peer)

    def _deliver(self, label: int, payload: bytes) -> None:
        if label == DONE:
            self.is_done = True
            if not self.ended.done():
                self.ended.set_result(None)
            return
        words = np.frombuffer(payload, dtype="<u8")
        if words.size and int(words.max()) >= self._links.modulus:
            raise ProtocolViolation(f"tallier {self.peer} sent a word that is no residue of the field")
        waiting = self._waiting.pop(label, None)
        if isinstance(waiting, bytes):
            raise ProtocolViolation(f"tallier {self.peer} sent two messages under one label")
        if waiting is None:
            self._waiting[label] = payload
        elif not waiting.done():
            waiting.set_result(payload)

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        self.nbytes_sent += len(data)


def another_certificate(peer: int) -> Forged:
    """The error where somebody else answers at the address of a tallier."""
    return Forged(f"who answers at the address of tallier {peer} does not have its certificate; nothing was sent to it")
