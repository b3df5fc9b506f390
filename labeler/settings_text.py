"""Settings in TOML: read from text, and every refusal with the line and column at which the mistake stands.

A file of settings is written by a person, who looks for the mistake in an editor. `tomllib` says where its syntax
breaks, and not where a field stands; so a text that it has read is cut into statements, the shortest runs of lines that
are TOML on their own, and each statement says which field it sets. Nothing is parsed by hand but the place of an `=`.

A refusal names fields and repeats no value, which may be a password.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from labeler.errors import InvalidSetting
from labeler.refused_fields import Loc, dotted, problems_of

M = TypeVar("M", bound=BaseModel)

_PART: Final = r"""(?:[\w-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEY: Final = re.compile(rf"(\s*)({_PART}(?:\s*\.\s*{_PART})*)(\s*=\s*)")
_AT: Final = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


@dataclass(frozen=True)
class Place:
    """Where something stands in a text, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


_NOWHERE: Final = Place(0, 0)


@dataclass(frozen=True)
class SettingsText:
    """The text of one settings file.

    Attributes:
        text: the whole file.
        name: what it is called in a refusal, for example "task file task.toml".
        fields: what it sets.
    """

    text: str
    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, data: bytes, name: str) -> SettingsText:
        """Read the bytes of a file.

        Raises:
            InvalidSetting: they are not TOML; the sentence says at which line and column.
        """
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise InvalidSetting(f"{name} is not valid TOML: line {line} is not UTF-8; save it as UTF-8") from None
        try:
            return cls(text, name, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise InvalidSetting(f"{name} is not valid TOML: {_syntax(str(error), text)}") from None
        except RecursionError:
            raise InvalidSetting(f"{name} is not valid TOML: it is nested too deeply") from None
        except ValueError:
            raise InvalidSetting(f"{name} is not valid TOML: a number in it has thousands of digits") from None

    def check(self, model: type[M], fields: Mapping[str, Any] | None = None) -> M:
        """The settings as a model.

        Args:
            model: what the file describes.
            fields: what is checked, where it is not exactly what the file sets.

        Raises:
            InvalidSetting: see `refuse`.
        """
        try:
            return model.model_validate(self.fields if fields is None else fields)
        except ValidationError as error:
            raise self.refuse(problems_of(error, model=model)) from None

    def refuse(self, problems: list[tuple[Loc, str]]) -> InvalidSetting:
        """The refusal of a file: one sentence for each field that is unknown, missing or out of bounds."""
        said = []
        for loc, sentence in problems:
            place = self.place(loc)
            where = "" if place is None else f"{place}: "
            said.append((place or _NOWHERE, f"{where}{dotted(loc)}: {sentence}" if loc else sentence))
        said.sort(key=lambda one: (one[0].line, one[0].column))
        return InvalidSetting(f"{self.name} refused: " + "; ".join(sentence for _, sentence in said))

    def place(self, loc: Loc) -> Place | None:
        """Where a field stands, or else the nearest table around it; None where the file names neither."""
        return next((self._places[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in self._places), None)

    @cached_property
    def _places(self) -> dict[Loc, Place]:
        places: dict[Loc, Place] = {}
        table: Loc = ()
        for line, statement in _statements(self.text):
            if (named := _KEY.match(statement)) is None:
                table = _heading(tomllib.loads(statement), places)
                heading = Place(line, len(statement) - len(statement.lstrip()) + 1)
                for end in range(1, len(table)):
                    places.setdefault(table[:end], heading)
                places[table] = heading
                continue
            outer = Place(line, len(named[1]) + 1)
            for loc in _paths(tomllib.loads(statement)):
                # Within an inline table a field stands further on.
                inner = re.search(rf"(?<![\w-]){re.escape(str(loc[-1]))}[\"']?\s*=", statement[named.end() :])
                is_inner = inner is not None and len(loc) > len(re.findall(_PART, named[2]))
                place = Place(line, named.end() + inner.start() + 1) if inner is not None and is_inner else outer
                places.setdefault((*table, *loc), place)
        return places


def _syntax(message: str, text: str) -> str:
    """What `tomllib` says, with the place first; what was found at the end alone is told of there."""
    found = _AT.search(message)
    if found is None:
        return message
    said = message[: found.start()]
    if found["line"] is not None:
        return f"line {found['line']}, column {found['column']}: {said}"
    return f"line {max(1, text.count(chr(10), 0, len(text.rstrip())) + 1)}: {said} at the end of the file"


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement of a valid text, with the line at which it begins."""
    begin, lines = 0, text.split("\n")
    for end in range(1, len(lines) + 1):
        statement = "\n".join(lines[begin:end])
        try:
            fields = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # a value that goes on in the next line
        if fields:
            yield begin + 1, statement
        begin = end


def _heading(fields: dict[str, Any], places: Mapping[Loc, Place]) -> Loc:
    """The table that a heading opens; the next one of its name where it is one of several."""
    loc: Loc = ()
    while fields:
        ((name, inner),) = fields.items()
        loc = (*loc, name)
        if isinstance(inner, list):
            fields = inner[0]
            loc = (*loc, sum(1 for number in range(len(places)) if (*loc, number) in places))
        else:
            fields = inner
            count = sum(1 for number in range(len(places)) if (*loc, number) in places)
            loc = (*loc, count - 1) if count else loc
    return loc


def _paths(fields: Mapping[str, Any]) -> Iterator[Loc]:
    """Every field, outer ones first."""
    for name, inner in fields.items():
        yield (name,)
        if isinstance(inner, dict):
            yield from ((name, *loc) for loc in _paths(inner))
