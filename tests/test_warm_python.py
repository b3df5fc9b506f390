"""A program in a fork of a warm process is like any other: input, output, exit code, signals, and nobody's files."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from tests.warm_python import WarmProgram

WAIT = "import sys\nprint('here', flush=True)\nsys.stdin.readline()"


def test_a_program_hears_answers_and_ends_with_its_code() -> None:
    text = "import sys\nprint(sys.argv[1], sys.stdin.readline().strip(), flush=True)\nsys.exit(3)"
    with closing(WarmProgram(text, "first")) as program:
        program.stdin.write("second\n")
        program.stdin.flush()
        assert program.stdout.read() == "first second\n"
        assert program.wait() == 3
    for text, code in {"pass": 0, "import sys; sys.stderr.close(); 1 / 0": 1, "import os; os.abort()": -6}.items():
        with closing(WarmProgram(text)) as program:
            assert program.wait() == code


def test_one_that_is_killed_ends_and_another_runs_on_beside_it() -> None:
    first, second = WarmProgram(WAIT), WarmProgram(WAIT)
    with closing(second), closing(first):
        assert first.stdout.readline() == second.stdout.readline() == "here\n"
        first.kill()
        assert first.wait() == -9
        assert first.stdout.read() == "", "nobody else holds its output open"


def test_it_holds_no_file_of_who_asked_for_it(tmp_path: Path) -> None:
    text = (
        "import os\nfor one in range(3, 256):\n"
        "    if os.path.exists(f'/proc/self/fd/{one}'): print(os.readlink(f'/proc/self/fd/{one}'))"
    )
    with (tmp_path / "held").open("w") as held, closing(WarmProgram(WAIT)), closing(WarmProgram(text)) as program:
        os.set_inheritable(held.fileno(), True)
        found = program.stdout.read()
        assert program.wait() == 0
    assert found == "", "neither that, nor the way to the warm process, nor the other programs' ends"
