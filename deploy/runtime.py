"""Print the part of constraints.txt that an installation without extras has on this machine: pins with their hashes.

What a bill of materials is made of and what an audit looks at (`make sbom`, `make audit`): the packages that run beside
private data, and none that only tests need.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(pyproject: Path) -> set[str]:
    """Canonical names of all packages that the project needs here: what it declares, and what that needs in turn."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [(line, frozenset[str]()) for line in tomllib.loads(pyproject.read_text())["project"]["dependencies"]]
    while todo:
        line, asked = todo.pop()
        one = Requirement(line)
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *asked)):
            continue
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key not in found:
            found.add(key)
            todo += [(inner, key[1]) for inner in distribution(one.name).requires or []]
    return {name for name, _ in found}


def pins(text: str) -> dict[str, str]:
    """Name to its pin with all hashes, of a file of constraints."""
    blocks = re.findall(r"^(\S+==[^\\\n]*(?:\\\n[^\\\n]*)*)$", text, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for block in blocks:
        requirement = Requirement(block.split("\\", 1)[0])
        if requirement.marker is None or requirement.marker.evaluate():
            found[canonicalize_name(requirement.name)] = block
    return found


if __name__ == "__main__":
    known = pins(Path("constraints.txt").read_text(encoding="utf-8"))
    wanted = needed(Path("pyproject.toml"))
    if missing := sorted(wanted - known.keys()):
        sys.exit(f"constraints.txt has no pin of {', '.join(missing)}; make it again: make constraints")
    sys.stdout.write("".join(f"{known[name]}\n" for name in sorted(wanted)))
