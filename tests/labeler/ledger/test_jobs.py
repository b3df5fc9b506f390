"""Jobs and rounds: every step once, none backwards, nothing released that was not paid for; on both databases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from labeler.budget import NothingLeft
from labeler.errors import (
    InvalidSetting,
    LabelerError,
    NotFound,
    NotReady,
    PrivacyRefusal,
    ProtocolViolation,
)
from labeler.ledger.database import Database
from labeler.ledger.jobs import FINISHED, Idempotency, JobRecord, JobState, JobStore, RoundCharge, RoundRecord
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.rounds import AggregateStore
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.task import Task
from tests.job_steps import take_step
from tests.labeler.ledger.conftest import Clock, Place, refuses

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TASK = Task(name="t", classes=("x", "y"), sigma_votes=5, delta=1e-5, max_queries=100, agents=2)
UNFINISHED: tuple[JobState, ...] = ("queued", "collecting", "tallying")
ALICE = "0a" * 16


def digest(letter: str) -> str:
    return letter * 64


def a_job(job_id: str = "job", **changes: Any) -> JobRecord:
    job = JobRecord(
        job_id=job_id, task_digest=TASK.digest, name="", state="queued", images=4, num_queries=4, first_query=0,
        strategy="all", count=None, seed=0, source="images", created_at=NOW, updated_at=NOW,
        expires_at=NOW + timedelta(days=1), created_by="tok_1",
    )  # fmt: skip
    return replace(job, **changes)


def rounds_for(job: JobRecord) -> list[RoundRecord]:
    first, half = job.first_query, job.num_queries // 2
    return [RoundRecord(job.job_id, 0, first, half), RoundRecord(job.job_id, 1, first + half, job.num_queries - half)]


@pytest.fixture
def store(database: Database, clock: Clock) -> JobStore:
    TaskStore(database).add(TaskRecord(TASK, ("alice", "bob"), NOW, "tok_1"))
    return JobStore(database, clock=clock)


@pytest.fixture
def sums(database: Database) -> AggregateStore:
    return AggregateStore(database)


@pytest.fixture
def job(store: JobStore, ledger: Ledger) -> JobRecord:
    """A job whose rounds have their queries and their reservations."""
    added = store.add(a_job(), rounds_for(a_job()), idempotency=None)
    take_step(store, "set_batches", "job", [(0, digest("1"), digest("a")), (1, digest("2"), digest("b"))])
    for number in (0, 1):
        ledger.reserve(f"job/{number}", [Charge("federation", "instance", 1)])
    return added


def post(store: JobStore, ledger: Ledger, database: Database, number: int = 0) -> int:
    with database.write() as connection:
        seq = ledger.post(f"job/{number}", connection=connection)
        take_step(store, "set_posted", "job", number, seq, connection=connection)
    return seq


def to_posted(store: JobStore, ledger: Ledger, database: Database, number: int = 0) -> int:
    take_step(store, "set_asked", "job", number)
    take_step(store, "fix_contributors", "job", number, ["alice", "bob"])
    return post(store, ledger, database, number)


# Jobs.


def test_a_job_is_read_as_it_was_written_also_after_a_restart(place: Place, clock: Clock) -> None:
    database = place.open()
    TaskStore(database).add(TaskRecord(TASK, ("alice", "bob"), NOW, "tok_1"))
    added = a_job(count=7, strategy="random", seed=3, name="Kätzchen")
    JobStore(database, clock=clock).add(added, rounds_for(added), idempotency=None)
    place.close()
    again = JobStore(place.open(), clock=clock)
    assert again.get("job") == added
    assert again.rounds("job") == rounds_for(added)
    assert again.unfinished() == [added]


def test_what_is_not_there_is_not_found(store: JobStore) -> None:
    for ask in (
        lambda: store.get("none"),
        lambda: store.round_of(digest("f")),
        lambda: take_step(store, "set_asked", "none", 0),
        lambda: store.change("none", "failed", expected=UNFINISHED),
    ):
        with pytest.raises(NotFound):
            ask()
    assert store.rounds("none") == []
    assert store.release("none", 0) is None


@pytest.mark.parametrize(
    "rounds",
    [
        [],
        [RoundRecord("job", 0, 0, 3)],
        [RoundRecord("job", 0, 0, 5)],
        [RoundRecord("job", 1, 0, 4)],
        [RoundRecord("other", 0, 0, 4)],
        [RoundRecord("job", 0, 0, 2), RoundRecord("job", 1, 1, 3)],
        [RoundRecord("job", 0, 1, 4)],
        [RoundRecord("job", 0, 0, 4, state="asked")],
    ],
)
def test_each_query_of_a_job_belongs_to_one_round(store: JobStore, rounds: list[RoundRecord]) -> None:
    with pytest.raises(InvalidSetting):
        store.add(a_job(), rounds, idempotency=None)
    assert store.list() == []


def test_a_job_id_is_taken_once(store: JobStore, job: JobRecord) -> None:
    with pytest.raises(ProtocolViolation, match="already"):
        store.add(a_job(), rounds_for(a_job()), idempotency=None)


def test_a_key_is_kept_with_its_job_and_makes_no_other(store: JobStore) -> None:
    key = Idempotency("tok_1", "k", digest("d"), "job")
    assert store.known("tok_1", "k") is None
    store.add(a_job(), rounds_for(a_job()), idempotency=key)
    assert store.known("tok_1", "k") == key
    assert store.known("tok_2", "k") is None
    second = a_job("second")
    with pytest.raises(IntegrityError):
        store.add(second, rounds_for(second), idempotency=replace(key, job_id="second"))
    assert [one.job_id for one in store.list()] == ["job"]
    store.add(second, rounds_for(second), idempotency=replace(key, job_id="second", token_id="tok_2"))


def test_a_refused_job_is_kept_with_its_reason_and_needs_no_round(store: JobStore) -> None:
    refused = a_job(state="refused", problem={"type": "urn:labeler:problem:budget-exceeded", "left": 3})
    store.add(refused, [], idempotency=None)
    assert store.get("job") == refused
    assert store.unfinished() == []


def test_a_change_happens_only_from_an_expected_state_and_returns_what_is_there_now(
    store: JobStore, job: JobRecord, clock: Clock
) -> None:
    clock.turn(minutes=5)
    before = store.get("job")
    moved = store.change("job", "collecting", expected={"queued"})
    assert (moved.state, moved.version, moved.updated_at) == ("collecting", before.version + 1, clock.now)
    assert store.change("job", "tallying", expected={"queued"}) == moved
    assert store.change("job", "collecting", expected=UNFINISHED) == moved
    failed = store.change("job", "failed", expected=UNFINISHED, problem={"detail": "why"})
    assert (failed.state, failed.problem) == ("failed", {"detail": "why"})


@pytest.mark.parametrize("end", sorted(FINISHED))
def test_a_finished_job_never_changes(store: JobStore, job: JobRecord, database: Database, end: JobState) -> None:
    finished = store.change("job", end, expected=UNFINISHED)
    for state in get_args(JobState):
        assert store.change("job", state, expected=get_args(JobState), problem={"new": 1}) == finished
    store.touch("job")
    take_step(store, "report_refusal", "job", 0, "alice", "late", is_final=True)
    assert store.get("job") == finished
    for column in ("state = 'queued'", "version = version + 1", "problem = '{}'"):
        with pytest.raises(IntegrityError), database.write() as connection:
            connection.execute(text(f"UPDATE jobs SET {column}"))
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(text("UPDATE rounds SET state = 'asked'"))


def test_of_many_who_end_a_job_at_once_one_wins_and_all_learn_who(store: JobStore, job: JobRecord) -> None:
    ends: list[JobState] = ["cancelled", "expired", "failed", "completed"] * 3
    with ThreadPoolExecutor(12) as threads:
        seen = list(threads.map(lambda end: store.change("job", end, expected=UNFINISHED), ends))
    assert len({(one.state, one.version) for one in seen}) == 1


def test_a_clock_set_back_does_not_make_a_change_look_older(store: JobStore, job: JobRecord, clock: Clock) -> None:
    clock.turn(hours=1)
    later = store.change("job", "collecting", expected=UNFINISHED)
    clock.turn(days=-30)
    store.touch("job")
    assert store.get("job").updated_at == later.updated_at
    assert store.get("job").version == later.version + 1


def test_lists_are_newest_first_by_state_and_page_by_page(store: JobStore) -> None:
    for number in range(9):
        one = a_job(f"job{number}", created_at=NOW + timedelta(seconds=number // 3))
        store.add(one, rounds_for(one), idempotency=None)
    for number in (1, 4, 8):
        store.change(f"job{number}", "failed", expected=UNFINISHED)
    found: list[str] = []
    after = None
    while page := store.list(after=after, limit=2):
        found += [one.job_id for one in page]
        after = page[-1].cursor
    assert found == [f"job{number}" for number in range(8, -1, -1)]
    assert [one.job_id for one in store.list(states=["failed"])] == ["job8", "job4", "job1"]
    assert store.list(states=[]) == []
    assert [one.job_id for one in store.unfinished()] == [f"job{number}" for number in (0, 2, 3, 5, 6, 7)]
    with pytest.raises(InvalidSetting, match="after"):
        store.list(after="nonsense")


# Rounds.


def test_a_round_goes_through_all_its_steps_and_each_twice_equals_once(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database, sums: AggregateStore
) -> None:
    versions = []
    seq = 0

    def steps() -> list[Callable[[], object]]:
        return [
            lambda: take_step(
                store, "set_batches", "job", [(0, digest("1"), digest("a")), (1, digest("2"), digest("b"))]
            ),
            lambda: take_step(store, "fix_participants", "job", 0, {"alice": digest("8"), "bob": digest("9")}),
            lambda: take_step(store, "set_asked", "job", 0),
            lambda: take_step(store, "report_holdings", "job", 0, "t0", {"alice": ALICE}),
            lambda: take_step(store, "report_refusal", "job", 0, "bob", "no", is_final=False),
            lambda: take_step(store, "fix_contributors", "job", 0, ["bob", "alice"]),
            lambda: post(store, ledger, database),
            lambda: sums.put(digest("a"), "t0", b"sum"),
            lambda: take_step(store, "store_release", "job", 0, b"release"),
        ]

    for step in steps():
        step()
        once = (store.get("job"), store.rounds("job"), sums.of_all([digest("a")]), ledger.head())
        step()
        assert (store.get("job"), store.rounds("job"), sums.of_all([digest("a")]), ledger.head()) == once
        versions.append(once[0].version)
    for step in steps():
        step()
    seq = store.rounds("job")[0].ledger_seq or 0
    assert store.rounds("job")[0] == RoundRecord(
        "job", 0, 0, 2, "opened", digest("1"), digest("a"), ("alice", "bob"), {"t0": {"alice": ALICE}},
        {"bob": "no"}, frozenset(), seq, {"alice": digest("8"), "bob": digest("9")},
        charge=RoundCharge("posted", seq),
    )  # fmt: skip
    assert store.round_of(digest("a")) == store.rounds("job")[0]
    assert store.rounds("job")[1].state == "waiting"
    assert store.release("job", 0) == b"release"
    assert store.release("job", 1) is None
    assert sums.of_all([digest("a")]) == {}
    assert versions == sorted(versions)


def test_a_step_before_its_time_is_refused(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database, sums: AggregateStore
) -> None:
    fresh = a_job("fresh")
    store.add(fresh, rounds_for(fresh), idempotency=None)
    with pytest.raises(NotReady, match="no queries"):
        take_step(store, "set_asked", "fresh", 0)
    for step in (
        lambda: take_step(store, "fix_contributors", "job", 0, ["alice"]),
        lambda: take_step(store, "set_posted", "job", 0, 1),
        lambda: take_step(store, "store_release", "job", 0, b"r"),
        lambda: sums.put(digest("a"), "t0", b"sum"),
    ):
        with pytest.raises(NotReady):
            step()
    take_step(store, "set_asked", "job", 0)
    with pytest.raises(NotReady, match="after its contributors"):
        take_step(store, "set_posted", "job", 0, 1)
    take_step(store, "fix_contributors", "job", 0, ["alice"])
    with pytest.raises(NotReady, match="charge is posted"):
        take_step(store, "store_release", "job", 0, b"r")
    assert store.release("job", 0) is None


def test_a_round_is_made_of_one_batch_for_ever(store: JobStore, job: JobRecord) -> None:
    for other in ((digest("1"), digest("c")), (digest("9"), digest("a"))):
        with pytest.raises(PrivacyRefusal, match="other queries"):
            take_step(store, "set_batches", "job", [(0, *other)])
    second = a_job("second")
    store.add(second, rounds_for(second), idempotency=None)
    with pytest.raises(PrivacyRefusal, match="same as one of job 'job'"):
        take_step(store, "set_batches", "second", [(0, digest("1"), digest("a"))])
    with pytest.raises(PrivacyRefusal):
        take_step(store, "set_batches", "second", [(0, digest("7"), digest("7")), (1, digest("7"), digest("7"))])
    assert store.rounds("second")[0].round_digest == ""


def test_the_keys_of_a_round_are_fixed_once_and_the_database_itself_keeps_them(
    store: JobStore, job: JobRecord, database: Database
) -> None:
    keys = {"alice": digest("8"), "bob": digest("9")}
    take_step(store, "fix_participants", "job", 0, keys)
    for other in (keys | {"bob": digest("7")}, {"alice": digest("8")}, keys | {"carol": digest("6")}):
        with pytest.raises(PrivacyRefusal, match="fixed"):
            take_step(store, "fix_participants", "job", 0, other)
    for statement in ("UPDATE round_participants SET verify_keys = '{}'", "DELETE FROM round_participants"):
        with pytest.raises(IntegrityError), database.write() as connection:
            connection.exec_driver_sql(statement)
    assert [one.participants for one in store.rounds("job")] == [keys, {}]
    for none in ({}, {"alice": ""}):
        with pytest.raises(InvalidSetting):
            take_step(store, "fix_participants", "job", 1, none)
    store.change("job", "cancelled", expected=UNFINISHED)
    with pytest.raises(NotReady):
        take_step(store, "fix_participants", "job", 1, keys)


def test_contributors_are_fixed_once_whoever_asks_first(store: JobStore, job: JobRecord) -> None:
    take_step(store, "set_asked", "job", 0)
    sets = [["alice"], ["bob"], ["alice", "bob"]] * 4

    def fix(names: list[str]) -> str:
        try:
            take_step(store, "fix_contributors", "job", 0, names)
        except PrivacyRefusal:
            return "refused"
        return ",".join(names)

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(fix, sets))
    fixed = set(answers) - {"refused"}
    assert fixed == {",".join(store.rounds("job")[0].contributors)}
    assert answers.count("refused") == 8


@pytest.mark.parametrize("names", [[], ["alice", "alice"]])
def test_contributors_are_at_least_one_each_once(store: JobStore, job: JobRecord, names: list[str]) -> None:
    take_step(store, "set_asked", "job", 0)
    with pytest.raises(InvalidSetting):
        take_step(store, "fix_contributors", "job", 0, names)


def test_a_round_is_posted_only_by_the_entry_that_posts_its_charge(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database
) -> None:
    take_step(store, "set_asked", "job", 0)
    take_step(store, "fix_contributors", "job", 0, ["alice", "bob"])
    other = ledger.post("job/1")
    for seq in (0, 1, other, 10**6):
        with pytest.raises(PrivacyRefusal, match="does not post"):
            take_step(store, "set_posted", "job", 0, seq)
        with pytest.raises(IntegrityError), database.write() as connection:
            connection.execute(text(f"UPDATE rounds SET state = 'posted', ledger_seq = {seq} WHERE number = 0"))
    with suppress(KeyError), database.write() as connection:
        take_step(store, "set_posted", "job", 0, ledger.post("job/0", connection=connection), connection=connection)
        raise KeyError
    assert (store.rounds("job")[0].state, ledger.state("job/0")) == ("agreed", "reserved")
    seq = post(store, ledger, database)
    with pytest.raises(ProtocolViolation, match=f"entry {seq}"):
        take_step(store, "set_posted", "job", 0, other)


def test_a_release_is_stored_once_and_ends_the_job_in_the_same_transaction(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database
) -> None:
    to_posted(store, ledger, database)
    with suppress(KeyError), database.write() as connection:
        take_step(store, "store_release", "job", 0, b"first", connection=connection)
        store.change("job", "completed", expected=UNFINISHED, connection=connection)
        raise KeyError
    assert (store.get("job").state, store.release("job", 0)) == ("queued", None)
    with database.write() as connection:
        take_step(store, "store_release", "job", 0, b"first", connection=connection)
        done = store.change("job", "completed", expected=UNFINISHED, connection=connection)
    assert done.state == "completed"
    take_step(store, "store_release", "job", 0, b"first")
    with pytest.raises(PrivacyRefusal, match="opened once") as refusal:
        take_step(store, "store_release", "job", 0, b"second")
    assert "first" not in str(refusal.value)
    assert "second answer" in str(refusal.value)
    assert store.release("job", 0) == b"first"


def test_of_many_releases_at_once_one_is_stored(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database
) -> None:
    to_posted(store, ledger, database)

    def release(number: int) -> bytes | None:
        try:
            take_step(store, "store_release", "job", 0, b"%d" % number)
        except PrivacyRefusal:
            return None
        return b"%d" % number

    with ThreadPoolExecutor(8) as threads:
        stored = set(threads.map(release, range(8))) - {None}
    assert stored == {store.release("job", 0)}


def test_rounds_of_a_finished_job_take_no_step(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database, sums: AggregateStore
) -> None:
    take_step(store, "set_asked", "job", 0)
    take_step(store, "fix_contributors", "job", 0, ["alice", "bob"])
    with database.write() as connection:
        ledger.void("job/1", NothingLeft("job/1", "never-asked"), connection=connection)
        store.change("job", "cancelled", expected=UNFINISHED, connection=connection)
    with pytest.raises(NotReady, match="cancelled"):
        take_step(store, "set_asked", "job", 1)
    seq = ledger.post("job/0")
    with pytest.raises(NotReady, match="cancelled"):
        take_step(store, "set_posted", "job", 0, seq)
    with pytest.raises(NotReady):
        sums.put(digest("a"), "t0", b"sum")
    take_step(store, "fix_contributors", "job", 0, ["alice", "bob"])
    with pytest.raises(PrivacyRefusal):
        take_step(store, "fix_contributors", "job", 0, ["alice"])


def test_a_release_is_refused_after_the_job_was_cancelled(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database
) -> None:
    to_posted(store, ledger, database)
    store.change("job", "cancelled", expected=UNFINISHED)
    with pytest.raises(NotReady, match="cancelled"):
        take_step(store, "store_release", "job", 0, b"r")
    assert store.release("job", 0) is None


NO_ROUND_MAY = (
    "UPDATE rounds SET state = 'agreed' WHERE number = 0",
    "UPDATE rounds SET state = 'asked', contributors = NULL, ledger_seq = NULL WHERE number = 0",
    "UPDATE rounds SET contributors = '[\"alice\"]' WHERE number = 0",
    "UPDATE rounds SET round_digest = 'x', batch_digest = 'x' WHERE number = 0",
    "UPDATE rounds SET ledger_seq = 1 WHERE number = 0",
    "UPDATE rounds SET state = 'opened' WHERE number = 0",
    "UPDATE rounds SET num_queries = 1 WHERE number = 0",
    "UPDATE rounds SET state = 'agreed', contributors = '[]' WHERE number = 1",
    "UPDATE rounds SET state = 'nonsense' WHERE number = 1",
    "INSERT INTO releases (job_id, number, data) VALUES ('job', 1, 'r')",
    "DELETE FROM rounds WHERE number = 1",
    "UPDATE aggregate_shares SET data = 'other'",
    "UPDATE aggregate_shares SET data_digest = 'other'",
    "DELETE FROM aggregate_shares",
    "DELETE FROM jobs",
)


def test_the_database_itself_refuses_what_no_round_may_do(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database, sums: AggregateStore
) -> None:
    to_posted(store, ledger, database)
    sums.put(digest("a"), "t0", b"sum")
    before = store.rounds("job")
    is_blob = database.dialect == "sqlite"  # a text is none there
    for statement in NO_ROUND_MAY:
        told = statement.replace("'r')", "x'00')").replace("data = 'other'", "data = x'00'") if is_blob else statement
        refuses(database, told)
    assert store.rounds("job") == before


NO_RELEASE_MAY = (
    "UPDATE releases SET number = 1",
    "DELETE FROM releases",
)


def test_the_database_itself_keeps_a_release(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database
) -> None:
    to_posted(store, ledger, database)
    take_step(store, "store_release", "job", 0, b"r")
    refuses(database, *NO_RELEASE_MAY)
    if database.dialect == "sqlite":
        refuses(database, "INSERT OR REPLACE INTO releases VALUES ('job', 0, x'00')")
    else:
        refuses(database, "TRUNCATE releases")
    assert store.release("job", 0) == b"r"


def test_the_latest_report_of_a_tallier_counts(store: JobStore, job: JobRecord) -> None:
    take_step(store, "set_asked", "job", 0)
    version = store.get("job").version
    take_step(store, "report_holdings", "job", 0, "t0", {"alice": bytes.fromhex(ALICE), "bob": "0b" * 16})
    take_step(store, "report_holdings", "job", 0, "t1", {})
    take_step(store, "report_holdings", "job", 0, "t0", {"alice": ALICE})
    assert store.rounds("job")[0].holdings == {"t0": {"alice": ALICE}, "t1": {}}
    assert store.get("job").version == version + 3
    with pytest.raises(ProtocolViolation):
        take_step(store, "report_holdings", "job", 0, "t0", {"alice": "short"})


def test_a_final_refusal_is_not_taken_back_by_one_that_passes(store: JobStore, job: JobRecord) -> None:
    take_step(store, "report_refusal", "job", 0, "alice", "a person has to approve", is_final=False)
    assert store.rounds("job")[0].final_refusals == frozenset()
    take_step(store, "report_refusal", "job", 0, "alice", "over budget", is_final=True)
    take_step(store, "report_refusal", "job", 0, "alice", "a person has to approve", is_final=False)
    one = store.rounds("job")[0]
    assert (one.refusals, one.final_refusals) == ({"alice": "over budget"}, {"alice"})
    assert store.rounds("job")[1].refusals == {}


# Sums of single talliers.


def test_a_talliers_sum_is_fixed_by_the_first_that_arrives_and_stays_known_when_it_is_dropped(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database, sums: AggregateStore
) -> None:
    to_posted(store, ledger, database)
    sums.put(digest("a"), "t0", b"sum 0")
    sums.put(digest("a"), "t1", b"sum 1")
    assert sums.of_all([digest("a")]) == {digest("a"): {"t0": b"sum 0", "t1": b"sum 1"}}
    with pytest.raises(PrivacyRefusal) as refusal:
        sums.put(digest("a"), "t0", b"sum 9")
    assert "sum 0" not in str(refusal.value)
    assert "sum 9" not in str(refusal.value)
    take_step(store, "store_release", "job", 0, b"release")
    assert sums.of_all([digest("a")]) == {}
    sums.put(digest("a"), "t0", b"sum 0")
    assert sums.of_all([digest("a")]) == {}
    with pytest.raises(PrivacyRefusal):
        sums.put(digest("a"), "t0", b"sum 9")
    with pytest.raises(NotReady):
        sums.put(digest("a"), "t2", b"sum 2")
    with pytest.raises(NotFound):
        sums.put(digest("f"), "t0", b"sum")


def test_a_sum_of_a_round_that_is_opened_with_it_is_never_written_and_another_is_refused_all_the_same(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database, sums: AggregateStore
) -> None:
    to_posted(store, ledger, database)
    sums.put(digest("a"), "t0", b"sum 0", is_kept=False)
    assert sums.of_all([digest("a")]) == {}
    sums.put(digest("a"), "t0", b"sum 0")
    assert sums.of_all([digest("a")]) == {}
    with pytest.raises(PrivacyRefusal):
        sums.put(digest("a"), "t0", b"sum 9", is_kept=False)


def test_nothing_of_a_release_or_a_sum_stands_in_an_error_of_the_database(
    store: JobStore, job: JobRecord, ledger: Ledger, database: Database
) -> None:
    with pytest.raises((IntegrityError, LabelerError)) as refusal, database.write() as connection:
        connection.execute(
            text("INSERT INTO releases (job_id, number, data) VALUES ('job', 0, :data)"), {"data": b"votes of bob"}
        )
    assert "votes of bob" not in str(refusal.value)
