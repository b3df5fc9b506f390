"""Taking a job: all of it or nothing, once per key, and a refusal that says whose budget and who spent it."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from api.coordinator import submission
from api.coordinator.ownership import Reader
from api.coordinator.pricing import price_view
from api.coordinator.uploads import upload_of_features
from api.coordinator.views import read_view
from api.problems import problem_of
from api.schema import JobRequest, JobView
from labeler.batching import BATCH_QUERIES, round_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import (
    BadData,
    BudgetExceeded,
    IdempotencyMismatch,
    InvalidSetting,
    InvalidTask,
    LabelerError,
    NotFound,
    NotReady,
    Unavailable,
)
from labeler.ledger.database import Connection, Database
from labeler.ledger.ledger import Ledger
from tests.api.conftest import CLASSES, FINGERPRINT, House
from tests.job_steps import take_step
from tests.scored import scored


def test_a_job_claims_its_queries_and_reserves_its_worst_case_everywhere(house: House) -> None:
    record = house.task()
    view = house.submit(record, 30, name="first")
    assert re.fullmatch(r"job-[0-9a-f]{20}", view.job_id)
    assert (view.state, view.queries, view.images, view.queries_done) == ("queued", 30, 30, 0)
    assert view.stage == "30 questions are being chosen"
    assert [one.state for one in view.rounds] == ["waiting"]
    assert house.tasks.get(record.digest).next_query == 30
    charges = round_charges(record.task, 30)
    assert house.ledger.state(f"{view.job_id}/proposed") == "reserved"
    assert house.ledger.state(f"{view.job_id}/0") is None
    for account in ("federation", "agent:east", "agent:north", "agent:west"):
        assert house.ledger.balance(account, "instance").reserved == charges["instance"]
        assert house.ledger.balance(account, "agent").reserved == charges["agent"]
    assert house.files() == [f"jobs/{view.job_id}", f"jobs/{view.job_id}/upload.parquet"]
    following = house.submit(record, 70, start=100)
    assert house.jobs.get(following.job_id).first_query == 30


@pytest.mark.usefixtures("small_rounds")
def test_a_large_job_is_reserved_whole_and_then_round_by_round_for_those_who_are_asked(house: House) -> None:
    record = house.task(max_queries=5000)
    view = house.submit(record, 5000)
    assert [(one.number, one.queries) for one in view.rounds] == [(0, BATCH_QUERIES), (1, 5000 - BATCH_QUERIES)]
    assert house.ledger.balance("agent:north", "instance").reserved == view.price.instance_charge_nano
    house.begin(view.job_id, asked=("east", "west"))
    names = (f"{view.job_id}/{number}" for number in ("proposed", 0, 1))
    assert [house.ledger.state(name) for name in names] == ["void", "reserved", "reserved"]
    for account, charge in (("federation", 1), ("agent:east", 1), ("agent:north", 0), ("agent:west", 1)):
        balance = house.ledger.balance(account, "instance")
        assert (balance.reserved, balance.posted) == (charge * view.price.instance_charge_nano, 0)
    house.ledger.verify()


def test_a_selection_asks_about_some_of_the_images(house: House) -> None:
    view = house.submit(house.task(), 30, selection={"strategy": "clustered", "count": 7, "seed": 3})
    assert (view.queries, view.images) == (7, 30)
    assert view.stage == "7 questions are being chosen"
    assert house.submit(house.task(), 1, start=50).stage == "1 question is being chosen"
    assert view.selection.count == 7


def test_the_deadline_is_the_requests_or_the_configured_one(house: House) -> None:
    record = house.task()
    assert house.submit(record, 1).expires_at == house.clock() + timedelta(days=1)
    assert house.submit(record, 1, deadline_s=60).expires_at == house.clock() + timedelta(seconds=60)


@pytest.mark.parametrize(
    ("fields", "count", "said"),
    [
        ({"backbone_fingerprint": None}, 3, "feature vectors need backbone_fingerprint"),
        ({"backbone_fingerprint": "0" * 16}, 3, "similarities between two backbones mean nothing"),
        ({"selection": {"strategy": "random", "count": 4}}, 3, "selection.count is 4, and 3 images were sent"),
        ({"selection": {"strategy": "spectral", "count": 4}}, 3, "selection.count is 4, and 3 images were sent"),
        ({"selection": {"strategy": "all", "count": 2}}, 3, "contradicts"),
        ({"query_ids": ["a"]}, 3, "query_ids go with feature vectors in the request"),
        ({"features": [[1.0, 2.0]]}, 3, "send one of the two"),
        ({}, 101, "101 queries are more than the 100 of the task"),
    ],
)
def test_what_does_not_fit_the_task_is_refused_and_leaves_nothing(
    house: House, fields: dict[str, Any], count: int, said: str
) -> None:
    record = house.task()
    head = house.ledger.head()
    with pytest.raises(InvalidSetting, match=re.escape(said)):
        house.submit(record, count, **fields)
    assert house.files() == []
    assert house.ledger.head() == head
    assert house.jobs.list() == []


def test_a_task_that_is_asked_at_once_says_what_to_do_with_fewer_images_and_with_more(house: House) -> None:
    """Where few labels are asked for there is no selection, and of three images nobody can choose twenty."""
    record = house.task(method="reverse-knn", k=1, max_queries=20)
    made = "Make a task with max_queries = 3, or"
    one_by_one = ", or make a task of method knn, which is asked any number at a time"
    with pytest.raises(InvalidTask, match=f"{made} send 20 images or vectors{one_by_one}"):
        house.submit(record, 3)
    some = {"strategy": "random", "count": 3}
    with pytest.raises(InvalidTask, match=re.escape(f"{made} choose 20 (selection.count){one_by_one}")):
        house.submit(record, 25, selection=some)
    assert house.files() == []


def test_an_evaluation_whose_question_is_no_model_is_refused_and_leaves_nothing(house: House) -> None:
    record = house.task(method="evaluate", k=1, max_queries=3)
    head = house.ledger.head()
    with pytest.raises(BadData, match="carry a released model, and these do not"):
        house.submit(record, 3)
    assert house.files() == []
    assert house.ledger.head() == head


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 5e-324, -9e-61, 1.1e60, 1e308])
def test_a_model_whose_numbers_would_be_slow_for_some_record_is_refused_and_leaves_nothing(
    house: House, number: float
) -> None:
    def submit(**model: Any) -> JobView:
        asked = scored(CLASSES, 6, fingerprint=FINGERPRINT, **model).rows(6, num_classes=len(CLASSES))
        record = house.task(method="evaluate", k=1, max_queries=len(asked))
        upload = upload_of_features(
            asked.tolist(), None, folder=house.config.home / "incoming", limits=house.config.limits
        )
        request = JobRequest(task_id=record.digest, backbone_fingerprint=FINGERPRINT)
        return house.submissions.submit(request, upload, reader=Reader("tok-1", "requester"), idempotency_key=None)

    weights = np.ones((7, len(CLASSES)))
    weights[3, 1] = number
    with pytest.raises(InvalidSetting, match="in a time that no record changes"):
        submit(weights=weights)
    assert house.files() == []
    assert house.jobs.list() == []
    weights[3, 1] = -0.0
    assert submit(weights=weights).state == "queued"


def test_vectors_of_a_length_that_no_agent_has_are_refused_as_soon_as_one_has_told(house: House) -> None:
    before = house.task()
    assert house.submit(before, 3).state == "queued"  # nobody has told: agents refuse it, and it costs nothing
    house.enrol("south", dimension=64)
    house.enrol("far", dimension=3, fingerprint="another")
    record = house.task(agents=["north", "south"])
    head, files = house.ledger.head(), house.files()
    said = "features: the vectors have 3 entries, but those of the task's agents (backbone ffffffffffffffff) "
    with pytest.raises(InvalidSetting, match=re.escape(said + "have 64.")):
        house.submit(record, 3, key="once")
    assert (house.ledger.head(), house.files()) == (head, files)
    assert house.jobs.known("tok-1", "once") is None
    # Who is not in the task decides nothing, and one agent that is wrong about itself refuses nobody's job.
    assert house.submit(before, 3, start=10).state == "queued"
    house.enrol("right", dimension=3)
    assert house.submit(house.task(agents=["right", "south"]), 3).state == "queued"


def test_a_probe_names_the_agent_that_has_another_backbone_and_nothing_is_charged(house: House) -> None:
    """Features of the requester, and of two agents, of which one is 3 grid units away; 2 are rounding."""
    rows = ([[2048, moved, 0], [0, 2048, 0]] for moved in (0, 2, 3, -2))
    ours, near, far, beyond = (base64.b64encode(np.array(one, dtype="<i2").tobytes()).decode() for one in rows)
    house.enrol("near", dimension=3, probe=near)
    house.enrol("far", dimension=3, probe=far)
    house.enrol("beyond", dimension=3, probe=beyond)
    house.enrol("silent", dimension=3)
    both = house.task(agents=["near", "far"])
    head, files = house.ledger.head(), house.files()
    for record, fields, said in (
        (both, {"probe": ours}, "probe: agent 'far' embedded the probe otherwise than the request"),
        (both, {}, "probe: the request embedded no probe"),
        (house.task(agents=["near", "silent"]), {"probe": ours}, "probe: agent 'silent' embedded no probe"),
        (both, {"probe": "AAAA"}, "this is no probe of features of 3 entries"),
        # Both are near the request, and not near each other.
        (house.task(agents=["near", "beyond"]), {"probe": ours}, "embedded the probe otherwise than agent "),
    ):
        with pytest.raises(InvalidSetting, match=re.escape(said)):
            house.submit(record, 3, key="once", **fields)
    assert (house.ledger.head(), house.files()) == (head, files)
    assert house.submit(house.task(agents=["near"]), 3, probe=ours).state == "queued"


def test_reverse_knn_is_asked_all_at_once(house: House) -> None:
    record = house.task(method="reverse-knn", k=1, max_queries=20)
    with pytest.raises(InvalidSetting, match="Make a task with max_queries = 19"):
        house.submit(record, 19)
    view = house.submit(record, 20)
    assert view.price.agent_epsilon is None
    assert house.ledger.balance("federation", "agent").reserved == UNBOUNDED_NANO


def test_a_job_whose_commit_is_durable_keeps_its_upload_although_its_requester_was_told_of_trouble(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the anchor beside the journal cannot be written on a full disk."""
    record = house.task()

    @contextmanager
    def trouble_behind_the_commit(database: Database) -> Iterator[Connection]:
        with write(database) as connection:
            yield connection
        raise Unavailable("the disk is full")

    write = Database.write
    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", trouble_behind_the_commit)
        with pytest.raises(Unavailable):
            house.submit(record, 10, key="k")
    (job,) = house.jobs.unfinished()
    assert house.files() == [f"jobs/{job.job_id}", f"jobs/{job.job_id}/upload.parquet"]
    assert house.submit(record, 10, key="k").job_id == job.job_id


