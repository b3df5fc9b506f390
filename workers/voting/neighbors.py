"""Votes of neighbours: the records nearest to each query (knn), or the queries nearest to each record (reverse-knn)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from feature_store.index import NeighborIndex, build_index
from feature_store.index.build import here, is_cluster, load_engine
from feature_store.index.exact_index import UNDECLARED_RECORDS, check_memory_limit
from labeler.ballots import attribute_ballots, knn_ballots, reverse_knn_ballots
from labeler.batch import QueryBatch
from labeler.task import Task
from workers.voting.records import Records, Selection

NEIGHBORS_AT_ONCE = 2**21
"""Neighbours found in one step: some 40 MiB, however many a task asks for."""

NUMBERS_AT_ONCE = 2**22
"""Numbers of the records' features that look for their nearest questions in one step: 8 MiB, and twice that in float32;
so memory does not follow how many records there are."""


class NeighborVotes:
    """Casts ballots of neighbours. The index over the records is kept until the records change.

    Raises:
        InvalidSetting: an engine that this machine does not have, or a limit that no shard of this dimension could be
            searched under. Said when an agent starts: once it is asked, nothing here fails.
    """

    def __init__(self, *, dimension: int, engine: str = "auto", memory_limit_bytes: int | None = None) -> None:
        if engine != "auto" or memory_limit_bytes is not None:
            check_memory_limit(memory_limit_bytes, dimension, load_engine(engine))
        self._engine = engine
        self._memory_limit_bytes = memory_limit_bytes
        self._index: tuple[Selection, NeighborIndex] | None = None

    def prepare(self, records: Records) -> None:
        """Build the index now, and not when the first batch has been paid for."""
        self._index_of(records)

    def forget(self) -> None:
        """Forget the index."""
        self._index = None

    @property
    def prepared_for(self) -> Selection | None:
        """Of which selection of records there is an index; None where there is none."""
        return None if self._index is None else self._index[0]

    def check_ready(self, task: Task, select: Callable[[], Records]) -> None:
        """Refuse, before a charge, where the parts of a cluster that would search are not all there.

        Engines of this process are there. What a cluster loses later is begun anew or done here: once charged, it is
        answered.

        Raises:
            Unavailable: see feature_store.cluster.search.ClusterIndex.ready.
        """
        if task.method == "knn" and is_cluster(self._engine):
            from feature_store.cluster.search import ClusterIndex

            index = self._index_of(select())
            if isinstance(index, ClusterIndex):
                index.ready()

    def knn(self, task: Task, batch: QueryBatch, records: Records) -> NDArray[np.int64]:
        """Votes of the nearest records of each query, in blocks: what k could ask for need not fit into memory."""
        votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
        k = records.neighbors(task.k)
        index = self._index_of(records)
        most = task.attributes_per_record
        each = 1 if most is None else task.num_classes
        # Row NO_RECORD, the last one, is no class, or has no attribute.
        nobody = np.full((1, *records.all_labels.shape[1:]), -1 if most is None else 0, dtype=np.int16)
        all_labels = np.concatenate([records.all_labels, nobody])
        for block in _blocks(len(batch), NEIGHBORS_AT_ONCE // (k * each)):
            rows = index.search(batch.features[block], k).rows
            # What a record votes for hangs on that record alone, so parts of the neighbours add up.
            for part in _blocks(k, NEIGHBORS_AT_ONCE // each):
                labels = all_labels[rows[:, part]]
                votes[block] += (
                    knn_ballots(labels, num_classes=task.num_classes)
                    if most is None
                    else attribute_ballots(labels, most=most)
                )
        return votes

    def reverse_knn(self, task: Task, batch: QueryBatch, records: Records) -> NDArray[np.int64]:
        """Votes of the records at their nearest queries, in blocks of records, whose votes add up.

        What is searched is the public queries, so it is done in this process whatever the engine.
        """
        if task.max_agent_records is not None:
            records = records.first(task.max_agent_records)
        limit = self._memory_limit_bytes
        queries = build_index(
            batch.features,
            np.arange(len(batch)),
            engine=here(self._engine),
            memory_limit_bytes=limit,
            searches=records.max_records or UNDECLARED_RECORDS,
            max_records=len(batch),
        )
        votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
        k = min(task.k, len(batch))
        for features, labels in records.blocks(records_at_once(batch.features.shape[1], k, votes.size)):
            nearest = queries.search(features, k).record_ids
            votes += reverse_knn_ballots(nearest, labels, num_queries=len(batch), num_classes=task.num_classes)
        return votes

    def _index_of(self, records: Records) -> NeighborIndex:
        """The index over the records as they are now; an index of an older version would let deleted ones vote."""
        if self._index is None or self._index[0] != records.selection:
            limit, self._index = self._memory_limit_bytes, None  # the old one goes first: two might not fit
            index = build_index(
                records.all_features,
                records.all_record_ids,
                engine=self._engine,
                memory_limit_bytes=limit,
                max_records=records.max_records,
                removed=records.absent_ids(),
            )
            self._index = (records.selection, index)
        return self._index[1]


def records_at_once(dimension: int, k: int, cells: int) -> int:
    """How many records look for their k nearest questions in one step.

    Each step is counted into a whole table of votes, so it is worth as many neighbours as that has cells; but no more
    numbers of features than `NUMBERS_AT_ONCE`.
    """
    return max(1, min(max(NEIGHBORS_AT_ONCE, cells) // k, NUMBERS_AT_ONCE // dimension))


def _blocks(count: int, most: int) -> Iterator[slice]:
    """Slices that cover `count` rows, each at least 1 and else at most `most` rows long."""
    step = max(1, most)
    return (slice(start, start + step) for start in range(0, count, step))
