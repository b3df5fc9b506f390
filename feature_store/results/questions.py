"""The files of a job's questions: what the embedder is asked for, and the questions as stored or why there are none.

The same questions are the same bytes, so that a file made twice is one file. A request to the embedder is one small
file per job, in a folder per requester, next to the folder of jobs.

    HOME/embedding/LANE/JOB.json        there while the job waits for features; LANE stands for the requester.

The coordinator writes a file as long as a job waits and takes it away when the job ends. Between two images the
embedder looks for the file. So work ends with its job, whatever dies.

A lane is one requester. Lanes take turns (`EmbedBoard.turn`), and so do the jobs of a lane: a requester who sends much
delays only their own jobs. A turn is a lock on a file of its lane, LANE/turn, which the system frees when its holder
dies. The file says how often a turn was begun since one has ended, and its time when that was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labeler.errors import BadData, LabelerError, OutputInUse, TryAgain, UnreadableImage
from labeler.release import arrays_from_bytes, arrays_to_bytes
from labeler.system.files import exclusive, replace_file, replacing

if TYPE_CHECKING:
    from feature_store.decode import Skipped

QUESTIONS: Final = "questions.safetensors"
FAILURE: Final = "failed.json"
UPLOAD: Final = "upload.parquet"
SHARD: Final = "public.shard"
LABELS: Final = "labels.parquet"
IMAGE_LABELS: Final = "image-labels.parquet"
STUDENT: Final = "student.safetensors"
MOST_NAMED: Final = 10
"""So many images that cannot be asked about are named in one refusal."""

IMAGE_FAILURE: Final = "image-labels.json"
"""Why the images of a job have no labels."""

PROGRESS: Final = "progress"
"""Percent of the work on a job that its process has done; for people who wait, and nothing depends on it."""


@dataclass(frozen=True, eq=False)
class StoredQuestions:
    """The questions of a job.

    Attributes:
        features: int16, shape (queries, dimension), quantized.
        rows: the image that each answer is about, or -1 for the center of a cluster.
        assignment: shape (images,): the answer that stands for each image.
        images: features of all images, where a model is asked for that will label them.
        fingerprint: of the backbone.
        backbone: its name, for people; may be empty.
    """

    features: NDArray[np.int16]
    rows: NDArray[np.int64]
    assignment: NDArray[np.int64]
    images: NDArray[np.int16] | None
    fingerprint: str
    backbone: str

    @property
    def asks_clusters(self) -> bool:
        """True if queries are centers of clusters rather than images."""
        return bool((self.rows < 0).any())

    def to_bytes(self) -> bytes:
        """As it is stored."""
        arrays: dict[str, NDArray[np.generic]] = {
            "features": self.features,
            "rows": self.rows,
            "assignment": self.assignment,
        }
        if self.images is not None:
            arrays["images"] = self.images
        metadata = {"fingerprint": self.fingerprint, "backbone": self.backbone}
        return arrays_to_bytes(arrays, metadata)


def read_stored_questions(path: Path) -> StoredQuestions:
    """Everything that is stored of a job's questions.

    Raises:
        BadData: the file cannot be read, or something is missing in it.
    """
    try:
        arrays, metadata = arrays_from_bytes(path.read_bytes())
        return StoredQuestions(
            features=arrays["features"],
            rows=arrays["rows"].astype(np.int64),
            assignment=arrays["assignment"].astype(np.int64),
            images=arrays.get("images"),
            fingerprint=metadata.get("fingerprint", ""),
            backbone=metadata.get("backbone", ""),
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadData(f"stored questions cannot be read ({type(error).__name__})") from None


def read_questions(path: Path) -> NDArray[np.int16]:
    """The questions alone, as they are asked, shape (queries, dimension).

    Raises:
        BadData: the file cannot be read, or holds no quantized features.
    """
    try:
        features: NDArray[np.int16] = arrays_from_bytes(path.read_bytes())[0]["features"]
    except (OSError, ValueError, KeyError):
        raise BadData("the prepared questions cannot be read; submit the job again") from None
    if features.dtype != np.int16 or features.ndim != 2:
        raise BadData("the prepared questions are not quantised features; submit the job again")
    return features


def unasked(images: Sequence[Skipped], *, all_were_looked_at: bool = True) -> UnreadableImage:
    """Explain why a job asks nothing: a question must not vanish silently, nor the labels of others move to its place.

    Args:
        images: that cannot be asked about, at least one; the first `MOST_NAMED` are named.
        all_were_looked_at: whether the others can be.
    """
    if len(images) == 1 and all_were_looked_at:
        return UnreadableImage(
            f"the image {images[0].source!r} cannot be asked about: {images[0].reason}. Take it out and submit again"
        )
    named = "; ".join(f"{one.source[:100]!r} ({one.reason})" for one in images[:MOST_NAMED])
    count = f"{'' if all_were_looked_at else 'at least '}{len(images)}"
    more = "" if len(images) <= MOST_NAMED else f"; and {len(images) - MOST_NAMED} more"
    return UnreadableImage(
        f"{count} of the images cannot be asked about: {named}{more}. Take them out and submit again"
    )


def write_failure(folder: Path, error: LabelerError, *, name: str = FAILURE) -> None:
    """Say why a job cannot go on, or why its images have no labels (`IMAGE_FAILURE`), for the coordinator."""
    content = {"problem_type": error.problem_type, "sentence": str(error)}
    replace_file(folder / name, json.dumps(content).encode(), mode=0o600)


def read_failure(path: Path) -> LabelerError:
    """Return the reason why questions or labels could not be prepared, as an error of the tree."""
    try:
        found = json.loads(path.read_bytes())
        return named_error(str(found["problem_type"]), str(found["sentence"]))
    except (OSError, ValueError, KeyError, TypeError):
        return BadData("the questions could not be prepared, and the reason cannot be read; submit the job again")


@contextmanager
def saying_progress(folder: Path) -> Iterator[Callable[[str, int, int], None]]:
    """Keep PROGRESS in a job's folder while the block works on it.

    Yields:
        Called with what is being done, the steps done, and their number.
    """

    said = -1

    def say(_: str, done: int, total: int) -> None:
        nonlocal said
        before, said = said, 100 * done // total
        if said != before:
            with suppress(OSError):  # A full disk or a forgotten job is found by the work itself.
                replace_file(folder / PROGRESS, b"%d" % said, mode=0o600)

    try:
        yield say
    finally:
        forget_progress(folder)


def forget_progress(folder: Path) -> None:
    """Remove PROGRESS, also after a process that was killed."""
    with suppress(OSError):
        (folder / PROGRESS).unlink()


def read_progress(folder: Path) -> int | None:
    """Return the percent that is done of the work on a job; None where no process works on it."""
    with suppress(OSError), (folder / PROGRESS).open("rb") as file:
        said = file.read(3)
        return min(int(said), 100) if said.isdigit() else None
    return None


def named_error(problem_type: str, sentence: str) -> LabelerError:
    """The error of the tree with this problem type, so that a refusal in another process, or kept, keeps its type."""
    kinds: list[type[LabelerError]] = [LabelerError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.problem_type == problem_type and not issubclass(kind, TryAgain):
            return kind(sentence)
    return BadData(sentence)


MAX_PIXELS: Final = 64_000_000
MAX_JOB_PIXELS: Final = 8_000_000_000

_FOLDER = "embedding"
_SUFFIX = ".json"
_TURN = "turn"


class EmbedRequest(BaseModel):
    """Features of which images are wanted.

    Attributes:
        fingerprint: of the task's backbone.
        max_pixels: of one image, width times height.
        max_job_pixels: of all images of the job together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    fingerprint: str
    max_pixels: Annotated[int, Field(ge=1)] = MAX_PIXELS
    max_job_pixels: Annotated[int, Field(ge=1)] = MAX_JOB_PIXELS


