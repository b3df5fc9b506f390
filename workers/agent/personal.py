"""Personal models of a site (PriFedSync): the shared model that an agent keeps, and what the site predicts with.

    answer of a step, sent  -->  HOME/shared-models/TASK.safetensors: public, as the coordinator sent it
    labeler agent predict   -->  that model + the site's records (workers.learning.personal)  -->  predictions.parquet

**What is kept is public**: the model that each step begins from is part of the question (`QueryBatch.model`). After the
first half of the steps the file holds the mean of the models since, as the released model does (labeler.linear_model);
it lacks the last step, which no agent is told. It is written after an answer has left, from task and question alone. If
that fails, for example on a full disk, the agent logs it and goes on, and the file is one step older.

**What is private** is made when a person at the site asks, and no model is ever written. Predictions follow from
private records without noise. They are readable by their owner only, and the file says that it has to stay.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from feature_store.decode import Skipped
from feature_store.results.models import LINEAR, StoredModel, model_file, read_model
from feature_store.shard import Shard
from labeler.errors import InvalidSetting, LabelerError, MixedShards, NotFound
from labeler.linear_model import is_averaged
from labeler.records import PublicAxes
from labeler.setting import Personal, Training
from labeler.settings import same_names
from labeler.system.files import PRIVATE_FILE, PRIVATE_FOLDER, check_file, replace_file
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.party.home import PREDICTING, SHARED_FOLDER, path_in_home, read_agent_config
from workers.party.link import cause
from workers.progress import ProgressCallback, silent

PREDICTIONS_FILE: Final = "predictions.parquet"

MOST_KEPT: Final = 16
"""Shared models that a home keeps, the newest: a coordinator cannot fill a site's disk."""

MUST_STAY: Final = (
    "follows from private records of this site without any noise: it has no privacy guarantee, and must not leave the "
    "site"
)

log = logging.getLogger("labeler.agent")


def keep_shared_model(home: Path, task: Task, batch: QueryBatch) -> None:
    """Keep the public model of a step that was answered, if sites of its task make personal models. Never raises.

    Nothing of a record is read, and the question alone says what is written.
    """
    training, model = task.training, batch.model
    if training is None or training.personal is None or model is None:
        return
    path, step = home / SHARED_FOLDER / f"{task.digest}.safetensors", batch.first_query // task.rows
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        last, averaged, before = _kept_until(path, model.shape)
        if last >= step:
            return  # a step that is asked for again
        if is_averaged(step, task.steps):
            model, averaged = model + averaged * before, averaged + 1
            model /= averaged
        card = {
            "task_digest": task.digest,
            "task_name": task.name,
            "backbone_fingerprint": task.backbone_fingerprint,
            "training": training.model_dump(mode="json"),
            "last_step": step,
            "averaged": averaged,
        }
        arrays = {"weights": model} | ({} if training.axes is None else {"axes": batch.features.astype(np.int16)})
        replace_file(path, model_file(arrays, kind=LINEAR, classes=task.classes, card=card), mode=PRIVATE_FILE)
        for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except Exception as error:  # answers do not need this file
        log.warning("the public model of a step could not be kept", extra={"task_digest": task.digest} | cause(error))


def _kept_until(path: Path, shape: tuple[int, ...]) -> tuple[int, int, np.ndarray[Any, np.dtype[np.float64]] | float]:
    """Return the last step of a kept model of a shape, how many models it is the mean of, and the mean; -1 where none
    is kept.
    """
    try:
        kept = read_model(path)
        weights = np.asarray(kept.arrays["weights"])
        if weights.shape == shape:
            return int(kept.card["last_step"]), int(kept.card["averaged"]), weights
    except (LabelerError, KeyError, TypeError, ValueError, OverflowError):
        pass
    return -1, 0, 0.0


def kept_model(home: Path, task: str | None) -> StoredModel:
    """Return the shared model of a task that a home keeps.

    Args:
        task: its name, or the first digits of its digest; None if the home keeps one only.

    Raises:
        NotFound: no such task was answered here, or several fit; the message names those that there are.
    """
    kept = []
    for path in sorted((home / SHARED_FOLDER).glob("*.safetensors")):
        # A damaged file counts as none, as for the agent, and a running agent may have removed an old one by now.
        with suppress(LabelerError):
            kept.append(read_model(path))
    found = [one for one in kept if not task or task == one.card.get("task_name") or one.task_digest.startswith(task)]
    if len(found) == 1:
        return found[0]
    names = "; ".join(f"{one.task_digest[:12]} {one.card.get('task_name', '')}" for one in kept)
    if not kept:
        raise NotFound(
            f"the agent of {home} has answered no task with training.personal, so it keeps no shared model; name a "
            "released model with --model"
        )
    many = "several tasks fit" if found else f"no task here is called {task!r}"
    raise NotFound(f"{many}; name one with --task, by its name or its first digits: {names}")


