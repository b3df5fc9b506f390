"""Two hundred requests for the last unit: one gets it, whoever asks. (A second process: see test_ownership.)"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from feature_store.journal.ledger import Charge, Ledger
from labeler.errors import BudgetExceeded

RIVALS = 200


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
