"""Bodies of messages, and their format: a frozen dataclass whose fields define the body.

    body = {"version":"labeler-willing/1", ...}                     one JSON object
    body = {"version":"labeler-share/1", ...} | line feed | arrays  if it has arrays (safetensors)

A field is written under its own name. A field is left out while it has its default. Bytes are hexadecimal, sets are
sorted lists, and arrays follow the JSON. A field's type says how it is read, and refuses everything else.

Bodies come from other parties, so reading trusts nothing. Models are strict (labeler.untrusted). Sizes are bounded
before anything is parsed. Arrays are exactly those expected. Every stated digest is computed again. Reading raises only
errors of `labeler.errors`, whatever the bytes, and can run no code (no pickle).

    poll         party -> coordinator    the party's journal head, and the mail it wants.
    poll         coordinator -> party    `Mail`: the coordinator's journal head.
    proposal     coordinator -> agent    this task, rounds of these sizes, until this moment.
    willing      agent -> coordinator    yes: the price is set aside in my own ledger until that moment.
    declined     agent -> coordinator    no, and why; or not yet (a person has to approve first).
    withdrawn    coordinator -> agent    rounds of this job that were not asked will not be.
    ask, open-round, sum                 a round: the requests to agents and talliers.
    answered, refused, holdings          their replies in words.
    input-share, aggregate-share, winner sealed bodies; shares and sums are secret.

Nothing before the ask depends on a record. An agent decides from its policy, its approvals, its own ledger and the
public facts of its shard. So a proposal is free for both, and an agent that declines has lost nothing. A yes promises
that a round asked before the named moment finds its price covered. The site's policy is read again at the ask.

More than 600 lines: one format and the list of everything that is written in it, each body with its checks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, InstanceOf, SkipValidation
from safetensors import SafetensorError
from safetensors.numpy import load, save

from labeler.errors import InvalidSetting, LabelerError, ProtocolViolation, TooLarge, TryAgain, WrongDigest
from labeler.messages.envelope import MAX_MESSAGE_BYTES, Kind
from labeler.randomness import KEY_BYTES
from labeler.sharing import SHARING_ID_BYTES, ShareVector, Winner, WinnerTerms, words_per_query
from labeler.tally import AggregateShare, BallotShare, QueryBatch, Round, round_of
from labeler.task import Task, parse_task
from labeler.untrusted import (
    Contributors,
    Digest,
    DigestIfAny,
    Flag,
    PartyId,
    Printable,
    PublicKey,
    UnixTime,
    canonical_json,
    check_mapping,
    check_party_id,
    check_public_key,
    hex_bytes,
    read_object,
    spelt,
    strict,
    text,
    whole,
)

MAX_JSON_BYTES = 8 * 1024 * 1024
"""Largest JSON part of a body: parsed JSON takes many times the memory of its text."""

MAX_ENTRIES = (MAX_MESSAGE_BYTES - 64 * 1024) // 8
"""Most entries (queries times classes) of a round: the last tallier's share, 8 bytes each, must fit into a message."""

MAX_SENTENCE_CHARACTERS = 2000
MAX_WAIT_S = 30.0
MAX_ROUNDS = 100_000

ANSWER_KINDS: tuple[Kind, Kind] = ("willing", "declined")
"""An agent's replies to a proposal."""

_MAX_QUERIES = 2**40
_FEATURE_SCALE = 2048

Arrays = Mapping[str, type[np.generic]]
"""Arrays of a body by name, with their types."""


def pack(version: str, content: Mapping[str, Any]) -> bytes:
    """Return a body made of its fields; see the module.

    Raises:
        TooLarge: its JSON has more than 8 MiB.
    """
    arrays = {name: np.ascontiguousarray(value) for name, value in content.items() if isinstance(value, np.ndarray)}
    words = {name: _plain(value) for name, value in content.items() if name not in arrays}
    data = canonical_json(words | {"version": version})
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(
            f"the JSON of a body has at most {MAX_JSON_BYTES} bytes, found {len(data)}; ask for less at once"
        )
    return data + b"\n" + save(arrays) if arrays else data