def lane_of(owner: str) -> str:
    """The lane of a requester: a name that is safe as a folder."""
    return hashlib.sha256(b"labeler-lane/1\n" + owner.encode()).hexdigest()[:16]


def job_pixels_refusal(images: int, pixels: int, most: int) -> str:
    """The sentence that refuses a job for the pixels of its images together."""
    return (
        f"the first {images} images have {pixels} pixels together, more than the {most} that one job may have; send "
        "smaller images (a backbone looks at a few hundred pixels a side), or make several jobs of it"
    )


class EmbedBoard:
    """The requests of one coordinator's home; every method may be called by any process at any time."""

    def __init__(self, home: Path) -> None:
        self._folder = home / _FOLDER

    def put(self, owner: str, job_id: str, request: EmbedRequest) -> None:
        """Ask for the features of a job; asking again changes nothing."""
        path = self._path(lane_of(owner), job_id)
        while not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # an embedder removed the empty folder at this moment
                replace_file(path, request.model_dump_json().encode(), mode=0o600)

    @contextmanager
    def turn(self) -> Iterator[tuple[str, int] | None]:
        """Hold the lane whose turn is longest ago, of those in which jobs wait and that no other embedder holds.

        Yields:
            The lane, and how often a turn of it was begun since one has ended, this one counted. A high number says
            that its first job ends every process that takes it. None where no job waits.
        """
        with ExitStack() as held:
            for lane in self._lanes_in_turn():
                turn = self._folder / lane / _TURN
                try:
                    held.enter_context(exclusive(turn, "the jobs of a requester"))
                except (OutputInUse, FileNotFoundError):
                    continue
                begun = int(turn.read_text() or 0) + 1
                turn.write_text(str(begun))
                try:
                    yield lane, begun
                finally:
                    turn.write_text("")  # now it is the last one
                    if not self.jobs(lane):
                        turn.unlink()
                        self._remove_empty(lane)
                return
            yield None

    def withdraw(self, job_id: str) -> bool:
        """Ask no more for a job, and tell whether anything was asked. Its worker stops at the next image."""
        found = list(self._folder.glob(f"*/{job_id}{_SUFFIX}"))
        for path in found:
            path.unlink(missing_ok=True)
            self._remove_empty(path.parent.name)
        return bool(found)

    def jobs(self, lane: str) -> list[str]:
        """Jobs of a lane that wait, whose turn is longest ago first."""
        waiting = []
        with suppress(FileNotFoundError):
            for entry in os.scandir(self._folder / lane):
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):
                        waiting.append((entry.stat().st_mtime_ns, entry.name.removesuffix(_SUFFIX)))
        return [job_id for _, job_id in sorted(waiting)]

    def all_jobs(self) -> list[str]:
        """Every job that waits, in no order."""
        return [job_id for lane in self._lanes() for job_id in self.jobs(lane)]

    def has_other_lanes(self, lane: str) -> bool:
        """Tell whether another requester waits too."""
        return any(self.jobs(other) for other in self._lanes() if other != lane)

    def is_wanted(self, lane: str, job_id: str) -> bool:
        """Tell whether the job still waits."""
        return self._path(lane, job_id).exists()

    def read(self, lane: str, job_id: str) -> EmbedRequest:
        """Return the request for a job.

        Raises:
            BadData: it cannot be read.
            FileNotFoundError: it was withdrawn.
        """
        try:
            return EmbedRequest.model_validate_json(self._path(lane, job_id).read_bytes())
        except ValidationError:
            raise BadData("the request for features cannot be read; submit the job again") from None

    def to_the_end(self, lane: str, job_id: str) -> None:
        """After a slice of work: the other jobs of the lane come first."""
        with suppress(FileNotFoundError):
            os.utime(self._path(lane, job_id))

    def done(self, lane: str, job_id: str) -> None:
        """Take a request off, after its result is durable."""
        self._path(lane, job_id).unlink(missing_ok=True)

    def _lanes_in_turn(self) -> list[str]:
        """Lanes in which jobs wait, whose turn, or whose first job, is longest ago first."""
        waiting = []
        for lane in self._lanes():
            with suppress(FileNotFoundError, IndexError):
                first = self._path(lane, self.jobs(lane)[0])
                turn = first.with_name(_TURN)
                waiting.append(((turn if turn.exists() else first).stat().st_mtime_ns, lane))
        return [lane for _, lane in sorted(waiting)]

    def _remove_empty(self, lane: str) -> None:
        with suppress(OSError):  # somebody has put a job there
            (self._folder / lane).rmdir()

    def _lanes(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self._folder) if entry.is_dir()]
        return []

    def _path(self, lane: str, job_id: str) -> Path:
        if Path(lane).name != lane or Path(job_id).name != job_id:
            raise BadData("no requester and no job has such a name")
        return self._folder / lane / f"{job_id}{_SUFFIX}"


def read_parquet(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table in a file of ours, with the metadata of its schema.

    `pyarrow.parquet.read_table` makes a data set of whatever it is given, which takes several times as long as reading
    a small file.

    Args:
        columns: only these, in this order; all where absent.

    Raises:
        OSError: the file cannot be read; FileNotFoundError where there is none.
        pyarrow.ArrowException: it is no Parquet file, or is damaged.
        KeyError: it lacks a column.
    """
    with path.open("rb") as opened, pq.ParquetFile(opened) as file:
        found = file.read(columns=None if columns is None else list(columns), use_threads=False)
    return found if columns is None else found.select(list(columns))


def write_parquet(table: pa.Table, path: Path, *, mode: int = 0o644) -> None:
    """Write a Parquet file whole or not at all."""
    with replacing(path, mode=mode) as temporary, temporary.open("wb") as file:
        pq.write_table(table, file)
