"""What a job's agents and talliers say, and what becomes of its charge: over a real journal, turn by turn.

labeler/rounds has the rules of the machine by themselves; here is what they do to the journal, the mail and the views.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from api.coordinator import pricing, submission
from api.limits import TooManyRequests
from api.problems import problem_of
from labeler import batching, planning
from labeler.accounting.events import IntegerSum
from labeler.driver.mail_memory import MemoryMailbox
from labeler.errors import InvalidSetting, NotReady, PrivacyRefusal, Unavailable, WrongDigest
from labeler.ledger.database import Connection, Database
from labeler.ledger.jobs import JobState, RoundRecord
from labeler.messages.bodies import Ask, OpenRound, Proposal, RefusalBody, Settled, Withdrawn
from labeler.release import release_from_bytes
from labeler.rounds import tallier
from labeler.rounds.tallier import TallierRound
from tests.api.conftest import House
from tests.api.coordinator.site import AGENTS, LATER, NO, TALLIERS, YES, Site
from tests.job_steps import take_step


@pytest.fixture
def site(house: House) -> Site:
    return Site(house)


# Whether agents will.


def test_agents_are_asked_whether_they_will_before_there_are_questions_and_told_who_submitted(site: Site) -> None:
    job = site.submit(prepared=False)
    site.thread.tick()
    (message,) = site.mail("east")
    proposal = Proposal.decode(message.body)
    assert (message.header.kind, message.header.round_digest) == ("proposal", "")
    assert (proposal.job_id, proposal.task.digest, proposal.sizes) == (job.job_id, job.task_id, (2,))
    assert proposal.expires_at == job.expires_at.timestamp()
    assert proposal.requester == f"named {job.created_by}"
    assert site.kinds("t0") == []
    assert [(one.agent_id, one.reason) for one in site.seen(job).waiting_for] == [(agent, "answer") for agent in AGENTS]


def test_only_once_a_quorum_is_willing_anybody_is_asked_or_charged_by_round(site: Site) -> None:
    job = site.submit()
    assert site.say(job, east=YES, north=YES).state == "queued"
    assert "ask" not in site.kinds("east")
    assert site.say(job, west=YES).state == "collecting"
    assert all(site.kinds(agent)[-1] == "ask" for agent in AGENTS)
    assert (site.charge(job, "proposed"), site.charge(job)) == ("void", "reserved")


def test_no_price_is_worked_out_while_others_wait_for_the_journal(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
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

    certified = planning.epsilon_bound
    monkeypatch.setattr(Database, "write", noted)
    monkeypatch.setattr(planning, "epsilon_bound", price_of)
    job = site.submit()
    site.say(job, east=YES, north=YES)
    for remembered in (pricing._price, pricing._price_view, planning._is_finite, batching._charges):
        remembered.cache_clear()
    before = len(priced)
    site.say(job, west=YES)
    assert site.charge(job) == "reserved"
    assert len(priced) > before, "it was worked out anew"
    assert set(priced) == {0}


@pytest.mark.parametrize(
    ("reason", "slug", "status"),
    [("policy-refusal", "quorum-not-reached", 503), ("refused-by-person", "refused-by-person", 403)],
)
def test_a_job_that_cannot_reach_its_quorum_is_refused_with_every_reason_and_charged_to_nobody(
    site: Site, reason: str, slug: str, status: int
) -> None:
    job = site.submit()
    assert set(site.spent().values()) != {0}
    view = site.say(job, east=YES, north=RefusalBody(reason, "allow.methods: not this one", True), west=YES)
    assert view.problem is not None
    assert (view.state, view.problem.type.rpartition(":")[2], view.problem.status) == ("refused", slug, status)
    assert view.problem.detail.count("north says: allow.methods: not this one") == 1
    assert view.declined == view.rounds[0].refused == {"north": "allow.methods: not this one"}
    assert view.rounds[0].state == "not-asked"
    assert view.stage == "refused before anybody was asked; nothing was charged. Declined: north"
    assert set(site.spent().values()) == {0}
    assert site.house.ledger.verify()
    # Those who had said yes learn that nothing comes.
    assert Withdrawn.decode(site.mail("east")[-1].body).job_id == job.job_id
    assert "withdrawn" not in site.kinds("north")
    assert "ask" not in site.kinds("east")


def test_who_declined_or_is_silent_is_neither_asked_nor_charged_where_a_quorum_remains(site: Site) -> None:
    job = site.submit(max_dropouts=1)
    view = site.say(job, east=YES, north=NO, west=YES)
    assert "ask" not in site.kinds("north")
    assert set(site.round(job).participants) == {"east", "west"}
    assert (view.rounds[0].waiting_for, set(view.rounds[0].refused)) == (("east", "west"), {"north"})
    charge = view.price.instance_charge_nano
    expected = {"federation": charge, "agent:east": charge, "agent:north": 0, "agent:west": charge}
    assert site.spent() == expected
    site.hold(job, "east", "west")
    assert site.round(job).contributors == ("east", "west")
    assert site.spent() == expected
    # One that says yes too late is told that nothing will be asked of it.
    site.restart(patience_s=60.0)
    patient = site.submit(max_dropouts=1)
    assert site.say(patient, east=YES, west=YES).state == "queued"
    site.restart()
    assert site.look(patient).state == "collecting"
    site.say(patient, north=YES)
    assert site.kinds("north")[-1] == "withdrawn"


def test_an_approval_is_waited_for_and_shown_as_such_and_the_job_goes_on_after_it(site: Site) -> None:
    job = site.submit()
    view = site.say(job, east=YES, north=LATER, west=YES)
    for _ in range(2):
        view = site.look(job, after_s=100.0)
    assert view.state == "queued"
    assert [(one.agent_id, one.reason) for one in view.waiting_for] == [("north", "approval")]
    assert view.stage == "questions are ready; waiting for approval by a person at north"
    assert view.rounds[0].refused == {}
    assert site.kinds("north").count("proposal") >= 3, "it is asked again by itself"
    assert "proposal" not in site.kinds("east"), "and nobody else is"
    assert site.say(job, north=YES).state == "collecting"


def test_a_requester_whose_jobs_tell_too_often_what_sites_would_pay_is_refused(site: Site) -> None:
    house = site.house
    limits = house.config.limits.model_copy(update={"max_unasked_jobs_per_day": 2})
    object.__setattr__(house, "config", house.config.model_copy(update={"limits": limits}))
    task = house.task()
    # One counts whether or not agents had answered its proposal.
    submission.cancel(house.submit(task, 1, start=7).job_id, stores=house.stores)
    site.later(days=0, seconds=3600)
    job = house.submit(task, 1, start=1)
    site.look(job)
    site.say(job, east=YES)
    submission.cancel(job.job_id, stores=house.stores)
    before = site.spent()
    with pytest.raises(TooManyRequests, match="of 2 jobs of this token in the last 24 hours no agent was asked") as no:
        house.submit(task, 1, start=5)
    assert no.value.retry_after_s == 23 * 3600
    assert problem_of(no.value)["status"] == 429
    assert site.spent() == before
    house.tasks.share(task.digest, "tok-2")
    assert house.submit(task, 1, by="tok-2").state == "queued", "it counts against its own token only"
    site.later(days=0, seconds=23 * 3600 - 1)
    with pytest.raises(TooManyRequests):
        house.submit(task, 1, start=5)
    site.later(days=0, seconds=2)
    assert house.submit(task, 1, start=6).state == "queued"


def test_jobs_that_end_unasked_count_however_they_end_and_leave_few_entries(house: House) -> None:
    limits = house.config.limits.model_copy(update={"max_unasked_jobs_per_day": 5})
    object.__setattr__(house, "config", house.config.model_copy(update={"limits": limits}))
    task = house.task()
    before = house.ledger.head().seq
    for number, state in enumerate(("cancelled", "refused", "expired", "failed")):
        job = house.submit(task, 1, start=number)
        house.stores.settlement.end(house.jobs.get(job.job_id), cast(JobState, state), None)
    assert house.ledger.head().seq <= before + 4 * 4, "two levels of one account, reserved and given back"
    assert {one.spent for one in house.ledger.balances()} == {0}
    job = house.submit(task, 1, start=4)
    house.begin(job.job_id)
    submission.cancel(job.job_id, stores=house.stores)
    with pytest.raises(TooManyRequests, match="5 jobs"):
        house.submit(task, 1, start=5)


def test_jobs_that_wait_count_as_ended_unasked_until_somebody_is_asked(house: House) -> None:
    """Else any number could be submitted first and cancelled later."""
    limits = house.config.limits.model_copy(update={"max_unasked_jobs_per_day": 3})
    object.__setattr__(house, "config", house.config.model_copy(update={"limits": limits}))
    task = house.task()
    waiting = [house.submit(task, 1, start=number) for number in range(3)]
    with pytest.raises(TooManyRequests, match="3 jobs") as no:
        house.submit(task, 1, start=3)
    assert no.value.retry_after_s == 60, "one may be asked soon"
    take_step(house.jobs, "set_batches", waiting[0].job_id, [(0, "1" * 64, "2" * 64)])
    house.begin(waiting[0].job_id)
    take_step(house.jobs, "set_asked", waiting[0].job_id, 0)
    assert house.submit(task, 1, start=4).state == "queued"
    for job in waiting[1:]:
        submission.cancel(job.job_id, stores=house.stores)


def test_a_job_that_was_refused_after_it_was_taken_is_shown_to_who_sends_it_again(site: Site) -> None:
    job = site.house.submit(site.house.task(), 2, key="k")
    site.look(job)
    site.say(job, north=NO)
    again = site.house.submit(site.house.tasks.get(job.task_id), 2, key="k")
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
    house.stores.settlement.end(house.jobs.get(job.job_id), "failed", None)
    assert house.ledger.state(f"{job.job_id}/proposed") == "posted"


# Asked.


def test_whose_shares_are_taken_is_durable_before_anybody_is_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = site.submit()
    site.say(job, east=YES, north=YES)
    seen: list[RoundRecord] = []
    monkeypatch.setattr(MemoryMailbox, "send_all", lambda *_, **__: seen.append(site.round(job)))
    site.say(job, west=YES)
    assert seen
    assert all(set(one.participants) == set(AGENTS) and one.state == "asked" for one in seen)


def test_a_batch_that_fits_into_no_message_is_not_asked_and_not_charged(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labeler.driver.sending.MAX_MESSAGE_BYTES", 9000)
    job = site.asked()
    view = site.seen(job)
    assert view.problem is not None
    assert (view.state, site.charge(job)) == ("failed", "void")
    assert "ask fewer queries at once" in view.problem.detail
    assert set(site.spent().values()) == {0}
    assert {site.kinds(party)[-1] for party in AGENTS} == {"withdrawn"}


# Keys that change while a round runs.


def test_a_tallier_is_told_the_same_round_again_after_keys_were_rotated_and_refuses_others(site: Site) -> None:
    """A coordinator would have to send other keys to have its own shares taken under an agent's name."""
    job = site.asked()
    before = site.round(job).participants
    site.look(job, after_s=10.0)
    site.rotate("north")
    site.restart()
    site.look(job, after_s=10.0)
    site.look(job, after_s=10.0)
    bodies = [message.body for message in site.mail("t0") if message.header.kind == "open-round"]
    assert len(set(bodies)) == 1
    opening = OpenRound.decode(bodies[0])
    assert dict(opening.participants) == site.round(job).participants == before
    swapped = OpenRound(opening.round, opening.tallier, before | {"north": secrets.token_hex(32)}, opening.expires_at)
    opened, _ = tallier.step(
        TallierRound(opening.round.digest), tallier.OpeningCame(opening, tallier.TallierSite()), 0.0
    )
    after, effects = tallier.step(opened, tallier.OpeningCame(swapped, tallier.TallierSite()), 0.0)
    (refused,) = [one.error for one in effects if isinstance(one, tallier.RefuseEvent)]
    assert after == opened
    assert isinstance(refused, WrongDigest)


