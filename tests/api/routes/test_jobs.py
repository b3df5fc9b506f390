"""Jobs over HTTP: feature vectors, files, zip, Parquet; idempotency; cancellation; refusals; what does not fit."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from api.client import Client, ServiceProblem
from api.coordinator.results import being_labeled
from api.schema import EstimateRequest, JobView, Selection
from feature_store.results.questions import saying_progress
from feature_store.rows import quantize
from labeler.errors import InvalidSetting
from tests.api.routes.conftest import FINGERPRINT, ConfigOf, ServeIn, Service
from tests.command_line import Labeler, labeler
from tests.feature_store.test_image_files import of_every_format, tabled, written, zipped
from tests.workers.builders import shard_of_rows

__all__ = ["labeler"]

Features = list[list[float]]


def picture(seed: int, size: int = 12) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for number, name in enumerate(names):
            made.writestr(name, picture(number))
    return buffer.getvalue()


def parquet(*names: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"name": list(names), "image": [picture(n) for n in range(len(names))]}), buffer)
    return buffer.getvalue()


def incoming(service: Service) -> list[Path]:
    return list((service.coordinator.config.home / "incoming").glob("*"))


def test_a_job_of_vectors_is_queued_with_its_place_and_the_same_key_gives_the_same_job(
    service: Service,
) -> None:
    body = service.vectors()
    with service.http("requester") as http:
        first = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "once"})
        assert first.status_code == 202, first.text
        job = first.json()
        assert first.headers["Location"] == f"/v1/jobs/{job['job_id']}"
        assert first.headers["Retry-After"] == "1"
        assert job["queries"] == 3
        again = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "once"})
        assert again.json()["job_id"] == job["job_id"]
        other = http.post("/v1/jobs", json=body | {"name": "other"}, headers={"Idempotency-Key": "once"})
        assert other.status_code == 422
        assert other.json()["type"] == "urn:labeler:problem:idempotency-mismatch"
        assert http.get(first.headers["Location"]).json()["job_id"] == job["job_id"]
        bad = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "x" * 201})
        assert bad.status_code == 422


def test_a_request_that_is_sent_again_gives_the_conductor_nothing_to_do(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays of one key were a way to keep every other job waiting."""
    woken: list[str] = []
    monkeypatch.setattr(service.coordinator.driver, "wake", woken.append)
    body = service.vectors()
    with service.http("requester") as http:
        made = [http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "again"}) for _ in range(5)]
    assert {one.status_code for one in made} == {202}
    assert woken == [made[0].json()["job_id"]]


@pytest.mark.parametrize("kind", ["images", "archive", "parquet"])
def test_images_arrive_as_files_as_a_zip_and_as_parquet(service: Service, kind: str) -> None:
    request = json.dumps({"task_id": service.task().task_id, "name": kind})
    files: list[tuple[str, tuple[str, bytes]]] = {
        "images": [("images", ("a/one.png", picture(0))), ("images", ("two.png", picture(1)))],
        "archive": [("archive", ("photos.zip", archive("a/one.png", "two.png")))],
        "parquet": [("parquet", ("photos.parquet", parquet("a/one.png", "two.png")))],
    }[kind]
    with service.http("requester") as http:
        response = http.post("/v1/jobs", data={"request": request}, files=files)
    assert response.status_code == 202, response.text
    job = response.json()
    assert (job["images"], job["queries"]) == (2, 2)
    stored = pq.read_table(service.coordinator.config.home / "jobs" / job["job_id"] / "upload.parquet")
    assert stored.column("name").to_pylist() == ["a/one.png", "two.png"]
    assert stored.column("image").to_pylist() == [picture(0), picture(1)]
    assert incoming(service) == []


@pytest.mark.parametrize(
    ("boundary", "written", "meant"),
    [
        ("----WebKitFormBoundaryx", "an %22odd%22 \\ {}%é.png", 'an "odd" / {}%é.png'),
        ("x", r"an \"odd\" one.png", 'an "odd" one.png'),
        ("labeler-x", r"an \"odd\" %22one%22.png", 'an "odd" %22one%22.png'),
    ],
    ids=["as browsers write it", "as HTTP quotes it", "as our clients write it"],
)
def test_a_name_in_a_form_comes_back_as_it_was_chosen(
    service: Service, boundary: str, written: str, meant: str
) -> None:
    request = json.dumps({"task_id": service.task().task_id})
    disposition = "Content-Disposition: form-data; name="
    head = f'--{boundary}\r\n{disposition}"request"\r\n\r\n{request}\r\n--{boundary}\r\n'
    head += f'{disposition}"images"; filename="{written}"\r\n\r\n'
    body = head.encode() + picture(0) + f"\r\n--{boundary}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    with service.http("requester") as http:
        response = http.post("/v1/jobs", content=body, headers=kind)
    assert response.status_code == 202, response.text
    stored = pq.read_table(service.coordinator.config.home / "jobs" / response.json()["job_id"] / "upload.parquet")
    assert stored.column("name").to_pylist() == [meant]


