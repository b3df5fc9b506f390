"""What a job gives back: pseudo-labels, a student, a report. All of it follows from what was released, at no price."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.renyi import improved_epsilon
from labeler.planning import METHOD, PrivacyStatement, price
from labeler.pseudo_labels import AnswerStatus, JobStamp, pseudo_label_table
from labeler.release import Release
from labeler.task import Task
from workers.job_folder import JobFolder, replacing, write_durably
from workers.preparation import PreparedJob
from workers.progress import ProgressCallback, StageClock, silent
from workers.report import (
    MAX_PER_QUERY,
    AnsweredQuery,
    CurvePoint,
    JobReport,
    LevelPrice,
    PriceRow,
    Privacy,
    StudentOutcome,
    map_public_set,
    report_json,
    shown_queries,
    write_report,
)
from workers.students import NoisyAnswers, Student, fit_student

CURVE_FACTORS = (8.0, 4.0, 2.0, 1.4)
"""How many times noisier the same answers are made to show what a cheaper job would have given."""
CURVE_DRAWS = 5
POINTS_OF_SPENDING = 100


def publish(
    prepared: PreparedJob,
    releases: Sequence[Release],
    folder: JobFolder,
    *,
    clock: StageClock,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Write everything a job gives back; the report last.

    Returns:
        The content of report.json.
    """
    answers = collect_answers(prepared, releases)
    created_at = datetime.now(UTC)
    with clock.stage("write pseudo-labels"):
        _write_pseudo_labels(prepared, answers, folder, created_at)
        _write_questions(prepared, folder)
    with clock.stage("train student"):
        progress("Student", 0, 2)
        student = fit_student(
            prepared.job.file.student.kind,
            answers,
            prepared.public.features,
            num_classes=prepared.task.num_classes,
            seed=prepared.job.file.student.seed,
        )
        student.save(folder.out / "student")
        progress("Student", 1, 2)
        _write_student_labels(prepared, student, folder.out)
        curve = _accuracy_against_epsilon(prepared, answers, student)
        progress("Student", 2, 2)
    with clock.stage("report"):
        report = _report(prepared, answers, student, curve, created_at=created_at, is_seeded=_is_seeded(releases))
        report = replace(report, seconds={name: round(spent, 3) for name, spent in clock.seconds.items()})
        write_report(report, folder.out)
        summary = report_json(report)
        write_durably(folder.out / "report.json", json.dumps(summary, indent=1, allow_nan=False).encode())
    return summary


def collect_answers(prepared: PreparedJob, releases: Sequence[Release]) -> NoisyAnswers:
    """Put the releases of all batches into the shape students learn from."""
    task = prepared.task
    votes = None
    if task.release == "histogram":
        votes = np.concatenate([release.noisy_votes for release in releases if release.noisy_votes is not None])
    contributors = {len(release.contributors) for release in releases}
    return NoisyAnswers(
        features=prepared.queries.features,
        noisy_votes=votes,
        labels=np.concatenate([release.labels for release in releases]),
        # With fewer contributors there is less noise; the largest is the cautious guess.
        total_sigma_votes=task.sigma_votes * math.sqrt(max(contributors) / task.noise_contributors),
        k=task.k,
        agents=task.agents,
        method=task.method,
        assignment=prepared.queries.assignment,
    )


def _is_seeded(releases: Sequence[Release]) -> bool:
    return any(release.is_seeded for release in releases)


def query_names(prepared: PreparedJob) -> tuple[list[str], list[str], NDArray[np.int64]]:
    """Ids and sources of the queries, and the row of the public image each stands for.

    A query that is the centre of a cluster stands for the image nearest to it.
    """
    rows = prepared.queries.nearest_rows
    is_cluster = prepared.job.file.queries.strategy == "clustered"
    kind = "cluster" if is_cluster else "query"
    ids = [f"{kind}-{number:06d}" for number in range(len(rows))]
    sources = prepared.public.sources
    return ids, [sources[row] for row in rows.tolist()], rows