def test_the_same_key_and_request_give_the_same_job(house: House) -> None:
    record = house.task()
    first = house.submit(record, 10, key="k")
    head = house.ledger.head()
    assert house.submit(record, 10, key="k") == first
    assert house.ledger.head() == head
    assert house.tasks.get(record.digest).next_query == 10
    assert house.files() == [f"jobs/{first.job_id}", f"jobs/{first.job_id}/upload.parquet"]
    assert house.submit(record, 10, key="other").job_id != first.job_id


@pytest.mark.parametrize("change", [{"name": "x"}, {"count": 11}, {"start": 1}, {"deadline_s": 9.0}])
def test_the_same_key_for_another_request_is_refused(house: House, change: dict[str, Any]) -> None:
    record = house.task()
    house.submit(record, 10, key="k")
    with pytest.raises(IdempotencyMismatch, match="belongs to another request"):
        house.submit(record, **({"count": 10, "key": "k"} | change))
    assert len(house.jobs.list()) == 1


def test_one_key_at_the_same_time_makes_one_job(house: House) -> None:
    record = house.task()
    gate = threading.Barrier(8)

    def send(_: int) -> str:
        gate.wait()
        return house.submit(record, 10, key="k").job_id

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(send, range(8)))
    assert len(ids) == 1
    assert house.tasks.get(record.digest).next_query == 10
    assert house.files() == [f"jobs/{ids.pop()}", house.files()[1]]


