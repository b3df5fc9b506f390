"""Print the dependencies of pyproject.toml, one a line; with --slim without the learning libraries.

Coordinator and talliers never load those (tests/test_architecture.py looks), and they are most of an image's size.
scikit-learn stays: a process that the coordinator starts chooses clusters with it, where a requester asks for clusters.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

LEARNING = frozenset({"faiss-cpu", "faiss-gpu", "matplotlib", "onnx", "onnxruntime", "timm", "torch", "torchvision"})


def requirements(pyproject: Path, *, is_slim: bool) -> list[str]:
    """The dependencies, with PostgreSQL's driver for a coordinator's journal, and the program of its edge."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted: list[str] = project["dependencies"] + extras["postgres"] + extras["edge"]
    return [one for one in wanted if not (is_slim and re.split(r"[\s\[=<>;~!]", one)[0].lower() in LEARNING)]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), is_slim="--slim" in sys.argv[1:])) + "\n")
