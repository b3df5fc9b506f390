"""What strangers, people in a hurry and mistyped names give the command line: a sentence and an exit code, always."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import read_config
from feature_store.backbones import read_spec
from feature_store.results.models import read_model
from feature_store.shard import read_manifest
from labeler.auditing import read_audit
from labeler.errors import BadData, InvalidSetting, InvalidTask, LabelerError
from labeler.system.files import read_named
from labeler.system.keys import PartyKeys
from workers import cli
from workers.audit.adversaries import _stored
from workers.homes.new import make_agent_home, make_tallier_home, read_public
from workers.run.task_file import read_task_file

ROOT = Path(__file__).parents[2]
DEEP = b"[" * 100_000 + b"]" * 100_000
SERVICE = ("--url", "http://127.0.0.1:9", "--token", "tok_secret")


def run(*arguments: bytes | str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The program itself, since its arguments and its streams are what is looked at."""
    command = [sys.executable, "-P", "-m", "workers.cli", *arguments]
    paths = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, check=False, env=os.environ | paths | environment)


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command in this process."""
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "__all__")
    monkeypatch.setattr(sys, "argv", ["labeler", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    assert isinstance(code, int)
    return code


# Names of files


@pytest.mark.parametrize(("images", "said"), [("none", "no file or folder 'none'"), ("empty", "no image to send")])
def test_no_task_is_made_for_images_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, images: str, said: str
) -> None:
    """The service here would be told as not there (75)."""
    (tmp_path / "empty").mkdir()
    task = '[task]\nname = "t"\nsigma_votes = 8.0\ndelta = 1e-5\n[queries]\nstrategy = "clustered"\ncount = 4\n'
    (tmp_path / "task.toml").write_text(task)
    monkeypatch.chdir(tmp_path)
    assert ended(monkeypatch, "submit", images, "--task", "task.toml", *SERVICE) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_argument_that_is_not_utf8_is_refused_at_the_door() -> None:
    done = run("student", b"n\xff\xfe.job")
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("read", [read_task_file, read_config, read_spec])
def test_a_settings_file_that_never_ends_is_read_no_further_than_one_can_be_long(read: Any, tmp_path: Path) -> None:
    endless = tmp_path / "endless.toml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(LabelerError, match="more than 16,777,216 bytes; is it the right file"):
        read(endless)


def test_a_named_file_is_read_whole_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_named(file, most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_named(file, most_bytes=4)


@pytest.mark.parametrize(
    "address",
    [
        "https://anna:hunter2@127.0.0.1:9",
        "http://127.0.0.1:9/dashboard#token=hunter2",
        "http://127.0.0.1:9/?token=hunter2",
    ],
)
def test_an_address_with_a_secret_in_it_is_refused_and_never_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    """The dashboard's own address, as `labeler up` prints it, carries the token."""
    assert ended(monkeypatch, "status", "--url", address, "--token", "tok_secret") == 2
    said = capsys.readouterr()
    assert "an address alone" in " ".join(said.err.split())
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize("token", ["t\u00f6k_secret", "tok\nsecret", "", "tok secret", "t" * 1001])
def test_a_token_that_no_header_carries_is_refused_and_never_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str
) -> None:
    assert ended(monkeypatch, "status", "--url", "http://127.0.0.1:9", "--token", token) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "copy all of it again" in said
    assert "secret" not in said


def test_a_line_end_that_came_along_with_a_token_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "status", "--url", "http://127.0.0.1:9", "--token", "tok_secret\r\n") == 75
    assert "nothing answers" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["https://anna:hunter2@x.example", "notaurl", "http://x.example", "https://[::1"])
def test_no_home_is_made_for_a_coordinator_that_its_party_would_not_speak_to(tmp_path: Path, address: str) -> None:
    home = tmp_path / "home"
    with pytest.raises(InvalidSetting, match="coordinator's URL") as refused:
        make_agent_home(home, agent_id="a", coordinator_url=address, shard=tmp_path, engine="auto")
    assert "hunter2" not in str(refused.value)
    keys = PartyKeys.generate().public
    with pytest.raises(InvalidSetting, match="coordinator's URL"):
        make_tallier_home(home, tallier_id="t", number=0, coordinator_url=address, coordinator=keys)
    assert not home.exists()


# What stands in them


def _model(path: Path) -> Path:
    path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    return path


def _manifest(path: Path) -> Path:
    path.mkdir()
    (path / "manifest.json").write_bytes(DEEP)
    return path


def test_json_nested_without_end_is_no_file_of_ours_and_breaks_nothing(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_bytes(DEEP)
    with pytest.raises(BadData, match="not a file of public keys"):
        read_public(deep)
    with pytest.raises(InvalidTask, match="cannot be read as a task"):
        _stored(deep, "a task", None, None)
    with pytest.raises(BadData, match=r"no audit\.json"):
        read_audit(DEEP)
    with pytest.raises(BadData, match="no model of a job"):
        read_model(_model(tmp_path / "model"))
    with pytest.raises(BadData, match="is damaged"):
        read_manifest(_manifest(tmp_path / "shard"))


# Keyboards


def test_a_command_that_is_stopped_from_the_keyboard_says_so_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workers.plan.make_plan", stopped)
    assert ended(monkeypatch, "plan", "--sigma", "25") == 75
    assert "labeler: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("reached", ["contextlib", "labeler.errors", "workers.plan", "rich.console"])
def test_a_command_that_is_stopped_while_it_starts_or_ends_leaves_no_trace_of_python(reached: str) -> None:
    """The interrupt comes when a module is first looked for, so it hits the same line each time."""
    code = (
        "import os, signal, sys\n"
        "class Stopper:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {reached!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stopper())\n"
        "sys.argv = ['labeler', 'plan', '--sigma', '-25']\n"
        "from workers.cli import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1:]) == (75, b"", [b"labeler: interrupted"])
    assert len(done.stderr.splitlines()) == 1


# Terminals


def test_a_terminal_that_lacks_letters_is_told_the_rest() -> None:
    done = run("plan", "--help", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert done.returncode == 0, done.stderr
    assert b"--sigma" in done.stdout
    assert b"Traceback" not in done.stderr


def test_a_disk_that_is_full_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    command = [sys.executable, "-P", "-m", "workers.cli", "plan", "--sigma", "25", "--json"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
    assert done.returncode == 75
    assert done.stderr.decode().splitlines()[0].startswith("labeler: cannot write a file: No space left on device")
    assert b"Traceback" not in done.stderr


# Places


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export . --format csv --out none/labels.csv", "make it first"),
        ("export . --format hf --out a-file", "is a file"),
        ("export . --format hf --out a-file/data", "is a file"),
        ("bench speed --out a-file", "is a file"),
        ("bench simulate --resume none/schedules.json", "--resume names a file in none"),
        ("agent history --home . --format csv --out none/answered.csv", "make it first"),
    ],
)
def test_a_place_is_looked_at_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    assert ended(monkeypatch, *command.split()) == 2
    assert words in " ".join(capsys.readouterr().err.split())
