"""An agent pays for a round once, even if its records change, and remembers it with the charge, and for whom it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.errors import AwaitingApproval, BudgetExceeded, InvalidSetting, LabelerError, NotFound, PrivacyRefusal
from labeler.ledger.agent_memory import MAX_WAITING, AgentMemory
from labeler.ledger.database import Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.promises import RequesterShares
from labeler.task import Task
from tests.labeler.ledger.conftest import Clock, Place, at_once, refuses, undone

TALLIERS = (("tallier-0", "a" * 64), ("tallier-1", "b" * 64))
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def memory(database: Database, ledger: Ledger, clock: Clock) -> AgentMemory:
    return AgentMemory(database, ledger, clock=clock)


def pay(memory: AgentMemory, number: int = 1, **changes: Any) -> bool:
    fields: dict[str, Any] = {
        "round_digest": f"{number:064x}",
        "shard_version": "v1",
        "reservation_id": f"round {number}",
        "charges": [Charge("federation", "instance", 10)],
        "num_queries": 4,
        "task_digest": "f" * 64,
        "max_queries": 100,
        "recipients": TALLIERS,
    }
    return memory.charge(**fields | changes)


def spent(ledger: Ledger) -> int:
    return ledger.balance("federation", "instance").spent


@pytest.mark.process
def test_a_round_is_charged_once_and_posted(memory: AgentMemory, ledger: Ledger, clock: Clock) -> None:
    pay(memory)
    head = ledger.head()
    assert (spent(ledger), ledger.state("round 1")) == (10, "posted")
    pay(memory)
    pay(memory, reservation_id="another name", charges=[Charge("federation", "instance", 99)])
    assert ledger.head() == head
    assert memory.queries_since(clock.now) == 4


def test_a_round_is_charged_once_whatever_its_records_and_goes_to_the_same_talliers_also_after_a_restart(
    place: Place, clock: Clock
) -> None:
    for number in range(2):
        database = place.open()
        ledger = Ledger(database, clock=clock)
        ledger.open_account("federation", "instance", 100)
        memory = AgentMemory(database, ledger, clock=clock)
        assert (memory.paid_by(f"{1:064x}") is not None) == (number > 0)
        assert pay(memory) == (number == 0)
        assert not pay(memory, shard_version="v2", reservation_id="round 1 v2")
        assert memory.paid_by(f"{1:064x}")
        for others in (TALLIERS[::-1], TALLIERS[:1], (TALLIERS[0], ("tallier-1", "c" * 64))):
            with pytest.raises(PrivacyRefusal, match="other talliers"):
                pay(memory, recipients=others)
        assert (spent(ledger), ledger.state("round 1 v2")) == (10, None)
        place.close()


def test_one_approval_is_for_the_queries_of_the_task_and_no_more(memory: AgentMemory, ledger: Ledger) -> None:
    pay(memory, 1, max_queries=9)
    pay(memory, 2, max_queries=9)
    for _ in range(2):
        with pytest.raises(PrivacyRefusal, match="the task has 9 queries, and with this round 12 of it"):
            pay(memory, 3, max_queries=9)
    pay(memory, 1, max_queries=9)
    assert spent(ledger) == 20
    pay(memory, 3, max_queries=9, task_digest="e" * 64)


def test_a_charge_that_is_not_covered_leaves_nothing_behind(memory: AgentMemory, ledger: Ledger, clock: Clock) -> None:
    head = ledger.head()
    with pytest.raises(BudgetExceeded):
        pay(memory, charges=[Charge("federation", "instance", 101)])
    with pytest.raises(NotFound):
        pay(memory, charges=[Charge("federation", "instance", 1), Charge("federation", "agent", 1)])
    with pytest.raises(LabelerError):
        pay(memory, charges=[])
    assert (ledger.head(), memory.queries_since(clock.now - timedelta(days=1))) == (head, 0)
    pay(memory)


def test_one_charge_pays_for_one_round(memory: AgentMemory, ledger: Ledger) -> None:
    pay(memory, 1)
    with pytest.raises(PrivacyRefusal, match="something else"):
        pay(memory, 2, reservation_id="round 1")
    ledger.reserve("elsewhere", [Charge("federation", "instance", 10)])
    with pytest.raises(PrivacyRefusal, match="something else"):
        pay(memory, 3, reservation_id="elsewhere")
    assert ledger.state("elsewhere") == "reserved"


@pytest.mark.parametrize(
    "changes", [{"num_queries": 0}, {"num_queries": True}, {"shard_version": ""}, {"round_digest": ""}]
)
def test_a_malformed_charge_is_refused(memory: AgentMemory, ledger: Ledger, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        pay(memory, **changes)
    assert spent(ledger) == 0


@pytest.mark.process
def test_the_same_round_asked_by_many_threads_is_charged_once_and_answered_to_the_same_talliers(
    memory: AgentMemory, ledger: Ledger
) -> None:
    answers = at_once(8, lambda number: pay(memory, recipients=((f"t{number // 2}", "a" * 64),)), PrivacyRefusal)
    assert sorted(answers, key=str) == [False, *[None] * 6, True]
    assert spent(ledger) == 10


def test_a_charge_is_undone_with_the_transaction_it_joined(
    memory: AgentMemory, ledger: Ledger, database: Database
) -> None:
    with undone(database) as connection:
        pay(memory, connection=connection)
    assert (spent(ledger), ledger.state("round 1")) == (0, None)
    pay(memory, shard_version="v2")


def test_queries_are_counted_from_a_moment_on_and_a_clock_set_back_does_not_begin_a_new_day(
    memory: AgentMemory, clock: Clock
) -> None:
    start = clock.now
    assert memory.queries_since(start) == 0
    pay(memory, 1)
    clock.turn(hours=20)
    pay(memory, 2, num_queries=7)
    assert memory.queries_since(start) == 11
    assert memory.queries_since(start + timedelta(microseconds=1)) == 7
    assert memory.queries_since(clock.now) == 7
    clock.turn(days=-3)
    pay(memory, 3, num_queries=5)
    assert memory.queries_since(clock.now - timedelta(days=1)) == 16
    assert memory.queries_since(start + timedelta(hours=20)) == 12


def test_the_database_itself_keeps_what_was_answered(memory: AgentMemory, database: Database) -> None:
    pay(memory)
    refuses(
        database,
        "UPDATE answered_rounds SET shard_version = 'v2'",
        "UPDATE answered_rounds SET num_queries = 1",
        "DELETE FROM answered_rounds",
        "INSERT INTO answered_rounds VALUES ('r', 'v', 'round 1', 1, 1, 't', '[]')",
        "INSERT INTO answered_rounds VALUES ('r', 'v', 'nothing', 1, 1, 't', '[]')",
        "UPDATE answered_rounds SET recipients = '[]'",
    )


def a_task(nonce: str = "") -> Task:
    return Task(
        name="t", method="knn", classes=("x", "y"), sigma_votes=5, delta=1e-5, max_queries=9, agents=2, nonce=nonce
    )


def test_a_task_waits_until_a_person_decides_and_each_step_twice_equals_once(memory: AgentMemory) -> None:
    first, second = a_task("1"), a_task("2")
    memory.request(second, NOW + timedelta(hours=1))
    for at in (NOW, NOW + timedelta(hours=2)):
        memory.request(first, at)
    assert memory.waiting() == [(first.digest, first, NOW), (second.digest, second, NOW + timedelta(hours=1))]
    assert not memory.is_approved(first.digest)
    for _ in range(2):
        memory.follow(first, NOW, is_approved=True)
        assert memory.is_approved(first.digest)
    assert [digest for digest, _, _ in memory.waiting()] == [second.digest]
    for _ in range(2):
        memory.follow(first, NOW, is_approved=False)
        assert not memory.is_approved(first.digest)
    memory.request(first, NOW + timedelta(days=1))
    assert [digest for digest, _, _ in memory.waiting()] == [second.digest]
    memory.follow(first, NOW, is_approved=True)
    assert memory.is_approved(first.digest)


def test_no_more_than_a_hundred_tasks_wait_and_what_nobody_decides_makes_room_in_a_week(memory: AgentMemory) -> None:
    for number in range(MAX_WAITING):
        memory.request(a_task(str(number)), NOW + timedelta(hours=number))
    with pytest.raises(AwaitingApproval, match="100 tasks wait"):
        memory.request(a_task("more"), NOW + timedelta(days=5))
    memory.request(a_task("0"), NOW + timedelta(days=5))
    memory.follow(a_task("50"), NOW, is_approved=True)
    memory.request(a_task("more"), NOW + timedelta(days=5))
    assert len(memory.waiting()) == MAX_WAITING
    memory.request(a_task("later"), NOW + timedelta(days=7, hours=2, minutes=1))
    waiting = {digest for digest, _, _ in memory.waiting()}
    assert len(waiting) == MAX_WAITING - 3 + 1
    assert a_task("0").digest not in waiting
    memory.request(a_task("0"), NOW + timedelta(days=8))
    assert memory.waiting()[-1][1] == a_task("0")


def test_a_persons_decision_is_written_down_also_where_the_list_is_full(memory: AgentMemory) -> None:
    for number in range(MAX_WAITING):
        memory.request(a_task(str(number)), NOW)
    memory.follow(a_task("known"), NOW, is_approved=True)
    assert memory.is_approved(a_task("known").digest)
    memory.follow(a_task("known"), NOW, is_approved=False)
    assert not memory.is_approved(a_task("known").digest)


@pytest.mark.process
def test_the_share_that_a_requester_has_taken_stays_and_what_was_given_back_counts_for_nobody(
    database: Database, ledger: Ledger
) -> None:
    """No sum leaves 64 bits: one of grace's prices has no bound for the site."""
    for level in ("instance", "agent"):
        ledger.open_account("agent:a", level, None)  # type: ignore[arg-type]
    shares = RequesterShares()
    for name, requester, agent in (("r1", "ada", 7), ("r2", "ada", 9), ("r3", "grace", UNBOUNDED_NANO)):
        charges = [Charge("agent:a", "instance", 5), Charge("agent:a", "agent", agent)]
        with database.write() as connection:
            ledger.reserve(name, charges, connection=connection)
            amounts = {one.level: one.amount for one in charges}
            shares.note(requester, [(name, amounts)], life_nano=3, connection=connection)
    ledger.void("r2", NothingLeft("r2", "lapsed"))
    with database.read() as connection:
        found = {name: shares.taken(name, connection=connection) for name in ("ada", "grace", "nobody")}
    assert found == {
        "ada": ({"instance": 5, "agent": 7}, 3),
        "grace": ({"instance": 5, "agent": UNBOUNDED_NANO}, 3),
        "nobody": ({"instance": 0, "agent": 0}, 0),
    }
    refuses(
        database,
        "UPDATE taken_by SET requester = 'grace' WHERE requester = 'ada'",
        "UPDATE taken_by SET instance_nano = 0",
        "DELETE FROM taken_by",
        "INSERT INTO taken_by VALUES ('of no ledger', 'ada', 1, 1, 1)",
    )
