"""What a job gives back: pseudo-labels, a student, a report. All of it follows from what was released, at no price."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_store.backbones.spec import loadable_name
from feature_store.results.image_labels import ImageStamp, attribute_label_table, image_label_table
from feature_store.results.models import ATTRIBUTES, ForStudents, model_file
from feature_store.results.pseudo_labels import AnsweredRound, JobStamp, label_table, model_label_table
from feature_store.results.report.model import CurvePoint, JobReport, StudentOutcome
from feature_store.results.report.page import report_json, write_report
from feature_store.students import Learners, NoisyAnswers, Student, fit_student
from feature_store.students.attributes import LabelledAttributes
from feature_store.students.labeling import LabelledImages, label_images
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.linear_model import released_model
from labeler.privacy_card import card_in_words, guarantee, privacy_card
from labeler.release import Release
from labeler.rounds.effects import ABSTAINED_LABEL, StudentKind
from labeler.system.files import replace_file, replacing
from workers.progress import ProgressCallback, StageClock, silent
from workers.run.attributes import read_releases
from workers.run.folder import JobFolder
from workers.run.preparation import PreparedJob
from workers.run.report import job_report

CURVE_FACTORS = (8.0, 4.0, 2.0, 1.4)
"""How many times noisier the same answers are made to show what a cheaper job would have given."""

CURVE_DRAWS = 5


def publish(
    prepared: PreparedJob,
    rounds: Sequence[AnsweredRound],
    folder: JobFolder,
    *,
    clock: StageClock,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Write everything a job gives back; the report last.

    Returns:
        The content of report.json.
    """
    releases = [one.release for one in rounds if one.release is not None]
    is_seeded = any(release.is_seeded for release in releases)
    created_at = datetime.now(UTC)
    with clock.stage("write pseudo-labels"):
        card = privacy_card(prepared.task, prepared.price, is_seeded=is_seeded)
        replace_file(folder.out / "privacy_card.md", card_in_words(card).encode())
        if prepared.task.traits.asks_for_a_model:
            model = released_model(prepared.task, releases, prepared.queries.features)
            _write_model(prepared, model.arrays, kind="linear", card=card, path=folder.out / "model.safetensors")
        _write_pseudo_labels(prepared, rounds, releases, folder, created_at=created_at)
        ForStudents(prepared.answered_features, prepared.queries.assignment, prepared.public.path).write(folder.out)
    if not any((release.labels != ABSTAINED_LABEL).any() for release in releases):
        return _publish_unanswered(prepared, releases, folder, created_at)
    answers = collect_answers(prepared, releases)
    with clock.stage("train student"):
        progress("Student", 0, 2)
        if prepared.task.attributes_per_record is not None:
            return _publish_attributes(prepared, answers, releases, folder, card, created_at, progress)
        labelled = label_images(
            answers,
            prepared.public.features,
            rows=None if prepared.task.traits.asks_for_a_model else prepared.queries.rows,
            kind=prepared.student,
            seed=prepared.job.file.student.seed,
        )
        student = labelled.student
        _write_model(prepared, student.arrays, kind=student.kind, card=card, path=folder.out / "student.safetensors")
        labels = _image_labels(image_label_table, prepared, labelled, created_at=created_at, is_seeded=is_seeded)
        write_table(labels, folder.out / "student_labels.parquet")
        progress("Student", 1, 2)
        curve = _accuracy_against_epsilon(prepared, answers, student)
        progress("Student", 2, 2)
    with clock.stage("report"):
        report = job_report(
            prepared,
            answers.labels,
            answers.noisy_votes,
            _outcome(prepared, student),
            curve,
            labels,
            created_at=created_at,
            is_seeded=is_seeded,
            contributors=min(len(release.contributors) for release in releases),
        )
        return _write_report(report, folder)


def _publish_unanswered(
    prepared: PreparedJob, releases: Sequence[Release], folder: JobFolder, created_at: datetime
) -> dict[str, Any]:
    """The same where no question has an answer: that is what was paid for, and nothing follows from it."""
    report = job_report(
        prepared,
        np.concatenate([release.labels for release in releases]),
        None,
        None,
        (),
        None,
        created_at=created_at,
        is_seeded=any(release.is_seeded for release in releases),
        contributors=min(len(release.contributors) for release in releases),
    )
    return _write_report(report, folder)


