"""A CUDA device for a party, as ratios within one run: exact search, a whole job, and when it is worth it.

Ours is compared with the obvious code: one product in half precision and `torch.topk`, or FAISS's flat index on the
device (float32). Neither settles ties; both twins get their records and queries where ours get them, on the host. Every
measured search was compared with the definition on a few of its queries.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import BenchRow, parts_in_turn, rows_of, seconds_of
from benchmarks.speed.speed import beside_bare, device_index, run_job, synthetic_job
from feature_store.index import build_index, nearest_by_definition
from feature_store.index.build import WORTH_A_DEVICE, contact, forget
from labeler.errors import InvalidSetting
from workers.doctor.engines import full_norm
from workers.progress import ProgressCallback, silent

_DIMENSION = 768
_K = 50
_JUDGED = 3
_OURS = "torch-gpu"


def bench_device(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure; see the module."""
    if not torch.cuda.is_available():
        raise InvalidSetting("bench device needs a CUDA device, and torch sees none")
    sizes, queries = ((100_000, 1_000_000), 4096) if full else ((50_000,), 1024)
    with tempfile.TemporaryDirectory() as name:
        return parts_in_turn(
            progress,
            "Device",
            _first_contact,
            lambda: [row for records in sizes for row in _searches(records, queries=queries)],
            lambda: _worth(largest=37 if full else 33),
            lambda: _job(Path(name), agents=10, records=50_000 if full else 5_000, queries=5_000 if full else 500),
        )


def _first_contact() -> list[BenchRow]:
    """Measure what a process pays once, before anything is charged: a child that finds the device and judges it."""
    forget()
    return [BenchRow(torch.cuda.get_device_name(), f"first contact, {_OURS}", "seconds", seconds_of(contact))]


def _searches(records: int, *, queries: int) -> list[BenchRow]:
    rng = np.random.default_rng(1)
    features = np.concatenate([full_norm(rng, min(50_000, records), _DIMENSION)] * max(1, records // 50_000))
    # Copies would tie; shifting each by its number does not change any time.
    features[:, :4] = rng.integers(-30, 31, (records, 4))
    ids = rng.permutation(records).astype(np.int64)
    asked = full_norm(rng, queries, _DIMENSION)
    case = f"{records:,} records of {_DIMENSION} numbers, {queries:,} queries, k = {_K}"
    expected = nearest_by_definition(features, ids, asked[:_JUDGED], _K)
    started = time.perf_counter()
    index = build_index(features, ids, engine=_OURS)
    loaded = time.perf_counter() - started
    found = index.search(asked, _K)
    if not np.array_equal(found.record_ids[:_JUDGED], expected.record_ids):
        raise InvalidSetting(f"engine {_OURS} found other neighbours than the definition; run labeler doctor")
    taken = {_OURS: _least(lambda index=index: index.search(asked, _K))}  # type: ignore[misc]
    del index, found
    taken["bare torch"], taken["product alone"] = _bare_torch(features, asked)
    bare = device_index(features)
    taken["bare FAISS"] = _least(lambda: bare.search(asked.astype(np.float32), _K))
    rows: list[tuple[str, str, float, None]] = [(_OURS, "seconds to load, check included", loaded, None)]
    rows += [(method, "queries per second", queries / seconds, None) for method, seconds in taken.items()]
    rows += [
        (f"{_OURS} / {method}", "time ratio", taken[_OURS] / taken[method], None)
        for method in ("product alone", "bare torch", "bare FAISS")
    ]
    settings = {"records": records, "queries": queries, "dimension": _DIMENSION, "k": _K}
    return rows_of(case, rows, settings=settings)


def _bare_torch(features: NDArray[np.int16], asked: NDArray[np.int16]) -> tuple[float, float]:
    """Return seconds of product and topk, and of the product alone."""
    there = torch.from_numpy(features).cuda().half()
    taken = _least(lambda: _product_and_topk(there, asked)), _least(lambda: _product(there, asked))
    torch.cuda.empty_cache()
    return taken


def _tiles(there: torch.Tensor, queries: NDArray[np.int16]) -> tuple[torch.Tensor, range]:
    return torch.from_numpy(queries).cuda().half(), range(0, len(there), 1 << 17)


def _product(there: torch.Tensor, queries: NDArray[np.int16]) -> None:
    """Compute the product and nothing else."""
    asked, starts = _tiles(there, queries)
    for start in starts:
        torch.mm(asked, there[start : start + (1 << 17)].T, out_dtype=torch.float32)
    torch.cuda.synchronize()


def _product_and_topk(there: torch.Tensor, queries: NDArray[np.int16]) -> NDArray[np.float32]:
    """Run the obvious code: a tile, its topk, topk of those."""
    asked, starts = _tiles(there, queries)
    best = torch.empty((len(queries), 0), dtype=torch.float32, device="cuda")
    for start in starts:
        found = torch.mm(asked, there[start : start + (1 << 17)].T, out_dtype=torch.float32)
        best = torch.topk(torch.cat([best, torch.topk(found, _K).values], dim=1), _K).values
    return best.cpu().numpy()


def _worth(*, largest: int) -> list[BenchRow]:
    """Time a whole small search, loading included, on the device and on the processor, to find where one overtakes."""
    rng = np.random.default_rng(2)
    build_index(full_norm(rng, 100, _DIMENSION), np.arange(100), engine="torch-gpu")  # the process has its device
    rows = []
    for power in range(29, largest + 1, 2):
        queries = 1024
        records = (1 << power) // queries // _DIMENSION
        features, asked = full_norm(rng, records, _DIMENSION), full_norm(rng, queries, _DIMENSION)
        ids = np.arange(records, dtype=np.int64)

        def search(engine: str, features: NDArray[np.int16] = features, ids: NDArray[np.int64] = ids) -> None:
            build_index(features, ids, engine=engine).search(asked, min(_K, len(features)))  # noqa: B023

        there, here = _least(lambda: search("torch-gpu")), _least(lambda: search("int16"))
        settings = {"records": records, "queries": queries, "auto_from": f"2^{WORTH_A_DEVICE.bit_length() - 1}"}
        rows.append(
            BenchRow(
                f"2^{power} products, loading included", "torch-gpu / int16 of the processor", "time ratio",
                there / here, seconds=there, settings=settings,
            )
        )  # fmt: skip
    return rows


def _job(folder: Path, *, agents: int, records: int, queries: int) -> list[BenchRow]:
    settings = {"agents": agents, "records": records, "dimension": _DIMENSION, "queries": queries, "k": _K}
    job = synthetic_job(folder, **settings, engine="torch-gpu")
    turns = beside_bare(job, device_index, turns=3)
    there = statistics.median(turn[1] for turn in turns)
    here = seconds_of(lambda: run_job(replace(job("here"), engine="int16")))
    case = f"{agents} x {records:,} x {_DIMENSION}, {queries:,} queries"
    ratio = statistics.median(ours / theirs for theirs, ours in turns)
    return [
        BenchRow(case, "run / bare FAISS on the device and numpy", "time ratio", ratio, settings=settings),
        BenchRow(case, "run", "labels per second", queries / there, seconds=there, settings=settings),
        BenchRow(case, "run, torch-gpu / int16", "time ratio", there / here, seconds=here, settings=settings),
    ]


def _least(work: Callable[[], object]) -> float:
    """Return the least of five times, after a warm-up; ours and the bare twins end with a copy to the host."""
    work()
    return min(seconds_of(work) for _ in range(5))
