"""Reading settings that people wrote: numbers, tables and names, and why one is refused.

A model whose numbers are numbers: no text that reads like one, and no truth value.

Pydantic takes "5" and true for 5 and 1, kindly. Here whoever writes `k = true` has meant something else, and a number
that was sent as text was made by something that will write 1,000 one day, or 1e-5 with a comma.

What pydantic refused, in sentences: field by field, with the name that was probably meant, and never a value.

Settings in TOML: read from text, and every refusal with the line and column at which the mistake stands.

A file of settings is written by a person, who looks for the mistake in an editor. `tomllib` says where its syntax
breaks, and not where a field stands; so a text that it has read is cut into statements, the shortest runs of lines that
are TOML on their own, and each statement says which field it sets. Nothing is parsed by hand but the place of an `=`.

A refusal names fields and repeats no value, which may be a password.

Names of public images leave: in Parquet, JSON, CSV and pages, where a text is UTF-8. So they are looked at first.

A file system of Linux takes any bytes for a name. One that is no UTF-8, as of an archive that was packed elsewhere,
can be opened and not written down; found out once answers are opened, they are paid for and cannot be published.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator

from labeler.errors import InvalidSetting


class PlainNumbers(BaseModel):
    """See the module. It looks at fields that hold one number; of a list its items say so themselves."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_text(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str | bool) and info.field_name in _numbers_of(cls):
            found = "a truth value" if isinstance(value, bool) else "a text"
            raise ValueError(f"a number is needed here, without quotes; found {found}")
        return value


@cache
def _numbers_of(model: type[BaseModel]) -> frozenset[str]:
    """Names of the fields in which nothing but a number may stand."""
    return frozenset(name for name, field in model.model_fields.items() if _is_numeric(field.annotation))


def _is_numeric(annotation: Any) -> bool:
    kinds = _kinds(annotation)
    return bool(kinds) and kinds <= {int, float}


def _kinds(annotation: Any) -> frozenset[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return frozenset().union(*(_kinds(part) for part in get_args(annotation))) - {NoneType}
    return frozenset({annotation}) - {NoneType}


Loc = tuple[str | int, ...]

_KIND = re.compile(r"constrained-\w+|[\w-]+\[.*\]")
"""What pydantic puts into a place for each kind that a value may be of: `constrained-float`, `literal['unlimited']`."""

_SHOULD_BE = "Input should be "


def describe_validation(error: ValidationError, what: str, *, model: type[BaseModel] | None = None) -> str:
    """Say in plain sentences which fields pydantic refused, without repeating their values.

    Args:
        what: what was checked.
        model: whose fields are meant; an unknown field that is nearly one of them is told so.
    """
    return f"{what} refused: " + "; ".join(
        f"{dotted(loc)}: {sentence}" if loc else sentence for loc, sentence in problems_of(error, model=model)
    )


def problems_of(error: ValidationError, *, model: type[BaseModel] | None = None) -> list[tuple[Loc, str]]:
    """Each refused field and why, in the order in which pydantic found them; once where it may be of several kinds."""
    found: list[tuple[Loc, str]] = []
    for loc, sentence in _each_kind(error, model):
        if found and found[-1][0] == loc and sentence.startswith(_SHOULD_BE):
            found[-1] = (loc, f"{found[-1][1]}, or {sentence.removeprefix(_SHOULD_BE)}")
        else:
            found.append((loc, sentence))
    return found


def _each_kind(error: ValidationError, model: type[BaseModel] | None) -> list[tuple[Loc, str]]:
    found: list[tuple[Loc, str]] = []
    for problem in error.errors(include_url=False):
        loc = tuple(part for part in problem["loc"] if not (isinstance(part, str) and _KIND.fullmatch(part)))
        match problem["type"]:
            case "extra_forbidden":
                known = () if model is None else sorted(_fields_at(model, loc[:-1]))
                near = nearest(str(loc[-1]), known)
                hint = "check its spelling against the documented fields" if near is None else f"did you mean {near}?"
                found.append((loc, f"unknown field; {hint}"))
            case "literal_error" if isinstance(problem.get("input"), str):
                words = re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))
                near = nearest(problem["input"], words)
                found.append((loc, problem["msg"] + ("" if near is None else f"; did you mean {near!r}?")))
            case _:
                found.append((loc, _in_plain_words(problem["msg"].removeprefix("Value error, "))))
    return found


