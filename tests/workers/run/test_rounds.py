"""Rounds of a run: the service's driver over a journal in the job's folder, with all parties in one process.

What its agents keep: keys and answers of a round together, and nothing after its release.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workers.run.preparation
from feature_store.shard import Shard
from labeler.driver import stepping
from labeler.driver.storing import Storer
from labeler.errors import BadData, InvalidSetting, InvalidTask, ProtocolViolation, Unavailable
from labeler.ledger.database import open_database
from labeler.ledger.jobs import JobStore
from labeler.ledger.ledger import Ledger
from labeler.ledger.rounds import AggregateStore, reservation_id
from labeler.release import Release, release_to_bytes
from labeler.system.clock import now_utc
from labeler.system.erasable import KeyFolder
from labeler.system.faults import listening
from labeler.tally import QueryBatch, round_of
from labeler.task import Task
from tests.run_journals import charges_of
from tests.simulation.campaign import memory_folder
from tests.simulation.case import Case, JobPlan, Rates
from tests.simulation.homes import Shape, Template, Templates
from tests.simulation.ways import questions
from tests.simulation.world import World
from tests.workers.conftest import CLASSES
from workers.agent.agent import Agent
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
    agents = [Agent(name, shard, engine="numpy") for name, shard in shards.items()]
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
        agent = Agent("agent", shard, engine="numpy")
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


def do(one: LabelingJob, opened: dict[str, Any] | None = None) -> list[Release]:
    """Do a job, and note whatever is opened, whether or not it comes to be stored."""
    together, noted = stepping.open_histogram, {} if opened is None else opened

    def noting(sums: Any, task: Any) -> Release:
        release = together(sums, task)
        seen = noted.setdefault(sums[0].round.digest, np.array(release.noisy_votes))
        assert np.array_equal(seen, release.noisy_votes), "a round was opened twice, under different noise"
        return release

    with pytest.MonkeyPatch.context() as patched, open_job_folder(one.out) as folder:
        patched.setattr(stepping, "open_histogram", noting)
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


def test_no_agent_computes_before_the_price_of_its_round_is_reserved_durably(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, seen, computed = make("job"), [], Agent.computed

    def looking(self: Agent, task: Task, batch: QueryBatch, **given: Any) -> Any:
        with closing(open_database(one.out / ".job" / "journal.db", read_only=True, allow_unsynced=True)) as database:
            ledger, (job,) = Ledger(database, clock=now_utc), JobStore(database).list()
            number = batch.first_query // 3
            state = ledger.state(reservation_id(job.job_id, number))
            seen.append((number, state, ledger.balance(ACCOUNT, "instance").spent))
        return computed(self, task, batch, **given)

    monkeypatch.setattr(Agent, "computed", looking)
    do(one)
    assert {(number, state) for number, state, _ in seen} == {(number, "reserved") for number in range(3)}
    assert len({spent for *_, spent in seen}) == 1, "all rounds are reserved together"


def test_a_task_without_a_finite_price_for_one_image_is_refused_before_anybody_is_asked(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.run.labeling.job_charges", lambda *_: {})
    monkeypatch.setattr(Agent, "check", lambda *_: pytest.fail("an agent was asked"))
    with pytest.raises(InvalidSetting, match=r"no instance-level account.*raise sigma_votes"):
        do(make("job"))


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


# What its agents keep.

ONE, OTHER = "a" * 64, "b" * 64
AGENTS = ("agent-0001", "agent-0002")
ANSWERS = {"agent-0001": (b"first", b"second"), "agent-0002": (b"", b"fourth" * 1000)}


def test_a_round_keeps_a_key_for_each_agent_and_the_first_answers_until_it_is_erased(tmp_path: Path) -> None:
    kept = RoundStore(tmp_path, AGENTS)
    assert kept.keys(ONE) == {}
    kept.begin([ONE, OTHER])
    keys, others = kept.keys(ONE), kept.keys(OTHER)
    assert len({*keys.values(), *others.values()}) == 4
    assert kept.answers(ONE) is None
    kept.store(ONE, ANSWERS)
    kept.store(ONE, dict.fromkeys(AGENTS, (b"others",)))
    assert "first" not in f"{kept!r} {kept}"
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in found)
    assert not any(b"fourth" in path.read_bytes() for path in found)
    again = RoundStore(tmp_path, AGENTS)  # as after a restart
    again.begin([ONE, OTHER])
    assert (again.keys(ONE), again.keys(OTHER)) == (keys, others)
    assert (again.answers(ONE), again.answers(OTHER)) == (ANSWERS, None)
    kept.erase([ONE])
    assert kept.keys(ONE) == {}
    assert kept.answers(ONE) is None
    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(key[at : at + 8] in left for key in keys.values() for at in range(25))
    assert len(kept.keys(OTHER)) == 2


@pytest.mark.parametrize("size", [-1, 40, 0])
def test_answers_that_were_damaged_are_refused(tmp_path: Path, size: int) -> None:
    kept = RoundStore(tmp_path, AGENTS)
    kept.begin([ONE])
    kept.store(ONE, ANSWERS)
    path = tmp_path / "answers" / ONE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadData):
        kept.answers(ONE)


class Stopped(BaseException):
    """As if the process were killed."""


def syncs_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    found, real = [], os.fsync

    def sync(handle: int) -> None:
        found.append(handle)
        real(handle)

    with monkeypatch.context() as counted:
        counted.setattr(os, "fsync", sync)
        work()
    return len(found)


MODEL = {
    "method": "blind-average", "k": 1, "training": {"min_records": 20, "regularisation": 0.1}, "dishonest_talliers": 1,
}  # fmt: skip
"""One round, whatever is asked."""


@pytest.mark.parametrize(
    ("noise", "rounds", "step"),
    [
        ({}, 2, 3),
        pytest.param({}, 2, 1, marks=pytest.mark.long),
        pytest.param({"dishonest_talliers": 1}, 2, 1, marks=pytest.mark.long),
        pytest.param(MODEL, 1, 1, marks=pytest.mark.long),
    ],
    ids=["agents, every third moment", "agents", "talliers", "a model"],
)
def test_a_run_that_dies_at_any_moment_goes_on_with_the_same_noise_and_is_charged_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, noise: dict[str, Any], rounds: int, step: int
) -> None:
    monkeypatch.setattr(workers.run.preparation, "BATCH_QUERIES", 4)
    for stop_at in itertools.count(1, step):
        one, moments, opened = make(f"job-{stop_at}", **noise), itertools.count(1), {}

        def die(_: str, moments: Any = moments, stop_at: int = stop_at) -> None:
            if next(moments) == stop_at:
                raise Stopped

        try:
            with listening(die):
                do(one, opened)
            is_over = True
        except Stopped:
            is_over = False
        releases = do(one, opened)
        assert len(releases) == len(opened) == rounds
        for release, votes in zip(releases, opened.values(), strict=True):
            assert np.array_equal(release.noisy_votes, votes)
        assert len(charges_of(one.out)) == len(dict(charges_of(one.out))) == rounds
        assert not {"keys", "answers"} & {path.name for path in (one.out / ".job").iterdir()}
        if is_over:
            break
    assert stop_at > 12 * rounds, "there are more moments than that between two effects of a job"


@pytest.mark.process
def test_winners_under_the_talliers_noise_are_the_same_computed_securely_and_in_clear(
    make: Make,
) -> None:
    labels = []
    for engine in ("plain", "secure"):
        one = replace(make(engine, dishonest_talliers=1, release="winner"), seed=7, winner=engine)
        with open_job_folder(one.out) as folder:
            prepared = prepare(one, folder)
            folder.begin(prepared.plan())
            releases = [done.release for done in label(prepared, folder)]
        assert all(release is not None and release.is_seeded for release in releases)
        labels.append([release.labels.tolist() for release in releases if release is not None])
    assert labels[0] == labels[1]
    assert [len(one) for one in labels[0]] == [3, 3, 2]


def test_a_run_whose_talliers_keys_of_noise_are_gone_is_refused_and_never_noised_anew(
    make: Make,
) -> None:
    one, opened = make("job", dishonest_talliers=1), {}

    def die(*_: object) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stepping, "open_histogram", die)
        with pytest.raises(Stopped):
            do(one, opened)
    keys = KeyFolder(one.out / ".job" / "keys")
    mine = [name for name in keys.names() if name.startswith("tallier-1.")]
    assert len(mine) == 3, "one for each round"
    keys.erase_all(mine)
    with pytest.raises(BadData, match="the key of tallier-1 for a batch that was charged is gone"):
        do(one, opened)
    assert opened == {}


def test_a_run_of_one_small_batch_needs_few_syncs_and_commits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten syncs of files, however many agents there are; and the journal's commits: the job, who is asked, whose
    shares are summed, the charge, the release."""
    monkeypatch.setattr(workers.run.preparation, "BATCH_QUERIES", 1000)
    moments: list[str] = []
    with listening(moments.append):
        assert syncs_of(monkeypatch, lambda: do(make("job"))) <= 10
    assert moments.count("committed") <= 6, "one of them is empty: the journal is opened"
