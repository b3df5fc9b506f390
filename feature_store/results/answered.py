"""From a table of questions, as a job keeps it, back to the answers that students learn from."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers
from labeler.errors import BadData
from labeler.task import Task, parse_task


def task_of(table: pa.Table) -> tuple[Task, bool]:
    """The task whose answers a table holds, and whether any noise came from a known seed.

    Raises:
        BadData: it is no table of questions.
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
    """What a table of questions says to a student.

    Args:
        table: see feature_store.results.pseudo_labels; a row per question, or per image where a model was asked for.
        features: what each row is about, shape (rows, dimension).
        assignment: the row that stands for each public image.
        contributors: how many agents' noise is in the answers; all of the task's when None, which is the most.

    Raises:
        NotReady: nothing was answered.
        BadData: lengths differ.
    """
    task, _ = task_of(table)
    votes = None
    if task.release == "histogram" and not task.traits.asks_for_a_model:
        nothing = [float("nan")] * task.num_classes  # of a question that was not opened
        votes = np.array([row or nothing for row in table["noisy_votes"].to_pylist()], dtype=np.float64)
    return NoisyAnswers.of(
        task,
        features=features,
        labels=table["label"].to_numpy(),
        noisy_votes=votes,
        assignment=assignment,
        contributors=contributors,
    )
