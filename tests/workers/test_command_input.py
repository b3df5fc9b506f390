"""The command line answers strangers, people in a hurry and mistyped names with a sentence and an exit code, always.

It speaks in the words of who typed them: their options, at most 80 columns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image

from api import client_http, examples
from api.coordinator.config import read_config
from api.schema import JobView
from checks.audit.adversaries import _stored
from feature_store.backbones import read_spec
from feature_store.results.models import read_model
from feature_store.shard import read_manifest
from labeler.auditing import read_audit
from labeler.errors import BadData, InvalidSetting, InvalidTask, LabelerError
from labeler.system.files import read_named
from labeler.system.keys import PartyKeys
from tests.command_line import Labeler
from workers.commands.catalog import in_option_words, load_commands
from workers.commands.client import _tell_job, unreadable_images
from workers.embedder.image_count import count_images
from workers.homes.new import make_agent_home, make_tallier_home, read_public
from workers.run.task_file import read_task_file

ROOT = Path(__file__).parents[2]
DEEP = b"[" * 100_000 + b"]" * 100_000
SERVICE = ("--url", "http://127.0.0.1:9", "--token", "tok_secret")


def run(*arguments: bytes | str, out: int | IO[bytes] = subprocess.PIPE, **environment: str) -> Any:
    """The program itself, since its arguments and its streams are what is looked at."""
    command = [sys.executable, "-P", "-m", "workers.cli", *arguments]
    settings = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False, env=settings)


# Names of files


@pytest.mark.parametrize(("images", "said"), [("none", "no file or folder 'none'"), ("empty", "no image to send")])
def test_no_task_is_made_for_images_that_are_not_there(
    labeler: Labeler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: str, said: str
) -> None:
    """The service here would be told as not there (75)."""
    (tmp_path / "empty").mkdir()
    task = '[task]\nname = "t"\nsigma_votes = 8.0\ndelta = 1e-5\n[queries]\nstrategy = "clustered"\ncount = 4\n'
    (tmp_path / "task.toml").write_text(task)
    monkeypatch.chdir(tmp_path)
    refused = labeler("submit", images, "--task", "task.toml", *SERVICE)
    assert refused.code == 2
    assert said in refused.err


@pytest.mark.process
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


def test_a_damaged_zip_of_images_is_counted_or_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.png", b"x")
    whole = path.read_bytes()
    start = whole.index(b"PK\x01\x02")
    for place in range(start, len(whole)):
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with suppress(LabelerError):
            count_images(path)


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
def test_an_address_with_a_secret_in_it_is_refused_and_never_repeated(labeler: Labeler, address: str) -> None:
    """The dashboard's own address, as `labeler up` prints it, carries the token."""
    refused = labeler("status", "--url", address, "--token", "tok_secret")
    assert refused.code == 2
    assert "an address alone" in refused.err
    assert "hunter2" not in refused.out + refused.err


@pytest.mark.parametrize("token", ["t\u00f6k_secret", "tok\nsecret", "", "tok secret", "t" * 1001])
def test_a_token_that_no_header_carries_is_refused_and_never_repeated(labeler: Labeler, token: str) -> None:
    refused = labeler("status", "--url", "http://127.0.0.1:9", "--token", token)
    assert refused.code == 2
    assert "copy all of it again" in refused.err
    assert "secret" not in refused.err


