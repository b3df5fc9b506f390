"""The coordinator's driver, turn by turn: what it takes, stores together, and keeps apart where it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Thread
from time import sleep
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from api.coordinator import submission
from api.coordinator.conductor import Conductor
from api.coordinator.ownership import Reader
from api.coordinator.views import read_view
from api.schema import JobRequest, JobView
from feature_store.rows import quantize
from labeler.driver.coordinator import CoordinatorDriver
from labeler.driver.intake import Delivery, Errand, incoming, with_heads
from labeler.driver.mail_memory import MemoryMailbox
from labeler.driver.reading import Plan
from labeler.driver.sending import Sender
from labeler.errors import InvalidSetting, JournalBehind, LabelerError, Replayed, Unavailable, WrongDigest
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.database import Connection
from labeler.ledger.parties import PartyStore
from labeler.ledger.sequences import Sequences
from labeler.ledger.tasks import TaskShares
from labeler.messages import COORDINATOR, Kind, Message, read_frames
from labeler.messages.bodies import AnswerSent, Willing, aggregate_to_bytes, holdings_to_bytes
from labeler.rounds.coordinator import LONGEST_PAUSE_S
from labeler.rounds.effects import Patience
from labeler.system.keys import PartyKeys
from labeler.tally import AggregateShare, Round
from tests.api.conftest import FINGERPRINT, House

AGENTS = ("east", "north", "west")
TALLIERS = ("t0", "t1", "t2")


@dataclass
class Site:
    """A driver over a real journal and a mailbox in memory; a test signs for every party."""

    house: House
    mailbox: MemoryMailbox = field(default_factory=MemoryMailbox)
    own: PartyKeys = field(default_factory=PartyKeys.generate)
    keys: dict[str, PartyKeys] = field(default_factory=dict)
    steady_s: float = 100.0
    sequence: int = 0

    def __post_init__(self) -> None:
        for agent in AGENTS:
            self._rotate(agent)
            facts: dict[str, Any] = {"classes": ["cat", "dog", "owl"], "backbone_fingerprint": FINGERPRINT}
            self.house.parties.contact(agent, self.house.clock(), facts | {"version": "labeler/0.2"}, Head(1, "a" * 64))
        for number, name in enumerate(TALLIERS):
            self.keys[name] = PartyKeys.generate()
            public = self.keys[name].public
            self.house.parties.enrol(name, "tallier", public.verify_key, public.seal_key, tallier=number)
        self.restart()

    def _rotate(self, name: str) -> None:
        self.keys[name] = PartyKeys.generate()
        public = self.keys[name].public
        self.house.parties.rotate(name, public.verify_key, public.seal_key)

    def restart(self) -> None:
        house = self.house
        self.conductor = Conductor(
            home=house.config.home,
            stores=replace(house.stores, sequences=Sequences(house.database)),
            keys=self.own,
            mailbox=self.mailbox,
            patience=Patience(0.0, 5.0),
            steady=lambda: self.steady_s,
        )

    def submit(self, *, by: str = "tok-1", prepared: bool = True, start: int = 0) -> JobView:
        task = self.house.task()
        TaskShares(self.house.database, clock=self.house.clock).add(task.digest, by)
        job = self.house.submit(task, 2, by=by, start=start)
        if prepared:
            vectors = np.array([[1.0 + number / 7, 2.0, -1.0] for number in range(2)])
            folder = self.house.config.home / "jobs" / job.job_id
            (folder / "questions.safetensors").write_bytes(save({"features": quantize(vectors)}))
        self.conductor.wake(job.job_id)
        return job

    def message(self, kind: Kind, sender: str, body: bytes, job: JobView, **header: Any) -> Message:
        self.sequence += 1
        fields: dict[str, Any] = {"recipient": COORDINATOR, "task_digest": job.task_id, "sequence": self.sequence}
        return self.keys[sender].message(kind, sender=sender, body=body, **(fields | header))

    def deliver(self, *messages: Message, error: LabelerError | None = None) -> list[int | LabelerError]:
        taken = [incoming(one, self.house.parties.get(one.header.sender), self.own) for one in messages]
        outcomes: list[int | LabelerError] = []
        self.conductor.deliver(Delivery(tuple(taken), error, outcomes.append))
        return outcomes

    def yes(self, agent: str, job: JobView) -> Message:
        return self.message("willing", agent, Willing(job.job_id, job.expires_at.timestamp()).encode(), job)

    def held(self, tallier: str, job: JobView) -> Message:
        body = holdings_to_bytes(dict.fromkeys(AGENTS, b"s" * 16))
        return self.message("holdings", tallier, body, job, round_digest=self.round_digest(job))

    def summed(self, number: int, job: JobView) -> Message:
        one = self.house.jobs.rounds(job.job_id)[0]
        of = self.house.tasks.get(job.task_id).task
        shape = (one.num_queries, of.num_classes)
        of_round = Round(of.digest, one.batch_digest, one.num_queries, of.num_classes, of.quorum)
        share = AggregateShare(number, of_round, frozenset(AGENTS), "b" * 64, np.zeros(shape, np.uint64), False)
        seal_to = self.own.public.seal_key
        body = aggregate_to_bytes(share)
        name = TALLIERS[number]
        return self.message("aggregate-share", name, body, job, round_digest=one.round_digest, seal_to=seal_to)

    def round_digest(self, job: JobView) -> str:
        return self.house.jobs.rounds(job.job_id)[0].round_digest

    def state(self, job: JobView) -> str:
        return self.house.jobs.get(job.job_id).state

    def waiting(self, party: str) -> int:
        return self.mailbox.all_pending([party])[party]

    def mail(self, party: str) -> list[Message]:
        """What waits for a party."""
        found = asyncio.run(self.mailbox.receive(party, "", 0.0, 100))
        return [message for _, frames in found for message in read_frames(frames, max_messages=1)]


@pytest.fixture
def site(house: House) -> Site:
    return Site(house)


def test_many_jobs_take_each_step_in_one_commit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [site.submit(by=f"tok-{number}") for number in range(6)]
    commits: list[int] = []
    write = type(site.house.database).write

    def counted(database: Any) -> Any:
        commits.append(1)
        return write(database)

    site.conductor.tick()
    for party in ("east", *TALLIERS):  # a block of numbers is taken before it is counted
        site.conductor.post_office._sequences.next(party)
    monkeypatch.setattr(type(site.house.database), "write", counted)
    # Every agent, then every tallier, with all of its messages in one delivery; all deliveries in one turn.
    outcomes = [site.deliver(*(site.yes(agent, job) for job in jobs)) for agent in AGENTS]
    site.conductor.tick()
    asked = len(commits)
    outcomes += [site.deliver(*(site.held(tallier, job) for job in jobs)) for tallier in TALLIERS]
    site.conductor.tick()
    held = len(commits) - asked
    outcomes += [site.deliver(*(site.summed(number, job) for job in jobs)) for number in range(3)]
    site.conductor.tick()
    assert outcomes == [[6]] * 9
    assert [site.state(job) for job in jobs] == ["completed"] * 6
    # One for what was said; then agreed and posted; then released.
    assert asked == 1
    assert held == 2
    assert len(commits) - asked - held == 1
    for job in jobs:
        assert site.house.ledger.state(f"{job.job_id}/0") == "posted"


def test_who_delivers_is_told_when_its_effect_is_durable_and_not_before(site: Site) -> None:
    job = site.submit()
    site.conductor.tick()
    outcomes = site.deliver(site.yes("east", job))
    assert outcomes == []
    site.conductor.tick()
    assert outcomes == [1]
    assert set(site.house.jobs.willingness.answers(job.job_id)) == {"east"}


def test_of_one_delivery_what_comes_before_the_first_refused_message_counts(site: Site) -> None:
    job = site.submit()
    site.conductor.tick()
    good, foreign, other = site.yes("east", job), site.yes("east", job), site.yes("east", job)
    wrong = site.message("willing", "east", Willing("job-nobody-has", 2e9).encode(), job)
    outcomes = site.deliver(good, wrong, foreign, other)
    site.conductor.tick()
    assert isinstance(outcomes[0], WrongDigest)
    assert set(site.house.jobs.willingness.answers(job.job_id)) == {"east"}
    again = site.deliver(good)
    site.conductor.tick()
    assert isinstance(again[0], Replayed)
    # Numbers of what was not taken are not used up.
    later = site.deliver(foreign)
    site.conductor.tick()
    assert later == [1]
    behind = site.deliver(other, error=Unavailable("what came behind it does not count"))
    site.conductor.tick()
    assert isinstance(behind[0], Unavailable)


def test_one_job_that_the_journal_refuses_harms_itself_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended by somebody else after a turn has read it; the others' step is kept."""
    jobs = [site.submit() for _ in range(3)]
    site.conductor.tick()
    for agent in AGENTS[:2]:
        site.deliver(*(site.yes(agent, job) for job in jobs))
    site.conductor.tick()
    driver, commit = site.conductor.driver, CoordinatorDriver._commit

    def overtaken(driver: CoordinatorDriver, plan: Plan) -> None:
        monkeypatch.setattr(CoordinatorDriver, "_commit", commit)
        submission.cancel(jobs[1].job_id, stores=site.house.stores)
        commit(driver, plan)

    monkeypatch.setattr(CoordinatorDriver, "_commit", overtaken)
    outcomes = site.deliver(*(site.yes("west", job) for job in jobs))
    site.conductor.tick()
    assert outcomes == [3], "of the second it is known by then that it has ended; its agent is told so"
    assert [site.state(job) for job in jobs] == ["collecting", "cancelled", "collecting"]
    assert driver.trouble(jobs[0].job_id) is None


