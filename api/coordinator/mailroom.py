"""The mailroom: signed messages from agents and talliers, checked, then handed to the driver; and mail handed out.

A share on its way from an agent to a tallier passes through here sealed: the coordinator reads its header, never its
body. Who sent a message, under which key, and what form it has is checked here; whether its round is open and its
number new, in the turn that takes it (labeler.driver.coordinator), and whoever sent it has its answer when its
effect is durable. A message that arrives a second time is refused (`Replayed`), which tells a sender whose first answer
was lost that it has arrived. Messages may end with their sender's next poll; it is answered once they are taken.

Sequence numbers of messages to the coordinator are kept in SQL, in the transaction that stores their effect. Those
of relayed messages are kept durably by the party they are for; here in memory, so that most replays end early.

Witnesses are parties that have seen more of the coordinator's journal than this one holds. A journal restored from an
older copy has lost charges, and only those who saw the newer one can tell. Their word alone would let any one party
stop the service, so it takes proof: every answer to a poll is signed by the coordinator and states the head of its
journal; a party keeps the answer that told it the furthest head, and sends it along with its next poll. What this
coordinator's own key has signed and its journal does not hold is missing from the journal.

Without proof only that party is refused, because it would not believe this coordinator's answers either; people see its
claim in the list of parties, and jobs go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar

from anyio import to_thread

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
    """How a request waits."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Do something that takes long, or writes."""
        ...

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """Ask for something that somebody else will tell of, by the callable it is given."""
        ...


class InLoop:
    """Of a server: threads for what takes long, while the event loop goes on."""

    async def aside(self, work: Callable[[], T]) -> T:
        """See Waiting."""
        return await to_thread.run_sync(work)

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """See Waiting."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(outcome: T) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def tell(outcome: T) -> None:
            # From the driver's thread to whoever waits; nobody does once the loop has ended.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome)

        ask(tell)
        return await answer


log = logging.getLogger("labeler.mailroom")

MAX_MESSAGES = 256
MAX_POLL_MESSAGES = 2
"""A poll, and the proof that may stand behind it."""

MAX_MAIL = 200
"""Most messages handed out at once; parties read 256, the coordinator's own among them."""

CONTACT_S = 5.0
"""A party's last contact is written down at most this often; in memory it is exact."""

SMALL_BYTES = 256 * 1024
"""Messages of so many bytes together are checked at once; more would hold up every other request."""


@dataclass(frozen=True)
class Asking:
    """A party that asks for its mail: its signature, and the form of what it says, were checked.

    Attributes:
        message: as it came.
        poll: its body.
        party: who asks.
        proof: an answer to an earlier poll as the coordinator signed it; None where none came.
    """

    message: Message
    poll: Poll
    party: PartyRecord
    proof: Message | None


