"""Rounds of a run: the service's driver over a journal in the job's folder, with all parties in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workers.run.preparation
from feature_store.shard import Shard
from labeler.budget import Account
from labeler.driver.storing import Storer
from labeler.errors import BadData, InvalidTask, ProtocolViolation, Unavailable
from labeler.ledger.database import open_database
from labeler.ledger.jobs import JobStore
from labeler.ledger.rounds import AggregateStore
from labeler.release import Release, release_to_bytes
from labeler.system.faults import listening
from labeler.tally import QueryBatch, round_of
from labeler.task import Task
from tests.simulation.campaign import memory_folder
from tests.simulation.case import Case, JobPlan, Rates
from tests.simulation.homes import Shape, Template, Templates
from tests.simulation.ways import questions
from tests.simulation.world import World
from tests.workers.conftest import CLASSES
from workers.agent.agent import Agent, InMemoryLedger
from workers.progress import silent
from workers.run.folder import RoundStore, open_job_folder
from workers.run.labeling import ACCOUNT, label, open_run_journal, run_rounds
from workers.run.parties import RunParties
from workers.run.preparation import LabelingJob, job_charges, prepare
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

SIZES = (2, 1)

Keys = dict[tuple[str, str], bytes]
Make = Callable[..., LabelingJob]


# The same answer as the service's.


@pytest.mark.parametrize(("release", "talliers"), [("histogram", 2), ("winner", 3)])
def test_a_run_opens_bit_for_bit_what_the_service_opens_of_the_same_task_shards_questions_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: Any, talliers: int
) -> None:
    """The service's coordinator, agents and talliers, signed and sealed; then a run under the keys they had drawn."""
    case = Case(0, 3, talliers, release, 0, (), (), (JobPlan(SIZES, 600.0, 0, None),), 1, Rates())
    drawn: Keys = {}
    computed = Agent.computed

    def noting(self: Agent, task: Task, batch: QueryBatch, *, key: bytes, seal: Any) -> tuple[bytes, ...]:
        drawn[self.agent_id, round_of(task, batch).digest] = key
        return computed(self, task, batch, key=key, seal=seal)

    with memory_folder() as folder:
        template = Templates(folder / "templates").of(Shape(3, talliers, release, 0))
        with monkeypatch.context() as patched:
            patched.setattr(Agent, "computed", noting)
            world = World(case, template, folder / "world")
            assert not world.run().violation
        opened = opened_by_service(world.folder / "coordinator" / "journal.db")
        assert len(drawn) == len(SIZES) * 3
        monkeypatch.setattr(RoundStore, "keys", lambda self, digest: {one: drawn[one, digest] for one in self._agents})
        assert opened_by_run(tmp_path, template, release) == opened


def opened_by_service(journal: Path) -> list[bytes]:
    with closing(open_database(journal, read_only=True, allow_unsynced=True)) as database:
        jobs = JobStore(database)
        (job,) = jobs.list()
        assert job.state == "completed"
        return [jobs.release(job.job_id, one.number) or b"" for one in jobs.rounds(job.job_id)]


def opened_by_run(state: Path, template: Template, release: str) -> list[bytes]:
    task, asked = template.tasks[0], questions("neighbours", 0, SIZES)
    batches = (QueryBatch(asked[:2], first_query=0), QueryBatch(asked[2:], first_query=2))
    shards = {name: Shard.open(template.shard(name, "all")) for name in template.agents}
    agents = [agent_over(name, shard, task, batches) for name, shard in shards.items()]
    caps = job_charges(task, batches)
    state.chmod(0o700)
    kept = RoundStore(state, template.agents)
    parties = RunParties(task, batches, agents, kept, is_seeded=False, winner_engine=None, progress=silent)
    with open_run_journal(state) as journal:
        job = journal.begin("job", task, template.agents, batches, caps, images=len(asked), chosen=QueriesTable())
        run_rounds(journal, job, asked, parties, is_seeded=False)
        found = [journal.release("job", number) for number in range(len(SIZES))]
    assert {one.kind for one in found if one is not None} == {release}
    return [release_to_bytes(one) for one in found if one is not None]


def agent_over(name: str, shard: Shard, task: Task, batches: tuple[QueryBatch, ...]) -> Agent:
    accounts = {level: Account(name, level, cap) for level, cap in job_charges(task, batches).items()}
    return Agent(name, shard, ledger=InMemoryLedger(accounts), engine="numpy")


# Ballots on a ball.


def test_a_run_opens_the_sum_of_ballots_that_each_agent_drew_onto_the_ball(make: Make) -> None:
    """Noise of 0.2 votes hides little; it is further than eight of its deviations off once in 10^14 times."""
    job = make("ball", method="reverse-knn", k=2, ballot_radius=2, sigma_votes=0.2, delta=1e-5)
    (release,) = do(job)
    with open_job_folder(job.out) as folder:
        prepared = prepare(job, folder)
    assert release.noisy_votes is not None
    expected = np.zeros_like(release.noisy_votes)
    for shard in prepared.shards:
        agent = agent_over("agent", shard, prepared.task, prepared.batches)
        ballots = agent.ballots(prepared.task, prepared.batches[0], bytes(32))
        centred = ballots - ballots.mean(axis=1, keepdims=True)
        length = np.sqrt((centred**2).sum())
        assert length > 2.5
        expected += centred * (2 / length)
    assert np.abs(release.noisy_votes - expected).max() < 8 * prepared.task.total_sigma_votes
    assert prepared.price.agent.squared_sensitivity == 4


