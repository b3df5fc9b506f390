"""From a message of a party to the event it is for the coordinator's machine; nothing is looked up but the party.

Who may send what is checked here, and the body decoded; whether it belongs to a round that is open, and whether its
number is new, is decided when the driver takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from feature_store.journal.chain import Head
from feature_store.journal.parties import PartyRecord
from feature_store.keys import PartyKeys
from labeler.errors import LabelerError, ProtocolViolation
from labeler.messages import COORDINATOR, Kind, Message
from labeler.messages.rounds import ANSWER_KINDS, AnswerSent, Declined, Refusal, Willing
from labeler.messages.shares import aggregate_from_bytes, holdings_from_bytes, winner_from_bytes
from labeler.rounds.effects import (
    AgentDone,
    Answered,
    HoldingsCame,
    MessageEvent,
    RefusalCame,
    Said,
    ShareCame,
    SumCame,
)

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
        job_id, event = said.job_id, Answered(who, header.task_digest, said_of(said))
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


def said_of(said: Willing | Declined) -> Said:
    """What an answer to a proposal amounts to."""
    if isinstance(said, Willing):
        return Said("willing", until_s=said.until)
    refusal = said.refusal
    return Said("declined" if refusal.is_final else "later", refusal.reason, refusal.sentence)
