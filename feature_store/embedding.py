"""From a source of images to a shard: read, prepare, embed, quantise, write; resumable after any batch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_store.backbones.backbone import Backbone
from feature_store.decode import Skipped, png_thumbnail
from feature_store.images import ImageSource, open_source, source_digest
from feature_store.quantize import usable_rows
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.errors import BadData, InvalidSetting, UnreadableImage

Progress = Callable[[int, int], None]
Loader = Callable[[int], Iterator[list["Loaded"]]]
"""Gives the images of a source from an index on, in batches of any size, in order."""

_DEFAULT_BATCH = 64
_THUMBNAIL_PIXELS = 64


@dataclass(frozen=True)
class EmbedReport:
    """What became of a source.

    Attributes:
        path: folder of the shard.
        records: images embedded.
        skipped: images left out, each with its reason; never silently.
        resumed_from: images of the source already done by an interrupted run.
        classes: class list of the shard.
        fingerprint: of the backbone.
        notes: sentences a person should read, for example where the class list came from.
    """

    path: Path
    records: int
    skipped: tuple[Skipped, ...]
    resumed_from: int
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Loaded:
    """One image of a source, ready for the network, or the reason why not.

    Attributes:
        index: its place in the source.
        pixels: what `Backbone.prepare` makes of it; None where it cannot be used.
        thumbnail: PNG bytes, where they are kept.
        reason: why it cannot be used.
    """

    index: int
    pixels: NDArray[np.uint8] | None
    thumbnail: bytes | None
    reason: str


def embed_source(
    source: ImageSource | str | Path,
    backbone: Backbone,
    out: str | Path,
    *,
    classes: Sequence[str] | None = None,
    public: bool = False,
    batch_size: int = _DEFAULT_BATCH,
    progress: Progress | None = None,
    thumbnails: bool | None = None,
    threads: int = 2,
    random_bytes: Callable[[int], bytes] = os.urandom,
    loader: Loader | None = None,
) -> EmbedReport:
    """Embed every image of a source into a shard.

    An interrupted run leaves a hidden folder beside `out`; the same call goes on from there, and gives the same
    features. A finished shard of the same job is left as it is and reported.

    Args:
        source: an ImageSource, or what `open_source` opens.
        backbone: see feature_store.backbones.load_backbone.
        out: folder of the shard.
        classes: the PUBLIC class list, in label order. Labels of the source are matched by name. Without it the
            source's own names are taken: right only if they are public, the same for all parties, and complete.
        public: whether these are public images. Their labels, if any, are truth for scoring and never leave for
            a vote; those outside `classes` become unknown.
        batch_size: images between two checkpoints.
        progress: called after every batch with (images done, images in all).
        thumbnails: keep a small PNG of each image; by default for public images, and refused for private ones.
        threads: that read and prepare images while the backbone computes.
        random_bytes: source of record ids and row order; the operating system's except in simulations.
        loader: reads and prepares images elsewhere (feature_store.decode_process); threads of this process when None.

    Raises:
        BadData: no image could be read; private images without a label or with one outside `classes`.
        InvalidSetting: a setting out of bounds, or `out` holds something else.
        OutputInUse: another process is writing it.
    """
    if batch_size < 1 or threads < 1:
        raise InvalidSetting(f"batch_size and threads must be at least 1, found {batch_size} and {threads}")
    if thumbnails and not public:
        raise InvalidSetting("pictures are kept in public shards only; leave thumbnails out for private images")
    keep_thumbnails = public if thumbnails is None else thumbnails
    images = open_source(source) if isinstance(source, str | Path) else source
    if classes is None and not public and images.label_names and not images.names_are_declared:
        raise InvalidSetting(
            "name the public class list (--classes): this source only knows the labels of its own records, and a list "
            "read off private records would tell which classes are present"
        )
    names = tuple(images.label_names if classes is None else classes)
    labels = match_labels(images, names, public=public)
    notes = _notes(images, names, given=classes is not None, public=public)
    job = _job_digest(images, backbone, names, public=public, thumbnails=keep_thumbnails)
    path = Path(out)
    if path.exists():
        return _report_finished(path, job, images, notes)
    with ShardWriter(
        path,
        classes=names,
        fingerprint=backbone.fingerprint,
        dimension=backbone.dimension,
        public=public,
        backbone=backbone.spec,
        job=job,
        random_bytes=random_bytes,
    ) as writer:
        resumed_from = writer.position
        total = len(images.names)
        load = loader or partial(_load_batches, images, backbone, batch_size, threads, keep_thumbnails)
        for batch in load(writer.position):
            _append_batch(writer, backbone, images, labels, batch, keep_thumbnails)
            if progress is not None:
                progress(writer.position, total)
        skipped = writer.skipped()
        records = writer.records
        writer.finish()
    return EmbedReport(path, records, skipped, resumed_from, names, backbone.fingerprint, notes)


def match_labels(images: ImageSource, classes: tuple[str, ...], *, public: bool) -> NDArray[np.int16]:
    """Translate the source's labels to places in the class list, -1 where there is none.

    Labels are matched by name; a source whose names are all numbers may use them as places in the list.

    Raises:
        BadData: private images without a label, or with a name that is not in the list. Names are not repeated,
            since which classes a party holds is its secret.
    """
    place = {name: index for index, name in enumerate(classes)}
    known = images.label_names
    if known and not any(name in place for name in known) and all(name.isdecimal() for name in known):
        place = {str(index): index for index in range(len(classes))}
    table = np.array([place.get(name, -1) for name in known] + [-1], dtype=np.int16)
    labels = table[np.array([-1 if label is None else label for label in images.labels], dtype=np.int64)]
    missing = int((labels < 0).sum())
    if missing and not public and not known:
        raise BadData(
            "these images carry no labels; put private images into one folder per class (or a Parquet file with a "
            "column label), or pass --public if they are public"
        )
    if missing and not public:
        raise BadData(
            f"{missing} of {len(labels)} private images have no label in the class list of {len(classes)} names; "
            "labels are matched by name, so check the list's spelling, or take those images out"
        )
    return labels


def _append_batch(
    writer: ShardWriter,
    backbone: Backbone,
    images: ImageSource,
    labels: NDArray[np.int16],
    batch: list[Loaded],
    keep_thumbnails: bool,
) -> None:
    skipped = list(images.left_out) if writer.position == 0 else []
    skipped += [Skipped(images.names[item.index], item.reason) for item in batch if item.pixels is None]
    loaded = [item for item in batch if item.pixels is not None]
    features = np.empty((0, backbone.dimension), dtype=np.float32)
    if loaded:
        features = backbone.embed_prepared(np.stack([item.pixels for item in loaded if item.pixels is not None]))
    usable = usable_rows(features)
    blank = [item for item, good in zip(loaded, usable, strict=True) if not good]
    kept = [item for item, good in zip(loaded, usable, strict=True) if good]
    skipped += [Skipped(images.names[item.index], "its feature is zero or not finite") for item in blank]
    indexes = np.array([item.index for item in kept], dtype=np.int64)
    writer.append(
        features[usable],
        labels[indexes],
        [images.names[item.index] for item in kept],
        thumbnails=[item.thumbnail or b"" for item in kept] if keep_thumbnails else None,
        skipped=skipped,
        position=batch[-1].index + 1,
    )


def _load_batches(
    images: ImageSource, backbone: Backbone, batch_size: int, threads: int, keep_thumbnails: bool, start: int
) -> Iterator[list[Loaded]]:
    """Batches in the source's order, the next one always being read while the caller works on this one."""

    def load(index: int) -> Loaded:
        try:
            image = images.read(index)
            thumbnail = png_thumbnail(image, side=_THUMBNAIL_PIXELS) if keep_thumbnails else None
            return Loaded(index, backbone.prepare(image), thumbnail, "")
        except (UnreadableImage, BadData) as error:
            return Loaded(index, None, None, str(error))

    with ThreadPoolExecutor(threads, thread_name_prefix="embed") as pool:
        starts = iter(range(start, len(images.names), batch_size))

        def submit(first: int) -> Iterator[Loaded]:
            return pool.map(load, range(first, min(first + batch_size, len(images.names))))

        ahead = [submit(first) for first in islice(starts, 2)]
        while ahead:
            yield list(ahead.pop(0))
            ahead += [submit(first) for first in islice(starts, 1)]


def _job_digest(
    images: ImageSource, backbone: Backbone, classes: tuple[str, ...], *, public: bool, thumbnails: bool
) -> str:
    settings = [source_digest(images), backbone.fingerprint, list(classes), public, thumbnails]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _notes(images: ImageSource, classes: tuple[str, ...], *, given: bool, public: bool) -> tuple[str, ...]:
    notes = []
    if not given and classes:
        notes.append(
            f"The class list ({len(classes)} names) was taken from the source. It becomes public: name it yourself "
            "if which classes are present is private, or if other parties hold more."
        )
    if public and images.label_names:
        notes.append("Labels of these public images are kept for scoring only; no vote and no query sees them.")
    return tuple(notes)


def _report_finished(path: Path, job: str, images: ImageSource, notes: tuple[str, ...]) -> EmbedReport:
    shard = Shard.open(path)
    if shard.job != job:
        raise InvalidSetting(
            f"{path.name!r} exists already and was made from another source, backbone or class list; "
            "choose another output, or delete it first"
        )
    done = len(shard.labels) + len(shard.skipped) - len(images.left_out)
    return EmbedReport(path, len(shard.labels), shard.skipped, done, shard.classes, shard.fingerprint, notes)
