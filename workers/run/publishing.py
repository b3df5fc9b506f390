"""Results of a job: pseudo-labels, a student, a report; for attributes a head for each instead of a student.

All of it follows from what was released, at no price.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_store.results.evaluations import (
    EVALUATION,
    MEASURED,
    evaluation_bytes,
    evaluation_document,
    measured_model,
)
from feature_store.results.image_labels import ON, ImageStamp, Origin, image_label_table, with_image_budgets
from feature_store.results.models import LINEAR, ForStudents, read_model
from feature_store.results.pseudo_labels import AnsweredRound, JobStamp, label_released, label_table
from feature_store.results.questions import write_parquet
from feature_store.results.report.coverage import MAX_PER_QUERY, map_public_set, places_to_show
from feature_store.results.report.model import (
    MOST_IMAGES,
    AnsweredQuery,
    AttributeImage,
    AttributeOutcome,
    AttributeReport,
    CurvePoint,
    ImageLabels,
    JobReport,
    LevelPrice,
    PriceRow,
    Privacy,
    StudentOutcome,
)
from feature_store.results.report.page import report_json, write_report
from feature_store.results.scores import auroc, score_probabilities
from feature_store.students import Learners, fit_student
from feature_store.students.attributes import LabeledAttributes
from feature_store.students.labeling import LabeledImages
from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.integer import improved_epsilon
from labeler.batching import mu_squared_of, round_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import NotReady
from labeler.linear_model import released_model
from labeler.methods.evaluate import Scored
from labeler.planning import PrivacyStatement, finite, instance_epsilon
from labeler.privacy_card import card_in_words, guarantee, privacy_card
from labeler.query_budgets import JOB_ACCOUNT, ChargedRounds, query_budgets, running_prices
from labeler.rounds.effects import ABSTAINED_LABEL, AnswerStatus, StudentKind
from labeler.setting import LEVELS, Level
from labeler.system.files import replace_file
from labeler.task import Task
from workers.progress import ProgressCallback, StageClock, silent
from workers.run.folder import REPORT, JobFolder
from workers.run.preparation import PreparedJob, PricedJob
from workers.run.student import say_use

CURVE_FACTORS = (8.0, 4.0, 2.0, 1.4)
"""Noise factors of the same answers, which show what a cheaper job would have given."""

CURVE_DRAWS = 5


def publish(
    prepared: PreparedJob,
    rounds: Sequence[AnsweredRound],
    folder: JobFolder,
    *,
    clock: StageClock,
    compared: Sequence[Mapping[str, Any]] = (),
    has_curve: bool = True,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Write all results of a job; the report last.

    Args:
        compared, has_curve: see `workers.run.labeling.run_in_folder`.

    Returns:
        The content of report.json.
    """
    task, public, queries = prepared.task, prepared.public, prepared.queries
    releases = [one.release for one in rounds if one.release is not None]
    is_seeded = any(release.is_seeded for release in releases)
    created_at = datetime.now(UTC)
    with clock.stage("write pseudo-labels"):
        card = privacy_card(task, prepared.price, is_seeded=is_seeded, not_covered=public.shard.not_covered)
        replace_file(folder.out / "privacy_card.md", card_in_words(card).encode())
        if (model := released_model(task, releases, queries.features)) is not None:
            file = public.model_file(model.arrays, kind=LINEAR, task=task, card=card, job_id=prepared.job_id)
            replace_file(folder.out / "model.safetensors", file)
            folder.released.add(file)
        stamp = JobStamp(
            job_id=prepared.job_id,
            backbone=public.backbone_name,
            created_at=created_at,
            privacy=guarantee(prepared.price) | {"mu_squared": mu_squared_of(task, task.max_queries)},
            is_seeded=is_seeded,
        )
        table = label_table(
            task,
            stamp,
            prepared.query_names,
            rounds,
            budgets=_budgets(task, rounds, len(prepared.query_names.query_ids), progress),
            questions=queries.features,
            images=public.features,
        )
        write_parquet(table, folder.out / "pseudo_labels.parquet")
        ForStudents(prepared.answered_features, queries.assignment, public.shard.path).write(folder.out)
    # Where no question has an answer, that is what was paid for, and nothing follows from it.
    given, votes = np.concatenate([release.labels for release in releases]), None
    labels: pa.Table | None = None
    outcome: StudentOutcome | None = None
    attributes: AttributeReport | None = None
    stable: tuple[float, float] | None = None
    curve: tuple[CurvePoint, ...] = ()
    if any((release.labels != ABSTAINED_LABEL).any() for release in releases):
        with clock.stage("train student"):
            progress("Student", 0, 2)
            said = label_released(
                table,
                questions=queries.features,
                rows=queries.rows,
                assignment=queries.assignment,
                images=public.features,
                contributors=np.repeat(
                    [len(one.contributors) for one in releases], [len(one.labels) for one in releases]
                ),
                kind=prepared.student,
                seed=prepared.job.file.student.seed,
                progress=progress,
            )
            student = said.student
            file = public.model_file(student.arrays, kind=student.kind, task=task, card=card, job_id=prepared.job_id)
            replace_file(folder.out / "student.safetensors", file)
            folder.released.add(file)
            labels = with_image_budgets(
                _image_labels(prepared, said, created_at=created_at, is_seeded=is_seeded), table
            )
            write_parquet(labels, folder.out / "student_labels.parquet")
            progress("Student", 1, 2)
            outcome = _outcome(prepared, said)
            if isinstance(said, LabeledImages):
                given, votes = said.answers.labels, said.answers.noisy_votes
                stable = said.stability
                curve = _accuracy_against_epsilon(prepared, said) if has_curve else ()
            else:
                votes = np.concatenate([one.noisy_votes for one in releases if one.noisy_votes is not None])
                attributes = _attribute_report(prepared, said)
            progress("Student", 2, 2)
    with clock.stage("report"):
        files = [
            (
                "pseudo_labels.parquet",
                "the released counts, one row per question"
                if attributes is not None
                else f"every label, one row per {task.traits.rows_about('question', 'image')}",
            ),
            *([] if outcome is None else [("student_labels.parquet", "what the student says of every public image")]),
            *([("model.safetensors", "the released model, with its privacy card")] if model else []),
            *([] if outcome is None else [("student.safetensors", _say_student(folder.out / "student.safetensors"))]),
            ("privacy_card.md", "what these files may tell of one private image, in words"),
            ("report.json", "the numbers of this page, for programs"),
        ]
        report = JobReport(
            task=task,
            queries=_answered_queries(prepared, given, votes),
            privacy=_privacy(prepared),
            contributors=min(len(release.contributors) for release in releases),
            public_images=len(public),
            student=outcome,
            curve=curve,
            images=None if labels is None or attributes is not None else _shown_labels(prepared, labels),
            attributes=attributes,
            stability=stable,
            coverage=map_public_set(
                public.features,
                prepared.answered_features,
                given >= 0,
                cells=queries.assignment if prepared.asks_clusters else None,
            ),
            versions={name: version(name) for name in PACKAGES},
            is_seeded=is_seeded,
            not_covered=public.shard.not_covered,
            backbone=public.backbone_name,
            job_id=prepared.job_id,
            created_at=created_at.isoformat(timespec="seconds"),
            downloads=tuple(files),
            compared=tuple(compared),
        )
        write_report(report, folder.out)
        summary = report_json(report)
        replace_file(folder.out / REPORT, json.dumps(summary, indent=1, allow_nan=False).encode())
        return summary


