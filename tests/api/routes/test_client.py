"""The client tries again where that is safe, resumes streams, never leaves half a file, and says what it was told."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from python_multipart.multipart import parse_options_header

from api import client_http, examples
from api.client import Client, ServiceBusy, ServiceProblem
from api.client_http import _ROWS_LOOKED_AT, FormBody, Part, parquet_of
from api.schema import JobView, LabelsRequest
from feature_store.rows import quantize
from labeler.errors import InvalidSetting, LabelerError, TooLarge, TryAgain
from tests import doors
from tests.api.routes.conftest import eventually
from workers.notebook.local import Service

Answer = Callable[["Handler"], None]


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """What a scripted service answers, in order, and what it was asked."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    script: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path == "/healthz":  # asked once, before anything else, and by no script's doing
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.script.seen.append(Seen(self.command, self.path, headers, body))
        self.script.answers.pop(0)(self)

    do_GET = do_POST = do_DELETE = answer


def reply(status: int, document: object, **headers: str) -> Answer:
    def send(handler: Handler) -> None:
        data = json.dumps(document).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return send


def stream(*pieces: bytes, is_whole: bool) -> Answer:
    def send(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if is_whole:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return send


def hang_up(handler: Handler) -> None:
    handler.close_connection = True


def event(version: int, state: str) -> bytes:
    job = examples.JOB | {"state": state, "version": version}
    return f"event: job\r\nid: {version}\r\ndata: {json.dumps(job)}\r\n\r\n".encode()


@pytest.fixture
def script() -> Iterator[Script]:
    with doors.opened(partial(doors.handle, Handler)) as number:
        Handler.script = Script(f"http://{doors.HOST}:{number}")
        yield Handler.script


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with Client(script.url, "lab_secret", timeout_s=240, patience_s=240) as made:
        yield made


PROBLEM = {
    "type": "urn:labeler:problem:budget-exceeded",
    "title": "no",
    "status": 409,
    "detail": "because",
    "left_nano": 3,
}
BUSY = {"type": "urn:labeler:problem:unavailable", "title": "not now", "status": 503, "detail": "later"}


def test_a_submission_that_got_no_answer_is_sent_again_under_the_same_key(client: Client, script: Script) -> None:
    script.answers = [hang_up, reply(503, BUSY), reply(502, {"html": 1}), reply(202, examples.JOB)]
    job = client.submit(examples.TASK_ID, features=[[0.6, 0.8]], backbone_fingerprint="f")
    assert job.job_id == examples.JOB_ID
    assert len(script.seen) == 4
    assert len({one.headers["idempotency-key"] for one in script.seen}) == 1
    assert len({one.body for one in script.seen}) == 1
    assert script.seen[0].headers["authorization"] == "Bearer lab_secret"


def test_a_form_is_sent_whole_in_every_try(client: Client, script: Script, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / 'one "1".jpg').write_bytes(b"first" * 100_000)
    (tmp_path / "two.PNG").write_bytes(b"second")
    (tmp_path / "notes.txt").write_bytes(b"no image")
    script.answers = [reply(503, BUSY), reply(202, examples.JOB)]
    client.submit(examples.TASK_ID, images=tmp_path)
    first, second = script.seen
    assert first.body == second.body
    assert int(first.headers["content-length"]) == len(first.body)
    assert first.body.index(b'name="request"') < first.body.index(b'name="images"')
    assert rb'filename="a/one \"1\".jpg"' in first.body
    assert b'filename="two.PNG"' in first.body
    assert b"notes" not in first.body


@pytest.mark.parametrize("name", ['one "1".jpg', "back\\slash.jpg", "100 %22.jpg", "a;b=c.jpg", "é.jpg", "a'b\\\".jpg"])
def test_the_name_of_a_file_is_read_back_as_it_was(name: str) -> None:
    """A quote came back as %22, so that no label was found by the name of its file."""
    head = FormBody([Part("images", b"", name)])._head(Part("images", b"", name))
    disposition = head.split(b"\r\n")[1].partition(b": ")[2]
    assert parse_options_header(disposition)[1][b"filename"].decode() == name


def test_a_name_that_is_no_text_is_refused_before_anything_is_sent(client: Client, tmp_path: Path) -> None:
    (tmp_path / "\udcff.png").write_bytes(b"x")
    with pytest.raises(InvalidSetting, match="names of 1 public images are no text"):
        client.submit(examples.TASK_ID, images=tmp_path)


VECTORS = np.ones((2, 3))
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"features": VECTORS * np.nan}, "2 of 2 vectors have NaN or infinite numbers, the first in row 0"),
    ({"features": VECTORS > 0}, "real numbers, in an array of floats; found dtype bool"),
    ({"features": VECTORS.astype(complex)}, "found dtype complex128"),
    ({"features": VECTORS.astype(str)}, "found dtype <U"),
    ({"features": VECTORS.astype(object)}, "found dtype object"),
    ({"features": np.ma.masked_array(VECTORS, VECTORS > 0)}, "found a masked array"),
    ({"features": VECTORS[0]}, r"shape \(queries, dimension\), found \(3,\)"),
    ({"features": [[1.0], [1.0, 2.0]]}, "one length each"),
    ({"features": VECTORS, "query_ids": [1, 2]}, "query_ids.0: must be a text"),
    ({"features": VECTORS, "name": "a\nb"}, "name: only printable characters"),
    ({"features": VECTORS, "idempotency_key": "é"}, "visible ASCII characters"),
    ({"features": VECTORS, "idempotency_key": "a b"}, "visible ASCII characters"),
    ({"features": VECTORS, "idempotency_key": ""}, "visible ASCII characters"),
    ({"images": ["photo.png"]}, "images are a Path, or several; found str"),
]