def _write_pseudo_labels(prepared: PreparedJob, answers: NoisyAnswers, folder: JobFolder, created_at: datetime) -> None:
    task = prepared.task
    ids, sources, _ = query_names(prepared)
    sequence = {entry["id"]: number for number, entry in enumerate(folder.ledger(), start=1)}
    ledger_seq = np.concatenate([np.full(len(batch), sequence[batch.digest]) for batch in prepared.batches])
    privacy = {
        "delta": task.delta,
        "instance": {"epsilon": _finite(prepared.price.instance.epsilon), "method": METHOD},
        "agent": {"epsilon": _finite(prepared.price.agent.epsilon), "method": METHOD},
    }
    stamp = JobStamp(
        job_id=prepared.job_id,
        backbone=str(prepared.public.backbone.get("name", "")),
        created_at=created_at,
        privacy=privacy,
        is_seeded=prepared.job.seed is not None,
    )
    table = pseudo_label_table(
        task,
        stamp,
        query_ids=ids,
        sources=sources,
        labels=answers.labels,
        statuses=[AnswerStatus.ANSWERED if label >= 0 else AnswerStatus.ABSTAINED for label in answers.labels.tolist()],
        ledger_seq=ledger_seq,
        noisy_votes=answers.noisy_votes,
    )
    write_table(table, folder.out / "pseudo_labels.parquet")


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file whole or not at all."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary)
        temporary.chmod(0o644)


def _write_questions(prepared: PreparedJob, folder: JobFolder) -> None:
    """What `labeler student` needs beside the pseudo-labels: the questions' features and the public set's place."""
    assignment = prepared.queries.assignment
    arrays = {"features": prepared.queries.features}
    if assignment is not None:
        arrays["assignment"] = assignment
    with replacing(folder.out / "queries.npz") as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its own options
    place = {"public_shard": os.path.relpath(prepared.public.path.resolve(), folder.out.resolve())}
    write_durably(folder.out / "job.json", json.dumps(place, indent=1).encode())


def _write_student_labels(prepared: PreparedJob, student: Student, out: Path) -> None:
    """What the student says of every public image: the labels most users came for."""
    probabilities = student.predict_proba(prepared.public.features)
    labels = probabilities.argmax(axis=1)
    table = pa.table(
        {
            "source": pa.array(list(prepared.public.sources), pa.string()),
            "label": pa.array(labels, pa.int16()),
            "label_name": pa.array(prepared.task.classes).take(pa.array(labels)),
            "probability": pa.array(probabilities.max(axis=1), pa.float32()),
        }
    )
    write_table(table, out / "student_labels.parquet")


def _accuracy_against_epsilon(prepared: PreparedJob, answers: NoisyAnswers, student: Student) -> tuple[CurvePoint, ...]:
    """Students of the same answers with more noise on top: what a cheaper job would have given.

    Adding noise to a release is post-processing, so the curve costs nothing. Only where truth is known and
    the histogram was released. The extra noise protects nobody by itself, so any generator will do.
    """
    if prepared.test is None or answers.noisy_votes is None or not math.isfinite(prepared.price.instance.epsilon):
        return ()
    rng = np.random.default_rng(0)
    points = []
    for factor in CURVE_FACTORS:
        extra = answers.total_sigma_votes * math.sqrt(factor**2 - 1)
        accuracies = []
        for _ in range(CURVE_DRAWS):
            votes = answers.noisy_votes + rng.normal(0.0, extra, answers.noisy_votes.shape)
            noisier = replace(
                answers,
                noisy_votes=votes,
                labels=votes.argmax(axis=1).astype(np.int16),
                total_sigma_votes=answers.total_sigma_votes * factor,
            )
            fitted = fit_student(
                student.kind, noisier, prepared.public.features, num_classes=prepared.task.num_classes, seed=0
            )
            accuracies.append(_accuracy(prepared, fitted))
        epsilon = epsilon_of_delta(prepared.task.delta, prepared.price.instance.mu / factor)
        points.append(
            CurvePoint(
                epsilon, float(np.mean(accuracies)), float(np.std(accuracies, ddof=1)), "same answers, more noise"
            )
        )
    points.append(CurvePoint(prepared.price.instance.epsilon, _accuracy(prepared, student), None, "this job"))
    return tuple(points)


def _accuracy(prepared: PreparedJob, student: Student) -> float:
    assert_test = prepared.test
    if assert_test is None:
        return math.nan
    known = assert_test.labels >= 0
    return float((student.predict(assert_test.features[known]) == assert_test.labels[known]).mean())


def _truth_of_queries(prepared: PreparedJob, rows: NDArray[np.int64]) -> list[int | None]:
    """True class of each query where the requester knows it: of its image, or of most of its cluster's images."""
    labels = np.asarray(prepared.public.labels)
    assignment = prepared.queries.assignment
    if prepared.job.file.queries.strategy != "clustered" or assignment is None:
        return [int(label) if label >= 0 else None for label in labels[rows].tolist()]
    known = (labels >= 0) & (assignment >= 0)
    cells = np.bincount(
        assignment[known] * prepared.task.num_classes + labels[known],
        minlength=len(rows) * prepared.task.num_classes,
    ).reshape(len(rows), prepared.task.num_classes)
    return [int(row.argmax()) if row.any() else None for row in cells]


