"""The mailroom: signed messages from agents and talliers, checked, then relayed or acted on.

A share on its way from an agent to a tallier passes through here sealed: the coordinator reads its header, never its
body. Everything is checked before anything happens: the sender is enrolled and not revoked, its signature holds,
the round is one of an unfinished job in which it takes part, and its sequence number is new. A message that arrives a
second time is refused (`Replayed`), which tells a sender whose first answer was lost that it has arrived.

Sequence numbers of messages to the coordinator are kept in SQL, in the transaction that stores their effect. Those
of relayed messages are kept durably by the party they are for; here in memory, so that most replays end early.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from api.coordinator.facts import check_facts
from api.coordinator.post_office import PostOffice
from api.coordinator.proposals import Proposals, read_answer
from api.coordinator.relays import Relays
from api.coordinator.winner_turns import WinnerTurns
from api.coordinator.witnesses import Witnesses
from feature_store.journal.aggregates import AggregateStore
from feature_store.journal.chain import EMPTY, Head
from feature_store.journal.database import Connection, Database
from feature_store.journal.jobs import JobStore, RoundRecord
from feature_store.journal.ledger import Ledger
from feature_store.journal.parties import PartyRecord, PartyStore
from feature_store.journal.sequences import Sequences
from feature_store.journal.tasks import TaskStore
from feature_store.keys import PartyKeys, verify, verify_header
from feature_store.mailbox import Mailbox
from labeler.bodies import Mail, Poll, Refusal
from labeler.errors import (
    LabelerError,
    NotEnrolled,
    NotFound,
    ProtocolViolation,
    Replayed,
    WrongDigest,
)
from labeler.messages import COORDINATOR, Header, Message, frame, read_frames
from labeler.methods import ReleaseKind
from labeler.proposals import ANSWER_KINDS
from labeler.share_bodies import aggregate_from_bytes, holdings_from_bytes, winner_from_bytes

log = logging.getLogger("labeler.mailroom")

MAX_MESSAGES = 256
CONTACT_S = 5.0
"""A party's last contact is written down at most this often; in memory it is exact."""

MAX_TASKS_KNOWN = 1024

_ROLES_OF = {
    "input-share": ("agent",),
    "answered": ("agent",),
    "refused": ("agent", "tallier"),
    "holdings": ("tallier",),
    "aggregate-share": ("tallier",),
    "winner": ("tallier",),
    "willing": ("agent",),
    "declined": ("agent",),
}
_OPEN_STATES = ("asked", "agreed", "posted")


@dataclass(frozen=True)
class _Part:
    """Of a task: who takes part, how many numbers a share has for each query, and what is released."""

    participants: frozenset[str]
    columns: int
    release: ReleaseKind


