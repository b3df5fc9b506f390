"""Features as rows of integers: quantized, and read in pieces from a memory map.

Integers make similarity exact, so one record moves at most one vote (feature_store.index.definition).
"""

from __future__ import annotations

import base64
import binascii
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData
from labeler.untrusted import MOST_PROBE_NUMBERS

FEATURE_SCALE = 2048
"""A normalized feature times this, rounded, is stored. Inner products then stay below 2^24 and are exact in float32."""


def quantize(features: NDArray[np.floating]) -> NDArray[np.int16]:
    """Normalise each row to Euclidean length 1 in float64, and round 2048 times it to int16.

    Rows are treated one by one: no statistic of the data enters, so a record's feature depends on its image alone.

    Args:
        features: floats, shape (n, d), any length but zero.

    Returns:
        int16, shape (n, d), `rint(2048 * x / ||x||)`; halves round to even.

    Raises:
        BadData: not two-dimensional floats, or a row that is zero or not finite.
    """
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating):
        raise BadData(
            f"features must be floats of shape (n, dimension), found {features.dtype} of shape {features.shape}"
        )
    usable = usable_rows(features)
    if not usable.all():
        raise BadData(
            f"{int((~usable).sum())} of {len(usable)} features are zero or not finite, so they have no direction; "
            "the images may be blank, or the backbone's weights damaged"
        )
    exact = features.astype(np.float64)
    # Dividing by the largest entry first keeps the squares of very large and very small rows in range.
    exact /= np.abs(exact).max(axis=1, keepdims=True, initial=0.0)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    exact *= FEATURE_SCALE
    return np.rint(exact, out=exact).astype(np.int16)


