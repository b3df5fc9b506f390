"""Choosing an engine and building an index: the one place that knows all engines by name.

FAISS and torch are imported only when an engine that needs them is asked for.

**auto** is FAISS: on all CUDA devices where a child process met them and found them exact (`contact`), else on the
processor, and numpy where FAISS is not installed (a coordinator's image). Nothing about records takes part. An agent
builds its index once and keeps it, so it takes its devices whatever it will be asked. A single job may be over before a
device is met: `engine_of_job` compares its public number of products with `WORTH_A_DEVICE`.

**First contact** with a device is in a separate process: whatever it does to that process becomes a sentence here. A
library may abort on an error of CUDA, a driver can hang, and both after a charge would cost a budget and tell that
something in the records set it off. So before anything is charged a child process finds the devices and searches
synthetic records on each of them, in every shape that has surprised somebody, against the definition. What it found
is kept for this process.

    python -m feature_store.index.build ENGINE          the child: prints one line of JSON
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NeighborIndex, nearest_by_definition
from feature_store.index.exact_index import NO_IDS, Engine, ExactIndex, NumpyEngine
from labeler.errors import InvalidSetting, LabelerError, UnsafeIndex

EngineName = Literal["auto", "faiss", "faiss-gpu", "numpy", "torch-gpu", "ray"]

ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)

_FORMER: Final = ("int16", "torch")
"""Engines of earlier versions, which homes and scripts may still name: auto takes their place, with equal neighbors."""

WORTH_A_DEVICE: Final = 2**39
"""Products of a job that are worth a device: what two cores search in the five seconds that first contact takes. A
choice of speed alone: neighbors are equal."""

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


log = logging.getLogger(__name__)


def build_index(
    features: NDArray[np.int16],
    record_ids: NDArray[np.int64],
    *,
    engine: str = "auto",
    memory_limit_bytes: int | None = None,
    max_records: int | None = None,
    removed: NDArray[np.int64] = NO_IDS,
    in_this_order: bool = False,
) -> NeighborIndex:
    """Build an index over an agent's records, in this process (of a cluster: `feature_store.cluster.search`).

    All engines return equal neighbors, bit for bit; they differ in speed. The search is exact.

    Args:
        features: int16 (n, d) made by quantize; in memory or memory-mapped. Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more. They break ties, so they must be random, not meaningful.
        engine: "auto" (see the module), "faiss", "faiss-gpu", "numpy" or "torch-gpu". A cluster's name means auto here.
        memory_limit_bytes: most memory that building and searching may add (see `exact_index` for what counts).
            Features that do not fit as float32 are read block by block at each search. No number of records
            is refused, only a dimension.
        max_records: a public bound on n; sizes follow from it, or from a fixed number where there is none.
        removed: ids of records that are not there, as if they were removed at once.
        in_this_order: the engine meets the records in this order, and not in that of their ids. Ties are settled by
            ids all the same, so neighbors are equal.

    Returns:
        The index, ready to search.

    Raises:
        BadData: features or record ids that are not what they should be.
        InvalidSetting: an unknown engine, one this machine has no device for, a limit too small, or ids to remove that
            are not there.
        UnsafeIndex: a kind of index that depends on other records.
    """
    return ExactIndex(
        features,
        record_ids,
        load_engine(engine),
        memory_limit_bytes=memory_limit_bytes,
        max_records=max_records,
        removed=removed,
        in_this_order=in_this_order,
    )


def is_cluster(engine: str) -> bool:
    """Tell whether an engine is the processes of a cluster."""
    return engine.partition(":")[0] == "ray"


def local_engine(engine: str) -> str:
    """Return the engine for what is searched in this process, where one is a cluster's."""
    return "auto" if is_cluster(engine) else engine


def processor_engine() -> str:
    """Return auto's choice without a device."""
    return "faiss" if find_spec("faiss") else "numpy"


def may_use_device(engine: str) -> bool:
    """Tell whether an engine may search on a device of this process."""
    return current_name(engine) in ("auto", "faiss-gpu", "torch-gpu")


def engine_of_job(engine: str, products: int) -> str:
    """Return the engine of a single job: auto meets a device only if that is worth it.

    Args:
        products: of the job's searches, from public numbers.
    """
    return processor_engine() if current_name(engine) == "auto" and products < WORTH_A_DEVICE else engine


