"""What is deprecated is told, stays for two releases, is documented, and goes in time."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from labeler.deprecation import DEPRECATIONS

ROOT = Path(__file__).parents[2]
UPGRADES = (ROOT / "docs" / "upgrades.md").read_text()


@pytest.mark.parametrize("name", DEPRECATIONS)
def test_what_is_deprecated_stays_for_two_releases_and_goes_in_time(name: str) -> None:
    one = DEPRECATIONS[name]
    assert one.gone_in >= (one.since[0], one.since[1] + 2) or one.gone_in[0] > one.since[0]
    major, minor = map(int, version("private-labeler").split(".")[:2])
    assert (major, minor) < one.gone_in, f"{one.what} was to go: remove it, its row here and its line in the docs"
    assert str(one) in UPGRADES


def test_the_command_line_tells_it_and_goes_on() -> None:
    arguments = ["labeler", "plan", "--method", "one-hot", "--sigma", "25"]
    code = f"import sys; sys.argv = {arguments!r}; from workers.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stderr == f"Warning: {DEPRECATIONS['one-hot']}.\n", "no class of Python's, no path of a machine"
    assert "epsilon, exact" in ended.stdout
