"""The command `doctor`: whether this machine is ready and right, step by step, and what to do where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from workers.commands.console import Json, cell, print_json
from workers.doctor.checkup import CheckUp
from workers.progress import say_seconds

_STYLES: Final = {"well": "green", "look": "yellow", "wrong": "bold red"}


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Check CUDA devices too; without one, that is wrong.")] = False,
    home: Annotated[Path, typer.Option(help="Folder of a party's home, there or to be.")] = Path(),
    only: Annotated[list[str] | None, typer.Option(help="A step, as --json names it; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Check that this machine is ready, computes exactly, and how fast it is; say what to do.

    Each step runs in a process of its own with a time limit, so that a crash or a hang is found too. Ends with 0 where
    nothing is wrong, with 1 else. Nothing is changed, and nothing private is read.

    Examples:

    `labeler doctor`

    `labeler doctor --home federation/agents/a --only disk --only journal`

    `labeler doctor --gpu --json > this-machine.json`
    """
    from workers.doctor.checkup import check_up
    from workers.doctor.steps import steps
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        found = check_up(steps(home, gpu=gpu), only=only or (), progress=progress)
    if as_json:
        print_json(found.as_json())
    else:
        _tell(found)
    if not found.is_well:
        raise typer.Exit(1)


def _tell(found: CheckUp) -> None:
    table = Table(show_edge=False, box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=20, overflow="fold")
    table.add_column(overflow="fold")
    for _, finding in found.findings:
        state = cell(finding.state)
        state.stylize(_STYLES[finding.state])
        table.add_row(state, cell(finding.what), cell(finding.found))
        if finding.to_do:
            table.add_row("", "", cell(f"To do: {finding.to_do}."))
    Console(highlight=False).print(table)
    states = [finding.state for _, finding in found.findings]
    counts = [f"{states.count('well')} well"]
    counts += [f"{states.count(state)} {words}" for state, words in _COUNTED if state in states]
    typer.echo(f"\n{', '.join(counts)}; {say_seconds(found.seconds)}")


_COUNTED: Final = (("look", "to look at"), ("wrong", "wrong"))
