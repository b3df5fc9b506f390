"""Documents for people who have to decide name what is there, and invent nobody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
