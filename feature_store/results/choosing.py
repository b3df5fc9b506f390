"""From the features of a job's images to its questions: a file that is there whole, or why there is none.

    jobs/JOB/upload.parquet    features a requester sent    \\
    jobs/JOB/public.shard      features the embedder made    }-->  jobs/JOB/questions.safetensors, or failed.json

Run as a program it does this for one job and ends: choosing clusters may take minutes and gigabytes, and both are
bounded by the system (`Room`). A few vectors are chosen from without it, by whoever calls `write_questions`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from feature_store.decode import Skipped
from feature_store.parquet_file import read_parquet
from feature_store.query_selection import select_queries
from feature_store.results.questions import (
    QUESTIONS,
    SHARD,
    UPLOAD,
    StoredQuestions,
    unasked,
    write_failure,
)
from feature_store.shard import Shard, check_features
from labeler.errors import BadData, InvalidSetting, LabelerError, NotReady
from labeler.rounds.effects import Strategy
from labeler.system.files import is_full, replace_file
from labeler.system.process_pool import bound_process
from labeler.task import describe_validation

CPU_S: Final = 600
ROOM_BYTES: Final = 2**30
COPIES: Final = 24
"""Copies of the features, as they were sent, that choosing may hold at once: as float32 and float64, and scaled."""

DISK_IS_FULL: Final = 75
"""Exit code: nothing is wrong with the job, and it is tried again."""


class QuestionRequest(BaseModel):
    """Which questions to make.

    Attributes:
        strategy, count, seed: see feature_store.query_selection.
        fingerprint: of the task's backbone.
        backbone: its name, for people; may be empty.
        source: whether the embedder made the features, or the requester sent them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    strategy: Strategy
    count: Annotated[int, Field(ge=1)] | None
    seed: Annotated[int, Field(ge=0)]
    fingerprint: str
    backbone: str = ""
    source: Literal["images", "features"]


def write_questions(folder: Path, request: QuestionRequest) -> None:
    """Write questions.safetensors of a job. The same features and request give the same bytes.

    Raises:
        BadData: the features cannot be read, or are not quantised ones.
        InvalidSetting: the request does not fit them.
        NotReady: the embedder has not made them.
        UnreadableImage: of some images it has made none, a blank one for example.
    """
    features = given_features(folder / UPLOAD) if request.source == "features" else _embedded(folder / SHARD)
    queries = select_queries(features, strategy=request.strategy, count=request.count, seed=request.seed)
    stored = StoredQuestions(
        features=queries.features,
        rows=queries.rows,
        assignment=queries.assignment,
        images=features if request.strategy == "weights" else None,  # What the model that is asked for will label.
        fingerprint=request.fingerprint,
        backbone=request.backbone,
    )
    replace_file(folder / QUESTIONS, stored.to_bytes(), mode=0o600)


def given_features(upload: Path) -> NDArray[np.int16]:
    """Features a requester sent, checked to be quantised ones.

    Raises:
        BadData: they are not, or cannot be read.
    """
    try:
        column = read_parquet(upload, columns=["feature"])["feature"]
    except (pa.ArrowException, KeyError, OSError):
        raise BadData("the uploaded features cannot be read; submit the job again") from None
    kind = column.type
    if not pa.types.is_fixed_size_list(kind) or kind.value_type != pa.int16() or column.null_count or not len(column):
        raise BadData("uploaded features must be a column feature of int16 lists of one length, none missing")
    values = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    features = np.ascontiguousarray(values.reshape(len(column), kind.list_size), dtype=np.int16)
    check_features(features)
    return features


def _embedded(shard: Path) -> NDArray[np.int16]:
    if not shard.exists():
        raise NotReady("the images of this job are not embedded yet")
    embedded = Shard.open(shard, verify=False)
    if embedded.skipped:
        # Rows of the shard stand for images of the upload by their place alone.
        raise unasked([Skipped(_name_of(shard.parent, one.source), one.reason) for one in embedded.skipped])
    return np.asarray(embedded.features)


def _name_of(folder: Path, source: str) -> str:
    """The name that a requester gave to an image, which the embedder numbers."""
    with suppress(pa.ArrowException, KeyError, OSError, IndexError, ValueError):
        return str(read_parquet(folder / UPLOAD, columns=["name"])["name"][int(source.rpartition("#")[2])].as_py())
    return source


# The program.


def main(folder: Path, request: str, feature_bytes: int) -> int:
    """Choose for one job; the exit code says whether there is an answer (0), or no room for one."""
    bound_process(ROOM_BYTES + COPIES * feature_bytes, CPU_S)
    try:
        try:
            write_questions(folder, QuestionRequest.model_validate_json(request))
        except ValidationError as error:
            raise InvalidSetting(describe_validation(error, "the request for questions")) from None
    except LabelerError as error:
        write_failure(folder, error)
    except OSError as error:
        if not is_full(error):
            raise
        return DISK_IS_FULL
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
