"""A check-up finds the faults that are planted, each in a sentence that says what to do, and nothing wrong here.

The faults are functions of a module that the step's process imports, so that the process dies, hangs or computes
wrongly in truth.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from checks.doctor.checkup import CheckFinding, Step, check_up, run_alone, steps, well
from checks.doctor.engines import built_for, devices
from feature_store.index import ENGINES
from labeler.errors import InvalidSetting

pytestmark = pytest.mark.process

PLANTED = '''
import os, resource, signal, subprocess, sys, time
import numpy as np
from checks.doctor import checkup, engines
from checks.doctor.checkup import well


def well_then_abort():
    yield well("a first thing", "found before the end", seconds=1.5)
    sys.stderr.write("Faiss assertion 'err == cudaSuccess' failed\\n")
    sys.stderr.flush()
    os.abort()


def raises():
    yield from ()
    raise RuntimeError("CUDA driver version is insufficient")


def hangs(file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(file, "w").write(str(child.pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield well("a first thing", "found before the end")
    open(file + " and it", "w").close()
    while True:
        time.sleep(60)


def misses_one():
    """An engine that loses the nearest record of some batches: the check at an index's load sees others."""
    from feature_store.index.exact_index import NumpyBlock

    right = NumpyBlock.scores

    def scores(self, queries, tile):
        found = right(self, queries, tile)
        if len(queries) == 6 and queries.shape[1] == 24:
            found[3, found[3].argmax()] = -5000
        return found

    NumpyBlock.scores = scores
    yield from engines.exactness("numpy")


def rounds():
    """An index leaves such an engine for numpy by itself, and finds the right neighbors all the same."""
    from feature_store.index.definition import RANK_BITS
    from feature_store.index.engine_faiss import FaissBlock

    right = FaissBlock.first_keys
    FaissBlock.first_keys = lambda self, queries, count: right(self, queries, count) & ~(3 << RANK_BITS)
    yield from engines.exactness("faiss")


def keeps_what_it_takes():
    from feature_store.index.exact_index import NumpyEngine

    right, kept = NumpyEngine.load, []

    def load(self, rows):
        kept.append(np.ones((len(rows), rows.dimension), dtype=np.float32))
        return right(self, rows)

    NumpyEngine.load = load
    yield from engines.made_and_freed("numpy")


def environment():
    yield well("environment", f"{os.environ['PLANTED_ONE']} {os.environ['PLANTED_TWO']}")


