"""BENCHMARKS.md and docs/benchmarks, made of benchmarks/pages and of the documents in benchmarks/results.

    python -m benchmarks.report        writes every page to its place in benchmarks/pages.

A document is the output of `labeler bench NAME --full --json`, in results/NAME.json. Below its table stands where it
comes from: the command, the commit, and the seeds, splits or draws in the settings of its rows. A line of a page names
a table of such a document, and @{NAME FIELD=VALUE ...} in a line is the value of the one row that has these values:

    @table NAME rows=FIELD,FIELD columns=FIELD [also=FIELD] [FIELD=VALUE ...]    a column for each value of a field
    @table NAME rows=FIELD,FIELD show=FIELD,FIELD [FIELD=VALUE ...]              a line for each measurement

FIELD=VALUE takes only the rows that have this value, FIELD!=VALUE those that have another, FIELD=ONE|TWO those with one
of several. FIELD~=PATTERN takes those in which this regular expression is found, FIELD!~=PATTERN the others. Fields are
those of `BenchRow`; `value` shows its deviation too. Rows that meet in one cell are joined by " / ". A table whose
first field is epsilon is in the order of epsilon.

The command also draws the pictures of `PICTURES` from the same documents.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks import BenchRow
from benchmarks.papers.chart import draw_chart
from labeler.errors import BadData

HERE: Final = Path(__file__).parent
PAGES: Final = HERE / "pages"
PAPERS: Final = tuple(f"papers-{name}" for name in ("ae-dpfl", "federated", "fedauxfdp", "dp-helmet"))
DRAWN: Final = (
    "MNIST, 100 agents x 600 of 6 digits",
    "MNIST -> USPS, 60 agents x 1,000",
    "Office-Caltech10, webcam",
    "Office-Caltech10, dslr",
    "CIFAR-10, 20 clients, Dirichlet 0.01",
    "CIFAR-10 features, 50,000 records",
)
PICTURES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], Literal["case", "metric"]]]] = {
    "docs/hospitals.png": (("medical",), ("per patient",), "metric"),
    "docs/rivals.png": (("rivals",), ("CIFAR-10, 10 agents x 400",), "case"),
    "docs/papers.png": (PAPERS, DRAWN, "case"),
}
"""Pictures of documents: the rows of some cases; a panel for each value of the last field."""

HEADINGS: Final = {"reference": "wanted, or printed by the paper"}


def render(template: str, results: Path) -> str:
    """Return the page of a template, with its tables and numbers filled in."""
    lines = [
        _table(line, results)
        if line.startswith("@table ")
        else re.sub(r"@\{(.+?)\}", lambda m: _value(m[1], results), line)
        for line in template.removesuffix("\n").split("\n")
    ]
    return "\n".join(lines) + "\n"


def _value(asked: str, results: Path) -> str:
    """Return one measured number of a document."""
    name, *given = shlex.split(asked)
    rows = _chosen(results, name, dict(one.split("=", 1) for one in given))
    if len(rows) != 1:
        raise BadData(f"{len(rows)} rows of {name} have {given}, and a number in a sentence is of one")
    return _shown(rows[0], "value")


def _chosen(results: Path, name: str, options: Mapping[str, str]) -> list[BenchRow]:
    """Return the rows of a document that have the wanted values."""
    rows = read_rows(results / f"{name}.json")
    for key, wanted in options.items():
        field = key.rstrip("!~")
        pattern = wanted if "~" in key else "|".join(f"^{re.escape(one)}$" for one in wanted.split("|"))
        rows = [row for row in rows if bool(re.search(pattern, _shown(row, field))) != ("!" in key)]
    if not rows:
        raise BadData(f"no row of {name} has {dict(options)}")
    return rows


def read_rows(path: Path) -> list[BenchRow]:
    """Return the rows of a document."""
    try:
        return [BenchRow(**row) for row in json.loads(path.read_text())["rows"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadData(f"{path.name} is no document of a bench: {error}") from None


def _table(line: str, results: Path) -> str:
    _, name, *given = shlex.split(line)
    options = dict(one.split("=", 1) for one in given)
    index = options.pop("rows").split(",")
    columns, show = options.pop("columns", ""), options.pop("show", "").split(",")
    also = options.pop("also", "")
    rows = _chosen(results, name, options)
    if index[0] == "epsilon":
        rows.sort(key=lambda row: math.inf if row.epsilon is None else row.epsilon)
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    headings = list(show) if not columns else []
    if columns == "epsilon":
        prices = sorted({row.epsilon for row in rows if row.epsilon is not None})
        headings = list(dict.fromkeys(map(_price, prices))) + ["no noise"] * any(row.epsilon is None for row in rows)
    for row in rows:
        cells = lines.setdefault(tuple(_shown(row, key) for key in index), {})
        if columns:
            heading = _shown(row, columns)
            headings += [heading] if heading not in headings else []
            cells[heading] = " / ".join([*([cells[heading]] if heading in cells else []), _shown(row, "value")])
            if also and _shown(row, also):
                cells[also] = _shown(row, also)
        else:
            cells.update({key: _shown(row, key) for key in show})
    headings += [also] if also else []
    labels = [
        *("" if key in ("case", "method") else key for key in index),
        *(HEADINGS.get(one, one) for one in headings),
    ]
    table = [labels, ["---"] * len(labels)]
    table += [[*key, *(cells.get(heading, "") for heading in headings)] for key, cells in lines.items()]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in table), "", _origin(results / f"{name}.json", rows)])


REPEATED: Final = ("seeds", "splits", "draws")
"""Settings of a row that say how often, or with which seeds, it was measured."""


def _origin(path: Path, rows: list[BenchRow]) -> str:
    """Return one line that says which program made a table, how, and with which seeds."""
    document = json.loads(path.read_text())
    said = {
        f"{key} {', '.join(map(str, found)) if isinstance(found := row.settings[key], list) else found}"
        for row in rows
        for key in REPEATED
        if key in row.settings
    }
    told = [f"`{document['command']}`", f"commit {document['commit']}", *sorted(said)]
    return f"*{'; '.join(told)}*"


def _shown(row: BenchRow, key: str) -> str:
    found: Any = getattr(row, key)
    if key == "value" and row.sd is not None:
        if abs(row.value) >= 10:
            return f"{row.value:,.1f} ± {row.sd:,.1f}"
        return f"{number(row.value)} ± {number(row.sd, like=row.value)}"
    if key == "epsilon":
        return "no noise" if found is None else _price(found)
    if found is None:
        return ""
    return found if isinstance(found, str) else number(found)


def _price(epsilon: float) -> str:
    """Format an epsilon to two digits, or to three where two would be off by more than a quarter of a percent."""
    short = float(f"{epsilon:.2g}")
    return f"{short:g}" if abs(short - epsilon) <= epsilon / 400 else f"{epsilon:.3g}"


def number(value: float, *, like: float | None = None) -> str:
    """Format a number: as it is where it is short, else to three digits, or to the last digit of the number `like`."""
    if all(one is None or round(one, 4 if abs(one) < 10 else 2) == one for one in (value, like)):
        return f"{value:,}"
    size = value if like is None else like
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(size)))) if size else 1}f}"


def pages() -> dict[Path, str]:
    """Return every page, by its path."""
    found = {path: path.read_text() for path in sorted(PAGES.rglob("*.md"))}
    return {HERE.parent / path.relative_to(PAGES): render(text, HERE / "results") for path, text in found.items()}


if __name__ == "__main__":
    for target, made in pages().items():
        target.parent.mkdir(exist_ok=True)
        target.write_text(made)
        sys.stdout.write(f"{target.relative_to(HERE.parent)}: {len(made.split()):,} words\n")
    for picture, (names, cases, panels) in PICTURES.items():
        drawn = [row for name in names for row in read_rows(HERE / "results" / f"{name}.json")]
        draw_chart([row for row in drawn if row.case in cases], HERE.parent / picture, panels=panels)
