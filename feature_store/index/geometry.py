"""Which integer vectors have exact similarities, and the checks at the door.

A row is admitted if every coordinate is at most 2048 in absolute value and its squares sum to less
than 2^24. Then, by Cauchy and Schwarz applied to any subset of the coordinates, every partial sum of
the inner product of two admitted rows is an integer below 2^24 in absolute value. All of these are
float32 numbers, so float32 arithmetic never rounds, whatever the order of summation, with or without
fused multiply-add. Coordinates up to 2048 also survive TF32 and float16 inputs (11 significant bits).

Features of `quantize` (rint(2048 x) of a unit vector) always pass: their norm is at most
2048 + sqrt(d)/2, which is below 4096 for every dimension below 16 million. A row that fails was made some other way.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.mapped import row_chunks
from labeler.errors import BadData, InvalidSetting

MAX_COORDINATE: Final = 2048
SQUARED_NORM_BOUND: Final = 2**24
MAX_RECORDS: Final = 2**38
"""A neighbour's rank must fit beside its similarity in one int64 (see keys)."""

_CHUNK_BYTES: Final = 1 << 20


def check_features(features: NDArray[np.int16], *, what: str = "features", dimension: int | None = None) -> None:
    """Refuse vectors whose similarities could be rounded.

    Args:
        features: must be an int16 array (n, d), d at least 1; memory-mapped arrays are read in pieces of a mebibyte.
        what: how to call them in the message.
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
        # Exact although float32: squared norms below the bound are sums that never round, and rounding is
        # monotone, so a sum at or above 2^24 stays there.
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
    """Refuse ids that could not break ties: they must be unique, not negative, one per record.

    Raises:
        BadData: wrong type, shape or number; negative or repeated ids (counted, not shown).
    """
    if not isinstance(record_ids, np.ndarray) or record_ids.dtype != np.int64 or record_ids.ndim != 1:
        found = f"{record_ids.dtype} {record_ids.shape}" if isinstance(record_ids, np.ndarray) else type(record_ids)
        raise BadData(f"record_ids must be an int64 array of shape (n,), found {found}")
    if len(record_ids) != num_records:
        raise BadData(f"{num_records} records but {len(record_ids)} record_ids; each record needs one")
    if num_records >= MAX_RECORDS:
        raise BadData(f"{num_records} records; one index holds fewer than {MAX_RECORDS}: split the shard")
    if num_records and int(record_ids.min()) < 0:
        raise BadData(f"{int((record_ids < 0).sum())} record ids are negative; ids are 0 or more")
    ordered = np.sort(record_ids)
    repeated = int((ordered[1:] == ordered[:-1]).sum())
    if repeated:
        raise BadData(
            f"{repeated} record ids occur more than once; a record present twice would move two votes: "
            "give every record its own random id"
        )


def check_count(value: int, name: str) -> int:
    """An integer of at least 1, as a Python int.

    Raises:
        InvalidSetting: a bool, a float, or less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidSetting(f"{name} must be an integer, found {type(value).__name__}")
    if value < 1:
        raise InvalidSetting(f"{name} must be at least 1, found {value}")
    return int(value)
