"""Before anybody is charged: who is asked whether they will, what their word changes, and that a no costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from api.coordinator import pricing, submission
from api.coordinator.views import read_view
from api.schema import JobView
from labeler import batching, planning
from labeler.accounting.events import IntegerSum
from labeler.driver.intake import said_of
from labeler.driver.reading import parties_of
from labeler.errors import AwaitingApproval, InvalidSetting, NotReady, PrivacyRefusal
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection, Database
from labeler.messages.bodies import Ask, Declined, Proposal, Refusal, Willing, Withdrawn
from labeler.rounds.effects import JobRun, Patience, ProposalReply, RoundRun, stand
from tests.api.conftest import House
from tests.api.coordinator.test_conductor import AGENTS, Desk, desk, server  # noqa: F401  # fixtures
from tests.job_steps import take_step

LATER = Declined("job", Refusal(AwaitingApproval.problem_type, "a person has to approve", False))
NO = Declined("job", Refusal("policy-refusal", "allow.methods: not this one", True))


@pytest.fixture
def speaking(desk: Desk) -> Desk:  # noqa: F811
    """Agents that a test answers for."""
    for agent in AGENTS:
        contact(desk.house, agent, "labeler/0.2")
    desk.all_agree = False
    return desk


def contact(house: House, agent: str, version: str) -> None:
    facts: dict[str, Any] = {"classes": ["cat", "dog", "owl"], "backbone_fingerprint": "f" * 16, "version": version}
    house.parties.contact(agent, house.clock(), facts, Head(1, "a" * 64))


def say(desk: Desk, job: JobView, **said: Willing | Declined | str) -> None:  # noqa: F811
    """What agents answer: "yes", or a body."""
    for agent, body in said.items():
        until = (desk.house.clock() + timedelta(hours=1)).timestamp()
        answer = said_of(Willing(job.job_id, until) if isinstance(body, str) else body)
        desk.house.jobs.willingness.report(job.job_id, agent, answer)


def seen(desk: Desk, job: JobView) -> JobView:  # noqa: F811
    return read_view(job.job_id, desk.house.stores)


def kinds(desk: Desk, party: str) -> list[str]:  # noqa: F811
    return [message.header.kind for message in desk.mail(party)]


def spent(house: House) -> dict[str, int]:
    return {balance.account: balance.spent for balance in house.ledger.balances() if balance.level == "instance"}


def test_agents_are_asked_whether_they_will_before_there_are_questions(
    speaking: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = speaking.house.task()
    job = speaking.house.submit(task, 2)
    conductor = speaking.conductor()
    conductor.advance(job.job_id)
    (message,) = speaking.mail("east")
    proposal = Proposal.decode(message.body)
    assert (message.header.kind, message.header.round_digest) == ("proposal", "")
    assert (proposal.job_id, proposal.task.digest, proposal.sizes) == (job.job_id, task.digest, (2,))
    assert proposal.expires_at == job.expires_at.timestamp()
    assert kinds(speaking, "t0") == []
    view = seen(speaking, job)
    assert [(one.agent_id, one.reason) for one in view.waiting_for] == [(agent, "answer") for agent in AGENTS]


def test_only_once_a_quorum_is_willing_anybody_is_asked_or_charged_by_round(speaking: Desk) -> None:
    job = speaking.job()
    conductor = speaking.conductor()
    say(speaking, job, east="yes", north="yes")
    conductor.advance(job.job_id)
    assert seen(speaking, job).state == "queued"
    assert "ask" not in kinds(speaking, "east")
    say(speaking, job, west="yes")
    conductor.advance(job.job_id)
    assert seen(speaking, job).state == "collecting"
    assert all(kinds(speaking, agent)[-1] == "ask" for agent in AGENTS)
    states = [speaking.house.ledger.state(f"{job.job_id}/{name}") for name in ("proposed", "0")]
    assert states == ["void", "reserved"]


def test_no_price_is_worked_out_while_others_wait_for_the_journal(
    speaking: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A price may take seconds, and after a restart none is remembered."""
    writing, priced, write = [0], [], Database.write

    @contextmanager
    def noted(database: Database, **options: Any) -> Iterator[Connection]:
        with write(database, **options) as connection:
            writing[0] += 1
            try:
                yield connection
            finally:
                writing[0] -= 1

    def price_of(event: IntegerSum, *arguments: Any, **options: Any) -> float:
        priced.append(writing[0])
        return certified(event, *arguments, **options)

    def forget() -> None:
        for remembered in (pricing._price, pricing._price_view, planning._is_finite, batching._charges):
            remembered.cache_clear()

    certified = planning.epsilon_bound
    monkeypatch.setattr(Database, "write", noted)
    monkeypatch.setattr(planning, "epsilon_bound", price_of)
    job = speaking.job()
    say(speaking, job, east="yes", north="yes", west="yes")
    forget()
    before = len(priced)
    speaking.conductor().advance(job.job_id)
    assert speaking.house.ledger.state(f"{job.job_id}/0") == "reserved"
    assert len(priced) > before, "it was worked out anew"
    assert set(priced) == {0}