@dataclass(frozen=True)
class Taken:
    """What became of one transmission.

    Attributes:
        count: how many messages were taken; what they changed is durable.
        asking: their sender, where it asks for its mail besides.
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
        self._contacts: dict[str, datetime] = {}
        self._written: dict[str, tuple[float, Poll]] = {}
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.witnesses = Witnesses(stores.ledger, keys.public.verify_key)

    def fresh(self, party: PartyRecord) -> PartyRecord:
        """A party with its last contact as this process knows it."""
        seen = self._contacts.get(party.party_id)
        is_newer = seen is not None and (party.last_contact is None or party.last_contact < seen)
        return replace(party, last_contact=seen) if is_newer else party

    async def take(self, data: bytes) -> Taken:
        """Take messages of one party; all of them, or those before the first that is refused.

        Args:
            data: frames (labeler.messages), as they came; behind the messages their sender's poll may stand, as `poll`
                takes it. A poll that is none refuses them all.

        Raises:
            NotEnrolled, Forged, Replayed, WrongDigest, ProtocolViolation, TooLarge: a message was refused.
            Unavailable: the mailbox or the journal cannot take it now; send again.
        """
        try:
            if len(data) <= SMALL_BYTES:
                messages, error, asking = self._checked(data)
            else:
                messages, error, asking = await self._waiting.aside(partial(self._checked, data))
            if not messages:
                # Anybody can send nothing, or what is refused for itself: no turn is begun or kept waiting for it.
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
        """The messages before the first that is refused for itself, why that one is, and the poll behind them.

        Raises:
            ProtocolViolation, TooLarge: these are no messages; none is taken.
            NotEnrolled, Forged: the poll behind them is not this party's; none is taken.
        """
        messages = read_frames(data, max_messages=MAX_MESSAGES + MAX_POLL_MESSAGES)
        # Nothing but a poll is no post: there is one place to ask for mail alone.
        end = next((place for place, one in enumerate(messages) if place and one.header.kind == "poll"), None)
        asking = None if end is None else self._asking(messages[end:])
        if asking is not None and asking.party.party_id != messages[0].header.sender:
            raise ProtocolViolation("a poll behind messages is of the party that sends them")
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
        """What waits for a party whose messages were taken, as `poll` answers.

        Returns:
            None where nothing comes in the time it names, or it has to ask again to be told what is wrong: whoever
            posted must not take a poll's trouble for a refusal of what was taken.
        """
        try:
            mail = await self._receive(asking)
        except LabelerError as error:
            self.refused[error.problem_type] += 1
            return None
        return self._answer(asking, mail) if mail else None

    async def poll(self, data: bytes) -> bytes:
        """Hand a party what waits for it, waiting a while if nothing does.

        Args:
            data: one framed "poll" message, and after it, as proof of what the party has seen of the journal, an
                answer to an earlier one as the coordinator signed it.

        Returns:
            Frames: first the coordinator's own "poll" with the cursor and the head of its journal, then the mail, of
            which there is never more than one message of the largest size (labeler.driver.mail.MAX_MAIL_BYTES).
        """
        asking = self._asking(read_frames(data, max_messages=MAX_POLL_MESSAGES))
        return self._answer(asking, await self._receive(asking))

    async def _receive(self, asking: Asking) -> list[tuple[str, bytes]]:
        message, poll, party = asking.message, asking.poll, asking.party
        with self._lock:
            if message.header.sequence <= self._polled.get(party.party_id, 0):
                raise Replayed(f"poll {message.header.sequence} of {party.party_id!r} was seen before")
            self._polled[party.party_id] = message.header.sequence
        if not self._is_known(party, poll):
            await self._waiting.aside(partial(self._compare, message, poll, party, asking.proof))
        # Who is shown as there has told its facts: a task may name it at once.
        self._contacts[party.party_id] = self._clock()
        mail = await self._mailbox.receive(party.party_id, poll.after, poll.wait_s, MAX_MAIL)
        if not mail:
            self._relays.emptied(party.party_id)
        return mail

    def _asking(self, messages: Sequence[Message]) -> Asking:
        if not messages or messages[0].header.kind != "poll" or messages[0].header.recipient != COORDINATOR:
            raise ProtocolViolation("asking for mail takes one message of kind poll, for the coordinator")
        if len(messages) > MAX_POLL_MESSAGES:
            raise TooLarge("behind a poll stands at most one message, an earlier answer of the coordinator")
        message, proof = messages[0], messages[1] if len(messages) == MAX_POLL_MESSAGES else None
        party = self._sender(message)
        poll = Poll.decode(self._keys.open(message))
        check_facts(poll.facts)
        return Asking(message, poll, party, proof)

    def _is_known(self, party: PartyRecord, poll: Poll) -> bool:
        """Whether nothing of a poll needs a look into the journal: the head it has seen is held, its facts are kept."""
        return self._is_written(party, poll) and self.witnesses.is_held(party.party_id, poll)

    def _is_written(self, party: PartyRecord, poll: Poll) -> bool:
        written_at, before = self._written.get(party.party_id, (-CONTACT_S, None))
        is_news = before is None or (before.facts, before.program) != (poll.facts, poll.program)
        is_recent = self._steady() - written_at < CONTACT_S
        return not is_news and is_recent and self._parties.is_as_far(party, _own_head(poll))

    def _compare(self, message: Message, poll: Poll, party: PartyRecord, proof: Message | None) -> None:
        self.witnesses.compare(party.party_id, poll, proof)
        self._write_contact(party, message, poll)

    def _write_contact(self, party: PartyRecord, message: Message, poll: Poll) -> None:
        if self._is_written(party, poll):
            return
        numbered, sequence = f"poll:{party.party_id}", message.header.sequence
        with self._database.write() as connection:
            if party.party_id not in self._written:
                # The first poll since this process started: an old one, recorded and sent again, ends here.
                self._sequences.check(numbered, sequence, verify_key=party.verify_key, connection=connection)
            facts = dict(poll.facts) | {"version": poll.program}
            self._parties.contact(party.party_id, self._clock(), facts, _own_head(poll), connection=connection)
            self._sequences.taken(numbered, sequence, verify_key=party.verify_key, connection=connection)
        self._written[party.party_id] = (self._steady(), poll)

    def _answer(self, asking: Asking, mail: Sequence[tuple[str, bytes]]) -> bytes:
        poll, head = asking.poll, self._ledger.known_head()
        self.witnesses.told(head)
        after = mail[-1][0] if mail else poll.after
        own = self._parties.last_answer(asking.party.party_id)
        body = Mail(
            after=after, coordinator_seq=head.seq, coordinator_hash=head.hash,
            journal_seq=own.seq, journal_hash=own.hash if own.seq else "",
        ).encode()  # fmt: skip
        first = self._post_office.sign("poll", asking.party.party_id, body)
        return b"".join((frame([first]), *(frames for _, frames in mail)))

    def check_sender(self, header: Header, signature: bytes) -> None:
        """Check who signed the header of a message whose body has not come yet, so that a stranger's is never read.

        Raises:
            NotEnrolled: the sender is unknown or revoked.
            Forged: the signature does not hold.
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
    """How far the journal is of the party that polls."""
    return Head(poll.journal_seq, poll.journal_hash) if poll.journal_seq else EMPTY


