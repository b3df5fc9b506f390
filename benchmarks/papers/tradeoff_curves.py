"""Pictures of trade-off curves: what sampling does to one, how far a limit is from the truth, what accuracy costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks import BenchRow
from benchmarks.accounting.federated import LocalTraining
from benchmarks.accounting.tradeoff import SampledGaussian, TradeOff, gaussian, lower_hull, mix
from feature_store.durable import replace_file
from workers.report.canvas import ACCENT, INK, LINE, MUTED, RIGHT, WRONG, Picture, finish, new_figure, plain_axes

_ALPHAS = np.concatenate([[0.0], np.geomspace(1e-6, 0.05, 300), np.linspace(0.05, 1.0, 700)])
_DOTTED, _DASHED = (0, (1.2, 2.0)), (0, (5, 2.5))


def draw_sampling(path: Path, *, mu: float = 1.8, probability: float = 0.35) -> Path:
    """f = G_mu, f_p = p f + (1 - p) Id, its inverse, and C_p(f), the symmetric curve below both."""
    alphas = np.concatenate([np.geomspace(1e-9, 1e-2, 400), np.linspace(0.01, 1, 1600)])
    mixed = mix(lower_hull(alphas, gaussian(mu)(alphas)), probability)
    figure = new_figure(4.9, 5.6)
    axes = _square(plain_axes(figure, grid="y"))
    axes.plot(_ALPHAS, 1 - _ALPHAS, color=LINE, lw=1.6)
    axes.text(0.66, 0.36, "Id: nothing to see", color=MUTED, fontsize=9.5)
    axes.plot(_ALPHAS, gaussian(mu)(_ALPHAS), color=MUTED, lw=1.6, ls=_DOTTED, label=f"f: Gaussian, μ = {mu:g}")
    axes.plot(_ALPHAS, mixed(_ALPHAS), color=RIGHT, lw=1.8, ls=_DASHED, label=f"f_p, seen with p = {probability:g}")
    axes.plot(_ALPHAS, mixed.inverse()(_ALPHAS), color=WRONG, lw=1.8, ls=_DASHED, label="inverse of f_p: other order")
    axes.plot(
        _ALPHAS, SampledGaussian(mu, probability)(_ALPHAS), color=ACCENT, lw=2.4, label="C_p(f): below both, symmetric"
    )
    _name(axes)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9.5, labelcolor=INK)
    alt = (
        f"Four trade-off curves below the line 1 - alpha: a Gaussian with mu {mu:g}, the same seen with probability "
        f"{probability:g}, its inverse, and the subsampling operator's symmetric curve below these two."
    )
    return _write(finish(figure, path.name, alt), path)


def draw_limit(path: Path, title: str, training: LocalTraining) -> Path:
    """Theorem 2's limit, the exact composition it stands for, and Poisson sampling: all of the curves, and their ends.

    Args:
        path: the PNG file; an SVG is written beside it.
        title: what is trained.
        training: its numbers.
    """
    exact, sampled = training.as_printed(interval=1e-3), training.exact(interval=1e-3)
    curves: list[tuple[TradeOff, str, object, str]] = [
        (gaussian(training.clt_mu), WRONG, _DASHED, f"theorem 2, the limit: μ = {training.clt_mu:.2f}"),
        (exact.curve(), ACCENT, "-", f"what it is the limit of, exactly: like μ = {exact.mu_at(1e-5):.2f} at δ = 1e-5"),
        (sampled.curve(), RIGHT, "-", f"Poisson batches, exactly: like μ = {sampled.mu_at(1e-5):.2f}"),
    ]
    figure = new_figure(8.8, 5.2)
    for place in (1, 2):
        axes = plain_axes(figure, grid="y", place=(1, 2, place))
        if place == 1:
            _square(axes)
            axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
        else:
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set(xlim=(1e-5, 1), ylim=(1e-5, 1), box_aspect=1)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_locator(NullLocator())
            axes.set_title("the same on logarithmic axes", loc="left", fontsize=11, color=INK, pad=10)
        axes.plot(_ALPHAS, 1 - _ALPHAS, color=LINE, lw=1.6)
        for curve, color, style, label in curves:
            axes.plot(_ALPHAS, curve(_ALPHAS), color=color, lw=2.0, ls=style, label=label if place == 1 else None)
        _name(axes)
    figure.legend(loc="outside lower center", frameon=False, fontsize=10, labelcolor=INK)
    alt = f"Trade-off curves of {title}: " + "; ".join(label for _, _, _, label in curves)
    return _write(finish(figure, path.name, alt), path)


def draw_personalisation(path: Path, rows: Sequence[BenchRow]) -> Path | None:
    """Accuracy of personal and global models against mu, a line per share of the global model; None without rows."""
    points = [row for row in rows if "in_chart" in row.settings and "own digits" in row.metric]
    by_share: dict[float, list[BenchRow]] = {}
    for row in points:
        by_share.setdefault(row.settings["interpolation"], []).append(row)
    shares = sorted(share for share, own in by_share.items() if len({row.settings["exact_mu"] for row in own}) > 1)
    if not shares:
        return None
    figure = new_figure(6.4, 4.4)
    axes = plain_axes(figure, grid="y")
    for method, marker, style in (("personalised", "o", "-"), ("global", "s", _DASHED)):
        for share, color in zip(shares, (ACCENT, RIGHT, WRONG), strict=False):
            chosen = sorted(
                (row.settings["exact_mu"], row.value) for row in by_share[share] if row.method.startswith(method)
            )
            if chosen:
                mus, values = zip(*chosen, strict=True)
                label = f"{method}, α = {share:g}" + (": trained alone" if share == 0 and marker == "o" else "")
                axes.plot(mus, values, color=color, marker=marker, ms=5, lw=1.8, ls=style, label=label)
    axes.plot([2.71], [90.03], "*", ms=15, color=MUTED, label="paper: 90.03 % at 2.71, by its limit")
    axes.set_xscale("log")
    ticks = [0.25, 0.5, 1.0, 2.0, 2.71]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("exact μ for one record (left is more private)", color=MUTED)
    axes.set_title("test accuracy on each client's own digits, %", loc="left", color=MUTED, fontsize=10.5)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9.5, labelcolor=INK, ncols=2)
    best = max(points, key=lambda row: row.value)
    alt = (
        f"Accuracy against mu; the best personal models reach {best.value:.1f} % at mu {best.settings['exact_mu']:.2f}."
    )
    return _write(finish(figure, path.name, alt), path)


def _square(axes: Axes) -> Axes:
    axes.set(xlim=(0, 1), ylim=(0, 1.0), aspect="equal")
    for setter in (axes.set_xticks, axes.set_yticks):
        setter([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return axes


def _name(axes: Axes) -> None:
    axes.set_xlabel("type I error: says the record is there, it is not", color=MUTED, fontsize=10)
    axes.set_ylabel("least type II error: misses it", color=MUTED, fontsize=10)


def _write(picture: Picture, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, picture.png)
    replace_file(path.with_suffix(".svg"), picture.svg.encode())
    return path
