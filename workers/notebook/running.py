"""A whole labelling job in this process, from a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from labeler.methods import Method
from labeler.rounds.effects import AskedStrategy, StudentKind
from workers.notebook.job import LabelledJob


def run(
    shards: Sequence[PathLike[str] | str],
    images: PathLike[str] | str,
    out: str | Path,
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    method: Method = "reverse-knn",
    k: int = 1,
    clusters: int | None = None,
    strategy: AskedStrategy = "clustered",
    student: StudentKind | None = None,
    test: PathLike[str] | str | None = None,
    backbone: str | None = None,
    allow_small_shards: bool = False,
    seed: int | None = None,
    quiet: bool = False,
    **task: Any,
) -> LabelledJob:
    """Label public images with private shards. An interrupted job continues in its folder, and is charged once.

    Args:
        shards: one for each agent, as `embed` returned them, or their paths.
        images: the public images: what `embed(..., public=True)` returned, or a folder together with `backbone`.
        out: the job's folder.
        epsilon: the price per private image that the noise is solved for; or give `sigma_votes` instead.
        delta: at which it holds.
        method, k: how agents answer (labeler.methods).
        clusters: ask about so many clusters of images; where None and the method asks questions, as many as price,
            classes and number of public images advise (labeler.expectation). Nothing about an image depends on being
            asked about: every image gets a label.
        strategy: how clusters are found: "clustered", or "spectral" along the graph of nearest neighbours.
        student: which student labels all images; None for the usual one.
        test: a labelled public shard to score it on.
        backbone: for `images`, where that is a folder.
        allow_small_shards: let an agent with fewer than k records vote with what it has.
        seed: simulation: reproducible noise that protects nobody.
        quiet: no progress bar.
        **task: any other field of the task file's `[task]` (docs/task-file.md), for example colluding_agents=0.

    Raises:
        InvalidTask, InvalidSetting: a field is unknown or out of bounds, before anything is read.
        LabelerError: see labeler.errors; nothing is half-written, and what was opened stays paid for.
    """
    from pydantic import ValidationError

    from feature_store.named_files import named_path
    from labeler.errors import InvalidSetting, InvalidTask
    from labeler.methods import METHODS
    from labeler.task import describe_validation
    from workers.jobs.labelling import run_job
    from workers.jobs.preparation import LabellingJob
    from workers.jobs.task_file import TaskFile
    from workers.progress import progress_bars

    if isinstance(shards, (str, PathLike)):  # else a text would be read letter by letter
        raise InvalidSetting(f"shards is a list, a shard for each agent; found one path: write [{str(shards)!r}]")
    folder, public = named_path(out, "out"), named_path(images, "images")
    fields: dict[str, Any] = {"name": folder.name, "method": method, "k": k, "delta": delta} | task
    if epsilon is not None:
        fields["epsilon"] = epsilon
    tables: dict[str, Any] = {"task": fields, "student": {} if student is None else {"kind": student}}
    try:
        if method in METHODS and not METHODS[method].asks_for_a_model:
            count = clusters if clusters is not None else _clusters(fields, shards, public, folder)
            tables["queries"] = {"strategy": "all"} if count is None else {"strategy": strategy, "count": count}
        file = TaskFile.model_validate(tables)
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "task")) from None
    job = LabellingJob(
        file=file,
        shards=tuple(named_path(shard, "a shard") for shard in shards),
        queries=public,
        out=folder,
        test=None if test is None else named_path(test, "test"),
        backbone=backbone,
        allow_small_shards=allow_small_shards,
        seed=seed,
    )
    with progress_bars(quiet=quiet) as progress:
        run_job(job, progress=progress)
    return LabelledJob(folder)


def _clusters(task: Mapping[str, Any], shards: Sequence[PathLike[str] | str], images: Path, out: Path) -> int | None:
    """How many questions an unfinished job in this folder asks, else what public facts advise; None asks about all."""
    from feature_store.shard import Shard
    from labeler.expectation import questions_for
    from workers.jobs.folder import JobFolder
    from workers.jobs.task_file import TaskFile

    if not shards:
        return None
    public = len(Shard.open(images, verify=False)) if (images / "manifest.json").exists() else None
    count = JobFolder(out).agreed("max_queries")
    if count is None:
        first = Shard.open(Path(shards[0]), verify=False)
        classes = tuple(task.get("classes") or first.classes)
        asked = TaskFile.model_validate({"task": dict(task)}).resolve(
            classes=classes,
            agents=len(shards),
            num_queries=2 * len(classes) + int(task.get("k", 1)),
            fingerprint=first.fingerprint,
            nonce="",
            has_attributes=first.has_attributes,
        )
        count = questions_for(asked, public_images=public)
    return count if public is None or count < public else None