def _say_student(path: Path) -> str:
    """Return what the report says of the student's file: the command that uses it."""
    student = read_model(path)
    return f"the student, with the privacy card; {say_use(student, Path(path.name))} labels others with it"


def publish_evaluation(prepared: PricedJob, rounds: Sequence[AnsweredRound], folder: JobFolder) -> dict[str, Any]:
    """Write the results of an evaluation, and the model with its confidence measured; evaluation.json last.

    Returns:
        The content of evaluation.json.
    """
    release = rounds[0].release
    if release is None or release.noisy_votes is None:
        raise NotReady("the evaluation opened nothing; run the same command again")
    question = prepared.batches[0].features
    card = privacy_card(prepared.task, prepared.price, is_seeded=release.is_seeded)
    # Records lie in the folder of the job that released the model, if its file still does.
    released = JobFolder(prepared.job.queries.parent).released
    document = evaluation_document(
        prepared.task,
        question,
        release.noisy_votes,
        contributors=len(release.contributors),
        card=card,
        job_id=prepared.job_id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        released=released,
    )
    replace_file(folder.out / "privacy_card.md", card_in_words(card).encode())
    measured = measured_model(Scored.of_rows(question).model, document, released=released)
    folder.released.add(measured)
    replace_file(folder.out / MEASURED, measured)
    replace_file(folder.out / EVALUATION, evaluation_bytes(document))
    return document


