"""Two hundred requests for the last unit: one gets it, whoever asks, from threads and from processes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Barrier

from feature_store.journal.database import open_database
from feature_store.journal.ledger import Charge, Ledger
from labeler.errors import BudgetExceeded
from tests.postgres_server import PostgresServer

RIVALS = 200

RIVAL = """
import sys
from datetime import UTC, datetime
from feature_store.journal.database import open_database
from feature_store.journal.ledger import Charge, Ledger
from labeler.errors import BudgetExceeded
url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
won = 0
with open_database(url, busy_timeout_s=60) as database:
    ledger = Ledger(database, clock=lambda: datetime.now(UTC))
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(count):
        try:
            ledger.reserve(f"{name}-{number}", [Charge("federation", "instance", 1)])
            won += 1
        except BudgetExceeded:
            pass
print(won)
"""


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


def test_of_four_processes_with_fifty_requests_each_one_gets_the_last_unit(postgres_server: PostgresServer) -> None:
    url = postgres_server.new_database()
    with open_database(url) as database:
        ledger = Ledger(database, clock=lambda: datetime.now(UTC))
        ledger.open_account("federation", "instance", 1)
        rivals = [
            subprocess.Popen(
                [sys.executable, "-c", RIVAL, url, f"rival-{number}", str(RIVALS // 4)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number in range(4)
        ]  # fmt: skip
        for rival in rivals:
            assert rival.stdout is not None
            assert rival.stdout.readline() == "ready\n"
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write("go\n")
            rival.stdin.flush()
        won = [int(rival.communicate(timeout=120)[0]) for rival in rivals]
        assert [rival.returncode for rival in rivals] == [0] * 4
        assert sum(won) == 1
        assert ledger.verify().seq == 2
