"""The bench of votes on attributes: its digits, and its quick version on real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import run_bench
from benchmarks.attribute_votes import MOST, SETTINGS, TABLE


def test_every_digit_has_attributes_of_its_own_and_four_at_most() -> None:
    assert TABLE.sum(axis=1).max() == MOST == 4
    assert len(np.unique(TABLE, axis=0)) == 10


@pytest.mark.long
def test_the_bench_reads_more_attributes_rightly_than_the_commoner_answer(data_root: Path) -> None:
    rows = run_bench("attributes", data=data_root)["rows"]
    assert len({row["method"] for row in rows}) == 5 + 2 * 4
    for setting in SETTINGS:
        found = [row for row in rows if f"k = {setting.k}, tau = {setting.most}," in row["method"]]
        best = next(row["value"] for row in found if "hardly any noise" in row["method"])
        assert best > 90
        assert all(row["value"] > 70 and row["delta"] == 1e-3 for row in found)
