"""The report of `make gpu` names cards and versions, and neither folders nor people nor hosts."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from tests.gpu_report import machine, nameless


def test_a_report_names_no_folder_user_or_host() -> None:
    home, here, host = Path.home(), Path.cwd(), platform.node()
    text = f'<testsuite hostname="{host}">{here}/tests/a.py {sys.prefix}/lib/torch.py {home}/.cache</testsuite>'
    assert not any(str(name) in nameless(text) for name in (home, here, host) if len(str(name)) > 1)
    assert "/lib/torch.py" in nameless(text)
    assert nameless(f"x{host}y {host}") == f"x{host}y <host>"


def test_a_machine_is_its_versions_and_cards() -> None:
    said = machine()
    assert "torch " in said
    assert "faiss-" in said
    assert platform.node() not in said


def test_make_gpu_is_that_command() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    target = makefile.split("\ngpu:")[1].split("\n\n")[0]
    assert target.endswith("-m tests.gpu_report")