def test_a_journal_that_cannot_be_written_loses_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = site.submit()
    site.conductor.tick()
    with monkeypatch.context() as broken:

        def full(_: Any) -> Any:
            raise Unavailable("the disk is full")

        broken.setattr(type(site.house.database), "write", full)
        outcomes = site.deliver(*(site.yes(agent, job) for agent in AGENTS[:1]))
        site.conductor.tick()
        assert isinstance(outcomes[0], Unavailable)
    assert site.house.jobs.willingness.answers(job.job_id) == {}
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.steady_s += LONGEST_PAUSE_S
    site.conductor.tick()
    assert site.state(job) == "collecting"


def test_a_journal_that_cannot_be_read_for_a_moment_loses_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """At that moment one job's look is due, another has what it agreed on durable, and an agent has other keys."""
    due, agreed = site.submit(), site.submit(by="tok-2")
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, agreed))
    site.conductor.tick()
    for tallier in TALLIERS:
        site.deliver(site.held(tallier, agreed))
    driver = site.conductor.driver
    driver.turn()
    assert driver._stored == [agreed.job_id]
    site._rotate("west")
    site.steady_s += LONGEST_PAUSE_S
    with monkeypatch.context() as broken:

        def away(*_: Any) -> Any:
            raise Unavailable("the journal is away")

        broken.setattr(driver._loader, "load", away)
        site.conductor.wake("another")
        site.conductor.tick()
    site.conductor.tick()
    assert site.house.ledger.state(f"{agreed.job_id}/0") == "posted"
    sent = site.waiting("west")
    site.steady_s += LONGEST_PAUSE_S
    site.conductor.tick()
    assert site.waiting("west") > sent, "the job whose look was lost asks again"
    assert driver._live[due.job_id].run.parties["west"].verify_key == site.keys["west"].public.verify_key


