"""A command loads what it needs and nothing else; the command line lists and completes all of them without loading any.

Asserted is what is loaded, not how long it takes: `labeler bench start` measures that.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feature_store.backbones.backbone import PixelBackbone
from feature_store.embedding import embed_source
from labeler.system.process_pool import start_process
from workers.commands.catalog import CATALOG, COMPLETION, GROUPS, load_commands

ROOT = Path(__file__).parent.parent.parent

HEAVY = (
    "cryptography",
    "dp_accounting",
    "faiss",
    "fastapi",
    "matplotlib",
    "mpmath",
    "mpyc",
    "nacl",
    "pandas",
    "PIL",
    "pyarrow",
    "redis",
    "scipy.optimize",
    "scipy.stats",
    "sklearn",
    "sqlalchemy",
    "timm",
    "torch",
    "torchvision",
)


FORKS = """
import atexit, importlib, json, os, sys
modules, commands = json.loads(sys.argv[1])
for name in modules:
    importlib.import_module(name)
for words in commands:
    reads, writes = os.pipe()
    if not os.fork():
        os.dup2(writes, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
        sys.argv = ["labeler", *words]
        from workers.cli import main
        main()
        sys.exit()
    os.close(writes)
    with open(reads) as said:
        text = said.read()
    print(json.dumps([text, os.waitstatus_to_exitcode(os.wait()[1])]))
"""

Ended = tuple[set[str], str, int]


def room_of(module: str) -> str:
    return module if "." in module else f"workers.commands.{module}"


def ended(commands: Sequence[Sequence[str]], *modules: str) -> list[Ended]:
    """What each command has loaded, what it complained of, and its exit code.

    Each is a fork of one fresh interpreter, which has loaded some modules that all of them need.
    """
    given = [sys.executable, "-c", FORKS, json.dumps([modules, commands])]
    told = subprocess.run(given, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found: list[Ended] = []
    for text, code in map(json.loads, told.splitlines()):
        assert "Traceback" not in text, text
        *said, loaded = text.splitlines()
        found.append((set(json.loads(loaded)), " ".join(said), code))
    return found


LIGHT = {
    "--help": ("numpy", "pydantic", "httpx2", "scipy", "workers.commands.client", "workers.commands.console"),
    "status --help": ("httpx2", "numpy", "scipy"),
    "status job_1 --url nowhere --token x": ("scipy",),
    "plan --sigma 25": ("httpx2", "scipy"),
    "plan --epsilon 1 --method knn --k 50": ("httpx2", "scipy"),
}
"""Commands, and what they do without beside `HEAVY`."""


@pytest.fixture(scope="module")
def light() -> dict[str, set[str]]:
    """What each light command loads."""
    found = ended([line.split() for line in LIGHT], "workers.commands.catalog")
    return dict(zip(LIGHT, (loaded for loaded, _, _ in found), strict=True))


@pytest.mark.parametrize("line", LIGHT)
def test_a_light_command_loads_no_heavy_library(light: dict[str, set[str]], line: str) -> None:
    assert "typer" in light[line]
    assert light[line] & {*HEAVY, *LIGHT[line]} == set()


def test_a_command_loads_its_own_module_and_no_other(light: dict[str, set[str]]) -> None:
    rooms = {room_of(entry.module) for entry in CATALOG.values()}
    assert light["status --help"] & rooms == {"workers.commands.client"}
    assert light["--help"] & rooms == set()


LEARNING = {"faiss", "matplotlib", "sklearn", "timm", "torch", "torchvision"}
WRONG = {
    "embed nowhere --out a.shard": "check the path",
    "embed SCANS --out a.shard --classes headphone,mug": "did you mean 'headphones' by 'headphone'",
    "embed SCANS --out a.shard --public --classes headphone,mug --device gpu": "device must be auto, cpu",
    "embed SCANS --out a.shard --device cuda": "there is no driver of a GPU here",
    "embed SCANS --out SCANS/mug/1.png/a.shard": "is a file",
    "pretrain nowhere --out backbone": "check the path",
    "predict nothing.safetensors SCANS": "cannot be read",
    "demo --out SCANS/mug/1.png": "is a file",
    "run nothing.toml --shard a.shard --images SCANS --out job": "cannot read task file",
    "run TASK --shard a.shard --images SCANS --out job": "'a.shard' is no finished shard",
    "run TASK --shard SHARD --images nowhere --out job": "no shard, folder or file nowhere",
    "run TASK --shard SHARD --images SCANS --out TASK": "is a file",
    "run MISSPELT --shard SHARD --images SCANS --out job": "did you mean 'headphones' by 'headphone'",
}


@pytest.fixture(scope="module")
def wrong(inputs: dict[str, Path]) -> dict[str, Ended]:
    """How each wrong command ends."""
    lines = [
        [str(inputs.get(word, word)).replace("SCANS/", f"{inputs['SCANS']}/") for word in line.split()]
        for line in WRONG
    ]
    found = ended(lines, "workers.commands.catalog", "workers.run.preparation", "workers.embedder.shards")
    return dict(zip(WRONG, found, strict=True))


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_with_a_command_is_told_before_a_learning_library_is_loaded(
    wrong: dict[str, Ended], line: str
) -> None:
    """One of them costs seconds of a core."""
    if "driver" in WRONG[line] and Path("/dev/nvidiactl").exists():
        pytest.skip("here is a GPU")
    loaded, complaint, code = wrong[line]
    assert WRONG[line] in " ".join(complaint.split())
    assert code in (1, 2)
    assert loaded & LEARNING == set()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of two classes, a shard of them, a task, and one that misspells a class."""
    root = tmp_path_factory.mktemp("inputs")
    for name in ("headphones", "mug"):
        (root / "scans" / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number + len(name)).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "scans" / name / f"{number}.png")
    embed_source(root / "scans", PixelBackbone(size=4), root / "a.shard", classes=("headphones", "mug"))
    task = '[task]\nname = "t"\nepsilon = 0.5\ndelta = 1e-5\ncolluding_agents = 0\n'
    (root / "task.toml").write_text(task)
    (root / "misspelt.toml").write_text(task + 'classes = ["headphone", "mug"]\n')
    shard = {"SHARD": root / "a.shard", "TASK": root / "task.toml", "MISSPELT": root / "misspelt.toml"}
    return shard | {"SCANS": root / "scans"}


