"""Identical images of one shard: equal bytes, or equal features, found by sorting digests.

A record that is there twice is protected as a group of two, and under two labels it teaches two things at once. So
private images are compared when they are embedded. What is compared are digests of 16 bytes per record, sorted once: no
pair of images is compared, and no image is kept in memory.

* Equal **bytes**: the same file under two names. Digests under the site's key are kept with the shard.
* Equal **features**: pictures that the backbone cannot tell apart, a re-encoded copy for example. Also what shards say
  that keep no digests.

**Keeping the first** (`keep_first`): of identical images with one label the first becomes a record; of identical images
with different labels none does. Then a record may stand for several files, so the rule has to be kept to one person:

    which files of a person become records depends on that person's files alone.

*A file* that comes or goes changes its own group of identical images and no other: a feature is a function of its image
(feature_store.embedding). Such a group is one record or none before, and one or none after. If it is one both
times, both have the same feature, label and person, and their ids are random. So shards with and without one
file differ in one record at most. *A person* whose files all come or go changes no record of anybody else, which is
what prices of people count on (labeler.methods.sensitivity). Were identical images of two people one record, or none,
a person who leaves would let one image of each such other person in. That is as many records as the two share images,
whatever `records_per_person` says. So each person keeps their own, and the site reads a report.

Where identical images are refused, equal bytes are looked for before hours go into embedding. The refusal is a sentence
that counts; it carries the names of files for the people of the site.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from feature_store.shard_writer import Gathered
from feature_store.sources import ImageSource, image_blocks
from labeler.errors import IdenticalImages, UnreadableImage
from labeler.system.site_key import DIGEST_WORDS, KEY_BYTES, Digests, SiteKey, as_digests

_ROWS_PER_BLOCK = 8192


Comparable = Shard | Gathered
"""Records to compare."""


@dataclass(frozen=True)
class SameImages:
    """Records that are one image. Private; a caller prints names of files to the site's own people only.

    Attributes:
        rows: their row numbers, ascending.
        labels_differ: whether they do not all have one label.
        persons_differ: whether they are said to be of different people.
    """

    rows: tuple[int, ...]
    labels_differ: bool
    persons_differ: bool

    @property
    def contradiction(self) -> str:
        """In words, without a label and without a person; "" where there is none."""
        found = ["different labels"] * self.labels_differ + ["different people"] * self.persons_differ
        return f"under {' and '.join(found)}" if found else ""


def find_same_images(
    records: Comparable, *, rows: NDArray[np.int64] | None = None, by_person: bool = False
) -> tuple[SameImages, ...]:
    """Every group of records that are one image, by bytes or by features.

    Args:
        records: what is compared.
        rows: which of them, ascending; all where absent.
        by_person: compare the images of each person among themselves, where it is known whose they are.

    Returns:
        Those under different labels first, then those of different people, then the rest; each by its first row.
    """
    chosen = np.arange(len(records.labels)) if rows is None else rows
    compared = [feature_digests(records.features, chosen)]
    if records.image_digests is not None:
        compared.append(records.image_digests[chosen])
    if by_person and records.persons is not None:
        compared = [np.hstack([digests, records.persons[chosen]]) for digests in compared]
    runs = [run for digests in compared for run in _runs(digests)]
    return _ordered((chosen[places] for places in _joined(runs)), records.labels, records.persons)


def feature_digests(features: NDArray[np.int16], rows: NDArray[np.int64]) -> Digests:
    """A digest of each row under a key of this call's own, read block by block."""
    key = SiteKey(os.urandom(KEY_BYTES))
    digests = np.empty((len(rows), 2), dtype=np.int64)
    for start in range(0, len(rows), _ROWS_PER_BLOCK):
        block = np.ascontiguousarray(features[rows[start : start + _ROWS_PER_BLOCK]])
        digests[start : start + len(block)] = key.digests("features", [row.tobytes() for row in block])
    return digests


def _runs(digests: Digests) -> Iterable[NDArray[np.int64]]:
    """Places of the rows that are there more than once, group by group, each ascending."""
    order = np.lexsort((np.arange(len(digests)), *digests.T))
    ordered = digests[order]
    same = (ordered[1:] == ordered[:-1]).all(axis=1)
    # Only what is there twice is looked at one by one.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        yield order[first : last + 1]


def _joined(runs: Iterable[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Groups that share a row, put together: equal bytes here and equal features there make one image."""
    group_of: dict[int, set[int]] = {}
    for run in runs:
        places = run.tolist()
        together = set(places).union(*(group_of[place] for place in places if place in group_of))
        group_of |= dict.fromkeys(together, together)
    groups = {id(group): group for group in group_of.values()}
    return [np.array(sorted(group), dtype=np.int64) for group in groups.values()]


def _ordered(
    groups: Iterable[NDArray[np.int64]], labels: NDArray[np.int16], persons: Digests | None
) -> tuple[SameImages, ...]:
    found = [
        SameImages(
            rows=tuple(rows.tolist()),
            labels_differ=bool((labels[rows] != labels[rows[0]]).any()),
            persons_differ=persons is not None and bool((persons[rows] != persons[rows[0]]).any()),
        )
        for rows in groups
    ]
    return tuple(sorted(found, key=lambda one: (not one.labels_differ, not one.persons_differ, one.rows)))


@dataclass(frozen=True, eq=False)
class KeptFirst:
    """The decision about records that are one image; see the module. Private; does not print.

    Attributes:
        keep: which records stay, shape (n,).
        same: every group of records that are one image, of one person or several.
        copies: how many records go because an equal one of the same person stays.
        contradictions: how many go because identical images of their person have different labels.
        shared: how many images are there under several people, each of whom keeps their own.
    """

    keep: NDArray[np.bool_] = field(repr=False)
    same: tuple[SameImages, ...] = field(repr=False)
    copies: int
    contradictions: int
    shared: int

    def listed(self, sources: Sequence[str]) -> bytes:
        """A table in CSV for the site's own people: each identical image by its files, and what became of them."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(("image", "file", "kept", "contradiction"))
        for number, group in enumerate(self.same, 1):
            for row in group.rows:
                table.writerow((number, sources[row], "yes" if self.keep[row] else "no", group.contradiction))
        return text.getvalue().encode("utf-8", "surrogateescape")


def keep_first(records: Comparable) -> KeptFirst:
    """Keep one of each person's identical images with one label, and none where labels differ; see the module."""
    keep = np.ones(len(records.labels), dtype=bool)
    copies = contradictions = 0
    for group in find_same_images(records, by_person=True):
        keep[list(group.rows if group.labels_differ else group.rows[1:])] = False
        copies += 0 if group.labels_differ else len(group.rows) - 1
        contradictions += len(group.rows) if group.labels_differ else 0
    same = find_same_images(records)
    return KeptFirst(keep, same, copies, contradictions, shared=sum(group.persons_differ for group in same))


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
            digests[index] = as_digests(digester.digest("image", image_blocks(images, index)))
        except UnreadableImage:
            readable[index] = False
        if scanned is not None and (index % _SCANNED_AT_ONCE == 0 or index + 1 == len(digests)):
            scanned(index + 1, len(digests))
    rows = np.flatnonzero(readable)
    same = _ordered(_runs(digests[rows]), labels[rows], None if people is None else people[rows])
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
    """The refusal of them all."""
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
