"""A batch labelling job in one process: shards and public images in, pseudo-labels, student and report out.

    prepare    read and check everything that can be wrong, price it, refuse or write the plan
    label      for each batch: agents answer, talliers add, the charge is posted, the release is stored
    publish    pseudo-labels, student, report; free, and repeatable from what was released

A job owns its output folder (see workers.jobs.folder) and can be interrupted anywhere: the same command
continues, replays the same noise, and charges nothing twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from labeler.budget import Account, budget_for
from labeler.expectation import expect
from labeler.randomness import KEY_BYTES, seeded_source
from labeler.release import Release, WinnerEngine
from labeler.tally import InputShare, round_of
from labeler.task import Level, Task
from workers.agent.agent import Agent, as_it_is, shares_of
from workers.agent.ledger import InMemoryLedger
from workers.agent.round_store import RoundsInMemory
from workers.jobs.first_look import look_first
from workers.jobs.folder import JobFolder, open_job_folder
from workers.jobs.preparation import LabellingJob, PreparedJob, batch_charges, job_charges, prepare
from workers.jobs.publishing import publish
from workers.jobs.round import run_rounds
from workers.progress import ProgressCallback, StageClock, silent


def run_job(
    job: LabellingJob,
    *,
    clock: StageClock | None = None,
    progress: ProgressCallback = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Do a job, or what is left of it.

    Args:
        job: what to do.
        clock: told how long each stage took; nothing that is written says so.
        progress: told of every step.
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
        look_first(job, folder)
        prepared = prepare(job, folder, progress=progress)
        # From public facts: how many records there are must not be told by a warning.
        expected = expect(prepared.task)
        if expected.warning:
            warn(expected.warning)
        folder.begin(prepared.plan())
    with clock.stage("label"):
        releases = label(prepared, folder, progress=progress)
    return publish(prepared, releases, folder, clock=clock, progress=progress)


def label(prepared: PreparedJob, folder: JobFolder, *, progress: ProgressCallback = silent) -> list[Release]:
    """Run every round that has not been opened yet."""
    releases = [folder.stored_release(number) for number in range(len(prepared.batches))]
    if any(release is None for release in releases):
        names = agent_ids(prepared.task)
        kept = folder.rounds(names, secrets=_secrets(prepared, names))
        agents = [
            Agent(
                agent_id,
                shard,
                ledger=InMemoryLedger(_accounts(prepared, agent_id)),
                rounds=RoundsInMemory(),  # the keys are given to it, and what it answers is kept, by `ask`
                is_seeded=prepared.job.seed is not None,
                engine=prepared.job.engine,
                memory_limit_bytes=prepared.job.memory_limit_bytes,
            )
            for agent_id, shard in zip(names, prepared.shards, strict=True)
        ]
        rounds = [round_of(prepared.task, batch) for batch in prepared.batches]

        def ask(number: int) -> Iterator[tuple[str, tuple[InputShare, ...]]]:
            """Every agent's answer, durable together before the first of them reaches a tallier."""
            task, batch, round = prepared.task, prepared.batches[number], rounds[number]
            answers = kept.answers(round.digest)
            if answers is None:
                kept.begin([one.digest for at, one in enumerate(rounds) if at >= number and releases[at] is None])
            keys, found = kept.keys(round.digest), dict(answers or {})
            for count, agent in enumerate(agents, start=1):
                name = agent.agent_id
                agent.charge(task, batch)
                if answers is None:
                    found[name] = agent.computed(task, batch, key=keys[name], seal=as_it_is)
                progress("Agents answer", count, len(agents))
            kept.store(round.digest, found)
            for agent in agents:
                yield agent.agent_id, shares_of(agent.agent_id, round, found[agent.agent_id])

        def keep(number: int, release: Release) -> None:
            folder.store_release(number, release)
            releases[number] = release
            # Released: nobody misses an answer any more, and whoever steals this folder finds none.
            kept.erase([rounds[number].digest])
            progress("Batches labelled", number + 1, len(prepared.batches))

        for batch, round, release in zip(prepared.batches, rounds, releases, strict=True):
            if release is None:
                folder.check_replayable(batch.digest, round.digest, kept, names)
        kept.erase([round.digest for round, release in zip(rounds, releases, strict=True) if release is not None])
        run_rounds(
            prepared.task,
            prepared.batches,
            agents,
            post_charge=lambda number, contributors: _post(prepared, folder, number, contributors),
            keep_release=keep,
            opened=[number for number, release in enumerate(releases) if release is not None],
            ask=ask,
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


def _secrets(prepared: PreparedJob, agents: Sequence[str]) -> dict[str, bytes]:
    """The key of every round where the job is seeded; by agent."""
    if prepared.job.seed is None:
        return {}
    return {agent: seeded_source(f"{prepared.job.seed} {agent}".encode()).bytes(KEY_BYTES) for agent in agents}


def _accounts(prepared: PreparedJob, agent_id: str) -> dict[Level, Account]:
    """An agent's own accounts: the caps of the task file, else exactly what this job costs."""
    budget = prepared.job.file.budget
    caps = job_charges(prepared.task, prepared.batches)
    for level, epsilon in (("instance", budget.instance_epsilon), ("agent", budget.agent_epsilon)):
        if epsilon is not None:
            caps[cast(Level, level)] = budget_for(epsilon, prepared.task.delta)
    return {level: Account(agent_id, level, cap) for level, cap in caps.items()}