def unpack(
    data: bytes,
    what: str,
    version: str,
    model: type[Any] | Sequence[str],
    *,
    optional: Sequence[str] = (),
    choices: Sequence[Arrays] = (),
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> dict[str, Any]:
    """Return the fields of a body, arrays included; the caller, or its model, checks their values.

    Args:
        data: the body.
        what: its name in errors: "a share".
        version: the required value of its field "version".
        model: the class whose fields it must have, no more and no fewer; or their names.
        optional: names that it may also have.
        choices: sets of arrays; exactly those of one set must be present. None for a body without arrays.
        most_bytes: largest accepted body with arrays; more than a message may have only for one that was never
            sent.

    Raises:
        TooLarge: larger than accepted.
        ProtocolViolation: malformed, or with other fields or arrays.
    """
    arrays: dict[str, NDArray[Any]] = {}
    if choices:
        if len(data) > most_bytes:
            raise TooLarge(f"{what} has at most {most_bytes} bytes, found {len(data)}")
        end = data.find(b"\n", 0, MAX_JSON_BYTES + 1)
        if end < 0:
            raise ProtocolViolation(f"{what} must begin with one line of JSON, at most {MAX_JSON_BYTES} bytes long")
        arrays = _arrays(data[end + 1 :], what, choices)
        data = data[:end]
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(f"the JSON of {what} has at most {MAX_JSON_BYTES} bytes, found {len(data)}")
    names = [one.name for one in fields(model)] if isinstance(model, type) else model
    words = [name for name in names if all(name not in choice for choice in choices)]
    return read_object(data, what, fields=words, version=version, optional=optional) | arrays


def _arrays(data: bytes, what: str, choices: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError):
        raise ProtocolViolation(f"the array of {what} is not in safetensors format, or of an unknown type") from None
    expected = next((choice for choice in choices if choice.keys() == arrays.keys()), None)
    if expected is None:
        named = " or ".join(" and ".join(map(repr, choice)) for choice in choices)
        raise ProtocolViolation(f"{what} must hold exactly the arrays {named}; found {len(arrays)}, or another")
    for name, array in arrays.items():
        if array.dtype != expected[name]:
            raise ProtocolViolation(f"{name} of {what} must be {np.dtype(expected[name])}, found {array.dtype}")
    return arrays


def written_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are written: all but those that have their default."""
    held = {one.name: (getattr(value, one.name), one.default) for one in fields(value)}
    return {
        name: found
        for name, (found, default) in held.items()
        if default is MISSING or isinstance(found, np.ndarray) or found != default
    }


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case Task():
            return value.model_dump(mode="json")
        case frozenset():
            return sorted(value)
        case tuple() | list():
            return [_plain(one) for one in value]
        case Mapping():
            return {name: _plain(one) for name, one in value.items()}
        case _ if is_dataclass(value):
            return {name: _plain(one) for name, one in written_fields(value).items()}
    return value


class Body:
    """A model that is sent; `version` names its format."""

    version: ClassVar[str]
    what: ClassVar[str]

    def content(self) -> dict[str, Any]:
        """Return its fields, as they are written."""
        return written_fields(self)

    def encode(self) -> bytes:
        """Return the body; `decode` reverses this."""
        return pack(self.version, self.content())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read such a body.

        Raises:
            ProtocolViolation: malformed, or see the class.
            TooLarge: larger than accepted.
        """
        return cls(**unpack(data, cls.what, cls.version, cls))


def _model(model: type[Any]) -> BeforeValidator:
    """Return the reader of a field that is a model: it reads an object with its fields."""

    def read(content: object) -> object:
        if not isinstance(content, Mapping):
            return content
        try:
            return model(**content)
        except InvalidSetting as error:
            raise ProtocolViolation(str(error)) from None

    return BeforeValidator(read)


def _round(content: object) -> object:
    if isinstance(content, Mapping) and content.get("terms") is not None:
        terms = check_mapping(content["terms"], "the terms of a round")
        content = {**content, "terms": _model(WinnerTerms).func(terms)}  # type: ignore[call-arg]  # of one argument
    return _model(Round).func(content)  # type: ignore[call-arg]  # of one argument


def _task(content: object) -> Task:
    """Return the task in a body, with every field, as the coordinator stored it.

    Raises:
        ProtocolViolation: it could be written differently.
        InvalidTask, UnsafeGrid: it cannot be answered.
    """
    if isinstance(content, Task):
        return content
    task = parse_task(content)
    if canonical_json(task.model_dump(mode="json")) != canonical_json(content):
        raise ProtocolViolation("the task of a message must be written out in full, as the coordinator stored it")
    return task


def _check_stated(what: str, said: Mapping[str, object], found: Mapping[str, str]) -> None:
    """Refuse a stated digest that is not that of the content."""
    for name, digest in found.items():
        if said[name] != digest:
            raise WrongDigest(
                f"{what} states another digest than its content has ({name} {digest[:12]!r}); it was changed, or "
                "sender and receiver run versions that do not match"
            )


_TupleOf = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
_RoundField = Annotated[InstanceOf[Round], BeforeValidator(_round), Field(description="a round")]
_TaskField = Annotated[Task, BeforeValidator(_task), Field(description="a task")]


# Polls.

Position = Annotated[str, spelt("|[0-9]{1,20}(-[0-9]{1,20})?", "empty or a position that came with a message")]


@strict("a poll")
class Poll(Body):
    """Body of "poll": a party asks for its mail and states its journal head.

    Attributes:
        after: position of the last message it took, empty for none.
        wait_s: how long the coordinator may hold the request while there is no mail, 0 to 30.
        journal_seq: the head of the party's own journal; 0 and an empty hash while it has none.
        journal_hash: as above.
        coordinator_seq: the highest head of the coordinator's journal that this party has seen. It reveals a
            coordinator restored from an old copy; 0 and an empty hash for none.
        coordinator_hash: as above.
        program: version of the program, for people.
        facts: what the coordinator needs to know of it (an agent: backbone_fingerprint, dimension, classes). Never a
            number of records.
    """

    version: ClassVar[str] = "labeler-poll/1"

    after: Position
    wait_s: Annotated[float | int, Field(ge=0, le=MAX_WAIT_S, description=f"between 0 and {MAX_WAIT_S:g} seconds")]
    journal_seq: Annotated[int, whole(0)]
    journal_hash: DigestIfAny
    coordinator_seq: Annotated[int, whole(0)]
    coordinator_hash: DigestIfAny
    program: Annotated[str, text(100), Printable]
    facts: SkipValidation[Mapping[str, Any]]

    def __post_init__(self) -> None:
        _check_head(self.journal_seq, self.journal_hash, "journal", "a poll")
        _check_head(self.coordinator_seq, self.coordinator_hash, "coordinator", "a poll")
        try:
            canonical_json(check_mapping(self.facts, "facts of a poll"))
        except (ValueError, TypeError, RecursionError):
            raise ProtocolViolation("facts of a poll must be JSON with finite numbers") from None
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))


