"""What an agent charges, sets aside, erases and gives back in a turn, within the turn's one transaction.

Each charge is a part of its own (`Database.attempt`): what the ledger refuses is an event, and the rest is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from labeler.batching import round_charges
from labeler.errors import BudgetExceeded, JournalBehind, JournalBroken, LabelerError
from labeler.ledger.agent_rounds import JournalRounds
from labeler.ledger.database import Connection, Database
from labeler.ledger.promises import PromiseStore
from labeler.messages.bodies import Ask, Proposal
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposing
from labeler.system.clock import Clock
from workers.agent.desk_letters import no_to_ask, not_willing
from workers.agent.desk_turn import Records
from workers.agent.durable_ledger import DurableLedger, ShareUsedUp
from workers.agent.policy import Policy

log = logging.getLogger("labeler.agent")


class DeskCharges:
    """See the module. Used by one thread."""

    def __init__(
        self,
        database: Database,
        records: Records,
        rounds: JournalRounds,
        promises: PromiseStore,
        ledger: DurableLedger,
        clock: Clock,
    ) -> None:
        self._database = database
        self._records = records
        self._rounds = rounds
        self._promises = promises
        self._ledger = ledger
        self._clock = clock

    def not_paid(
        self,
        charges: Sequence[tuple[str, machine.Charge]],
        promises: Sequence[tuple[Proposal, proposing.Promise]],
        error: LabelerError,
    ) -> list[tuple[str, Any, Any]]:
        """Nothing of it could be kept: whoever asked is told so."""
        events: list[tuple[str, Any, Any]] = []
        for digest, charge in charges:
            events.append(("round", digest, machine.ChargeRefused(no_to_ask(charge.ask, error))))
        for proposal, _ in promises:
            events.append(("proposal", proposal, machine.Refused(not_willing(proposal, error))))
        return events

    def paid(
        self,
        connection: Connection,
        policy: Policy,
        charges: Sequence[tuple[str, machine.Charge]],
        promises: Sequence[tuple[Proposal, proposing.Promise]],
    ) -> list[tuple[str, Any, Any]]:
        """Charge rounds and set prices aside, each by itself: one that is refused takes none of the others with it.

        Returns:
            What happened, as ("round", its digest, event) or ("proposal", it, event).

        Raises:
            JournalBroken, JournalBehind: nothing may be charged any more.
        """
        events: list[tuple[str, Any, Any]] = []
        begun: dict[str, datetime] = {}
        for digest, charge in charges:
            try:
                with self._database.attempt(connection):
                    if self._charge(connection, policy, digest, charge.ask):
                        begun[digest] = self._ledger.kept_until(charge.ask.expires_at)
            except (JournalBroken, JournalBehind):
                raise
            except LabelerError as error:
                if isinstance(error, BudgetExceeded | ShareUsedUp):
                    task = charge.ask.task
                    size = len(charge.ask.batch)
                    self._ledger.decline_ask(connection, policy, digest, task, size, round_charges(task, size))
                events.append(("round", digest, machine.ChargeRefused(no_to_ask(charge.ask, error))))
            else:
                events.append(("round", digest, machine.Charged(charge.ask)))
        for proposal, _ in promises:
            try:
                with self._database.attempt(connection):
                    until = self._ledger.promise_in(connection, policy, proposal)
            except (JournalBroken, JournalBehind):
                raise
            except BudgetExceeded as error:
                self._ledger.decline(connection, policy, proposal, error)
                events.append(("proposal", proposal, proposing.NotCovered(not_willing(proposal, error))))
            except LabelerError as error:
                if isinstance(error, ShareUsedUp):
                    self._ledger.decline(connection, policy, proposal, error)
                events.append(("proposal", proposal, machine.Refused(not_willing(proposal, error))))
            else:
                events.append(("proposal", proposal, proposing.Promised(until.timestamp())))
        self._rounds.open(begun, connection=connection)
        return events

    def given_back(self, connection: Connection, erased: Sequence[str], withdrawn: Sequence[str]) -> None:
        """Erase what nobody may ask for any more, and give back what was set aside for jobs that ended."""
        self._rounds.erase_in(erased, connection=connection)
        for job_id in withdrawn:
            given_back = self._promises.withdraw(job_id, self._clock(), connection=connection)
            log.info("proposal withdrawn", extra={"job_id": job_id, "rounds_given_back": given_back})

    def _charge(self, connection: Connection, policy: Policy, digest: str, ask: Ask) -> bool:
        return self._ledger.charge_in(
            connection,
            policy,
            round_digest=digest,
            shard_version=self._records.agent().shard_version,
            reservation_id=digest,
            charges=round_charges(ask.task, len(ask.batch)),
            task=ask.task,
            num_queries=len(ask.batch),
            recipients=machine.recipients_of(ask),
        )
