"""Many requesters at once, each with its own token and task: price, submit, look until it is done, download, again.

Every request is sent once (no patience), so that a refusal, a lost connection or a "too many requests" is counted and
never hidden by a second try. A requester looks at its job once a second, as the answer to its submission asks it to.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from api.client import Client
from api.schema import FINISHED, EstimateRequest, EstimateView, JobView, TaskRequest, TaskView
from labeler.errors import BadData, LabelerError

LOOK_EVERY_S: Final = 1.0
"""What `Retry-After` of an accepted job says."""

QUIET_S: Final = 60.0
"""Longest silence within one request before it counts as an error."""

DEADLINE_S: Final = 300.0
"""A job that takes longer is an error."""

SHORT_DEADLINE_S: Final = 20.0
"""Of a job whose time is compared with that of the same job in quiet."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Wanted:
    """What every requester asks for.

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
    """A job that was completed, and what was agreed as its price.

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
    """What a load was made of and how it went.

    Attributes:
        seconds: latency of every request by its kind: price, submit, status, labels, and a whole job.
        jobs: completed ones.
        queries_left: of each task at the end, by task id.
        errors: everything that was not as it should be, in words.
        wall_s: from the first request to the last label.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    jobs: list[PaidJob] = field(default_factory=list)
    queries_left: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0


def put_under_load(
    url: str,
    token: str,
    wanted: Wanted,
    *,
    requesters: int,
    seconds: float,
    folder: Path,
    urls: Sequence[str] = (),
) -> Load:
    """Let requesters work side by side for a while; each finishes the job it is at.

    Args:
        url: of the service.
        token: of an administrator, who makes a token per requester.
        wanted: what they ask.
        requesters: how many at once.
        seconds: no new job begins after that.
        folder: for their downloads.
        urls: of the coordinators that they are spread over, where there are several.
    """
    load, lock = Load(), threading.Lock()
    with Client(url, token) as admin:
        names = [f"requester-{number:02d}" for number in range(requesters)]
        made = [admin.create_token(name, "requester").token or "" for name in names]
    tasks: dict[str, TaskView] = {}
    start = threading.Barrier(requesters + 1)
    until = [0.0]

    def work(name: str, secret: str, number: int) -> None:
        place = urls[number % len(urls)] if urls else url
        with Client(place, secret, timeout_s=QUIET_S, patience_s=0.0) as client:
            requester = _Requester(client, wanted, number, folder / f"{name}.jsonl")
            try:
                requester.make_task()
            except LabelerError as error:
                requester.errors.append(str(error))
            start.wait()
            while not requester.errors and time.monotonic() < until[0]:
                requester.do_job()
        with lock:
            load.errors += [f"{name}: {sentence}" for sentence in requester.errors]
            load.jobs += requester.jobs
            for kind, found in requester.seconds.items():
                load.seconds[kind] += found
            if requester.task is not None:
                tasks[requester.task.task_id] = requester.task

    threads = [
        threading.Thread(target=work, args=(name, secret, number), name=name)
        for number, (name, secret) in enumerate(zip(names, made, strict=True))
    ]
    for thread in threads:
        thread.start()
    until[0] = time.monotonic() + seconds + QUIET_S
    start.wait()
    started = time.monotonic()
    until[0] = started + seconds
    for thread in threads:
        thread.join()
    load.wall_s = time.monotonic() - started
    with Client(url, token) as admin:
        load.queries_left = {task_id: admin.task(task_id).queries_left for task_id in tasks}
    return load


class _Requester:
    """One of them; stops at its first error."""

    def __init__(self, client: Client, wanted: Wanted, number: int, path: Path) -> None:
        self._client = client
        self._wanted = wanted
        self._choose = np.random.default_rng(number)
        self._path = path
        self.task: TaskView | None = None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.jobs: list[PaidJob] = []
        self.errors: list[str] = []

    def make_task(self) -> None:
        self.task = self._client.create_task(TaskRequest.model_validate(self._wanted.task))

    def do_job(self) -> None:
        assert self.task is not None  # noqa: S101  # without a task there is an error, and no job is begun
        started = time.monotonic()
        try:
            self.jobs.append(self._job(self.task.task_id))
        except LabelerError as error:
            self.errors.append(str(error))
        self.seconds["job"].append(time.monotonic() - started)

    def _job(self, task_id: str) -> PaidJob:
        client, wanted = self._client, self._wanted
        asked = EstimateRequest(task_id=task_id, queries=wanted.queries)
        quoted: EstimateView = self._timed("price", lambda: client.estimate(asked))
        rows = self._choose.choice(len(wanted.features), wanted.queries, replace=False)
        ids = [f"digit-{row}" for row in rows.tolist()]
        job: JobView = self._timed(
            "submit",
            lambda: client.submit(
                task_id,
                features=wanted.features[rows],
                query_ids=ids,
                backbone_fingerprint=wanted.fingerprint,
                deadline_s=DEADLINE_S,
            ),
        )
        look = partial(client.job, job.job_id)
        while job.state not in FINISHED:
            time.sleep(LOOK_EVERY_S)
            job = self._timed("status", look)
        if job.state != "completed":
            why = job.problem.detail if job.problem is not None else "no reason given"
            raise BadData(f"job {job.job_id} ended as {job.state}: {why}")
        self._timed("labels", lambda: client.labels(job.job_id, self._path, format="jsonl", of="questions"))
        if quoted.price != job.price:
            raise BadData(f"job {job.job_id} was priced {quoted.price} and then cost {job.price}")
        return PaidJob(
            job_id=job.job_id,
            task_id=task_id,
            rounds=len(job.rounds),
            charges=_charges(job),
            labels=_count_labels(self._path, ids),
        )

    def _timed(self, kind: str, request: Callable[[], Answer]) -> Answer:
        started = time.perf_counter()
        answer = request()
        self.seconds[kind].append(time.perf_counter() - started)
        return answer


def _charges(job: JobView) -> dict[str, int]:
    charges = {"instance": job.price.instance_charge_nano, "agent": job.price.agent_charge_nano}
    if None in charges.values():
        raise BadData(f"job {job.job_id} has no finite price at both levels: {job.price.reason}")
    return {level: amount for level, amount in charges.items() if amount is not None}


def _count_labels(path: Path, ids: Sequence[str]) -> int:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = sorted(row["source"] for row in rows if row["status"] == "answered")
    if found != sorted(ids):
        raise BadData(f"asked about {len(ids)} queries and got {len(rows)} rows, {len(found)} of them labels")
    return len(found)


class WellBehaved:
    """One requester with a task of its own that submits a small job, waits for its labels, and does it again.

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
        """A job of its own as it is sent: vectors in JSON, some of them twice where more are asked than there are."""
        count = self._wanted.queries if queries is None else queries
        found = len(self._wanted.features)
        rows = self._choose.choice(found, count, replace=count > found)
        return {
            "task_id": self.task_id,
            "features": self._wanted.features[rows].tolist(),
            "backbone_fingerprint": self._wanted.fingerprint,
        }

    def job_seconds(
        self, *, queries: int | None = None, deadline_s: float = SHORT_DEADLINE_S, labels: Path | None = None
    ) -> float:
        """From submission to the end of one job; its deadline where it expired, and then more would have been needed.

        Args:
            queries: how many; what it usually asks where absent.
            deadline_s: of the job.
            labels: file that takes its labels, and then the seconds are those until it is written.

        Raises:
            BadData: it ended in another way than completed or expired.
        """
        body = self.body(queries)
        started = time.perf_counter()
        job = self._client.submit(
            self.task_id,
            features=body["features"],
            backbone_fingerprint=self._wanted.fingerprint,
            deadline_s=deadline_s,
        )
        job = self._client.wait(job.job_id)
        if job.state not in ("completed", "expired"):
            why = job.problem.detail if job.problem is not None else "no reason given"
            raise BadData(f"job {job.job_id} ended as {job.state}: {why}")
        if labels is not None and job.state == "completed":
            self._client.labels(job.job_id, labels, format="jsonl", of="questions")
        return time.perf_counter() - started


def new_token(url: str, token: str, name: str) -> str:
    """A requester's token, made by an administrator."""
    with Client(url, token) as admin:
        return admin.create_token(name, "requester").token or ""


def revoke_token(url: str, token: str, *, name: str) -> None:
    """End every token of a name."""
    with Client(url, token) as admin:
        for one in list(admin.tokens()):
            if one.name == name:
                admin.revoke_token(one.token_id)
