"""A running service, from a notebook."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from api.client import Client, made
from api.schema import LabelsOf, Selection, TaskRequest
from labeler.errors import JobNotCompleted
from labeler.rounds.effects import AskedStrategy
from labeler.system.files import named_path
from workers.notebook.job import Frame, TrainedStudent, framed, load_student


class Service:
    """A service and what it labelled for you; close it, or use it as a context manager.

    Attributes:
        client: every call of the REST interface (api.client.Client).
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Service({self.client!r})"

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def create_task(self, **fields: Any) -> str:
        """Make a task (fields as in POST /v1/tasks); returns its id. Costs nothing."""
        return self.client.create_task(made(TaskRequest, **fields)).task_id

    def label(
        self,
        task_id: str,
        images: str | Path | Sequence[str | Path],
        *,
        clusters: int | None = None,
        strategy: AskedStrategy = "clustered",
        name: str = "",
        idempotency_key: str | None = None,
    ) -> str:
        """Submit images under a task and wait until the job is over; goes on through restarts of the service.

        Args:
            task_id: the task under whose price it runs.
            images: a folder, a zip, a Parquet file, or image files.
            clusters: ask about so many clusters of images; about every image when None.
            strategy: how clusters are found: "clustered", or "spectral" along the graph of nearest neighbours.
            name: for people.
            idempotency_key: give one to make a cell safe to run twice.

        Returns:
            The job's id.

        Raises:
            JobNotCompleted: the job ended otherwise; the message says how and why.
            ServiceProblem: the service refused, for example because the budget does not cover it.
        """
        selection = None if clusters is None else made(Selection, strategy=strategy, count=clusters)
        where = (
            named_path(images, "images")
            if isinstance(images, str | Path)
            else [named_path(one, "images") for one in images]
        )
        job = self.client.submit(task_id, images=where, selection=selection, name=name, idempotency_key=idempotency_key)
        ended = self.client.wait(job.job_id)
        if ended.state != "completed":
            why = "" if ended.problem is None else f": {ended.problem.detail}"
            raise JobNotCompleted(f"job {ended.job_id} is {ended.state}{why}")
        return job.job_id

    def labels(self, job_id: str, frame: Frame = "pandas") -> Any:
        """The label of every image of a completed job, asked about or inferred, with a confidence (docs/labels.md).

        Args:
            job_id: the job.
            frame: "pandas", "polars" or "arrow".
        """
        return self._table(job_id, frame, "images")

    def questions(self, job_id: str, frame: Frame = "pandas") -> Any:
        """What was asked and what was released for it; see `labels` for the arguments."""
        return self._table(job_id, frame, "questions")

    def student(self, job_id: str) -> TrainedStudent:
        """The student that labelled the job's images, to label others."""
        with tempfile.TemporaryDirectory() as folder:
            return load_student(self.client.student(job_id, Path(folder) / "student.safetensors"))

    def _table(self, job_id: str, frame: Frame, of: LabelsOf) -> Any:
        import pyarrow.parquet as pq

        with tempfile.TemporaryDirectory() as folder:
            return framed(pq.read_table(self.client.labels(job_id, Path(folder) / "labels.parquet", of=of)), frame)


def connect(url: str, token: str, *, ca_file: str | Path | None = None) -> Service:
    """A service by its address and your token, as `labeler up` prints them.

    Raises:
        InvalidSetting: the address is none, or would send the token over a network in clear.
    """
    return Service(Client(url, token, ca_file=None if ca_file is None else named_path(ca_file, "ca_file")))
