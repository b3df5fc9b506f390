"""How far each record of an agent moves its votes when it leaves, from one search; see labeler.own_loss."""

from __future__ import annotations

import numpy as np

from feature_store.index import NO_RECORD, build_index
from labeler.batch import QueryBatch
from labeler.errors import InvalidSetting
from labeler.own_loss import OwnLosses
from labeler.task import Task
from workers.voting.records import Records


def own_losses(owner: str, task: Task, batch: QueryBatch, records: Records, *, engine: str = "auto") -> OwnLosses:
    """The losses of every record that would answer a batch.

    knn: a record among the first k of a question leaves its place to the next after them: nothing changes where both
    are of one class, else two counts by one vote; without a next, one count. reverse-knn: its own votes leave, and
    nothing else moves.

    Args:
        task: of method knn or reverse-knn, without caps, ball or votes for life.
        batch: its public questions.

    Raises:
        InvalidSetting: another method, or a cap: there what leaves lets another in, or moves a model.
    """
    plain = task.records_per_person is None and task.max_agent_records is None and task.ballot_radius is None
    plain = plain and task.attributes_per_record is None
    if not (task.traits.has_k and plain and task.life is None):
        raise InvalidSetting(
            "what single records are told of is computed for knn and reverse-knn without caps, ball, attributes or "
            "votes for life; for other tasks the price is what there is"
        )
    squared = np.zeros(len(records.all_labels) + 1, dtype=np.int64)
    if task.traits.records_choose:
        squared[:] = min(task.k, len(batch))
    else:
        index = build_index(
            records.all_features,
            records.all_record_ids,
            engine=engine,
            max_records=records.max_records,
            removed=records.absent_ids(),
        )
        rows = index.search(batch.features, records.neighbors(task.k) + 1).rows
        voting, after = rows[:, :-1], rows[:, -1:]
        # Row NO_RECORD is the last one, of no record, and gathers what moves for those there are none of.
        labels = np.append(records.all_labels, np.int16(-1))
        np.add.at(squared, voting, np.where(after == NO_RECORD, 1, 2 * (labels[voting] != labels[after])))
    return OwnLosses(owner, task, len(batch), squared[records.rows])
