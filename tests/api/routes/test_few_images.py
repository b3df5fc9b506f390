"""A few images in one request: what is taken, what is refused, and that a form and base64 are one request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from api import job_intake
from api.client import Client
from api.coordinator.uploads import Upload
from api.limits import MAX_LABELS_FORM_BYTES
from api.routes import jobs as routes
from feature_store.results.questions import IMAGE_FAILURE, write_failure
from labeler.errors import InvalidSetting, NotReady
from tests.api.routes.conftest import FINGERPRINT, ConfigOf, ServeIn, Service, eventually, of_new_requester
from tests.api.routes.test_jobs import archive, incoming, picture
from tests.api.routes.test_labels import complete

Images = list[tuple[str, bytes]]
PATH = "/v1/labels"
UNREADABLE = "urn:labeler:problem:unreadable-image"


@pytest.fixture(scope="module")
def service(service: Service) -> Service:
    return of_new_requester(service)


def pictures(count: int) -> Images:
    return [(f"{number}.png", picture(number, 4)) for number in range(count)]


def by_form(service: Service, images: Images, *, task_id: str = "", field: str = "images", **headers: str) -> Any:
    request = json.dumps({"task_id": task_id or service.task().task_id, "wait_s": 0.1})
    with service.http("requester") as http:
        files = [(field, image) for image in images]
        return http.post(PATH, data={"request": request}, files=files, headers=headers)


def as_base64(service: Service, images: Images, *, task_id: str = "", more: Any = None, **headers: str) -> Any:
    sent = [{"name": name, "data": base64.b64encode(data).decode()} for name, data in images]
    body = {"task_id": task_id or service.task().task_id, "wait_s": 0.1, "images": sent} | (more or {})
    with service.http("requester") as http:
        return http.post(PATH, json=body, headers=headers)


Send = Callable[..., Any]
WAYS = pytest.mark.parametrize("send", [by_form, as_base64], ids=["form", "base64"])


def jobs(service: Service) -> set[str]:
    return {job.job_id for job in service.coordinator.stores.jobs.list(after=None, limit=200)}


@WAYS
def test_sixty_four_images_are_taken_and_sixty_five_are_told_where_they_are(service: Service, send: Send) -> None:
    taken = send(service, pictures(64))
    assert taken.status_code == 202, taken.text
    job_id = taken.json()["job_id"]
    assert taken.headers["Location"] == f"/v1/jobs/{job_id}"
    upload = pq.read_table(service.coordinator.config.home / "jobs" / job_id / "upload.parquet")
    assert upload["name"].to_pylist() == [name for name, _ in pictures(64)]
    assert upload["image"].to_pylist() == [data for _, data in pictures(64)]
    before = jobs(service)
    refused = send(service, pictures(65))
    assert (refused.status_code, refused.json()["type"]) == (413, "urn:labeler:problem:too-large")
    assert "at most 64 images" in refused.json()["detail"]
    assert "POST /v1/jobs" in refused.json()["detail"]
    assert jobs(service) == before
    assert incoming(service) == []


def test_a_form_and_base64_are_the_same_request_under_one_key(service: Service) -> None:
    task_id, key = service.task().task_id, {"Idempotency-Key": "few-images"}
    ways = [by_form, as_base64, as_base64, by_form]
    answers: list[Any] = [None] * len(ways)

    def send(place: int) -> None:
        answers[place] = ways[place](service, pictures(3), task_id=task_id, **key)

    # All at once: one of them makes the job.
    senders = [threading.Thread(target=send, args=(place,)) for place in range(len(ways))]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(240)
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["job_id"] for answer in answers}) == 1
    for other in (pictures(2), pictures(3)[::-1]):
        refused = as_base64(service, other, task_id=task_id, **key)
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:labeler:problem:idempotency-mismatch")


def test_an_answer_comes_in_time_where_a_wait_cannot_be_cancelled(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a busy machine: Redis's client took the cancellation for trouble of its own, and the wait went on."""
    watch = service.coordinator._mailbox.watch

    async def stubborn(job_id: str, after: str, wait_s: float) -> list[tuple[str, bool]]:
        for _ in range(1000):
            with contextlib.suppress(asyncio.CancelledError):
                return await watch(job_id, after, wait_s)
        return []

    monkeypatch.setattr(service.coordinator._mailbox, "watch", stubborn)
    with service.http("requester") as http:
        http.timeout = 30
        body = {"task_id": service.task().task_id, "wait_s": 0.3}
        images = [{"name": "0.png", "data": base64.b64encode(picture(0)).decode()}]
        assert http.post(PATH, json=body | {"images": images}).status_code == 202


