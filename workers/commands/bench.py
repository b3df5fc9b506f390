"""The command `bench`: the one door from the product to `benchmarks`, opened when somebody runs it.

Benchmarks are in a checkout of the project and not in the installed package, and so is the list of their names.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from labeler.errors import InvalidSetting
from workers.commands.console import Json, check_file, check_folder, print_json

EXTRA: Final = frozenset({"dp_accounting"})
"""Top-level modules of the extra `benchmarks`."""


def bench(
    name: Annotated[str | None, typer.Argument(help="Which bench; all their names when left out.")] = None,
    paper: Annotated[str | None, typer.Argument(help="For papers: whose table; all when left out.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the real data sets.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All repetitions, as in BENCHMARKS.md; papers go on where they were stopped.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Papers, answers, curves: folder for documents and pictures.")
    ] = None,
    agents: Annotated[str | None, typer.Option(help="For scale: 1000,100000, how many answer one round.")] = None,
    method: Annotated[str | None, typer.Option(help="For scale: what those agents answer by (knn).")] = None,
    seeds: Annotated[str | None, typer.Option(help="For simulate: A:B, the schedules to run, without B.")] = None,
    resume: Annotated[Path | None, typer.Option(help="For simulate: file to go on with and to write into.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="For simulate: every step of one schedule.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="For simulate: begin nothing after so many (45).", min=0, max=45)
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

    benchmarks = _benchmarks()
    if name is None:
        for one in benchmarks.BENCHES:
            typer.echo(one)
        return
    check_folder(out)
    check_file(resume, "--resume")
    options = {
        "paper": paper, "data": data, "full": full, "out": out, "agents": agents, "method": method, "seeds": seeds,
        "resume": resume, "trace": trace, "minutes": minutes,
    }  # fmt: skip
    try:
        with progress_bars(quiet=as_json) as progress:
            result = benchmarks.run_bench(name, progress=progress, **options)
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


def _benchmarks() -> ModuleType:
    """`benchmarks` of the checkout that this program runs from.

    Raises:
        InvalidSetting: the program runs from an installed package, which holds no benchmarks.
    """
    checkout = Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "__init__.py").is_file():
        raise InvalidSetting(
            "the installed package holds no benchmarks; clone the project and run make install, then "
            ".venv/bin/labeler bench in the clone"
        )
    sys.path.insert(0, str(checkout))  # opacus installs a package of the same name
    import benchmarks

    return benchmarks


def _print_bench(result: dict[str, Any]) -> None:
    rows = [{column: _cell(row.get(column)) for column in _COLUMNS} for row in result["rows"]]
    # What is the same in every row is said once, so that the rest fits beside each other.
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


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
