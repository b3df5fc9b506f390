"""Figures that read well on light and on dark pages: one palette, and SVG that follows the reader's colour scheme.

A figure is drawn once, in the light colours. In its SVG those exact colours become CSS variables
with a dark twin, so that the picture changes with the page. Figures are made without pyplot, which keeps
state between calls.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.transforms import Bbox

INK, MUTED, LINE, SURFACE = "#1c2431", "#5a6676", "#d8dde3", "#fefefe"
ACCENT, RIGHT, WRONG = "#0a66c3", "#00775d", "#b4461b"
_DARK = {
    INK: "#e8edf3",
    MUTED: "#a0acba",
    LINE: "#38434f",
    SURFACE: "#171e27",
    ACCENT: "#6cb4ff",
    RIGHT: "#3fcba2",
    WRONG: "#ff9566",
}

CLASS_COLORS = (
    "#2a7fc1", "#e08e0b", "#129e78", "#d2571c", "#4fb3e3", "#cc6fa3", "#92962b", "#8468cf", "#b84a6b", "#8f7256",
)  # fmt: skip
"""After Okabe and Ito (2008), lengthened to ten; each stands out on white and on black. Never a class's only sign."""

OTHER_COLOR = "#8a93a0"

FONT = "DejaVu Sans"
PNG_DPI = 160
_PAD = PNG_DPI / 24
"""Pixels around what is drawn."""


@dataclass(frozen=True)
class Picture:
    """A finished picture: a PNG file for any use, an SVG if the page shows it, and words for those who see neither."""

    file_name: str
    alt: str
    png: bytes = field(repr=False)
    svg: str = field(default="", repr=False)

    @property
    def data_uri(self) -> str:
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, laid out without overlaps."""
    return Figure(figsize=(width, height), layout="constrained")


def plain_axes(
    figure: Figure, *, grid: Literal["x", "y"] | None = None, place: tuple[int, int, int] = (1, 1, 1)
) -> Axes:
    """Axes in the page's manner: no box, quiet ticks, a grid along one axis at most.

    Args:
        grid: the axis with lines.
        place: (rows, columns, number) among several axes, as matplotlib counts.
    """
    axes = figure.add_subplot(*place)
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=MUTED, labelcolor=MUTED, length=0, labelsize=10, labelfontfamily=FONT)
    if grid is not None:
        axes.grid(axis=grid, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def finish(figure: Figure, file_name: str, alt: str) -> Picture:
    """Turn a figure into a picture for the page and a file."""
    _lay_out(figure)
    vector = io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # A fixed salt: ids of clip paths would differ from run to run, and equal reports shall be equal bytes.
    with rc_context({"svg.hashsalt": file_name}):
        figure.savefig(vector, format="svg", facecolor="none", metadata=no_metadata, dpi=PNG_DPI)
    return replace(finish_file(figure, file_name, alt), svg=_follow_color_scheme(vector.getvalue().decode()))


def finish_file(figure: Figure, file_name: str, alt: str) -> Picture:
    """Turn a figure into a file only, for what the page shows in its own way."""
    _lay_out(figure)
    raster = io.BytesIO()
    figure.savefig(raster, format="png", facecolor=SURFACE, metadata={"Software": None}, dpi=PNG_DPI)
    return Picture(file_name, alt, raster.getvalue())


def _lay_out(figure: Figure) -> None:
    """Lay a figure out, once: while it has an engine of layout, each saving draws it twice, first to measure texts.

    One plot with a legend below it is measured once, where the engine measures it four times.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        return
    figure.set_dpi(PNG_DPI)
    if len(figure.axes) != 1:
        engine.execute(figure)
        figure.set_layout_engine(None)
        return
    figure.set_layout_engine(None)
    [axes] = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    below = sum(legend.get_window_extent(renderer).height + _PAD for legend in figure.legends)
    axes.set_position((0.1, 0.1 + below / figure.bbox.height, 0.8, 0.8 - below / figure.bbox.height))
    axes.apply_aspect()
    plot = axes.get_window_extent(renderer)
    whole = axes.get_tightbbox(renderer) or plot  # nothing of an invisible one
    left, bottom = plot.x0 - whole.x0 + _PAD, plot.y0 - whole.y0 + _PAD + below
    right, top = figure.bbox.width - (whole.x1 - plot.x1) - _PAD, figure.bbox.height - (whole.y1 - plot.y1) - _PAD
    axes.set_position(Bbox.from_extents(left, bottom, right, top).transformed(figure.transFigure.inverted()))


def _follow_color_scheme(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    light = ";".join(f"--c{number}:{color}" for number, color in enumerate(_DARK))
    dark = ";".join(f"--c{number}:{color}" for number, color in enumerate(_DARK.values()))
    for number, color in enumerate(_DARK):
        svg = re.sub(rf"((?:fill|stroke): ?){color}", rf"\1var(--c{number})", svg)
        # Hatches carry their ground as an attribute, in which variables do not work.
        svg = svg.replace(f'fill="{color}"', f'style="fill:var(--c{number})"')
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head_end = svg.index(">") + 1
    return svg[:head_end] + style + svg[head_end:]


def legible(name: str, *, most: int = 18) -> str:
    """A name as a picture can write it: shortened, on one line, a box for letters the font lacks."""
    line = " ".join(name.split())
    line = line if len(line) <= most else line[: most - 1].rstrip() + "…"
    return "".join(letter if ord(letter) in _letters() and letter.isprintable() else "□" for letter in line)


@cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())


def drawable(name: str, *, most: int = 18) -> str:
    """A legible name as a figure takes it: a dollar begins no mathematics."""
    return legible(name, most=most).replace("$", r"\$")


def class_colors(labels: Iterable[int], num_classes: int) -> dict[int, str]:
    """A colour per class: by number while there are colours for all, else for the most frequent; grey for the rest."""
    if num_classes <= len(CLASS_COLORS):
        return dict(enumerate(CLASS_COLORS[:num_classes]))
    counts: dict[int, int] = {}
    for label in labels:
        if label >= 0:
            counts[label] = counts.get(label, 0) + 1
    frequent = sorted(counts, key=lambda label: (-counts[label], label))
    colors = dict.fromkeys(frequent, OTHER_COLOR)
    return colors | dict(zip(sorted(frequent[: len(CLASS_COLORS)]), CLASS_COLORS, strict=False))
