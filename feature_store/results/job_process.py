r"""The program that makes a job's questions and labels its images, in a process that the system bounds.

    jobs/JOB/upload.parquet          features a requester sent    \
    jobs/JOB/public.shard            features the embedder made    }-->  jobs/JOB/questions.safetensors, or failed.json

    jobs/JOB/labels.parquet          questions and released answers  \        image-labels.parquet
    jobs/JOB/questions.safetensors   what was asked                   }-->    student.safetensors
    jobs/JOB/upload.parquet, shard   names and features of images    /        or image-labels.json: why there are none
                                     of an evaluation                         evaluation.json, student.safetensors

    a task whose winners are released                      -->    prices/KIND.json: C(1), C(2), ... of its questions

With arguments it chooses the questions of one job and ends: choosing clusters may take minutes and gigabytes. Another
process calls `write_questions` itself for a few vectors. Without arguments it reads orders to label from its input, a
line of JSON each, and answers each with an exit code on a line. It stays for further jobs, because loading its
libraries takes longer than a small one. So no coordinator grows with the size of its jobs. All it reads is public or
released: what it makes is post-processing, and costs no privacy. The same files give the same results.
"""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from feature_store.decode import Skipped
from feature_store.query_selection import select_queries
from feature_store.results.image_labels import ImageStamp, has_budgets, image_label_table, with_image_budgets
from feature_store.results.models import RELEASED, ReleasedModels, model_file
from feature_store.results.pseudo_labels import QuestionNames, label_released, query_rows, task_of
from feature_store.results.questions import (
    IMAGE_FAILURE,
    IMAGE_LABELS,
    LABELS,
    QUESTIONS,
    SHARD,
    STUDENT,
    UPLOAD,
    StoredQuestions,
    read_parquet,
    read_stored_questions,
    saying_progress,
    unasked,
    write_failure,
    write_parquet,
)
from feature_store.shard import Shard, check_features
from labeler.errors import BadData, InvalidSetting, LabelerError, NotReady
from labeler.ledger.jobs import JobRecord
from labeler.methods.evaluate import Scored
from labeler.query_budgets import running_prices
from labeler.rounds.effects import Strategy
from labeler.system.files import is_full, replace_file
from labeler.system.process_pool import bound_process, serve_process, start_process
from labeler.task import Task, describe_validation, parse_task

CHOOSING_CPU_S: Final = 600
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
        BadData: the features cannot be read, or are not quantized ones.
        InvalidSetting: the request does not fit them.
        NotReady: the embedder has not made them.
        UnreadableImage: of some images it has made none, a blank one for example.
    """
    features = given_features(folder / UPLOAD) if request.source == "features" else _embedded(folder / SHARD)
    with saying_progress(folder) as progress:
        queries = select_queries(
            features, strategy=request.strategy, count=request.count, seed=request.seed, progress=progress
        )
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
    """Features a requester sent, checked to be quantized ones.

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


def read_names(folder: Path, job: JobRecord) -> tuple[StoredQuestions, QuestionNames]:
    """Read a job's questions and their names, from its upload and its stored choice of questions.

    Raises:
        BadData: a file is missing or damaged.
    """
    try:
        questions = read_stored_questions(folder / QUESTIONS)
        sources = read_parquet(folder / UPLOAD, columns=["name"])["name"].to_pylist()
        is_there = job.source == "features" or (folder / SHARD).exists()
        rows = query_rows(
            questions.rows,
            questions.assignment,
            centres=questions.features,
            images=_image_features(folder, job.source) if questions.asks_clusters and is_there else None,
        )
        kind = "cluster" if questions.asks_clusters else None if job.source == "features" else "query"
        names = QuestionNames.of(rows, sources, kind=kind)
    except (OSError, BadData, pa.ArrowException, KeyError, IndexError) as error:
        raise BadData(
            f"what job {job.job_id} asked cannot be read ({type(error).__name__}); restore its folder "
            "in jobs/ from a backup"
        ) from None
    answers = job.images if job.strategy == "weights" else job.num_queries
    if len(names.sources) != answers:
        raise BadData(f"job {job.job_id} has {answers} answers, but its folder names {len(names.sources)}")
    return questions, names