def test_the_same_command_with_the_same_key_is_the_same_job_although_its_file_makes_a_new_task(
    service: Service, tmp_path: Path, labeler: Labeler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABELER_URL", service.url)
    monkeypatch.setenv("LABELER_TOKEN", service.tokens["requester"])
    (tmp_path / "photos.zip").write_bytes(archive("one.png", "two.png"))
    make = service.coordinator.create_task
    told = {"backbone_fingerprint": FINGERPRINT}  # as agents report it, whom this service never heard
    monkeypatch.setattr(
        service.coordinator, "create_task", lambda request, *, by: make(request.model_copy(update=told), by=by)
    )

    def submit(sigma: str = "20.0", **changes: str) -> Any:
        task = f'[task]\nname = "tools"\nmethod = "knn"\nk = 1\nsigma_votes = {sigma}\ndelta = 1e-5\n'
        (tmp_path / "task.toml").write_text(task)
        more = [word for name, value in changes.items() for word in (f"--{name}", value)]
        named = [tmp_path / "photos.zip", "--task", tmp_path / "task.toml", "--json"]
        return labeler("submit", *named, *(more or ["--key", "night"]))

    first, again = submit(), submit()
    assert first.code == 0, first.err
    assert again.document["job_id"] == first.document["job_id"], again.err
    assert submit(key="other").document["job_id"] != first.document["job_id"]
    for changed in (submit("21.0"), submit(key="night", name="another name")):
        assert changed.code == 2
        assert "idempotency key belongs to another request" in changed.err


def test_the_client_submits_a_folder_a_zip_and_files(service: Service, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "one.png").write_bytes(picture(0))
    (folder / "two.png").write_bytes(picture(1))
    zipped = tmp_path / "photos.zip"
    zipped.write_bytes(archive("one.png", "two.png", "three.png"))
    task = service.task()
    with Client(service.url, service.tokens["requester"]) as client:
        assert client.estimate(EstimateRequest(task_id=task.task_id, queries=2)).affordable
        assert client.submit(task.task_id, images=folder).images == 2
        job = client.submit(task.task_id, images=zipped, selection=Selection(strategy="random", count=2))
        assert (job.images, job.queries) == (3, 2)
        assert client.submit(task.task_id, images=[folder / "two.png"]).images == 1
        ids = [one.job_id for one in client.jobs()]
        assert ids[1] == job.job_id
        with pytest.raises(ServiceProblem, match=r"state|completed") as caught:
            client.labels(job.job_id, tmp_path / "labels.jsonl")
        assert caught.value.status == 409
        assert client.cancel(job.job_id).state == "cancelled"
        assert client.cancel(job.job_id).state == "cancelled"
        assert client.wait(job.job_id).state == "cancelled"
        assert next(iter(client.ledger())).seq == 1
        assert client.agent_budget("agent-a").accounts
        assert client.task(task.task_id).task_id == task.task_id


def test_a_folder_of_every_format_is_sent_whole_and_what_is_left_out_is_named_first(
    service: Service,
    tmp_path: Path,
    labeler: Labeler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LABELER_URL", service.url)
    monkeypatch.setenv("LABELER_TOKEN", service.tokens["requester"])
    files = of_every_format()
    left = {"@eaDir/1.png/THUMB.jpg": picture(0), "notes.txt": b"two owls", "report.pdf": b"%PDF\0"}
    folder = written(tmp_path / "photos", files | left)
    task = service.task()
    passed = "files are no images, and are not labeled: @eaDir/ (a Synology disk station keeps it), notes.txt (a text)"
    named = f"3 {passed}, report.pdf (a PDF; save its pictures as files)"
    with Client(service.url, service.tokens["requester"]) as client:
        job = client.submit(task.task_id, images=folder)
        assert named in caplog.text
        assert (job.images, job.passed_over) == (len(files), 0)
        del left["report.pdf"]
        packed = zipped(tmp_path / "photos.zip", files | left)
        job = client.submit(task.task_id, images=packed)
        assert f"2 {passed}\n" in caplog.text
        assert (job.images, job.passed_over) == (len(files), 2)
        assert [one.source for one in job.passed_over_files] == ["@eaDir/", "notes.txt"]
        few = tabled(tmp_path / "few.parquet", {"a.png": picture(0), "@eaDir/1.png/THUMB.jpg": picture(0)})
        assert client.submit(task.task_id, images=few).passed_over == 1
    done = labeler("submit", folder, "--task", task.task_id, "--strategy", "random", "--count", 1, "--json")
    assert done.code == 0, done.err
    assert done.document["images"] == len(files)
    assert done.err.count("@eaDir/") == 1
    assert named in " ".join(done.err.split())


BROKEN = {
    "no request": ({}, [("images", ("a.png", picture(0)))], 422),
    "no images": ({"request": "TASK"}, [("other", ("a.png", picture(0)))], 422),
    "unreadable image": ({"request": "TASK"}, [("images", ("a.png", b"not an image"))], 422),
    "unreadable zip": ({"request": "TASK"}, [("archive", ("a.zip", b"not a zip"))], 422),
    "unreadable parquet": ({"request": "TASK"}, [("parquet", ("a.parquet", b"PAR1"))], 422),
    "two kinds": ({"request": "TASK"}, [("archive", ("a.zip", archive("a.png"))), ("images", ("b.png", b""))], 422),
    "same name": ({"request": "TASK"}, [("images", ("a.png", picture(0))), ("images", ("a.png", picture(1)))], 422),
    "request is no JSON": ({"request": "{"}, [("images", ("a.png", picture(0)))], 400),
    "request does not fit": ({"request": '{"task_id": 3}'}, [("images", ("a.png", picture(0)))], 422),
    "large request": ({"request": " " * 1_100_000}, [("images", ("a.png", picture(0)))], 413),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_form_that_cannot_be_taken_leaves_nothing_behind(service: Service, name: str) -> None:
    data, files, status = BROKEN[name]
    task = json.dumps({"task_id": service.task().task_id})
    filled = {field: value.replace("TASK", task) for field, value in data.items()}
    with service.http("requester") as http:
        response = http.post("/v1/jobs", data=filled, files=files)
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    assert incoming(service) == []


@pytest.mark.parametrize(
    ("content_type", "content"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=a", b"no boundary at all"),
        ("multipart/form-data; boundary=a", b'--a\r\nContent-Disposition: form-data; name="request"\r\n\r\n{'),
        ("multipart/form-data; boundary=a", b"--a\r\nX: y\r\n\r\nbody\r\n--a--\r\n"),
        ("multipart/form-data; boundary=" + "a" * 5000, b"x"),
        ("multipart/form-data; boundary=a", b""),
    ],
)
def test_a_malformed_form_is_refused(service: Service, content_type: str, content: bytes) -> None:
    with service.http("requester") as http:
        response = http.post("/v1/jobs", content=content, headers={"Content-Type": content_type})
    assert response.status_code == 422, response.text
    assert incoming(service) == []


def test_an_upload_that_is_too_large_is_refused_by_its_length_and_while_it_is_read(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "home", max_upload_bytes=1000, max_image_bytes=600)
    with serve_in(config) as service, service.http("requester") as http:
        request = {"request": json.dumps({"task_id": service.task().task_id})}
        big = [("images", ("a.png", picture(0) * 2))]
        response = http.post("/v1/jobs", data=request, files=big)
        assert response.status_code == 413, response.text
        three = [("images", (f"{n}.png", picture(n))) for n in range(3)]
        assert http.post("/v1/jobs", data=request, files=three).status_code == 413
        head = b'--a\r\nContent-Disposition: form-data; name="archive"; filename="a.zip"\r\n\r\n'

        def endless() -> object:
            yield head
            while True:
                yield b"\0" * 1_000_000

        form = {"Content-Type": "multipart/form-data; boundary=a"}
        try:
            status = http.post("/v1/jobs", content=endless(), headers=form).status_code  # type: ignore[arg-type]
        except httpx2.TransportError:
            # The service hung up on a body it had refused; whether the refusal is read first is a race.
            status = 413
        assert status == 413
        with service.connect() as raw:
            raw.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=a\r\n"
                + f"Authorization: Bearer {service.tokens['requester']}\r\n".encode()
                + b"Content-Length: 1099511627776\r\nExpect: 100-continue\r\n\r\n"
            )
            assert raw.recv(4096).startswith(b"HTTP/1.1 413")
        assert incoming(service) == []


def test_a_small_question_nobody_answers_in_time_says_where_its_job_is(service: Service) -> None:
    body = service.vectors(wait_s=0.3)
    with service.http("requester") as http:
        response = http.post("/v1/labels", json=body)
        assert response.status_code == 202, response.text
        assert response.json()["labels"] == []
        assert http.get(response.headers["Location"]).status_code == 200
        refused = http.post("/v1/labels", json=body | {"features": 22 * body["features"]})
        assert (refused.status_code, "send more as a job: POST /v1/jobs" in refused.json()["detail"]) == (413, True)


def test_many_vectors_travel_as_parquet_and_keep_their_names_and_numbers(service: Service) -> None:
    rng = np.random.default_rng(3)
    few = rng.normal(size=(3, 8)).astype(np.float32)
    many = rng.normal(size=(1100, 512))
    task = service.task(max_queries=4000)
    with Client(service.url, service.tokens["requester"]) as client:
        small = client.submit(task.task_id, features=few, backbone_fingerprint=FINGERPRINT)
        large = client.submit(task.task_id, features=many, backbone_fingerprint=FINGERPRINT)
        with pytest.raises(InvalidSetting, match="query_ids"):
            client.submit(task.task_id, features=many, query_ids=["a"], backbone_fingerprint=FINGERPRINT)
    assert (small.queries, large.queries) == (3, 1100)
    kept = pq.read_table(service.coordinator.config.home / "jobs" / large.job_id / "upload.parquet")
    assert kept["name"].to_pylist() == [f"query-{number:06d}" for number in range(1100)]
    assert np.array_equal(np.array(kept["feature"].to_pylist(), dtype=np.int16), quantize(many))


def test_a_public_shard_is_sent_as_its_names_and_features_and_a_private_one_never(
    service: Service, tmp_path: Path
) -> None:
    rows = np.random.default_rng(2).normal(size=(3, 8))
    public = shard_of_rows(tmp_path / "public", rows, fingerprint=FINGERPRINT)
    private = shard_of_rows(tmp_path / "private", rows, np.zeros(3, np.int16), fingerprint=FINGERPRINT)
    with Client(service.url, service.tokens["requester"]) as client:
        with pytest.raises(InvalidSetting, match="private shard"):
            client.submit(service.task().task_id, images=private.path)
        job = client.submit(service.task().task_id, images=public.path)
    kept = pq.read_table(service.coordinator.config.home / "jobs" / job.job_id / "upload.parquet")
    assert kept["name"].to_pylist() == public.sources
    assert np.array_equal(kept["feature"].to_pylist(), public.features)


def test_events_begin_with_the_job_resume_after_the_last_seen_and_end_with_it(
    service: Service, features: Features
) -> None:
    with Client(service.url, service.tokens["requester"]) as client, service.http("viewer") as http:
        job = client.submit(service.task().task_id, features=features, backbone_fingerprint=FINGERPRINT)
        client.cancel(job.job_id)
        response = http.get(f"/v1/jobs/{job.job_id}/events")
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = response.text.splitlines()
        assert "event: job" in lines
        identity = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
        data = next(line for line in lines if line.startswith("data: ")).removeprefix("data: ")
        assert json.loads(data)["state"] == "cancelled"
        assert int(identity) == json.loads(data)["version"]
        assert http.get("/v1/jobs/job-none/events").status_code == 404


def test_a_queued_job_tells_its_view_and_its_events_how_much_of_its_preparation_is_done(
    service: Service, features: Features
) -> None:
    with Client(service.url, service.tokens["requester"]) as client:
        job = client.submit(service.task().task_id, features=features, backbone_fingerprint=FINGERPRINT)
        folder = service.coordinator.config.home / "jobs" / job.job_id
        with saying_progress(folder) as say:
            say("Grouping public images", 1, 4)
            view = client.job(job.job_id)
            assert "are being chosen: 25 % done" in view.stage
            assert next(client.jobs()).stage == view.stage
            seen: list[JobView] = []

            def on_change(now: JobView) -> None:
                seen.append(now)
                if ": 25 % done" in now.stage:
                    say("Grouping public images", 3, 4)
                elif ": 75 % done" in now.stage:
                    client.cancel(job.job_id)

            client.wait(job.job_id, on_change)
    assert [int(one.stage.split(" % done")[0][-2:]) for one in seen if " % done" in one.stage] == [25, 75]
    assert seen[-1].state == "cancelled"


def test_labels_that_are_being_made_are_503_with_how_much_is_done_and_when_to_ask_again(
    service: Service, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(service.url, service.tokens["requester"]) as client, service.http("requester") as http:
        job = client.submit(service.task().task_id, features=features, backbone_fingerprint=FINGERPRINT)

        def being_made(job_id: str, *_: object) -> None:
            raise being_labeled(service.coordinator.config.home / "jobs" / job_id)

        monkeypatch.setattr(service.coordinator.results, "_read_made", being_made)
        with saying_progress(service.coordinator.config.home / "jobs" / job.job_id) as say:
            say("Labeling images", 2, 4)
            for what in ("labels", "student", "evaluation"):
                answer = http.get(f"/v1/jobs/{job.job_id}/{what}")
                assert answer.status_code == 503
                assert "50 % done" in answer.json()["detail"]
                assert int(answer.headers["Retry-After"]) >= 1
        client.cancel(job.job_id)
