"""The budget of every query of a service: what rows say agrees with the ledger, whatever became of a job."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import pytest

from api.coordinator.budgets import budget_view
from api.coordinator.ownership import Reader
from api.coordinator.query_budgets import PRICES, QueryBudgetPages, RunningPrices
from api.schema import JobView, QueryBudgetView
from feature_store.results.image_labels import ImageStamp, image_label_table, stamp_of, with_image_budgets
from feature_store.results.job_process import JobProcess, write_prices
from labeler.batching import person_spent
from labeler.budget import epsilon_spent
from labeler.errors import InvalidSetting, NotFound, Unavailable
from labeler.ledger.jobs import ForgottenJobs
from labeler.ledger.rounds import FEDERATION, PostedRounds
from labeler.ledger.tasks import TaskRecord
from labeler.query_budgets import COLUMNS, running_prices
from labeler.release import release_to_bytes
from tests.api.conftest import House
from tests.api.coordinator.site import Site
from tests.api.coordinator.test_labels import finish, release, write_questions
from tests.job_steps import take_step

MINE, OTHER = Reader("tok-1", "requester"), Reader("tok-2", "requester")
ADMIN, VIEWER = Reader("tok-9", "admin"), Reader("tok-8", "viewer")


@pytest.fixture
def pages(house: House) -> Iterator[QueryBudgetPages]:
    budgets = house.budgets
    yield QueryBudgetPages(house.config, house.stores, house.owners, budgets)
    budgets.prices.stop()


def completed(house: House, count: int = 4, **fields: object) -> tuple[TaskRecord, JobView]:
    record = house.task(**fields)
    view = house.submit(record, count)
    folder = house.config.home / "jobs" / view.job_id
    every = np.arange(count)
    write_questions(folder, features=np.ones((count, 3), np.int16), rows=every, assignment=every)
    finish(house, record, view, salt=house.ledger.head().seq)
    return record, view


def charge_of(house: House, job_id: str, level: str = "instance") -> int:
    entries = house.ledger.entries(limit=1000, account=FEDERATION)
    return sum(
        one.amount
        for one in entries
        if one.kind == "post" and one.level == level and one.reservation_id.startswith(job_id)
    )


def rows_of(
    pages: QueryBudgetPages, job_id: str | None, *, reader: Reader = MINE, limit: int = 3
) -> list[QueryBudgetView]:
    found: list[QueryBudgetView] = []
    after = None
    while True:
        page = pages.page(job_id, after, limit, reader=reader)
        assert len(page.items) <= limit
        found += page.items
        after = page.next
        if after is None:
            return found


def test_rows_of_a_completed_job_add_up_to_its_charge_and_end_at_the_accounts_total(
    house: House, pages: QueryBudgetPages
) -> None:
    _, first = completed(house)
    house.clock.turn(seconds=1)
    _, second = completed(house, method="ensemble", k=1)
    rows = rows_of(pages, second.job_id)
    assert [one.number for one in rows] == [3, 2, 1, 0]
    assert {(one.share_kind, one.account, one.level, one.status) for one in rows} == {
        ("each", FEDERATION, "instance", "answered")
    }
    assert sum(one.share_nano or 0 for one in rows) == charge_of(house, second.job_id)
    assert sum(one.agent_share_nano or 0 for one in rows) == charge_of(house, second.job_id, "agent")
    balance = budget_view(house.ledger, house.config.delta, account=FEDERATION).accounts
    spent = {one.level: one for one in balance}
    assert rows[0].total_nano == spent["instance"].posted_nano
    assert rows[0].total_epsilon == spent["instance"].spent_epsilon
    assert rows[0].agent_total_nano == spent["agent"].posted_nano
    assert rows[-1].total_nano == charge_of(house, first.job_id) + (rows[-1].share_nano or 0)
    # All jobs: the newest first, and the same rows whatever the size of a page.
    both = [(one.job_id, one.number) for one in rows_of(pages, None)]
    assert both == [(job.job_id, number) for job in (second, first) for number in (3, 2, 1, 0)]
    assert rows_of(pages, None, limit=100) == rows_of(pages, None, limit=1)


def test_files_of_earlier_versions_and_forgotten_jobs_have_the_same_budgets(
    house: House, pages: QueryBudgetPages
) -> None:
    _, view = completed(house)
    head = house.ledger.head()
    table = house.results.table(view.job_id)
    path = house.config.home / "jobs" / view.job_id / "labels.parquet"
    pq.write_table(table, path)
    new = rows_of(pages, view.job_id)
    assert [one.source for one in new] == [f"query-{number:06d}" for number in (3, 2, 1, 0)]
    pq.write_table(table.drop_columns(list(COLUMNS)), path)
    assert rows_of(pages, view.job_id) == new
    path.unlink()
    ForgottenJobs(house.database, clock=house.clock).forget(view.job_id, "asked")
    gone = rows_of(pages, view.job_id)
    assert [one.model_copy(update={"source": new[0].source}) for one in gone[:1]] == new[:1]
    assert {one.source for one in gone} == {None}
    assert house.ledger.head() == head, "nothing was written for it"


@pytest.mark.usefixtures("small_rounds")
def test_a_job_that_ended_early_took_what_its_asked_rounds_cost_and_nothing_for_the_others(
    house: House, pages: QueryBudgetPages
) -> None:
    record = house.task(max_queries=5000)
    view = house.submit(record, 5000)
    assert pages.page(view.job_id, None, 10, reader=MINE).items == (), "nothing is final yet"
    take_step(house.jobs, "set_batches", view.job_id, [(0, "1" * 64, "2" * 64), (1, "3" * 64, "4" * 64)])
    house.begin(view.job_id)
    take_step(house.jobs, "set_asked", view.job_id, 0)
    take_step(house.jobs, "fix_contributors", view.job_id, 0, record.participants)
    seq = house.ledger.post(f"{view.job_id}/0")
    take_step(house.jobs, "set_posted", view.job_id, 0, seq)
    first = view.rounds[0].queries
    take_step(house.jobs, "store_release", view.job_id, 0, release_to_bytes(release(first)))
    assert [one.number for one in pages.page(view.job_id, None, 2, reader=MINE).items] == [first - 1, first - 2]
    house.stores.settlement.end(house.jobs.get(view.job_id), "cancelled", None)
    rows = rows_of(pages, view.job_id, limit=1000)
    assert [one.number for one in rows] == list(range(4999, -1, -1))
    charge = charge_of(house, view.job_id)
    assert charge > 0
    assert sum(one.share_nano or 0 for one in rows) == charge
    assert {(one.share_nano, one.status) for one in rows[: 5000 - first]} == {(0, "failed_quorum")}
    assert {one.status for one in rows[5000 - first :]} == {"answered"}
    assert {one.total_nano for one in rows[: 5000 - first]} == {charge}
    never_asked = house.submit(house.task(), 3)
    house.stores.settlement.end(house.jobs.get(never_asked.job_id), "cancelled", None)
    assert {(one.share_nano, one.charge_nano) for one in rows_of(pages, never_asked.job_id)} == {(0, 0)}


def test_a_requester_sees_the_queries_of_its_own_jobs_and_a_viewer_no_name(
    house: House, pages: QueryBudgetPages
) -> None:
    _, view = completed(house)
    assert rows_of(pages, None, reader=OTHER) == []
    after = pages.page(view.job_id, None, 1, reader=MINE).next
    for job_id in (view.job_id, "job-00000000000000000000"):
        with pytest.raises(NotFound, match="no job"):
            pages.page(job_id, None, 10, reader=OTHER)
    with pytest.raises(NotFound):
        pages.page(None, after, 10, reader=OTHER)
    assert rows_of(pages, None, reader=ADMIN) == rows_of(pages, view.job_id)
    assert {one.source for one in rows_of(pages, None, reader=VIEWER)} == {None}
    for wrong in ("x", "~", f"{view.job_id}~-1", f"{view.job_id}~{'9' * 20}", "job-1~3"):
        with pytest.raises((InvalidSetting, NotFound)):
            pages.page(view.job_id, wrong, 10, reader=MINE)


@pytest.mark.process
def test_shares_of_winners_come_from_prices_that_were_computed_before(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's work is done here; the next test starts one."""
    monkeypatch.setattr(JobProcess, "carry_out", lambda *_, **__: None)
    budgets = house.budgets
    (house.config.home / PRICES).mkdir()
    pages = QueryBudgetPages(house.config, house.stores, house.owners, budgets)
    Site(house)  # three talliers
    record, view = completed(house, method="ensemble", k=1, release="winner", max_queries=6, sigma_votes=12.0)
    with pytest.raises(Unavailable, match="is being computed"):
        pages.page(view.job_id, None, 10, reader=MINE)
    # The list of all jobs goes on without it, and names it.
    _, earlier = completed(house)
    house.clock.turn(seconds=1)
    _, other = completed(house)
    both = pages.page(None, None, 10, reader=ADMIN)
    assert ({one.job_id for one in both.items}, both.waiting, both.next) == (
        {earlier.job_id, other.job_id},
        (view.job_id,),
        None,
    )
    path = house.config.home / PRICES / f"{hashlib.sha256(record.task.kind.encode()).hexdigest()}.json"
    write_prices(path, task=record.task.model_dump(mode="json"), queries=4)
    rows = rows_of(pages, view.job_id)[::-1]
    assert {one.share_kind for one in rows} == {"running"}
    exact = running_prices(record.task, 4)["instance"]
    assert np.cumsum([one.share_nano for one in rows]).tolist() == exact
    assert exact[-1] == charge_of(house, view.job_id)
    assert pages.page(None, None, 100, reader=ADMIN).waiting == ()
    kept = json.loads(path.read_bytes())
    for damaged in ([], exact[:3], exact[::-1], [0.5, *exact[1:]], [str(one) for one in exact], None):
        path.write_text(json.dumps(kept | {"prices": kept["prices"] | {"instance": damaged}}))
        with pytest.raises(Unavailable):
            pages.page(view.job_id, None, 10, reader=MINE)


