"""One requester who behaves, beside whom others put a service under load or attack it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from api.client import Client
from api.schema import EstimateRequest, Role, TaskRequest
from benchmarks.service.requesters import QUIET_S, Wanted
from labeler.errors import BadData

SHORT_DEADLINE_S: Final = 20.0
"""Of a job whose time is compared with that of the same job in quiet."""


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
        """From submission to the end of one job; its deadline where it expired, and then more would have been needed.

        Args:
            queries: how many; what it usually asks where absent.
            deadline_s: of the job.
            labels: file that takes its labels as Parquet, and then the seconds are those until it is written.

        Raises:
            BadData: it ended in another way than completed or expired.
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
        """Of one question for the price of a task that nobody has asked for before."""
        task = {"sigma_votes": 100 + self._choose.random()}
        asked = TaskRequest.model_validate({**self._wanted.task, **task})
        started = time.perf_counter()
        self._client.estimate(EstimateRequest(task=asked))
        return time.perf_counter() - started


def new_token(url: str, token: str, name: str, role: Role = "requester") -> str:
    """A token of somebody, made by an administrator."""
    with Client(url, token) as admin:
        return admin.create_token(name, role).token or ""


def revoke_token(url: str, token: str, *, name: str) -> None:
    """End every token of a name."""
    with Client(url, token) as admin:
        for one in list(admin.tokens()):
            if one.name == name:
                admin.revoke_token(one.token_id)
