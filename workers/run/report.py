"""From a finished job to what its report shows: prices, questions with pictures, coverage. Public facts only."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from datetime import datetime
from fractions import Fraction
from importlib.metadata import version

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_store.results.image_labels import Origin
from feature_store.results.report.coverage import MAX_PER_QUERY, map_public_set, places_to_show
from feature_store.results.report.model import (
    AnsweredQuery,
    AttributeReport,
    CurvePoint,
    ImageLabels,
    JobReport,
    LevelPrice,
    PriceRow,
    Privacy,
    StudentOutcome,
)
from labeler.accounting.events import GaussianSum
from labeler.accounting.integer import improved_epsilon
from labeler.planning import PrivacyStatement, instance_epsilon
from labeler.rounds.effects import AnswerStatus
from labeler.task import Task
from workers.run.preparation import PreparedJob

POINTS_OF_SPENDING = 100
PACKAGES = ("private-labeler", "torch", "timm", "numpy")


def job_report(
    prepared: PreparedJob,
    answers: NDArray[np.integer],
    noisy_votes: NDArray[np.float64] | None,
    student: StudentOutcome | None,
    curve: tuple[CurvePoint, ...],
    labels: pa.Table | None,
    *,
    created_at: datetime,
    is_seeded: bool,
    contributors: int,
    attributes: AttributeReport | None = None,
) -> JobReport:
    """Everything the report of a job shows, but for the seconds it took.

    Args:
        answers: what was released of each question, -1 where it was left without an answer.
        noisy_votes: the noisy sums behind it; None where only winners were released.
        student: None where nothing was answered.
        labels: of every public image, as `student_labels.parquet` holds them; None where they have attributes, or no
            labels because nothing was answered.
    """
    is_about_a_model = prepared.task.traits.asks_for_a_model
    return JobReport(
        task=prepared.task,
        queries=_answered_queries(prepared, answers, noisy_votes),
        privacy=_privacy(prepared),
        contributors=contributors,
        public_images=len(prepared.public),
        student=student,
        curve=curve,
        images=None if labels is None else _image_labels(prepared, labels),
        attributes=attributes,
        coverage=map_public_set(
            prepared.public.features,
            prepared.answered_features,
            answers >= 0,
            cells=prepared.queries.assignment if prepared.asks_clusters else None,
        ),
        versions={name: version(name) for name in PACKAGES},
        is_seeded=is_seeded,
        backbone=prepared.public.backbone_name,
        job_id=prepared.job_id,
        created_at=created_at.isoformat(timespec="seconds"),
        downloads=(
            (
                "pseudo_labels.parquet",
                "the released counts, one row per question"
                if attributes is not None
                else f"every label, one row per {'image' if is_about_a_model else 'question'}",
            ),
            *(() if student is None else (("student_labels.parquet", "what the student says of every public image"),)),
            *((("model.safetensors", "the released model, with its privacy card"),) if is_about_a_model else ()),
            *(() if student is None else (("student.safetensors", "the student, with the privacy card"),)),
            ("privacy_card.md", "what these files may tell of one private image, in words"),
            ("report.json", "the numbers of this page, for programs"),
        ),
    )


def finite(value: float) -> float | None:
    """JSON and report pages have no infinity."""
    return value if math.isfinite(value) else None


def _answered_queries(
    prepared: PreparedJob, answers: NDArray[np.integer], noisy_votes: NDArray[np.float64] | None
) -> tuple[AnsweredQuery, ...]:
    names = prepared.query_names
    truths, groups = _truths(prepared), _groups(prepared)
    found = [
        AnsweredQuery(
            query_id=names.query_ids[number],
            source=names.sources[number],
            label=label,
            status=AnswerStatus.ANSWERED if label >= 0 else AnswerStatus.ABSTAINED,
            truth=truths[number],
            noisy_votes=None if noisy_votes is None else noisy_votes[number],
            group_size=len(group),
        )
        for number, (label, group) in enumerate(zip(answers.tolist(), groups, strict=True))
    ]
    shown = {place: groups[place][:MAX_PER_QUERY] for place in places_to_show(found)}
    pictures = prepared.public.thumbnails(sorted({row for rows in shown.values() for row in rows}))
    return tuple(
        replace(query, thumbnails=tuple(pictures[row] for row in shown.get(place, ()) if row in pictures))
        for place, query in enumerate(found)
    )


def _image_labels(prepared: PreparedJob, labels: pa.Table) -> ImageLabels:
    """What the student says of every public image, with the truth where the requester knows it."""
    public = prepared.public
    has_truth = public.classes == prepared.task.classes
    found = ImageLabels(
        sources=labels["source"].to_pylist(),
        labels=labels["label"].to_numpy(),
        confidences=np.clip(labels["confidence"].to_numpy().astype(np.float64), 0.0, 1.0),
        asked=np.asarray(labels["origin"].to_numpy(zero_copy_only=False) == str(Origin.ASKED)),
        truth=public.labels if has_truth else np.full(len(public), -1, dtype=np.int16),
    )
    return replace(found, thumbnails=public.thumbnails(found.numbers_to_show()))


def _truths(prepared: PreparedJob) -> list[int | None]:
    """True class of each query where the requester knows it: of its image, or of most of its cluster's images."""
    public, queries, task = prepared.public, prepared.queries, prepared.task
    if public.classes != task.classes or task.attributes_per_record is not None:
        return [None] * len(queries.rows)
    if not prepared.asks_clusters:
        return [label if label >= 0 else None for label in public.labels[prepared.query_rows].tolist()]
    known = public.labels >= 0
    cells = queries.assignment[known] * task.num_classes + public.labels[known]
    counts = np.bincount(cells, minlength=len(queries.features) * task.num_classes).reshape(-1, task.num_classes)
    return [int(row.argmax()) if row.any() else None for row in counts]