def on_grid(features: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows may have been made by `quantize`: whole numbers whose length rounding explains.

    Args:
        features: float64, shape (n, d).
    """
    slack = features.shape[1] ** 0.5 / 2
    # Comparisons with NaN are False; without an upper bound here the squares could overflow.
    whole = (np.abs(features) <= FEATURE_SCALE + slack).all(axis=1)
    whole &= (np.rint(np.where(whole[:, None], features, 0.5)) == features).all(axis=1)
    lengths = np.linalg.norm(np.where(whole[:, None], features, 0.0), axis=1)
    ready: NDArray[np.bool_] = whole & (np.abs(lengths - FEATURE_SCALE) <= slack)
    return ready


def usable_rows(features: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Which rows have a direction: finite, and not all zero."""
    usable: NDArray[np.bool_] = np.isfinite(features).all(axis=1) & features.any(axis=1)
    return usable


def largest_square_length(dimension: int) -> int:
    """Bound on the squared length of a quantized row: rounding moves each of d entries by at most 1/2."""
    return int((FEATURE_SCALE + dimension**0.5 / 2) ** 2) + 1


PROBE_SLACK = 2
"""Two computers that run one backbone differ by rounding: by so many grid units at most."""


def probe_text(features: NDArray[np.floating]) -> str:
    """A probe's features as text: public, quantized, for a manifest or a request.

    Args:
        features: of public images or texts that everybody embeds, in the order in which they were published; floats,
            shape (n, dimension).

    Raises:
        BadData: they have no direction, are no rows, or are too many.
    """
    if features.ndim == 2 and not 0 < features.size <= MOST_PROBE_NUMBERS:
        raise BadData(
            f"a probe has at most {MOST_PROBE_NUMBERS} numbers and at least one row, found {len(features)} rows of "
            f"{features.shape[1]}; publish fewer"
        )
    return base64.b64encode(quantize(features).astype("<i2").tobytes()).decode("ascii")


def probe_rows(text: str, dimension: int) -> NDArray[np.int16]:
    """The features of `probe_text`, int16, shape (n, dimension).

    Raises:
        BadData: it is none, or one of features of another width.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw or len(raw) % (2 * dimension) or len(raw) > 2 * MOST_PROBE_NUMBERS:
        raise BadData(
            f"this is no probe of features of {dimension} entries; make it with labeler embed --features ... --probe"
        )
    return np.frombuffer(raw, dtype="<i2").astype(np.int16).reshape(-1, dimension)


def refuse_other_probe(first: str, other: str, dimension: int, *, first_name: str, other_name: str) -> None:
    """Compare two parties' features of one probe: a declared backbone proves nothing, its features do.

    A refusal tells that they differ, never by how much: a party that chooses one of them could read the other one off
    it.

    Args:
        first, other: as `probe_text` made them; empty where a party sent none.
        dimension: numbers in a feature.
        first_name, other_name: who made them, for the sentence.

    Raises:
        BadData: one is missing, of other rows, or further than PROBE_SLACK grid units from the other.
    """
    for text, name in ((first, first_name), (other, other_name)):
        if not text:
            raise BadData(
                f"{name} embedded no probe, so nobody knows whether its features go with those of others; embed the "
                "published probe with its backbone (labeler embed --features ... --probe)"
            )
    ours, theirs = probe_rows(first, dimension), probe_rows(other, dimension)
    if len(ours) != len(theirs):
        raise BadData(
            f"{first_name} embedded a probe of {len(ours)} rows and {other_name} one of {len(theirs)}; both embed the "
            "one that was published, whole and in its order"
        )
    if (np.abs(ours.astype(np.int32) - theirs) > PROBE_SLACK).any():
        raise BadData(
            f"{other_name} embedded the probe otherwise than {first_name}, by more than the {PROBE_SLACK} grid units "
            "that rounding explains: they are not of one backbone, whatever it is called. Embed with the same one, "
            "fitted once and handed to all"
        )


def refuse_other_probes(probes: Sequence[tuple[str, str]], dimension: int) -> None:
    """Compare the probes of several parties, each with each: two that are near a third one may be twice as far apart.

    Args:
        probes: name of each party and its features; see `refuse_other_probe`.

    Raises:
        BadData: see `refuse_other_probe`; the sentence names both.
    """
    seen: dict[str, str] = {}
    for name, probe in probes:
        for known, of in seen.items() or [(probe, name)]:  # the first with itself, since it may be none
            refuse_other_probe(known, probe, dimension, first_name=of, other_name=name)
        seen.setdefault(probe, name)


CHUNK_BYTES = 1 << 18
"""Gathered rows are copied so many bytes at a time, counted as float32; one row is always taken."""


class GatheredRows:
    """Some rows of the features, in a given order.

    An index always reads through it, even rows in order: the first deletion must not change how they are read.

    Args:
        features: int16 (n, d); in memory or memory-mapped.
        rows: int64 (m,), which of them, in which order.
        ranks: int64 (m,), the place of each in the order of record ids.
    """

    def __init__(self, features: NDArray[np.int16], rows: NDArray[np.int64], ranks: NDArray[np.int64]) -> None:
        self.features, self.rows, self.ranks = features, rows, ranks

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dimension(self) -> int:
        return int(self.features.shape[1])

    def part(self, start: int, stop: int) -> GatheredRows:
        """Rows from `start` to before `stop` of these."""
        return GatheredRows(self.features, self.rows[start:stop], self.ranks[start:stop])

    def chunks(self) -> Iterator[tuple[slice, NDArray[np.int16]]]:
        """Yield the place of a piece among these rows, and the piece: int16, C order, a copy."""
        step = max(1, CHUNK_BYTES // (4 * self.dimension))
        for start in range(0, len(self.rows), step):
            some = self.rows[start : start + step]
            yield slice(start, start + len(some)), np.ascontiguousarray(self.features[some])
        unmap_pages(self.features)

    def copy_to(self, floats: NDArray[np.float32]) -> NDArray[np.float32]:
        """Copy the rows into an array of their shape, and return it."""
        for where, chunk in self.chunks():
            floats[where] = chunk
        return floats


def row_chunks(features: NDArray[np.int16], bytes_per_row: int, chunk_bytes: int) -> Iterator[slice]:
    """Slices that cover the rows, in order; the pages behind one are given back before the next.

    Args:
        features: (n, d), n may be 0.
        bytes_per_row: memory the caller needs for each row.
        chunk_bytes: memory the caller has; one row is always taken.
    """
    step = max(1, chunk_bytes // bytes_per_row)
    for start in range(0, len(features), step):
        yield slice(start, start + step)
        unmap_pages(features)


def unmap_pages(features: NDArray[np.int16]) -> None:
    """Tell the system that the pages of a read-only memory map are not needed for now.

    Nothing is lost: they are read again from the page cache or the file. Arrays that are not maps, and
    numpy maps that may hold changes of their own (modes "c" and "r+"), are left alone.
    """
    owner: object = features
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and owner.mode != "r":
            return
        owner = owner.base
    if isinstance(owner, mmap.mmap) and not features.flags.writeable and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
