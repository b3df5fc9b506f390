"""What the README says is true: its commands exist, its prices are right, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_plan_in_the_readme_prints_what_it_says(labeler, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    commands = re.findall(r"^\$ labeler (plan .*)\n((?:[^$`].*\n|\n)*)", README, flags=re.M)
    assert len(commands) == 2
    for command, printed in commands:
        result = labeler(*shlex.split(command))
        assert result.code == 0
        assert set(printed.split()) <= set(result.out.split())


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "BENCHMARKS.md"])
def test_links_and_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`((?:labeler|feature_store|workers|api|tests|docs)/[\w./-]+)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name


def test_every_command_stands_in_the_readme() -> None:
    from workers.commands.catalogue import load_commands

    names = [name for name, command in load_commands().items() if not hasattr(command, "commands")]
    assert len(names) > 15
    assert {f"`labeler {name}`" for name in names} <= set(re.findall(r"`labeler \w+`", README))