def _groups(prepared: PreparedJob) -> list[list[int]]:
    """Rows of the public images each query stands for, the one it is named after first."""
    rows, assignment = prepared.query_rows, prepared.queries.assignment
    if not prepared.asks_clusters:
        return [[row] for row in rows.tolist()]
    order = np.argsort(assignment, kind="stable")
    starts = np.searchsorted(assignment[order], np.arange(len(rows) + 1)).tolist()
    members = [order[start:end].tolist() for start, end in itertools.pairwise(starts)]
    return [[row, *(m for m in group if m != row)] for row, group in zip(rows.tolist(), members, strict=True)]


def _privacy(prepared: PreparedJob) -> Privacy:
    task, instance, agent = prepared.task, prepared.price.instance, prepared.price.agent
    rows = (
        ("Exact bound for the integer noise that runs", instance.epsilon, agent.epsilon, True),
        ("Exact, for real-valued noise", instance.continuous_epsilon, agent.continuous_epsilon, False),
        ("Renyi DP, improved conversion (2020)", _improved(task, instance), _improved(task, agent), False),
        ("As computed in the papers", instance.as_in_paper_epsilon, agent.as_in_paper_epsilon, False),
    )
    return Privacy(
        delta=task.delta,
        instance=_level_price(instance),
        agent=_level_price(agent),
        breakdown=tuple(PriceRow(name, finite(one), finite(other), reported) for name, one, other, reported in rows),
        spent=_spending(prepared),
        person=None if prepared.price.person is None else _level_price(prepared.price.person),
        records_per_person=prepared.price.records_per_person,
    )


def _spending(prepared: PreparedJob) -> tuple[tuple[int, float], ...]:
    """Instance epsilon after so many questions."""
    asked = prepared.task.max_queries
    if prepared.task.traits.single_round:
        return ((asked, prepared.price.instance.epsilon),)
    counts = np.unique(np.linspace(1, asked, min(asked, POINTS_OF_SPENDING)).astype(int)).tolist()
    return tuple((count, instance_epsilon(prepared.task, count)) for count in counts)


def _level_price(statement: PrivacyStatement) -> LevelPrice:
    return LevelPrice(
        finite(statement.epsilon),
        statement.method,
        statement.reason or "",
        finite(statement.participant_epsilon),
        statement.histogram_epsilon,
    )


def _improved(task: Task, statement: PrivacyStatement) -> float:
    if statement.squared_sensitivity is None:
        return math.inf
    return improved_epsilon(
        GaussianSum(Fraction(statement.squared_sensitivity), task.sigma_votes, statement.level), task.delta
    )
