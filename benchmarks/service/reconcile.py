"""Whether every label was charged exactly once: the completed jobs against the journals, entry by entry.

Read after everything has stopped, from the coordinator's journal and from that of every agent, whose chains are
checked from the first entry to the last. What does not add up is told in words; an empty list is the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from benchmarks.service.requesters import PaidJob
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Balance, Entry, Ledger
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE
from workers.up.home import LocalFederation

_PAGE = 1000

Line = TypeVar("Line", bound=tuple[object, ...])


@dataclass(frozen=True)
class Book:
    """A journal's ledger as it was found, its chain checked.

    Attributes:
        name: whose.
        entries: all.
        balances: as derived by the ledger.
    """

    name: str
    entries: tuple[Entry, ...]
    balances: tuple[Balance, ...]


def read_book(name: str, home: Path) -> Book:
    """Read a ledger of a party that has stopped.

    Raises:
        JournalBroken, JournalBehind, JournalInUse: it cannot be trusted, or is in use.
    """
    with open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE) as database:
        ledger = Ledger(database, clock=lambda: datetime.now(UTC))
        ledger.verify()
        entries: list[Entry] = []
        while page := ledger.entries(after=entries[-1].seq if entries else 0, limit=_PAGE):
            entries += page
        return Book(name, tuple(entries), tuple(ledger.balances()))


def discrepancies(federation: LocalFederation, jobs: Sequence[PaidJob]) -> list[str]:
    """Everything that does not add up between completed jobs and the ledgers of the coordinator and of every agent."""
    found = check_coordinator(
        read_book("coordinator", federation.coordinator), jobs, [f"agent:{name}" for name in federation.agents]
    )
    for name, home in federation.agents.items():
        found += check_agent(read_book(name, home), jobs)
    return found


def check_coordinator(book: Book, jobs: Sequence[PaidJob], agent_accounts: Collection[str]) -> list[str]:
    """In every account each job is reserved, given back as it is divided, and its round reserved and posted: once each.

    Nothing else was charged or void.

    Small jobs have one round each; a job of several is told as a discrepancy, since its rounds' prices are not known.
    """
    accounts = ["federation", *agent_accounts]
    expected: Counter[tuple[str, str, str, str, int]] = Counter()
    for job in jobs:
        if job.rounds != 1:
            return [f"{book.name}: job {job.job_id} has {job.rounds} rounds; this check is for jobs of one"]
        for account in accounts:
            for level, amount in job.charges.items():
                for kind, name in (("reserve", "proposed"), ("void", "proposed"), ("reserve", "0"), ("post", "0")):
                    expected[kind, f"{job.job_id}/{name}", account, level, amount] += 1
    actual: Counter[tuple[str, str, str, str, int]] = Counter(
        (entry.kind, entry.reservation_id, entry.account, entry.level, entry.amount)
        for entry in book.entries
        if entry.kind not in ("open", "cap")
    )
    return _differences(book, expected, actual) + _sums(book, jobs)


def check_agent(book: Book, jobs: Sequence[PaidJob]) -> list[str]:
    """The agent charged itself once per job, the same amounts; its reservations are named after rounds, not jobs."""
    reservations: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for entry in book.entries:
        if entry.kind not in ("open", "cap"):
            reservations.setdefault((entry.reservation_id, entry.kind), []).append((entry.level, entry.amount))
    actual = Counter((kind, tuple(sorted(charged))) for (_, kind), charged in reservations.items())
    expected = Counter((kind, tuple(sorted(job.charges.items()))) for job in jobs for kind in ("reserve", "post"))
    return _differences(book, expected, actual) + _sums(book, jobs)


def _differences(book: Book, expected: Counter[Line], actual: Counter[Line]) -> list[str]:
    missing, surplus = expected - actual, actual - expected
    return [f"{book.name}: {count} x {what} is missing" for what, count in missing.items()] + [
        f"{book.name}: {count} x {what} belongs to no completed job" for what, count in surplus.items()
    ]


def _sums(book: Book, jobs: Sequence[PaidJob]) -> list[str]:
    found = []
    for balance in book.balances:
        paid = sum(job.charges[balance.level] for job in jobs)
        if (balance.posted, balance.reserved) != (paid, 0):
            found.append(
                f"{book.name}: {balance.account} ({balance.level}) has {balance.posted} posted and {balance.reserved} "
                f"reserved, and the jobs cost {paid}"
            )
    return found
