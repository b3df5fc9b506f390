"""Every command of `labeler`: its name, its first sentence, and its module, which is loaded when the command is used.

`labeler --help` needs names and sentences, and `labeler status` one module out of ten; nothing else is loaded. A test
compares the sentences with those of the commands, so they cannot diverge.

Errors name options of the command line. The code that checks a setting knows it as a field of a task or an argument of
a function, because notebooks, services and task files set it too. At the command line it is an option, so a refusal
says `--colluding-agents`, which can be found in the typed line. A field in a file keeps its name: its refusals have
line numbers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from labeler.errors import Interrupted, InvalidSetting, LabelerError
from workers.commands import interruptible


class CommandEntry(NamedTuple):
    """A command, or a group of them, as `labeler --help` lists it.

    Attributes:
        module: in `workers.commands`, or the path of one that stands apart. It has a function of the command's name, or
            a group, `NAME_app`.
    """

    module: str
    summary: str


_TABLE: Final = """\
Try:
demo jobs Run the whole pipeline on real handwritten digits, without any download.
up federation Run a whole federation here: coordinator, embedder, agents, talliers and redis-server, each a process.
bench benchmarks.command Reproduce a paper's table or measure speed. Runs in a checkout of the project.
Label images:
plan jobs Show the price of a setting before anything is asked, or the setting for a price.
embed shards Turn images into a shard of features. Resumes after an interruption.
duplicates shards List images that a shard holds more than once, those with different labels first.
pretrain shards Pretrain a SimCLR backbone on public images. Continues from its last checkpoint.
run jobs Label public images with private shards: a batch labeling job in one process.
student jobs Train a student on a job's released answers, or fetch a service's; score it where truth is known.
evaluate evaluation Measure how good a released model is on private records: every number with two intervals.
predict jobs Label new images with a student, or with the model that a job released. Asks nobody, costs no privacy.
export client Write labels as other tools want them: those of every image of a local job, or those of a service's job.
Ask a service:
submit client Send images to a running service for labeling. The price is reserved before any agent is asked.
status client Show one job, or the newest jobs.
budget client Show what is spent and what is left, per account and level, or what every query took.
share client Let another requester submit jobs into a task of yours. Each sees its own jobs; the queries are shared.
Run a site:
agent parties Run an agent, and review and decide its answers.
tallier parties Run a tallier, which adds up secret shares.
declare shards Declare a public bound on the records of a shard that was embedded without one.
delete shards Delete the records of people, or of images, from a shard and from the bytes of its files.
Operate a service:
serve federation Run the coordinator of a home; with --init make that home first.
embedder federation Run the embedder, which turns uploaded images into questions. Uses the coordinator's home.
invite journal Invite a site: make one signed file with all it needs, and a phrase to compare by phone.
keys journal Make, show, enrol, rotate and revoke keys; make access tokens.
evidence journal Write signed evidence of what was asked and what it cost, from a verified journal; or verify it.
audit checks.commands Attack a task's real pipeline, and say how much of its promise the attacks prove.
prune journal Delete images, questions and labels of ended jobs. Charges and digests stay; the journal still verifies.
journal journal Verify and back up a home's ledger; recover after its loss.
doctor checks.commands Check that this machine is ready and exact, and how fast it is; say how to fix problems.
"""
"""The headings of `labeler --help` in order, and below each its commands: name, module, first sentence."""

CATALOG: Final[dict[str, CommandEntry]] = {}
GROUPS: Final[dict[str, list[str]]] = {}
for _line in _TABLE.splitlines():
    if _line.endswith(":"):
        GROUPS[_line[:-1]] = _names = []
    else:
        _name, _module, _summary = _line.split(" ", 2)
        CATALOG[_name] = CommandEntry(_module, _summary)
        _names.append(_name)


class Cataloged(TyperGroup):
    """A group whose commands are stubs with a name and a sentence, until one is invoked or completed."""

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = {
            name: TyperCommand(
                name=name, help=CATALOG[name].summary, rich_markup_mode="markdown", rich_help_panel=group
            )
            for group, names in GROUPS.items()
            for name in names
        }
        super().__init__(**settings)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. If stopped from the keyboard, it says so and ends with the exit code for "try again"; typer
        alone would end it with 130 and no message.

        Raises:
            Interrupted: it was stopped.
        """
        with interruptible():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                raise Interrupted("interrupted") from None
            except typer.BadParameter as error:
                from pydantic import ValidationError

                from labeler.settings import problems_of

                if isinstance(error.__cause__, ValidationError):
                    error.message = "; ".join(sentence for _, sentence in problems_of(error.__cause__))
                raise

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Load the command itself from its module if a stub was named."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else load_commands([name])[name], rest


