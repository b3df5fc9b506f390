"""A batch labeling job in one process: shards and public images in, pseudo-labels, student and report out.

    prepare    read and check everything that can be wrong, price it, refuse or write the plan.
    label      for each batch: agents answer, talliers add, the charge is posted, the release is stored.
    publish    pseudo-labels, student, report; free, and repeatable from what was released.

A job owns its output folder (see workers.run.folder) and can be interrupted anywhere: the same command continues,
replays the same noise, and charges nothing twice.

Its coordinator is the service's own driver (labeler.driver), over its own stores in the job's folder:

    turn of the driver: machine steps, one commit, what leaves  ->  parties answer  ->  the next turn takes it

Every rule of a round is the machine's and every durable step the journal's, the same as in the service. Nothing waits:
each send is answered before the next turn. So a run that cannot continue is over, and says why. The same command
continues from what is in the journal.

    .job/journal.db    the task, the job and its rounds, what was charged and what was opened

It holds nothing private: only contributors, charges, and what the charges paid for. The talliers' sums come in the turn
that opens them, so they are never written (`labeler.driver.storing`). All agents of a run have the same budget and pay
the same, so one account serves for each of them. The price of every round is reserved in it, durably, before any agent
is asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import may_use_device
from feature_store.results.pseudo_labels import AnsweredRound
from feature_store.results.questions import named_error
from labeler.batching import round_charges
from labeler.budget import budget_for
from labeler.driver.coordinator import CoordinatorDriver
from labeler.driver.mail_memory import MemoryMailbox
from labeler.driver.settlement import Settlement
from labeler.errors import InvalidSetting, LabelerError, ProtocolViolation, Unavailable
from labeler.expectation import expect
from labeler.ledger.database import Database, open_database
from labeler.ledger.jobs import JobRecord, JobStore, RoundRecord
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.randomness import KEY_BYTES, seeded_source
from labeler.release import Release, WinnerEngine, release_from_bytes
from labeler.rounds.effects import UNFINISHED, JobRun, Patience
from labeler.system.clock import now_utc
from labeler.tally import QueryBatch
from labeler.task import Level, Task
from workers.agent.agent import Agent
from workers.progress import ProgressCallback, StageClock, silent
from workers.run.folder import JOURNAL_FILE, JobFolder, RoundStore, open_job_folder
from workers.run.parties import RunParties, tallier_names
from workers.run.preparation import (
    LabelingJob,
    PreparedJob,
    PricedJob,
    job_charges,
    prepare,
    prepare_evaluation,
)
from workers.run.publishing import publish, publish_evaluation
from workers.run.task_file import QueriesTable


def run_job(
    job: LabelingJob,
    *,
    clock: StageClock | None = None,
    progress: ProgressCallback = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Run a job, or what is left of it.

    Args:
        clock: takes how long each stage took; nothing that is written says so.
        warn: called, before any agent is asked, if the noise will drown the votes, with a remedy; and with files of
            the public images that are none.

    Returns:
        The content of report.json.

    Raises:
        LabelerError: see labeler.errors; nothing is half-written, and what was opened stays paid for.
    """
    with open_job_folder(job.out) as folder:
        return run_in_folder(job, folder, clock=clock or StageClock(), progress=progress, warn=warn)


