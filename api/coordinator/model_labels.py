"""Jobs that ask agents for a model: the model itself as a file, and the label it gives to every public image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from api.coordinator.pricing import certified_price
from feature_store.journal.jobs import JobRecord
from feature_store.journal.tasks import TaskRecord
from labeler.errors import BadData, NotFound
from labeler.linear_model import released_model
from labeler.model_file import model_file, privacy_card
from labeler.release import Release


def model_labels(folder: Path, job: JobRecord, record: TaskRecord, release: Release) -> NDArray[np.int16]:
    """The label of each image of a job, shape (images,).

    Args:
        folder: of the job.
        job: completed.
        record: its task, of a method that asks for a model.
        release: of its one round.

    Raises:
        BadData: the images' features cannot be read.
    """
    try:
        features = load((folder / "questions.safetensors").read_bytes())["images"]
    except (OSError, SafetensorError, KeyError) as error:
        raise BadData(
            f"the images of job {job.job_id} cannot be read ({type(error).__name__}); restore its folder in jobs/ from "
            "a backup"
        ) from None
    return released_model(record.task, release).predict(features)


def model_bytes(job: JobRecord, record: TaskRecord, release: Release) -> bytes:
    """The released model of a job as a safetensors file with its privacy card.

    Raises:
        NotFound: the job's task asks for labels, not for a model.
    """
    task = record.task
    if not task.traits.asks_for_a_model:
        raise NotFound(
            f"job {job.job_id} asked for labels (method {task.method}), so there is no model of the agents; train a "
            "student on its labels"
        )
    card = privacy_card(task, certified_price(task, job.num_queries), is_seeded=release.is_seeded)
    weights = {"weights": released_model(task, release).weights}
    return model_file(weights, kind="linear", classes=task.classes, card=card)
