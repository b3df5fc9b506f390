"""Shards and their rows: what is written is what is read, and nothing damaged, mixed or half-written is accepted."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feature_store.shard
from feature_store.decode import Skipped
from feature_store.rows import FEATURE_SCALE, largest_square_length, quantize
from feature_store.shard import DELETIONS_NAME, Shard, check_compatible, deletions
from feature_store.shard_writer import ShardWriter
from labeler.errors import BadData, DamagedShard, InvalidSetting, MixedShards, OutputInUse

CLASSES = ("cat", "dog", "owl")


def write(path: Path, *, rows: int = 20, public: bool = False, pictures: bool = False, **settings: Any) -> Shard:
    given: dict[str, Any] = {"classes": CLASSES, "fingerprint": "f" * 64, "dimension": 8} | settings
    rng = np.random.default_rng(rows)
    features = rng.normal(size=(rows, given["dimension"]))
    with ShardWriter(path, public=public, **given) as writer:
        for start in range(0, rows, 7):
            block = features[start : start + 7]
            names = [f"{start + row}.png" for row in range(len(block))]
            png = [b"png" + name.encode() for name in names] if pictures else None
            writer.append(block, np.arange(start, start + len(block)) % 2, names, thumbnails=png)
        writer.finish()
    return Shard.open(path)


def expected(rows: int = 20, dimension: int = 8) -> np.ndarray[Any, np.dtype[np.int16]]:
    return quantize(np.random.default_rng(rows).normal(size=(rows, dimension)))


def test_a_private_shard_holds_every_record_in_a_random_order(tmp_path: Path) -> None:
    shard = write(tmp_path / "shard", rows=200)
    place = np.array([int(name.removesuffix(".png")) for name in shard.sources])
    assert sorted(place) == list(range(200))
    assert not np.array_equal(place, np.arange(200))
    assert np.array_equal(np.asarray(shard.features), expected(200)[place])
    assert np.array_equal(np.asarray(shard.labels), place % 2)
    assert len(np.unique(shard.record_ids)) == 200
    assert shard.record_ids.min() >= 0
    assert not np.intersect1d(shard.record_ids, write(tmp_path / "again", rows=200).record_ids).size


def test_a_public_shard_keeps_the_order_of_its_source_and_its_pictures(tmp_path: Path) -> None:
    shard = write(tmp_path / "shard", public=True, pictures=True)
    assert shard.sources == [f"{row}.png" for row in range(20)]
    wanted = shard.record_ids[[3, 5]]
    assert shard.thumbnails(wanted) == {int(wanted[0]): b"png3.png", int(wanted[1]): b"png5.png"}


def test_a_private_shard_prints_no_label(tmp_path: Path) -> None:
    printed = repr(write(tmp_path / "shard"))
    assert "labels not shown" in printed
    assert not any(name in printed for name in CLASSES)


@pytest.mark.parametrize("name", ["features.npy", "labels.npy", "record_ids.npy", "sources.jsonl"])
def test_one_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "shard").path / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedShard, match=f"bytes of {name} do not match"):
        Shard.open(path.parent)
    assert len(Shard.open(path.parent, verify=False)) == 20


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["features.npy", "record_ids.npy"])
def test_a_truncated_or_missing_file_is_found_without_reading_it(tmp_path: Path, name: str, verify: bool) -> None:
    path = write(tmp_path / "shard").path / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedShard, match="truncated"):
        Shard.open(path.parent, verify=verify)
    path.unlink()
    with pytest.raises(DamagedShard, match="missing"):
        Shard.open(path.parent, verify=verify)


def test_a_changed_manifest_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "shard").path / "manifest.json"
    fields = json.loads(path.read_text())
    fields["classes"] = ["cat", "owl", "dog"]
    path.write_text(json.dumps(fields))
    with pytest.raises(DamagedShard, match="does not match its checksum"):
        Shard.open(path.parent)
    path.write_text("{")
    with pytest.raises(DamagedShard, match="manifest"):
        Shard.open(path.parent)


@pytest.mark.parametrize("name", [" cat", "cat ", "c\nat", "c\tat", "\u202ecat", "\udcff", "\u00a0cat"])
def test_a_class_that_no_task_could_name_is_refused_before_anything_is_embedded(tmp_path: Path, name: str) -> None:
    """It was embedded, and every job of the shard then refused: a task's names are printable, and stripped."""
    with pytest.raises(InvalidSetting, match="no task could ask about a class that is called"):
        ShardWriter(tmp_path / "s", classes=(name, "owl"), fingerprint="f", dimension=4, public=False)
    assert list(tmp_path.iterdir()) == []


