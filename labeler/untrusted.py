"""Read values from other parties strictly: each is returned in its expected form, or refused.

JSON alone is not strict enough: in Python `true` is a number, and `1e999` reads as infinity. An id may hold a line
break that forges a log line. Every function here names the value in its error and never repeats it, because it may
be long or hostile.

`strict` makes a class the model of a message. A model accepts exactly its fields, of exactly their types. Anything else
raises a `ProtocolViolation` that says what was expected. Nothing is converted: neither true nor "5" is a number, and a
text holds no line break. A field's type defines which values are accepted, and the words of the refusal. Models are
frozen dataclasses. Pydantic's compiled rules check them, whether a decoder or our own code makes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from labeler.errors import LabelerError, ProtocolViolation, WrongVersion

MOST_PROBE_NUMBERS = 16_384
"""Most numbers in a feature, and in the probe of features that agents send at every poll (feature_store.rows)."""

MOST_PROBE_CHARACTERS = 4 * -(-2 * MOST_PROBE_NUMBERS // 3)

MAX_ID_CHARACTERS = 200
ENROLLED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Pattern of an enrolled name: it becomes part of a file's name, an address and a line of a log."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORMAT = re.compile(r"(labeler-[a-z-]{1,40})/([0-9]{1,6})")
LARGEST_INTEGER = 2**62
LATEST_S = 1e11


def canonical_json(content: object) -> bytes:
    """Return JSON in one spelling: keys sorted, no spaces, ASCII; numbers that are not finite are refused."""
    return _CANONICAL.encode(content).encode()


def read_object(
    data: bytes, what: str, *, fields: Iterable[str], version: str, optional: Iterable[str] = ()
) -> dict[str, Any]:
    """Read one JSON object that has exactly these fields and this version. The result leaves the version out.

    Args:
        data: the JSON; the caller has bounded its size.
        what: its name for the error: "a header".
        fields: the names it must have, no more and no fewer.
        version: the required value of its field "version".
        optional: names it may also have.

    Raises:
        ProtocolViolation: it is no JSON object, holds NaN, infinity or a key twice, or has other fields.
        WrongVersion: it is such an object of another version.
    """
    try:
        content = _STRICT.decode(data.decode())
    except (ValueError, RecursionError):
        raise ProtocolViolation(
            f"{what} must be JSON in UTF-8, not nested deeply, without NaN, infinity or a key twice"
        ) from None
    if not isinstance(content, dict):
        raise ProtocolViolation(f"{what} must be a JSON object")
    if (found := content.pop("version", None)) != version:
        raise _other_version(what, found, version)
    expected = set(fields)
    if content.keys() - set(optional) != expected:
        missing = sorted(expected - content.keys())
        raise ProtocolViolation(
            f"{what} must have exactly the fields {', '.join(sorted(expected))}; "
            f"missing {', '.join(missing) or 'none'}, unknown {len(content.keys() - expected)}"
        )
    return content


def _other_version(what: str, found: object, expected: str) -> ProtocolViolation:
    """Return the refusal of another version. If both versions have a number, it says whose program is older."""
    said = _FORMAT.fullmatch(found) if isinstance(found, str) else None
    ours = _FORMAT.fullmatch(expected)
    if said is None or ours is None or said[1] != ours[1]:
        return ProtocolViolation(
            f"{what} must have version {expected!r}: this is something else, or was written by a program of another "
            "version"
        )
    is_newer = int(said[2]) > int(ours[2])
    older, newer = ("this party", "its sender") if is_newer else ("its sender", "this party")
    return WrongVersion(
        f"{what} is written in version {int(said[2])} of its format and version {ours[2]} is read here: the program "
        f"of {older} is older than {newer}'s; upgrade the older one (docs/upgrades.md says in which order)"
    )


def check_party_id(value: object, what: str) -> str:
    """Return a party id, or refuse it: 1 to 200 printable characters, no line break, no control character."""
    return check_text(value, what, most=MAX_ID_CHARACTERS)


def check_digest(value: object, what: str) -> str:
    """Return a SHA-256 in lower-case hexadecimal, or refuse it."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ProtocolViolation(f"{what} must be a SHA-256, 64 lower-case hexadecimal digits")
    return value


def check_public_key(value: object, what: str) -> str:
    """Return a public key in lower-case hexadecimal, or refuse it; `labeler.system.keys` checks that it is usable."""
    return hex_bytes(value, 32, what).hex()


