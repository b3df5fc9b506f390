"""Evidence of a coordinator's journal: what it says, that it stays the same, and that an edited journal gives none."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta

import pytest

from api.coordinator.budgets import signed_evidence
from api.schema import JobView
from feature_store.results.evidence import SignedEvidence, read_signed
from labeler.errors import Forged, JournalBehind, JournalBroken, ProtocolViolation
from labeler.evidence.derive import derive, differences
from labeler.evidence.document import JournalFacts
from labeler.ledger.chain import Head, time_of
from labeler.ledger.evidence import EvidenceScope, coordinator_facts, forgotten
from labeler.ledger.jobs import ForgottenJobs
from labeler.ledger.tasks import TaskRecord
from labeler.rounds.effects import ProposalReply
from labeler.system.keys import PartyKeys
from tests.api.conftest import House
from tests.job_steps import take_step

KEYS = PartyKeys.generate()


def made(house: House, wanted: EvidenceScope) -> SignedEvidence:
    return signed_evidence(wanted, database=house.database, keys=KEYS, delta=house.config.delta, clock=house.clock)


def again(house: House, facts: JournalFacts) -> JournalFacts:
    """The facts read again, as of a document's head and moment."""
    with house.database.read() as connection:
        return coordinator_facts(
            connection,
            EvidenceScope.of(facts.scope),
            delta=house.config.delta,
            read_at=time_of(facts.journal.read_at),
            head=Head(facts.journal.entries, facts.journal.head),
        )


def ask(house: House, record: TaskRecord, view: JobView, *, asked: tuple[str, ...], post: bool = True) -> None:
    """Take a job through its rounds, as the driver does, with those that said yes."""
    store = house.jobs
    take_step(
        store,
        "set_batches",
        view.job_id,
        [(one.number, f"{one.number:064x}", _digest(view, one.number)) for one in view.rounds],
    )
    for agent in set(record.participants) - set(asked):
        store.willingness.report(view.job_id, agent, ProposalReply("declined", "policy-refusal", "k is at most 3 here"))
    house.begin(view.job_id, asked=asked)
    for one in view.rounds:
        take_step(store, "set_asked", view.job_id, one.number)
        if not post:
            continue
        take_step(store, "fix_contributors", view.job_id, one.number, asked)
        detail = {"job": view.job_id, "queries": one.queries, "contributors": list(asked)}
        seq = house.ledger.post(f"{view.job_id}/{one.number}", detail=detail)
        take_step(store, "set_posted", view.job_id, one.number, seq)
        take_step(store, "store_release", view.job_id, one.number, b"the release")
    if post:
        house.clock.turn(minutes=1)
        store.change(view.job_id, "completed", expected={"collecting"})


def _digest(view: JobView, number: int) -> str:
    return f"{abs(hash((view.job_id, number))) % 16**60:064x}"


@pytest.fixture
def record(house: House) -> TaskRecord:
    return house.task(max_dropouts=1)


@pytest.fixture
def asked(house: House, record: TaskRecord) -> JobView:
    """A completed job of which one agent of three did not want to know."""
    view = house.submit(record, 20)
    ask(house, record, view, asked=("east", "west"))
    return view


def test_a_document_says_who_was_asked_who_refused_and_what_it_cost(
    house: House, record: TaskRecord, asked: JobView
) -> None:
    document = made(house, EvidenceScope(record.digest)).evidence
    [task] = document.facts.tasks
    [job] = task.jobs
    [one] = job.rounds
    assert (job.job_id, job.state, job.asked) == (asked.job_id, "completed", ("east", "west"))
    assert [(refusal.agent, refusal.said, refusal.sentence) for refusal in job.refusals] == [
        ("north", "declined", "k is at most 3 here")
    ]
    assert (one.charge, one.questions, one.contributors) == ("posted", 20, ("east", "west"))
    assert one.posted_entry is not None
    assert house.ledger.entries(after=one.posted_entry - 1, limit=1)[0].kind == "post"
    assert {charge.account for charge in one.charges} == {"federation", "agent:east", "agent:west"}
    assert len(one.release_digest) == 64
    head = house.ledger.head()
    assert (document.facts.journal.entries, document.facts.journal.head) == (head.seq, head.hash)
    [found] = document.tasks
    assert (found.cohort.participants, found.cohort.fewest_contributors) == (3, 2)
    assert document.remarks == ()


def test_a_signed_file_comes_back_and_a_changed_one_is_found_out(
    house: House, record: TaskRecord, asked: JobView
) -> None:
    signed = made(house, EvidenceScope(record.digest))
    data = signed.to_bytes()
    assert read_signed(data) == signed
    signed.check(KEYS.public.verify_key)
    with pytest.raises(Forged, match="another key"):
        signed.check(PartyKeys.generate().public.verify_key)
    with pytest.raises(Forged, match="does not hold"):
        read_signed(data.replace(b"k is at most 3 here", b"k is at most 4 here")).check()
    with pytest.raises(ProtocolViolation, match="one spelling"):
        read_signed(data.replace(b'"tasks":', b'"tasks": ', 1))


