"""Choosing an engine and building an index: the one place that knows all engines by name.

torch is imported only when the engine that needs it is asked for.

**auto** is, with enough to do to be worth it, torch on all CUDA devices where one was met and found exact
(`device_probe`), else int16 on a processor whose kernel was found exact (`engine_int16`); numpy in all other cases. An
engine on a device is never a matter of trust: it is met in a child process first. How much there is to do follows from
public numbers alone: which engine answers must not tell how many records there are.

FAISS is for `labeler run` and benchmarks (`engine_faiss`): it is asked two questions about every query, and takes
longer where a query ties with thousands of records, so agents of a service refuse it.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.index.device_probe import contact, found_or_none, has_driver
from feature_store.index.engine import Engine
from feature_store.index.engine_numpy import NumpyEngine
from feature_store.index.geometry import check_count, check_features, check_record_ids
from feature_store.index.memory import UNDECLARED_RECORDS, check_memory_limit, rows_at_once
from feature_store.index.protocol import NeighborIndex
from feature_store.index.refusals import refuse_unsafe
from feature_store.index.split import SplitIndex
from feature_store.index.stored import NO_IDS, StoredIndex
from labeler.errors import InvalidSetting

EngineName = Literal["auto", "numpy", "int16", "faiss", "torch", "torch-gpu", "ray"]

USUAL_SEARCHES: Final = 500

WORTH_A_DEVICE: Final = 2**35
"""Products of one search that are worth a device: about a second of two cores, and about what it costs a process to
begin with a device. A choice of speed alone: neighbours are equal."""

WORTH_A_KERNEL: Final = 2**31
"""Products of one search that are worth int16's kernel: a process makes it in a fifth of a second, and then saves two
thirds of numpy's time."""

ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)


def build_index(
    features: NDArray[np.int16],
    record_ids: NDArray[np.int64],
    *,
    engine: str = "auto",
    memory_limit_bytes: int | None = None,
    searches: int = USUAL_SEARCHES,
    max_records: int | None = None,
    removed: NDArray[np.int64] = NO_IDS,
) -> NeighborIndex:
    """An index over an agent's records.

    All engines return equal neighbours, bit for bit; they differ in speed. The search is exact.

    Args:
        features: int16 (n, d) made by quantize; in memory or memory-mapped. Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more. They break ties, so they must be random, not meaningful.
        engine: "auto" (see the module), "numpy", "int16", "faiss", "torch", "torch-gpu", "ray" (in the processes of a
            cluster of its own) or "ray:HOST:PORT" (of the party's cluster there).
        memory_limit_bytes: most memory that building and searching may add (see `memory` for what counts).
            Features that do not fit as float32 are read block by block at each search. No number of records
            is refused, only a dimension.
        searches: a public number of about how many queries there will be: with little to do, auto stays on the
            processor.
        max_records: a public bound on n; engine and sizes follow from it, or from a fixed number where there is none.
        removed: ids of records that are not there, as if they were removed at once.

    Returns:
        The index, ready to search.

    Raises:
        BadData: features or record ids that are not what they should be.
        InvalidSetting: an unknown engine, one this machine has no device for, a limit too small, or ids to remove that
            are not there.
        UnsafeIndex: a kind of index that depends on other records.
    """
    if engine == "auto" and isinstance(features, np.ndarray) and features.ndim == 2:
        products = products_of(features.shape[1], max_records=max_records, searches=searches)
        if not goes_to_device(products, engine):
            engine = engine_of_processor(products)
    loaded = load_engine(engine)
    if is_cluster(engine):
        from feature_store.cluster.search import ClusterIndex

        check_features(features[:1])  # its kind; every part checks its own rows
        cluster = ClusterIndex(
            features, record_ids, address=engine.partition(":")[2] or None, memory_limit_bytes=memory_limit_bytes
        )
        cluster.remove(removed)
        return cluster
    if memory_limit_bytes is not None and isinstance(features, np.ndarray):
        check_count(memory_limit_bytes, "memory_limit_bytes")
        if features.ndim == 2:
            check_memory_limit(memory_limit_bytes, features.shape[1], loaded)
        if max_records is None or max_records > rows_at_once(memory_limit_bytes):
            check_features(features)
            check_record_ids(record_ids, len(features))
            return SplitIndex(features, record_ids, loaded, memory_limit_bytes=memory_limit_bytes, removed=removed)
    return StoredIndex(
        features,
        record_ids,
        loaded,
        memory_limit_bytes=memory_limit_bytes,
        max_records=max_records,
        removed=removed,
    )


def products_of(dimension: int, *, max_records: int | None, searches: int = USUAL_SEARCHES) -> int:
    """Products of a search, from public numbers: see build_index."""
    return dimension * searches * (UNDECLARED_RECORDS if max_records is None else max_records)


def is_cluster(engine: str) -> bool:
    """Whether an engine is the processes of a cluster."""
    return engine.partition(":")[0] == "ray"


def here(engine: str) -> str:
    """The engine for what is searched in this process, where one is a cluster's."""
    return "auto" if is_cluster(engine) else engine


def goes_to_device(products: int, engine: str) -> bool:
    """Whether a search of so many products would be tried on a device of this machine; see build_index."""
    return engine == "torch-gpu" or (engine == "auto" and products >= WORTH_A_DEVICE and has_driver())


def training_device(engine: str, *, products: int) -> str | None:
    """The device that a training of so many products is worth, for torch; None for the processor. Never raises.

    An agent's engine says which devices are its own, for what it searches and for what it trains.
    """
    if goes_to_device(products, engine):
        return "cuda:0" if found_or_none("torch-gpu") is not None else None
    return None


def engine_of_processor(products: int) -> str:
    """What auto takes on a processor for a search of so many products: "int16" or "numpy"."""
    if products < WORTH_A_KERNEL:
        return "numpy"
    from feature_store.index.engine_int16 import probed_kernel

    return "numpy" if isinstance(probed_kernel(), str) else "int16"


def load_engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        InvalidSetting: unknown, or this machine has no device for it.
        UnsafeIndex: it names an index that would void the guarantee.
    """
    if not isinstance(name, str):
        raise InvalidSetting(f"engine must be a name, found {type(name).__name__}")
    if is_cluster(name):
        from feature_store.cluster.door import check_installed

        check_installed()
        return load_engine(here(name))
    if name == "int16":
        from feature_store.index.engine_int16 import Int16Engine

        return Int16Engine()
    if name == "faiss":
        from feature_store.index.engine_faiss import FaissEngine

        return FaissEngine()
    if name in ("auto", "torch-gpu"):
        met = found_or_none("torch-gpu") if name == "auto" else contact("torch-gpu")
        if met is not None:
            from feature_store.index.engine_torch import TorchEngine

            on_all = TorchEngine(devices=[f"cuda:{number}" for number in range(met.devices)])
            return on_all if met.is_half_exact else on_all.in_single_precision()
    if name == "torch":
        from feature_store.index.engine_torch import TorchEngine

        return TorchEngine()
    if name in ("auto", "numpy"):
        return NumpyEngine()
    refuse_unsafe(name)
    raise InvalidSetting(f"engine {name!r} is unknown; choose one of {', '.join(ENGINES)}")
