"""The pseudo-label set: the schema of what a labelling job gives back, and how a release becomes rows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.task import Task


class AnswerStatus(StrEnum):
    """Why a query has the label it has."""

    ANSWERED = "answered"
    ABSTAINED = "abstained"
    REFUSED_BUDGET = "refused_budget"
    FAILED_QUORUM = "failed_quorum"


ABSTAINED_LABEL = -1
"""The label of a query without an answer."""

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
    ]
)
"""One row per query asked. `noisy_votes` are the released, paid-for noisy sums, in votes; null for winner."""


@dataclass(frozen=True)
class JobStamp:
    """What every row of one job has in common.

    Attributes:
        job_id: the job.
        backbone: name of the backbone, for people.
        created_at: when the set was made; the caller's clock.
        privacy: data-independent epsilons and delta, written into the schema's metadata as JSON.
        is_seeded: True for a simulation, whose noise a reader of the seed can subtract.
    """

    job_id: str
    backbone: str
    created_at: datetime
    privacy: Mapping[str, object]
    is_seeded: bool


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
) -> pa.Table:
    """Put the answers of a job into the fixed schema.

    Args:
        task: the task; its digest, sigma and k stand in every row.
        stamp: see JobStamp.
        query_ids, sources, statuses, ledger_seq: one entry per query.
        labels: int16, shape (num_queries,); -1 where there is no answer.
        noisy_votes: float64, shape (num_queries, num_classes), of the histogram release; None for winner.

    Raises:
        InvalidSetting: lengths differ, a label is no class, or votes come with a winner release.
    """
    lengths = {len(query_ids), len(sources), len(labels), len(statuses), len(ledger_seq)}
    if len(lengths) != 1:
        raise InvalidSetting(f"columns of a pseudo-label set must be equally long; found lengths {sorted(lengths)}")
    if labels.size and (labels.min() < ABSTAINED_LABEL or labels.max() >= task.num_classes):
        raise InvalidSetting(f"a label lies outside -1 to {task.num_classes - 1}")
    if task.release == "winner" and noisy_votes is not None:
        raise InvalidSetting("the winner release opens no votes, so none can be stored")
    count = len(query_ids)
    names = pa.array([*task.classes, None], pa.string()).take(pa.array(np.where(labels < 0, task.num_classes, labels)))
    votes = pa.nulls(count, pa.list_(pa.float64()))
    if noisy_votes is not None:
        offsets = np.arange(count + 1, dtype=np.int32) * task.num_classes
        votes = pa.ListArray.from_arrays(pa.array(offsets), pa.array(noisy_votes.ravel()))

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
    ]
    metadata = {
        "classes": json.dumps(task.classes),
        "privacy": json.dumps(stamp.privacy, sort_keys=True),
        "task": task.model_dump_json(),
        "seeded": json.dumps(stamp.is_seeded),
    }
    return pa.table(columns, schema=SCHEMA.with_metadata(metadata))
