"""Calls of a notebook: embed images, plan a job, run it in the same process, or ask a running service."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self

import numpy as np

from api.client import Client, made
from api.schema import LabelsOf, Selection, TaskRequest
from feature_store.backbones.spec import DEFAULT_BACKBONE
from labeler.errors import InvalidSetting, JobNotCompleted
from labeler.methods import DEFAULT_METHOD, MethodName
from labeler.rounds.effects import AskedStrategy, StudentKind
from labeler.setting import DEFAULT_DELTA
from labeler.system.files import named_path
from workers.notebook.job import Frame, LabeledJob, TrainedStudent, framed, load_student
from workers.plan import PlanRequest, make_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from feature_store.embedding import Duplicates
    from feature_store.own_features import Column, FittedOn
    from feature_store.sources import PersonColumn

P = ParamSpec("P")

SHARD_SUFFIX = ".shard"


@dataclass(frozen=True)
class EmbeddedImages:
    """Images that were turned into a shard of features.

    Attributes:
        path: the shard.
        records: how many images are in it. For a private shard this is its owner's to know.
        classes: in label order.
        fingerprint: of the backbone; shards of one job share it.
        skipped: images that could not be read, with the reason.
        copies, contradictions: private images that were left out because an identical one is kept, or because identical
            ones have different labels.
        listed: a table of them next to the shard, for its owner; None where there is none.
        passed_over: files that are certainly no images, with the reason.
    """

    path: Path
    records: int
    classes: tuple[str, ...]
    fingerprint: str
    skipped: tuple[tuple[str, str], ...] = ()
    copies: int = 0
    contradictions: int = 0
    listed: Path | None = None
    passed_over: tuple[tuple[str, str], ...] = ()

    @classmethod
    def _of(cls, told: dict[str, Any]) -> Self:
        skipped, passed_over = (
            tuple((one["source"], one["reason"]) for one in told[what]) for what in ("skipped", "passed_over")
        )
        listed = None if told["listed"] is None else Path(told["listed"])
        counts = told["copies"], told["contradictions"]
        facts = Path(told["out"]), told["records"], tuple(told["classes"]), told["fingerprint"]
        return cls(*facts, skipped, *counts, listed, passed_over)

    def __fspath__(self) -> str:
        return str(self.path)


def embed(
    source: str | Path | None = None,
    out: str | Path | None = None,
    *,
    features: str | Path | NDArray[Any] | None = None,
    ids: Column | None = None,
    labels: Column | None = None,
    backbone_name: str | None = None,
    fitted_on: FittedOn | None = None,
    probe: str | Path | NDArray[Any] | None = None,
    backbone: str | Path = DEFAULT_BACKBONE,
    architecture: str | None = None,
    classes: Sequence[str] | None = None,
    public: bool = False,
    persons: PersonColumn | Column | None = None,
    duplicates: Duplicates | None = None,
    max_records: int | None = None,
    quiet: bool = False,
) -> EmbeddedImages:
    """Turn images, or features of your own backbone, into a shard.

    A finished shard of the same images is used as it is, an interrupted one continues.

    Args:
        source: folder of class folders, Parquet file, or torchvision:NAME?root=DIR.
        out: the shard to write; next to the source when None (`scans` gives `scans.shard`).
        features: instead of a source, rows that you computed: an array of shape (n, d), or a file
            (feature_store.own_features).
        ids, labels: of these rows, or where their file has them.
        backbone_name, fitted_on: what made them, in a name that all parties use; and what that was fitted on: "public",
            "other-records" (private ones that never vote) or "voting-records", which is refused.
        probe: features of the published probe, by the same backbone.
        backbone, architecture: see feature_store.backbones.load_backbone; the default needs no download.
        classes: PUBLIC class names in label order. Private images need them.
        public: these are public images: thumbnails are kept for reports.
        persons: whose images are whose (feature_store.sources); of features a name each, too.
        duplicates: the treatment of identical private images: "keep-first" (the default: one of identical ones, and
            none under different labels), "refuse" or "keep-all".
        max_records: a public bound on private images, declared before they are counted; more are refused.
        quiet: no progress bar.

    Raises:
        BadData, InvalidSetting, IdenticalImages: see feature_store.embedding.embed_source.
    """
    from feature_store.sources import PersonColumn
    from workers.embedder.shards import embed_features, embed_images
    from workers.progress import progress_bars

    names = None if classes is None else tuple(classes)
    if (source is None) == (features is None):
        raise InvalidSetting("name one source: images, or features=... of your own backbone")
    if features is not None:
        rows = _file_or_array(features)
        if out is None and not isinstance(rows, Path):
            raise InvalidSetting("say where the shard of these features is to be written: out=...")
        made = embed_features(
            rows,
            _beside(str(rows)) if out is None else named_path(out, "out"),
            backbone_name=backbone_name,
            fitted_on=fitted_on,
            probe=None if probe is None else _file_or_array(probe),
            ids=ids,
            labels=labels,
            persons=persons,
            classes=names,
            public=public,
            duplicates=duplicates,
            max_records=max_records,
        )
        return EmbeddedImages._of(made)
    if source is None or not (persons is None or isinstance(persons, PersonColumn)):
        raise InvalidSetting("of images persons is a PersonColumn: a folder level, a table or a column")
    named_path(source, "source")
    path = _beside(source) if out is None else named_path(out, "out")
    with progress_bars(quiet=quiet) as progress:
        made = embed_images(
            source,
            backbone,
            path,
            architecture=architecture,
            classes=names,
            public=public,
            persons=persons,
            duplicates=duplicates,
            max_records=max_records,
            progress=progress,
        )
    return EmbeddedImages._of(made)


def _file_or_array(value: str | Path | NDArray[Any]) -> Path | NDArray[Any]:
    return Path(value) if isinstance(value, str | Path) else np.asarray(value)


def _beside(source: str | Path) -> Path:
    text = str(source)
    if "://" in text or text.startswith("torchvision:"):
        raise InvalidSetting(f"say where the shard of {text.partition('?')[0]!r} is to be written: out=...")
    path = Path(source)
    return path.with_name(path.name + SHARD_SUFFIX) if path.is_dir() else path.with_suffix(SHARD_SUFFIX)


@dataclass(frozen=True)
class Plan:
    """The price of a setting.

    Attributes:
        epsilon: per private image, at `delta`; None where nothing is bounded.
        agent_epsilon: per agent; None where nothing is bounded.
        sigma_votes: the noise nobody can subtract, in votes; None for methods whose noise is the agents' own.
        queries: how many questions.
        k: neighbors that vote.
        delta: at which the epsilons hold.
        holds_against: for whom, in words.
        document: everything `labeler plan --json` says.
        expected_accuracy: the shares of labels, from and to, that can be expected to be right; None where nothing can
            be said beforehand (labeler.expectation).
        warning: where noise drowns the votes: which price or number of records would do; empty otherwise.
        least_epsilon: with `accuracy` the range of the least epsilon for it: below the first it is out of reach, from
            the second on it is expected; None there if no epsilon is known to do. `epsilon` is the middle of
            rehearsals on labeled images, or without them the first. `document["least_epsilon"]` has the table and the
            reasons.
    """

    epsilon: float | None
    agent_epsilon: float | None
    sigma_votes: float | None
    queries: int
    k: int
    delta: float
    holds_against: str
    document: dict[str, Any]
    expected_accuracy: tuple[float, float] | None = None
    warning: str = ""
    least_epsilon: tuple[float, float | None] | None = None

    def __str__(self) -> str:
        from labeler.budget import say_epsilon

        agent = "no bound" if self.agent_epsilon is None else f"epsilon {say_epsilon(self.agent_epsilon)}"
        image = "no bound" if self.epsilon is None else f"epsilon {say_epsilon(self.epsilon)}"
        price = f"{self.queries} questions: {image} per private image, {agent} per agent (delta {self.delta:g})"
        right = (
            ""
            if self.expected_accuracy is None
            else "; {:.0%} to {:.0%} of labels right".format(*self.expected_accuracy)
        )
        least = ""
        if self.least_epsilon is not None:
            low, high = self.least_epsilon
            ends = f"{low:g} or more, and no upper end is known" if high is None else f"{low:g} to {high:g}"
            said = self.document["least_epsilon"]
            least = f". For {said['wanted']:.3g} of labels right: epsilon {ends}. Assumed: {said['assumed'][:-1]}"
        return price + right + least + (f". WARNING: {self.warning}" if self.warning else "")


def _by_fields(request: Callable[P, PlanRequest]) -> Callable[[Callable[[PlanRequest], Plan]], Callable[P, Plan]]:
    """Let a call take the fields of its request by their names, typed, with their words in its help."""
    fields = PlanRequest.model_fields
    named = [
        one.replace(default=None) if fields[one.name].default_factory else one
        for one in inspect.signature(request).parameters.values()
    ]
    own = inspect.Signature(named, return_annotation=Plan)
    words = "".join(f"\n    {name}: {one.description}" for name, one in fields.items())

    def decorate(call: Callable[[PlanRequest], Plan]) -> Callable[P, Plan]:
        @wraps(call)
        def by_fields(*nothing: P.args, **fields: P.kwargs) -> Plan:
            own.bind(*nothing, **fields)  # a TypeError, as of every call
            return call(PlanRequest.of(fields))

        vars(by_fields)["__signature__"] = own
        by_fields.__doc__ = f"{inspect.getdoc(call)}\n\nArgs:{words}"
        return by_fields

    return decorate


@_by_fields(PlanRequest)
def plan(request: PlanRequest) -> Plan:
    """Compute the price of a setting (`sigma`), or the setting for a price (`epsilon`) or for a share of right labels
    (`accuracy`); asks no agent. Its arguments are the fields of `workers.plan.PlanRequest`, each by its name.

    Raises:
        InvalidSetting: the request is incomplete, contradicts itself, or has no solution.
    """
    document = make_plan(request)
    expected, least = document["expected_accuracy"], document.get("least_epsilon")
    return Plan(
        epsilon=document["instance"]["epsilon"],
        agent_epsilon=document["agent"]["epsilon"],
        sigma_votes=document["sigma_votes"],
        queries=document["queries"],
        k=document["k"],
        delta=document["delta"],
        holds_against=document["holds_against"],
        document=document,
        expected_accuracy=None if expected["low"] is None else (expected["low"], expected["high"]),
        warning=document["warning"],
        least_epsilon=None if least is None else (least["low"], least["high"]),
    )


def run(
    shards: Sequence[PathLike[str] | str],
    images: PathLike[str] | str,
    out: str | Path,
    *,
    epsilon: float | None = None,
    delta: float = DEFAULT_DELTA,
    method: MethodName = DEFAULT_METHOD,
    k: int | None = None,
    queries: int | None = None,
    strategy: AskedStrategy = "clustered",
    student: StudentKind | None = None,
    test: PathLike[str] | str | None = None,
    backbone: str | None = None,
    allow_small_shards: bool = False,
    seed: int | None = None,
    quiet: bool = False,
    **task: Any,
) -> LabeledJob:
    """Label public images with private shards. An interrupted job continues in its folder, and is charged once.

    Args:
        shards: one for each agent, as `embed` returned them, or their paths.
        images: the public images: what `embed(..., public=True)` returned, or a folder together with `backbone`.
        out: the job's folder.
        epsilon: the price per private image that the noise is solved for; or give `sigma_votes` instead.
        delta: at which it holds.
        method, k: how agents answer (labeler.methods); k is the method's own where it is None.
        queries: the number of questions, each about a cluster of similar images. If None and the method asks questions,
            price, classes and number of public images decide (labeler.expectation). Nothing about an image depends on
            being asked about: every image gets a label.
        strategy: how clusters are found: "clustered", or "spectral" along the graph of nearest neighbors.
        student: which student labels all images; None for the usual one.
        test: a labeled public shard to score it on.
        backbone: for `images`, where that is a folder.
        allow_small_shards: let an agent with fewer than k records vote with what it has.
        seed: simulation: reproducible noise that protects nobody.
        quiet: no progress bar.
        **task: any other field of the task file's `[task]` (docs/task-file.md), for example colluding_agents=0.

    Raises:
        InvalidTask, InvalidSetting: a field is unknown or out of bounds, before anything is read.
        LabelerError: see labeler.errors; nothing is half-written, and what was opened stays paid for.
    """
    from workers.progress import progress_bars
    from workers.run.preparation import LabelingJob, open_shards
    from workers.run.task_file import make_task_file

    if isinstance(shards, (str, PathLike)):  # otherwise a text would be read letter by letter
        raise InvalidSetting(f"shards is a list, a shard for each agent; found one path: write [{str(shards)!r}]")
    folder, public = named_path(out, "out"), named_path(images, "images")
    private = tuple(named_path(shard, "a shard") for shard in shards)
    file = make_task_file(
        {"method": method, "delta": delta, "k": k, "epsilon": epsilon} | task,
        shards=private,
        images=public,
        out=folder,
        queries=queries,
        strategy=strategy,
        student=student,
    )
    job = LabelingJob(
        file=file,
        shards=private,
        queries=public,
        out=folder,
        test=None if test is None else named_path(test, "test"),
        backbone=backbone,
        allow_small_shards=allow_small_shards,
        seed=seed,
    )
    open_shards(job)  # reports a wrong path or class before anything large is loaded
    from workers.run.labeling import run_job

    with progress_bars(quiet=quiet) as progress:
        run_job(job, progress=progress)
    return LabeledJob(folder)


class Service:
    """A service and what it labeled for you; close it, or use it as a context manager.

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
        """Make a task (fields as in POST /v1/tasks); return its id. Costs nothing."""
        return self.client.create_task(made(TaskRequest, **fields)).task_id

    def label(
        self,
        task_id: str,
        images: str | Path | Sequence[str | Path],
        *,
        queries: int | None = None,
        strategy: AskedStrategy = "clustered",
        name: str = "",
        idempotency_key: str | None = None,
    ) -> str:
        """Submit images under a task and wait until the job is over; continues through restarts of the service.

        Args:
            task_id: the task under whose price it runs.
            images: a folder, a zip, a Parquet file, or image files.
            queries: the number of questions, each about a cluster of similar images; about every image when None.
            strategy: how clusters are found: "clustered", or "spectral" along the graph of nearest neighbors.
            name: for people.
            idempotency_key: give one to make a cell safe to run twice.

        Returns:
            The job's id.

        Raises:
            JobNotCompleted: the job ended otherwise; the message says how and why.
            ServiceProblem: the service refused, for example because the budget does not cover it.
        """
        selection = None if queries is None else made(Selection, strategy=strategy, count=queries)
        where = (
            named_path(images, "images")
            if isinstance(images, str | Path)
            else [named_path(one, "images") for one in images]
        )
        job = self.client.submit(task_id, images=where, selection=selection, name=name, idempotency_key=idempotency_key)
        return self._ended(job.job_id)

    def labels(self, job_id: str, frame: Frame = "pandas") -> Any:
        """Return the label of every image of a completed job, asked about or inferred, with a confidence
        (docs/labels.md).

        Args:
            job_id: the job.
            frame: "pandas", "polars" or "arrow".
        """
        return self._table(job_id, frame, "images")

    def questions(self, job_id: str, frame: Frame = "pandas") -> Any:
        """Return the questions and their released answers; see `labels` for the arguments."""
        return self._table(job_id, frame, "questions")

    def student(self, job_id: str) -> TrainedStudent:
        """Return the student that labeled the job's images, to label others."""
        with tempfile.TemporaryDirectory() as folder:
            return load_student(self.client.student(job_id, Path(folder) / "student.safetensors"))

    def evaluate(self, job_id: str, *, epsilon: float = 0.1, **settings: Any) -> dict[str, Any]:
        """Measure a job's student on the agents' records; waits for the result.

        Args:
            job_id: a completed job.
            epsilon: the price per private image.
            **settings: see api.client.Client.evaluate.

        Returns:
            The content of evaluation.json. Its "job_id" is of the evaluation: `student(job_id)` of that one is the same
            model, whose confidence is measured.

        Raises:
            JobNotCompleted: the evaluation ended otherwise; the message says how and why.
            ServiceProblem: the service refused.
        """
        asked = self._ended(self.client.evaluate(job_id, epsilon=epsilon, **settings).job_id)
        return self.client.evaluation(asked)

    def _ended(self, job_id: str) -> str:
        ended = self.client.wait(job_id)
        if ended.state != "completed":
            why = "" if ended.problem is None else f": {ended.problem.detail}"
            raise JobNotCompleted(f"job {ended.job_id} is {ended.state}{why}")
        return job_id

    def _table(self, job_id: str, frame: Frame, of: LabelsOf) -> Any:
        import pyarrow.parquet as pq

        with tempfile.TemporaryDirectory() as folder:
            return framed(pq.read_table(self.client.labels(job_id, Path(folder) / "labels.parquet", of=of)), frame)


def connect(url: str | None = None, token: str | None = None, *, ca_file: str | Path | None = None) -> Service:
    """Connect to a service by its address and your token, as `labeler up` prints them.

    Without arguments LABELER_URL, LABELER_TOKEN and LABELER_CA_FILE are read. A token of the environment goes only to
    the address in the same environment.

    Raises:
        InvalidSetting: the address is none, or would send the token over a network in clear; or one of the two is
            missing.
    """
    if url is None and token is None:
        url, token = os.environ.get("LABELER_URL"), os.environ.get("LABELER_TOKEN")
        ca_file = ca_file or os.environ.get("LABELER_CA_FILE")
    if not url or not token:
        raise InvalidSetting(
            "name the service by both, connect(url, token), or set LABELER_URL and LABELER_TOKEN, which `labeler up` "
            "prints"
        )
    return Service(Client(url, token, ca_file=None if ca_file is None else named_path(ca_file, "ca_file")))