@dataclass(frozen=True, eq=False)
class SitePredictions:
    """Predictions of a personal model. Private.

    Attributes:
        table: image, label, confidence; its metadata says that it must stay.
        counts: images of each class.
        skipped: files that are no images, or cannot be read.
        helper, alpha, scores: how the model was made (workers.learning.personal.PersonalModel).
        accuracy: share right, where the images came with their truth.
    """

    table: pa.Table
    counts: Mapping[str, int]
    skipped: tuple[Skipped, ...]
    helper: str
    alpha: float | None
    scores: tuple[float, ...]
    accuracy: float | None


def predict_at_site(
    images: str,
    *,
    home: Path | None = None,
    shard: Path | None = None,
    task: str | None = None,
    model: Path | None = None,
    backbone: str | None = None,
    architecture: str | None = None,
    progress: ProgressCallback = silent,
) -> SitePredictions:
    """Label images with a personal model, which is trained now; asks nobody, sends nothing, and takes no lock.

    Args:
        images: a folder or another source, a shard, or features, as `labeler predict` takes them.
        home: of the agent, which may run meanwhile.
        shard: private records without a home, as of `labeler run`; needs `model`.
        task: whose kept model to take; see `kept_model`.
        model: the file of a released model to take in its place.
        backbone, architecture: what loads the backbone, where neither the file nor the home names one.

    Raises:
        InvalidSetting: neither home nor shard; the model's task has no `training.personal`.
        MixedShards: the model has other classes, or another backbone, than the records, or the images do.
        NotFound: see `kept_model`.
    """
    from workers.learning.personal import personal_model
    from workers.run.student import new_images
    from workers.voting import select_records

    if home is not None and shard is None:
        config, beside = read_agent_config(home), home
        own = Shard.open(home / config.shard, verify=False)
        shared = kept_model(home, task) if model is None else read_model(model)
        if config.embedding is not None and backbone is None:
            backbone, architecture = path_in_home(home, config.embedding.backbone), config.embedding.architecture
    elif home is None and shard is not None and model is not None:
        own, shared, beside = Shard.open(shard, verify=False), read_model(model), shard.parent
    else:
        raise InvalidSetting("name the home with --home; or, without one, a --shard of records and a --model")
    personal = _personal_of(shared, own)
    shared = replace(shared, probe=own.probe or "", measured=None)
    with tempfile.TemporaryDirectory(prefix=PREDICTING, dir=beside) as folder:
        if shared.reads_own_features or (Path(images) / "manifest.json").exists():
            backbone = None
        new, skipped = new_images(
            shared, images, backbone=backbone, architecture=architecture, folder=Path(folder), progress=progress
        )
    progress("Training", 0, 1)
    axes = shared.arrays.get("axes")
    made = personal_model(
        select_records(own, records_per_person=None),
        np.asarray(shared.arrays["weights"], dtype=np.float64),
        axes=None if axes is None else PublicAxes(axes),
        personal=personal,
    )
    progress("Training", 1, 1)
    probabilities = replace(shared, arrays=dict(shared.arrays) | {"weights": made.weights}).predict_proba(new.features)
    labels = probabilities.argmax(axis=1)
    columns = {
        "image": pa.array(new.names, pa.string()),
        "label": pa.array(shared.classes, pa.string()).take(pa.array(labels)),
        "confidence": pa.array(probabilities.max(axis=1), pa.float32()),
    }
    about = {"task_digest": shared.task_digest, "personal": f"This file {MUST_STAY}."}
    known = None if new.labels is None else new.labels >= 0
    return SitePredictions(
        pa.table(columns).replace_schema_metadata({"labeler": json.dumps(about)}),
        dict(zip(shared.classes, np.bincount(labels, minlength=len(shared.classes)).tolist(), strict=True)),
        skipped,
        personal.helper,
        made.alpha,
        made.scores,
        None if new.labels is None or known is None else float((labels == new.labels)[known].mean()),
    )


def write_predictions(found: SitePredictions, out: Path) -> None:
    """Write predictions, readable by their owner only."""
    from feature_store.results.questions import write_parquet

    check_file(out)
    write_parquet(found.table, out, mode=PRIVATE_FILE)


def _personal_of(shared: StoredModel, own: Shard) -> Personal:
    """Return what the model's task says of personal models; refuses what does not fit the records."""
    try:
        training = Training.model_validate(shared.card["training"])
    except (KeyError, TypeError, ValidationError):
        training = None
    if shared.kind != LINEAR or training is None or training.personal is None:
        raise InvalidSetting(
            "the task of this model has no training.personal, so that sites make no models of their own of it; use "
            "`labeler predict` for the model as it is"
        )
    if shared.fingerprint != own.fingerprint:
        raise MixedShards(
            f"the shared model reads features of backbone {shared.fingerprint[:12]}, and this site's records are of "
            f"{own.fingerprint[:12]}; embed them again with the task's backbone"
        )
    if own.is_public or own.has_attributes or not same_names(own.classes, shared.classes):
        raise MixedShards(f"shard {own.path.name!r} does not hold private records of the shared model's classes")
    return training.personal
