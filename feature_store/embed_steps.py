"""The steps from an image of a source to a row of a shard, each a function that can run where it is cheapest.

    load_image          one image: read, decode, prepare    any thread or process; needs no network and no GPU
    loaded_batches      many of them on all cores, ahead of whoever takes them, in the source's order
    embedded_batches    forward passes, each of as many images as the network takes at once
    appended_batches    rows of a shard, durably            one process, in the source's order

What one step makes of an image depends on that image alone, never on its batch, so the steps may be spread over
threads, processes or machines, stopped and gone on with, and give the same shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones.backbone import Backbone, ImageLike, decode_for, prepare_image
from feature_store.backbones.spec import Transform
from feature_store.decode import Skipped, png_thumbnail
from feature_store.images import ImageSource
from feature_store.quantize import usable_rows
from feature_store.shard_writer import ShardWriter
from labeler.errors import BadData, UnreadableImage
from labeler.system.site_key import Digests, SiteKey, as_digests

_THUMBNAIL_PIXELS = 64

_AT_ONCE = 8
"""Images that a thread takes together: handing over one at a time would cost more than decoding a small one."""


_MOST_WAITING = 32
"""Batches that wait for a disk; then the device waits, too."""

_MOST_SKIPPED = 4096
"""Images that cannot be used in one batch: after so many it ends, so that they are not tried again after a crash."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """One image of a source, ready for the network, or the reason why not.

    Attributes:
        index: its place in the source.
        pixels: what `prepare_image` makes of it; None where it cannot be used.
        thumbnail: PNG bytes, where they are kept.
        reason: why it cannot be used.
        digest: of its bytes; empty where nobody looks for equal images.
    """

    index: int
    pixels: NDArray[np.uint8] | None = field(repr=False)
    thumbnail: bytes | None = field(repr=False)
    reason: str
    digest: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, eq=False)
class Embedded:
    """A batch of images of a source, in its order, with the features of those that can be used.

    Attributes:
        items: all images of the batch.
        features: float32, shape (n, dimension): a row for each item with pixels.
    """

    items: list[Loaded] = field(repr=False)
    features: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Records:
    """What rows of a shard say besides their features; index by index of the source. Private; does not print.

    Attributes:
        labels: places in the class list, -1 where unknown.
        people: whose image each is, digests under the site's key; None where nobody says.
    """

    images: ImageSource = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    people: Digests | None = field(repr=False)
    keep_thumbnails: bool


def load_image(
    images: ImageSource,
    index: int,
    transform: Transform,
    *,
    digester: SiteKey | None = None,
    keep_thumbnail: bool = False,
) -> Loaded:
    """Read, decode and prepare one image.

    Args:
        digester: makes the digest by which equal images are found; none where None.
        keep_thumbnail: whether to make a picture for reports; of public images only.
    """
    try:
        file = images.file(index)
        image = _decoded(images, index, file, transform)
        thumbnail = None
        if keep_thumbnail:
            thumbnail = png_thumbnail(_picture(image), side=_THUMBNAIL_PIXELS)
        digest = b""
        if digester is not None:
            digest = digester.digest("image", (file,) if isinstance(file, bytes) else images.blocks(index))
        return Loaded(index, prepare_image(image, transform), thumbnail, "", digest)
    except (UnreadableImage, BadData) as error:
        return Loaded(index, None, None, str(error))


def appended_batches(
    writer: ShardWriter, records: Records, batches: Iterable[Embedded], *, aside: bool
) -> Generator[int]:
    """Add batch after batch; gives the writer's position whenever more of them survives a crash.

    Args:
        aside: in a thread of its own, what has come meanwhile at once: a device need not wait for a disk.
    """
    if not aside:
        for batch in batches:
            append_batch(writer, records, batch)
            yield writer.position
        return
    waiting: list[Embedded] = []
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="append") as pool:
        for batch in batches:
            waiting.append(batch)
            if writing is not None and (writing.done() or len(waiting) == _MOST_WAITING):
                writing.result()
                writing = None
                yield writer.position
            if writing is None:
                writing = pool.submit(append_batch, writer, records, _joined(waiting))
                waiting = []
        if writing is not None:
            writing.result()
    if waiting:
        append_batch(writer, records, _joined(waiting))
    if writing is not None:
        yield writer.position


def _joined(batches: list[Embedded]) -> Embedded:
    items = [item for batch in batches for item in batch.items]
    return Embedded(items, np.concatenate([batch.features for batch in batches]))


def image_for(images: ImageSource, index: int, transform: Transform) -> ImageLike:
    """One image of a source, decoded for a network as `load_image` decodes it.

    Raises:
        UnreadableImage: it cannot be read.
    """
    return _decoded(images, index, images.file(index), transform)


def _decoded(images: ImageSource, index: int, file: bytes | Path | None, transform: Transform) -> ImageLike:
    return images.read(index) if file is None else decode_for(file, transform, max_pixels=images.max_pixels)


def loaded_batches(
    load: Callable[[int], Loaded], indices: Iterable[int], *, batch_size: int, threads: int
) -> Generator[list[Loaded]]:
    """Batches in the order of the indices, the next two always being loaded while the caller works on this one.

    Each batch but the last has `batch_size` images that can be used, and what lies between them that cannot: a forward
    pass costs the same however many images it has.

    Args:
        load: what becomes of an index; runs in any thread.
        indices: in the source's order.
        batch_size: usable images of a batch.
        threads: that load.
    """
    remaining = iter(indices)
    waiting: deque[Future[list[Loaded]]] = deque()
    at_once = min(_AT_ONCE, max(1, batch_size // threads))

    def load_some(some: list[int]) -> list[Loaded]:
        return [load(index) for index in some]

    with ThreadPoolExecutor(threads, thread_name_prefix="embed") as pool:

        def submit() -> None:
            if some := list(islice(remaining, at_once)):
                waiting.append(pool.submit(load_some, some))

        try:
            for _ in range(threads + -(-2 * batch_size // at_once)):
                submit()
            batch: list[Loaded] = []
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


def embedded_batches(backbone: Backbone, batches: Iterable[list[Loaded]]) -> Generator[Embedded]:
    """Batches with their features; where a device computes, one pass is under way while the next is made ready."""
    begun: deque[tuple[list[Loaded], Callable[[], NDArray[np.float32]]]] = deque()
    for items in batches:
        pixels = [item.pixels for item in items if item.pixels is not None]
        begun.append((items, backbone.begin(np.stack(pixels)) if pixels else _nothing(backbone.dimension)))
        if len(begun) > backbone.passes_ahead:
            items, wait = begun.popleft()
            yield Embedded(items, wait())
    for items, wait in begun:
        yield Embedded(items, wait())


def digested(images: ImageSource, digester: SiteKey, batch: Embedded) -> Embedded:
    """A batch that came from where the site's key is not, with the digests of its images.

    Raises:
        UnreadableImage: an image that was embedded cannot be read any more.
    """
    items = [
        item if item.pixels is None else replace(item, digest=digester.digest("image", images.blocks(item.index)))
        for item in batch.items
    ]
    return replace(batch, items=items)


def append_batch(writer: ShardWriter, records: Records, batch: Embedded) -> None:
    """Add a batch to a shard that is being written; when this returns it survives a crash.

    Args:
        writer: its position is that of the batch.
        batch: what follows next in the source.
    """
    images, items = records.images, batch.items
    skipped = list(images.left_out) if writer.position == 0 else []
    skipped += [Skipped(images.names[item.index], item.reason) for item in items if item.pixels is None]
    loaded = [item for item in items if item.pixels is not None]
    usable = usable_rows(batch.features)
    blank = [item for item, good in zip(loaded, usable, strict=True) if not good]
    kept = [item for item, good in zip(loaded, usable, strict=True) if good]
    skipped += [Skipped(images.names[item.index], "its feature is zero or not finite") for item in blank]
    indexes = np.array([item.index for item in kept], dtype=np.int64)
    digests = b"".join(item.digest for item in kept)
    writer.append(
        batch.features[usable],
        records.labels[indexes],
        [images.names[item.index] for item in kept],
        thumbnails=[item.thumbnail or b"" for item in kept] if records.keep_thumbnails else None,
        persons=None if records.people is None else records.people[indexes],
        image_digests=as_digests(digests) if digests else None,
        skipped=skipped,
        position=items[-1].index + 1,
    )


def _picture(image: ImageLike) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def _nothing(dimension: int) -> Callable[[], NDArray[np.float32]]:
    return lambda: np.empty((0, dimension), dtype=np.float32)
