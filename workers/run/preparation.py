"""Checks and price of a job before any agent is asked, in one pass: a shard is opened once, a price computed once."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from feature_store.backbones.spec import loadable_name
from feature_store.index.build import current_name, engine_of_job, load_engine
from feature_store.query_selection import QuerySet, known_axes, select_queries
from feature_store.results.evaluations import question_of, released_model, stated_beside
from feature_store.results.models import model_file, read_model_bytes
from feature_store.results.pseudo_labels import QuestionNames, query_rows
from feature_store.shard import Shard, check_compatible
from feature_store.students import Student
from labeler.batching import BATCH_QUERIES, check_round_fits, round_sizes, total_charges
from labeler.budget import budget_for, short_epsilon
from labeler.errors import BadData, BudgetExceeded, InvalidSetting, InvalidTask, MixedShards
from labeler.expectation import assumed_records, axes_for
from labeler.methods import METHODS
from labeler.planning import Price, price
from labeler.records import UNDECLARED_RECORDS
from labeler.rounds.effects import StudentKind
from labeler.settings import check_names_are_text, given, misspelt, one_spelling, same_names
from labeler.solving import ways_to_fit
from labeler.system.files import check_folder
from labeler.tally import QueryBatch
from labeler.task import Level, Task, describe_validation
from workers.learning.learner import Trainer
from workers.progress import ProgressCallback, silent
from workers.run.folder import JobFolder
from workers.run.task_file import TaskFile


@dataclass(frozen=True)
class LabelingJob:
    """The inputs of a job: images to label, private shards, and the output folder.

    Attributes:
        file: the task file.
        shards: one private shard per agent.
        queries: a public shard, or a folder of public images (then `backbone` says how to embed them).
        test: a labeled public shard to score the student on.
        allow_small_shards: let an agent with fewer than k records vote with what it has. Refusing is the default
            because it is nearly always a mistake. In a federation of several owners the agent always votes, since a
            refusal would tell the others how few records it has.
        seed: makes noise and ids reproducible; a simulation that protects nobody.
        winner: how winners are found: "plain" adds the sums in this process, which sees everything anyway; "secure"
            computes them as talliers that distrust each other do.
    """

    file: TaskFile
    shards: tuple[Path, ...]
    queries: Path
    out: Path
    test: Path | None = None
    backbone: str | None = None
    allow_small_shards: bool = False
    seed: int | None = None
    engine: str = "auto"
    memory_limit_bytes: int | None = None
    winner: Literal["plain", "secure"] = "plain"


@dataclass(frozen=True, eq=False)
class PublicImages:
    """Public images with their features.

    Attributes:
        shard: their source; its deleted rows are not seen here.
        rows: which of its rows, shape (n,).
        classes: the task's class list, in which `labels` are places.
    """

    shard: Shard
    rows: NDArray[np.int64]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, shard: Shard, classes: Sequence[str]) -> PublicImages:
        """Return all images of a shard."""
        return cls(shard, shard.rows, tuple(classes))

    @classmethod
    def labelled(cls, shard: Shard, classes: Sequence[str]) -> PublicImages:
        """Return the images of a shard whose truth is known, to score on."""
        labels = shard.labels_as(classes)[shard.rows]
        return cls(shard, shard.rows[(labels[:, 0] if shard.has_attributes else labels) >= 0], tuple(classes))

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def features(self) -> NDArray[np.int16]:
        """int16, shape (n, dimension)."""
        return np.ascontiguousarray(self.shard.features[self.rows])

    @cached_property
    def labels(self) -> NDArray[np.int16]:
        """True classes for scoring, -1 where unknown; shape (n,), or (n, C) of attributes."""
        return self.shard.labels_as(self.classes)[self.rows]

    @cached_property
    def sources(self) -> list[str]:
        """The name of each image within its source."""
        return [self.shard.sources[row] for row in self.rows.tolist()]

    @property
    def backbone_name(self) -> str:
        """The backbone in words, for people."""
        described = self.shard.backbone
        return str(described.get("architecture") or described.get("kind") or "")

    def model_file(
        self,
        arrays: Mapping[str, NDArray[np.generic]],
        *,
        kind: str,
        task: Task,
        card: Mapping[str, Any],
        job_id: str | None = None,
    ) -> bytes:
        """Return the file of a model of a job about these images; see `feature_store.results.models.model_file`."""
        return model_file(
            arrays,
            kind=kind,
            classes=task.classes,
            card=card,
            backbone=loadable_name(self.shard.backbone),
            probe=self.shard.probe,
            job_id=job_id,
        )

    def share_right(self, student: Student) -> float:
        """Return the share of these images that a student labels right; their truth must be known."""
        return float((student.predict(self.features) == self.labels).mean())

    def thumbnails(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return PNG bytes per image number, for those that have a picture."""
        ids = {int(self.shard.record_ids[self.rows[number]]): number for number in numbers}
        return {ids[record_id]: png for record_id, png in self.shard.thumbnails(list(ids)).items()}


