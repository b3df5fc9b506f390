"""Sites of other styles: does a site's own offset (`labeler.methods.site_offset`) give better labels at the same price?

Photos of Office-Caltech10, all four collections together, are divided at random into four sites of 633 and redrawn:

* photo: as they are.
* art: flattened by a median filter, with stronger and turned colors.
* cartoon: few colors within black outlines.
* sketch: outlines alone, black on white.

Three sites label the fourth, whose images are public. Each row is of whole jobs, run as `labeler run` does it, by the
usual method with and without an offset, and by class means.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.calibration import DELTA, METHODS, Case, job_reports
from benchmarks.accuracy.office_caltech import BACKBONE, data_folder
from benchmarks.data import Split, cache_folder, embedded, split_of
from feature_store.backbones import load_backbone, parse_spec
from workers.progress import ProgressCallback, silent

SIDE = 320
DIVISION_SEED = 5
ASKED: Final[Mapping[str, Mapping[str, Any]]] = {
    "reverse-knn, no offset": {"method": "reverse-knn", "offset_share": 0},
    "reverse-knn": {"method": "reverse-knn"},
    "class means": METHODS["class means"],
}


def bench_styles(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return the mean share of right labels of each style, method and price."""
    styles = styled(data_folder(data), progress)
    seeds = range(4 if full else 1)
    right: dict[tuple[str, str, float], list[float]] = {}
    started = time.perf_counter()
    for style, seed in in_turn(progress, "Styles", [*itertools.product(styles, seeds)]):
        case = Case(styles[style], tuple(own for name, own in styles.items() if name != style))
        for method, epsilon, report in job_reports(case, seed, ASKED):
            right.setdefault((style, method, epsilon), []).append(100 * report["accuracy"])
    seconds = time.perf_counter() - started
    return [
        mean_row(
            style,
            method,
            "labels that are right, %",
            found,
            epsilon=epsilon,
            delta=DELTA,
            level="instance",
            seconds=seconds,
            settings={"seeds": list(seeds), "each": found},
        )
        for (style, method, epsilon), found in right.items()
    ]


def styled(root: Path, progress: ProgressCallback) -> dict[str, Split]:
    """Return the features of each style's site, embedded the first time and kept in the user's cache folder."""
    photos = root / "office-caltech10"
    classes = sorted(path.name for path in (photos / "amazon").iterdir())
    backbone = load_backbone(parse_spec(BACKBONE | {"weights": root / "backbones" / "mobilenetv2_100.safetensors"}))
    kept = {name: cache_folder() / backbone.fingerprint[:16] / f"office-styles-{name}" for name in STYLES}
    with tempfile.TemporaryDirectory() as folder:
        if not all(out.exists() for out in kept.values()):
            _redraw(sorted(photos.rglob("*.jpg")), Path(folder), progress)
        return {
            name: split_of(embedded(Path(folder, name), backbone, out, classes=classes, seed=name, progress=progress))
            for name, out in kept.items()
        }


def _redraw(photos: list[Path], folder: Path, progress: ProgressCallback) -> None:
    order = np.random.default_rng(DIVISION_SEED).permutation(len(photos)).tolist()
    for place, photo in enumerate(order):
        progress("Redrawing photos", place, len(order))
        style = list(STYLES)[place % len(STYLES)]
        out = folder / style / photos[photo].parent.name
        out.mkdir(parents=True, exist_ok=True)
        with Image.open(photos[photo]) as image:
            drawn = image.convert("RGB")
        drawn.thumbnail((SIDE, SIDE))
        STYLES[style](drawn).save(out / f"{place}.png")


def _art(photo: Image.Image) -> Image.Image:
    flat = photo.filter(ImageFilter.MedianFilter(7)).filter(ImageFilter.ModeFilter(9)).convert("HSV")
    hue, saturation, value = flat.split()
    colors = [hue.point([(one + 20) % 256 for one in range(256)]), saturation.point(_stronger), value]
    return Image.merge("HSV", colors).convert("RGB")


def _cartoon(photo: Image.Image) -> Image.Image:
    outlines = _edges(photo, 1.5).point([0 if one > 18 else 255 for one in range(256)])
    few = ImageOps.posterize(photo.filter(ImageFilter.MedianFilter(5)), 2)
    return Image.composite(few, Image.new("RGB", photo.size), outlines)


def _sketch(photo: Image.Image) -> Image.Image:
    return _edges(photo, 1.2).point([0 if one > 17 else 255 for one in range(256)]).convert("RGB")


def _edges(photo: Image.Image, blur: float) -> Image.Image:
    return photo.convert("L").filter(ImageFilter.GaussianBlur(blur)).filter(ImageFilter.FIND_EDGES)


_stronger = [min(255, int(1.8 * one) + 30) for one in range(256)]

STYLES: Final[Mapping[str, Callable[[Image.Image], Image.Image]]] = {
    "photo": lambda photo: photo,
    "art": _art,
    "cartoon": _cartoon,
    "sketch": _sketch,
}