def load_engine(name: str) -> Engine:
    """Return the engine of that name.

    Raises:
        InvalidSetting: unknown, not installed, or this machine has no device for it.
        UnsafeIndex: it names an index that would void the guarantee.
    """
    if not isinstance(name, str):
        raise InvalidSetting(f"engine must be a name, found {type(name).__name__}")
    name = current_name(name)
    if is_cluster(name):
        from feature_store.cluster.driver import check_installed

        check_installed()
        name = "auto"
    if name == "auto":
        try:
            return device_engine("faiss-gpu", **contact("faiss-gpu"))
        except InvalidSetting as error:
            if has_driver():
                _warn_once(str(error))
        name = processor_engine()
    if name == "faiss":
        if find_spec("faiss") is None:
            raise InvalidSetting("engine faiss needs the package faiss-cpu or faiss-gpu; use engine numpy or auto")
        from feature_store.index.engine_faiss import FaissEngine

        return FaissEngine()
    if name in ("faiss-gpu", "torch-gpu"):
        return device_engine(name, **contact(name))
    if name == "numpy":
        return NumpyEngine()
    refuse_unsafe(name)
    raise InvalidSetting(f"engine {name!r} is unknown; choose one of {', '.join(ENGINES)}")


@cache
def current_name(name: str) -> str:
    """Return auto for an engine of an earlier version, and say so once; any other name as it is."""
    if name not in _FORMER:
        return name
    log.warning("this engine is gone; auto takes its place, with equal neighbors", extra={"engine": name})
    return "auto"


def device_engine(name: str, *, devices: Sequence[str], is_half: bool = True) -> Engine:
    """Return an engine on some devices, which must have been met; see `engine_gpu`."""
    from feature_store.index.engine_gpu import FaissGpuEngine, TorchEngine

    return TorchEngine(devices=devices) if name == "torch-gpu" else FaissGpuEngine(devices=devices, is_half=is_half)


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
                "Use an exact engine (auto, faiss, faiss-gpu, numpy)."
            )


TIME_LIMIT_S: Final = 180
"""The first use of CUDA on a machine may compile kernels, which takes a minute or two."""

_COMMAND: Final = [sys.executable, "-P", "-m", "feature_store.index.build"]
_LOCK = threading.Lock()


def has_driver() -> bool:
    """Tell whether NVIDIA's driver library is there; without it there is no device to look for."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def contact(engine: str) -> dict[str, Any]:
    """Return what a child process found for an engine: CUDA devices, each of them exact, and how rows are stored.

    Raises:
        InvalidSetting: there is no device, one is not exact, or the child died of it; with what to use instead.
    """
    with _LOCK:
        found = _ask(engine)
    if isinstance(found, str):
        raise InvalidSetting(f"engine {engine} needs a CUDA device that works here: {found}; use engine faiss or auto")
    return found


@cache
def _warn_once(reason: str) -> None:
    log.warning("no device is used", extra={"reason": reason})


def forget() -> None:
    """Ask again next time; for tests."""
    _ask.cache_clear()
    _warn_once.cache_clear()


@cache
def _ask(engine: str) -> dict[str, Any] | str:
    """Ask a child process, once in this process's life; return a sentence where no device can be used."""
    if not has_driver():
        return "this machine has no NVIDIA driver"
    try:
        done = subprocess.run(
            [*_COMMAND, engine],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"the first search on it did not end within {TIME_LIMIT_S} s"
    lines = done.stderr.strip().splitlines()
    said = f", saying {lines[-1][:200]!r}" if lines else ""
    if done.returncode < 0:
        return f"the first search on it ended its process with {signal.Signals(-done.returncode).name}{said}"
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        if "refused" in answer:
            return str(answer["refused"])
        return {"devices": list(answer["devices"]), "is_half": bool(answer["is_half"])}
    except (ValueError, KeyError, TypeError, IndexError):
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
            is_equal = np.array_equal(found.record_ids, expected.record_ids)
            is_equal &= np.array_equal(found.similarities, expected.similarities)
            if not is_equal or index.engine is not engine:
                return f"it failed, or was not exact, on {what} with k = {k}"
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


def meet(engine: str, devices: Sequence[str]) -> dict[str, Any]:
    """Return the child's answer: the devices if all are exact, with rows in float16 or else in float32."""
    refused = "torch sees no CUDA device"
    for is_half in (True, False) if engine == "faiss-gpu" else (True,):
        wrongs = {name: probe(device_engine(engine, devices=[name], is_half=is_half)) for name in devices}
        if devices and not any(wrongs.values()):
            return {"devices": list(devices), "is_half": is_half}
        refused = next((f"{name}: {wrong}" for name, wrong in wrongs.items() if wrong), refused)
    return {"refused": refused}


def main() -> None:
    """The child's part."""
    import torch

    try:
        answer = meet(sys.argv[1], [f"cuda:{number}" for number in range(torch.cuda.device_count())])
    except LabelerError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
