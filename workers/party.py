"""The link of an agent or a tallier to its coordinator: outbound HTTP only, signed both ways, repeated until taken.

    poll       "anything for me?" -> messages, checked to be for this party; the coordinator's own head first
    post       this party's messages, with new sequence numbers at each attempt, until the coordinator takes them
    handled    everything of the last poll had its effect and its answer was taken; the next poll goes on after it

A message is marked as taken only when its effect is durable and the answer to it was accepted. A crash in between
repeats it, and every effect may happen twice: answers are deterministic, and stores keep the first of equals.

The coordinator's journal is watched: its highest head ever seen is kept in a file, told at every poll, and a
coordinator that shows an older one has lost charges, so this party stops taking part.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import random
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from feature_store.journal.anchor import Anchor
from feature_store.journal.chain import EMPTY, Head
from feature_store.journal.database import Database
from feature_store.journal.sequences import Sequences
from feature_store.keys import PartyKeys, verify
from labeler.bodies import Mail, Poll
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
)
from labeler.messages import COORDINATOR, MAX_MESSAGE_BYTES, Kind, Message, frame, read_frames

log = logging.getLogger("labeler.party")

MAX_ANSWER_BYTES = 17 * MAX_MESSAGE_BYTES
"""Largest answer to a poll that is read: sixteen of the largest messages, and the coordinator's own."""

MAX_MAIL = 256
VERSION = "labeler/0.1"

_MAX_PROBLEM_BYTES = 64 * 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_REFUSED_PAUSE_S = 10.0
_WATCH_S = 0.1
_NEW_NUMBERS = 3
_PROBLEM = "urn:labeler:problem:"

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Draft:
    """A message before it has a number and a signature.

    Attributes:
        kind, recipient, task_digest, round_digest: as in a header.
        body: in clear.
        seal_to: the recipient's seal key; None sends the body in clear.
    """

    kind: Kind
    recipient: str
    body: bytes
    task_digest: str = ""
    round_digest: str = ""
    seal_to: str | None = None

    def __repr__(self) -> str:
        return f"Draft(kind={self.kind!r}, recipient={self.recipient!r})"


