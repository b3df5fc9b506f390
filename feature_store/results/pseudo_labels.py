"""The pseudo-label set, a table of the questions that a job asked and the answers that it released.

`label_table` makes the table from what a job opened. `answers_of` reads it back, and `label_released` labels the public
images by it. The service and `labeler run` both go this way. They name a question after an image by the same rule
(`QuestionNames`, `query_rows`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_store.query_selection import Progress, silent
from feature_store.results.image_labels import BUDGET_FIELDS, with_budgets
from feature_store.students.answers import NoisyAnswers
from labeler.errors import BadData, InvalidSetting
from labeler.linear_model import released_model
from labeler.release import Release
from labeler.rounds.effects import ABSTAINED_LABEL, AnswerStatus
from labeler.task import Task, parse_task

if TYPE_CHECKING:
    from feature_store.students.attributes import LabeledAttributes
    from feature_store.students.labeling import LabeledImages

SCHEMA = pa.schema(
    [
        ("query_id", pa.string()),
        ("source", pa.string()),
        ("label", pa.int16()),
        ("label_name", pa.string()),
        ("status", pa.string()),
        ("task_digest", pa.string()),
        ("job_id", pa.string()),
        ("release", pa.string()),
        ("sigma", pa.float64()),
        ("k", pa.int32()),
        ("backbone", pa.string()),
        ("backbone_fingerprint", pa.string()),
        ("ledger_seq", pa.int64()),
        ("created_at", pa.timestamp("us", tz="UTC")),
        ("noisy_votes", pa.list_(pa.float64())),
        ("mu_squared_share", pa.float64()),
        *BUDGET_FIELDS,
    ]
)
"""One row per query asked. `noisy_votes` are the released, paid-for noisy sums, in votes; null for winner.
`mu_squared_share` is the question's part of the charge per private image; null where the job is priced once. The
columns after it are the question's budget (`labeler.query_budgets`), which every method has."""


@dataclass(frozen=True)
class JobStamp:
    """The facts that all rows of one job share.

    Attributes:
        backbone: name of the backbone, for people.
        created_at: when the set was made, by the caller's clock.
        privacy: data-independent epsilons and delta, and `mu_squared` of the job and of a question
            (`labeler.batching.mu_squared_of`), written into the schema's metadata as JSON.
        is_seeded: True for a simulation, whose noise a reader of the seed can subtract.
    """

    job_id: str
    backbone: str
    created_at: datetime
    privacy: Mapping[str, Any]
    is_seeded: bool


@dataclass(frozen=True)
class AnsweredRound:
    """One round of a job, and what it opened.

    Attributes:
        start: place of its first query among all queries of the job, from 0.
        ledger_seq: ledger entry of the charge that paid for it; 0 if no charge was posted.
        release: what was opened; None if nothing was.
    """

    start: int
    num_queries: int
    ledger_seq: int
    release: Release | None


def label_table(
    task: Task,
    stamp: JobStamp,
    names: QuestionNames,
    rounds: Sequence[AnsweredRound],
    *,
    budgets: Mapping[str, Sequence[Any]],
    questions: NDArray[np.int16] | None = None,
    images: NDArray[np.int16] | None = None,
) -> pa.Table:
    """Return the releases of a job's rounds as a table of the fixed schema.

    If a round was not opened, its queries get no label. A released model labels every image, and the charge of the
    first round pays for it. Then the table has no votes, because none were counted.

    Args:
        names: of every question; of every image if a model was asked for.
        budgets: of as many rows (`labeler.query_budgets.QueryBudgets.columns`).
        questions: what was asked, int16, shape (queries, dimension); needed for a model along axes.
        images: int16, shape (images, dimension); needed for a model. None if they were deleted.

    Raises:
        BadData: a release does not have the shape of its round, or the images for a model are gone.
    """
    count = len(names.query_ids)
    labels = np.full(count, ABSTAINED_LABEL, dtype=np.int16)
    votes = None if task.release == "winner" else np.full((count, task.num_classes), np.nan)
    statuses = [AnswerStatus.FAILED_QUORUM] * count
    sequence = np.zeros(count, dtype=np.int64)
    opened = [one.release for one in rounds if one.release is not None]
    if opened and (model := released_model(task, opened, questions)) is not None:
        if images is None:
            raise BadData(f"the images of job {stamp.job_id} cannot be read; restore its folder in jobs/ from a backup")
        labels, votes = model.predict(images), None
        statuses, sequence = [AnswerStatus.ANSWERED] * len(labels), np.full(len(labels), rounds[0].ledger_seq)
        rounds = ()
    for number, one in enumerate(rounds):
        place = slice(one.start, one.start + one.num_queries)
        sequence[place] = one.ledger_seq
        if one.release is None:
            continue
        if one.release.labels.shape != (one.num_queries,) or one.release.kind != task.release:
            raise BadData(f"the stored release of round {number} of job {stamp.job_id} is not one of this task")
        labels[place] = one.release.labels
        if votes is not None and one.release.noisy_votes is not None:
            votes[place] = one.release.noisy_votes
        # Only a winner release holds -1: the best noisy sum was below the task's threshold.
        statuses[place] = [
            AnswerStatus.ABSTAINED if label == ABSTAINED_LABEL else AnswerStatus.ANSWERED
            for label in one.release.labels.tolist()
        ]
    return pseudo_label_table(
        task,
        stamp,
        query_ids=names.query_ids,
        sources=names.sources,
        labels=labels,
        statuses=statuses,
        ledger_seq=sequence,
        noisy_votes=votes,
        budgets=budgets,
    )


