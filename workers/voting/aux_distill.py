"""FedAUXfdp: an agent answers with soft labels of heads that already carry its own noise (Hoech et al. 2022).

The agent fits a classifier and a certainty score to its records, adds noise to both once, and from then on looks at the
noisy ones only: what it says of public queries is post-processing. Every fifth query serves as a public negative, from
which the certainty score learns to tell what the agent has records of.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.local_heads import LocalHeadTerms
from labeler.methods.aux_distill import head_terms
from labeler.randomness import ByteSource
from labeler.task import NEGATIVES_EVERY, Task
from workers.voting.model_store import ModelStore
from workers.voting.records import FEATURE_ONE, Records, most_trained

if TYPE_CHECKING:
    from workers.learning.public_map import PublicMap

HEAD_SHARPNESS, SCORE_SHARPNESS = 3.0, 8.0
"""Factors on the scores before they become probabilities: heads fitted under strong regularisation are timid. They cost
no privacy, and did best on CIFAR-10 in `labeler bench papers fedauxfdp`."""


def soft_ballots(
    task: Task,
    batch: QueryBatch,
    records: Records,
    models: ModelStore,
    *,
    source: ByteSource,
    engine: str = "numpy",
) -> NDArray[np.int64]:
    """Certainty times class probability of each query on the grid: at least 0, and at most 1 (the scale) in a row.

    Args:
        batch: the public queries, all of the task.
        models: where the answer is kept, before it leaves.
        source: the agent's secret source of local noise for this batch, at its beginning.
        engine: which devices may be used; see workers.learning.descent.

    Returns:
        Grid units, int64, shape (num_queries, num_classes). It carries the agent's noise.
    """

    def answer() -> NDArray[np.int64]:
        # Loaded where it is wanted: most agents never train.
        from workers.learning.private_heads import fit_rows

        terms, queries = head_terms(task), _queries(batch)
        fitted = fit_rows(
            records.trainable(most_trained(task)),
            queries[::NEGATIVES_EVERY],
            terms=terms,
            maps=_maps(batch, terms),
            engine=engine,
        )
        heads = fitted.released(terms, source=source)
        votes = heads.soft_votes(queries, head_sharpness=HEAD_SHARPNESS, score_sharpness=SCORE_SHARPNESS)
        # Rounded down, so that a row never adds up to more than one.
        return np.asarray(np.floor(votes * task.scale), dtype=np.int64)

    return models.once(records.version, f"aux-distill {task.digest} {batch.digest}", answer)


def check_negatives(task: Task, batch: QueryBatch) -> None:
    """Refuse queries from which no public map can be made; said before the charge, from public numbers alone.

    Raises:
        InvalidSetting: they are all the same, or a map of them would magnify rounding errors.
    """
    _ = _maps(batch, head_terms(task))


@lru_cache(maxsize=2)
def _maps(batch: QueryBatch, terms: LocalHeadTerms) -> tuple[PublicMap, PublicMap]:
    from workers.learning.private_heads import public_maps

    return public_maps(_queries(batch)[::NEGATIVES_EVERY], terms=terms)


def _queries(batch: QueryBatch) -> NDArray[np.float32]:
    return batch.features.astype(np.float32) / FEATURE_ONE