@pytest.mark.parametrize(("given", "said"), UNFIT, ids=range(len(UNFIT)))
def test_what_is_no_job_is_refused_in_a_sentence_and_never_sent(
    client: Client, script: Script, given: dict[str, Any], said: str
) -> None:
    """Text, truth values and complex numbers were sent as the numbers they could be made into."""
    with pytest.raises(InvalidSetting, match=said):
        client.submit(examples.TASK_ID, **given)
    assert script.seen == []


def test_a_setting_that_no_task_has_and_a_variable_that_is_not_set_are_told_in_a_sentence(client: Client) -> None:
    with pytest.raises(InvalidSetting, match="sigma_vote: unknown field; did you mean sigma_votes"):
        Service(client).create_task(name="x", delta=1e-5, max_queries=3, epsilon=1.0, sigma_vote=3)
    with pytest.raises(InvalidSetting, match="count: must be at least 1"):
        Service(client).label(examples.TASK_ID, "photos", queries=0)
    with pytest.raises(InvalidSetting, match="a job's id is a text"):
        client.job(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="the access token must be a text; is the variable"):
        Client("http://127.0.0.1:1", None)  # type: ignore[arg-type]


def test_a_refusal_is_raised_at_once_with_all_it_says(client: Client, script: Script) -> None:
    script.answers = [reply(409, PROBLEM)]
    with pytest.raises(ServiceProblem) as caught:
        client.submit(examples.TASK_ID, features=[[1.0]], backbone_fingerprint="f")
    problem = caught.value
    assert (problem.type, problem.status, problem.detail) == (PROBLEM["type"], 409, "because")
    assert problem.members == {"left_nano": 3}
    assert problem.exit_code == 1
    assert isinstance(problem, LabelerError)
    assert not isinstance(problem, TryAgain)
    assert "lab_secret" not in repr(client) + str(problem) + repr(problem)


def test_a_refusal_that_is_no_problem_document_is_told_by_its_status(client: Client, script: Script) -> None:
    script.answers = [reply(403, "<html>")]
    with pytest.raises(ServiceProblem, match="403"):
        client.budget()