@strict("an answer to a poll")
class Mail(Body):
    """Body of the coordinator's own "poll", the first message of every answer to a poll.

    Attributes:
        after: position to send as `Poll.after` once everything in the answer was handled.
        coordinator_seq: head of the coordinator's journal; a party that has seen a higher one knows that the
            coordinator lost entries.
        coordinator_hash: as above; empty for 0.
        journal_seq: the head of the party's own journal that came with its last answer. A journal without it
            is an older copy, and takes no part. 0 and an empty hash for none.
        journal_hash: as above.
    """

    version: ClassVar[str] = "labeler-mail/1"

    after: Position
    coordinator_seq: Annotated[int, whole(0)]
    coordinator_hash: DigestIfAny
    journal_seq: Annotated[int, whole(0)] = 0
    journal_hash: DigestIfAny = ""

    def __post_init__(self) -> None:
        _check_head(self.coordinator_seq, self.coordinator_hash, "coordinator", "an answer")
        _check_head(self.journal_seq, self.journal_hash, "journal", "an answer")

    def content(self) -> dict[str, Any]:
        """See Body: an empty head is also written."""
        return dict(vars(self))


def _check_head(seq: int, digest: str, journal: str, what: str) -> None:
    """Check that a hash is empty exactly if the journal is empty."""
    if seq and not digest:
        raise ProtocolViolation(f"{journal}_hash of {what} must be a SHA-256, 64 lower-case hexadecimal digits")


