"""The files of a private evaluation: the question about a model, evaluation.json, and the measured model.

The question holds the model and the cells in which agents count their records. evaluation.json holds what was found.
The third file is the same model, which now states a measured confidence. A local job and a service write equal files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_store.results.models import (
    ATTRIBUTES,
    LINEAR,
    Measured,
    ReleasedModels,
    StoredModel,
    model_file,
    model_of_bytes,
)
from labeler.errors import BadData
from labeler.evaluation import SPEAKS_FOR, Evaluation, choose_bands, choose_layout
from labeler.methods.evaluate import Layout, Scored, edges_of
from labeler.privacy_card import card_beside_claim, joined_cards
from labeler.task import Task

EVALUATION: Final = "evaluation.json"
MEASURED: Final = "measured.safetensors"
CONFIDENCE: Final = (
    "confidence: the share of private records at the sites that this model was right on, by bands of what it stated; "
    "measured under noise, paid for with the numbers above. "
) + SPEAKS_FOR


def question_of(
    model: bytes,
    *,
    num_classes: int,
    sigma: float,
    records: int,
    layout: Layout | None = None,
    bands: int | None = None,
    edges: tuple[float, ...] | None = None,
    stated: NDArray[np.floating] | None = None,
) -> Scored:
    """Return the question about a model: the model, and the cells in which agents count.

    Cells that the caller does not name are chosen from public facts.

    Args:
        sigma: standard deviation of all noise in one count.
        records: number of records of all agents together, as far as it is public.
        layout: kind of the cells (`labeler.methods.evaluate.Layout`); chosen if None.
        bands: number of confidence bands; chosen if None. Not used if `edges` is given.
        edges: confidences between bands. If None, edges are chosen so that each band holds equally many of the `stated`
            confidences.
        stated: the model's confidences for public images.
    """
    if edges is None:
        wanted = choose_bands(num_classes, sigma=sigma, records=records) if bands is None else bands
        edges = edges_of(() if stated is None else stated, num_classes, wanted)
    return Scored(
        model, edges, layout or choose_layout(num_classes, sigma=sigma, records=records, bands=len(edges) + 1)
    )


def released_model(model: bytes, *, name: str) -> StoredModel:
    """Read a model to evaluate; it must label classes, and carry a privacy card, whose numbers are only claims.

    Raises:
        BadData: it is no such model.
    """
    stored = model_of_bytes(model, name=name)
    if stored.kind == ATTRIBUTES:
        raise BadData(f"{name} labels attributes, any number per image, and an evaluation counts one class each")
    try:
        card_beside_claim(stored.card, {"task_digest": ""}, confidence="")
    except (KeyError, TypeError, AttributeError):
        raise BadData(f"{name} holds no privacy card of this version; download it again") from None
    return stored


def stated_beside(model: Path) -> NDArray[np.float64] | None:
    """Return the confidences of a model for the public images of its job; None if its folder holds no labels."""
    try:
        column = pq.read_table(model.with_name("student_labels.parquet"), columns=["confidence"])["confidence"]
    except (OSError, pa.ArrowException, KeyError):
        return None
    return np.asarray(column.to_numpy(), dtype=np.float64)


def evaluation_document(
    task: Task,
    question: NDArray[np.int16],
    votes: NDArray[np.float64],
    *,
    contributors: int,
    card: Mapping[str, Any],
    job_id: str,
    created_at: str,
    released: ReleasedModels,
) -> dict[str, Any]:
    """Return the content of evaluation.json.

    Args:
        released: the models that were released here: the job of another one is what its file claims.
    """
    asked = Scored.of_rows(question)
    model = model_of_bytes(asked.model, name="the question")
    sigma, known = task.sum_sigma_votes(contributors), released.find(model)
    job = {"job_id": known[0]} if known else {"job_id": "", "claimed_job_id": model.job_id[:200]}
    found = Evaluation.of(asked, task.classes, votes, sigma=sigma, contributors=contributors)
    return found.to_json() | {
        "model": {"sha256": hashlib.sha256(asked.model).hexdigest(), "kind": model.kind} | job,
        "job_id": job_id,
        "task_digest": task.digest,
        "created_at": created_at,
        "privacy": dict(card),
    }


def measured_model(model: bytes, evaluation: Mapping[str, Any], *, released: ReleasedModels) -> bytes:
    """Return the file of the evaluated model, which now states in each band the share that was right there.

    This is post-processing: it costs nothing more. The card states the price of both only if the model was released
    here. Else it states that of the evaluation, and apart from it the claim of the model's file.
    """
    stored = model_of_bytes(model, name="the question")
    known, evaluated = released.find(stored), evaluation["privacy"]
    if known is not None:
        card = joined_cards(known[1], evaluated, confidence=CONFIDENCE)
    else:
        card = card_beside_claim(stored.card, evaluated, confidence=CONFIDENCE)
    # How the model is read, which `StoredModel.check_fits` has checked. It says nothing of a price.
    card |= {"backbone_fingerprint": stored.fingerprint}
    card |= {"training": stored.card["training"]} if stored.kind == LINEAR else {}
    measured = Measured(tuple(evaluation["edges"]), tuple(map(tuple, evaluation["stated"])))
    return model_file(
        stored.arrays,
        kind=stored.kind,
        classes=stored.classes,
        card=card,
        backbone=stored.backbone,
        job_id=None if known is None else known[0],
        measured=measured,
        probe=stored.probe,
    )


def evaluation_bytes(document: Mapping[str, Any]) -> bytes:
    """Return evaluation.json as bytes."""
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
