"""What a device may do to an index, on machines without one: see fake_devices for what takes its place."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index import Neighbors, build, build_index, engine_gpu, nearest_by_definition
from feature_store.index.build import probe
from feature_store.index.engine_faiss import WINDOW, FaissBlock, FaissEngine
from feature_store.index.engine_gpu import (
    DeviceBlock,
    FaissGpuEngine,
    TorchEngine,
    TorchPart,
    exact_product,
    exact_sums,
)
from feature_store.index.exact_index import (
    Engine,
    ExactIndex,
    NumpyBlock,
    NumpyEngine,
    every_query_tied,
)
from feature_store.rows import GatheredRows, quantize
from labeler.errors import InvalidSetting, UnsafeIndex
from tests.feature_store.index.fake_devices import FakeDevice, SmallFaiss, SmallTorch

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


@pytest.mark.parametrize("made", [SmallFaiss, SmallTorch])
@pytest.mark.parametrize("room", [1, 70, 640, 2999])
def test_what_a_device_has_no_room_for_is_read_block_by_block(
    made: type[TorchEngine], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_gpu, "_room_bytes", lambda _: room * (2 * 8 + 8) // 2)
    engine = made(devices=("cpu", "cpu"))
    engine.bytes_per_row = lambda dimension: 2 * dimension + 8  # type: ignore[method-assign]
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

    class Failing(FaissGpuEngine):
        searches = 0

        def load(self, rows: GatheredRows) -> DeviceBlock:
            block = super().load(rows)
            whole, part = block.first_keys, block.parts[0]

            def fails(queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
                Failing.searches += 1
                if Failing.searches >= moment:
                    part.begin = _broken  # type: ignore[method-assign]
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


def _broken(*_: object) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("limit", [None, 560_000, 5_000_000])
def test_a_device_that_does_not_tell_its_memory_is_left(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:

    def silent(_: torch.device) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(engine_gpu, "_room_bytes", silent)
    engine = FaissGpuEngine(devices=["cpu"])
    index = ExactIndex(FEATURES, IDS, engine, memory_limit_bytes=limit)
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


def test_faiss_that_misses_a_record_is_left_for_numpy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first_keys = FaissBlock.first_keys
    monkeypatch.setattr(FaissBlock, "first_keys", lambda self, asked, count: first_keys(self, asked, count + 1)[:, 1:])
    index = ExactIndex(FEATURES, IDS, FaissEngine())
    assert isinstance(index.engine, NumpyEngine)
    assert_equal(index.search(QUERIES, 60), 60)
    assert [record.__dict__["engine"] for record in caplog.records] == ["faiss"]


@pytest.mark.parametrize("limit", [None, 1_200_000])
def test_an_engine_for_the_processor_that_misses_a_record_is_refused(limit: int | None) -> None:
    class Forgetful(NumpyEngine):
        def load(self, rows: GatheredRows) -> NumpyBlock:
            return _Forgetful(super().load(rows)._rows, rows.ranks)

    class _Forgetful(NumpyBlock):
        def scores(self, queries: NDArray[np.float32], tile: slice) -> NDArray[np.float32]:
            scores = super().scores(queries, tile)
            scores[:, len(self._rows) // 2] = scores[:, 0]
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


def accumulated(bits: int, *, at_once: int = 8) -> Callable[[Tensor, Tensor], Tensor]:
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
def test_an_accumulator_of_24_bits_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_gpu, "exact_product", accumulated(24))
    assert probe(TorchEngine(devices=["cpu"])) is None


@pytest.mark.parametrize("bits", [22, 23, 14])
def test_an_accumulator_of_fewer_bits_is_found_out_by_the_probe(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_gpu, "exact_product", accumulated(bits))
    wrong = probe(TorchEngine(devices=["cpu"]))
    assert wrong is not None
    assert "failed, or was not exact" in wrong


def test_sums_that_are_rounded_to_half_precision_are_found_out_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(queries: Tensor, records: Tensor) -> Tensor:
        middle = queries.shape[1] // 2
        parts = [
            exact_product(queries[:, some], records[:, some]).half() for some in (slice(middle), slice(middle, None))
        ]
        return parts[0].float() + parts[1].float()

    monkeypatch.setattr(engine_gpu, "exact_product", reduced)
    assert probe(TorchEngine(devices=["cpu"])) is not None


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
        ('print("noise"); print(\'{"refused": "torch sees no CUDA device"}\')', "torch sees no CUDA device"),
        ("import time; time.sleep(600)", "did not end within 1 s"),
    ],
)
@pytest.mark.process
def test_whatever_a_device_does_to_the_child_is_a_sentence(
    code: str, sentence: str, driver: pytest.MonkeyPatch
) -> None:
    child(driver, code)
    driver.setattr(build, "TIME_LIMIT_S", 1 if "sleep" in code else 240)
    for engine in ("faiss-gpu", "torch-gpu"):
        with pytest.raises(InvalidSetting, match=sentence) as refused:
            build_index(FEATURES, IDS, engine=engine)
        assert f"engine {engine} needs" in str(refused.value)
        assert "use engine faiss or auto" in str(refused.value)


@pytest.mark.process
def test_auto_uses_the_processor_where_the_device_does_not_work_and_says_why_once(
    driver: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child(driver, "import os; os.abort()")
    for _ in range(3):
        index = build_index(FEATURES, IDS)
        assert isinstance(index, ExactIndex)
        assert isinstance(index.engine, FaissEngine)
    assert [record.getMessage() for record in caplog.records] == ["no device is used"]


def test_without_a_driver_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    build.forget()
    monkeypatch.setattr(build, "has_driver", lambda: False)
    monkeypatch.setattr(subprocess, "run", None)
    for engine in ("faiss-gpu", "torch-gpu"):
        with pytest.raises(InvalidSetting, match="this machine has no NVIDIA driver"):
            build_index(FEATURES, IDS, engine=engine)
    assert isinstance(build.load_engine("auto"), FaissEngine)
    build.forget()


@pytest.mark.long
@pytest.mark.process
def test_the_child_says_what_it_found_on_one_line(driver: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(InvalidSetting, match="sees no CUDA device"):
        build.contact("faiss-gpu")


@pytest.mark.process
def test_auto_takes_all_devices_whatever_the_work_and_a_single_job_only_for_much(driver: pytest.MonkeyPatch) -> None:
    child(driver, """print('{"devices": ["cuda:0", "cuda:1"], "is_half": true}')""")
    driver.setattr(torch.cuda, "device_count", lambda: 2)
    assert repr(build.load_engine("auto")) == "FaissGpuEngine(devices=['cuda:0', 'cuda:1'])"
    assert repr(build.load_engine("torch-gpu")) == "TorchEngine(devices=['cuda:0', 'cuda:1'])"
    assert build.engine_of_job("auto", build.WORTH_A_DEVICE - 1) == "faiss"
    assert build.engine_of_job("auto", build.WORTH_A_DEVICE) == "auto"
    assert build.engine_of_job("faiss-gpu", 1) == "faiss-gpu"


@pytest.mark.parametrize("exact", [(True, True), (False, True), (False, False)])
def test_rows_are_stored_in_float32_where_float16_is_not_exact(
    exact: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's part, over fakes: one device is exact in float16, in float32, or not."""

    def engine_of(name: str, *, devices: Sequence[str], is_half: bool) -> FakeDevice:
        assert name == "faiss-gpu"
        return FakeDevice(loses_best=devices == ["second"] and not exact[0 if is_half else 1])

    monkeypatch.setattr(build, "device_engine", engine_of)
    answer = build.meet("faiss-gpu", ["first", "second"])
    if any(exact):
        assert answer == {"devices": ["first", "second"], "is_half": exact[0]}
    else:
        assert answer["refused"].startswith("second: it failed, or was not exact")