def test_a_job_that_cannot_reach_its_quorum_is_refused_with_every_reason_and_charged_to_nobody(speaking: Desk) -> None:
    job = speaking.job()
    assert set(spent(speaking.house).values()) != {0}
    conductor = speaking.conductor()
    say(speaking, job, east="yes", north=NO, west="yes")
    conductor.advance(job.job_id)
    view = seen(speaking, job)
    assert view.state == "refused"
    assert view.problem is not None
    assert view.problem.type.endswith("quorum-not-reached")
    assert "1 of 3 agents will not take part" in view.problem.detail
    assert view.declined == {"north": "allow.methods: not this one"}
    assert view.rounds[0].refused == view.declined
    assert view.rounds[0].state == "not-asked"
    assert view.stage == "refused before anybody was asked; nothing was charged. Declined: north"
    assert set(spent(speaking.house).values()) == {0}
    assert speaking.house.ledger.verify()
    # Those who had said yes learn that nothing comes.
    conductor.advance(job.job_id)
    assert [Withdrawn.decode(message.body).job_id for message in speaking.mail("east")[-1:]] == [job.job_id]
    assert "withdrawn" not in kinds(speaking, "north")
    assert "ask" not in kinds(speaking, "east")


def test_who_declined_is_neither_asked_nor_charged_where_a_quorum_remains(speaking: Desk) -> None:
    job = speaking.job(max_dropouts=1)
    say(speaking, job, east="yes", north=NO, west="yes")
    conductor = speaking.conductor()
    conductor.advance(job.job_id)
    assert "ask" not in kinds(speaking, "north")
    assert set(speaking.round(job).participants) == {"east", "west"}
    view = seen(speaking, job)
    assert view.rounds[0].waiting_for == ("east", "west")
    assert view.rounds[0].refused == {"north": "allow.methods: not this one"}
    charge = view.price.instance_charge_nano
    expected = {"federation": charge, "agent:east": charge, "agent:north": 0, "agent:west": charge}
    assert spent(speaking.house) == expected
    speaking.held(job, "east", "west")
    conductor.advance(job.job_id)
    assert speaking.round(job).contributors == ("east", "west")
    assert spent(speaking.house) == expected


def test_an_approval_is_waited_for_and_shown_as_such_and_the_job_goes_on_after_it(speaking: Desk) -> None:
    job = speaking.job()
    say(speaking, job, east="yes", north=LATER, west="yes")
    conductor = speaking.conductor()
    for _ in range(3):
        conductor.advance(job.job_id)
    view = seen(speaking, job)
    assert view.state == "queued"
    assert [(one.agent_id, one.reason) for one in view.waiting_for] == [("north", "approval")]
    assert view.stage == "questions are ready; waiting for approval by a person at north"
    assert view.rounds[0].refused == {}
    # It is asked again by itself, and nobody else is.
    assert kinds(speaking, "north").count("proposal") == 3
    assert "proposal" not in kinds(speaking, "east")
    say(speaking, job, north="yes")
    conductor.advance(job.job_id)
    assert seen(speaking, job).state == "collecting"


def test_a_job_that_waits_for_a_person_until_its_deadline_expires_at_no_charge(speaking: Desk) -> None:
    job = speaking.job()
    say(speaking, job, east="yes", north=LATER, west="yes")
    speaking.conductor().advance(job.job_id)
    speaking.house.clock.turn(days=2)
    speaking.conductor().advance(job.job_id)
    view = seen(speaking, job)
    assert view.state == "expired"
    assert view.problem is not None
    assert "north had not agreed to take part; nobody was asked" in view.problem.detail
    assert view.waiting_for == ()
    assert set(spent(speaking.house).values()) == {0}


def test_who_is_silent_is_waited_for_with_patience_where_a_quorum_is_willing(speaking: Desk) -> None:
    speaking.patience_s = 60.0
    job = speaking.job(max_dropouts=1)
    say(speaking, job, east="yes", west="yes")
    speaking.conductor().advance(job.job_id)
    assert seen(speaking, job).state == "queued"
    speaking.patience_s = 0.0
    conductor = speaking.conductor()
    conductor.advance(job.job_id)
    assert set(speaking.round(job).participants) == {"east", "west"}
    # One that says yes too late is told that nothing will be asked of it.
    assert speaking.deliver(conductor, "willing", "north", Willing(job.job_id, 2e9).encode(), job) == 1
    assert kinds(speaking, "north")[-1] == "withdrawn"


def test_a_yes_that_has_ended_is_none(speaking: Desk) -> None:
    job = speaking.job()
    now = speaking.house.clock()
    run = JobRun(
        job_id=job.job_id,
        task=speaking.house.tasks.get(job.task_id).task,
        participants=AGENTS,
        num_queries=2,
        expires_at_s=job.expires_at.timestamp(),
        patience=Patience(0.0, 0.0),
        state="queued",
        rounds=(RoundRun(0, 0, 2),),
        answers=dict.fromkeys(AGENTS, ProposalReply("willing", until_s=now.timestamp())),
        parties=parties_of(speaking.house.parties.list()),
    )
    assert stand(run, wall_s=now.timestamp()).willing == list(AGENTS)
    assert stand(run, wall_s=now.timestamp() + 1).silent == list(AGENTS)


