"""What is deprecated is told once, stays for two releases, is documented, and goes in time."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

from labeler import deprecation
from labeler.deprecation import DEPRECATIONS, warn_once

ROOT = Path(__file__).parents[2]
UPGRADES = (ROOT / "docs" / "upgrades.md").read_text()


@pytest.mark.parametrize("name", DEPRECATIONS)
def test_what_is_deprecated_stays_for_two_releases_and_goes_in_time(name: str) -> None:
    one = DEPRECATIONS[name]
    assert one.gone_in >= (one.since[0], one.since[1] + 2) or one.gone_in[0] > one.since[0]
    major, minor = map(int, version("private-labeler").split(".")[:2])
    assert (major, minor) < one.gone_in, f"{one.what} was to go: remove it, its row here and its line in the docs"
    assert str(one) in UPGRADES


def test_who_uses_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_said", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_once("one-hot")
    assert [str(one.message) for one in said] == [str(DEPRECATIONS["one-hot"])]
    assert said[0].category is FutureWarning
    with pytest.raises(KeyError):
        warn_once("nothing")


def test_the_command_line_tells_it_and_goes_on() -> None:
    arguments = ["labeler", "plan", "--method", "one-hot", "--sigma", "25"]
    code = f"import sys; sys.argv = {arguments!r}; from workers.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "one-hot is deprecated since 0.1 and goes in 0.3; use ensemble" in " ".join(ended.stderr.split())
    assert "epsilon, exact" in ended.stdout
