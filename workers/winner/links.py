"""A tallier's connections to the two others during one job: whose they are, and that all three do the same job.

A number is tied to a certificate: who shows the certificate of tallier 2 is tallier 2, and no message says who
sent it. TLS 1.3, both certificates pinned. Lower numbers connect, higher ones listen, on the configured address
only. Before anything else is sent, the parties compare all that must be equal, job id first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import Callable
from typing import Any, Final

from feature_store.keys import verify_statement
from labeler.errors import Forged, InvalidSetting, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from workers.winner.certificates import fingerprint, pinned_context, read_certificate
from workers.winner.engine import NUM_PARTIES, WinnerJob
from workers.winner.link import DONE, Link, another_certificate

Record = Callable[[int, bytes], None]
"""Told every byte string that arrives, with the number of the party it came from: for tests of what is learnt."""

_RETRY_S = 0.05
CLOSE_LIMIT_S: Final = 3.0
"""How long a party that gives up waits for the others to hear of it."""


class Links:
    """The two connections of one job.

    Args:
        job: the job.
        extra: further parameters that must be equal, for example versions.
        max_payload_bytes: longest message the protocol of this job has.
        key_for: the key this party chose for itself and a higher one.
        take_key: keeps the key a lower one chose.
        record: told everything that arrives; tests only.
    """

    def __init__(
        self,
        job: WinnerJob,
        *,
        extra: dict[str, Any],
        max_payload_bytes: int,
        key_for: Callable[[int], bytes],
        take_key: Callable[[int, bytes], None],
        record: Record | None = None,
    ) -> None:
        self._job = job
        self._parameters = job.parameters | extra
        self.party = job.party
        self.modulus = job.field.modulus
        self.max_payload_bytes = max_payload_bytes
        self.key_for = key_for
        self.take_key = take_key
        self.record = record
        hello = self._parameters | {"signature": job.signature}
        self.hello = json.dumps(hello, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        self.peers: dict[int, Link] = {}
        self.problem: LabelerError | None = None
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._all_here: asyncio.Future[None] = loop.create_future()
        self._dialling: list[asyncio.Future[None]] = []
        self._server: asyncio.Server | None = None
        self._open: set[int] = set()
        self._refused = 0
        self._is_closing = False

    async def connect(self) -> None:
        """Open both connections and compare jobs over them.

        Returns only when both are open. What a peer does wrong is raised by `failed`; who is absent is waited for.

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
        await self.abandon(CLOSE_LIMIT_S)

    async def abandon(self, limit_s: float, *, late_limit_s: float = 0.0) -> None:
        """Close in order, so that what was sent last (a hello that says what differs) still arrives.

        Args:
            limit_s: for what was sent to arrive.
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
        if len(self.peers) == NUM_PARTIES - 1 and not self._all_here.done():
            self._all_here.set_result(None)

    def opened(self, peer: int) -> None:
        """A connection is ready for messages."""
        self._open.add(peer)
        if len(self._open) == NUM_PARTIES - 1 and not self._ready.done():
            self._ready.set_result(None)

    def compare(self, peer: int, hello: bytes) -> None:
        """Refuse a peer that does another job, saying what differs.

        Raises:
            WrongDigest: it does a job of another name.
            ProtocolViolation: it does this job otherwise.
            Forged: it has not signed that it does this job.
        """
        try:
            theirs = json.loads(hello)
        except ValueError as error:
            raise ProtocolViolation(f"tallier {peer} opened with something that is no hello") from error
        if not isinstance(theirs, dict):
            raise ProtocolViolation(f"tallier {peer} opened with something that is no hello")
        signature = theirs.pop("signature", "")
        if theirs == self._parameters:
            if self._job.verify_keys:
                verify_statement(self._job.statement, str(signature), self._job.verify_keys[peer])
            return
        names = sorted(name for name in self._parameters if theirs.get(name) != self._parameters[name])
        if "job_id" in names:
            raise WrongDigest(f"tallier {peer} was given another job than this tallier; nothing was computed")
        if "contributors" in names:
            raise ProtocolViolation(_other_contributors(peer, self._job.contributors, theirs.get("contributors")))
        raise ProtocolViolation(
            f"tallier {peer} was given this job with other parameters: {', '.join(names) or 'more than are known'} "
            "differ from this tallier's; nothing was computed"
        )

    def left(self, peer: int, stage: str, exc: BaseException | None) -> None:
        """A connection ended before its peer was done."""
        if self._is_closing:
            return
        if isinstance(exc, ssl.SSLError) and stage == "hello":
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
        missing = [str(peer) for peer in range(NUM_PARTIES) if peer != self.party and peer not in self._open]
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
        while True:
            try:
                await asyncio.get_running_loop().create_connection(
                    lambda: Link(self, peer), address.host, address.port, ssl=context, server_hostname=""
                )
            except ssl.SSLCertVerificationError:
                self.fail(another_certificate(peer))
                return
            except (OSError, UnicodeError):
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _context(self, peers: range | list[int], *, is_server: bool) -> ssl.SSLContext:
        trusted = [self._job.certificates[peer] for peer in peers]
        return pinned_context(self._job.identity_path, trusted=trusted, is_server=is_server)


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