def full_disk(home_folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # EFBIG, as a full quota says it
    yield from checkup.disk(home_folder)


def disk_of_another(home_folder):
    if os.geteuid() == 0:
        os.seteuid(65534)
    yield from checkup.disk(home_folder)
    yield from checkup.sqlite(home_folder)
'''


@pytest.fixture(autouse=True)
def _planted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted_faults.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(folder)


def run(name: str, *, limit_s: float = 240.0, **arguments: object) -> list[CheckFinding]:
    return run_alone(Step(name, f"planted_faults:{name}", limit_s, "start it again", arguments))


def test_an_abort_is_a_sentence_and_what_was_found_before_is_kept() -> None:
    first, last = run("well_then_abort")
    assert first == well("a first thing", "found before the end", seconds=1.5)
    assert last.state == "wrong"
    assert last.found == "was ended by SIGABRT: Faiss assertion 'err == cudaSuccess' failed"
    assert last.to_do == "start it again"


def test_an_error_is_a_sentence() -> None:
    (finding,) = run("raises")
    assert (finding.state, finding.found) == ("wrong", "failed: RuntimeError: CUDA driver version is insufficient")


def test_what_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over as soon as it hangs, however slow this machine is."""
    wait = subprocess.Popen.wait

    def over(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        while timeout is not None:
            if (tmp_path / "child and it").exists():
                raise subprocess.TimeoutExpired(process.args, timeout)
            time.sleep(0.02)
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", over)
    first, last = run("hangs", limit_s=8.0, file=str(tmp_path / "child"))
    assert first.state == "well"
    assert (last.state, last.found) == ("wrong", "did not end within 8 s and was ended")
    with suppress(FileNotFoundError, ProcessLookupError):  # it is gone
        while Path(f"/proc/{(tmp_path / 'child').read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)


def test_a_step_has_its_environment_where_ours_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_ONE", "ours")
    step = Step("environment", "planted_faults:environment", environment={"PLANTED_ONE": "its", "PLANTED_TWO": "own"})
    assert run_alone(step) == [well("environment", "ours own")]


def test_an_engine_that_misses_a_neighbour_is_found() -> None:
    (finding,) = run("misses_one")
    assert finding.state == "wrong"
    assert "the first: near 2^24, 24 numbers, k 1" in finding.found
    assert 'set engine = "numpy"' in finding.to_do


@pytest.mark.long
def test_an_engine_that_its_index_left_for_numpy_is_not_called_exact() -> None:
    (finding,) = run("rounds")
    assert finding.state == "wrong"
    assert finding.numbers["wrong"] > 0
    assert "left for numpy: neighbours of four random queries" in finding.found


def test_memory_that_does_not_come_back_is_found() -> None:
    (finding,) = run("keeps_what_it_takes")
    assert finding.state == "wrong"
    assert finding.numbers["main_grown_bytes"] > 90 * 2**20
    assert "does not give back what it takes" in finding.to_do


def test_a_full_disk_is_found(tmp_path: Path) -> None:
    (finding,) = run("full_disk", home_folder=str(tmp_path))
    assert finding.state == "wrong"
    assert "4 MiB cannot be written" in finding.found
    assert "make room" in finding.to_do
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".labeler")] == []


def test_a_home_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o500)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
    disk, journal = run("disk_of_another", home_folder=str(home))
    assert (disk.state, journal.state) == ("wrong", "wrong")
    assert f"nothing can be written at {home}" in disk.found
    assert "name a home" in disk.to_do


def test_one_step_that_dies_does_not_end_the_check_up(tmp_path: Path) -> None:
    done = []
    planted = [Step("dies", "planted_faults:well_then_abort"), Step("disk", "checks.doctor.checkup:disk",
               arguments={"home": str(tmp_path / "not" / "there" / "yet")})]  # fmt: skip
    found = check_up(planted, progress=lambda _, at, of: done.append((at, of)))
    assert not found.is_well
    assert [(step, finding.state) for step, finding in found.findings] == [
        ("dies", "well"),
        ("dies", "wrong"),
        ("disk", "well"),
    ]
    assert done == [(0, 2), (1, 2), (2, 2)]
    assert not (tmp_path / "not").exists()


def test_a_step_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="'engine-tpu' is not a step; choose among versions, processor"):
        check_up(steps(tmp_path, gpu=False), only=["engine-tpu"])


ROOT = Path(__file__).parents[3]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv = ['labeler', 'doctor', *{list(arguments)!r}]; from workers.cli import main; main()"
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


def test_every_engine_that_is_registered_has_a_step() -> None:
    named = [step.name for step in steps(Path(), gpu=True)]
    assert [name for name in named if name.startswith("engine-")] == [f"engine-{name}" for name in ENGINES[1:]]
    without = {step.name for step in steps(Path(), gpu=False)}
    assert {"engine-faiss-gpu", "engine-torch-gpu", "devices"} == set(named) - without


def test_this_machine_is_told_in_80_columns_and_ends_with_0(tmp_path: Path) -> None:
    names = ("versions", "processor", "memory", "clock", "disk", "journal", "redis-server", "engine-numpy")
    done = doctor("--home", str(tmp_path), *(word for name in names for word in ("--only", name)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "exact: 40 searches equal int64, k to 2049" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_redis_server_is_named_with_its_version() -> None:
    done = doctor("--json", "--only", "redis-server")
    (found,) = json.loads(done.stdout)["findings"]
    assert re.fullmatch(r"(Redis|Valkey) \d+\.\d+\.\d+ starts, answers and ends", found["found"])


def test_a_device_is_wrong_where_it_was_asked_for_and_is_not_there() -> None:
    _no_device()
    found = list(devices())
    assert {one.what: one.state for one in found}["torch"] == "wrong"
    assert all(one.to_do for one in found if one.state != "well")


def _no_device() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")


@pytest.mark.long
def test_the_whole_check_up_finds_nothing_wrong_here(tmp_path: Path) -> None:
    done = doctor("--json", "--home", str(tmp_path))
    document = json.loads(done.stdout)
    assert done.returncode == 0, [one for one in document["findings"] if one["state"] == "wrong"]
    found = {one["what"] for one in document["findings"]}
    assert {"engine numpy", "engine faiss", "product", "search by faiss", "images"} <= found


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (8, 0), True),
        (["sm_80", "sm_90"], (8, 9), True),  # a later minor version runs what an earlier one does
        (["sm_86"], (8, 0), False),
        (["sm_80", "sm_90"], (7, 5), False),
        (["sm_80", "sm_90"], (10, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),  # compiled by the driver when it is loaded
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["compute_100f"], (12, 0), False),
        ([], (9, 0), False),
    ],
)
def test_what_a_library_was_built_for(architectures: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert built_for(architectures, capability) is runs
