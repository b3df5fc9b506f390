"""The coordinator's driver: carries out what `labeler.rounds.coordinator` wants, for all jobs of a turn together.

    turn    take every message, wake and look that is due -> step the machines -> one write transaction for all that
            is stored -> one pipeline of signed messages -> answers to whoever waits -> what is durable goes on

Whoever delivers messages waits for the commit that holds their effect, and messages that arrive meanwhile are taken by
the next turn: the more comes, the more of it shares a commit. Jobs that are not finished are kept in memory, as the
journal has them; a wake reads one of them again. Nothing in memory is the truth: a driver that begins with nothing
reads the unfinished jobs, and `resume` gives what is still owed.

What others have to write (a job that was submitted) is an errand, and shares the commit too.

Where the transaction of a turn fails, nothing of it is kept, in memory either, and it is done again piece by piece
(each delivery, then each of its messages, each look), so that what the journal refuses harms itself alone.

It runs without threads: a test calls `turn`. `deliver` and `wake` may be called by any thread.

By far the longest file of the house: one class, each of whose methods carries out one kind of effect.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.clock import Clock
from feature_store.driving.errands import Errand
from feature_store.driving.intake import Delivery, Incoming
from feature_store.driving.loading import Loaded, Loader, parties_of
from feature_store.driving.post_office import PostOffice, letter_of
from feature_store.driving.relays import Relays
from feature_store.driving.sending import Sender, batch_of
from feature_store.driving.storing import Settlement, Storer
from feature_store.faults import fault_point
from feature_store.journal.aggregates import AggregateStore
from feature_store.journal.chain import EMPTY
from feature_store.journal.database import Database
from feature_store.journal.jobs import JobRecord, JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.parties import PartyStore
from feature_store.journal.sequences import Sequences
from feature_store.journal.tasks import TaskStore
from feature_store.mailbox import Letter, Mailbox
from labeler.errors import (
    BadData,
    LabelerError,
    NotFound,
    Replayed,
    TryAgain,
    Unavailable,
    WrongDigest,
)
from labeler.messages import COORDINATOR
from labeler.messages.shares import aggregate_from_bytes, winner_from_bytes
from labeler.release import Release, agree_on_winners, open_histogram
from labeler.rounds import winner_line
from labeler.rounds.coordinator import LONGEST_PAUSE_S, step
from labeler.rounds.effects import (
    SENDS,
    STORES,
    UNFINISHED,
    Admitted,
    AskForSums,
    AskForTurn,
    BodiesMade,
    Effect,
    Ended,
    Enter,
    Event,
    Failed,
    FixContributors,
    Leave,
    MakeBodies,
    Now,
    Opened,
    PartiesChanged,
    Party,
    Patience,
    Post,
    Prepare,
    PutTogether,
    QuestionsPrepared,
    Refuse,
    Relay,
    Send,
    SendAsks,
    SendProposals,
    Store,
    Stored,
    StoreRelease,
    Tell,
    Tick,
    TurnFailed,
    TurnGranted,
    WaitUntil,
)
from labeler.rounds.job_state import JobRun
from labeler.rounds.lanes import Lanes, admit, enter, leave, next_place_s
from labeler.tally import round_of
from labeler.task import Task

log = logging.getLogger("labeler.conductor")

REFRESH_S = 1.0
"""How often the journal is asked which jobs are unfinished, for wakes that were lost."""

_FIRST_PAUSE_S = 0.25
_COUNTED_S = 0.5
_OVER = 10_000
"""Rounds of ended jobs that are remembered, so that late messages of theirs cost no look into the journal."""


class Questions(Protocol):
    """Whoever makes the questions of jobs."""

    def look(self, job: JobRecord, task: Task) -> NDArray[np.int16] | None:
        """The questions of a job, shape (queries, dimension); asks whoever makes them, and None while there are none.

        Raises:
            LabelerError: there are none to be had; TryAgain where there may be later.
        """

    def read(self, job_id: str) -> NDArray[np.int16]:
        """The questions of a job that has them.

        Raises:
            BadData: they cannot be read.
        """


@dataclass
class _Live:
    """A job in memory."""

    loaded: Loaded
    run: JobRun
    due_s: float = 0.0
    pause_s: float = 0.0
    not_before_s: float = 0.0


@dataclass
class _Plan:
    """What one turn, or one piece of it, has come to; kept only once it is durable."""

    now: Now
    runs: dict[str, JobRun] = field(default_factory=dict)
    stores: dict[str, list[Store]] = field(default_factory=dict)
    sends: list[tuple[str, Send]] = field(default_factory=list)
    relays: list[Incoming] = field(default_factory=list)
    taken: dict[tuple[str, str], int] = field(default_factory=dict)
    relayed: dict[tuple[str, str], int] = field(default_factory=dict)
    looks: dict[str, float] = field(default_factory=dict)
    retries: dict[str, Exception] = field(default_factory=dict)
    broken: dict[str, LabelerError] = field(default_factory=dict)
    line: winner_line.Line = field(default_factory=winner_line.Line)
    lanes: Lanes = field(default_factory=Lanes)
    follow: list[str] = field(default_factory=list)
    answers: list[tuple[Delivery, int | LabelerError]] = field(default_factory=list)
    errands: list[Errand] = field(default_factory=list)
    refused: dict[Errand, LabelerError] = field(default_factory=dict)

    @property
    def is_stored(self) -> bool:
        """Whether anything is to be made durable."""
        return bool(self.stores or self.taken or self.errands)


class CoordinatorDriver:
    """See the module.

    Args:
        database, ledger, tasks, jobs, aggregates, parties, sequences: the coordinator's journal.
        post_office: signs what it says.
        mailbox: takes it.
        questions: makes the questions of jobs.
        settlement: says what is charged to whom.
        encode_release: a release as it is stored.
        patience: how long jobs wait.
        clock: the wall clock.
        steady: seconds that never run backwards.
        requester_of: the name of whoever holds a token, by its id; sites are told it with a proposal.
    """

    def __init__(
        self,
        *,
        database: Database,
        ledger: Ledger,
        tasks: TaskStore,
        jobs: JobStore,
        aggregates: AggregateStore,
        parties: PartyStore,
        sequences: Sequences,
        post_office: PostOffice,
        mailbox: Mailbox,
        questions: Questions,
        settlement: Settlement,
        encode_release: Callable[[Release], bytes],
        patience: Patience,
        clock: Clock,
        steady: Callable[[], float] = time.monotonic,
        requester_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._parties = parties
        self._sequences = sequences
        self._mailbox = mailbox
        self._questions = questions
        self._patience = patience
        self._clock = clock
        self._steady = steady
        self._loader = Loader(database, tasks, jobs, aggregates, patience, requester_of=requester_of)
        self._storer = Storer(ledger, jobs, aggregates, settlement, encode_release)
        self._sender = Sender(post_office, questions)
        self.observe: Callable[[JobRun, JobRun], None] | None = None
        """Told of each job's step, as it was before and is now, once it is durable."""
        self.relays = Relays()
        self._live: dict[str, _Live] = {}
        self._of_round: dict[str, str] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._heap: list[tuple[float, str]] = []
        self._line = winner_line.Line()
        self._lanes = Lanes()
        self._last: dict[tuple[str, str], int] = {}
        self._relayed: dict[tuple[str, str], int] = {}
        self._known_parties: tuple[int, dict[str, Party]] = (-1, {})
        self._counted: tuple[float, dict[str, int]] = (-_COUNTED_S, {})
        self._refreshed_s: float | None = None
        self._stored: list[str] = []
        self._deferred: set[str] = set()
        self._guests: list[str] = []
        self._bell = threading.Condition()
        self._deliveries: list[Delivery] = []
        self._errands: list[Errand] = []
        self._woken: dict[str, None] = {}
        self._rung = False
        self._closed = False

    # What others say; any thread.

    def deliver(self, delivery: Delivery) -> None:
        """Take messages at the next turn; `delivery.done` is told what became of them."""
        with self._bell:
            if not self._closed:
                self._deliveries.append(delivery)
                self._bell.notify()
                return
        delivery.done(_stopping())

    def hand_in(self, errand: Errand) -> None:
        """Write something in the next turn's transaction; `errand.done` is told what became of it."""
        with self._bell:
            if not self._closed:
                self._errands.append(errand)
                self._bell.notify()
                return
        errand.settle(_stopping())

    def wake(self, job_id: str) -> None:
        """Something about a job was changed in the journal, or around it: read it again at the next turn."""
        with self._bell:
            self._woken[job_id] = None
            self._bell.notify()

    def ring(self) -> None:
        """End a `wait` at once."""
        with self._bell:
            self._rung = True
            self._bell.notify()

    def close(self) -> None:
        """Take nothing more; whoever waits is told to send again."""
        with self._bell:
            self._closed = True
            left, self._deliveries = self._deliveries, []
            undone, self._errands = self._errands, []
        for delivery in left:
            delivery.done(_stopping())
        for errand in undone:
            errand.settle(_stopping())

    def wait(self) -> None:
        """Wait until there is something to do, or `ring`."""
        with self._bell:
            if self._rung or self._closed or self._deliveries or self._errands or self._woken or self._stored:
                self._rung = False
                return
            pause_s = self._next_s() - self._steady()
            if pause_s > 0:
                self._bell.wait(pause_s)
            self._rung = False

    # One turn.

    def turn(self) -> bool:
        """Do everything that is to be done now.

        Returns:
            Whether there is more to do at once.
        """
        with self._bell:
            deliveries, self._deliveries = self._deliveries, []
            errands, self._errands = self._errands, []
            woken, self._woken = self._woken, {}
        now = self._now()
        try:
            self._refresh(now, woken)
            changed = self._party_news()
            stored, self._stored = self._stored, []
            events: list[tuple[str, Event]] = [(job_id, Stored()) for job_id in stored]
            events += [(job_id, changed) for job_id in self._live if changed is not None]
            due = [job_id for job_id in self._due(now) if job_id not in woken]
            again = [job_id for job_id in due if job_id in self._deferred]
            events += self._reload([*woken, *again], now)
            events += [(job_id, Tick(self._mail(now))) for job_id in due if job_id not in again]
            self._load_for(deliveries)
        except LabelerError as error:
            log.warning("journal cannot be read now", extra={"problem": error.problem_type})
            with self._bell:
                # Looks, news of parties, and what had become durable, are off their lists: all jobs are read again.
                self._woken = dict.fromkeys(self._live) | woken | self._woken
            for delivery in deliveries:
                delivery.done(_unavailable(error))
            for errand in errands:
                errand.settle(_unavailable(error))
            self._refreshed_s = now.steady_s
            return False
        try:
            self._together(deliveries, events, now, errands)
        except Exception as error:
            for errand in errands:
                errand.settle(_unavailable(error))  # who was told already stays told
            raise
        self._see_off()
        return bool(self._stored)

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
            plan.answers.append((delivery, self._take(delivery, plan)))
        for job_id, event in self._in_turns(events):
            self._step_safely(job_id, event, plan)
        self._admit(plan)
        try:
            self._commit(plan)
        except Exception as error:
            if len(deliveries) + len(events) + len(errands) > 1 or any(len(one.messages) > 1 for one in deliveries):
                log.info("a turn is done again piece by piece", extra={"problem": _problem(error)})
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
                    self._load_for([single])  # what it is about may have ended in a piece before
                except LabelerError as error:
                    outcomes.append(_unavailable(error))
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
            job_id = self._job_of(delivery.messages[0]) if delivery.messages else None
            if not isinstance(error, LabelerError):
                log.error("a message met a defect", exc_info=error)
            delivery.done(error if isinstance(error, LabelerError) else _unavailable(error))
            if isinstance(error, Replayed):
                # It had been kept, and what followed the commit failed: the journal knows more than this memory.
                for incoming in delivery.messages:
                    self._last.pop((incoming.message.header.sender, incoming.verify_key), None)
                if job_id is not None:
                    self.wake(job_id)
            elif job_id is not None:
                self._again(job_id, error, now)
        for job_id, _ in events:
            self._again(job_id, error, now)

    def _again(self, job_id: str, error: Exception, now: Now) -> None:
        """After a step of a job was not kept: read it again, and end it where it cannot go on."""
        try:
            fresh = self._loader.load([job_id], self._known_parties[1]).get(job_id)
        except LabelerError as trouble:
            fresh, error = None, trouble
        live = self._live.get(job_id)
        if fresh is not None and fresh.run.state not in UNFINISHED:
            self._finish(fresh, now)
            return
        if live is None:
            return
        if fresh is not None:
            live.run = _merged(fresh.run, live.run)
            live.loaded = fresh
        else:
            self._deferred.add(job_id)  # what memory holds of it may be ahead: its next look reads it again
        if isinstance(error, LabelerError) and not isinstance(error, TryAgain):
            plan = self._plan(now)
            log.warning("job fails", extra={"job_id": job_id, "problem": error.problem_type})
            self._step(job_id, Failed(error), plan)
            try:
                self._commit(plan)
                self._keep(plan)
                return
            except LabelerError as failure:
                log.warning("job could not be ended yet", extra={"job_id": job_id, "problem": failure.problem_type})
        self._pause(job_id, error)

    def _finish(self, fresh: Loaded, now: Now) -> None:
        """Somebody else has ended a job: whoever took part is told."""
        job_id = fresh.run.job_id
        if job_id not in self._live:
            return
        plan = self._plan(now)
        self._live[job_id].run = _merged(fresh.run, self._live[job_id].run)
        self._step(job_id, Ended(fresh.run.state), plan)
        self._keep(plan)

    # Events.

    def _refresh(self, now: Now, woken: dict[str, None]) -> None:
        if self._refreshed_s is not None and now.steady_s - self._refreshed_s < self._every_s:
            return
        unfinished = self._loader.unfinished()
        self._refreshed_s = now.steady_s
        known = set(unfinished)
        woken.update(dict.fromkeys(job_id for job_id in unfinished if job_id not in self._live))
        woken.update(dict.fromkeys(job_id for job_id in self._live if job_id not in known))

    @property
    def _every_s(self) -> float:
        return max(0.05, min(REFRESH_S, self._patience.ask_again_s))

    def _party_news(self) -> PartiesChanged | None:
        version = self._parties.version
        if version == self._known_parties[0]:
            return None
        parties = parties_of(self._parties.all())
        is_news = parties != self._known_parties[1]
        self._known_parties = (version, parties)
        return PartiesChanged(parties) if is_news else None

    def _reload(self, woken: Iterable[str], now: Now) -> list[tuple[str, Event]]:
        """Woken jobs as the journal has them; a pause that a failure has earned is not shortened."""
        ready = []
        for job_id in woken:
            live = self._live.get(job_id)
            if live is not None and now.steady_s < live.not_before_s:
                self._deferred.add(job_id)
                continue
            self._deferred.discard(job_id)
            ready.append(job_id)
        found = self._loader.load(ready, self._known_parties[1])
        events: list[tuple[str, Event]] = []
        for job_id, fresh in found.items():
            live = self._live.get(job_id)
            if fresh.run.state not in UNFINISHED:
                if live is not None:
                    self._finish(fresh, now)
                continue
            if live is None:
                self._live[job_id] = _Live(fresh, fresh.run)
            else:
                live.loaded, live.run = fresh, _merged(fresh.run, live.run)
            self._note_rounds(fresh.run)
            events.append((job_id, Tick(self._mail(now))))
        return events

    def _due(self, now: Now) -> list[str]:
        """Jobs whose time has come."""
        found = []
        while self._heap and self._heap[0][0] <= now.steady_s:
            due_s, job_id = heapq.heappop(self._heap)
            live = self._live.get(job_id)
            if live is not None and live.due_s == due_s:
                found.append(job_id)
        return found

    def _mail(self, now: Now) -> Mapping[str, int]:
        """How much mail waits with whom, as counted within the last half second."""
        if now.steady_s - self._counted[0] >= _COUNTED_S:
            try:
                counted = self._mailbox.all_pending(list(self._known_parties[1]))
            except LabelerError:
                counted = {}
            self._counted = (now.steady_s, counted)
        return self._counted[1]

    def _load_for(self, deliveries: list[Delivery]) -> None:
        """Jobs that messages are about and that are not in memory: finished ones, or none at all."""
        missing: dict[str, None] = {}
        for delivery in deliveries:
            for message in delivery.messages:
                job_id = message.job_id
                digest = message.message.header.round_digest
                if not job_id and digest not in self._of_round and digest not in self._over:
                    try:
                        job_id = self._loader.job_of_round(digest)
                    except NotFound:
                        continue
                if job_id and job_id not in self._live:
                    missing[job_id] = None
        for job_id, found in self._loader.load(list(missing), self._known_parties[1]).items():
            self._live[job_id] = _Live(found, found.run)
            self._guests.append(job_id)
            self._note_rounds(found.run)

    def _see_off(self) -> None:
        """Jobs that were read for a message stay only where they are not finished."""
        guests, self._guests = self._guests, []
        for job_id in guests:
            live = self._live.get(job_id)
            if live is not None and live.run.state not in UNFINISHED:
                self._forget(job_id, live.run)
            elif live is not None:
                self.wake(job_id)

    def _note_rounds(self, run: JobRun) -> None:
        for one in run.rounds:
            if one.round_digest:
                self._of_round[one.round_digest] = run.job_id

    def _in_turns(self, events: list[tuple[str, Event]]) -> list[tuple[str, Event]]:
        """The events with requesters taking turns, each requester's in order."""
        lanes: OrderedDict[str, list[tuple[str, Event]]] = OrderedDict()
        for job_id, event in events:
            live = self._live.get(job_id)
            if live is not None:
                lanes.setdefault(live.loaded.record.created_by, []).append((job_id, event))
        ordered: list[tuple[str, Event]] = []
        place = 0
        while len(ordered) < sum(map(len, lanes.values())):
            ordered += [lane[place] for lane in lanes.values() if place < len(lane)]
            place += 1
        return ordered

    def _take(self, delivery: Delivery, plan: _Plan) -> int | LabelerError:
        """How many messages are taken, or why the first that is not is refused."""
        for incoming in delivery.messages:
            try:
                self._take_one(incoming, plan)
            except LabelerError as error:
                return error
            except Exception as error:
                log.exception("a message met a defect", extra={"message_id": incoming.message.message_id})
                return _unavailable(error)
        return len(delivery.messages) if delivery.error is None else delivery.error

    def _take_one(self, incoming: Incoming, plan: _Plan) -> None:
        header = incoming.message.header
        job_id = self._job_of(incoming)
        if job_id is None:
            raise WrongDigest(
                "the answer is about a job that this coordinator never proposed"
                if incoming.job_id
                else "the message belongs to a round that this coordinator never opened"
            )
        party = self._known_parties[1].get(header.sender)
        if party is None or party.verify_key != incoming.verify_key:
            raise Unavailable(f"the keys of {header.sender!r} were changed at this moment; send again")
        # Tried on a draft, so that nothing is kept of a message that is not taken.
        draft = _Plan(plan.now, line=plan.line, lanes=plan.lanes)
        draft.runs[job_id] = self._run_of(job_id, plan)
        refusal = self._step(job_id, incoming.event, draft, incoming)
        if refusal is not None:
            raise refusal
        self._check_new(incoming, plan)
        _join(plan, draft)
        key = (header.sender, incoming.verify_key)
        if header.recipient == COORDINATOR:
            plan.taken[key] = header.sequence
        else:
            plan.relayed[header.sender, header.recipient] = header.sequence

    def _check_new(self, incoming: Incoming, plan: _Plan) -> None:
        header = incoming.message.header
        if header.recipient == COORDINATOR:
            key = (header.sender, incoming.verify_key)
            if key not in self._last:
                self._last[key] = self._sequences.last(*key)
            last = plan.taken.get(key, self._last[key])
        else:
            way = (header.sender, header.recipient)
            last = plan.relayed.get(way, self._relayed.get(way, 0))
        if header.sequence <= last:
            raise Replayed(
                f"message {header.sequence} of {header.sender!r} for {header.recipient!r} is not new: message {last} "
                "was taken. If it was sent again because the answer was lost, it has arrived"
            )

    def _job_of(self, incoming: Incoming) -> str | None:
        digest = incoming.message.header.round_digest
        job_id = incoming.job_id or self._of_round.get(digest, "")
        if not job_id and digest in self._over:
            raise WrongDigest("the round is over, or was not begun; nothing more is taken for it")
        return job_id if job_id in self._live else None

    # Steps.

    def _plan(self, now: Now) -> _Plan:
        return _Plan(now, line=self._line, lanes=self._lanes)

    def _run_of(self, job_id: str, plan: _Plan) -> JobRun:
        return plan.runs[job_id] if job_id in plan.runs else self._live[job_id].run

    def _step_safely(self, job_id: str, event: Event, plan: _Plan) -> None:
        """A step that no message waits for: a job that meets a defect must not stop the others."""
        live = self._live.get(job_id)
        if live is None:
            return
        draft = _Plan(plan.now, line=plan.line, lanes=plan.lanes)
        draft.runs[job_id] = self._run_of(job_id, plan)
        try:
            self._step(job_id, event, draft)
        except Exception as error:
            plan.retries[job_id] = error
            return
        _join(plan, draft)

    def _admit(self, plan: _Plan) -> None:
        """Jobs whose turn it is, and rounds whose turn to have their winners found has come."""
        while True:
            plan.lanes, admitted = admit(plan.lanes, plan.now.steady_s)
            follow, plan.follow = plan.follow, []
            if not admitted and not follow:
                return
            for job_id in admitted:
                self._step_safely(job_id, Admitted(), plan)
            for round_digest in follow:
                job_id = self._of_round.get(round_digest, "")
                if job_id in self._live:
                    self._step_safely(job_id, Tick(self._mail(plan.now)), plan)

    def _step(self, job_id: str, event: Event, plan: _Plan, incoming: Incoming | None = None) -> LabelerError | None:
        """One event, and the events that its computations come back as; why a message is refused."""
        waiting: list[Event] = [event]
        while waiting:
            run, effects = step(self._run_of(job_id, plan), waiting.pop(0), plan.now)
            plan.runs[job_id] = run
            for effect in effects:
                if isinstance(effect, Refuse):
                    return effect.error
                if isinstance(effect, STORES):
                    plan.stores.setdefault(job_id, []).append(effect)
                elif isinstance(effect, Relay) and incoming is not None:
                    columns = _columns(run.task)
                    one = run.round_with(incoming.message.header.round_digest)
                    self.relays.check(incoming.message, one.num_queries if one is not None else 0, columns)
                    plan.relays.append(incoming)
                elif isinstance(effect, SENDS):
                    plan.sends.append((job_id, effect))
                else:
                    waiting += self._compute(job_id, effect, plan)
        return None

    def _compute(self, job_id: str, effect: Effect, plan: _Plan) -> list[Event]:
        """What comes back of an effect that is neither stored nor sent."""
        live, run = self._live[job_id], plan.runs[job_id]
        match effect:
            case WaitUntil():
                plan.looks[job_id] = effect.steady_s
            case Enter():
                if job_id in plan.lanes.held:
                    return [Admitted()]  # the step that took its place could not be kept; the place could
                plan.lanes = enter(plan.lanes, live.loaded.record.created_by, job_id)
            case Prepare():
                return self._prepare(live, run)
            case MakeBodies():
                try:
                    self._sender.make(run, effect.number)
                except TryAgain:
                    raise
                except LabelerError as error:
                    return [Failed(error)]
                return [BodiesMade(effect.number)]
            case PutTogether():
                return [self._put_together(run, effect)]
            case AskForTurn():
                plan.line, is_granted = winner_line.ask_for_turn(
                    plan.line,
                    effect.round_digest,
                    plan.now.steady_s,
                    num_answers=effect.num_answers,
                    limit_s=effect.limit_s,
                    ask_again_s=self._patience.ask_again_s,
                )
                return [TurnGranted(effect.round_digest)] if is_granted else []
            case TurnFailed():
                plan.line, following = winner_line.turn_failed(plan.line, effect.round_digest, plan.now.steady_s)
                plan.follow += [] if following is None else [following]
            case Leave():
                plan.line, following = winner_line.leave_line(plan.line, effect.round_digests)
                plan.follow += [] if following is None else [following]
                if effect.has_ended:
                    plan.lanes = leave(plan.lanes, job_id)
        return []

    def _prepare(self, live: _Live, run: JobRun) -> list[Event]:
        try:
            features = self._questions.look(live.loaded.record, run.task)
            if features is None:
                return []
            if len(features) != run.num_queries:
                raise _wrong_count(len(features), run)
            batches = []
            for one in run.rounds:
                batch = batch_of(features, run, one)
                batches.append((one.number, batch.digest, round_of(run.task, batch).digest))
        except TryAgain:
            raise
        except LabelerError as error:
            return [Failed(error)]
        return [QuestionsPrepared(tuple(batches))]

    def _put_together(self, run: JobRun, effect: PutTogether) -> Event:
        try:
            if run.task.release == "winner":
                of_round = run.round_value(run.rounds[effect.number])
                release = agree_on_winners([winner_from_bytes(one) for one in effect.answers], of_round, run.task)
            else:
                release = open_histogram([aggregate_from_bytes(one) for one in effect.answers], run.task)
        except LabelerError as error:
            return Failed(error)
        fault_point("coordinator.opened")
        return Opened(effect.number, release)

    # What a turn has come to.

    def _commit(self, plan: _Plan) -> None:
        """Everything of a turn that is stored, in one transaction."""
        if not plan.is_stored:
            return
        with self._database.write() as connection:
            for errand in plan.errands:
                try:
                    with self._database.attempt(connection):
                        errand.write(connection)
                except LabelerError as error:
                    plan.refused[errand] = error
            for job_id, stores in plan.stores.items():
                self._storer.store(self._live[job_id].loaded, stores, connection)
            for (sender, verify_key), sequence in plan.taken.items():
                self._sequences.taken(sender, sequence, verify_key=verify_key, connection=connection)
        for kind, name in (
            (FixContributors, "coordinator.agreed"),
            (Post, "coordinator.posted"),
            (StoreRelease, "coordinator.released"),
        ):
            if any(isinstance(one, kind) for stores in plan.stores.values() for one in stores):
                fault_point(name)

    def _keep(self, plan: _Plan) -> None:
        """What is durable is true in memory too; then everything leaves, and who waits is told."""
        self._line, self._lanes = plan.line, plan.lanes
        self._last |= plan.taken
        for errand in plan.errands:
            errand.settle(plan.refused.get(errand))
        for job_id, run in plan.runs.items():
            live = self._live[job_id]
            if self.observe is not None:
                self.observe(live.run, run)
            live.run = run
            if job_id not in plan.retries and live.pause_s and job_id in plan.looks:
                live.pause_s = live.not_before_s = 0.0
            self._note_rounds(run)
            if run.is_storing and job_id in plan.stores:
                self._stored.append(job_id)
        failure = self._send(plan)
        relayed = {id(incoming) for incoming in plan.relays}
        for delivery, outcome in plan.answers:
            is_lost = failure is not None and any(id(incoming) in relayed for incoming in delivery.messages)
            delivery.done(_unavailable(failure) if failure is not None and is_lost else outcome)
        if failure is None:
            self._relayed |= plan.relayed
            for incoming in plan.relays:
                self.relays.sent(incoming.message)
        for job_id, error in plan.retries.items():
            self._pause(job_id, error)
        for job_id, look_s in plan.looks.items():
            live = self._live[job_id]
            if job_id not in plan.retries and live.due_s != look_s:
                live.due_s = look_s
                heapq.heappush(self._heap, (look_s, job_id))
        for job_id, run in plan.runs.items():
            if run.state not in UNFINISHED:
                self._forget(job_id, run)
        for job_id, error in plan.broken.items():
            self._again(job_id, error, plan.now)

    def _send(self, plan: _Plan) -> LabelerError | None:
        """Everything that leaves, in one pipeline; why it could not, where it could not: it is asked for again."""
        letters: list[Letter] = [letter_of(incoming.message) for incoming in plan.relays]
        tell: dict[str, None] = {}
        head = EMPTY
        if any(isinstance(send, AskForSums) for _, send in plan.sends):
            head = self._ledger.known_head()
        for job_id, send in plan.sends:
            if isinstance(send, Tell):
                tell[job_id] = None
                continue
            try:
                letters += self._sender.letters(plan.runs[job_id], send, head)
            except LabelerError as error:
                # Of this job alone; the others' messages leave.
                plan.broken[job_id] = error
        try:
            if letters or tell:
                self._mailbox.send_all(letters, tell=tell)
        except LabelerError as error:
            log.warning("messages could not be sent", extra={"problem": error.problem_type, "letters": len(letters)})
            return error
        for kind, name in (
            (SendProposals, "coordinator.proposed"),
            (SendAsks, "coordinator.asked"),
            (AskForSums, "coordinator.sum-asked"),
        ):
            if any(isinstance(send, kind) for _, send in plan.sends):
                fault_point(name)
        for job_id in {one for one, stores in plan.stores.items() if any(isinstance(s, StoreRelease) for s in stores)}:
            log.info("round opened", extra={"job_id": job_id})
        return None

    def _pause(self, job_id: str, error: Exception) -> None:
        """A job that could not go on waits, ever longer, and a wake does not shorten that."""
        live = self._live.get(job_id)
        if live is None:
            return
        if isinstance(error, LabelerError):
            log.warning("job waits", extra={"job_id": job_id, "problem": error.problem_type})
        else:
            log.error("job met a defect", extra={"job_id": job_id}, exc_info=error)
        live.pause_s = min(2 * live.pause_s, LONGEST_PAUSE_S) if live.pause_s else _FIRST_PAUSE_S
        live.not_before_s = live.due_s = self._steady() + live.pause_s
        heapq.heappush(self._heap, (live.due_s, job_id))

    def _forget(self, job_id: str, run: JobRun) -> None:
        digests = [one.round_digest for one in run.rounds if one.round_digest]
        self._sender.forget(digests)
        for digest in digests:
            self._of_round.pop(digest, None)
            if any(one.state != "waiting" for one in run.rounds):
                self._over[digest] = None
        while len(self._over) > _OVER:
            self._over.popitem(last=False)
        self._live.pop(job_id, None)
        self._deferred.discard(job_id)
        self._stored = [one for one in self._stored if one != job_id]

    def _next_s(self) -> float:
        """When something is to be done by itself."""
        while self._heap:
            due_s, job_id = self._heap[0]
            live = self._live.get(job_id)
            if live is not None and live.due_s == due_s:
                break
            heapq.heappop(self._heap)
        times = [self._heap[0][0]] if self._heap else []
        times.append(self._steady() if self._refreshed_s is None else self._refreshed_s + self._every_s)
        place_s = next_place_s(self._lanes)
        return min([*times, place_s] if place_s is not None else times)

    def _now(self) -> Now:
        return Now(self._clock().timestamp(), self._steady())