def _report(
    prepared: PreparedJob,
    answers: NoisyAnswers,
    student: Student,
    curve: tuple[CurvePoint, ...],
    *,
    created_at: datetime,
    is_seeded: bool,
) -> JobReport:
    task, public, test = prepared.task, prepared.public, prepared.test
    ids, sources, rows = query_names(prepared)
    truths = _truth_of_queries(prepared, rows) if tuple(public.classes) == tuple(task.classes) else [None] * len(rows)
    shown = set(shown_queries(len(rows)).tolist())
    groups = _groups(prepared, rows)
    queries = tuple(
        AnsweredQuery(
            query_id=ids[number],
            source=sources[number],
            label=int(answers.labels[number]),
            status=AnswerStatus.ANSWERED if answers.labels[number] >= 0 else AnswerStatus.ABSTAINED,
            truth=truths[number],
            noisy_votes=None if answers.noisy_votes is None else answers.noisy_votes[number],
            thumbnails=public.thumbnails(groups[number][:MAX_PER_QUERY]) if number in shown else (),
            group_size=len(groups[number]),
        )
        for number in range(len(rows))
    )
    scored = None if test is None or not (test.labels >= 0).any() else test
    return JobReport(
        task=task,
        queries=queries,
        privacy=_privacy(prepared),
        contributors=task.agents,
        public_images=len(public.features),
        student=StudentOutcome(
            kind=student.kind,
            public_images=len(public.features),
            accuracy=None if scored is None else _accuracy(prepared, student),
            test_images=None if scored is None else int((scored.labels >= 0).sum()),
        ),
        curve=curve,
        coverage=map_public_set(
            public.features, prepared.queries.features, answers.labels >= 0, cells=prepared.queries.assignment
        ),
        versions={
            name: version(name) for name in ("private-labeler", "faiss-gpu", "torch", "timm", "numpy", "dp-accounting")
        },
        is_seeded=is_seeded,
        backbone=str(public.backbone.get("name", "")),
        job_id=prepared.job_id,
        created_at=created_at.isoformat(timespec="seconds"),
        downloads=(
            ("pseudo_labels.parquet", "every label, one row per question"),
            ("student_labels.parquet", "what the student says of every public image"),
            ("report.json", "the numbers of this page, for programs"),
        ),
    )


def _groups(prepared: PreparedJob, rows: NDArray[np.int64]) -> list[list[int]]:
    """Rows of the public images each query stands for, the one it is named after first."""
    assignment = prepared.queries.assignment
    if prepared.job.file.queries.strategy != "clustered" or assignment is None:
        return [[row] for row in rows.tolist()]
    order = np.argsort(assignment, kind="stable")
    starts = np.searchsorted(assignment[order], np.arange(len(rows) + 1))
    members = [order[start:end].tolist() for start, end in zip(starts[:-1], starts[1:], strict=True)]
    return [[row, *(m for m in group if m != row)] for row, group in zip(rows.tolist(), members, strict=True)]


def _privacy(prepared: PreparedJob) -> Privacy:
    task, instance, agent = prepared.task, prepared.price.instance, prepared.price.agent
    return Privacy(
        delta=task.delta,
        instance=_level_price(instance),
        agent=_level_price(agent),
        breakdown=(
            PriceRow(
                "Exact bound for the integer noise that runs", _finite(instance.epsilon), _finite(agent.epsilon), True
            ),
            PriceRow(
                "Exact, for real-valued noise", _finite(instance.continuous_epsilon), _finite(agent.continuous_epsilon)
            ),
            PriceRow("Renyi DP, improved conversion (2020)", _improved(task, instance), _improved(task, agent)),
            PriceRow(
                "As computed in the papers", _finite(instance.as_in_paper_epsilon), _finite(agent.as_in_paper_epsilon)
            ),
        ),
        spent=_spending(prepared),
    )


def _spending(prepared: PreparedJob) -> tuple[tuple[int, float], ...]:
    """Instance epsilon after so many questions."""
    asked = prepared.task.max_queries
    if prepared.task.method == "reverse-knn":
        return ((asked, prepared.price.instance.epsilon),)
    counts = sorted({*np.linspace(1, asked, min(asked, POINTS_OF_SPENDING)).astype(int).tolist()})
    return tuple((count, price(prepared.task, queries=count).instance.epsilon) for count in counts)


def _level_price(statement: PrivacyStatement) -> LevelPrice:
    return LevelPrice(_finite(statement.epsilon), METHOD, statement.reason or "")


def _improved(task: Task, statement: PrivacyStatement) -> float | None:
    if statement.squared_sensitivity is None:
        return None
    return improved_epsilon(GaussianSum(statement.squared_sensitivity, task.sigma_votes, statement.level), task.delta)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
