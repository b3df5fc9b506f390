"""Models of messages: exactly their fields, of exactly their types; else a `ProtocolViolation` that says what was due.

Messages come from other parties, so nothing is converted: true is no number, "5" is none either, and a text holds no
line break that would forge a line of a log. A field's type says both what is taken and, in words, what is refused; the
value itself is never repeated, because it may be long or hostile. Models are frozen dataclasses, checked by pydantic's
compiled rules however they are made: by a decoder out of bytes, or by our own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, dataclass_transform, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from labeler.errors import LabelerError, ProtocolViolation
from labeler.untrusted import LARGEST_INTEGER, LATEST_S, MAX_ID_CHARACTERS

T = TypeVar("T")


def whole(least: int, most: int = LARGEST_INTEGER) -> Any:
    """Of an int field: within bounds; 1.0 and true are no whole numbers."""
    return Field(ge=least, le=most, description=f"a whole number between {least} and {most}")


def text(most: int) -> Any:
    """Of a str field: 1 to `most` characters, which `Printable` has to check besides."""
    return Field(min_length=1, max_length=most, description=f"1 to {most} printable characters")


def spelt(pattern: str, words: str) -> Any:
    """Of a str field: all of it as the pattern says."""
    return Field(pattern=f"^({pattern})$", description=words)


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError
    return value


Printable = AfterValidator(_printable)
"""Of a str field: one line without control characters."""

PartyId = Annotated[str, text(MAX_ID_CHARACTERS), Printable]
Digest = Annotated[str, spelt("[0-9a-f]{64}", "a SHA-256, 64 lower-case hexadecimal digits")]
DigestIfAny = Annotated[str, spelt("[0-9a-f]{64}|", "a SHA-256, 64 lower-case hexadecimal digits, or empty")]
PublicKey = Annotated[str, spelt("[0-9a-f]{64}", "32 bytes, 64 lower-case hexadecimal digits")]
"""Whether it is a usable key says `feature_store.keys`."""

SharingId = Annotated[str, spelt("[0-9a-f]{32}", "16 bytes, 32 lower-case hexadecimal digits")]
Flag = Annotated[bool, Field(description="true or false")]
UnixTime = Annotated[float | int, Field(gt=0, lt=LATEST_S, description="a finite number, a unix time in seconds")]
"""Whether it was written as a whole number stays as it was: digests are made of it."""


@dataclass_transform(frozen_default=True)
def strict(what: str, *, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a class a model.

    Args:
        what: what it is, for refusals: "a poll".
        eq: whether two are equal where their fields are.
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


_NAMES: dict[type, tuple[str, ...]] = {}
_TUPLES: dict[type, tuple[str, ...]] = {}


def names_of(model: type) -> tuple[str, ...]:
    """Its fields, in order."""
    found = _NAMES.get(model)
    if found is None:
        found = _NAMES[model] = tuple(field.name for field in fields(model))
    return found


def tuples_of(model: type) -> tuple[str, ...]:
    """Its fields that are tuples, which JSON writes as lists."""
    found = _TUPLES.get(model)
    if found is None:
        hints = get_type_hints(model)
        found = _TUPLES[model] = tuple(name for name in names_of(model) if get_origin(hints[name]) is tuple)
    return found


def _refusal(model: type[Any], what: str, error: ValidationError) -> LabelerError:
    """The first thing that is wrong, in a sentence, without the value."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, LabelerError):
        return cause
    names, place = names_of(model), first["loc"][0] if first["loc"] else ""
    name = names[place] if isinstance(place, int) and place < len(names) else str(place)
    if name not in names:
        return ProtocolViolation(f"{what} must have exactly the fields {', '.join(names)}")
    hint = get_type_hints(model, include_extras=True)[name]
    words = (getattr(one, "description", None) for one in getattr(hint, "__metadata__", ()))
    return ProtocolViolation(f"{name} of {what} must be {next(filter(None, words), 'of its stated type')}")
