"""The definition of nearest neighbors, and the vectors for which every engine computes it exactly.

    similarity(q, x) = sum_j q_j * x_j              over integers
    neighbors(q)     = the first k records by (similarity descending, record id ascending).

Every engine must return these neighbors bit for bit. Integers make them a function of the set of records alone: no
order of summation, block size, thread count or library can change them. The privacy proofs need that
(`labeler.methods.knn`).

**One record moves at most one vote of one query.** Let T(D) be the first k of the records D in a
fixed total order. Adding x to D leaves T(D) as it is, or puts x in and at most the last member out; removing
is the same read backwards. So with at least k records, one vote leaves one class and enters another (L1 at
most 2, L2 at most sqrt 2). With fewer, one vote appears or disappears (L2 at most 1).
Replacing x by y changes T in at most one member too. First remove x: T(D - x) is T(D), or it is T(D) without x
and with the next record z. Then add y. If it stays out, at most z has taken the place of x. Otherwise y pushes
out the last member. If z came in, that is z, so y takes the place of x. If z did not come in, y takes the place
of one member of T(D). So one vote moves, L2 at most sqrt 2, although replacing is removing and adding. All of
this is instance level, per query, and holds only because the order of two records depends on no third one.

**Exact vectors.** A row is admitted if every coordinate is at most 2048 in absolute value and its squares sum to less
than 2^24. Then, by Cauchy and Schwarz applied to any subset of the coordinates, every partial sum of
the inner product of two admitted rows is an integer below 2^24 in absolute value. All of these are
float32 numbers, so float32 arithmetic never rounds, whatever the order of summation, with or without
fused multiply-add. Coordinates up to 2048 also survive TF32 and float16 inputs (11 significant bits).
Features of `quantize` (rint(2048 x) of a unit vector) always pass: their norm is at most
2048 + sqrt(d)/2, which is below 4096 for every dimension below 16 million. So a row that fails does not come from
`quantize`.

**Keys.** Each neighbor gets one integer as its key, and neighbors are sorted by their keys:

    key = (2^24 - similarity) * 2^38 + rank.

Here rank is the record's place in the order of record ids. Similarities lie strictly between -2^24
and 2^24, so a key is a positive int64, and smaller keys are exactly those that come first by
(similarity descending, record id ascending). Keys are unique, so no sort ever has to break a tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.rows import row_chunks
from labeler.errors import BadData, InvalidSetting

NO_RECORD: Final = -1
"""Fills `record_ids` and `rows` where fewer than k records exist."""

NO_SIMILARITY: Final = -(2**24)
"""Fills `similarities` in the same places: one below the least similarity that two records can have."""

MAX_COORDINATE: Final = 2048
SQUARED_NORM_BOUND: Final = 2**24
RANK_BITS: Final = 38
NO_KEY: Final = int(np.iinfo(np.int64).max)
"""Larger than every key; it marks a missing neighbor."""

_OFFSET: Final = 1 << 24
_CHUNK_BYTES: Final = 1 << 20
_IDS_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class Neighbors:
    """The k nearest records of each query, nearest first.

    Private: it stays with the agent. Its repr shows the shape and nothing else.

    Attributes:
        record_ids: int64 (nq, k); NO_RECORD where there are fewer than k records.
        similarities: int32 (nq, k), exact inner products; NO_SIMILARITY there.
        rows: int64 (nq, k), row of each neighbor in the features the index was built from; NO_RECORD there. So labels
            are `labels[rows]`, also after deletions.
    """

    record_ids: NDArray[np.int64]
    similarities: NDArray[np.int32]
    rows: NDArray[np.int64]

    @classmethod
    def none(cls, queries: int, k: int) -> Neighbors:
        """Return an empty result, the start for `put` and `merge`."""
        return cls(
            record_ids=np.full((queries, k), NO_RECORD, dtype=np.int64),
            similarities=np.full((queries, k), NO_SIMILARITY, dtype=np.int32),
            rows=np.full((queries, k), NO_RECORD, dtype=np.int64),
        )

    def put(self, some: slice, found: Neighbors) -> None:
        """Set neighbors of some queries, which have none yet."""
        count = found.rows.shape[1]
        self.record_ids[some, :count] = found.record_ids
        self.similarities[some, :count] = found.similarities
        self.rows[some, :count] = found.rows

    def merge(self, some: slice, found: Neighbors, *, first_row: int = 0) -> None:
        """Merge neighbors of another part into this one: keep the first k of both.

        The order is (similarity descending, record id ascending), so NO_SIMILARITY comes last.

        The first k of the whole are the first k of what its parts found, since the order of two records depends on no
        third one.

        Args:
            some: the queries that `found` is about.
            found: of another part of the records.
            first_row: row of the whole at which that part begins.
        """
        k = self.record_ids.shape[1]
        rows = np.where(found.rows == NO_RECORD, NO_RECORD, found.rows + first_row)
        ids = np.concatenate([self.record_ids[some], found.record_ids], axis=1)
        similarities = np.concatenate([self.similarities[some], found.similarities], axis=1)
        order = np.lexsort((ids, -similarities), axis=1)[:, :k]
        self.record_ids[some] = np.take_along_axis(ids, order, axis=1)
        self.similarities[some] = np.take_along_axis(similarities, order, axis=1)
        self.rows[some] = np.take_along_axis(np.concatenate([self.rows[some], rows], axis=1), order, axis=1)

    def __repr__(self) -> str:
        queries, k = self.record_ids.shape
        return f"Neighbors({queries} queries, k={k}, contents private)"


class NeighborIndex(Protocol):
    """Finds the nearest private records of public queries.

    A search never changes the index, and two searches of one index give equal results.
    """

    @property
    def dimension(self) -> int:
        """Length of a feature vector."""

    def __len__(self) -> int:
        """Number of records that can be found: those added less those removed."""

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """Return the first k records by (similarity descending, record id ascending), for each query.

        Args:
            queries: int16 (nq, dimension), quantized as the records are; nq may be 0.
            k: at least 1; may exceed the number of records.

        Raises:
            BadData: queries of another dtype or dimension, or outside the exact range.
            InvalidSetting: k is not an integer of at least 1.
            UnsafeIndex: the machine's matrix product turned out not to be exact.
        """

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """Remove records, all or none, as if they had never been added.

        Args:
            record_ids: int64 (m,); repeated ids count once.
            missing_ok: ignore ids that are not (or no longer) in the index.

        Returns:
            How many records were removed.

        Raises:
            InvalidSetting: some ids are not in the index and missing_ok is False; nothing was removed.
        """


def nearest_by_definition(
    features: NDArray[np.int16], record_ids: NDArray[np.int64], queries: NDArray[np.int16], k: int
) -> Neighbors:
    """Return neighbors by the definition itself, as a reference for every engine.

    It is as short as possible, slow, and shares no code with the engines.
    """
    similarities = queries.astype(np.int64) @ features.astype(np.int64).T
    ids = np.broadcast_to(record_ids, similarities.shape)
    rows = np.lexsort((ids, -similarities), axis=1)[:, :k]
    padding = ((0, 0), (0, k - rows.shape[1]))
    return Neighbors(
        record_ids=np.pad(record_ids[rows], padding, constant_values=NO_RECORD),
        similarities=np.pad(
            np.take_along_axis(similarities, rows, axis=1), padding, constant_values=NO_SIMILARITY
        ).astype(np.int32),
        rows=np.pad(rows, padding, constant_values=NO_RECORD),
    )


def pack(similarities: NDArray[np.floating], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys of neighbors, from exact similarities and ranks of equal shape."""
    keys = similarities.astype(np.int64)
    np.subtract(_OFFSET, keys, out=keys)
    keys <<= RANK_BITS
    keys |= ranks
    return keys