# A round: requests, and replies in words.


@strict("a tallier key")
class TallierKey:
    """The recipient of an agent's share: a tallier and its enrolled keys.

    Attributes:
        tallier_id: party id of the tallier.
        seal_key: X25519 public key, 64 hexadecimal digits; shares are sealed to it.
        verify_key: Ed25519 public key, 64 hexadecimal digits.
    """

    tallier_id: PartyId
    seal_key: PublicKey
    verify_key: PublicKey


_Talliers = Annotated[
    tuple[Annotated[TallierKey, _model(TallierKey)], ...], _TupleOf, Field(description="a list of talliers")
]


@strict("an ask", eq=False)
class Ask(Body):
    """Body of "ask": the coordinator asks an agent to answer one batch of a task.

    Attributes:
        task: the whole task; its digest is computed by the agent, not taken from the message.
        batch: the queries; for a step of training with the public model that it starts from.
        talliers: the parties that get one share each, in tallier order; as many as the task says, all different.
        expires_at: unix time in seconds; later answers are ignored.

    Raises:
        ProtocolViolation: talliers do not match the task, or the batch lies beyond the task's queries. Or a
            feature is longer than a normalized one, so that inner products with it would not be exact.
    """

    version: ClassVar[str] = "labeler-ask/1"

    task: _TaskField
    batch: InstanceOf[QueryBatch]
    talliers: _Talliers
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
        if (self.batch.model is None) != (self.task.sampled is None):
            raise ProtocolViolation(
                "an ask carries a public model where its task trains one in steps, and nowhere else"
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
        """Return the round this ask belongs to."""
        return round_of(self.task, self.batch)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of queries of each round that is asked: this one."""
        return (len(self.batch),)

    def content(self) -> dict[str, Any]:
        """See Body: the batch is written out, and digests are stated so that a changed ask is detected."""
        content = written_fields(self)
        del content["batch"]
        return content | self._digests | {"first_query": 0} | written_fields(self.batch)

    @property
    def _digests(self) -> dict[str, str]:
        return {"task_digest": self.task.digest, "batch_digest": self.batch.digest}

    @classmethod
    def decode(cls, data: bytes) -> Ask:
        """Read a body of "ask".

        Raises:
            ProtocolViolation: malformed, or see the class.
            InvalidTask, UnsafeGrid: the task cannot be answered.
            WrongDigest: task or batch do not have the stated digest.
            TooLarge: larger than accepted.
        """
        names = ("task", "task_digest", "first_query", "batch_digest", "talliers", "expires_at")
        choices: list[Arrays] = [{"features": np.int16}, {"features": np.int16, "model": np.float64}]
        content = unpack(data, cls.what, cls.version, names, choices=choices)
        batch = {name: content.pop(name) for name in ("features", "first_query", "model") if name in content}
        stated = {name: content.pop(name) for name in ("task_digest", "batch_digest")}
        if type(batch["first_query"]) is not int:
            raise ProtocolViolation("first_query of an ask must be a whole number")
        try:
            ask = cls(**content, batch=QueryBatch(**batch))
        except InvalidSetting as error:
            # A task that cannot be answered keeps its own class of error.
            raise ProtocolViolation(str(error)) if type(error) is InvalidSetting else error from None
        _check_stated("an ask", stated, ask._digests)
        return ask


@strict("an open-round")
class OpenRound(Body):
    """Body of "open-round": announces a round, and the agents whose shares a tallier may take.

    Attributes:
        tallier: index of the recipient, from 0.
        participants: verify key (Ed25519, 64 hexadecimal digits) of each agent; no two the same.
        expires_at: unix time in seconds, after which the round is given up unless it was summed.
    """

    version: ClassVar[str] = "labeler-open-round/1"

    round: _RoundField
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


def _check_entries(round: Round, agents: int) -> None:
    """Refuse a round whose messages or sums would exceed the largest message."""
    words = words_per_query(round.terms, num_classes=round.num_classes, agents=agents)
    if round.num_queries * words > MAX_ENTRIES:
        raise TooLarge(
            f"a round has at most {MAX_ENTRIES} entries, {words} for each query of this one, and it has "
            f"{round.num_queries} queries; ask at most {MAX_ENTRIES // words} queries at once"
        )


@strict("a sum")
class SumRequest(Body):
    """Body of "sum": add up these agents; the charge is in the ledger already.

    Attributes:
        contributors: the agents agreed on.
        ledger_seq: entry of the coordinator's ledger that posted the charge.
        ledger_hash: hash of that entry.
    """

    version: ClassVar[str] = "labeler-sum/1"

    contributors: Contributors
    ledger_seq: Annotated[int, whole(1)]
    ledger_hash: Digest


@strict("a refusal")
class RefusalBody(Body):
    """Body of "refused": why a party does not fulfill a request.

    Attributes:
        reason: `problem_type` of the error.
        sentence: for people, at most 2000 printable characters; says nothing private.
        is_final: False if it may be asked again later (for example because a person has to approve first).
    """

    version: ClassVar[str] = "labeler-refused/1"

    reason: Annotated[str, spelt("[a-z][a-z-]{0,63}", "a problem type: lower-case letters and hyphens")]
    sentence: Annotated[str, text(MAX_SENTENCE_CHARACTERS), Printable]
    is_final: Flag

    @classmethod
    def of(cls, error: LabelerError) -> RefusalBody:
        """Convert an error into a refusal; temporary errors are not final."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(error).split()))
        sentence = printable[:MAX_SENTENCE_CHARACTERS] or error.problem_type
        return cls(error.problem_type, sentence, not isinstance(error, TryAgain))


@strict("an answer that was sent")
class AnswerSent(Body):
    """Body of an agent's "answered": its shares are on their way, and this is its journal head.

    The head covers what the answer was charged and what it spends. A party that has seen it detects an older copy of
    the journal, in which the answer was never given.

    Attributes:
        journal_seq, journal_hash: head of the agent's journal.
    """

    version: ClassVar[str] = "labeler-answered/1"

    journal_seq: Annotated[int, whole(1)]
    journal_hash: Digest


@strict("a settlement")
class Settled(Body):
    """Body of the coordinator's "answered" to an agent: every party has what it needs of this round.

    An agent says "answered" when its shares are on their way (`AnswerSent`). The coordinator says it back once every
    tallier has summed the round, or the job has ended. The agent then erases what it stored of the round and the
    round's key.

    A lying coordinator gains nothing by it. If it says so too early, the agent cannot answer the round again, and
    refuses with its sentence for every settled round: the coordinator could as well not have asked. If it never says
    so, the agent erases after the deadline of the ask, and at the latest after a month. For a round that the agent was
    not charged for, it changes nothing.
    """

    version: ClassVar[str] = "labeler-settled/1"


# Before anything is charged.


@strict("a proposal")
class Proposal(Body):
    """Body of "proposal": a submitted job, fixed, before agents are asked.

    Attributes:
        job_id: the coordinator's name for it.
        task: the whole task; its digest is computed by the agent.
        sizes: queries of each round, in order; each at least 1, together at most the task's.
        talliers: the recipients of shares, as in an ask.
        expires_at: unix time in seconds; nothing is asked after it.
        requester: its submitter, as the coordinator says: for people, and for a site that divides its budget among
            requesters (`per_requester`). Empty if it is not told.

    Raises:
        ProtocolViolation: the sizes or the talliers do not fit the task.
    """

    version: ClassVar[str] = "labeler-proposal/1"

    job_id: PartyId
    task: _TaskField
    sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=_MAX_QUERIES)], ...],
        _TupleOf,
        Field(
            min_length=1,
            max_length=MAX_ROUNDS,
            description=f"1 to {MAX_ROUNDS} rounds, the queries of a round a whole number between 1 and {_MAX_QUERIES}",
        ),
    ]
    talliers: _Talliers
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
        """Return the queries of all rounds together."""
        return sum(self.sizes)

    @cached_property
    def digest(self) -> str:
        """Return the digest by which agents recognize a proposal: of its job, task, rounds and deadline.

        Talliers may change their keys, and the requester is the coordinator's word, so no answer depends on either.
        """
        content = [self.job_id, self.task.digest, list(self.sizes), self.expires_at]
        return hashlib.sha256(b"labeler-proposal/1\n" + canonical_json(content)).hexdigest()

    def content(self) -> dict[str, Any]:
        """See Body."""
        return written_fields(self) | {"task_digest": self.task.digest}

    @classmethod
    def decode(cls, data: bytes) -> Proposal:
        """Read a body of "proposal".

        Raises:
            ProtocolViolation: malformed, or see the class.
            InvalidTask, UnsafeGrid: the task cannot be answered.
            WrongDigest: the task does not have the stated digest.
            TooLarge: larger than accepted.
        """
        names = ("job_id", "task", "sizes", "talliers", "expires_at", "task_digest")
        content = unpack(data, cls.what, cls.version, names, optional=("requester",))
        stated = {"task_digest": content.pop("task_digest")}
        proposal = cls(**content)
        _check_stated("a proposal", stated, {"task_digest": proposal.task.digest})
        return proposal


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
class Declined(Body):
    """Body of "declined".

    Attributes:
        refusal: why, and whether it may be proposed again later.
    """

    version: ClassVar[str] = "labeler-declined/1"

    job_id: PartyId
    refusal: InstanceOf[RefusalBody]

    @classmethod
    def of(cls, job_id: str, error: LabelerError) -> Declined:
        """Convert an error into a no."""
        return cls(job_id, RefusalBody.of(error))

    def content(self) -> dict[str, Any]:
        """See Body: the refusal is written out."""
        return self.refusal.content() | {"job_id": self.job_id}

    @classmethod
    def decode(cls, data: bytes) -> Declined:
        """Read a body of "declined"."""
        content = unpack(data, cls.what, cls.version, ("job_id", "reason", "sentence", "is_final"))
        return cls(content.pop("job_id"), RefusalBody(**content))


