"""Documents for people who have to decide name what is there, and invent nobody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import BENCHES
from benchmarks.papers import PAPERS
from workers.agent.policy import AllowTable, BudgetTable, CoordinatorTable
from workers.commands.catalog import load_commands

ROOT = Path(__file__).parents[1]
ALL_PAGES = [*(one for one in ROOT.glob("*.md") if one.name != "CHANGELOG.md"), *(ROOT / "docs").rglob("*.md")]
"""Every page that people read, but for the list of what changed."""
CODE_PAGES = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/round.md",
    "docs/threat-model.md",
    "docs/threats-from-outside.md",
)
PAGES = ("SECURITY.md", "docs/upgrades.md", "docs/dpia-template.md")


@pytest.mark.parametrize("name", [*PAGES, *CODE_PAGES])
def test_what_a_page_names_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:labeler|feature_store|workers|api|tests|docs)/[a-z][\w./-]*)`", text):
        assert "NAME" in path or (ROOT / path).exists(), path
    for module in re.findall(r"`((?:labeler|feature_store|workers|api)(?:\.\w+)+)`", text):
        *folders, last = module.split(".")
        inside = ROOT.joinpath(*folders)
        source = inside.with_suffix(".py") if inside.with_suffix(".py").exists() else inside / "__init__.py"
        is_there = inside.joinpath(last).exists() or inside.joinpath(f"{last}.py").exists()
        assert is_there or re.search(rf"\b{last}\b", source.read_text()), module
    for command in re.findall(r"`labeler ([a-z]+)", text):
        from workers.commands.catalog import CATALOG

        assert command in CATALOG, command
    for target in re.findall(r"^`?make (\w+)|`make (\w+)", text):
        name_of = target[0] or target[1]
        assert re.search(rf"^{name_of}:", (ROOT / "Makefile").read_text(), re.M), name_of


@pytest.mark.parametrize("name", PAGES)
def test_no_page_invents_an_address_or_a_person(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"[\w.]+@[\w.]+\.\w+", text)
    assert not re.search(r"https?://(?!labels\.example\.org)", text)


def test_the_template_is_filled_where_the_program_decides_and_blank_where_the_site_does() -> None:
    text = (ROOT / "docs" / "dpia-template.md").read_text()
    assert text.count("**[blank") > 30
    for field in re.findall(r"`(max_\w+|person_epsilon|records_per_person|colluding_agents)`", text):
        known = (ROOT / "docs" / "policy.md").read_text() + (ROOT / "docs" / "task-file.md").read_text()
        assert f"`{field}`" in known, field


def test_every_policy_field_that_a_page_names_is_one_that_the_policy_has() -> None:
    """Named after the word "policy" in parentheses, as `allow.FIELD`, or in the tables of docs/policy.md."""
    tables = {"budget": BudgetTable.model_fields, "allow": AllowTable.model_fields}
    fields = {name for one in tables.values() for name in one} | set(CoordinatorTable.model_fields)
    named = 0
    for page in ALL_PAGES:
        text = page.read_text()
        for listed in re.findall(r"polic(?:y|ies)\b[^.|`()]*\((`\w+`(?:(?:,| and) `\w+`)*)\)", text):
            for name in re.findall(r"`(\w+)`", listed):
                assert name in fields, f"{page.name}: the policy has no field {name!r}"
                named += 1
        for table, name in re.findall(r"`(budget|allow)\.(\w+)`", text):
            assert name in tables[table], f"{page.name}: [{table}] has no field {name!r}"
    assert named >= 3, "the pattern finds what it is for"
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "policy.md").read_text(), re.M)
    assert set(rows) == fields


FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
TYPED = re.compile(
    r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*"
    r"(?:docker compose run --rm (?:--no-deps )?\w\S+|docker compose exec \S+ labeler|labeler)(?: (.*))?$",
    re.M,
)


def commands_on(page: Path) -> Iterator[list[str]]:
    """Yield the words behind `labeler` of each command that a page shows, in a block of code or in a sentence."""
    text = page.read_text()
    shown = [block for language, block in FENCED.findall(text) if language in ("", "sh", "bash", "console")]
    prose = FENCED.sub("", text)
    lines = [line for one in (*shown, prose) for line in TYPED.findall(one.replace("\\\n", " "))]
    for line in (*lines, *re.findall(r"`labeler(?:\s+([^`]*))?`", prose)):
        words = re.split(r"\s(?:#|\||>|&&)\s|;", line)[0].split()
        if words and re.fullmatch(r"[a-z]+", words[0]):
            yield words


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_on_a_page_exists_with_its_options(page: Path) -> None:
    known = load_commands()
    for words in commands_on(page):
        assert words[0] in known, words
        command: Any = known[words.pop(0)]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0].rstrip(".,") for word in words if word.startswith("--")}
        assert used - {"--help"} <= options, (command.name, words)


BENCH_IN_A_SENTENCE = re.compile(r"\b[Bb]ench(?:es)? ((?:`[a-z-]+`(?:, | and )?)+)")


def test_every_bench_that_is_named_is_one_that_the_command_lists() -> None:
    named: dict[str, set[str]] = {}
    for page in ALL_PAGES:
        for words in commands_on(page):
            if words[0] == "bench" and words[1:] and re.fullmatch(r"[a-z-]+", words[1]) and words[1][0] != "-":
                named.setdefault(words[1], set()).add(page.name)
                if words[1] == "papers" and words[2:] and re.fullmatch(r"[a-z][a-z-]+", words[2]):
                    assert words[2] in PAPERS, (page.name, words)
    sources = [path for package in ("labeler", "feature_store", "api", "workers", "checks", "benchmarks", "docs")
               for path in (ROOT / package).rglob("*.py")]  # fmt: skip
    for path in (*ALL_PAGES, *sources):
        text = " ".join(path.read_text().split())
        for sentence in BENCH_IN_A_SENTENCE.findall(text):
            for name in re.findall(r"[a-z-]+", sentence.replace(" and ", " ")):
                named.setdefault(name, set()).add(path.name)
        if path.suffix == ".py":
            for name in re.findall(r"`labeler bench ([a-z][a-z-]*)", text):
                named.setdefault(name, set()).add(path.name)
    assert len(named) > 12
    assert {name: pages for name, pages in named.items() if name not in BENCHES} == {}
