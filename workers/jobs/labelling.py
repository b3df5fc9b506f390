"""A batch labelling job in one process: shards and public images in, pseudo-labels, student and report out.

    prepare    read and check everything that can be wrong, price it, refuse or write the plan
    label      for each batch: agents answer, talliers add, the charge is posted, the release is stored
    publish    pseudo-labels, student, report; free, and repeatable from what was released

A job owns its output folder (see workers.jobs.folder) and can be interrupted anywhere: the same command
continues, replays the same noise, and charges nothing twice.
"""

from __future__ import annotations

from typing import Any, cast

from labeler.budget import Account, budget_for
from labeler.randomness import seeded_source
from labeler.release import Release, WinnerEngine
from labeler.tally import round_of
from labeler.task import Level, Task
from workers.agent.agent import Agent
from workers.agent.ledger import InMemoryLedger
from workers.agent.round_store import RoundFolder
from workers.jobs.first_look import look_first
from workers.jobs.folder import JobFolder, open_job_folder
from workers.jobs.preparation import LabellingJob, PreparedJob, batch_charges, job_charges, prepare
from workers.jobs.publishing import publish
from workers.jobs.round import run_rounds
from workers.progress import ProgressCallback, StageClock, silent


def run_job(
    job: LabellingJob, *, clock: StageClock | None = None, progress: ProgressCallback = silent
) -> dict[str, Any]:
    """Do a job, or what is left of it.

    Args:
        job: what to do.
        clock: told how long each stage took; nothing that is written says so.
        progress: told of every step.

    Returns:
        The content of report.json.

    Raises:
        LabelerError: see labeler.errors; nothing is half-written, and what was opened stays paid for.
    """
    with open_job_folder(job.out) as folder:
        return run_in_folder(job, folder, clock=clock or StageClock(), progress=progress)


def run_in_folder(
    job: LabellingJob, folder: JobFolder, *, clock: StageClock, progress: ProgressCallback = silent
) -> dict[str, Any]:
    """`run_job` for a caller that owns the output folder already and has a clock running."""
    with clock.stage("read and check"):
        look_first(job, folder)
        prepared = prepare(job, folder, progress=progress)
        folder.begin(prepared.plan())
    with clock.stage("label"):
        releases = label(prepared, folder, progress=progress)
    return publish(prepared, releases, folder, clock=clock, progress=progress)


def label(prepared: PreparedJob, folder: JobFolder, *, progress: ProgressCallback = silent) -> list[Release]:
    """Run every round that has not been opened yet."""
    releases = [folder.stored_release(number) for number in range(len(prepared.batches))]
    if any(release is None for release in releases):
        rounds = {agent_id: _rounds(prepared, folder, agent_id) for agent_id in agent_ids(prepared.task)}
        agents = [
            Agent(
                agent_id,
                shard,
                ledger=InMemoryLedger(_accounts(prepared, agent_id)),
                rounds=rounds[agent_id],
                is_seeded=prepared.job.seed is not None,
                engine=prepared.job.engine,
                memory_limit_bytes=prepared.job.memory_limit_bytes,
            )
            for agent_id, shard in zip(rounds, prepared.shards, strict=True)
        ]
        digests = [round_of(prepared.task, batch).digest for batch in prepared.batches]

        def keep(number: int, release: Release) -> None:
            folder.store_release(number, release)
            releases[number] = release
            for kept in rounds.values():
                # Released: nobody misses an answer any more, and whoever steals this folder finds none.
                kept.erase(digests[number])
            progress("Batches labelled", number + 1, len(prepared.batches))

        for number, release in enumerate(releases):
            if release is None:
                folder.check_replayable(prepared.batches[number].digest, digests[number], rounds)
            else:
                for kept in rounds.values():
                    kept.erase(digests[number])
        run_rounds(
            prepared.task,
            prepared.batches,
            agents,
            post_charge=lambda number, contributors: _post(prepared, folder, number, contributors),
            keep_release=keep,
            opened=[number for number, release in enumerate(releases) if release is not None],
            winner_engine=_winner_engine(prepared),
            progress=progress,
        )
    progress("Batches labelled", len(prepared.batches), len(prepared.batches))
    folder.destroy_secrets()
    return [release for release in releases if release is not None]


def agent_ids(task: Task) -> list[str]:
    """Names of the agents of a job in one process, in the order of their shards."""
    return [f"agent-{number:04d}" for number in range(1, task.agents + 1)]


def _post(prepared: PreparedJob, folder: JobFolder, number: int, contributors: frozenset[str]) -> None:
    batch = prepared.batches[number]
    charge = batch_charges(prepared.task, batch)
    folder.post(
        {"id": batch.digest, "queries": len(batch), "charge_nano": charge, "contributors": sorted(contributors)}
    )


def _winner_engine(prepared: PreparedJob) -> WinnerEngine | None:
    if prepared.job.winner != "mpyc" or prepared.task.release != "winner":
        return None
    # Loaded where it is wanted: a histogram needs none of it.
    from workers.winner.in_process import ThreeProcesses

    return ThreeProcesses()


def _rounds(prepared: PreparedJob, folder: JobFolder, agent_id: str) -> RoundFolder:
    if prepared.job.seed is None:
        return folder.rounds(agent_id)
    return folder.rounds(agent_id, secret=seeded_source(f"{prepared.job.seed} {agent_id}".encode()).bytes(32))


def _accounts(prepared: PreparedJob, agent_id: str) -> dict[Level, Account]:
    """An agent's own accounts: the caps of the task file, else exactly what this job costs."""
    budget = prepared.job.file.budget
    caps = job_charges(prepared.task, prepared.batches)
    for level, epsilon in (("instance", budget.instance_epsilon), ("agent", budget.agent_epsilon)):
        if epsilon is not None:
            caps[cast(Level, level)] = budget_for(epsilon, prepared.task.delta)
    return {level: Account(agent_id, level, cap) for level, cap in caps.items()}
