"""What pydantic refused, in sentences: field by field, with the name that was probably meant, and never a value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

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
