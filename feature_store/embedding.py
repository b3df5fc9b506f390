"""From a source of images to a shard: read, prepare, embed, quantize, write; resumable after any batch.

Each step is a function that can run where it is cheapest.

    load_image          one image: read, decode, prepare; any thread or process, no network and no GPU.
    loaded_batches      many of them on all cores, ahead of the caller, in the source's order.
    embedded_batches    forward passes, each of as many images as the network takes at once.
    append_batch        rows of a shard, durably; one process, in the source's order.

The result of a step for an image depends on that image alone, never on its batch. So the steps may be spread over
threads, processes or machines, stopped and resumed, and they give the same shard.

More than 600 lines: the one path from a source to rows must be read together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones.backbone import Backbone, ImageLike, decode_for, prepare_image
from feature_store.backbones.spec import Transform
from feature_store.decode import Skipped, png_thumbnail
from feature_store.rows import quantize, usable_rows
from feature_store.same_images import find_same_images, keep_first, named, refusal, refuse_same_bytes
from feature_store.shard import MANIFEST_NAME, Shard
from feature_store.shard_writer import ShardWriter
from feature_store.sources import AttributeSource, ImageSource, PersonColumn, image_blocks, open_source, source_digest
from labeler.errors import BadData, InvalidSetting, StorageFull, UnreadableFile, UnreadableImage
from labeler.settings import check_names_are_text, misspelt, one_spelling
from labeler.system.files import PRIVATE_FILE, is_full, replace_file
from labeler.system.process_pool import all_cores
from labeler.system.site_key import PUBLIC_KEY, SITE_KEY_FILE, Digests, SiteKey, as_digests, site_key

_THUMBNAIL_PIXELS = 64

_AT_ONCE = 8
"""Images that a thread takes together: handing over one at a time would cost more than decoding a small one."""


_MOST_SKIPPED = 4096
"""Images that need no forward pass in one batch: after so many it ends, so that they are not read again after a
crash."""

NOTHING_KNOWN: Final[Mapping[bytes, NDArray[np.int16]]] = {}


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """One image of a source, ready for the network, or the reason why not.

    Attributes:
        index: its place in the source.
        pixels: what `prepare_image` makes of it; None where it cannot be used.
        thumbnail: PNG bytes, where they are kept.
        reason: why it cannot be used.
        digest: of its bytes; empty where nobody looks for equal images.
        row: its quantized feature, int16, where it is known already; then it has no pixels.
    """

    index: int
    pixels: NDArray[np.uint8] | None = field(repr=False)
    thumbnail: bytes | None = field(repr=False)
    reason: str
    digest: bytes = field(default=b"", repr=False)
    row: NDArray[np.int16] | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Embedded:
    """A batch of images of a source, in its order, with the features of those that can be used.

    Attributes:
        items: all images of the batch.
        features: float32, shape (n, dimension): a row for each item with pixels.
    """

    items: list[LoadedImage] = field(repr=False)
    features: NDArray[np.float32] = field(repr=False)


def load_image(
    images: ImageSource,
    index: int,
    transform: Transform,
    *,
    digester: SiteKey | None = None,
    known: Mapping[bytes, NDArray[np.int16]] = NOTHING_KNOWN,
    keep_thumbnail: bool = False,
    must_read: bool = False,
) -> LoadedImage:
    """Read, decode and prepare one image.

    Args:
        digester: makes the digest by which equal images are found; none where None.
        known: the rows of images that are embedded already, by their digests; these are decoded for a picture only.
        keep_thumbnail: whether to make a picture for reports; of public images only.
        must_read: refuse a file that cannot be read; a file that is read and holds no image is still left out.

    Raises:
        UnreadableFile: see `must_read`.
    """
    try:
        file = images.file(index)
        thumbnail, digest = None, b""
        if digester is not None:
            digest = digester.digest("image", (file,) if isinstance(file, bytes) else image_blocks(images, index))
        if (row := known.get(digest)) is not None and not keep_thumbnail:
            return LoadedImage(index, None, None, "", digest, row)
        image = images.read(index) if file is None else decode_for(file, transform, max_pixels=images.max_pixels)
        if keep_thumbnail:
            picture = image
            if not isinstance(picture, Image.Image):
                picture = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
            thumbnail = png_thumbnail(picture, side=_THUMBNAIL_PIXELS)
        if row is not None:
            return LoadedImage(index, None, thumbnail, "", digest, row)
        return LoadedImage(index, prepare_image(image, transform), thumbnail, "", digest)
    except (UnreadableImage, BadData) as error:
        if must_read and isinstance(error, UnreadableFile):
            raise UnreadableFile(
                f"{images.names[index]!r} cannot be read now ({error}) and is not taken for removed. Nothing was "
                "changed; let this user read the file, or take it out, and give the same command again"
            ) from None
        return LoadedImage(index, None, None, str(error))


def image_for(images: ImageSource, index: int, transform: Transform) -> ImageLike:
    """Return one image of a source, decoded for a network.

    Raises:
        UnreadableImage: it cannot be read.
    """
    file = images.file(index)
    return images.read(index) if file is None else decode_for(file, transform, max_pixels=images.max_pixels)


def loaded_batches(
    load: Callable[[int], LoadedImage], indices: Iterable[int], *, batch_size: int, threads: int
) -> Generator[list[LoadedImage]]:
    """Batches in the order of the indices, the next two always being loaded while the caller works on this one.

    Each batch but the last has `batch_size` images that can be used, and what lies between them that cannot: a forward
    pass costs the same however many images it has.
    """
    remaining = iter(indices)
    waiting: deque[Future[list[LoadedImage]]] = deque()
    at_once = min(_AT_ONCE, max(1, batch_size // threads))

    def load_some(some: list[int]) -> list[LoadedImage]:
        return [load(index) for index in some]

    with ThreadPoolExecutor(threads, thread_name_prefix="embed") as pool:

        def submit() -> None:
            if some := list(islice(remaining, at_once)):
                waiting.append(pool.submit(load_some, some))

        try:
            for _ in range(threads + -(-2 * batch_size // at_once)):
                submit()
            batch: list[LoadedImage] = []
            usable = 0
            while waiting:
                for item in waiting.popleft().result():
                    batch.append(item)
                    usable += item.pixels is not None
                    if usable == batch_size or len(batch) == _MOST_SKIPPED + batch_size:
                        yield batch
                        batch, usable = [], 0
                submit()
            if batch:
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def embedded_batches(backbone: Backbone, batches: Iterable[list[LoadedImage]]) -> Generator[Embedded]:
    """Batches with their features."""
    for items in batches:
        pixels = [item.pixels for item in items if item.pixels is not None]
        features = np.empty((0, backbone.dimension), dtype=np.float32)
        yield Embedded(items, backbone.embed_prepared(np.stack(pixels)) if pixels else features)


def digested(images: ImageSource, digester: SiteKey, batch: Embedded) -> Embedded:
    """Add the digests of its images to a batch that came from a process without the site's key.

    Raises:
        UnreadableImage: an image that was embedded cannot be read any more.
    """
    items = [
        item
        if item.pixels is None
        else replace(item, digest=digester.digest("image", image_blocks(images, item.index)))
        for item in batch.items
    ]
    return replace(batch, items=items)


def append_batch(
    writer: ShardWriter,
    images: ImageSource,
    batch: Embedded,
    *,
    labels: NDArray[np.int16],
    people: Digests | None,
    keep_thumbnails: bool,
) -> None:
    """Add a batch to a shard that is being written; when this returns it survives a crash.

    Args:
        labels: places in the class list, -1 where unknown; of all images of the source.
        people: digest of each image's person under the site's key; None where nobody says.
    """
    items = batch.items
    skipped = list(images.left_out) if writer.position == 0 else []
    skipped += [
        Skipped(images.names[item.index], item.reason) for item in items if item.pixels is None and item.row is None
    ]
    loaded = [item for item in items if item.pixels is not None]
    usable = usable_rows(batch.features)
    blank = [item for item, good in zip(loaded, usable, strict=True) if not good]
    kept = [item for item, good in zip(loaded, usable, strict=True) if good]
    skipped += [Skipped(images.names[item.index], "its feature is zero or not finite") for item in blank]
    features: NDArray[np.floating] | NDArray[np.int16] = batch.features[usable]
    if known := {item.index: item.row for item in items if item.row is not None}:
        rows = dict(zip((item.index for item in kept), quantize(features.astype(np.float64)), strict=True)) | known
        kept = [item for item in items if item.index in rows]
        features = np.stack([rows[item.index] for item in kept])
    indexes = np.array([item.index for item in kept], dtype=np.int64)
    digests = b"".join(item.digest for item in kept)
    writer.append(
        features,
        labels[indexes],
        [images.names[item.index] for item in kept],
        thumbnails=[item.thumbnail or b"" for item in kept] if keep_thumbnails else None,
        persons=None if people is None else people[indexes],
        image_digests=as_digests(digests) if digests else None,
        skipped=skipped,
        position=items[-1].index + 1,
    )


Duplicates = Literal["refuse", "keep-first", "keep-all"]
"""The treatment of private images that are there more than once."""

Progress = Callable[[int, int], None]

Embedder = Callable[[Backbone, Callable[[int], LoadedImage], range], Generator[Embedded]]
"""Loads images with what it is given, a function that can be sent elsewhere, and embeds them, in order."""

CHECKPOINT = 32
"""Images between two checkpoints of a backbone that takes one at a time: a checkpoint is half a dozen syncs of a disk,
however little was computed."""


@dataclass(frozen=True)
class EmbedReport:
    """The outcome of embedding a source.

    Attributes:
        path: folder of the shard.
        records: images embedded.
        skipped: images left out, each with its reason; never silently.
        resumed_from: images of the source already done by an interrupted run.
        notes: sentences a person should read, for example where the class list came from.
        same_images: images that are there more than once: the names of their files, and how they contradict themselves
            ("" where they do not). Those under different labels come first. For the site's own people.
        passed_over: files that are certainly no images (feature_store.image_files).
        copies, contradictions, shared: how many private images were left out, and why (feature_store.same_images).
        listed: the table of them next to the shard; None where there is none.
    """

    path: Path
    records: int
    skipped: tuple[Skipped, ...]
    resumed_from: int
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...]
    same_images: tuple[tuple[tuple[str, ...], str], ...] = ()
    passed_over: tuple[Skipped, ...] = ()
    copies: int = 0
    contradictions: int = 0
    shared: int = 0
    listed: Path | None = None


def embed_source(
    source: ImageSource | str | Path,
    backbone: Backbone | Callable[[], Backbone],
    out: str | Path,
    *,
    classes: Sequence[str] | None = None,
    public: bool = False,
    batch_size: int | None = None,
    progress: Progress | None = None,
    thumbnails: bool | None = None,
    threads: int | None = None,
    persons: PersonColumn | None = None,
    duplicates: Duplicates | None = None,
    key: SiteKey | Path | None = None,
    scanned: Progress | None = None,
    max_records: int | None = None,
    update: bool = False,
    random_bytes: Callable[[int], bytes] = os.urandom,
    embedder: Embedder | None = None,
) -> EmbedReport:
    """Embed every image of a source into a shard.

    An interrupted run leaves a hidden folder next to `out`; the same call goes on from there, and gives the same
    features. A finished shard of the same job is compared with its source, by the bytes of every image. If all are the
    same, and what was left out still cannot be read, the shard is left as it is and reported. Otherwise it is brought
    up to date, as with `update`. A private shard most of whose images are others is refused: two sites may use the same
    names, and one of them may mistype `out`.

    With `update`, a finished shard is brought up to date with its source in one step, whatever its source held before.
    An image whose bytes it holds, or an interrupted run embedded, is not embedded again. A record of the same image,
    label and person keeps its id. The whole source is compared again, so the result has the records of a shard that is
    made from nothing. A file that cannot be read ends it before anything changes: what a disk withholds must not pass
    for what was removed.

    Args:
        source: an ImageSource, or what `open_source` opens.
        backbone: makes the features; or what loads it, once source, labels, people and place were found to be right.
        out: folder of the shard.
        classes: the PUBLIC class list, in label order. Labels of the source are matched by name. Without it the
            source's own names are taken: right only if they are public, the same for all parties, and complete.
        public: whether these are public images. Their labels, if any, are truth for scoring and never leave for
            a vote; those outside `classes` become unknown.
        batch_size: images between two checkpoints, rounded up to whole forward passes of the backbone; one pass when
            None, or `CHECKPOINT` images where a pass takes one.
        progress: called after every batch with (images done, images in all).
        thumbnails: keep a small PNG of each image; by default for public images, and refused for private ones.
        threads: that read and prepare images while the backbone computes; as many as there are cores when None.
        persons: the place that names the person of each image; kept with a private shard, as digests.
        duplicates: the treatment of private images that are there more than once: of each person's identical ones the
            first is kept, and none under different labels (the default; feature_store.same_images); or they are
            refused, or all kept. Public ones are all kept, and reported.
        key: the site's key for digests of persons and images, or its file; by default the file SITE_KEY_FILE beside
            `out`, which is made where there is none. Private shards only.
        scanned: called while private images are compared before they are embedded, with (images read, images in all).
        max_records: a public bound on the records of a private shard, declared in advance and kept by it: more are
            refused. Tasks whose models need half the noise where it is kept name it (labeler.setting).
        update: bring a private shard that is there up to date, whatever its source held before.
        random_bytes: source of record ids and row order; the operating system's except in simulations.
        embedder: loads and embeds elsewhere (feature_store.cluster.embedding, decode_process); this process when None.

    Raises:
        BadData: no image could be read; private images without a label or with one outside `classes`, or without a
            person.
        IdenticalImages: private images are there more than once, and are to be refused. Found by their bytes before
            anything is embedded; by their features at the end, when the same call with another `duplicates` has
            nothing left to compute.
        InvalidSetting: a setting out of bounds, or `out` holds something else; there are more records than declared.
        OutputInUse: another process is writing it.
        StorageFull: there is no room left; the same call goes on from the last checkpoint.
    """
    if (batch_size is not None and batch_size < 1) or (threads is not None and threads < 1):
        raise InvalidSetting(f"batch_size and threads must be at least 1, found {batch_size} and {threads}")
    if thumbnails and not public:
        raise InvalidSetting("pictures are kept in public shards only; leave thumbnails out for private images")
    if public and (persons is not None or duplicates not in (None, "keep-all")):
        raise InvalidSetting("of public images nobody is a person to protect, and every one is kept and asked about")
    path = Path(out)
    if path.exists() and not (path / MANIFEST_NAME).is_file():
        # Before the site's key is made in the same folder, and before anything is read.
        raise InvalidSetting(
            f"the shard is to be written to {str(path)!r}, which is there already and is no shard; name a new folder"
        )
    if update and embedder is not None:
        raise InvalidSetting("a shard is brought up to date in one process")
    keep_thumbnails = public if thumbnails is None else thumbnails
    policy: Duplicates = duplicates or ("keep-all" if public else "keep-first")
    listed = list_source(source, classes=classes, public=public, persons=persons)
    images, names, labels, notes = listed.images, listed.classes, listed.labels, listed.notes
    network = backbone() if callable(backbone) else backbone
    passes = -(-(batch_size or (CHECKPOINT if network.batch_size == 1 else 1)) // network.batch_size)

    digester = PUBLIC_KEY if public else _site_key(path, key)
    sent = partial(load_image, images, transform=network.transform, keep_thumbnail=keep_thumbnails)
    known = NOTHING_KNOWN

    def here(indices: range) -> Generator[Embedded]:
        one, size = partial(sent, digester=digester, known=known, must_read=renew), passes * network.batch_size
        with closing(loaded_batches(one, indices, batch_size=size, threads=threads or all_cores())) as batches:
            yield from embedded_batches(network, batches)

    people = None
    if listed.people is not None:
        people = digester.digests("person", [name.encode("utf-8", "surrogateescape") for name in listed.people])
    job = _job_digest(images, network, names, labels, public=public, thumbnails=keep_thumbnails, people=people)
    renew = update
    if path.exists() and not update:
        _refuse_other(path, job, network.fingerprint, names, public=public)
        finished = _report_finished(path, images, notes, policy, max_records)
        again, left_out = _compare(path, images, sent, digester, scanned, labels=labels, people=people)
        if again == "same":
            return replace(finished, skipped=left_out)
        if again == "other":
            raise _made_otherwise(path, _OTHER_FILES)
        renew, embedder = True, None
    with (
        while_there_is_room(path),
        ShardWriter(
            path,
            classes=names,
            fingerprint=network.fingerprint,
            dimension=network.dimension,
            public=public,
            backbone=network.spec,
            job=job,
            site_key=digester.name,
            max_records=max_records,
            attributes=isinstance(images, AttributeSource),
            update=renew,
            random_bytes=random_bytes,
        ) as writer,
    ):
        if writer.position and not _is_current(writer, images, sent, digester):
            writer.begin_again()
        if renew:
            writer.check_replaced(knows_persons=people is not None)
        known = writer.known_rows() if embedder is None else NOTHING_KNOWN
        resumed_from = writer.position
        total = len(images.names)
        if policy == "refuse" and not public and not resumed_from:
            refuse_same_bytes(images, labels, people, digester, scanned)
        left = range(writer.position, total)
        with closing(here(left) if embedder is None else embedder(network, sent, left)) as batches:
            for batch in batches:
                if embedder is not None:
                    batch = digested(images, digester, batch)
                append_batch(writer, images, batch, labels=labels, people=people, keep_thumbnails=keep_thumbnails)
                if progress is not None:
                    progress(writer.position, total)
        skipped = writer.skipped()
        first = keep_first(writer.gathered()) if policy == "keep-first" else None
        same = find_same_images(writer.gathered()) if first is None else first.same
        said = named(same, writer.sources() if same else ())
        if policy == "refuse" and same:
            raise refusal(said, "they were compared by their features as well, and nothing is left to be computed")
        if first is None:
            records = writer.records
            unchanged = not writer.finish()
        else:
            records = int(first.keep.sum())
            if first.same:
                replace_file(same_images_list(path), first.listed(writer.sources()), mode=PRIVATE_FILE)
            else:
                same_images_list(path).unlink(missing_ok=True)  # of an earlier shard of this name
            unchanged = not writer.finish(keep=first.keep)
    if unchanged and not update:
        return finished
    report = EmbedReport(
        path, records, skipped, resumed_from, names, network.fingerprint, notes, said, images.passed_over
    )
    if first is None or not same:
        return report
    return replace(
        report,
        copies=first.copies,
        contradictions=first.contradictions,
        shared=first.shared,
        listed=same_images_list(path),
    )


@dataclass(frozen=True, eq=False)
class Listed:
    """A source whose labels and people were found to be right, before anything is embedded.

    Attributes:
        classes: the class list.
        labels: places in it; see `match_labels`.
        people: the person of each image; None where nobody says.
        notes: sentences a person should read.
    """

    images: ImageSource = field(repr=False)
    classes: tuple[str, ...]
    labels: NDArray[np.int16] = field(repr=False)
    people: Sequence[str] | None = field(repr=False)
    notes: tuple[str, ...]


def list_source(
    source: ImageSource | str | Path, *, classes: Sequence[str] | None, public: bool, persons: PersonColumn | None
) -> Listed:
    """Open a source and match its labels and people; see `embed_source` for arguments and errors."""
    images = open_source(source, public=public) if isinstance(source, str | Path) else source
    if public:
        check_names_are_text(images.names)
    if classes is None and not public and images.label_names and not images.names_are_declared:
        raise InvalidSetting(
            "name the public class list (--classes): this source only knows the labels of its own records, and a list "
            "read off private records would tell which classes are present"
        )
    names = tuple(images.label_names if classes is None else classes)
    labels = match_labels(images, names, public=public)
    notes = _notes(images, names, given=classes is not None, public=public)
    return Listed(images, names, labels, None if persons is None else persons.of(images), notes)


def same_images_list(shard: Path) -> Path:
    """The table of identical images of a shard: names of files, for nobody but its owner."""
    return shard.with_name(f"{shard.name}.duplicates.csv")


def match_labels(images: ImageSource, classes: tuple[str, ...], *, public: bool) -> NDArray[np.int16]:
    """Translate the source's labels to places in the class list, -1 where there is none; of attributes to 1 and 0.

    Labels are matched by name. A number is a name like any other, unless the source says that its numbers are places
    (`labels_are_places`). Classes called 1 and 2 need not be the second and third of a list.

    Returns:
        Shape (images,), or (images, classes) of a source of attributes.

    Raises:
        BadData: private images without a label, or with a name that is not in the list. Which classes a party holds is
            its secret: no name is repeated but the one that a name of the list was probably meant to be.
    """
    if isinstance(images, AttributeSource):
        return images.columns(classes, public=public)
    place = {one_spelling(name): index for index, name in enumerate(classes)}
    known = list(map(one_spelling, images.label_names))
    are_numbers = _are_other_numbers(known, place)
    if are_numbers and images.labels_are_places:
        place = {str(index): index for index in range(len(classes))}
    if len(set(known)) != len(known):
        raise BadData("two labels of this source are one name, composed differently in Unicode; rename one")
    table = np.array([place.get(name, -1) for name in known] + [-1], dtype=np.int16)
    labels = table[np.array([-1 if label is None else label for label in images.labels], dtype=np.int64)]
    missing = int((labels < 0).sum())
    if missing and not public and not known:
        raise BadData(
            "these images carry no labels; put private images into one folder per class (or a Parquet file with a "
            "column label), or pass --public if they are public"
        )
    if missing and not public and are_numbers and not images.labels_are_places:
        raise BadData(f"the labels of these private images are numbers, and no name of the class list is one{NUMBERS}")
    if missing and not public:
        silent = [row for row, label in enumerate(images.labels) if label is None]
        more = ", ..." if len(silent) > _SHOWN else ""
        rows = ", ".join(map(str, silent[:_SHOWN])) + more
        raise BadData(
            f"{missing} of {len(labels)} private images have no label in the class list of {len(classes)} names; "
            + (f"{len(silent)} have none at all (row {rows}, counted from 0); " if silent else "")
            + "labels are matched by name, so check the list's spelling, or take those images out"
            + misspelt(classes, images.label_names)
        )
    return labels


NUMBERS: Final = (
    ". A number is no place in the list, because some count from 0 and some from 1. Write the names of the classes for "
    "them: as names of folders, or as text in the column label; or list the numbers as names (--classes 1,2)"
)
_SHOWN: Final = 5


def _are_other_numbers(known: Sequence[str], place: Mapping[str, int]) -> bool:
    """Return whether all labels of a source are numbers, and none is a name of the list."""
    return bool(known) and all(name.isdecimal() for name in known) and not any(name in place for name in known)


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, for people."""
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _site_key(out: Path, key: SiteKey | Path | None) -> SiteKey:
    if isinstance(key, SiteKey):
        return key
    with while_there_is_room(out):
        return site_key(out.parent / SITE_KEY_FILE if key is None else key)