def load_commands(names: Sequence[str] = tuple(CATALOG)) -> dict[str, Any]:
    """Load commands by their names, each with all of its options; every command by default."""
    found: dict[str, Any] = {}
    for module in dict.fromkeys(CATALOG[name].module for name in names):
        found |= _commands_of(module)
    return {name: found[name] for name in names}


@cache
def _commands_of(module: str) -> dict[str, Any]:
    """Return the commands of a module. Cached, because each call would add a group's commands to it once more."""
    room = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
    loaded = _imported(module)
    for name in (name for name, entry in CATALOG.items() if entry.module == module):
        if (group := getattr(loaded, f"{name}_app", None)) is not None:
            room.add_typer(group, name=name)
        else:
            room.command(name)(getattr(loaded, name))
    found = dict(typer.main.get_group(room).commands)
    for command in found.values():
        word_errors_of(command)
    return found


def _imported(module: str) -> ModuleType:
    """Return a module of commands.

    Raises:
        InvalidSetting: it is of the benchmarks, and the program runs from an installed package, which holds none.
    """
    apart, _, _ = module.rpartition(".")
    if apart == "benchmarks":
        checkout = Path(__file__).parents[2]
        if not (checkout / apart / "__init__.py").is_file():
            raise InvalidSetting(
                "the installed package holds no benchmarks; clone the project and run make install, then "
                ".venv/bin/labeler bench in the clone"
            )
        sys.path.insert(0, str(checkout))  # placed first, because opacus also installs a package named benchmarks
    return import_module(module if apart else f"workers.commands.{module}")


COMPLETION: Final = "_LABELER_COMPLETE"
"""A shell sets it to ask for completions: `eval "$(_LABELER_COMPLETE=source_bash labeler)"`; zsh and fish likewise."""

app = typer.Typer(
    name="labeler",
    cls=Cataloged,
    help="Label public images with the private images of several organizations, under a proven privacy bound.",
    epilog=f'Tab completes commands and options after: eval "$({COMPLETION}=source_bash labeler)"; zsh, fish likewise.',
    no_args_is_help=True,
    add_completion=COMPLETION in os.environ,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"labeler {version('private-labeler')}")
        raise typer.Exit


@app.callback()
def labeler(
    version: Annotated[  # its callback answers and ends
        bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Do nothing before a command: a callback makes the command line a group, whatever it holds."""


ALIASES: Final[Mapping[str, str]] = {
    "sigma_votes": "sigma",
    "max_queries": "queries",
    "memory_limit_bytes": "memory_limit",
    "idempotency_key": "key",
}
"""Fields whose parameters have another name."""


def in_option_words(message: str, options: Mapping[str, str]) -> str:
    """Replace the names of settings in a message by a command's options.

    Args:
        options: parameter of the command to the option that sets it, {"colluding_agents": "--colluding-agents"}.
    """
    known = dict(options) | {field: options[name] for field, name in ALIASES.items() if name in options}
    for name, option in known.items():
        # A name with underscores is never English; a single word counts only in backquotes or where fields are listed.
        inner = re.escape(name)
        places = [rf"`{inner}`", rf"(?<=refused: ){inner}(?=[:.])", rf"(?<=; ){inner}(?=[:.])"]
        if "_" in name:
            places = [rf"(?<![\w.-]){inner}(?![\w-]|\.\w)", *places]
        else:
            places.append(rf"(?<=\bneeds ){inner}(?=[,;])")
        message = re.sub("|".join(places), option, message)
    return re.sub(r"^(?:task|plan|what was typed) refused: (?=--)", "", message)


def worded(callback: Callable[..., Any], options: Mapping[str, str]) -> Callable[..., Any]:
    """Wrap a command so that its errors name its own options."""

    @wraps(callback)
    def run(*arguments: Any, **settings: Any) -> Any:
        try:
            return callback(*arguments, **settings)
        except LabelerError as error:
            error.args = (in_option_words(str(error), options), *error.args[1:])
            raise
        except ValueError as error:
            from pydantic import ValidationError

            if not isinstance(error, ValidationError):
                raise
            # Requests to a service are validated here, too, and an argument may not fit.
            from labeler.settings import describe_validation

            raise InvalidSetting(in_option_words(describe_validation(error, "what was typed"), options)) from None

    return run


def word_errors_of(command: Any) -> None:
    """Make the errors of a command, and of every command below it, name its own options."""
    for inner in getattr(command, "commands", {}).values():
        word_errors_of(inner)
    options = {
        parameter.name: next(option for option in parameter.opts if option.startswith("--"))
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name
    }
    if command.callback is not None and options:
        command.callback = worded(command.callback, options)
