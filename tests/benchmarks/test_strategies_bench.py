"""The bench of strategies: what it calls pure, and that digits are purer along nearest neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import run_bench
from benchmarks.strategies import COUNTS, PURITY, purity


def test_purity_counts_the_images_of_each_groups_most_frequent_class() -> None:
    assert purity(np.array([0, 0, 0, 2, 2]), np.array([1, 1, 0, 0, 0])) == pytest.approx(80.0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)  # 90 s of a core, which four processes may share
def test_digits_are_purer_along_nearest_neighbours(data_root: Path) -> None:
    rows = run_bench("strategies", data=data_root)["rows"]
    found = {(row["case"], row["method"]): row["value"] for row in rows if row["metric"] == PURITY}
    for count in COUNTS:
        spectral, clustered = (found["MNIST", f"{name}, {count} questions"] for name in ("spectral", "clustered"))
        assert spectral > 95 > clustered
