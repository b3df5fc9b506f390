"""Settings that people wrote: numbers, tables and names, and refusals that say why and where.

**Plain numbers** (`PlainNumbers`): a model whose number fields accept neither numeric text nor truth values. Pydantic
converts "5" and true to 5 and 1. Here a person who writes `k = true` meant something else. A program that sends a
number as text will some day send 1,000, or 1e-5 with a comma.

**Refusals** (`describe_validation`): pydantic's errors in sentences, field by field, with the name that was probably
meant, and never a value.

**TOML** (`SettingsText`): every refusal has the line and column of the mistake, because a person looks for it in an
editor. `tomllib` reports where syntax breaks, but not where a field is. So a text that it has read is cut into
statements, the shortest runs of lines that are valid TOML alone, and each statement tells which field it sets. Only the
place of an `=` is parsed by hand. A refusal names fields and repeats no value, which may be a password.

**File names** (`check_names_are_text`): names of public images leave in Parquet, JSON, CSV and pages, where a text is
UTF-8, so they are checked first. A file system of Linux accepts any bytes as a name. A file whose name is not UTF-8,
for example from a foreign archive, can be opened, but its name cannot be written down. If that were found only after
answers are opened, they would be paid for and could not be published.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator

from labeler.errors import InvalidSetting


class PlainNumbers(BaseModel):
    """A model whose number fields accept only numbers; see the module. List items are checked by their own models."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_text(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str | bool) and info.field_name in _numbers_of(cls):
            found = "a truth value" if isinstance(value, bool) else "a text"
            raise ValueError(f"a number is needed here, without quotes; found {found}")
        return value


@cache
def _numbers_of(model: type[BaseModel]) -> frozenset[str]:
    """Return names of the fields that accept only numbers."""
    kinds = {name: _kinds(field.annotation) for name, field in model.model_fields.items()}
    return frozenset(name for name, found in kinds.items() if found and found <= {int, float})


def _kinds(annotation: Any) -> frozenset[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return frozenset().union(*(_kinds(part) for part in get_args(annotation))) - {NoneType}
    return frozenset({annotation}) - {NoneType}


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that were given: None leaves a field out."""
    return {name: value for name, value in fields.items() if value is not None}


Loc = tuple[str | int, ...]

_KIND = re.compile(r"constrained-\w+|[\w-]+\[.*\]")
"""Pydantic's location part for each kind that a value may have: `constrained-float`, `literal['unlimited']`."""

_MUST_BE = "must be "

_SENTENCES: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "none_required": "must be left out",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "int_parsing_size": "must be a whole number of fewer digits",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("string_type", "string_sub_type", "string_unicode", "bytes_type"), "must be a text"),
    "string_too_short": "must have at least {min_length} {characters}",
    "string_too_long": "must have at most {max_length} {characters}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "bytes_too_long": "must have at most {max_length} bytes",
    "bytes_invalid_encoding": "must be base64",
    "too_short": "must have at least {min_length} {entries}, found {actual_length}",
    "too_long": "must have at most {max_length} {entries}",
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"), "must be a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"),
        "must be a table of names and values",
    ),
    **dict.fromkeys(("literal_error", "enum"), "must be {expected}"),
    **dict.fromkeys(
        ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware"),
        "must be a date and time, such as 2027-03-01T08:00:00Z",
    ),
    **dict.fromkeys(("date_type", "date_parsing", "date_from_datetime_parsing"), "must be a date, such as 2027-03-01"),
}
"""Pydantic's kinds of errors in plain words. They speak of the field, and say the bound."""


