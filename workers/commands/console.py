"""How commands speak: one JSON document for machines, sentences for people, complaints on standard error."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from labeler.errors import InvalidSetting

T = TypeVar("T", bound=str)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines, nothing else.")]


def print_json(document: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(document, allow_nan=False))


def tell(document: Any, *lines: str, as_json: bool) -> None:
    """Print what was found: as a document for machines, else as these lines for people."""
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(lines))


def escaped(text: str) -> str:
    """A text from elsewhere as one line that a terminal only shows: control characters are written out, not obeyed."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in text
    )


def cell(text: str) -> Text:
    """A text from elsewhere for a table: escaped, and its square brackets are no markup."""
    return Text(escaped(text))


def complain(sentence: str) -> None:
    """Say on standard error what went wrong."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("labeler:", style="bold red", end=" ")
    console.print("\n".join(map(escaped, sentence.splitlines())), markup=False, emoji=False)


def one_of(name: str, value: str, allowed: tuple[T, ...]) -> T:
    """The value of an option that must be one of a few words.

    Raises:
        InvalidSetting: it is none of them.
    """
    for word in allowed:
        if value == word:
            return word
    raise InvalidSetting(f"--{name} must be one of {', '.join(allowed)}; found {value[:100]!r}")


def tell_warning(sentence: str) -> None:
    """Say to standard error what may not be what was meant; nothing is wrong with the command."""
    typer.echo(f"Warning: {escaped(sentence)}.", err=True)