@WAYS
def test_every_image_that_cannot_be_used_is_named_with_its_reason_and_nothing_is_kept(
    service: Service, send: Send
) -> None:
    before = jobs(service)
    refused = send(service, [*pictures(2), ("text.png", b"no image"), ("empty.png", b"")])
    assert (refused.status_code, refused.json()["type"]) == (422, UNREADABLE)
    detail = refused.json()["detail"]
    assert "2 of the images cannot be used" in detail
    assert "'text.png' (not an image of a known format, but a text)" in detail
    assert "'empty.png' (an empty file)" in detail
    assert jobs(service) == before
    assert incoming(service) == []


@pytest.mark.parametrize("data", ["%%%%", "aGk", "aGk=aGk=", "aGk=\n", "data:image/png;base64,aGk=", "ä" * 4])
def test_data_that_is_not_base64_is_named(service: Service, data: str) -> None:
    images = [{"name": "0.png", "data": base64.b64encode(picture(0)).decode()}, {"name": "bad.png", "data": data}]
    refused = as_base64(service, [], more={"images": images})
    assert (refused.status_code, refused.json()["type"]) == (422, UNREADABLE)
    assert "'bad.png' (its data is not base64" in refused.json()["detail"]
    assert incoming(service) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"features": [[1.0, 0.0]]}, "images and feature vectors; send one of the two"),
        ({"query_ids": ["a"]}, "files have their own names"),
        ({"images": None}, "without images"),
        ({"images": []}, "at least 1"),
        ({"images": [{"data": ""}]}, "name"),
    ],
)
def test_a_document_that_is_no_request_is_refused(service: Service, more: dict[str, Any], said: str) -> None:
    refused = as_base64(service, pictures(1), more=more)
    assert refused.status_code == 422
    assert said in refused.json()["detail"]
    assert incoming(service) == []


def test_archives_and_other_bodies_are_sent_elsewhere(service: Service) -> None:
    refused = by_form(service, [("photos.zip", archive("a.png"))], field="archive")
    assert refused.status_code == 422
    assert "send it to /v1/jobs" in refused.json()["detail"]
    with service.http("requester") as http:
        other = http.post(PATH, content=picture(0), headers={"Content-Type": "image/png"})
        assert other.status_code == 415
        inside = {"task_id": service.task().task_id, "images": [{"name": "a", "data": ""}]}
        both = http.post(PATH, data={"request": json.dumps(inside)}, files=[("images", ("a.png", picture(0)))])
    assert (both.status_code, "in one of the two" in both.json()["detail"]) == (422, True)


@WAYS
def test_bytes_and_pixels_of_an_image_have_the_limits_of_jobs(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory, send: Send
) -> None:
    home = tmp_path_factory.mktemp("limited") / "home"
    with serve_in(config_of(home, max_image_bytes=3000, max_pixels=100)) as limited:
        large = send(limited, [("large.png", picture(0, 80))])
        assert (large.status_code, "3000 bytes" in large.json()["detail"]) == (413, True)
        wide = send(limited, [("wide.png", picture(0, 11))])
        assert (wide.status_code, wide.json()["type"]) == (422, UNREADABLE)
        assert "11 x 11 pixels, at most 100" in wide.json()["detail"]
        assert incoming(limited) == []


