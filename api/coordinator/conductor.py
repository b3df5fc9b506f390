"""The conductor: moves every unfinished job towards its end, one durable step at a time.

    queued ----> collecting -------------------------------> tallying ------------------------> completed
      |            |   rounds, one after the other:             |
      |            |   waiting > asked > agreed > posted > opened
      |            |                       |        |        |
      |            |              contributors   charge   release
      |            |              fixed for ever posted   stored, once
      v            v
    failed, refused, cancelled, expired

It is level-triggered: it keeps no memory that matters. At every turn it reads from SQL what is there and asks for
what is missing: the embedder for questions, agents for shares, talliers for sums. Whoever is asked twice answers
twice the same, so a crash of anybody, or a Redis that forgot everything, costs time and nothing else.

Whose shares a round takes, and the key each is signed with, is stored before anybody is asked: every tallier is told
the same each time. An agent whose keys are changed while a round runs takes part from the next round on; its new key
brings nothing into this one, so whoever can change keys here cannot put a share of their own into a round that runs.

Where a task releases the winner only, talliers answer with what the three of them opened together, and no sum comes
here: three equal answers are the release. They compute one round at a time (api.coordinator.winner_turns).

Whom a job asks is settled while its questions are prepared (api.coordinator.proposals): agents say whether they will,
and only those that do are asked and charged. A job that loses its quorum before its first round is refused, at no
charge.

Three rules hold whatever dies when. The contributors of a round are fixed, durably, before the charge is posted; the
charge is posted before any tallier is asked for its sum; a release is stored once and never replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from api.coordinator.holdings import check_still_held, held_by_all
from api.coordinator.labels import release_to_bytes
from api.coordinator.pace import Pace
from api.coordinator.post_office import PostOffice
from api.coordinator.preparation import Preparation
from api.coordinator.proposals import Proposals
from api.coordinator.questions import batch_of, read_failure, read_questions
from api.coordinator.schedule import Schedule
from api.coordinator.settled import tell_settled
from api.coordinator.settlement import UNFINISHED, divide, reservation_id, settle_rounds
from api.coordinator.winner_turns import WinnerTurns
from feature_store.faults import fault_point
from feature_store.journal.aggregates import AggregateStore
from feature_store.journal.database import Connection, Database
from feature_store.journal.jobs import JobRecord, JobState, JobStore, RoundRecord
from feature_store.journal.ledger import Ledger
from feature_store.journal.tasks import TaskRecord, TaskStore
from feature_store.mailbox import Mailbox
from labeler.bodies import Ask, OpenRound, SumRequest, TallierKey
from labeler.errors import (
    BadData,
    LabelerError,
    NotFound,
    ProtocolViolation,
    QuorumNotReached,
    TooLarge,
    TryAgain,
    WrongDigest,
)
from labeler.messages import MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, SIGNATURE_BYTES
from labeler.release import agree_on_winners, open_histogram
from labeler.share_bodies import aggregate_from_bytes, winner_from_bytes
from labeler.tally import Round, round_of
from labeler.winner import winner_time_limit_s

log = logging.getLogger("labeler.conductor")

SUM_GRACE_S = 3600.0
"""How long talliers keep the shares of a round beyond its job's deadline, so that what was paid for can be opened."""

REKEYED = "its keys were changed while this batch was being collected; it takes part again from the next one on"

TURN_GRACE_S = 30.0
"""How much longer than talliers may compute a round waits for its winners, before it is another round's turn."""

_LOOK_S = 1.0
_LEAST_LOOK_S = 0.05


@dataclass(frozen=True)
class Timing:
    """How long the conductor waits.

    Attributes:
        patience_s: how long a round that has its quorum, or cannot reach it, waits for the agents still missing.
        ask_again_s: after how long somebody who has not answered is asked again; longer while their mail piles up.
    """

    patience_s: float
    ask_again_s: float


