"""Curves from epsilon 0.05 to 2 on CIFAR-10, frozen networks that packages carry: `labeler bench curves`.

Settings and reading of each method at each epsilon are those of best accuracy on other images of the set
(`cifar10_worlds`), so no label of an image that is scored has chosen anything. `--out` takes a folder for the chart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.data_sets import Cifar10Backbone, cifar10_features, data_root
from benchmarks.rivals.cifar10_worlds import AGENTS, DELTA, cifar10_world
from benchmarks.rivals.contest import ENTRANTS, Choice, Scores, every_setting, scores
from benchmarks.rivals.reading import READINGS
from benchmarks.rows import BenchRow
from workers.progress import ProgressCallback, silent

EPSILONS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SEEDS, DRAWS, TUNING_SEED = (0, 1, 2), 3, 100
CHART: Final = "rivals.png"


@dataclass(frozen=True)
class Case:
    """One panel of the chart."""

    backbone: Cifar10Backbone
    records: int

    @property
    def name(self) -> str:
        network = "EfficientNet-Lite2" if self.backbone == "efficientnet-lite2" else "MobileNetV2"
        return f"CIFAR-10, {network}, {AGENTS} agents x {self.records:,}"


CASES: Final = (Case("efficientnet-lite2", 400), Case("efficientnet-lite2", 4_000), Case("mobilenetv2", 400))


def bench_curves(
    *, data: Path | None = None, full: bool = False, out: Path | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Every method's curve in every case; see the module.

    Args:
        data: folder of the real data sets.
        full: all cases and seeds; else the first of each at two epsilons.
        out: folder for the chart; None draws nothing.

    Raises:
        InvalidSetting: the data are not there.
    """
    root = data_root(data)
    epsilons: tuple[float | None, ...] = (*(EPSILONS if full else (0.1, 1.0)), None)
    rows: list[BenchRow] = []
    cases = CASES if full else CASES[:1]
    for number, case in enumerate(cases):
        progress("CIFAR-10", number, len(cases))
        features = cifar10_features(root, backbone=case.backbone, progress=progress)
        world = cifar10_world(features, TUNING_SEED, records=case.records, tuning=True)
        tried = scores([world], every_setting(epsilons), draws=DRAWS if full else 1)
        choice = Choice.best([tried], epsilons, ENTRANTS)
        seeds = SEEDS if full else SEEDS[:1]
        worlds = (cifar10_world(features, seed, records=case.records) for seed in seeds)
        found = scores(worlds, choice.wanted, draws=DRAWS if full else 1)
        rows += [_row(case, name, epsilon, choice, tried, found) for epsilon in epsilons for name in ENTRANTS]
    progress("CIFAR-10", len(cases), len(cases))
    if out is not None:
        from benchmarks.papers.chart import draw_chart

        draw_chart([row for row in rows if row.epsilon is not None], out / CHART)
    return rows


def _row(case: Case, name: str, epsilon: float | None, choice: Choice, tried: Scores, found: Scores) -> BenchRow:
    """The reading, too, is the one that was best on the tuning images."""
    options = {reading: choice.taken[name, epsilon, reading] for reading in READINGS}
    reading = max(READINGS, key=lambda one: float(np.mean(tried[options[one], epsilon, one])))
    values = found[options[reading], epsilon, reading]
    return BenchRow(
        case=case.name,
        method=name,
        metric="test accuracy, %",
        value=float(np.mean(values)),
        sd=float(np.std(values, ddof=1)) if len(values) > 1 else None,
        epsilon=epsilon,
        delta=None if epsilon is None else DELTA,
        level=None if epsilon is None else "instance",
        settings={"setting": repr(options[reading]), "reading": reading, "colluding_agents": 1, "runs": len(values)},
    )
