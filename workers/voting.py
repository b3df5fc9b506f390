"""An agent's records, indexes and votes for life: what methods answer with (`labeler.methods`).

**Votes for life**: reverse kNN in which every image pays for its votes from its own budget, and then falls silent.
`labeler.accounting.lifetime.may_vote` decides who votes, image by image; the proof is there. What the images have spent
comes from the agent's journal. What they spend here returns to it in the transaction that stores the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from feature_store.cluster.search import ClusterIndex, build_index_of
from feature_store.index import NeighborIndex, build_index
from feature_store.index.build import is_cluster, load_engine
from feature_store.index.exact_index import rows_under_limit
from feature_store.shard import Shard
from labeler.accounting.lifetime import life_of, may_vote, vote_nano
from labeler.errors import MixedShards, PrivacyRefusal
from labeler.ledger.lifetimes import NO_DIGESTS, CastVotes, Spent
from labeler.methods.reverse_knn import records_at_once, reverse_knn_ballots
from labeler.methods.sensitivity import kept_bound
from labeler.randomness import ByteSource, os_source, permutation
from labeler.records import FEATURE_ONE, Records, Selection, first_of_each_person
from labeler.tally import QueryBatch
from labeler.task import Task

NO_PERSONS = (
    "the task bounds how many records of one person vote (records_per_person), and this shard does not know whose "
    "records it holds; embed it again with --person-level, --persons or --person-column"
)
"""The reason why a shard without a person column cannot answer: a fact of its setup, the same whatever it holds."""


def select_records(shard: Shard, *, records_per_person: int | None) -> Records:
    """Return the records that an agent answers a task with.

    The cut of a person comes before any other. It depends on that person's records alone, so that no other person's
    vote depends on how many there are. A cap on all of an agent's records comes after it.

    Raises:
        PrivacyRefusal: the task bounds records of one person, and the shard does not know whose they are.
    """
    chosen = shard.alive
    if records_per_person is not None:
        if shard.persons is None:
            raise PrivacyRefusal(NO_PERSONS)
        kept = first_of_each_person(shard.persons[chosen], shard.record_ids[chosen], records_per_person)
        chosen = chosen.copy()
        chosen[np.flatnonzero(chosen)] = kept
    rows = np.flatnonzero(chosen)
    return Records(
        shard.features, shard.record_ids, shard.labels, shard.version, records_per_person, rows, shard.max_records
    )


def check_labels_fit(task: Task, shard: Shard) -> None:
    """Refuse a task about attributes at a shard of classes, and vice versa: facts of how both were set up.

    Raises:
        MixedShards: the message says which is which.
    """
    asked = task.attributes_per_record is not None
    if asked != shard.has_attributes:
        raise MixedShards(
            "the task asks about attributes, of which a record may have any number (attributes_per_record), and the "
            "shard holds one class per record"
            if asked
            else "the shard holds attributes, any number per record, and the task asks for one class; give the task "
            "attributes_per_record"
        )


def check_bound(task: Task, shard: Shard) -> None:
    """Refuse a task that relies on a bound on records which this shard was not declared to keep.

    This depends on the declaration alone, whatever the shard holds, and comes before any charge.

    Raises:
        PrivacyRefusal: nothing was declared, or more than the task allows.
    """
    most = None if task.training is None else kept_bound(task)
    if most is None or (shard.max_records is not None and shard.max_records <= most):
        return
    kept = "this shard declares no bound" if shard.max_records is None else f"this one keeps {shard.max_records}"
    raise PrivacyRefusal(
        f"the task counts on shards that keep a public bound of at most {most} records (training.max_records), and "
        f"{kept}; embed it again with --max-records, or ask for a task without that bound"
    )


class NeighborIndexes:
    """Exact indexes of one agent.

    The index over all its records is built when the agent starts (`build`), and kept until they change. A task that
    bounds the records of a person has an index over fewer, which stays until another is needed.

    Raises:
        InvalidSetting: an engine that this machine does not have, or a limit that no shard of this dimension could be
            searched under. Raised when an agent starts: once it is asked, nothing here fails.
    """

    def __init__(self, *, dimension: int, engine: str = "auto", memory_limit_bytes: int | None = None) -> None:
        if engine != "auto" or memory_limit_bytes is not None:
            load_engine(engine)
        if memory_limit_bytes is not None:
            rows_under_limit(memory_limit_bytes, dimension)
        self._engine = engine
        self._memory_limit_bytes = memory_limit_bytes
        self._indexes: dict[Selection, NeighborIndex] = {}

    def build(self, records: Records) -> None:
        """Build the index over all records now. Parts of a cluster are loaded when they are asked to be ready."""
        if not is_cluster(self._engine):
            self.of_records(records)

    def forget(self) -> None:
        """Forget the indexes."""
        self._indexes = {}

    @property
    def prepared_for(self) -> list[Selection]:
        """Return the selections of records that have an index."""
        return list(self._indexes)

    def check_ready(self, task: Task, select: Callable[[], Records]) -> None:
        """Refuse, before a charge, where the parts of a cluster that would search are not all there.

        Engines of this process are there. After the charge the query is answered: what a cluster loses is restarted, or
        searched here.

        Raises:
            Unavailable: see feature_store.cluster.search.ClusterIndex.ready.
        """
        if task.traits.searches(task.max_queries) and is_cluster(self._engine):
            index = self.of_records(select())
            if isinstance(index, ClusterIndex):
                index.ready()

    def of_records(self, records: Records) -> NeighborIndex:
        """Return the index over the records as they are now; an older version would let deleted ones vote."""
        if records.selection not in self._indexes:
            limit, whole = self._memory_limit_bytes, (records.version, None)
            # The old ones go first; under a limit all of them, since two might not fit.
            self._indexes = {of: kept for of, kept in self._indexes.items() if limit is None and of == whole}
            self._indexes[records.selection] = build_index_of(
                self._engine,
                records.all_features,
                records.all_record_ids,
                memory_limit_bytes=limit,
                max_records=records.max_records,
                removed=records.absent_ids(),
            )
        return self._indexes[records.selection]

    def of_questions(self, questions: NDArray[np.int16], *, order: ByteSource) -> NeighborIndex:
        """Return an index over public questions, in this process whatever the engine, searched in a secret order.

        A search takes longer the later near questions come, so a requester must not choose when they do. Ties keep the
        numbers of the questions, so neighbors do not depend on the order.

        Args:
            order: the secret source of the order.
        """
        numbers = permutation(order, len(questions))
        return build_index(
            questions[numbers],
            numbers,
            engine=self._engine,
            memory_limit_bytes=self._memory_limit_bytes,
            max_records=len(questions),
            in_this_order=True,
        )


def lifetime_ballots(
    task: Task,
    batch: QueryBatch,
    shard: Shard,
    spends: Callable[[NDArray[np.int64]], Spent],
    *,
    indexes: NeighborIndexes | None = None,
    order: ByteSource | None = None,
) -> tuple[NDArray[np.int64], CastVotes]:
    """Return the votes of the images that are near enough and can pay for them, and what each image spends.

    Args:
        batch: the public queries, all of the task.
        shard: the agent's, which recognizes its images.
        spends: what images have spent, by their digests, each once.
        indexes: of the agent; with numpy where absent.
        order: the secret source of the order in which questions are searched; the system's where absent.

    Returns:
        Votes, int64, shape (num_queries, num_classes), and what is to be written with the answer.

    Raises:
        PrivacyRefusal: the shard has no digests of its images; raised before the charge (`Agent.check_task`).
    """
    life, price = life_of(task), vote_nano(task)
    if shard.image_digests is None or shard.site_key is None:
        raise PrivacyRefusal(NO_DIGESTS)
    rows = one_row_of_each_image(shard)
    records = Records(
        shard.features, shard.record_ids, shard.labels, shard.version, rows=rows, max_records=shard.max_records
    )
    digests = shard.image_digests[rows]
    spent = spends(digests)
    k = min(task.k, len(batch))
    indexes = indexes or NeighborIndexes(dimension=batch.features.shape[1], engine="numpy")
    queries = indexes.of_questions(batch.features, order=order or os_source())
    votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    paid = np.zeros(len(rows), dtype=np.int64)
    # Only its own label decides: a record of another class is silent, and pays nothing.
    names = task.classes if life.asked_classes is None else life.asked_classes
    asked = np.isin(np.array(task.classes), np.array(names))
    least, done = life.least_product(int(FEATURE_ONE)), 0
    for features, labels in records.blocks(records_at_once(batch.features.shape[1], k, votes.size)):
        block = slice(done, done + len(labels))
        found = queries.search(features, k)
        near = np.where((found.similarities >= least) & asked[labels][:, None], found.record_ids, -1)
        count = (near >= 0).sum(axis=1)
        casts = may_vote(spent.spent[block], count, price=price, life=life)
        near[~casts] = -1
        votes += reverse_knn_ballots(near, labels, num_queries=len(batch), num_classes=task.num_classes)
        paid[block] = np.where(casts, count, 0) * price
        done = block.stop
    return votes, CastVotes(spent.version, shard.site_key, digests, paid)


def one_row_of_each_image(shard: Shard) -> NDArray[np.int64]:
    """Return, for each image, its row with the smallest record id, ascending: an image has one account.

    Raises:
        PrivacyRefusal: see `lifetime_ballots`.
    """
    if shard.image_digests is None:
        raise PrivacyRefusal(NO_DIGESTS)
    rows = select_records(shard, records_per_person=None).rows
    return rows[first_of_each_person(shard.image_digests[rows], shard.record_ids[rows], 1)]
