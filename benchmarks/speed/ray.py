"""The cost and gain of a party's own Ray cluster: images embedded, and records searched, against one process.

Both sides have the same processors of one machine, so more of them gain nothing here: the bench measures the overhead.
Shards and neighbors are compared bit for bit each time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import BenchRow, seconds_of
from feature_store.cluster.driver import Driver
from feature_store.cluster.embedding import Recipe, cluster_embedder
from feature_store.cluster.search import ClusterIndex
from feature_store.embedding import embed_source
from feature_store.index import build_index
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.errors import LabelerError
from workers.progress import ProgressCallback, silent

_WORKERS = 2
_SIDE = 320
_ROWS_AT_ONCE = 20_000


def bench_ray(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure embedding and searching by two workers of Ray, against one process."""
    images, records, turns = (600, 100_000, 2) if full else (64, 5_000, 1)
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as name:
        folder = Path(name)
        driver = Driver(beside=folder / "shard", cpus=_WORKERS)
        try:
            progress("Ray", 0, 3)
            begun = seconds_of(lambda: driver.cluster)
            rows.append(BenchRow(f"{_WORKERS} workers", "Ray", "seconds to begin", begun, seconds=begun))
            progress("Ray", 1, 3)
            rows += _embedding(folder, driver, images=images, turns=turns)
            progress("Ray", 2, 3)
            rows += _search(folder, driver, records=records, turns=turns)
            progress("Ray", 3, 3)
        finally:
            driver.end()
    return rows


def _embedding(folder: Path, driver: Driver, *, images: int, turns: int) -> list[BenchRow]:
    source = folder / "images"
    source.mkdir()
    rng = np.random.default_rng(1)
    for number in range(images):
        coarse = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC).save(source / f"{number:06}.jpg")
    recipe = Recipe("efficientnet-lite0", device="cpu")
    backbone = recipe.load()

    def embed(out: str, **settings: Any) -> float:
        return seconds_of(
            lambda: embed_source(
                source, backbone, folder / out, public=True, random_bytes=np.random.default_rng(2).bytes, **settings
            )
        )

    pairs = []
    for turn in range(turns):
        alone = embed(f"alone-{turn}", threads=_WORKERS)
        pairs.append((alone, embed(f"ray-{turn}", embedder=cluster_embedder(recipe, driver))))
        files = [{file.name: file.read_bytes() for file in (folder / f"{who}-{turn}").iterdir()} for who in _WHO]
        if files[0] != files[1]:
            raise LabelerError("the shard of two workers is not that of one process")
    settings = {"images": images, "pixels": _SIDE, "workers": _WORKERS, "turns": turns}
    return _rows(f"{images} images", "images", images, pairs, settings)


_WHO = ("alone", "ray")


def _search(folder: Path, driver: Driver, *, records: int, turns: int) -> list[BenchRow]:
    dimension, queries, k = 512, 500, 50
    rng = np.random.default_rng(3)
    path = folder / "records"
    with ShardWriter(path, classes=("a", "b"), fingerprint="f", dimension=dimension, public=False) as writer:
        for start in range(0, records, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, records - start)
            writer.append(rng.standard_normal((count, dimension), np.float32), np.zeros(count, int), ["x"] * count)
        writer.finish()
    shard = Shard.open(path, verify=False)
    asked = quantize(rng.normal(size=(queries, dimension)))
    alone = build_index(shard.features, shard.record_ids)
    together = ClusterIndex(shard.features, shard.record_ids, driver=driver)
    together.ready()
    pairs = []
    for _ in range(turns + 1):
        pairs.append((seconds_of(lambda: alone.search(asked, k)), seconds_of(lambda: together.search(asked, k))))
    first, second = alone.search(asked, k), together.search(asked, k)
    if not all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ("record_ids", "rows")):
        raise LabelerError("the neighbours of two workers are not those of one process")
    settings = {"records": records, "dimension": dimension, "queries": queries, "k": k, "turns": turns}
    return _rows(f"{records} x {dimension}, k = {k}", "queries", queries, pairs[1:], settings | {"files": 4})


def _rows(
    case: str, what: str, count: int, pairs: list[tuple[float, float]], settings: dict[str, Any]
) -> list[BenchRow]:
    alone, together = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    threads = {"cores": len(os.sched_getaffinity(0))}
    return [
        BenchRow(case, "one process", f"{what} per second", count / alone, seconds=alone, settings=settings | threads),
        BenchRow(case, "Ray", f"{what} per second", count / together, seconds=together, settings=settings | threads),
        BenchRow(case, "Ray / one process", "time ratio", ratio, settings=settings | threads),
    ]
