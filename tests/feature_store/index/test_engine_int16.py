"""The int16 kernel finds what the definition finds, however it is compiled, split and ordered; else it is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.index import build, build_index, engine_int16, nearest_by_definition
from feature_store.index.definition import RANK_BITS
from feature_store.index.engine_int16 import Int16Block, Int16Engine, num_threads, probed_kernel
from feature_store.index.exact_index import ExactIndex
from feature_store.rows import GatheredRows
from labeler.errors import InvalidSetting

pair_kernel = pytest.importorskip("feature_store.index.pair_kernel", reason="llvmlite is not installed")

ROOT = Path(__file__).parents[3]
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vbmi", "avx512vbmi2"})
VNNI = frozenset({"avxvnni", "avx512vnni"})
WAYS = {
    "as it is": frozenset[str](),
    "AVX-512 without VNNI": VNNI,
    "AVX2 with VNNI": AVX512 | {"avx512vnni"},
    "AVX2": AVX512 | VNNI,
}


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    if isinstance(reason := probed_kernel(), str) and "neither AVX2" in reason:
        pytest.skip(reason)
    yield
    probed_kernel.cache_clear()


def vectors(rng: np.random.Generator, count: int, dimension: int) -> NDArray[np.int16]:
    made = rng.standard_normal((count, dimension))
    made *= 4095 / np.linalg.norm(made, axis=1, keepdims=True)
    return np.clip(np.trunc(made), -2048, 2048).astype(np.int16)


def definition(features: NDArray[np.int16], queries: NDArray[np.int16], k: int) -> NDArray[np.int64]:
    found = nearest_by_definition(features, np.arange(len(features)), queries, k)
    keys: NDArray[np.int64] = ((1 << 24) - found.similarities.astype(np.int64) << RANK_BITS) | found.record_ids
    return keys


def block_of(kernel: Any, features: NDArray[np.int16]) -> Int16Block:
    rows = np.arange(len(features))
    return Int16Block(kernel, GatheredRows(features, rows, 1 << 18), len(rows))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dimension", [1, 2, 3, 63, 200])
def test_every_way_of_compiling_finds_the_definition(way: str, dimension: int) -> None:
    kernel = pair_kernel.compile_kernel(without=WAYS[way])
    rng = np.random.default_rng(dimension)
    features = vectors(rng, 400, dimension)
    features[300:] = features[:100]
    queries = np.concatenate([features[:5], -features[:5], vectors(rng, 13, dimension)])
    for k in (1, 13, 399, 400):
        np.testing.assert_array_equal(
            block_of(kernel, features).first_keys(queries, k), definition(features, queries, k)
        )


@pytest.mark.parametrize("order", ["nearest last", "nearest first", "all tied", "random"])
def test_no_order_of_records_overflows_what_is_kept(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_int16, "_PACKED_BYTES", 48 * 2 * 60 * 4)
    rng = np.random.default_rng(3)
    query = rng.integers(-2, 3, (1, 60)).astype(np.int16)
    features = rng.integers(-2, 3, (5000, 60)).astype(np.int16)  # similarities that differ by 1, and many that do not
    similar = features.astype(np.int64) @ query[0].astype(np.int64)
    if order.startswith("nearest"):
        features = features[np.argsort(similar if order == "nearest last" else -similar)]
    if order == "all tied":
        features[:] = features[0]
    queries = np.concatenate([query, rng.integers(-2, 3, (99, 60)).astype(np.int16)])
    for k in (1, 7, 300):
        found = block_of(pair_kernel.compile_kernel(), features).first_keys(queries, k)
        np.testing.assert_array_equal(found, definition(features, queries, k))


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_threads_change_nothing(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(engine_int16, "_SMALL_WORK", 1)
    assert num_threads() == int(threads)
    rng = np.random.default_rng(4)
    features, queries = vectors(rng, 3000, 33), vectors(rng, 101, 33)
    found = block_of(pair_kernel.compile_kernel(), features).first_keys(queries, 20)
    np.testing.assert_array_equal(found, definition(features, queries, 20))


# Where it cannot be used


def test_auto_takes_it_where_there_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.engine_of_processor(build.WORTH_A_KERNEL) == "int16"
    assert build.engine_of_processor(build.WORTH_A_KERNEL - 1) == "numpy"
    monkeypatch.setattr(build, "WORTH_A_KERNEL", 0)
    index = build_index(np.ones((3, 4), np.int16), np.arange(3))
    assert isinstance(index, ExactIndex)
    assert isinstance(index.engine, Int16Engine)


def test_a_kernel_that_misses_a_neighbour_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = pair_kernel.compile_kernel()

    def forgetful(*arguments: Any) -> int:
        return int(right.score(*arguments[:6], arguments[6] - 1, *arguments[7:]))  # one record fewer counts

    monkeypatch.setattr(pair_kernel, "compile_kernel", lambda: replace(right, score=forgetful))
    probed_kernel.cache_clear()
    assert "did not find what the definition finds" in str(probed_kernel())
    assert "it is not used" in caplog.text
    assert build.engine_of_processor(build.WORTH_A_KERNEL) == "numpy"
    with pytest.raises(InvalidSetting, match=r"engine int16 cannot be used here.*use engine numpy or auto"):
        build_index(np.ones((3, 4), np.int16), np.arange(3), engine="int16")


def test_without_llvmlite_numpy_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    probed_kernel.cache_clear()
    monkeypatch.delitem(sys.modules, "feature_store.index.pair_kernel")
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert probed_kernel() == "llvmlite is not installed"
    assert build.engine_of_processor(build.WORTH_A_KERNEL) == "numpy"


def test_a_processor_without_its_instructions_is_told() -> None:
    with pytest.raises(OSError, match="neither AVX2 nor AVX-512"):
        pair_kernel.compile_kernel(without=AVX512 | VNNI | {"avx2"})


def test_where_new_code_may_not_run_it_is_refused_and_nothing_dies() -> None:
    # Linux since 6.3: this process may not make anything executable any more (PR_SET_MDWE, as MemoryDenyWriteExecute).
    code = (
        "import ctypes, sys\n"
        "import numpy, llvmlite.binding\n"
        "from feature_store.index.engine_int16 import probed_kernel\n"
        "if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit(77)\n"
        "print(probed_kernel())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel cannot deny it")
    assert "does not let a process run code that it has made" in done.stdout, done.stderr
