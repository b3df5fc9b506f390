"""Input of the coordinator's driver: messages of parties, and wakes.

This module checks which party may send what, and decodes the body; it looks up nothing but the party. The driver later
decides whether a message belongs to an open round, and whether its number is new.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.ledger.chain import Head
from labeler.ledger.parties import PartyRecord
from labeler.messages import COORDINATOR, Message
from labeler.messages.bodies import (
    ANSWER_KINDS,
    AnswerSent,
    Declined,
    RefusalBody,
    Willing,
    aggregate_from_bytes,
    holdings_from_bytes,
    winner_from_bytes,
)
from labeler.rounds import effects as fx
from labeler.rounds.effects import Event, MessageEvent, ProposalReply
from labeler.system.keys import PartyKeys

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


@dataclass(frozen=True)
class Incoming:
    """A message whose sender, signature and form were checked.

    Attributes:
        verify_key: that its signature was checked with.
        event: its meaning for the machine.
        job_id: the job it is about, if the body names it; else empty, and the round in its header identifies the job.
        head: of the sender's own journal, if it came with an answer; stored with each message of that answer, so that
            no share of it is passed on earlier.
    """

    message: Message
    verify_key: str
    event: MessageEvent
    job_id: str = ""
    head: Head | None = None


@dataclass
class Delivery:
    """Messages of one transmission, and the caller that waits for their outcome.

    Attributes:
        messages: processed in order, up to the first that is refused.
        error: why the messages after them are not processed; None if there are none.
        done: called once, when the effect of the accepted ones is durable: with their number, or with the error.
    """

    messages: tuple[Incoming, ...]
    error: LabelerError | None
    done: Callable[[int | LabelerError], None] = field(repr=False)


def check_role(message: Message, party: PartyRecord) -> None:
    """Refuse a message that a party of this role may not send, or not to this recipient.

    Raises:
        ProtocolViolation: the role does not allow it.
    """
    header = message.header
    if party.role not in _ROLES_OF.get(header.kind, ()):
        raise ProtocolViolation(f"{party.role} {party.party_id!r} may not send a message of kind {header.kind}")
    if (header.kind == "input-share") == (header.recipient == COORDINATOR):
        raise ProtocolViolation(f"a message of kind {header.kind} is not for {header.recipient!r}")
    if header.kind == "input-share" and not header.is_sealed:
        raise ProtocolViolation("a share goes to an enrolled tallier, sealed to its key")


def incoming(message: Message, party: PartyRecord, keys: PartyKeys) -> Incoming:
    """Return a checked message with its event.

    Args:
        message: its signature was checked with the party's key.
        party: its sender, active.
        keys: of the coordinator, which opens what is sealed to it.

    Raises:
        ProtocolViolation: this party may not send this, or the body is invalid for its kind.
        Forged: the body does not open.
    """
    check_role(message, party)
    header, who = message.header, party.party_id
    of = (header.round_digest, header.task_digest)
    job_id, head = "", None
    event: MessageEvent
    if header.kind == "input-share":
        return Incoming(message, party.verify_key, fx.ShareCame(*of, who, header.recipient))
    body = keys.open(message)
    if header.kind in ANSWER_KINDS:
        if header.kind == "willing":
            yes = Willing.decode(body)
            job_id, reply = yes.job_id, ProposalReply("willing", until_s=yes.until)
        else:
            no = Declined.decode(body)
            answer: Literal["declined", "later"] = "declined" if no.refusal.is_final else "later"
            job_id, reply = no.job_id, ProposalReply(answer, no.refusal.reason, no.refusal.sentence)
        event = fx.ReplyCame(who, header.task_digest, reply)
    elif header.kind == "holdings":
        holdings = {agent: sharing.hex() for agent, sharing in holdings_from_bytes(body).items()}
        event = fx.HoldingsCame(*of, who, holdings)
    elif header.kind == "refused":
        told = RefusalBody.decode(body)
        event = fx.RefusalCame(*of, who, told.sentence, told.is_final)
    elif header.kind == "aggregate-share":
        aggregate = aggregate_from_bytes(body)
        event = fx.SumCame(*of, who, "histogram", (aggregate.round.digest, aggregate.tallier), body)
    elif header.kind == "winner":
        winner = winner_from_bytes(body)
        event = fx.SumCame(*of, who, "winner", (winner.round_digest, winner.tallier), body)
    else:
        sent = AnswerSent.decode(body)
        event, head = fx.AgentDone(*of, who), Head(sent.journal_seq, sent.journal_hash)
    return Incoming(message, party.verify_key, event, job_id, head)


def with_heads(messages: Sequence[Incoming]) -> tuple[Incoming, ...]:
    """Return messages of one transmission, each with the furthest head in its sender's answers."""
    heads: dict[str, Head] = {}
    for one in messages:
        sender = one.message.header.sender
        if one.head is not None and (sender not in heads or one.head.seq > heads[sender].seq):
            heads[sender] = one.head
    return tuple(replace(one, head=heads.get(one.message.header.sender)) for one in messages)


class Inbox:
    """Input for the driver between two turns; any thread may add to it.

    Callers that wait for a delivery are also notified when the driver ends. Nobody waits for a wake: a lost wake only
    delays a changed job until the next regular look.
    """

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self.deliveries: list[Delivery] = []
        self.told: list[tuple[str, Event]] = []
        self.woken: dict[str, None] = {}
        self._rung = False
        self._closed = False

    def deliver(self, delivery: Delivery) -> None:
        """Queue messages for the next turn; `delivery.done` gets the outcome."""
        with self._bell:
            if not self._closed:
                self.deliveries.append(delivery)
                self._bell.notify()
                return
        delivery.done(_stopping())

    def tell(self, job_id: str, event: Event) -> None:
        """Queue a job's event, from a party of this process, for the next turn."""
        with self._bell:
            self.told.append((job_id, event))
            self._bell.notify()

    def wake(self, job_id: str) -> None:
        """Read a job again at the next turn, because something about it was changed in the journal or around it."""
        with self._bell:
            self.woken[job_id] = None
            self._bell.notify()

    def wake_again(self, job_ids: Iterable[str]) -> None:
        """Queue jobs that a turn could not look at, before those that were woken since."""
        with self._bell:
            self.woken = dict.fromkeys(job_ids) | self.woken

    def ring(self) -> None:
        """End a `wait` at once."""
        with self._bell:
            self._rung = True
            self._bell.notify()

    def take(self) -> tuple[list[Delivery], list[tuple[str, Event]], dict[str, None]]:
        """Return all input since the last turn."""
        with self._bell:
            deliveries, self.deliveries = self.deliveries, []
            told, self.told = self.told, []
            woken, self.woken = self.woken, {}
        return deliveries, told, woken

    def close(self) -> None:
        """Accept nothing more; waiting callers get an error that asks them to send again."""
        with self._bell:
            self._closed = True
        for delivery in self.take()[0]:
            delivery.done(_stopping())

    def wait_for_input(self, pause_s: Callable[[], float]) -> None:
        """Wait until there is something to do, or `ring`.

        Args:
            pause_s: returns the longest wait; called once the queue is empty.
        """
        with self._bell:
            waiting = (self.deliveries, self.told, self.woken)
            if self._rung or self._closed or any(waiting):
                self._rung = False
                return
            longest_s = pause_s()
            if longest_s > 0:
                self._bell.wait(longest_s)
            self._rung = False


def _stopping() -> LabelerError:
    return Unavailable("the coordinator is stopping; send again in a moment")
