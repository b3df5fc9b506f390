"""How commands speak: one JSON document for machines, sentences for people, complaints on standard error."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from labeler.errors import InvalidSetting

T = TypeVar("T", bound=str)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines, nothing else.")]


def print_json(document: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(document, allow_nan=False))


def complain(sentence: str) -> None:
    """Say on standard error what went wrong."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("labeler:", style="bold red", end=" ")
    console.print(sentence, markup=False, emoji=False)


def one_of(name: str, value: str, allowed: tuple[T, ...]) -> T:
    """The value of an option that must be one of a few words.

    Raises:
        InvalidSetting: it is none of them.
    """
    for word in allowed:
        if value == word:
            return word
    raise InvalidSetting(f"--{name} must be one of {', '.join(allowed)}; found {value!r}")