def check_text(value: object, what: str, *, most: int) -> str:
    """Return printable text of 1 to `most` characters on one line, or refuse it."""
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        raise ProtocolViolation(f"{what} must be 1 to {most} printable characters")
    return value


def hex_bytes(value: object, count: int, what: str) -> bytes:
    """Return exactly `count` bytes, written in lower-case hexadecimal, or refuse them."""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * count}}}", value):
        raise ProtocolViolation(f"{what} must be {count} bytes, {2 * count} lower-case hexadecimal digits")
    return bytes.fromhex(value)


def check_list(value: object, what: str) -> list[Any]:
    """Return a list, or refuse the value."""
    if not isinstance(value, list):
        raise ProtocolViolation(f"{what} must be a list")
    return value


def check_mapping(value: object, what: str) -> dict[str, Any]:
    """Return a copy of a mapping, or refuse the value."""
    if not isinstance(value, Mapping):
        raise ProtocolViolation(f"{what} must be an object with named fields")
    return dict(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key twice")
    return content


# Made once: a party reads and writes some hundred small objects a second.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)


T = TypeVar("T")


def whole(least: int, most: int = LARGEST_INTEGER) -> Any:
    """Return the rule of an int field: within bounds; 1.0 and true are not whole numbers."""
    return Field(ge=least, le=most, description=f"a whole number between {least} and {most}")


def text(most: int) -> Any:
    """Return the rule of a str field: 1 to `most` characters. Add `Printable`, which checks that they print."""
    return Field(min_length=1, max_length=most, description=f"1 to {most} printable characters")


def spelt(pattern: str, words: str) -> Any:
    """Return the rule of a str field: the whole text matches the pattern."""
    return Field(pattern=f"^({pattern})$", description=words)


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError
    return value


Printable = AfterValidator(_printable)
"""Rule of a str field: one line without control characters."""

PartyId = Annotated[str, text(MAX_ID_CHARACTERS), Printable]
Digest = Annotated[str, spelt("[0-9a-f]{64}", "a SHA-256, 64 lower-case hexadecimal digits")]
DigestIfAny = Annotated[str, spelt("[0-9a-f]{64}|", "a SHA-256, 64 lower-case hexadecimal digits, or empty")]
PublicKey = Annotated[str, spelt("[0-9a-f]{64}", "32 bytes, 64 lower-case hexadecimal digits")]
"""The form of a public key; `labeler.system.keys` checks that it is usable."""

Flag = Annotated[bool, Field(description="true or false")]
UnixTime = Annotated[float | int, Field(gt=0, lt=LATEST_S, description="a finite number, a unix time in seconds")]
"""Integers and floats stay as they were written: digests depend on it."""


def _contributors(value: object) -> object:
    """Check the order of a written list; a set in memory was checked already."""
    if isinstance(value, list | tuple):
        names = [check_party_id(agent, "a contributor") for agent in value]
        if names != sorted(set(names)):
            raise ProtocolViolation("contributors must be at least one agent, sorted, each once")
        return frozenset(names)
    return value


Contributors = Annotated[
    frozenset[PartyId], BeforeValidator(_contributors), Field(min_length=1, description="at least one agent")
]
"""Agents whose shares are summed."""


@dataclass_transform(frozen_default=True)
def strict(what: str, *, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class a model.

    Args:
        what: its name for refusals: "a poll".
        eq: True if two models with equal fields are equal.
    """

    def model(cls: type[T]) -> type[T]:
        config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)
        made: type[Any] = validated(cls, frozen=True, eq=eq, config=config)
        check = made.__init__

        def __init__(self: Any, *given: Any, **named: Any) -> None:
            try:
                check(self, *given, **named)
            except ValidationError as error:
                raise _refusal(made, what, error) from None

        made.__init__ = __init__
        made.what = what
        return made

    return model


def _refusal(model: type[Any], what: str, error: ValidationError) -> LabelerError:
    """Return the first error as a sentence, without the value."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, LabelerError):
        return cause
    names = [field.name for field in fields(model)]
    place = first["loc"][0] if first["loc"] else ""
    name = names[place] if isinstance(place, int) and place < len(names) else str(place)
    if name not in names:
        return ProtocolViolation(f"{what} must have exactly the fields {', '.join(names)}")
    hint = get_type_hints(model, include_extras=True)[name]
    words = (getattr(one, "description", None) for one in getattr(hint, "__metadata__", ()))
    return ProtocolViolation(f"{name} of {what} must be {next(filter(None, words), 'of its stated type')}")
