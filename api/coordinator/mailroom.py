"""The mailroom: checks signed messages from agents and talliers, hands them to the driver, and delivers mail.

A share from an agent to a tallier passes through here sealed: the coordinator reads its header, never its body. Sender,
key and form of a message are checked here. The turn that takes it (labeler.driver.coordinator) checks that its round is
open and its number new. The sender gets its answer when the effect is durable. A repeated message is refused
(`Replayed`), which tells a sender whose first answer was lost that it arrived. Messages may end with their sender's
next poll, which is answered once they are taken.

Sequence numbers of messages to the coordinator are kept in SQL, in the transaction that stores their effect. Those of
relayed messages are kept durably by the receiving party; here only in memory, so that most replays end early.

Witnesses are parties that have seen more of the coordinator's journal than it now holds. A journal restored from an
older copy has lost charges, and only those who saw the newer one can tell. Their word alone would let any one party
stop the service, so proof is required. Every answer to a poll is signed by the coordinator and states the head of its
journal. A party keeps the answer with the furthest head and sends it with its next poll. A head that this coordinator's
own key has signed, and that its journal does not hold, proves that entries are missing.

Without proof only that party is refused, because it would not believe this coordinator's answers either. People see its
claim in the list of parties, and jobs go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from anyio import CapacityLimiter, to_thread

from api.coordinator.roster import check_facts
from api.coordinator.stores import Stores
from labeler.driver.intake import Delivery, Incoming, incoming, with_heads
from labeler.driver.mail import Mailbox
from labeler.driver.sending import PostOffice, Relays
from labeler.errors import JournalBehind, LabelerError, NotEnrolled, ProtocolViolation, Replayed, TooLarge
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.ledger import Ledger
from labeler.ledger.parties import PartyRecord
from labeler.messages import COORDINATOR, Header, Message, frame, read_frames
from labeler.messages.bodies import Mail, Poll
from labeler.system.keys import PartyKeys, verify, verify_header

T = TypeVar("T")


class Waiting(Protocol):
    """A way for a request to wait."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work that takes long, or writes."""
        ...

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """Start something asynchronous and wait for the outcome that it passes to its callback."""
        ...


class InLoop:
    """Waiting in a server: long work runs in threads while the event loop continues.

    The threads are parties' alone, so that no party waits for requests of people.
    """

    def __init__(self) -> None:
        self._threads = CapacityLimiter(THREADS)

    async def aside(self, work: Callable[[], T]) -> T:
        """See Waiting."""
        return await to_thread.run_sync(work, limiter=self._threads)

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """See Waiting."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(outcome: T) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def tell(outcome: T) -> None:
            # Called in the driver's thread; once the loop has ended, nobody waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, outcome)

        ask(tell)
        return await answer


log = logging.getLogger("labeler.mailroom")

MAX_MESSAGES = 256
MAX_POLL_MESSAGES = 2
"""A poll, and the proof that may follow it."""

MAX_MAIL = 200
"""Most messages delivered at once; parties read 256, including the coordinator's own."""

THREADS = 16
"""Threads for what parties send."""

CONTACT_S = 5.0
"""A party's last contact is stored at most this often."""


@dataclass(frozen=True)
class Asking:
    """A party's poll, with signature and form checked.

    Attributes:
        message: as received.
        poll: its body.
        party: the sender.
        proof: an answer to an earlier poll as the coordinator signed it; None if none came.
    """

    message: Message
    poll: Poll
    party: PartyRecord
    proof: Message | None


@dataclass(frozen=True)
class Taken:
    """The outcome of one transmission.

    Attributes:
        count: how many messages were taken; their effects are durable.
        asking: the sender's poll, if one followed the messages.
    """

    count: int
    asking: Asking | None = None


