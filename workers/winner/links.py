"""A tallier's connections to the two others during one computation, and agreement on the jobs that all three do.

    hello (length, JSON)  ->  messages (job, chunk, size, bytes)

A message belongs to a channel: one job, or one chunk of its queries. Messages of a channel are read in order. The
reader knows how long each message is, and any other length ends the computation. Whatever arrives is interpreted as
numbers and as nothing else.

A tallier's number is tied to its certificate: the peer that shows the certificate of tallier 2 is tallier 2, and no
message names its sender. TLS 1.3 is used with both certificates pinned (workers.winner.certificates). Lower numbers
connect; higher ones listen, on the configured address only. First each tallier says which jobs it was given, with all
that must be equal and its signature. Only jobs that all three were given alike are done; any other job gets its own
reason (`disagreement`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import ssl
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from labeler.errors import Forged, InvalidSetting, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from labeler.system.keys import verify_statement
from workers.winner.certificates import fingerprint, pinned_context, read_certificate
from workers.winner.engine import NUM_PARTIES, WinnerJob

PROTOCOL_NAME: Final = "labeler-winner/2"
"""The protocol name that both ends of a connection have to speak (ALPN)."""

Channel = tuple[int, int]

DONE: Final[Channel] = (2**32 - 1, 0)
"""The channel of a party's last message."""

OPENING: Final[Channel] = (2**32 - 2, 0)
"""The channel of the bytes sent after the hello."""

Record = Callable[[int, bytes], None]
"""A function that gets every byte string that arrives, with the number of its sender: for tests of what is learned."""

_HEADER = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_MAX_HELLO_BYTES = 1 << 26
"""A hello names every contributor of every round; its sender has proved to be a pinned tallier."""

_READ_AHEAD_BYTES = 1 << 22

_RETRY_S = (0.005, 0.01, 0.02, 0.05)
"""Pauses before another try at a tallier that does not listen yet; the last one repeats."""

CLOSE_LIMIT_S: Final = 3.0
"""Seconds that a party that gives up waits for the others to hear of it."""

_MOST_WAITING_BYTES: Final = 1 << 26
"""Bytes that may have arrived before they are read: the chunks that are under way (workers.winner.tournament)."""


