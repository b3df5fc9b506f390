"""`labeler predict`: new images labelled with a student, or with the model that a job released. Asks nobody.

A model reads features of one backbone. Images are embedded with the backbone that its file names, and with no other:
the fingerprint decides, before an image is read. It is post-processing of the release, and costs no privacy.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_store.backbones.spec import is_plain_name
from feature_store.decode import Skipped
from feature_store.results.image_labels import ON, ImageStamp, attribute_label_table, image_label_table
from feature_store.results.models import ATTRIBUTES, StoredModel
from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting, MixedShards
from labeler.privacy_card import guarantee_of
from workers.progress import ProgressCallback, silent
from workers.run.preparation import PublicImages


@dataclass(frozen=True, eq=False)
class Prediction:
    """New images with their labels.

    Attributes:
        table: in the schema of image labels; every image is inferred.
        counts: how many images got each class, in label order; of attributes an image may get several.
        skipped: images that could not be read.
    """

    table: pa.Table
    counts: dict[str, int]
    skipped: tuple[Skipped, ...]


def predict_images(
    model: StoredModel,
    images: Path | str,
    *,
    backbone: str | None = None,
    architecture: str | None = None,
    progress: ProgressCallback = silent,
) -> Prediction:
    """Label images.

    Args:
        images: a shard, or a source of images to embed: a folder, Parquet, or torchvision:NAME?root=DIR.
        backbone, architecture: what loads the backbone, where the model's file names none.

    Raises:
        MixedShards: the shard, or the backbone, is not the model's.
        InvalidSetting: the model's file names no backbone, and none was given.
        BadData: images or features cannot be used.
    """
    path = Path(images)
    if (path / "manifest.json").exists():
        if backbone is not None:
            raise InvalidSetting(f"{path} is a shard, whose images are embedded already; leave the backbone out")
        return _predict(model, Shard.open(path), ())
    # Here: a shard needs no network.
    from feature_store.backbones import load_backbone
    from feature_store.embedding import embed_source

    name = backbone or (model.backbone if is_plain_name(model.backbone) else "")
    if not name:
        raise InvalidSetting(
            "the model's file does not name a backbone that can be loaded by a name; give it with --backbone (the file "
            f"of weights or the backbone file that made fingerprint {model.fingerprint[:16]})"
        )
    loaded = load_backbone(name, architecture=architecture)
    _check_fingerprint(model, loaded.fingerprint, f"backbone {name!r}")
    with tempfile.TemporaryDirectory(prefix="labeler-predict-") as folder:
        out = Path(folder) / "images"
        report = embed_source(
            str(images),
            loaded,
            out,
            classes=model.classes,
            public=True,
            progress=lambda done, total: progress("Embedding", done, total),
        )
        return _predict(model, Shard.open(out, verify=False), report.skipped)


def _predict(model: StoredModel, shard: Shard, skipped: tuple[Skipped, ...]) -> Prediction:
    _check_fingerprint(model, shard.fingerprint, f"shard {shard.path.name!r}")
    images = PublicImages.of(shard)
    if not len(images):
        raise BadData("there is no image that can be read, so there is nothing to label")
    probabilities = model.predict_proba(images.features)
    try:
        privacy = guarantee_of(model.card)
    except (KeyError, TypeError, AttributeError):
        raise BadData("the model's file holds no privacy card of this version; download it again") from None
    stamp = ImageStamp(
        task_digest=model.task_digest,
        job_id=model.job_id,
        classes=model.classes,
        privacy=privacy,
        is_seeded=not model.card.get("holds", True),
        created_at=datetime.now(UTC).isoformat(),
    )
    as_table = attribute_label_table if model.kind == ATTRIBUTES else image_label_table
    table = as_table(
        stamp, sources=images.sources, probabilities=probabilities, asked=np.zeros(len(images), dtype=np.bool_)
    )
    return Prediction(table, _counts(model, probabilities), skipped)


def _counts(model: StoredModel, probabilities: NDArray[np.float64]) -> dict[str, int]:
    of_attributes = model.kind == ATTRIBUTES
    each = (
        (probabilities >= ON).sum(axis=0)
        if of_attributes
        else np.bincount(probabilities.argmax(axis=1), minlength=len(model.classes))
    )
    return dict(zip(model.classes, each.tolist(), strict=True))


def _check_fingerprint(model: StoredModel, found: str, what: str) -> None:
    if found != model.fingerprint:
        raise MixedShards(
            f"the model reads features of the backbone with fingerprint {model.fingerprint[:16]}, and {what} has "
            f"{found[:16]}: its labels would mean nothing. Use the backbone of the model's task"
        )