def _image_features(folder: Path, source: str) -> NDArray[np.int16]:
    """Return the features of all images, as sent or as the embedder stored them."""
    if source == "features":
        return given_features(folder / UPLOAD)
    return np.asarray(Shard.open(folder / SHARD, verify=False).features)


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


def choose(folder: Path, request: str, feature_bytes: int) -> int:
    """Choose for one job; the exit code says whether there is an answer (0), or no room for one."""
    bound_process(ROOM_BYTES + COPIES * feature_bytes, CHOOSING_CPU_S)
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


LABELING_CPU_S: Final = 1800
IDLE_S: Final = 60.0
"""How long it waits for another order; then it ends, which gives its memory back."""

BYTES_PER_IMAGE: Final = 32 * 2**10
"""Beside them: a block of similarities to every image, its order, and labels."""


class LabelingOrder(BaseModel):
    """A job to label, with what the journal knows of it.

    Attributes:
        contributors: how many agents' noise is in the answers, at most.
        card: see `labeler.privacy_card.privacy_card`.
        privacy: see `labeler.privacy_card.guarantee`.
        is_seeded: whether any noise came from a known seed.
        created_at: ISO 8601, UTC.
        rounds: of a task about attributes, whose counts are read as shares: how many questions each round asked, and of
            how many agents a sum was opened (0: of none).
        source: whether the embedder made the features, or the requester sent them.
        backbone: the name that loads the backbone, where one does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    folder: str
    job_id: str
    task_digest: str
    classes: tuple[str, ...]
    contributors: Annotated[int, Field(ge=1)]
    card: dict[str, Any]
    privacy: dict[str, Any]
    is_seeded: bool
    created_at: str
    source: Literal["images", "features"]
    backbone: str = ""
    rounds: tuple[tuple[int, int], ...] = ()

    @property
    def released(self) -> ReleasedModels:
        """The record of models that this service released: `released/` in its home. It outlives a job's files."""
        return ReleasedModels(Path(self.folder).parent.parent / RELEASED)


def label_job(order: LabelingOrder) -> None:
    """Write the labels of every image of a job, and its student; the labels last.

    Raises:
        BadData: nothing was answered, or a file cannot be read.
    """
    folder = Path(order.folder)
    questions = read_stored_questions(folder / QUESTIONS)
    features = _image_features(folder, order.source) if questions.images is None else questions.images
    try:
        table = pq.read_table(folder / LABELS)
        sources = pq.read_table(folder / UPLOAD, columns=["name"])["name"].to_pylist()
    except (OSError, pa.ArrowException, KeyError):
        raise BadData("what the job asked and got cannot be read; restore its folder from a backup") from None
    task = task_of(table)[0]
    if task.traits.labels is None:
        _write_evaluation(folder, order, task, questions.features, table)
        return
    is_several = task.attributes_per_record is not None
    contributors = np.array([order.contributors])
    if is_several:
        contributors = np.repeat([own for _, own in order.rounds], [asked for asked, _ in order.rounds])
    with saying_progress(folder) as progress:
        said = label_released(
            table,
            questions=questions.features,
            rows=questions.rows,
            assignment=questions.assignment,
            images=features,
            contributors=contributors,
            progress=progress,
        )
    stamp = ImageStamp(
        task_digest=order.task_digest,
        task_name=task.name,
        job_id=order.job_id,
        classes=order.classes,
        privacy=order.privacy,
        is_seeded=order.is_seeded,
        created_at=order.created_at,
    )
    rows = image_label_table(
        stamp, sources=sources, probabilities=said.probabilities, asked=said.asked, several=is_several
    )
    if has_budgets(table):
        rows = with_image_budgets(rows, table)
    student = model_file(
        said.student.arrays,
        kind=said.student.kind,
        classes=order.classes,
        card=order.card,
        backbone=order.backbone,
        job_id=order.job_id,
    )
    order.released.add(student)
    replace_file(folder / STUDENT, student, mode=0o600)
    write_parquet(rows, folder / IMAGE_LABELS, mode=0o600)


