"""What the bodies of messages hold.

Bodies come from other parties, so a decoder believes nothing: fields must be exactly those named, types exact
(true is no number), numbers finite, arrays of exactly the stated type and shape, and whatever digest is stated
is computed again. A decoder raises only errors of `labeler.errors`, whatever the bytes. How a body is written
says `labeler.body_format`. Bodies that hold shares, sums and winners are in `labeler.share_bodies`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.body_format import (
    read_json,
    read_with_array,
    write_json,
    write_with_array,
)
from labeler.errors import InvalidSetting, LabelerError, ProtocolViolation, TooLarge, TryAgain, WrongDigest
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.tally import Round, round_of
from labeler.task import Task, parse_task
from labeler.untrusted import (
    canonical_json,
    check_digest,
    check_flag,
    check_integer,
    check_list,
    check_mapping,
    check_number,
    check_party_id,
    check_public_key,
    check_text,
    check_time,
)
from labeler.winner import WinnerTerms, words_per_query

MAX_ENTRIES = (MAX_MESSAGE_BYTES - 64 * 1024) // 8
"""Most entries (queries times classes) of a round: the last tallier's share, 8 bytes each, must fit into a message."""

MAX_SENTENCE_CHARACTERS = 2000
MAX_WAIT_S = 30.0

_MAX_TERM = 2**62
_ROUND_FIELDS = {field.name for field in fields(Round)} - {"terms"}
_FEATURE_SCALE = 2048
_POSITION = re.compile(r"|[0-9]{1,20}(-[0-9]{1,20})?")
_SLUG = re.compile(r"[a-z][a-z-]{0,63}")


@dataclass(frozen=True)
class TallierKey:
    """Where an agent's share goes: a tallier and its enrolled keys.

    Attributes:
        tallier_id: party id of the tallier.
        seal_key: X25519 public key, 64 hexadecimal digits; shares are sealed to it.
        verify_key: Ed25519 public key, 64 hexadecimal digits.
    """

    tallier_id: str
    seal_key: str
    verify_key: str

    def __post_init__(self) -> None:
        check_party_id(self.tallier_id, "tallier_id of a tallier key")
        check_public_key(self.seal_key, "seal_key of a tallier key")
        check_public_key(self.verify_key, "verify_key of a tallier key")


