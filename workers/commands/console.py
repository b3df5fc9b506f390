"""How commands speak: one JSON document for machines, sentences and tables for people, complaints on standard error.

Where a command will write is looked at before its work: else hours of work, or a price, end with no place for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.table import Table
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


def check_file(out: Path | None, option: str = "--out") -> None:
    """Refuse a file that could not be written at the end.

    Args:
        out: the file; None where nothing is written.
        option: that named it.

    Raises:
        InvalidSetting: its folder is not there or not writable, or a folder has its name.
    """
    if out is None:
        return
    if not out.parent.is_dir():
        raise InvalidSetting(f"{option} names a file in {out.parent}, which is no folder; make it first")
    _check_writable(out.parent, f"{option} names a file in")
    if out.is_dir():
        raise InvalidSetting(f"{option} names a file to write, and {out} is a folder")


def check_folder(out: Path | None, option: str = "--out") -> None:
    """Refuse a folder that could not be made, or written into, at the end; see `check_file`."""
    if out is None:
        return
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not there.is_dir():
        raise InvalidSetting(f"{option} names a folder to write, and {there} is a file")
    _check_writable(there, f"{option} names a folder in")


def _check_writable(folder: Path, what: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidSetting(f"{what} {folder}, where this user cannot write")


_WIDTH: Final = 20


def budget_table(accounts: Sequence[Mapping[str, Any]]) -> Table:
    """A table of accounts.

    Args:
        accounts: mappings with account, level, delta, cap_nano, left_nano, cap_epsilon and spent_epsilon; a cap that
            is None is not limited, a spent epsilon that is None has no finite bound.
    """
    table = Table(show_edge=False)
    table.add_column("account", overflow="fold")
    table.add_column("level")
    for heading in ("spent", "of", "left"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for one in accounts:
        spent, cap = one["spent_epsilon"], one["cap_epsilon"]
        table.add_row(
            cell(one["account"]),
            "per image" if one["level"] == "instance" else "per agent",
            "no bound" if spent is None else f"{spent:.3f}",
            "unlimited" if cap is None else f"{cap:g}",
            "" if one["cap_nano"] is None else f"{left_fraction(one):.1%}",
            _bar(one),
        )
    table.caption = "epsilon; what is left is counted in mu^2, which adds up over jobs"
    if any(one.get("life_nano") for one in accounts):
        table.caption += (
            "; what is set aside for votes for life is counted as spent from the beginning, and no such job adds to it"
        )
    return table


def left_fraction(account: Mapping[str, Any]) -> float:
    """Which part of a limited account is left, between 0 and 1."""
    cap, left = account["cap_nano"], account["left_nano"]
    return left / cap if cap else 0.0


def _bar(account: Mapping[str, Any]) -> str:
    if account["cap_nano"] is None:
        return ""
    # Rounded up, so that a full bar is never shown while something is left, nor an empty one after a charge.
    spent = 1 - left_fraction(account)
    full = min(_WIDTH, int(spent * _WIDTH) + (0 < spent < 1))
    return "#" * full + "." * (_WIDTH - full)


def wrapped(text: str, *, bullet: bool = False) -> None:
    """Print a text from elsewhere in lines of 80 columns."""
    indent = ("- ", "  ") if bullet else ("", "")
    typer.echo(fill(escaped(text), 80, initial_indent=indent[0], subsequent_indent=indent[1]))
