"""A batch labelling job in one process: shards and public images in, pseudo-labels, student and report out.

    prepare    read and check everything that can be wrong, price it, refuse or write the plan
    label      for each batch: agents answer, talliers add, the charge is posted, the release is stored
    publish    pseudo-labels, student, report; free, and repeatable from what was released

A job owns its output folder (see workers.run.folder) and can be interrupted anywhere: the same command
continues, replays the same noise, and charges nothing twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from feature_store.results.pseudo_labels import AnsweredRound
from labeler.budget import Account, budget_for
from labeler.expectation import expect
from labeler.randomness import KEY_BYTES, seeded_source
from labeler.release import WinnerEngine
from labeler.rounds.effects import JobRun
from labeler.task import Level, Task
from workers.agent.agent import Agent
from workers.agent.ledger import InMemoryLedger
from workers.progress import ProgressCallback, StageClock, silent
from workers.run.folder import JobFolder, RoundStore, open_job_folder
from workers.run.parties import RunParties, tallier_names
from workers.run.preparation import LabellingJob, PreparedJob, job_charges, prepare
from workers.run.publishing import publish
from workers.run.run_journal import Order, RunJournal, open_run_journal, run_rounds


def run_job(
    job: LabellingJob,
    *,
    clock: StageClock | None = None,
    progress: ProgressCallback = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Do a job, or what is left of it.

    Args:
        clock: told how long each stage took; nothing that is written says so.
        warn: told, before anybody is asked, that the noise will drown the votes, and what would do.

    Returns:
        The content of report.json.

    Raises:
        LabelerError: see labeler.errors; nothing is half-written, and what was opened stays paid for.
    """
    with open_job_folder(job.out) as folder:
        return run_in_folder(job, folder, clock=clock or StageClock(), progress=progress, warn=warn)


def run_in_folder(
    job: LabellingJob,
    folder: JobFolder,
    *,
    clock: StageClock,
    progress: ProgressCallback = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """`run_job` for a caller that owns the output folder already and has a clock running."""
    with clock.stage("read and check"):
        prepared = prepare(job, folder, progress=progress)
        # From public facts: how many records there are must not be told by a warning.
        expected = expect(prepared.task)
        if expected.warning:
            warn(expected.warning)
        folder.begin(prepared.plan())
    with clock.stage("label"):
        rounds = label(prepared, folder, progress=progress)
    return publish(prepared, rounds, folder, clock=clock, progress=progress)


def label(prepared: PreparedJob, folder: JobFolder, *, progress: ProgressCallback = silent) -> list[AnsweredRound]:
    """Run every round that has not been opened yet, and give back what all of them opened."""
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
                ledger=InMemoryLedger({level: Account(agent_id, level, cap) for level, cap in caps.items()}),
                is_seeded=is_seeded,
                engine=prepared.job.engine,
                memory_limit_bytes=prepared.job.memory_limit_bytes,
            )
            for agent_id, shard in zip(names, prepared.shards, strict=True)
        ]
        engine = _winner_engine(prepared)
        parties = RunParties(
            prepared.task,
            prepared.batches,
            agents,
            store,
            is_seeded=is_seeded,
            winner_engine=engine,
            progress=progress,
        )
        selection = prepared.job.file.queries
        order = Order(
            job_id=prepared.job_id,
            task=prepared.task,
            agents=tuple(names),
            batches=prepared.batches,
            caps=caps,
            images=len(prepared.public),
            strategy=selection.strategy,
            count=selection.count,
            seed=selection.seed,
        )
        job = journal.begin(order)
        rounds = journal.rounds(job.job_id)
        # Released: nobody misses an answer any more, and whoever steals this folder finds none.
        store.erase([one.round_digest for one in rounds if one.state == "opened"])

        def count(run: JobRun) -> None:
            opened = sum(one.state == "opened" for one in run.rounds)
            progress("Batches labelled", opened, len(prepared.batches))

        run_rounds(journal, job, prepared.queries.features, parties, is_seeded=is_seeded, on_step=count)
        folder.destroy_secrets()
        return _answered(journal, job.job_id)


def _answered(journal: RunJournal, job_id: str) -> list[AnsweredRound]:
    """What every round opened, and which of the folder's charges paid for it, counted from 1."""
    rounds = journal.rounds(job_id)
    places = {seq: place for place, seq in enumerate(sorted(one.ledger_seq or 0 for one in rounds), start=1)}
    return [
        AnsweredRound(
            one.first_query, one.num_queries, places[one.ledger_seq or 0], journal.release(job_id, one.number)
        )
        for one in rounds
    ]


def agent_ids(task: Task) -> list[str]:
    """Names of the agents of a job in one process, in the order of their shards."""
    return [f"agent-{number:04d}" for number in range(1, task.agents + 1)]


def _winner_engine(prepared: PreparedJob) -> WinnerEngine | None:
    if prepared.job.winner == "plain" or prepared.task.release != "winner":
        return None
    # Loaded where it is wanted: a histogram needs none of it.
    from workers.winner.session import ThreeTalliers

    return ThreeTalliers()


def _secrets(prepared: PreparedJob, agents: Sequence[str]) -> dict[str, bytes]:
    """The key of every round where the job is seeded; by party."""
    if prepared.job.seed is None:
        return {}
    return {agent: seeded_source(f"{prepared.job.seed} {agent}".encode()).bytes(KEY_BYTES) for agent in agents}


def _caps(prepared: PreparedJob) -> dict[Level, int]:
    """What each agent may spend: the caps of the task file, else exactly what this job costs."""
    budget = prepared.job.file.budget
    caps = job_charges(prepared.task, prepared.batches)
    for level, epsilon in (("instance", budget.instance_epsilon), ("agent", budget.agent_epsilon)):
        if epsilon is not None:
            caps[cast(Level, level)] = budget_for(epsilon, prepared.task.delta)
    return caps
