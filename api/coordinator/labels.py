"""The labels of a finished job: releases as they are stored, and the pseudo-label table made of them.

The table is a function of what is stored, so that a file downloaded twice is the same file. A question about one image
is named after it; the question about a cluster has the image nearest to the cluster's centre as its source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from api.coordinator.config import CoordinatorConfig
from api.coordinator.model_labels import model_bytes, model_labels
from api.coordinator.pricing import certified_price
from api.schema import LabelRow
from feature_store.journal.jobs import JobRecord, JobStore, RoundRecord
from feature_store.journal.tasks import TaskRecord, TaskStore
from feature_store.shard import Shard
from labeler.errors import BadData, LabelerError, NotReady
from labeler.planning import METHOD, person_guarantee
from labeler.pseudo_labels import ABSTAINED_LABEL, AnswerStatus, JobStamp, pseudo_label_table
from labeler.release import Release

RELEASE_VERSION = "labeler-release/1"


class _Stores(Protocol):
    @property
    def tasks(self) -> TaskStore: ...

    @property
    def jobs(self) -> JobStore: ...


@dataclass(frozen=True, eq=False)
class Questions:
    """What a job asked, in words.

    Attributes:
        query_ids: one per query.
        sources: name of the image that each query is, or is nearest to.
        backbone: name of the backbone, for people; may be empty.
    """

    query_ids: tuple[str, ...]
    sources: tuple[str, ...]
    backbone: str


def job_label_table(job_id: str, *, stores: _Stores, config: CoordinatorConfig) -> pa.Table:
    """The pseudo-label set of a completed job, with the schema of labeler.pseudo_labels.

    Raises:
        NotFound: there is no such job.
        NotReady: it is not completed.
        BadData: what is stored of it cannot be read.
    """
    job = stores.jobs.get(job_id)
    if job.state != "completed":
        advice = "it ended without all its labels" if job.is_finished else "wait until it is completed"
        raise NotReady(f"job {job_id} is {job.state}, so there are no labels to fetch: {advice}")
    rounds = stores.jobs.rounds(job_id)
    stored = [stores.jobs.release(job_id, one.number) for one in rounds]
    releases = [None if data is None else release_from_bytes(data) for data in stored]
    folder, record = config.home / "jobs" / job_id, stores.tasks.get(job.task_digest)
    questions = read_questions(folder, job)
    if record.task.traits.asks_for_a_model and releases[0] is not None:
        return model_label_table(folder, job, record, releases[0], questions, ledger_seq=rounds[0].ledger_seq or 0)
    return label_table(job, rounds, record, releases, questions)


def job_model(job_id: str, *, stores: _Stores) -> bytes:
    """The model that a completed job released, as a file with its privacy card.

    Raises:
        NotFound: there is no such job, or it asked for labels.
        NotReady: it is not completed.
        BadData: what is stored of it cannot be read.
    """
    job = stores.jobs.get(job_id)
    data = stores.jobs.release(job_id, 0) if job.state == "completed" else None
    if data is None:
        raise NotReady(f"job {job_id} is {job.state}, so there is no model to fetch")
    return model_bytes(job, stores.tasks.get(job.task_digest), release_from_bytes(data))


def model_label_table(
    folder: Path, job: JobRecord, record: TaskRecord, release: Release, questions: Questions, *, ledger_seq: int
) -> pa.Table:
    """What the released model says of every image, in the fixed schema; without votes, since none were counted.

    Raises:
        BadData: the images' features cannot be read.
    """
    labels = model_labels(folder, job, record, release)
    return pseudo_label_table(
        record.task,
        JobStamp(
            job_id=job.job_id,
            backbone=questions.backbone,
            created_at=job.updated_at,
            privacy=_privacy(job, record),
            is_seeded=release.is_seeded,
        ),
        query_ids=questions.query_ids,
        sources=questions.sources,
        labels=labels,
        statuses=[AnswerStatus.ANSWERED] * len(labels),
        ledger_seq=np.full(len(labels), ledger_seq, dtype=np.int64),
        noisy_votes=None,
    )


def label_table(
    job: JobRecord,
    rounds: Sequence[RoundRecord],
    record: TaskRecord,
    releases: Sequence[Release | None],
    questions: Questions,
) -> pa.Table:
    """Put the releases of a job into the fixed schema.

    Args:
        job: whose labels.
        rounds: in order.
        record: its task.
        releases: one per round; None for a round that was not opened, whose queries get no label.
        questions: names of the queries and of their images.

    Raises:
        BadData: a release does not have the shape of its round.
    """
    task = record.task
    labels = np.full(job.num_queries, ABSTAINED_LABEL, dtype=np.int16)
    votes = None if task.release == "winner" else np.full((job.num_queries, task.num_classes), np.nan)
    statuses = [AnswerStatus.FAILED_QUORUM] * job.num_queries
    sequence = np.zeros(job.num_queries, dtype=np.int64)
    is_seeded = False
    for one, release in zip(rounds, releases, strict=True):
        start = one.first_query - job.first_query
        place = slice(start, start + one.num_queries)
        sequence[place] = one.ledger_seq or 0
        if release is None:
            continue
        if release.labels.shape != (one.num_queries,) or release.kind != task.release:
            raise BadData(f"the stored release of round {one.number} of job {job.job_id} is not one of this task")
        labels[place] = release.labels
        if votes is not None and release.noisy_votes is not None:
            votes[place] = release.noisy_votes
        # Only a winner release holds -1: the best noisy sum was below the task's threshold.
        statuses[place] = [
            AnswerStatus.ABSTAINED if label == ABSTAINED_LABEL else AnswerStatus.ANSWERED
            for label in release.labels.tolist()
        ]
        is_seeded |= release.is_seeded
    table = pseudo_label_table(
        task,
        JobStamp(
            job_id=job.job_id,
            backbone=questions.backbone,
            created_at=job.updated_at,
            privacy=_privacy(job, record),
            is_seeded=is_seeded,
        ),
        query_ids=questions.query_ids,
        sources=questions.sources,
        labels=labels,
        statuses=statuses,
        ledger_seq=sequence,
        noisy_votes=votes,
    )
    return _without_unopened(table, labels)


def label_rows(table: pa.Table) -> tuple[LabelRow, ...]:
    """The rows of a small table as they travel in JSON."""
    columns = ["query_id", "source", "label", "label_name", "status", "noisy_votes"]
    return tuple(LabelRow.model_validate(row) for row in table.select(columns).to_pylist())


def read_questions(folder: Path, job: JobRecord) -> Questions:
    """Names of a job's queries, from its upload and from what was chosen of it.

    Raises:
        BadData: a file is missing or damaged.
    """
    path = folder / "questions.safetensors"
    try:
        arrays = load(path.read_bytes())
        with safe_open(path, framework="numpy") as file:
            backbone = (file.metadata() or {}).get("backbone", "")
        names = pq.read_table(folder / "upload.parquet", columns=["name"])["name"].to_pylist()
        rows = _rows(folder, job, arrays)
        sources = tuple(names[row] for row in rows.tolist())
    except (OSError, SafetensorError, pa.ArrowException, KeyError, IndexError) as error:
        raise BadData(
            f"what job {job.job_id} asked cannot be read ({type(error).__name__}); restore its folder "
            "in jobs/ from a backup"
        ) from None
    answers = job.images if job.strategy == "weights" else job.num_queries
    if len(sources) != answers:
        raise BadData(f"job {job.job_id} has {answers} answers, and its folder tells of {len(sources)}")
    asks_clusters = bool((arrays["rows"] < 0).any())
    if job.source == "features" and not asks_clusters:
        return Questions(sources, sources, backbone)
    kind = "cluster" if asks_clusters else "query"
    return Questions(tuple(f"{kind}-{number:06d}" for number in range(len(sources))), sources, backbone)


def release_to_bytes(release: Release) -> bytes:
    """A release as it is stored; equal releases are equal bytes."""
    arrays = {"labels": np.ascontiguousarray(release.labels, dtype=np.int16)}
    if release.noisy_votes is not None:
        arrays["noisy_votes"] = np.ascontiguousarray(release.noisy_votes, dtype=np.float64)
    about = {
        "version": RELEASE_VERSION,
        "kind": release.kind,
        "contributors": sorted(release.contributors),
        "is_seeded": release.is_seeded,
    }
    # One entry: several would be written in an order that differs from process to process.
    return save(arrays, {"release": json.dumps(about, sort_keys=True, separators=(",", ":"))})


def release_from_bytes(data: bytes) -> Release:
    """A release from its stored bytes.

    Raises:
        BadData: they are damaged, or of another version.
    """
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["release"])
        labels, votes = arrays["labels"], arrays.get("noisy_votes")
        if about["version"] != RELEASE_VERSION or labels.dtype != np.int16 or labels.ndim != 1:
            raise ValueError
        if votes is not None and (
            votes.dtype != np.float64 or votes.ndim != 2 or len(votes) != len(labels) or not np.isfinite(votes).all()
        ):
            raise ValueError
        return Release(
            kind=about["kind"],
            labels=labels,
            noisy_votes=votes,
            contributors=frozenset(str(agent) for agent in about["contributors"]),
            is_seeded=bool(about["is_seeded"]),
        )
    except (SafetensorError, ValueError, KeyError, TypeError, LabelerError):
        raise BadData("a stored release is damaged, or of another version; restore the journal from a backup") from None


def _rows(folder: Path, job: JobRecord, arrays: dict[str, NDArray[np.generic]]) -> NDArray[np.int64]:
    """The image that each query is, or the one most similar to it in its cluster."""
    rows = arrays["rows"].astype(np.int64)
    if not (rows < 0).any():
        return rows
    assignment, centres = arrays["assignment"].astype(np.int64), arrays["features"].astype(np.float64)
    features = _image_features(folder, job)
    similarity = np.zeros(len(assignment))
    if features is not None:
        wide = features.astype(np.float64)
        similarity = np.einsum("id,id->i", wide, centres[assignment]) / np.linalg.norm(wide, axis=1)
    # Ascending by similarity, and among equals the lowest number last: what is written last stays.
    order = np.lexsort((-np.arange(len(assignment)), similarity))
    nearest = np.zeros(len(rows), dtype=np.int64)
    nearest[assignment[order]] = order
    return nearest


def _image_features(folder: Path, job: JobRecord) -> NDArray[np.int16] | None:
    """Features of all images, where they are still there: sent, or kept by the embedder."""
    if job.source == "features":
        column = pq.read_table(folder / "upload.parquet", columns=["feature"])["feature"].combine_chunks()
        entries: NDArray[np.int16] = column.flatten().to_numpy(zero_copy_only=False)
        return entries.reshape(len(column), -1)
    shard = folder / "public.shard"
    return np.asarray(Shard.open(shard, verify=False).features) if shard.exists() else None


def _privacy(job: JobRecord, record: TaskRecord) -> dict[str, object]:
    """The job's data-independent guarantee, for the metadata of a file that travels alone."""
    cost = certified_price(record.task, job.num_queries)
    return {
        "delta": record.task.delta,
        "instance": {"epsilon": cost.instance.to_json()["epsilon"], "method": METHOD},
        "agent": {"epsilon": cost.agent.to_json()["epsilon"], "method": METHOD},
        **person_guarantee(cost),
        "colluding_agents": cost.colluding_agents,
        "holds_against": cost.holds_against,
    }


def _without_unopened(table: pa.Table, labels: NDArray[np.int16]) -> pa.Table:
    """Null votes where nothing was opened: a NaN would look like an answer."""
    if not (labels == ABSTAINED_LABEL).any():
        return table
    place = table.schema.get_field_index("noisy_votes")
    rows = table.column("noisy_votes").combine_chunks()
    kept = pa.array(np.arange(len(labels)), mask=labels == ABSTAINED_LABEL)
    return table.set_column(place, table.schema.field(place), rows.take(kept))
