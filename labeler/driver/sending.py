"""Send: messages that leave after a turn's commit, written, signed, and sent in one pipeline; kill points for tests.

A lost message is asked for again; a job whose messages cannot be written affects only itself. The messages that ask a
round are made once before it is charged for. So a batch that is too large for a message costs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.driver.mail import Letter, Mailbox
from labeler.driver.reading import TurnPlan
from labeler.errors import LabelerError, ProtocolViolation, TooLarge, Unavailable, WrongDigest
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.jobs import JobRecord
from labeler.ledger.ledger import Ledger
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, SIGNATURE_BYTES, Kind, Message, frame
from labeler.messages.bodies import Ask, OpenRound, Proposal, Settled, SumRequest, TallierKey, Withdrawn
from labeler.rounds import effects as fx
from labeler.rounds.effects import JobRun, Party, RoundRun, Send
from labeler.system.faults import fault_point
from labeler.system.keys import PartyKeys
from labeler.tally import QueryBatch
from labeler.task import Task

log = logging.getLogger("labeler.conductor")

SUM_GRACE_S = 3600.0
"""How long talliers keep the shares of a round after its job's deadline, so that paid rounds can still be opened."""

BYTES_PER_ENTRY = 8
SHARE_OVERHEAD_BYTES = 8 * 1024
"""Most bytes that the seal and the head of a share add to its numbers."""

MAX_SHARES_WAITING = 4

_SETTLED = Settled().encode()


class Questions(Protocol):
    """The maker of jobs' questions."""

    def look(self, job: JobRecord, task: Task) -> NDArray[np.int16] | None:
        """Return the questions of a job, shape (queries, dimension). If there are none yet, request them and return
        None.

        Raises:
            LabelerError: they cannot be made; TryAgain if they may be later.
        """

    def has_features(self, job: JobRecord, task: Task) -> bool:
        """Return whether a job's uploaded images are decoded; if not, request it.

        Raises:
            LabelerError: they cannot be decoded; TryAgain if they may be later.
        """

    def read(self, job_id: str) -> NDArray[np.int16]:
        """Return the questions of a job that has them, shape (queries, dimension).

        Raises:
            BadData: they cannot be read.
        """


class Writer(Protocol):
    """Delivery of the machine's messages to their recipients: written and signed (`Sender`), or passed directly."""

    def make(self, job: JobRun, number: int) -> None:
        """Make the messages of a round before it is charged for: an impossible ask costs nothing.

        Raises:
            LabelerError: it cannot be asked.
        """

    def letters(self, job: JobRun, send: Send, head: Head) -> list[Letter]:
        """Return the messages of one effect; the stores of its turn are durable by now.

        Args:
            job: as it is after the step.
            head: of the ledger, including the charge if sums are asked for.
        """


class PostOffice:
    """Signs the coordinator's messages."""

    def __init__(self, *, keys: PartyKeys, sequences: Sequences) -> None:
        self._keys = keys
        self._sequences = sequences

    def letter(self, kind: Kind, recipient: str, body: bytes, *, task_digest: str, round_digest: str = "") -> Letter:
        """Return one message, ready for its recipient's mail."""
        return letter_of(self.sign(kind, recipient, body, task_digest=task_digest, round_digest=round_digest))

    def sign(
        self, kind: Kind, recipient: str, body: bytes, *, task_digest: str = "", round_digest: str = ""
    ) -> Message:
        """Return a message of the coordinator, with the next sequence number for its recipient."""
        return self._keys.message(
            kind,
            sender=COORDINATOR,
            recipient=recipient,
            task_digest=task_digest,
            round_digest=round_digest,
            sequence=self._sequences.next(recipient),
            body=body,
        )


def letter_of(message: Message) -> Letter:
    """Return a signed message in the mailbox's form."""
    return Letter(message.header.recipient, frame([message]), message.message_id)