def test_a_coordinator_that_forgot_everything_in_memory_goes_on_where_it_was(speaking: Desk) -> None:
    """Level-triggered: every turn by another conductor, as after a crash."""
    job = speaking.job()
    for agent in AGENTS:
        speaking.conductor().advance(job.job_id)
        say(speaking, job, **{agent: "yes"})
    speaking.conductor().advance(job.job_id)
    speaking.conductor().advance(job.job_id)
    assert speaking.round(job).state == "asked"
    assert Ask.decode(speaking.mail("west")[-1].body).task.digest == job.task_id


def test_sites_are_told_who_submitted_a_job(speaking: Desk) -> None:
    job = speaking.job()
    speaking.conductor().advance(job.job_id)
    found = {Proposal.decode(speaking.mail(agent)[-1].body).requester for agent in AGENTS}
    assert found == {f"named {seen(speaking, job).created_by}"}


def test_an_agent_that_was_never_heard_of_is_waited_for_and_gets_no_mail(speaking: Desk) -> None:
    speaking.house.parties.enrol("south", "agent", "1" * 64, "2" * 64)
    assert not parties_of(speaking.house.parties.list())["south"].is_heard


def test_a_requester_whose_jobs_tell_too_often_what_sites_would_pay_is_refused(speaking: Desk) -> None:
    house = speaking.house
    limits = house.config.limits.model_copy(update={"max_unasked_jobs_per_day": 2})
    object.__setattr__(house, "config", house.config.model_copy(update={"limits": limits}))
    task = house.task()
    # One that nobody had answered told nothing.
    submission.cancel(house.submit(task, 1, start=7).job_id, stores=house.stores)
    for number in range(2):
        job = house.submit(task, 1, start=number)
        say(speaking, job, east="yes")
        submission.cancel(job.job_id, stores=house.stores)
    before = spent(house)
    with pytest.raises(PrivacyRefusal, match="2 jobs of this token ended in the last 24 hours after agents replied"):
        house.submit(task, 1, start=5)
    assert spent(house) == before
    house.clock.turn(days=1, seconds=1)
    assert house.submit(task, 1, start=6).state == "queued"


def test_a_job_that_was_refused_after_it_was_taken_is_shown_to_who_sends_it_again(
    speaking: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = speaking.house.submit(speaking.house.task(), 2, key="k")
    say(speaking, job, north=NO)
    conductor = speaking.conductor()
    conductor.advance(job.job_id)
    task = speaking.house.tasks.get(job.task_id)
    again = speaking.house.submit(task, 2, key="k")
    assert (again.job_id, again.state) == (job.job_id, "refused")


def test_whom_a_job_asks_is_fixed_once_and_a_job_that_ended_is_not_divided(house: House) -> None:
    job = house.submit(house.task(), 2)
    house.begin(job.job_id, asked=("east", "west"))
    house.jobs.willingness.fix_asked(job.job_id, ("east", "west"))
    with pytest.raises(PrivacyRefusal, match="is fixed"):
        house.jobs.willingness.fix_asked(job.job_id, ("east",))
    with pytest.raises(InvalidSetting, match="at least one"):
        house.jobs.willingness.fix_asked(job.job_id, ())
    ended = house.submit(house.task(), 2)
    submission.cancel(ended.job_id, stores=house.stores)
    with pytest.raises(NotReady, match="has ended meanwhile"):
        house.begin(ended.job_id)
    assert house.ledger.state(f"{ended.job_id}/0") is None


def test_what_was_asked_without_being_divided_is_paid_for(house: House) -> None:
    job = house.submit(house.task(), 2)
    take_step(house.jobs, "set_batches", job.job_id, [(0, "1" * 64, "2" * 64)])
    house.jobs.change(job.job_id, "collecting", expected=["queued"])
    take_step(house.jobs, "set_asked", job.job_id, 0)
    record = house.jobs.get(job.job_id)
    house.stores.settlement.end(record, "failed", None)
    assert house.ledger.state(f"{job.job_id}/proposed") == "posted"


def test_a_failed_round_waits_for_nobody(speaking: Desk) -> None:
    job = speaking.job()
    say(speaking, job, east="yes", north="yes", west="yes")
    conductor = speaking.conductor()
    conductor.advance(job.job_id)
    assert [one.reason for one in seen(speaking, job).waiting_for] == ["share"] * 3
    for agent in AGENTS:
        take_step(speaking.house.jobs, "report_refusal", job.job_id, 0, agent, "lost", True)
    conductor.advance(job.job_id)
    view = seen(speaking, job)
    assert (view.state, view.rounds[0].state, view.rounds[0].waiting_for) == ("failed", "given-up", ())
    assert view.waiting_for == ()
    assert "had been asked" in view.stage
