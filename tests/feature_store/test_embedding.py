"""Embedding a source: labels by name, skipped images listed, and a killed run that goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feature_store.backbones import load_backbone
from feature_store.backbones.backbone import PixelBackbone
from feature_store.decode import Skipped
from feature_store.embedding import embed_source
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.sources import open_source
from labeler.errors import BadData, InvalidSetting


class Stop(Exception):
    """What a test raises to stop a run."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """30 images of 3 classes."""
    rng = np.random.default_rng(8)
    for name in ("cat", "dog", "owl"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            image = Image.fromarray(rng.integers(0, 256, (12, 9, 3), dtype=np.uint8))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def by_source(shard: Shard) -> dict[str, tuple[bytes, int]]:
    rows = zip(shard.sources, np.asarray(shard.features), np.asarray(shard.labels), strict=True)
    return {source: (feature.tobytes(), int(label)) for source, feature, label in rows}


def test_every_image_is_embedded_and_labelled_by_name(photos: Path, tmp_path: Path) -> None:
    backbone = load_backbone("pixels:4")
    report = embed_source(photos, backbone, tmp_path / "out", classes=["owl", "dog", "cat", "fox"], batch_size=7)
    shard = Shard.open(tmp_path / "out")
    assert (report.records, report.skipped, report.notes, report.resumed_from) == (30, (), (), 0)
    assert (shard.classes, shard.fingerprint) == (("owl", "dog", "cat", "fox"), backbone.fingerprint)
    source = open_source(photos)
    expected = quantize(backbone.embed([source.read(row) for row in range(30)]))
    place = {"owl": 0, "dog": 1, "cat": 2}
    rows = zip(source.names, expected, strict=True)
    assert by_source(shard) == {name: (row.tobytes(), place[name.split("/")[0]]) for name, row in rows}


def test_private_labels_outside_the_class_list_are_refused_unnamed(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="10 of 30 private images have no label in the class list") as caught:
        embed_source(photos, PixelBackbone(size=4), tmp_path / "out", classes=["cat", "dog"])
    assert "owl" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [".", "cat", "file"])
def test_a_shard_is_written_to_no_folder_of_something_else_and_no_key_is_made_beside_it(
    photos: Path, name: str
) -> None:
    (photos / "file").touch()
    before = sorted(photos.parent.rglob("*"))
    with pytest.raises(InvalidSetting, match="is there already and is no shard; name a new folder"):
        embed_source(photos, PixelBackbone(size=4), photos / name)
    assert sorted(photos.parent.rglob("*")) == before


def test_public_images_keep_order_pictures_and_truth_where_known(photos: Path, tmp_path: Path) -> None:
    report = embed_source(photos, PixelBackbone(size=4), tmp_path / "out", classes=["dog", "cat"], public=True)
    shard = Shard.open(tmp_path / "out")
    assert shard.is_public
    assert shard.sources == list(open_source(photos).names)
    assert np.asarray(shard.labels).tolist() == [1] * 10 + [0] * 10 + [-1] * 10
    assert all(png.startswith(b"\x89PNG") for png in shard.thumbnails(shard.record_ids).values())
    assert "for scoring only" in report.notes[-1]


def test_unreadable_images_are_listed_and_skipped(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "3.png").write_bytes(b"no image")
    (photos / "dog" / "9.png").write_bytes((photos / "dog" / "9.png").read_bytes()[:60])
    (photos / "readme.txt").write_text("hello")
    report = embed_source(photos, PixelBackbone(size=4), tmp_path / "out", batch_size=4)
    assert report.records == 28
    assert [each.source for each in report.skipped] == ["cat/3.png", "dog/9.png"]
    assert report.passed_over == ("readme.txt",)
    assert Skipped("cat/3.png", "not an image of a known format") in report.skipped
    assert Shard.open(tmp_path / "out").skipped == report.skipped


def test_a_source_without_one_readable_image_makes_no_shard(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "0.png").write_bytes(b"no image")
    with pytest.raises(BadData, match="would be empty"):
        embed_source(tmp_path / "photos", PixelBackbone(size=4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_public_images_whose_names_are_no_text_are_refused_and_private_ones_are_not(
    photos: Path, tmp_path: Path
) -> None:
    backbone = load_backbone("pixels:4")
    (photos / "cat" / "0.png").rename(photos / "cat" / "\udcff.png")
    with pytest.raises(InvalidSetting, match=r"names of 1 public images are no text in UTF-8.*cat/\\udcff.png; rename"):
        embed_source(photos, backbone, tmp_path / "public", classes=["cat", "dog", "owl"], public=True)
    assert embed_source(photos, backbone, tmp_path / "own", classes=["cat", "dog", "owl"]).records == 30


def test_unlabelled_private_images_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no label"):
        embed_source(photos / "cat", PixelBackbone(size=4), tmp_path / "out", classes=["cat", "dog"])


def test_numbered_labels_are_places_in_the_class_list(tmp_path: Path) -> None:
    image = tmp_path / "one.png"
    Image.new("RGB", (2, 2), (9, 9, 9)).save(image)
    pq.write_table(pa.table({"image": [image.read_bytes()] * 3, "label": [2, 0, 2]}), tmp_path / "set.parquet")
    embed_source(
        tmp_path / "set.parquet",
        PixelBackbone(size=4),
        tmp_path / "out",
        classes=["a", "b", "c"],
        duplicates="keep-all",
    )
    assert sorted(np.asarray(Shard.open(tmp_path / "out").labels)) == [0, 2, 2]


def test_a_run_stopped_between_batches_goes_on(photos: Path, tmp_path: Path) -> None:
    backbone = PixelBackbone(size=4)
    (photos / "cat" / "0.png").write_bytes(b"no image")
    embed_source(photos, backbone, tmp_path / "whole", batch_size=4)

    def stop(done: int, total: int) -> None:
        if done >= 12:
            raise Stop

    with pytest.raises(Stop):
        embed_source(photos, backbone, tmp_path / "out", batch_size=4, progress=stop)
    assert not (tmp_path / "out").exists()
    calls: list[tuple[int, int]] = []
    report = embed_source(
        photos, backbone, tmp_path / "out", batch_size=4, progress=lambda done, total: calls.append((done, total))
    )
    assert (report.resumed_from, report.records, len(report.skipped)) == (13, 29, 1)
    assert calls[0] == (17, 30)
    assert calls[-1] == (30, 30)
    assert by_source(Shard.open(tmp_path / "out")) == by_source(Shard.open(tmp_path / "whole"))


def test_a_killed_run_goes_on_and_gives_the_same_features(photos: Path, tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from feature_store.backbones.backbone import PixelBackbone
        from feature_store.embedding import embed_source

        def die(done, total):
            if done >= 15:
                os.kill(os.getpid(), signal.SIGKILL)

        embed_source(sys.argv[1], PixelBackbone(size=4), sys.argv[2], batch_size=5, progress=die)
    """
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(script), str(photos), str(out)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert not out.exists()
    report = embed_source(photos, PixelBackbone(size=4), out)
    embed_source(photos, PixelBackbone(size=4), tmp_path / "whole")
    assert (report.resumed_from, report.records) == (15, 30)
    assert by_source(Shard.open(out)) == by_source(Shard.open(tmp_path / "whole"))