def ranks_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each key's rank in the order of record ids; for NO_KEY, the largest possible rank."""
    return keys & ((1 << RANK_BITS) - 1)


def similarities_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the exact similarity of each key; meaningless for NO_KEY."""
    return _OFFSET - (keys >> RANK_BITS)


def check_features(features: NDArray[np.int16], *, what: str = "features", dimension: int | None = None) -> None:
    """Refuse vectors whose similarities could be rounded.

    Args:
        features: must be an int16 array (n, d), d at least 1; memory-mapped arrays are read in pieces of a mebibyte.
        what: the word for them in the message.
        dimension: the d they must have, if it is fixed already.

    Raises:
        BadData: not an array, float (NaN included), another integer type, another shape or dimension,
            or rows outside the exact range. The message counts rows; it shows no value.
    """
    if not isinstance(features, np.ndarray):
        raise BadData(f"{what} must be a numpy array of int16, found {type(features).__name__}")
    if features.dtype != np.int16:
        raise BadData(
            f"{what} must be int16, found {features.dtype}; floating-point features make similarities depend on the "
            "order of summation, which voids the privacy proof: pass them through quantize first"
        )
    if features.ndim != 2 or features.shape[1] < 1:
        raise BadData(f"{what} must have shape (n, d) with d at least 1, found {features.shape}")
    if dimension is not None and features.shape[1] != dimension:
        raise BadData(
            f"{what} have dimension {features.shape[1]}, the index has {dimension}; "
            "both must come from the same backbone: compare fingerprints"
        )
    outside = 0
    for rows in row_chunks(features, 4 * features.shape[1], _CHUNK_BYTES):
        # float32 decides this exactly. A sum of squares below the bound never rounds. Rounding is monotone, so a sum
        # at or above 2^24 does not fall below it.
        chunk = features[rows].astype(np.float32)
        bad = np.vecdot(chunk, chunk) >= SQUARED_NORM_BOUND
        if chunk.max() > MAX_COORDINATE or chunk.min() < -MAX_COORDINATE:
            bad |= (np.abs(chunk) > MAX_COORDINATE).any(axis=1)
        outside += int(bad.sum())
    if outside:
        raise BadData(
            f"{outside} of {len(features)} rows of {what} are outside the exact range (coordinates at most "
            f"{MAX_COORDINATE}, sum of squares below {SQUARED_NORM_BOUND}); features must be made by quantize"
        )


def check_record_ids(record_ids: NDArray[np.int64], num_records: int) -> None:
    """Refuse ids that cannot break ties: they must be unique, not negative, and one per record.

    Raises:
        BadData: wrong type, shape or number; negative or repeated ids (counted, not shown).
    """
    if not isinstance(record_ids, np.ndarray) or record_ids.dtype != np.int64 or record_ids.ndim != 1:
        found = f"{record_ids.dtype} {record_ids.shape}" if isinstance(record_ids, np.ndarray) else type(record_ids)
        raise BadData(f"record_ids must be an int64 array of shape (n,), found {found}")
    if len(record_ids) != num_records:
        raise BadData(f"{num_records} records but {len(record_ids)} record_ids; each record needs one")
    if num_records >= 1 << RANK_BITS:
        raise BadData(f"{num_records} records; one index holds fewer than {1 << RANK_BITS}: split the shard")
    if num_records and int(record_ids.min()) < 0:
        raise BadData(f"{int((record_ids < 0).sum())} record ids are negative; ids are 0 or more")
    # A private shard is stored in the order of its ids, so this check usually needs no sorted copy.
    starts = range(0, num_records, _IDS_AT_ONCE)
    if all((np.diff(record_ids[start : start + _IDS_AT_ONCE + 1]) > 0).all() for start in starts):
        return
    ordered = np.sort(record_ids)
    repeated = int((ordered[1:] == ordered[:-1]).sum())
    if repeated:
        raise BadData(
            f"{repeated} record ids occur more than once; a record present twice would move two votes: "
            "give every record its own random id"
        )


def check_count(value: int, name: str) -> int:
    """Return an integer of at least 1 as a Python int.

    Raises:
        InvalidSetting: a bool, a float, or less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidSetting(f"{name} must be an integer, found {type(value).__name__}")
    if value < 1:
        raise InvalidSetting(f"{name} must be at least 1, found {value}")
    return int(value)
