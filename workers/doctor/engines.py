"""Whether an engine finds what the definition finds, where that is hardest, and gives back what it took.

The judge is a product of 64-bit integers and a full sort. The records are those that would show a rounding:
similarities up to 2^24, one number or 1280, all tied; asked for k on both sides of what libraries return at once
(2048), under every switch of torch by which a process may have allowed products of less precision.

Of CUDA devices it is asked first which there are, whether the libraries were built for them, and what is free. Each
library is asked by itself, because one can see a device that another was not built for.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index import NeighborIndex, Neighbors, build_index, nearest_by_definition
from feature_store.index.build import is_cluster
from labeler.errors import InvalidSetting, UnsafeIndex
from workers.doctor.checkup import Finding, look, well, wrong

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_QUERY: Final = "--query-gpu=name,driver_version,memory.total,memory.used"
_LITTLE: Final = 2 << 30


def devices() -> Iterator[Finding]:
    """Driver, architectures, memory."""
    yield _driver()
    yield from _by_torch()


def built_for(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether a list such as ["sm_80", "sm_90", "compute_90"] holds code for a device.

    Code of one generation (sm_80) runs on later minor versions of it (8.6); what can be compiled at load (compute_90)
    runs on everything later. sm_90a and the like are counted for that version alone.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        version = divmod(int(number.rstrip("af") or 0), 10)
        if kind == "sm" and version == capability:
            return True
        if number.endswith(("a", "f")):
            continue
        if kind == "sm" and version[0] == capability[0] and version[1] <= capability[1]:
            return True
        if kind == "compute" and version <= capability:
            return True
    return False


def _driver() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        said = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else ""
        if said:
            return look(
                "driver",
                f"{said}; nvidia-smi is missing",
                "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        return wrong(
            "driver", "there is no NVIDIA driver here",
            "install the driver; in a container, start it with --gpus all (NVIDIA container toolkit)",
        )  # fmt: skip
    asked = subprocess.run([program, _QUERY, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return wrong(
            "driver", f"nvidia-smi fails: {asked.stdout.strip() or asked.stderr.strip()}", "install the driver again"
        )
    return well("driver", "; ".join(asked.stdout.strip().splitlines()))


def _by_torch() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield wrong(
            "torch", f"torch {torch.__version__} is built for processors only", "install torch's wheel with CUDA"
        )
        return
    if not torch.cuda.is_available():
        yield wrong(
            "torch", f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device",
            "compare the driver's version with the one that this CUDA needs, and look at CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
        return
    architectures = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        words = f"{name}, compute capability {capability[0]}.{capability[1]}"
        if not built_for(architectures, capability):
            yield wrong(
                f"cuda:{number}", f"{words}; torch {torch.__version__} is built for {', '.join(architectures)}",
                "install a version of torch that is built for this device",
            )  # fmt: skip
            continue
        free, total = torch.cuda.mem_get_info(number)
        found = f"{words}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < _LITTLE:
            yield look(
                f"cuda:{number}",
                found,
                "end what else uses it (nvidia-smi lists it)",
                free_bytes=free,
                total_bytes=total,
            )
        else:
            yield well(f"cuda:{number}", found, free_bytes=free, total_bytes=total)


DIMENSIONS: Final = (1, 24, 768, 1280)
COUNTS: Final = (1, 50, 2047, 2048, 2049)
RECORDS: Final = 2100
_QUERIES: Final = 6
_INDEXES: Final = 100
_INDEX_SHAPE: Final = (1000, 256)
_GROWTH: Final = 16
"""Indexes' worth of memory that may stay after a hundred: allocators keep some."""

_ELSE: Final = "numpy"


@dataclass(frozen=True, eq=False)
class Case:
    """Records, queries, and what has to be found."""

    name: str
    features: NDArray[np.int16]
    record_ids: NDArray[np.int64]
    queries: NDArray[np.int16]
    expected: Neighbors


def cases() -> list[Case]:
    """The same at every run."""
    made = []
    for dimension in DIMENSIONS:
        rng = np.random.default_rng(dimension)
        full = full_norm(rng, RECORDS, dimension)
        full[RECORDS // 2 :: 7] = full[0]  # ties among the nearest, and opposite to the farthest
        tied = np.repeat(full_norm(rng, 1, dimension), RECORDS, axis=0)
        for name, features in (("near 2^24", full), ("all tied", tied)):
            ids = rng.choice(2**62, RECORDS, replace=False).astype(np.int64)
            queries = np.concatenate([features[:1], -features[:1], full_norm(rng, _QUERIES - 2, dimension)])
            expected = nearest_by_definition(features, ids, queries, max(COUNTS))
            made.append(Case(f"{name}, {dimension} numbers", features, ids, queries, expected))
    return made


def full_norm(rng: np.random.Generator, count: int, dimension: int) -> NDArray[np.int16]:
    """Rows as long as rows may be: squared norms just below 2^24."""
    vectors = rng.standard_normal((count, dimension))
    vectors *= 4095 / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)


