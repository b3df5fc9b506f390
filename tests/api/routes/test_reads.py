"""Whoever reads lists and sums waits for others who do, and nobody else waits for them: a real server, real sockets."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial

import pytest

from api.coordinator.budgets import Budgets, budget_view, ledger_page
from api.coordinator.ownership import Reader, ledger_for
from api.limits import LISTS_AT_ONCE, LISTS_EACH
from api.schema import BudgetView
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.rounds import FEDERATION
from tests.api.conftest import House
from tests.api.routes.conftest import Service


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says of every reading of all accounts that it happened."""
    seen: list[str] = []
    read = Ledger.charged_without

    def counted(ledger: Ledger, **options: object) -> object:
        seen.append("")
        return read(ledger, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(Ledger, "charged_without", counted)
    return seen


def test_all_accounts_are_read_once_for_everybody_until_an_entry_is_written(house: House, computed: list[str]) -> None:
    budgets = Budgets(house.ledger, 1e-5)
    start = threading.Barrier(16)

    def read(number: int) -> BudgetView:
        start.wait()
        return budgets.view(account=FEDERATION if number % 2 else None)

    with ThreadPoolExecutor(16) as pool:
        views = list(pool.map(read, range(16)))
    assert len(computed) == 1
    assert {len(view.accounts) for view in views} == {2, 8}
    assert budgets.balances()[FEDERATION, "instance"].spent == 0
    for number in range(3):
        house.ledger.reserve(f"job-{number}", [Charge(FEDERATION, "instance", 5)])
        assert budgets.view() == budgets.view() == budget_view(house.ledger, 1e-5)
        assert budgets.balances()[FEDERATION, "instance"].spent == 5 * (number + 1)
    assert len(computed) == 1 + 3 * 2, "one for all who look, and one for each that looks without"


def test_readers_take_turns_and_nobody_else_waits_for_them(own: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that asks for more than its share at once is told when to come again."""
    reading, go_on = threading.Semaphore(0), threading.Event()
    held = own.coordinator.budget

    def slow(agent_id: str | None = None) -> BudgetView:
        reading.release()
        go_on.wait(240)
        return held(agent_id)

    monkeypatch.setattr(own.coordinator, "budget", slow)
    with ThreadPoolExecutor(2 * LISTS_EACH) as pool, own.http("viewer") as viewer, own.http("admin") as other:
        # Of one more than its share any may come last. Its refusal says that all others are in.
        waiting = {pool.submit(viewer.get, "/v1/budget") for _ in range(LISTS_EACH + 1)}
        try:
            for _ in range(LISTS_AT_ONCE):
                assert reading.acquire(timeout=240)
            [last] = wait(waiting, timeout=240, return_when=FIRST_COMPLETED).done
            assert last.result().status_code == 429
            refused = viewer.get("/metrics")
            assert (refused.status_code, int(refused.headers["Retry-After"]) > 0) == (429, True)
            assert f"{LISTS_EACH} lists" in refused.json()["detail"]
            assert not reading.acquire(blocking=False), "no more than a few are read at once"
            assert viewer.get("/v1/whoami").status_code == 200
            assert viewer.get("/readyz").status_code in (200, 503)
            assert other.get("/v1/jobs/none").status_code == 404
            late = pool.submit(other.get, "/v1/parties")
            assert own.post(own.polling("agent-a", 1), path="/v1/messages:poll").status_code == 200
        finally:
            go_on.set()
        assert {one.result().status_code for one in waiting - {last}} == {200}
        assert late.result().status_code == 200
        assert viewer.get("/v1/budget").status_code == 200


def test_a_search_goes_on_where_it_stopped_and_finds_everything(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requester's search too, which leaves out what is another's."""
    for module in ("labeler.ledger.ledger", "api.coordinator.budgets"):
        monkeypatch.setattr(f"{module}.LOOKED_THROUGH", 7)
    mine = [house.submit(house.task(), 1, start=number) for number in range(4)]
    for number in range(12):
        house.ledger.reserve(f"other-{number}", [Charge(FEDERATION, "instance", 1)])
    mine.append(house.submit(house.task(), 1, start=9))
    pages = 0

    def found(reader: Reader | None, search: str) -> list[str]:
        nonlocal pages
        names, after = [], 0
        while True:
            page = partial(ledger_page, house.ledger, search=search)
            if reader is None:
                one = page(after, 3)
            else:
                one = ledger_for(reader, house.jobs.creators, page, after=after, limit=3, is_search=True)
            names += [entry.reservation_id for entry in one.items]
            pages += 1
            if one.next is None:
                return names
            assert int(one.next) > after
            after = int(one.next)

    for job in mine:
        assert found(None, job.job_id) == [f"{job.job_id}/proposed"] * 2
        assert found(Reader("tok-1", "requester"), job.job_id) == [f"{job.job_id}/proposed"] * 2
        assert found(Reader("tok-2", "requester"), job.job_id) == []
    assert pages > 3 * len(mine), "more than one page each"
    assert len(found(None, "reserve")) == 2 * len(mine) + 12
