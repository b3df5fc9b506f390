"""Many requesters at once, each with its own token and task: price, submit, look until it is done, download, again.

Every request is sent once (no patience), so that a refusal, a lost connection or a "too many requests" is counted, and
no second try hides it. A requester looks at its job once a second, as the answer to its submission asks it to. All of
them wait in one thread. Each has a separate connection that speaks as little HTTP/1.1 as a load needs. A general client
takes one to two milliseconds of CPU a request, of the cores that it shares with what it measures.

`WellBehaved` is one requester in a service that others load or attack.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from api.client import Client
from api.schema import FINISHED, EstimateRequest, Role, TaskRequest
from labeler.errors import BadData, LabelerError, Unavailable

LOOK_EVERY_S: Final = 1.0
"""The `Retry-After` of an accepted job."""

QUIET_S: Final = 60.0
"""Longest silence within one request before it counts as an error."""

DEADLINE_S: Final = 300.0
"""A job that takes longer is an error."""


@dataclass(frozen=True)
class Answer:
    """An answer to one request.

    Attributes:
        status: of HTTP.
        body: all of it.
        seconds: from the moment the request was written until the last byte of the answer was there.
    """

    status: int
    body: bytes
    seconds: float


class PlainConnection:
    """A connection to one service, for one request at a time; it opens at the first, and again where it was closed.

    Args:
        quiet_s: longest that one answer may take.
    """

    def __init__(self, url: str, token: str, *, quiet_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise BadData(f"a load is put on http://HOST:PORT, found {parts.scheme}://{parts.netloc}")
        self._host, self._port, self._quiet_s = parts.hostname, parts.port, quiet_s
        self._fields = (
            f"Host: {parts.netloc}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
            f"User-Agent: private-labeler\r\nAuthorization: Bearer {token}\r\n"
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request, once, and wait for its answer, which is cut by its Content-Length."""
        fields = self._fields + "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if body is not None:
            fields += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        try:
            async with asyncio.timeout(self._quiet_s):
                if self._streams is None:
                    self._streams = await asyncio.open_connection(self._host, self._port)
                reader, writer = self._streams
                began = time.perf_counter()
                writer.write(f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode() + (body or b""))
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                length = next(line[15:] for line in lines if line.startswith(b"content-length:"))
                found = await reader.readexactly(int(length))
                return Answer(int(first.split(b" ", 2)[1]), found, time.perf_counter() - began)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise Unavailable(f"{method} {path}: no answer ({type(error).__name__})") from None
        except (StopIteration, IndexError, ValueError, asyncio.LimitOverrunError):
            self.close()
            raise BadData(f"{method} {path}: an answer without a status or a Content-Length") from None

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


@dataclass(frozen=True, eq=False)
class Wanted:
    """The request of every requester.

    Attributes:
        task: fields of each requester's task; the service adds a nonce, so each task is another one.
        fingerprint: of the backbone that made the features.
        features: public vectors to choose from, shape (n, d).
        queries: of one job.
    """

    task: Mapping[str, Any]
    fingerprint: str
    features: NDArray[np.float64]
    queries: int


@dataclass(frozen=True)
class PaidJob:
    """A job that was completed, and its agreed price.

    Attributes:
        job_id: the job.
        task_id: its task.
        rounds: into how many batches it was cut.
        charges: nano-units of mu^2 by level, as priced before it was submitted.
        labels: answered queries in the downloaded file, each once.
    """

    job_id: str
    task_id: str
    rounds: int
    charges: dict[str, int]
    labels: int


