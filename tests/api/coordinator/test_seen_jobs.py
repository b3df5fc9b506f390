"""A job that has not changed is not read again, and one that has is never shown as it was."""

from __future__ import annotations

from collections.abc import Callable

from api.coordinator import submission
from api.coordinator.seen_jobs import FRESH_S, MOST, SeenJobs
from api.schema import JobView
from feature_store.journal.willingness import AgentAnswer
from tests.api.conftest import House


def test_every_change_of_a_job_is_seen_and_nothing_is_read_twice(house: House) -> None:
    read: list[str] = []

    def reading(job_id: str) -> JobView:
        read.append(job_id)
        return submission.read_job(job_id, stores=house.stores)

    seen = SeenJobs(reading)
    house.database.listen(seen.changed)
    job_id = house.submit(house.task(), 2).job_id

    def check(reads: int) -> None:
        for _ in range(3):
            shown = seen.look(job_id)
            assert shown.view == submission.read_job(job_id, stores=house.stores)
            assert JobView.model_validate_json(shown.body) == shown.view
            assert seen.at_once(job_id) is shown
        assert len(read) == reads

    check(1)
    with house.database.write() as connection:
        house.jobs.willingness.report(job_id, "east", AgentAnswer("declined", "x", "no"), connection=connection)
        house.jobs.touch(job_id, connection=connection)
    check(2)
    house.jobs.set_batches(job_id, [(0, "1" * 64, "2" * 64)])
    check(3)
    house.begin(job_id)
    check(4)
    house.jobs.set_asked(job_id, 0)
    check(5)
    house.jobs.fix_contributors(job_id, 0, ["east"])
    check(6)
    with house.database.write() as connection:
        seq = house.ledger.post(f"{job_id}/0", connection=connection)
        house.jobs.set_posted(job_id, 0, seq, connection=connection)
    check(7)
    house.jobs.store_release(job_id, 0, b"release")
    house.jobs.change(job_id, "completed", expected=["collecting"])
    check(8)


def test_a_job_that_changes_while_it_is_read_is_read_again_whoever_reads_it(house: House) -> None:
    job_id = house.submit(house.task(), 2).job_id
    in_between: list[Callable[[], None]] = []

    def reading(asked: str) -> JobView:
        view = submission.read_job(asked, stores=house.stores)
        if in_between:
            in_between.pop()()
        return view

    seen = SeenJobs(reading)
    house.database.listen(seen.changed)

    def cancelled_after_another_look() -> None:
        assert seen.look(job_id).view.state == "queued"  # begins later, ends earlier
        submission.cancel(job_id, stores=house.stores)

    in_between.append(cancelled_after_another_look)
    assert seen.look(job_id).view.state == "queued", "that is what it was when it was read"
    assert seen.at_once(job_id) is None
    assert seen.look(job_id).view.state == "cancelled"


def test_what_nobody_told_of_is_found_out_soon(house: House) -> None:
    now_s = [0.0]
    seen = SeenJobs(lambda job_id: submission.read_job(job_id, stores=house.stores), steady=lambda: now_s[0])
    job_id = house.submit(house.task(), 2).job_id
    seen.look(job_id)
    submission.cancel(job_id, stores=house.stores)
    now_s[0] = FRESH_S - 0.1
    assert seen.look(job_id).view.state == "queued"
    now_s[0] = FRESH_S
    assert seen.at_once(job_id) is None
    assert seen.look(job_id).view.state == "cancelled"


def test_what_is_remembered_stays_small(house: House) -> None:
    view = house.submit(house.task(), 2)
    seen = SeenJobs(lambda job_id: view.model_copy(update={"job_id": job_id}))

    for number in range(MOST + 10):
        seen.look(f"job-{number}")
    assert len(seen._kept) == MOST
    assert not seen._reading