@dataclass(frozen=True, eq=False)
class PricedJob:
    """A job whose questions were checked and priced, before any agent is asked; an evaluation needs no more."""

    job: LabelingJob
    task: Task
    price: Price
    shards: tuple[Shard, ...]
    batches: tuple[QueryBatch, ...]

    @property
    def job_id(self) -> str:
        """A name for this job that does not change when it is resumed."""
        parts = [self.task.digest, *(batch.digest for batch in self.batches), str(self.job.seed)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def asked(self) -> NDArray[np.int16]:
        """The questions of one step, int16, shape (queries, dimension)."""
        return np.concatenate([batch.features for batch in self.batches])

    @property
    def engine(self) -> str:
        """The index engine of the agents: auto meets a device only where the job's public size is worth it."""
        if self.task.traits.searched is None:
            return self.job.engine
        records = sum(shard.max_records or UNDECLARED_RECORDS for shard in self.shards)
        return engine_of_job(self.job.engine, records * self.asked.size)

    @property
    def images(self) -> int:
        """The number of public images."""
        return 0

    def plan(self) -> dict[str, Any]:
        """The purpose of the output folder: a job resumed with anything else is refused."""
        return {
            "task": self.task.model_dump(mode="json"),
            "task_digest": self.task.digest,
            "shards": [shard.version for shard in self.shards],
            "batches": [batch.digest for batch in self.batches],
            "seed": self.job.seed,
        }


@dataclass(frozen=True, eq=False)
class PreparedJob(PricedJob):
    """A job that labels images, checked and priced."""

    public: PublicImages
    test: PublicImages | None
    queries: QuerySet
    student: StudentKind

    @property
    def asked(self) -> NDArray[np.int16]:
        """See PricedJob: steps of training ask the same."""
        return self.queries.features

    @property
    def images(self) -> int:
        """See PricedJob."""
        return len(self.public)

    @property
    def asks_clusters(self) -> bool:
        """True if queries are centers of clusters rather than images."""
        return bool((self.queries.rows < 0).any())

    @cached_property
    def query_rows(self) -> NDArray[np.int64]:
        """The image each answer is about, or the one nearest to it in its cluster, shape (num_answers,)."""
        return query_rows(
            self.queries.rows,
            self.queries.assignment,
            centres=self.queries.features,
            images=self.public.features,
        )

    @cached_property
    def query_names(self) -> QuestionNames:
        """The id of each answer, and the source of its image, or of the image nearest to its cluster's center."""
        kind = "cluster" if self.asks_clusters else "query"
        return QuestionNames.of(self.query_rows, self.public.sources, kind=kind)

    @property
    def answered_features(self) -> NDArray[np.int16]:
        """The features that answers are about: the queries; or every image, where a model was asked for."""
        return self.task.traits.rows_about(self.queries.features, self.public.features)


def prepare(
    job: LabelingJob,
    folder: JobFolder,
    *,
    progress: ProgressCallback = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> PreparedJob:
    """Check and price a job, before any agent is asked.

    Checks of names, sizes and manifests come before anything large is read. They find shards that do not go together, a
    public shard given as a private one, another backbone, a folder that holds another job, or a budget that is too
    small.

    Raises:
        DamagedShard, MixedShards, BadData: a shard cannot be used.
        InvalidSetting: a setting is out of bounds, or k is larger than a shard.
        BudgetExceeded: the job costs more than its budget.
    """
    if current_name(job.engine) != "auto":
        load_engine(job.engine)
    shards, asked, scored = open_shards(job)
    folder.check_same({"shards": [shard.version for shard in shards], "seed": job.seed})
    if asked is None:
        _check_source(job, shards[0])
    count = _questions(job, shards[0], images=None if asked is None else len(asked))
    priced = None if count is None else _priced(job, shards, count)
    if count is None:
        fewest = 2 if job.file.chooses_axes else 1
        settle(job, shards, questions=fewest)  # refuses what is wrong for any number of questions

    with ThreadPoolExecutor() as pool:  # checksums let other threads run
        list(pool.map(Shard.verify, [*shards, *([] if asked is None else [asked]), *scored]))
    if asked is None:
        # Imported on use: questions mostly come embedded.
        from workers.embedder.shards import embed_queries

        place = folder.out / ".job" / "queries"
        asked = embed_queries(
            job.queries, str(job.backbone), place, classes=shards[0].classes, progress=progress, warn=warn
        )
        _check_together(job, shards, [asked, *scored])
    _check_no_record_twice(job, shards)
    public = PublicImages.of(asked, shards[0].classes)
    check_names_are_text(asked.sources)
    test = PublicImages.labelled(scored[0], shards[0].classes) if scored else None
    if test is not None and not len(test):
        raise BadData(f"no image of {job.test} has a label of the task's classes, so no student can be scored on it")
    selection, method = job.file.queries, METHODS[job.file.task.method]
    axes = job.file.axes
    if job.file.chooses_axes:
        axes = axes_for(settle(job, shards, questions=2), known=known_axes(public.features))
    strategy, count = method.selection(selection.strategy, selection.count, axes=axes)
    queries = select_queries(
        public.features,
        strategy=strategy,
        count=count,
        seed=selection.seed,
        progress=progress,
    )
    if priced is None or count != len(queries.features):
        priced = _priced(job, shards, len(queries.features))
    task, cost = priced
    _check_k(job, task, shards)
    batches = _batches(task, queries.features)
    student = job.file.student.kind or "planned"
    return PreparedJob(job, task, cost, shards, batches, public, test, queries, student)


def evaluation_job(
    model: Path,
    shards: Sequence[Path],
    out: Path,
    *,
    task: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    seed: int | None = None,
) -> LabelingJob:
    """Return the job that evaluates a model.

    Args:
        task, evaluation: fields of these tables of a task file; those that are None are left out.

    Raises:
        InvalidTask: a field is unknown or out of bounds.
    """
    fields = {"name": f"evaluate {model.name}"[:200], "method": "evaluate"} | given(task)
    try:
        file = TaskFile.model_validate({"task": fields, "evaluation": given(evaluation)})
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "evaluation", model=TaskFile)) from None
    return LabelingJob(file, tuple(shards), model, out, seed=seed)


