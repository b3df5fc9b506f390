"""The picture of slopes: cost against size, both axes logarithmic, with the line that is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.scaling.fits import Slope


def draw_slopes(slopes: Mapping[str, Slope], folder: Path) -> Path:
    """Write scale.png: CPU seconds against each size, a panel per dimension.

    Args:
        slopes: by their names, "agents, METHOD" or what else grows.
        folder: made where it is missing.
    """
    # Loaded where it is wanted: a bench without --out draws nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, dict[str, Slope]] = {}
    for name, slope in slopes.items():
        kind, _, which = name.partition(", ")
        kinds.setdefault(kind, {})[which] = slope
    figure = Figure(figsize=(4.6 * len(kinds), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (kind, lines) in enumerate(sorted(kinds.items()), start=1):
        axes = figure.add_subplot(1, len(kinds), place)
        for color, (which, slope) in zip(("#1f5a7a", "#b4551d", "#3f7d3a"), lines.items(), strict=False):
            sizes = np.array(sorted(slope.at))
            axes.plot(sizes, [slope.at[size] for size in sizes], "o", color=color)
            middle = np.exp(np.mean(np.log(sizes)))
            level = np.exp(np.mean(np.log(list(slope.at.values()))))
            label = f"{which + ', ' if which else ''}exponent {slope.exponent:.2f}"
            axes.plot(sizes, level * (sizes / middle) ** slope.exponent, "-", color=color, label=label)
        axes.set(xscale="log", yscale="log", xlabel=kind, ylabel="CPU seconds")
        axes.minorticks_off()
        axes.set_xticks(sizes, labels=[_say(size) for size in sizes.tolist()])
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(which="major", alpha=0.25)
        axes.legend(frameon=False)
    path = folder / "scale.png"
    figure.savefig(path, dpi=150)
    return path


def _say(size: int) -> str:
    return f"{size / 1e6:g} million" if size >= 1_000_000 else f"{size:,}"