def sentence_of(problem: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as a plain sentence about its field: "must be at least 1"."""
    template = _SENTENCES.get(problem.get("type", ""))
    bounds = {name: _plain(bound) for name, bound in problem.get("ctx", {}).items()}
    for noun, plural in (("character", "characters"), ("entry", "entries")):
        bounds[plural] = noun if "1" in (bounds.get("min_length"), bounds.get("max_length")) else plural
    try:
        if template is not None:
            return template.format_map(bounds)
    except KeyError:
        pass  # another version of pydantic names its bounds differently
    said = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub(r"^(?:Input|Value) should be ", _MUST_BE, said)


def _plain(bound: object) -> str:
    return f"{bound:.15g}" if isinstance(bound, float) else str(bound)


def describe_validation(error: ValidationError, what: str, *, model: type[BaseModel] | None = None) -> str:
    """Say in plain sentences which fields pydantic refused, without repeating their values.

    Args:
        what: name of the checked object.
        model: the expected model; an unknown field that resembles one of its fields gets a hint.
    """
    return f"{what} refused: " + "; ".join(
        f"{dotted(loc)}: {sentence}" if loc else sentence for loc, sentence in problems_of(error, model=model)
    )


def problems_of(error: ValidationError, *, model: type[BaseModel] | None = None) -> list[tuple[Loc, str]]:
    """Return each refused field and why, in pydantic's order; once per field that may be of several kinds."""
    return plain_problems(error.errors(include_url=False), model=model)


def plain_problems(
    errors: Iterable[Mapping[str, Any]], *, model: type[BaseModel] | None = None, within: int = 0
) -> list[tuple[Loc, str]]:
    """Return the problems in a list of pydantic's errors; see `problems_of`.

    Args:
        within: parts of a location that stand before the model: 1 for "body" of a request.
    """
    found: list[tuple[Loc, str]] = []
    for problem in errors:
        if problem.get("type") == "default_factory_not_called":
            continue  # another field, from which a default follows, was refused
        loc = tuple(part for part in problem["loc"] if not (isinstance(part, str) and _KIND.fullmatch(part)))
        sentence = sentence_of(problem)
        match problem.get("type"):
            case "extra_forbidden":
                known = () if model is None else sorted(_fields_at(model, loc[within:-1]))
                near = nearest(str(loc[-1]), known)
                hint = "check its spelling against the documented fields" if near is None else f"did you mean {near}?"
                sentence = f"unknown field; {hint}"
            case "literal_error" if isinstance(problem.get("input"), str):
                words = re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))
                near = nearest(problem["input"], words)
                sentence += "" if near is None else f"; did you mean {near!r}?"
        if found and found[-1][0] == loc and sentence.startswith(_MUST_BE):
            found[-1] = (loc, f"{found[-1][1]}, or {sentence.removeprefix(_MUST_BE)}")
        else:
            found.append((loc, sentence))
    return found


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, or None; of equally near ones the first.

    A word that begins with this one comes first ("resnet"), the shortest of them. Then come words of nearly the same
    letters, as after a typing error, words that hold it ("dinov2"), and words of similar letters.
    """
    folded = {_folded(one): one for one in reversed(list(known))}
    keys, given = list(reversed(folded)), _folded(word)
    if given in folded:
        return folded[given]
    ranked = (
        sorted((key for key in keys if len(given) >= _ABBREVIATION and key.startswith(given)), key=len),
        get_close_matches(given, keys, n=1, cutoff=0.8),
        sorted((key for key in keys if len(given) > _ABBREVIATION and given in key), key=len),
        get_close_matches(given, keys, n=1),
    )
    return next((folded[found[0]] for found in ranked if found), None)


_ABBREVIATION: Final = 3
"""Fewest letters that may stand for a longer word."""


def _folded(word: str) -> str:
    return re.sub(r"[-_. ]", "", word.casefold())


def one_spelling(name: str) -> str:
    """Return a name as names are compared: in Unicode's NFC, for systems compose the same letters differently.

    For comparisons only: a name is stored, shown and sent as people wrote it.
    """
    return unicodedata.normalize("NFC", name)


def same_names(some: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether two lists hold the same names in the same order, however their letters are composed."""
    return list(map(one_spelling, some)) == list(map(one_spelling, others))


def misspelt(words: Collection[str], known: Collection[str]) -> str:
    """Return a hint for the end of a refusal: the known word that the first misspelt one resembles; "" if none does."""
    given, there = set(map(one_spelling, words)), set(map(one_spelling, known))
    free = [one for one in known if one_spelling(one) not in given]
    found = ((word, nearest(word, free)) for word in words if one_spelling(word) not in there)
    return next((f"; did you mean {near!r} by {word!r}?" for word, near in found if near is not None), "")


def dotted(loc: Loc) -> str:
    """Return a place among nested fields as people write it: "task.training.min_records"."""
    return ".".join(map(str, loc))


def _fields_at(model: type[BaseModel], loc: Loc) -> set[str]:
    """Return names of the fields of the model at a place within a model."""
    kinds: list[Any] = [model]
    for part in loc:
        named = [kind.model_fields[str(part)] for kind in _models(kinds) if str(part) in kind.model_fields]
        kinds = [field.annotation for field in named] or _inner(kinds)
    return {name for kind in _models(kinds) for name in kind.model_fields}


def _models(kinds: Sequence[Any]) -> list[type[BaseModel]]:
    """Return the models among types, looking through unions and annotations."""
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
    """Return the item types of collections: the values of a mapping, the members of a list."""
    return [argument for kind in kinds if get_origin(kind) is not None for argument in get_args(kind)]


M = TypeVar("M", bound=BaseModel)

