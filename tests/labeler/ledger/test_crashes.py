"""A process that is killed in the middle of charging loses no charge that it had acknowledged."""

from __future__ import annotations

import random
import time

import pytest

from labeler.ledger.chain import Anchor
from labeler.ledger.ledger import Ledger
from tests.labeler.ledger.conftest import Clock, Place, program

CHARGING = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger
with open_database(sys.argv[1], anchor=Path(sys.argv[2])) as database:
    ledger = Ledger(database, clock=lambda: datetime.now(UTC))
    ledger.open_account("federation", "instance", 10**9)
    ledger.open_account("agent-1", "instance", 10**9)
    number = ledger.head().seq
    while True:
        number += 1
        charges = [Charge("federation", "instance", 1), Charge("agent-1", "instance", 2)]
        seq = ledger.reserve(f"job-{number}", charges)
        print(f"job-{number}", seq, ledger.entries(after=seq - 1, limit=1)[0].hash, flush=True)
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_process_loses_no_acknowledged_entry(place: Place, clock: Clock, seed: int) -> None:
    acknowledged: dict[str, tuple[int, str]] = {}
    for number in range(3):
        process = program(CHARGING, place.target, place.anchor)
        lines = [process.stdout.readline()]  # it is charging now
        time.sleep(random.Random(10 * seed + number).uniform(0.0, 0.15))
        process.kill()
        rest = process.stdout.read()
        for line in (lines[0] + rest).splitlines(keepends=True):
            if line.endswith("\n"):
                name, seq, entry = line.split()
                acknowledged[name] = (int(seq), entry)
        assert process.wait() == -9
        process.communicate()
    remembered = Anchor(place.anchor).read()
    ledger = Ledger(place.open(), clock=clock)
    head = ledger.verify()
    assert remembered is not None
    assert head.seq - remembered.seq in (0, 2), "at most the one transaction between a commit and its anchor"
    entries = {
        entry.seq: entry for start in range(0, head.seq, 1000) for entry in ledger.entries(after=start, limit=1000)
    }
    for name, (seq, entry_hash) in acknowledged.items():
        assert (entries[seq].reservation_id, entries[seq].hash) == (name, entry_hash)
        assert ledger.state(name) == "reserved"
    balances = {balance.account: balance.spent for balance in ledger.balances()}
    assert balances["agent-1"] == 2 * balances["federation"] >= 2 * len(acknowledged)
