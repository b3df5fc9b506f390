"""One organisation's agent: its records, its index, and its answers.

Everything private stays in this object. Only one secret share per tallier leaves it. Before that, its caller has had
the agent check the task, and has made the price durable: in the site's own journal (workers.agent.ledger), or, for all
agents of a run alike, in the journal of the job (workers.run.labeling).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.errors import MixedShards, PrivacyRefusal
from labeler.ledger.lifetimes import CastVotes, LifetimeSpends
from labeler.messages.bodies import share_from_bytes, share_to_bytes
from labeler.methods.ensemble import model_of
from labeler.randomness import ByteSource, derive_key, keyed_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.release import input_shares
from labeler.settings import same_names
from labeler.tally import InputShare, QueryBatch, Round, round_of
from labeler.task import Task
from workers.learning.learner import Trainer
from workers.voting import NO_PERSONS, NeighborIndexes, check_bound, check_labels_fit, lifetime_ballots, select_records

Seal = Callable[[int, bytes], bytes]
"""Turns the body for the recipient with this number into what is sent to it."""


NOISE: Final = b"noise and masks"
"""The purpose of an agent's source for a round's noise, and then for its masks."""

ORDER: Final = b"order of search"
"""The purpose of a source for the secret order in which a round's questions are searched."""

LOCAL_NOISE: Final = b"local noise"
"""The purpose of a source for the noise that a method's own answer carries."""

NO_SPENDS = (
    "votes for life are cast by a site's own agent, whose journal remembers what each record has spent; this one "
    "remembers nothing beyond its job. Run a service (labeler up, labeler agent)"
)
"""The reason why an agent without a journal answers no task with `lifetime_budget`."""


@dataclass(frozen=True, repr=False)
class Answer:
    """An answer that is stored nowhere yet. Does not print.

    Attributes:
        bodies: sealed, one per recipient.
        cast: what its votes spend, to be written in the transaction that stores the bodies; None but for votes for
            life.
    """

    bodies: tuple[bytes, ...]
    cast: CastVotes | None = None

    def __repr__(self) -> str:
        return "Answer(<sealed>)"