def _budgets(
    task: Task, rounds: Sequence[AnsweredRound], rows: int, progress: ProgressCallback
) -> dict[str, list[Any]]:
    """Return the budget of every row of a job's labels, by the charges that every agent's ledger has for its rounds."""
    total: dict[Level, int] = dict.fromkeys(LEVELS, 0)
    charged, answered = [], 0
    for one in rounds:
        due = round_charges(task, one.num_queries, answered=answered)
        nano = {level: due.get(level, UNBOUNDED_NANO) for level in LEVELS}
        total = {level: total[level] + nano[level] for level in LEVELS}
        charged.append(ChargedRounds((one.num_queries,), nano, total))
        answered += one.num_queries
    largest = max((one.num_queries for one in rounds), default=0)
    prices = running_prices(task, largest, progress=lambda done, of: progress("Price of each question", done, of))
    return query_budgets(task, charged, rows=rows, prices=prices).columns(JOB_ACCOUNT, task.delta)


def _outcome(prepared: PreparedJob, said: LabeledImages | LabeledAttributes) -> StudentOutcome:
    """Return the student, scored where truth is known."""
    outcome, test = StudentOutcome(kind=said.student.kind, public_images=len(prepared.public)), prepared.test
    if test is None:
        return outcome
    probabilities = said.student.predict_proba(test.features)
    if not isinstance(said, LabeledImages):
        return replace(outcome, accuracy=float(((probabilities >= ON) == test.labels).mean()), test_images=len(test))
    scores = score_probabilities(test.labels, probabilities, prepared.task.classes)
    return replace(outcome, accuracy=test.share_right(said.student), test_images=len(test), scores=scores)


def _image_labels(
    prepared: PreparedJob,
    labelled: LabeledImages | LabeledAttributes,
    *,
    created_at: datetime,
    is_seeded: bool,
) -> pa.Table:
    """Return the label, or the attributes, of every public image: what most users came for."""
    stamp = ImageStamp(
        task_digest=prepared.task.digest,
        task_name=prepared.task.name,
        job_id=prepared.job_id,
        classes=prepared.task.classes,
        privacy=guarantee(prepared.price),
        is_seeded=is_seeded,
        created_at=created_at.isoformat(),
    )
    return image_label_table(
        stamp,
        sources=prepared.public.sources,
        probabilities=labelled.probabilities,
        asked=labelled.asked,
        several=isinstance(labelled, LabeledAttributes),
    )


