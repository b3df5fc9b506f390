"""`labeler delete`: people and images go from a shard, all that is named or nothing, and no person is named."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feature_store.shard import Shard
from feature_store.sources import PersonColumn
from labeler.errors import BadData, InvalidSetting
from workers.embedder.shards import delete_records, embed_images, lines_of

PEOPLE = ("P-1", "Jos\u00e9", "P-3")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """CLASS/PATIENT/scan: three people of two scans each."""
    rng = np.random.default_rng(5)
    for person in PEOPLE:
        for label in ("ill", "well"):
            path = tmp_path / "scans" / label / person / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return _embedded(tmp_path, "a.shard", persons=PersonColumn(level=2))


def _embedded(folder: Path, name: str, **more: Any) -> Path:
    embed_images(folder / "scans", "pixels:4", folder / name, classes=("ill", "well"), public=False, **more)
    return folder / name


def _left(shard: Path) -> set[str]:
    opened = Shard.open(shard)
    return {opened.sources[row] for row in opened.rows}


def test_all_records_of_a_person_go_whichever_way_the_name_is_spelt_and_the_others_keep_their_ids(shard: Path) -> None:
    before = Shard.open(shard)
    kept = {before.sources[row]: int(before.record_ids[row]) for row in before.rows}
    assert delete_records(shard, persons=[" Jose\u0301 "]) == {"shard": str(shard), "deleted": 2, "left": 4}
    after = Shard.open(shard)
    assert {after.sources[row].split("/")[1] for row in after.rows} == {"P-1", "P-3"}
    assert {after.sources[row]: int(after.record_ids[row]) for row in after.rows}.items() <= kept.items()
    assert after.version != before.version, "an agent that holds an index of it looks anew"
    assert delete_records(shard, persons=["Jos\u00e9"])["deleted"] == 0, "again: no change"


def test_the_table_of_identical_images_goes_because_it_may_name_what_was_deleted(tmp_path: Path, shard: Path) -> None:
    shutil.copy(tmp_path / "scans/ill/P-1/0.png", tmp_path / "scans/ill/P-1/again.png")
    made = _embedded(tmp_path, "b.shard", persons=PersonColumn(level=2))
    listed = tmp_path / "b.shard.duplicates.csv"
    assert "again.png" in listed.read_text()
    with pytest.raises(BadData, match="Instead of a copy that was left out, name the file"):
        delete_records(made, images=["ill/P-1/again.png"])
    assert listed.exists()
    assert delete_records(made, persons=["P-3"])["deleted"] == 2
    assert not listed.exists()


def test_all_that_is_named_goes_or_nothing(shard: Path) -> None:
    whole = _left(shard)
    with pytest.raises(BadData, match="1 of 2 people never had an image") as refused:
        delete_records(shard, persons=["P-1", "P-9"])
    assert "P-9" not in str(refused.value)
    with pytest.raises(BadData, match=r"1 of 2 images are not in shard 'a\.shard', .* at place 2; ") as refused:
        delete_records(shard, images=["ill/P-1/0.png", "ill/P-1/7.png"])
    assert "P-1" not in str(refused.value), "a folder may be named after a person"
    with pytest.raises(InvalidSetting, match="without a record"):
        delete_records(shard, persons=PEOPLE)
    with pytest.raises(InvalidSetting, match="name people"):
        delete_records(shard)
    assert _left(shard) == whole
    delete_records(shard, persons=["P-1"], images=["ill/P-3/0.png"])
    assert _left(shard) == whole - {"ill/P-1/0.png", "well/P-1/0.png", "ill/P-3/0.png"}


def test_people_are_found_with_the_key_of_the_shard_alone(shard: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "site.key"
    with pytest.raises(InvalidSetting, match=r"there is no site's key"):
        delete_records(shard, persons=["P-1"], key=other)
    assert not other.exists(), "looking makes none"
    other.parent.mkdir()
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    with pytest.raises(BadData, match=r"not the key that shard 'a\.shard' was made with"):
        delete_records(shard, persons=["P-1"], key=other)
    nobody = _embedded(tmp_path, "b.shard")
    with pytest.raises(InvalidSetting, match="was not told whose records it holds"):
        delete_records(nobody, persons=["P-1"])
    assert len(_left(shard)) == 6


def test_names_come_from_a_file_or_the_standard_input_and_from_no_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments are seen by every user of the machine, and kept by shells."""
    (tmp_path / "names.txt").write_bytes(b"\xef\xbb\xbfP-1\r\n\r\nP 2\n")
    assert lines_of(tmp_path / "names.txt") == ["P-1", "P 2"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("P-3\n"))
    assert lines_of(Path("-")) == ["P-3"]
    for content in (None, b"\xff"):
        if content is not None:
            (tmp_path / "odd.txt").write_bytes(content)
        with pytest.raises(InvalidSetting, match="cannot be read as names"):
            lines_of(tmp_path / "odd.txt")
