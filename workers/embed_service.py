"""The embedder process: turns the images of a job into public questions, in the coordinator's own domain.

    claim (lease, heartbeat) -> jobs/JOB/upload.parquet -> embed, resumable -> select -> jobs/JOB/questions.safetensors
                                                                     |
                                                                     v
                                          jobs/JOB/failed.json: what cannot be asked about, and why

Only public images are read here, and nothing is charged. The result is a function of the upload, the backbone and the
request, so work that is done twice, by this process or another, gives the same file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import save

from feature_store.backbones import Backbone, load_backbone, read_spec
from feature_store.durable import replace_file
from feature_store.embedding import embed_source
from feature_store.faults import fault_point
from feature_store.mailbox import Mailbox, Work
from feature_store.query_selection import Strategy, select_queries
from feature_store.shard import Shard, check_features
from labeler.errors import (
    BadData,
    Interrupted,
    InvalidSetting,
    LabelerError,
    MixedShards,
    NotReady,
    TryAgain,
    UnreadableImage,
)
from labeler.task import describe_validation

log = logging.getLogger("labeler.embedder")

QUEUE = "embed"
LEASE_S = 10.0
HEARTBEAT_S = 3.0
MOST_ATTEMPTS = 5
"""Work that was handed out this often without an end kills whoever takes it, and is given up."""

ROLE = "embedder"
ALIVE_S = 30.0
"""For so long a sign of life counts, several times as long as it takes between two."""

_CLAIM_WAIT_S = 1.0


class EmbedRequest(BaseModel):
    """`jobs/JOB/request.json`: which questions to make.

    Attributes:
        strategy, count, seed: see feature_store.query_selection.
        fingerprint: of the task's backbone.
        source: whether the upload holds images, or features made by that backbone elsewhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    strategy: Strategy
    count: Annotated[int, Field(ge=1)] | None
    seed: Annotated[int, Field(ge=0)]
    fingerprint: str
    source: Literal["images", "features"]


def run_embedder(
    coordinator_home: Path, redis_url: str, backbones: Mapping[str, str], *, stop: threading.Event
) -> None:
    """Prepare questions for jobs until told to stop.

    Args:
        coordinator_home: the coordinator's home, shared with it.
        redis_url: the coordinator's Redis.
        backbones: fingerprint -> what loads it (feature_store.backbones.load_backbone).
        stop: ends it after the batch of images at hand; another embedder goes on from there.

    Raises:
        InvalidSetting: the Redis URL is none.
    """
    consumer = f"embedder-{socket.gethostname()[:50]}-{os.getpid()}"
    embedder = Embedder(coordinator_home, backbones, stop=stop)
    mailbox = Mailbox(redis_url)
    log.info("embedder ready", extra={"backbones": len(backbones)})
    is_reached = True
    try:
        while not stop.is_set():
            try:
                mailbox.show_life(ROLE, for_s=ALIVE_S)
                work = mailbox.claim(QUEUE, consumer, lease_s=LEASE_S, wait_s=_CLAIM_WAIT_S)
                if work is not None:
                    with _lease(mailbox, work):
                        embedder.prepare(work.work_id, attempt=work.attempt, mailbox=mailbox)
                    mailbox.done(work)
                is_reached = True
            except Interrupted:
                break
            except TryAgain as error:
                if is_reached:
                    log.warning("work waits", extra={"problem": error.problem_type, "sentence": str(error)})
                is_reached = False
                stop.wait(_CLAIM_WAIT_S)
    finally:
        mailbox.close()
    log.info("embedder stopped")


