"""The arrows and doors of ARCHITECTURE.md hold, and the tool that says so catches a planted violation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("labeler", "feature_store", "api", "workers")

PLANTED = {
    "labeler imports feature_store": ("labeler/task.py", "import feature_store", "Arrows point down"),
    "feature_store imports workers": ("feature_store/shard.py", "import workers", "Arrows point down"),
    "api imports workers": ("api/__init__.py", "import workers", "Arrows point down"),
    "labeler imports torch": ("labeler/noise.py", "import torch", "labeler is pure"),
    "faiss outside its door": ("workers/agent.py", "import faiss", "faiss has one door"),
    "timm outside its door": ("feature_store/shard.py", "import timm", "timm and torchvision have one door"),
    "torchvision outside its door": ("workers/agent.py", "import torchvision", "timm and torchvision have one door"),
    "sql outside its door": ("workers/agent.py", "import sqlalchemy", "SQL has one door"),
    "fastapi outside its door": ("workers/agent.py", "import fastapi", "fastapi and uvicorn have one door"),
    "redis outside its door": ("feature_store/shard.py", "import redis", "redis has one door"),
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run(
        [*command, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(folder)},
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_house_as_it_stands_keeps_every_contract(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_violation_is_caught(copy: Path, plant: str) -> None:
    file, line, contract = PLANTED[plant]
    path = copy / file
    path.write_text(
        path.read_text().replace(
            "from __future__ import annotations\n", f"from __future__ import annotations\n\n{line}\n", 1
        )
    )
    if line not in path.read_text():
        path.write_text(path.read_text() + f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout
    broken = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert any(contract in row for row in broken), result.stdout


def test_labeler_and_shards_load_without_any_learning_library() -> None:
    code = (
        "import sys, labeler.planning, labeler.tally, labeler.release, labeler.contribution, feature_store.shard; "
        "print(*sorted({'torch','timm','faiss','torchvision','sklearn'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == []
