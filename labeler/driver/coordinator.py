"""The coordinator's driver: carries out the effects of `labeler.rounds.coordinator`, for all jobs of a turn together.

    acquire   collect messages, wakes and due looks, and read the jobs they concern from the journal.
    step      run the machines of these jobs on a plan, of which nothing counts yet.
    store     run one write transaction for everything that the plan stores.
    send      sign and send messages in one pipeline; notify waiting callers; durable jobs continue in the next turn.

A caller that delivers messages waits for the commit that holds their effect. Messages that arrive meanwhile go into the
next turn, so under load more of them share a commit. Nothing in memory is the truth: each turn reads its jobs again. So
a driver that starts with nothing, or whose job was changed by others, does the same as any other.

If the transaction of a turn fails, nothing of it is kept. The turn is repeated piece by piece (each message, each
look), so that what the journal refuses affects only itself.

It runs without threads: a test calls `turn`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from labeler.driver.intake import Delivery, Inbox, Incoming
from labeler.driver.mail import Mailbox
from labeler.driver.reading import Live, Loader, PartyBook, TurnPlan, parties_of
from labeler.driver.sending import Questions, Relays, Writer, note_stored, send_off
from labeler.driver.settlement import Settlement
from labeler.driver.stepping import Stepper
from labeler.driver.storing import Storer
from labeler.errors import LabelerError, Replayed, TryAgain, Unavailable, WrongDigest
from labeler.ledger.rounds import AggregateStore
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR
from labeler.rounds import effects as fx
from labeler.rounds import queues
from labeler.rounds.effects import UNFINISHED, Event, JobRun, Now, Party, Patience
from labeler.rounds.queues import FairQueue
from labeler.system.clock import Clock

log = logging.getLogger("labeler.conductor")

REFRESH_S = 1.0
"""Interval at which the journal is asked which jobs are unfinished, in case a wake was lost."""

_COUNTED_S = 0.5

JobEvent = tuple[str, Event]


class CoordinatorDriver(Inbox):
    """See the module; its input comes through `Inbox`, from any thread.

    Args:
        questions: makes the questions of jobs.
        settlement: decides the charges, and names the journal with all its stores.
        steady: seconds that never run backwards.
        requester_of: returns the name of a token's holder, by the token's id; a proposal tells it to the sites.
        is_simulated: noise from a known seed is expected, and every release says so; never in a service.
    """

    def __init__(
        self,
        *,
        parties: PartyBook,
        sender: Writer,
        mailbox: Mailbox,
        questions: Questions,
        settlement: Settlement,
        patience: Patience,
        clock: Clock,
        steady: Callable[[], float] = time.monotonic,
        requester_of: Callable[[str], str] = lambda _: "",
        is_simulated: bool = False,
    ) -> None:
        super().__init__()
        self._database, self._ledger, self._jobs = settlement.database, settlement.ledger, settlement.jobs
        self._sequences, aggregates = Sequences(self._database), AggregateStore(self._database)
        self._book = parties
        self._mailbox = mailbox
        self._clock = clock
        self._steady = steady
        self._storer = Storer(aggregates, settlement)
        self._sender = sender
        self.observe: Callable[[JobRun, JobRun], None] | None = None
        """Called after each durable step of a job, with the job before and after."""
        self.relays = Relays()
        self._loader = Loader(
            self._database,
            settlement.tasks,
            self._jobs,
            aggregates,
            patience,
            requester_of=requester_of,
            is_simulated=is_simulated,
        )
        self._live = self._loader.live
        self._stepper = Stepper(sender, questions, self.relays, patience)
        self._line = queues.WinnerQueue()
        self._turns = FairQueue()
        self._stored: list[str] = []
        """Jobs whose last step is durable and that continue at once."""
        self._last: dict[tuple[str, str], int] = {}
        self._relayed: dict[tuple[str, str], int] = {}
        self._parties: dict[str, Party] = {}
        self._version = -1
        self._every_s = max(0.05, min(REFRESH_S, patience.ask_again_s))
        self._refreshed_s: float | None = None
        self._counted: tuple[float, dict[str, int]] = (-_COUNTED_S, {})

    def wait(self) -> None:
        """Wait until there is something to do, or `ring`."""
        self.wait_for_input(lambda: 0.0 if self._stored else self._next_s() - self._steady())

    def trouble(self, job_id: str) -> Exception | None:
        """Return why an unfinished job could not continue at its last attempt; None without trouble or job."""
        live = self._live.get(job_id)
        return None if live is None else live.trouble

    # A turn.

    def turn(self) -> bool:
        """Do everything that is due now.

        Returns:
            Whether there is more to do at once.
        """
        deliveries, told, woken = self.take()
        now = self._now()
        try:
            events = self._due(told, woken, now)
        except LabelerError as error:
            self._unreadable(deliveries, woken, now, error)
            return False
        self._work(deliveries, events, now)
        return bool(self._stored)

    def _work(self, deliveries: Sequence[Delivery], events: Sequence[JobEvent], now: Now) -> None:
        """Acquire, step, store and send; if storing fails, piece by piece."""
        try:
            plan = self._stepped(deliveries, events, now)
        except LabelerError as error:
            self._unreadable(deliveries, [job_id for job_id, _ in events], now, error)
            return
        try:
            self._commit(plan)
        except Exception as error:
            if len(deliveries) + len(events) > 1 or any(len(one.messages) > 1 for one in deliveries):
                problem = getattr(error, "problem_type", type(error).__name__)
                log.info("a turn is done again piece by piece", extra={"problem": problem})
                self._apart(deliveries, events, now)
            else:
                self._refused(deliveries, events, error, plan)
            return
        self._keep(plan)

    def _apart(self, deliveries: Sequence[Delivery], events: Sequence[JobEvent], now: Now) -> None:
        for delivery in deliveries:
            outcomes: list[int | LabelerError] = []
            for message in delivery.messages:
                self._work([Delivery((message,), None, outcomes.append)], [], now)
                if isinstance(outcomes[-1], LabelerError):
                    break
            failed = next((one for one in outcomes if isinstance(one, LabelerError)), delivery.error)
            delivery.done(len(outcomes) if failed is None else failed)
        for event in events:
            self._work([], [event], now)

    def _refused(
        self, deliveries: Sequence[Delivery], events: Sequence[JobEvent], error: Exception, plan: TurnPlan
    ) -> None:
        """Handle a single piece that the journal refuses; nothing of it is kept."""
        for job_id, job in plan.jobs.items():
            if job.run.state in UNFINISHED:  # one that was read for the first time waits as others do
                self._live.setdefault(job_id, Live(job.run, due_s=plan.now.steady_s))
        for delivery in deliveries:
            if not isinstance(error, LabelerError):
                log.error("a message met a defect", exc_info=error)
            delivery.done(error if isinstance(error, LabelerError) else unavailable(error))
            for incoming in delivery.messages:
                if isinstance(error, Replayed):
                    # It had been stored, and what followed the commit failed: the journal knows more than this memory.
                    self._last.pop((incoming.message.header.sender, incoming.verify_key), None)
                    self.wake(self._loader.known_job(incoming))
                else:
                    self._fail(self._loader.known_job(incoming), error, plan.now)
        for job_id, event in events:
            if isinstance(event, fx.JobFailed) and job_id in self._live:
                self._live[job_id].pause(error, self._steady())  # it could not be ended yet
            else:
                self._fail(job_id, error, plan.now)

    def _fail(self, job_id: str, error: Exception, now: Now, *, number: int | None = None) -> None:
        """Handle a job whose step was not kept: end it if it cannot continue, else let it wait.

        Args:
            number: of the round whose messages could not be written, if that is the reason.
        """
        if isinstance(error, LabelerError) and not isinstance(error, TryAgain):
            log.warning("job fails", extra={"job_id": job_id, "problem": error.problem_type})
            self._work([], [(job_id, fx.JobFailed(error, number))], now)
        elif job_id in self._live:
            self._live[job_id].pause(error, self._steady())

    def _unreadable(self, deliveries: Iterable[Delivery], woken: Iterable[str], now: Now, error: LabelerError) -> None:
        """Do nothing, because the journal cannot be read now; due looks are lost, so every job gets a new one."""
        log.warning("journal cannot be read now", extra={"problem": error.problem_type})
        self.wake_again([*self._live, *woken])
        self._refreshed_s = now.steady_s
        for delivery in deliveries:
            delivery.done(unavailable(error))

    # Acquire.

    def _due(self, told: list[JobEvent], woken: dict[str, None], now: Now) -> list[JobEvent]:
        """Return what else, besides messages, is to be looked at now."""
        if self._refreshed_s is None or now.steady_s - self._refreshed_s >= self._every_s:
            unfinished = dict.fromkeys(self._jobs.unfinished_ids())
            self._refreshed_s = now.steady_s
            woken.update(dict.fromkeys(job_id for job_id in unfinished if job_id not in self._live))
            woken.update(dict.fromkeys(job_id for job_id in self._live if job_id not in unfinished))
        stored, self._stored = self._stored, []
        events: list[JobEvent] = [(job_id, fx.StepStored()) for job_id in stored]
        if self._book.version != self._version:
            version = self._book.version
            parties = parties_of(self._book.all())
            if parties != self._parties:
                self._parties = parties
                events += [(job_id, fx.PartiesChanged(parties)) for job_id in self._live]
            self._version = version
        events += told
        for job_id, live in self._live.items():
            if live.due_s <= now.steady_s:
                live.due_s = math.inf  # until its step sets the next time
                woken.setdefault(job_id)
        # A pause after a failure is not shortened.
        paused = [one for one in woken if one in self._live and now.steady_s < self._live[one].not_before_s]
        return events + [(job_id, fx.Tick(self._mail(now))) for job_id in woken if job_id not in paused]

    def _mail(self, now: Now) -> dict[str, int]:
        """Return the number of waiting messages by party, counted within the last half second."""
        if now.steady_s - self._counted[0] >= _COUNTED_S:
            try:
                counted = dict(self._mailbox.all_pending(list(self._parties)))
            except LabelerError:
                counted = {}
            self._counted = (now.steady_s, counted)
        return self._counted[1]

    def _next_s(self) -> float:
        """Return the time of the next look that needs no event."""
        refresh_s = self._steady() if self._refreshed_s is None else self._refreshed_s + self._every_s
        place_s = self._turns.next_place_s()
        return min([refresh_s, *(live.due_s for live in self._live.values()), *([] if place_s is None else [place_s])])

    def _now(self) -> Now:
        return Now(self._clock().timestamp(), self._steady())

    # Step.

    def _stepped(self, deliveries: Sequence[Delivery], events: Sequence[JobEvent], now: Now) -> TurnPlan:
        """Return a plan with the results of all of this.

        Raises:
            LabelerError: the journal cannot be read.
        """
        about = {id(one): self._loader.job_of(one) for delivery in deliveries for one in delivery.messages}
        wanted = dict.fromkeys([*about.values(), *(job_id for job_id, _ in events)])
        plan = TurnPlan(now, {}, self._line, self._turns)
        self._read(wanted, plan)
        ended = {one for one in plan.jobs if one in self._live and plan.jobs[one].run.state not in UNFINISHED}
        for job_id in ended:  # by somebody else: tell the participants
            self._stepper.step_safely(job_id, fx.Ended(plan.jobs[job_id].run.state), plan)
        for delivery in deliveries:
            plan.answers.append((delivery, self._take(delivery, about, plan)))
        open_jobs = [one for one in events if one[0] in plan.jobs and plan.jobs[one[0]].run.state in UNFINISHED]
        for job_id, event in _in_turns(open_jobs, lambda one: plan.jobs[one[0]].record.created_by):
            self._stepper.step_safely(job_id, event, plan)
        while True:  # jobs that get their turn, and rounds that get their turn to have winners found
            plan.turns, admitted = plan.turns.take(now.steady_s)
            follow, plan.follow = plan.follow, []
            if not admitted and not follow:
                return plan
            following = [self._loader.of_round.get(round_digest, "") for round_digest in follow]
            self._read([*admitted, *following], plan)
            for job_id in admitted:
                if job_id in plan.jobs:
                    self._stepper.step_safely(job_id, fx.JobAdmitted(), plan)
            for job_id in following:
                if job_id in plan.jobs:
                    self._stepper.step_safely(job_id, fx.Tick(self._mail(now)), plan)

    def _read(self, job_ids: Iterable[str], plan: TurnPlan) -> None:
        missing = [job_id for job_id in job_ids if job_id and job_id not in plan.jobs]
        plan.jobs |= self._loader.load(missing, self._parties)

    def _take(self, delivery: Delivery, about: dict[int, str], plan: TurnPlan) -> int | LabelerError:
        """Return how many messages were accepted, or why the first rejected one was refused."""
        for incoming in delivery.messages:
            try:
                self._take_one(incoming, about[id(incoming)], plan)
            except LabelerError as error:
                return error
            except Exception as error:
                log.exception("a message met a defect", extra={"message_id": incoming.message.message_id})
                return unavailable(error)
        return len(delivery.messages) if delivery.error is None else delivery.error

    def _take_one(self, incoming: Incoming, job_id: str, plan: TurnPlan) -> None:
        header = incoming.message.header
        if job_id not in plan.jobs:
            raise WrongDigest(
                "the answer is about a job that this coordinator never proposed"
                if incoming.job_id
                else "the message belongs to a round that this coordinator never opened"
            )
        party = self._parties.get(header.sender)
        if party is None or party.verify_key != incoming.verify_key:
            raise Unavailable(f"the keys of {header.sender!r} were changed at this moment; send again")
        # Tried on a draft, so that nothing of a refused message is kept.
        draft = plan.draft(job_id)
        refusal = self._stepper.step(job_id, incoming.event, draft, incoming)
        if refusal is not None:
            raise refusal
        numbers = plan.taken if header.recipient == COORDINATOR else plan.relayed
        way = (header.sender, incoming.verify_key if header.recipient == COORDINATOR else header.recipient)
        last = numbers[way] if way in numbers else self._last_of(*way, is_relayed=numbers is plan.relayed)
        if header.sequence <= last:
            raise Replayed(
                f"message {header.sequence} of {header.sender!r} for {header.recipient!r} is not new: message {last} "
                "was taken. If it was sent again because the answer was lost, it has arrived"
            )
        plan.join(draft)
        numbers[way] = header.sequence
        if incoming.head is not None:
            plan.heads[header.sender] = incoming.head

    def _last_of(self, sender: str, key: str, *, is_relayed: bool) -> int:
        """Return the highest number accepted from a sender: under a key, or for a tallier."""
        if is_relayed:
            return self._relayed.get((sender, key), 0)
        if (sender, key) not in self._last:
            self._last[sender, key] = self._sequences.last(sender, key)
        return self._last[sender, key]

    # Store.

    def _commit(self, plan: TurnPlan) -> None:
        """Store everything of a turn in one transaction."""
        if not plan.is_stored:
            return
        prices = {job_id: self._storer.prices(plan.jobs[job_id], stores) for job_id, stores in plan.stores.items()}
        with self._database.write() as connection:
            for job_id, stores in plan.stores.items():
                self._storer.store(plan.jobs[job_id], stores, connection, prices=prices[job_id])
            for (sender, verify_key), sequence in plan.taken.items():
                self._sequences.taken(sender, sequence, verify_key=verify_key, connection=connection)
            if plan.heads:
                self._book.answered(plan.heads, connection=connection)
        note_stored(plan)

    # Send.

    def _keep(self, plan: TurnPlan) -> None:
        """Copy the durable state to memory; then send everything and notify waiting callers."""
        self._line, self._turns = plan.line, plan.turns
        self._last |= plan.taken
        for job_id, run in plan.runs.items():
            live = self._live.get(job_id)
            if self.observe is not None:
                self.observe(plan.jobs[job_id].run if live is None else live.run, run)
            self._loader.keep(run)
            if run.is_storing and job_id in plan.stores:
                self._stored.append(job_id)
        failure = send_off(plan, self._sender, self._ledger, self._mailbox)
        relayed = {id(incoming) for incoming in plan.relays}
        for delivery, outcome in plan.answers:
            is_lost = failure is not None and any(id(incoming) in relayed for incoming in delivery.messages)
            delivery.done(unavailable(failure) if failure is not None and is_lost else outcome)
        if failure is None:
            self._relayed |= plan.relayed
            for incoming in plan.relays:
                self.relays.sent(incoming.message)
        for job_id, look_s in plan.looks.items():
            if job_id in self._live and job_id not in plan.retries:
                live = self._live[job_id]
                live.due_s, live.pause_s, live.not_before_s, live.trouble = look_s, 0.0, 0.0, None
        for job_id, error in plan.retries.items():
            self._live.setdefault(job_id, Live(plan.jobs[job_id].run)).pause(error, self._steady())
        for run in plan.runs.values():
            if run.state not in UNFINISHED:
                self._loader.forget(run)
        for job_id, failed in plan.broken.items():
            self._fail(job_id, failed.error, plan.now, number=failed.number)


def _in_turns(events: Sequence[JobEvent], requester_of: Callable[[JobEvent], str]) -> list[JobEvent]:
    """Return the events with requesters taking turns, each requester's in order."""
    lanes: dict[str, list[JobEvent]] = {}
    for one in events:
        lanes.setdefault(requester_of(one), []).append(one)
    longest = max(map(len, lanes.values()), default=0)
    return [lane[place] for place in range(longest) for lane in lanes.values() if place < len(lane)]


def unavailable(error: Exception) -> LabelerError:
    """Return the error for senders whose input could not be processed now."""
    return error if isinstance(error, TryAgain) else Unavailable("the journal cannot take it now; send again")
