"""The embedder process: turns the images of jobs into public features, in the coordinator's own domain.

    turn of a lane (EmbedBoard.turn) -> its next job -> decode (in another process) -> embed, a slice at a time
                                                                     |
                          jobs/JOB/public.shard: the features        v
                          jobs/JOB/failed.json: what cannot be asked about, and why

A lane is one requester (feature_store.results.questions). While others wait it has `SLICE_S`, then it is their turn,
and its job later continues where it stopped. So the longest wait for a first step is one slice of every other lane.
Work stops between two looks, a fraction of a second apart, when nobody waits for its job any more.

Only public images are read here, and nothing is charged. The result is a function of the upload and the backbone, so
repeated work, by this process or another, gives the same file. Several embedders may serve one coordinator; each has
another requester's turn.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_store.backbones import Backbone, Transform, load_backbone
from feature_store.decode import Skipped
from feature_store.decode_process import PixelLimits, UnusableImage, decoded_images
from feature_store.embedding import LoadedImage, embed_source, embedded_batches
from feature_store.results.questions import (
    FAILURE,
    MOST_NAMED,
    SHARD,
    UPLOAD,
    EmbedBoard,
    EmbedRequest,
    saying_progress,
    unasked,
    write_failure,
)
from labeler.driver.mail import Mailbox
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import (
    BadData,
    Interrupted,
    InvalidSetting,
    LabelerError,
    MixedShards,
    TryAgain,
    UnreadableImage,
)
from labeler.system.faults import fault_point
from labeler.system.files import is_full, storage_full
from workers.service_process import tell_ready

log = logging.getLogger("labeler.embedder")

HEARTBEAT_S = 3.0
MOST_ATTEMPTS = 5
"""Work that was handed out this often without an end kills its embedders, and is given up."""

SLICE_S = 2.0
"""Seconds of work on one requester's images while another one's wait."""

BATCH_IMAGES = 64
BATCH_S = 1.0
"""A batch is what came within these seconds, so that large images do not make a batch that lasts minutes."""

ROLE = "embedder"
ALIVE_S = 30.0
"""Seconds for which a sign of life counts, several times the pause between two."""

WORKING = f".{SHARD}.writing"

LOOK_EVERY_S = 0.1
"""Seconds between two looks at the board while nobody waits."""

AGAIN_S = 1.0


class _JobEnded(Exception):
    """The job is no longer waited for."""


class _SliceOver(Exception):
    """The slice ended; it is another lane's turn."""


def run_embedder(
    coordinator_home: Path, redis_url: str, backbones: Mapping[str, str], *, stop: threading.Event
) -> None:
    """Make features for jobs until told to stop.

    Args:
        coordinator_home: the coordinator's home, shared with it.
        backbones: fingerprint -> what loads it (feature_store.backbones.load_backbone).
        stop: ends it within a moment; another embedder continues from there.

    Raises:
        InvalidSetting: the Redis URL is not valid.
    """
    embedder = Embedder(coordinator_home, backbones, stop=stop)
    board = EmbedBoard(coordinator_home)
    mailbox = RedisMailbox(redis_url)
    log.info("embedder ready", extra={"backbones": len(backbones)})
    said = ""
    try:
        with _signs_of_life(mailbox):
            while not stop.is_set():
                try:
                    with board.turn() as turn:
                        if turn is not None:
                            embedder.turn(turn[0], attempt=turn[1])
                    said = ""
                    if turn is None:
                        stop.wait(LOOK_EVERY_S)
                except Interrupted:
                    break
                except TryAgain as error:
                    # No process died of it, so it is no attempt: a full disk may last for hours.
                    if error.problem_type != said:
                        log.warning("work waits", extra={"problem": error.problem_type, "sentence": str(error)})
                    said = error.problem_type
                    stop.wait(AGAIN_S)
    finally:
        mailbox.close()
    log.info("embedder stopped")


