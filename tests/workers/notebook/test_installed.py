"""The project as it is installed: a wheel in a folder of its own, beside somebody else's folders of the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("labeler", "feature_store", "api", "workers", "checks")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` unpacks: the wheel, built here without a download."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    assert wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, beside: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, as a notebook's kernel: that folder first, what is installed behind it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = f"{beside}:{installed}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=beside, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_the_wheel_holds_every_package_with_its_pages_and_nothing_else(installed: Path) -> None:
    found = {path.name for path in installed.iterdir()}
    assert {name for name in found if not name.endswith(".dist-info")} == set(PACKAGES)
    for needed in ("feature_store/results/report/report.html.j2", "api/console/static/index.html", "labeler/py.typed"):
        assert (installed / needed).is_file(), needed


@pytest.mark.long
@pytest.mark.process
def test_the_command_of_the_wheel_runs_the_demo_in_a_clean_environment(installed: Path, tmp_path: Path) -> None:
    """An environment of its own, where the packages that the wheel depends on are seen and this checkout is not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)
    [wheel] = installed.parent.glob("*.whl")
    uv = shutil.which("uv", path=Path(sys.executable).parent) or pytest.skip("`make install` installs uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--offline", "--python", "env/bin/python", str(wheel)]
    subprocess.run(command, cwd=tmp_path, check=True)
    [packages] = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # a path alone: no .pth beyond is read
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments, says in ((["--version"], f"{PROJECT['version']}"), (["demo", "--out", "demo"], "right")):
        ran = subprocess.run(
            ["env/bin/labeler", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert says in ran.stdout
    assert (tmp_path / "demo" / "report.html").is_file()


@pytest.mark.process
def test_a_notebook_beside_folders_without_python_in_them_works(installed: Path, tmp_path: Path) -> None:
    for name in ("api", "workers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("ours")
    ran = run(installed, tmp_path, "import labeler; print(labeler.__file__); print(labeler.plan(epsilon=1.0))")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(installed))
    assert "epsilon 1.0" in ran.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["workers", *(pytest.param(name, marks=pytest.mark.long) for name in ("api", "feature_store"))]
)
def test_a_notebook_beside_a_package_of_that_name_gets_one_clear_sentence(
    installed: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('somebody else')")
    ran = run(installed, tmp_path, "import labeler; labeler.plan(epsilon=1.0)")
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: `import labeler` needs its own package '{name}', and Python finds another one"
    )
    assert "rename that one" in last
    assert "somebody else" not in ran.stderr


@pytest.mark.process
def test_the_command_is_untouched_by_whatever_lies_in_the_folder(installed: Path, tmp_path: Path) -> None:
    """As `uv tool install` sets it up: the folder it is called in is not on the path."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('somebody else')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(installed)
    code = (
        "import sys; sys.path.remove(''); sys.argv = ['labeler', 'plan', '--help']; import workers.cli as it; it.main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "--epsilon" in ran.stdout
