"""What a read costs beside a long history, counted in steps of SQLite's machine and not in seconds.

A read of a page, of a balance or of what is under way takes as many steps with ten times the history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import Engine

from api.coordinator.config import CoordinatorConfig
from api.coordinator.ownership import Owners, Reader
from api.coordinator.query_budgets import JobBudgets, QueryBudgetPages, RunningPrices
from api.coordinator.stores import Stores
from benchmarks.speed.grown import grow
from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.errors import BudgetExceeded, InvalidSetting, JournalBroken, NotFound, ProtocolViolation
from labeler.ledger import verification
from labeler.ledger.agent_memory import AgentMemory, JournalRounds, answered
from labeler.ledger.database import Connection, Database
from labeler.ledger.jobs import ForgottenJobs, JobStore
from labeler.ledger.ledger import LOOKED_THROUGH, SUMS_EVERY, Charge, Ledger
from labeler.ledger.promises import PromiseStore, Proposed, RequesterShares, promise_name
from labeler.ledger.tallier_memory import TallierMemory
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.ledger.verification import verify_recent
from labeler.setting import LEVELS
from labeler.system.erasable import KeyFolder
from labeler.task import Level
from tests.api.conftest import config_fields
from tests.labeler.evidence.conftest import AGENTS, task_with
from tests.labeler.ledger.conftest import Clock, Place

NAMES = tuple(f"agent:{name}" for name in AGENTS)
SHORT = 3 * SUMS_EVERY
LONG = 10 * SHORT
LIMIT = 1.5
"""A tree that is ten times as large is about one level deeper."""


@contextmanager
def listening(what: str, note: Callable[..., None]) -> Iterator[None]:
    """Tell of every event of any engine in this thread: servers that earlier tests started read their own journals."""
    here = threading.get_ident()

    def told(*arguments: Any) -> None:
        if threading.get_ident() == here:
            note(*arguments)

    event.listen(Engine, what, told)
    try:
        yield
    finally:
        event.remove(Engine, what, told)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count steps of SQLite's machine, in tens, of all transactions that begin in this block."""
    steps = [0]

    def tick() -> int:
        steps[0] += 1
        return 0

    def watch(connection: Connection) -> None:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_progress_handler(tick, 10)

    with listening("begin", watch):
        yield steps


def opened(place: Place, clock: Clock) -> Ledger:
    """A ledger with accounts at both levels, and a task."""
    clock.now = datetime.now(UTC)
    ledger = Ledger(place.open(), clock=clock)
    for account in ("federation", *NAMES):
        for level in LEVELS:
            ledger.open_account(account, level, 10**15)
    TaskStore(ledger.database).add(TaskRecord(task_with(), AGENTS, clock(), "tok-1"))
    return ledger


def grown(ledger: Ledger, entries: int) -> None:
    grow(ledger.database, entries, agents=NAMES, task_digest=task_with().digest)