@pytest.mark.parametrize("engine", ["faiss-gpu", "torch-gpu"])
def test_the_engines_of_devices_pass_the_childs_probe(engine: str) -> None:
    assert build.meet(engine, ["cpu"]) == {"devices": ["cpu"], "is_half": True}
    assert build.meet(engine, []) == {"refused": "torch sees no CUDA device"}


def test_the_processors_engine_takes_memory_maps_beside_that_of_devices(tmp_path: Path) -> None:
    """The tensors' door of FAISS, which the engine of devices opens for its process, takes no kind of array but one."""
    np.save(tmp_path / "features.npy", FEATURES)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    for engine in (FaissEngine(), FaissGpuEngine(devices=["cpu"])):
        index = ExactIndex(mapped, IDS, engine)
        found = index.search(mapped[:40], 7)
        assert index.fault is None
        np.testing.assert_array_equal(
            found.record_ids, nearest_by_definition(FEATURES, IDS, FEATURES[:40], 7).record_ids
        )


# What ties cost


@pytest.mark.parametrize("made", [lambda: FaissEngine(), lambda: FaissGpuEngine(devices=["cpu"])])
def test_only_queries_that_tie_beyond_the_window_are_settled_in_full_unless_a_probe_asks_for_all(
    made: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[int] = []
    plain, tiles = NumpyBlock.first_keys, TorchPart.settle

    def counts(self: NumpyBlock, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        settled.append(len(queries))
        return plain(self, queries, count)

    def counts_too(self: TorchPart, queries: Tensor, count: int) -> Tensor:
        settled.append(len(queries))
        return tiles(self, queries, count)

    monkeypatch.setattr(NumpyBlock, "first_keys", counts)
    monkeypatch.setattr(TorchPart, "settle", counts_too)
    copies = WINDOW + 1
    features = quantize(RNG.normal(size=(400, 16)))
    features[:copies] = features[0]
    features[copies : 2 * copies - 1] = features[copies]  # one less: they fit the window
    index = ExactIndex(features, IDS[:400], made())
    queries = features[[0, copies, -1, -2]]

    def found() -> tuple[Neighbors, int]:
        settled.clear()
        return index.search(queries, 1), sum(settled)

    alone, some = found()
    with every_query_tied():
        again, all_of_them = found()
    assert some == 1
    assert all_of_them == len(queries)
    np.testing.assert_array_equal(alone.record_ids, again.record_ids)
    assert found()[1] == some


def test_a_device_that_this_machine_does_not_have_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert repr(TorchEngine(devices=["cuda:0"])) == "TorchEngine(devices=['cuda:0'])"
    with pytest.raises(InvalidSetting, match="device cuda:7 is needed, and torch sees 1 CUDA devices"):
        TorchEngine(devices=["cuda:7"])
    with pytest.raises(InvalidSetting, match="names no device"):
        TorchEngine(devices=["toaster"])


# On a machine that has one


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["faiss-gpu", "torch-gpu"])
def test_a_real_device_is_exact_and_is_not_left_for_the_processor(engine: str) -> None:
    """The suites of equal neighbors would pass on the processor too."""
    loaded = build.load_engine(engine)
    assert probe(loaded) is None
    index = build_index(FEATURES, IDS, engine=engine)
    assert isinstance(index, ExactIndex)
    for k in (1, 50, 2040, 2041, 3000):
        assert_equal(index.search(QUERIES, k), k)
        with every_query_tied():
            assert_equal(index.search(QUERIES, k), k)
    assert isinstance(index.engine, type(loaded))


@pytest.mark.gpu
@pytest.mark.parametrize("is_half", [True, False])
def test_faiss_is_exact_on_every_real_device_in_both_kinds_of_storage(is_half: bool) -> None:
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    assert build.contact("faiss-gpu") == {"devices": devices, "is_half": True}
    for device in devices:
        assert probe(FaissGpuEngine(devices=[device], is_half=is_half)) is None
    assert probe(FaissGpuEngine(devices=devices, is_half=is_half)) is None


@pytest.mark.gpu
def test_auto_is_faiss_on_a_real_device_whatever_the_work() -> None:
    index = build_index(FEATURES[:3], IDS[:3])
    assert isinstance(index, ExactIndex)
    assert isinstance(index.engine, FaissGpuEngine)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["faiss-gpu", "torch-gpu"])
