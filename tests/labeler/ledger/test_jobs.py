"""Jobs and rounds: every step once, none backwards, nothing released that was not paid for; on both databases."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.labeler.ledger.conftest import Clock, Place, at_once, refuses, undone

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TASK = Task(name="t", method="knn", classes=("x", "y"), sigma_votes=5, delta=1e-5, max_queries=100, agents=2)
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


class Jobs(JobStore):
    """A store of jobs, with the ledger and the talliers' sums of the same journal."""

    def __init__(self, ledger: Ledger, database: Database, clock: Clock) -> None:
        super().__init__(database, clock=clock)
        self.ledger, self.database, self.sums = ledger, database, AggregateStore(database)

    def put(self, job: JobRecord, idempotency: Idempotency | None = None) -> JobRecord:
        """Add a job with two rounds."""
        return self.add(job, rounds_for(job), idempotency=idempotency)

    def step(self, name: str, *args: Any, **named: Any) -> None:
        """Take a step of the job 'job'."""
        take_step(self, name, "job", *args, **named)

    def post(self) -> int:
        with self.database.write() as connection:
            seq = self.ledger.post("job/0", connection=connection)
            self.step("set_posted", 0, seq, connection=connection)
        return seq

    def agreed(self) -> Jobs:
        self.step("set_asked", 0)
        self.step("fix_contributors", 0, ["alice", "bob"])
        return self

    def to_posted(self) -> int:
        return self.agreed().post()


@pytest.fixture
def store(ledger: Ledger, database: Database, clock: Clock) -> Jobs:
    """Without a job."""
    TaskStore(database).add(TaskRecord(TASK, ("alice", "bob"), NOW, "tok_1"))
    return Jobs(ledger, database, clock)


@pytest.fixture
def jobs(store: Jobs) -> Jobs:
    """With a job whose rounds have their queries and their reservations."""
    store.put(a_job())
    store.step("set_batches", [(0, digest("1"), digest("a")), (1, digest("2"), digest("b"))])
    for number in (0, 1):
        store.ledger.reserve(f"job/{number}", [Charge("federation", "instance", 1)])
    return store


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


def test_what_is_not_there_is_not_found(store: Jobs) -> None:
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
def test_each_query_of_a_job_belongs_to_one_round(store: Jobs, rounds: list[RoundRecord]) -> None:
    with pytest.raises(InvalidSetting):
        store.add(a_job(), rounds, idempotency=None)
    assert store.list() == []


def test_a_job_id_is_taken_once(jobs: Jobs) -> None:
    with pytest.raises(ProtocolViolation, match="already"):
        jobs.put(a_job())


def test_a_key_is_kept_with_its_job_and_makes_no_other(store: Jobs) -> None:
    key = Idempotency("tok_1", "k", digest("d"), "job")
    assert store.known("tok_1", "k") is None
    store.put(a_job(), key)
    assert store.known("tok_1", "k") == key
    assert store.known("tok_2", "k") is None
    second = a_job("second")
    with pytest.raises(IntegrityError):
        store.put(second, replace(key, job_id="second"))
    assert [one.job_id for one in store.list()] == ["job"]
    store.put(second, replace(key, job_id="second", token_id="tok_2"))


def test_a_refused_job_is_kept_with_its_reason_and_needs_no_round(store: Jobs) -> None:
    refused = a_job(state="refused", problem={"type": "urn:labeler:problem:budget-exceeded", "left": 3})
    store.add(refused, [], idempotency=None)
    assert store.get("job") == refused
    assert store.unfinished() == []


def test_a_change_happens_only_from_an_expected_state_and_returns_what_is_there_now(jobs: Jobs, clock: Clock) -> None:
    clock.turn(minutes=5)
    before = jobs.get("job")
    moved = jobs.change("job", "collecting", expected={"queued"})
    assert (moved.state, moved.version, moved.updated_at) == ("collecting", before.version + 1, clock.now)
    assert jobs.change("job", "tallying", expected={"queued"}) == moved
    assert jobs.change("job", "collecting", expected=UNFINISHED) == moved
    failed = jobs.change("job", "failed", expected=UNFINISHED, problem={"detail": "why"})
    assert (failed.state, failed.problem) == ("failed", {"detail": "why"})


@pytest.mark.parametrize("end", sorted(FINISHED))
def test_a_finished_job_never_changes(jobs: Jobs, end: JobState) -> None:
    finished = jobs.change("job", end, expected=UNFINISHED)
    for state in get_args(JobState):
        assert jobs.change("job", state, expected=get_args(JobState), problem={"new": 1}) == finished
    jobs.touch("job")
    jobs.step("report_refusal", 0, "alice", "late", is_final=True)
    assert jobs.get("job") == finished
    refuses(
        jobs.database,
        *(f"UPDATE jobs SET {one}" for one in ("state = 'queued'", "version = version + 1", "problem = '{}'")),
    )
    refuses(jobs.database, "UPDATE rounds SET state = 'asked'")