class Mailroom:
    """See the module. `take`, `poll` and `mail_after` belong to one event loop."""

    def __init__(
        self,
        *,
        keys: PartyKeys,
        stores: Stores,
        mailbox: Mailbox,
        post_office: PostOffice,
        deliver: Callable[[Delivery], None],
        relays: Relays,
        steady: Callable[[], float] = time.monotonic,
        waiting: Waiting | None = None,
    ) -> None:
        self._keys = keys
        self._steady = steady
        self._waiting = waiting or InLoop()
        self._database = stores.database
        self._ledger = stores.ledger
        self._parties = stores.parties
        self._sequences = stores.sequences
        self._mailbox = mailbox
        self._post_office = post_office
        self._deliver = deliver
        self._relays = relays
        self._clock = stores.clock
        self._lock = threading.Lock()
        self._polled: dict[str, int] = {}
        self._written: dict[str, tuple[float, Poll]] = {}
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.witnesses = Witnesses(stores.ledger, keys.public.verify_key)

    async def take(self, data: bytes) -> Taken:
        """Take messages of one party: all of them, or those before the first refused one.

        Args:
            data: frames (labeler.messages) as received. Their sender's poll may follow them, in the form that `poll`
                takes; if it is malformed, all are refused.

        Raises:
            NotEnrolled, Forged, Replayed, WrongDigest, ProtocolViolation, TooLarge: a message was refused.
            Unavailable: the mailbox or the journal cannot take it now; send again.
        """
        try:
            messages, error, asking = await self._waiting.aside(partial(self._checked, data))
            if not messages:
                # Anybody can send nothing, or messages that fail these checks: they must not start or delay a turn.
                if error is not None:
                    raise error
                return Taken(0)
            outcome: int | LabelerError = await self._waiting.told(
                lambda tell: self._deliver(Delivery(messages, error, tell))
            )
            if isinstance(outcome, LabelerError):
                raise outcome
        except LabelerError as error:
            self.refused[error.problem_type] += 1
            raise
        self.taken.update(one.message.header.kind for one in messages)
        return Taken(outcome, asking)

    def _checked(self, data: bytes) -> tuple[tuple[Incoming, ...], LabelerError | None, Asking | None]:
        """Return the messages before the first that fails its own checks, that failure, and the poll that follows.

        Raises:
            ProtocolViolation, TooLarge: the data are not messages; none is taken.
            NotEnrolled, Forged: the poll is not this party's; none is taken.
        """
        messages = read_frames(data, max_messages=MAX_MESSAGES + MAX_POLL_MESSAGES)
        # A poll without messages is not accepted here: `poll` is the only way to ask for mail alone.
        end = next((place for place, one in enumerate(messages) if place and one.header.kind == "poll"), None)
        asking = None if end is None else self._asking(messages[end:])
        if asking is not None and asking.party.party_id != messages[0].header.sender:
            raise ProtocolViolation("a poll after messages must come from their sender")
        messages = messages[:end]
        if len(messages) > MAX_MESSAGES:
            raise TooLarge(f"one transmission holds at most {MAX_MESSAGES} messages; send the rest in another")
        found: list[Incoming] = []
        for message in messages:
            try:
                found.append(incoming(message, self._sender(message), self._keys))
            except LabelerError as error:
                return with_heads(found), error, None
        return with_heads(found), None, asking

    async def mail_after(self, asking: Asking) -> bytes | None:
        """Return the mail of a party whose messages were taken, as `poll` answers.

        Returns:
            None if nothing comes in the time it names, or if its poll fails. The party must not take a failed poll for
            a refusal of its messages, so it has to poll again to see the reason.
        """
        try:
            mail = await self._receive(asking)
        except LabelerError as error:
            self.refused[error.problem_type] += 1
            return None
        return self._answer(asking, mail) if mail else None

    async def poll(self, data: bytes) -> bytes:
        """Return a party's mail; wait a while if there is none.

        Args:
            data: one framed "poll" message. After it may follow proof of what the party has seen of the journal: an
                answer to an earlier poll as the coordinator signed it.

        Returns:
            Frames: first the coordinator's own "poll" with the cursor and the head of its journal, then the mail. The
            mail holds at most one message of the largest size (labeler.driver.mail.MAX_MAIL_BYTES).
        """
        asking = self._asking(read_frames(data, max_messages=MAX_POLL_MESSAGES))
        return self._answer(asking, await self._receive(asking))

    async def _receive(self, asking: Asking) -> list[tuple[str, bytes]]:
        poll, party, sequence = asking.poll, asking.party, asking.message.header.sequence
        with self._lock:
            if sequence <= self._polled.get(party.party_id, 0):
                raise Replayed(f"poll {sequence} of {party.party_id!r} was seen before")
            self._polled[party.party_id] = sequence
        await self._waiting.aside(partial(self._compare, asking))
        mail = await self._mailbox.receive(party.party_id, poll.after, poll.wait_s, MAX_MAIL)
        if not mail:
            self._relays.emptied(party.party_id)
        return mail

    def _asking(self, messages: Sequence[Message]) -> Asking:
        if not messages or messages[0].header.kind != "poll" or messages[0].header.recipient != COORDINATOR:
            raise ProtocolViolation("to ask for mail, send one message of kind poll to the coordinator")
        if len(messages) > MAX_POLL_MESSAGES:
            raise TooLarge("at most one message may follow a poll: an earlier answer of the coordinator")
        message, proof = messages[0], messages[1] if len(messages) == MAX_POLL_MESSAGES else None
        party = self._sender(message)
        poll = Poll.decode(self._keys.open(message))
        check_facts(poll.facts)
        return Asking(message, poll, party, proof)

    def _compare(self, asking: Asking) -> None:
        """Compare the head that a party has seen with the journal, and store its facts and its own head."""
        poll, party, sequence = asking.poll, asking.party, asking.message.header.sequence
        self.witnesses.compare(party.party_id, poll, asking.proof)
        written_s, before = self._written.get(party.party_id, (-CONTACT_S, None))
        is_news = before is None or (before.facts, before.program) != (poll.facts, poll.program)
        is_recent = self._steady() - written_s < CONTACT_S
        if is_recent and not is_news and self._parties.is_as_far(party, _own_head(poll)):
            return
        numbered = f"poll:{party.party_id}"
        with self._database.write() as connection:
            # First: an older poll that is replayed to a new process is refused here, before anything of it counts.
            self._sequences.taken(numbered, sequence, verify_key=party.verify_key, connection=connection)
            facts = dict(poll.facts) | {"version": poll.program}
            self._parties.contact(party.party_id, self._clock(), facts, _own_head(poll), connection=connection)
        self._written[party.party_id] = (self._steady(), poll)

    def _answer(self, asking: Asking, mail: Sequence[tuple[str, bytes]]) -> bytes:
        poll, head = asking.poll, self._ledger.head()
        after = mail[-1][0] if mail else poll.after
        own = self._parties.last_answer(asking.party.party_id)
        body = Mail(
            after=after, coordinator_seq=head.seq, coordinator_hash=head.hash,
            journal_seq=own.seq, journal_hash=own.hash if own.seq else "",
        ).encode()  # fmt: skip
        first = self._post_office.sign("poll", asking.party.party_id, body)
        return b"".join((frame([first]), *(frames for _, frames in mail)))

    def check_sender(self, header: Header, signature: bytes) -> None:
        """Check the signature of a header before the body is received, so that a stranger's body is never read.

        Raises:
            NotEnrolled: the sender is unknown or revoked.
            Forged: the signature is wrong.
        """
        try:
            verify_header(header, signature, self._active(header.sender).verify_key)
        except LabelerError as error:
            self.refused[error.problem_type] += 1
            raise

    def _sender(self, message: Message) -> PartyRecord:
        party = self._active(message.header.sender)
        verify(message, party.verify_key)
        return party

    def _active(self, party_id: str) -> PartyRecord:
        party = self._parties.known(party_id)
        if party is None:
            raise NotEnrolled(f"no party {party_id!r} is enrolled; ask the administrator")
        if party.state != "active":
            raise NotEnrolled(f"the keys of {party.party_id!r} were revoked; ask the administrator")
        return party