def test_doing_it_twice_equals_doing_it_once(photos: Path, tmp_path: Path) -> None:
    first = embed_source(photos, PixelBackbone(size=4), tmp_path / "out")
    version = Shard.open(tmp_path / "out").version
    again = embed_source(photos, PixelBackbone(size=4), tmp_path / "out")
    assert (again.records, again.skipped, again.resumed_from) == (first.records, first.skipped, 30)
    assert Shard.open(tmp_path / "out").version == version
    with pytest.raises(InvalidSetting, match="made from another source, backbone or class list"):
        embed_source(photos, PixelBackbone(size=8), tmp_path / "out")


def test_a_shard_of_other_images_under_the_same_names_is_not_taken_for_this_one(photos: Path, tmp_path: Path) -> None:
    """Two hospitals whose cameras count from 1, and one mistyped --out: the second would answer with the first's."""
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    embed_source(photos, PixelBackbone(size=4), tmp_path / "shard")
    for file in other.rglob("*.png"):
        file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(InvalidSetting, match="made from another source"):
        embed_source(other, PixelBackbone(size=4), tmp_path / "shard")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB in memory; skips where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("a full disk needs the right to mount one")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True, timeout=30)


def test_a_disk_that_is_full_at_any_step_is_said_and_the_same_call_goes_on(photos: Path, small_disk: Path) -> None:
    """The features were written through mapped memory, where the system ends a process that finds no room."""
    code = textwrap.dedent("""
        import os, shutil, sys
        from pathlib import Path
        from feature_store.backbones import load_backbone
        from feature_store.embedding import embed_source
        from feature_store.shard import Shard
        from labeler.errors import StorageFull

        photos, disk, backbone = Path(sys.argv[1]), Path(sys.argv[2]), load_backbone("pixels:16")
        refused = 0
        for left in range(0, 140, 4):
            out = disk / f"folder {left}" / "s.shard"
            out.parent.mkdir()
            with (disk / "filler").open("wb", buffering=0) as filler:
                filler.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - left * 1024))
            try:
                embed_source(photos, backbone, out, classes=["cat", "dog", "owl"], batch_size=10)
            except StorageFull as error:
                assert "make room" in str(error)
                refused += 1
            (disk / "filler").unlink()
            assert embed_source(photos, backbone, out, classes=["cat", "dog", "owl"], batch_size=10).records == 30
            Shard.open(out)
            shutil.rmtree(out.parent)
        print(refused)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(photos), str(small_disk)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 10 < int(done.stdout) < 35