_PART: Final = r"""(?:[\w-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEY: Final = re.compile(rf"(\s*)({_PART}(?:\s*\.\s*{_PART})*)(\s*=\s*)")
_AT: Final = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


@dataclass(frozen=True)
class Place:
    """A position in a text, counted from 1."""

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
        name: the file's name in a refusal, for example "task file task.toml".
        fields: the fields that it sets.
    """

    text: str
    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, data: bytes, name: str) -> SettingsText:
        """Read the bytes of a file.

        Raises:
            InvalidSetting: they are not TOML; the sentence gives line and column.
        """
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise InvalidSetting(f"{name} is not valid TOML: line {line} is not UTF-8; save it as UTF-8") from None
        try:
            # Check before parsing: tomllib's time grows with the square of the number of dots.
            if _DEEP_KEY.search(text) or is_deep(fields := tomllib.loads(text)):
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
        """Return the settings as a model.

        Args:
            model: the model that the file describes.
            fields: fields to check, if they differ from those that the file sets.

        Raises:
            InvalidSetting: see `refuse`.
        """
        try:
            return model.model_validate(self.fields if fields is None else fields)
        except ValidationError as error:
            raise self.refuse(problems_of(error, model=model)) from None

    def refuse(self, problems: list[tuple[Loc, str]]) -> InvalidSetting:
        """Return the refusal of a file: one sentence for each field that is unknown, missing or out of bounds."""
        said = []
        for loc, sentence in problems:
            place = self.place(loc)
            where = "" if place is None else f"{place}: "
            said.append((place or _NOWHERE, f"{where}{dotted(loc)}: {sentence}" if loc else sentence))
        said.sort(key=lambda one: (one[0].line, one[0].column))
        return InvalidSetting(f"{self.name} refused: " + "; ".join(sentence for _, sentence in said))

    def place(self, loc: Loc) -> Place | None:
        """Return the place of a field, or else of the nearest table around it; None if the file names neither."""
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
                # Within an inline table a field comes later in the statement.
                inner = re.search(rf"(?<![\w-]){re.escape(str(loc[-1]))}[\"']?\s*=", statement[named.end() :])
                is_inner = inner is not None and len(loc) > len(re.findall(_PART, named[2]))
                place = Place(line, named.end() + inner.start() + 1) if inner is not None and is_inner else outer
                places.setdefault((*table, *loc), place)
        return places


MOST_NESTED: Final = 50
"""Most levels of tables and lists in a file of settings."""


_DEEP_KEY: Final = re.compile(rf"^[ \t]*\[*[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MOST_NESTED},}}", re.MULTILINE)


def is_deep(fields: dict[str, Any]) -> bool:
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
    """Return the message of `tomllib` with the place first; "at the end" refers to the last place."""
    found = _AT.search(message)
    if found is None:
        return message
    said = message[: found.start()]
    if found["line"] is not None:
        return f"line {found['line']}, column {found['column']}: {said}"
    return f"line {max(1, text.count(chr(10), 0, len(text.rstrip())) + 1)}: {said} at the end of the file"


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each statement of a valid text, with the line at which it begins."""
    begin, lines = 0, text.split("\n")
    for end in range(1, len(lines) + 1):
        statement = "\n".join(lines[begin:end])
        try:
            fields = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # a value that continues in the next line
        if fields:
            yield begin + 1, statement
        begin = end


def _heading(fields: dict[str, Any], places: Mapping[Loc, Place]) -> Loc:
    """Return the table that a heading opens; the next one of its name if there are several."""
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
    """Yield every field, outer ones first."""
    for name, inner in fields.items():
        yield (name,)
        if isinstance(inner, dict):
            yield from ((name, *loc) for loc in _paths(inner))


_SHOWN = 3


def check_names_are_text(names: Iterable[str]) -> None:
    """Refuse file names that are not text, before anything is sent or asked.

    Raises:
        InvalidSetting: names the first few, with their invalid bytes as numbers.
    """
    bad = [name for name in names if not _is_text(name)]
    if bad:
        shown = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidSetting(
            f"the names of {len(bad)} public images are no text in UTF-8, so no label could be written beside them: "
            f"{shown}{more}; rename these files, or the folders they are in"
        )


_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that end a line, move a cursor, or turn the direction of the text around them."""


def check_names_have_no_controls(names: Iterable[str]) -> None:
    """Refuse file names with a control character: another name would come back with the label.

    Raises:
        InvalidSetting: names the first one.
    """
    if wrong := next((name for name in names if _CONTROLS.search(name)), None):
        raise InvalidSetting(f"the name {wrong[:100]!a} has a control character, and labels go by names; rename it")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
