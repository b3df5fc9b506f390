"""One connection between two talliers: its certificate says whose it is, and it carries bytes of known lengths.

    hello (length, JSON)  ->  messages (job, chunk, size, bytes)

A message belongs to a channel, that is one job, or one chunk of its queries, and messages of a channel are read in
order. Who reads knows how long each is, and another length ends the computation; nothing that arrives is ever
interpreted in another way than as numbers.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict, deque
from typing import Final, Protocol, cast

from labeler.errors import Forged, LabelerError, ProtocolViolation, Unavailable

PROTOCOL_NAME: Final = "labeler-winner/2"
"""What both ends of a connection have to speak (ALPN); earlier versions name nothing, and are told nothing."""

Channel = tuple[int, int]

DONE: Final[Channel] = (2**32 - 1, 0)
"""Of the last message of a party."""

_HEADER = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_MAX_HELLO_BYTES = 1 << 26
"""A hello names every contributor of every round; who sends one has proved to be a pinned tallier."""


class Owner(Protocol):
    """Whose connection it is: what a `Link` tells, and asks.

    Attributes:
        most_waiting_bytes: that may have arrived and not been read.
    """

    most_waiting_bytes: int

    def party_of(self, certificate: bytes) -> int | None:
        """The other tallier whose certificate this is (DER), or None."""
        ...

    def awaits(self, peer: int) -> bool:
        """Whether this tallier is to connect here and has not yet."""
        ...

    def arrived(self, peer: int, link: Link) -> None:
        """A connection has shown the certificate of this peer; it is to be greeted."""
        ...

    def received(self, peer: int, data: bytes) -> None:
        """Told every byte string that arrives."""
        ...

    def greeted(self, peer: int, hello: bytes) -> None:
        """A peer's hello is here; raises a LabelerError where it does not fit."""
        ...

    def left(self, peer: int, exc: BaseException | None, *, has_greeted: bool) -> None:
        """A connection ended before its peer was done."""
        ...

    def fail(self, error: LabelerError) -> None:
        """End the computation for this reason, unless it has ended."""
        ...


class Link(asyncio.Protocol):
    """One connection. `peer` is None until the certificate of who came in has said whose it is."""

    def __init__(self, owner: Owner, expected: int | None) -> None:
        self._owner = owner
        self._expected = expected
        self._has_greeted = False
        self._data = bytearray()
        self._queues: defaultdict[Channel, deque[bytes]] = defaultdict(deque)
        self._readers: dict[Channel, asyncio.Future[None]] = {}
        self._waiting_bytes = 0
        self._transport: asyncio.Transport | None = None
        self.peer: int | None = None
        self.is_done = False
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection if its certificate is that of a tallier who belongs at this end."""
        self._transport = cast(asyncio.Transport, transport)
        encrypted = transport.get_extra_info("ssl_object")
        peer = self._owner.party_of(encrypted.getpeercert(binary_form=True) or b"")
        if peer is None or (peer != self._expected if self._expected is not None else not self._owner.awaits(peer)):
            if self._expected is not None:
                self._owner.fail(another_certificate(self._expected))
            self._transport.abort()
            return
        if encrypted.selected_alpn_protocol() != PROTOCOL_NAME:
            self._owner.fail(another_version(peer))
            self._transport.abort()
            return
        self.peer = peer
        self._owner.arrived(peer, self)

    def greet(self, hello: bytes) -> None:
        """Send what is first on a connection."""
        self._write(_LENGTH.pack(len(hello)) + hello)

    def send(self, channel: Channel, payload: bytes) -> None:
        """Send bytes on a channel."""
        self._write(_HEADER.pack(*channel, len(payload)) + payload)

    async def receive(self, channel: Channel, size: int) -> bytes:
        """The next bytes of a channel; one reader at a time.

        Raises:
            ProtocolViolation: they are not as many as are due.
        """
        queue = self._queues[channel]
        if not queue:
            reader = self._readers[channel] = asyncio.get_running_loop().create_future()
            await reader
        payload = queue.popleft()
        if not queue:
            del self._queues[channel]
        self._waiting_bytes -= len(payload)
        if len(payload) != size:
            raise ProtocolViolation(f"tallier {self.peer} sent {len(payload)} bytes where {size} are due")
        return payload

    def close_connection(self) -> None:
        """Close, once everything sent is on its way."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was sent is on its way all the same."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes apart; whatever the protocol does not allow ends the computation."""
        if self.peer is None:
            return
        self._owner.received(self.peer, data)
        self._data += data
        try:
            while self._take():
                pass
        except LabelerError as error:
            self._owner.fail(error)
            self._data.clear()
            self.close_connection()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the owner, unless the peer had finished."""
        for future in (self.ended, self.closed):
            if not future.done():
                future.set_result(None)
        if self.peer is not None and not self.is_done:
            self._owner.left(self.peer, exc, has_greeted=self._has_greeted)

    def _take(self) -> bool:
        """Take one message off the data; False where it is not all there yet."""
        data, peer = self._data, cast(int, self.peer)
        if not self._has_greeted:
            if len(data) < _LENGTH.size:
                return False
            (size,) = _LENGTH.unpack_from(data)
            if size > _MAX_HELLO_BYTES:
                raise ProtocolViolation(f"tallier {peer} opened with something that is no hello")
            if len(data) < _LENGTH.size + size:
                return False
            hello = bytes(data[_LENGTH.size : _LENGTH.size + size])
            del data[: _LENGTH.size + size]
            self._has_greeted = True
            self._owner.greeted(peer, hello)
            return True
        if len(data) < _HEADER.size:
            return False
        job, chunk, size = _HEADER.unpack_from(data)
        if self._waiting_bytes + size > self._owner.most_waiting_bytes:
            raise ProtocolViolation(f"tallier {peer} sent more than can be due")
        if len(data) < _HEADER.size + size:
            return False
        payload = bytes(data[_HEADER.size : _HEADER.size + size])
        del data[: _HEADER.size + size]
        self._deliver((job, chunk), payload)
        return True

    def _deliver(self, channel: Channel, payload: bytes) -> None:
        if channel == DONE:
            self.is_done = True
            if not self.ended.done():
                self.ended.set_result(None)
            return
        self._queues[channel].append(payload)
        self._waiting_bytes += len(payload)
        reader = self._readers.pop(channel, None)
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def another_certificate(peer: int) -> Forged:
    """The error where somebody else answers at the address of a tallier."""
    return Forged(f"who answers at the address of tallier {peer} does not have its certificate; nothing was sent to it")


def another_version(peer: int) -> Unavailable:
    """The error where a tallier runs a version of this program that finds winners in another way."""
    return Unavailable(
        f"tallier {peer} runs another version of the program, which finds winners otherwise ({PROTOCOL_NAME} is spoken "
        "here); nothing was sent to it. Bring the three talliers to one version; the round waits, and nothing is lost"
    )