class Relays:
    """A limit on one agent's entries in a tallier's mail: shares of their round's size, and a few of each.

    A share is sealed, so the coordinator cannot look into it, but it can bound size and number. An honest agent sends
    the same share again when it is asked again, so a few are accepted. More are refused until the tallier's mail is
    empty, which happens once the tallier took them, and also if Redis lost them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Counter[tuple[str, str]]] = {}

    def check(self, message: Message, num_queries: int, num_classes: int) -> None:
        """Refuse a share that is larger than one of its round, or one too many.

        Raises:
            TooLarge: more bytes than the votes of the round take.
            ProtocolViolation: several shares of this agent for this round are in the tallier's mail already.
        """
        header = message.header
        most = BYTES_PER_ENTRY * num_queries * num_classes + SHARE_OVERHEAD_BYTES
        if len(message.body) > most:
            raise TooLarge(
                f"a share of {num_queries} queries and {num_classes} classes has at most {most} bytes, found "
                f"{len(message.body)}"
            )
        with self._lock:
            count = self._waiting.get(header.recipient, Counter())[header.sender, header.round_digest]
        if count >= MAX_SHARES_WAITING:
            raise ProtocolViolation(
                f"{count} shares of {header.sender!r} for one round lie in the mail of {header.recipient!r} already; "
                "no more are taken until it has read them"
            )

    def sent(self, message: Message) -> None:
        """Count a share that was put into its tallier's mail."""
        header = message.header
        with self._lock:
            self._waiting.setdefault(header.recipient, Counter())[header.sender, header.round_digest] += 1

    def emptied(self, recipient: str) -> None:
        """Reset the count of a party that asked for its mail and found none: counted shares were read or lost."""
        with self._lock:
            self._waiting.pop(recipient, None)


class Sender:
    """Writes and signs messages."""

    def __init__(self, post_office: PostOffice, questions: Questions) -> None:
        self._post_office = post_office
        self._questions = questions

    def make(self, job: JobRun, number: int) -> None:
        """See Writer.

        Raises:
            TooLarge, BadData, WrongDigest: it cannot be asked.
            Unavailable: a tallier is not enrolled yet.
        """
        one = job.rounds[number]
        keys = {agent: job.parties[agent].verify_key for agent in job.agents if agent in job.parties}
        largest = max(len(self._ask(job, one)), len(_opening(job, one, 0, keys)))
        if largest > MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - 2 * SIGNATURE_BYTES:
            raise TooLarge(
                f"a batch of {one.num_queries} queries makes a message of {largest} bytes, and at most "
                f"{MAX_MESSAGE_BYTES} are sent; ask fewer queries at once, or use a backbone with shorter features"
            )

    def letters(self, job: JobRun, send: Send, head: Head) -> list[Letter]:
        """See Writer; shares that are passed on, and notes to watchers, are not the coordinator's messages."""
        found: list[Letter]
        match send:
            case fx.SendProposals():
                proposed = Proposal(
                    job_id=job.job_id,
                    task=job.task,
                    sizes=tuple(one.num_queries for one in job.rounds),
                    talliers=tallier_keys(job.parties, job.task.talliers),
                    expires_at=job.expires_at_s,
                    requester=job.requester,
                )
                return self._to_all("proposal", send.agents, job, None, proposed.encode())
            case fx.SendWithdrawn():
                return self._to_all("withdrawn", send.agents, job, None, Withdrawn(job.job_id).encode())
            case fx.OpenAt():
                one = job.rounds[send.number]
                found = []
                for tallier in send.talliers:
                    index = job.parties[tallier].tallier
                    body = _opening(job, one, -1 if index is None else index, one.participants)
                    found += self._to_all("open-round", [tallier], job, one, body)
                return found
            case fx.SendAsks():
                one = job.rounds[send.number]
                return self._to_all("ask", send.agents, job, one, self._ask(job, one))
            case fx.AskForSums():
                one = job.rounds[send.number]
                request = SumRequest(frozenset(one.contributors), ledger_seq=head.seq, ledger_hash=head.hash)
                return self._to_all("sum", send.talliers, job, one, request.encode())
            case fx.TellSettled():
                rounds = [job.rounds[number] for number in send.numbers]
                return [
                    letter
                    for one in rounds
                    for letter in self._to_all("answered", sorted(one.participants), job, one, _SETTLED)
                ]
            case _:
                return []

    def _to_all(
        self, kind: Kind, recipients: tuple[str, ...] | list[str], job: JobRun, one: RoundRun | None, body: bytes
    ) -> list[Letter]:
        digest = "" if one is None else one.round_digest
        return [
            self._post_office.letter(kind, recipient, body, task_digest=job.task.digest, round_digest=digest)
            for recipient in recipients
        ]

    def _ask(self, job: JobRun, one: RoundRun) -> bytes:
        talliers = tallier_keys(job.parties, job.task.talliers)
        batch = batch_of(self._questions.read(job.job_id), job, one)
        if batch.digest != one.batch_digest:
            raise WrongDigest("the prepared questions are not those the round was made of; submit the job again")
        return Ask(task=job.task, batch=batch, talliers=talliers, expires_at=job.expires_at_s).encode()


