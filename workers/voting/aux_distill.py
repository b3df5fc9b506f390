"""FedAUXfdp: an agent answers with soft labels of heads that already carry its own noise (Hoech et al. 2022).

The agent fits a classifier and a certainty score to its records, adds noise to both once, and from then on looks at the
noisy ones only: what it says of public queries is post-processing. Every fifth query serves as a public negative, from
which the certainty score learns to tell what the agent has records of.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.model_terms import head_terms
from labeler.randomness import ByteSource
from labeler.task import NEGATIVES_EVERY, Task
from workers.voting.model_store import ModelStore
from workers.voting.records import Records

HEAD_SHARPNESS, SCORE_SHARPNESS = 3.0, 8.0
"""Factors on the scores before they become probabilities: heads fitted under strong regularisation are timid. They cost
no privacy, and did best on CIFAR-10 in `labeler bench papers fedauxfdp`."""

_FEATURE_ONE = np.float32(2048)


def soft_ballots(
    task: Task, batch: QueryBatch, records: Records, models: ModelStore, *, source: ByteSource
) -> NDArray[np.int64]:
    """Certainty times class probability of each query on the grid: at least 0, and at most 1 (the scale) in a row.

    Args:
        task: of method aux-distill.
        batch: the public queries, all of the task.
        records: the agent's.
        models: where the answer is kept, before it leaves.
        source: the agent's secret source of local noise for this batch, at its beginning.

    Returns:
        Grid units, int64, shape (num_queries, num_classes). It carries the agent's noise.
    """

    def answer() -> NDArray[np.int64]:
        # Loaded where it is wanted: most agents never train.
        from workers.learning.private_heads import private_heads

        queries = batch.features.astype(np.float32) / _FEATURE_ONE
        heads = private_heads(
            records.features.astype(np.float32) / _FEATURE_ONE,
            records.labels,
            queries[::NEGATIVES_EVERY],
            terms=head_terms(task),
            source=source,
        )
        votes = heads.soft_votes(queries, head_sharpness=HEAD_SHARPNESS, score_sharpness=SCORE_SHARPNESS)
        # Rounded down, so that a row never adds up to more than one.
        return np.asarray(np.floor(votes * task.scale), dtype=np.int64)

    return models.once(records.version, f"aux-distill {task.digest} {batch.digest}", answer)
