"""Benches on scikit-learn's handwritten digits: the demo over seeds, and an audit of every method.

`labeler bench digits`: five agents, SimCLR pretrained on the public part. `labeler bench audit`: each method's promise
of epsilon 5, and what adversaries of `labeler audit` prove of it. Noise and coins are seeded, so the table can be
repeated.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import BenchRow, in_turn, mean_row, rows_of
from benchmarks.sums import task_at
from checks.audit.adversaries import ADVERSARIES, STRONGEST
from checks.audit.run import ONE_RUN, Audit, applicable, digits_pool, run_audit
from labeler.task import Task
from workers.progress import ProgressCallback, silent
from workers.run.demo import TASK, run_demo

SEEDS = range(5)


def bench_digits(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Run the demo with seeds 0 to 4 (quick: 0 and 1) and return the student's mean accuracy."""
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


EPSILON: Final = 5.0
DELTA: Final = 1e-4
CONFIDENCE: Final = 0.95
RUNS, QUICK_RUNS = 800, 20

_TRAINING: Final = {"min_records": 50, "regularisation": 0.1}
_KEPT: Final = _TRAINING | {"max_records": 200}
_MODEL: Final = {"method": "blind-average", "max_queries": 65}
CASES: Final[dict[str, dict[str, Any]]] = {
    "knn": {"method": "knn", "k": 5, "max_queries": 100},
    "knn, winners": {"method": "knn", "k": 50, "max_queries": 100, "release": "winner"},
    "knn, winners of few votes": {"method": "knn", "k": 5, "max_queries": 100, "release": "winner"},
    "reverse-knn": {"method": "reverse-knn", "k": 1, "max_queries": 200},
    "ensemble": {"method": "ensemble", "max_queries": 100},
    "softmax, records bounded": _MODEL | {"training": _KEPT},
    "softmax": _MODEL | {"training": _TRAINING},
    "svm, records bounded": _MODEL | {"training": _KEPT | {"learner": "svm"}},
    "svm, regularisation 1.2": _MODEL | {"training": _TRAINING | {"learner": "svm", "regularisation": 1.2}},
    "class means": _MODEL | {"training": {"learner": "means", "axes": 64}},
    "federated, 10 steps": {
        "method": "federated",
        "max_queries": 170,
        "training": {
            "min_records": 50,
            "regularisation": 1e-3,
            "iterations": 10,
            "clip_norm": 0.5,
            "sampled": {"rate": 0.3, "learning_rate": 0.1},
        },
    },
    "aux-distill, records bounded": {
        "method": "aux-distill",
        "max_queries": 350,
        "training": _KEPT | {"dimension": 64, "regularisation": 0.03},
    },
    "aux-distill": {"method": "aux-distill", "max_queries": 100, "training": _TRAINING | {"dimension": 8}},
}
"""Fields of the task, by name."""

MORE_ADVERSARIES: Final = {"knn": tuple(ADVERSARIES), "reverse-knn": (STRONGEST, ONE_RUN)}
"""Adversaries beside the strongest."""

MORE_RUNS: Final = {"aux-distill, records bounded": 2_000}
"""Runs of attacks that prove more with more runs."""


def bench_audit(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Audit every method."""
    pool = digits_pool(seed=0)
    rows = []
    for case, fields in CASES.items():
        task = audited(fields, pool.classes)
        runs = MORE_RUNS.get(case, RUNS) if full else QUICK_RUNS
        audit = Audit(
            task,
            applicable(task, MORE_ADVERSARIES.get(case, (STRONGEST,))),
            runs,
            confidence=CONFIDENCE,
            noise_seed=0,
            features=pool.features,
            labels=pool.labels,
            is_private=pool.is_private,
        )

        def tell(stage: str, done: int, total: int, case: str = case) -> None:
            progress(f"{case}: {stage}", done, total)

        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            document = run_audit(audit, Path(folder), progress=tell)
        rows += _rows(case, task, runs, document)
    return rows


def audited(fields: dict[str, Any], classes: tuple[str, ...]) -> Task:
    """Return the task with the noise that its promise takes."""
    whole = fields | {"name": "audit", "classes": classes, "delta": DELTA, "agents": 3, "colluding_agents": 1}
    return task_at(EPSILON, whole | {"backbone_fingerprint": "audit"})


def _rows(case: str, task: Task, runs: int, document: dict[str, Any]) -> list[BenchRow]:
    found = document["findings"]
    settings = {"runs": runs, "sigma_votes": task.sigma_votes, "confidence": CONFIDENCE}
    promised = {"epsilon": found["promised_epsilon"], "delta": DELTA, "level": "instance"}
    rows = []
    for one in found["findings"]:
        told = {"moved_epsilon": one.get("moved_epsilon"), "mu": one["mu"], "any_epsilon": one["any_epsilon"]}
        measured = [
            (one["adversary"], metric, one[key], f"at most {found[f'promised_{key}']:.3f}")
            for metric, key in (("epsilon at least", "epsilon"), ("advantage", "advantage"))
        ]
        rows += rows_of(case, measured, **promised, settings=settings | told | {"promised_mu": found["promised_mu"]})
    return rows
