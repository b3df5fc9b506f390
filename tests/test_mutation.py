"""The settings of `make mutation` are about code and tests that exist."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from tests.mutation import EXPLAINED, ROOT


def functions(module: str) -> set[str]:
    """The names that mutmut gives to the functions and methods of a module."""
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    found = {f"x_{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    for part in tree.body:
        if isinstance(part, ast.ClassDef):
            found |= {f"xǁ{part.name}ǁ{node.name}" for node in part.body if isinstance(node, ast.FunctionDef)}
    return found


def test_every_module_that_is_changed_and_every_test_of_it_exists() -> None:
    tests = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutation"]["tests"]
    assert len(tests) > 10
    for module, files in tests.items():
        assert functions(module), module
        assert files
        assert all((ROOT / Path(file)).is_file() for file in files), module


def test_every_explanation_is_about_a_function_that_exists_and_says_why() -> None:
    entries = tomllib.loads(EXPLAINED.read_text())["explained"]
    assert entries
    for entry in entries:
        module, _, function = entry["where"].rpartition(".x")
        assert f"x{function}" in functions(module), entry["where"]
        assert len(entry["why"]) > 10
        assert all("- " in change or "+ " in change for change in entry["changes"])