@dataclass
class Load:
    """The requests of a load and their results.

    Attributes:
        seconds: latency of every request by its kind: price, submit, status, labels, and a whole job.
        jobs: completed ones.
        queries_left: of each task at the end, by task id.
        errors: everything that was not as it should be, in words.
        wall_s: from the first request to the last label.
        cpu_s: what the requesters themselves took of this machine's cores.
        began_at: moment of the first request, seconds since 1970.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    jobs: list[PaidJob] = field(default_factory=list)
    queries_left: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    began_at: float = 0.0

    def queries_not_used_once(self, of_each_task: int) -> list[str]:
        """Check that each task lost as many queries as labels were downloaded; return the differences, in words."""
        found = []
        for task_id, left in self.queries_left.items():
            labels = sum(job.labels for job in self.jobs if job.task_id == task_id)
            if of_each_task - left != labels:
                found.append(f"task {task_id[:12]}: {of_each_task - left} queries are used for {labels} labels")
        return found


def put_under_load(
    url: str,
    token: str,
    wanted: Wanted,
    *,
    requesters: int,
    seconds: float,
    connect: type[PlainConnection] = PlainConnection,
    on_start: Callable[[], None] = lambda: None,
    on_end: Callable[[], None] = lambda: None,
) -> Load:
    """Let requesters work in parallel for a while; each finishes its current job.

    Args:
        token: of an administrator, who makes a token per requester.
        seconds: no new job starts after that.
        connect: how each of them connects (plainly).
        on_start: called when all of them have their task.
        on_end: called when all of them have their last labels.
    """
    with Client(url, token) as admin:
        names = [f"requester-{number:02d}" for number in range(requesters)]
        made = [admin.create_token(name, "requester").token or "" for name in names]
    # Every vector is spelled as it is sent before the load starts.
    vectors = [json.dumps(row, separators=(",", ":")) for row in wanted.features.tolist()]
    some = [
        _Requester(name, connect(url, secret, quiet_s=QUIET_S), wanted, vectors, number)
        for number, (name, secret) in enumerate(zip(names, made, strict=True))
    ]
    load = asyncio.run(_side_by_side(some, seconds, on_start, on_end))
    with Client(url, token) as admin:
        load.queries_left = {one.task_id: admin.task(one.task_id).queries_left for one in some if one.task_id}
    return load


async def _side_by_side(
    some: Sequence[_Requester], seconds: float, on_start: Callable[[], None], on_end: Callable[[], None]
) -> Load:
    load, cpu_s = Load(), time.thread_time()
    try:
        # None starts before each has its task and its connection.
        await asyncio.gather(*(one.make_task() for one in some))
        on_start()
        started, load.began_at = time.monotonic(), time.time()
        await asyncio.gather(*(one.work(started + seconds) for one in some))
        load.wall_s = time.monotonic() - started
        on_end()
    finally:
        for one in some:
            one.close()
    load.cpu_s = time.thread_time() - cpu_s
    for one in some:
        load.errors += [f"{one.name}: {sentence}" for sentence in one.errors]
        load.jobs += one.jobs
        for kind, found in one.seconds.items():
            load.seconds[kind] += found
    return load


class _Requester:
    """One requester; stops at its first error."""

    def __init__(
        self, name: str, connection: PlainConnection, wanted: Wanted, vectors: Sequence[str], number: int
    ) -> None:
        self.name = name
        self.task_id = ""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.jobs: list[PaidJob] = []
        self.errors: list[str] = []
        self._connection = connection
        self._wanted = wanted
        self._vectors = vectors
        self._choose = np.random.default_rng(number)

    def close(self) -> None:
        self._connection.close()

    async def make_task(self) -> None:
        asked = TaskRequest.model_validate(self._wanted.task).model_dump_json().encode()
        try:
            self.task_id = json.loads(await self._asked("task", "POST", "/v1/tasks", asked))["task_id"]
        except LabelerError as error:
            self.errors.append(str(error))

    async def work(self, until_s: float) -> None:
        """Run one job after the other until that moment of `time.monotonic`."""
        while not self.errors and time.monotonic() < until_s:
            started = time.monotonic()
            try:
                self.jobs.append(await self._job())
            except LabelerError as error:
                self.errors.append(str(error))
            self.seconds["job"].append(time.monotonic() - started)

    async def _job(self) -> PaidJob:
        wanted = self._wanted
        asked = json.dumps({"task_id": self.task_id, "queries": wanted.queries}).encode()
        quoted = json.loads(await self._asked("price", "POST", "/v1/jobs:estimate", asked))
        rows = self._choose.choice(len(self._vectors), wanted.queries, replace=False).tolist()
        ids = [f"digit-{row}" for row in rows]
        key = {"Idempotency-Key": secrets.token_urlsafe(24)}
        job = json.loads(await self._asked("submit", "POST", "/v1/jobs", self._submission(rows, ids), key))
        path = f"/v1/jobs/{job['job_id']}"
        while job["state"] not in FINISHED:
            await asyncio.sleep(LOOK_EVERY_S)
            job = json.loads(await self._asked("status", "GET", path))
        if job["state"] != "completed":
            why = (job["problem"] or {}).get("detail", "no reason given")
            raise BadData(f"job {job['job_id']} ended as {job['state']}: {why}")
        labels = await self._asked("labels", "GET", f"{path}/labels?format=jsonl&of=questions")
        if quoted["price"] != job["price"]:
            raise BadData(f"job {job['job_id']} was priced {quoted['price']} and then cost {job['price']}")
        charges = {level: job["price"][f"{level}_charge_nano"] for level in ("instance", "agent")}
        if None in charges.values():
            raise BadData(f"job {job['job_id']} has no finite price at both levels: {job['price']['reason']}")
        return PaidJob(
            job_id=job["job_id"],
            task_id=self.task_id,
            rounds=len(job["rounds"]),
            charges=charges,
            labels=_count_labels(labels, ids),
        )

    def _submission(self, rows: Sequence[int], ids: Sequence[str]) -> bytes:
        fields = {
            "task_id": self.task_id,
            "deadline_s": DEADLINE_S,
            "query_ids": ids,
            "backbone_fingerprint": self._wanted.fingerprint,
        }
        vectors = ",".join(self._vectors[row] for row in rows)
        return f'{json.dumps(fields)[:-1]}, "features": [{vectors}]}}'.encode()

    async def _asked(
        self, kind: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        answer = await self._connection.ask(method, path, body, headers)
        self.seconds[kind].append(answer.seconds)
        if answer.status >= 400:
            raise BadData(f"{kind}: the service answered {answer.status}: {answer.body[:300].decode(errors='replace')}")
        return answer.body


def _count_labels(body: bytes, ids: Sequence[str]) -> int:
    rows = [json.loads(line) for line in body.decode("utf-8").splitlines()]
    found = sorted(row["source"] for row in rows if row["status"] == "answered")
    if found != sorted(ids):
        raise BadData(f"asked about {len(ids)} queries and got {len(rows)} rows, {len(found)} of them labels")
    return len(found)


SHORT_DEADLINE_S: Final = 20.0
"""Deadline of a job whose time is compared with that of the same job in quiet."""


class WellBehaved:
    """One requester with a separate task that submits a small job, waits for its labels, and does it again.

    Args:
        url: of the service.
        token: a requester's.
        wanted: what it asks.
    """

    def __init__(self, url: str, token: str, wanted: Wanted) -> None:
        self._client = Client(url, token, timeout_s=QUIET_S)
        self._wanted = wanted
        self._choose = np.random.default_rng(0)
        self.task_id = self._client.create_task(TaskRequest.model_validate(wanted.task)).task_id

    def __enter__(self) -> WellBehaved:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def body(self, queries: int | None = None) -> dict[str, Any]:
        """Return the body of a new job: vectors in JSON, some of them twice where more are asked than there are."""
        return {
            "task_id": self.task_id,
            "features": self._vectors(queries).tolist(),
            "backbone_fingerprint": self._wanted.fingerprint,
        }

    def _vectors(self, queries: int | None) -> NDArray[np.float64]:
        count = self._wanted.queries if queries is None else queries
        found = len(self._wanted.features)
        return self._wanted.features[self._choose.choice(found, count, replace=count > found)]

    def job_seconds(
        self, *, queries: int | None = None, deadline_s: float = SHORT_DEADLINE_S, labels: Path | None = None
    ) -> float:
        """Return seconds from submission to the end of one job; its deadline where it expired, which is then a lower
        bound.

        Args:
            queries: how many; what it usually asks where absent.
            deadline_s: of the job.
            labels: file that takes its labels as Parquet; the seconds then end when it is written.
        """
        vectors = self._vectors(queries)
        started = time.perf_counter()
        job = self._client.submit(
            self.task_id,
            features=vectors,
            backbone_fingerprint=self._wanted.fingerprint,
            deadline_s=deadline_s,
        )
        job = self._client.wait(job.job_id)
        if job.state not in ("completed", "expired"):
            why = job.problem.detail if job.problem is not None else "no reason given"
            raise BadData(f"job {job.job_id} ended as {job.state}: {why}")
        if labels is not None and job.state == "completed":
            self._client.labels(job.job_id, labels, of="questions")
        return time.perf_counter() - started

    def price_seconds(self) -> float:
        """Return the seconds of one request for the price of a new task."""
        task = {"sigma_votes": 100 + self._choose.random()}
        asked = TaskRequest.model_validate({**self._wanted.task, **task})
        started = time.perf_counter()
        self._client.estimate(EstimateRequest(task=asked))
        return time.perf_counter() - started


def new_token(url: str, token: str, name: str, role: Role = "requester") -> str:
    """Make a token for a name, as an administrator."""
    with Client(url, token) as admin:
        return admin.create_token(name, role).token or ""


def revoke_token(url: str, token: str, *, name: str) -> None:
    """End every token of a name."""
    with Client(url, token) as admin:
        for one in list(admin.tokens()):
            if one.name == name:
                admin.revoke_token(one.token_id)
