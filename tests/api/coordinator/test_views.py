"""What people see of a job and of other parties' words, and when those who watch are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Literal, cast

import pytest

from api.coordinator import service
from api.coordinator.service import Coordinator
from api.coordinator.views import ledger_in_words, ledger_seq, read_view, refusals
from api.schema import JobView, RoundView
from labeler.driver.mail_memory import MemoryMailbox
from labeler.errors import LabelerError, QuorumNotReached
from labeler.ledger.jobs import RoundCharge, RoundRecord
from labeler.rounds.coordinator import MAX_REASON_CHARACTERS, printable
from tests.api.conftest import House
from tests.job_steps import take_step


def test_words_of_another_party_are_shown_on_one_line_bounded_and_harmless() -> None:
    assert printable("the policy allows  nothing\n today") == "the policy allows nothing today"
    assert printable("\x1b]0;owned\x07 \x1b[2J\u202e") == "?]0;owned? ?[2J?"
    assert len(printable("x" * 5000)) == MAX_REASON_CHARACTERS
    assert printable("x" * 5000).endswith("...")
    assert printable("x" * MAX_REASON_CHARACTERS) == "x" * MAX_REASON_CHARACTERS


def test_a_refusal_in_a_job_is_shown_that_way(house: House) -> None:
    view = house.submit(house.task(), 5)
    take_step(house.jobs, "set_batches", view.job_id, [(0, "1" * 64, "2" * 64)])
    house.jobs.change(view.job_id, "collecting", expected={"queued"})
    take_step(house.jobs, "set_asked", view.job_id, 0)
    take_step(house.jobs, "report_refusal", view.job_id, 0, "north", "no\x1b[2J " + "x" * 1900, True)
    shown = read_view(view.job_id, house.stores).rounds[0].refused["north"]
    assert shown.startswith("no?[2J xxx")
    assert len(shown) == MAX_REASON_CHARACTERS


def _end(house: House, job_id: str, error: LabelerError) -> JobView:
    stores = house.stores
    job = stores.jobs.get(job_id)
    stores.settlement.end(job, "failed", error)
    return read_view(job_id, stores)


def test_a_job_names_the_entries_of_its_charge_however_it_ended(house: House) -> None:
    waiting = house.submit(house.task(), 5)
    reserved = [one for one in house.ledger.entries(limit=1000) if one.reservation_id == f"{waiting.job_id}/proposed"]
    assert (waiting.ledger_seq, waiting.ledger) == (None, f"reserved by entry {reserved[0].seq}")
    take_step(house.jobs, "set_batches", waiting.job_id, [(0, "1" * 64, "2" * 64)])
    house.begin(waiting.job_id)
    take_step(house.jobs, "set_asked", waiting.job_id, 0)
    failed = _end(house, waiting.job_id, QuorumNotReached("too few agents answered"))
    posted = [one.seq for one in house.ledger.entries(limit=1000) if one.kind == "post"]
    assert (failed.state, failed.ledger_seq) == ("failed", posted[0])
    assert failed.ledger == f"charged by entry {posted[0]}"

    untouched = house.submit(house.task(), 5)
    given_back = _end(house, untouched.job_id, QuorumNotReached("nobody was there"))
    names = {f"{untouched.job_id}/proposed"}
    void = [one.seq for one in house.ledger.entries(limit=1000) if one.kind == "void" and one.reservation_id in names]
    assert (given_back.ledger_seq, given_back.ledger) == (None, f"given back by entry {void[0]}")


def test_a_job_of_several_batches_says_what_became_of_each() -> None:
    def one(number: int, state: Literal["posted", "void", "reserved"], seq: int) -> RoundRecord:
        return RoundRecord("job", number, number, 1, charge=RoundCharge(state, seq))

    rounds = [one(0, "posted", 40), one(1, "posted", 52), one(2, "void", 60)]
    assert (
        ledger_in_words(rounds)
        == "2 of 3 batches charged, last by entry 52; 1 of 3 batches given back, last by entry 60"
    )
    assert ledger_seq(rounds) == 52
    assert ledger_in_words([]) == "no entry: nothing was reserved"


def test_a_reason_is_counted_once_however_many_batches_it_was_given_for() -> None:
    def one(number: int, **refused: str) -> RoundView:
        return RoundView(number=number, queries=1, state="asked", refused=refused)

    found = refusals([one(0, north="the budget is spent"), one(1, north="the budget is spent", west="no approval")])
    assert [(each.party_id, each.reason, each.rounds) for each in found] == [
        ("north", "the budget is spent", (0, 1)),
        ("west", "no approval", (1,)),
    ]


def test_changes_are_told_together_and_the_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEAST_BETWEEN_S", 25.0)
    monkeypatch.setattr(service, "WATCH_S", 20.0)
    mailbox = MemoryMailbox()

    async def watched() -> tuple[bool, str]:
        of = cast(Coordinator, SimpleNamespace(_mailbox=mailbox))
        change = asyncio.create_task(Coordinator._next_change(of, "job-1", "", 30.0))
        for _ in range(3):
            mailbox.send_all([], tell=["job-1"])
            for _ in range(50):
                await asyncio.sleep(0)
        waits = not change.done()
        mailbox.send_all([], tell=["job-1"], ended=["job-1"])
        return waits, await asyncio.wait_for(change, 30.0)

    async def all_of_it() -> list[tuple[str, bool]]:
        return await mailbox.watch("job-1", "", 0.0)

    waits, position = asyncio.run(watched())
    events = asyncio.run(all_of_it())
    assert waits
    assert position == events[-1][0]
    assert [has_ended for _, has_ended in events] == [False, False, False, True]


def test_a_job_that_goes_on_is_told_of_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEAST_BETWEEN_S", 0.01)
    mailbox = MemoryMailbox()
    mailbox.send_all([], tell=["job-1"])
    of = cast(Coordinator, SimpleNamespace(_mailbox=mailbox))
    assert asyncio.run(Coordinator._next_change(of, "job-1", "", 5.0))
