"""Classes and files are named as people name them, in whatever script, from the folder to every export."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feature_store.results import label_files

CLASSES = ("Würger", "雀", "עורב", "Ἁλκυών 🐦")


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with a bright quarter each in folders of four scripts; two sites and public images without folders."""
    root = tmp_path_factory.mktemp("vögel")
    rng = np.random.default_rng(0)
    quarters = [(slice(row, row + 4), slice(column, column + 4)) for row in (0, 4) for column in (0, 4)]
    for site, count in (("Süd", 12), ("北", 12), ("öffentlich", 5)):
        for name, quarter in zip(CLASSES, quarters, strict=True):
            for number in range(count):
                folder = root / site if site == "öffentlich" else root / site / name
                folder.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 30, (8, 8), dtype=np.uint8)
                pixels[quarter] += 200
                Image.fromarray(pixels).save(folder / f"{name} № {number}.png")
    return root


def test_names_of_every_script_come_through_embed_run_and_all_exports(labeler: Any, birds: Path) -> None:
    names = ",".join(CLASSES)
    for site, more in (("Süd", ()), ("北", ()), ("öffentlich", ("--public",))):
        made = labeler("embed", birds / site, "--backbone", "pixels:8", "--classes", names, "--out",
                       birds / f"{site}.shard", *more)  # fmt: skip
        assert made.code == 0, made.err
    (birds / "Aufgabe.toml").write_text(
        '[task]\nname = "Vögel 鳥"\nmethod = "knn"\nk = 3\nsigma_votes = 0.5\ndelta = 1e-5\n', encoding="utf-8"
    )
    shards = ("--shard", birds / "Süd.shard", "--shard", birds / "北.shard")
    run = labeler("run", birds / "Aufgabe.toml", *shards, "--queries", birds / "öffentlich.shard", "--out",
                  birds / "Ergebnis", "--json")  # fmt: skip
    assert run.code == 0, run.err
    assert json.loads(run.out)["task"]["name"] == "Vögel 鳥"
    table = pq.read_table(birds / "Ergebnis" / "pseudo_labels.parquet")
    told = dict(zip(table["source"].to_pylist(), table["label_name"].to_pylist(), strict=True))
    assert sum(source.startswith(name) for source, name in told.items()) >= 18, told
    report = (birds / "Ergebnis" / "report.html").read_text(encoding="utf-8")
    assert all(name in report for name in ("Vögel 鳥", "Würger"))
    _check_service_exports(table)
    _check_local_exports(labeler, birds)


def _check_service_exports(table: Any) -> None:
    """The files of GET /v1/jobs/{id}/labels, which are made of the same table."""
    expected = table["label_name"].to_pylist()
    lines = b"".join(label_files.json_lines(table)).decode("utf-8").splitlines()
    assert [json.loads(line)["label_name"] for line in lines] == expected
    rows = list(csv.reader(io.StringIO(b"".join(label_files.image_folder_csv(table)).decode("utf-8"))))
    assert {name for row in rows[1:] for name in row} >= set(expected)
    assert pq.read_table(io.BytesIO(b"".join(label_files.parquet(table))))["label_name"].to_pylist() == expected
    studio = json.loads(b"".join(label_files.label_studio(table)))
    assert {name for name in expected if name in json.dumps(studio, ensure_ascii=False)} == set(expected)


def _check_local_exports(labeler: Any, birds: Path) -> None:
    for kind in ("hf", "croissant", "label-studio", "csv", "image-folder"):
        out = birds / f"für-{kind}{'.json' if kind == 'label-studio' else '.csv' if kind == 'csv' else ''}"
        exported = labeler(
            "export", birds / "Ergebnis", "--format", kind, "--images", birds / "öffentlich", "--out", out
        )
        assert exported.code == 0, (kind, exported.err)
        files = [out] if out.is_file() else [path for path in out.rglob("*") if path.suffix in (".md", ".json", ".csv")]
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        text = json.dumps(json.loads(text), ensure_ascii=False) if kind == "label-studio" else text
        if kind == "image-folder":
            assert {path.name for path in out.iterdir() if path.is_dir()} <= set(CLASSES)
            assert len(list(out.rglob("*.png"))) == 20
        else:
            assert "雀" in text or "\\u96c0" in text, kind
