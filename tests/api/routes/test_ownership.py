"""Requesters among each other: what is another's is as if it were not there, and viewers see budgets, not labels."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import event

from api.client import Client
from api.coordinator.ownership import Reader
from tests.api.routes.conftest import FINGERPRINT, NOBODY, ConfigOf, ServeIn, Service

NAME = "march photographs of ward 7"


@contextmanager
def holder_of(service: Service, secret: str) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx2.Client(base_url=service.url, headers=headers, timeout=240, trust_env=False, verify=NOBODY) as http:
        yield http


@pytest.fixture
def stranger(service: Service) -> Iterator[httpx2.Client]:
    """Another requester, with a token of its own."""
    with holder_of(service, service.coordinator.tokens.create("another", "requester")[1]) as http:
        yield http


def body(task_id: str, features: list[list[float]], **more: Any) -> dict[str, Any]:
    return {"task_id": task_id, "features": features, "backbone_fingerprint": FINGERPRINT, "name": NAME} | more


@pytest.fixture
def job(service: Service, features: list[list[float]]) -> dict[str, Any]:
    """A job of the first requester in a task of its own."""
    with service.http("requester") as http:
        answer = http.post("/v1/jobs", json=body(service.task().task_id, features))
        assert answer.status_code == 202, answer.text
        found: dict[str, Any] = answer.json()
        return found


def without_id(answer: httpx2.Response, *ids: str) -> tuple[int, str]:
    text = answer.text
    for one in ids:
        text = text.replace(one, "ID")
    return answer.status_code, text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/{job}"),
        ("DELETE", "/v1/jobs/{job}"),
        ("GET", "/v1/jobs/{job}/labels"),
        ("GET", "/v1/jobs/{job}/model"),
        ("GET", "/v1/jobs/{job}/events"),
        ("GET", "/v1/tasks/{task}"),
        ("DELETE", "/v1/tasks/{task}/shares/tok_1"),
    ],
)
def test_what_is_anothers_is_answered_like_what_does_not_exist(
    service: Service, stranger: httpx2.Client, job: dict[str, Any], method: str, path: str
) -> None:
    no_job, no_task = "job-" + "0" * 20, "0" * 64
    names = (job["job_id"], job["task_id"], no_job, no_task, no_task[:12])
    foreign = stranger.request(method, path.format(job=job["job_id"], task=job["task_id"]))
    missing = stranger.request(method, path.format(job=no_job, task=no_task))
    assert without_id(foreign, *names) == without_id(missing, *names)
    assert foreign.status_code == 404


def test_nobody_submits_into_anothers_task(
    service: Service, stranger: httpx2.Client, job: dict[str, Any], features: list[list[float]]
) -> None:
    task_id, no_task = job["task_id"], "0" * 64
    for path, more in (("/v1/jobs", {}), ("/v1/jobs:estimate", {}), ("/v1/labels", {"wait_s": 1})):
        asked = body(task_id, features) | more
        if path != "/v1/jobs":
            asked.pop("name")
        if path == "/v1/jobs:estimate":
            asked = {"task_id": task_id}
        foreign = stranger.post(path, json=asked)
        missing = stranger.post(path, json=asked | {"task_id": no_task})
        assert without_id(foreign, task_id) == without_id(missing, no_task)
        assert foreign.status_code == 404, path
    with service.http("requester") as http:
        assert http.get(f"/v1/tasks/{task_id}").json()["queries_left"] == 98, "its queries are still its creator's"


def test_lists_hold_what_is_ones_own(service: Service, stranger: httpx2.Client, job: dict[str, Any]) -> None:
    assert stranger.get("/v1/jobs").json()["items"] == []
    assert stranger.get("/v1/tasks").json()["items"] == []
    for role in ("requester", "admin", "viewer"):
        with service.http(role) as http:
            assert job["job_id"] in {one["job_id"] for one in http.get("/v1/jobs?limit=200").json()["items"]}, role
            assert job["task_id"] in {one["task_id"] for one in http.get("/v1/tasks?limit=200").json()["items"]}, role


def test_a_task_is_shared_explicitly_and_each_sees_its_own_jobs(
    service: Service, stranger: httpx2.Client, job: dict[str, Any], features: list[list[float]]
) -> None:
    task_id = job["task_id"]
    with service.http("requester") as http, Client(service.url, service.tokens["requester"]) as owner:
        their_id = stranger.get("/v1/whoami").json()["token_id"]
        assert owner.share_task(task_id, their_id).shared_with == (their_id,)
        assert owner.share_task(task_id, their_id).shared_with == (their_id,), "again: no change"
        seen = stranger.get(f"/v1/tasks/{task_id}").json()
        assert (seen["shared_with"], seen["queries_left"]) == ([], 98)
        assert [one["task_id"] for one in stranger.get("/v1/tasks").json()["items"]] == [task_id]
        theirs = stranger.post("/v1/jobs", json=body(task_id, features))
        assert theirs.status_code == 202
        job_id = theirs.json()["job_id"]
        assert [one["job_id"] for one in stranger.get("/v1/jobs").json()["items"]] == [job_id]
        assert stranger.get(f"/v1/jobs/{job['job_id']}").status_code == 404
        assert http.get(f"/v1/jobs/{job_id}").status_code == 404, "nor does the task's creator see theirs"
        assert stranger.post(f"/v1/tasks/{task_id}/shares", json={"token_id": their_id}).status_code == 403
        assert owner.unshare_task(task_id, their_id).shared_with == ()
        assert stranger.post("/v1/jobs", json=body(task_id, features)).status_code == 404
        assert stranger.get(f"/v1/jobs/{job_id}").status_code == 200, "what it submitted stays its own"
        answer = http.post(f"/v1/tasks/{task_id}/shares", json={"token_id": "tok_none"})
        assert (answer.status_code, "no active token" in answer.text) == (404, True)


def test_an_administrator_sees_and_cancels_everything(service: Service, job: dict[str, Any]) -> None:
    with service.http("admin") as http:
        assert http.get(f"/v1/jobs/{job['job_id']}").json()["name"] == NAME
        assert http.delete(f"/v1/jobs/{job['job_id']}").json()["state"] == "cancelled"


def test_a_viewer_sees_that_there_are_jobs_and_what_they_cost_but_no_names_files_or_labels(
    service: Service, job: dict[str, Any]
) -> None:
    detail = "photo-of-mrs-smith.png cannot be read"
    problem = {"type": "urn:labeler:problem:bad-data", "title": "t", "status": 422, "detail": detail, "more": detail}
    service.coordinator.stores.jobs.change(job["job_id"], "failed", expected={"queued"}, problem=problem)
    with service.http("viewer") as http:
        one = http.get(f"/v1/jobs/{job['job_id']}")
        listed = http.get("/v1/jobs?limit=200")
        streamed = http.get(f"/v1/jobs/{job['job_id']}/events")
        for answer in (one, listed, streamed):
            assert answer.status_code == 200
            assert NAME not in answer.text
            assert "smith" not in answer.text
        assert one.json()["price"] == job["price"]
        assert one.json()["problem"]["title"] == "t"
        for part in ("labels", "model"):
            assert http.get(f"/v1/jobs/{job['job_id']}/{part}").status_code == 403
        assert http.delete(f"/v1/jobs/{job['job_id']}").status_code == 403
        for path in ("/v1/budget", "/v1/ledger", "/v1/parties", "/v1/tasks"):
            assert http.get(path).status_code == 200
    with service.http("requester") as http:
        assert "smith" in http.get(f"/v1/jobs/{job['job_id']}").text


def test_in_the_ledger_jobs_of_others_have_no_names_and_are_not_found_by_a_text(
    service: Service, stranger: httpx2.Client, job: dict[str, Any]
) -> None:
    with service.http("requester") as http:
        mine = http.get("/v1/ledger", params={"search": job["job_id"]}).json()["items"]
        creator = http.get("/v1/whoami").json()["token_id"]
    assert mine
    after = mine[0]["seq"] - 1
    seen = stranger.get("/v1/ledger", params={"after": after, "limit": len(mine)}).json()["items"]
    hidden = {"reservation_id", "detail"}
    kept = [{key: value for key, value in one.items() if key not in hidden | {"spent_after_nano"}} for one in seen]
    assert kept == [
        {key: value for key, value in one.items() if key not in hidden | {"spent_after_nano"}} for one in mine
    ]
    assert {(one["reservation_id"], str(one["detail"])) for one in seen} == {("another requester's job", "{}")}
    for text in (job["job_id"], job["job_id"][-6:], creator, job["task_id"]):
        for limit in (1, 200):
            answer = stranger.get("/v1/ledger", params={"search": text, "limit": limit}).json()
            assert answer == {"next": None, "items": []}, text
    found = stranger.get("/v1/ledger", params={"search": "federation", "limit": 2}).json()
    assert len(found["items"]) == 2, "what is nobody's is found"


def test_a_refusal_names_no_job_of_another_requester(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, features: list[list[float]]
) -> None:
    with serve_in(config_of(tmp_path / "home", federation_epsilon=0.6)) as service:
        with service.http("requester") as http:
            spent = http.post("/v1/jobs", json=body(service.task().task_id, features))
            assert spent.status_code == 202, spent.text
        secret = service.coordinator.tokens.create("another", "requester")
        with holder_of(service, secret[1]) as http:
            task = service.task(by=secret[0].token_id)
            many = 30 * features
            refused = http.post("/v1/jobs", json=body(task.task_id, many))
            assert refused.status_code == 409, refused.text
            assert refused.json()["last_spenders"][0]["reservation_id"] == "another requester's job"
            assert spent.json()["job_id"] not in refused.text
            kept = http.get(f"/v1/jobs/{refused.json()['job_id']}")
            assert spent.json()["job_id"] not in kept.text


def test_a_page_of_ten_costs_as_many_statements_as_a_page_of_one(service: Service, features: list[list[float]]) -> None:
    with service.http("requester") as http:
        for _ in range(10):
            task = service.task()
            assert http.post("/v1/jobs", json=body(task.task_id, features[:1])).status_code == 202
    reader = Reader(service.holder("requester"), "requester")
    engine = service.coordinator.stores.database._reader
    here, counted = threading.get_ident(), []

    def count(*arguments: Any) -> None:
        if threading.get_ident() == here:  # the driver reads beside us
            counted.append(arguments[2])

    event.listen(engine, "before_cursor_execute", count)
    try:
        for listed in (service.coordinator.jobs, service.coordinator.tasks):
            numbers = []
            for limit in (1, 10):
                counted.clear()
                assert len(listed(None, limit, reader=reader).items) == limit
                numbers.append(len(counted))
            assert 0 < numbers[0] == numbers[1], listed
    finally:
        event.remove(engine, "before_cursor_execute", count)


def test_a_stream_ends_when_its_token_is_revoked(
    service: Service, features: list[list[float]], job: dict[str, Any]
) -> None:
    record, secret = service.coordinator.tokens.create("to be revoked", "requester")
    task = service.task(by=record.token_id)
    with holder_of(service, secret) as http:
        mine = http.post("/v1/jobs", json=body(task.task_id, features)).json()
        with http.stream("GET", f"/v1/jobs/{mine['job_id']}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("event: job")
            service.coordinator.tokens.revoke(record.token_id)
            # It ends by itself, and what happens to the job from now on is not told any more.
            known = service.coordinator.stores.jobs.get(mine["job_id"]).version
            service.coordinator.stores.jobs.touch(mine["job_id"])
            with service.http("admin") as admin:
                admin.delete(f"/v1/jobs/{mine['job_id']}")
            rest = [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
        later = [view for view in rest if view["version"] > known]
        assert len(later) <= 1, "the event under way, and nothing after it"
        assert not any(view["state"] == "cancelled" for view in rest)
        assert http.get(f"/v1/jobs/{mine['job_id']}/events").status_code == 401


def test_labels_that_were_waited_for_are_not_told_to_a_token_that_was_revoked_meanwhile(
    service: Service, features: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, secret = service.coordinator.tokens.create("to be revoked", "requester")
    task = service.task(by=record.token_id)
    asked = {"task_id": task.task_id, "features": features, "backbone_fingerprint": FINGERPRINT, "wait_s": 20}
    taken = threading.Event()
    submit = service.coordinator.submit

    def submitted(*arguments: Any, **named: Any) -> Any:
        view = submit(*arguments, **named)
        taken.set()
        return view

    monkeypatch.setattr(service.coordinator, "submit", submitted)
    answers: list[httpx2.Response] = []
    with holder_of(service, secret) as http:
        waiting = threading.Thread(target=lambda: answers.append(http.post("/v1/labels", json=asked)))
        waiting.start()
        assert taken.wait(240)
        service.coordinator.tokens.revoke(record.token_id)
        waiting.join(240)
    assert answers[0].status_code in (202, 401)
    assert answers[0].json().get("labels", []) == []