def run_in_folder(
    job: LabelingJob,
    folder: JobFolder,
    *,
    clock: StageClock,
    compared: Sequence[Mapping[str, Any]] = (),
    has_curve: bool = True,
    progress: ProgressCallback = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Run a job for a caller that owns the output folder already and has a clock running.

    Args:
        compared: report.json of jobs that asked the same by other methods, to show beside this one.
        has_curve: the report shows accuracy against epsilon, for which twenty more students are trained.
    """
    with clock.stage("read and check"):
        is_whole = not job.file.evaluates
        prepared = prepare(job, folder, progress=progress, warn=warn) if is_whole else prepare_evaluation(job, folder)
        # From public facts: a warning must not reveal the number of records.
        expected = expect(prepared.task)
        if expected.warning:
            warn(expected.warning)
        folder.begin(prepared.plan())
    with clock.stage("label"):
        rounds = label(prepared, folder, progress=progress)
    if isinstance(prepared, PreparedJob):
        return publish(prepared, rounds, folder, compared=compared, has_curve=has_curve, clock=clock, progress=progress)
    return publish_evaluation(prepared, rounds, folder)


def label(prepared: PricedJob, folder: JobFolder, *, progress: ProgressCallback = silent) -> list[AnsweredRound]:
    """Run every round that has not been opened yet, and return what all of them opened."""
    with open_run_journal(folder.state) as journal:
        names = agent_ids(prepared.task)
        noisy = tallier_names(prepared.task) if prepared.task.noise_by == "talliers" else []
        store = RoundStore(folder.state, names, talliers=noisy, secrets=_secrets(prepared, [*names, *noisy]))
        is_seeded = prepared.job.seed is not None
        caps = _caps(prepared)
        agents = [
            Agent(
                agent_id,
                shard,
                is_seeded=is_seeded,
                engine=prepared.engine,
                memory_limit_bytes=prepared.job.memory_limit_bytes,
            )
            for agent_id, shard in zip(names, prepared.shards, strict=True)
        ]
        if prepared.task.traits.searches(prepared.task.max_queries) and may_use_device(prepared.engine):
            for agent in agents:  # what a device does to the process, it does before a charge
                agent.build_index()
        winner_engine: WinnerEngine | None = None
        if prepared.job.winner == "secure" and prepared.task.release == "winner":
            # Imported on use: a histogram needs none of it.
            from workers.winner.session import ThreeTalliers

            winner_engine = ThreeTalliers()
        parties = RunParties(
            prepared.task,
            prepared.batches,
            agents,
            store,
            is_seeded=is_seeded,
            winner_engine=winner_engine,
            progress=progress,
        )
        job = journal.begin(
            prepared.job_id,
            prepared.task,
            names,
            prepared.batches,
            caps,
            images=prepared.images,
            chosen=prepared.job.file.queries,
        )
        rounds = journal.rounds(job.job_id)
        # Released: nobody misses an answer any more, and a thief of this folder finds none.
        store.erase([one.round_digest for one in rounds if one.state == "opened"])

        def count(run: JobRun) -> None:
            opened = sum(one.state == "opened" for one in run.rounds)
            progress("Batches labeled", opened, len(prepared.batches))

        run_rounds(journal, job, prepared.asked, parties, is_seeded=is_seeded, on_step=count)
        folder.destroy_secrets()
        return _answered(journal, job.job_id)


def _answered(journal: RunJournal, job_id: str) -> list[AnsweredRound]:
    """Return what every round opened, and which of the folder's charges paid for it, counted from 1."""
    rounds = journal.rounds(job_id)
    places = {seq: place for place, seq in enumerate(sorted(one.ledger_seq or 0 for one in rounds), start=1)}
    return [
        AnsweredRound(
            one.first_query, one.num_queries, places[one.ledger_seq or 0], journal.release(job_id, one.number)
        )
        for one in rounds
    ]


def agent_ids(task: Task) -> list[str]:
    """Return names of the agents of a job in one process, in the order of their shards."""
    return [f"agent-{number:04d}" for number in range(1, task.agents + 1)]


def _secrets(prepared: PricedJob, agents: Sequence[str]) -> dict[str, bytes]:
    """Return the key of every round where the job is seeded; by party."""
    if prepared.job.seed is None:
        return {}
    return {agent: seeded_source(f"{prepared.job.seed} {agent}".encode()).bytes(KEY_BYTES) for agent in agents}


def _caps(prepared: PricedJob) -> dict[Level, int]:
    """Return what each agent may spend: the caps of the task file, else exactly what this job costs.

    Raises:
        InvalidSetting: one private image has no finite price, so no account could refuse anything.
    """
    budget = prepared.job.file.budget
    caps = job_charges(prepared.task, prepared.batches)
    for level, epsilon in (("instance", budget.instance_epsilon), ("agent", budget.agent_epsilon)):
        if epsilon is not None:
            caps[cast(Level, level)] = budget_for(epsilon, prepared.task.delta)
    if "instance" not in caps:
        raise InvalidSetting(
            "an agent's ledger has no instance-level account, so it could not refuse anything; where a task has no "
            "finite price for one private image there is none: raise sigma_votes, or ask fewer queries"
        )
    return caps


ACCOUNT: Final = "each agent"
NO_DEADLINE: Final = datetime(4000, 1, 1, tzinfo=UTC)
"""A job in one process waits for nobody."""

_BY = "run"


class RunJournal:
    """The journal of a run; see the module. `open_run_journal` makes it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.ledger = Ledger(database, clock=now_utc)
        self.tasks, self.jobs = TaskStore(database), JobStore(database)

    def begin(
        self,
        job_id: str,
        task: Task,
        agents: Sequence[str],
        batches: Sequence[QueryBatch],
        caps: Mapping[Level, int],
        *,
        images: int,
        chosen: QueriesTable,
    ) -> JobRecord:
        """Store a job, or find it as it was left.

        Args:
            batches: the questions of each round, in order.
            caps: what each agent may spend, in nano-units of mu^2, at the levels at which the task has a price.
            images, chosen: how many there are, and how questions were chosen among them.
        """
        with self.database.write() as connection:
            if job_id in self.jobs.many([job_id], connection=connection):
                return self.jobs.get(job_id, connection=connection)
            now = now_utc()
            stored = self.tasks.add(TaskRecord(task, tuple(agents), now, _BY), connection=connection)
            for level, cap in caps.items():
                self.ledger.open_account(ACCOUNT, level, cap, connection=connection)
            job = JobRecord(
                job_id=job_id,
                task_digest=stored.digest,
                name=task.name,
                state="queued",
                images=images,
                num_queries=sum(map(len, batches)),
                first_query=0,
                strategy=chosen.strategy,
                count=chosen.count,
                seed=chosen.seed,
                source="features",
                created_at=now,
                updated_at=now,
                expires_at=NO_DEADLINE,
                created_by=_BY,
            )
            rounds = [
                RoundRecord(job_id, number, batch.first_query, len(batch)) for number, batch in enumerate(batches)
            ]
            self.jobs.add(job, rounds, connection=connection)
            # No agent is asked for its consent: naming a shard gives it.
            self.jobs.willingness.fix_asked(job_id, agents, connection=connection)
            return self.jobs.get(job_id, connection=connection)

    def rounds(self, job_id: str) -> list[RoundRecord]:
        """Return the rounds of a job, in order."""
        return self.jobs.rounds(job_id)

    def release(self, job_id: str, number: int) -> Release | None:
        """Return what a round opened, if it did."""
        data = self.jobs.release(job_id, number)
        return None if data is None else release_from_bytes(data)


@contextmanager
def open_run_journal(state: Path) -> Iterator[RunJournal]:
    """Open the journal in the folder of a job's state, created if missing.

    Raises:
        JournalInUse, UnsafeStorage, JournalBroken: it cannot be used.
    """
    # A run may lie on any disk: a lost charge costs only the run of the person who owns the folder.
    with open_database(state / JOURNAL_FILE, allow_unsynced=True) as database:
        yield RunJournal(database)


class GivenQuestions:
    """Questions that were there before the job; a `labeler.driver.stepping.Questions`."""

    def __init__(self, features: NDArray[np.int16]) -> None:
        self._features = features

    def has_features(self, job: JobRecord, task: Task) -> bool:  # noqa: ARG002  # of the only job
        """Return True: they were given."""
        return True

    def look(self, job: JobRecord, task: Task) -> NDArray[np.int16]:  # noqa: ARG002  # of the only job
        """See Questions."""
        return self._features

    def read(self, job_id: str) -> NDArray[np.int16]:  # noqa: ARG002  # as above
        """See Questions."""
        return self._features


def run_rounds(
    journal: RunJournal,
    job: JobRecord,
    features: NDArray[np.int16],
    parties: RunParties,
    *,
    is_seeded: bool,
    on_step: Callable[[JobRun], None] = lambda _: None,
) -> None:
    """Bring a job to its end.

    Args:
        features: its questions, int16, shape (queries, dimension).
        is_seeded: noise from a known seed is expected.
        on_step: called with the job after each step that is durable.

    Raises:
        LabelerError: a party refuses, or the job cannot continue; what was charged stays charged.
    """
    if job.state not in UNFINISHED:
        if job.state != "completed":
            problem = job.problem or {}
            because = str(problem.get("detail", f"the job has ended: {job.state}"))
            raise named_error(str(problem.get("type", "")), because)
        return
    ended: list[LabelerError] = []

    def problem_of(error: LabelerError) -> dict[str, Any]:
        ended.append(error)
        return {"type": error.problem_type, "detail": str(error)}

    settlement = Settlement(
        journal.database,
        journal.ledger,
        journal.jobs,
        journal.tasks,
        price_rounds=lambda task, sizes, _: [
            round_charges(task.task, size, answered=number) for number, size in enumerate(sizes)
        ],
        charges_of=lambda _, amounts: [Charge(ACCOUNT, level, cost) for level, cost in amounts.items()],
        problem_of=problem_of,
    )
    driver = CoordinatorDriver(
        parties=parties,
        sender=parties,
        mailbox=MemoryMailbox(),
        questions=GivenQuestions(features),
        settlement=settlement,
        # Nothing waits: a party answers at once, or its error ends the run.
        patience=Patience(0.0, float("inf")),
        clock=now_utc,
        is_simulated=is_seeded,
    )
    last: list[JobRun] = []

    def observe(_: JobRun, after: JobRun) -> None:
        last[:] = [after]
        on_step(after)

    driver.observe = observe
    while not (last and last[0].state not in UNFINISHED):
        while True:  # as many turns as follow from the events
            is_more = driver.turn()
            if trouble := driver.trouble(job.job_id):
                raise trouble  # a service would try again
            if not is_more:
                break
        events = parties.answer()
        if not (events or (last and last[0].state not in UNFINISHED)):
            raise (
                ProtocolViolation(f"a job in one process stopped at {last[0].state}; this is a defect of this program")
                if last
                else Unavailable("the journal in the job's folder cannot be read now; run the same command again")
            )
        for event in events:
            driver.tell(job.job_id, event)
    if ended:
        raise ended[-1]
