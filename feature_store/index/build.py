"""Choosing an engine and building an index: the one place that knows all engines by name.

torch is imported only when the engine that needs it is asked for.

**auto** is torch on all CUDA devices, if there is enough to do and a child process met one and found it exact
(`contact`). Else it is int16 on a processor whose kernel was found exact (`engine_int16`), if that is worth it, and
numpy in all other cases. An engine on a device is never a matter of trust: it is met in a child process first. The
amount of work follows from public numbers alone: which engine answers must not tell how many records there are.

FAISS is for `labeler run` and benchmarks (`engine_faiss`). It is asked two questions about every query, and takes
longer where a query ties with thousands of records, so agents of a service refuse it.

**First contact** with a device is in a separate process: whatever it does to that process becomes a sentence here. A
library may abort on an error of CUDA, a driver can hang, and both after a charge would cost a budget and tell that
something in the records set it off. So before anything is charged a child process finds the devices and searches
synthetic records on each of them, in every shape that has surprised somebody, against the definition. What it found
is kept for this process.

    python -m feature_store.index.build          the child: prints one line of JSON
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NeighborIndex, nearest_by_definition
from feature_store.index.exact_index import NO_IDS, Engine, ExactIndex, NumpyEngine
from labeler.errors import InvalidSetting, LabelerError, UnsafeIndex
from labeler.records import UNDECLARED_RECORDS

EngineName = Literal["auto", "numpy", "int16", "faiss", "torch", "torch-gpu", "ray"]

USUAL_SEARCHES: Final = 500

WORTH_A_DEVICE: Final = 2**35
"""Products of one search that are worth a device: about a second of two cores, and about what it costs a process to
begin with a device. A choice of speed alone: neighbors are equal."""

WORTH_A_KERNEL: Final = 2**31
"""Products of one search that are worth int16's kernel: a process makes it in a fifth of a second, and then saves two
thirds of numpy's time."""

_REASONS: Final = (
    (
        ("hnsw", "nsg", "cagra", "nndescent", "vamana", "diskann", "graph"),
        "a graph index links records to each other, so removing one record reroutes searches and can change many "
        "neighbours of a query at once",
    ),
    (
        ("pq", "opq", "rq", "lsq", "itq", "pca", "sq", "scann", "whitening"),
        "its codebook or transform is fitted to the indexed records, so one record changes the codes, and with them "
        "the distances, of all others",
    ),
    (
        ("lsh",),
        "its tables are laid out by what else is stored, so whether a record is found depends on the other records",
    ),
    (
        ("ivf",),
        "lists around centroids trained on the indexed records move when one record does, and take other records' "
        "votes with them",
    ),
)
"""Kinds of index that would void the guarantee, each with the reason.

Instance level means: one record more or less moves at most one vote of a query. That holds if the order of
two records depends on no third one. These structures break it: what they return for a query depends on how the
other records happened to be arranged, so one record can change any number of neighbors.
"""

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
    in_this_order: bool = False,
) -> NeighborIndex:
    """An index over an agent's records.

    All engines return equal neighbors, bit for bit; they differ in speed. The search is exact.

    Args:
        features: int16 (n, d) made by quantize; in memory or memory-mapped. Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more. They break ties, so they must be random, not meaningful.
        engine: "auto" (see the module), "numpy", "int16", "faiss", "torch", "torch-gpu", "ray" (a cluster that this
            process starts) or "ray:HOST:PORT" (the party's cluster there).
        memory_limit_bytes: most memory that building and searching may add (see `exact_index` for what counts).
            Features that do not fit as float32 are read block by block at each search. No number of records
            is refused, only a dimension.
        searches: a public number of about how many queries there will be: with little to do, auto stays on the
            processor.
        max_records: a public bound on n; engine and sizes follow from it, or from a fixed number where there is none.
        removed: ids of records that are not there, as if they were removed at once.
        in_this_order: an engine of this process meets the records in this order, and not in that of their ids. Ties
            are settled by ids all the same, so neighbors are equal.

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

        return ClusterIndex(
            features,
            record_ids,
            address=engine.partition(":")[2] or None,
            memory_limit_bytes=memory_limit_bytes,
            removed=removed,
        )
    return ExactIndex(
        features,
        record_ids,
        loaded,
        memory_limit_bytes=memory_limit_bytes,
        max_records=max_records,
        removed=removed,
        in_this_order=in_this_order,
    )


def products_of(dimension: int, *, max_records: int | None, searches: int = USUAL_SEARCHES) -> int:
    """Products of a search, from public numbers: see build_index."""
    return dimension * searches * (UNDECLARED_RECORDS if max_records is None else max_records)


def is_cluster(engine: str) -> bool:
    """Tell whether an engine is the processes of a cluster."""
    return engine.partition(":")[0] == "ray"


def here(engine: str) -> str:
    """The engine for what is searched in this process, where one is a cluster's."""
    return "auto" if is_cluster(engine) else engine


def goes_to_device(products: int, engine: str) -> bool:
    """Tell whether a search of this many products would be tried on a device of this machine; see build_index."""
    return engine == "torch-gpu" or (engine == "auto" and products >= WORTH_A_DEVICE and has_driver())


