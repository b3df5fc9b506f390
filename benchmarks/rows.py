"""What every bench returns: rows of one shape, whatever was measured."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "private-labeler",
    "faiss-gpu",
    "llvmlite",
    "faiss-cpu",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "scikit-learn",
    "dp-accounting",
)


@dataclass(frozen=True)
class BenchRow:
    """One measured number.

    Attributes:
        case: on what (a server domain, a size).
        method: how it was reached.
        metric: what the value is, with its unit.
        value: the measurement; a mean where `sd` stands beside it.
        sd: standard deviation over repetitions.
        epsilon, delta, level: the guarantee the value was reached under.
        reference: what it is to be compared with.
        seconds: how long it took.
        settings: everything needed to repeat it.
    """

    case: str
    method: str
    metric: str
    value: float
    sd: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    level: str | None = None
    reference: str | None = None
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def bench_document(name: str, rows: list[BenchRow], seconds: float) -> dict[str, Any]:
    """The document of `labeler bench --json`."""
    return {
        "name": name,
        "rows": [asdict(row) for row in rows],
        "seconds": round(seconds, 3),
        "versions": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """Versions of what results depend on, of those that are installed."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