def pseudo_label_table(
    task: Task,
    stamp: JobStamp,
    *,
    query_ids: Sequence[str],
    sources: Sequence[str],
    labels: NDArray[np.int16],
    statuses: Sequence[AnswerStatus],
    ledger_seq: NDArray[np.int64],
    noisy_votes: NDArray[np.float64] | None,
    budgets: Mapping[str, Sequence[Any]],
) -> pa.Table:
    """Return the answers of a job as a table of the fixed schema.

    Args:
        task: every row repeats its digest, sigma and k.
        query_ids, sources, statuses, ledger_seq: one entry per query.
        labels: int16, shape (num_queries,); -1 where there is no answer. Such a row has null votes.
        noisy_votes: float64, shape (num_queries, num_classes), of the histogram release; None for winner.
        budgets: see `label_table`.

    Raises:
        InvalidSetting: lengths differ, a label is no class, or votes come with a winner release.
    """
    lengths = {len(query_ids), len(sources), len(labels), len(statuses), len(ledger_seq), len(budgets["share_nano"])}
    if len(lengths) != 1:
        raise InvalidSetting(f"columns of a pseudo-label set must be equally long; found lengths {sorted(lengths)}")
    if labels.size and (labels.min() < ABSTAINED_LABEL or labels.max() >= task.num_classes):
        raise InvalidSetting(f"a label lies outside -1 to {task.num_classes - 1}")
    if task.release == "winner" and noisy_votes is not None:
        raise InvalidSetting("the winner release opens no votes, so none can be stored")
    count = len(query_ids)
    votes = pa.nulls(count, pa.list_(pa.float64()))
    if noisy_votes is not None:
        offsets = np.arange(count + 1, dtype=np.int32) * task.num_classes
        votes = pa.ListArray.from_arrays(pa.array(offsets), pa.array(noisy_votes.ravel()))
        # Null where nothing was opened: a NaN would look like an answer.
        votes = votes.take(pa.array(np.arange(count), mask=labels < 0))
    if task.attributes_per_record is not None:
        # An image may have any number of attributes, so no single one is its label. Readers use the votes.
        labels = np.full(count, ABSTAINED_LABEL, dtype=np.int16)
    names = pa.array([*task.classes, None], pa.string()).take(pa.array(np.where(labels < 0, task.num_classes, labels)))

    def same(value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    columns = [
        pa.array(query_ids, pa.string()),
        pa.array(sources, pa.string()),
        pa.array(labels, pa.int16()),
        names,
        pa.array([str(status) for status in statuses], pa.string()),
        same(task.digest, pa.string()),
        same(stamp.job_id, pa.string()),
        same(task.release, pa.string()),
        same(task.sigma_votes, pa.float64()),
        same(task.k, pa.int32()),
        same(stamp.backbone, pa.string()),
        same(task.backbone_fingerprint, pa.string()),
        pa.array(ledger_seq, pa.int64()),
        same(stamp.created_at, pa.timestamp("us", tz="UTC")),
        votes,
        same(_share_of(stamp.privacy), pa.float64()),
    ]
    metadata = {
        "classes": json.dumps(task.classes),
        "privacy": json.dumps(stamp.privacy, sort_keys=True),
        "task": task.model_dump_json(),
        "seeded": json.dumps(stamp.is_seeded),
    }
    own = pa.schema(list(SCHEMA)[: len(columns)], metadata=metadata)
    return with_budgets(pa.table(columns, schema=own), budgets)


_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class QuestionNames:
    """The names of a job's questions, and of the image behind each question.

    Attributes:
        query_ids: one per answer.
        sources: name of the image that each answer is about. For a cluster, the image nearest to its center.
    """

    query_ids: tuple[str, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, rows: NDArray[np.int64], sources: Sequence[str], *, kind: str | None) -> QuestionNames:
        """Name answers after the images of these rows.

        Args:
            rows: see `query_rows`.
            sources: names of all images.
            kind: "query" or "cluster": answers get this word and a number as their id. None: an answer's id is the
                name of its image.

        Raises:
            IndexError: a row is no image.
        """
        named = tuple(sources[row] for row in rows.tolist())
        ids = named if kind is None else tuple(f"{kind}-{number:06d}" for number in range(len(named)))
        return cls(ids, named)


def query_rows(
    rows: NDArray[np.int64],
    assignment: NDArray[np.int64],
    *,
    centres: NDArray[np.int16],
    images: NDArray[np.int16] | None,
) -> NDArray[np.int64]:
    """Return the row of the image that each answer is about.

    If an answer is about a cluster, return its image most similar to the center; among equals, the lowest row.
    Similarity is the cosine with the center. Products of quantized features are whole numbers below 2^53, so every
    machine computes the same number.

    Args:
        rows: shape (num_answers,), the image of each answer; -1 for the center of a cluster.
        assignment: shape (num_images,), the answer that stands for each image.
        centres: int16, shape (num_answers, dimension), the vectors that were asked about.
        images: int16, shape (num_images, dimension). None if they were deleted: then the first image of each cluster
            is returned.

    Returns:
        int64, shape (num_answers,); 0 for a cluster without images.
    """
    if not (rows < 0).any():
        return rows
    similarity = np.zeros(len(assignment))
    if images is not None:
        for start in range(0, len(images), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            wide = images[block].astype(np.float64)
            products = np.einsum("id,id->i", wide, centres[assignment[block]].astype(np.float64))
            similarity[block] = products / np.linalg.norm(wide, axis=1)
    # Sorted by rising similarity, and among equals the lowest row last. The last write below wins.
    order = np.lexsort((-np.arange(len(assignment)), similarity))
    nearest = np.zeros(len(rows), dtype=np.int64)
    nearest[assignment[order]] = order
    return nearest


def question_share(table: pa.Table) -> dict[str, float | None]:
    """Return the extra field `mu_squared` of every row: the part of one image's budget that its question took.

    The value is None if the job is priced once. The field is absent for a table of images, and for a table of an
    earlier version.
    """
    privacy = json.loads((table.schema.metadata or {}).get(b"privacy", b"{}"))
    return {"mu_squared": _share_of(privacy)} if "mu_squared" in privacy else {}


def _share_of(privacy: Mapping[str, Any]) -> float | None:
    return (privacy.get("mu_squared", {}).get("question") or {}).get("instance")


def task_of(table: pa.Table) -> tuple[Task, bool]:
    """Return the task whose answers a table holds, and whether any noise came from a known seed.

    Raises:
        BadData: the table is not one of questions.
    """
    try:
        metadata = table.schema.metadata or {}
        return parse_task(json.loads(metadata[b"task"])), bool(json.loads(metadata[b"seeded"]))
    except (ValueError, KeyError, TypeError):
        raise BadData("these are no questions and answers of a job; download them again") from None


def answers_of(
    table: pa.Table,
    *,
    features: NDArray[np.generic],
    assignment: NDArray[np.int64],
    contributors: int | None = None,
) -> NoisyAnswers:
    """Return the answers of a table of questions, for a student.

    Args:
        table: in the fixed schema, a row per question; a row per image if a model was asked for.
        features: what each row is about, shape (rows, dimension).
        assignment: the row that stands for each public image.
        contributors: how many agents' noise is in the answers. None means all agents of the task, the most possible.

    Raises:
        NotReady: nothing was answered.
        BadData: lengths differ.
    """
    task, _ = task_of(table)
    votes, counted = None, table["noisy_votes"].to_pylist()
    if any(counted):  # neither of winners nor of a model's labels
        nothing = [float("nan")] * task.num_classes  # for a question that was not opened
        votes = np.array([row or nothing for row in counted], dtype=np.float64)
    return NoisyAnswers.of(
        task,
        features=features,
        labels=table["label"].to_numpy(),
        noisy_votes=votes,
        assignment=assignment,
        contributors=contributors,
    )


def label_released(
    table: pa.Table,
    *,
    questions: NDArray[np.int16],
    rows: NDArray[np.int64],
    assignment: NDArray[np.int64],
    images: NDArray[np.int16],
    contributors: NDArray[np.integer],
    kind: str = "planned",
    seed: int = 0,
    progress: Progress = silent,
) -> LabeledImages | LabeledAttributes:
    """Label every public image from what a job released. Post-processing: costs no privacy.

    Args:
        table: of the job's questions.
        questions: features of what was asked, shape (num_questions, dimension).
        rows: shape (num_questions,), the image that each question is, or -1 for the center of a cluster.
        assignment: shape (num_images,), the question that stands for each image.
        images: features of all images, shape (num_images, dimension).
        contributors: of how many agents sums were opened: of each question's, for a task about attributes; of any.
        kind, seed: see `feature_store.students.fit_student`.
        progress: see `feature_store.students.labeling.label_images`.

    Raises:
        NotReady, BadData: nothing was answered, or shapes do not fit.
    """
    # Imported on use: a process that only makes tables loads no learning library.
    from feature_store.students.attributes import attributes_of
    from feature_store.students.labeling import label_images

    task = task_of(table)[0]
    if task.attributes_per_record is not None:
        votes = [row or [0.0] * task.num_classes for row in table["noisy_votes"].to_pylist()]
        return attributes_of(task, votes, contributors, questions, images, rows=rows, seed=seed)
    about, own = task.traits.rows_about((questions, rows), (images, None))
    answers = answers_of(
        table,
        features=about,
        assignment=assignment,
        # Rounds may differ in their contributors; expecting the most noise is the cautious guess.
        contributors=int(contributors.max()),
    )
    return label_images(answers, images, rows=own, kind=kind, seed=seed, progress=progress)