def test_a_round_that_needs_the_agent_says_so_at_once_and_its_charge_stands(site: Site) -> None:
    """Shares it sent before may be on their way, so nobody can say that nothing left."""
    job = site.asked()
    site.rotate("north")
    assert site.look(job).state == "collecting", "no tallier has said yet what it holds"
    site.hold(job, "east", "west")
    view = site.look(job)
    assert view.problem is not None
    assert "1 of 3 agents refused or had their keys changed" in view.problem.detail
    assert (view.state, site.charge(job)) == ("failed", "posted")


def test_a_job_that_needs_an_agent_whose_keys_were_revoked_is_refused_and_charged_to_nobody(site: Site) -> None:
    job = site.submit()
    site.say(job, east=YES, north=YES)
    site.house.parties.revoke("west")
    view = site.look(job)
    assert view.problem is not None
    assert "1 of 3 agents will not take part" in view.problem.detail
    assert (view.state, site.charge(job, "proposed"), site.mail("t0")) == ("refused", "void", [])


def test_agents_that_are_asked_again_learn_the_keys_that_talliers_have_now(site: Site) -> None:
    job = site.asked()
    site.rotate("t1")
    site.look(job, after_s=100.0)
    first, *_, again = (Ask.decode(message.body) for message in site.mail("east") if message.header.kind == "ask")
    assert first.round.digest == again.round.digest
    assert first.talliers[1].seal_key != again.talliers[1].seal_key == site.keys["t1"].public.seal_key