def _join(plan: _Plan, draft: _Plan) -> None:
    """What a step has come to becomes part of its turn."""
    plan.runs |= draft.runs
    for job_id, stores in draft.stores.items():
        plan.stores.setdefault(job_id, []).extend(stores)
    plan.sends += draft.sends
    plan.relays += draft.relays
    plan.looks |= draft.looks
    plan.line, plan.lanes = draft.line, draft.lanes
    plan.follow += draft.follow


def _merged(fresh: JobRun, known: JobRun) -> JobRun:
    """A job as the journal has it now, with what only memory holds of it."""
    before = {one.number: one for one in known.rounds}
    rounds = tuple(
        replace(
            one,
            is_made=before[one.number].is_made,
            decided_at_s=before[one.number].decided_at_s,
            gone_at_s=before[one.number].gone_at_s,
        )
        if one.number in before and before[one.number].state == one.state
        else one
        for one in fresh.rounds
    )
    is_same = known.state == fresh.state
    return replace(
        fresh,
        rounds=rounds,
        is_admitted=known.is_admitted,
        decided_at_s=known.decided_at_s if is_same else None,
        asked_at_s=known.asked_at_s if is_same else {},
        mail=known.mail,
    )


def _columns(task: Task) -> int:
    """How many numbers a share has for each query."""
    terms = task.winner_terms
    # Where rows are checked, ballots with a column for votes not cast travel beside the noise.
    has_rows = terms is not None and terms.row_total is not None
    return 2 * task.num_classes + 1 if has_rows else task.num_classes


def _wrong_count(found: int, run: JobRun) -> BadData:
    advice = (
        f"make a task with max_queries = {found}, one more than a feature has numbers"
        if run.task.traits.asks_for_a_model
        else "submit again"
    )
    return BadData(f"{found} questions were prepared, {run.num_queries} were paid for; {advice}")


def _stopping() -> LabelerError:
    return Unavailable("the coordinator is stopping; send again in a moment")


def _unavailable(error: Exception) -> LabelerError:
    if isinstance(error, TryAgain):
        return error
    return Unavailable("the journal cannot take it now; send again")


def _problem(error: Exception) -> str:
    return error.problem_type if isinstance(error, LabelerError) else type(error).__name__
