"""What the embedder leaves beside a job: its questions, or why there are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from feature_store.journal.jobs import JobRecord, RoundRecord
from labeler.batch import QueryBatch
from labeler.errors import BadData, LabelerError, TryAgain


def batch_of(features: NDArray[np.int16], job: JobRecord, one: RoundRecord) -> QueryBatch:
    """The questions of one round, of all those of its job."""
    start = one.first_query - job.first_query
    return QueryBatch(features[start : start + one.num_queries], first_query=one.first_query)


def read_questions(path: Path) -> NDArray[np.int16]:
    """Questions as the embedder left them, shape (queries, dimension).

    Raises:
        BadData: the file cannot be read, or holds no quantised features.
    """
    try:
        features = load(path.read_bytes())["features"]
    except (OSError, SafetensorError, KeyError):
        raise BadData("the prepared questions cannot be read; submit the job again") from None
    if features.dtype != np.int16 or features.ndim != 2:
        raise BadData("the prepared questions are not quantised features; submit the job again")
    return features


def read_failure(path: Path) -> LabelerError:
    """Why the embedder could not prepare them, as an error of the tree."""
    try:
        found = json.loads(path.read_bytes())
        return _named_error(str(found["problem_type"]), str(found["sentence"]))
    except (OSError, ValueError, KeyError, TypeError):
        return BadData("the questions could not be prepared, and the reason cannot be read; submit the job again")


def _named_error(problem_type: str, sentence: str) -> LabelerError:
    """The error of the tree with this problem type, so that a refusal in another process keeps its type."""
    kinds: list[type[LabelerError]] = [LabelerError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.problem_type == problem_type and not issubclass(kind, TryAgain):
            return kind(sentence)
    return BadData(sentence)