@strict("a withdrawal")
class Withdrawn(Body):
    """Body of "withdrawn"."""

    version: ClassVar[str] = "labeler-withdrawn/1"

    job_id: PartyId


# Sealed bodies, and reports about them.


@strict("a share")
class _ShareHead:
    """A share as it is written, without its ids and its words or their seed."""

    shape: Annotated[
        tuple[Annotated[int, whole(1)], ...],
        _TupleOf,
        Field(min_length=1, max_length=4, description="1 to 4 dimensions, each a whole number of at least 1"),
    ]
    is_seeded: Flag


_SHARE_VERSIONS = {
    False: ("a share", "labeler-share/1"),
    True: ("a share of ballots and noise", "labeler-ballot-share/1"),
}
"""Arrays of a share, by whether ballots and noise are separate."""


def share_to_bytes(share: ShareVector | BallotShare) -> bytes:
    """Return the body of "input-share" before it is sealed. Secret.

    The field in which shares add up is not written: both sides know it from the terms of the round.
    """
    is_apart = isinstance(share, BallotShare)
    content: dict[str, Any] = {"shape": share.shape, "is_seeded": share.is_seeded}
    parts = {"ballots": share.ballots, "noise": share.noise} if isinstance(share, BallotShare) else {"sharing": share}
    is_short = all(part.seed is not None for part in parts.values())
    for name, part in parts.items():
        content[f"{name}_id"] = part.sharing_id
        array = np.frombuffer(part.seed, dtype=np.uint8) if is_short and part.seed is not None else part.expand()
        kind = "seed" if is_short else "words"
        content[f"{name}_{kind}" if is_apart else kind] = array
    return pack(_SHARE_VERSIONS[is_apart][1], content)


