"""A job that has not changed is not read again, and one that has is never shown as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial

import pytest

from api.coordinator import submission, views
from api.coordinator.seen_jobs import FRESH_S, MOST, SeenJobs, Unseen
from api.coordinator.views import read_views
from api.schema import JobView
from labeler.errors import Unavailable
from labeler.rounds.effects import Said
from tests.api.conftest import House
from tests.job_steps import take_step


def looked(house: House, job_ids: Collection[str]) -> dict[str, Unseen]:
    return read_views(job_ids, database=house.database, tasks=house.tasks)


def test_every_change_of_a_job_is_seen_and_nothing_is_read_twice(house: House) -> None:
    read: list[str] = []

    def reading(job_ids: Collection[str]) -> dict[str, Unseen]:
        read.extend(job_ids)
        return looked(house, job_ids)

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
        house.jobs.willingness.report(job_id, "east", Said("declined", "x", "no"), connection=connection)
        house.jobs.touch(job_id, connection=connection)
    check(2)
    take_step(house.jobs, "set_batches", job_id, [(0, "1" * 64, "2" * 64)])
    check(3)
    house.begin(job_id)
    check(4)
    take_step(house.jobs, "set_asked", job_id, 0)
    check(5)
    take_step(house.jobs, "fix_contributors", job_id, 0, ["east"])
    check(6)
    with house.database.write() as connection:
        seq = house.ledger.post(f"{job_id}/0", connection=connection)
        take_step(house.jobs, "set_posted", job_id, 0, seq, connection=connection)
    check(7)
    take_step(house.jobs, "store_release", job_id, 0, b"release")
    house.jobs.change(job_id, "completed", expected=["collecting"])
    check(8)


def test_a_job_that_changes_while_it_is_read_is_read_again_whoever_reads_it(house: House) -> None:
    job_id = house.submit(house.task(), 2).job_id
    in_between: list[Callable[[], None]] = []

    def reading(asked: Collection[str]) -> dict[str, Unseen]:
        views = looked(house, asked)
        if in_between:
            in_between.pop()()
        return views

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
    seen = SeenJobs(partial(looked, house), steady=lambda: now_s[0])
    job_id = house.submit(house.task(), 2).job_id
    seen.look(job_id)
    submission.cancel(job_id, stores=house.stores)
    now_s[0] = FRESH_S - 0.1
    assert seen.look(job_id).view.state == "queued"
    now_s[0] = FRESH_S
    assert seen.at_once(job_id) is None
    assert seen.look(job_id).view.state == "cancelled"


def test_a_job_that_somebody_looks_at_is_read_anew_when_it_changes_until_it_has_ended(house: House) -> None:
    read: list[list[str]] = []

    def reading(job_ids: Collection[str]) -> dict[str, Unseen]:
        read.append(sorted(job_ids))
        return looked(house, job_ids)

    seen = SeenJobs(reading)
    house.database.listen(seen.changed)
    looked_at, submitted, other = (house.submit(house.task(), 2).job_id for _ in range(3))
    seen.look(looked_at)
    seen.expect(submitted)
    seen.refresh()
    assert read == [[looked_at], [submitted]]
    for digit, job_id in zip("abc", (looked_at, submitted, other), strict=True):
        take_step(house.jobs, "set_batches", job_id, [(0, digit * 64, digit * 64)])
    assert seen.at_once(looked_at) is seen.at_once(submitted) is None, "what was is not shown while it is read"
    seen.refresh()
    assert read[2:] == [sorted([looked_at, submitted])], "one read for both, and none of what nobody looks at"
    for job_id in (looked_at, submitted):
        shown = seen.at_once(job_id)
        assert shown is not None
        assert shown.view == submission.read_job(job_id, stores=house.stores)
    submission.cancel(looked_at, stores=house.stores)
    seen.refresh()
    ended = seen.at_once(looked_at)
    assert ended is not None
    assert ended.is_final
    seen.changed("job", looked_at)
    assert not seen._stale, "a job that has ended is read when somebody asks"


def test_a_job_that_changes_while_it_is_read_anew_is_read_once_more(house: House) -> None:
    job_id = house.submit(house.task(), 2).job_id
    in_between: list[Callable[[], object]] = []

    def reading(asked: Collection[str]) -> dict[str, Unseen]:
        views = looked(house, asked)
        if in_between:
            in_between.pop()()
        return views

    seen = SeenJobs(reading)
    house.database.listen(seen.changed)
    seen.expect(job_id)
    in_between.append(lambda: submission.cancel(job_id, stores=house.stores))
    seen.refresh()
    shown = seen.at_once(job_id)
    assert shown is not None
    assert shown.view.state == "cancelled"


def test_the_thread_that_reads_anew_goes_on_after_a_journal_that_could_not_be_read_and_ends(house: House) -> None:
    job_id = house.submit(house.task(), 2).job_id
    fails, read, stopping = [Unavailable("the disk is away")], threading.Event(), threading.Event()

    def reading(asked: Collection[str]) -> dict[str, Unseen]:
        if fails:
            raise fails.pop()
        views = looked(house, asked)
        read.set()
        return views

    seen = SeenJobs(reading)
    thread = threading.Thread(target=seen.run, args=(stopping,))
    thread.start()
    seen.expect(job_id)
    while fails:
        time.sleep(0.001)
    seen.expect(job_id)
    assert read.wait(30)
    stopping.set()
    seen.ring()
    thread.join(30)
    assert not thread.is_alive()


def plain(make: Callable[[], JobView]) -> Unseen:
    return Unseen(is_final=False, num_rounds=1, is_small=True, make=make)


def test_a_view_is_made_when_somebody_looks_and_once(house: House) -> None:
    view = house.submit(house.task(), 2)
    made: list[int] = []
    seen = SeenJobs(
        lambda _: {
            view.job_id: Unseen(is_final=False, num_rounds=1, is_small=True, make=lambda: made.append(1) or view)
        }
    )
    for _ in range(3):
        seen.expect(view.job_id)
        seen.refresh()
    assert made == []
    first = seen.at_once(view.job_id)
    assert first is not None
    assert first.view == view
    assert seen.look(view.job_id) is first
    assert made == [1]


def test_a_view_that_takes_long_to_make_is_made_where_it_is_read_and_then_found_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at once holds up everybody, whether the job is theirs or not."""
    job_id = house.submit(house.task(), 2).job_id
    monkeypatch.setattr(views, "SMALL_SIZE", 10)
    seen = SeenJobs(partial(looked, house))
    seen.expect(job_id)
    seen.refresh()
    assert seen.at_once(job_id) is None
    found = seen.look_all([job_id])[job_id]
    assert seen.at_once(job_id) is found


def test_what_is_remembered_stays_small(house: House) -> None:
    view = house.submit(house.task(), 2)
    seen = SeenJobs(
        lambda job_ids: {
            job_id: Unseen(is_final=False, num_rounds=1, is_small=True, make=lambda: view) for job_id in job_ids
        }
    )

    for number in range(MOST + 10):
        seen.look(f"job-{number}")
    assert len(seen._kept) == MOST
    for number in range(MOST + 10):
        seen.expect(f"job-{number}")
    assert len(seen._stale) == MOST
    seen.refresh()
    assert not seen._stale
    assert len(seen._kept) == MOST
    assert not seen._reading
