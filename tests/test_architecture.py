"""The arrows and doors of ARCHITECTURE.md hold, and the tool that says so catches a planted violation."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from labeler.methods import Method

ROOT = Path(__file__).parent.parent
PACKAGES = ("labeler", "feature_store", "api", "workers", "checks", "benchmarks")

PLANTED = {
    "labeler imports feature_store": ("labeler/task.py", "import feature_store", "Arrows point down"),
    "feature_store imports workers": ("feature_store/shard.py", "import workers", "Arrows point down"),
    "api imports workers": ("api/__init__.py", "import workers", "Arrows point down"),
    "a circle in the report": (
        "feature_store/results/report/words.py",
        "import feature_store.results.report.page",
        "the report is built upwards",
    ),
    "labeler imports torch": ("labeler/noise.py", "import torch", "labeler is pure"),
    "faiss outside its door": ("workers/agent/driver.py", "import faiss", "faiss has one door"),
    "ONNX Runtime beside its door": ("feature_store/backbones/network.py", "import onnxruntime", "ONNX has one door"),
    "timm outside its door": ("feature_store/shard.py", "import timm", "timm and torchvision have one door"),
    "sql outside its door": ("workers/agent/driver.py", "import sqlalchemy", "SQL has one door"),
    "sql in the coordinator's decisions": ("api/coordinator/service.py", "import sqlalchemy", "SQL has one door"),
    "fastapi outside its door": ("workers/agent/driver.py", "import fastapi", "fastapi and uvicorn have one door"),
    "redis outside its door": ("feature_store/shard.py", "import redis", "redis has one door"),
    "redis in the coordinator's decisions": ("api/coordinator/service.py", "import redis", "redis has one door"),
    "nacl beside its door": ("labeler/driver/mail_redis.py", "import nacl", "PyNaCl has one door"),
    "postgresql in a route": ("api/routes/jobs.py", "import psycopg", "SQL has one door"),
    "workers import a check": ("workers/agent/driver.py", "import checks.audit.run", "Arrows point down"),
    "a benchmark in the product": ("workers/agent/driver.py", "import benchmarks.speed.speed", "uses no benchmark"),
    "a benchmark behind a command": ("workers/commands/jobs.py", "from benchmarks import speed", "uses no benchmark"),
    "dp-accounting in a price": ("labeler/planning.py", "import dp_accounting", "dp-accounting has one door"),
    "mpyc in the product": ("workers/winner/session.py", "import mpyc.runtime", "MPyC is no part of the product"),
    "an agent imports the coordinator": (
        "workers/agent/driver.py",
        "import api.coordinator.service",
        "parties know no coordinator",
    ),
    "a clock of the system in a price": ("labeler/planning.py", "import labeler.system.clock", "Inside labeler"),
    "the system reads the ledger": ("labeler/system/faults.py", "import labeler.ledger.database", "Inside labeler"),
    "the ledger sends mail": ("labeler/ledger/jobs.py", "import labeler.driver.mail", "Inside labeler"),
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


def copy_of_the_house(folder: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.process
def test_the_house_as_it_stands_keeps_every_contract(tmp_path: Path) -> None:
    result = lint(copy_of_the_house(tmp_path))
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what is said of each broken contract, by its name, where all violations are planted at once."""
    folder = copy_of_the_house(tmp_path_factory.mktemp("planted"))
    for file, line, _ in PLANTED.values():
        with (folder / file).open("a") as module:
            module.write(f"\n{line}\n")
    result = lint(folder)
    assert result.returncode == 1, result.stdout
    said = result.stdout.split("Broken contracts\n")[1]
    parts = re.split(r"^(.+)\n-+\n", said, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_violation_is_caught(planted: dict[str, str], plant: str) -> None:
    file, line, contract = PLANTED[plant]
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imported = line.removeprefix("from ").removeprefix("import ").replace(" import ", ".")
    if imported.split(".")[0] not in PACKAGES:
        imported = imported.split(".")[0]  # of what is not ours it names the library
    (report,) = (text for name, text in planted.items() if contract in name)
    assert re.search(rf"^- +{re.escape(module)} -> {re.escape(imported)} ", report, flags=re.MULTILINE), report


LEARNING = ("torch", "timm", "faiss", "onnxruntime", "onnx", "sklearn", "torchvision", "matplotlib")
DECISIONS = sorted(f"api.coordinator.{path.stem}" for path in (ROOT / "api" / "coordinator").glob("[!_]*.py"))
LOADS_NONE = {
    "prices and shards": ("labeler.planning, labeler.tally, labeler.release, feature_store.shard", ()),
    "the coordinator": (", ".join(("workers.serve", "api.app", "api.server", "api.client", *DECISIONS)), ()),
    # They keep counts and sums; scipy alone takes longer than all the rest.
    "a tallier and a ledger": ("workers.tallier.service, labeler.ledger.ledger", ("scipy",)),
    "an agent": ("workers.agent.service", ("scipy.optimize", "scipy.stats")),
    "the reader of strangers' files": (
        "api.coordinator.parquet_reader",
        ("scipy", "pydantic", "sqlalchemy", "fastapi", "redis", "nacl"),
    ),
    "the command line": ("workers.commands.catalog", ()),
}
"""What begins without any learning library, and what else it does without."""


@pytest.mark.parametrize("what", LOADS_NONE)
@pytest.mark.process
def test_who_learns_nothing_begins_without_a_learning_library(what: str) -> None:
    modules, others = LOADS_NONE[what]
    code = f"import sys\nimport {modules}\nprint(*sys.modules.keys() & {(*LEARNING, *others)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == []


LONG = 600


def long_without_reason(folder: Path) -> list[str]:
    """Modules of more lines than are read at a sitting, whose docstring does not say why."""
    found = []
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            text = path.read_text()
            words = " ".join((ast.get_docstring(ast.parse(text)) or "").split()) if text.count("\n") > LONG else ""
            if text.count("\n") > LONG and not re.search(r"More than \d+ lines\b[^.]{10,}\.", words):
                found.append(path.relative_to(folder).as_posix())
    return found


def test_a_module_of_more_than_600_lines_says_why_in_its_docstring(tmp_path: Path) -> None:
    assert long_without_reason(ROOT) == []
    (tmp_path / "labeler").mkdir()
    lines = "x = 1\n" * LONG
    (tmp_path / "labeler" / "no_reason.py").write_text(f'"""One idea.\n\nMore than 600 lines.\n"""\n{lines}')
    (tmp_path / "labeler" / "reason.py").write_text(
        f'"""One idea.\n\nMore than 600 lines: a list of all x.\n"""\n{lines}'
    )
    (tmp_path / "labeler" / "short.py").write_text("x = 1\n")
    assert long_without_reason(tmp_path) == ["labeler/no_reason.py"]


def test_every_row_of_the_threat_tables_names_a_test_that_exists() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("threat-model.md", "threats-from-outside.md"))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", row)}
    assert len(named) > 30
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)} == set()


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for package in PACKAGES[:-1]:
        for path in sorted((ROOT / package).rglob("*.py")):
            for found in ast.parse(path.read_text()).body:
                if isinstance(found, ast.ClassDef) and not found.name.startswith("_"):
                    places.setdefault(found.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_module_needs_itself_by_way_of_others() -> None:
    """Also not inside a function; only imports for type checking alone may."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    needs = {one: graph.find_modules_directly_imported_by(one) - {one} for one in graph.modules}
    TopologicalSorter(needs).prepare()  # raises CycleError, with the circle


READ_OUTSIDE = {"labels": 5, "searched": 3}
"""Facts of methods that other code still compares, and how often; a number may only fall."""


def test_no_flag_of_a_method_is_read_outside_its_package() -> None:
    """A method brings its behavior (`labeler.methods.sensitivity.Method`): callers ask it a question."""
    kinds = Method.__annotations__ | {
        name: one.fget.__annotations__["return"] for name, one in vars(Method).items() if isinstance(one, property)
    }
    flags = {name for name, kind in kinds.items() if kind == "bool" or "Literal" in kind}
    flags |= {"takes", "stated", "row_total"}
    found: Counter[str] = Counter()
    for path in (one for package in PACKAGES for one in sorted((ROOT / package).rglob("*"))):
        if path.suffix == ".j2":
            found.update(one for one in re.findall(r"\btraits\.(\w+)", path.read_text()) if one in flags)
        if path.suffix != ".py" or path.parent == ROOT / "labeler" / "methods":
            continue
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.Attribute) and one.attr in flags:
                whose = ast.unparse(one.value)
                if whose in ("traits", "method") or whose.endswith(".traits") or "METHODS" in whose:
                    found[one.attr] += 1
    assert found == READ_OUTSIDE