def fresh(*arguments: str, **environment: str) -> str:
    """Return what a fresh interpreter prints."""
    settings = os.environ | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=settings).stdout


@pytest.mark.process
def test_the_help_of_no_command_loads_a_heavy_library() -> None:
    """All rooms in one process: together they load no more than what one may."""
    code = "import json, sys; from workers.commands.catalog import load_commands; load_commands()"
    loaded = set(json.loads(fresh("-c", f"{code}; print(json.dumps(sorted(sys.modules)))")))
    assert {room_of(entry.module) for entry in CATALOG.values()} <= loaded
    assert loaded & {*HEAVY, "httpx2", "scipy"} == set()


@pytest.fixture
def nosy(tmp_path: Path) -> Path:
    """A folder with a package that extends pydantic; it says so in `asked` where it is loaded."""
    (tmp_path / "nosy.py").write_text(f"open({str(tmp_path / 'asked')!r}, 'w').close()\nplugin = None\n")
    told = tmp_path / "nosy-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: nosy\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[pydantic]\nnosy = nosy:plugin\n")
    return tmp_path


@pytest.mark.process
def test_what_a_command_validates_is_shown_to_no_other_package(nosy: Path) -> None:
    """Installed packages may extend pydantic, and are then told every value that is validated."""
    path = os.pathsep.join([str(nosy), str(ROOT)])
    told = fresh("-m", "workers.cli", "plan", "--sigma", "25", "--json", PYTHONPATH=path)
    assert json.loads(told)["sigma_votes"] == 25
    assert not (nosy / "asked").exists()


@pytest.mark.process
def test_nor_is_what_a_process_of_its_own_validates(nosy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nosy / "validates.py").write_text(
        "from pydantic import BaseModel\nclass One(BaseModel):\n    one: int\nprint(One(one=1).one)\n"
    )
    monkeypatch.syspath_prepend(str(nosy))
    said, _ = start_process("validates", answers=True).communicate(timeout=200)
    assert said == b"1\n"
    assert not (nosy / "asked").exists()


def test_the_catalogue_says_of_every_command_what_its_own_help_says_first() -> None:
    commands = load_commands()
    assert list(commands) == list(CATALOG)
    for name, command in commands.items():
        assert command.name == name
        first = inspect.cleandoc(command.short_help or command.help).split("\n\n")[0]
        assert " ".join(first.split()) == CATALOG[name].summary, name


@pytest.mark.process
def test_the_help_lists_every_command_once_under_a_heading_and_says_how_a_shell_completes() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(CATALOG)
    told = fresh("-m", "workers.cli", "--help")
    places = [told.index(f" {heading} ") for heading in GROUPS]
    assert places == sorted(places)
    assert (
        told.index(" Ask a service ") < told.index("│ submit ") < told.index(" Run a site ") < told.index("│ tallier ")
    )
    assert COMPLETION in told


def complete(words: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    asked = {"_LABELER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import sys; sys.argv = ['labeler']; from workers.cli import main; main()"
    return fresh("-c", code, **asked).split()


@pytest.mark.process
def test_a_shell_completes_commands_their_parts_and_their_options() -> None:
    assert complete("labeler st") == ["student", "status"]
    assert complete("labeler agent ap") == ["approve"]
    assert "--records-per-person" in complete("labeler plan --rec")