def test_a_job_beyond_the_budget_is_kept_as_refused_and_told_the_same_twice(house: House) -> None:
    record = house.task()
    cost = price_view(record.task, 100).instance_epsilon
    assert cost is not None
    house = house.with_caps(federation=("unlimited", "unlimited"), agents=(cost, "unlimited"))
    paid = house.submit(record, 90)
    left = house.ledger.balance("agent:east", "instance").left
    other = house.task()
    with pytest.raises(BudgetExceeded, match="account 'agent:east', instance level: a job of 50 queries") as refused:
        house.submit(other, 50, key="k")
    problem = problem_of(refused.value)
    assert (problem["account"], problem["level"], problem["status"]) == ("agent:east", "instance", 409)
    assert problem["asked_nano"] == price_view(other.task, 50).instance_charge_nano
    assert problem["left_nano"] == left
    assert problem["asked_epsilon"] > problem["left_epsilon"]
    assert problem["last_spenders"][0]["reservation_id"] == f"{paid.job_id}/proposed"
    assert "Nobody was asked" in problem["detail"]
    job = house.jobs.get(problem["job_id"])
    assert (job.state, job.num_queries) == ("refused", 50)
    view = read_view(job.job_id, house.stores)
    assert view.problem is not None
    assert view.problem.model_dump(exclude={"instance"}) == problem
    assert view.stage == "refused before anybody was asked"
    assert view.rounds == ()
    assert house.tasks.get(other.digest).next_query == 0
    assert house.ledger.state(f"{job.job_id}/proposed") is None
    assert house.files() == [f"jobs/{paid.job_id}", f"jobs/{paid.job_id}/upload.parquet"]
    with pytest.raises(BudgetExceeded) as again:
        house.submit(other, 50, key="k")
    assert problem_of(again.value) == problem
    assert len(house.jobs.list()) == 2


