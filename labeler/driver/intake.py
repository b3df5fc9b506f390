"""What comes to the coordinator's driver: messages of parties, what others want written, and wakes.

Who may send what is checked here, and the body decoded; nothing is looked up but the party. Whether a message belongs
to a round that is open, and whether its number is new, is decided when the driver takes it.

What others want written (a job that was submitted) shares the commit of a turn: a commit costs the same however much it
holds. Each errand is undone by itself where it is refused, and takes nothing else of the turn with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection
from labeler.ledger.parties import PartyRecord
from labeler.messages import COORDINATOR, Kind, Message
from labeler.messages.bodies import (
    ANSWER_KINDS,
    AnswerSent,
    Declined,
    Refusal,
    Willing,
    aggregate_from_bytes,
    holdings_from_bytes,
    winner_from_bytes,
)
from labeler.rounds.effects import (
    AgentDone,
    Event,
    HoldingsCame,
    MessageEvent,
    ProposalReply,
    RefusalCame,
    ReplyCame,
    ShareCame,
    SumCame,
)
from labeler.system.keys import PartyKeys

Result = TypeVar("Result")

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
        event: what it is to the machine.
        job_id: the job it is about, where the body names it; else empty, and the round of its header says it.
        head: of the sender's own journal, where it came with an answer: kept with each message of that answer, so that
            no share of it is passed on before.
    """

    message: Message
    verify_key: str
    event: MessageEvent
    job_id: str = ""
    head: Head | None = None


@dataclass
class Delivery:
    """Messages of one transmission, and whoever waits for what becomes of them.

    Attributes:
        messages: to be taken in order, up to the first that is refused.
        error: why what came behind them is not taken; None where nothing did.
        done: called once, when the effect of those that were taken is durable: with how many, or with the error.
    """

    messages: tuple[Incoming, ...]
    error: LabelerError | None
    done: Callable[[int | LabelerError], None] = field(repr=False)


def check_role(message: Message, party: PartyRecord) -> None:
    """Refuse what a party of this role does not send, or not to this recipient.

    Raises:
        ProtocolViolation: see above.
    """
    header = message.header
    if party.role not in _ROLES_OF.get(header.kind, ()):
        raise ProtocolViolation(f"{party.role} {party.party_id!r} may not send a message of kind {header.kind}")
    if (header.kind == "input-share") == (header.recipient == COORDINATOR):
        raise ProtocolViolation(f"a message of kind {header.kind} is not for {header.recipient!r}")
    if header.kind == "input-share" and not header.is_sealed:
        raise ProtocolViolation("a share goes to an enrolled tallier, sealed to its key")


def incoming(message: Message, party: PartyRecord, keys: PartyKeys) -> Incoming:
    """A checked message and its event.

    Args:
        message: its signature was checked with the party's key.
        party: its sender, active.
        keys: of the coordinator, which opens what is sealed to it.

    Raises:
        ProtocolViolation: this party may not send this, or the body is none of its kind.
        Forged: the body does not open.
    """
    check_role(message, party)
    header, who = message.header, party.party_id
    of = (header.round_digest, header.task_digest)
    job_id, head = "", None
    event: MessageEvent
    if header.kind == "input-share":
        return Incoming(message, party.verify_key, ShareCame(*of, who, header.recipient))
    body = keys.open(message)
    if header.kind in ANSWER_KINDS:
        said = read_answer(header.kind, body)
        job_id, event = said.job_id, ReplyCame(who, header.task_digest, said_of(said))
    elif header.kind == "holdings":
        holdings = {agent: sharing.hex() for agent, sharing in holdings_from_bytes(body).items()}
        event = HoldingsCame(*of, who, holdings)
    elif header.kind == "refused":
        told = Refusal.decode(body)
        event = RefusalCame(*of, who, told.sentence, told.is_final)
    elif header.kind == "aggregate-share":
        aggregate = aggregate_from_bytes(body)
        event = SumCame(*of, who, "histogram", (aggregate.round.digest, aggregate.tallier), body)
    elif header.kind == "winner":
        winner = winner_from_bytes(body)
        event = SumCame(*of, who, "winner", (winner.round_digest, winner.tallier), body)
    else:
        sent = AnswerSent.decode(body)
        event, head = AgentDone(*of, who), Head(sent.journal_seq, sent.journal_hash)
    return Incoming(message, party.verify_key, event, job_id, head)


def with_heads(messages: Sequence[Incoming]) -> tuple[Incoming, ...]:
    """Messages of one transmission, each with the furthest head that its sender's answers in it carry."""
    heads: dict[str, Head] = {}
    for one in messages:
        sender = one.message.header.sender
        if one.head is not None and (sender not in heads or one.head.seq > heads[sender].seq):
            heads[sender] = one.head
    return tuple(replace(one, head=heads.get(one.message.header.sender)) for one in messages)