# What is charged, and how a run ends that cannot go on.


@pytest.fixture
def make(tmp_path: Path, make_shard: Callable[..., Shard], monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(workers.run.preparation, "BATCH_QUERIES", 3)
    shards = tuple(make_shard(f"agent-{number}", seed=number).path for number in range(2))
    public = make_shard("public", records=8, seed=9, public=True).path
    assert len(CLASSES) == 3

    def made(name: str, **fields: Any) -> LabelingJob:
        task = {"name": "t", "method": "knn", "k": 3, "sigma_votes": 5.0, "delta": 1e-5, "colluding_agents": 0}
        file = TaskFile(task=TaskTable.model_validate(task | fields))
        return LabelingJob(file=file, shards=shards, queries=public, out=tmp_path / name, engine="numpy")

    return made


def do(one: LabelingJob) -> list[Release]:
    with open_job_folder(one.out) as folder:
        prepared = prepare(one, folder)
        folder.begin(prepared.plan())
        return [done.release for done in label(prepared, folder) if done.release is not None]


def test_each_round_is_charged_its_price_and_the_account_holds_no_more_than_the_job_costs(make: Make) -> None:
    one = make("job")
    with open_job_folder(one.out) as folder:
        prepared = prepare(one, folder)
        folder.begin(prepared.plan())
        seqs = [done.ledger_seq for done in label(prepared, folder)]
    assert seqs == [1, 2, 3]
    with open_run_journal(one.out / ".job") as journal:
        balances = {balance.level: balance for balance in journal.ledger.balances()}
        assert {balance.account for balance in balances.values()} == {ACCOUNT}
        for level, cost in job_charges(prepared.task, prepared.batches).items():
            assert (balances[level].spent, balances[level].cap) == (cost, cost)
        journal.ledger.verify()


def test_no_sum_of_a_tallier_is_written_into_the_folder(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    put = AggregateStore.put

    def noting(self: AggregateStore, *arguments: Any, is_kept: bool = True, **more: Any) -> None:
        kept.append(is_kept)
        put(self, *arguments, is_kept=is_kept, **more)

    monkeypatch.setattr(AggregateStore, "put", noting)
    do(make("job"))
    assert kept == [False] * 9, "three talliers in three rounds"


def test_a_sum_that_is_beyond_what_ballots_add_up_to_ends_the_run_for_good_and_stays_charged(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beyond(*_: object) -> Release:
        raise ProtocolViolation("a sum is beyond what contributions add up to")

    with monkeypatch.context() as patched:
        patched.setattr("labeler.driver.stepping.open_histogram", beyond)
        with pytest.raises(ProtocolViolation, match="beyond what contributions"):
            do(make("job"))
    # It is not opened later, under whatever program: the same words again.
    with pytest.raises(ProtocolViolation, match="beyond what contributions"):
        do(make("job"))
    with open_run_journal(make("job").out / ".job") as journal:
        (job,) = journal.jobs.list()
        assert job.state == "failed"
        states = [(one.state, None if one.charge is None else one.charge.state) for one in journal.rounds(job.job_id)]
    # The second was asked while the first was summed.
    assert states == [("posted", "posted"), ("asked", "posted"), ("waiting", "void")]


def test_a_refusal_of_a_party_reaches_the_caller_and_the_run_goes_on_once_it_is_mended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise BadData("a disk that cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(Agent, "computed", refusing)
        with pytest.raises(BadData, match="cannot be read"):
            do(make("job"))
    assert len(do(make("job"))) == 3


def test_a_journal_that_does_not_write_ends_the_run_instead_of_trying_for_ever(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Storer, "store", full)
        with pytest.raises(Unavailable, match="disk is full"):
            do(make("job"))
    assert len(do(make("job"))) == 3


def test_a_charged_batch_whose_keys_are_gone_is_not_opened_under_other_noise(make: Make) -> None:
    def stop(name: str) -> None:
        if name == "coordinator.posted":
            raise KeyboardInterrupt

    one = make("job")
    with pytest.raises(KeyboardInterrupt), listening(stop):
        do(one)
    for path in (one.out / ".job" / "keys").iterdir():
        path.unlink()
    with pytest.raises(BadData, match=r"key of agent-0001 .* is gone"):
        do(one)
    (answers,) = (one.out / ".job" / "answers").iterdir()
    answers.unlink()
    with pytest.raises(BadData, match=r"key of agent-0001 .* cannot be replayed"):
        do(one)


def test_a_job_of_one_round_that_fits_into_no_tally_is_refused_before_anything_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labeler.batching.MAX_ROUND_ENTRIES", 20)
    with pytest.raises(InvalidTask, match="use method knn"):
        do(make("job", method="reverse-knn", k=1))
    assert not make("job").out.exists()