def test_a_job_of_several_rounds_is_refused_as_a_whole(house: House) -> None:
    record = house.task(max_queries=5000)
    one_round = price_view(record.task, BATCH_QUERIES).instance_epsilon
    assert one_round is not None
    house = house.with_caps(federation=(one_round * 1.01, "unlimited"))
    with pytest.raises(BudgetExceeded, match="a job of 5000 queries") as refused:
        house.submit(record, 5000)
    assert problem_of(refused.value)["asked_nano"] == price_view(record.task, 5000).instance_charge_nano
    assert problem_of(refused.value)["last_spenders"] == []
    assert house.ledger.balance("federation", "instance").spent == 0


def test_a_level_without_a_bound_is_refused_where_the_account_has_a_cap(house: House) -> None:
    record = house.task(method="reverse-knn", max_queries=20)
    house = house.with_caps(federation=("unlimited", 100.0))
    with pytest.raises(BudgetExceeded, match="no finite epsilon") as refused:
        house.submit(record, 20)
    problem = problem_of(refused.value)
    assert (problem["level"], problem["asked_nano"], problem["asked_epsilon"]) == ("agent", None, None)
    assert house.ledger.balance("federation", "agent").spent == 0


def test_the_last_of_a_budget_is_given_to_one_of_many(house: House) -> None:
    record = house.task(max_queries=1000)
    cost = price_view(record.task, 100).instance_epsilon
    assert cost is not None
    house = house.with_caps(federation=(cost, "unlimited"))
    gate = threading.Barrier(8)

    def send(number: int) -> str:
        gate.wait()
        try:
            return house.submit(record, 100, start=number).state
        except BudgetExceeded:
            return "refused"

    with ThreadPoolExecutor(8) as pool:
        states = sorted(pool.map(send, range(8)))
    assert states == ["queued"] + ["refused"] * 7
    assert isinstance(house.ledger, Ledger)
    house.ledger.verify()