def reads(ledger: Ledger) -> dict[str, Callable[[], object]]:
    database = ledger.database
    jobs, tasks, seq = JobStore(database), TaskStore(database), ledger.head().seq
    middle = jobs.list(limit=100)[-1].cursor
    charge = Charge("federation", "instance", 10**16)
    later = datetime.now(UTC) + timedelta(days=2)

    stores = Stores.over(database, clock=lambda: later)
    config = CoordinatorConfig.model_validate(config_fields(Path("no-home")))
    prices = RunningPrices(config.home)
    pages = QueryBudgetPages(config, stores, Owners(tasks, jobs), JobBudgets(config, stores, prices))
    requester = Reader("tok-1", "requester")

    def refused() -> None:
        with pytest.raises(BudgetExceeded), database.write() as connection:
            ledger.reserve("too much", [charge], connection=connection)

    def unknown() -> None:
        with pytest.raises(NotFound):
            jobs.round_of("d" * 64)

    return {
        "head": ledger.head,
        "balances": ledger.balances,
        "accounts without a price": ledger.charged_without,
        "a page from the middle": lambda: ledger.entries(after=seq // 2),
        "a page of an account": lambda: ledger.entries(after=seq // 2, account=NAMES[0]),
        "the last page of an account": lambda: ledger.entries(after=seq - 30, account=NAMES[0]),
        "a page of an account that is not there": lambda: ledger.entries(account="nobody"),
        "sums before a page": lambda: [ledger.spent_at(seq // 2 // SUMS_EVERY * SUMS_EVERY + 1000)],
        "sums of an account before a page": lambda: ledger.spent_at(seq - 10, account=NAMES[0]),
        "what an account had posted": lambda: ledger.posted_at(
            seq // 2 // SUMS_EVERY * SUMS_EVERY + 1000, account=NAMES[0]
        ),
        "budgets of the newest queries": lambda: pages.page(None, None, 20, reader=requester),
        "budgets of queries in the middle": lambda: pages.page(
            None, f"{jobs.list(limit=100)[-1].job_id}~0", 20, reader=requester
        ),
        "budgets of a job": lambda: pages.page(jobs.list(limit=100)[-1].job_id, None, 20, reader=requester),
        "the refusal of a charge": refused,
        "unfinished jobs": jobs.unfinished_ids,
        "records of unfinished jobs": jobs.unfinished,
        "newest jobs": lambda: jobs.list(limit=20),
        "jobs in the middle": lambda: jobs.list(limit=20, after=middle),
        "jobs of a token": lambda: jobs.list(limit=20, created_by="tok-1"),
        "jobs of another token": lambda: jobs.list(limit=20, created_by="tok-2"),
        "jobs under way": lambda: jobs.list(limit=20, states={"queued", "collecting"}),
        "failed jobs": lambda: jobs.list(limit=20, states={"failed", "completed"}),
        "failed jobs of a token": lambda: jobs.list(limit=20, after=middle, states={"failed"}, created_by="tok-1"),
        "jobs of which nobody was asked": lambda: jobs.willingness.unasked_until("tok-1", later, most=5),
        "tasks": lambda: tasks.list(limit=20),
        "tasks of a token": lambda: tasks.list(limit=20, open_to="tok-2"),
        "a round by its digest": unknown,
        "jobs that are due": lambda: ForgottenJobs(database).due(datetime.now(UTC) - timedelta(days=1000)),
    }


def steps_of(each: Mapping[str, Callable[[], object]]) -> dict[str, int]:
    found = {}
    for name, read in each.items():
        with counted() as steps:
            read()
        found[name] = steps[0]
    return found


@pytest.mark.long
def test_a_read_takes_as_many_steps_beside_ten_times_the_history(sqlite_place: Place, clock: Clock) -> None:
    ledger = opened(sqlite_place, clock)
    grown(ledger, SHORT)
    short = steps_of(reads(ledger))
    grown(ledger, LONG - SHORT)
    long = steps_of(reads(ledger))
    assert {name: (short[name], long[name]) for name in long if long[name] > LIMIT * short[name] + 20} == {}


def test_a_search_looks_through_a_part_of_the_ledger_and_says_where_to_go_on(
    sqlite_place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LOOKED_THROUGH >= 1000
    monkeypatch.setattr("labeler.ledger.ledger.LOOKED_THROUGH", 5)
    ledger = opened(sqlite_place, clock)
    ledger.reserve("here", [Charge("federation", "instance", 1)])
    assert ledger.entries(search="here") == []
    assert [one.reservation_id for one in ledger.entries(search="here", after=ledger.head().seq - 5)] == ["here"]


# An agent.


def answer(database: Database, memory: AgentMemory, promises: PromiseStore, clock: Clock, rounds: range) -> None:
    """Let an agent charge and give back rounds of one task for one requester, a minute apart."""
    for number in rounds:
        clock.turn(minutes=1)
        with database.write() as connection:
            amounts: dict[Level, int] = {"instance": 5, "agent": UNBOUNDED_NANO if number % 5 == 4 else 7}
            about = Proposed(f"{number:064x}", f"job-{number}", "t" * 64, clock() + timedelta(hours=1), clock())
            promises.keep(about, [(2, amounts)], account="agent", connection=connection)
            name = promise_name(about.digest, 0)
            RequesterShares().note("tok", [(name, amounts)], life_nano=3, connection=connection)
            if number % 3 == 2:
                promises.withdraw(about.job_id, clock(), connection=connection)
                continue
            memory.charge(
                round_digest=f"{number:064x}",
                shard_version="v1",
                reservation_id=name,
                charges=[Charge("agent", level, amount) for level, amount in amounts.items()],
                num_queries=2,
                task_digest="t" * 64,
                max_queries=10**9,
                recipients=[("t0", "k")],
                is_promised=True,
                connection=connection,
            )


def test_an_agents_day_and_shares_take_as_many_steps_after_many_rounds_and_are_right(
    sqlite_place: Place, clock: Clock
) -> None:
    database = sqlite_place.open()
    ledger = Ledger(database, clock=clock)
    for level in LEVELS:
        ledger.open_account("agent", level, None)
    memory, promises = AgentMemory(database, ledger, clock=clock), PromiseStore(database, ledger)
    began = clock()

    def each() -> dict[str, Callable[[], object]]:
        def taken() -> None:
            with database.read() as connection:
                RequesterShares().taken("tok", connection=connection)
                RequesterShares().requesters(connection=connection)

        return {
            "a day": lambda: memory.queries_since(began + timedelta(minutes=10)),
            "a task": lambda: memory.queries_of("t" * 64),
            "shares": taken,
            "the last rounds": lambda: answered(database, last=10),
        }

    answer(database, memory, promises, clock, range(60))
    short = steps_of(each())
    answer(database, memory, promises, clock, range(60, 600))
    long = steps_of(each())
    assert {name: (short[name], long[name]) for name in long if long[name] > LIMIT * short[name] + 20} == {}
    assert memory.queries_of("t" * 64) == 2 * 400
    assert memory.queries_of("u" * 64) == 0
    for minutes in (0, 1, 2, 3, 300, 598, 599, 600, 601, 10_000):
        since = began + timedelta(minutes=minutes)
        expected = sum(2 for number in range(600) if number % 3 != 2 and began + timedelta(minutes=number + 1) >= since)
        assert memory.queries_since(since) == expected, minutes
    with database.read() as connection:
        assert RequesterShares().requesters(connection=connection) == ["tok"]
        found = RequesterShares().taken("tok", connection=connection)
        assert RequesterShares().taken("nobody", connection=connection) == ({"instance": 0, "agent": 0}, 0)
    bounded = sum(7 for number in range(600) if number % 3 != 2 and number % 5 != 4)
    assert found == ({"instance": 5 * 400, "agent": bounded + UNBOUNDED_NANO}, 3 * 400)
    rounds, tasks = answered(database, last=10)
    everything, _ = answered(database)
    assert (rounds, tasks, len(everything)) == (everything[-10:], {}, 400)
    assert rounds[-1].charges == {"instance": 5, "agent": 7}


# A start.


@pytest.fixture
def old(sqlite_place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger that is older than what a start reads again, with one reservation that is still open."""
    monkeypatch.setattr(verification, "RECENT", 10)
    ledger = opened(sqlite_place, clock)
    ledger.reserve(
        "open", [Charge("federation", level, 7) for level in LEVELS], held_back=[Charge(NAMES[0], "agent", 5)]
    )
    grown(ledger, 3 * SUMS_EVERY)
    return ledger


def entries_read(ledger: Ledger) -> int:
    rows = 0

    def read(_: object, cursor: object, statement: str, *__: object) -> None:
        nonlocal rows
        rows += "FROM ledger_entries" in statement

    with listening("before_cursor_execute", read):
        ledger.verify(is_whole=False)
    return rows


def test_a_start_reads_as_much_of_a_ledger_however_old_it_is(old: Ledger) -> None:
    head = old.head()
    assert old.verify(is_whole=False) == old.verify() == head
    before = entries_read(old)
    grown(old, 2 * SUMS_EVERY)
    assert entries_read(old) <= before + 3
    old.post("open")
    assert old.verify(is_whole=False) == old.verify()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE ledger_accounts SET spent = spent - 1, posted = posted - 1 WHERE account = 'federation'",
        "UPDATE ledger_accounts SET cap = cap + 1",
        "UPDATE ledger_accounts SET held = 0",
        "UPDATE ledger_reservations SET held = NULL",
        "UPDATE ledger_reservations SET state = 'posted', settled_seq = 9 WHERE reservation_id = 'late'",
        "UPDATE ledger_entries SET amount = 2 WHERE seq = (SELECT max(seq) FROM ledger_entries)",
        "UPDATE ledger_sums SET spent = spent - 1 WHERE seq = (SELECT max(seq) FROM ledger_sums)",
        "UPDATE ledger_entries SET amount = 2 WHERE seq = (SELECT max(seq) FROM ledger_sums)",
        "DELETE FROM ledger_reservations WHERE reservation_id = 'late'",
    ],
)
def test_a_start_refuses_what_does_not_add_up(old: Ledger, change: str) -> None:
    old.reserve("late", [Charge("federation", level, 1) for level in LEVELS])
    assert old.verify(is_whole=False) == old.head()
    with old.database.write() as connection:
        for table in ("ledger_entries", "ledger_sums"):
            connection.execute(text(f"DROP TRIGGER {table}_stay"))
        connection.execute(text(change))
    with pytest.raises(JournalBroken):
        old.verify(is_whole=False)


def test_only_the_whole_check_reads_what_is_old(old: Ledger) -> None:
    with old.database.write() as connection:
        connection.execute(text("DROP TRIGGER ledger_entries_stay"))
        connection.execute(text("UPDATE ledger_entries SET amount = 2 WHERE seq = 20"))
    assert old.verify(is_whole=False) == old.head()
    with pytest.raises(JournalBroken, match="entry 20 was changed"):
        old.verify()


def test_a_short_ledger_is_read_whole_at_a_start(sqlite_place: Place, clock: Clock) -> None:
    ledger = opened(sqlite_place, clock)
    grown(ledger, 2 * SUMS_EVERY)
    with ledger.database.write() as connection:
        connection.execute(text("DROP TRIGGER ledger_entries_stay"))
        connection.execute(text("UPDATE ledger_entries SET amount = 2 WHERE seq = 20"))
    with pytest.raises(JournalBroken, match="entry 20 was changed"), ledger.database.read() as connection:
        verify_recent(connection)


def test_the_fact_that_something_has_no_price_is_kept_with_its_account_and_checked(
    sqlite_place: Place, clock: Clock
) -> None:
    ledger = opened(sqlite_place, clock)
    for number, ends in enumerate(("post", "void", "leave")):
        name = f"job-{number}"
        ledger.reserve(name, [Charge(NAMES[number], "instance", 1), *(Charge("federation", one, 1) for one in LEVELS)])
        if ends == "post":
            ledger.post(name)
        elif ends == "void":
            assert ledger.charged_without()["agent"] == {NAMES[0], NAMES[1]}
            ledger.void(name, NothingLeft(name, "never-asked"))
    assert ledger.charged_without() == {"instance": set(), "agent": {NAMES[0], NAMES[2]}}
    ledger.verify()
    with ledger.database.write() as connection:
        connection.execute(text("UPDATE ledger_accounts SET alone = 0"))
    with pytest.raises(JournalBroken, match="without a charge at one level"):
        ledger.verify()


# Charges that are held without an entry.


def test_what_is_held_without_an_entry_counts_until_it_is_given_back(place: Place, clock: Clock) -> None:
    ledger = Ledger(place.open(), clock=clock)
    for account in ("federation", "agent:a"):
        ledger.open_account(account, "instance", 10)
    first, held = [Charge("federation", "instance", 6)], [Charge("agent:a", "instance", 6)]
    seq = ledger.reserve("job", first, held_back=held)
    assert ledger.head().seq == seq
    assert ledger.reserve("job", first, held_back=held) == seq
    with pytest.raises(ProtocolViolation, match="with other charges"):
        ledger.reserve("job", first)
    balance = ledger.balance("agent:a", "instance")
    assert (balance.reserved, balance.posted, balance.left) == (6, 0, 4)
    with pytest.raises(BudgetExceeded) as refused:
        ledger.reserve("other", [Charge("agent:a", "instance", 5)])
    assert refused.value.last_spenders == (("job", 6),)
    with pytest.raises(BudgetExceeded):
        ledger.reserve("other", [Charge("federation", "instance", 1)], held_back=[Charge("agent:a", "instance", 5)])
    with pytest.raises(BudgetExceeded):
        ledger.open_account("agent:a", "instance", 5)
    with pytest.raises(InvalidSetting, match="at most once"):
        ledger.reserve("twice", first, held_back=first)
    ledger.verify()
    ledger.void("job", NothingLeft("job", "never-asked"))
    assert ledger.balance("agent:a", "instance").left == 10
    assert ledger.head().seq == seq + 1
    ledger.verify()


def test_the_database_refuses_to_hold_more_than_a_cap(sqlite_place: Place, clock: Clock) -> None:
    database: Database = sqlite_place.open()
    ledger = Ledger(database, clock=clock)
    ledger.open_account("a", "instance", 10)
    ledger.reserve("job", [Charge("a", "instance", 6)])
    with pytest.raises(Exception, match="never_overheld"), database.write() as connection:
        connection.execute(text("UPDATE ledger_accounts SET held = 5"))


@pytest.mark.process
def test_what_a_party_keeps_is_found_without_the_rounds_that_are_over(sqlite_place: Place, tmp_path: Path) -> None:
    """An index has the few rounds that were neither erased nor forgotten."""
    database = sqlite_place.open()
    (tmp_path / "keys").mkdir(mode=0o700)
    keys = KeyFolder(tmp_path / "keys")
    rounds, tallier = JournalRounds(database, keys), TallierMemory(database, keys)
    asked: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        asked.append((statement, parameters))

    with listening("before_cursor_execute", note):
        rounds.over(datetime.now(UTC))
        rounds.unanswered_for_life()
        rounds.sweep()
        tallier.open_rounds()
        tallier.sweep()
    with database.read() as connection:
        plans = [
            str(row[3])
            for statement, parameters in asked
            if statement.startswith("SELECT")
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    assert len(asked) > 5
    names = ("agent_rounds", "tallier_rounds", "tallier_shares")
    assert [one for one in plans if any(f"SCAN {name}" in one for name in names) and "ix_" not in one] == []
