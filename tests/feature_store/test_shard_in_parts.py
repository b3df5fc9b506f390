"""A shard whose features lie in several files is the shard that one file would have been."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.index import build_index
from feature_store.rows import EDGE_BYTES, joined_rows, rows_to_an_edge, unmap_pages
from feature_store.shard import Shard, read_manifest
from feature_store.shard_writer import ShardWriter
from labeler.errors import DamagedShard, InvalidSetting

ROWS, DIMENSION, PART = 1000, 256, 300
FILES = 3


def seeded() -> Callable[[int], bytes]:
    return np.random.default_rng(7).bytes


def write(path: Path, *, public: bool = False, **settings: Any) -> Shard:
    features = np.random.default_rng(1).normal(size=(ROWS, DIMENSION))
    names = [f"{row}-é.png" for row in range(ROWS)]
    with ShardWriter(
        path, classes=("a", "b"), fingerprint="f", dimension=DIMENSION, public=public, random_bytes=seeded(), **settings
    ) as writer:
        writer.append(features, np.arange(ROWS) % 2, names)
        writer.finish()
    return Shard.open(path)


def test_parts_hold_what_one_file_would(tmp_path: Path) -> None:
    whole, parts = write(tmp_path / "whole"), write(tmp_path / "parts", part_records=PART)
    assert len(list(parts.path.glob("features-*.int16"))) == FILES
    assert not (parts.path / "features.npy").exists()
    assert parts.features.shape == (ROWS, DIMENSION)
    assert not parts.features.flags.writeable
    assert np.array_equal(parts.features, whole.features)
    for name in ("labels.npy", "record_ids.npy", "sources.jsonl", "skipped.jsonl"):
        assert (parts.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_part_is_rounded_up_to_whole_pages_and_the_last_takes_the_rest(tmp_path: Path) -> None:
    parts = write(tmp_path / "parts", part_records=PART, public=True)
    most = read_manifest(parts.path).part_records
    assert most == rows_to_an_edge(PART, DIMENSION) == 384
    sizes = [(parts.path / name).stat().st_size for name in read_manifest(parts.path).feature_files]
    assert sizes == [2 * DIMENSION * rows for rows in (384, 384, ROWS - 2 * 384)]
    assert all(size % EDGE_BYTES == 0 for size in sizes[:-1])


def test_one_index_finds_the_same_in_parts_within_a_memory_limit(tmp_path: Path) -> None:
    whole, parts = write(tmp_path / "whole"), write(tmp_path / "parts", part_records=1)
    queries = np.asarray(whole.features[::97])
    for limit in (None, 1 << 20):
        found = [
            build_index(shard.features, shard.record_ids, engine="numpy", memory_limit_bytes=limit).search(queries, 30)
            for shard in (whole, parts)
        ]
        assert np.array_equal(found[0].record_ids, found[1].record_ids)
        assert np.array_equal(found[0].rows, found[1].rows)


def test_records_are_deleted_over_all_parts_and_the_version_says_so(tmp_path: Path) -> None:
    shard = write(tmp_path / "parts", part_records=PART)
    before = shard.version
    gone = shard.record_ids[[0, 500, 999]]
    assert shard.delete(gone) == 3
    again = Shard.open(shard.path)
    assert len(again) == ROWS - 3
    assert again.version == shard.version != before
    assert not again.alive[[0, 500, 999]].any()


@pytest.mark.parametrize("name", [f"features-{number:05d}.int16" for number in range(FILES)])
def test_a_part_that_is_missing_cut_or_altered_is_found(tmp_path: Path, name: str) -> None:
    shard = write(tmp_path / "parts", part_records=PART)
    for number, harm in enumerate((lambda file: file.unlink(), _cut, _alter)):
        copy = Path(shutil.copytree(shard.path, tmp_path / f"harmed-{number}"))
        harm(copy / name)
        with pytest.raises(DamagedShard, match=name):
            Shard.open(copy)


def test_parts_that_were_changed_for_each_other_are_found(tmp_path: Path) -> None:
    shard = write(tmp_path / "parts", part_records=PART)
    first, second = shard.path / "features-00000.int16", shard.path / "features-00001.int16"
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    with pytest.raises(DamagedShard, match="checksum"):
        Shard.open(shard.path)


def test_an_interrupted_writer_may_go_on_with_parts(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    settings: dict[str, Any] = {"classes": ("a", "b"), "fingerprint": "f", "dimension": DIMENSION, "public": False}
    features = np.random.default_rng(1).normal(size=(ROWS, DIMENSION))
    names = [f"{row}-é.png" for row in range(ROWS)]
    with ShardWriter(tmp_path / "parts", **settings) as writer:
        writer.append(features[:400], np.arange(400) % 2, names[:400])
    with ShardWriter(tmp_path / "parts", part_records=PART, random_bytes=seeded(), **settings) as writer:
        writer.append(features[400:], np.arange(400, ROWS) % 2, names[400:])
        writer.finish()
    assert np.array_equal(Shard.open(tmp_path / "parts").features, whole.features)


def test_a_part_of_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="at least 1 record"):
        write(tmp_path / "parts", part_records=0)


def test_rows_stay_mapped_while_an_array_over_them_lives(tmp_path: Path) -> None:
    values = np.arange(EDGE_BYTES, dtype="<i2")
    values[: EDGE_BYTES // 2].tofile(tmp_path / "a")
    values[EDGE_BYTES // 2 :].tofile(tmp_path / "b")
    slice_over_both = joined_rows([tmp_path / "a", tmp_path / "b"], 4)[EDGE_BYTES // 8 - 2 : EDGE_BYTES // 8 + 2]
    gc.collect()
    expected = values.reshape(-1, 4)[EDGE_BYTES // 8 - 2 : EDGE_BYTES // 8 + 2]
    assert np.array_equal(slice_over_both, expected)
    unmap_pages(slice_over_both)
    assert np.array_equal(slice_over_both, expected)


def test_a_file_that_ends_within_a_page_is_joined_with_nothing(tmp_path: Path) -> None:
    for name, size in (("a", EDGE_BYTES - 2), ("b", EDGE_BYTES)):
        (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(DamagedShard, match="another length"):
        joined_rows([tmp_path / "a", tmp_path / "b"], 1)


def _cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - EDGE_BYTES)


def _alter(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(100)
        byte = opened.read(1)
        opened.seek(100)
        opened.write(bytes([byte[0] ^ 1]))