def _write_evaluation(
    folder: Path, order: LabelingOrder, task: Task, question: NDArray[np.int16], table: pa.Table
) -> None:
    """Write what an evaluation found, and the model with its confidence measured in the student's place."""
    from feature_store.results.evaluations import (
        EVALUATION,
        evaluation_bytes,
        evaluation_document,
        measured_model,
        released_model,
    )

    votes = np.array(table["noisy_votes"].to_pylist(), dtype=np.float64)
    document = evaluation_document(
        task,
        question,
        votes,
        contributors=order.contributors,
        card=order.card,
        job_id=order.job_id,
        created_at=order.created_at,
        released=order.released,
    )
    model = Scored.of_rows(question).model
    released_model(model, name="the evaluated model")
    measured = measured_model(model, document, released=order.released)
    order.released.add(measured)
    replace_file(folder / STUDENT, measured, mode=0o600)
    replace_file(folder / EVALUATION, evaluation_bytes(document), mode=0o600)


# The program.


def serve(arguments: Sequence[str], orders: BinaryIO, answers: BinaryIO) -> int:
    """Choose questions for the job that the arguments name; without any, label jobs as they are ordered."""
    if arguments:
        return choose(Path(arguments[0]), arguments[1], int(arguments[2]))
    label_ordered(orders, answers)
    return 0


def label_ordered(orders: BinaryIO, answers: BinaryIO) -> None:
    """Label every job that is ordered, or write prices, until no order has come for a while."""
    while select.select([orders], [], [], IDLE_S)[0] and (line := orders.readline()):
        wanted = json.loads(line)
        if "prices" in wanted:
            bound_process(ROOM_BYTES, LABELING_CPU_S)
            code = write_prices(Path(wanted["prices"]["path"]), **wanted["prices"]["of"])
        else:
            room = ROOM_BYTES + COPIES * wanted["feature_bytes"] + BYTES_PER_IMAGE * wanted["images"]
            bound_process(room, LABELING_CPU_S)
            code = _labeled(LabelingOrder.model_validate(wanted["order"]))
        answers.write(b"%d\n" % code)
        answers.flush()


def write_prices(path: Path, *, task: dict[str, Any], queries: int) -> int:
    """Write the prices of up to a number of a task's questions (`labeler.query_budgets.running_prices`)."""
    prices = running_prices(parse_task(task), queries)
    try:
        replace_file(path, json.dumps({"queries": queries, "prices": prices}).encode(), mode=0o600)
    except OSError as error:
        if not is_full(error):
            raise
        return DISK_IS_FULL
    return 0


def _labeled(order: LabelingOrder) -> int:
    """Label a job; the exit code says whether there was room on the disk."""
    try:
        label_job(order)
    except LabelerError as error:
        write_failure(Path(order.folder), error, name=IMAGE_FAILURE)
    except FileNotFoundError:
        pass  # forgotten meanwhile
    except OSError as error:
        if not is_full(error):
            raise
        return DISK_IS_FULL
    return 0


# Its other side.

_MODULE: Final = "feature_store.results.job_process"
_LOOK_S: Final = 0.25


class JobProcess:
    """A process that works on one job after the other; an order starts it if it is not running."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def carry_out(self, order: bytes, *, is_over: Callable[[], bool]) -> int | None:
        """Send an order and wait for its exit code; None if the process has ended or `is_over` says so."""
        if self._process is None:
            self._process = start_process(_MODULE, stdin=subprocess.PIPE, answers=True)
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None  # noqa: S101, PT018  # pipes were asked for
        try:
            orders.write(order + b"\n")
            orders.flush()
            poll = select.poll()
            poll.register(answers, select.POLLIN)
            while not poll.poll(1000 * _LOOK_S):
                if is_over():
                    return None
            return int(answers.readline())
        except (BrokenPipeError, ValueError):
            self.end()
            return None

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
        self._process = None


if __name__ == "__main__":
    serve_process(serve)
