"""How a party fetches its mail: it says where it stands, and is told where the coordinator stands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, SkipValidation

from labeler.errors import ProtocolViolation
from labeler.messages.body_format import Body, read_json, write_json
from labeler.messages.strict import DigestIfAny, Printable, names_of, spelt, strict, text, whole
from labeler.untrusted import canonical_json, check_mapping

MAX_WAIT_S = 30.0

Position = Annotated[str, spelt("|[0-9]{1,20}(-[0-9]{1,20})?", "empty or a position that came with a message")]


@strict("a poll")
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
        facts: what the coordinator needs to know of it (an agent: backbone_fingerprint, dimension, classes). Never a
            number of records.
    """

    format: ClassVar[str] = "labeler-poll/1"
    what: ClassVar[str]

    after: Position
    wait_s: Annotated[float | int, Field(ge=0, le=MAX_WAIT_S, description=f"between 0 and {MAX_WAIT_S:g} seconds")]
    journal_seq: Annotated[int, whole(0)]
    journal_hash: DigestIfAny
    coordinator_seq: Annotated[int, whole(0)]
    coordinator_hash: DigestIfAny
    version: Annotated[str, text(100), Printable]
    facts: SkipValidation[Mapping[str, Any]]

    def __post_init__(self) -> None:
        _check_head(self.journal_seq, self.journal_hash, "journal", "a poll")
        _check_head(self.coordinator_seq, self.coordinator_hash, "coordinator", "a poll")
        try:
            canonical_json(check_mapping(self.facts, "facts of a poll"))
        except (ValueError, TypeError, RecursionError):
            raise ProtocolViolation("facts of a poll must be JSON with finite numbers") from None
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        content = {name: getattr(self, name) for name in names_of(Poll)}
        return write_json(content | {"facts": dict(self.facts), "program": self.version, "version": self.format})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a body of "poll"."""
        content = read_json(data, cls.what, _POLL_NAMES, cls.format)
        return cls(version=content.pop("program"), **content)


_POLL_NAMES = ("program", *(name for name in names_of(Poll) if name != "version"))


@strict("an answer to a poll")
class Mail(Body):
    """Body of the coordinator's own "poll", the first message of every answer to a poll.

    Attributes:
        after: position to send as `Poll.after` once everything in the answer was handled.
        coordinator_seq: head of the coordinator's journal; a party that has seen a higher one knows that the
            coordinator lost entries.
        coordinator_hash: as above; empty for 0.
        journal_seq: the head of the party's own journal that came with its last answer, told to parties that read it:
            a journal that does not hold it is an older copy, and takes no part. 0 and an empty hash for none.
        journal_hash: as above.
        program: the coordinator's dialect (labeler.wire_versions), told to parties that read it; else empty, and then
            the body is as it was before there was this field.
    """

    version: ClassVar[str] = "labeler-mail/1"

    after: Position
    coordinator_seq: Annotated[int, whole(0)]
    coordinator_hash: DigestIfAny
    program: Annotated[str, Field(max_length=100, description="at most 100 printable characters"), Printable] = ""
    journal_seq: Annotated[int, whole(0)] = 0
    journal_hash: DigestIfAny = ""

    def __post_init__(self) -> None:
        _check_head(self.coordinator_seq, self.coordinator_hash, "coordinator", "an answer")
        _check_head(self.journal_seq, self.journal_hash, "journal", "an answer")

    def content(self) -> dict[str, Any]:
        """See Body."""
        return {name: value for name, value in super().content().items() if value or name not in _MAY_LACK}

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """See Body."""
        return cls(**read_json(data, cls.what, _MAIL_NAMES, cls.version, optional=_MAY_LACK))


_MAY_LACK = ("program", "journal_seq", "journal_hash")
_MAIL_NAMES = tuple(name for name in names_of(Mail) if name not in _MAY_LACK)


def _check_head(seq: int, digest: str, journal: str, what: str) -> None:
    """An empty hash belongs to an empty journal, and to no other."""
    if seq and not digest:
        raise ProtocolViolation(f"{journal}_hash of {what} must be a SHA-256, 64 lower-case hexadecimal digits")