def prepare_evaluation(job: LabelingJob, folder: JobFolder) -> PricedJob:
    """Check and price an evaluation of the model in the file `job.queries`, before any agent is asked.

    Raises:
        DamagedShard, MixedShards, BadData: a shard or the model cannot be used.
        InvalidSetting: a setting is out of bounds.
        BudgetExceeded: it costs more than its budget.
    """
    shards, images, _ = open_shards(job)
    if images is not None or job.test is not None or job.backbone is not None:
        raise InvalidSetting(
            "an evaluation asks about a model and reads no public images: --images names the model's file; leave "
            "--test and --backbone out"
        )
    if shards[0].has_attributes:
        raise MixedShards("the shards hold attributes, any number per record, and an evaluation counts one class each")
    folder.check_same({"shards": [shard.version for shard in shards], "seed": job.seed})
    model, own = read_model_bytes(job.queries), shards[0]
    released_model(model, name=job.queries.name)
    Trainer(own.probe).check_model(model, classes=own.classes, fingerprint=own.fingerprint, dimension=own.dimension)
    wanted = job.file.evaluation
    one = settle(job, shards, questions=1)
    question = question_of(
        model,
        num_classes=one.num_classes,
        sigma=one.total_sigma_votes,
        records=assumed_records(one, wanted.records),
        layout=wanted.layout,
        bands=wanted.bands,
        edges=wanted.edges,
        stated=stated_beside(job.queries),
    ).rows(own.dimension, num_classes=len(own.classes))
    task, cost = _priced(job, shards, len(question))
    for shard in shards:
        shard.verify()
    _check_no_record_twice(job, shards)
    return PricedJob(job, task, cost, shards, (QueryBatch(question),))


