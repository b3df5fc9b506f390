"""The map of ARCHITECTURE.md: its tables name all that the code has, and nothing else."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import get_args

from labeler.ledger.schema import metadata
from labeler.messages.envelope import SEALED_KINDS, Kind

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
THREAD = re.compile(
    r'Thread\([^()]*(?:\([^()]*\)[^()]*)*?\bname="([^"]+)"|thread_name_prefix="([^"]+)"|FairPool\("([^"]+)"'
)


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table below a heading."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n##")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def named(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@cache
def source() -> str:
    packages = ("labeler", "feature_store", "api", "workers")
    return "\n".join(path.read_text() for package in packages for path in sorted((ROOT / package).rglob("*.py")))


def test_every_kind_of_message_has_its_row_and_sealed_ones_say_so() -> None:
    table = rows("Kinds of messages")
    assert {row[0].strip("`") for row in table} == set(get_args(Kind))
    assert {row[0].strip("`") for row in table if "(sealed)" in row[3]} == set(SEALED_KINDS)
    assert len({(row[0], row[2]) for row in table}) == len(table)


def test_files_are_named_as_the_code_names_them() -> None:
    listed = {name for row in rows("Files of a home and of a job") for name in named(row[1:2])}
    strings = set(re.findall(r'"([\w./-]+)"', source()))
    assert {name for name in listed if name.strip("/") not in strings and name != ".job/"} == set()
    constants = ("workers/party/home.py", "feature_store/results/questions.py")
    written = {
        name
        for module in constants
        for name in re.findall(r'^[A-Z_]+(?:: Final)? = "([\w-]+\.[a-z]+)"', (ROOT / module).read_text(), re.MULTILINE)
    }
    assert len(written) > 12
    assert written - listed == set()


def test_every_table_of_a_journal_belongs_to_a_step() -> None:
    listed = [name for row in rows("Tables of a journal") for name in re.findall(r"`([^`]+)`", row[1])]
    assert sorted(listed) == sorted(metadata.tables)


def test_every_thread_and_process_is_listed() -> None:
    table = rows("Processes and threads")
    started = {next(filter(None, found)) for found in THREAD.findall(source())}
    assert {name for row in table for name in named(row[2:])} >= started
    assert len(started) > 10
    for row in table:
        for module in named(row[1:2]):
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module


def test_every_word_stands_in_the_code() -> None:
    for _, _, where in rows("Words"):
        for name in named([where]):
            assert (ROOT / name).is_file() if "/" in name else re.search(rf"\b{name}\b", source()), name


def test_every_path_in_this_page_and_in_the_documents_exists() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    texts = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}
    texts |= {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in ("labeler", "feature_store", "api", "workers", "checks", "benchmarks", "tests")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != Path(__file__)
    }
    paths = re.compile(
        r"(?<![\w./\"-])((?:labeler|feature_store|api|workers|checks|benchmarks|docs|tests)/[\w./-]+\.(?:py|md|toml))\b"
    )
    stale = {
        (page, path)
        for page, text in texts.items()
        for path in paths.findall(text)
        if not any((folder / path).is_file() for folder in (ROOT, (ROOT / page).parent)) and "NAME" not in path
    }
    assert stale == set()