def test_a_body_that_is_too_large_is_told_of_jobs_before_it_is_read(service: Service) -> None:
    with service.connect() as raw:
        raw.sendall(
            b"POST /v1/labels HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=a\r\n"
            + f"Authorization: Bearer {service.tokens['requester']}\r\n".encode()
            + f"Content-Length: {MAX_LABELS_FORM_BYTES + 1}\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        said = raw.recv(4096)
    assert said.startswith(b"HTTP/1.1 413")
    assert b"POST /v1/jobs" in said


def test_an_upload_counts_once_while_its_request_waits(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = config_of(tmp_path_factory.mktemp("quota") / "home", max_token_bytes=2**20, max_upload_bytes=2**20)
    with serve_in(config) as small:
        large, rest = ("large.png", picture(0, 450)), ("rest.png", picture(1, 200))
        assert len(large[1]) > 2**19
        answers: list[Any] = []
        sender = threading.Thread(target=lambda: answers.append(as_base64(small, [large], more={"wait_s": 60})))
        sender.start()
        eventually(lambda: jobs(small) != set())
        (job_id,) = jobs(small)
        task = {"request": json.dumps({"task_id": small.task().task_id})}
        with small.http("requester") as http:
            # Its answer to the sender begins a moment after its job is there.
            eventually(
                lambda: http.post("/v1/jobs", data=task, files=[("images", rest)]).status_code == 202, seconds=20
            )
            refused = http.post("/v1/jobs", data=task, files=[("images", large)])
            assert (refused.status_code, refused.json()["type"]) == (429, "urn:labeler:problem:quota-used-up")
            http.delete(f"/v1/jobs/{job_id}")
        sender.join(240)
    assert answers[0].json()["state"] == "cancelled"


def completed(service: Service, key: str, *, failure: str = "") -> Callable[[], Any]:
    """Complete a job of two images, and return what sends its request again."""
    task_id = service.task().task_id

    def send() -> Any:
        return as_base64(service, pictures(2), task_id=task_id, **{"Idempotency-Key": key})

    job_id = send().json()["job_id"]
    if failure:
        write_failure(service.coordinator.config.home / "jobs" / job_id, NotReady(failure), name=IMAGE_FAILURE)
    complete(service, job_id, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    return send


def test_images_that_get_no_labels_are_told_what_was_released(service: Service) -> None:
    answer = completed(service, "no-labels", failure="nothing was answered")()
    assert answer.status_code == 200, answer.text
    assert [(row["source"], row["label_name"], row["confidence"]) for row in answer.json()["labels"]] == [
        ("0.png", "backpack", None),
        ("1.png", "keyboard", None),
    ]


def test_labels_that_are_not_made_in_time_are_told_by_their_job(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = completed(service, "not-in-time")
    monkeypatch.setattr(service.coordinator.results, "begin", lambda *_, **__: Future())
    answer = send()
    assert (answer.status_code, answer.json()["state"], answer.json()["labels"]) == (202, "completed", [])
    assert answer.headers["Location"] == f"/v1/jobs/{answer.json()['job_id']}"


def test_the_client_refuses_what_is_no_few_images_before_it_sends_anything(service: Service, tmp_path: Path) -> None:
    for name, data in pictures(65):
        (tmp_path / name).write_bytes(data)
    zipped = tmp_path / "photos.zip"
    zipped.write_bytes(archive("a.png"))
    before = jobs(service)
    with Client(service.url, service.tokens["requester"]) as client:
        for images in (tmp_path, zipped):
            with pytest.raises(InvalidSetting, match="label takes up to 64 image files"):
                client.label(service.task().task_id, images)
        with pytest.raises(InvalidSetting, match="wait_s"):
            client.label(service.task().task_id, [tmp_path / "0.png"], wait_s=61)
        assert jobs(service) == before
        assert client.label(service.task().task_id, [tmp_path / "0.png"], wait_s=0.1).labels == ()


def test_what_a_waiting_request_sent_is_not_in_memory(own: Service) -> None:
    """Up to 200 requests wait, and each may have sent 32 MiB."""
    padded = {"images": [{"name": "a.png", "data": base64.b64encode(picture(0)).decode()}]}
    vectors = {"features": np.eye(64, 2000).tolist(), "backbone_fingerprint": FINGERPRINT}
    as_base64(own, pictures(1))  # the first job imports modules
    for sent, padding in ((padded, 12 * 2**20), (vectors, 0)):
        document: dict[str, Any] = {"task_id": own.task().task_id, "wait_s": 60} | sent
        body = json.dumps(document).encode() + b" " * padding
        head = f"Authorization: Bearer {own.tokens['requester']}\r\nContent-Length: {len(body)}\r\n\r\n"
        known = jobs(own)
        with own.connect() as raw:
            gc.collect()
            tracemalloc.start()
            try:
                raw.sendall(
                    b"POST /v1/labels HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head.encode()
                )
                raw.sendall(body)
                eventually(lambda known=known: jobs(own) != known)
                eventually(lambda: tracemalloc.get_traced_memory()[0] < 2**20, seconds=5)
            finally:
                tracemalloc.stop()


def test_a_small_document_of_images_is_written_beside_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every request would wait while the disk takes it."""
    made = job_intake.upload_of_images
    seen: list[bool] = []

    def watched(*given: Any, **more: Any) -> Upload:
        seen.append(asyncio._get_running_loop() is None)
        return made(*given, **more)

    monkeypatch.setattr(job_intake, "upload_of_images", watched)
    assert as_base64(service, pictures(1)).status_code == 202
    assert seen == [True]


def test_one_token_does_not_take_every_place_to_wait(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_WAITING", 2)
    monkeypatch.setattr(routes, "MAX_WAITING_OF_A_TOKEN", 1)
    with serve_in(config_of(tmp_path_factory.mktemp("waiting") / "home")) as crowded:
        answers: list[Any] = []

        def wait(service: Service) -> threading.Thread:
            before = jobs(crowded)
            sent = {"task_id": service.task(by=service.holder("requester")).task_id, "more": {"wait_s": 60}}
            sender = threading.Thread(target=lambda: answers.append(as_base64(service, pictures(1), **sent)))
            sender.start()
            eventually(lambda: jobs(crowded) != before)
            return sender

        first = wait(crowded)
        wait(crowded).join(30)
        assert [answer.status_code for answer in answers] == [202], "the same token's second request is not kept"
        other = wait(of_new_requester(crowded))
        other.join(1)
        assert other.is_alive(), "another token's request waits"
        for job_id in jobs(crowded):
            with crowded.http("admin") as http:
                http.delete(f"/v1/jobs/{job_id}")
        for sender in (first, other):
            sender.join(240)
    assert [answer.json()["state"] for answer in answers[1:]] == ["cancelled", "cancelled"]