class Mailroom:
    """See the module."""

    def __init__(
        self,
        *,
        keys: PartyKeys,
        database: Database,
        ledger: Ledger,
        tasks: TaskStore,
        jobs: JobStore,
        aggregates: AggregateStore,
        parties: PartyStore,
        sequences: Sequences,
        mailbox: Mailbox,
        post_office: PostOffice,
        wake: Callable[[str], None],
        proposals: Proposals,
        turns: WinnerTurns,
        clock: Callable[[], datetime],
    ) -> None:
        self._keys = keys
        self._database = database
        self._ledger = ledger
        self._tasks = tasks
        self._jobs = jobs
        self._aggregates = aggregates
        self._parties = parties
        self._sequences = sequences
        self._mailbox = mailbox
        self._post_office = post_office
        self._wake = wake
        self._proposals = proposals
        self._turns = turns
        self._clock = clock
        self._lock = threading.Lock()
        self._relayed: dict[tuple[str, str], int] = {}
        self._parts: dict[str, _Part] = {}
        self._relays = Relays()
        self._polled: dict[str, int] = {}
        self._contacts: dict[str, datetime] = {}
        self._written: dict[str, tuple[float, Poll]] = {}
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.witnesses = Witnesses(ledger, keys.public.verify_key)

    def fresh(self, party: PartyRecord) -> PartyRecord:
        """A party with its last contact as this process knows it."""
        seen = self._contacts.get(party.party_id)
        is_newer = seen is not None and (party.last_contact is None or party.last_contact < seen)
        return replace(party, last_contact=seen) if is_newer else party

    def take(self, data: bytes) -> int:
        """Take messages of one party; all of them, or those before the first that is refused.

        Args:
            data: frames (labeler.messages), as they came.

        Returns:
            How many were taken.

        Raises:
            NotEnrolled, Forged, Replayed, WrongDigest, ProtocolViolation, TooLarge: a message was refused.
            Unavailable: the mailbox or the journal cannot take it now; send again.
        """
        count = 0
        try:
            for message in read_frames(data, max_messages=MAX_MESSAGES):
                self._take(message)
                self.taken[message.header.kind] += 1
                count += 1
        except LabelerError as error:
            self.refused[error.problem_type] += 1
            raise
        return count

    async def poll(self, data: bytes, *, in_thread: Callable[..., object]) -> bytes:
        """Hand a party what waits for it, waiting a while if nothing does.

        Args:
            data: one framed "poll" message, and after it, as proof of what the party has seen of the journal, an
                answer to an earlier one as the coordinator signed it.
            in_thread: awaitable runner of blocking functions, for example anyio.to_thread.run_sync.

        Returns:
            Frames: first the coordinator's own "poll" with the cursor and the head of its journal, then the mail, of
            which there is never more than one message of the largest size (feature_store.mailbox.MAX_MAIL_BYTES).
        """
        message, poll = await in_thread(self._check_poll, data)  # type: ignore[misc]  # a coroutine function
        mail = await self._mailbox.receive(message.header.sender, poll.after, poll.wait_s)
        if not mail:
            self._relays.emptied(message.header.sender)
        after = mail[-1][0] if mail else poll.after
        first: Message = await in_thread(self._answer, message.header.sender, after)  # type: ignore[misc]
        return b"".join((frame([first]), *(frames for _, frames in mail)))

    def _check_poll(self, data: bytes) -> tuple[Message, Poll]:
        messages = read_frames(data, max_messages=2)
        if not messages or messages[0].header.kind != "poll" or messages[0].header.recipient != COORDINATOR:
            raise ProtocolViolation("asking for mail takes one message of kind poll, for the coordinator")
        message, proof = messages[0], messages[1] if len(messages) == 2 else None
        party = self._sender(message)
        with self._lock:
            if message.header.sequence <= self._polled.get(party.party_id, 0):
                raise Replayed(f"poll {message.header.sequence} of {party.party_id!r} was seen before")
            self._polled[party.party_id] = message.header.sequence
        poll = Poll.decode(self._keys.open(message))
        check_facts(poll.facts)
        self._contacts[party.party_id] = self._clock()
        self.witnesses.compare(party.party_id, poll, proof)
        self._write_contact(party, message, poll)
        return message, poll

    def _write_contact(self, party: PartyRecord, message: Message, poll: Poll) -> None:
        written_at, before = self._written.get(party.party_id, (-CONTACT_S, None))
        news = before is None or (before.facts, before.version) != (poll.facts, poll.version)
        if not news and time.monotonic() - written_at < CONTACT_S:
            return
        numbered, sequence = f"poll:{party.party_id}", message.header.sequence
        with self._database.write() as connection:
            if before is None:
                # The first poll since this process started: an old one, recorded and sent again, ends here.
                self._sequences.check(numbered, sequence, verify_key=party.verify_key, connection=connection)
            head = Head(poll.journal_seq, poll.journal_hash) if poll.journal_seq else EMPTY
            facts = dict(poll.facts) | {"version": poll.version}
            self._parties.contact(party.party_id, self._clock(), facts, head, connection=connection)
            self._sequences.taken(numbered, sequence, verify_key=party.verify_key, connection=connection)
        self._written[party.party_id] = (time.monotonic(), poll)

    def _answer(self, party_id: str, after: str) -> Message:
        head = self._ledger.head()
        body = Mail(after=after, coordinator_seq=head.seq, coordinator_hash=head.hash).encode()
        return self._post_office.sign("poll", party_id, body)

    def _take(self, message: Message) -> None:
        header = message.header
        # One moment of the journal for everything that is looked up: a transaction each costs more than the looking.
        with self._database.read() as connection:
            party = self._sender(message, connection)
            if party.role not in _ROLES_OF.get(header.kind, ()):
                raise ProtocolViolation(f"{party.role} {party.party_id!r} may not send a message of kind {header.kind}")
            if (header.kind == "input-share") == (header.recipient == COORDINATOR):
                raise ProtocolViolation(f"a message of kind {header.kind} is not for {header.recipient!r}")
            current = None if header.kind in ANSWER_KINDS else self._round(message, party, connection)
            if current is not None and header.kind == "input-share":
                self._check_share(message, current, connection)
                self._relays.check(message, current, self._part(message.header.task_digest, connection).columns)
        if current is None:
            self._wake(self._take_answer(message, party))
            return
        if header.kind == "input-share":
            self._relay(message, current)
        else:
            self._act(message, party, current)
        self._wake(current.job_id)
        if header.kind == "refused" and party.role == "tallier":
            following = self._turns.failed(current.round_digest)
            if following is not None:
                self._wake(following)

    def _take_answer(self, message: Message, party: PartyRecord) -> str:
        """What an agent says to a proposal, and its sequence number, in one transaction; the job it is about.

        Raises:
            WrongDigest: there is no such job, it is of another task, or the agent takes no part in it.
        """
        header = message.header
        said = read_answer(header.kind, self._keys.open(message))
        try:
            job = self._jobs.get(said.job_id)
        except NotFound:
            raise WrongDigest("the answer is about a job that this coordinator never proposed") from None
        task = self._tasks.get(job.task_digest)
        if header.task_digest != task.digest or party.party_id not in task.participants:
            raise WrongDigest("the answer is about a job of another task, or one the sender has no part in")
        kept = self._proposals.take(job, task, party.party_id, said)
        with self._database.write() as connection:
            self._sequences.check(header.sender, header.sequence, verify_key=party.verify_key, connection=connection)
            if self._jobs.willingness.report(job.job_id, party.party_id, kept, connection=connection):
                self._jobs.touch(job.job_id, connection=connection)
            self._sequences.taken(header.sender, header.sequence, verify_key=party.verify_key, connection=connection)
        return job.job_id

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

    def _sender(self, message: Message, connection: Connection | None = None) -> PartyRecord:
        party = self._active(message.header.sender, connection)
        verify(message, party.verify_key)
        return party

    def _active(self, party_id: str, connection: Connection | None = None) -> PartyRecord:
        try:
            party = self._parties.get(party_id, connection=connection)
        except NotFound:
            raise NotEnrolled(f"no party {party_id!r} is enrolled; ask the administrator") from None
        if party.state != "active":
            raise NotEnrolled(f"the keys of {party.party_id!r} were revoked; ask the administrator")
        return party

    def _round(self, message: Message, party: PartyRecord, connection: Connection) -> RoundRecord:
        """The open round a message belongs to.

        Raises:
            WrongDigest: no such round, another task, a round that is over, or one the sender has no part in.
        """
        header = message.header
        try:
            current = self._jobs.round_of(header.round_digest, connection=connection)
        except NotFound:
            raise WrongDigest("the message belongs to a round that this coordinator never opened") from None
        job = self._jobs.get(current.job_id, connection=connection)
        if job.task_digest != header.task_digest:
            raise WrongDigest("the message names another task than its round is of")
        if current.state not in _OPEN_STATES or job.state not in ("collecting", "tallying"):
            raise WrongDigest("the round is over, or was not begun; nothing more is taken for it")
        if party.role == "agent" and party.party_id not in self._part(job.task_digest, connection).participants:
            raise WrongDigest(f"agent {party.party_id!r} takes no part in the task of this round")
        return current

    def _part(self, task_digest: str, connection: Connection) -> _Part:
        """What messages of a task are checked against; remembered, since it never changes and every message asks for
        it."""
        known = self._parts.get(task_digest)
        if known is None:
            record = self._tasks.get(task_digest, connection=connection)
            terms = record.task.winner_terms
            # Where rows are checked, ballots with a column for votes not cast travel beside the noise.
            has_rows = terms is not None and terms.row_total is not None
            columns = 2 * record.task.num_classes + 1 if has_rows else record.task.num_classes
            known = _Part(frozenset(record.participants), columns, record.task.release)
            while len(self._parts) >= MAX_TASKS_KNOWN:
                self._parts.pop(next(iter(self._parts)), None)
            self._parts[task_digest] = known
        return known

    def _check_share(self, message: Message, current: RoundRecord, connection: Connection) -> None:
        header = message.header
        try:
            tallier = self._parties.get(header.recipient, connection=connection)
        except NotFound:
            tallier = None
        if tallier is None or tallier.role != "tallier" or tallier.state != "active" or not header.is_sealed:
            raise ProtocolViolation("a share goes to an enrolled tallier, sealed to its key")
        if current.state != "asked":
            # The contributors are fixed; a late share could only be refused at the tallier.
            raise WrongDigest("the contributors of this round are fixed; the agent can take part in the next")

    def _relay(self, message: Message, current: RoundRecord) -> None:
        header = message.header
        if not current.has_shares:
            # Durable before it leaves: a charge is given back only where no share did.
            self._jobs.note_share(current.job_id, current.number)
        with self._lock:
            key = (header.sender, header.recipient)
            if header.sequence <= self._relayed.get(key, 0):
                raise Replayed(
                    f"message {header.sequence} of {header.sender!r} for {header.recipient!r} was taken before"
                )
            self._mailbox.send(header.recipient, frame([message]), message_id=message.message_id)
            self._relayed[key] = header.sequence
        self._relays.sent(message)

    def _act(self, message: Message, party: PartyRecord, current: RoundRecord) -> None:
        """The effect of a message to the coordinator and its sequence number, in one transaction."""
        header, job_id, number = message.header, current.job_id, current.number
        body = self._keys.open(message)
        with self._database.write() as connection:
            release = self._part(header.task_digest, connection).release
            self._sequences.check(header.sender, header.sequence, verify_key=party.verify_key, connection=connection)
            if header.kind == "holdings":
                holdings = {agent: sharing.hex() for agent, sharing in holdings_from_bytes(body).items()}
                self._jobs.report_holdings(job_id, number, party.party_id, holdings, connection=connection)
            elif header.kind == "refused":
                told = Refusal.decode(body)
                self._jobs.report_refusal(
                    job_id, number, party.party_id, told.sentence, told.is_final, connection=connection
                )
            elif header.kind == "aggregate-share":
                aggregate = aggregate_from_bytes(body)
                if aggregate.round.digest != current.round_digest or aggregate.tallier != party.tallier:
                    raise WrongDigest("a tallier's sum is of another round, or of another tallier")
                if release != "histogram":
                    raise ProtocolViolation("the sums of a winner round stay with the talliers; none is taken here")
                self._aggregates.put(current.round_digest, party.party_id, body, connection=connection)
            elif header.kind == "winner":
                winner = winner_from_bytes(body)
                if winner.round_digest != current.round_digest or winner.tallier != party.tallier:
                    raise WrongDigest("a tallier's winners are of another round, or of another tallier")
                if release != "winner":
                    raise ProtocolViolation("the task of this round releases the histogram; it takes no winners")
                self._aggregates.put(current.round_digest, party.party_id, body, connection=connection)
            self._sequences.taken(header.sender, header.sequence, verify_key=party.verify_key, connection=connection)