def _in_plain_words(sentence: str) -> str:
    """People write lists and tables, and not what a program keeps them in."""
    sentence = sentence.replace("valid tuple", "list").replace("Tuple should", "List should")
    return re.sub(r"valid dictionary(?: or (?:instance|object) .*)?", "table", sentence)


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The one of some words that somebody who wrote this probably meant."""
    close = get_close_matches(word.lower().replace("-", "_"), known, n=1) or get_close_matches(word, known, n=1)
    return close[0] if close else None


def misspelt(words: Collection[str], known: Collection[str]) -> str:
    """The end of a refusal of some words: for the first that looks like a known one, that one; "" where none does."""
    found = ((word, nearest(word, [one for one in known if one not in words])) for word in words if word not in known)
    return next((f"; did you mean {near!r} by {word!r}?" for word, near in found if near is not None), "")


def dotted(loc: Loc) -> str:
    """A place among nested fields as people write it: "task.training.min_records"."""
    return ".".join(map(str, loc))


def _fields_at(model: type[BaseModel], loc: Loc) -> set[str]:
    """Names of the fields of the model that lies at a place within a model."""
    kinds: list[Any] = [model]
    for part in loc:
        kinds = [
            inner
            for kind in _models(kinds)
            if (field := kind.model_fields.get(str(part))) is not None
            for inner in [field.annotation]
        ] or _inner(kinds)
    return {name for kind in _models(kinds) for name in kind.model_fields}


def _models(kinds: Sequence[Any]) -> list[type[BaseModel]]:
    """The models among types, looking through unions and annotations."""
    found: list[type[BaseModel]] = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append(kind)
        elif get_origin(kind) in (Union, UnionType):
            found += _models(get_args(kind))
        elif hasattr(kind, "__metadata__"):
            found += _models([get_args(kind)[0]])
    return found


def _inner(kinds: Sequence[Any]) -> list[Any]:
    """What collections among types hold: the values of a mapping, the members of a list."""
    return [argument for kind in kinds if get_origin(kind) is not None for argument in get_args(kind)]


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
            # Before it is read: the time that tomllib takes grows with the square of the dots.
            if _DEEP_KEY.search(text) or _is_deep(fields := tomllib.loads(text)):
                raise RecursionError
            return cls(text, name, fields)
        except tomllib.TOMLDecodeError as error:
            raise InvalidSetting(f"{name} is not valid TOML: {_syntax(str(error), text)}") from None
        except RecursionError:
            raise InvalidSetting(
                f"{name} refused: a field is nested more than {MOST_NESTED} levels deep; no setting is, so look for a "
                "key of many dots or a list of many brackets"
            ) from None
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


MOST_NESTED: Final = 50
"""Levels of tables and lists in a file of settings."""


_DEEP_KEY: Final = re.compile(rf"^[ \t]*\[*[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MOST_NESTED},}}", re.MULTILINE)


def _is_deep(fields: dict[str, Any]) -> bool:
    """Return whether tables or lists are nested too deeply; level by level, however deep they are."""
    level: list[Any] = [fields]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


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


_SHOWN = 3


def check_names_are_text(names: Iterable[str]) -> None:
    """Refuse names of files that are no text, before anything is sent or asked.

    Raises:
        InvalidSetting: the first few are named, with what is no text in them as numbers.
    """
    bad = [name for name in names if not _is_text(name)]
    if bad:
        shown = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidSetting(
            f"the names of {len(bad)} public images are no text in UTF-8, so no label could be written beside them: "
            f"{shown}{more}; rename these files, or the folders they are in"
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
