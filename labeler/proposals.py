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
from dataclasses import asdict, dataclass, fields
from functools import cached_property

from labeler.bodies import Refusal, TallierKey, tallier_key_from
from labeler.body_format import read_json, write_json
from labeler.errors import LabelerError, ProtocolViolation, WrongDigest
from labeler.messages import Kind
from labeler.task import Task, parse_task
from labeler.untrusted import (
    canonical_json,
    check_digest,
    check_integer,
    check_list,
    check_party_id,
    check_time,
)

ANSWER_KINDS: tuple[Kind, Kind] = ("willing", "declined")
"""What an agent says to a proposal."""

MAX_ROUNDS = 100_000
_MAX_QUERIES = 2**40


@dataclass(frozen=True)
class Proposal:
    """Body of "proposal": a submitted job, fixed, that agents have not been asked about.

    Attributes:
        job_id: the coordinator's name for it.
        task: the whole task; its digest is computed by the agent.
        sizes: queries of each round, in order; each at least 1, together at most the task's.
        talliers: who would get the shares, as in an ask.
        expires_at: unix time in seconds; nothing is asked after it.

    Raises:
        ProtocolViolation: the sizes or the talliers do not fit the task.
    """

    job_id: str
    task: Task
    sizes: tuple[int, ...]
    talliers: tuple[TallierKey, ...]
    expires_at: float

    def __post_init__(self) -> None:
        check_party_id(self.job_id, "job_id of a proposal")
        check_time(self.expires_at, "expires_at of a proposal")
        if not 1 <= len(self.sizes) <= MAX_ROUNDS:
            raise ProtocolViolation(f"a proposal has 1 to {MAX_ROUNDS} rounds, found {len(self.sizes)}")
        for size in self.sizes:
            check_integer(size, "queries of a round of a proposal", least=1, most=_MAX_QUERIES)
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
        """What makes two proposals the same: job, task, rounds and deadline; talliers may change their keys."""
        content = [self.job_id, self.task.digest, list(self.sizes), self.expires_at]
        return hashlib.sha256(b"labeler-proposal/1\n" + canonical_json(content)).hexdigest()

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(
            {
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
        names = ("job_id", "task", "task_digest", "sizes", "talliers", "expires_at")
        content = read_json(data, "a proposal", names, "labeler-proposal/1")
        task = parse_task(content["task"])
        if canonical_json(task.model_dump(mode="json")) != canonical_json(content["task"]):
            raise ProtocolViolation("the task of a proposal must be written out in full, as the coordinator stored it")
        if check_digest(content["task_digest"], "task_digest of a proposal") != task.digest:
            raise WrongDigest("a proposal states another digest than its task has")
        return cls(
            job_id=content["job_id"],
            task=task,
            sizes=tuple(check_list(content["sizes"], "sizes of a proposal")),
            talliers=tuple(tallier_key_from(one) for one in check_list(content["talliers"], "talliers of a proposal")),
            expires_at=content["expires_at"],
        )


@dataclass(frozen=True)
class Willing:
    """Body of "willing".

    Attributes:
        job_id: of the proposal.
        until: unix time in seconds; until then the price is set aside.
    """

    job_id: str
    until: float

    def __post_init__(self) -> None:
        check_party_id(self.job_id, "job_id of a yes")
        check_time(self.until, "until of a yes")

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(asdict(self) | {"version": "labeler-willing/1"})

    @classmethod
    def decode(cls, data: bytes) -> Willing:
        """Read a body of "willing"."""
        return cls(**read_json(data, "a yes", [field.name for field in fields(cls)], "labeler-willing/1"))


@dataclass(frozen=True)
class Declined:
    """Body of "declined".

    Attributes:
        job_id: of the proposal.
        refusal: why, and whether it may be proposed again later.
    """

    job_id: str
    refusal: Refusal

    def __post_init__(self) -> None:
        check_party_id(self.job_id, "job_id of a no")

    @classmethod
    def of(cls, job_id: str, error: LabelerError) -> Declined:
        """The no that an error amounts to."""
        return cls(job_id, Refusal.of(error))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(asdict(self.refusal) | {"version": "labeler-declined/1", "job_id": self.job_id})

    @classmethod
    def decode(cls, data: bytes) -> Declined:
        """Read a body of "declined"."""
        names = ["job_id", *(field.name for field in fields(Refusal))]
        content = read_json(data, "a no", names, "labeler-declined/1")
        return cls(content.pop("job_id"), Refusal(**content))


@dataclass(frozen=True)
class Withdrawn:
    """Body of "withdrawn".

    Attributes:
        job_id: of the proposal.
    """

    job_id: str

    def __post_init__(self) -> None:
        check_party_id(self.job_id, "job_id of a withdrawal")

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(asdict(self) | {"version": "labeler-withdrawn/1"})

    @classmethod
    def decode(cls, data: bytes) -> Withdrawn:
        """Read a body of "withdrawn"."""
        return cls(**read_json(data, "a withdrawal", [field.name for field in fields(cls)], "labeler-withdrawn/1"))
