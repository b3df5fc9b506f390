"""Keys that change while a round runs: talliers are told the same each time, and no round waits in vain."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from api.coordinator.conductor import Conductor
from api.coordinator.views import job_view
from api.schema import JobView
from feature_store.rows import quantize
from labeler.driver.intake import Delivery, incoming
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import WrongDigest
from labeler.ledger.jobs import RoundRecord
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR, Kind, Message, read_frames
from labeler.messages.bodies import Ask, OpenRound
from labeler.rounds.coordinator import REKEYED
from labeler.rounds.effects import Patience, ProposalReply
from labeler.system.keys import PartyKeys
from tests.api.conftest import House
from tests.job_steps import take_step
from workers.up.redis_server import RedisServer

AGENTS = ("east", "north", "west")
TALLIERS = ("t0", "t1", "t2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@dataclass
class Turns:
    """Takes a conductor's turns."""

    conductor: Conductor

    def advance(self, job_id: str) -> None:
        """Everything of a job that can be done now, however it came there."""
        self.conductor.wake(job_id)
        self.conductor.tick()


@dataclass
class Desk:
    """A conductor without its thread: a test takes its turns, and reads the mail it sent."""

    house: House
    url: str
    mailbox: RedisMailbox
    keys: PartyKeys = field(default_factory=PartyKeys.generate)
    patience_s: float = 0.0
    sequence: int = 0
    opened: int = 0
    all_agree: bool = True

    def conductor(self) -> Turns:
        """One that remembers nothing, as after a restart."""
        house = self.house
        return Turns(
            Conductor(
                home=house.config.home,
                stores=replace(house.stores, sequences=Sequences(house.database)),
                keys=self.keys,
                mailbox=self.mailbox,
                patience=Patience(patience_s=self.patience_s, ask_again_s=0.0),
                requester_of="named {}".format,
            )
        )

    def open(self, job: JobView) -> None:
        """Agents are asked; no share comes, so talliers learn of the round after the pause."""
        turns = self.conductor()
        turns.advance(job.job_id)
        assert not self.openings("t0")[self.opened :]
        turns.advance(job.job_id)
        self.opened = len(self.openings("t0"))

    def job(self, *, max_dropouts: int = 0) -> JobView:
        """A job whose questions are prepared, and to which every agent has said yes unless a test lets them speak."""
        task = self.house.task(max_dropouts=max_dropouts)
        job = self.house.submit(task, 2)
        vectors = np.array([[1.0 + number / 7, 2.0, -1.0] for number in range(2)])
        folder = self.house.config.home / "jobs" / job.job_id
        (folder / "questions.safetensors").write_bytes(save({"features": quantize(vectors)}))
        if self.all_agree:
            self.agree(job)
        return job

    def agree(self, job: JobView) -> None:
        """Every agent says yes to a job."""
        until_s = (self.house.clock() + timedelta(days=30)).timestamp()
        for agent in AGENTS:
            self.house.jobs.willingness.report(job.job_id, agent, ProposalReply("willing", until_s=until_s))

    def problem(self, job: JobView) -> str:
        """Why a job has ended."""
        problem = self.house.jobs.get(job.job_id).problem
        return "" if problem is None else str(problem["detail"])

    def round(self, job: JobView) -> RoundRecord:
        return self.house.jobs.rounds(job.job_id)[0]

    def held(self, job: JobView, *agents: str) -> None:
        """Every tallier reports to hold shares of these agents."""
        for tallier in TALLIERS:
            take_step(self.house.jobs, "report_holdings", job.job_id, 0, tallier, dict.fromkeys(agents, b"s" * 16))

    def deliver(self, turns: Turns, kind: Kind, sender: str, body: bytes, job: JobView, **header: Any) -> object:
        """What becomes of a message that a party sends, as the mailroom would hand it over."""
        party = self.house.parties.get(sender)
        fields: dict[str, Any] = {"task_digest": job.task_id, "sequence": self.next_sequence(), "body": body}
        keys = PartyKeys.generate()
        message = keys.message(kind, sender=sender, **({"recipient": COORDINATOR} | fields | header))
        outcomes: list[object] = []
        turns.conductor.deliver(Delivery((incoming(message, party, self.keys),), None, outcomes.append))
        turns.conductor.tick()
        return outcomes[0]

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def rotate(self, party: str) -> None:
        self.house.parties.rotate(party, secrets.token_hex(32), secrets.token_hex(32))

    def mail(self, party: str) -> list[Message]:
        async def read() -> list[Message]:
            mailbox = RedisMailbox(self.url)
            try:
                found = await mailbox.receive(party, "", 0.0)
            finally:
                await mailbox.aclose()
            return [read_frames(data, max_messages=1)[0] for _, data in found]

        return asyncio.run(read())

    def openings(self, tallier: str) -> list[bytes]:
        return [message.body for message in self.mail(tallier) if message.header.kind == "open-round"]


@pytest.fixture
def desk(house: House, server: RedisServer) -> Iterator[Desk]:
    mailbox = RedisMailbox(server.url)
    mailbox._redis.flushall()
    for number, name in enumerate(TALLIERS):
        house.parties.enrol(name, "tallier", secrets.token_hex(32), secrets.token_hex(32), tallier=number)
    yield Desk(house, server.url, mailbox)
    mailbox.close()


def test_a_tallier_is_told_the_same_round_again_after_an_agents_keys_were_rotated(desk: Desk) -> None:
    job = desk.job()
    before = {agent: desk.house.parties.get(agent).verify_key for agent in AGENTS}
    desk.open(job)
    desk.rotate("north")
    desk.open(job)
    first, again = desk.openings("t0")
    assert first == again
    assert dict(OpenRound.decode(again).participants) == before
    assert desk.round(job).participants == before


