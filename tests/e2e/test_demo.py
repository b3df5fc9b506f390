"""`labeler demo` does what the README says."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from feature_store.backbones.simclr import DIGITS_CONFIG

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_demo_waits_for_no_library_of_networks_that_are_not_its_own() -> None:
    """timm brings torchvision and half of torch's compiler, a second and more of a core: no module that it needs loads
    them when it is loaded itself."""
    seen, left = set[str](), {"feature_store.backbones.simclr"}
    while left:
        name = left.pop()
        seen.add(name)
        left |= {one for one in loaded_at_once(name) if one.startswith("feature_store.backbones.")} - seen
        assert not {"timm", "torchvision"} & {one.partition(".")[0] for one in loaded_at_once(name)}, name
    assert {"feature_store.backbones.simclr"} <= seen


def loaded_at_once(module: str) -> set[str]:
    """What a module imports outside its functions."""
    tree = ast.parse((Path(__file__).parents[2] / f"{module.replace('.', '/')}.py").read_text())
    plain = {one.name for node in tree.body if isinstance(node, ast.Import) for one in node.names}
    return plain | {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "accuracy"), [(5, 0.7), pytest.param(DIGITS_CONFIG.epochs, 0.85, marks=pytest.mark.long)]
)
def test_the_demo_labels_real_digits_well_at_a_small_price(
    labeler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int, accuracy: float
) -> None:
    """Pretrained for a tenth of its epochs, which are two thirds of its time, it labels most images right."""
    shorter = DIGITS_CONFIG.model_copy(update={"epochs": epochs})
    monkeypatch.setattr("feature_store.backbones.simclr.DIGITS_CONFIG", shorter)
    out = tmp_path / "demo"
    result = labeler("demo", "--out", out, "--seed", 0)
    assert result.code == 0, result.err
    stated = re.search(r"^Privacy .*\n .*\n", README, flags=re.M)
    assert stated is not None
    assert stated[0] in result.out
    summary = json.loads((out / "report.json").read_text())
    assert summary["student"]["accuracy"] >= accuracy
    assert summary["privacy"]["instance"]["epsilon"] <= 2
    assert summary["privacy"]["delta"] == 1e-4
    assert summary["agents"]["number"] == 5
    assert all(stage in result.err for stage in ("Seconds", "pretrain backbone", "embed", "label", "train student"))
    assert "seconds" not in summary
    # The same questions by the paper's method, at its price, with a report of its own.
    other = summary["compared"]["knn"]
    assert other["task"]["method"] == "knn"
    assert other["labels"]["asked"] == summary["labels"]["asked"]
    assert other["student"]["accuracy"] >= accuracy
    assert 2.9 < other["privacy"]["instance"]["epsilon"] <= 3
    page = (out / "report.html").read_text()
    for one in (summary, other):
        assert one["privacy"]["one_record"].removeprefix("one record moves ") in page
        assert f"{one['images']['accuracy']:.1%}" in result.out
    assert json.loads((out / "knn" / "report.json").read_text()) == other
    rows = [line.split("  ")[0].strip() for line in re.findall(r"^ {10}([a-z].*)", README, flags=re.M)]
    assert rows[:4] == ["labels right", "student right", "epsilon per image", "one image moves"]
    assert all(row in result.out for row in rows[:4])
    for name in ("report.json", "report.html", "pseudo_labels.parquet", "accuracy_vs_epsilon.png"):
        assert (out / name).stat().st_size > 1000
    assert "http://" not in (out / "report.html").read_text().replace("http://www.w3.org", "")
