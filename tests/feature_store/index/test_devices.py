"""What a device may do to an index, on machines without one: see fake_devices for what takes its place."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index import Neighbors, build, build_index, engine_torch, nearest_by_definition
from feature_store.index.build import probe
from feature_store.index.definition import pack
from feature_store.index.engine_torch import (
    _GROUP,
    Product,
    TorchBlock,
    TorchEngine,
    exact_sums,
    first_of_tile,
    interleaved,
    single_product,
)
from feature_store.index.exact_index import ExactIndex, NumpyBlock, NumpyEngine, check_memory_limit
from feature_store.rows import GatheredRows
from labeler.errors import InvalidSetting, UnsafeIndex
from tests.feature_store.index.fake_devices import FakeDevice

RNG = np.random.default_rng(20261122)
FEATURES = RNG.integers(-3, 4, (3000, 8)).astype(np.int16)
IDS = RNG.permutation(3000).astype(np.int64)
QUERIES = RNG.integers(-3, 4, (40, 8)).astype(np.int16)


def assert_equal(found: Neighbors, k: int, kept: slice = slice(None)) -> None:
    expected = nearest_by_definition(FEATURES[kept], IDS[kept], QUERIES, k)
    np.testing.assert_array_equal(found.record_ids, expected.record_ids)
    np.testing.assert_array_equal(found.similarities, expected.similarities)


# Memory


@pytest.mark.parametrize("k", [1, 50, 3000, 4000])
def test_a_shard_larger_than_the_device_is_searched_with_one_block_alive_at_a_time(k: int) -> None:
    device = FakeDevice(room=500)
    index = ExactIndex(FEATURES, IDS, device)
    assert_equal(index.search(QUERIES, k), k)
    assert index.engine is device
    assert index.fault is None
    assert device.made >= 6
    assert device.most_alive == 1
    assert not device.alive


@pytest.mark.parametrize("room", [1, 70, 640, 2999])
def test_torch_reads_block_by_block_what_its_device_has_no_room_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_torch, "_room_bytes", lambda _: room * (2 * 8 + 8) // 2)
    engine = TorchEngine(devices=("cpu", "cpu"), tile_rows=100)
    assert engine.room_rows(8) in (room, max(1, room - 1))
    some = slice(0, 300 if room == 1 else None)
    index = ExactIndex(FEATURES[some], IDS[some], engine)
    assert_equal(index.search(QUERIES, 60), 60, some)
    assert index.engine is engine


def test_deletions_on_a_device_load_again_without_a_second_copy() -> None:
    device = FakeDevice()
    index = ExactIndex(FEATURES, IDS, device)
    index.remove(IDS[:1000])
    assert_equal(index.search(QUERIES, 30), 30, slice(1000, None))
    assert device.made == 2
    assert device.most_alive == 1


# Failures


@pytest.mark.parametrize("moment", [1, 2, 3, 5])
def test_a_device_that_fails_is_left_and_the_processor_gives_the_same_answer(
    moment: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first search is that of the check; a round that is charged must be answered whatever happens then."""

    class Failing(TorchEngine):
        searches = 0

        def load(self, rows: GatheredRows, most_rows: int) -> TorchBlock:
            block = super().load(rows, most_rows)
            whole = block.first_keys

            def fails(queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
                Failing.searches += 1
                if Failing.searches >= moment:
                    block._parts[0]._product = _broken
                return whole(queries, count)

            block.first_keys = fails  # type: ignore[method-assign]
            return block

    with caplog.at_level(logging.ERROR):
        index = ExactIndex(FEATURES, IDS, Failing(devices=("cpu", "cpu")))
        for k in (7, 2500, 40, 1):
            assert_equal(index.search(QUERIES, k), k)
    assert isinstance(index.engine, NumpyEngine)
    assert index.fault == "RuntimeError"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    index.remove(IDS[:5])
    assert_equal(index.search(QUERIES, 9), 9, slice(5, None))


def _broken(_: Tensor, __: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("limit", [None, 560_000, 5_000_000])
def test_a_device_that_does_not_tell_its_memory_is_left(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit its memory is asked for before there is an index: an agent that starts, or a shard in parts."""

    def silent(_: torch.device) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(engine_torch, "_room_bytes", silent)
    check_memory_limit(limit, 8, TorchEngine())
    index = build_index(FEATURES, IDS, engine="torch", memory_limit_bytes=limit)
    assert isinstance(index, ExactIndex)
    assert index.is_kept == (limit is None)
    assert_equal(index.search(QUERIES, 70), 70)


# A neighbor that is missing


def test_a_record_that_a_device_never_returns_is_noticed_when_the_index_is_loaded() -> None:
    """What it returns is exact, so recomputing that saw nothing wrong."""
    device = FakeDevice(loses_best=True)
    index = ExactIndex(FEATURES, IDS, device)
    assert device.made == 1
    assert not device.alive
    assert isinstance(index.engine, NumpyEngine)
    assert_equal(index.search(QUERIES, 60), 60)


@pytest.mark.parametrize("limit", [None, 1_200_000])
def test_an_engine_for_the_processor_that_misses_a_record_is_refused(limit: int | None) -> None:
    class Forgetful(NumpyEngine):
        def load(self, rows: GatheredRows, most_rows: int) -> NumpyBlock:
            return _Forgetful(super().load(rows, most_rows)._rows)

    class _Forgetful(NumpyBlock):
        def scores(self, queries: NDArray[np.float32], tile: slice) -> NDArray[np.float32]:
            scores = super().scores(queries, tile)
            scores[:, len(self) // 2] = scores[:, 0]
            return scores

    rng = np.random.default_rng(3)
    features = rng.normal(0, 40, (90, 2000)).astype(np.int16)
    with pytest.raises(UnsafeIndex, match="records are missed"):
        ExactIndex(features, IDS[:90], Forgetful(), memory_limit_bytes=limit).search(features[:3], 2)


def test_every_load_is_checked_and_every_search_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    check = ExactIndex._check_found
    monkeypatch.setattr(ExactIndex, "_check_found", lambda *given: (checks.append(1), check(*given))[1])
    index = ExactIndex(FEATURES, IDS, NumpyEngine())
    for _ in range(3):
        index.search(QUERIES, 4)
    assert len(checks) == 1
    index.remove(IDS[:1000])
    assert len(checks) == 2
    for limit in (600_000, 900_000):
        in_blocks = build_index(FEATURES, IDS, engine="numpy", memory_limit_bytes=limit)
        before = len(checks)
        assert before > 2
        in_blocks.search(QUERIES, 4)
        assert len(checks) == before


# Exactness


def test_half_precision_holds_the_whole_grid_and_nothing_beyond_it() -> None:
    grid = torch.arange(-2048, 2049)
    assert torch.equal(grid.to(torch.float16).to(torch.int64), grid)
    assert int(torch.tensor(2049).to(torch.float16)) != 2049
    assert not torch.equal(grid.to(torch.bfloat16).to(torch.int64), grid)


def accumulated(bits: int, *, at_once: int = 8) -> Product:
    """A product as tensor cores take it: summands aligned to the largest, what lies below so many bits cut off."""

    def aligned(summands: Tensor) -> Tensor:
        largest = summands.abs().amax(dim=0).clamp(min=1)
        unit = torch.exp2(torch.floor(torch.log2(largest)) + 1 - bits).clamp(min=1)
        return (torch.trunc(summands / unit) * unit).sum(dim=0)

    def product(queries: Tensor, records: Tensor) -> Tensor:
        total = torch.zeros((len(queries), len(records)), dtype=torch.float64)
        for start in range(0, queries.shape[1], at_once):
            some = slice(start, start + at_once)
            products = torch.einsum("qd,rd->dqr", queries[:, some].double(), records[:, some].double())
            total = aligned(torch.cat([total[None], products]))
            total = aligned(total[None])
        return total.float()

    return product


@pytest.mark.long  # a minute and a half, bit by bit; that fakes pass the probe is looked at below
def test_an_accumulator_of_24_bits_is_exact() -> None:
    assert probe(TorchEngine(product=accumulated(24))) is None


@pytest.mark.parametrize("bits", [22, 23, 14])
def test_an_accumulator_of_fewer_bits_is_found_out_by_the_probe(bits: int) -> None:
    wrong = probe(TorchEngine(product=accumulated(bits)))
    assert wrong is not None
    assert "failed, or was not exact" in wrong


def test_sums_that_are_rounded_to_half_precision_are_found_out_by_the_probe() -> None:
    def reduced(queries: Tensor, records: Tensor) -> Tensor:
        middle = queries.shape[1] // 2
        parts = [
            single_product(queries[:, some], records[:, some]).half() for some in (slice(middle), slice(middle, None))
        ]
        return parts[0].float() + parts[1].float()

    assert probe(TorchEngine(product=reduced)) is not None


def test_switches_of_precision_are_off_for_a_product_and_what_they_were_afterwards() -> None:
    matmul, processor = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    switches = [
        (matmul, "allow_fp16_reduced_precision_reduction", True, False),
        (matmul, "allow_bf16_reduced_precision_reduction", True, False),
        (matmul, "allow_fp16_accumulation", True, False),
        (matmul, "fp32_precision", "tf32", "ieee"),
        (processor, "fp32_precision", "bf16", "ieee"),
    ]
    before = [getattr(owner, name) for owner, name, _, _ in switches]
    try:
        for owner, name, allowed, _ in switches:
            setattr(owner, name, allowed)
        with exact_sums():
            assert [getattr(owner, name) for owner, name, _, _ in switches] == [one[3] for one in switches]
        assert [getattr(owner, name) for owner, name, _, _ in switches] == [one[2] for one in switches]
    finally:
        for (owner, name, _, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


# First contact


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine that looks as if it had a device; whoever asks for it starts a child."""
    monkeypatch.setattr(build, "has_driver", lambda: True)
    build.forget()
    yield monkeypatch
    build.forget()


def child(patch: pytest.MonkeyPatch, code: str) -> None:
    patch.setattr(build, "_COMMAND", [sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import os, sys; print('CUDA assertion', file=sys.stderr, flush=True); os.abort()", "SIGABRT, saying 'CUDA"),
        ("raise SystemExit(3)", "failed with exit code 3"),
        ("print('half a')", "failed with exit code 0"),
        ('print(\'{"refused": "torch sees no CUDA device"}\')', "torch sees no CUDA device"),
        ("import time; time.sleep(600)", "did not end within 1 s"),
    ],
)
def test_whatever_a_device_does_to_the_child_is_a_sentence(
    code: str, sentence: str, driver: pytest.MonkeyPatch
) -> None:
    child(driver, code)
    driver.setattr(build, "TIME_LIMIT_S", 1 if "sleep" in code else 240)
    with pytest.raises(InvalidSetting, match=sentence) as refused:
        build_index(FEATURES, IDS, engine="torch-gpu")
    assert "use engine numpy or auto" in str(refused.value)


def test_auto_uses_the_processor_where_the_device_does_not_work_and_says_why_once(
    driver: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child(driver, "import os; os.abort()")
    driver.setattr(build, "WORTH_A_DEVICE", 0)
    for _ in range(3):
        index = build_index(FEATURES, IDS)
        assert isinstance(index, ExactIndex)
        assert isinstance(index.engine, NumpyEngine)
    assert [record.getMessage() for record in caplog.records] == ["no device is used"]


def test_without_a_driver_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    build.forget()
    monkeypatch.setattr(build, "has_driver", lambda: False)
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(InvalidSetting, match="this machine has no NVIDIA driver"):
        build_index(FEATURES, IDS, engine="torch-gpu")
    build.forget()


@pytest.mark.long
def test_the_child_says_what_it_found_on_one_line(driver: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(InvalidSetting, match="sees no CUDA device"):
        build.contact()


def test_auto_takes_all_devices_for_a_large_bound_and_none_for_a_small_one(driver: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def met() -> int:
        asked.append("torch-gpu")
        return 3

    driver.setattr(build, "found_or_none", met)
    driver.setattr(torch.cuda, "device_count", lambda: 3)
    index = build_index(FEATURES, IDS)
    assert isinstance(index, ExactIndex)
    assert isinstance(index.engine, NumpyEngine)
    assert not asked
    assert not build.goes_to_device(build.products_of(8, max_records=None), "auto")
    assert build.goes_to_device(build.products_of(8, max_records=9_000_000), "auto")
    engine = build.load_engine("auto")
    assert repr(engine) == "TorchEngine(devices=['cuda:0', 'cuda:1', 'cuda:2'])"


def test_a_device_that_this_machine_does_not_have_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert repr(TorchEngine(devices=["cuda:0"])) == "TorchEngine(devices=['cuda:0'])"
    with pytest.raises(InvalidSetting, match="needs device cuda:7, torch sees 1 CUDA devices"):
        TorchEngine(devices=["cuda:7"])
    with pytest.raises(InvalidSetting, match="names no device"):
        TorchEngine(devices=["toaster"])


# On a machine that has one


@pytest.mark.gpu
def test_a_real_device_is_exact_and_is_not_left_for_the_processor() -> None:
    """The suites of equal neighbors would pass on the processor too."""
    loaded = build.load_engine("torch-gpu")
    assert probe(loaded) is None
    index = build_index(FEATURES, IDS, engine="torch-gpu")
    assert isinstance(index, ExactIndex)
    for k in (1, 50, 3000):
        assert_equal(index.search(QUERIES, k), k)
    assert isinstance(index.engine, type(loaded))


@pytest.mark.gpu
def test_half_precision_products_are_exact_on_every_real_device() -> None:
    assert build.contact() == torch.cuda.device_count()


@pytest.mark.gpu
def test_a_hundred_indexes_leave_a_real_device_as_it_was() -> None:
    engine = build.load_engine("torch-gpu")
    ExactIndex(FEATURES, IDS, engine)
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        ExactIndex(FEATURES, IDS, engine).search(QUERIES, 5)
    assert torch.cuda.memory_allocated() == before


@given(
    seed=st.integers(0, 2**32 - 1),
    panels=st.integers(1, 3),
    records=st.integers(1, 12 * _GROUP),
    count=st.integers(1, 12),
    values=st.sampled_from([1, 2, 3, 40, 2**24]),
)
def test_the_first_of_a_tile_are_those_of_a_full_sort(
    seed: int, panels: int, records: int, count: int, values: int
) -> None:
    rng = np.random.default_rng(seed)
    similarities = rng.integers(-values, values, (3, panels * records)).clip(-(2**24) + 1).astype(np.float32)
    ranks = np.sort(rng.choice(2**37, panels * records, replace=False)).astype(np.int64)
    found = first_of_tile(_laid(similarities.T, records).T, _laid(ranks, records), count, records).numpy()
    assert np.array_equal(np.sort(found, axis=1), np.sort(pack(similarities, ranks), axis=1)[:, :count])


def _laid(by_record: NDArray[Any], panel_rows: int) -> torch.Tensor:
    """What belongs to records, as it lies on a device: panel after panel."""
    return torch.cat([interleaved(panel) for panel in torch.from_numpy(by_record).split(panel_rows)]).contiguous()


ROOT = Path(__file__).parents[3]
CARDS = {75: "T4", 80: "A100", 86: "A10", 89: "L4", 90: "H100"}


@pytest.mark.skipif(torch.version.cuda is None, reason="this wheel of torch is for processors only")
def test_the_torch_wheel_has_code_for_every_card() -> None:
    flags = torch._C._cuda_getArchFlags().split()
    majors = {int(flag.removeprefix("sm_").rstrip("af")) // 10 for flag in flags if flag.startswith("sm_")}
    assert {card // 10 for card in CARDS} <= majors, flags


@pytest.mark.long
def test_where_a_gpu_is_required_its_tests_fail_instead_of_being_skipped() -> None:
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "0"]
    asked.append("tests/feature_store/test_backbones.py")
    outcomes = {}
    for required in ("0", "1"):
        environment = os.environ | {"LABELER_REQUIRE_GPU": required, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        outcomes[required] = (done.returncode, "skipped" in done.stdout.splitlines()[-1], "failed" in done.stdout)
    assert outcomes == {"0": (0, True, False), "1": (1, False, True)}
