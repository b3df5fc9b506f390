"""The machine's sends, written and signed: one body for all who get it, one pipeline for all of a turn.

What a round asks is made before it is charged for and kept until its agents have answered, so that a batch that fits
into no message costs nothing and is not encoded twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.driving.post_office import PostOffice
from feature_store.journal.chain import Head
from feature_store.mailbox import Letter
from labeler.batch import QueryBatch
from labeler.errors import TooLarge, Unavailable, WrongDigest
from labeler.messages import MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, SIGNATURE_BYTES, Kind
from labeler.messages.rounds import Ask, OpenRound, Proposal, Settled, SumRequest, TallierKey, Withdrawn
from labeler.rounds.effects import (
    AskForSums,
    OpenAt,
    Party,
    Send,
    SendAsks,
    SendProposals,
    SendWithdrawn,
    TellSettled,
)
from labeler.rounds.job_state import JobRun, RoundRun

SUM_GRACE_S = 3600.0
"""How long talliers keep the shares of a round beyond its job's deadline, so that what was paid for can be opened."""

_KEPT_BYTES = 64 * 1024 * 1024
"""Of asks that may be sent again; what does not fit is made again."""

_SETTLED = Settled().encode()


class Questions(Protocol):
    """Where the questions of a job are."""

    def read(self, job_id: str) -> NDArray[np.int16]:
        """The questions of a job that has them, shape (queries, dimension).

        Raises:
            BadData: they cannot be read.
        """


class Writer(Protocol):
    """How what the machine sends gets to its recipients: written and signed (`Sender`), or handed over."""

    def make(self, job: JobRun, number: int) -> None:
        """Make what a round sends before it is charged for: what cannot be asked costs nothing.

        Raises:
            LabelerError: it cannot be asked.
        """

    def letters(self, job: JobRun, send: Send, head: Head) -> list[Letter]:
        """The messages of one effect; what its turn stored is durable by now.

        Args:
            job: as it is after the step.
            head: of the ledger, with the charge in it where sums are asked for.
        """

    def forget(self, round_digests: list[str]) -> None:
        """These rounds ask nobody any more."""


class Sender:
    """Writes and signs messages."""

    def __init__(self, post_office: PostOffice, questions: Questions) -> None:
        self._post_office = post_office
        self._questions = questions
        self._asks: OrderedDict[str, tuple[tuple[TallierKey, ...], bytes]] = OrderedDict()
        self._kept_bytes = 0

    def make(self, job: JobRun, number: int, features: NDArray[np.int16] | None = None) -> None:
        """See Writer.

        Raises:
            TooLarge, BadData, WrongDigest: it cannot be asked.
            Unavailable: a tallier is not enrolled yet.
        """
        one = job.rounds[number]
        keys = {agent: job.parties[agent].verify_key for agent in job.agents if agent in job.parties}
        largest = max(len(self._ask(job, one, features)), len(_opening(job, one, 0, keys)))
        if largest > MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - 2 * SIGNATURE_BYTES:
            self.forget([one.round_digest])
            raise TooLarge(
                f"a batch of {one.num_queries} queries makes a message of {largest} bytes, and at most "
                f"{MAX_MESSAGE_BYTES} are sent; ask fewer queries at once, or use a backbone with shorter features"
            )

    def letters(self, job: JobRun, send: Send, head: Head) -> list[Letter]:
        """See Writer; a share that is passed on, and word to watchers, are no messages of ours."""
        found: list[Letter]
        match send:
            case SendProposals():
                proposed = Proposal(
                    job_id=job.job_id,
                    task=job.task,
                    sizes=tuple(one.num_queries for one in job.rounds),
                    talliers=tallier_keys(job.parties, job.task.talliers),
                    expires_at=job.expires_at_s,
                    requester=job.requester,
                )
                return self._to_all("proposal", send.agents, job, None, proposed.encode())
            case SendWithdrawn():
                return self._to_all("withdrawn", send.agents, job, None, Withdrawn(job.job_id).encode())
            case OpenAt():
                one = job.rounds[send.number]
                found = []
                for tallier in send.talliers:
                    index = job.parties[tallier].tallier
                    body = _opening(job, one, -1 if index is None else index, one.participants)
                    found += self._to_all("open-round", [tallier], job, one, body)
                return found
            case SendAsks():
                one = job.rounds[send.number]
                return self._to_all("ask", send.agents, job, one, self._ask(job, one))
            case AskForSums():
                one = job.rounds[send.number]
                request = SumRequest(contributors=one.contributors, ledger_seq=head.seq, ledger_hash=head.hash)
                return self._to_all("sum", send.talliers, job, one, request.encode())
            case TellSettled():
                rounds = [job.rounds[number] for number in send.numbers]
                self.forget([one.round_digest for one in rounds])
                return [
                    letter
                    for one in rounds
                    for letter in self._to_all("answered", sorted(one.participants), job, one, _SETTLED)
                ]
            case _:
                return []

    def forget(self, round_digests: list[str]) -> None:
        """See Writer."""
        for digest in round_digests:
            _, body = self._asks.pop(digest, ((), b""))
            self._kept_bytes -= len(body)

    def _to_all(
        self, kind: Kind, recipients: tuple[str, ...] | list[str], job: JobRun, one: RoundRun | None, body: bytes
    ) -> list[Letter]:
        digest = "" if one is None else one.round_digest
        return [
            self._post_office.letter(kind, recipient, body, task_digest=job.task.digest, round_digest=digest)
            for recipient in recipients
        ]

    def _ask(self, job: JobRun, one: RoundRun, features: NDArray[np.int16] | None = None) -> bytes:
        talliers = tallier_keys(job.parties, job.task.talliers)
        known, body = self._asks.get(one.round_digest, ((), b""))
        if known == talliers:
            return body
        read = self._questions.read(job.job_id) if features is None else features
        batch = batch_of(read, job, one)
        if batch.digest != one.batch_digest:
            raise WrongDigest("the prepared questions are not those the round was made of; submit the job again")
        body = Ask(task=job.task, batch=batch, talliers=talliers, expires_at=job.expires_at_s).encode()
        self.forget([one.round_digest])
        self._asks[one.round_digest] = (talliers, body)
        self._kept_bytes += len(body)
        while self._kept_bytes > _KEPT_BYTES and len(self._asks) > 1:
            self.forget([next(iter(self._asks))])
        return body


def batch_of(features: NDArray[np.int16], job: JobRun, one: RoundRun) -> QueryBatch:
    """The questions of one round, of all those of its job.

    Raises:
        BadData: it is a step of training, and one of those before it is not opened.
    """
    # Steps of training ask about the same rows again, and beside them about the model as it is then.
    start = 0 if job.task.traits.is_sampled else one.first_query - job.rounds[0].first_query
    return QueryBatch(features[start : start + one.num_queries], one.first_query, job.model_asked(one))


def tallier_keys(parties: Mapping[str, Party], count: int) -> tuple[TallierKey, ...]:
    """What an agent needs to seal its shares; it compares the keys with those its own site has pinned.

    Raises:
        Unavailable: one of them is not enrolled.
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