def test_a_public_record_may_have_no_label_and_no_class_list(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", classes=(), fingerprint="f", dimension=4, public=True) as writer:
        writer.append(np.ones((2, 4)), np.array([-1, -1]), ["x", "y"])
        writer.finish()
    assert Shard.open(tmp_path / "s").labels.tolist() == [-1, -1]


def test_an_interrupted_writer_goes_on_and_drops_what_was_not_committed(tmp_path: Path) -> None:
    features = np.random.default_rng(20).normal(size=(20, 8))
    names = [f"{row}.png" for row in range(20)]
    settings: dict[str, Any] = {"classes": CLASSES, "fingerprint": "f", "dimension": 8, "public": True}
    with ShardWriter(tmp_path / "s", **settings) as writer:
        writer.append(features[:7], np.zeros(7, dtype=int), names[:7], skipped=[Skipped("bad", "why")], position=8)
    with (tmp_path / ".s.writing" / "features").open("ab") as file:
        file.write(b"half a row")
    with ShardWriter(tmp_path / "s", **settings) as writer:
        assert (writer.records, writer.position) == (7, 8)
        writer.append(features[7:], np.zeros(13, dtype=int), names[7:])
        writer.finish()
    shard = Shard.open(tmp_path / "s")
    assert np.array_equal(np.asarray(shard.features), expected())
    assert shard.sources == names
    assert shard.skipped == (Skipped("bad", "why"),)
    assert not (tmp_path / ".s.writing").exists()


PRIVATE: dict[str, Any] = {"classes": CLASSES, "fingerprint": "f", "dimension": 4, "public": False}
ONES, BEYOND = np.ones((1, 4)), np.full((1, 4), 2048, dtype=np.int16)


@pytest.mark.parametrize(
    ("features", "label", "more", "error", "sentence"),
    [
        (ONES, -1, {}, BadData, "outside the class list"),
        (ONES, 3, {}, BadData, "outside the class list"),
        (ONES, 0, {"thumbnails": [b"png"]}, InvalidSetting, "public shards only"),
        (BEYOND, 0, {}, BadData, "length 2048"),
        (np.zeros_like(BEYOND), 0, {}, BadData, "length 2048"),
    ],
)
def test_what_no_private_shard_holds_is_refused_and_an_empty_one_is_not_finished(
    tmp_path: Path, features: np.ndarray, label: int, more: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with ShardWriter(tmp_path / "s", **PRIVATE) as writer:
        with pytest.raises(error, match=sentence):
            writer.append(features, np.array([label]), ["x"], **more)
        assert writer.records == 0
        with pytest.raises(BadData, match="empty"):
            writer.finish()
    with pytest.raises(BadData, match="no finished shard"):
        Shard.open(tmp_path / "s")


def test_an_output_is_written_once_by_one_writer_for_one_job(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", **PRIVATE) as writer:
        writer.append(ONES, np.array([0]), ["x"])
        with pytest.raises(OutputInUse, match="another process"):
            ShardWriter(tmp_path / "s", **PRIVATE).__enter__()
    with pytest.raises(InvalidSetting, match="another source, backbone or class list"):
        ShardWriter(tmp_path / "s", **PRIVATE | {"fingerprint": "g"}).__enter__()
    write(tmp_path / "done")
    with pytest.raises(InvalidSetting, match="exists already"):
        write(tmp_path / "done")
    with pytest.raises(InvalidSetting, match="one-class"):
        ShardWriter(tmp_path / "t", **PRIVATE | {"classes": ["cat"]})


def test_a_deleted_record_is_dead_for_every_reader_and_changes_the_version(tmp_path: Path) -> None:
    shard = write(tmp_path / "s")
    gone = shard.record_ids[[2, 11]]
    before = shard.version
    assert shard.delete(gone) == 2
    assert shard.delete(gone) == 0
    for reader in (shard, Shard.open(tmp_path / "s")):
        assert len(reader) == 18
        assert reader.rows.tolist() == [row for row in range(20) if row not in (2, 11)]
        assert reader.version == shard.version != before


def test_a_full_disk_deletes_nothing_without_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write(tmp_path / "a.shard")
    gone, replace = shard.record_ids[:2], feature_store.shard.replace_file

    def full(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == DELETIONS_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, *arguments, **more)

    monkeypatch.setattr(feature_store.shard, "replace_file", full)
    with pytest.raises(OSError, match="No space left"):
        shard.delete(gone)
    monkeypatch.undo()
    again = Shard.open(shard.path)
    assert len(again.rows) == len(again)
    assert again.delete(gone) == 2
    assert len(deletions(shard.path)) == 1


def test_two_readers_that_delete_do_not_undo_each_other(tmp_path: Path) -> None:
    first, second = write(tmp_path / "s"), Shard.open(tmp_path / "s")
    first.delete(first.record_ids[:1])
    second.delete(first.record_ids[1:2])
    assert Shard.open(tmp_path / "s").rows.tolist() == list(range(2, 20))


def test_deleting_an_unknown_record_or_all_deletes_nothing(tmp_path: Path) -> None:
    shard = write(tmp_path / "s")
    unknown = next(value for value in range(100) if value not in shard.record_ids)
    with pytest.raises(BadData, match="1 of 2 record ids are not in shard"):
        shard.delete([int(shard.record_ids[0]), unknown])
    with pytest.raises(InvalidSetting, match="without a record"):
        shard.delete(shard.record_ids)
    assert len(Shard.open(tmp_path / "s")) == 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fingerprint": "g" * 64}, "different backbones"),
        ({"dimension": 9}, "different dimensions"),
        ({"classes": ("dog", "cat", "owl")}, "different class lists"),
    ],
)
def test_shards_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", **change)
    with pytest.raises(MixedShards, match=sentence):
        check_compatible([first, second])


def test_shards_that_fit_pass_and_a_public_one_needs_no_classes(tmp_path: Path) -> None:
    public = tmp_path / "p"
    with ShardWriter(public, classes=(), fingerprint="f" * 64, dimension=8, public=True) as writer:
        writer.append(np.ones((1, 8)), np.array([-1]), ["x"])
        writer.finish()
    check_compatible([Shard.open(public), write(tmp_path / "a"), write(tmp_path / "b")])
    with pytest.raises(InvalidSetting, match="at least one shard"):
        check_compatible([])


def test_a_row_becomes_2048_times_its_direction() -> None:
    quantised = quantize(np.array([[3.0, 4.0], [0.0, -0.5]]))
    assert quantised.dtype == np.int16
    assert quantised.tolist() == [[round(2048 * 0.6), round(2048 * 0.8)], [0, -2048]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_inner_products_stay_exact_in_float32(dimension: int, seed: int) -> None:
    rows = quantize(np.random.default_rng(seed).normal(size=(4, dimension)) + 1e-9).astype(np.int64)
    squares = (rows**2).sum(axis=1)
    assert squares.max() <= largest_square_length(dimension) < 2**24
    assert np.abs(squares**0.5 - FEATURE_SCALE).max() <= dimension**0.5 / 2 + 1e-6


def test_a_row_does_not_depend_on_the_rows_beside_it(rng: np.random.Generator) -> None:
    features = rng.normal(size=(50, 33)).astype(np.float32)
    together = quantize(features)
    assert all(np.array_equal(quantize(features[row : row + 1])[0], together[row]) for row in range(50))


def test_length_does_not_matter_even_at_the_ends_of_the_range() -> None:
    row = np.array([[1.0, -2.0, 3.0]])
    assert np.array_equal(quantize(row * 1e-300), quantize(row))
    assert np.array_equal(quantize(row * 1e300), quantize(row))


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_rows_without_a_direction_are_refused(bad: float) -> None:
    with pytest.raises(BadData, match="1 of 2 features are zero or not finite"):
        quantize(np.array([[1.0, 2.0], [bad, 0.0]]))


def test_integers_are_refused() -> None:
    with pytest.raises(BadData, match="must be floats"):
        quantize(np.ones((2, 2), dtype=np.int16))


@pytest.mark.process
def test_shards_indexes_and_clusters_are_named_without_loading_what_computes() -> None:
    code = (
        "import sys, feature_store.shard, feature_store.shard_writer, feature_store.embedding\n"
        "import feature_store.backbones, feature_store.index\n"
        "assert not {'torch', 'timm', 'torchvision', 'faiss'} & sys.modules.keys()\n"
        "import feature_store.cluster.search\n"
        "assert 'ray' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