def test_retry_after_is_kept_and_patience_ends(script: Script) -> None:
    script.answers = [reply(429, BUSY | {"status": 429}, Retry_After="30")]
    with Client(script.url, "t", patience_s=1) as client, pytest.raises(ServiceBusy) as caught:
        client.budget()
    assert caught.value.exit_code == 75
    assert len(script.seen) == 1


def test_an_unreachable_service_is_try_again(script: Script) -> None:
    with (
        Client(f"http://{doors.HOST}:9", "t", patience_s=0.3) as client,
        pytest.raises(ServiceBusy, match="nothing answers at"),
    ):
        client.budget()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("closed", "nothing answers at http://127.127.0.1:"),
        ("silent", "in time: is this the service's address and port"),
        ("silent TLS", "no answer from https://127.127.0.1:"),
        ("plain", "does not speak TLS; check the port"),
    ],
)
@pytest.mark.parametrize("call", ["budget", "create_token"])
@pytest.mark.timeout(50)
def test_a_wrong_address_is_found_out_long_before_a_request_would_time_out(
    script: Script, monkeypatch: pytest.MonkeyPatch, kind: str, said: str, call: str
) -> None:
    assert 2 * client_http.STRANGER_PATIENCE_S < 10  # a first try, and what remains of the last one
    monkeypatch.setattr(client_http, "STRANGER_PATIENCE_S", 0.5)
    silent: list[socket.socket] = []
    with doors.opened(lambda theirs, _: silent.append(theirs)) as number, contextlib.ExitStack() as held:
        address = f"{doors.HOST}:{0 if kind == 'closed' else number}"
        held.callback(lambda: [one.close() for one in silent])
        url = {
            "plain": script.url.replace("http:", "https:"),
            "silent TLS": f"https://{address}",
        }.get(kind, f"http://{address}")
        with Client(url, "t") as client, pytest.raises(ServiceBusy) as refused:
            client.budget() if call == "budget" else client.create_token("name", "viewer")
    assert said in str(refused.value)
    assert script.seen == []


def test_a_token_is_never_made_twice(client: Client, script: Script) -> None:
    script.answers = [hang_up]
    with pytest.raises(ServiceBusy):
        client.create_token("x", "viewer")
    assert len(script.seen) == 1


def test_waiting_goes_on_where_a_broken_stream_ended(client: Client, script: Script) -> None:
    script.answers = [
        stream(event(1, "queued"), event(2, "collecting"), b": ping\r\n\r\n", is_whole=False),
        reply(503, BUSY),
        stream(event(3, "tallying"), is_whole=True),
        reply(200, examples.JOB | {"version": 3, "state": "tallying"}),
        stream(event(4, "completed"), is_whole=True),
    ]
    seen: list[JobView] = []
    job = client.wait(examples.JOB_ID, seen.append)
    assert job.state == "completed"
    assert [one.version for one in seen] == [1, 2, 3, 4]
    streams = [one for one in script.seen if one.path.endswith("/events")]
    assert [one.headers.get("last-event-id") for one in streams] == [None, "2", "2", "3"]