def open_shards(job: LabelingJob) -> tuple[tuple[Shard, ...], Shard | None, list[Shard]]:
    """Return the private shards, the public one and the one to score on, where they exist and go together.

    Commands call it before they load what labels, so that a wrong path or class is reported at once.
    """
    if not job.shards:
        raise InvalidSetting("a job needs at least one private shard; name one for each agent")
    check_folder(job.out)
    shards = tuple(Shard.open(path, verify=False) for path in job.shards)
    asked = Shard.open(job.queries, verify=False) if (job.queries / "manifest.json").exists() else None
    scored = [] if job.test is None else [Shard.open(job.test, verify=False)]
    _check_together(job, shards, [*([] if asked is None else [asked]), *scored])
    if asked is not None or job.file.evaluates:
        return shards, asked, scored
    if not job.queries.exists() and not str(job.queries).startswith("torchvision:"):
        raise InvalidSetting(f"there is no shard, folder or file {job.queries} to take --images from")
    if job.backbone is None:
        raise InvalidSetting(
            f"{job.queries} is no shard; embed it first with `labeler embed ... --public`, or name the backbone "
            "with --backbone so that its images are embedded now"
        )
    return shards, None, scored


def _check_together(job: LabelingJob, private: Sequence[Shard], public: Sequence[Shard]) -> None:
    """Refuse shards that do not go together, by their manifests."""
    check_compatible([*private, *public])
    for shard, should_be_public in [*((shard, False) for shard in private), *((shard, True) for shard in public)]:
        if shard.is_public != should_be_public:
            raise InvalidSetting(
                f"{shard.path} is a {'public' if shard.is_public else 'private'} shard and was given as a "
                f"{'public' if should_be_public else 'private'} one; "
                + ("private images must never be asked about" if should_be_public else "embed it without --public")
            )
    classes = next((shard.classes for shard in private if shard.classes), ())
    if job.file.task.classes is not None and not same_names(job.file.task.classes, classes):
        raise InvalidTask(
            "the task file lists other classes than the shards; both must name them in the same order"
            + misspelt(job.file.task.classes, classes)
        )
    if job.test is not None and {*map(one_spelling, classes)}.isdisjoint(map(one_spelling, public[-1].classes)):
        raise MixedShards(
            f"{job.test} and the shards have different class lists, with no name in common, so no student can be "
            "scored on it" + misspelt(public[-1].classes, classes)
        )
    if job.test is not None and private[0].has_attributes and not public[-1].has_attributes:
        raise MixedShards(
            f"{job.test} holds one class per image, and the shards hold attributes; embed it with a table of attributes"
        )


def _check_source(job: LabelingJob, shard: Shard) -> None:
    """Check that public images to embed on the way use the backbone of the shards."""
    # Imported on use: questions mostly come embedded.
    from feature_store.backbones import load_backbone

    fingerprint = load_backbone(str(job.backbone)).fingerprint
    if fingerprint != shard.fingerprint:
        raise MixedShards(
            f"--backbone has the fingerprint {fingerprint[:12]}, and shard {shard.path.name!r} was made by another, "
            f"{shard.fingerprint[:12]}; name the backbone with which the shards were embedded"
        )


def _questions(job: LabelingJob, shard: Shard, *, images: int | None) -> int | None:
    """Return the number of questions of each step; None if it depends on features of the public images."""
    chosen = job.file.queries
    strategy, axes = METHODS[job.file.task.method].selection(chosen.strategy, chosen.count, axes=job.file.axes)
    if strategy == "weights":
        return None if job.file.chooses_axes else (axes or shard.dimension) + 1
    if images is not None and chosen.strategy == "all" and chosen.count not in (None, images):
        raise InvalidSetting(
            f"queries.count is {chosen.count}, and strategy 'all' (the default) asks about every image; "
            "name strategy 'clustered', 'spectral' or 'random', or leave count out"
        )
    if images is not None and chosen.count is not None and chosen.count > images:
        raise InvalidSetting(f"queries.count asks about {chosen.count} of {images} public images; ask about fewer")
    return images if chosen.strategy == "all" else chosen.count