@dataclass(frozen=True, eq=False)
class Ask:
    """Body of "ask": the coordinator asks an agent to answer one batch of a task.

    Attributes:
        task: the whole task; its digest is computed by the agent, not taken from the message.
        batch: the queries.
        talliers: the parties that get one share each, in tallier order; as many as the task says, all different.
        expires_at: unix time in seconds; an answer after it is not waited for.

    Raises:
        ProtocolViolation: talliers do not match the task, the batch lies beyond the task's queries, or a
            feature is longer than a normalised one, so that inner products with it would not be exact.
    """

    task: Task
    batch: QueryBatch
    talliers: tuple[TallierKey, ...]
    expires_at: float

    def __post_init__(self) -> None:
        check_time(self.expires_at, "expires_at of an ask")
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
        return write_with_array(
            {
                "version": "labeler-ask/1",
                "task": self.task.model_dump(mode="json"),
                "task_digest": self.task.digest,
                "first_query": self.batch.first_query,
                "batch_digest": self.batch.digest,
                "talliers": [asdict(tallier) for tallier in self.talliers],
                "expires_at": self.expires_at,
            },
            "features",
            self.batch.features,
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
        names = ("task", "task_digest", "first_query", "batch_digest", "talliers", "expires_at")
        content, _, features = read_with_array(data, "an ask", names, "labeler-ask/1", {"features": np.int16})
        task = parse_task(content["task"])
        if canonical_json(task.model_dump(mode="json")) != canonical_json(content["task"]):
            raise ProtocolViolation("the task of an ask must be written out in full, as the coordinator stored it")
        first_query = check_integer(content["first_query"], "first_query of an ask", least=0)
        if features.ndim != 2 or not features.shape[1]:
            raise ProtocolViolation(
                f"the features of an ask must have shape (num_queries, dimension), found {features.shape}"
            )
        try:
            batch = QueryBatch(features, first_query)
        except InvalidSetting as error:
            raise ProtocolViolation(str(error)) from None
        for name, found in (("task_digest", task.digest), ("batch_digest", batch.digest)):
            if check_digest(content[name], f"{name} of an ask") != found:
                raise WrongDigest(
                    f"an ask states {name} {content[name][:12]!r}, its content has {found[:12]!r}; it was changed, or "
                    "sender and receiver run versions that do not match"
                )
        talliers = tuple(tallier_key_from(item) for item in check_list(content["talliers"], "talliers of an ask"))
        return cls(task, batch, talliers, content["expires_at"])


@dataclass(frozen=True)
class OpenRound:
    """Body of "open-round": a tallier learns of a round, and whose shares it may take.

    Attributes:
        round: the round.
        tallier: index of the tallier in it, from 0.
        participants: verify key (Ed25519, 64 hexadecimal digits) of each agent; no two the same.
        expires_at: unix time in seconds, after which the round is given up unless it was summed.
    """

    round: Round
    tallier: int
    participants: Mapping[str, str]
    expires_at: float

    def __post_init__(self) -> None:
        check_integer(self.tallier, "tallier of a round", least=0, most=2)
        check_time(self.expires_at, "expires_at of a round")
        _check_entries(self.round, len(self.participants))
        for agent, key in self.participants.items():
            check_party_id(agent, "a participant of a round")
            check_public_key(key, "the verify key of a participant")
        if len(set(self.participants.values())) != len(self.participants):
            raise ProtocolViolation("two participants of a round have one verify key; one agent would count twice")
        object.__setattr__(self, "participants", MappingProxyType(dict(self.participants)))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(
            {
                "version": "labeler-open-round/1",
                "round": round_fields(self.round),
                "tallier": self.tallier,
                "participants": dict(self.participants),
                "expires_at": self.expires_at,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> OpenRound:
        """Read a body of "open-round"."""
        names = ("round", "tallier", "participants", "expires_at")
        content = read_json(data, "an open-round", names, "labeler-open-round/1")
        content["participants"] = check_mapping(content["participants"], "participants of a round")
        return cls(**content | {"round": round_from(content["round"])})


@dataclass(frozen=True)
class SumRequest:
    """Body of "sum": add up these agents; the charge stands in the ledger already.

    Attributes:
        contributors: the agents agreed on, sorted, each once.
        ledger_seq: entry of the coordinator's ledger that posted the charge.
        ledger_hash: hash of that entry.
    """

    contributors: tuple[str, ...]
    ledger_seq: int
    ledger_hash: str

    def __post_init__(self) -> None:
        check_contributors(self.contributors, "a sum")
        check_integer(self.ledger_seq, "ledger_seq of a sum", least=1)
        check_digest(self.ledger_hash, "ledger_hash of a sum")

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(asdict(self) | {"version": "labeler-sum/1"})

    @classmethod
    def decode(cls, data: bytes) -> SumRequest:
        """Read a body of "sum"."""
        content = read_json(data, "a sum", [field.name for field in fields(cls)], "labeler-sum/1")
        return cls(**content | {"contributors": tuple(check_list(content["contributors"], "contributors of a sum"))})


@dataclass(frozen=True)
class Refusal:
    """Body of "refused": why a party does not do what it was asked.

    Attributes:
        reason: `problem_type` of the error.
        sentence: for people, at most 2000 printable characters; says nothing private.
        is_final: False where it may be asked again later (a person has to approve first, for example).
    """

    reason: str
    sentence: str
    is_final: bool

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not _SLUG.fullmatch(self.reason):
            raise ProtocolViolation("reason of a refusal must be a problem type: lower-case letters and hyphens")
        check_text(self.sentence, "sentence of a refusal", most=MAX_SENTENCE_CHARACTERS)
        check_flag(self.is_final, "is_final of a refusal")

    @classmethod
    def of(cls, error: LabelerError) -> Refusal:
        """The refusal that an error amounts to; errors that pass by themselves are not final."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(error).split()))
        sentence = printable[:MAX_SENTENCE_CHARACTERS] or error.problem_type
        return cls(error.problem_type, sentence, not isinstance(error, TryAgain))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(asdict(self) | {"version": "labeler-refused/1"})

    @classmethod
    def decode(cls, data: bytes) -> Refusal:
        """Read a body of "refused"."""
        return cls(**read_json(data, "a refusal", [field.name for field in fields(cls)], "labeler-refused/1"))


@dataclass(frozen=True)
class Settled:
    """Body of the coordinator's "answered" to an agent: nobody misses anything of this round any more.

    An agent says "answered" when its shares are on their way; the coordinator says it back once every tallier has
    summed the round, or the job has ended. The agent then erases what it stored of the round and the round's key.

    A lying coordinator gains nothing by it. Said too early, the agent cannot answer the round again, and refuses with
    the sentence with which it refuses every settled round: the coordinator could as well not have asked. Said never,
    the agent erases by itself after the deadline it was asked with, and at the latest after a month. Said of a round
    that the agent was not charged for, it changes nothing.

    It travels as "answered" because an agent of an older version leaves a message of that kind from the coordinator
    alone and says so in its log, while a kind that it does not know would stop it from reading its mail.
    """

    def encode(self) -> bytes:
        """The body; `decode` gives it back. What round it is about says the header."""
        return write_json({"version": "labeler-settled/1"})

    @classmethod
    def decode(cls, data: bytes) -> Settled:
        """Read the body of the coordinator's "answered"."""
        read_json(data, "a settlement", (), "labeler-settled/1")
        return cls()


@dataclass(frozen=True)
class Poll:
    """Body of "poll": a party asks for its mail and says where it stands.

    Attributes:
        after: position of the last message it took, empty for none.
        wait_s: how long the coordinator may hold the request while there is no mail, 0 to 30.
        journal_seq: the head of the party's own journal; 0 and an empty hash while it has none.
        journal_hash: as above.
        coordinator_seq: the highest head of the coordinator's journal this party has seen, so that a
            coordinator restored from an old copy is found out; 0 and an empty hash for none.
        coordinator_hash: as above.
        version: of the program.
        facts: what the coordinator needs to know of it (an agent: backbone_fingerprint, classes). Never a
            number of records.
    """

    after: str
    wait_s: float
    journal_seq: int
    journal_hash: str
    coordinator_seq: int
    coordinator_hash: str
    version: str
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.after, str) or not _POSITION.fullmatch(self.after):
            raise ProtocolViolation("after of a poll must be empty or a position that came with a message")
        if not 0 <= check_number(self.wait_s, "wait_s of a poll") <= MAX_WAIT_S:
            raise ProtocolViolation(f"wait_s of a poll must lie between 0 and {MAX_WAIT_S:g} seconds")
        for journal in ("journal", "coordinator"):
            seq, digest = getattr(self, f"{journal}_seq"), getattr(self, f"{journal}_hash")
            if check_integer(seq, f"{journal}_seq of a poll", least=0) or digest != "":
                check_digest(digest, f"{journal}_hash of a poll")
        check_text(self.version, "version of a poll", most=100)
        try:
            canonical_json(check_mapping(self.facts, "facts of a poll"))
        except (ValueError, TypeError, RecursionError):
            raise ProtocolViolation("facts of a poll must be JSON with finite numbers") from None
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return write_json(
            content | {"facts": dict(self.facts), "program": content["version"], "version": "labeler-poll/1"}
        )

    @classmethod
    def decode(cls, data: bytes) -> Poll:
        """Read a body of "poll"."""
        names = [field.name for field in fields(cls) if field.name != "version"]
        content = read_json(data, "a poll", [*names, "program"], "labeler-poll/1")
        return cls(version=content.pop("program"), **content)


@dataclass(frozen=True)
class Mail:
    """Body of the coordinator's own "poll", the first message of every answer to a poll.

    Attributes:
        after: position to send as `Poll.after` once everything in the answer was handled.
        coordinator_seq: head of the coordinator's journal; a party that has seen a higher one knows that the
            coordinator lost entries.
        coordinator_hash: as above; empty for 0.
    """

    after: str
    coordinator_seq: int
    coordinator_hash: str

    def __post_init__(self) -> None:
        if not isinstance(self.after, str) or not _POSITION.fullmatch(self.after):
            raise ProtocolViolation("after of an answer to a poll must be empty or a position of the mailbox")
        if check_integer(self.coordinator_seq, "coordinator_seq of an answer", least=0) or self.coordinator_hash != "":
            check_digest(self.coordinator_hash, "coordinator_hash of an answer")

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(
            {field.name: getattr(self, field.name) for field in fields(self)} | {"version": "labeler-mail/1"}
        )

    @classmethod
    def decode(cls, data: bytes) -> Mail:
        """Read the body of an answer to a poll."""
        return cls(**read_json(data, "an answer to a poll", [field.name for field in fields(cls)], "labeler-mail/1"))


def check_shape(array: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
    """Refuse an array of another shape."""
    if array.shape != shape:
        raise ProtocolViolation(f"{what} must have shape {shape}, found {array.shape}")


def round_fields(round: Round) -> dict[str, Any]:
    """A round as JSON, as `round_from` reads it."""
    content = {name: getattr(round, name) for name in _ROUND_FIELDS}
    return content if round.terms is None else content | {"terms": asdict(round.terms)}


def round_from(content: object) -> Round:
    """A round out of a body; everything else is a ProtocolViolation."""
    items = check_mapping(content, "a round")
    if items.keys() - {"terms"} != _ROUND_FIELDS:
        raise ProtocolViolation(
            f"a round must have the fields {', '.join(sorted(_ROUND_FIELDS))}, and terms where the winner is released"
        )
    return Round(
        task_digest=check_digest(items["task_digest"], "task_digest of a round"),
        batch_digest=check_digest(items["batch_digest"], "batch_digest of a round"),
        num_queries=check_integer(items["num_queries"], "num_queries of a round", least=1),
        num_classes=check_integer(items["num_classes"], "num_classes of a round", least=1),
        quorum=check_integer(items["quorum"], "quorum of a round", least=1),
        terms=_terms(items["terms"]) if "terms" in items else None,
    )


def _terms(content: object) -> WinnerTerms:
    items = check_mapping(content, "the terms of a round")
    names = [field.name for field in fields(WinnerTerms)]
    if items.keys() != set(names):
        raise ProtocolViolation(f"the terms of a round must have the fields {', '.join(names)}")
    for name in names:
        if items[name] is not None or name not in ("row_total", "threshold"):
            check_integer(items[name], f"{name} of a round", least=-_MAX_TERM, most=_MAX_TERM)
    try:
        return WinnerTerms(**items)
    except InvalidSetting as error:
        raise ProtocolViolation(str(error)) from None


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
    if items.keys() != {field.name for field in fields(TallierKey)}:
        raise ProtocolViolation("a tallier key must have the fields tallier_id, seal_key and verify_key")
    return TallierKey(**items)


def check_contributors(contributors: tuple[str, ...], what: str) -> None:
    """Refuse what is not at least one agent, sorted, each once."""
    for agent in contributors:
        check_party_id(agent, f"a contributor of {what}")
    if not contributors or list(contributors) != sorted(set(contributors)):
        raise ProtocolViolation(f"contributors of {what} must be at least one agent, sorted, each once")