class _Peer:
    """The connection to one tallier, with what has arrived and was not read."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, arrived: Callable[[bytes], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.writer = writer
        self._reader = reader
        self._arrived = arrived
        self._data = bytearray()
        self.queues: defaultdict[Channel, asyncio.Queue[bytes]] = defaultdict(asyncio.Queue)
        self.waiting_bytes = 0
        self.has_greeted = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    def write(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    async def read(self, size: int) -> bytes:
        """Read the next bytes.

        Raises:
            EOFError: the connection ended before.
        """
        while len(self._data) < size:
            data = await self._reader.read(_READ_AHEAD_BYTES)
            if not data:
                raise EOFError
            self._arrived(data)
            self._data += data
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken


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
        self._most_waiting_bytes = _MOST_WAITING_BYTES + sum(
            64 * (job.num_queries + len(job.contributors)) for job in jobs
        )
        self.problem: LabelerError | None = None
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._all_here: asyncio.Future[None] = loop.create_future()
        self._peers: dict[int, _Peer] = {}
        self._dialling: list[asyncio.Task[None]] = []
        self._talking: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._told: dict[int, dict[str, Any]] = {}
        self._refused = 0
        self._is_closing = False
        self._is_over = False

    def send(self, peer: int, channel: Channel, data: bytes) -> None:
        """Send bytes to a peer."""
        self._peers[peer].write(_HEADER.pack(*channel, len(data)) + data)

    async def receive(self, peer: int, channel: Channel, size: int) -> bytes:
        """Return the next bytes of a peer on a channel.

        Raises:
            ProtocolViolation: they are not as many as are due.
        """
        link = self._peers[peer]
        payload = await link.queues[channel].get()
        if link.queues[channel].empty():
            del link.queues[channel]
        link.waiting_bytes -= len(payload)
        if len(payload) != size:
            raise ProtocolViolation(f"tallier {peer} sent {len(payload)} bytes where {size} are due")
        return payload

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
            own = self._job.addresses[self.party]
            try:
                self._server = await asyncio.start_server(
                    lambda reader, writer: self._arrived(None, reader, writer),
                    own.host,
                    own.port,
                    ssl=self._context(range(self.party), is_server=True),
                    reuse_address=True,
                    limit=_READ_AHEAD_BYTES,
                )
            except OSError as error:
                raise Unavailable(
                    f"this tallier cannot listen on {own.host} port {own.port}: {error.strerror}"
                ) from error
        for peer, context in zip(higher, contexts, strict=True):
            self._dialling.append(asyncio.ensure_future(self._connect_to(peer, context)))
        await self._ready
        self._stop_listening()

    async def finish(self) -> None:
        """Say that this party is done, wait until the others are done or gone, and close.

        A party that closed earlier could tear down a connection that still holds what a peer needs.
        """
        self._is_closing = True
        for peer in self._peers:
            self.send(peer, DONE, b"")
        await asyncio.wait([link.ended for link in self._peers.values()])
        # Nothing more is due in either direction, so no wait for a farewell, which would take another one-way delay.
        for link in self._peers.values():
            link.writer.transport.abort()
        await self.abandon(CLOSE_LIMIT_S)

    async def abandon(self, limit_s: float, *, late_limit_s: float = 0.0) -> None:
        """Close in order, so that what was sent last (a hello that says what differs) still arrives.

        Args:
            late_limit_s: the time that a peer gets to arrive late, so that it learns what is wrong. It is 0 where the
                job is tried again: a late peer then comes to the next attempt, and would be turned away from that.
        """
        self._is_closing = True
        if late_limit_s:
            await asyncio.wait([self._all_here], timeout=late_limit_s)
        self._is_over = True
        self._stop_listening()
        for dialling in self._dialling:
            dialling.cancel()
        for link in self._peers.values():
            link.writer.close()
        if self._peers:
            await asyncio.wait([link.closed for link in self._peers.values()], timeout=limit_s)
        for writer, talking in self._talking.items():
            writer.transport.abort()
            talking.cancel()
        await asyncio.gather(*self._dialling, *self._talking.values(), return_exceptions=True)

    def disagreement(self, job: WinnerJob) -> LabelerError | None:
        """Return why both others' statements rule a job out; else None. All three talliers find the same."""
        for peer, told in sorted(self._told.items()):
            theirs = told.get(job.job_id)
            if theirs is None:
                return WrongDigest(f"tallier {peer} was not given this job, or not yet; nothing was computed")
            if theirs != job.parameters:
                return _difference(peer, job, theirs)
        return None

    def waiting_for(self) -> str:
        """Name the talliers that are missing, in words."""
        missing = [str(peer) for peer in range(NUM_PARTIES) if peer != self.party and peer not in self._told]
        if not missing:
            return "the computation did not end in time"
        refused = f" ({self._refused} connections of others were refused)" if self._refused else ""
        return f"no connection with tallier {' and '.join(missing)}{refused}"

    def _fail(self, error: LabelerError) -> None:
        """End the computation for this reason, unless it has ended."""
        if self.problem is None:
            self.problem = error
            if not self.failed.done():
                self.failed.set_exception(error)

    def _arrived(self, expected: int | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_over:
            writer.transport.abort()
            return
        self._talking[writer] = asyncio.ensure_future(self._talk(expected, reader, writer))

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    def _context(self, peers: Sequence[int], *, is_server: bool) -> ssl.SSLContext:
        trusted = [self._job.certificates[peer] for peer in peers]
        context = pinned_context(self._job.identity_path, trusted=trusted, is_server=is_server)
        context.set_alpn_protocols([PROTOCOL_NAME])
        return context

    async def _connect_to(self, peer: int, context: ssl.SSLContext) -> None:
        address = self._job.addresses[peer]
        for attempt in itertools.count():
            try:
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=context, server_hostname="", limit=_READ_AHEAD_BYTES
                )
            except ssl.SSLCertVerificationError:
                self._fail(_another_certificate(peer))
                return
            except (OSError, UnicodeError):
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            else:
                self._arrived(peer, reader, writer)
                return

    async def _talk(self, expected: int | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a connection to its end, if its certificate is that of a tallier who belongs at this end."""
        peer = self._party_at(expected, writer)
        if peer is None:
            writer.transport.abort()
            return
        record = self._record
        link = self._peers[peer] = _Peer(reader, writer, lambda data: None if record is None else record(peer, data))
        link.write(_LENGTH.pack(len(self.hello)) + self.hello)
        if peer in self._opening:
            self.send(peer, OPENING, self._opening[peer])
        if len(self._peers) == NUM_PARTIES - 1 and not self._all_here.done():
            self._all_here.set_result(None)
        try:
            await self._read(peer, link)
        except LabelerError as error:
            self._fail(error)
            writer.close()
        except (EOFError, OSError) as error:
            self._left(peer, link, error)
        finally:
            for future in (link.ended, link.closed):
                if not future.done():
                    future.set_result(None)

    def _party_at(self, expected: int | None, writer: asyncio.StreamWriter) -> int | None:
        """Return the peer at the other end, by its certificate; None where it may not connect here."""
        encrypted = writer.get_extra_info("ssl_object")
        digest = hashlib.sha256(encrypted.getpeercert(binary_form=True) or b"").hexdigest()
        found = next((party for party, known in enumerate(self._job.fingerprints) if known == digest), None)
        if expected is not None and found != expected:
            self._fail(_another_certificate(expected))
            return None
        if expected is None and (found is None or found >= self.party or found in self._peers):
            self._refused += found is not None and found != self.party
            return None
        if found is not None and encrypted.selected_alpn_protocol() != PROTOCOL_NAME:
            self._fail(
                Unavailable(
                    f"tallier {found} runs another version of the program, which finds winners otherwise "
                    f"({PROTOCOL_NAME} is spoken here); nothing was sent to it. Bring the three talliers to one "
                    "version; the round waits, and nothing is lost"
                )
            )
            return None
        return found

    async def _read(self, peer: int, link: _Peer) -> None:
        """Read messages until the peer is done; anything that the protocol does not allow ends the computation."""
        (size,) = _LENGTH.unpack(await link.read(_LENGTH.size))
        if size > _MAX_HELLO_BYTES:
            raise ProtocolViolation(f"tallier {peer} opened with something that is no hello")
        hello = await link.read(size)
        link.has_greeted = True
        self._greeted(peer, hello)
        while True:
            job, chunk, size = _HEADER.unpack(await link.read(_HEADER.size))
            if link.waiting_bytes + size > self._most_waiting_bytes:
                raise ProtocolViolation(f"tallier {peer} sent more than can be due")
            payload = await link.read(size)
            if (job, chunk) == DONE:
                link.ended.set_result(None)
                continue
            link.waiting_bytes += size
            link.queues[job, chunk].put_nowait(payload)

    def _greeted(self, peer: int, hello: bytes) -> None:
        """Store the jobs that a peer says it was given.

        Raises:
            ProtocolViolation: it is no hello.
            Forged: it has not signed a job that it names.
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

    def _left(self, peer: int, link: _Peer, error: BaseException) -> None:
        """Handle a connection that ended before its peer was done."""
        if self._is_closing or link.ended.done():
            return
        if isinstance(error, ssl.SSLError) and not link.has_greeted:
            self._fail(
                Forged(f"tallier {peer} does not accept this tallier's certificate; exchange certificates again")
            )
        else:
            self._fail(Unavailable(f"tallier {peer} has left in the middle of the job; try again with the same shares"))


def _another_certificate(peer: int) -> Forged:
    return Forged(f"who answers at the address of tallier {peer} does not have its certificate; nothing was sent to it")


def _difference(peer: int, job: WinnerJob, theirs: dict[str, Any]) -> ProtocolViolation:
    """Return the error that a tallier was given this job with other parameters; it names them."""
    names = sorted(name for name in job.parameters if theirs.get(name) != job.parameters[name])
    if "contributors" not in names:
        return ProtocolViolation(
            f"tallier {peer} was given this job with other parameters: {', '.join(names) or 'more than are known'} "
            "differ from this tallier's; nothing was computed"
        )
    # Another party sent the names, so they are quoted.
    told, own = theirs.get("contributors"), set(job.contributors)
    named = {agent for agent in told if isinstance(agent, str)} if isinstance(told, list) else set()
    parts = [
        f"only {whom} has {', '.join(repr(agent[:100]) for agent in sorted(agents)[:5])}"
        for whom, agents in (("it", named - own), ("this one", own - named))
        if agents
    ]
    return ProtocolViolation(
        f"tallier {peer} was told other contributors than this tallier: {'; '.join(parts) or 'in another order'}. "
        "Nothing was computed; the coordinator has to tell all talliers the same"
    )
