"""Shards: what is written is what is read, and nothing damaged, mixed or half-written is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.decode import Skipped
from feature_store.rows import quantize
from feature_store.shard import Shard, check_compatible
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


def test_a_public_shard_keeps_the_order_of_its_source_and_its_pictures(tmp_path: Path) -> None:
    shard = write(tmp_path / "shard", public=True, pictures=True)
    assert shard.sources == [f"{row}.png" for row in range(20)]
    wanted = shard.record_ids[[3, 5]]
    assert shard.thumbnails(wanted) == {int(wanted[0]): b"png3.png", int(wanted[1]): b"png5.png"}


def test_two_shards_of_the_same_images_have_different_record_ids(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert not np.intersect1d(first.record_ids, second.record_ids).size


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


def test_a_folder_that_is_no_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no finished shard"):
        Shard.open(tmp_path)


def test_an_empty_shard_is_refused_and_leaves_nothing_finished(tmp_path: Path) -> None:
    with (
        ShardWriter(tmp_path / "s", classes=CLASSES, fingerprint="f", dimension=4, public=False) as writer,
        pytest.raises(BadData, match="empty"),
    ):
        writer.finish()
    assert not (tmp_path / "s").exists()


def test_a_one_class_private_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="one-class"):
        ShardWriter(tmp_path / "s", classes=["cat"], fingerprint="f", dimension=4, public=False)


@pytest.mark.parametrize("name", [" cat", "cat ", "c\nat", "c\tat", "\u202ecat", "\udcff", "\u00a0cat"])
def test_a_class_that_no_task_could_name_is_refused_before_anything_is_embedded(tmp_path: Path, name: str) -> None:
    """It was embedded, and every job of the shard then refused: a task's names are printable, and stripped."""
    with pytest.raises(InvalidSetting, match="no task could ask about a class that is called"):
        ShardWriter(tmp_path / "s", classes=(name, "owl"), fingerprint="f", dimension=4, public=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("label", [-1, 3])
def test_a_private_label_outside_the_classes_is_refused_without_naming_it(tmp_path: Path, label: int) -> None:
    with ShardWriter(tmp_path / "s", classes=CLASSES, fingerprint="f", dimension=4, public=False) as writer:
        with pytest.raises(BadData, match="outside the class list"):
            writer.append(np.ones((1, 4)), np.array([label]), ["x"])
        assert writer.records == 0


def test_a_public_record_may_have_no_label_and_no_class_list(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", classes=(), fingerprint="f", dimension=4, public=True) as writer:
        writer.append(np.ones((2, 4)), np.array([-1, -1]), ["x", "y"])
        writer.finish()
    assert Shard.open(tmp_path / "s").labels.tolist() == [-1, -1]


def test_pictures_of_private_images_are_refused(tmp_path: Path) -> None:
    with (
        ShardWriter(tmp_path / "s", classes=CLASSES, fingerprint="f", dimension=4, public=False) as writer,
        pytest.raises(InvalidSetting, match="public shards only"),
    ):
        writer.append(np.ones((1, 4)), np.array([0]), ["x"], thumbnails=[b"png"])


def test_integers_that_quantize_cannot_have_made_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", classes=CLASSES, fingerprint="f", dimension=4, public=False) as writer:
        for bad in (np.full((1, 4), 2048, dtype=np.int16), np.zeros((1, 4), dtype=np.int16)):
            with pytest.raises(BadData, match="length 2048"):
                writer.append(bad, np.array([0]), ["x"])


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


def test_an_interrupted_writer_of_another_job_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"classes": CLASSES, "dimension": 4, "public": True}
    with ShardWriter(tmp_path / "s", fingerprint="f", **settings) as writer:
        writer.append(np.ones((1, 4)), np.array([0]), ["x"])
    with (
        pytest.raises(InvalidSetting, match="another source, backbone or class list"),
        ShardWriter(tmp_path / "s", fingerprint="g", **settings),
    ):
        pass


def test_two_writers_of_one_output_are_refused_with_try_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"classes": CLASSES, "fingerprint": "f", "dimension": 4, "public": True}
    with (
        ShardWriter(tmp_path / "s", **settings),
        pytest.raises(OutputInUse, match="another process"),
        ShardWriter(tmp_path / "s", **settings),
    ):
        pass


def test_an_existing_output_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "s")
    with pytest.raises(InvalidSetting, match="exists already"):
        write(tmp_path / "s")


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


def test_two_readers_that_delete_do_not_undo_each_other(tmp_path: Path) -> None:
    first, second = write(tmp_path / "s"), Shard.open(tmp_path / "s")
    first.delete(first.record_ids[:1])
    second.delete(first.record_ids[1:2])
    assert Shard.open(tmp_path / "s").rows.tolist() == list(range(2, 20))


def test_deleting_an_unknown_record_deletes_nothing(tmp_path: Path) -> None:
    shard = write(tmp_path / "s")
    unknown = next(value for value in range(100) if value not in shard.record_ids)
    with pytest.raises(BadData, match="1 of 2 record ids are not in shard"):
        shard.delete([int(shard.record_ids[0]), unknown])
    assert len(Shard.open(tmp_path / "s")) == 20


def test_deleting_every_record_is_refused(tmp_path: Path) -> None:
    shard = write(tmp_path / "s")
    with pytest.raises(InvalidSetting, match="without a record"):
        shard.delete(shard.record_ids)


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


def test_opening_a_shard_loads_no_deep_learning_library() -> None:
    code = (
        "import sys, feature_store.shard, feature_store.shard_writer, feature_store.embedding, feature_store.backbones;"
        "print(sorted({'torch', 'timm', 'torchvision', 'faiss'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
