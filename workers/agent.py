"""One organisation's agent: its records, its index, its noise secret, and the ledger that says what it may answer.

Everything private stays in this object. What leaves it is one secret share per tallier, and only
after the agent itself has checked the task and its own ledger has taken the price.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from feature_store.index import NeighborIndex, build_index
from feature_store.shard import Shard
from labeler.ballots import knn_ballots, reverse_knn_ballots
from labeler.batch import QueryBatch
from labeler.batching import round_charges
from labeler.contribution import input_shares
from labeler.errors import InvalidSetting, MixedShards, PrivacyRefusal
from labeler.randomness import derive_key, keyed_source
from labeler.tally import InputShare, round_of
from labeler.task import Task
from workers.agent_ledger import ANSWERED_BEFORE, IN_PROCESS, AgentLedger, Recipients

NEIGHBORS_AT_ONCE = 2**21
"""Neighbours found in one step: some 40 MiB, however many a task asks for."""


class Agent:
    """An agent answers batches of public queries with shares of its noised ballots.

    An answer is a function of the agent's secret, the task, the batch and the version of its shard:
    asked twice, it sends the same bytes, so a retry tells nobody anything new. If a record was
    deleted in between, the ledger refuses: the other agents would replay their noise, and the difference of
    the two releases would carry this agent's noise alone. The batch can be asked in a new task, in which
    everybody draws anew and is charged anew.

    Answering is two steps. What `charge` raises was decided from public things and may be told to whoever asked;
    what `shares` raises may depend on the records and may not.

    Args:
        agent_id: the name under which talliers count it.
        shard: its private records.
        noise_secret: 32 bytes known to nobody else; whoever knows it can subtract this agent's noise.
        ledger: what the agent itself allows, and remembers (workers.agent_ledger).
        is_seeded: True in simulations, where the secret follows from a seed. It travels with every release.
        engine: which exact index engine searches (see feature_store.index.build_index).
        memory_limit_bytes: search in blocks that need at most this much memory beside the shard.
    """

    def __init__(
        self,
        agent_id: str,
        shard: Shard,
        *,
        noise_secret: bytes,
        ledger: AgentLedger,
        is_seeded: bool = False,
        engine: str = "auto",
        memory_limit_bytes: int | None = None,
    ) -> None:
        if len(noise_secret) != 32:
            raise InvalidSetting(f"a noise secret is 32 bytes long, found {len(noise_secret)}")
        self.agent_id = agent_id
        self._ledger = ledger
        self._shard = shard
        self._secret = noise_secret
        self._is_seeded = is_seeded
        self._engine = engine
        self._memory_limit_bytes = memory_limit_bytes
        self._answering = threading.Lock()
        self._index: tuple[str, NeighborIndex] | None = None

    def __repr__(self) -> str:
        return f"Agent({self.agent_id!r}, records=<private>, noise_secret=<secret>)"

    def answer(self, task: Task, batch: QueryBatch, *, recipients: Recipients = IN_PROCESS) -> tuple[InputShare, ...]:
        """Check the task, charge the own ledger, vote, add noise, split into one share per tallier.

        Args:
            task: the task.
            batch: the public queries.
            recipients: who gets the shares, in this order; the same at every answer to one round.

        Raises:
            LabelerError: see `charge` and `shares`.
        """
        with self._answering:
            version = self._charge(task, batch, recipients)
            return self._shares(task, batch, version)

    def charge(self, task: Task, batch: QueryBatch, *, recipients: Recipients = IN_PROCESS) -> None:
        """Check the task and charge the own ledger; nothing of the records but their class list takes part.

        Raises:
            MixedShards, InvalidSetting: see `check`.
            PrivacyRefusal: see `check`; records were deleted since this batch was first answered, its shares went to
                other recipients, or the price is not covered.
            BudgetExceeded: an account has too little left; nothing was computed.
        """
        with self._answering:
            self._charge(task, batch, recipients)

    def shares(self, task: Task, batch: QueryBatch, *, recipients: Recipients = IN_PROCESS) -> tuple[InputShare, ...]:
        """The answer itself, one share per tallier, of a batch that `charge` has accepted.

        It asks the ledger again, which changes nothing for a batch that was paid for and refuses any other.
        """
        return self.answer(task, batch, recipients=recipients)

    def _charge(self, task: Task, batch: QueryBatch, recipients: Recipients) -> str:
        version = self._shard.version
        self.check(task, batch)
        round_digest = round_of(task, batch).digest
        self._ledger.charge(
            round_digest=round_digest,
            shard_version=version,
            reservation_id=round_digest,
            charges=round_charges(task, len(batch)),
            task=task,
            num_queries=len(batch),
            recipients=recipients,
        )
        return version

    def _shares(self, task: Task, batch: QueryBatch, version: str) -> tuple[InputShare, ...]:
        ballots = self.ballots(task, batch)
        if self._shard.version != version:
            raise PrivacyRefusal(ANSWERED_BEFORE)
        context = (task.digest.encode(), batch.digest.encode(), version.encode())
        source = keyed_source(derive_key(self._secret, b"noise and masks", *context), is_seeded=self._is_seeded)
        return input_shares(ballots, task, round_of(task, batch), agent_id=self.agent_id, source=source)

    def ballots(self, task: Task, batch: QueryBatch) -> NDArray[np.int64]:
        """Votes without noise, shape (num_queries, num_classes). Private: for this agent's own eyes."""
        features, record_ids, labels = self._alive()
        if task.method == "knn":
            return self._knn(task, batch, self._search(features, record_ids), labels)
        if task.max_agent_records is not None and len(labels) > task.max_agent_records:
            kept = np.argsort(record_ids)[: task.max_agent_records]
            features, labels = features[kept], labels[kept]
        return self._reverse_knn(task, batch, features, labels)

    def _knn(
        self, task: Task, batch: QueryBatch, records: NeighborIndex, labels: NDArray[np.int16]
    ) -> NDArray[np.int64]:
        """Votes of the nearest records of each query, in blocks: what k could ask for need not fit into memory."""
        votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
        k = min(task.k, len(labels))
        for block in _blocks(len(batch), NEIGHBORS_AT_ONCE // k):
            rows = records.search(batch.features[block], k).rows
            votes[block] = knn_ballots(labels[rows], num_classes=task.num_classes)
        return votes

    def _reverse_knn(
        self, task: Task, batch: QueryBatch, features: NDArray[np.int16], labels: NDArray[np.int16]
    ) -> NDArray[np.int64]:
        """Votes of the records at their nearest queries, in blocks of records, whose votes add up."""
        limit = self._memory_limit_bytes
        queries = build_index(batch.features, np.arange(len(batch)), engine=self._engine, memory_limit_bytes=limit)
        votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
        k = min(task.k, len(batch))
        # Each block is counted into a whole table of votes, so it is worth as many neighbours as that has cells.
        for block in _blocks(len(labels), max(NEIGHBORS_AT_ONCE, votes.size) // k):
            nearest = queries.search(features[block], k).record_ids
            votes += reverse_knn_ballots(nearest, labels[block], num_queries=len(batch), num_classes=task.num_classes)
        return votes

    def _search(self, features: NDArray[np.int16], record_ids: NDArray[np.int64]) -> NeighborIndex:
        """The index over the records as they are now; an index of an older version would let deleted ones vote."""
        version = self._shard.version
        if self._index is None or self._index[0] != version:
            limit = self._memory_limit_bytes
            index = build_index(features, record_ids, engine=self._engine, memory_limit_bytes=limit)
            self._index = (version, index)
        return self._index[1]

    def _alive(self) -> tuple[NDArray[np.int16], NDArray[np.int64], NDArray[np.int16]]:
        features, ids, labels = self._shard.features, self._shard.record_ids, self._shard.labels
        alive = self._shard.alive
        if alive.all():
            return features, ids, labels
        return features[alive], ids[alive], labels[alive]

    def check(self, task: Task, batch: QueryBatch) -> None:
        """Refuse what this agent cannot answer, whatever its policy and its budget say; costs nothing.

        Raises:
            MixedShards: the task's classes or backbone are not those of the shard.
            InvalidSetting: the task needs a trained model.
            PrivacyRefusal: the batch does not belong to the task.
        """
        if task.method == "one-hot":
            raise InvalidSetting("an agent with records cannot cast one-hot ballots; it needs a trained model")
        if batch.features.shape[1] != self._shard.dimension:
            raise MixedShards(
                f"agent {self.agent_id}: the queries have dimension {batch.features.shape[1]}, "
                f"its shard {self._shard.dimension}"
            )
        if batch.first_query + len(batch) > task.max_queries:
            raise PrivacyRefusal(
                f"agent {self.agent_id}: the task's price is for {task.max_queries} queries, and this batch would "
                f"reach query {batch.first_query + len(batch)}"
            )
        if tuple(task.classes) != tuple(self._shard.classes):
            raise MixedShards(f"agent {self.agent_id}: the task's classes are not those of its shard")
        if task.backbone_fingerprint != self._shard.fingerprint:
            raise MixedShards(
                f"agent {self.agent_id}: its shard was embedded by backbone {self._shard.fingerprint[:12]}, "
                f"the task asks for {task.backbone_fingerprint[:12]}; embed it again with the task's backbone"
            )
        if task.method == "reverse-knn" and len(batch) != task.max_queries:
            raise PrivacyRefusal(
                f"agent {self.agent_id}: a reverse-knn task is answered in one batch of all its {task.max_queries} "
                f"queries; every batch costs the whole price, and this one has {len(batch)}"
            )


def _blocks(count: int, most: int) -> Iterator[slice]:
    """Slices that cover `count` rows, each at least 1 and else at most `most` rows long."""
    step = max(1, most)
    return (slice(start, start + step) for start in range(0, count, step))