def _accuracy_against_epsilon(prepared: PreparedJob, said: LabeledImages) -> tuple[CurvePoint, ...]:
    """Fit students of the same answers with more noise on top: what a cheaper job would have given.

    Adding noise to a release is post-processing, so the curve costs nothing. It exists where truth is known and the
    histogram was released. The extra noise protects nobody by itself, so any generator will do.
    """
    test, statement, answers, student = prepared.test, prepared.price.instance, said.answers, said.student
    if (
        test is None
        or answers.noisy_votes is None
        or not prepared.task.noise_parties
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


POINTS_OF_SPENDING = 100
PACKAGES = ("private-labeler", "torch", "timm", "numpy")


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


def _shown_labels(prepared: PreparedJob, labels: pa.Table) -> ImageLabels:
    """Return the student's labels of every public image, with the truth where the requester knows it."""
    public = prepared.public
    found = ImageLabels(
        sources=labels["source"].to_pylist(),
        labels=labels["label"].to_numpy(),
        confidences=np.clip(labels["confidence"].to_numpy().astype(np.float64), 0.0, 1.0),
        asked=np.asarray(labels["origin"].to_numpy(zero_copy_only=False) == str(Origin.ASKED)),
        truth=public.labels,
    )
    return replace(found, thumbnails=public.thumbnails(found.numbers_to_show()))


def _truths(prepared: PreparedJob) -> list[int | None]:
    """Return the true class of each query where the requester knows it: of its image, or of most of its cluster's
    images.
    """
    public, queries, task = prepared.public, prepared.queries, prepared.task
    if task.attributes_per_record is not None:
        return [None] * len(queries.rows)
    if not prepared.asks_clusters:
        return [label if label >= 0 else None for label in public.labels[prepared.query_rows].tolist()]
    known = public.labels >= 0
    cells = queries.assignment[known] * task.num_classes + public.labels[known]
    counts = np.bincount(cells, minlength=len(queries.features) * task.num_classes).reshape(-1, task.num_classes)
    return [int(row.argmax()) if row.any() else None for row in counts]


def _groups(prepared: PreparedJob) -> list[list[int]]:
    """Return the rows of the public images of each query, the one it is named after first."""
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
        group=None if prepared.price.group is None else _level_price(prepared.price.group),
        group_size=prepared.price.group_size,
    )


def _spending(prepared: PreparedJob) -> tuple[tuple[int, float], ...]:
    """Return the instance epsilon after each number of questions."""
    asked = prepared.task.max_queries
    least = prepared.task.traits.least_asked(prepared.task)
    counts = np.unique(np.linspace(least, asked, min(asked, POINTS_OF_SPENDING)).astype(int)).tolist()
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


def _attribute_report(prepared: PreparedJob, labelled: LabeledAttributes) -> AttributeReport:
    public, names = prepared.public, prepared.task.classes
    has = labelled.probabilities >= ON
    sure = np.where(has, labelled.probabilities, 1 - labelled.probabilities)
    truth: NDArray[np.int16] | None = None
    if public.shard.has_attributes and (public.labels >= 0).any():
        truth = public.labels
    known = np.zeros(len(public), dtype=np.bool_) if truth is None else truth[:, 0] >= 0
    outcomes = []
    for place, name in enumerate(names):
        one = AttributeOutcome(name=name, on=int(has[:, place].sum()), confidence=float(sure[:, place].mean()))
        if truth is not None:
            truly, said = truth[known, place] == 1, has[known, place]
            one = replace(
                one,
                right=float((said == truly).mean()),
                # The accuracy of always giving the more frequent answer.
                commoner=max(float(truly.mean()), 1 - float(truly.mean())),
                recall=float(said[truly].mean()) if truly.any() else None,
                auroc=auroc(truly, labelled.probabilities[known, place]),
            )
        outcomes.append(one)
    numbers = np.unique(np.linspace(0, len(public) - 1, min(MOST_IMAGES, len(public))).astype(np.int64)).tolist()
    pictures = public.thumbnails(numbers)
    images = tuple(
        AttributeImage(
            source=public.sources[number],
            has=tuple(names[place] for place in np.flatnonzero(has[number])),
            truth=None
            if truth is None or not known[number]
            else tuple(names[place] for place in np.flatnonzero(truth[number] == 1)),
            thumbnail=pictures.get(number),
        )
        for number in numbers
    )
    return AttributeReport(tuple(outcomes), images, len(public), int(known.sum()))
