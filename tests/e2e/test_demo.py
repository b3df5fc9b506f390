"""`labeler demo` does what the README says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.slow
def test_the_demo_labels_real_digits_well_at_a_small_price(labeler, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = labeler("demo", "--out", out, "--seed", 0)
    assert result.code == 0, result.err
    stated = re.search(r"^Privacy .*\n .*\n", README, flags=re.M)
    assert stated is not None
    assert stated[0] in result.out
    summary = json.loads((out / "report.json").read_text())
    assert summary["student"]["accuracy"] >= 0.85
    assert summary["privacy"]["instance"]["epsilon"] <= 2
    assert summary["privacy"]["delta"] == 1e-4
    assert summary["agents"]["number"] == 5
    assert all(stage in result.err for stage in ("Seconds", "pretrain backbone", "embed", "label", "train student"))
    assert "seconds" not in summary
    for name in ("report.json", "report.html", "pseudo_labels.parquet", "accuracy_vs_epsilon.png"):
        assert (out / name).stat().st_size > 1000
    assert "http://" not in (out / "report.html").read_text().replace("http://www.w3.org", "")
