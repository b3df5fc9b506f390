"""The questions of a job as they are stored, or the reason why there are none.

The same questions are the same bytes, so that a file made twice is one file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from labeler.errors import BadData, LabelerError, TryAgain, UnreadableImage
from labeler.system.files import replace_file

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


@dataclass(frozen=True, eq=False)
class StoredQuestions:
    """What a job asks.

    Attributes:
        features: int16, shape (queries, dimension), quantised.
        rows: the image that each answer is about, or -1 for the centre of a cluster.
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
        """Whether queries are centres of clusters rather than images."""
        return bool((self.rows < 0).any())

    def to_bytes(self) -> bytes:
        """As it is stored."""
        arrays = {"features": self.features, "rows": self.rows, "assignment": self.assignment}
        if self.images is not None:
            arrays["images"] = self.images
        metadata = {"fingerprint": self.fingerprint, "backbone": self.backbone}
        return _in_one_order(save({name: np.ascontiguousarray(one) for name, one in arrays.items()}, metadata))


def _in_one_order(data: bytes) -> bytes:
    """The same file with its metadata sorted: safetensors writes them in an order that differs by process."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def read_stored_questions(path: Path) -> StoredQuestions:
    """Everything that is stored of a job's questions.

    Raises:
        BadData: the file cannot be read, or something is missing in it.
    """
    try:
        arrays = load(path.read_bytes())
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        return StoredQuestions(
            features=arrays["features"],
            rows=arrays["rows"].astype(np.int64),
            assignment=arrays["assignment"].astype(np.int64),
            images=arrays.get("images"),
            fingerprint=metadata.get("fingerprint", ""),
            backbone=metadata.get("backbone", ""),
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise BadData(f"stored questions cannot be read ({type(error).__name__})") from None


def read_questions(path: Path) -> NDArray[np.int16]:
    """The questions alone, as they are asked, shape (queries, dimension).

    Raises:
        BadData: the file cannot be read, or holds no quantised features.
    """
    try:
        features = load(path.read_bytes())["features"]
    except (OSError, SafetensorError, KeyError):
        raise BadData("the prepared questions cannot be read; submit the job again") from None
    if features.dtype != np.int16 or features.ndim != 2:
        raise BadData("the prepared questions are not quantised features; submit the job again")
    return features


def unasked(images: Sequence[Skipped], *, all_were_looked_at: bool = True) -> UnreadableImage:
    """Why a job asks nothing: a question must not vanish silently, nor the labels of others move to its place.

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
    """Why the questions could not be prepared, or the images not labelled, as an error of the tree."""
    try:
        found = json.loads(path.read_bytes())
        return named_error(str(found["problem_type"]), str(found["sentence"]))
    except (OSError, ValueError, KeyError, TypeError):
        return BadData("the questions could not be prepared, and the reason cannot be read; submit the job again")


def named_error(problem_type: str, sentence: str) -> LabelerError:
    """The error of the tree with this problem type, so that a refusal in another process, or kept, keeps its type."""
    kinds: list[type[LabelerError]] = [LabelerError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.problem_type == problem_type and not issubclass(kind, TryAgain):
            return kind(sentence)
    return BadData(sentence)
