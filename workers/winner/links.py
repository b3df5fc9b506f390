"""One connection between two talliers: its certificate says whose it is, and it carries bytes of known lengths.

    hello (length, JSON)  ->  messages (job, chunk, size, bytes)

A message belongs to a channel, that is one job, or one chunk of its queries, and messages of a channel are read in
order. Who reads knows how long each is, and another length ends the computation; nothing that arrives is ever
interpreted in another way than as numbers.

A tallier's connections to the two others during one computation: whose they are, and which jobs all three do.

A number is tied to a certificate: who shows the certificate of tallier 2 is tallier 2, and no message says who
sent it. TLS 1.3, both certificates pinned. Lower numbers connect, higher ones listen, on the configured address
only. First each says which jobs it was given, with all that must be equal and its signature; only jobs that all
three were given alike are done, and why another is not done is said of that one alone (`disagreement`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import ssl
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from labeler.errors import Forged, InvalidSetting, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from labeler.system.keys import verify_statement
from workers.winner.certificates import fingerprint, pinned_context, read_certificate
from workers.winner.engine import NUM_PARTIES, WinnerJob

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


Record = Callable[[int, bytes], None]
"""Told every byte string that arrives, with the number of the party it came from: for tests of what is learnt."""

OPENING: Final[Channel] = (2**32 - 2, 0)
"""The channel of what is sent behind the hello."""

_RETRY_S = (0.005, 0.01, 0.02, 0.05)
"""Pauses before a tallier that does not listen yet is tried again; the last one again and again."""

CLOSE_LIMIT_S: Final = 3.0
"""How long a party that gives up waits for the others to hear of it."""

_MOST_WAITING_BYTES: Final = 1 << 26
"""What may have arrived before it is read: the chunks that are under way (workers.winner.tournament)."""


class Links:
    """The two connections of one computation.

    Args:
        jobs: one or more, with different names, of the same talliers.
        opening: what each peer is sent behind the hello, on channel `OPENING`.
        record: told everything that arrives; tests only.
    """

    def __init__(
        self, jobs: Sequence[WinnerJob], *, opening: Mapping[int, bytes], record: Record | None = None
    ) -> None:
        self._job = jobs[0]
        self._jobs = {job.job_id: job for job in jobs}
        self.party = self._job.party
        self._opening = opening
        self._record = record
        told = {job.job_id: job.parameters | {"signature": job.signature} for job in jobs}
        self.hello = json.dumps({"jobs": told}, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        self.most_waiting_bytes = _MOST_WAITING_BYTES + sum(
            64 * (job.num_queries + len(job.contributors)) for job in jobs
        )
        self.peers: dict[int, Link] = {}
        self.problem: LabelerError | None = None
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._all_here: asyncio.Future[None] = loop.create_future()
        self._dialling: list[asyncio.Future[None]] = []
        self._server: asyncio.Server | None = None
        self._told: dict[int, dict[str, Any]] = {}
        self._refused = 0
        self._is_closing = False

    def send(self, peer: int, channel: Channel, data: bytes) -> None:
        """Send bytes to a peer."""
        self.peers[peer].send(channel, data)

    async def receive(self, peer: int, channel: Channel, size: int) -> bytes:
        """The next bytes of a peer on a channel.

        Raises:
            ProtocolViolation: they are not as many as are due.
        """
        return await self.peers[peer].receive(channel, size)

    async def connect(self) -> None:
        """Open both connections and hear of the jobs of both.

        Returns only when both have said theirs. What a peer does wrong is raised by `failed`; who is absent is waited
        for.

        Raises:
            InvalidSetting: this tallier's key or certificate is not the one of the job.
            Unavailable: its address is taken.
        """
        if fingerprint(read_certificate(self._job.identity_path)) != self._job.fingerprints[self.party]:
            raise InvalidSetting("the certificate beside this tallier's key is not the one the job pins for it")
        higher = range(self.party + 1, NUM_PARTIES)
        contexts = [self._context([peer], is_server=False) for peer in higher]
        if self.party > 0:
            self._server = await self._listen()
        self._dialling = [
            asyncio.ensure_future(self._connect_to(peer, context))
            for peer, context in zip(higher, contexts, strict=True)
        ]
        await self._ready
        self._stop_listening()

    async def finish(self) -> None:
        """Say that this party is done, wait until the others are or are gone, and close.

        Who closed earlier could tear down a connection that still holds what a peer needs.
        """
        self._is_closing = True
        for link in self.peers.values():
            link.send(DONE, b"")
        await asyncio.wait([link.ended for link in self.peers.values()])
        # Nothing more is due in either direction, so nobody has to wait for a farewell, which takes a whole way back.
        for link in self.peers.values():
            link.abort()
        await self.abandon(CLOSE_LIMIT_S)

    async def abandon(self, limit_s: float, *, late_limit_s: float = 0.0) -> None:
        """Close in order, so that what was sent last (a hello that says what differs) still arrives.

        Args:
            late_limit_s: a peer that has not come yet is given this long to, so that it learns what is wrong. None
                of it where the job is tried again: a peer that comes late comes to the next attempt, and would be
                turned away from that.
        """
        self._is_closing = True
        if late_limit_s:
            await asyncio.wait([self._all_here], timeout=late_limit_s)
        self._stop_listening()
        for dialling in self._dialling:
            dialling.cancel()
        for link in self.peers.values():
            link.close_connection()
        if self.peers:
            await asyncio.wait([link.closed for link in self.peers.values()], timeout=limit_s)
            for link in self.peers.values():
                link.abort()
            await asyncio.sleep(0)

    def party_of(self, certificate: bytes) -> int | None:
        """The other tallier whose certificate this is (DER), or None."""
        digest = hashlib.sha256(certificate).hexdigest()
        parties = [party for party, known in enumerate(self._job.fingerprints) if known == digest]
        return parties[0] if parties and parties[0] != self.party else None

    def awaits(self, peer: int) -> bool:
        """Whether this tallier is to connect here and has not yet."""
        if peer < self.party and peer not in self.peers:
            return True
        self._refused += 1
        return False

    def arrived(self, peer: int, link: Link) -> None:
        """A connection has shown the certificate of this peer."""
        self.peers[peer] = link
        link.greet(self.hello)
        if peer in self._opening:
            link.send(OPENING, self._opening[peer])
        if len(self.peers) == NUM_PARTIES - 1 and not self._all_here.done():
            self._all_here.set_result(None)

    def received(self, peer: int, data: bytes) -> None:
        """See `workers.winner.links.Owner`."""
        if self._record is not None:
            self._record(peer, data)

    def greeted(self, peer: int, hello: bytes) -> None:
        """Keep which jobs a peer was given.

        Raises:
            ProtocolViolation: it is no hello.
            Forged: it has not signed a job that it says it does.
        """
        try:
            told = json.loads(hello)["jobs"]
            jobs = {str(name): dict(parameters) for name, parameters in told.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProtocolViolation(f"tallier {peer} opened with something that is no hello") from error
        signatures = {name: str(parameters.pop("signature", "")) for name, parameters in jobs.items()}
        for name, job in self._jobs.items():
            if job.verify_keys and jobs.get(name) == job.parameters:
                verify_statement(job.statement, signatures[name], job.verify_keys[peer])
        self._told[peer] = jobs
        if len(self._told) == NUM_PARTIES - 1 and not self._ready.done():
            self._ready.set_result(None)

    def disagreement(self, job: WinnerJob) -> LabelerError | None:
        """Why a job cannot be done with what both others have said; None where it can. All three find it alike."""
        for peer, told in sorted(self._told.items()):
            theirs = told.get(job.job_id)
            if theirs is None:
                return WrongDigest(f"tallier {peer} was not given this job, or not yet; nothing was computed")
            if theirs != job.parameters:
                return _difference(peer, job, theirs)
        return None

    def left(self, peer: int, exc: BaseException | None, *, has_greeted: bool) -> None:
        """A connection ended before its peer was done."""
        if self._is_closing:
            return
        if isinstance(exc, ssl.SSLError) and not has_greeted:
            self.fail(Forged(f"tallier {peer} does not accept this tallier's certificate; exchange certificates again"))
        else:
            self.fail(Unavailable(f"tallier {peer} has left in the middle of the job; try again with the same shares"))

    def fail(self, error: LabelerError) -> None:
        """End the job for this reason, unless it has ended."""
        if self.problem is None:
            self.problem = error
            if not self.failed.done():
                self.failed.set_exception(error)

    def waiting_for(self) -> str:
        """Who is missing, in words."""
        missing = [str(peer) for peer in range(NUM_PARTIES) if peer != self.party and peer not in self._told]
        if not missing:
            return "the computation did not end in time"
        refused = f" ({self._refused} connections of others were refused)" if self._refused else ""
        return f"no connection with tallier {' and '.join(missing)}{refused}"

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _listen(self) -> asyncio.Server:
        own = self._job.addresses[self.party]
        context = self._context(range(self.party), is_server=True)
        try:
            return await asyncio.get_running_loop().create_server(
                lambda: Link(self, None), own.host, own.port, ssl=context, reuse_address=True
            )
        except OSError as error:
            raise Unavailable(f"this tallier cannot listen on {own.host} port {own.port}: {error.strerror}") from error

    async def _connect_to(self, peer: int, context: ssl.SSLContext) -> None:
        address = self._job.addresses[peer]
        for attempt in itertools.count():
            try:
                await asyncio.get_running_loop().create_connection(
                    lambda: Link(self, peer), address.host, address.port, ssl=context, server_hostname=""
                )
            except ssl.SSLCertVerificationError:
                self.fail(another_certificate(peer))
                return
            except (OSError, UnicodeError):
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            else:
                return

    def _context(self, peers: range | list[int], *, is_server: bool) -> ssl.SSLContext:
        trusted = [self._job.certificates[peer] for peer in peers]
        context = pinned_context(self._job.identity_path, trusted=trusted, is_server=is_server)
        context.set_alpn_protocols([PROTOCOL_NAME])
        return context


def _difference(peer: int, job: WinnerJob, theirs: dict[str, Any]) -> ProtocolViolation:
    """That a tallier was given this job otherwise, and what differs."""
    names = sorted(name for name in job.parameters if theirs.get(name) != job.parameters[name])
    if "contributors" in names:
        return ProtocolViolation(_other_contributors(peer, job.contributors, theirs.get("contributors")))
    return ProtocolViolation(
        f"tallier {peer} was given this job with other parameters: {', '.join(names) or 'more than are known'} "
        "differ from this tallier's; nothing was computed"
    )


def _other_contributors(peer: int, own: tuple[str, ...], theirs: object) -> str:
    """That a tallier adds up other agents, and which; the names come from another party, so they are quoted."""
    named = {agent for agent in theirs if isinstance(agent, str)} if isinstance(theirs, list) else set()
    parts = [
        f"only {whom} has {', '.join(repr(agent[:100]) for agent in sorted(agents)[:5])}"
        for whom, agents in (("it", named - set(own)), ("this one", set(own) - named))
        if agents
    ]
    return (
        f"tallier {peer} was told other contributors than this tallier: {'; '.join(parts) or 'in another order'}. "
        "Nothing was computed; the coordinator has to tell all talliers the same"
    )
