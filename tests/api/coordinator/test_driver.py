"""The coordinator's driver, turn by turn: what it takes, stores together, and keeps apart where it is refused."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from api.coordinator import coordinator_thread, submission
from api.coordinator.coordinator_thread import QuestionMaker
from api.coordinator.views import read_view
from labeler.driver.coordinator import CoordinatorDriver
from labeler.driver.intake import Delivery, incoming, with_heads
from labeler.driver.mail_memory import MemoryMailbox
from labeler.driver.reading import TurnPlan
from labeler.errors import JournalBehind, Replayed, Unavailable, WrongDigest
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.parties import PartyStore
from labeler.messages.bodies import AnswerSent, Willing, holdings_to_bytes
from labeler.rounds.coordinator import LONGEST_PAUSE_S
from tests.api.conftest import House
from tests.api.coordinator.site import AGENTS, TALLIERS, YES, Site


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

    site.thread.tick()
    for party in ("east", *TALLIERS):  # a block of numbers is taken before it is counted
        site.thread.post_office._sequences.next(party)
    monkeypatch.setattr(type(site.house.database), "write", counted)
    # Every agent, then every tallier, with all of its messages in one delivery; all deliveries in one turn.
    outcomes = [site.deliver(*(site.yes(agent, job) for job in jobs)) for agent in AGENTS]
    site.thread.tick()
    asked = len(commits)
    outcomes += [site.deliver(*(site.held(tallier, job) for job in jobs)) for tallier in TALLIERS]
    site.thread.tick()
    held = len(commits) - asked
    outcomes += [site.deliver(*(site.summed(number, job) for job in jobs)) for number in range(3)]
    site.thread.tick()
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
    site.thread.tick()
    outcomes = site.deliver(site.yes("east", job))
    assert outcomes == []
    site.thread.tick()
    assert outcomes == [1]
    assert set(site.house.jobs.willingness.answers(job.job_id)) == {"east"}


def test_of_one_delivery_what_comes_before_the_first_refused_message_counts(site: Site) -> None:
    job = site.submit()
    site.thread.tick()
    good, foreign, other = site.yes("east", job), site.yes("east", job), site.yes("east", job)
    wrong = site.message("willing", "east", Willing("job-nobody-has", 2e9).encode(), job)
    outcomes = site.deliver(good, wrong, foreign, other)
    site.thread.tick()
    assert isinstance(outcomes[0], WrongDigest)
    assert set(site.house.jobs.willingness.answers(job.job_id)) == {"east"}
    again = site.deliver(good)
    site.thread.tick()
    assert isinstance(again[0], Replayed)
    # Numbers of what was not taken are not used up.
    later = site.deliver(foreign)
    site.thread.tick()
    assert later == [1]
    behind = site.deliver(other, error=Unavailable("what came behind it does not count"))
    site.thread.tick()
    assert isinstance(behind[0], Unavailable)


def test_one_job_that_the_journal_refuses_harms_itself_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended by somebody else after a turn has read it; the others' step is kept."""
    jobs = [site.submit() for _ in range(3)]
    site.thread.tick()
    for agent in AGENTS[:2]:
        site.deliver(*(site.yes(agent, job) for job in jobs))
    site.thread.tick()
    driver, commit = site.driver, CoordinatorDriver._commit

    def overtaken(driver: CoordinatorDriver, plan: TurnPlan) -> None:
        monkeypatch.setattr(CoordinatorDriver, "_commit", commit)
        submission.cancel(jobs[1].job_id, stores=site.house.stores)
        commit(driver, plan)

    monkeypatch.setattr(CoordinatorDriver, "_commit", overtaken)
    outcomes = site.deliver(*(site.yes("west", job) for job in jobs))
    site.thread.tick()
    assert outcomes == [3], "of the second it is known by then that it has ended; its agent is told so"
    assert [site.state(job) for job in jobs] == ["collecting", "cancelled", "collecting"]
    assert driver.trouble(jobs[0].job_id) is None


def test_a_journal_that_cannot_be_written_loses_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = site.submit()
    site.thread.tick()
    with monkeypatch.context() as broken:

        def full(_: Any) -> Any:
            raise Unavailable("the disk is full")

        broken.setattr(type(site.house.database), "write", full)
        outcomes = site.deliver(*(site.yes(agent, job) for agent in AGENTS[:1]))
        site.thread.tick()
        assert isinstance(outcomes[0], Unavailable)
    assert site.house.jobs.willingness.answers(job.job_id) == {}
    for agent in AGENTS:
        site.deliver(site.yes(agent, job))
    site.steady_s += LONGEST_PAUSE_S
    site.thread.tick()
    assert site.state(job) == "collecting"