def test_a_job_whose_question_is_damaged_keeps_no_other_s_messages_back(site: Site) -> None:
    bad, good = site.submit(), site.submit(by="tok-2")
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, bad))
    site.conductor.tick()
    assert site.house.jobs.rounds(bad.job_id)[0].state == "asked"
    (site.house.config.home / "jobs" / bad.job_id / "questions.safetensors").write_bytes(b"damaged")
    site.restart()  # what was made of it is not in memory any more
    for agent in AGENTS:
        site.deliver(site.yes(agent, good))
    site.conductor.tick()
    site.conductor.tick()
    assert site.house.jobs.rounds(good.job_id)[0].state == "asked"
    asked = {one.header.round_digest for one in site.mail("east") if one.header.kind == "ask"}
    assert site.house.jobs.rounds(good.job_id)[0].round_digest in asked
    assert site.state(bad) == "failed"
    assert site.state(good) == "collecting"


def _asked_in_rounds_of_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> JobView:
    """A job of one question a round, whose agents have said yes."""
    monkeypatch.setattr(submission, "batch_queries_of", lambda *_: 1)
    job = site.submit()
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.conductor.tick()
    return job


def test_what_is_paid_for_is_opened_though_the_question_that_was_asked_meanwhile_is_damaged(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _asked_in_rounds_of_one(site, monkeypatch)
    site.deliver(*(site.held(tallier, job) for tallier in TALLIERS))
    site.conductor.tick()
    assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["posted", "asked"]
    (site.house.config.home / "jobs" / job.job_id / "questions.safetensors").write_bytes(b"damaged")
    site.restart()  # what was made of it is not in memory any more
    site.conductor.tick()
    for number in range(3):
        assert site.deliver(site.summed(number, job)) == []
        site.conductor.tick()
    site.steady_s += LONGEST_PAUSE_S
    site.conductor.tick()
    assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["opened", "asked"]
    assert site.house.jobs.release(job.job_id, 0) is not None
    assert site.state(job) == "failed"


def test_what_is_paid_for_is_opened_while_the_next_question_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _asked_in_rounds_of_one(site, monkeypatch)
    with monkeypatch.context() as away:

        def gone(*_: Any) -> None:
            raise Unavailable("the disk does not answer")

        away.setattr(Sender, "make", gone)
        site.deliver(*(site.held(tallier, job) for tallier in TALLIERS))
        site.conductor.tick()
        for number in range(3):
            site.deliver(site.summed(number, job))
            site.conductor.tick()
        assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["opened", "waiting"]
    site.steady_s += LONGEST_PAUSE_S
    site.conductor.tick()
    assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["opened", "asked"]


def test_a_job_whose_step_after_its_agreement_meets_a_defect_goes_on_at_its_next_look(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _asked_in_rounds_of_one(site, monkeypatch)
    with monkeypatch.context() as broken:

        def defect(*_: Any) -> None:
            raise MemoryError

        broken.setattr(Sender, "make", defect)  # of the round that would be asked while this one is summed
        site.deliver(*(site.held(tallier, job) for tallier in TALLIERS))
        site.conductor.tick()
        site.conductor.tick()
        assert site.state(job) == "tallying"
    for _ in range(2):
        site.steady_s += LONGEST_PAUSE_S
        site.conductor.tick()
    assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["posted", "asked"]


def test_shares_that_could_not_be_passed_on_are_sent_again_by_their_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.submit()
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.conductor.tick()
    before = site.waiting("t0")
    share = site.message(
        "input-share", "east", bytes(100), job,
        recipient="t0", round_digest=site.round_digest(job), seal_to=site.keys["t0"].public.seal_key,
    )  # fmt: skip
    with monkeypatch.context() as away:

        def gone(*_: Any, **__: Any) -> None:
            raise Unavailable("redis is away")

        away.setattr(MemoryMailbox, "send_all", gone)
        lost = site.deliver(share)
        site.conductor.tick()
    assert isinstance(lost[0], Unavailable)
    found = site.deliver(share)
    site.conductor.tick()
    assert (found, site.waiting("t0")) == ([1], before + 1)
    again = site.deliver(share)
    site.conductor.tick()
    assert isinstance(again[0], Replayed)


@pytest.mark.parametrize("count", [1, 2])
def test_no_share_is_passed_on_before_the_head_of_its_agents_journal_is_kept(site: Site, count: int) -> None:
    """Also where the receipt behind it is not taken any more: the head lies beside every message of the answer."""
    job = site.submit()
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.conductor.tick()
    digest, seal_to = site.round_digest(job), site.keys["t0"].public.seal_key
    share = site.message(
        "input-share", "east", bytes(100), job, recipient="t0", round_digest=digest, seal_to=seal_to
    )  # fmt: skip
    receipt = site.message("answered", "east", AnswerSent(7, "c" * 64).encode(), job, round_digest=digest)
    both = with_heads([incoming(one, site.house.parties.get("east"), site.own) for one in (share, receipt)])
    site.conductor.deliver(Delivery(both[:count], None, lambda _: None))
    site.conductor.tick()
    assert [message.header.kind for message in site.mail("t0")].count("input-share") == 1
    again = PartyStore(site.house.database)
    for parties in (site.house.parties, again):
        assert (parties.last_answer("east"), parties.last_answer("north")) == (Head(7, "c" * 64), EMPTY)
    with pytest.raises(JournalBehind, match="ended at entry 7 and now ends at entry 6"):
        again.contact("east", site.house.clock(), {}, Head(6, "b" * 64))


@pytest.mark.parametrize("first", range(3))
def test_what_a_requester_sees_is_the_same_whichever_agent_has_answered_until_the_round_ends(
    site: Site, first: int
) -> None:
    """Bytes of the view and its version, by which the stream of events says that there is something new."""
    job = site.submit()
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.conductor.tick()

    def seen() -> str:
        return read_view(job.job_id, site.house.stores).model_dump_json()

    asked, digest = seen(), site.round_digest(job)
    assert "3 of 3 agents" in asked
    has_answered: dict[str, bytes] = {}
    for agent in (AGENTS[first:] + AGENTS[:first])[:2]:
        for tallier in TALLIERS:
            share = site.message(
                "input-share", agent, bytes(100), job,
                recipient=tallier, round_digest=digest, seal_to=site.keys[tallier].public.seal_key,
            )  # fmt: skip
            site.deliver(share)
            site.conductor.tick()
            assert seen() == asked
        has_answered[agent] = b"s" * 16
        for tallier in TALLIERS:
            site.deliver(site.message("holdings", tallier, holdings_to_bytes(has_answered), job, round_digest=digest))
            site.conductor.tick()
            assert seen() == asked
    cancelled = submission.cancel(job.job_id, stores=site.house.stores)
    assert cancelled.rounds[0].answered == ()


def test_a_restarted_driver_goes_on_with_every_unfinished_job(site: Site) -> None:
    jobs = [site.submit() for _ in range(3)]
    for agent in AGENTS:
        site.restart()
        site.conductor.tick()
        outcomes = site.deliver(*(site.yes(agent, job) for job in jobs))
        site.conductor.tick()
        assert outcomes == [3]
    for number, tallier in enumerate(TALLIERS):
        site.restart()
        site.deliver(*(site.held(tallier, job) for job in jobs))
        site.conductor.tick()
        assert {site.state(job) for job in jobs} == {"tallying" if number == 2 else "collecting"}
    for number in range(3):
        site.restart()
        site.deliver(*(site.summed(number, job) for job in jobs))
        site.conductor.tick()
    assert {site.state(job) for job in jobs} == {"completed"}
    assert {site.house.ledger.state(f"{job.job_id}/0") for job in jobs} == {"posted"}
    assert site.house.ledger.verify()


def test_what_lay_in_the_mail_of_a_killed_process_is_asked_for_again_in_the_first_turn_of_the_next(site: Site) -> None:
    """Mail in memory is lost with it, and nobody waits until it is time to ask again."""

    def lying() -> tuple[list[str], list[str]]:
        return tuple([one.header.kind for one in site.mail(party)] for party in ("west", "t0"))  # type: ignore[return-value]

    def after_a_kill() -> tuple[list[str], list[str]]:
        site.mailbox.empty()
        site.restart()
        site.conductor.tick()
        return lying()

    job = site.submit()
    site.conductor.tick()
    assert (lying(), after_a_kill()) == ((["proposal"], []), (["proposal"], []))
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.conductor.tick()
    assert (lying(), after_a_kill()) == ((["proposal", "ask"], []), (["ask"], []))
    share = site.message(
        "input-share", "east", bytes(100), job,
        recipient="t0", round_digest=site.round_digest(job), seal_to=site.keys["t0"].public.seal_key,
    )  # fmt: skip
    site.deliver(share)
    site.conductor.tick()
    assert (lying(), after_a_kill()) == ((["ask"], ["open-round", "input-share"]), (["ask"], ["open-round"]))
    for tallier in TALLIERS:
        site.deliver(site.held(tallier, job))
    site.conductor.tick()
    assert (lying(), after_a_kill()) == ((["ask"], ["open-round", "sum"]), ([], ["sum"]))


def test_a_requester_with_many_jobs_does_not_fill_the_mail_before_anothers_job(site: Site) -> None:
    for number in range(12):
        site.submit(by="loud", prepared=False, start=number)
    site.conductor.tick()
    full = site.waiting("east")
    assert full < 12
    site.submit(by="quiet", prepared=False, start=50)
    site.conductor.tick()
    assert site.waiting("east") == full + 1


def test_a_job_that_others_wake_all_the_time_does_not_keep_another_from_being_looked_at(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud, quiet = site.submit(prepared=False), site.submit(prepared=False, start=9)
    looked: list[str] = []
    questions = site.conductor.driver._stepper._questions
    monkeypatch.setattr(questions, "look", lambda job, _: looked.append(job.job_id))
    for _ in range(150):
        site.conductor.wake(loud.job_id)
        site.conductor.tick()
        site.steady_s += 0.4
    assert looked.count(quiet.job_id) >= 40


def test_what_was_lost_of_a_wake_is_found_by_looking(site: Site) -> None:
    job = site.submit(prepared=False)
    site.conductor.driver.woken.clear()
    site.conductor.tick()
    assert job.job_id in site.conductor.driver._live
    submission.cancel(job.job_id, stores=site.house.stores)
    site.steady_s += 2.0
    site.conductor.tick()
    assert job.job_id not in site.conductor.driver._live


def test_nothing_is_kept_of_jobs_that_have_ended(site: Site) -> None:
    job = site.submit()
    site.conductor.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.conductor.tick()
    late = site.held("t0", job)
    submission.cancel(job.job_id, stores=site.house.stores)
    site.conductor.wake(job.job_id)
    site.conductor.tick()
    driver = site.conductor.driver
    assert (driver._live, driver._loader.of_round, driver._stored) == ({}, {}, [])
    outcomes = site.deliver(late), site.deliver(site.yes("east", job))
    site.conductor.tick()
    assert isinstance(outcomes[0][0], WrongDigest)
    assert outcomes[1] == [1]
    assert (driver._live, driver._loader.of_round) == ({}, {})


def test_a_driver_that_is_closed_tells_whoever_still_delivers_to_send_again(site: Site) -> None:
    job = site.submit()
    site.conductor.tick()
    early = site.deliver(site.yes("east", job))
    site.conductor.driver.close()
    late = site.deliver(site.yes("west", job))
    assert isinstance(early[0], Unavailable)
    assert isinstance(late[0], Unavailable)


def test_a_message_under_a_key_that_was_changed_meanwhile_is_sent_again(site: Site) -> None:
    job = site.submit()
    site.conductor.tick()
    outcomes = site.deliver(site.yes("east", job))
    site._rotate("east")
    site.conductor.tick()
    assert isinstance(outcomes[0], Unavailable)
    assert site.house.jobs.willingness.answers(job.job_id) == {}


def test_what_others_write_shares_the_commit_of_a_turn_and_is_refused_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five submissions, of which the third finds no queries left, beside an agent's yes."""
    job = site.submit()
    site.conductor.tick()
    task = site.house.task(max_queries=7)
    stores = replace(site.house.stores, hand_in=site.conductor.hand_in)
    outcomes: dict[int, JobView | LabelerError] = {}

    def submit(number: int, count: int) -> None:
        request = JobRequest.model_validate({"task_id": task.digest, "backbone_fingerprint": FINGERPRINT})
        try:
            outcomes[number] = submission.submit(
                request,
                site.house.upload(count, start=7 * number),
                reader=Reader("tok-1", "requester"),
                owners=site.house.owners,
                idempotency_key=f"key-{number}",
                config=site.house.config,
                stores=stores,
            )
        except LabelerError as error:
            outcomes[number] = error

    threads = []
    for number, count in enumerate((2, 1, 6, 1, 1)):
        threads.append(Thread(target=submit, args=(number, count)))
        threads[-1].start()
        while len(site.conductor.driver.errands) <= number:
            sleep(0.001)
    told = site.deliver(site.yes("east", job))
    commits: list[int] = []
    write = type(site.house.database).write

    def counted(database: Any) -> Any:
        commits.append(1)
        return write(database)

    monkeypatch.setattr(type(site.house.database), "write", counted)
    site.conductor.tick()
    for thread in threads:
        thread.join()
    assert len(commits) == 1
    assert told == [1]
    assert isinstance(outcomes.pop(2), InvalidSetting)
    for view in outcomes.values():
        assert isinstance(view, JobView)
        assert view == read_view(view.job_id, site.house.stores)
    assert site.house.tasks.get(task.digest).next_query == 5
    assert not [one for one in site.house.files() if one.startswith("incoming/")]
    site.house.ledger.verify()


def test_a_turn_that_fails_as_a_whole_is_done_again_errand_by_errand(site: Site) -> None:
    def defect(_: Connection) -> None:
        raise ZeroDivisionError

    told: dict[str, BaseException | None] = {}
    task = site.house.task()
    tasks = site.house.tasks

    def hand_in(name: str, write: Callable[[Connection], Any]) -> None:
        site.conductor.hand_in(Errand(write, lambda error: told.update({name: error})))

    hand_in("first", lambda connection: tasks.claim_queries(task.digest, 3, connection=connection))
    hand_in("defect", defect)
    hand_in("refused", lambda connection: tasks.claim_queries(task.digest, 98, connection=connection))
    hand_in("last", lambda connection: tasks.claim_queries(task.digest, 4, connection=connection))
    site.conductor.tick()
    assert told["first"] is None
    assert told["last"] is None
    assert isinstance(told["defect"], ZeroDivisionError)
    assert isinstance(told["refused"], InvalidSetting)
    assert tasks.get(task.digest).next_query == 7
    site.conductor.driver.close()
    hand_in("late", lambda _: None)
    assert isinstance(told["late"], Unavailable)
