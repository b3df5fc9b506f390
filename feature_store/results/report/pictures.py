"""The pictures of a report, drawn from released or public data alone; each is left out where there is nothing to draw.

They read well on light and on dark pages. A figure is drawn once, in the light colors. In its SVG those exact colors
become CSS variables with a dark twin, so that the picture changes with the page. Figures are made without pyplot,
which keeps state between calls.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from feature_store.results.page_templates import count
from feature_store.results.report.model import JobReport, PriceRow, bands
from feature_store.results.report.words import say_number, say_percent
from labeler.budget import say_epsilon, say_estimate

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
    """An empty figure of this size in inches, laid out without overlaps."""
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
    vector, raster = io.BytesIO(), io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # A fixed salt: ids of clip paths would differ from run to run, and equal reports shall be equal bytes.
    with rc_context({"svg.hashsalt": file_name}):
        figure.savefig(vector, format="svg", facecolor="none", metadata=no_metadata, dpi=PNG_DPI)
    figure.savefig(raster, format="png", facecolor=SURFACE, metadata={"Software": None}, dpi=PNG_DPI)
    return Picture(file_name, alt, raster.getvalue(), _follow_color_scheme(vector.getvalue().decode()))


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


@cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())


def drawable(name: str, *, most: int = 18) -> str:
    """A name as a figure can write it: shortened, on one line, a box for letters that the font lacks, and no math."""
    line = " ".join(name.split())
    line = line if len(line) <= most else line[: most - 1].rstrip() + "…"
    written = "".join(letter if ord(letter) in _letters() and letter.isprintable() else "□" for letter in line)
    return written.replace("$", r"\$")


def class_colors(labels: Iterable[int], num_classes: int) -> dict[int, str]:
    """A color per class: by number while there are colors for all, else for the most frequent; gray for the rest."""
    if num_classes <= len(CLASS_COLORS):
        return dict(enumerate(CLASS_COLORS[:num_classes]))
    counts: dict[int, int] = {}
    for label in labels:
        if label >= 0:
            counts[label] = counts.get(label, 0) + 1
    frequent = sorted(counts, key=lambda label: (-counts[label], label))
    colors = dict.fromkeys(frequent, OTHER_COLOR)
    return colors | dict(zip(sorted(frequent[: len(CLASS_COLORS)]), CLASS_COLORS, strict=False))


PICTURE_FILES = (
    "accuracy_vs_epsilon.png", "budget.png", "price.png", "coverage.png", "vote_margins.png",
    "calibration.png",
)  # fmt: skip
"""Every file this module may make; a report removes those an earlier one left behind."""

CALIBRATION = ((0.0, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.85), (0.85, 0.95), (0.95, 1.0))
LEAST_IN_A_BAND = 10
"""Of fewer labels the share that is right tells nothing."""

_NAME_SIZE = np.array([0.3, 0.06])


def draw_pictures(report: JobReport) -> dict[str, Picture]:
    """Draw every picture that this report has data for, by file name without `.png`."""
    if report.attributes is not None:
        # The other pictures are of one class per question.
        return {drawn.file_name.removesuffix(".png"): drawn for drawn in (budget(report), price(report)) if drawn}
    drawn = (
        accuracy(report), calibration(report), budget(report), price(report), coverage(report), vote_margins(report),
    )  # fmt: skip
    return {picture.file_name.removesuffix(".png"): picture for picture in drawn if picture is not None}


def accuracy(report: JobReport) -> Picture | None:
    """Student accuracy against instance epsilon, with this job."""
    here = report.privacy.instance.epsilon, report.student_accuracy
    if not report.curve or (len(report.curve) < 2 and here[0] is None):
        return None
    figure = new_figure(3.6, 3.0)
    axes = plain_axes(figure, grid="y")
    points = sorted(report.curve, key=lambda point: point.epsilon)
    epsilons = np.array([point.epsilon for point in points])
    means = np.array([point.accuracy for point in points])
    spread = np.array([point.sd or 0.0 for point in points])
    if spread.any():
        axes.fill_between(
            epsilons, np.clip(means - spread, 0, 1), np.clip(means + spread, 0, 1), color=ACCENT, alpha=0.16, lw=0
        )
    axes.plot(epsilons, means, color=ACCENT, lw=2.2, marker="o", ms=5, label="student, mean of repetitions")
    alt = (
        f"Line chart of student accuracy against epsilon: {say_percent(means[0])} at epsilon "
        f"{say_estimate(epsilons[0], digits=3)}, {say_percent(means[-1])} at {say_estimate(epsilons[-1], digits=3)}."
    )
    if here[0] is not None and here[1] is not None:
        label = f"this job: {say_percent(here[1])}"
        axes.plot([here[0]], [here[1]], "*", ms=19, mfc=WRONG, mec=SURFACE, mew=1.2, zorder=5, label=label)
        alt += f" This job reached {say_percent(here[1])} at {say_epsilon(here[0])}."
    every = [*epsilons, *([here[0]] if here[0] is not None else [])]
    positive = [value for value in every if value > 0]
    if positive and len(positive) == len(every) and max(positive) > 6 * min(positive):
        axes.set_xscale("log")
        axes.set_xticks(_decade_ticks(min(positive), max(positive)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], min_n_ticks=4))
    _label(axes, x="epsilon for one image (left: more private)")
    _legend(axes)
    return finish(figure, "accuracy_vs_epsilon.png", alt)


def calibration(report: JobReport) -> Picture | None:
    """The share of right labels by stated confidence; on the diagonal labels mean what they say."""
    if report.images is None or report.image_accuracy is None:
        return None
    found = [band for band in bands(report.images, CALIBRATION) if band.known >= LEAST_IN_A_BAND]
    if len(found) < 2:
        return None
    figure = new_figure(3.6, 3.0)
    axes = plain_axes(figure, grid="y")
    stated = [band.stated for band in found]
    shares = [band.right / band.known for band in found]
    reach = np.array([band.interval() for band in found])
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1.2, ls=(0, (4, 3)), label="means what it says")
    axes.vlines(stated, reach[:, 0], reach[:, 1], color=ACCENT, lw=1.6)
    axes.plot(stated, shares, "o", color=ACCENT, ms=6, label="labels of similar confidence")
    low = max(0.0, min(*stated, *reach[:, 0].tolist()) - 0.04)
    axes.set(xlim=(low, 1.02), ylim=(low, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    _label(axes, x="confidence stated", y="are right")
    _legend(axes)
    told = "; ".join(f"{say_percent(band.stated)} stated, {say_percent(band.share_right)} right" for band in found)
    return finish(figure, "calibration.png", f"Chart of stated confidence against the share that is right: {told}.")


def budget(report: JobReport) -> Picture | None:
    """The epsilon that the first q questions had spent."""
    spent = report.privacy.spent
    if len(spent) < 2:
        return None
    figure = new_figure(3.6, 2.7)
    axes = plain_axes(figure, grid="y")
    asked, epsilons = np.array(spent, dtype=np.float64).T
    axes.fill_between(asked, epsilons, color=ACCENT, alpha=0.14, lw=0)
    axes.plot(asked, epsilons, color=ACCENT, lw=2.2)
    axes.plot(asked[-1], epsilons[-1], "o", color=ACCENT, ms=7)
    axes.annotate(
        say_epsilon(epsilons[-1]), (asked[-1], epsilons[-1]), xytext=(-4, 8), textcoords="offset points",
        ha="right", color=INK, fontsize=12, weight="bold",
    )  # fmt: skip
    axes.set_ylim(0, max(1e-9, 1.22 * epsilons.max()))
    axes.set_xlim(min(0.0, asked[0]), asked[-1] * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    _label(axes, x="questions asked", y="epsilon spent for one image")
    alt = (
        f"Area chart of the budget spent: epsilon reaches {say_epsilon(epsilons[-1])} after {asked[-1]:,.0f} questions."
    )
    return finish(figure, "budget.png", alt)


def price(report: JobReport) -> Picture | None:
    """The price of the releases for one private image, in several ways."""
    rows = report.privacy.breakdown
    known = [row.instance_epsilon for row in rows if row.instance_epsilon is not None]
    if not known:
        return None
    figure = new_figure(4.4, 0.5 + 0.54 * len(rows))
    axes = plain_axes(figure)
    places, widest = np.arange(len(rows)), max(known) or 1.0
    tints = [ACCENT if row.is_reported else OTHER_COLOR for row in rows]
    axes.barh(places, [row.instance_epsilon or 0.0 for row in rows], height=0.36, color=tints)
    for place, row in zip(places.tolist(), rows, strict=True):
        weight = "bold" if row.is_reported else "normal"
        axes.text(0, place - 0.28, drawable(row.name, most=46), va="bottom", color=INK, fontsize=10, weight=weight)
        end = (row.instance_epsilon or 0.0) + 0.015 * widest
        axes.text(end, place, _say_row(row), va="center", color=INK, fontsize=10.5, weight=weight)
    axes.set(xlim=(0, 1.22 * widest), ylim=(len(rows) - 0.6, -0.85), xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("epsilon for one private image", loc="left", color=MUTED, fontsize=10.5)
    named = "; ".join(f"{row.name} {_say_row(row)}" for row in rows)
    return finish(figure, "price.png", f"Bar chart of the price, epsilon for one image: {named}.")


def _say_row(row: PriceRow) -> str:
    return (say_epsilon if row.is_reported else say_estimate)(row.instance_epsilon, digits=4)


def coverage(report: JobReport) -> Picture | None:
    """The public set on a map, colored by the released label that covers each image, and the questions on it."""
    chart = report.coverage
    if chart is None:
        return None
    labels = np.array([query.label for query in report.queries])
    colors = class_colors(labels.tolist(), report.task.num_classes)
    figure = new_figure(4.4, 3.6)
    axes = plain_axes(figure)
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines["bottom"].set_visible(False)
    covered = chart.point_query >= 0
    point_labels = np.where(covered, labels[chart.point_query], -1)
    # Many dots are drawn as one image, whose colors cannot change with the page: mid-tones only.
    dot_tints = [
        to_rgba(colors.get(label, OTHER_COLOR), 0.55 if label >= 0 else 0.25) for label in point_labels.tolist()
    ]
    dot_size = float(np.clip(9000 / max(1, len(chart.points)), 5, 20))
    dots = axes.scatter(chart.points[:, 0], chart.points[:, 1], dot_size, dot_tints, lw=0)
    dots.set_rasterized(len(chart.points) > 400)
    answered = labels >= 0
    has_room = len(labels) <= 60 and max(len(name) for name in report.task.classes) <= 2
    size, rim = (150, 1.2) if has_room else (64, 1.1) if len(labels) <= 400 else (14, 0.0)
    at, tints = chart.query_points[answered], [colors[label] for label in labels[answered].tolist()]
    questions = axes.scatter(at[:, 0], at[:, 1], size, tints, lw=rim, ec=SURFACE, zorder=3)
    questions.set_rasterized(len(labels) > 400)
    lost = chart.query_points[~answered]
    axes.scatter(lost[:, 0], lost[:, 1], 44, MUTED, marker="x", lw=1.8, zorder=3)
    if has_room:
        for (x, y), label in zip(at.tolist(), labels[answered].tolist(), strict=True):
            text = axes.text(x, y, drawable(report.class_name(label)), color="white", fontsize=8.5, zorder=4)
            text.set(ha="center", va="center_baseline", weight="bold")
    else:
        _name_regions(axes, report, labels, colors)
    alt = (
        f"Map of {count(chart.public_images, 'public image')} by similarity, with "
        f"{count(len(labels), 'question')} marked. "
        f"Answered questions cover {say_percent(chart.fraction)} of the images."
    )
    return finish(figure, "coverage.png", alt)


def _name_regions(axes: Axes, report: JobReport, labels: NDArray[np.int64], colors: dict[int, str]) -> None:
    """Write each class's name once, at a question near the middle of its class with room for it."""
    if report.coverage is None:
        return
    reach = np.ptp(report.coverage.query_points, axis=0).max() or 1.0
    taken = np.full((1, 2), np.inf)
    halo = [withStroke(linewidth=3, foreground=SURFACE)]
    for label in [label for label, color in colors.items() if color != OTHER_COLOR and (labels == label).any()]:
        own = report.coverage.query_points[labels == label]
        own = own[np.linalg.norm(own - np.median(own, axis=0), axis=1).argsort(kind="stable")]
        apart = np.abs(own[:, None] - taken[None]) > reach * _NAME_SIZE
        place = own[apart.any(axis=2).all(axis=1).argmax()]
        taken = np.vstack([taken, place])
        axes.annotate(
            drawable(report.class_name(label), most=14), place, xytext=(0, 6), textcoords="offset points", ha="center",
            va="bottom", color=INK, fontsize=10.5, weight="bold", path_effects=halo, zorder=5,
        )  # fmt: skip