def engine_of_processor(products: int) -> str:
    """Return auto's choice on a processor for a search of this many products: "int16" or "numpy"."""
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
        from feature_store.cluster.driver import check_installed

        check_installed()
        return load_engine(here(name))
    if name == "int16":
        from feature_store.index.engine_int16 import Int16Engine

        return Int16Engine()
    if name == "faiss":
        from feature_store.index.engine_faiss import FaissEngine

        return FaissEngine()
    if name in ("auto", "torch-gpu"):
        devices = found_or_none() if name == "auto" else contact()
        if devices is not None:
            from feature_store.index.engine_torch import TorchEngine

            return TorchEngine(devices=[f"cuda:{number}" for number in range(devices)])
    if name == "torch":
        from feature_store.index.engine_torch import TorchEngine

        return TorchEngine()
    if name in ("auto", "numpy"):
        return NumpyEngine()
    refuse_unsafe(name)
    raise InvalidSetting(f"engine {name!r} is unknown; choose one of {', '.join(ENGINES)}")


def refuse_unsafe(kind: str) -> None:
    """Refuse an index that depends on private data beyond the records themselves.

    Args:
        kind: a name or a FAISS factory string, such as "hnsw", "HNSW32" or "IVF256,PQ16". Anything that names
            no unsafe structure passes.

    Raises:
        UnsafeIndex: with the reason, and what to use instead.
    """
    for structures, reason in _REASONS:
        if any(structure in kind.lower() for structure in structures):
            raise UnsafeIndex(
                f"index {kind!r} is refused for instance-level privacy: {reason}. "
                "Use an exact engine (auto, numpy, int16, torch, torch-gpu)."
            )


TIME_LIMIT_S: Final = 180
"""The first use of CUDA on a machine may compile kernels, which takes a minute or two."""

_COMMAND: Final = [sys.executable, "-P", "-m", "feature_store.index.build"]
_LOCK = threading.Lock()
_FOUND: Final[list[int | str]] = []

log = logging.getLogger(__name__)


def has_driver() -> bool:
    """Tell whether NVIDIA's driver library is there; without it there is no device to look for."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def contact() -> int:
    """Return how many CUDA devices a child process found, each of them exact; asked once in a process's life.

    Raises:
        InvalidSetting: there is no device, one is not exact, or the child died of it; with what to use instead.
    """
    with _LOCK:
        if not _FOUND:
            _FOUND.append(_ask())
        found = _FOUND[0]
    if isinstance(found, str):
        raise InvalidSetting(f"engine torch-gpu needs a CUDA device that works here: {found}; use engine numpy or auto")
    return found


def found_or_none() -> int | None:
    """Do the same for "auto": a device that cannot be used is logged once, and the processor used instead."""
    is_news = not _FOUND
    try:
        return contact()
    except InvalidSetting as error:
        if is_news and has_driver():
            log.warning("no device is used", extra={"reason": str(error)})
        return None


def forget() -> None:
    """Ask again next time; for tests."""
    _FOUND.clear()


def _ask() -> int | str:
    if not has_driver():
        return "this machine has no NVIDIA driver"
    try:
        done = subprocess.run(
            _COMMAND, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"the first search on it did not end within {TIME_LIMIT_S} s"
    lines = done.stderr.strip().splitlines()
    said = f", saying {lines[-1][:200]!r}" if lines else ""
    if done.returncode < 0:
        return f"the first search on it ended its process with {signal.Signals(-done.returncode).name}{said}"
    try:
        answer = json.loads(done.stdout)
        return str(answer["refused"]) if "refused" in answer else int(answer["devices"])
    except (ValueError, KeyError, TypeError):
        return f"the first search on it failed with exit code {done.returncode}{said}"


# In the child


def probe(engine: Engine) -> str | None:
    """Search synthetic records with an engine; what is wrong with it, or None.

    Similarities reach the last bit below 2^24, all records tie, k goes over a tile's groups, and
    dimensions are those that kernels are chosen by.
    """
    for what, features, queries, counts in _trials():
        ids = np.random.default_rng(len(features)).permutation(len(features)).astype(np.int64)
        index = ExactIndex(features, ids, engine)
        for k in counts:
            found, expected = index.search(queries, k), nearest_by_definition(features, ids, queries, k)
            if index.engine is not engine:
                return f"it failed, or was not exact, on {what} with k = {k}"
            if not np.array_equal(found.record_ids, expected.record_ids):
                return f"it found other neighbours than the definition on {what} with k = {k}"
            if not np.array_equal(found.similarities, expected.similarities):
                return f"it rounded similarities on {what} with k = {k}"
    return None


_Trial = tuple[str, NDArray[np.int16], NDArray[np.int16], tuple[int, ...]]


def _trials() -> Iterator[_Trial]:
    rng = np.random.default_rng(20261122)
    top = np.full((1, 4), 2047, dtype=np.int16)
    near = np.repeat(top, 8, axis=0)
    near[:, 0] -= np.arange(8, dtype=np.int16)
    yield "similarities that differ in the last of 24 bits", np.concatenate([near, -near]), near, (1, 3, 16)
    for dimension in (1, 24, 768, 1280):
        vectors = rng.standard_normal((300, dimension))
        vectors *= 4090 / np.linalg.norm(vectors, axis=1, keepdims=True)
        rows = np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)
        rows[100:200] = rows[:100]
        yield f"records of {dimension} numbers, a third of them twice", rows, rows[:70], (1, 50, 300)
    tied = np.ones((2500, 24), dtype=np.int16)
    yield "records that all tie", tied, tied[:3], (1, 50, 2047, 2048, 2049)


def main() -> None:
    """The child's part."""
    import torch

    from feature_store.index.engine_torch import TorchEngine

    answer: dict[str, object] = {"refused": "torch sees no CUDA device"}
    try:
        for number in range(torch.cuda.device_count()):
            wrong = probe(TorchEngine(devices=[f"cuda:{number}"]))
            if wrong is not None:
                answer = {"refused": f"device {number}: {wrong}"}
                break
            answer = {"devices": number + 1}
    except LabelerError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