@contextmanager
def while_there_is_room(out: Path) -> Iterator[None]:
    """Raise StorageFull where a disk has no room left for a shard; every other error passes."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StorageFull(
            f"there is no room left for {out.name!r}: the disk is full, or its quota is used up. What was embedded is "
            "kept; make room and give the same command again"
        ) from error


def _job_digest(
    images: ImageSource,
    backbone: Backbone,
    classes: tuple[str, ...],
    labels: NDArray[np.int16],
    *,
    public: bool,
    thumbnails: bool,
    people: Digests | None,
) -> str:
    settings: list[object] = [source_digest(images), backbone.fingerprint, list(classes), public, thumbnails]
    if labels.ndim > 1:
        # Labels are in the source's own digest, attributes are not.
        settings.append({"attributes": hashlib.sha256(np.ascontiguousarray(labels, dtype="<i2").tobytes()).hexdigest()})
    if people is not None:
        # Digests under the site's key: a plain hash of names of people would let others check guesses.
        settings.append(hashlib.sha256(np.ascontiguousarray(people, dtype="<i8").tobytes()).hexdigest())
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _notes(images: ImageSource, classes: tuple[str, ...], *, given: bool, public: bool) -> tuple[str, ...]:
    notes = []
    if not given and classes and not public:
        notes.append(
            f"The class list was taken from the source: {_listed(classes)}. It becomes public: name it yourself "
            "if which classes are present is private, or if other parties hold more."
        )
    place = {one_spelling(name): index for index, name in enumerate(classes)}
    are_numbers = not isinstance(images, AttributeSource) and _are_other_numbers(images.label_names, place)
    if are_numbers and images.labels_are_places:
        said = [f"{number} is {name}" for number, name in enumerate(classes)]
        notes.append(f"Numbers as labels were taken as places in the class list, counted from 0: {_listed(said)}.")
    elif public and images.label_names:
        other = [name for name in images.label_names if one_spelling(name) not in place]
        if other:
            notes.append(
                f"These public images have labels outside the class list, which score nothing: {_listed(other)}"
                + (NUMBERS if are_numbers else misspelt(classes, other)).rstrip(".")
                + "."
            )
        if len(other) < len(images.label_names):
            taken = [name for name in images.label_names if one_spelling(name) in place]
            notes.append(
                f"Labels of these public images are {_listed(taken)}. They only score tasks that have classes of these "
                "names; no vote and no query sees them."
            )
    return tuple(notes)


def _report_finished(
    path: Path,
    images: ImageSource,
    notes: tuple[str, ...],
    policy: Duplicates,
    max_records: int | None,
) -> EmbedReport:
    shard = Shard.open(path)
    if max_records not in (None, shard.max_records):
        raise InvalidSetting(
            f"{path.name!r} exists already, and was not declared to hold at most {max_records} records; embed into "
            "another output, or delete it first"
        )
    same = find_same_images(shard, rows=shard.rows, by_person=policy == "keep-first")
    if same and policy == "keep-first":
        raise InvalidSetting(
            f"{path.name!r} exists already, with all files of identical images; delete it first, or keep them "
            "(--duplicates keep-all)"
        )
    if not shard.is_public and policy != "keep-first":
        known = {*shard.sources, *(one.source for one in shard.skipped)}
        if not known.issuperset(images.names):
            raise InvalidSetting(
                f"{path.name!r} exists already, without a record of some files (copies of others, or contradictions); "
                "delete it first, or leave --duplicates out"
            )
    said = named(same, shard.sources if same else ())
    if same and policy == "refuse":
        raise refusal(said, f"{path.name!r} exists already and holds them all")
    listed = same_images_list(path)
    if shard.image_digests is None:
        notes += (
            "An earlier version made this shard and kept nothing to compare its images by. Move it away, and give the "
            "same command again, if an image has changed since.",
        )
    return EmbedReport(
        path,
        len(shard.labels),
        shard.skipped,
        len(images.names),
        shard.classes,
        shard.fingerprint,
        notes,
        said,
        images.passed_over,
        listed=listed if listed.exists() else None,
    )


_OTHER_FILES: Final = "from another source: files, labels or people are others"


def _refuse_other(path: Path, job: str, fingerprint: str, classes: tuple[str, ...], *, public: bool) -> None:
    """Refuse a finished shard of another job, and say what is other; see `_job_digest`."""
    shard = Shard.open(path)
    if shard.job == job:
        return
    if shard.is_public != public:
        how = "of public images" if shard.is_public else "of private images"
    elif shard.fingerprint != fingerprint:
        how = "with another backbone"
    elif shard.classes != classes:
        how = "with another class list, or with its names in another order"
    else:
        how = _OTHER_FILES
    raise _made_otherwise(path, how)


def _made_otherwise(path: Path, how: str) -> InvalidSetting:
    return InvalidSetting(f"{path.name!r} exists already and was made {how}; choose another output, or delete it first")


def _compare(
    path: Path,
    images: ImageSource,
    load: Callable[[int], LoadedImage],
    digester: SiteKey,
    progress: Progress | None,
    *,
    labels: NDArray[np.int16],
    people: Digests | None,
) -> tuple[Literal["same", "changed", "other"], tuple[Skipped, ...]]:
    """Compare a finished shard with its source, by the bytes of every image.

    Args:
        labels, people: of all images of the source; see `append_batch`.

    Returns:
        "same" where every image is, and what could not be read still cannot; "other" where most records of a private
        shard are not the images of their names; else "changed". And what is left out today.

    Raises:
        InvalidSetting: something changed, and records of the shard were deleted, which must not come back.
    """
    shard = Shard.open(path)
    if shard.image_digests is None or shard.site_key != digester.name:
        return "same", shard.skipped  # it kept nothing to compare them by

    def of_record(digest: bytes, label: NDArray[np.int16], person: NDArray[np.int64] | None) -> tuple[bytes, ...]:
        return digest, label.tobytes(), b"" if person is None else person.tobytes()

    digests = [row.astype("<i8").tobytes() for row in shard.image_digests]
    stored = dict(zip(shard.sources, digests, strict=True))
    theirs = [None] * len(digests) if shard.persons is None else shard.persons
    known = {of_record(*one) for one in zip(digests, shard.labels, theirs, strict=True)}
    reasons = {one.source: one.reason for one in shard.skipped}
    left_out = [Skipped(one.source, one.reason) for one in images.left_out]
    others, has_changed = 0, False
    for index, name in enumerate(images.names):
        if name not in stored and name in reasons:
            reason = load(index).reason
            has_changed |= not reason
            left_out.append(Skipped(name, reason or reasons[name]))
        else:
            found = digest_of(images, index, digester)
            others += name in stored and found not in (b"", stored[name])
            person = None if people is None else people[index]
            # A copy has no own record, but another one of its label and person has its bytes.
            same = found == stored[name] if name in stored else of_record(found, labels[index], person) in known
            has_changed |= not same
        if progress is not None:
            progress(index + 1, len(images.names))
    is_erased = len(shard) < len(stored)
    if has_changed and is_erased:
        raise InvalidSetting(
            f"images of {path.name!r} changed, and records of it were deleted, which would come back; embed into "
            "another output"
        )
    if not shard.is_public and 2 * others > len(stored):
        return "other", ()
    is_same = not has_changed and (is_erased or set(left_out) == set(shard.skipped))
    return "same" if is_same else "changed", tuple(left_out)


def digest_of(images: ImageSource, index: int, digester: SiteKey) -> bytes:
    """Return the digest of one image's bytes; empty where they cannot be read."""
    try:
        return digester.digest("image", image_blocks(images, index))
    except UnreadableImage:
        return b""


def _is_current(
    writer: ShardWriter, images: ImageSource, load: Callable[[int], LoadedImage], digester: SiteKey
) -> bool:
    """Tell whether what an interrupted writer gathered, and left out, would be the same today."""
    digests, names = writer.gathered().image_digests, writer.sources()
    place = {name: index for index, name in enumerate(images.names)}
    if names and digests is None:
        return False  # an earlier version kept nothing to compare them by
    rows = zip(names, () if digests is None else digests.astype("<i8"), strict=True)
    skipped = {one.source: one.reason for one in writer.skipped()}
    today = {one.source: one.reason for one in images.left_out}
    today |= {name: load(place[name]).reason for name in skipped if name in place}
    return today == skipped and all(digest_of(images, place[name], digester) == row.tobytes() for name, row in rows)
