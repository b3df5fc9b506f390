"""Output of commands: one JSON document for machines, sentences and tables for people, errors on standard error.

Access to a running service is here too, with the options that name it. Commands of other modules use its client, which
`connect` loads; calls that need a model of the API are functions here.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from labeler.budget import say_epsilon, say_epsilon_left
from labeler.errors import InvalidSetting

if TYPE_CHECKING:
    from pydantic import BaseModel

    from api.client import Client
    from workers.progress import ProgressCallback

T = TypeVar("T", bound=str)
F = TypeVar("F", bound=Callable[..., None])

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines, nothing else.")]


def option(model: type[BaseModel], name: str, *flags: str, lead: str = "", default: Any = None) -> Any:
    """Return the typer option of a model's field, with its words and bounds.

    Args:
        flags: of the option, if not --NAME.
        lead: stands before the words: where the option applies.
        default: of the option. The field's is shown where the option's is None.
    """
    kinds, help = _kinds(model, name), lead + option_words(model, name, default)
    if len(kinds) > 1 or kinds[0].get("type") != "integer":
        return typer.Option(*flags, help=help)
    return typer.Option(*flags, min=kinds[0].get("minimum"), max=kinds[0].get("maximum"), help=help)


def option_words(model: type[BaseModel], name: str, default: Any) -> str:
    """Return the first sentence of a field's words, with its choices and default."""
    field = _properties(model)[name]
    first, _, rest = " ".join(field["description"].split()).rstrip(".").partition(". ")
    parts = [first]
    if choices := _kinds(model, name)[0].get("enum"):
        parts.append(f"One of: {', '.join(map(str, choices))}")
    if default is None and field.get("default") is not None:
        parts.append(f"Default: {field['default']}")
    said = ". ".join([*parts, *re.findall(r"Default: .*?(?=\. |$)", rest)]) + "."
    return re.sub("`([a-z_]+)`", lambda one: f"--{one[1]}".replace("_", "-"), said)


def _kinds(model: type[BaseModel], name: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of a field's types, but null."""
    field = _properties(model)[name]
    return [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = model.model_json_schema()["properties"]
    return found


def with_options_of(
    model: type[BaseModel], *, without: Collection[str] = (), flags: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Callable[[F], F]:
    """Give a command an option for each field of a model, in place of its `**fields`; the model checks their values."""

    def parameter(name: str) -> inspect.Parameter:
        kinds, default = _kinds(model, name), _properties(model)[name].get("default")
        kind = {"integer": int, "number": float}.get(kinds[0]["type"], str) if len(kinds) == 1 else str
        if kinds[0].get("format") == "path":
            kind = Path
        info = typer.Option(*flags.get(name, ()), help=option_words(model, name, default))
        typed: Any = kind if default is not None else kind | None
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, info]
        )

    def decorate(command: F) -> F:
        own = inspect.signature(command, eval_str=True)
        others = [one.replace(kind=one.KEYWORD_ONLY) for one in own.parameters.values() if one.kind != one.VAR_KEYWORD]
        found = [*(parameter(name) for name in _properties(model) if name not in without), *others]
        vars(command)["__signature__"] = own.replace(parameters=found)
        command.__annotations__ = {one.name: one.annotation for one in found}
        return command

    return decorate


def print_json(document: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(document, allow_nan=False))


def tell(document: Any, *lines: str, as_json: bool) -> None:
    """Print a result: as a document for machines, or as lines for people."""
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(lines))


def escaped(text: str) -> str:
    """Escape an outside text to one line that is safe for a terminal: control characters are shown, not obeyed."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in text
    )


def cell(text: str) -> Text:
    """Make a table cell of an outside text: escaped, and with square brackets that are not markup."""
    return Text(escaped(text))


def complain(sentence: str) -> None:
    """Print an error on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("labeler:", style="bold red", end=" ")
    console.print("\n".join(map(escaped, sentence.splitlines())), markup=False, emoji=False)


def one_of(name: str, value: str, allowed: tuple[T, ...]) -> T:
    """Check the value of an option that must be one of a few words.

    Raises:
        InvalidSetting: it is none of them.
    """
    for word in allowed:
        if value == word:
            return word
    from labeler.settings import nearest

    near = nearest(value, allowed)
    hint = "" if near is None else f"; did you mean {near!r}?"
    raise InvalidSetting(f"--{name} must be one of {', '.join(allowed)}; found {value[:100]!r}{hint}")


def tell_warning(sentence: str) -> None:
    """Print a warning on standard error: the command is valid but may not do what was meant."""
    typer.echo(f"Warning: {escaped(sentence)}.", err=True)


_WIDTH: Final = 8