def share_from_bytes(
    data: bytes, *, max_entries: int, terms: WinnerTerms | None = None, most_bytes: int = MAX_MESSAGE_BYTES
) -> ShareVector | BallotShare:
    """Read a share.

    Args:
        data: output of `share_to_bytes`.
        max_entries: most numbers the shared vector may have (queries times classes of the round). A seed of 32
            bytes expands to a vector of any size, so without the bound a short message could fill the memory of
            a tallier.
        terms: of the round, in a winner round. They say in which field the words must be residues, and whether
            ballots and noise are separate.
        most_bytes: largest accepted body; more than a message may have only for one that was never sent.

    Raises:
        ProtocolViolation: malformed, or not a share of such a round.
        TooLarge: the shape has more entries.
    """
    is_apart = terms is not None and terms.row_total is not None
    what, version = _SHARE_VERSIONS[is_apart]
    parts = ("ballots", "noise") if is_apart else ("sharing",)
    prefix = {name: f"{name}_" if is_apart else "" for name in parts}
    kinds: dict[str, type[np.generic]] = {"seed": np.uint8, "words": np.uint64}
    choices = [{f"{one}{kind}": dtype for one in prefix.values()} for kind, dtype in kinds.items()]
    names = ("shape", "is_seeded", *(f"{name}_id" for name in parts))
    content = unpack(data, what, version, names, choices=choices, most_bytes=most_bytes)
    head = _ShareHead(content["shape"], content["is_seeded"])
    shape = head.shape
    if math.prod(shape) > max_entries:
        raise TooLarge(f"a share has at most {max_entries} entries here, found {math.prod(shape)}")
    if is_apart and len(shape) != 2:
        raise ProtocolViolation(f"{what} has 2 dimensions, found {len(shape)}")
    found = []
    for name in parts:
        sharing_id = hex_bytes(content[f"{name}_id"], SHARING_ID_BYTES, f"{name}_id of {what}")
        size = (shape[0], shape[1] + 1) if name == "ballots" else shape
        seed, words = content.get(f"{prefix[name]}seed"), content.get(f"{prefix[name]}words")
        if seed is not None and seed.shape != (KEY_BYTES,):
            raise ProtocolViolation(f"the seed of a share must have shape {(KEY_BYTES,)}, found {seed.shape}")
        key = None if seed is None else seed.tobytes()
        field = None if terms is None else terms.field
        found.append(ShareVector(size, sharing_id, head.is_seeded, seed=key, words=words, field=field))
    return BallotShare(*found) if is_apart else found[0]


