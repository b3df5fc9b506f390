"""Bodies of messages: of a proposal, before anything is charged, and of a round.

More than 400 lines: a list of bodies, each with its checks.

The bodies of a round: what is asked of agents and talliers, and what they answer in words.

Bodies come from other parties, so a decoder believes nothing: models are strict (`strict`), arrays are of
exactly the stated type and shape, and whatever digest is stated is computed again. A decoder raises only errors of
`labeler.errors`, whatever the bytes. Bodies that hold shares, sums and winners are in `labeler.messages.shares`.

What is said before anything is charged: a coordinator proposes a job, an agent says whether it will.

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
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, InstanceOf, SkipValidation

from labeler.batch import QueryBatch
from labeler.errors import InvalidSetting, LabelerError, ProtocolViolation, TooLarge, TryAgain, WrongDigest
from labeler.messages.envelope import (
    MAX_MESSAGE_BYTES,
    Body,
    Kind,
    read_json,
    read_with_arrays,
    write_json,
    write_with_arrays,
)
from labeler.tally import Round, round_of
from labeler.task import Task, parse_task
from labeler.untrusted import (
    Digest,
    Flag,
    PartyId,
    Printable,
    PublicKey,
    UnixTime,
    canonical_json,
    check_mapping,
    check_party_id,
    check_public_key,
    names_of,
    spelt,
    strict,
    text,
    whole,
)
from labeler.winner import WinnerTerms, words_per_query

MAX_ENTRIES = (MAX_MESSAGE_BYTES - 64 * 1024) // 8
"""Most entries (queries times classes) of a round: the last tallier's share, 8 bytes each, must fit into a message."""

MAX_SENTENCE_CHARACTERS = 2000

_MAX_TERM = 2**62
_NOISE = "tallier_sigma_grid"
_FEATURE_SCALE = 2048


@strict("a tallier key")
class TallierKey:
    """Where an agent's share goes: a tallier and its enrolled keys.

    Attributes:
        tallier_id: party id of the tallier.
        seal_key: X25519 public key, 64 hexadecimal digits; shares are sealed to it.
        verify_key: Ed25519 public key, 64 hexadecimal digits.
    """

    tallier_id: PartyId
    seal_key: PublicKey
    verify_key: PublicKey


@strict("an ask")
class _AskHead:
    """An ask as it is written, but for its features."""

    task: Annotated[Any, Field(description="a task")]
    task_digest: Digest
    first_query: Annotated[int, whole(0)]
    batch_digest: Digest
    talliers: Annotated[list[Any], Field(description="a list")]
    expires_at: UnixTime


