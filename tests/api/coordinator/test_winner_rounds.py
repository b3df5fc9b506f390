"""The winner step of the conductor: three equal answers are the release, and who differs is named."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from api.coordinator.views import read_view
from api.schema import JobView
from feature_store.rows import quantize
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import Unavailable
from labeler.ledger.chain import Head
from labeler.ledger.rounds import AggregateStore
from labeler.messages.bodies import Settled, winner_to_bytes
from labeler.release import release_from_bytes
from labeler.sharing import Winner
from tests.api.conftest import House
from tests.api.coordinator.test_conductor import AGENTS, TALLIERS, Desk
from tests.job_steps import take_step
from workers.up.redis_server import RedisServer

QUERIES = 2


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def desk(house: House, redis: RedisServer) -> Iterator[Desk]:
    mailbox = RedisMailbox(redis.url)
    mailbox._redis.flushall()
    for number, name in enumerate(TALLIERS):
        house.parties.enrol(name, "tallier", secrets.token_hex(32), secrets.token_hex(32), tallier=number)
        house.parties.contact(name, house.clock(), {"winner_group": "a" * 64}, Head(1, "a" * 64))
    yield Desk(house, redis.url, mailbox)
    mailbox.close()


@pytest.fixture
def job(desk: Desk) -> JobView:
    """A job whose talliers hold the shares of everybody."""
    job = desk.house.submit(desk.house.task(release="winner", abstain_below=4), QUERIES)
    vectors = np.array([[1.0 + number / 7, 2.0, -1.0] for number in range(QUERIES)])
    folder: Path = desk.house.config.home / "jobs" / job.job_id
    (folder / "questions.safetensors").write_bytes(save({"features": quantize(vectors)}))
    desk.agree(job)
    desk.conductor().advance(job.job_id)
    desk.held(job, *AGENTS)
    return job


def answer(desk: Desk, job: JobView, number: int, labels: list[int]) -> None:
    winner = Winner(
        tallier=number,
        round_digest=desk.round(job).round_digest,
        contributors=frozenset(AGENTS),
        sharings_digest="b" * 64,
        labels=np.array(labels, dtype=np.int16),
        is_seeded=False,
    )
    store = AggregateStore(desk.house.database)
    store.put(desk.round(job).round_digest, TALLIERS[number], winner_to_bytes(winner))


def asked(desk: Desk) -> list[int]:
    """How often each tallier was asked."""
    return [sum(message.header.kind == "sum" for message in desk.mail(name)) for name in TALLIERS]


def test_three_equal_answers_are_the_release_and_abstained_queries_have_none(desk: Desk, job: JobView) -> None:
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    assert asked(desk) == [1, 1, 1]
    for number in range(3):
        answer(desk, job, number, [2, -1])
    conductor.advance(job.job_id)
    assert desk.house.jobs.get(job.job_id).state == "completed"
    stored = desk.house.jobs.release(job.job_id, 0)
    assert stored is not None
    release = release_from_bytes(stored)
    assert (release.kind, release.labels.tolist(), release.noisy_votes) == ("winner", [2, -1], None)


def test_a_watcher_reads_what_talliers_do_and_why_it_takes_long(desk: Desk, job: JobView) -> None:
    desk.conductor().advance(job.job_id)
    house = desk.house

    def stage() -> str:
        return read_view(job.job_id, house.stores).stage

    assert "talliers are finding the winners of 3 agents' votes" in stage()
    take_step(house.jobs, "report_refusal", job.job_id, 0, "t1", "tallier 0 has left in the middle of the job", False)
    assert "not at the first attempt, see what t1 said" in stage()


def test_where_one_has_not_answered_all_are_asked_again(desk: Desk, job: JobView) -> None:
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    conductor.advance(job.job_id)
    assert asked(desk) == [1, 1, 1]
    answer(desk, job, 0, [2, 1])
    answer(desk, job, 2, [2, 1])
    conductor.advance(job.job_id)
    assert asked(desk) == [2, 2, 2]


def test_a_tallier_that_answers_differently_voids_the_round_and_is_named(desk: Desk, job: JobView) -> None:
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    for number, labels in enumerate(([2, 1], [2, 0], [2, 1])):
        answer(desk, job, number, labels)
    conductor.advance(job.job_id)
    assert "tallier 1 answered differently from the others" in desk.problem(job)


def test_what_a_tallier_says_can_never_be_computed_ends_the_job_with_its_sentence(desk: Desk, job: JobView) -> None:
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    take_step(
        desk.house.jobs,
        "report_refusal",
        job.job_id,
        0,
        TALLIERS[2],
        "the ballots of 1 agents do not sum: 'west'",
        True,
    )
    conductor.advance(job.job_id)
    assert "t2 says: the ballots of 1 agents do not sum: 'west'" in desk.problem(job)


@pytest.mark.parametrize("at_once", [1, 2])
def test_rounds_that_are_due_together_are_asked_for_together_as_many_as_have_a_turn(
    desk: Desk, job: JobView, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("labeler.rounds.queues.AT_ONCE", at_once)
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    second = desk.house.submit(desk.house.tasks.get(desk.house.jobs.get(job.job_id).task_digest), QUERIES, start=5)
    folder = desk.house.config.home / "jobs" / second.job_id
    vectors = np.array([[1.0 + number / 7, 3.0, -1.0] for number in range(QUERIES)])
    (folder / "questions.safetensors").write_bytes(save({"features": quantize(vectors)}))
    desk.agree(second)
    conductor.advance(second.job_id)
    desk.held(second, *AGENTS)
    conductor.advance(second.job_id)
    assert asked(desk) == [at_once] * 3
    for number in range(3):
        answer(desk, job, number, [0, 1])
    conductor.advance(job.job_id)
    conductor.advance(second.job_id)
    assert asked(desk) == [2, 2, 2]


def settled(desk: Desk, agent: str) -> list[str]:
    found = [message for message in desk.mail(agent) if message.header.kind == "answered"]
    assert all(Settled.decode(message.body) == Settled() for message in found)
    return [message.header.round_digest for message in found]


def test_agents_are_told_once_that_a_round_is_settled_and_only_when_it_is_opened(desk: Desk, job: JobView) -> None:
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    for number in range(3):
        assert settled(desk, AGENTS[0]) == []
        answer(desk, job, number, [2, -1])
        conductor.advance(job.job_id)
    conductor.advance(job.job_id)
    desk.conductor().advance(job.job_id)
    for agent in AGENTS:
        assert settled(desk, agent) == [desk.round(job).round_digest]


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_agents_are_told_that_a_round_is_settled_when_its_job_ends_otherwise(
    desk: Desk, job: JobView, how: str
) -> None:
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    if how == "cancelled":
        desk.house.jobs.change(job.job_id, "cancelled", expected=("collecting", "tallying"))
    else:
        answer(desk, job, 0, [2, -1])
        answer(desk, job, 1, [1, -1])
        answer(desk, job, 2, [0, -1])
    for _ in range(3):
        conductor.advance(job.job_id)
    assert desk.house.jobs.get(job.job_id).state == how
    for agent in AGENTS:
        assert desk.round(job).round_digest in settled(desk, agent)


def test_a_mailbox_that_cannot_be_reached_does_not_undo_what_was_opened(
    desk: Desk, job: JobView, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.conductor().advance(job.job_id)
    for number in range(3):
        answer(desk, job, number, [2, -1])

    def away(*_: object, **__: object) -> None:
        raise Unavailable("redis is away")

    monkeypatch.setattr(RedisMailbox, "send_all", away)
    desk.conductor().advance(job.job_id)
    assert desk.house.jobs.get(job.job_id).state == "completed"