def _publish_attributes(
    prepared: PreparedJob,
    answers: NoisyAnswers,
    releases: Sequence[Release],
    folder: JobFolder,
    card: Mapping[str, Any],
    created_at: datetime,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """The same where a record may have any number of labels: a head for each, and no single label of an image."""
    read = read_releases(prepared, releases)
    is_seeded = any(release.is_seeded for release in releases)
    heads = read.labelled.student
    _write_model(prepared, heads.arrays, kind=ATTRIBUTES, card=card, path=folder.out / "student.safetensors")
    labels = _image_labels(attribute_label_table, prepared, read.labelled, created_at=created_at, is_seeded=is_seeded)
    write_table(labels, folder.out / "student_labels.parquet")
    progress("Student", 2, 2)
    report = job_report(
        prepared,
        answers.labels,
        answers.noisy_votes,
        read.outcome,
        (),
        None,
        created_at=created_at,
        is_seeded=is_seeded,
        contributors=min(len(release.contributors) for release in releases),
        attributes=read.report,
    )
    return _write_report(report, folder)


def _write_report(report: JobReport, folder: JobFolder) -> dict[str, Any]:
    write_report(report, folder.out)
    summary = report_json(report)
    replace_file(folder.out / "report.json", json.dumps(summary, indent=1, allow_nan=False).encode())
    return summary


def collect_answers(prepared: PreparedJob, releases: Sequence[Release]) -> NoisyAnswers:
    """Put the releases of all batches into the shape students learn from."""
    task, votes = prepared.task, None
    if task.traits.asks_for_a_model:
        labels = released_model(task, releases, prepared.queries.features).predict(prepared.public.features)
    else:
        labels = np.concatenate([release.labels for release in releases])
        if task.release == "histogram":
            votes = np.concatenate([release.noisy_votes for release in releases if release.noisy_votes is not None])
    return NoisyAnswers.of(
        task,
        features=prepared.answered_features,
        labels=labels.astype(np.int16),
        noisy_votes=votes,
        assignment=prepared.queries.assignment,
        # Batches may differ in who answered; expecting the most noise is the cautious guess.
        contributors=max(len(release.contributors) for release in releases),
    )


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file whole or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        pq.write_table(table, file)


def _outcome(prepared: PreparedJob, student: Student) -> StudentOutcome:
    outcome = StudentOutcome(kind=student.kind, public_images=len(prepared.public))
    if prepared.test is None:
        return outcome
    return replace(outcome, accuracy=prepared.test.share_right(student), test_images=len(prepared.test))


def _write_pseudo_labels(
    prepared: PreparedJob,
    rounds: Sequence[AnsweredRound],
    releases: Sequence[Release],
    folder: JobFolder,
    *,
    created_at: datetime,
) -> None:
    stamp = JobStamp(
        job_id=prepared.job_id,
        backbone=prepared.public.backbone_name,
        created_at=created_at,
        privacy=guarantee(prepared.price),
        is_seeded=any(release.is_seeded for release in releases),
    )
    task, names = prepared.task, prepared.query_names
    if task.traits.asks_for_a_model:
        model, paid = released_model(task, releases, prepared.queries.features), rounds[0].ledger_seq
        table = model_label_table(task, stamp, names, model, prepared.public.features, ledger_seq=paid)
    else:
        table = label_table(task, stamp, names, rounds)
    write_table(table, folder.out / "pseudo_labels.parquet")


def _write_model(
    prepared: PreparedJob,
    arrays: Mapping[str, NDArray[np.generic]],
    *,
    kind: str,
    card: Mapping[str, object],
    path: Path,
) -> None:
    data = model_file(
        arrays,
        kind=kind,
        classes=prepared.task.classes,
        card=card,
        backbone=loadable_name(prepared.public.shard.backbone),
        job_id=prepared.job_id,
    )
    replace_file(path, data)


def _image_labels(
    as_table: Callable[..., pa.Table],
    prepared: PreparedJob,
    labelled: LabelledImages | LabelledAttributes,
    *,
    created_at: datetime,
    is_seeded: bool,
) -> pa.Table:
    """The label, or the attributes, of every public image: what most users came for."""
    stamp = ImageStamp(
        task_digest=prepared.task.digest,
        job_id=prepared.job_id,
        classes=prepared.task.classes,
        privacy=guarantee(prepared.price),
        is_seeded=is_seeded,
        created_at=created_at.isoformat(),
    )
    return as_table(stamp, sources=prepared.public.sources, probabilities=labelled.probabilities, asked=labelled.asked)


def _accuracy_against_epsilon(prepared: PreparedJob, answers: NoisyAnswers, student: Student) -> tuple[CurvePoint, ...]:
    """Students of the same answers with more noise on top: what a cheaper job would have given.

    Adding noise to a release is post-processing, so the curve costs nothing; it exists where truth is known and
    the histogram was released. The extra noise protects nobody by itself, so any generator will do.
    """
    test, statement = prepared.test, prepared.price.instance
    if (
        test is None
        or answers.noisy_votes is None
        or not prepared.task.traits.counts
        or not math.isfinite(statement.epsilon)
    ):
        return ()
    rng, seed = np.random.default_rng(0), prepared.job.file.student.seed
    features, num_classes, points = prepared.public.features, prepared.task.num_classes, []
    kind, learners = cast(StudentKind, student.kind), Learners(features, num_classes=num_classes, seed=seed)
    for factor in CURVE_FACTORS:
        extra = answers.total_sigma_votes * math.sqrt(factor**2 - 1)
        accuracies = []
        for _ in range(CURVE_DRAWS):
            votes = answers.noisy_votes + rng.normal(0.0, extra, answers.noisy_votes.shape)
            labels = votes.argmax(axis=1).astype(np.int16)
            noisier = replace(
                answers, noisy_votes=votes, labels=labels, total_sigma_votes=answers.total_sigma_votes * factor
            )
            again = fit_student(kind, noisier, features, num_classes=num_classes, seed=seed, learners=learners)
            accuracies.append(test.share_right(again))
        epsilon = epsilon_of_delta(prepared.task.delta, statement.mu / factor)
        mean, deviation = float(np.mean(accuracies)), float(np.std(accuracies, ddof=1))
        points.append(CurvePoint(epsilon, mean, deviation, "these answers with more noise"))
    points.append(CurvePoint(statement.epsilon, test.share_right(student), None, "this job"))
    return tuple(points)