def test_patience_begins_again_with_every_change_that_was_seen(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job takes hours, and a service that restarts in the middle of it is waited for like any other."""
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=time.sleep)
    monkeypatch.setattr(client_http, "time", clock)

    def slowly(handler: Handler) -> None:
        stream(event(1, "queued"), is_whole=False)(handler)
        passed_s[0] += 7200.0

    script.answers = [slowly, reply(503, BUSY), stream(event(2, "completed"), is_whole=True)]
    with Client(script.url, "t", timeout_s=240, patience_s=240) as client:
        assert client.wait(examples.JOB_ID).state == "completed"


def test_vectors_that_are_all_quantised_are_sent_in_two_bytes_a_number_and_others_as_they_are() -> None:
    exact = quantize(np.random.default_rng(0).normal(size=(_ROWS_LOOKED_AT + 1, 8))).astype(np.float64)
    off = exact.copy()
    off[-1, 0] += 0.5
    for vectors, kind in ((exact, "int16"), (off, "double"), (exact * 2, "double")):
        table = pq.read_table(io.BytesIO(parquet_of(vectors, None)))
        assert str(table.schema.field("feature").type.value_type) == kind
        assert np.array_equal(np.array(table["feature"].to_pylist()), vectors)


def test_labels_appear_only_when_they_are_whole(client: Client, script: Script, tmp_path: Path) -> None:
    target = tmp_path / "labels.jsonl"
    script.answers = [stream(b"half", is_whole=False), stream(b"whole", b" file", is_whole=True)]
    assert client.labels(examples.JOB_ID, target, format="jsonl") == target
    assert target.read_bytes() == b"whole file"
    script.answers = [reply(409, PROBLEM)]
    with pytest.raises(ServiceProblem):
        client.labels(examples.JOB_ID, tmp_path / "none.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["labels.jsonl"]


def test_labels_that_get_on_are_waited_for_beyond_the_patience_and_what_is_done_is_told(
    script: Script, tmp_path: Path
) -> None:
    def busy(percent: int) -> Handler:
        return reply(503, BUSY | {"detail": f"{percent} % done"})

    script.answers = [busy(10), busy(50), busy(50), stream(b"whole", is_whole=True)]
    told: list[str] = []
    with Client(script.url, "t", timeout_s=240, patience_s=0.0) as client:
        # The second that gets no further is tried again as far as the patience goes, which is nowhere.
        with pytest.raises(ServiceBusy, match="50 % done"):
            client.labels(examples.JOB_ID, tmp_path / "labels", on_wait=told.append)
        assert told == ["10 % done", "50 % done"]
        client.labels(examples.JOB_ID, tmp_path / "labels", on_wait=told.append)
    assert (tmp_path / "labels").read_bytes() == b"whole"


def test_a_file_for_a_folder_that_is_not_there_is_refused_before_anything_is_asked(
    client: Client, script: Script, tmp_path: Path
) -> None:
    place = tmp_path / "none" / "file"
    for download in (client.labels, client.student, client.model):
        with pytest.raises(InvalidSetting, match=r"there is no folder '.*none' to put 'file' in; make it"):
            download(examples.JOB_ID, place)
    with pytest.raises(InvalidSetting, match="there is no folder"):
        client.evidence(place)
    with pytest.raises(InvalidSetting, match="is a folder; name a file in it"):
        client.labels(examples.JOB_ID, tmp_path)
    assert script.seen == []


def test_the_ledger_is_read_page_by_page(client: Client, script: Script) -> None:
    entries = [examples.LEDGER_ENTRY | {"seq": seq} for seq in (1, 2, 3)]
    script.answers = [reply(200, {"items": entries[:2], "next": "2"}), reply(200, {"items": entries[2:], "next": None})]
    assert [entry.seq for entry in client.ledger(account="federation")] == [1, 2, 3]
    assert script.seen[1].path == "/v1/ledger?after=2&account=federation"


def test_small_questions_wait_longer_than_the_service(client: Client, script: Script) -> None:
    script.answers = [reply(200, examples.LABELS)]
    answer = client.ask(LabelsRequest.model_validate(examples.LABELS_REQUEST))
    assert answer.labels[0].label_name == "mug"


@pytest.mark.parametrize("url", ["http://labels.example.org", "ftp://127.0.0.1", "127.0.0.1:8080", "http://"])
def test_a_token_does_not_travel_in_clear(url: str) -> None:
    with pytest.raises(InvalidSetting):
        Client(url, "lab_secret")


def test_images_that_cannot_be_sent_are_refused_before_anything_is_sent(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no image"):
        client.submit(examples.TASK_ID, images=tmp_path)
    with pytest.raises(InvalidSetting, match="no file or folder"):
        client.submit(examples.TASK_ID, images=tmp_path / "none")
    with pytest.raises(InvalidSetting, match="same name"):
        client.submit(examples.TASK_ID, images=[tmp_path / "a.jpg", tmp_path / "b" / "a.jpg"])
    os.mkfifo(tmp_path / "pipe.jpg")
    for images in (tmp_path / "pipe.jpg", [tmp_path / "pipe.jpg"]):
        with pytest.raises(InvalidSetting, match="no file"):
            client.submit(examples.TASK_ID, images=images)
    with pytest.raises(InvalidSetting, match="exactly one"):
        client.submit(examples.TASK_ID)
    with pytest.raises(InvalidSetting, match="CA file"):
        Client("https://127.0.0.1", "t", ca_file=tmp_path / "none.pem")


MIB = 2**20


def endless(piece: bytes, sent: list[int], *, status: int = 200, head: bytes = b"", **headers: str) -> Answer:
    """An answer that goes on until its reader hangs up, or a gibibyte was sent."""

    def send(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            for part in itertools.chain([head] if head else [], itertools.repeat(piece, 2**30 // len(piece))):
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                sent[0] += len(part)

    return send


READS: dict[str, Callable[[Client], object]] = {
    "a view": lambda client: client.whoami(),
    "an evaluation": lambda client: client.evaluation("job-1"),
    "readiness": lambda client: client.readiness(),
    "a stream": lambda client: client.wait("job-1"),
}


@pytest.mark.parametrize("read", READS)
def test_an_answer_without_end_is_given_up_before_it_fills_the_memory(
    client: Client, script: Script, read: str
) -> None:
    sent = [0]
    script.answers = [endless(b"x" * MIB, sent)]
    with pytest.raises(TooLarge, match="Is the URL right"):
        READS[read](client)
    eventually(lambda: 0 < sent[0] < client_http.MAX_ANSWER_BYTES + 32 * MIB)


def test_an_event_without_end_is_given_up(client: Client, script: Script) -> None:
    sent = [0]
    script.answers = [endless(b"data: " + b"x" * MIB + b"\n", sent)]
    with pytest.raises(TooLarge, match="an event has more than"):
        client.wait("job-1")


def test_a_refusal_without_end_is_told_by_its_status(client: Client, script: Script) -> None:
    sent = [0]
    script.answers = [endless(b"x" * 10_000, sent, status=500)]
    with pytest.raises(ServiceProblem) as refused:
        client.whoami()
    assert refused.value.status == 500
    eventually(lambda: 0 < sent[0] < 32 * MIB)


@pytest.mark.parametrize("read", [*READS, "a file"])
def test_a_compressed_answer_is_refused_and_not_unpacked(
    client: Client, script: Script, read: str, tmp_path: Path
) -> None:
    bomb = gzip.compress(b"{" + bytes(64 * MIB))
    script.answers = [endless(bomb, [0], Content_Encoding="gzip")]
    reads = READS | {"a file": lambda client: client.model("job-1", tmp_path / "model")}
    with pytest.raises(TooLarge, match=r"compressed \('gzip'\)"):
        reads[read](client)
    assert script.seen[0].headers["accept-encoding"] == "identity"
    assert not list(tmp_path.iterdir())


def test_a_file_without_end_is_given_up_and_removed(
    client: Client, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_FILE_BYTES", "MAX_MODEL_BYTES"):
        monkeypatch.setattr(f"api.client.{name}", 3 * MIB)
    for download in (client.labels, client.student, client.model):
        sent = [0]
        script.answers = [endless(b"x" * MIB, sent)]
        with pytest.raises(TooLarge, match="more than 3145728 bytes"):
            download("job-1", tmp_path / "file")
        assert not list(tmp_path.iterdir())
    script.answers = [endless(b"x" * MIB, [0])]
    with pytest.raises(TooLarge):
        client.evidence(tmp_path / "file")


def test_a_head_without_end_is_given_up(script: Script) -> None:
    def send(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        handler.close_connection = True
        with contextlib.suppress(OSError):
            for number in range(1_000_000):
                handler.wfile.write(b"X-%d: %s\r\n" % (number, b"y" * 1000))
                sent[0] += 1000

    sent = [0]
    script.answers = [send]
    with Client(script.url, "lab_secret", patience_s=0) as client, pytest.raises(ServiceBusy):
        client.whoami()
    eventually(lambda: 0 < sent[0] < 32 * MIB)
