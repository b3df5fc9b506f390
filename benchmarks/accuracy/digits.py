"""The demo over seeds: handwritten digits of scikit-learn, five agents, SimCLR pretrained on the public part."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import BenchRow, in_turn, mean_row
from workers.progress import ProgressCallback, silent
from workers.run.demo import TASK, run_demo

SEEDS = range(5)


def bench_digits(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Run the demo with seeds 0 to 4 (quick: 0 and 1) and give the student's mean accuracy."""
    seeds = SEEDS if full else SEEDS[:2]
    accuracies, seconds, privacy = [], [], {}
    for seed in in_turn(progress, "Demo over seeds", seeds):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            summary = run_demo(Path(folder) / "demo", seed=seed)
            seconds.append(time.perf_counter() - started)
        accuracies.append(100 * summary["student"]["accuracy"])
        privacy = summary["privacy"]
    return [
        mean_row(
            "handwritten digits, 5 agents, 1 may collude",
            "reverse kNN, cluster centres, histogram; SimCLR on the public digits",
            "student accuracy on unseen images, %",
            accuracies,
            epsilon=privacy["instance"]["epsilon"],
            delta=privacy["delta"],
            level="instance",
            reference="at least 85 at epsilon at most 2",
            seconds=statistics.mean(seconds),
            settings={"seeds": list(seeds), "each": accuracies} | TASK.model_dump(mode="json"),
        )
    ]