def _own_head(poll: Poll) -> Head:
    """Return the head of the polling party's own journal."""
    return Head(poll.journal_seq, poll.journal_hash) if poll.journal_seq else EMPTY


class Witnesses:
    """Compares the heads that parties have seen with the journal.

    Args:
        verify_key: the coordinator's own; it checks the coordinator's earlier signatures.
    """

    def __init__(self, ledger: Ledger, verify_key: str) -> None:
        self._ledger = ledger
        self._verify_key = verify_key
        self._lock = threading.Lock()
        self._behind: dict[str, tuple[int, bool]] = {}
        """Party -> the entry that it has seen and the journal does not hold, and whether it has proven so."""

    @property
    def sentence(self) -> str:
        """Say that the journal is behind, and which party proved it; empty while none has."""
        with self._lock:
            return next((_behind(name, seq) for name, (seq, is_proven) in self._behind.items() if is_proven), "")

    @property
    def doubters(self) -> tuple[str, ...]:
        """Return the parties that claim without proof to have seen entries that the journal does not hold."""
        with self._lock:
            return tuple(sorted(name for name, (_, is_proven) in self._behind.items() if not is_proven))

    def claim(self, party_id: str) -> str:
        """Return a party's unproven claim about the journal; empty if it makes none."""
        with self._lock:
            seq, is_proven = self._behind.get(party_id, (0, True))
        return "" if is_proven else f"says that it has seen entry {seq} of the coordinator's journal, without proof"

    def forget(self, party_id: str) -> None:
        """Drop a party's claim and proof: it is revoked, or its head is in the journal."""
        with self._lock:
            self._behind.pop(party_id, None)

    def compare(self, party_id: str, poll: Poll, proof: Message | None) -> None:
        """Compare the head that a party has seen with the journal.

        If they differ, the party gets no answer. Otherwise its record of the head would be overwritten once the journal
        grows past it. If its site has accepted this journal, the head it reports is one of this journal.

        Args:
            party_id: the sender; its signature was checked.
            proof: an answer to a poll as this coordinator signed it; None if none came.

        Raises:
            JournalBehind: the journal does not hold what the party says it has seen.
        """
        if not poll.coordinator_seq or self._holds(Head(poll.coordinator_seq, poll.coordinator_hash)):
            self.forget(party_id)
            return
        seen = self._signed(proof)
        if seen is not None and not self._holds(seen):
            self._note(party_id, seen.seq, is_proven=True)
            raise JournalBehind(
                f"{_behind(party_id, seen.seq)}. No mail is delivered until the newest journal is back, or the site "
                "consents to this one (labeler journal trust-restored)"
            )
        self._note(party_id, poll.coordinator_seq, is_proven=False)
        raise JournalBehind(
            f"{party_id} says that it has seen entry {poll.coordinator_seq} of the coordinator's journal, which does "
            "not hold it, and sent no answer with this coordinator's signature as proof. Only this party is refused: "
            "restore its coordinator.proof, or tell the operator. If the journal was restored, the site has to consent "
            "to it (labeler journal trust-restored)"
        )

    def _note(self, party_id: str, seq: int, *, is_proven: bool) -> None:
        with self._lock:
            is_news = self._behind.get(party_id, (0, not is_proven))[1] != is_proven
            self._behind[party_id] = (seq, is_proven)
        if is_news and is_proven:
            log.error("journal is behind", extra={"party": party_id, "seq": seq})
        elif is_news:
            log.warning("a party says without proof that the journal is behind", extra={"party": party_id, "seq": seq})

    def _holds(self, head: Head) -> bool:
        try:
            self._ledger.check_not_behind(head)
        except JournalBehind:
            return False
        return True

    def _signed(self, proof: Message | None) -> Head | None:
        """Return the head in an answer signed by this coordinator; None if the signature is not its own."""
        if proof is None or proof.header.kind != "poll" or proof.header.sender != COORDINATOR:
            return None
        try:
            verify(proof, self._verify_key)
            stated = Mail.decode(proof.body)
        except LabelerError:
            return None
        return Head(stated.coordinator_seq, stated.coordinator_hash) if stated.coordinator_seq else None


def _behind(party_id: str, seq: int) -> str:
    return (
        f"{party_id} has seen entry {seq} of the coordinator's journal, and this journal does not hold it: it is an "
        "older copy, and charges are missing from it"
    )
