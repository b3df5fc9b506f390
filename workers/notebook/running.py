"""A whole labelling job in this process, from a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labeler.methods import Method
from workers.notebook.job import LabelledJob

if TYPE_CHECKING:
    from feature_store.students import StudentKind


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
    student: StudentKind = "auto",
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
        clusters: ask about so many clusters of images; about twice the number of classes, but no more than there are
            images, where None and the method asks questions. Nothing about an image depends on being asked about: every
            image gets a label.
        student: which student labels all images.
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

    from labeler.errors import InvalidTask
    from labeler.methods import METHODS
    from labeler.task import describe_validation
    from workers.jobs.labelling import run_job
    from workers.jobs.preparation import LabellingJob
    from workers.jobs.task_file import TaskFile
    from workers.progress import progress_bars

    fields: dict[str, Any] = {"name": Path(out).name, "method": method, "k": k, "delta": delta} | task
    if epsilon is not None:
        fields["epsilon"] = epsilon
    tables: dict[str, Any] = {"task": fields, "student": {"kind": student}}
    if method in METHODS and not METHODS[method].asks_for_a_model:
        count = clusters if clusters is not None else _clusters(shards[0] if shards else None, images)
        tables["queries"] = {"strategy": "clustered", "count": count} if count else {"strategy": "all"}
    try:
        file = TaskFile.model_validate(tables)
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "task")) from None
    job = LabellingJob(
        file=file,
        shards=tuple(Path(shard) for shard in shards),
        queries=Path(images),
        out=Path(out),
        test=None if test is None else Path(test),
        backbone=backbone,
        allow_small_shards=allow_small_shards,
        seed=seed,
    )
    with progress_bars(quiet=quiet) as progress:
        run_job(job, progress=progress)
    return LabelledJob(Path(out))


def _clusters(shard: PathLike[str] | str | None, images: PathLike[str] | str) -> int | None:
    """Two questions for each class, from the public class list and the number of public images."""
    from feature_store.shard import Shard

    if shard is None:
        return None
    wanted = 2 * len(Shard.open(Path(shard), verify=False).classes)
    path = Path(images)
    is_shard = (path / "manifest.json").exists()
    if not is_shard:
        return wanted
    return wanted if wanted < len(Shard.open(path, verify=False)) else None