@strict("an ask", eq=False)
class Ask:
    """Body of "ask": the coordinator asks an agent to answer one batch of a task.

    Attributes:
        task: the whole task; its digest is computed by the agent, not taken from the message.
        batch: the queries; of a step of training with the public model that it begins from.
        talliers: the parties that get one share each, in tallier order; as many as the task says, all different.
        expires_at: unix time in seconds; an answer after it is not waited for.

    Raises:
        ProtocolViolation: talliers do not match the task, the batch lies beyond the task's queries, or a
            feature is longer than a normalised one, so that inner products with it would not be exact.
    """

    task: Task
    batch: InstanceOf[QueryBatch]
    talliers: tuple[TallierKey, ...]
    expires_at: UnixTime

    def __post_init__(self) -> None:
        if len(self.talliers) != self.task.talliers:
            raise ProtocolViolation(
                f"the task shares ballots among {self.task.talliers} talliers, the ask names {len(self.talliers)}"
            )
        for name in ("tallier_id", "seal_key", "verify_key"):
            if len({getattr(tallier, name) for tallier in self.talliers}) != len(self.talliers):
                raise ProtocolViolation(f"two talliers of an ask have the same {name}; one party would hold two shares")
        last = self.batch.first_query + len(self.batch)
        if self.batch.first_query < 0 or last > self.task.max_queries:
            raise ProtocolViolation(
                f"the batch holds queries {self.batch.first_query} to {last - 1}, the task pays for queries "
                f"0 to {self.task.max_queries - 1}"
            )
        _check_entries(self.round, self.task.agents)
        features = self.batch.features
        squares = np.einsum("ij,ij->i", features, features, dtype=np.int64)
        # Rounding moves each entry by at most 1/2. Beyond this, float32 inner products are no longer exact and
        # one record could move more votes than the task's price covers.
        limit = min(int((_FEATURE_SCALE + features.shape[1] ** 0.5 / 2) ** 2) + 1, 2**24 - 1)
        if squares.max() > limit:
            raise ProtocolViolation(
                f"{int((squares > limit).sum())} queries of an ask are longer than a normalised feature "
                f"(squared length at most {limit}); the coordinator must quantise them"
            )

    @cached_property
    def round(self) -> Round:
        """The round this ask belongs to."""
        return round_of(self.task, self.batch)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Queries of each round that is asked: this one."""
        return (len(self.batch),)

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        arrays: dict[str, NDArray[Any]] = {"features": self.batch.features}
        if self.batch.model is not None:
            arrays["model"] = self.batch.model
        return write_with_arrays(
            {
                "version": "labeler-ask/1",
                "task": self.task.model_dump(mode="json"),
                "task_digest": self.task.digest,
                "first_query": self.batch.first_query,
                "batch_digest": self.batch.digest,
                "talliers": [asdict(tallier) for tallier in self.talliers],
                "expires_at": self.expires_at,
            },
            arrays,
        )

    @classmethod
    def decode(cls, data: bytes) -> Ask:
        """Read a body of "ask".

        Raises:
            ProtocolViolation: malformed, or see the class.
            InvalidTask, UnsafeGrid: the task is not one that can be answered.
            WrongDigest: task or batch do not have the stated digest.
            TooLarge: larger than is taken.
        """
        choices: list[dict[str, type[np.generic]]] = [
            {"features": np.int16},
            {"features": np.int16, "model": np.float64},
        ]
        content, arrays = read_with_arrays(data, "an ask", names_of(_AskHead), "labeler-ask/1", choices)
        features = arrays["features"]
        head = _AskHead(**content)
        task = task_written_out(head.task, "an ask")
        if features.ndim != 2 or not features.shape[1]:
            raise ProtocolViolation(
                f"the features of an ask must have shape (num_queries, dimension), found {features.shape}"
            )
        try:
            batch = QueryBatch(features, head.first_query, arrays.get("model"))
            if (batch.model is None) == task.traits.is_sampled:
                raise InvalidSetting(
                    "an ask carries a public model where its task trains one in steps, and nowhere else"
                )
        except InvalidSetting as error:
            raise ProtocolViolation(str(error)) from None
        for name, said, found in (
            ("task_digest", head.task_digest, task.digest),
            ("batch_digest", head.batch_digest, batch.digest),
        ):
            if said != found:
                raise WrongDigest(
                    f"an ask states {name} {said[:12]!r}, its content has {found[:12]!r}; it was changed, or "
                    "sender and receiver run versions that do not match"
                )
        return cls(task, batch, tuple(tallier_key_from(item) for item in head.talliers), head.expires_at)


@strict("an open-round")
class OpenRound(Body):
    """Body of "open-round": a tallier learns of a round, and whose shares it may take.

    Attributes:
        tallier: index of the tallier in it, from 0.
        participants: verify key (Ed25519, 64 hexadecimal digits) of each agent; no two the same.
        expires_at: unix time in seconds, after which the round is given up unless it was summed.
    """

    version: ClassVar[str] = "labeler-open-round/1"

    round: InstanceOf[Round]
    tallier: Annotated[int, whole(0, 2)]
    participants: SkipValidation[Mapping[str, str]]
    expires_at: UnixTime

    def __post_init__(self) -> None:
        participants = check_mapping(self.participants, "participants of a round")
        _check_entries(self.round, len(participants))
        for agent, key in participants.items():
            check_party_id(agent, "a participant of a round")
            check_public_key(key, "the verify key of a participant")
        if len(set(participants.values())) != len(participants):
            raise ProtocolViolation("two participants of a round have one verify key; one agent would count twice")
        object.__setattr__(self, "participants", MappingProxyType(participants))

    def content(self) -> dict[str, Any]:
        """See Body."""
        return super().content() | {"round": round_fields(self.round), "participants": dict(self.participants)}

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a body of "open-round"."""
        content = read_json(data, cls.what, names_of(cls), cls.version)
        return cls(**content | {"round": round_from(content["round"])})