class Embedder:
    """An embedder of one job after the other; backbones are loaded once and kept."""

    def __init__(self, home: Path, backbones: Mapping[str, str], *, stop: threading.Event) -> None:
        self._home = home
        self._board = EmbedBoard(home)
        self._backbones = backbones
        self._stop = stop
        self._loaded: dict[str, Backbone] = {}

    def turn(self, lane: str, *, attempt: int) -> None:
        """Work for one requester, until nothing is left or another one's turn has come.

        Args:
            attempt: how often this turn was started, from 1; the job it starts with may have ended the other attempts.

        Raises:
            TryAgain: stopped, or something cannot be reached or kept now; the jobs keep waiting.
        """
        until = time.monotonic() + SLICE_S
        while waiting := self._board.jobs(lane):
            try:
                self._job(lane, waiting[0], attempt=attempt, until=until)
            except _SliceOver:
                self._board.to_the_end(lane, waiting[0])
                return
            attempt = 1
            if self._is_over(lane, until):
                return

    def _is_over(self, lane: str, until: float) -> bool:
        return time.monotonic() >= until and self._board.has_other_lanes(lane)

    def _job(self, lane: str, job_id: str, *, attempt: int, until: float) -> None:
        folder = self._home / "jobs" / job_id
        if (folder / SHARD).exists() or (folder / FAILURE).exists():
            self._board.done(lane, job_id)
            return
        fault_point("embedder.claimed")
        try:
            if attempt > MOST_ATTEMPTS:
                raise BadData(
                    f"embedding these images was begun {attempt - 1} times and never ended; look at their sizes"
                )
            self._embed(lane, job_id, folder, until=until)
            log.info("features made", extra={"job_id": job_id})
        except (TryAgain, _SliceOver):
            raise
        except Exception as error:
            if not self._board.is_wanted(lane, job_id):
                # Another process may have removed its folder; what we left in it is removed too.
                shutil.rmtree(folder / WORKING, ignore_errors=True)
                log.info("work stopped: the job has ended", extra={"job_id": job_id})
                return
            if isinstance(error, OSError) and is_full(error):
                raise storage_full("the features of a job") from error
            self._fail(folder, job_id, error)
        self._board.done(lane, job_id)

    def _fail(self, folder: Path, job_id: str, error: Exception) -> None:
        if isinstance(error, LabelerError):
            write_failure(folder, error)
            log.warning("job failed", extra={"job_id": job_id, "problem": error.problem_type})
            return
        # A defect of a library must not stop the embedder for every other job.
        write_failure(folder, BadData(f"the images could not be embedded ({type(error).__name__})"))
        log.error("job failed", extra={"job_id": job_id}, exc_info=error)

    def _embed(self, lane: str, job_id: str, folder: Path, *, until: float) -> None:
        """Write public.shard, as far as the slice reaches."""
        try:
            request = self._board.read(lane, job_id)
        except FileNotFoundError:
            raise _JobEnded from None
        backbone = self._backbone(request.fingerprint)
        upload = folder / UPLOAD

        def look() -> None:
            if self._stop.is_set():
                raise Interrupted("stopped while embedding; another embedder goes on from here")
            if not self._board.is_wanted(lane, job_id):
                raise _JobEnded

        def progress(done: int, total: int) -> None:
            look()
            say("Embedding", done, total)
            if done < total and self._is_over(lane, until):
                raise _SliceOver

        look()
        with (
            saying_progress(folder) as say,
            _decoder(upload, backbone, request, look, lambda: self._is_over(lane, until)) as load,
        ):
            embed_source(
                upload,
                backbone,
                folder / SHARD,
                classes=(),
                public=True,
                thumbnails=False,
                progress=progress,
                embedder=lambda network, _, indices: embedded_batches(network, load(indices.start)),
            )
        fault_point("embedder.embedded")

    def _backbone(self, fingerprint: str) -> Backbone:
        """Return the backbone of a task, loaded once.

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
def _decoder(
    upload: Path, backbone: Backbone, request: EmbedRequest, look: Callable[[], None], is_over: Callable[[], bool]
) -> Iterator[Callable[[int], Generator[list[LoadedImage]]]]:
    """Yield batches of images from the decoder's process, as many as come within a moment; it ends with the block."""
    transform = Transform.model_validate(backbone.spec["transform"])
    limits = PixelLimits(request.max_pixels, request.max_job_pixels)
    with ExitStack() as processes:

        def load(start: int) -> Generator[list[LoadedImage]]:
            images = decoded_images(upload, transform, limits, start=start, look=look)
            processes.enter_context(closing(images))
            batch: list[LoadedImage] = []
            until = time.monotonic() + BATCH_S
            for index, pixels in enumerate(images, start):
                if isinstance(pixels, UnusableImage):
                    raise _unasked(upload, pixels, images, is_over)
                batch.append(LoadedImage(index, pixels, None, ""))
                if len(batch) >= max(BATCH_IMAGES, backbone.batch_size) or time.monotonic() >= until:
                    yield batch
                    batch = []
                    until = time.monotonic() + BATCH_S
            if batch:
                yield batch

        yield load


def _unasked(
    upload: Path,
    first: UnusableImage,
    others: Generator[NDArray[np.uint8] | UnusableImage],
    is_over: Callable[[], bool],
) -> UnreadableImage:
    """Return the error of a job with an unusable image, with the other unusable ones found until the slice is over.

    Otherwise a requester that sent twenty would hear of them one by one.
    """
    found, all_were_looked_at = [first], False
    while len(found) < MOST_NAMED and not found[-1].is_last and not is_over():
        image = next(others, None)
        if image is None:
            all_were_looked_at = True
            break
        if isinstance(image, UnusableImage):
            found.append(image)
    names = _names_of(upload, [one.index for one in found])
    bad = [Skipped(name, one.reason) for name, one in zip(names, found, strict=True)]
    return unasked(bad, all_were_looked_at=all_were_looked_at)


@contextmanager
def _signs_of_life(mailbox: Mailbox) -> Iterator[None]:
    """Report that an embedder is there while the block runs, however long a job takes."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            with suppress(TryAgain):
                mailbox.show_life(ROLE, for_s=ALIVE_S)
                tell_ready()
            if ended.wait(HEARTBEAT_S):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _names_of(upload: Path, rows: Sequence[int]) -> list[str]:
    """Return the names a requester gave to images."""
    with suppress(pa.ArrowException, KeyError, OSError, IndexError):
        names = pq.read_table(upload, columns=["name"])["name"]
        return [str(names[row].as_py()) for row in rows]
    return [f"number {row}" for row in rows]
