"""The coordinator's driver: carries out what `labeler.rounds.coordinator` wants, for all jobs of a turn together.

    turn    take every message, wake and look that is due -> step the machines -> one write transaction for all that
            is stored -> one pipeline of signed messages -> answers to whoever waits -> what is durable goes on

Whoever delivers messages waits for the commit that holds their effect, and messages that arrive meanwhile are taken by
the next turn: the more comes, the more of it shares a commit. Jobs that are not finished are kept in memory, as the
journal has them; a wake reads one of them again. Nothing in memory is the truth: a driver that begins with nothing
reads the unfinished jobs, and `resume` gives what is still owed.

Where the transaction of a turn fails, nothing of it is kept, in memory either, and it is done again piece by piece
(each delivery, then each of its messages, each look), so that what the journal refuses harms itself alone.

It runs without threads: a test calls `turn`. What others say or want written meanwhile, from any thread, lies in the
`Inbox`; jobs in memory are `LiveJobs`; a step is the `Stepper`'s; and what a turn has come to is a `Plan`.

A little over 400 lines: what a turn does, and what it does again where the journal refuses it, are one order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from feature_store.clock import Clock
from feature_store.driving.errands import Errand
from feature_store.driving.gathering import Gatherer
from feature_store.driving.inbox import Inbox
from feature_store.driving.intake import Delivery
from feature_store.driving.leaving import note_stored, send_off
from feature_store.driving.live_jobs import LiveJobs
from feature_store.driving.loading import Loaded, Loader
from feature_store.driving.reading import PartyBook, Reader
from feature_store.driving.relays import Relays
from feature_store.driving.sending import Writer
from feature_store.driving.settling import Settling
from feature_store.driving.stepping import Questions, Stepper
from feature_store.driving.storing import Settlement, Storer
from feature_store.driving.taking import Taker, unavailable
from feature_store.driving.turn_plan import Plan
from feature_store.journal.database import Database
from feature_store.journal.jobs import JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.rounds import AggregateStore
from feature_store.journal.sequences import Sequences
from feature_store.journal.tasks import TaskStore
from feature_store.mailbox import Mailbox
from labeler.errors import LabelerError, Replayed, TryAgain
from labeler.release import Release
from labeler.rounds import winner_line
from labeler.rounds.effects import UNFINISHED, Admitted, Ended, Event, Failed, Now, Patience, Stored, Tick
from labeler.rounds.job_state import JobRun
from labeler.rounds.lanes import Lanes, admit, next_place_s

log = logging.getLogger("labeler.conductor")


class CoordinatorDriver:
    """See the module.

    Args:
        questions: makes the questions of jobs.
        settlement: says what is charged to whom.
        encode_release: a release as it is stored.
        steady: seconds that never run backwards.
        requester_of: the name of whoever holds a token, by its id; sites are told it with a proposal.
        settle_after_s: how long agents may wait to be told that a round is settled.
        is_simulated: noise from a known seed is expected, and every release says so; never in a service.
    """

    def __init__(
        self,
        *,
        database: Database,
        ledger: Ledger,
        tasks: TaskStore,
        jobs: JobStore,
        aggregates: AggregateStore,
        parties: PartyBook,
        sequences: Sequences,
        sender: Writer,
        mailbox: Mailbox,
        questions: Questions,
        settlement: Settlement,
        encode_release: Callable[[Release], bytes],
        patience: Patience,
        clock: Clock,
        steady: Callable[[], float] = time.monotonic,
        requester_of: Callable[[str], str] = lambda _: "",
        settle_after_s: float = 0.0,
        is_simulated: bool = False,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._sequences = sequences
        self._parties = parties
        self._mailbox = mailbox
        self._clock = clock
        self._steady = steady
        self._storer = Storer(ledger, jobs, aggregates, settlement, encode_release)
        self._sender = sender
        self._settling = Settling(settle_after_s)
        self.observe: Callable[[JobRun, JobRun], None] | None = None
        """Told of each job's step, as it was before and is now, once it is durable."""
        self.relays = Relays()
        self._live = LiveJobs()
        self._inbox = Inbox()
        self.gatherer = Gatherer(self._inbox, self._live, self._now)
        self._stepper = Stepper(self._live, sender, questions, self.relays, patience)
        self._line = winner_line.Line()
        self._lanes = Lanes()
        self._taker = Taker(self._live, self._stepper, sequences)
        loader = Loader(
            database, tasks, jobs, aggregates, patience, requester_of=requester_of, is_simulated=is_simulated
        )
        self._reader = Reader(loader, parties, mailbox, self._live, patience)

    # What others say; any thread. See `Inbox`.

    def deliver(self, delivery: Delivery) -> None:
        """Take messages at the next turn; `delivery.done` is told what became of them."""
        self._inbox.deliver(delivery)

    def hand_in(self, errand: Errand) -> None:
        """Write something in the next turn's transaction; `errand.done` is told what became of it."""
        self._inbox.hand_in(errand)

    def tell(self, job_id: str, event: Event) -> None:
        """What a party of this very process says of a job: there is no message to check, and nobody waits."""
        self._inbox.tell(job_id, event)

    def wake(self, job_id: str) -> None:
        """Something about a job was changed in the journal, or around it: read it again at the next turn."""
        self._inbox.wake(job_id)

    def ring(self) -> None:
        """End a `wait` at once."""
        self._inbox.ring()

    def close(self) -> None:
        """Take nothing more; whoever waits is told to send again. Agents are told what has waited."""
        self._inbox.close()
        self._send(self._plan(self._now()), is_last=True)

    def wait(self) -> None:
        """Wait until there is something to do, or `ring`; then for those who are about to say the same."""
        self._inbox.wait(lambda: 0.0 if self._live.stored else self._next_s() - self._steady())
        self.gatherer.gather()

    # One turn.

    def turn(self) -> bool:
        """Do everything that is to be done now.

        Returns:
            Whether there is more to do at once.
        """
        deliveries, errands, told, woken = self._inbox.take()
        now = self._now()
        try:
            self._reader.refresh(now, woken)
            changed = self._reader.party_news()
            stored, self._live.stored = self._live.stored, []
            events: list[tuple[str, Event]] = [(job_id, Stored()) for job_id in stored]
            events += [(job_id, changed) for job_id in self._live.jobs if changed is not None]
            events += told
            due = [job_id for job_id in self._live.due(now.steady_s) if job_id not in woken]
            again = [job_id for job_id in due if job_id in self._live.deferred]
            for fresh in self._reader.reload([*woken, *again], now):
                if fresh.run.state not in UNFINISHED:
                    self._finish(fresh, now)
                    continue
                self._live.know(fresh)
                events.append((fresh.run.job_id, Tick(self._reader.mail(now))))
            events += [(job_id, Tick(self._reader.mail(now))) for job_id in due if job_id not in again]
            self._reader.load_for(deliveries)
        except LabelerError as error:
            log.warning("journal cannot be read now", extra={"problem": error.problem_type})
            # Looks, news of parties, and what had become durable, are off their lists: all jobs are read again.
            self._inbox.wake_again([*self._live.jobs, *woken])
            for delivery in deliveries:
                delivery.done(unavailable(error))
            for errand in errands:
                errand.settle(unavailable(error))
            self._reader.refreshed_s = now.steady_s
            return False
        try:
            self._together(deliveries, events, now, errands)
        except Exception as error:
            for errand in errands:
                errand.settle(unavailable(error))  # who was told already stays told
            raise
        self._see_off()
        return bool(self._live.stored)

    def _together(
        self,
        deliveries: list[Delivery],
        events: list[tuple[str, Event]],
        now: Now,
        errands: Sequence[Errand] = (),
    ) -> None:
        """Everything in one transaction; where that fails, piece by piece."""
        plan = self._plan(now)
        plan.errands += errands
        for delivery in deliveries:
            plan.answers.append((delivery, self._taker.take(delivery, plan, self._reader.parties)))
        for job_id, event in self._live.in_turns(events):
            self._stepper.step_safely(job_id, event, plan)
        self._admit(plan)
        try:
            self._commit(plan)
        except Exception as error:
            if len(deliveries) + len(events) + len(errands) > 1 or any(len(one.messages) > 1 for one in deliveries):
                problem = getattr(error, "problem_type", type(error).__name__)
                log.info("a turn is done again piece by piece", extra={"problem": problem})
                self._apart(deliveries, events, now, errands)
            else:
                self._refused(deliveries, events, error, now)
                for errand in errands:
                    errand.settle(error)
            return
        self._keep(plan)

    def _apart(
        self, deliveries: list[Delivery], events: list[tuple[str, Event]], now: Now, errands: Sequence[Errand]
    ) -> None:
        for errand in errands:
            self._together([], [], now, [errand])
        for delivery in deliveries:
            outcomes: list[int | LabelerError] = []
            count = 0
            for message in delivery.messages:
                single = Delivery((message,), None, outcomes.append)
                try:
                    self._reader.load_for([single])  # what it is about may have ended in a piece before
                except LabelerError as error:
                    outcomes.append(unavailable(error))
                    break
                self._together([single], [], now)
                if isinstance(outcomes[-1], LabelerError):
                    break
                count += 1
            failed = next((one for one in outcomes if isinstance(one, LabelerError)), delivery.error)
            delivery.done(count if failed is None else failed)
        for event in events:
            self._together([], [event], now)

    def _refused(self, deliveries: list[Delivery], events: list[tuple[str, Event]], error: Exception, now: Now) -> None:
        """The journal does not take one single piece; nothing of it is kept."""
        for delivery in deliveries:
            job_id = self._live.job_of(delivery.messages[0]) if delivery.messages else None
            if not isinstance(error, LabelerError):
                log.error("a message met a defect", exc_info=error)
            delivery.done(error if isinstance(error, LabelerError) else unavailable(error))
            if isinstance(error, Replayed):
                # It had been kept, and what followed the commit failed: the journal knows more than this memory.
                for incoming in delivery.messages:
                    self._taker.forget(incoming)
                if job_id is not None:
                    self.wake(job_id)
            elif job_id is not None:
                self._again(job_id, error, now)
        for job_id, _ in events:
            self._again(job_id, error, now)

    def _again(self, job_id: str, error: Exception, now: Now, *, number: int | None = None) -> None:
        """After a step of a job was not kept: read it again, and end it where it cannot go on.

        Args:
            error: why the step was not kept.
            now: when the turn began.
            number: of the round whose messages could not be written, where that is why.
        """
        try:
            fresh = self._reader.one(job_id)
        except LabelerError as trouble:
            fresh, error = None, trouble
        live = self._live.jobs.get(job_id)
        if fresh is not None and fresh.run.state not in UNFINISHED:
            self._finish(fresh, now)
            return
        if live is None:
            return
        if fresh is not None:
            self._live.know(fresh)
        if isinstance(error, LabelerError) and not isinstance(error, TryAgain):
            plan = self._plan(now)
            log.warning("job fails", extra={"job_id": job_id, "problem": error.problem_type})
            self._stepper.step(job_id, Failed(error, number), plan)
            try:
                self._commit(plan)
                self._keep(plan)
                return
            except LabelerError as failure:
                log.warning("job could not be ended yet", extra={"job_id": job_id, "problem": failure.problem_type})
        self._live.pause(job_id, error, self._steady())

    def _finish(self, fresh: Loaded, now: Now) -> None:
        """Somebody else has ended a job: whoever took part is told."""
        job_id = fresh.run.job_id
        if job_id not in self._live.jobs:
            return
        plan = self._plan(now)
        self._live.know(fresh)
        self._stepper.step(job_id, Ended(fresh.run.state), plan)
        self._keep(plan)

    def trouble(self, job_id: str) -> Exception | None:
        """Why an unfinished job could not go on when it was tried last; None where it could, or is none."""
        live = self._live.jobs.get(job_id)
        return None if live is None else live.trouble

    # What a turn comes to.

    def _plan(self, now: Now) -> Plan:
        return Plan(now, line=self._line, lanes=self._lanes)

    def _admit(self, plan: Plan) -> None:
        """Jobs whose turn it is, and rounds whose turn to have their winners found has come."""
        while True:
            plan.lanes, admitted = admit(plan.lanes, plan.now.steady_s)
            follow, plan.follow = plan.follow, []
            if not admitted and not follow:
                return
            for job_id in admitted:
                self._stepper.step_safely(job_id, Admitted(), plan)
            for round_digest in follow:
                job_id = self._live.of_round.get(round_digest, "")
                if job_id in self._live.jobs:
                    self._stepper.step_safely(job_id, Tick(self._reader.mail(plan.now)), plan)

    def _commit(self, plan: Plan) -> None:
        """Everything of a turn that is stored, in one transaction."""
        if not plan.is_stored:
            return
        live = self._live.jobs
        prices = {job_id: self._storer.prices(live[job_id].loaded, stores) for job_id, stores in plan.stores.items()}
        with self._database.write() as connection:
            for errand in plan.errands:
                try:
                    with self._database.attempt(connection):
                        errand.write(connection)
                except LabelerError as error:
                    plan.refused[errand] = error
            for job_id, stores in plan.stores.items():
                self._storer.store(live[job_id].loaded, stores, connection, prices=prices[job_id])
            for (sender, verify_key), sequence in plan.taken.items():
                self._sequences.taken(sender, sequence, verify_key=verify_key, connection=connection)
            if plan.heads:
                self._parties.answered(plan.heads, connection=connection)
        note_stored(plan)

    def _keep(self, plan: Plan) -> None:
        """What is durable is true in memory too; then everything leaves, and who waits is told."""
        self._line, self._lanes = plan.line, plan.lanes
        self._taker.keep(plan)
        for errand in plan.errands:
            errand.settle(plan.refused.get(errand))
        for job_id, run in plan.runs.items():
            live = self._live.jobs[job_id]
            if self.observe is not None:
                self.observe(live.run, run)
            live.run = run
            if job_id not in plan.retries and live.pause_s and job_id in plan.looks:
                live.pause_s, live.not_before_s, live.trouble = 0.0, 0.0, None
            self._live.note_rounds(run)
            if run.is_storing and job_id in plan.stores:
                self._live.stored.append(job_id)
        failure = self._send(plan)
        relayed = {id(incoming) for incoming in plan.relays}
        for delivery, outcome in plan.answers:
            is_lost = failure is not None and any(id(incoming) in relayed for incoming in delivery.messages)
            delivery.done(unavailable(failure) if failure is not None and is_lost else outcome)
        if failure is None:
            self._taker.keep_relayed(plan)
            for incoming in plan.relays:
                self.relays.sent(incoming.message)
        for job_id, error in plan.retries.items():
            self._live.pause(job_id, error, self._steady())
        for job_id, look_s in plan.looks.items():
            if job_id not in plan.retries:
                self._live.look_at(job_id, look_s)
        for job_id, run in plan.runs.items():
            if run.state not in UNFINISHED:
                self._forget(job_id, run)
        for job_id, failed in plan.broken.items():
            self._again(job_id, failed.error, plan.now, number=failed.number)

    def _send(self, plan: Plan, *, is_last: bool = False) -> LabelerError | None:
        settled = self._settling.leaving(plan, is_last=is_last)
        return send_off(plan, settled, self._sender, self._ledger, self._mailbox)

    def _see_off(self) -> None:
        """Jobs that were read for a message stay only where they are not finished."""
        over, stay = self._live.see_off()
        for job_id, run in over:
            self._forget(job_id, run)
        for job_id in stay:
            self.wake(job_id)

    def _forget(self, job_id: str, run: JobRun) -> None:
        self._sender.forget(self._live.forget(job_id, run))

    def _next_s(self) -> float:
        """When something is to be done by itself."""
        now_s = self._steady()
        refresh_s = now_s if self._reader.refreshed_s is None else self._reader.refreshed_s + self._reader.every_s
        times = [refresh_s, self._live.next_due_s(), next_place_s(self._lanes), self._settling.due_s]
        return min(one for one in times if one is not None)

    def _now(self) -> Now:
        return Now(self._clock().timestamp(), self._steady())
