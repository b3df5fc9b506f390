"""One organisation's agent: its records, its index, its rounds' keys, and the ledger of a run.

Everything private stays in this object. Only one secret share per tallier leaves it, and only after the agent itself
has checked the task and a ledger has taken the price.

A charge happens whole or not at all. The round must never have been charged for other recipients, and every level that
the owner limits must be priced and covered; only then is the price taken. A round is charged once, even if the records
change; `labeler.rounds.agent` then says what is sent of it. The ledger here and its durable twin (workers.agent.ledger)
keep the same rules and pass the same tests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.batching import due, round_charges
from labeler.budget import Account
from labeler.errors import InvalidSetting, MixedShards, PrivacyRefusal
from labeler.ledger.lifetimes import CastVotes, LifetimeSpends
from labeler.messages.bodies import share_from_bytes, share_to_bytes
from labeler.methods.ensemble import head_of
from labeler.randomness import ByteSource, derive_key, keyed_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.release import input_shares
from labeler.rounds.agent import ANSWERED_TO_OTHERS, IN_PROCESS, Recipients
from labeler.settings import same_names
from labeler.tally import InputShare, QueryBatch, Round, round_of
from labeler.task import Level, Task
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

    What `charge` raises was decided from public things, and the asker may see it. What `computed` raises may depend on
    the records, and the asker may not.

    Args:
        agent_id: the name under which talliers count it.
        shard: its private records.
        ledger: what the agent itself allows, and remembers (workers.agent.agent); None where the caller charges for
            many rounds together (workers.agent.driver).
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
        ledger: AgentLedger | None = None,
        models: ModelStore | None = None,
        is_seeded: bool = False,
        engine: str = "auto",
        memory_limit_bytes: int | None = None,
        spends: LifetimeSpends | None = None,
    ) -> None:
        self.agent_id = agent_id
        self._ledger = ledger
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
            head_of(task, self._records(task), models=self._models, learner=self._trainer)

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

    def charge(self, task: Task, batch: QueryBatch, *, recipients: Recipients = IN_PROCESS) -> None:
        """Check the task and charge the agent's ledger; nothing of the records but their class list takes part.

        Args:
            recipients: who gets the shares, in this order; the same at every answer to one round.

        Raises:
            MixedShards: see `check`.
            PrivacyRefusal: see `check`; the shares went to other recipients, or the price is not covered.
            BudgetExceeded: an account has too little left; nothing was computed.
            InvalidSetting: it has no ledger.
        """
        if self._ledger is None:
            raise InvalidSetting(f"agent {self.agent_id} has no ledger of its own; its driver charges what it answers")
        with self._answering:
            self.check(task, batch)
            round_digest = round_of(task, batch).digest
            self._ledger.charge(
                round_digest=round_digest,
                shard_version=self._shard.version,
                charges=round_charges(task, len(batch)),
                task=task,
                num_queries=len(batch),
                recipients=recipients,
            )

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


class AgentLedger(Protocol):
    """A ledger that an agent asks before it computes anything."""

    def charge(
        self,
        *,
        round_digest: str,
        shard_version: str,
        charges: Mapping[Level, int],
        task: Task,
        num_queries: int,
        recipients: Recipients,
    ) -> None:
        """Take the price of one answer, once: the same round again changes nothing.

        Args:
            shard_version: which records would answer, were it answered now.
            charges: nano-units of mu^2 at every level at which the task has a finite price.
            recipients: who gets the shares of the answer.

        Raises:
            PrivacyRefusal: the round was charged for other recipients, more queries of the task
                than it has are asked, or a level that is limited has no finite price.
            PolicyRefusal: the site's policy does not allow it now.
            BudgetExceeded: an account has too little left. Nothing was charged.
        """
        ...


class InMemoryLedger:
    """The ledger of an agent that lives for one `run`.

    Args:
        accounts: what may be spent at each level; instance level always, agent level where it is limited.

    Raises:
        InvalidSetting: no instance-level account.
    """

    def __init__(self, accounts: Mapping[Level, Account]) -> None:
        if "instance" not in accounts:
            raise InvalidSetting(
                "an agent's ledger has no instance-level account, so it could not refuse anything; where a task has no "
                "finite price for one private image there is none: raise sigma_votes, or ask fewer queries"
            )
        self.accounts: dict[Level, Account] = dict(accounts)
        self._answered: dict[str, Recipients] = {}
        self._queries: Counter[str] = Counter()

    def charge(
        self,
        *,
        round_digest: str,
        shard_version: str,  # noqa: ARG002  # see AgentLedger
        charges: Mapping[Level, int],
        task: Task,
        num_queries: int,
        recipients: Recipients,
    ) -> None:
        """See AgentLedger."""
        if self._answered.get(round_digest, recipients) != recipients:
            raise PrivacyRefusal(ANSWERED_TO_OTHERS)
        if round_digest in self._answered:
            return
        asked = self._queries[task.digest] + num_queries
        if asked > task.max_queries:
            raise PrivacyRefusal(beyond_task(asked, task))
        charged = dict(self.accounts)
        charges = due(task, charges, answered=self._queries[task.digest])
        for level, account in self.accounts.items():
            charged[level] = account.reserve(round_digest, priced(charges, level)).post(round_digest)
        self.accounts = charged
        self._answered[round_digest] = recipients
        self._queries[task.digest] = asked

    def __repr__(self) -> str:
        return f"InMemoryLedger(levels={sorted(self.accounts)})"


def priced(charges: Mapping[Level, int], level: Level) -> int:
    """Return the charge at a level that is limited.

    Raises:
        PrivacyRefusal: there is none, so no budget could pay it.
    """
    if level not in charges:
        raise PrivacyRefusal(
            f"this task has no finite {level}-level price, so no {level}-level budget can pay it; give the task "
            "ballot_radius or max_agent_records, or raise sigma_votes"
        )
    return charges[level]


def beyond_task(answered: int, task: Task) -> str:
    """Return why a round is refused that asks more of a task than a person approved, and than its price covers."""
    return (
        f"the task has {task.max_queries} queries, and with this round {answered} of it would be answered; ask in a "
        "new task"
    )