def test_cancelling_before_anybody_was_asked_gives_everything_back(house: House) -> None:
    record = house.task(max_queries=5000)
    view = house.submit(record, 5000)
    cancelled = submission.cancel(view.job_id, stores=house.stores)
    assert cancelled.state == "cancelled"
    assert cancelled.stage == "cancelled before anybody was asked; nothing was charged"
    assert house.ledger.state(f"{view.job_id}/proposed") == "void"
    assert house.ledger.balance("federation", "instance").spent == 0
    assert submission.cancel(view.job_id, stores=house.stores) == cancelled


@pytest.mark.usefixtures("small_rounds")
def test_cancelling_keeps_the_charge_of_rounds_that_were_asked(house: House) -> None:
    record = house.task(max_queries=5000)
    view = house.submit(record, 5000)
    take_step(house.jobs, "set_batches", view.job_id, [(0, "1" * 64, "2" * 64), (1, "3" * 64, "4" * 64)])
    house.begin(view.job_id)
    take_step(house.jobs, "set_asked", view.job_id, 0)
    seen = read_view(view.job_id, house.stores)
    assert seen.stage == "batch 1 of 2: waiting for shares of 3 of 3 agents: east, north, west"
    take_step(house.jobs, "report_refusal", view.job_id, 0, "north", "the policy of this site does not allow it", True)
    for tallier in ("t0", "t1", "t2"):
        take_step(house.jobs, "report_holdings", view.job_id, 0, tallier, {"east": "ab" * 16})
    seen = read_view(view.job_id, house.stores)
    assert seen.stage == "batch 1 of 2: waiting for shares of 2 of 3 agents: east, west; refused: north"
    assert seen.rounds[0].answered == ()
    assert seen.rounds[0].waiting_for == ("east", "west")
    cancelled = submission.cancel(view.job_id, stores=house.stores)
    assert cancelled.stage == "cancelled; 1 of 2 batches had been asked"
    assert [house.ledger.state(f"{view.job_id}/{number}") for number in (0, 1)] == ["posted", "void"]
    assert house.ledger.balance("agent:west", "instance").spent == round_charges(record.task, BATCH_QUERIES)["instance"]


@pytest.mark.parametrize("has_left", [False, True], ids=["no share", "a share"])
def test_a_round_that_everybody_refused_is_given_back_only_where_no_share_was_ever_passed_on(
    house: House, has_left: bool
) -> None:
    """An agent may answer, be asked again under another policy, and refuse: its refusal is no proof."""
    view = house.submit(house.task(), 5)
    take_step(house.jobs, "set_batches", view.job_id, [(0, "1" * 64, "2" * 64)])
    house.begin(view.job_id)
    take_step(house.jobs, "set_asked", view.job_id, 0)
    if has_left:
        take_step(house.jobs, "note_share", view.job_id, 0)
    for agent in ("east", "north", "west"):
        take_step(
            house.jobs, "report_refusal", view.job_id, 0, agent, "the policy of this site does not allow it", True
        )
    submission.cancel(view.job_id, stores=house.stores)
    assert house.ledger.state(f"{view.job_id}/0") == ("posted" if has_left else "void")


def test_a_job_that_has_ended_cannot_be_cancelled(house: House) -> None:
    view = house.submit(house.task(), 5)
    house.jobs.change(view.job_id, "failed", expected={"queued"}, problem=problem_of(LabelerError("x")))
    with pytest.raises(NotReady, match="has ended"):
        submission.cancel(view.job_id, stores=house.stores)
    with pytest.raises(NotFound, match="no job"):
        submission.cancel("job-0", stores=house.stores)