def test_a_job_waits_while_there_is_no_room_for_its_questions_and_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.submit(prepared=False)
    with monkeypatch.context() as full:

        def no_room(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(coordinator_thread, "write_questions", no_room)
        for _ in range(3):
            assert site.look(job, after_s=LONGEST_PAUSE_S).state == "queued"
    site.look(job, after_s=LONGEST_PAUSE_S)
    assert site.say(job, east=YES, north=YES, west=YES).state == "collecting"


def test_a_job_whose_question_is_damaged_keeps_no_other_s_messages_back(site: Site) -> None:
    bad, good = site.submit(), site.submit(by="tok-2")
    site.thread.tick()
    for agent in AGENTS:
        site.deliver(site.yes(agent, bad))
    site.thread.tick()
    assert site.house.jobs.rounds(bad.job_id)[0].state == "asked"
    (site.house.config.home / "jobs" / bad.job_id / "questions.safetensors").write_bytes(b"damaged")
    site.restart()  # what was made of it is not in memory any more
    for agent in AGENTS:
        site.deliver(site.yes(agent, good))
    site.thread.tick()
    site.thread.tick()
    assert site.house.jobs.rounds(good.job_id)[0].state == "asked"
    asked = {one.header.round_digest for one in site.mail("east") if one.header.kind == "ask"}
    assert site.house.jobs.rounds(good.job_id)[0].round_digest in asked
    assert site.state(bad) == "failed"
    assert site.state(good) == "collecting"


def test_what_is_paid_for_is_opened_though_the_question_that_was_asked_meanwhile_is_damaged(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "batch_queries_of", lambda *_: 1)
    job = site.asked()
    site.deliver(*(site.held(tallier, job) for tallier in TALLIERS))
    site.thread.tick()
    assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["posted", "asked"]
    (site.house.config.home / "jobs" / job.job_id / "questions.safetensors").write_bytes(b"damaged")
    site.restart()  # what was made of it is not in memory any more
    site.thread.tick()
    for number in range(3):
        assert site.deliver(site.summed(number, job)) == []
        site.thread.tick()
    site.steady_s += LONGEST_PAUSE_S
    site.thread.tick()
    assert [one.state for one in site.house.jobs.rounds(job.job_id)] == ["opened", "asked"]
    assert site.house.jobs.release(job.job_id, 0) is not None
    assert site.state(job) == "failed"


def test_shares_that_could_not_be_passed_on_are_sent_again_by_their_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.asked()
    before = site.waiting("t0")
    share = site.share("east", "t0", job)
    with monkeypatch.context() as away:

        def gone(*_: Any, **__: Any) -> None:
            raise Unavailable("redis is away")

        away.setattr(MemoryMailbox, "send_all", gone)
        lost = site.deliver(share)
        site.thread.tick()
    assert isinstance(lost[0], Unavailable)
    found = site.deliver(share)
    site.thread.tick()
    assert (found, site.waiting("t0")) == ([1], before + 1)
    again = site.deliver(share)
    site.thread.tick()
    assert isinstance(again[0], Replayed)


@pytest.mark.parametrize("count", [1, 2])
def test_no_share_is_passed_on_before_the_head_of_its_agents_journal_is_kept(site: Site, count: int) -> None:
    """Also where the receipt behind it is not taken any more: the head lies beside every message of the answer."""
    job = site.asked()
    digest = site.round(job).round_digest
    share = site.share("east", "t0", job)
    receipt = site.message("answered", "east", AnswerSent(7, "c" * 64).encode(), job, round_digest=digest)
    both = with_heads([incoming(one, site.house.parties.get("east"), site.own) for one in (share, receipt)])
    site.driver.deliver(Delivery(both[:count], None, lambda _: None))
    site.thread.tick()
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
    job = site.asked()

    def seen() -> str:
        return read_view(job.job_id, site.house.stores).model_dump_json()

    asked, digest = seen(), site.round(job).round_digest
    assert "3 of 3 agents" in asked
    has_answered: dict[str, bytes] = {}
    for agent in (AGENTS[first:] + AGENTS[:first])[:2]:
        for tallier in TALLIERS:
            site.deliver(site.share(agent, tallier, job))
            site.thread.tick()
            assert seen() == asked
        has_answered[agent] = b"s" * 16
        for tallier in TALLIERS:
            site.deliver(site.message("holdings", tallier, holdings_to_bytes(has_answered), job, round_digest=digest))
            site.thread.tick()
            assert seen() == asked
    cancelled = submission.cancel(job.job_id, stores=site.house.stores)
    assert cancelled.rounds[0].answered == ()


def test_a_requester_with_many_jobs_does_not_fill_the_mail_before_anothers_job(site: Site) -> None:
    for number in range(12):
        site.submit(by="loud", prepared=False, start=number)
    site.thread.tick()
    full = site.waiting("east")
    assert full < 12
    site.submit(by="quiet", prepared=False, start=50)
    site.thread.tick()
    assert site.waiting("east") == full + 1


def test_a_job_that_others_wake_all_the_time_does_not_keep_another_from_being_looked_at(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud, quiet = site.submit(prepared=False), site.submit(prepared=False, start=9)
    looked: list[str] = []
    monkeypatch.setattr(QuestionMaker, "look", lambda _, job, __: looked.append(job.job_id))
    for _ in range(150):
        site.driver.wake(loud.job_id)
        site.thread.tick()
        site.steady_s += 0.4
    assert looked.count(quiet.job_id) >= 40


def test_a_driver_that_is_closed_tells_whoever_still_delivers_to_send_again(site: Site) -> None:
    job = site.submit()
    site.thread.tick()
    early = site.deliver(site.yes("east", job))
    site.driver.close()
    late = site.deliver(site.yes("west", job))
    assert isinstance(early[0], Unavailable)
    assert isinstance(late[0], Unavailable)


def test_a_message_under_a_key_that_was_changed_meanwhile_is_sent_again(site: Site) -> None:
    job = site.submit()
    site.thread.tick()
    outcomes = site.deliver(site.yes("east", job))
    site.rotate("east")
    site.thread.tick()
    assert isinstance(outcomes[0], Unavailable)
    assert site.house.jobs.willingness.answers(job.job_id) == {}