class Conductor:
    """See the module. One per service; `run` is its thread."""

    def __init__(
        self,
        *,
        home: Path,
        database: Database,
        ledger: Ledger,
        tasks: TaskStore,
        jobs: JobStore,
        aggregates: AggregateStore,
        post_office: PostOffice,
        mailbox: Mailbox,
        timing: Timing,
        clock: Callable[[], datetime],
        turns: WinnerTurns | None = None,
        preparation: Preparation | None = None,
        proposals: Proposals | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._turns = turns or WinnerTurns()
        self._database = database
        self._ledger = ledger
        self._tasks = tasks
        self._jobs = jobs
        self._aggregates = aggregates
        self._post_office = post_office
        self._mailbox = mailbox
        self._timing = timing
        self._clock = clock
        self._preparation = preparation or Preparation(
            home, mailbox, is_wanted=lambda job_id: self._jobs.get(job_id).state == "queued", on_end=self.wake
        )
        self._schedule = Schedule(every_s=max(_LEAST_LOOK_S, min(_LOOK_S, timing.ask_again_s)), clock=now)
        self._pace = Pace(mailbox, ask_again_s=timing.ask_again_s, now=now)
        self._proposals = proposals or Proposals(
            jobs=jobs,
            post_office=post_office,
            mailbox=mailbox,
            patience_s=timing.patience_s,
            ask_again_s=timing.ask_again_s,
            clock=clock,
            now=now,
        )
        # Conveniences, all of which may be lost: when a quorum was first seen or lost.
        self._quorum_since: dict[str, float] = {}
        self._rekeyed_since: dict[tuple[str, str], float] = {}
        self._asks: dict[str, tuple[tuple[TallierKey, ...], bytes]] = {}

    def wake(self, job_id: str) -> None:
        """Look at a job soon: something about it has changed."""
        self._schedule.wake(job_id)

    def ring(self) -> None:
        """Let `run` see at once that it is to stop."""
        self._schedule.ring()

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop."""
        while not stop.is_set():
            self.tick(stop)
            if not stop.is_set():
                self._schedule.wait()

    def tick(self, stop: threading.Event | None = None) -> None:
        """Look once at every job that is due, whoever was woken meanwhile (api.coordinator.schedule)."""
        if self._schedule.wants_refresh:
            try:
                self._schedule.refresh(job.job_id for job in self._jobs.unfinished())
            except LabelerError as error:
                log.warning("journal cannot be read now", extra={"problem": error.problem_type})
                self._schedule.postpone_refresh()
        for job_id in self._schedule.due():
            if stop is None or not stop.is_set():
                self._turn(job_id)

    def _turn(self, job_id: str) -> None:
        self._schedule.looking(job_id)
        try:
            self.advance(job_id)
            self._schedule.went_on(job_id)
        except QuorumNotReached as error:
            # Refusals are final: waiting for the deadline would only keep the requester from knowing.
            log.warning("quorum cannot be reached", extra={"job_id": job_id})
            self._give_up(job_id, error)
        except TryAgain as error:
            log.warning("job waits", extra={"job_id": job_id, "problem": error.problem_type})
            self._schedule.failed(job_id)
        except LabelerError as error:
            log.warning("job fails", extra={"job_id": job_id, "problem": error.problem_type})
            self._give_up(job_id, error)
        except Exception:
            # One job that meets a defect must not stop the others; it is tried again, ever more slowly.
            log.exception("job met a defect", extra={"job_id": job_id})
            self._schedule.failed(job_id)

    def advance(self, job_id: str) -> None:
        """Take every step of a job that can be taken now.

        Raises:
            LabelerError: the job cannot go on; TryAgain where it can later.
        """
        while True:
            job = self._jobs.get(job_id)
            rounds = self._jobs.rounds(job_id)
            if job.state not in UNFINISHED:
                if job.state == "cancelled":
                    self._tell_settled(job)
                self._proposals.withdraw(job, rounds, self._tasks.get(job.task_digest))
                self._forget(job)
                return
            current = next((one for one in rounds if one.state != "opened"), None)
            if current is None:
                self._change(job, "completed")
                continue
            if self._clock() > job.expires_at and current.state != "posted":
                self._expire(job)
                continue
            if not (self._prepare(job) if job.state == "queued" else self._step(job, current)):
                return

    def _prepare(self, job: JobRecord) -> bool:
        """Questions, and agents that are willing; True once both are there and the job goes on."""
        task, rounds = self._tasks.get(job.task_digest), self._jobs.rounds(job.job_id)
        is_ready = self._has_questions(job, task, rounds)
        asked = self._proposals.pursue(job, rounds, task)
        if not is_ready or asked is None:
            return False
        with self._database.write() as connection:
            divide(job, rounds, task, asked, ledger=self._ledger, connection=connection)
            self._jobs.willingness.fix_asked(job.job_id, asked, connection=connection)
            self._jobs.change(job.job_id, "collecting", expected=["queued"], connection=connection)
        self._publish(job.job_id)
        return True

    def _has_questions(self, job: JobRecord, task: TaskRecord, rounds: Sequence[RoundRecord]) -> bool:
        """Whether the rounds are tied to their questions; asks whoever makes them (api.coordinator.preparation)."""
        if all(one.round_digest for one in rounds):
            return True
        folder = self._home / "jobs" / job.job_id
        if (folder / "failed.json").exists():
            raise read_failure(folder / "failed.json")
        path = folder / "questions.safetensors"
        if not path.exists() and self._pace.is_due(("prepare", job.job_id, self._preparation.step(job))):
            self._preparation.ask(job, task.task)
        if not path.exists():
            return False
        features = read_questions(path)
        if len(features) != job.num_queries:
            advice = (
                f"make a task with max_queries = {len(features)}, one more than a feature has numbers"
                if task.task.traits.asks_for_a_model
                else "submit again"
            )
            raise BadData(f"{len(features)} questions were prepared, {job.num_queries} were paid for; {advice}")
        digests = []
        for one in rounds:
            batch = batch_of(features, job, one)
            digests.append((one.number, batch.digest, round_of(task.task, batch).digest))
        self._jobs.set_batches(job.job_id, digests)
        self._publish(job.job_id)
        return True

    def _agents(self, job_id: str, task: TaskRecord) -> tuple[str, ...]:
        """Whom a job asks: those that were willing; in a job of an earlier version every agent of its task."""
        return self._jobs.willingness.asked(job_id) or task.participants

    def _step(self, job: JobRecord, current: RoundRecord) -> bool:
        task = self._tasks.get(job.task_digest)
        if current.state == "waiting":
            self._check_can_be_asked(job, current, task)
            # Durable before the first question leaves: from here on nobody can say that nothing left.
            with self._database.write() as connection:
                self._fix_participants(current, task, connection)
                self._jobs.set_asked(job.job_id, current.number, connection=connection)
            self._publish(job.job_id)
            return True
        if current.state == "asked" and not current.participants:
            # Asked by a version that did not store them.
            self._fix_participants(current, task, None)
            return True
        if current.state == "asked":
            return self._collect(job, current, task)
        if current.state == "agreed":
            self._post(job, current)
            return True
        return self._sum(job, current, task)

    def _check_can_be_asked(self, job: JobRecord, current: RoundRecord, task: TaskRecord) -> None:
        """Make what will be sent before it is charged for: a batch that cannot be asked costs nothing.

        Raises:
            TooLarge, BadData, WrongDigest: it cannot be asked.
            Unavailable: a tallier is not enrolled yet.
        """
        opening = OpenRound(
            round=_round(task, current),
            tallier=0,
            participants=self._post_office.verify_keys(self._agents(job.job_id, task)),
            expires_at=job.expires_at.timestamp() + SUM_GRACE_S,
        )
        largest = max(len(self._ask_body(job, current, task)), len(opening.encode()))
        if largest > MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - 2 * SIGNATURE_BYTES:
            raise TooLarge(
                f"a batch of {current.num_queries} queries makes a message of {largest} bytes, and at most "
                f"{MAX_MESSAGE_BYTES} are sent; ask fewer queries at once, or use a backbone with shorter features"
            )

    def _fix_participants(self, current: RoundRecord, task: TaskRecord, connection: Connection | None) -> None:
        agents = self._agents(current.job_id, task)
        keys = self._post_office.verify_keys(agents)
        if len(keys) < task.task.quorum:
            raise QuorumNotReached(
                f"{len(keys)} of {len(agents)} agents that were willing are enrolled with keys in force, so the "
                f"quorum of {task.task.quorum} cannot be reached; nobody was asked in this batch"
            )
        self._jobs.fix_participants(current.job_id, current.number, keys, connection=connection)

    def _collect(self, job: JobRecord, current: RoundRecord, task: TaskRecord) -> bool:
        talliers = self._post_office.talliers(task.task.talliers)
        answered = held_by_all(current, [tallier.party_id for tallier in talliers])
        refused = current.final_refusals - answered
        gone = self._rekeyed(current, task) - answered - refused
        agents = self._agents(job.job_id, task)
        missing = [agent for agent in agents if agent not in answered | refused | gone]
        if len(answered) >= task.task.quorum:
            since = self._quorum_since.setdefault(current.round_digest, time.monotonic())
            if not missing or time.monotonic() - since >= self._timing.patience_s:
                self._jobs.fix_contributors(job.job_id, current.number, sorted(answered))
                self._change(job, "tallying")
                fault_point("coordinator.agreed")
                return True
        elif len(answered) + len(missing) < task.task.quorum:
            # Lost already, but other refusals still count: where all refuse, nothing left, and nothing is charged.
            since = self._quorum_since.setdefault(current.round_digest, time.monotonic())
            if not missing or time.monotonic() - since >= self._timing.patience_s:
                raise QuorumNotReached(
                    f"{len(refused | gone)} of {len(agents)} agents refused or had their keys changed "
                    f"meanwhile, so the quorum of {task.task.quorum} cannot be reached; nothing was opened. Their "
                    "reasons stand beside the round"
                )
        self._ask(job, current, task, missing)
        return False

    def _rekeyed(self, current: RoundRecord, task: TaskRecord) -> set[str]:
        """Agents that cannot answer in this round, because the key it knows of them is not theirs any more.

        They are given up once every tallier has reported and a moment has passed, in which shares that were signed with
        the old key may still arrive. Only said to people, never a refusal of theirs: nobody knows what they have sent.
        """
        agents = self._agents(current.job_id, task)
        now = self._post_office.verify_keys(agents)
        changed = [agent for agent in agents if now.get(agent) != current.participants.get(agent)]
        if len(current.holdings) < task.task.talliers:
            return set()
        gone = set()
        for agent in changed:
            since = self._rekeyed_since.setdefault((current.round_digest, agent), time.monotonic())
            if time.monotonic() - since >= self._timing.patience_s:
                gone.add(agent)
                if agent not in current.refusals:
                    self._jobs.report_refusal(current.job_id, current.number, agent, REKEYED, False)
        return gone

    def _ask(self, job: JobRecord, current: RoundRecord, task: TaskRecord, agents: Collection[str]) -> None:
        """Open the round at every tallier that has not reported, then ask every agent that is missing."""
        talliers = self._post_office.talliers(task.task.talliers)
        expires_at = job.expires_at.timestamp()
        unaware = [one for one in talliers if one.party_id not in current.holdings]
        for tallier in unaware:
            if self._pace.is_due((current.round_digest, tallier.party_id), through=[tallier.party_id]):
                opening = OpenRound(
                    round=_round(task, current),
                    tallier=tallier.tallier if tallier.tallier is not None else -1,
                    participants=current.participants,
                    expires_at=expires_at + SUM_GRACE_S,
                )
                self._post_office.send("open-round", tallier.party_id, current, task, opening.encode())
        asked = False
        for agent in agents:
            # A share that lies in a tallier's mail is on its way, and its agent need not be asked for it again.
            if self._pace.is_due((current.round_digest, agent), through=[agent, *(one.party_id for one in talliers)]):
                self._post_office.send("ask", agent, current, task, self._ask_body(job, current, task))
                asked = True
        if asked:
            fault_point("coordinator.asked")

    def _ask_body(self, job: JobRecord, current: RoundRecord, task: TaskRecord) -> bytes:
        talliers = self._post_office.tallier_keys(task.task.talliers)
        known, body = self._asks.get(current.round_digest, ((), b""))
        if known != talliers:
            features = read_questions(self._home / "jobs" / job.job_id / "questions.safetensors")
            batch = batch_of(features, job, current)
            if batch.digest != current.batch_digest:
                raise WrongDigest("the prepared questions are not those the round was made of; submit the job again")
            ask = Ask(
                task=task.task,
                batch=batch,
                talliers=talliers,
                expires_at=job.expires_at.timestamp(),
            )
            body = ask.encode()
            self._asks[current.round_digest] = (talliers, body)
        return body

    def _post(self, job: JobRecord, current: RoundRecord) -> None:
        detail = {"job": job.job_id, "queries": current.num_queries, "contributors": list(current.contributors)}
        with self._database.write() as connection:
            seq = self._ledger.post(reservation_id(job.job_id, current.number), detail=detail, connection=connection)
            self._jobs.set_posted(job.job_id, current.number, seq, connection=connection)
        fault_point("coordinator.posted")
        self._publish(job.job_id)

    def _sum(self, job: JobRecord, current: RoundRecord, task: TaskRecord) -> bool:
        stored = self._aggregates.of(current.round_digest)
        talliers = [one.party_id for one in self._post_office.talliers(task.task.talliers)]
        missing = [one for one in talliers if one not in stored]
        if missing:
            check_still_held(current, missing)
            self._ask_for_sums(current, task, self._whom_to_ask(current, task, talliers, missing))
            return False
        answers = [stored[one] for one in talliers]
        if task.task.release == "winner":
            release = agree_on_winners([winner_from_bytes(one) for one in answers], _round(task, current), task.task)
        else:
            release = open_histogram([aggregate_from_bytes(one) for one in answers], task.task)
        if release.is_seeded:
            raise ProtocolViolation(
                "an agent's noise came from a known seed; such a round protects nobody, and is void"
            )
        if release.contributors != frozenset(current.contributors):
            raise ProtocolViolation(
                "the talliers summed other agents than the charge was posted for; the round is void"
            )
        fault_point("coordinator.opened")
        is_last = all(one.state == "opened" for one in self._jobs.rounds(job.job_id) if one.number != current.number)
        with self._database.write() as connection:
            self._jobs.store_release(job.job_id, current.number, release_to_bytes(release), connection=connection)
            following: JobState = "completed" if is_last else "collecting"
            self._jobs.change(job.job_id, following, expected=UNFINISHED, connection=connection)
        fault_point("coordinator.released")
        tell_settled([current], task, post_office=self._post_office)
        log.info("round opened", extra={"job_id": job.job_id, "round": current.number, "queries": current.num_queries})
        self._publish(job.job_id)
        self._end_turns({current.round_digest})
        return True

    def _whom_to_ask(
        self, current: RoundRecord, task: TaskRecord, talliers: Sequence[str], missing: Sequence[str]
    ) -> Sequence[str]:
        """Talliers to ask for their sum now; for winners all or nobody, since each needs the others.

        Raises:
            ProtocolViolation: a tallier has said that the winners of this round can never be found.
        """
        if task.task.release != "winner":
            due = [(one, (current.round_digest, "sum", one)) for one in missing]
            return [one for one, what in due if self._pace.is_due(what, through=[one])]
        for one in talliers:
            if one in current.final_refusals:
                raise ProtocolViolation(f"{one} says: {current.refusals[one]}")
        is_due = self._turns.should_ask(
            current.round_digest,
            job_id=current.job_id,
            num_answers=len(talliers) - len(missing),
            limit_s=winner_time_limit_s(current.num_queries, task.task.num_classes) + TURN_GRACE_S,
            ask_again_s=self._timing.ask_again_s,
        )
        return talliers if is_due else ()

    def _ask_for_sums(self, current: RoundRecord, task: TaskRecord, talliers: Sequence[str]) -> None:
        head = self._ledger.head()
        body = SumRequest(contributors=tuple(current.contributors), ledger_seq=head.seq, ledger_hash=head.hash).encode()
        for tallier in talliers:
            self._post_office.send("sum", tallier, current, task, body)
        if talliers:
            fault_point("coordinator.sum-asked")

    def _end_turns(self, round_digests: Collection[str]) -> None:
        following = self._turns.ended(round_digests)
        if following is not None:
            self.wake(following)

    def _expire(self, job: JobRecord) -> None:
        said = self._jobs.willingness.answers(job.job_id)
        later = [agent for agent, answer in said.items() if answer.answer == "later"] if job.state == "queued" else []
        error = QuorumNotReached(
            f"the deadline passed while {', '.join(sorted(later)[:5])} had not agreed to take part; nobody was asked, "
            "and nothing is charged. Submit the job again"
            if later
            else "the deadline passed before enough agents and talliers had answered; submit the job again"
        )
        self._end(job, "expired", error)

    def _give_up(self, job_id: str, error: LabelerError) -> None:
        try:
            job = self._jobs.get(job_id)
            if job.state in UNFINISHED:
                is_begun = any(one.state != "waiting" for one in self._jobs.rounds(job_id))
                is_refused = isinstance(error, QuorumNotReached) and not is_begun
                self._end(job, "refused" if is_refused else "failed", error)
        except NotFound:
            self._schedule.forget(job_id)
        except LabelerError as failure:
            log.warning("job could not be ended yet", extra={"job_id": job_id, "problem": failure.problem_type})
            self._schedule.failed(job_id)

    def _end(self, job: JobRecord, state: JobState, error: LabelerError) -> None:
        """End a job: what was asked stays charged, what was not is given back, in one transaction."""
        settle_rounds(
            job, state, error, database=self._database, ledger=self._ledger, jobs=self._jobs, tasks=self._tasks
        )
        self._end_turns({one.round_digest for one in self._jobs.rounds(job.job_id)})
        self._tell_settled(job)
        log.info("job ended", extra={"job_id": job.job_id, "state": state, "problem": error.problem_type})
        self._publish(job.job_id)

    def _tell_settled(self, job: JobRecord) -> None:
        """Of rounds that were opened it was said then."""
        rest = [one for one in self._jobs.rounds(job.job_id) if one.state != "opened"]
        tell_settled(rest, self._tasks.get(job.task_digest), post_office=self._post_office)

    def _change(self, job: JobRecord, state: JobState) -> None:
        if job.state != state:
            self._jobs.change(job.job_id, state, expected=UNFINISHED)
        self._publish(job.job_id)

    def _publish(self, job_id: str) -> None:
        try:
            self._mailbox.publish(job_id, {"changed": True})
        except TryAgain:
            # Watchers look into SQL by themselves every few seconds.
            log.debug("progress not published", extra={"job_id": job_id})

    def _forget(self, job: JobRecord) -> None:
        digests = {one.round_digest for one in self._jobs.rounds(job.job_id)}
        self._end_turns(digests)
        self._pace.forget({*digests, job.job_id})
        self._proposals.forget(job)
        for digest in digests:
            self._quorum_since.pop(digest, None)
            self._asks.pop(digest, None)
        self._rekeyed_since = {what: when for what, when in self._rekeyed_since.items() if what[0] not in digests}
        self._schedule.forget(job.job_id)


def _round(task: TaskRecord, current: RoundRecord) -> Round:
    of = task.task
    return Round(of.digest, current.batch_digest, current.num_queries, of.num_classes, of.quorum, of.winner_terms)
