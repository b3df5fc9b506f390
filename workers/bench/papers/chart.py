"""One picture of all methods: accuracy against epsilon, a panel per data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from feature_store.durable import replace_file
from workers.bench.rows import BenchRow
from workers.report.canvas import CLASS_COLORS, INK, MUTED, drawable, finish_file, new_figure, plain_axes

_MARKS = "osD^vPX*<>"
_MOST_COLUMNS = 3
_LEAST_RATIO = 1.25


def draw_chart(rows: Sequence[BenchRow], path: Path) -> bool:
    """Draw every accuracy that was reached under a finite epsilon; methods without privacy are dashed lines.

    A panel holds the rows of one `case`, the data set with its agents.

    Args:
        rows: of any benches; those whose metric is no accuracy are left out.
        path: the PNG file.

    Returns:
        Whether there was anything to draw.
    """
    accuracies = [row for row in rows if "accuracy" in row.metric]
    cases = [
        case
        for case in dict.fromkeys(row.case for row in accuracies)
        if any(row.case == case and row.epsilon is not None for row in accuracies)
    ]
    if not cases:
        return False
    columns = min(_MOST_COLUMNS, len(cases))
    lines = -(-len(cases) // columns)
    figure = new_figure(5.2 * columns, 4.6 * lines)
    for place, case in enumerate(cases, start=1):
        axes = plain_axes(figure, grid="y", place=(lines, columns, place))
        _panel(axes, case, [row for row in accuracies if row.case == case])
    alt = f"Accuracy against epsilon on {len(cases)} data sets, one line per method."
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, finish_file(figure, path.name, alt).png)
    return True


def _panel(axes: Axes, case: str, rows: Sequence[BenchRow]) -> None:
    axes.set_title(drawable(case, most=60), loc="left", fontsize=11, color=INK)
    axes.set_xscale("log")
    private = list(dict.fromkeys((row.method, row.level or "") for row in rows if row.epsilon is not None))
    shown: set[float] = set()
    for number, (method, level) in enumerate(private):
        points = sorted(
            (row.epsilon, row.value, row.sd or 0.0)
            for row in rows
            if (row.method, row.level or "") == (method, level) and row.epsilon
        )
        epsilons, values, deviations = zip(*points, strict=True)
        shown |= {float(f"{epsilon:.2g}") for epsilon in epsilons}
        axes.errorbar(
            epsilons, values, yerr=deviations if any(deviations) else None,
            label=drawable(f"{method}, {level} level" if level else method, most=60),
            color=CLASS_COLORS[number % len(CLASS_COLORS)], marker=_MARKS[number % len(_MARKS)],
            ms=6, lw=1.8, capsize=3,
        )  # fmt: skip
    axes.set_xticks(_apart(sorted(shown)))
    for number, row in enumerate(row for row in rows if row.epsilon is None):
        style = (0, (4 + 2 * number, 3))
        axes.axhline(row.value, color=MUTED, lw=1.3, ls=style, label=drawable(f"{row.method} (not private)", most=48))
    axes.set_xlabel("epsilon (exact)", color=MUTED)
    axes.set_ylabel("accuracy, %", color=MUTED)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(fontsize=8, frameon=False, loc="best", labelcolor=INK)


def _apart(epsilons: Sequence[float]) -> list[float]:
    """Those far enough from the one before for their numbers not to run into each other."""
    kept: list[float] = []
    for epsilon in epsilons:
        if not kept or epsilon > _LEAST_RATIO * kept[-1]:
            kept.append(epsilon)
    return kept
