"""Reading and checking everything that can be wrong with a job, and pricing it, before anybody is asked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from feature_store.index import load_engine
from feature_store.job_files.naming import QuestionNames, query_rows
from feature_store.query_selection import QuerySet, select_queries
from feature_store.shard import Shard, check_compatible
from labeler.batch import QueryBatch
from labeler.batching import BATCH_QUERIES, check_round_fits, round_sizes, total_charges
from labeler.budget import budget_for
from labeler.errors import BadData, BudgetExceeded, InvalidSetting, InvalidTask, MixedShards
from labeler.methods import METHODS
from labeler.planning import Price, price
from labeler.rounds.effects import StudentKind
from labeler.settings import check_names_are_text
from labeler.task import Level, Task
from workers.jobs.folder import JobFolder
from workers.jobs.public_images import PublicImages
from workers.jobs.task_file import TaskFile
from workers.progress import ProgressCallback, silent


@dataclass(frozen=True)
class LabellingJob:
    """What to label, with whose records, and where the answers go.

    Attributes:
        file: the task file.
        shards: one private shard per agent.
        queries: a public shard, or a folder of public images (then `backbone` says how to embed them).
        test: a labelled public shard to score the student on.
        allow_small_shards: let an agent with fewer than k records vote with what it has. Refusing is the
            default because it is nearly always a mistake; in a federation of several owners the agent
            always votes, since a refusal would tell the others how few records it has.
        seed: makes noise and ids reproducible; a simulation that protects nobody.
        winner: how winners are found: "plain" puts the sums together in this process, which sees everything
            anyway; "secure" computes them as talliers that distrust each other do. "mpyc" is its earlier name.
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
    winner: Literal["plain", "secure", "mpyc"] = "plain"


