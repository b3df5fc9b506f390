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

Three rules hold whatever dies when. The contributors of a round are fixed, durably, before the charge is posted; the
charge is posted before any tallier is asked for its sum; a release is stored once and never replaced.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from api.coordinator.labels import release_to_bytes
from api.coordinator.post_office import PostOffice
from api.problems import problem_of
from feature_store.durable import replace_file
from feature_store.faults import fault_point
from feature_store.journal.aggregates import AggregateStore
from feature_store.journal.database import Database
from feature_store.journal.jobs import JobRecord, JobState, JobStore, RoundRecord
from feature_store.journal.ledger import Ledger
from feature_store.journal.tasks import TaskRecord, TaskStore
from feature_store.mailbox import Mailbox
from labeler.batch import QueryBatch
from labeler.bodies import Ask, OpenRound, SumRequest, aggregate_from_bytes
from labeler.budget import NothingLeft
from labeler.errors import BadData, LabelerError, ProtocolViolation, QuorumNotReached, TryAgain, WrongDigest
from labeler.release import open_histogram
from labeler.tally import Round, round_of

log = logging.getLogger("labeler.conductor")

UNFINISHED: tuple[JobState, ...] = ("queued", "collecting", "tallying")
EMBED_QUEUE = "embed"
SUM_GRACE_S = 3600.0
"""How long talliers keep the shares of a round beyond its job's deadline, so that what was paid for can be opened."""

_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Timing:
    """How long the conductor waits.

    Attributes:
        patience_s: how long a round that has its quorum waits for the agents still missing.
        ask_again_s: after how long somebody who has not answered is asked again.
    """

    patience_s: float
    ask_again_s: float


