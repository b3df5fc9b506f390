"""Two hundred requests for the last unit: one gets it. (A second process: see test_ownership.)"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from time import sleep

from labeler.errors import BudgetExceeded
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger

RIVALS = 200
READERS = 8


def test_of_two_hundred_threads_that_want_the_last_unit_one_gets_it(ledger: Ledger) -> None:
    ledger.reserve("all but one", [Charge("federation", "instance", 99)])
    start = Barrier(RIVALS)

    def want(number: int) -> bool:
        start.wait()
        try:
            ledger.reserve(f"rival-{number}", [Charge("federation", "instance", 1)])
        except BudgetExceeded:
            return False
        return True

    with ThreadPoolExecutor(RIVALS) as pool:
        won = list(pool.map(want, range(RIVALS)))
    assert sum(won) == 1
    assert ledger.balance("federation", "instance").left == 0
    assert ledger.verify().seq == 3


def test_two_hundred_threads_that_ask_for_the_same_reservation_make_one(ledger: Ledger) -> None:
    start = Barrier(RIVALS)

    def ask(_: int) -> int:
        start.wait()
        return ledger.reserve("job", [Charge("federation", "instance", 60)])

    with ThreadPoolExecutor(RIVALS) as pool:
        assert set(pool.map(ask, range(RIVALS))) == {2}
    assert ledger.verify().seq == 2


def test_whoever_waits_for_a_connection_gets_the_next_that_becomes_idle(tmp_path: Path) -> None:
    with open_database(tmp_path / "journal.db", allow_unsynced=True, busy_timeout_s=3) as database:
        own = Ledger(database, clock=lambda: datetime(2026, 3, 1, tzinfo=UTC), anchored=False)
        with ThreadPoolExecutor(4) as pool:
            with ExitStack() as held:
                for _ in range(READERS):
                    held.enter_context(database.read())
                waiting = [pool.submit(own.head) for _ in range(4)]
                sleep(0.3)  # in which they begin to wait; those that do not are no test of anything
                assert not any(one.done() for one in waiting)
            assert [one.result().seq for one in waiting] == [0] * 4