def budget_table(accounts: Sequence[Mapping[str, Any]]) -> Table:
    """A table of accounts.

    Args:
        accounts: mappings with account, level, delta, cap_nano, left_nano, cap_epsilon, posted_epsilon, spent_epsilon
            and left_epsilon; a cap of None is unlimited, a spent epsilon of None has no finite bound.
    """
    table = Table(show_edge=False)
    table.add_column("account", overflow="fold")
    table.add_column("one")
    for heading in ("so far", "of", "one more", "share"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for one in accounts:
        spent, posted, cap = one["spent_epsilon"], one["posted_epsilon"], one["cap_epsilon"]
        table.add_row(
            cell(one["account"]),
            "image" if one["level"] == "instance" else "agent",
            "no bound" if spent is None else say_epsilon(spent if posted is None else posted),
            "unlimited" if cap is None else f"{cap:g}",
            "" if one["left_epsilon"] is None else say_epsilon_left(one["left_epsilon"]),
            "" if one["cap_nano"] is None else f"{1 - left_fraction(one):.1%}",
            _bar(one),
        )
    table.caption = (
        "epsilon; so far: of what was answered; one more: the largest further job; share: of what was answered and of "
        "what is set aside for jobs that wait, in mu^2, which adds up over jobs"
    )
    if any(one.get("life_nano") for one in accounts):
        table.caption += (
            "; what is set aside for votes for life is counted as spent from the beginning, and no such job adds to it"
        )
    return table


def left_fraction(account: Mapping[str, Any]) -> float:
    """Return the part of a limited account that is left, between 0 and 1."""
    cap, left = account["cap_nano"], account["left_nano"]
    return left / cap if cap else 0.0


def _bar(account: Mapping[str, Any]) -> str:
    if account["cap_nano"] is None:
        return ""
    # Rounded up, so that a full bar is never shown while something is left, nor an empty one after a charge.
    spent = 1 - left_fraction(account)
    full = min(_WIDTH, int(spent * _WIDTH) + (0 < spent < 1))
    return "#" * full + "." * (_WIDTH - full)


def filled(text: str, *, start: str = "") -> str:
    """Return an outside text in lines of 80 columns, behind a start that later lines leave room for."""
    room = " " * len(start)
    return fill(escaped(text), 80, initial_indent=start, subsequent_indent=room, break_on_hyphens=False)


def wrapped(text: str, *, start: str = "") -> None:
    """Print an outside text in lines of 80 columns."""
    typer.echo(filled(text, start=start))


_ABSENT_PATIENCE_S = 1.0

_URL = typer.Option(envvar="LABELER_URL", help="Address of the service, for example https://labels.example.org.")
_TOKEN = typer.Option(envvar="LABELER_TOKEN", help="Access token. Better in LABELER_TOKEN than here.")
Url = Annotated[str, _URL]
Token = Annotated[str, _TOKEN]
MaybeUrl = Annotated[str | None, _URL]
MaybeToken = Annotated[str | None, _TOKEN]
CaFile = Annotated[
    Path | None,
    typer.Option(envvar="LABELER_CA_FILE", help="PEM file of the authority that signed the service's certificate."),
]

_HOME = typer.Option(help="Home folder of this coordinator, agent or tallier.")
Home = Annotated[Path, _HOME]
MaybeHome = Annotated[Path | None, _HOME]

JOB = "Folder of a finished job here, or a job's id at a service."


def folder_of(job: str | None, url: str | None, token: str | None) -> Path | None:
    """Return the folder of a local job; None for a job of a service.

    Raises:
        InvalidSetting: there is no such folder, and no service was named.
    """
    if job is not None and Path(job).is_dir():
        return Path(job)
    if url is None or token is None:
        here = "" if job is None else f"{job!r} is not a job's folder here; for a job of a service, "
        raise InvalidSetting(f"{here}name the service: --url and --token (or LABELER_URL and LABELER_TOKEN)")
    return None


Role = Literal["admin", "requester", "viewer"]
ROLES: tuple[Role, ...] = ("admin", "requester", "viewer")


def connect(url: str, token: str, ca_file: Path | None) -> Client:
    """Return a client of a running service."""
    from api.client import Client

    # A person learns quickly that nothing answers; but `wait` keeps waiting for a job through restarts.
    return Client(url, token, ca_file=ca_file, absent_patience_s=_ABSENT_PATIENCE_S)


def prune_service(
    url: str, token: str, ca_file: Path | None, age: timedelta, *, dry_run: bool, progress: ProgressCallback
) -> dict[str, Any]:
    """Have a running service forget jobs that ended longer ago than `age`; for `labeler prune --url`.

    Returns:
        {"url", "jobs": [id], "dry_run"}.
    """
    from api.schema import FINISHED

    before = datetime.now(UTC) - age
    with connect(url, token, ca_file) as service:
        ended = service.jobs(states=sorted(FINISHED))
        old = [job.job_id for job in ended if job.updated_at < before and job.forgotten_at is None]
        for number, job_id in enumerate([] if dry_run else old, 1):
            service.forget(job_id)
            progress("Jobs", number, len(old))
    return {"url": url, "jobs": old, "dry_run": dry_run}


@contextmanager
def waiting(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error what a service says while labels are made: one line, or lines for logs and pipes."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with Progress(TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console) as bars:
            bar = bars.add_task("", visible=False)
            yield lambda said: bars.update(bar, description=escaped(said), visible=True)
    else:
        yield lambda said: console.print(escaped(said), markup=False, emoji=False, soft_wrap=True)