def reservation_id(job_id: str, number: int) -> str:
    """The ledger's name for the charge of one round."""
    return f"{job_id}/{number}"


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
    ) -> None:
        self._home = home
        self._database = database
        self._ledger = ledger
        self._tasks = tasks
        self._jobs = jobs
        self._aggregates = aggregates
        self._post_office = post_office
        self._mailbox = mailbox
        self._timing = timing
        self._clock = clock
        self._wanted: set[str] = set()
        self._bell = threading.Condition()
        # Conveniences, all of which may be lost: when somebody was last asked, when a quorum was first seen.
        self._asked: dict[tuple[str, ...], float] = {}
        self._quorum_since: dict[str, float] = {}
        self._asks: dict[str, bytes] = {}
        self._pauses: dict[str, tuple[float, float]] = {}

    def wake(self, job_id: str) -> None:
        """Look at a job soon: something about it has changed."""
        with self._bell:
            self._wanted.add(job_id)
            self._bell.notify()

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop; `wake` or a tick starts a turn."""
        while not stop.is_set():
            with self._bell:
                if not self._wanted:
                    self._bell.wait(min(1.0, self._timing.ask_again_s))
                wanted, self._wanted = self._wanted, set()
            try:
                wanted = wanted or {job.job_id for job in self._jobs.unfinished()}
            except LabelerError as error:
                log.warning("journal cannot be read now", extra={"problem": error.problem_type})
                stop.wait(1.0)
                continue
            for job_id in sorted(wanted):
                if not stop.is_set():
                    self._turn(job_id)

    def _turn(self, job_id: str) -> None:
        not_before, pause = self._pauses.get(job_id, (0.0, 0.25))
        if time.monotonic() < not_before:
            return
        try:
            self.advance(job_id)
            self._pauses.pop(job_id, None)
        except TryAgain as error:
            log.warning("job waits", extra={"job_id": job_id, "problem": error.problem_type})
            self._pauses[job_id] = (time.monotonic() + pause, min(2 * pause, _LONGEST_PAUSE_S))
        except LabelerError as error:
            log.warning("job fails", extra={"job_id": job_id, "problem": error.problem_type})
            self._give_up(job_id, error)
        except Exception:
            # One job that meets a defect must not stop the others; it is tried again, ever more slowly.
            log.exception("job met a defect", extra={"job_id": job_id})
            self._pauses[job_id] = (time.monotonic() + pause, min(2 * pause, _LONGEST_PAUSE_S))

    def advance(self, job_id: str) -> None:
        """Take every step of a job that can be taken now.

        Raises:
            LabelerError: the job cannot go on; TryAgain where it can later.
        """
        while True:
            job = self._jobs.get(job_id)
            if job.state not in UNFINISHED:
                self._forget(job)
                return
            rounds = self._jobs.rounds(job_id)
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
        """Questions, from the embedder; True once they are there."""
        folder = self._home / "jobs" / job.job_id
        task = self._tasks.get(job.task_digest)
        if (folder / "failed.json").exists():
            raise _read_failure(folder / "failed.json")
        path = folder / "questions.safetensors"
        if not path.exists():
            if self._is_due(("embed", job.job_id)):
                folder.mkdir(parents=True, exist_ok=True)
                request = {
                    "strategy": job.strategy,
                    "count": job.count,
                    "seed": job.seed,
                    "source": job.source,
                    "fingerprint": task.task.backbone_fingerprint,
                }
                replace_file(folder / "request.json", json.dumps(request).encode())
                self._mailbox.add_work(EMBED_QUEUE, job.job_id)
            return False
        features = _read_questions(path)
        if len(features) != job.num_queries:
            raise BadData(f"{len(features)} questions were prepared, {job.num_queries} were paid for; submit again")
        digests = []
        for one in self._jobs.rounds(job.job_id):
            batch = _batch(features, job, one)
            digests.append((one.number, batch.digest, round_of(task.task, batch).digest))
        self._jobs.set_batches(job.job_id, digests)
        self._change(job, "collecting")
        return True

    def _step(self, job: JobRecord, current: RoundRecord) -> bool:
        task = self._tasks.get(job.task_digest)
        if current.state == "waiting":
            # Durable before the first question leaves: from here on nobody can say that nothing left.
            self._jobs.set_asked(job.job_id, current.number)
            self._publish(job.job_id)
            return True
        if current.state == "asked":
            return self._collect(job, current, task)
        if current.state == "agreed":
            self._post(job, current)
            return True
        return self._sum(job, current, task)

    def _collect(self, job: JobRecord, current: RoundRecord, task: TaskRecord) -> bool:
        talliers = self._post_office.talliers(task.task.talliers)
        answered = held_by_all(current, [tallier.party_id for tallier in talliers])
        refused = current.final_refusals - answered
        missing = [agent for agent in task.participants if agent not in answered | refused]
        if len(answered) >= task.task.quorum:
            since = self._quorum_since.setdefault(current.round_digest, time.monotonic())
            if not missing or time.monotonic() - since >= self._timing.patience_s:
                self._jobs.fix_contributors(job.job_id, current.number, sorted(answered))
                self._change(job, "tallying")
                fault_point("coordinator.agreed")
                return True
        elif len(answered) + len(missing) < task.task.quorum:
            raise QuorumNotReached(
                f"{len(refused)} of {len(task.participants)} agents refused, so the quorum of {task.task.quorum} "
                "cannot be reached; nothing was opened. Their reasons stand beside the round"
            )
        self._ask(job, current, task, missing)
        return False

    def _ask(self, job: JobRecord, current: RoundRecord, task: TaskRecord, agents: Collection[str]) -> None:
        """Open the round at every tallier that has not reported, then ask every agent that is missing."""
        talliers = self._post_office.talliers(task.task.talliers)
        expires_at = job.expires_at.timestamp()
        unaware = [one for one in talliers if one.party_id not in current.holdings]
        for tallier in unaware:
            if self._is_due((current.round_digest, tallier.party_id)):
                opening = OpenRound(
                    round=_round(task, current),
                    tallier=tallier.tallier if tallier.tallier is not None else -1,
                    participants=self._post_office.verify_keys(task.participants),
                    expires_at=expires_at + SUM_GRACE_S,
                )
                self._post_office.send("open-round", tallier.party_id, current, task, opening.encode())
        asked = False
        for agent in agents:
            if self._is_due((current.round_digest, agent)):
                self._post_office.send("ask", agent, current, task, self._ask_body(job, current, task))
                asked = True
        if asked:
            fault_point("coordinator.asked")

    def _ask_body(self, job: JobRecord, current: RoundRecord, task: TaskRecord) -> bytes:
        body = self._asks.get(current.round_digest)
        if body is None:
            features = _read_questions(self._home / "jobs" / job.job_id / "questions.safetensors")
            batch = _batch(features, job, current)
            if batch.digest != current.batch_digest:
                raise WrongDigest("the prepared questions are not those the round was made of; submit the job again")
            ask = Ask(
                task=task.task,
                batch=batch,
                talliers=self._post_office.tallier_keys(task.task.talliers),
                expires_at=job.expires_at.timestamp(),
            )
            body = self._asks[current.round_digest] = ask.encode()
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
        talliers = self._post_office.talliers(task.task.talliers)
        head = self._ledger.head()
        body = SumRequest(contributors=tuple(current.contributors), ledger_seq=head.seq, ledger_hash=head.hash).encode()
        asked = False
        for tallier in talliers:
            if tallier.party_id not in stored and self._is_due((current.round_digest, "sum", tallier.party_id)):
                self._post_office.send("sum", tallier.party_id, current, task, body)
                asked = True
        if asked:
            fault_point("coordinator.sum-asked")
        if any(tallier.party_id not in stored for tallier in talliers):
            return False
        release = open_histogram([aggregate_from_bytes(stored[one.party_id]) for one in talliers], task.task)
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
        log.info("round opened", extra={"job_id": job.job_id, "round": current.number, "queries": current.num_queries})
        self._publish(job.job_id)
        return True

    def _expire(self, job: JobRecord) -> None:
        error = QuorumNotReached(
            "the deadline passed before enough agents and talliers had answered; submit the job again"
        )
        self._end(job, "expired", error)

    def _give_up(self, job_id: str, error: LabelerError) -> None:
        try:
            job = self._jobs.get(job_id)
            if job.state in UNFINISHED:
                self._end(job, "failed", error)
        except LabelerError as failure:
            log.warning("job could not be ended yet", extra={"job_id": job_id, "problem": failure.problem_type})

    def _end(self, job: JobRecord, state: JobState, error: LabelerError) -> None:
        """End a job: what was asked stays charged, what was not is given back, in one transaction."""
        settle_rounds(
            job, state, error, database=self._database, ledger=self._ledger, jobs=self._jobs, tasks=self._tasks
        )
        log.info("job ended", extra={"job_id": job.job_id, "state": state, "problem": error.problem_type})
        self._publish(job.job_id)

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

    def _is_due(self, what: tuple[str, ...]) -> bool:
        now = time.monotonic()
        if now - self._asked.get(what, -self._timing.ask_again_s) < self._timing.ask_again_s:
            return False
        self._asked[what] = now
        return True

    def _forget(self, job: JobRecord) -> None:
        digests = {one.round_digest for one in self._jobs.rounds(job.job_id)}
        self._asked = {
            what: when for what, when in self._asked.items() if not digests & set(what) and job.job_id not in what
        }
        for digest in digests:
            self._quorum_since.pop(digest, None)
            self._asks.pop(digest, None)
        self._pauses.pop(job.job_id, None)


def held_by_all(current: RoundRecord, tallier_ids: Collection[str]) -> set[str]:
    """Agents of which every tallier holds a share of the same split; nobody while a tallier has not reported."""
    reports = [current.holdings.get(tallier_id) for tallier_id in tallier_ids]
    if not reports or any(report is None for report in reports):
        return set()
    common = set((reports[0] or {}).items())
    for report in reports[1:]:
        common &= set((report or {}).items())
    return {agent for agent, _ in common}


def settle_rounds(
    job: JobRecord,
    state: JobState,
    error: LabelerError | None,
    *,
    database: Database,
    ledger: Ledger,
    jobs: JobStore,
    tasks: TaskStore,
) -> JobRecord:
    """End a job in one transaction: void the charge of rounds of which nothing left, post all others.

    Nothing left of a round where nobody was asked, or where every participant refused before answering and no tallier
    holds a share. In every other case shares may be on their way, so the charge stands.

    Args:
        job: unfinished.
        state: cancelled, failed or expired.
        error: why, shown to the requester.

    Returns:
        The job as it is now.
    """
    participants = set(tasks.get(job.task_digest).participants)
    with database.write() as connection:
        for one in jobs.rounds(job.job_id, connection=connection):
            name = reservation_id(job.job_id, one.number)
            if one.state == "waiting":
                ledger.void(name, NothingLeft(name, "never-asked"), connection=connection)
            elif one.state == "asked" and participants <= one.final_refusals and not any(one.holdings.values()):
                ledger.void(name, NothingLeft(name, "refused"), connection=connection)
            elif one.state in ("asked", "agreed"):
                detail = {"job": job.job_id, "queries": one.num_queries, "because": f"{state} after agents were asked"}
                ledger.post(name, detail=detail, connection=connection)
        problem = None if error is None else problem_of(error)
        return jobs.change(job.job_id, state, expected=UNFINISHED, problem=problem, connection=connection)


def _round(task: TaskRecord, current: RoundRecord) -> Round:
    return Round(task.task.digest, current.batch_digest, current.num_queries, task.task.num_classes, task.task.quorum)


def _batch(features: NDArray[np.int16], job: JobRecord, one: RoundRecord) -> QueryBatch:
    start = one.first_query - job.first_query
    return QueryBatch(features[start : start + one.num_queries], first_query=one.first_query)


def _read_questions(path: Path) -> NDArray[np.int16]:
    try:
        features = load(path.read_bytes())["features"]
    except (OSError, SafetensorError, KeyError):
        raise BadData("the prepared questions cannot be read; submit the job again") from None
    if features.dtype != np.int16 or features.ndim != 2:
        raise BadData("the prepared questions are not quantised features; submit the job again")
    return features


def _read_failure(path: Path) -> LabelerError:
    try:
        found = json.loads(path.read_bytes())
        return _named_error(str(found["problem_type"]), str(found["sentence"]))
    except (OSError, ValueError, KeyError, TypeError):
        return BadData("the questions could not be prepared, and the reason cannot be read; submit the job again")


def _named_error(problem_type: str, sentence: str) -> LabelerError:
    """The error of the tree with this problem type, so that a refusal in another process keeps its type."""
    kinds: list[type[LabelerError]] = [LabelerError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.problem_type == problem_type and not issubclass(kind, TryAgain):
            return kind(sentence)
    return BadData(sentence)
