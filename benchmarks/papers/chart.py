"""One picture of all methods: accuracy against epsilon, a panel per data set or per metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks import BenchRow
from feature_store.results.report.pictures import (
    CLASS_COLORS,
    INK,
    MUTED,
    drawable,
    finish,
    new_figure,
    plain_axes,
)
from labeler.system.files import replace_file

_MARKS = "osD^vPX*<>"
_MOST_COLUMNS = 3
_MOST_METHODS = 9
_MOST_LINES = 2
_LEAST_RATIO = 1.25

Method = tuple[str, str]
"""A method and its level."""


def draw_chart(rows: Sequence[BenchRow], path: Path, *, panels: Literal["case", "metric"] = "case") -> bool:
    """Draw every accuracy that was reached under a finite epsilon; methods without privacy are dashed lines.

    A panel holds the rows of one `case`, the data set with its agents; a case at a single epsilon has nothing to draw.
    Where a case has many methods, those measured at most epsilons are shown.

    Args:
        rows: of any benches; in panels of cases those whose metric is no accuracy are left out.
        path: the PNG file.
        panels: the field whose values each have a panel.

    Returns:
        True if there was anything to draw.
    """
    groups: dict[str, list[BenchRow]] = {}
    for row in rows:
        if panels == "metric" or "accuracy" in row.metric:
            groups.setdefault(getattr(row, panels), []).append(row)
    groups = {name: some for name, some in groups.items() if any(len(p) > 1 for p in _points(some).values())}
    if not groups:
        return False
    columns = 2 if len(groups) == 4 else min(_MOST_COLUMNS, len(groups))
    lines, same = -(-len(groups) // columns), panels == "metric"
    figure = new_figure(5.4 * columns, (4.2 if same else 5.6) * lines)
    for place, (name, inside) in enumerate(groups.items(), start=1):
        axes = plain_axes(figure, grid="y", place=(lines, columns, place))
        _panel(axes, name, inside, "%" if same else "accuracy, %")
        # The methods of all metrics are the same: the panel at the bottom left names them.
        if not same or place == columns * (lines - 1) + 1:
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), labelcolor=INK)
    alt = f"Accuracy against epsilon in {len(groups)} panels, one line per method."
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, finish(figure, path.name, alt).png)
    return True


def _points(rows: Sequence[BenchRow]) -> dict[Method, list[tuple[float, float, float]]]:
    """Return epsilon, accuracy and deviation of every private method, by epsilon."""
    points: dict[Method, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row.epsilon:
            points.setdefault((row.method, row.level or ""), []).append((row.epsilon, row.value, row.sd or 0.0))
    return {method: sorted(found) for method, found in points.items()}


def _panel(axes: Axes, title: str, rows: Sequence[BenchRow], unit: str) -> None:
    axes.set_title(drawable(title, most=60), loc="left", fontsize=11, color=INK)
    axes.set_xscale("log")
    points = _points(rows)
    most_measured = sorted(points, key=lambda method: -len(points[method]))[:_MOST_METHODS]
    shown: set[float] = set()
    for number, (name, level) in enumerate(method for method in points if method in most_measured):
        epsilons, values, deviations = zip(*points[name, level], strict=True)
        shown |= {float(f"{epsilon:.2g}") for epsilon in epsilons}
        axes.errorbar(
            epsilons, values, yerr=deviations if any(deviations) else None,
            label=drawable(f"{name}, {level} level" if level == "agent" else name, most=60),
            color=CLASS_COLORS[number % len(CLASS_COLORS)], marker=_MARKS[number % len(_MARKS)],
            ms=6, lw=1.8, capsize=3,
        )  # fmt: skip
    free = sorted((row for row in rows if row.epsilon is None), key=lambda row: -row.value)[:_MOST_LINES]
    for number, row in enumerate(free):
        label = drawable(f"{row.method} (not private)", most=60)
        axes.axhline(row.value, color=MUTED, lw=1.3, ls=(0, (4 + 3 * number, 3)), label=label)
    axes.set_xticks(_apart(sorted(shown)))
    axes.set_xlabel("epsilon (exact)", color=MUTED)
    axes.set_ylabel(unit, color=MUTED)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _apart(epsilons: Sequence[float]) -> list[float]:
    """Return the epsilons far enough from the one before that their numbers do not overlap."""
    kept: list[float] = []
    for epsilon in epsilons:
        if not kept or epsilon > _LEAST_RATIO * kept[-1]:
            kept.append(epsilon)
    return kept
