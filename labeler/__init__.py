"""Private labeling: tasks, prices, methods and rounds without I/O; then `system`, `ledger` and `driver`, with I/O.

`import labeler` in a notebook or a script also offers the few calls that people need (workers.notebook):

    import labeler

    site = labeler.embed("hospital-a", classes=["healthy", "ill"])
    photos = labeler.embed("scans", public=True)
    job = labeler.run([site], photos, "job", epsilon=0.5, delta=1e-5)
    job.labels()

`labeler.client` is the client of a service's REST interface, api.client. All of these are imported from higher packages
on first use, the one exception to the rule that imports point down.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labeler import client
    from workers.notebook import (
        EmbeddedImages,
        LabeledJob,
        Plan,
        Service,
        TrainedStudent,
        connect,
        embed,
        load_student,
        open_job,
        plan,
        run,
    )

__all__ = [
    "EmbeddedImages",
    "LabeledJob",
    "Plan",
    "Service",
    "TrainedStudent",
    "client",
    "connect",
    "embed",
    "load_student",
    "open_job",
    "plan",
    "run",
]

_BESIDE = ("workers", "api", "feature_store")


if not TYPE_CHECKING:  # else a type checker would accept every missing name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for package in _BESIDE:
            _check_ours(package)
        if name == "client":
            return importlib.import_module("labeler.client")
        return getattr(importlib.import_module("workers.notebook"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_ours(package: str) -> None:
    """Refuse with a message if a foreign folder has the name of one of our packages."""
    found = importlib.util.find_spec(package)
    where = found.origin if found is not None and found.origin else "nowhere"
    if _parent(where) != _parent(__file__):
        raise ImportError(
            f"`import labeler` needs its own package {package!r}, and Python finds another one ({where}): start the "
            f"notebook in a folder without a package named {package!r}, or rename that one"
        )


def _parent(origin: str) -> str:
    """Return the folder that holds a package, with links resolved."""
    return os.path.dirname(os.path.dirname(os.path.realpath(origin)))  # noqa: PTH120  # this package opens no files
