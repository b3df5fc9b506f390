"""Private images that are there twice: looked for before hours go into embedding them, and refused in a sentence.

The sentence counts; names of files stand beside it, for the people of the site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from feature_store.images import ImageSource
from feature_store.same_images import SameImages, same_bytes
from feature_store.site_key import DIGEST_WORDS, Digests, SiteKey, as_digests
from labeler.errors import IdenticalImages, UnreadableImage

Twice = tuple[tuple[tuple[str, ...], str], ...]
"""For each image the names of its files, and how it contradicts itself ("" where it does not)."""

_SCANNED_AT_ONCE = 64


def refuse_same_bytes(
    images: ImageSource,
    labels: NDArray[np.int16],
    people: Digests | None,
    digester: SiteKey,
    scanned: Callable[[int, int], None] | None,
) -> None:
    """Refuse files that are there twice before hours go into embedding them; unreadable ones are somebody else's."""
    digests = np.empty((len(images.names), DIGEST_WORDS), dtype=np.int64)
    readable = np.ones(len(digests), dtype=bool)
    for index in range(len(digests)):
        try:
            digests[index] = as_digests(digester.digest("image", images.blocks(index)))
        except UnreadableImage:
            readable[index] = False
        if scanned is not None and (index % _SCANNED_AT_ONCE == 0 or index + 1 == len(digests)):
            scanned(index + 1, len(digests))
    rows = np.flatnonzero(readable)
    same = same_bytes(digests[rows], labels[rows], None if people is None else people[rows])
    names = [images.names[row] for row in rows.tolist()]
    # Files that are no images are skipped when they are embedded, however many there are of one.
    same = tuple(group for group in same if _is_image(images, int(rows[group.rows[0]])))
    if same:
        said = named(same, names)
        raise refusal(said, "nothing was embedded; their features were not compared yet")


def _is_image(images: ImageSource, index: int) -> bool:
    try:
        images.read(index)
    except UnreadableImage:
        return False
    return True


def named(same: Sequence[SameImages], sources: Sequence[str]) -> Twice:
    """Groups of equal images by the names of their files."""
    return tuple((tuple(sources[row] for row in group.rows), group.contradiction) for group in same)


def refusal(said: Twice, state: str) -> IdenticalImages:
    """The refusal of them all.

    Args:
        said: see `named`.
        state: how far the embedding has come.
    """
    files = sum(len(names) for names, _ in said)
    labels = sum("label" in how for _, how in said)
    return IdenticalImages(
        f"{len(said)} private {'image is' if len(said) == 1 else 'images are'} there more than once, as {files} files"
        + (f", {labels} of them under different labels" if labels else "")
        + ". A record that is there twice is protected half as well as one that is there once. Look at the list, take "
        "the wrong files out and embed again; or keep the first file of each (--duplicates keep-first), or all of them "
        f"(--duplicates keep-all); {state}",
        groups=said,
    )
