"""Choosing an engine and building an index: the one place that knows all engines by name.

faiss and torch are imported only when the engine that needs them is asked for.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Engine
from feature_store.index.geometry import check_count, check_features, check_record_ids
from feature_store.index.memory import check_memory_limit, rows_at_once
from feature_store.index.protocol import NeighborIndex
from feature_store.index.refusals import refuse_unsafe
from feature_store.index.split import SplitIndex
from feature_store.index.stored import StoredIndex
from labeler.errors import InvalidSetting

EngineName = Literal["auto", "numpy", "faiss", "faiss-gpu", "torch", "torch-gpu"]

ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)


def build_index(
    features: NDArray[np.int16],
    record_ids: NDArray[np.int64],
    *,
    engine: str = "auto",
    memory_limit_bytes: int | None = None,
) -> NeighborIndex:
    """An index over an agent's records.

    All engines return equal neighbours, bit for bit; they differ in speed. The search is exact.

    Args:
        features: int16 (n, d) made by quantize; in memory or memory-mapped. Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more. They break ties, so they must be random, not meaningful.
        engine: "auto" (FAISS, on a CUDA device if it sees one), "numpy", "faiss", "faiss-gpu", "torch", "torch-gpu".
        memory_limit_bytes: most memory that building and searching may add (see `memory` for what counts).
            Features that do not fit as float32 are read block by block at each search. No number of records
            is refused, only a dimension.

    Returns:
        The index, ready to search.

    Raises:
        BadData: features or record ids that are not what they should be.
        InvalidSetting: an unknown engine, one this machine has no device for, or a limit too small.
        UnsafeIndex: a kind of index that depends on other records.
    """
    loaded = load_engine(engine)
    if memory_limit_bytes is not None and isinstance(features, np.ndarray):
        check_count(memory_limit_bytes, "memory_limit_bytes")
        if features.ndim == 2:
            check_memory_limit(memory_limit_bytes, features.shape[1], loaded)
        if len(features) > rows_at_once(memory_limit_bytes):
            check_features(features)
            check_record_ids(record_ids, len(features))
            return SplitIndex(features, record_ids, loaded, memory_limit_bytes=memory_limit_bytes)
    return StoredIndex(features, record_ids, loaded, memory_limit_bytes=memory_limit_bytes)


def load_engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        InvalidSetting: unknown, or this machine has no device for it.
        UnsafeIndex: it names an index that would void the guarantee.
    """
    if not isinstance(name, str):
        raise InvalidSetting(f"engine must be a name, found {type(name).__name__}")
    if name == "numpy":
        from feature_store.index.engine_numpy import NumpyEngine

        return NumpyEngine()
    if name in ("auto", "faiss", "faiss-gpu"):
        from feature_store.index.engine_faiss import FaissDeviceEngine, FaissEngine, num_devices

        on_device = name == "faiss-gpu" or (name == "auto" and num_devices() > 0)
        return FaissDeviceEngine() if on_device else FaissEngine()
    if name in ("torch", "torch-gpu"):
        from feature_store.index.engine_torch import TorchEngine

        return TorchEngine(device="cuda" if name == "torch-gpu" else "cpu")
    refuse_unsafe(name)
    raise InvalidSetting(f"engine {name!r} is unknown; choose one of {', '.join(ENGINES)}")