def batch_of(features: NDArray[np.int16], job: JobRun, one: RoundRun) -> QueryBatch:
    """Return the questions of one round, out of all those of its job.

    Raises:
        BadData: it is a step of training, and an earlier step is not opened.
    """
    # Steps of training ask about the same rows again, with the model of that moment.
    start = (one.first_query - job.rounds[0].first_query) % job.task.rows
    return QueryBatch(features[start : start + one.num_queries], one.first_query, job.model_asked(one))


def tallier_keys(parties: Mapping[str, Party], count: int) -> tuple[TallierKey, ...]:
    """Return the keys with which an agent seals its shares; it compares them with those its own site has pinned.

    Raises:
        Unavailable: one of the talliers is not enrolled.
    """
    by_number = {one.tallier: one for one in parties.values() if one.tallier is not None}
    missing = [number for number in range(count) if number not in by_number]
    if missing:
        raise Unavailable(f"tallier {missing[0]} of {count} is not enrolled; an administrator has to enrol its keys")
    found = [by_number[number] for number in range(count)]
    return tuple(TallierKey(tallier_id=one.party_id, seal_key=one.seal_key, verify_key=one.verify_key) for one in found)


def _opening(job: JobRun, one: RoundRun, tallier: int, participants: Mapping[str, str]) -> bytes:
    return OpenRound(
        round=job.round_value(one),
        tallier=tallier,
        participants=participants,
        expires_at=job.expires_at_s + SUM_GRACE_S,
    ).encode()


def note_stored(plan: TurnPlan) -> None:
    """Kill point for tests: the stores of a turn are durable, and nothing has left."""
    for kind, name in (
        (fx.FixContributors, "coordinator.agreed"),
        (fx.Post, "coordinator.posted"),
        (fx.StoreRelease, "coordinator.released"),
    ):
        if any(isinstance(one, kind) for stores in plan.stores.values() for one in stores):
            fault_point(name)


def _is_no_opening(send: tuple[str, Send]) -> bool:
    """Sort key: a tallier learns of a round before it gets a share of it."""
    return not isinstance(send[1], fx.OpenAt)


def send_off(plan: TurnPlan, sender: Writer, ledger: Ledger, mailbox: Mailbox) -> LabelerError | None:
    """Send everything of a turn at once. Return the error if that failed: it will be asked for again."""
    letters: list[Letter] = []
    tell: dict[str, None] = {}
    head = ledger.head() if any(isinstance(send, fx.AskForSums) for _, send in plan.sends) else EMPTY
    relayed = [letter_of(incoming.message) for incoming in plan.relays]
    for job_id, send in sorted(plan.sends, key=_is_no_opening):
        if isinstance(send, fx.Tell):
            tell[job_id] = None
            continue
        if not isinstance(send, fx.OpenAt):
            letters, relayed = letters + relayed, []
        try:
            letters += sender.letters(plan.runs[job_id], send, head)
        except LabelerError as error:
            # Only this job fails; other messages leave. Its current round sends first, so that failure is kept.
            plan.broken.setdefault(job_id, fx.JobFailed(error, getattr(send, "number", None)))
    letters += relayed
    try:
        if letters or tell:
            ended = [job_id for job_id in tell if plan.runs[job_id].state not in fx.UNFINISHED]
            mailbox.send_all(letters, tell=tell, ended=ended)
    except LabelerError as error:
        log.warning("messages could not be sent", extra={"problem": error.problem_type, "letters": len(letters)})
        return error
    for kind, name in (
        (fx.SendProposals, "coordinator.proposed"),
        (fx.SendAsks, "coordinator.asked"),
        (fx.AskForSums, "coordinator.sum-asked"),
    ):
        if any(isinstance(send, kind) for _, send in plan.sends):
            fault_point(name)
    for job_id in {one for one, stores in plan.stores.items() if any(isinstance(s, fx.StoreRelease) for s in stores)}:
        log.info("round opened", extra={"job_id": job_id})
    return None
