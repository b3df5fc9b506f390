"""Refuse an environment that has not the oldest version of each dependency, or in which a module cannot be imported.

`make test-lowest` starts it in an environment of its own, before the tests that run there.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("dicom", "hdf5", "heic", "postgres", "ray", "telemetry", "edge")
PACKAGES = ("labeler", "feature_store", "api", "workers", "checks")


def others_than_the_lowest(pyproject: Path) -> list[str]:
    """Return a line for each dependency that is installed in another version than the oldest that is allowed."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    wrong = []
    for one in map(Requirement, lines):
        if one.marker is None or one.marker.evaluate():
            (lowest,) = (part.version for part in one.specifier if part.operator in (">=", "=="))
            if (found := version(one.name)) != lowest:
                wrong.append(f"{one}: {found} is the oldest that can be installed with the others")
    return wrong


def unimportable() -> list[str]:
    """Return a line for each module that cannot be imported; a revision of the journal runs under Alembic alone."""
    wrong = []
    for package in PACKAGES:
        for module in pkgutil.walk_packages([package], f"{package}.", onerror=lambda _: None):
            if not module.name.endswith(".__main__") and ".migrations." not in module.name:
                try:
                    importlib.import_module(module.name)
                except Exception as error:
                    wrong.append(f"{module.name}: {type(error).__name__}: {error}")
    return wrong


if __name__ == "__main__":
    if found := others_than_the_lowest(Path("pyproject.toml")) + unimportable():
        sys.exit("\n".join(found))
