"""What can be known to be wrong with a job before anything large is read.

Shards say in their manifests which backbone made them, for whom, with which classes and how many records; a task file
and a number of questions are a price. So mixed shards, a public shard given as a private one, a backbone that is
another, an output folder that holds another job, and a budget that is too small are told at once, and not after
gigabytes were summed and every image was embedded. Everything is checked again with what was read (`preparation`).
"""

from __future__ import annotations

from feature_store.backbones import load_backbone
from feature_store.index import load_engine
from feature_store.shard import Shard, check_compatible
from labeler.batching import BATCH_QUERIES, round_sizes, total_charges
from labeler.errors import InvalidSetting, InvalidTask, MixedShards
from labeler.methods import METHODS
from labeler.planning import price
from workers.jobs.folder import JobFolder
from workers.jobs.preparation import LabellingJob, check_budget, check_roles, settle


def look_first(job: LabellingJob, folder: JobFolder) -> None:
    """Refuse what needs no more than names, sizes and manifests to be refused.

    Raises:
        BadData, MixedShards: a shard is unfinished or incomplete, or does not go with the others.
        InvalidSetting: a setting is out of bounds.
        BudgetExceeded: the job costs more than its budget.
    """
    if not job.shards:
        raise InvalidSetting("a job needs at least one private shard; name one for each agent")
    load_engine(job.engine)
    shards = [Shard.open(path, verify=False) for path in job.shards]
    asked = Shard.open(job.queries, verify=False) if (job.queries / "manifest.json").exists() else None
    scored = [] if job.test is None else [Shard.open(job.test, verify=False)]
    public = [*([] if asked is None else [asked]), *scored]
    check_compatible([*shards, *public])
    check_roles(shards, public)
    classes = next((shard.classes for shard in [*shards, *public] if shard.classes), ())
    if job.file.task.classes is not None and tuple(job.file.task.classes) != tuple(classes):
        raise InvalidTask("the task file lists other classes than the shards; both must name them in the same order")
    folder.check_same({"shards": [shard.version for shard in shards], "seed": job.seed})
    if asked is None:
        _check_source(job, shards[0])
    _check_price(job, folder, shards, images=None if asked is None else len(asked))


def _check_source(job: LabellingJob, shard: Shard) -> None:
    """Public images that are embedded on the way: they are there, and so is the backbone of the shards."""
    if not job.queries.exists() and not str(job.queries).startswith("torchvision:"):
        raise InvalidSetting(f"there is no shard, folder or file {job.queries} to take --queries from")
    if job.backbone is None:
        return
    fingerprint = load_backbone(job.backbone).fingerprint
    if fingerprint != shard.fingerprint:
        raise MixedShards(
            f"--backbone has the fingerprint {fingerprint[:12]}, and shard {shard.path.name!r} was made by another, "
            f"{shard.fingerprint[:12]}; name the backbone with which the shards were embedded"
        )


def _check_price(job: LabellingJob, folder: JobFolder, shards: list[Shard], *, images: int | None) -> None:
    """The task with as many questions as there will be, where that is known already."""
    chosen = job.file.queries
    if METHODS[job.file.task.method].asks_for_a_model:
        count: int | None = (job.file.axes or shards[0].dimension) + 1
    else:
        count = images if chosen.strategy == "all" else chosen.count
        if chosen.strategy == "all" and chosen.count not in (None, images):
            raise InvalidSetting(
                f"queries.count is {chosen.count}, and strategy 'all', which counts where none is named, asks about "
                "every image; name strategy 'clustered', 'spectral' or 'random', or leave count out"
            )
    if images is not None and chosen.count is not None and chosen.count > images:
        raise InvalidSetting(f"queries.count asks about {chosen.count} of {images} public images; ask about fewer")
    task = settle(job, folder, shards, questions=count or 1)
    if count is not None:
        sizes = round_sizes(task, count * job.file.steps, batch_queries=BATCH_QUERIES)
        check_budget(job, task, price(task), total_charges(task, sizes))