@pytest.mark.process
def test_a_dead_address_is_told_at_once_and_a_line_end_that_came_along_with_a_token_is_no_part_of_it(
    labeler: Labeler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries and no third: the pauses are counted, not the time."""
    slept: list[float] = []
    monkeypatch.setattr(client_http.time, "sleep", slept.append)
    monkeypatch.setattr(client_http.time, "monotonic", lambda: sum(slept))
    told = labeler("status", "--url", "http://127.0.0.1:9", "--token", "tok_secret\r\n")
    assert told.code == 75
    assert "nothing answers at http://127.0.0.1:9" in told.err
    assert 1 <= len(slept) <= 4
    assert sum(slept) <= 1.0


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


@pytest.mark.process
def test_a_command_that_is_stopped_from_the_keyboard_says_so_and_may_be_tried_again(
    labeler: Labeler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workers.plan.make_plan", stopped)
    told = labeler("plan", "--sigma", "25")
    assert told.code == 75
    assert "labeler: interrupted" in told.err


@pytest.mark.parametrize("reached", ["contextlib", "labeler.errors", "workers.plan", "rich.console"])
@pytest.mark.process
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


@pytest.mark.process
def test_a_terminal_that_lacks_letters_is_told_the_rest() -> None:
    done = run("plan", "--help", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert done.returncode == 0, done.stderr
    assert b"--sigma" in done.stdout
    assert b"Traceback" not in done.stderr


@pytest.mark.process
def test_a_disk_that_is_full_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("wb") as full:
        done = run("plan", "--sigma", "25", "--json", out=full)
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
        ("up --home a-file", "--home names a folder to write"),
        ("bench simulate --resume none/schedules.json", "--resume names a file in none"),
        ("agent history --home . --format csv --out none/answered.csv", "make it first"),
    ],
)
def test_a_place_is_looked_at_before_the_work(
    labeler: Labeler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    refused = labeler(*command.split())
    assert refused.code == 2
    assert words in refused.err


# Words and width


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --sigma 25 --k 0", "--k: must be"),
        ("plan --sigma -1", "--sigma: must be"),
        ("plan --sigma nan", "--sigma: must be a finite number"),
        ("plan --sigma 3 --method guess", "--method: must be one of knn, reverse-knn, ensemble"),
        ("plan", "give a price as --epsilon, or the noise as --sigma"),
        ("plan --epsilon 1 --solve queries", "--solve queries finds what --epsilon pays for: give the noise (--sigma)"),
        ("plan --sigma 25 --delta 2", "--delta: must be"),
        ("plan --sigma 25 --colluding-agents 5", "lower --colluding-agents or --max-dropouts"),
        ("plan --sigma 25 --max-dropouts 2", "lower --max-dropouts to 1, or say --colluding-agents = 0"),
        ("plan --sigma 25 --method knn --max-agent-records 5", "--max-agent-records only means something"),
        ("plan --sigma 25 --method reverse-knn --records-per-person 2 --max-dropouts -1", "--max-dropouts: must be"),
        ("plan --sigma 25 --method blind-average --min-records 5 --regularisation -1", "--regularisation: must be"),
        ("plan --sigma 25 --method blind-average --min-records 5 --axes 10 --queries 11", "leave --min-records out"),
        (
            "plan --sigma 25 --method blind-average --axes 10 --max-records 2000000 --queries 11",
            "'--max-records': must be",
        ),
        ("plan --sigma 3 --method blind-average --learner logistic", "--min-records: is missing"),
        ("plan --sigma 3 --method aux-distill --score-share 0", "--score-share says how agents train"),
        (
            "plan --sigma 3 --method blind-average --min-records 5 --learner logit",
            "--learner: must be 'softmax', 'svm'",
        ),
        (
            "plan --sigma 3 --method aux-distill --min-records 5 --score-share 1",
            "--score-share: must be less than 1: labels come from the head",
        ),
        ("plan --sigma 3 --group-size 0", "--group-size: must be at least 1"),
        (
            "plan --sigma 3 --method federated --queries 4 --steps 4 --rate 0.5 --group-size 2",
            "--group-size goes with no",
        ),
        ("plan --sigma 1e-9", "--sigma must be at least"),
        ("plan --sigma 25 --release votes", "--release: must be 'histogram' or"),
        ("plan --sigma 3 --solve k", "--epsilon (the price wanted) and --solve (what to find for it) go together"),
        (
            "plan --epsilon 1 --sigma 3",
            "give the price (--epsilon) or the noise (--sigma), or both and",
        ),
        ("plan --sigma 3 --method reverse-knn --life-epsilon -1", "--life-epsilon: must be at least 0"),
        ("plan --sigma 3 --epsilon 1 --solve sigma", "--solve sigma finds the noise for --epsilon, so do not give"),
        ("plan --sigma 3 --method reverse-knn --ballot-radius auto", "name their shard (--public)"),
        ("plan --sigma 3 --method federated --queries 0 --steps 4 --rate 0.5", "--queries: must be at least 1"),
        ("plan --sigma 3 --classes 33000", "--classes: must be at most 32000"),
        ("plan --epsilon 1 --solve sigma --method reverse-knn --life-epsilon 1", "give --sigma, which decides"),
        ("submit . --task t --strategy random --url https://localhost:9 --token t", "needs --count"),
        ("submit . --task t --strategy most --url https://localhost:9 --token t", "--strategy: must be"),
        ("status nothing", "'nothing' is not a job's folder here; for a job of a service, name the service: --url and"),
        ("student nothing", "'nothing' is not a job's folder here; for a job of a service, name"),
        ("export nothing --out a", "'nothing' is not a job's folder here; for a job of a service, name"),
        ("run none.toml --shard a --queries b --out c --winner x", "task file none.toml"),
    ],
)
@pytest.mark.process
def test_a_refused_setting_is_named_as_it_was_typed(
    labeler: Labeler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = labeler(*line.split())
    assert refused.code == 2
    assert said in refused.err


def test_words_of_a_file_and_of_english_stay() -> None:
    options = {"k": "--k", "queries": "--queries", "max_dropouts": "--max-dropouts", "name": "--name"}
    for sentence in (
        "task file t.toml refused: line 3, column 1: queries.count: must be more than 0",
        "the name of k queries is a name",
        "see labeler.max_dropouts.md and my-max_dropouts",
    ):
        assert in_option_words(sentence, options) == sentence
    assert in_option_words("task refused: k: no; name: too long", options) == "--k: no; --name: too long"


def test_every_help_fits_eighty_columns_and_has_an_example(labeler: Labeler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")

    def commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
        yield words, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, [*words, name])

    found = [both for name, command in load_commands().items() for both in commands(command, [name])]
    assert len(found) > 35
    for words, command in found:
        shown = labeler(*words, "--help")
        assert shown.code == 0
        assert max(map(len, shown.out.splitlines())) <= 80, words
        if not getattr(command, "commands", {}) or command.invoke_without_command:
            assert re.search(rf"`labeler {' '.join(words)}\b", command.help or ""), words


def test_unreadable_images_are_listed_and_the_others_go(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "in" / "good.png")
    (tmp_path / "in" / "bad.png").write_bytes((tmp_path / "in" / "good.png").read_bytes()[:40])
    (tmp_path / "empty.jpg").touch()
    found = unreadable_images(tmp_path)
    assert set(found) == {"in/bad.png", "empty.jpg"}
    shutil.rmtree(tmp_path / "in")
    with pytest.raises(InvalidSetting, match=r"no image in .* can be read \(1 in all\)"):
        unreadable_images(tmp_path)
    with pytest.raises(InvalidSetting, match="--skip-unreadable needs a folder"):
        unreadable_images(tmp_path / "empty.jpg")


def test_a_job_that_waits_for_approval_says_for_whose(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = examples.JOB | {"state": "queued", "waiting_for": [{"agent_id": "north", "reason": "approval"}]}
    _tell_job(JobView.model_validate(waiting), out=None, as_json=False)
    assert "Waits for  north: a person there has to approve the task" in capsys.readouterr().out
    _tell_job(JobView.model_validate(waiting), out=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["waiting_for"] == [{"agent_id": "north", "reason": "approval"}]
