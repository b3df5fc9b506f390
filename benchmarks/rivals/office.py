"""Rivals at the same price on Office-Caltech10, each of the four domains in turn the server: `labeler bench rivals`.

**Choosing settings**: leave one server out. What a method does on a server is the setting of best mean student
accuracy on the three others at that epsilon, on splits and noise that are not reported. **Reported**: `SPLITS`
splits x `DRAWS` draws, the splits of `labeler bench office-caltech`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.office_caltech import DELTA, DOMAINS
from benchmarks.rivals.contest import ENTRANTS, Choice, Scores, every_setting, scores
from benchmarks.rivals.office_worlds import COLLUDING, office_domains, office_world
from benchmarks.rivals.reading import Reading
from benchmarks.rows import BenchRow
from workers.progress import ProgressCallback, silent

EPSILONS = (0.05, 0.1, 0.3, 1.0)
TUNING_SPLITS, REPORTED_SPLITS = range(100, 104), range(10)
DRAWS = 3


def bench_rivals(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Every rival's student accuracy on every server; see the module.

    Args:
        data: folder that holds `office-caltech10/` and `backbones/`.
        full: as many splits as BENCHMARKS.md reports; else one.

    Raises:
        InvalidSetting: the data are not there.
    """
    domains = office_domains(data, progress)
    tuning, reported = (TUNING_SPLITS, REPORTED_SPLITS) if full else (TUNING_SPLITS[:1], REPORTED_SPLITS[:1])
    draws = DRAWS if full else 1
    epsilons: tuple[float | None, ...] = (*EPSILONS, None)
    tried: dict[str, Scores] = {}
    for number, server in enumerate(DOMAINS):
        progress("Choosing settings", number, len(DOMAINS))
        tried[server] = scores(
            (office_world(domains, server, split) for split in tuning), every_setting(epsilons), draws=draws
        )
    rows: list[BenchRow] = []
    for number, server in enumerate(DOMAINS):
        progress("Rivals", number, len(DOMAINS))
        others = [table for domain, table in tried.items() if domain != server]
        choice = Choice.best(others, epsilons, ENTRANTS)
        found = scores((office_world(domains, server, split) for split in reported), choice.wanted, draws=draws)
        rows += [
            _row(server, name, epsilon, reading, found[setting, epsilon, reading], repr(setting))
            for (name, epsilon, reading), setting in choice.taken.items()
        ]
    progress("Rivals", len(DOMAINS), len(DOMAINS))
    return rows + _means(rows)


def _row(
    server: str, name: str, epsilon: float | None, reading: Reading, found: Sequence[float], setting: str
) -> BenchRow:
    return BenchRow(
        case=server,
        method=name if reading == "plain" else f"{name}; refined",
        metric="student accuracy on unseen images, %",
        value=float(np.mean(found)),
        sd=float(np.std(found, ddof=1)) if len(found) > 1 else None,
        epsilon=epsilon,
        delta=None if epsilon is None else DELTA,
        level=None if epsilon is None else "instance",
        settings={"colluding_agents": COLLUDING, "setting": setting, "runs": len(found)},
    )


def _means(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The mean over servers of each method at each epsilon, and the mean of the servers' deviations."""
    groups: dict[tuple[str, float | None], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault((row.method, row.epsilon), []).append(row)
    return [
        replace(
            several[0],
            case="mean of four servers",
            value=float(np.mean([row.value for row in several])),
            sd=float(np.mean([row.sd or 0.0 for row in several])),
            settings={"colluding_agents": COLLUDING},
        )
        for several in groups.values()
    ]
