"""Commands speak in the words of who typed them: their options, at most 80 columns, a version, completions."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api import examples
from api.schema import JobView
from labeler.errors import InvalidSetting
from tests.command_line import Labeler
from workers import cli
from workers.commands.catalog import in_option_words, load_commands

# Options


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --sigma 25 --k 0", "--k: Input should be greater"),
        ("plan --sigma -1", "--sigma: Input should be greater"),
        ("plan --sigma nan", "--sigma: Input should be a finite number"),
        ("plan --sigma 3 --method guess", "--method must be one of knn, reverse-knn, ensemble"),
        ("plan", "give a price as --epsilon, or the noise as --sigma"),
        ("plan --sigma 25 --delta 2", "--delta: Input should be less"),
        ("plan --sigma 25 --colluding-agents 5", "lower --colluding-agents or --max-dropouts"),
        ("plan --sigma 25 --max-dropouts 2", "lower --max-dropouts, or say --colluding-agents = 0"),
        ("plan --sigma 25 --method knn --max-agent-records 5", "--max-agent-records only means something"),
        ("plan --sigma 25 --method reverse-knn --records-per-person 2 --max-dropouts -1", "--max-dropouts: Input"),
        ("plan --sigma 25 --method blind-average --min-records 5 --regularisation -1", "--regularisation: Input"),
        ("plan --sigma 25 --method blind-average --min-records 5 --axes 10 --queries 11", "leave --min-records out"),
        ("plan --sigma 25 --method blind-average --axes 10 --max-records 2000000 --queries 11", "--max-records: Input"),
        ("plan --sigma 1e-9", "--sigma must be at least"),
        ("plan --sigma 25 --release votes", "--release must be one of"),
        ("plan --sigma 3 --solve k", "--epsilon (the price wanted) and --solve (what to find for it) go together"),
        (
            "plan --epsilon 1 --sigma 3",
            "give the price (--epsilon) or the noise (--sigma), or both and",
        ),
        ("plan --sigma 3 --method reverse-knn --life-epsilon -1", "'--life-epsilon': Input should be greater"),
        ("plan --sigma 3 --epsilon 1 --solve sigma", "--solve sigma finds the noise for --epsilon, so do not give"),
        ("plan --sigma 3 --method reverse-knn --ballot-radius auto", "name their shard (--queries-shard)"),
        ("plan --sigma 3 --classes 33000", "--classes: must be a whole number from 2 to 32,000"),
        ("plan --epsilon 1 --solve sigma --method reverse-knn --life-epsilon 1", "give --sigma, which decides"),
        ("submit . --task t --strategy random --url https://localhost:9 --token t", "needs --count"),
        ("submit . --task t --strategy most --url https://localhost:9 --token t", "--strategy: Input should be"),
        ("status nothing", "'nothing' is not a job's folder here; for a job of a service, name the service: --url and"),
        ("student nothing", "'nothing' is not a job's folder here; for a job of a service, name"),
        ("export nothing --out a", "'nothing' is not a job's folder here; for a job of a service, name"),
        ("run none.toml --shard a --queries b --out c --winner x", "task file none.toml"),
    ],
)
def test_a_refused_setting_is_named_as_it_was_typed(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["labeler", *line.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_words_of_a_file_and_of_english_stay() -> None:
    options = {"k": "--k", "queries": "--queries", "max_dropouts": "--max-dropouts", "name": "--name"}
    for sentence in (
        "task file t.toml refused: line 3, column 1: queries.count: Input should be greater than 0",
        "the name of k queries is a name",
        "see labeler.max_dropouts.md and my-max_dropouts",
    ):
        assert in_option_words(sentence, options) == sentence
    assert in_option_words("task refused: k: no; name: too long", options) == "--k: no; --name: too long"


# Width


def test_every_help_fits_eighty_columns(labeler: Labeler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")

    def commands(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, [*words, name])

    found = [words for name, command in load_commands().items() for words in commands(command, [name])]
    assert len(found) > 35
    for words in found:
        shown = labeler(*words, "--help")
        assert shown.code == 0
        assert max(map(len, shown.out.splitlines())) <= 80, words


# Unreadable images


def test_unreadable_images_are_listed_and_the_others_go(tmp_path: Path) -> None:
    from PIL import Image

    from workers.commands.client import unreadable_images

    (tmp_path / "in").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "in" / "good.png")
    (tmp_path / "in" / "bad.png").write_bytes((tmp_path / "in" / "good.png").read_bytes()[:40])
    (tmp_path / "empty.jpg").touch()
    found = unreadable_images(tmp_path)
    assert set(found) == {"in/bad.png", "empty.jpg"}
    shutil.rmtree(tmp_path / "in")
    with pytest.raises(InvalidSetting, match="none of the 1 images"):
        unreadable_images(tmp_path)
    with pytest.raises(InvalidSetting, match="--skip-unreadable needs a folder"):
        unreadable_images(tmp_path / "empty.jpg")


def test_a_dead_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tries and no third: the pauses are counted, not the time."""
    from api import client_http

    slept: list[float] = []
    monkeypatch.setattr(client_http.time, "sleep", slept.append)
    monkeypatch.setattr(client_http.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(sys, "argv", ["labeler", "status", "--url", "http://127.0.0.1:9", "--token", "t", "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 75
    assert "nothing answers at http://127.0.0.1:9" in " ".join(capsys.readouterr().err.split())
    assert 1 <= len(slept) <= 4
    assert sum(slept) <= 1.0


def test_a_job_that_waits_for_approval_says_for_whose(capsys: pytest.CaptureFixture[str]) -> None:
    from workers.commands.client import _tell_job

    waiting = examples.JOB | {"state": "queued", "waiting_for": [{"agent_id": "north", "reason": "approval"}]}
    _tell_job(JobView.model_validate(waiting), out=None, as_json=False)
    assert "Waits for  north: a person there has to approve the task" in capsys.readouterr().out
    _tell_job(JobView.model_validate(waiting), out=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["waiting_for"] == [{"agent_id": "north", "reason": "approval"}]
