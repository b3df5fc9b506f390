"""The command `bench`, which a checkout of the project adds to `labeler`: the installed package holds no benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import BENCHES, run_bench
from labeler.errors import InvalidSetting
from labeler.system.files import check_file, check_folder
from workers.commands.console import Json, print_json, tell

EXTRA: Final = frozenset({"dp_accounting", "opacus"})
"""Top-level modules that the extra `benchmarks` installs."""


def bench(
    name: Annotated[str | None, typer.Argument(help="Which bench; lists all names when left out.")] = None,
    paper: Annotated[str | None, typer.Argument(help="For papers: whose table; all when left out.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the real data sets.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All repetitions, as in BENCHMARKS.md; papers resume where they stopped.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="For papers: folder for documents and pictures.")] = None,
    agents: Annotated[
        str | None,
        typer.Option(help="For scale: how many agents answer one round. Separate several numbers by commas: 100,1000."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="For scale: what those agents answer by (knn).")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="For simulate: which schedules to run. 0:2000 runs those from 0 to 1999.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="For simulate: file to go on with and to write into.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="For simulate: every step of one schedule.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="For simulate: start no new schedule after this many minutes. Default: 45.", min=0, max=45),
    ] = None,
    entries: Annotated[
        int | None,
        typer.Option(help="For ledger and attacks: entries of the longest ledger. Default: by --full.", min=1000),
    ] = None,
    as_json: Json = False,
) -> None:
    """Reproduce a paper's table or measure speed. Runs in a checkout of the project.

    Examples:

    `labeler bench speed`

    `labeler bench papers dp-helmet --data DATA --full --out tables`

    `labeler bench scale --agents 1000,100000 --method ensemble`

    `labeler bench simulate --seeds 0:2000 --resume schedules.json`
    """
    from workers.progress import progress_bars

    if name is None:
        tell(list(BENCHES), *BENCHES, as_json=as_json)
        return
    check_folder(out)
    check_file(resume, "--resume")
    options = {
        "paper": paper, "data": data, "full": full, "out": out, "agents": agents, "method": method, "seeds": seeds,
        "resume": resume, "trace": trace, "minutes": minutes, "entries": entries,
    }  # fmt: skip
    try:
        with progress_bars(quiet=as_json) as progress:
            result = run_bench(name, progress=progress, **options)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in EXTRA:
            raise
        raise InvalidSetting(
            f"bench {name} needs the package {missing.name}, which is not installed; add the extra: "
            "pip install -e '.[benchmarks]'"
        ) from None
    if as_json:
        print_json(result)
    else:
        _print_bench(result)
    if any(row["metric"] == "rules broken" and row["value"] for row in result["rows"]):
        raise typer.Exit(1)


def _print_bench(result: dict[str, Any]) -> None:
    rows = [{column: _number(row.get(column)) for column in _COLUMNS} for row in result["rows"]]
    # A value that is the same in every row is printed once, so that the other columns fit.
    varying = [column for column in _COLUMNS if len({row[column] for row in rows}) > 1 or column in _ALWAYS]
    table = Table(title=result["name"], show_edge=False)
    for column in varying:
        table.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[column] for column in varying))
    same = {column: rows[0][column] for column in _COLUMNS if rows and column not in varying and rows[0][column]}
    table.caption = ", ".join(f"{column} {value}" for column, value in same.items())
    Console(highlight=False).print(table)


_COLUMNS = ("case", "method", "metric", "value", "sd", "epsilon", "delta", "level", "reference", "seconds")
_ALWAYS = frozenset({"case", "metric", "value"})
_WORDS = frozenset({"case", "method", "metric", "level"})


def _number(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