MAX_KNOWN = 4096
"""Heads that were found in the journal, or told to parties, and need not be looked for again."""


class Witnesses:
    """Compares what parties have seen of the journal with the journal.

    Args:
        verify_key: the coordinator's own, which what it signed before is checked with.
    """

    def __init__(self, ledger: Ledger, verify_key: str) -> None:
        self._ledger = ledger
        self._verify_key = verify_key
        self._lock = threading.Lock()
        self._proven: dict[str, int] = {}
        self._claimed: dict[str, int] = {}
        self._known: OrderedDict[tuple[int, str], None] = OrderedDict()

    @property
    def sentence(self) -> str:
        """Why the journal is known to be behind, and by whom; empty while it is not."""
        with self._lock:
            first = next(iter(self._proven.items()), None)
        return "" if first is None else _behind(*first)

    @property
    def doubters(self) -> tuple[str, ...]:
        """Parties that say, without proof, to have seen what the journal does not hold."""
        with self._lock:
            return tuple(sorted(self._claimed))

    def claim(self, party_id: str) -> str:
        """What a party says of the journal and cannot prove; empty where it says nothing."""
        with self._lock:
            seq = self._claimed.get(party_id)
        return "" if seq is None else f"says that it has seen entry {seq} of the coordinator's journal, without proof"

    def forget(self, party_id: str) -> None:
        """A party is believed no longer, or has seen what the journal holds."""
        with self._lock:
            self._proven.pop(party_id, None)
            self._claimed.pop(party_id, None)

    def compare(self, party_id: str, poll: Poll, proof: Message | None) -> None:
        """Compare what a party has seen with the journal.

        It gets no answer where they differ, so that what it has seen is not overwritten once the journal has grown
        longer than that. Where its site has consented to this journal, it says so by what it has seen.

        Args:
            party_id: who polls; its signature was checked.
            proof: an answer to a poll as this coordinator signed it; None where none came.

        Raises:
            JournalBehind: the journal does not hold what the party says it has seen.
        """
        if not poll.coordinator_seq or self._holds(Head(poll.coordinator_seq, poll.coordinator_hash)):
            self.forget(party_id)
            if poll.coordinator_seq:
                self.told(Head(poll.coordinator_seq, poll.coordinator_hash))
            return
        seen = self._signed(proof)
        if seen is not None and not self._holds(seen):
            self._note(self._proven, self._claimed, party_id, seen.seq)
            raise JournalBehind(
                f"{_behind(party_id, seen.seq)}. Nothing is handed out until the newest journal is back, or the site "
                "consents to this one (labeler journal trust-restored)"
            )
        self._note(self._claimed, self._proven, party_id, poll.coordinator_seq)
        raise JournalBehind(
            f"{party_id} says that it has seen entry {poll.coordinator_seq} of the coordinator's journal, which does "
            "not hold it, and sent no answer with this coordinator's signature that proves it. Only this party is "
            "refused: restore its coordinator.proof, or tell the operator; where the journal was restored, the site "
            "consents to it (labeler journal trust-restored)"
        )

    def is_held(self, party_id: str, poll: Poll) -> bool:
        """Whether what a party has seen was found in the journal before, so that nobody has to look again."""
        with self._lock:
            if party_id in self._proven or party_id in self._claimed:
                return False
            return not poll.coordinator_seq or (poll.coordinator_seq, poll.coordinator_hash) in self._known

    def told(self, head: Head) -> None:
        """A head of this journal that parties are told now: they will say that they have seen it."""
        with self._lock:
            self._known[head.seq, head.hash] = None
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _note(self, into: dict[str, int], out_of: dict[str, int], party_id: str, seq: int) -> None:
        with self._lock:
            is_news = party_id not in into
            into[party_id] = seq
            out_of.pop(party_id, None)
        if is_news and into is self._proven:
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
        """The head that this coordinator once stated under its signature; None where it is not its own statement."""
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