def read_answer(kind: Kind, body: bytes) -> Willing | Declined:
    """The body of a "willing" or "declined".

    Raises:
        ProtocolViolation: it is none.
    """
    return Willing.decode(body) if kind == "willing" else Declined.decode(body)


def said_of(said: Willing | Declined) -> ProposalReply:
    """What an answer to a proposal amounts to."""
    if isinstance(said, Willing):
        return ProposalReply("willing", until_s=said.until)
    refusal = said.refusal
    return ProposalReply("declined" if refusal.is_final else "later", refusal.reason, refusal.sentence)


@dataclass(eq=False)
class Errand:
    """Something to be written, and whoever waits for it.

    Attributes:
        write: writes it within the transaction of a turn. It may run again, where the turn is done again piece by
            piece; what it did before was undone then. A `LabelerError` of it is a refusal.
        done: called once: with None when it is durable, else with why nothing of it was kept.
    """

    write: Callable[[Connection], None] = field(repr=False)
    done: Callable[[BaseException | None], None] = field(repr=False)
    is_settled: bool = False

    def settle(self, error: BaseException | None) -> None:
        """Tell who waits; the first time counts."""
        if not self.is_settled:
            self.is_settled = True
            self.done(error)


def run_errand(hand_in: Callable[[Errand], None], step: Callable[[Connection], Result]) -> Result:
    """Have a step written by the driver, and wait in this thread until it is durable.

    Args:
        step: see `Errand.write`.

    Returns:
        What the step returned.

    Raises:
        LabelerError: it was refused, or the journal cannot take it now; nothing of it was kept.
    """
    is_done = threading.Event()
    results: list[Result] = []
    failures: list[BaseException] = []

    def write(connection: Connection) -> None:
        results.clear()
        results.append(step(connection))

    def done(error: BaseException | None) -> None:
        if error is not None:
            failures.append(error)
        is_done.set()

    hand_in(Errand(write, done))
    is_done.wait()
    if failures:
        raise failures[0]
    return results[0]


class Inbox:
    """What others say to the driver between two turns; any thread may say it.

    Who waits for what becomes of a delivery or an errand is told also when the driver ends. Nobody waits for a wake: a
    job that was changed is found by looking, too, only later.
    """

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self.deliveries: list[Delivery] = []
        self.errands: list[Errand] = []
        self.told: list[tuple[str, Event]] = []
        self.woken: dict[str, None] = {}
        self._rung = False
        self._closed = False

    def deliver(self, delivery: Delivery) -> None:
        """Have messages taken at the next turn; `delivery.done` is told what became of them."""
        with self._bell:
            if not self._closed:
                self.deliveries.append(delivery)
                self._bell.notify()
                return
        delivery.done(_stopping())

    def hand_in(self, errand: Errand) -> None:
        """Have something written in the next turn's transaction; `errand.done` is told what became of it."""
        with self._bell:
            if not self._closed:
                self.errands.append(errand)
                self._bell.notify()
                return
        errand.settle(_stopping())

    def tell(self, job_id: str, event: Event) -> None:
        """Have an event of a job taken at the next turn, from a party of this process."""
        with self._bell:
            self.told.append((job_id, event))
            self._bell.notify()

    def wake(self, job_id: str) -> None:
        """Something about a job was changed in the journal, or around it: read it again at the next turn."""
        with self._bell:
            self.woken[job_id] = None
            self._bell.notify()

    def wake_again(self, job_ids: Iterable[str]) -> None:
        """Jobs that a turn could not look at; they come before those that were woken since."""
        with self._bell:
            self.woken = dict.fromkeys(job_ids) | self.woken

    def ring(self) -> None:
        """End a `wait` at once."""
        with self._bell:
            self._rung = True
            self._bell.notify()

    def take(self) -> tuple[list[Delivery], list[Errand], list[tuple[str, Event]], dict[str, None]]:
        """Everything that was said since the last turn."""
        with self._bell:
            deliveries, self.deliveries = self.deliveries, []
            errands, self.errands = self.errands, []
            told, self.told = self.told, []
            woken, self.woken = self.woken, {}
        return deliveries, errands, told, woken

    def close(self) -> None:
        """Take nothing more; whoever waits is told to send again."""
        with self._bell:
            self._closed = True
        deliveries, errands, _, _ = self.take()
        for delivery in deliveries:
            delivery.done(_stopping())
        for errand in errands:
            errand.settle(_stopping())

    def wait(self, pause_s: Callable[[], float]) -> None:
        """Wait until there is something to do, or `ring`.

        Args:
            pause_s: for how long at most; asked once nothing is there.
        """
        with self._bell:
            waiting = (self.deliveries, self.errands, self.told, self.woken)
            if self._rung or self._closed or any(waiting):
                self._rung = False
                return
            longest_s = pause_s()
            if longest_s > 0:
                self._bell.wait(longest_s)
            self._rung = False


def _stopping() -> LabelerError:
    return Unavailable("the coordinator is stopping; send again in a moment")
