"""What is said before anything is charged: a coordinator proposes a job, an agent says whether it will.

    proposal    coordinator -> agent   this task, rounds of these sizes, until this moment
    willing     agent -> coordinator   yes: the price is set aside in my own ledger until that moment
    declined    agent -> coordinator   no, and why; or not yet (a person has to approve first)
    withdrawn   coordinator -> agent   rounds of this job that were not asked will not be

Nothing here depends on a record. An agent decides from its policy, its approvals, its own ledger and what is public of
its shard; so a proposal is free for both, and who declines has lost nothing. What a yes is worth: a round that is
asked until the moment named finds its price covered. The site's policy is read again at the ask.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from labeler.errors import LabelerError, ProtocolViolation, WrongDigest
from labeler.messages.body_format import Body, read_json, write_json
from labeler.messages.envelope import Kind
from labeler.messages.rounds import Refusal, TallierKey, tallier_key_from, task_written_out
from labeler.messages.strict import Digest, PartyId, Printable, UnixTime, names_of, strict
from labeler.task import Task
from labeler.untrusted import canonical_json

ANSWER_KINDS: tuple[Kind, Kind] = ("willing", "declined")
"""What an agent says to a proposal."""

MAX_ROUNDS = 100_000
_MAX_QUERIES = 2**40


@strict("a proposal")
class _ProposalHead:
    """A proposal as it is written."""

    job_id: PartyId
    task: Annotated[Any, Field(description="a task")]
    task_digest: Digest
    sizes: Annotated[list[Any], Field(description="a list")]
    talliers: Annotated[list[Any], Field(description="a list")]
    expires_at: UnixTime


@strict("a proposal")
class Proposal:
    """Body of "proposal": a submitted job, fixed, that agents have not been asked about.

    Attributes:
        job_id: the coordinator's name for it.
        task: the whole task; its digest is computed by the agent.
        sizes: queries of each round, in order; each at least 1, together at most the task's.
        talliers: who would get the shares, as in an ask.
        expires_at: unix time in seconds; nothing is asked after it.
        requester: who submitted it, as the coordinator says: for people, and for a site that divides its budget among
            requesters (`per_requester`). Empty where it is not told; then the body is as it was before there was this
            field.

    Raises:
        ProtocolViolation: the sizes or the talliers do not fit the task.
    """

    job_id: PartyId
    task: Task
    sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=_MAX_QUERIES)], ...],
        Field(
            min_length=1,
            max_length=MAX_ROUNDS,
            description=f"1 to {MAX_ROUNDS} rounds, the queries of a round a whole number between 1 and {_MAX_QUERIES}",
        ),
    ]
    talliers: tuple[TallierKey, ...]
    expires_at: UnixTime
    requester: Annotated[str, Field(max_length=100, description="at most 100 printable characters"), Printable] = ""

    def __post_init__(self) -> None:
        if self.num_queries > self.task.max_queries:
            raise ProtocolViolation(
                f"a proposal is about {self.num_queries} queries, and its task has {self.task.max_queries}"
            )
        if len(self.talliers) != self.task.talliers:
            raise ProtocolViolation(
                f"the task shares ballots among {self.task.talliers} talliers, the proposal names {len(self.talliers)}"
            )

    @property
    def num_queries(self) -> int:
        """Of all rounds together."""
        return sum(self.sizes)

    @cached_property
    def digest(self) -> str:
        """What makes two proposals the same: job, task, rounds and deadline; talliers may change their keys.

        Who submitted it is the coordinator's word, so no answer hangs on it.
        """
        content = [self.job_id, self.task.digest, list(self.sizes), self.expires_at]
        return hashlib.sha256(b"labeler-proposal/1\n" + canonical_json(content)).hexdigest()

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(
            ({"requester": self.requester} if self.requester else {})
            | {
                "version": "labeler-proposal/1",
                "job_id": self.job_id,
                "task": self.task.model_dump(mode="json"),
                "task_digest": self.task.digest,
                "sizes": list(self.sizes),
                "talliers": [asdict(tallier) for tallier in self.talliers],
                "expires_at": self.expires_at,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Proposal:
        """Read a body of "proposal".

        Raises:
            ProtocolViolation: malformed, or see the class.
            InvalidTask, UnsafeGrid: the task is not one that can be answered.
            WrongDigest: the task does not have the stated digest.
            TooLarge: larger than is taken.
        """
        names = names_of(_ProposalHead)
        content = read_json(data, "a proposal", names, "labeler-proposal/1", optional=("requester",))
        requester = content.pop("requester", "")
        head = _ProposalHead(**content)
        task = task_written_out(head.task, "a proposal")
        if head.task_digest != task.digest:
            raise WrongDigest("a proposal states another digest than its task has")
        return cls(
            job_id=head.job_id,
            task=task,
            sizes=tuple(head.sizes),
            talliers=tuple(tallier_key_from(one) for one in head.talliers),
            expires_at=head.expires_at,
            requester=requester,
        )


@strict("a yes")
class Willing(Body):
    """Body of "willing".

    Attributes:
        until: unix time in seconds; until then the price is set aside.
    """

    version: ClassVar[str] = "labeler-willing/1"

    job_id: PartyId
    until: UnixTime


@strict("a no")
class Declined:
    """Body of "declined".

    Attributes:
        refusal: why, and whether it may be proposed again later.
    """

    job_id: PartyId
    refusal: Refusal

    @classmethod
    def of(cls, job_id: str, error: LabelerError) -> Declined:
        """The no that an error amounts to."""
        return cls(job_id, Refusal.of(error))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(self.refusal.content() | {"version": "labeler-declined/1", "job_id": self.job_id})

    @classmethod
    def decode(cls, data: bytes) -> Declined:
        """Read a body of "declined"."""
        content = read_json(data, "a no", ("job_id", *names_of(Refusal)), "labeler-declined/1")
        return cls(content.pop("job_id"), Refusal(**content))


@strict("a withdrawal")
class Withdrawn(Body):
    """Body of "withdrawn"."""

    version: ClassVar[str] = "labeler-withdrawn/1"

    job_id: PartyId