@dataclass(frozen=True, eq=False)
class PreparedJob:
    """A job that was checked and priced, before anybody is asked."""

    job: LabellingJob
    task: Task
    price: Price
    shards: tuple[Shard, ...]
    public: PublicImages
    test: PublicImages | None
    queries: QuerySet
    batches: tuple[QueryBatch, ...]
    student: StudentKind

    @property
    def job_id(self) -> str:
        """A name for this job that does not change when it is resumed."""
        parts = [self.task.digest, *(batch.digest for batch in self.batches), str(self.job.seed)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def asks_clusters(self) -> bool:
        """Whether queries are centres of clusters rather than images."""
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
        """Id of each answer, and source of the image it asks about, or that lies nearest to its cluster's centre."""
        kind = "cluster" if self.asks_clusters else "query"
        return QuestionNames.of(self.query_rows, self.public.sources, kind=kind)

    @property
    def answered_features(self) -> NDArray[np.int16]:
        """What each answer is about: the queries; or every image, where a model was asked for."""
        return self.public.features if self.task.traits.asks_for_a_model else self.queries.features

    def plan(self) -> dict[str, Any]:
        """What the output folder is for: a job resumed with anything else is refused."""
        return {
            "task": self.task.model_dump(mode="json"),
            "task_digest": self.task.digest,
            "shards": [shard.version for shard in self.shards],
            "batches": [batch.digest for batch in self.batches],
            "seed": self.job.seed,
        }


def prepare(job: LabellingJob, folder: JobFolder, *, progress: ProgressCallback = silent) -> PreparedJob:
    """Read and check everything that can be wrong, and price the job.

    Raises:
        DamagedShard, MixedShards, BadData: a shard cannot be used.
        InvalidSetting: a setting is out of bounds, or k is larger than a shard.
        BudgetExceeded: the job costs more than its budget.
    """
    load_engine(job.engine)
    shards = tuple(Shard.open(path) for path in job.shards)
    asked = open_queries(job, folder, shards[0], progress=progress)
    scored = [] if job.test is None else [Shard.open(job.test)]
    check_compatible([*shards, asked, *scored])
    check_roles(shards, [asked, *scored])
    _check_no_record_twice(job, shards)
    if scored and shards[0].has_attributes and not scored[0].has_attributes:
        raise MixedShards(
            f"{job.test} holds one class per image, and the shards hold attributes; embed it with a table of attributes"
        )
    public = PublicImages.of(asked)
    check_names_are_text(asked.sources)
    test = PublicImages.labelled(scored[0]) if scored else None
    if test is not None and not len(test):
        raise BadData(f"no image of {job.test} has a known label, so no student can be scored on it")
    selection = job.file.queries
    queries = select_queries(
        public.features,
        strategy="weights" if METHODS[job.file.task.method].asks_for_a_model else selection.strategy,
        count=job.file.axes if METHODS[job.file.task.method].asks_for_a_model else selection.count,
        seed=selection.seed,
        progress=progress,
    )
    task = settle(job, folder, shards, questions=len(queries.features))
    if task.attributes_per_record is not None and job.file.student.kind is not None:
        raise InvalidTask("student.kind: of attributes there is one kind of student, a head for each; leave it out")
    if tuple(task.classes) != tuple(shards[0].classes):
        raise InvalidTask("the task file lists other classes than the shards; both must name them in the same order")
    _check_k(job, task, shards)
    check_round_fits(task, task.steps * len(queries.features))
    cost = price(task)
    batches = _batches(task, queries.features)
    check_budget(job, task, cost, job_charges(task, batches))
    return PreparedJob(job, task, cost, shards, public, test, queries, batches, job.file.student.kind or "planned")


def settle(job: LabellingJob, folder: JobFolder, shards: Sequence[Shard], *, questions: int) -> Task:
    """The task of a job that asks so many questions, in each of its steps."""
    return job.file.resolve(
        classes=shards[0].classes,
        agents=len(shards),
        num_queries=questions * job.file.steps,
        fingerprint=shards[0].fingerprint,
        nonce="" if job.seed is None else f"seed {job.seed}",
        agreed_colluding_agents=folder.agreed("colluding_agents"),
        has_attributes=shards[0].has_attributes,
    )


def open_queries(job: LabellingJob, folder: JobFolder, asks: Shard, *, progress: ProgressCallback = silent) -> Shard:
    """The public shard; embedded first, once, as the shard it asks, where the job names a folder of images."""
    if (job.queries / "manifest.json").exists():
        return Shard.open(job.queries)
    if job.backbone is None:
        raise InvalidSetting(
            f"{job.queries} is no shard; embed it first with `labeler embed ... --public`, or name the backbone "
            "with --backbone so that its images are embedded now"
        )
    from workers.embedder.shards import embed_queries

    return embed_queries(
        job.queries,
        job.backbone,
        folder.out / ".job" / "queries",
        classes=asks.classes,
        fingerprint=asks.fingerprint,
        progress=progress,
    )


def job_charges(task: Task, batches: Sequence[QueryBatch]) -> dict[Level, int]:
    """What all batches cost together, each rounded up as it will be charged."""
    return total_charges(task, [len(batch) for batch in batches])


def _batches(task: Task, features: NDArray[np.int16]) -> tuple[QueryBatch, ...]:
    sizes = round_sizes(task, len(features) * task.steps, batch_queries=BATCH_QUERIES)
    starts = np.cumsum((0, *sizes)).tolist()
    if task.traits.is_sampled:  # every step is about the same rows
        return tuple(QueryBatch(features, first_query=start) for start in starts[:-1])
    return tuple(QueryBatch(features[start:end], first_query=start) for start, end in pairwise(starts))


def check_roles(private: Sequence[Shard], public: Sequence[Shard]) -> None:
    """Refuse a public shard that was given as an agent's, and a private one that would be asked about."""
    for shard, should_be_public in [*((shard, False) for shard in private), *((shard, True) for shard in public)]:
        if shard.is_public != should_be_public:
            raise InvalidSetting(
                f"{shard.path} is a {'public' if shard.is_public else 'private'} shard and was given as a "
                f"{'public' if should_be_public else 'private'} one; "
                + ("private images must never be asked about" if should_be_public else "embed it without --public")
            )


def _check_no_record_twice(job: LabellingJob, shards: Sequence[Shard]) -> None:
    """A record at two agents would vote twice, and the price is for one vote."""
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


def _check_k(job: LabellingJob, task: Task, shards: Sequence[Shard]) -> None:
    if task.traits.records_choose and task.k > task.max_queries:
        raise InvalidSetting(f"k is {task.k} queries per record, but only {task.max_queries} queries are asked")
    if not task.traits.has_k or task.traits.records_choose:
        return
    small = [str(path) for path, shard in zip(job.shards, shards, strict=True) if shard.alive.sum() < task.k]
    if small and not job.allow_small_shards:
        raise InvalidSetting(
            f"k is {task.k}, more than the records of {len(small)} of {len(shards)} shards ({', '.join(small[:3])}); "
            "use a smaller k, or --allow-small-shards to let them vote with what they have"
        )


def check_budget(job: LabellingJob, task: Task, cost: Price, charges: Mapping[Level, int]) -> None:
    """Refuse a job that costs more than the budget of its task file, at either level."""
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
            asked = f"epsilon {statement.epsilon:.4g}" if math.isfinite(statement.epsilon) else "no finite epsilon"
            raise BudgetExceeded(
                f"the job costs {asked} at {level} level (delta {task.delta:g}) and its budget allows {cap:g}; nothing "
                "was asked. Ask fewer queries, add noise (sigma_votes), or raise the budget in the task file"
            )