def holdings_to_bytes(holdings: Mapping[str, bytes]) -> bytes:
    """Return the body of "holdings": the sharing_id a tallier holds of each agent. Not secret."""
    return pack("labeler-holdings/1", {"holdings": holdings})


def holdings_from_bytes(data: bytes) -> Mapping[str, bytes]:
    """Read a body of "holdings"."""
    content = unpack(data, "holdings", "labeler-holdings/1", ("holdings",))
    held = check_mapping(content["holdings"], "holdings")
    return MappingProxyType(
        {
            check_party_id(agent, "an agent of holdings"): hex_bytes(one, SHARING_ID_BYTES, "a sharing_id of holdings")
            for agent, one in held.items()
        }
    )


def aggregate_to_bytes(share: AggregateShare) -> bytes:
    """Return the body of "aggregate-share" before sealing. Secret until the round opens; in a winner round always."""
    return pack("labeler-aggregate-share/1", written_fields(share))


def aggregate_from_bytes(data: bytes) -> AggregateShare:
    """Read an aggregate share; its words have the shape of its round and cannot be written to.

    Raises:
        ProtocolViolation: malformed. Its round is checked when it is opened.
    """
    choices: list[Arrays] = [{"words": np.uint64}, {"words": np.uint64, "row_sums": np.uint64}]
    content = unpack(data, "an aggregate share", "labeler-aggregate-share/1", AggregateShare, choices=choices)
    round = _round(check_mapping(content["round"], "a round"))
    return AggregateShare(**content | {"round": round})


def winner_to_bytes(winner: Winner) -> bytes:
    """Return the body of "winner" before it is sealed: what a tallier and the two others have opened of a round."""
    return pack("labeler-winner/1", written_fields(winner))


def winner_from_bytes(data: bytes) -> Winner:
    """Read a body of "winner".

    Raises:
        ProtocolViolation: malformed. `agree_on_winners` checks that it answers the right round.
    """
    return Winner(**unpack(data, "a winner", "labeler-winner/1", Winner, choices=[{"labels": np.int16}]))