class Agent:
    """An agent answers batches of public queries with shares of its noised ballots.

    An answer is computed once, stored before it leaves, and sent again as it was stored, whatever the records are by
    then (labeler.rounds.agent). So a retry reveals nothing new, also not that a record came or went. Its noise comes
    from a key of the round, which is erased with the stored answer once no tallier can miss it. The machine
    (labeler.rounds.agent) decides the order. Its caller (workers.agent.driver, workers.run.parties) keeps keys and
    answers, and knows that a round is answered once.

    What `check` raises was decided from public things, and the asker may see it. What `computed` raises may depend on
    the records, and the asker may not.

    Args:
        agent_id: the name under which talliers count it.
        shard: its private records.
        models: where it keeps what it trains while it answers; in memory by default.
        is_seeded: True in simulations, where the secret follows from a seed. It travels with every release.
        engine: which exact index engine searches (see feature_store.index.build_index).
        memory_limit_bytes: search in blocks that need at most this much memory besides the shard.
        spends: what its images have spent on votes for life; without it no such task is answered.

    Raises:
        InvalidSetting: an engine that this machine does not have, or a limit without room for one record.
    """

    def __init__(
        self,
        agent_id: str,
        shard: Shard,
        *,
        models: ModelStore | None = None,
        is_seeded: bool = False,
        engine: str = "auto",
        memory_limit_bytes: int | None = None,
        spends: LifetimeSpends | None = None,
    ) -> None:
        self.agent_id = agent_id
        self._shard = shard
        self.is_seeded = is_seeded
        self._answering = threading.Lock()
        self._neighbors = NeighborIndexes(
            dimension=shard.dimension, engine=engine, memory_limit_bytes=memory_limit_bytes
        )
        self._models = ModelStore() if models is None else models
        self._trainer = Trainer(shard.probe)
        self._spends = spends

    def build_index(self) -> None:
        """Build the index over all records now, and keep it: when an agent starts, and not when it is asked.

        So a question takes no longer because an index is missing, and what a device does to the process, it does before
        anything is charged.
        """
        self._neighbors.build(select_records(self._shard, records_per_person=None))

    def take_over(self, before: Agent) -> None:
        """Build now what the agent of the earlier records had built, and not when the next question comes.

        Otherwise the first answer after a deletion would be late, and reveal the deletion.
        """
        for _, records_per_person in before._neighbors.prepared_for:
            self._neighbors.of_records(select_records(self._shard, records_per_person=records_per_person))
        for task in before._models.tasks():
            model_of(task, self._records(task), models=self._models, learner=self._trainer)

    @property
    def answering(self) -> threading.Lock:
        """Held while an answer is computed: its holder sees the agent's index and models at rest."""
        return self._answering

    def forget_models(self) -> None:
        """Forget what was trained so far."""
        self._models.clear()

    def forget_index(self) -> None:
        """Forget the search indexes."""
        self._neighbors.forget()

    def __repr__(self) -> str:
        return f"Agent({self.agent_id!r}, records=<private>)"

    @property
    def shard_version(self) -> str:
        """The version of the records that would answer; for the site's own ledger."""
        return self._shard.version

    def computed(self, task: Task, batch: QueryBatch, *, key: bytes, seal: Seal) -> Answer:
        """Compute the answer, sealed: one body per recipient, of which nothing is stored, and what it spends.

        The round is charged, its key is there, and nothing of it was stored. The caller must store the result before a
        byte of it leaves; if it cannot, nothing leaves.

        Args:
            seal: seals the body of one recipient, by its number.
        """
        cast: CastVotes | None = None
        with self._answering:
            if task.lifetime_budget is None:
                ballots = self.ballots(task, batch, key)
            elif self._spends is None:
                raise PrivacyRefusal(f"agent {self.agent_id}: {NO_SPENDS}")
            else:
                order = self._order(key, task, batch)
                ballots, cast = lifetime_ballots(
                    task, batch, self._shard, self._spends.spent, indexes=self._neighbors, order=order
                )
            source = self._source(key, NOISE, task, batch, self._shard.version)
            shares = input_shares(ballots, task, round_of(task, batch), agent_id=self.agent_id, source=source)
            return Answer(tuple(seal(number, share_to_bytes(share.share)) for number, share in enumerate(shares)), cast)

    def ballots(self, task: Task, batch: QueryBatch, key: bytes) -> NDArray[np.int64]:
        """Return this agent's contribution, shape (num_queries, num_classes): votes, or numbers on the grid.

        Without noise, but for methods whose noise is the agent's own. Private: for this agent's own eyes.
        """
        records = self._records(task)

        def local_noise() -> ByteSource:
            return self._source(key, LOCAL_NOISE, task, batch, records.version)

        order = partial(self._order, key, task, batch)
        context = RunnerContext(self._neighbors, self._models, local_noise, self._trainer, order)
        return task.traits.ballots(task, batch, records, context)

    def _records(self, task: Task) -> Records:
        # `check_task` checked this before the charge, but the shard may have been re-embedded since. Where a cut binds,
        # one record replaces another, which costs twice the charge. The declaration is public, so silence tells
        # nothing.
        check_bound(task, self._shard)
        check_labels_fit(task, self._shard)
        return select_records(self._shard, records_per_person=task.records_per_person)

    def _order(self, key: bytes, task: Task, batch: QueryBatch) -> ByteSource:
        """Return the source of the order of search: of the round alone, whatever the records are by now."""
        return self._source(key, ORDER, task, batch, "")

    def _source(self, key: bytes, purpose: bytes, task: Task, batch: QueryBatch, version: str) -> ByteSource:
        """Return the agent's secret source of one purpose for one batch, at its start."""
        context = (task.digest.encode(), batch.digest.encode(), version.encode())
        return keyed_source(derive_key(key, purpose, *context), is_seeded=self.is_seeded)

    def check(self, task: Task, batch: QueryBatch) -> None:
        """Refuse what this agent cannot answer, whatever its policy and its budget say; costs nothing.

        Raises:
            MixedShards: the task's classes or backbone are not those of the shard.
            PrivacyRefusal: the batch does not belong to the task, or the task bounds records of one person and the
                shard does not know whose they are.
            InvalidSetting: the queries do not serve as public negatives (aux-distill).
            Unavailable: it searches in a cluster, of which a part is lost.
        """
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
        self.check_task(task, (len(batch),))
        task.traits.check_questions(task, batch, self._trainer)

    def check_task(self, task: Task, sizes: Sequence[int]) -> None:
        """Check the task as `check` does, before there are queries: only their number in each round is known.

        Args:
            sizes: queries of each round, at least one.

        Raises:
            MixedShards: the task's classes or backbone are not those of the shard.
            PrivacyRefusal: the sizes do not belong to the task. Or it bounds records of one person and the shard does
                not know whose they are. Or it relies on a bound on records that the shard does not keep. Or a site has
                no room for what it would train.
            Unavailable: it searches in a cluster, of which a part is lost.
        """
        if task.records_per_person is not None and not self._shard.knows_persons:
            raise PrivacyRefusal(f"agent {self.agent_id}: {NO_PERSONS}")
        if task.lifetime_budget is not None:
            if self._spends is None:
                raise PrivacyRefusal(f"agent {self.agent_id}: {NO_SPENDS}")
            self._spends.check(None if self._shard.image_digests is None else self._shard.site_key)
        check_bound(task, self._shard)
        check_labels_fit(task, self._shard)
        if not same_names(task.classes, self._shard.classes):
            raise MixedShards(f"agent {self.agent_id}: the task's classes are not those of its shard")
        if task.backbone_fingerprint != self._shard.fingerprint:
            raise MixedShards(
                f"agent {self.agent_id}: its shard was embedded by backbone {self._shard.fingerprint[:12]}, "
                f"the task asks for {task.backbone_fingerprint[:12]}; embed it again with the task's backbone"
            )
        task.traits.check_sizes(task, sizes)
        task.traits.check_room(task, self._shard.dimension)
        self._neighbors.check_ready(task, lambda: self._records(task))


def as_it_is(_: int, body: bytes) -> bytes:
    """A `Seal` for talliers that are objects of the same process."""
    return body


def shares_of(agent_id: str, round: Round, bodies: Sequence[bytes]) -> tuple[InputShare, ...]:
    """Return an answer that was not sealed, as the talliers of the same process take it."""
    entries = round.num_queries * round.num_classes
    return tuple(
        InputShare(
            agent_id,
            tallier,
            round.digest,
            share_from_bytes(body, max_entries=entries, terms=round.terms, most_bytes=len(body)),
        )
        for tallier, body in enumerate(bodies)
    )