def test_a_journal_that_went_on_still_says_what_a_document_said(
    house: House, record: TaskRecord, asked: JobView
) -> None:
    under_way = house.submit(record, 5, start=40)
    ask(house, record, under_way, asked=("east", "west"), post=False)
    document = made(house, EvidenceScope(record.digest)).evidence
    assert [job.state for job in document.facts.tasks[0].jobs] == ["completed", "under way"]
    house.clock.turn(hours=1)
    for one in under_way.rounds:
        take_step(house.jobs, "fix_contributors", under_way.job_id, one.number, ("east", "west"))
        seq = house.ledger.post(f"{under_way.job_id}/{one.number}", detail={"contributors": ["east", "west"]})
        take_step(house.jobs, "set_posted", under_way.job_id, one.number, seq)
        take_step(house.jobs, "store_release", under_way.job_id, one.number, b"later")
    house.jobs.change(under_way.job_id, "completed", expected={"collecting"})
    ask(house, record, house.submit(record, 3, start=60), asked=("north", "west"))
    assert not differences(document, derive(again(house, document.facts), document.software))
    later = made(house, EvidenceScope(record.digest)).evidence
    assert [job.state for job in later.facts.tasks[0].jobs] == ["completed"] * 3


def test_a_period_holds_the_jobs_submitted_in_it(house: House, record: TaskRecord, asked: JobView) -> None:
    house.clock.turn(days=10)
    other = house.task(name="birds")
    ask(house, other, house.submit(other, 7), asked=tuple(other.participants))
    begin = house.clock.now - timedelta(days=1)
    assert [task.digest for task in made(house, EvidenceScope(since=begin)).evidence.facts.tasks] == [other.digest]
    assert [task.digest for task in made(house, EvidenceScope(until=begin)).evidence.facts.tasks] == [record.digest]
    assert len(made(house, EvidenceScope()).evidence.facts.tasks) == 2
    assert made(house, EvidenceScope(since=begin, until=begin + timedelta(hours=1))).evidence.facts.tasks == ()


def test_names_and_words_of_a_requester_are_not_in_it(house: House, record: TaskRecord) -> None:
    view = house.submit(record, 2, name="march-of-patient-meier")
    ask(house, record, view, asked=("east", "west"), post=False)
    problem = {"type": "urn:labeler:problem:bad-data", "detail": "meier-2.png cannot be read"}
    house.jobs.change(view.job_id, "failed", expected={"collecting"}, problem=problem)
    data = made(house, EvidenceScope(record.digest)).to_bytes()
    assert b"meier" not in data
    assert b"bad-data" in data


def test_a_forgotten_job_keeps_its_charges_and_loses_the_words_of_refusals(house: House, record: TaskRecord) -> None:
    view = house.submit(record, 4)
    ask(house, record, view, asked=("east", "west"), post=False)
    take_step(house.jobs, "report_refusal", view.job_id, 0, "east", "our budget is spent", is_final=True)
    house.jobs.change(view.job_id, "failed", expected={"collecting"})
    before = made(house, EvidenceScope(record.digest)).evidence
    ForgottenJobs(house.database, clock=house.clock).forget(view.job_id, "asked")
    after = again(house, before.facts)
    with house.database.read() as connection:
        assert forgotten(connection, before.facts) == {view.job_id}
    assert before.facts.tasks[0].jobs[0].rounds[0].refusals[0].sentence == "our budget is spent"
    assert after.tasks[0].jobs[0].rounds[0].refusals == ()
    assert after.accounts == before.facts.accounts


EDITS = {
    "an entry's amount": "UPDATE ledger_entries SET amount = amount - 1 WHERE kind = 'post'",
    "an entry": "DELETE FROM ledger_entries WHERE seq = (SELECT max(seq) FROM ledger_entries)",
    "a balance": "UPDATE ledger_accounts SET posted = posted - 1 WHERE account = 'federation'",
    "a round": "DELETE FROM rounds",
    "its questions": "UPDATE rounds SET num_queries = 19",
    "who was summed": "UPDATE rounds SET contributors = '[\"east\"]'",
    "who was asked": "UPDATE job_asked SET agents = '[\"east\"]'",
    "the task of a job": "UPDATE jobs SET num_queries = 19",
    "the noise of a task": "UPDATE tasks SET body = replace(body, '\"sigma_votes\":40.0', '\"sigma_votes\":90.0')",
    "the agents of a task": 'UPDATE tasks SET participants = \'["east","north","south"]\'',
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_journal_gives_no_evidence(house: House, record: TaskRecord, asked: JobView, edit: str) -> None:
    assert made(house, EvidenceScope()).evidence.facts.tasks
    path = house.database.path
    assert path is not None
    with closing(sqlite3.connect(path)) as connection, connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            connection.execute(f'DROP TRIGGER "{name}"')
        assert connection.execute(EDITS[edit]).rowcount > 0
    with pytest.raises((JournalBroken, JournalBehind)):
        made(house, EvidenceScope())


def test_a_journal_that_was_cut_is_not_the_one_of_the_document(
    house: House, record: TaskRecord, asked: JobView
) -> None:
    document = made(house, EvidenceScope(record.digest)).evidence
    facts = document.facts
    beyond = facts.model_copy(
        update={"journal": facts.journal.model_copy(update={"entries": facts.journal.entries + 1})}
    )
    with pytest.raises(JournalBehind, match="does not hold entry"):
        again(house, beyond)
    other = facts.model_copy(update={"journal": facts.journal.model_copy(update={"head": "ab" * 32})})
    with pytest.raises(JournalBehind, match="another party's"):
        again(house, other)
