"""`labeler doctor` on this machine: nothing wrong, every registered engine, 80 columns, one document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from feature_store.index import ENGINES
from workers.doctor.checkup import steps
from workers.doctor.engines import built_for, devices

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
    assert {"engine-torch-gpu", "devices"} == set(named) - without


def test_this_machine_is_told_in_80_columns_and_ends_with_0(tmp_path: Path) -> None:
    names = ("versions", "processor", "memory", "clock", "disk", "journal", "redis-server", "engine-numpy")
    done = doctor("--home", str(tmp_path), *(word for name in names for word in ("--only", name)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "exact: 40 searches equal int64, k to 2049" in done.stdout
    assert list(tmp_path.iterdir()) == []


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
    assert {"engine numpy", "engine int16", "engine torch", "product", "search by int16", "images"} <= found


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
