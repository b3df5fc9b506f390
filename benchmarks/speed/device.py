"""A CUDA device for a party, as ratios within one run: exact search, a whole job, and when it is worth it.

Ours are `faiss-gpu`, with rows in float16 and in float32, and `torch-gpu`. They are compared with the obvious code:
FAISS's flat index on the device (float32), and one product in half precision with `torch.topk`. Neither settles ties;
both twins get their records and queries where ours get them, on the host. "Every query tied" is the most that ties can
cost. Every measured search was compared with the definition on a few of its queries. Memory is what a loaded index has
taken of the device, FAISS's working memory included.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import BenchRow, parts_in_turn, rows_of, seconds_of
from benchmarks.speed.speed import beside_bare, device_index, run_job, synthetic_job
from checks.doctor.engines import full_norm
from feature_store.index import nearest_by_definition
from feature_store.index.build import WORTH_A_DEVICE, build_index, contact, device_engine, forget
from feature_store.index.exact_index import Engine, ExactIndex, every_query_tied
from labeler.errors import InvalidSetting
from workers.progress import ProgressCallback, silent

_DIMENSION = 768
_K = 50
_JUDGED = 3


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
            lambda: _worth(largest=41 if full else 35),
            lambda: _job(Path(name), agents=10, records=50_000 if full else 5_000, queries=5_000 if full else 500),
        )


def _first_contact() -> list[BenchRow]:
    """Measure what a process pays once, before anything is charged: a child that finds the device and judges it."""
    forget()
    card = torch.cuda.get_device_name()
    return [
        BenchRow(card, f"first contact, {engine}", "seconds", seconds_of(lambda: contact(engine)))  # noqa: B023
        for engine in ("faiss-gpu", "torch-gpu")
    ]


def _engines() -> dict[str, Engine]:
    devices = contact("faiss-gpu")["devices"]
    return {
        "faiss-gpu, float16": device_engine("faiss-gpu", devices=devices, is_half=True),
        "faiss-gpu, float32": device_engine("faiss-gpu", devices=devices, is_half=False),
        "torch-gpu": device_engine("torch-gpu", devices=devices),
    }


def _searches(records: int, *, queries: int) -> list[BenchRow]:
    rng = np.random.default_rng(1)
    features = np.concatenate([full_norm(rng, min(50_000, records), _DIMENSION)] * max(1, records // 50_000))
    # Copies would tie; shifting each by its number does not change any time.
    features[:, :4] = rng.integers(-30, 31, (records, 4))
    ids = rng.permutation(records).astype(np.int64)
    asked = full_norm(rng, queries, _DIMENSION)
    case = f"{records:,} records of {_DIMENSION} numbers, {queries:,} queries, k = {_K}"
    expected = nearest_by_definition(features, ids, asked[:_JUDGED], _K)
    rows: list[tuple[str, str, float, None]] = []
    taken: dict[str, float] = {}
    for name, engine in _engines().items():
        before = _free_bytes()
        started = time.perf_counter()
        index = ExactIndex(features, ids, engine)
        rows.append((name, "seconds to load, check included", time.perf_counter() - started, None))
        rows.append((name, "GiB of the device", (before - _free_bytes()) / 2**30, None))
        found = index.search(asked, _K)
        if index.fault is not None or not np.array_equal(found.record_ids[:_JUDGED], expected.record_ids):
            raise InvalidSetting(f"engine {name} failed, or is not exact ({index.fault}); run labeler doctor --gpu")
        taken[name] = _least(lambda index=index: index.search(asked, _K))  # type: ignore[misc]
        with every_query_tied():
            taken[f"{name}, every query tied"] = _least(lambda index=index: index.search(asked, _K))  # type: ignore[misc]
        del index, found
    theirs = {"bare FAISS": _bare_faiss(features, asked)}
    theirs["bare torch"], theirs["product alone"] = _bare_torch(features, asked)
    rows += [(method, "queries per second", queries / seconds, None) for method, seconds in (taken | theirs).items()]
    rows += [
        (f"{ours} / {method}", "time ratio", taken[ours] / seconds, None)
        for ours in taken
        for method, seconds in theirs.items()
    ]
    settings = {"records": records, "queries": queries, "dimension": _DIMENSION, "k": _K}
    return rows_of(case, rows, settings=settings)


def _free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _bare_faiss(features: NDArray[np.int16], asked: NDArray[np.int16]) -> float:
    index = device_index(features)
    return _least(lambda: index.search(asked.astype(np.float32), _K))


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
    build_index(full_norm(rng, 100, _DIMENSION), np.arange(100), engine="faiss-gpu")  # the process has its device
    rows = []
    for power in range(31, largest + 1, 2):
        queries = 1024
        records = (1 << power) // queries // _DIMENSION
        features, asked = full_norm(rng, records, _DIMENSION), full_norm(rng, queries, _DIMENSION)
        ids = np.arange(records, dtype=np.int64)

        def search(engine: str, features: NDArray[np.int16] = features, ids: NDArray[np.int64] = ids) -> None:
            build_index(features, ids, engine=engine).search(asked, min(_K, len(features)))  # noqa: B023

        there, here = _least(lambda: search("faiss-gpu")), _least(lambda: search("faiss"))
        settings = {"records": records, "queries": queries, "run_from": f"2^{WORTH_A_DEVICE.bit_length() - 1}"}
        rows += rows_of(
            f"2^{power} products, loading included",
            [("faiss-gpu / faiss", "time ratio", there / here, None), ("faiss", "seconds", here, None)],
            settings=settings,
        )
    return rows


def _job(folder: Path, *, agents: int, records: int, queries: int) -> list[BenchRow]:
    settings: dict[str, Any] = {
        "agents": agents, "records": records, "dimension": _DIMENSION, "queries": queries, "k": _K,
    }  # fmt: skip
    job = synthetic_job(folder, **settings)
    case = f"{agents} x {records:,} x {_DIMENSION}, {queries:,} queries"
    found, taken = [], {}
    for engine in ("faiss-gpu", "torch-gpu"):
        turns = beside_bare(lambda name: replace(job(f"{engine}-{name}"), engine=engine), device_index, turns=3)  # noqa: B023
        taken[engine] = statistics.median(turn[1] for turn in turns)
        ratio = statistics.median(ours / theirs for theirs, ours in turns)
        found += [
            (f"run, {engine} / bare FAISS on the device and numpy", "time ratio", ratio, None),
            (f"run, {engine}", "labels per second", queries / taken[engine], None),
        ]
    here = seconds_of(lambda: run_job(replace(job("here"), engine="faiss")))
    found += [(f"run, {engine} / faiss", "time ratio", seconds / here, None) for engine, seconds in taken.items()]
    return rows_of(case, found, settings=settings)


def _least(work: Callable[[], object]) -> float:
    """Return the least of five times, after a warm-up; ours and the bare twins end with a copy to the host."""
    work()
    return min(seconds_of(work) for _ in range(5))