@pytest.mark.process
def test_a_process_computes_the_prices(house: House) -> None:
    Site(house)  # three talliers
    task = house.task(method="ensemble", k=1, release="winner", max_queries=3, sigma_votes=12.0).task
    prices = RunningPrices(house.config.home)
    try:
        made = prices.want(task, 3, by="tok-1")
        assert made is not None
        made.result(240)
        assert prices.get(task, 3, by="tok-1", wait_s=0.0) == running_prices(task, 3)
        assert prices.want(task, 2, by="tok-1") is None, "fewer are known, too"
    finally:
        prices.stop()


@pytest.mark.process
def test_prices_of_a_job_that_ended_without_a_charge_are_not_computed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a requester who submits and cancels has a processor busy for hours, and pays nothing."""
    computed: list[bytes] = []
    monkeypatch.setattr(JobProcess, "carry_out", lambda _, order, **__: computed.append(order))
    Site(house)  # three talliers
    record = house.task(method="ensemble", k=1, release="winner", max_queries=6, sigma_votes=12.0)
    view, other = house.submit(record, 4), house.submit(record, 2, start=4)
    budgets = house.budgets
    begun, turn = threading.Event(), threading.Event()
    before = budgets.prices._pool.submit("tok-2", lambda: (begun.set(), turn.wait()))
    try:
        assert begun.wait(60)
        assert not budgets.is_ready(house.jobs.get(view.job_id))
        assert not budgets.is_ready(house.jobs.get(other.job_id))
        house.stores.settlement.end(house.jobs.get(view.job_id), "cancelled", None)
        turn.set()
        before.result(60)
        budgets.prices._pool.submit("tok-1", lambda: None).result(60)  # the last of this requester's turns
        assert {json.loads(one)["prices"]["of"]["queries"] for one in computed} == {2}
    finally:
        turn.set()
        budgets.prices.stop()


def test_images_take_what_the_questions_named_after_them_took(house: House) -> None:
    record, view = completed(house)
    table = house.results.table(view.job_id)
    sources = ["another.png", *table["source"].to_pylist()]
    stamp = ImageStamp(record.digest, view.job_id, record.task.classes, {}, False, "2026-01-01")
    images = image_label_table(stamp, sources=sources, probabilities=np.full((5, 3), 1 / 3), asked=np.ones(5, np.bool_))
    found = with_image_budgets(images, table)
    assert found["share_nano"].to_pylist() == [0, *table["share_nano"].to_pylist()]
    assert found["total_nano"].to_pylist()[0] == table["total_nano"].to_pylist()[-1]
    assert sum(found["share_nano"].to_pylist()) == charge_of(house, view.job_id)
    assert stamp_of(found) == stamp_of(images)


def test_a_service_says_what_a_person_cost_over_all_jobs_as_the_ledger_of_images_bears_out(house: House) -> None:
    """Two jobs of which one image of a person votes: an image is charged two votes, a person costs one."""
    for _ in range(2):
        completed(house, method="reverse-knn", k=1, records_per_person=1, max_queries=4)
    view = budget_view(house.ledger, house.config.delta)
    charged = {one.account: one.posted_nano for one in view.accounts if one.level == "instance"}
    assert charged[FEDERATION] > 0
    for one in view.persons:
        assert one.person_nano == pytest.approx(charged[one.account] / 2, abs=2)
        assert one.person_epsilon == epsilon_spent(one.person_nano or 0, house.config.delta)
    # Read once more after another job, as the page does: what is new is added, and one job without a bound ends it.
    completed(house)
    after = budget_view(house.ledger, house.config.delta)
    (federation,) = (one for one in after.persons if one.account == FEDERATION)
    assert federation.person_epsilon is None
    assert federation.reason.startswith("1 of 3 answered rounds do not limit how many images of one person vote")


def test_entries_since_the_last_look_count_once(house: House) -> None:
    posted, seen = PostedRounds(), []
    for _ in range(3):
        completed(house, method="reverse-knn", k=1, records_per_person=1, max_queries=4)
        with house.ledger.database.read() as connection:
            seen.append(person_spent(posted.read(connection)[FEDERATION]).nano)
            assert person_spent(posted.read(connection)[FEDERATION]).nano == seen[-1]
    assert seen == [seen[0], 2 * seen[0], 3 * seen[0]]
    with house.ledger.database.read() as connection:
        assert person_spent(PostedRounds().read(connection)[FEDERATION]).nano == seen[-1]
