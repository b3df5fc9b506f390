"""What the embedder is asked for: one small file per job, in a folder per requester, beside the jobs.

    HOME/embedding/LANE/JOB.json        there while the job waits for features; LANE stands for who asks

The coordinator writes a file as long as a job waits and takes it away when the job ends; the embedder looks between
two images whether it is still there. So work ends with its job, whoever dies.

A lane is one requester. Lanes take turns (`EmbedBoard.turn`), and so do the jobs of a lane: whoever sends much waits
for itself. A turn is a lock on a file of its lane, LANE/turn, which the system frees when its holder dies. The file
says how often a turn was begun since one has ended, and its time when that was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labeler.errors import BadData, OutputInUse
from labeler.system.files import exclusive, replace_file

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
            The lane, and how often a turn of it was begun since one has ended, this one counted: a high number says
            that its first job ends whoever takes it. None where nobody waits.
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
        """Ask no more for a job; whether anything was asked. Whoever works on it stops at the next image."""
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
        """Whether somebody else waits too."""
        return any(self.jobs(other) for other in self._lanes() if other != lane)

    def is_wanted(self, lane: str, job_id: str) -> bool:
        """Whether the job still waits."""
        return self._path(lane, job_id).exists()

    def read(self, lane: str, job_id: str) -> EmbedRequest:
        """What is asked for.

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
