"""`labeler embed` and `labeler duplicates`: what the site's own people see on their terminal, and nobody else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feature_store.shard import Shard
from tests.command_line import Labeler


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """CLASS/PATIENT/scan, one scan under two classes."""
    rng = np.random.default_rng(8)
    for label, patient in (("ill", "P-17"), ("ill", "P-23"), ("well", "P-17")):
        (tmp_path / "scans" / label / patient).mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / label / patient / f"{number}.png")
    shutil.copy(tmp_path / "scans/ill/P-23/0.png", tmp_path / "scans/well/P-17/copy.png")
    return tmp_path / "scans"


def test_embed_says_what_it_left_out_and_where_the_list_is(labeler: Labeler, scans: Path, tmp_path: Path) -> None:
    shutil.copy(scans / "ill/P-17/0.png", scans / "ill/P-17/again.png")
    for name in ("Thumbs.db", "well/.DS_Store", "well/P-17/notes.txt"):
        (scans / name).write_text("no image")
    options = ("--backbone", "pixels:4", "--classes", "ill,well")
    done = labeler("embed", scans, *options, "--out", tmp_path / "a.shard")
    assert done.code == 0, done.err
    shard = Shard.open(tmp_path / "a.shard")
    assert done.out.splitlines()[:4] == [
        f"5 images are in {tmp_path / 'a.shard'} (backbone pixels:4, {shard.fingerprint[:12]})",
        "Left out as copies of other images: 1",
        "Left out because identical images have different labels: 2",
        f"Identical images are listed in {tmp_path / 'a.shard.duplicates.csv'}; delete it once you have looked at it",
    ]
    assert "ill/P-23" not in done.out + done.err
    assert done.err.strip().endswith(
        "Warning: 3 files are no images and were passed over: Thumbs.db, well/.DS_Store, well/P-17/notes.txt."
    )
    (scans / "ill/P-17/cut.png").write_bytes((scans / "ill/P-17/1.png").read_bytes()[:40])
    done = labeler("embed", scans, *options, "--out", tmp_path / "b.shard", "--json")
    assert done.code == 1
    document = done.document
    assert [one["source"] for one in document["skipped"]] == ["ill/P-17/cut.png"]
    assert (document["records"], document["copies"], document["contradictions"]) == (5, 1, 2)


def test_embed_refuses_what_is_there_twice_where_it_is_told_to(labeler: Labeler, scans: Path, tmp_path: Path) -> None:
    options = ("--backbone", "pixels:4", "--out", tmp_path / "a.shard", "--classes", "ill,well", "--person-level", 2)
    refused = labeler("embed", scans, *options, "--duplicates", "refuse")
    assert refused.code == 1
    assert "the same image (under different labels and different people): ill/P-23/0.png, well/P-17/copy.png" in (
        refused.err
    )
    assert "--duplicates keep-first" in refused.err

    as_json = labeler("embed", scans, *options, "--duplicates", "refuse", "--json")
    assert as_json.code == 1
    assert as_json.document["duplicates"] == [
        {
            "sources": ["ill/P-23/0.png", "well/P-17/copy.png"],
            "contradiction": "under different labels and different people",
        }
    ]

    done = labeler("embed", scans, *options, "--duplicates", "keep-all", "--json")
    assert done.code == 0, done.err
    assert done.document["records"] == 7
    shard = Shard.open(tmp_path / "a.shard")
    assert shard.knows_persons
    assert len(np.unique(np.asarray(shard.persons), axis=0)) == 2

    looked = labeler("duplicates", tmp_path / "a.shard", "--json")
    assert looked.code == 1
    assert looked.document["compared"] == ["bytes", "features"]
    assert looked.document["duplicates"][0]["contradiction"] == "under different labels and different people"


def test_words_that_are_no_choice_are_refused(labeler: Labeler, scans: Path, tmp_path: Path) -> None:
    options = ("--backbone", "pixels:4", "--out", tmp_path / "a.shard", "--classes", "ill,well")
    refused = labeler("embed", scans, *options, "--duplicates", "whatever")
    assert refused.code == 2
    assert "must be one of refuse, keep-first, keep-all" in refused.err
    refused = labeler("embed", scans, *options, "--person-level", 2, "--person-column", "patient")
    assert refused.code == 2
    assert "in one way" in refused.err