def test_whose_shares_are_taken_is_durable_before_anybody_is_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    job = desk.job()
    seen: list[RoundRecord] = []
    monkeypatch.setattr(RedisMailbox, "send_all", lambda *_, **__: seen.append(desk.round(job)))
    desk.conductor().advance(job.job_id)
    assert seen
    assert all(set(one.participants) == set(AGENTS) and one.state == "asked" for one in seen)


def test_a_round_goes_on_without_an_agent_whose_keys_were_rotated(desk: Desk) -> None:
    job = desk.job(max_dropouts=1)
    desk.conductor().advance(job.job_id)
    desk.rotate("north")
    desk.held(job, "east", "west")
    desk.conductor().advance(job.job_id)
    assert desk.round(job).contributors == ("east", "west")
    record = desk.house.jobs.get(job.job_id)
    view = job_view(record, desk.house.jobs.rounds(job.job_id), desk.house.tasks.get(record.task_digest))
    assert view.rounds[0].refused == {"north": REKEYED}


def test_shares_signed_before_the_keys_were_rotated_still_count(desk: Desk) -> None:
    job = desk.job()
    desk.conductor().advance(job.job_id)
    desk.rotate("north")
    desk.held(job, *AGENTS)
    desk.conductor().advance(job.job_id)
    assert desk.round(job).contributors == AGENTS


def test_a_round_that_needs_the_agent_says_so_at_once_and_its_charge_stands(desk: Desk) -> None:
    """Shares it sent before may be on their way, so nobody can say that nothing left."""
    job = desk.job()
    desk.conductor().advance(job.job_id)
    desk.rotate("north")
    desk.held(job)
    for agent in ("east", "west"):
        take_step(desk.house.jobs, "report_refusal", job.job_id, 0, agent, "no", True)
    desk.conductor().advance(job.job_id)
    assert "3 of 3 agents refused or had their keys changed" in desk.problem(job)
    assert desk.house.jobs.get(job.job_id).state == "failed"
    assert desk.house.ledger.state(f"{job.job_id}/0") == "posted"


def test_nothing_is_given_up_while_a_tallier_is_silent_or_the_moment_has_not_passed(desk: Desk) -> None:
    job = desk.job()
    desk.conductor().advance(job.job_id)
    desk.rotate("north")
    desk.conductor().advance(job.job_id)
    assert desk.house.jobs.get(job.job_id).state == "collecting"
    desk.held(job)
    desk.patience_s = 60.0
    desk.conductor().advance(job.job_id)
    assert desk.round(job).refusals == {}


def test_a_job_that_needs_an_agent_whose_keys_were_revoked_is_refused_and_charged_to_nobody(
    desk: Desk,
) -> None:
    job = desk.job()
    desk.house.parties.revoke("west")
    desk.conductor().advance(job.job_id)
    assert "1 of 3 agents will not take part" in desk.problem(job)
    assert desk.house.jobs.get(job.job_id).state == "refused"
    assert desk.house.ledger.state(f"{job.job_id}/proposed") == "void"
    assert desk.mail("t0") == []


def test_agents_that_are_asked_again_learn_the_keys_that_talliers_have_now(desk: Desk) -> None:
    job = desk.job()
    conductor = desk.conductor()
    conductor.advance(job.job_id)
    desk.rotate("t1")
    conductor.advance(job.job_id)
    first, again = (Ask.decode(message.body) for message in desk.mail("east"))
    assert first.round.digest == again.round.digest
    assert first.talliers[1].seal_key != again.talliers[1].seal_key
    assert again.talliers[1].seal_key == desk.house.parties.get("t1").seal_key


def test_a_round_opened_with_swapped_keys_is_refused_by_a_tallier(desk: Desk) -> None:
    """What a coordinator would have to send to have its own shares taken under an agent's name."""
    from labeler.rounds import tallier
    from labeler.rounds.tallier import TallierRound

    job = desk.job()
    desk.open(job)
    opening = OpenRound.decode(desk.openings("t0")[0])
    swapped = OpenRound(
        opening.round,
        opening.tallier,
        dict(opening.participants) | {"north": secrets.token_hex(32)},
        opening.expires_at,
    )
    opened, _ = tallier.step(TallierRound(opening.round.digest), tallier.Opened(opening, tallier.Site()), 0.0)
    after, effects = tallier.step(opened, tallier.Opened(swapped, tallier.Site()), 0.0)
    assert after == opened
    (refused,) = [one.error for one in effects if isinstance(one, tallier.Refuse)]
    assert isinstance(refused, WrongDigest)
    assert "never changes" in str(refused)


def test_a_batch_that_fits_into_no_message_is_not_asked_and_not_charged(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = desk.job()
    monkeypatch.setattr("labeler.driver.sending.MAX_MESSAGE_BYTES", 9000)
    desk.conductor().advance(job.job_id)
    ended = desk.house.jobs.get(job.job_id)
    assert ended.state == "failed"
    assert ended.problem is not None
    assert "ask fewer queries at once" in ended.problem["detail"]
    assert desk.house.ledger.state(f"{job.job_id}/0") == "void"
    assert desk.house.ledger.balance("federation", "instance").spent == 0
    assert {one.header.kind for party in (*AGENTS, *TALLIERS) for one in desk.mail(party)} == {"withdrawn"}


def test_nobody_is_asked_and_nothing_is_charged_while_a_tallier_is_missing(desk: Desk) -> None:
    job = desk.job()
    desk.house.parties.revoke("t2")
    desk.conductor().advance(job.job_id)
    assert desk.round(job).state == "waiting"
    assert desk.house.jobs.get(job.job_id).state == "collecting"