@strict("a sum")
class SumRequest(Body):
    """Body of "sum": add up these agents; the charge stands in the ledger already.

    Attributes:
        contributors: the agents agreed on, sorted, each once.
        ledger_seq: entry of the coordinator's ledger that posted the charge.
        ledger_hash: hash of that entry.
    """

    version: ClassVar[str] = "labeler-sum/1"

    contributors: Annotated[tuple[str, ...], Field(description="a list of agents")]
    ledger_seq: Annotated[int, whole(1)]
    ledger_hash: Digest

    def __post_init__(self) -> None:
        check_contributors(self.contributors, "a sum")


@strict("a refusal")
class Refusal(Body):
    """Body of "refused": why a party does not do what it was asked.

    Attributes:
        reason: `problem_type` of the error.
        sentence: for people, at most 2000 printable characters; says nothing private.
        is_final: False where it may be asked again later (a person has to approve first, for example).
    """

    version: ClassVar[str] = "labeler-refused/1"

    reason: Annotated[str, spelt("[a-z][a-z-]{0,63}", "a problem type: lower-case letters and hyphens")]
    sentence: Annotated[str, text(MAX_SENTENCE_CHARACTERS), Printable]
    is_final: Flag

    @classmethod
    def of(cls, error: LabelerError) -> Refusal:
        """The refusal that an error amounts to; errors that pass by themselves are not final."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(error).split()))
        sentence = printable[:MAX_SENTENCE_CHARACTERS] or error.problem_type
        return cls(error.problem_type, sentence, not isinstance(error, TryAgain))


@strict("an answer that was sent")
class AnswerSent(Body):
    """Body of an agent's "answered": its shares are on their way, and this is how far its journal is.

    The head covers what the answer was charged and what it spends. Whoever has seen it finds out an older copy of the
    journal, in which the answer was never given.

    Attributes:
        journal_seq, journal_hash: head of the agent's journal.
    """

    version: ClassVar[str] = "labeler-answered/1"

    journal_seq: Annotated[int, whole(1)]
    journal_hash: Digest


@strict("a settlement")
class Settled(Body):
    """Body of the coordinator's "answered" to an agent: nobody misses anything of this round any more.

    An agent says "answered" when its shares are on their way (`AnswerSent`); the coordinator says it back once every
    tallier has summed the round, or the job has ended. The agent then erases what it stored of the round and the
    round's key.

    A lying coordinator gains nothing by it. Said too early, the agent cannot answer the round again, and refuses with
    the sentence with which it refuses every settled round: the coordinator could as well not have asked. Said never,
    the agent erases by itself after the deadline it was asked with, and at the latest after a month. Said of a round
    that the agent was not charged for, it changes nothing.

    It travels as "answered" because an agent of an older version leaves a message of that kind from the coordinator
    alone and says so in its log, while a kind that it does not know would stop it from reading its mail.
    """

    version: ClassVar[str] = "labeler-settled/1"


@strict("a round")
class _RoundHead:
    """A round as it is written, but for the terms of its winner."""

    task_digest: Digest
    batch_digest: Digest
    num_queries: Annotated[int, whole(1)]
    num_classes: Annotated[int, whole(1)]
    quorum: Annotated[int, whole(1)]


_Term = Annotated[int, whole(-_MAX_TERM, _MAX_TERM)]
_TermIfAny = Annotated[int | None, whole(-_MAX_TERM, _MAX_TERM)]


@strict("the terms of a round")
class _TermsHead:
    """What talliers need to find winners, as it is written."""

    scale: _Term
    lowest: _Term
    highest: _Term
    row_total: _TermIfAny
    threshold: _TermIfAny


def check_shape(array: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
    """Refuse an array of another shape."""
    if array.shape != shape:
        raise ProtocolViolation(f"{what} must have shape {shape}, found {array.shape}")


def round_fields(round: Round) -> dict[str, Any]:
    """A round as JSON, as `round_from` reads it."""
    content = {name: getattr(round, name) for name in names_of(_RoundHead)}
    if round.terms is not None:
        content["terms"] = asdict(round.terms)
    if round.tallier_sigma_grid is not None:
        content[_NOISE] = round.tallier_sigma_grid
    return content


def round_from(content: object) -> Round:
    """A round out of a body; everything else is a ProtocolViolation."""
    items = check_mapping(content, "a round")
    if items.keys() - {"terms", _NOISE} != set(names_of(_RoundHead)):
        raise ProtocolViolation(
            f"a round must have the fields {', '.join(sorted(names_of(_RoundHead)))}, terms where the winner is "
            f"released, and {_NOISE} where the talliers add the noise"
        )
    terms = _terms(items.pop("terms")) if "terms" in items else None
    sigma = items.pop(_NOISE) if _NOISE in items else None
    if sigma is not None and type(sigma) is not float:
        raise ProtocolViolation(f"{_NOISE} of a round must be a number with a decimal point")
    try:
        return Round(**vars(_RoundHead(**items)), terms=terms, tallier_sigma_grid=sigma)
    except InvalidSetting as error:
        raise ProtocolViolation(str(error)) from None


def _terms(content: object) -> WinnerTerms:
    items = check_mapping(content, "the terms of a round")
    if items.keys() != set(names_of(_TermsHead)):
        raise ProtocolViolation(f"the terms of a round must have the fields {', '.join(names_of(_TermsHead))}")
    try:
        return WinnerTerms(**vars(_TermsHead(**items)))
    except InvalidSetting as error:
        raise ProtocolViolation(str(error)) from None


def task_written_out(content: object, what: str) -> Task:
    """A task out of a body, with every field, as the coordinator stored it.

    Raises:
        ProtocolViolation: it could be written otherwise.
        InvalidTask, UnsafeGrid: it is none that can be answered.
    """
    task = parse_task(content)
    if canonical_json(task.model_dump(mode="json")) != canonical_json(content):
        raise ProtocolViolation(f"the task of {what} must be written out in full, as the coordinator stored it")
    return task


def _check_entries(round: Round, agents: int) -> None:
    """Refuse a round of which a message or a tallier's sum would not fit into the largest message."""
    words = words_per_query(round.terms, num_classes=round.num_classes, agents=agents)
    if round.num_queries * words > MAX_ENTRIES:
        raise TooLarge(
            f"a round has at most {MAX_ENTRIES} entries, {words} for each query of this one, and it has "
            f"{round.num_queries} queries; ask at most {MAX_ENTRIES // words} queries at once"
        )


def tallier_key_from(content: object) -> TallierKey:
    """A tallier and its keys out of a body; everything else is a ProtocolViolation."""
    items = check_mapping(content, "a tallier key")
    if items.keys() != set(names_of(TallierKey)):
        raise ProtocolViolation("a tallier key must have the fields tallier_id, seal_key and verify_key")
    return TallierKey(**items)


def check_contributors(contributors: tuple[str, ...], what: str) -> None:
    """Refuse what is not at least one agent, sorted, each once."""
    for agent in contributors:
        check_party_id(agent, f"a contributor of {what}")
    if not contributors or list(contributors) != sorted(set(contributors)):
        raise ProtocolViolation(f"contributors of {what} must be at least one agent, sorted, each once")


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
