"""An agent's answer to a batch, without noise shares: what its method makes of its records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.randomness import ByteSource, os_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.learning.learner import Trainer
from workers.voting import NeighborIndexes


def answer(
    task: Task,
    batch: QueryBatch,
    records: Records,
    *,
    source: ByteSource | None = None,
    models: ModelStore | None = None,
) -> NDArray[np.int64]:
    """Ballots of the task's method over these records, shape (num_queries, num_classes).

    Args:
        source: of its noise or coins; the system's by default.
        models: where models are kept; nowhere by default.
    """
    indexes = NeighborIndexes(dimension=batch.features.shape[1], engine="numpy")
    context = RunnerContext(indexes, models or ModelStore(), lambda: source or os_source(), Trainer())
    return task.traits.ballots(task, batch, records, context)