# Winners.


@pytest.fixture
def finding(site: Site) -> tuple[Site, Any]:
    """A job of which three talliers find the winners."""
    job = site.asked(release="winner", abstain_below=4)
    site.hold(job)
    assert [site.kinds(name).count("sum") for name in TALLIERS] == [1, 1, 1]
    return site, job


def test_three_equal_answers_are_the_release_and_agents_are_told_once_that_it_is_settled(
    finding: tuple[Site, Any],
) -> None:
    site, job = finding
    assert "talliers are finding the winners of 3 agents' votes" in site.seen(job).stage
    site.refuse("t1", job, "tallier 0 has left in the middle of the job", is_final=False)
    assert "not at the first attempt, see what t1 said" in site.look(job).stage
    for number in range(3):
        assert "answered" not in site.kinds("east")
        site.deliver(site.won(number, job, [2, -1]))
        site.thread.tick()
    assert site.state(job) == "completed"
    release = release_from_bytes(site.house.jobs.release(job.job_id, 0) or b"")
    assert (release.kind, release.labels.tolist(), release.noisy_votes) == ("winner", [2, -1], None)
    site.restart()
    site.look(job)
    for agent in AGENTS:
        (message,) = (one for one in site.mail(agent) if one.header.kind == "answered")
        assert (Settled.decode(message.body), message.header.round_digest) == (Settled(), site.round(job).round_digest)


def test_a_tallier_that_answers_differently_voids_the_round_and_is_named(finding: tuple[Site, Any]) -> None:
    site, job = finding
    for number, labels in enumerate(([2, 1], [2, 0], [2, 1])):
        site.deliver(site.won(number, job, labels))
    view = site.look(job)
    assert view.problem is not None
    assert "tallier 1 answered differently from the others" in view.problem.detail
    assert site.round(job).round_digest in [one.header.round_digest for one in site.mail("east")[-1:]]


def test_a_mailbox_that_cannot_be_reached_does_not_undo_what_was_opened(
    finding: tuple[Site, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, job = finding

    def away(*_: object, **__: object) -> None:
        raise Unavailable("redis is away")

    monkeypatch.setattr(MemoryMailbox, "send_all", away)
    for number in range(3):
        site.deliver(site.won(number, job, [2, -1]))
    assert site.look(job).state == "completed"
