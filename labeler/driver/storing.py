"""The machine's stores, carried out within one write transaction and checked again by the journal's own rules.

Every function of the journal called here checks in the database what the machine has decided. Contributors are
fixed once, a charge is posted before a sum is kept, a release is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labeler.driver.reading import LoadedJob
from labeler.driver.settlement import Settlement
from labeler.ledger import rounds as steps
from labeler.ledger.database import Connection
from labeler.ledger.rounds import AggregateStore, reservation_id
from labeler.release import release_to_bytes
from labeler.rounds import effects as fx
from labeler.rounds.effects import Store
from labeler.task import Level


class Storer:
    """Carries out stores."""

    def __init__(self, aggregates: AggregateStore, settlement: Settlement) -> None:
        self._ledger, self._jobs = settlement.ledger, settlement.jobs
        self._aggregates = aggregates
        self._settlement = settlement

    def prices(self, job: LoadedJob, stores: Sequence[Store]) -> Sequence[Mapping[Level, int]]:
        """Return the prices that `store` needs, worked out before the journal is locked."""
        if any(isinstance(one, fx.ReserveRounds) for one in stores):
            return self._settlement.prices(job.record, job.rounds, job.task)
        return ()

    def store(
        self,
        job: LoadedJob,
        stores: Sequence[Store],
        connection: Connection,
        *,
        prices: Sequence[Mapping[Level, int]],
    ) -> None:
        """Store everything of one job's turn, in order, and raise its version once.

        Raises:
            LabelerError: the journal refuses a step; discard the transaction.
        """
        is_touched = False
        opened = {one.number for one in stores if isinstance(one, fx.StoreRelease)}
        reports = {(one.number, one.tallier_id): one for one in stores if isinstance(one, fx.StoreHoldings)}
        for one in stores:
            if isinstance(one, fx.StoreHoldings) and reports[one.number, one.tallier_id] is not one:
                continue  # a later report of the same turn replaces it
            if isinstance(one, fx.StoreSum) and one.number in opened:
                # Opened by this same transaction: it need not reach the disk.
                self._aggregates.put(one.round_digest, one.tallier_id, one.data, is_kept=False, connection=connection)
            else:
                is_touched |= self._store(job, one, connection, prices)
        if is_touched:
            self._jobs.touch(job.record.job_id, connection=connection)

    def _store(
        self, job: LoadedJob, store: Store, connection: Connection, prices: Sequence[Mapping[Level, int]]
    ) -> bool:
        """Store one effect; return whether watchers see a difference and the version was not raised yet."""
        job_id = job.record.job_id
        match store:
            case fx.StoreBatches():
                return steps.set_batches(connection, job_id, store.batches)
            case fx.StoreReply():
                return self._jobs.willingness.report(job_id, store.agent_id, store.said, connection=connection)
            case fx.ReserveRounds():
                self._settlement.divide(
                    job.record, job.rounds, job.task, store.agents, amounts=prices, connection=connection
                )
                self._jobs.willingness.fix_asked(job_id, store.agents, connection=connection)
                self._jobs.move(job_id, "collecting", connection=connection)
                return False
            case fx.Begin():
                steps.fix_participants(connection, job_id, store.number, store.participants)
                return steps.set_asked(connection, job_id, store.number)
            # No view shows these, else watchers would learn when an agent answered.
            case fx.StoreShareNote():
                steps.note_share(connection, job_id, store.number)
                return False
            case fx.StoreHoldings():
                steps.report_holdings(connection, job_id, store.number, store.tallier_id, store.holdings)
                return False
            case fx.StoreRefusal():
                return steps.report_refusal(
                    connection, job_id, store.number, store.party_id, store.sentence, store.is_final
                )
            case fx.FixContributors():
                steps.fix_contributors(connection, job_id, store.number, store.contributors)
                self._jobs.move(job_id, "tallying", connection=connection)
                return False
            case fx.Post():
                detail = {
                    "job": job_id,
                    "queries": store.num_queries,
                    "contributors": list(store.contributors),
                }
                seq = self._ledger.post(reservation_id(job_id, store.number), detail=detail, connection=connection)
                return steps.set_posted(connection, job_id, store.number, seq)
            case fx.StoreRelease():
                data = release_to_bytes(store.release)
                steps.store_release(connection, job_id, store.number, data)
                self._jobs.move(job_id, store.following, connection=connection)
                return False
            case fx.StoreSum():
                self._aggregates.put(store.round_digest, store.tallier_id, store.data, connection=connection)
                return False
            case fx.Complete():
                self._jobs.move(job_id, "completed", connection=connection)
                return False
            case fx.End():
                self._settlement.end(job.record, store.state, store.error, connection=connection)
                return False