def exactness(engine: str) -> Iterator[Finding]:
    """Every case and count, as this process is set up; then under every switch, where the engine uses torch."""
    judged = cases()
    try:
        wrongs, refusals, searches = _tried(engine, judged, COUNTS)
    except InvalidSetting as error:
        yield look(f"engine {engine}", str(error), "nothing, unless it should be there; auto uses another")
        return
    switches = list(_switches()) if "torch" in sys.modules else []
    some = [case for case in judged if not case.name.endswith(" 1 numbers")]
    for name, switch in switches:
        undo = switch()
        try:
            found = _tried(engine, some, (50, 2049))
        finally:
            undo()
        wrongs += [f"{which} with {name}" for which in found[0]]
        refusals += [f"{which} with {name}" for which in found[1]]
        searches += found[2]
    numbers = {"searches": searches, "wrong": len(wrongs), "refused": len(refusals)}
    also = f", {len(switches)} switches of torch" if switches else ""
    if wrongs or (refusals and not switches):
        said = [*wrongs, *refusals]
        yield wrong(
            f"engine {engine}",
            f"not exact in {len(said)} of {searches} searches, the first: {said[0]}",
            f'do not use it: set engine = "{_ELSE}", and report this with --json',
            **numbers,
        )
    elif refusals:
        yield look(
            f"engine {engine}", f"exact as set up; refuses {len(refusals)} searches, the first: {refusals[0]}",
            "nothing, unless a program of yours sets such a switch", **numbers,
        )  # fmt: skip
    else:
        yield well(f"engine {engine}", f"exact: {searches} searches equal int64, k to {max(COUNTS)}{also}", **numbers)


def made_and_freed(engine: str) -> Iterator[Finding]:
    """A hundred indexes one after the other, each searched once: memory has to come back."""
    rng = np.random.default_rng(0)
    features, ids = full_norm(rng, *_INDEX_SHAPE), np.arange(_INDEX_SHAPE[0], dtype=np.int64)

    def once() -> None:
        build_index(features, ids, engine=engine).search(features[:8], 50)
        gc.collect(0)

    try:
        for _ in range(5):
            once()
    except (InvalidSetting, UnsafeIndex):
        return  # what is not there, or not exact, was said before
    before = _taken()
    for _ in range(_INDEXES):
        once()
    after = _taken()
    size = 4 * features.size
    grown = {where: after[where] - before[where] for where in before}
    numbers = {f"{where}_grown_bytes": value for where, value in grown.items()}
    words = ", ".join(f"{value / 2**20:+.1f} MiB in {where} memory" for where, value in grown.items())
    if any(value > _GROWTH * size for value in grown.values()):
        yield wrong(
            f"memory of {engine}", f"{words} after {_INDEXES} indexes of {size / 2**20:.1f} MiB",
            f"it does not give back what it takes: set engine = \"{_ELSE}\", and report this with --json", **numbers,
        )  # fmt: skip
    else:
        yield well(f"memory of {engine}", f"{words} after {_INDEXES} indexes of {size / 2**20:.1f} MiB", **numbers)


def check(engine: str) -> Iterator[Finding]:
    """Both, in one process; of a cluster the first, whose indexes are processes that take seconds to begin."""
    yield from exactness(engine)
    if not is_cluster(engine):
        yield from made_and_freed(engine)


def _tried(engine: str, judged: list[Case], counts: tuple[int, ...]) -> tuple[list[str], list[str], int]:
    """Which searches found something else, which were refused, and how many there were."""
    wrongs, refusals, searches = [], [], 0
    for case in judged:
        index: NeighborIndex | None = None
        for k in counts:
            searches += 1
            try:
                index = index or build_index(case.features, case.record_ids, engine=engine)
                found = index.search(case.queries, k)
            except UnsafeIndex:
                refusals.append(f"{case.name}, k {k}")
                continue
            fault = getattr(index, "fault", None)
            if fault is not None:
                # The index went on with another engine, whose neighbours are right: this one's were not, or never came.
                wrongs.append(f"{case.name}, k {k}, left for the processor: {fault}")
                index = None
                continue
            same = np.array_equal(found.record_ids, case.expected.record_ids[:, :k])
            if not same or not np.array_equal(found.similarities, case.expected.similarities[:, :k]):
                wrongs.append(f"{case.name}, k {k}")
    return wrongs, refusals, searches


def _switches() -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Names of switches of torch, and what sets each and gives what undoes it."""
    import torch

    cuda: Any = torch.backends.cuda.matmul
    backends: Any = torch.backends
    processor = backends.mkldnn.matmul

    def setting(owner: Any, name: str, value: object) -> Callable[[], Callable[[], None]]:
        def switch() -> Callable[[], None]:
            before = getattr(owner, name)
            setattr(owner, name, value)
            return lambda: setattr(owner, name, before)

        return switch

    yield "TF32 on a device", setting(cuda, "fp32_precision", "tf32")
    yield "TF32 on the processor", setting(processor, "fp32_precision", "tf32")
    yield "bfloat16 on the processor", setting(processor, "fp32_precision", "bf16")
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        if hasattr(cuda, name):
            yield name, setting(cuda, name, True)


def _taken() -> dict[str, int]:
    """Bytes in use by this process, and on the device where torch sees one."""
    gc.collect()
    taken = {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()  # the first time, the process begins with the device: 100 MiB of main
        taken["device"] = total - free
    pages = Path("/proc/self/statm")
    if pages.exists():
        taken["main"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return taken