class PartyLink:
    """See the module. Used by one thread.

    Args:
        url: of the coordinator; https, or http to this machine only.
        party_id: who this party is.
        keys: its keys.
        coordinator_key: the pinned key that the coordinator's signatures are checked with.
        database: of its own journal.
        sequences: of the same journal.
        journal_head: the head of its own ledger, told at every poll.
        seen: file that remembers the coordinator's highest head.
        facts: what the coordinator is told at every poll.
        stop: ends every wait and every retry.
        ca_file: certificates to check the coordinator's against; the system's where absent.
        wait_s: how long the coordinator may hold a poll while there is no mail.

    Raises:
        InvalidSetting: the address is none, or would send messages over a network in clear.
    """

    def __init__(
        self,
        *,
        url: str,
        party_id: str,
        keys: PartyKeys,
        coordinator_key: str,
        database: Database,
        sequences: Sequences,
        journal_head: Callable[[], Head],
        seen: Path,
        facts: Callable[[], Mapping[str, Any]],
        stop: threading.Event,
        ca_file: str | None = None,
        wait_s: float = 20.0,
    ) -> None:
        self.party_id = party_id
        self.coordinator_key = coordinator_key
        self._keys = keys
        self._database = database
        self._sequences = sequences
        self._journal_head = journal_head
        self._seen = Anchor(seen)
        self._facts = facts
        self._stop = stop
        self._wait_s = wait_s
        self._after = self._next_after = ""
        self._last_answer = 0
        self._failures = 0
        self._client = httpx2.AsyncClient(
            base_url=check_url(url),
            verify=_certificates(ca_file),
            # A proxy of the environment is for the network, never for this machine.
            trust_env=not _is_loopback(httpx2.URL(url).host),
            timeout=httpx2.Timeout(30.0, connect=10.0, read=wait_s + 30.0),
            headers={"Content-Type": "application/octet-stream", "Accept-Encoding": "identity"},
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> PartyLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    def poll(self) -> list[Message]:
        """Wait for mail. What comes is for this party; who sent it, `open` checks.

        Raises:
            JournalBehind: the coordinator's journal is older than what this party has seen of it.
            NotEnrolled: this party is not enrolled, or its keys were revoked.
            ProtocolViolation: the answer is none.
            Interrupted: told to stop.
        """
        seen, own = self._seen.read() or EMPTY, self._journal_head()
        body = Poll(
            after=self._after,
            wait_s=self._wait_s,
            journal_seq=own.seq,
            journal_hash=own.hash if own.seq else "",
            coordinator_seq=seen.seq,
            coordinator_hash=seen.hash if seen.seq else "",
            version=VERSION,
            facts=self._facts(),
        ).encode()
        answer = self._send("/v1/messages:poll", [Draft("poll", COORDINATOR, body)])
        messages = read_frames(answer, max_messages=MAX_MAIL)
        if not messages or messages[0].header.kind != "poll":
            raise ProtocolViolation("the answer to a poll begins with the coordinator's own message; is the URL right?")
        first, *mail = messages
        self._check_envelope(first, self.coordinator_key)
        if first.header.sender != COORDINATOR or first.header.sequence <= self._last_answer:
            raise Replayed("the answer to a poll is an old one, or not the coordinator's")
        self._last_answer = first.header.sequence
        note = Mail.decode(self._keys.open(first))
        self._compare(seen, note)
        self._next_after = note.after
        return [message for message in mail if self._is_ours(message)]

    def handled(self) -> None:
        """Everything of the last poll is done with; the next one asks for what comes after it."""
        self._after = self._next_after

    def post(self, drafts: Sequence[Draft]) -> None:
        """Send messages, in this order, until the coordinator has taken them all.

        Raises:
            NotEnrolled, Forged: the coordinator does not know this party or its keys.
            ProtocolViolation, TooLarge: it will not take them, for example because their round is over.
            Interrupted: told to stop.
        """
        self._send("/v1/messages", drafts)

    def open(self, message: Message, verify_key: str) -> bytes:
        """Check who sent a message and that it is new, and open its body.

        Args:
            message: as `poll` returned it.
            verify_key: the pinned or enrolled key of the sender it names.

        Raises:
            Forged: signature, digest or seal do not hold.
            Replayed: this or a later message of the sender was taken before.
        """
        self._check_envelope(message, verify_key)
        self._sequences.check(message.header.sender, message.header.sequence)
        return self._keys.open(message)

    def taken(self, messages: Sequence[Message]) -> None:
        """Never take these again; only of messages that `open` has opened."""
        highest: dict[str, int] = {}
        for message in messages:
            sender, sequence = message.header.sender, message.header.sequence
            highest[sender] = max(sequence, highest.get(sender, 0))
        if highest:
            with self._database.write() as connection:
                for sender, sequence in highest.items():
                    self._sequences.taken(sender, sequence, connection=connection)

    def _check_envelope(self, message: Message, verify_key: str) -> None:
        if message.header.recipient != self.party_id:
            raise ProtocolViolation(f"a message for {message.header.recipient!r} came to {self.party_id!r}")
        verify(message, verify_key)

    def _is_ours(self, message: Message) -> bool:
        if message.header.recipient == self.party_id:
            return True
        log.warning("message for somebody else skipped", extra={"message_id": message.message_id})
        return False

    def _compare(self, seen: Head, note: Mail) -> None:
        told = Head(note.coordinator_seq, note.coordinator_hash) if note.coordinator_seq else EMPTY
        if told.seq < seen.seq or (told.seq == seen.seq and told.hash != seen.hash):
            raise JournalBehind(
                f"the coordinator's journal ends at entry {told.seq}, and this party has seen entry {seen.seq} of it: "
                "charges are missing from it. This party answers nothing until the coordinator's newest journal is "
                f"back; if it was given up for good, remove {self._seen.path.name} here"
            )
        if told.seq > seen.seq:
            self._seen.remember(told)

    def _send(self, path: str, drafts: Sequence[Draft]) -> bytes:
        """Send until there is an answer: new numbers where old ones were seen, patience where nobody answers."""
        renumbered = 0
        while True:
            data = frame([self._sign(draft) for draft in drafts])
            try:
                answer = self._run(self._request(path, data))
            except Replayed:
                # The first attempt arrived although its answer did not; sent anew it changes nothing.
                renumbered += 1
                if renumbered > _NEW_NUMBERS:
                    raise
            except (Unavailable, httpx2.TransportError) as error:
                self._wait_after(error)
            else:
                if self._failures:
                    log.info("coordinator reached again", extra={"party": self.party_id})
                self._failures = 0
                return answer

    def _sign(self, draft: Draft) -> Message:
        return self._keys.message(
            draft.kind,
            sender=self.party_id,
            recipient=draft.recipient,
            task_digest=draft.task_digest,
            round_digest=draft.round_digest,
            sequence=self._sequences.next(draft.recipient),
            body=draft.body,
            seal_to=draft.seal_to,
        )

    async def _request(self, path: str, data: bytes) -> bytes:
        async with self._client.stream("POST", path, content=data) as response:
            if response.status_code in (200, 202):
                return await _bounded(response, MAX_ANSWER_BYTES)
            raise _problem(response, await _bounded(response, _MAX_PROBLEM_BYTES))

    def _wait_after(self, error: Exception) -> None:
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        pause = max(pause * random.uniform(0.5, 1.0), getattr(error, "retry_after_s", 0.0))
        if self._failures == 0:
            log.warning(
                "coordinator cannot be reached; trying again",
                extra={"party": self.party_id, "problem": type(error).__name__, "sentence": str(error)[:300]},
            )
        self._failures += 1
        if self._stop.wait(pause):
            raise Interrupted("stopped while the coordinator could not be reached") from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(self._until_stopped(work))

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """A held poll would keep a process that was told to stop for many seconds; it is dropped instead."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._stop.is_set():
                    raise Interrupted("stopped while talking to the coordinator")
                await asyncio.wait({task}, timeout=_WATCH_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def converse(link: PartyLink, handle: Callable[[Sequence[Message]], None], stop: threading.Event) -> None:
    """Poll and handle until told to stop; what passes by itself is waited for, what does not is said in the log.

    Args:
        link: to the coordinator.
        handle: has the effect of every message and sends the answers; raises only what concerns them all.
        stop: ends the conversation.

    Raises:
        LabelerError: this party's own journal or files cannot be used any more.
    """
    while not stop.is_set():
        try:
            handle(link.poll())
            link.handled()
        except Interrupted:
            return
        except (NotEnrolled, Forged) as error:
            _pause(
                error, "the coordinator does not accept this party; an administrator has to enrol its keys", link, stop
            )
        except JournalBehind as error:
            _pause(error, "the coordinator's journal is behind; this party takes no part", link, stop)
        except (ProtocolViolation, TooLarge, Unavailable) as error:
            _pause(error, "mail could not be handled; trying again", link, stop, pause_s=_FIRST_PAUSE_S * 10)


def _pause(
    error: LabelerError, what: str, link: PartyLink, stop: threading.Event, *, pause_s: float = _REFUSED_PAUSE_S
) -> None:
    log.error(what, extra={"party": link.party_id, "problem": error.problem_type, "sentence": str(error)})
    stop.wait(pause_s)


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
    if parsed.scheme == "http" and not _is_loopback(parsed.host):
        raise InvalidSetting(
            f"the coordinator's URL sends messages to {parsed.host!r} in clear; use https:// (plain http:// is for "
            "127.0.0.1 only)"
        )
    return str(parsed)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _certificates(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError):
        raise InvalidSetting("ca_file cannot be read, or holds no certificates (PEM)") from None


async def _bounded(response: httpx2.Response, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > most:
            raise TooLarge(f"the coordinator's answer has more than {most} bytes; is the URL right?")
        parts.append(part)
    return b"".join(parts)


def _problem(response: httpx2.Response, body: bytes) -> LabelerError:
    """The error that a refusal of the coordinator stands for; its words are shown only as far as they print."""
    status = response.status_code
    try:
        document = json.loads(body)
        kind, detail = str(document["type"]).removeprefix(_PROBLEM), str(document["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        kind, detail = "", ""
    said = "".join(letter if letter.isprintable() else "?" for letter in detail)[:500]
    sentence = f"the coordinator answered {status}" + (f": {said}" if said else "")
    if status == 429 or status >= 500:
        error = Unavailable(sentence)
        error.retry_after_s = _retry_after(response)  # type: ignore[attr-defined]  # read by `_wait_after`
        return error
    for known in (NotEnrolled, Forged, Replayed, TooLarge):
        if kind == known.problem_type:
            return known(sentence)
    if status in (401, 403):
        return NotEnrolled(sentence)
    return ProtocolViolation(sentence)


def _retry_after(response: httpx2.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), _LONGEST_PAUSE_S) if text.isdecimal() else 0.0