def test_both_libraries_in_one_process_give_a_real_device_back(engine: str) -> None:
    """FAISS brings CUDA 12 beside torch's 13. Its working memory stays; a hundred indexes add nothing to it."""
    loaded = build.load_engine(engine)
    rows = quantize(RNG.normal(size=(50_000, 256)))
    ids = np.arange(len(rows))

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    product = torch.ones((256, 256), device="cuda") @ torch.ones((256, 256), device="cuda")
    ExactIndex(rows, ids, loaded).search(rows[:40], 5)
    before = free()
    for _ in range(20):
        ExactIndex(rows, ids, loaded).search(rows[:40], 5)
        assert float((product @ product)[0, 0]) == 256.0**3
    assert free() >= before - (64 << 20)


ROOT = Path(__file__).parents[3]
CARDS = {75: "T4", 80: "A100", 86: "A10", 89: "L4", 90: "H100"}


@pytest.mark.skipif(torch.version.cuda is None, reason="this wheel of torch is for processors only")
def test_the_torch_wheel_has_code_for_every_card() -> None:
    flags = torch._C._cuda_getArchFlags().split()
    majors = {int(flag.removeprefix("sm_").rstrip("af")) // 10 for flag in flags if flag.startswith("sm_")}
    assert {card // 10 for card in CARDS} <= majors, flags


@pytest.mark.long
@pytest.mark.process
def test_where_a_gpu_is_required_its_tests_fail_instead_of_being_skipped() -> None:
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "0"]
    asked.append("tests/feature_store/test_backbones.py")
    outcomes = {}
    for required in ("0", "1"):
        environment = os.environ | {"LABELER_REQUIRE_GPU": required, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        outcomes[required] = (done.returncode, "skipped" in done.stdout.splitlines()[-1], "failed" in done.stdout)
    assert outcomes == {"0": (0, True, False), "1": (1, False, True)}