def test_of_many_who_end_a_job_at_once_one_wins_and_all_learn_who(jobs: Jobs) -> None:
    ends: list[JobState] = ["cancelled", "expired", "failed", "completed"] * 3
    seen = at_once(12, lambda number: jobs.change("job", ends[number], expected=UNFINISHED))
    assert len({(one.state, one.version) for one in seen}) == 1


def test_a_clock_set_back_does_not_make_a_change_look_older(jobs: Jobs, clock: Clock) -> None:
    clock.turn(hours=1)
    later = jobs.change("job", "collecting", expected=UNFINISHED)
    clock.turn(days=-30)
    jobs.touch("job")
    assert jobs.get("job").updated_at == later.updated_at
    assert jobs.get("job").version == later.version + 1


def test_lists_are_newest_first_by_state_and_page_by_page(store: Jobs) -> None:
    for number in range(9):
        store.put(a_job(f"job{number}", created_at=NOW + timedelta(seconds=number // 3)))
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


def test_a_round_goes_through_all_its_steps_and_each_twice_equals_once(jobs: Jobs) -> None:
    steps: list[Callable[[], object]] = [
        lambda: jobs.step("set_batches", [(0, digest("1"), digest("a")), (1, digest("2"), digest("b"))]),
        lambda: jobs.step("fix_participants", 0, {"alice": digest("8"), "bob": digest("9")}),
        lambda: jobs.step("set_asked", 0),
        lambda: jobs.step("report_holdings", 0, "t0", {"alice": ALICE}),
        lambda: jobs.step("report_refusal", 0, "bob", "no", is_final=False),
        lambda: jobs.step("fix_contributors", 0, ["bob", "alice"]),
        lambda: jobs.post(),
        lambda: jobs.sums.put(digest("a"), "t0", b"sum"),
        lambda: jobs.step("store_release", 0, b"release"),
    ]
    versions = []
    for step in steps:
        step()
        once = (jobs.get("job"), jobs.rounds("job"), jobs.sums.of_all([digest("a")]), jobs.ledger.head())
        step()
        assert (jobs.get("job"), jobs.rounds("job"), jobs.sums.of_all([digest("a")]), jobs.ledger.head()) == once
        versions.append(once[0].version)
    for step in steps:
        step()
    seq = jobs.rounds("job")[0].ledger_seq or 0
    assert jobs.rounds("job")[0] == RoundRecord(
        "job", 0, 0, 2, "opened", digest("1"), digest("a"), ("alice", "bob"), {"t0": {"alice": ALICE}},
        {"bob": "no"}, frozenset(), seq, {"alice": digest("8"), "bob": digest("9")},
        charge=RoundCharge("posted", seq),
    )  # fmt: skip
    assert jobs.round_of(digest("a")) == jobs.rounds("job")[0]
    assert jobs.rounds("job")[1].state == "waiting"
    assert jobs.release("job", 0) == b"release"
    assert jobs.release("job", 1) is None
    assert jobs.sums.of_all([digest("a")]) == {}
    assert versions == sorted(versions)


def test_a_step_before_its_time_is_refused(jobs: Jobs) -> None:
    jobs.put(a_job("fresh"))
    with pytest.raises(NotReady, match="no queries"):
        take_step(jobs, "set_asked", "fresh", 0)
    for step in (
        lambda: jobs.step("fix_contributors", 0, ["alice"]),
        lambda: jobs.step("set_posted", 0, 1),
        lambda: jobs.step("store_release", 0, b"r"),
        lambda: jobs.sums.put(digest("a"), "t0", b"sum"),
    ):
        with pytest.raises(NotReady):
            step()
    jobs.step("set_asked", 0)
    with pytest.raises(NotReady, match="after its contributors"):
        jobs.step("set_posted", 0, 1)
    jobs.step("fix_contributors", 0, ["alice"])
    with pytest.raises(NotReady, match="charge is posted"):
        jobs.step("store_release", 0, b"r")
    assert jobs.release("job", 0) is None


def test_a_round_is_made_of_one_batch_for_ever(jobs: Jobs) -> None:
    for other in ((digest("1"), digest("c")), (digest("9"), digest("a"))):
        with pytest.raises(PrivacyRefusal, match="other queries"):
            jobs.step("set_batches", [(0, *other)])
    jobs.put(a_job("second"))
    with pytest.raises(PrivacyRefusal, match="same as one of job 'job'"):
        take_step(jobs, "set_batches", "second", [(0, digest("1"), digest("a"))])
    with pytest.raises(PrivacyRefusal):
        take_step(jobs, "set_batches", "second", [(0, digest("7"), digest("7")), (1, digest("7"), digest("7"))])
    assert jobs.rounds("second")[0].round_digest == ""


def test_the_keys_of_a_round_are_fixed_once_and_the_database_itself_keeps_them(jobs: Jobs) -> None:
    keys = {"alice": digest("8"), "bob": digest("9")}
    jobs.step("fix_participants", 0, keys)
    for other in (keys | {"bob": digest("7")}, {"alice": digest("8")}, keys | {"carol": digest("6")}):
        with pytest.raises(PrivacyRefusal, match="fixed"):
            jobs.step("fix_participants", 0, other)
    refuses(jobs.database, "UPDATE round_participants SET verify_keys = '{}'", "DELETE FROM round_participants")
    assert [one.participants for one in jobs.rounds("job")] == [keys, {}]
    for none in ({}, {"alice": ""}):
        with pytest.raises(InvalidSetting):
            jobs.step("fix_participants", 1, none)
    jobs.change("job", "cancelled", expected=UNFINISHED)
    with pytest.raises(NotReady):
        jobs.step("fix_participants", 1, keys)


def test_contributors_are_fixed_once_whoever_asks_first(jobs: Jobs) -> None:
    jobs.step("set_asked", 0)
    for names in ([], ["alice", "alice"]):
        with pytest.raises(InvalidSetting):
            jobs.step("fix_contributors", 0, names)
    sets = [("alice",), ("bob",), ("alice", "bob")] * 4

    def fix(number: int) -> tuple[str, ...]:
        jobs.step("fix_contributors", 0, sets[number])
        return sets[number]

    answers = at_once(12, fix, PrivacyRefusal)
    assert set(answers) - {None} == {jobs.rounds("job")[0].contributors}
    assert answers.count(None) == 8


def test_a_round_is_posted_only_by_the_entry_that_posts_its_charge(jobs: Jobs) -> None:
    jobs.agreed()
    other = jobs.ledger.post("job/1")
    for seq in (0, 1, other, 10**6):
        with pytest.raises(PrivacyRefusal, match="does not post"):
            jobs.step("set_posted", 0, seq)
        refuses(jobs.database, f"UPDATE rounds SET state = 'posted', ledger_seq = {seq} WHERE number = 0")
    with undone(jobs.database) as connection:
        jobs.step("set_posted", 0, jobs.ledger.post("job/0", connection=connection), connection=connection)
    assert (jobs.rounds("job")[0].state, jobs.ledger.state("job/0")) == ("agreed", "reserved")
    seq = jobs.post()
    with pytest.raises(ProtocolViolation, match=f"entry {seq}"):
        jobs.step("set_posted", 0, other)


def test_a_release_is_stored_once_and_ends_the_job_in_the_same_transaction(jobs: Jobs) -> None:
    jobs.to_posted()
    with undone(jobs.database) as connection:
        jobs.step("store_release", 0, b"first", connection=connection)
        jobs.change("job", "completed", expected=UNFINISHED, connection=connection)
    assert (jobs.get("job").state, jobs.release("job", 0)) == ("queued", None)
    with jobs.database.write() as connection:
        jobs.step("store_release", 0, b"first", connection=connection)
        done = jobs.change("job", "completed", expected=UNFINISHED, connection=connection)
    assert done.state == "completed"
    jobs.step("store_release", 0, b"first")
    with pytest.raises(PrivacyRefusal, match=r"opened once.*second answer") as refusal:
        jobs.step("store_release", 0, b"second")
    assert "first" not in str(refusal.value)
    assert jobs.release("job", 0) == b"first"


def test_of_many_releases_at_once_one_is_stored(jobs: Jobs) -> None:
    jobs.to_posted()
    answers = at_once(8, lambda number: jobs.step("store_release", 0, b"%d" % number) or number, PrivacyRefusal)
    assert [b"%d" % number for number in answers if number is not None] == [jobs.release("job", 0)]


def test_rounds_of_a_finished_job_take_no_step(jobs: Jobs) -> None:
    jobs.agreed()
    with jobs.database.write() as connection:
        jobs.ledger.void("job/1", NothingLeft("job/1", "never-asked"), connection=connection)
        jobs.change("job", "cancelled", expected=UNFINISHED, connection=connection)
    with pytest.raises(NotReady, match="cancelled"):
        jobs.step("set_asked", 1)
    seq = jobs.ledger.post("job/0")
    with pytest.raises(NotReady, match="cancelled"):
        jobs.step("set_posted", 0, seq)
    with pytest.raises(NotReady):
        jobs.sums.put(digest("a"), "t0", b"sum")
    jobs.step("fix_contributors", 0, ["alice", "bob"])
    with pytest.raises(PrivacyRefusal):
        jobs.step("fix_contributors", 0, ["alice"])


def test_a_release_is_refused_after_the_job_was_cancelled(jobs: Jobs) -> None:
    jobs.to_posted()
    jobs.change("job", "cancelled", expected=UNFINISHED)
    with pytest.raises(NotReady, match="cancelled"):
        jobs.step("store_release", 0, b"r")
    assert jobs.release("job", 0) is None


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


def test_the_database_itself_refuses_what_no_round_may_do(jobs: Jobs) -> None:
    jobs.to_posted()
    jobs.sums.put(digest("a"), "t0", b"sum")
    before = jobs.rounds("job")
    is_blob = jobs.database.dialect == "sqlite"  # a text is none there
    for statement in NO_ROUND_MAY:
        told = statement.replace("'r')", "x'00')").replace("data = 'other'", "data = x'00'") if is_blob else statement
        refuses(jobs.database, told)
    assert jobs.rounds("job") == before


def test_the_database_itself_keeps_a_release(jobs: Jobs) -> None:
    jobs.to_posted()
    jobs.step("store_release", 0, b"r")
    replaced = "INSERT OR REPLACE INTO releases VALUES ('job', 0, x'00')"
    also = replaced if jobs.database.dialect == "sqlite" else "TRUNCATE releases"
    refuses(jobs.database, "UPDATE releases SET number = 1", "DELETE FROM releases", also)
    assert jobs.release("job", 0) == b"r"


def test_the_latest_report_of_a_tallier_counts(jobs: Jobs) -> None:
    jobs.step("set_asked", 0)
    jobs.step("report_holdings", 0, "t0", {"alice": bytes.fromhex(ALICE), "bob": "0b" * 16})
    jobs.step("report_holdings", 0, "t1", {})
    jobs.step("report_holdings", 0, "t0", {"alice": ALICE})
    assert jobs.rounds("job")[0].holdings == {"t0": {"alice": ALICE}, "t1": {}}
    with pytest.raises(ProtocolViolation):
        jobs.step("report_holdings", 0, "t0", {"alice": "short"})


def test_a_final_refusal_is_not_taken_back_by_one_that_passes(jobs: Jobs) -> None:
    jobs.step("report_refusal", 0, "alice", "a person has to approve", is_final=False)
    assert jobs.rounds("job")[0].final_refusals == frozenset()
    jobs.step("report_refusal", 0, "alice", "over budget", is_final=True)
    jobs.step("report_refusal", 0, "alice", "a person has to approve", is_final=False)
    one = jobs.rounds("job")[0]
    assert (one.refusals, one.final_refusals) == ({"alice": "over budget"}, {"alice"})
    assert jobs.rounds("job")[1].refusals == {}


# Sums of single talliers.


def test_a_talliers_sum_is_fixed_by_the_first_that_arrives_and_stays_known_when_it_is_dropped(jobs: Jobs) -> None:
    jobs.to_posted()
    jobs.sums.put(digest("a"), "t0", b"sum 0")
    jobs.sums.put(digest("a"), "t1", b"sum 1")
    assert jobs.sums.of_all([digest("a")]) == {digest("a"): {"t0": b"sum 0", "t1": b"sum 1"}}
    with pytest.raises(PrivacyRefusal, match=r"^(?!.*sum \d)"):
        jobs.sums.put(digest("a"), "t0", b"sum 9")
    jobs.step("store_release", 0, b"release")
    assert jobs.sums.of_all([digest("a")]) == {}
    jobs.sums.put(digest("a"), "t0", b"sum 0")
    assert jobs.sums.of_all([digest("a")]) == {}
    with pytest.raises(PrivacyRefusal):
        jobs.sums.put(digest("a"), "t0", b"sum 9")
    with pytest.raises(NotReady):
        jobs.sums.put(digest("a"), "t2", b"sum 2")
    with pytest.raises(NotFound):
        jobs.sums.put(digest("f"), "t0", b"sum")


def test_a_sum_of_a_round_that_is_opened_with_it_is_never_written_and_another_is_refused_all_the_same(
    jobs: Jobs,
) -> None:
    jobs.to_posted()
    jobs.sums.put(digest("a"), "t0", b"sum 0", is_kept=False)
    assert jobs.sums.of_all([digest("a")]) == {}
    jobs.sums.put(digest("a"), "t0", b"sum 0")
    assert jobs.sums.of_all([digest("a")]) == {}
    with pytest.raises(PrivacyRefusal):
        jobs.sums.put(digest("a"), "t0", b"sum 9", is_kept=False)


def test_nothing_of_a_release_or_a_sum_stands_in_an_error_of_the_database(jobs: Jobs) -> None:
    with pytest.raises((IntegrityError, LabelerError)) as refusal, jobs.database.write() as connection:
        connection.execute(
            text("INSERT INTO releases (job_id, number, data) VALUES ('job', 0, :data)"), {"data": b"votes of bob"}
        )
    assert "votes of bob" not in str(refusal.value)