def vote_margins(report: JobReport) -> Picture | None:
    """The lead of the first class over the second in the released noisy sums."""
    asked = [query for query in report.queries if query.noisy_votes is not None]
    if len(asked) < 2:
        return None
    votes = np.sort(np.stack([query.noisy_votes for query in asked if query.noisy_votes is not None]), axis=1)
    gaps = votes[:, -1] - votes[:, -2]
    groups = {
        "right": np.array([query.is_right is True for query in asked]),
        "wrong": np.array([query.is_right is False for query in asked]),
        "answered": np.array([query.label >= 0 and query.is_right is None for query in asked]),
        "no label": np.array([query.label < 0 for query in asked]),
    }
    figure = new_figure(3.6, 2.7)
    axes = plain_axes(figure, grid="y")
    edges = np.linspace(0, max(float(gaps.max()), 1e-9), min(24, 6 + math.isqrt(len(gaps))) + 1)
    looks = {
        "right": (RIGHT, ""),
        "wrong": (WRONG, "////"),
        "answered": (ACCENT, ""),
        "no label": (OTHER_COLOR, ".."),
    }
    base = np.zeros(len(edges) - 1)
    for name, members in groups.items():
        if not members.any():
            continue
        heights = np.histogram(gaps[members], edges)[0]
        color, hatch = looks[name]
        some = heights > 0
        axes.bar(
            edges[:-1][some], heights[some], np.diff(edges)[some], base[some], align="edge", fc=color, hatch=hatch,
            ec=SURFACE, lw=1, label=f"{name} ({members.sum():,})",
        )  # fmt: skip
        base += heights
    sigma = report.task.total_sigma_votes * math.sqrt(2)
    if sigma < edges[-1]:
        axes.axvline(sigma, color=INK, lw=1.3, ls=(0, (4, 3)), label=f"noise of such a gap: {say_number(sigma)} votes")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    _label(axes, x="noisy votes, first class above second", y="questions")
    _legend(axes)
    alt = (
        f"Histogram of {count(len(gaps), 'vote margin')} in the released noisy sums; half of them are above "
        f"{say_number(float(np.median(gaps)))} votes."
    )
    return finish(figure, "vote_margins.png", alt)


def _decade_ticks(least: float, most: float) -> list[float]:
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    inside = [tick for tick in ticks if 0.8 * least <= tick <= 1.25 * most]
    return inside or [least, most]


def _label(axes: Axes, *, x: str = "", y: str = "") -> None:
    axes.set_xlabel(x, color=MUTED, fontsize=10.5, labelpad=6)
    if y:
        axes.set_title(y, loc="left", color=MUTED, fontsize=10.5)


def _legend(axes: Axes) -> None:
    axes.figure.legend(loc="outside lower center", frameon=False, labelcolor=INK, fontsize=10, ncols=1)