class Embedder:
    """Makes the questions of one job after the other; backbones are loaded once and kept."""

    def __init__(self, home: Path, backbones: Mapping[str, str], *, stop: threading.Event) -> None:
        self._home = home
        self._backbones = backbones
        self._stop = stop
        self._loaded: dict[str, Backbone] = {}

    def prepare(self, job_id: str, *, attempt: int, mailbox: Mailbox) -> None:
        """Write questions.safetensors or failed.json of a job, unless either is there.

        Raises:
            TryAgain: stopped, or something cannot be reached now; the work stays on the queue.
        """
        if Path(job_id).name != job_id:
            log.error("work skipped: no job has such a name")
            return
        folder = self._home / "jobs" / job_id
        if not (folder / "request.json").is_file():
            log.warning("work skipped: the job is gone", extra={"job_id": job_id})
            return
        if (folder / "questions.safetensors").exists() or (folder / "failed.json").exists():
            return
        fault_point("embedder.claimed")
        try:
            if attempt > MOST_ATTEMPTS:
                raise BadData(
                    f"embedding these images was begun {attempt - 1} times and never ended; look at their sizes"
                )
            self._ask(folder, job_id, mailbox)
            log.info("questions prepared", extra={"job_id": job_id})
        except TryAgain:
            raise
        except LabelerError as error:
            _write_failure(folder, error)
            log.warning("job failed", extra={"job_id": job_id, "problem": error.problem_type})
        except Exception as error:
            # A defect of a library must not stop the embedder for every other job.
            _write_failure(folder, BadData(f"the questions could not be prepared ({type(error).__name__})"))
            log.exception("job failed", extra={"job_id": job_id})
        _tell(mailbox, job_id, {"stage": "embedded"})

    def _ask(self, folder: Path, job_id: str, mailbox: Mailbox) -> None:
        request = _read_request(folder / "request.json")
        upload = folder / "upload.parquet"
        if request.source == "images":
            features = self._embed(upload, folder / "public.shard", request, job_id, mailbox)
        else:
            features = _given_features(upload)
        queries = select_queries(features, strategy=request.strategy, count=request.count, seed=request.seed)
        fault_point("embedder.embedded")
        arrays = {"features": queries.features, "rows": queries.rows, "assignment": queries.assignment}
        if request.strategy == "weights":
            arrays["images"] = features  # What the model that is asked for will label.
        metadata = {"fingerprint": request.fingerprint, "backbone": self._name_of(request.fingerprint)}
        replace_file(
            folder / "questions.safetensors",
            save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata),
            mode=0o600,
        )

    def _embed(
        self, upload: Path, out: Path, request: EmbedRequest, job_id: str, mailbox: Mailbox
    ) -> NDArray[np.int16]:
        """Features of all images, in their order."""
        backbone = self._backbone(request.fingerprint)

        def progress(done: int, total: int) -> None:
            _tell(mailbox, job_id, {"stage": "embedding", "done": done, "total": total})
            if self._stop.is_set():
                raise Interrupted("stopped while embedding; another embedder goes on from here")

        report = embed_source(upload, backbone, out, classes=(), public=True, thumbnails=False, progress=progress)
        if report.skipped:
            first = report.skipped[0]
            raise UnreadableImage(
                f"{len(report.skipped)} of the images cannot be asked about, first {_name_of(upload, first.source)!r}: "
                f"{first.reason}. Take them out and submit again"
            )
        return np.asarray(Shard.open(out, verify=False).features)

    def _name_of(self, fingerprint: str) -> str:
        """The backbone in words, for people; empty for one that only the requester has."""
        if fingerprint not in self._backbones:
            return ""
        spec = read_spec(self._backbones[fingerprint])
        return spec.architecture or spec.kind

    def _backbone(self, fingerprint: str) -> Backbone:
        """The backbone of a task, loaded once.

        Raises:
            InvalidSetting: the coordinator has none of that fingerprint.
            MixedShards: what it has under that fingerprint is another one.
        """
        if fingerprint not in self._backbones:
            known = ", ".join(name[:16] for name in self._backbones) or "none"
            raise InvalidSetting(
                f"no backbone with fingerprint {fingerprint[:16]} is configured here; known are {known}. Send features "
                "instead of images, or ask the operator to add the backbone"
            )
        if fingerprint not in self._loaded:
            backbone = load_backbone(self._backbones[fingerprint])
            if backbone.fingerprint != fingerprint:
                raise MixedShards(
                    f"the backbone configured as {fingerprint[:16]} has fingerprint {backbone.fingerprint[:16]}; the "
                    "operator has to correct [backbones]"
                )
            self._loaded[fingerprint] = backbone
        return self._loaded[fingerprint]


@contextmanager
def _lease(mailbox: Mailbox, work: Work) -> Iterator[None]:
    """Signs of life while the block runs, so that nobody else takes the work over."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            # Lost or unreachable: the result is welcome all the same.
            with suppress(NotReady, TryAgain):
                mailbox.show_life(ROLE, for_s=ALIVE_S)
                mailbox.heartbeat(work)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_request(path: Path) -> EmbedRequest:
    try:
        return EmbedRequest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BadData(describe_validation(error, "the request for questions")) from None


def _given_features(upload: Path) -> NDArray[np.int16]:
    """Features a requester sent, checked to be quantised ones."""
    try:
        column = pq.read_table(upload, columns=["feature"])["feature"]
    except (pa.ArrowException, KeyError, OSError):
        raise BadData("the uploaded features cannot be read; submit the job again") from None
    kind = column.type
    if not pa.types.is_fixed_size_list(kind) or kind.value_type != pa.int16() or column.null_count or not len(column):
        raise BadData("uploaded features must be a column feature of int16 lists of one length, none missing")
    values = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    features = np.ascontiguousarray(values.reshape(len(column), kind.list_size), dtype=np.int16)
    check_features(features)
    return features


def _name_of(upload: Path, source: str) -> str:
    """The name a requester gave to an image that is known by its row."""
    row = source.rpartition("#")[2]
    with suppress(pa.ArrowException, KeyError, OSError, IndexError, ValueError):
        return str(pq.read_table(upload, columns=["name"])["name"][int(row)].as_py())
    return source


def _write_failure(folder: Path, error: LabelerError) -> None:
    content = {"problem_type": error.problem_type, "sentence": str(error)}
    replace_file(folder / "failed.json", json.dumps(content).encode(), mode=0o600)


def _tell(mailbox: Mailbox, job_id: str, event: Mapping[str, object]) -> None:
    with suppress(TryAgain):
        mailbox.publish(job_id, event)
