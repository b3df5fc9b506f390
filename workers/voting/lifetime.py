"""Votes for life: reverse kNN in which every image pays for its votes from a budget of its own, and then falls silent.

Who votes is decided by `labeler.accounting.lifetime.may_vote`, image by image; the proof is there. What the images
have spent comes from the agent's journal, and what they spend here goes back to it in the transaction that stores the
answer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from feature_store.index import build_index
from feature_store.index.build import here
from feature_store.index.exact_index import UNDECLARED_RECORDS
from feature_store.journal.lifetimes import NO_DIGESTS, CastVotes, Spent
from feature_store.shard import Shard
from labeler.accounting.lifetime import life_of, may_vote, vote_nano
from labeler.ballots import reverse_knn_ballots
from labeler.batch import QueryBatch
from labeler.errors import PrivacyRefusal
from labeler.task import Task
from workers.voting.neighbors import records_at_once
from workers.voting.records import FEATURE_ONE, Records, first_of_each_person, select_records


def lifetime_ballots(
    task: Task,
    batch: QueryBatch,
    shard: Shard,
    spends: Callable[[NDArray[np.int64]], Spent],
    *,
    engine: str = "numpy",
    memory_limit_bytes: int | None = None,
) -> tuple[NDArray[np.int64], CastVotes]:
    """The votes of the images that are near enough and can pay for them, and what each image spends.

    Args:
        batch: the public queries, all of the task.
        shard: the agent's, which knows its images again.
        spends: what images have spent, by their digests, each once.
        engine, memory_limit_bytes: see feature_store.index.build_index; the queries are searched in this process.

    Returns:
        Votes, int64, shape (num_queries, num_classes), and what is to be written with the answer.

    Raises:
        PrivacyRefusal: the shard has no digests of its images; said before the charge (`Agent.check_task`).
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
    queries = build_index(
        batch.features,
        np.arange(len(batch)),
        engine=here(engine),
        memory_limit_bytes=memory_limit_bytes,
        searches=records.max_records or UNDECLARED_RECORDS,
        max_records=len(batch),
    )
    votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    paid = np.zeros(len(rows), dtype=np.int64)
    # By its own label, which is all that decides: a record of another class is silent, and pays nothing.
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
    """Of rows that hold one image the one with the smallest record id, ascending: an image has one account.

    Raises:
        PrivacyRefusal: see `lifetime_ballots`.
    """
    if shard.image_digests is None:
        raise PrivacyRefusal(NO_DIGESTS)
    rows = select_records(shard, records_per_person=None).rows
    return rows[first_of_each_person(shard.image_digests[rows], shard.record_ids[rows], 1)]