def settle(job: LabelingJob, shards: Sequence[Shard], *, questions: int) -> Task:
    """Return the task of a job that asks `questions` questions in each of its steps."""
    task = job.file.resolve(
        classes=shards[0].classes,
        agents=len(shards),
        num_queries=questions * job.file.steps,
        fingerprint=shards[0].fingerprint,
        nonce="" if job.seed is None else f"seed {job.seed}",
        has_attributes=shards[0].has_attributes,
    )
    if task.attributes_per_record is not None and job.file.student.kind is not None:
        raise InvalidTask("student.kind: of attributes there is one kind of student, a head for each; leave it out")
    return task


def _priced(job: LabelingJob, shards: Sequence[Shard], questions: int) -> tuple[Task, Price]:
    """Return the task and its cost, within the budget of its file."""
    task = settle(job, shards, questions=questions)
    check_round_fits(task, task.steps * questions)
    cost = price(task)
    sizes = round_sizes(task, questions * task.steps, batch_queries=BATCH_QUERIES)
    charges = total_charges(task, sizes)
    caps: tuple[tuple[Level, float | None], ...] = (
        ("instance", job.file.budget.instance_epsilon),
        ("agent", job.file.budget.agent_epsilon),
    )
    for level, cap in caps:
        if cap is None:
            continue
        statement = cost.statement(level)
        too_much = level not in charges or charges[level] > budget_for(cap, task.delta)
        if too_much or not statement.epsilon <= cap:
            asked = (
                f"epsilon {short_epsilon(statement.epsilon, digits=4)}"
                if math.isfinite(statement.epsilon)
                else "no finite epsilon"
            )
            asked_nano = charges.get(level, 0)
            allowed = budget_for(cap, task.delta)
            ways = ways_to_fit(task, questions, level=level, asked_nano=asked_nano, left_nano=allowed)
            raise BudgetExceeded(
                f"the job costs {asked} at {level} level (delta {task.delta:g}) and its budget allows {cap:g}; nothing "
                f"was asked. In the task file, {', or '.join((*ways, f'raise budget.{level}_epsilon'))}"
            )
    return task, cost


def job_charges(task: Task, batches: Sequence[QueryBatch]) -> dict[Level, int]:
    """Return the cost of all batches together, each rounded up as it will be charged."""
    return total_charges(task, [len(batch) for batch in batches])


def _batches(task: Task, features: NDArray[np.int16]) -> tuple[QueryBatch, ...]:
    sizes = round_sizes(task, len(features) * task.steps, batch_queries=BATCH_QUERIES)
    starts = np.cumsum((0, *sizes)).tolist()
    # Every step of a training is about the same rows.
    return tuple(
        QueryBatch(features[start % task.rows :][: end - start], first_query=start) for start, end in pairwise(starts)
    )


def _check_no_record_twice(job: LabelingJob, shards: Sequence[Shard]) -> None:
    """Refuse a record at two agents: it would vote twice, and the price is for one vote."""
    owner = np.repeat(np.arange(len(shards)), [len(shard.record_ids) for shard in shards])
    ids = np.concatenate([shard.record_ids for shard in shards])
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(again):
        first, second = (job.shards[owner[order[again[0] + step]]] for step in (0, 1))
        raise InvalidSetting(
            f"shards {first} and {second} hold the same records (one is a copy of the other); a record with two votes "
            "would be protected half as well as stated. Name each shard once"
        )


def _check_k(job: LabelingJob, task: Task, shards: Sequence[Shard]) -> None:
    task.traits.check_k(task.k, task.max_queries)
    if not task.traits.searches(task.max_queries):
        return
    small = [str(path) for path, shard in zip(job.shards, shards, strict=True) if shard.alive.sum() < task.k]
    if small and not job.allow_small_shards:
        raise InvalidSetting(
            f"k is {task.k}, more than the records of {len(small)} of {len(shards)} shards ({', '.join(small[:3])}); "
            "use a smaller k, or --allow-small-shards to let them vote with what they have"
        )
