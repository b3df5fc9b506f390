"""Embedding a source: labels by name, skipped images listed, full passes, and a killed run that goes on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones import load_backbone, parse_spec
from feature_store.backbones.backbone import PixelBackbone
from feature_store.backbones.network import NetworkBackbone, load_timm
from feature_store.decode import Skipped
from feature_store.embedding import Duplicates, EmbedReport, LoadedImage, embed_source, loaded_batches
from feature_store.rows import quantize
from feature_store.shard import MARK_NAME, Shard, check_compatible, claim
from feature_store.shard_writer import erase_deleted
from feature_store.sources import open_source
from labeler.errors import BadData, InvalidSetting, NoUsableImage, OutputInUse, UnreadableFile
from labeler.system.faults import listening
from tests.feature_store.conftest import write_pictures


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """30 images of 3 classes."""
    names = [f"{name}/{number}.png" for name in ("cat", "dog", "owl") for number in range(10)]
    return write_pictures(tmp_path / "photos", names)


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


def test_private_images_without_a_label_of_the_class_list_are_refused_unnamed(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no label"):
        embed_source(photos / "cat", PixelBackbone(size=4), tmp_path / "out", classes=["cat", "dog"])
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
    assert report.notes == (
        "These public images have labels outside the class list, which score nothing: owl.",
        "Labels of these public images are cat, dog. They only score tasks that have classes of these names; no vote "
        "and no query sees them.",
    )


def test_unreadable_images_are_listed_and_skipped(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "3.png").write_bytes(b"no image")
    (photos / "dog" / "9.png").write_bytes((photos / "dog" / "9.png").read_bytes()[:60])
    (photos / "readme.txt").write_text("hello")
    report = embed_source(photos, PixelBackbone(size=4), tmp_path / "out", batch_size=4)
    assert report.records == 28
    assert [each.source for each in report.skipped] == ["cat/3.png", "dog/9.png"]
    assert [(one.source, one.reason) for one in report.passed_over] == [("readme.txt", "a text")]
    assert Skipped("cat/3.png", "not an image of a known format, but a text") in report.skipped
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


@pytest.mark.parametrize("is_folder", [True, False])
def test_numbers_as_labels_are_never_taken_for_places_in_the_class_list(tmp_path: Path, is_folder: bool) -> None:
    source = tmp_path / "set" if is_folder else tmp_path / "set.parquet"
    if is_folder:
        for number, label in enumerate((1, 2, 2)):
            (source / str(label)).mkdir(parents=True, exist_ok=True)
            (source / str(label) / f"{number}.png").write_bytes(_png(number))
    else:
        pq.write_table(pa.table({"image": [_png(0), _png(1), _png(2)], "label": [1, 2, 2]}), source)
    with pytest.raises(BadData, match=r"A number is no place in the list.*--classes 1,2"):
        embed_source(source, PixelBackbone(size=4), tmp_path / "out", classes=["benign", "malignant", "normal"])
    assert not (tmp_path / "out").exists()
    embed_source(source, PixelBackbone(size=4), tmp_path / "named", classes=["1", "2", "3"], duplicates="keep-all")
    assert sorted(np.asarray(Shard.open(tmp_path / "named").labels)) == [0, 1, 1]
    report = embed_source(source, PixelBackbone(size=4), tmp_path / "p", classes=["benign", "ill"], public=True)
    assert set(np.asarray(Shard.open(tmp_path / "p").labels).tolist()) == {-1}
    assert "score nothing: 1, 2. A number is no place" in report.notes[0]


def _png(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def test_minus_one_of_hugging_face_is_no_label(tmp_path: Path) -> None:
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.binary()), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    columns = [[_png(0), _png(1), _png(2)], [-1, 1, -1]]
    pq.write_table(pa.table(columns, schema=schema), tmp_path / "hf.parquet")
    embed_source(tmp_path / "hf.parquet", PixelBackbone(size=4), tmp_path / "p", public=True)
    assert np.asarray(Shard.open(tmp_path / "p").labels).tolist() == [-1, 1, -1]
    with pytest.raises(BadData, match=r"2 of 3 private .* 2 have none at all \(row 0, 2, counted from 0\)"):
        embed_source(tmp_path / "hf.parquet", PixelBackbone(size=4), tmp_path / "out", classes=["cat", "dog"])


COMPOSED, DECOMPOSED = "m\u00e9lanome", "me\u0301lanome"


@pytest.mark.parametrize(("folder", "name"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_a_class_is_one_however_its_letters_are_composed_and_is_written_as_given(
    tmp_path: Path, folder: str, name: str
) -> None:
    for place, label in enumerate((folder, "nevus")):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.png").write_bytes(_png(place))
    embed_source(tmp_path / "set", PixelBackbone(size=4), tmp_path / "out", classes=["nevus", name])
    shard = Shard.open(tmp_path / "out")
    assert shard.classes == ("nevus", name)
    found = dict(zip(shard.sources, np.asarray(shard.labels).tolist(), strict=True))
    assert found == {f"{folder}/1.png": 1, "nevus/1.png": 0}
    # Shards of two sites that wrote the list differently go together; a list of both forms is no list.
    embed_source(tmp_path / "set", PixelBackbone(size=4), tmp_path / "other", classes=["nevus", folder])
    check_compatible([shard, Shard.open(tmp_path / "other")])
    with pytest.raises(InvalidSetting, match="different from each other"):
        embed_source(tmp_path / "set", PixelBackbone(size=4), tmp_path / "no", classes=["nevus", name, folder])


def test_folders_of_public_images_are_no_class_list_and_score_by_their_names(tmp_path: Path) -> None:
    for place, label in enumerate(("2019", COMPOSED, "nevus")):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.png").write_bytes(_png(place))
    embed_source(tmp_path / "set", PixelBackbone(size=4), tmp_path / "public", public=True)
    private = tmp_path / "set"
    (private / "2019" / "1.png").unlink()
    (private / "2019").rmdir()
    embed_source(private, PixelBackbone(size=4), tmp_path / "out", classes=["nevus", DECOMPOSED])
    public = Shard.open(tmp_path / "public")
    check_compatible([Shard.open(tmp_path / "out"), public])
    assert public.labels_as(["nevus", DECOMPOSED]).tolist() == [-1, 1, 0]
    assert public.labels_as(["flu", "cold"]).tolist() == [-1, -1, -1]


def test_an_id_that_is_missing_or_there_twice_is_refused_by_its_row(tmp_path: Path) -> None:
    for ids, said in (
        (["a", "b", "a"], "row 2 has the id of row 0"),
        (["a", None, "c"], "row 1 has an empty id"),
        (["a", "", "c"], "row 1 has an empty id"),
        ([b"a", b"b", b"c"], "must hold text or whole numbers"),
    ):
        pq.write_table(pa.table({"image": [_png(0), _png(1), _png(2)], "id": ids}), tmp_path / "x.parquet")
        with pytest.raises(BadData, match=said):
            open_source(tmp_path / "x.parquet")
    names = [" a#1 ", DECOMPOSED, "c+%.png"]
    pq.write_table(pa.table({"image": [_png(0), _png(1), _png(2)], "id": names}), tmp_path / "y.parquet")
    assert list(open_source(tmp_path / "y.parquet").names) == names


@pytest.mark.process
def test_a_killed_run_goes_on_and_gives_the_same_features(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "0.png").write_bytes(b"no image")
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
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    assert not out.exists()
    calls: list[tuple[int, int]] = []
    report = embed_source(photos, PixelBackbone(size=4), out, progress=lambda *now: calls.append(now))
    embed_source(photos, PixelBackbone(size=4), tmp_path / "whole")
    assert 15 <= report.resumed_from < 30
    assert calls[0][0] > report.resumed_from
    assert calls[-1] == (30, 30)
    assert (report.records, len(report.skipped)) == (29, 1)
    assert by_source(Shard.open(out)) == by_source(Shard.open(tmp_path / "whole"))


def test_doing_it_twice_equals_doing_it_once(photos: Path, tmp_path: Path) -> None:
    first = embed_source(photos, PixelBackbone(size=4), tmp_path / "out")
    version = Shard.open(tmp_path / "out").version
    again = embed_source(photos, PixelBackbone(size=4), tmp_path / "out")
    assert (again.records, again.skipped, again.resumed_from) == (first.records, first.skipped, 30)
    assert Shard.open(tmp_path / "out").version == version
    with pytest.raises(InvalidSetting, match="made with another backbone; choose another output"):
        embed_source(photos, PixelBackbone(size=8), tmp_path / "out")
    with pytest.raises(InvalidSetting, match="made with another class list, or with its names in another order"):
        embed_source(photos, PixelBackbone(size=4), tmp_path / "out", classes=["owl", "dog", "cat"])
    with pytest.raises(InvalidSetting, match="made of private images"):
        embed_source(photos, PixelBackbone(size=4), tmp_path / "out", public=True)
    (photos / "cat/0.png").rename(photos / "dog/moved.png")
    with pytest.raises(InvalidSetting, match="made from another source: files, labels or people are others"):
        embed_source(photos, PixelBackbone(size=4), tmp_path / "out")


@pytest.mark.parametrize("duplicates", ["keep-all", "refuse"])
def test_a_second_embed_does_not_pass_over_copies_that_are_to_be_kept_or_refused(
    photos: Path, tmp_path: Path, duplicates: Duplicates
) -> None:
    """The shard was left as it was, without them, and said to be done."""
    shutil.copy(photos / "cat/0.png", photos / "cat/copy.png")
    assert _embed_again(photos, tmp_path / "out").records == 30
    with pytest.raises(InvalidSetting, match=r"without a record of some files.*delete it first"):
        _embed_again(photos, tmp_path / "out", duplicates=duplicates)
    assert _embed_again(photos, tmp_path / "out").records == 30


def test_a_shard_of_other_images_under_the_same_names_is_not_taken_for_this_one(photos: Path, tmp_path: Path) -> None:
    """Two hospitals whose cameras count from 1, and one mistyped --out: the second would answer with the first's."""
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    embed_source(photos, PixelBackbone(size=4), tmp_path / "shard")
    for file in other.rglob("*.png"):
        file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(InvalidSetting, match="made from another source"):
        embed_source(other, PixelBackbone(size=4), tmp_path / "shard")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read, which Linux has")
@pytest.mark.parametrize("count", [1, 30])
def test_files_that_became_unreadable_end_a_second_embed_that_changes_nothing(
    photos: Path, tmp_path: Path, count: int
) -> None:
    embed_source(photos, PixelBackbone(size=4), tmp_path / "shard")
    before = Shard.open(tmp_path / "shard").version
    for file in sorted(photos.rglob("*.png"))[:count]:
        file.unlink()
        file.symlink_to("/proc/self/mem")
    with pytest.raises(UnreadableFile, match=r"'cat/0.png' cannot be read now .*Nothing was changed; let this user"):
        embed_source(photos, PixelBackbone(size=4), tmp_path / "shard")
    assert Shard.open(tmp_path / "shard").version == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB in memory; skips where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("a full disk needs the right to mount one")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True, timeout=240)


@pytest.mark.process
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
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 10 < int(done.stdout) < 35


TRANSFORM = {"resize": 36, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture
def jpegs(tmp_path: Path) -> Path:
    """20 photographs of 2 classes, three of which cannot be read."""
    names = [f"{name}/{number}.jpg" for name in ("cat", "dog") for number in range(10)]
    write_pictures(tmp_path / "jpegs", names, size=(90, 70))
    for name in ("cat/0", "cat/3", "dog/9"):
        (tmp_path / "jpegs" / f"{name}.jpg").write_bytes(b"no image")
    return tmp_path / "jpegs"


def network(weights: Path, **settings: Any) -> NetworkBackbone:
    fields = {"kind": "timm", "architecture": "test_efficientnet", "weights": weights, "transform": TRANSFORM}
    return load_timm(parse_spec(fields), device="cpu", half=None, **settings)


def test_passes_are_full_whatever_batch_is_asked_for_and_whatever_cannot_be_read(
    weights: Path, jpegs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass costs the same however many images it has: 17 images are 3 passes of 8, not one for every two images."""
    passed: list[int] = []
    run = NetworkBackbone._pass

    def counted(self: NetworkBackbone, block: NDArray[np.uint8]) -> NDArray[np.float32]:
        passed.append(len(block))
        return run(self, block)

    monkeypatch.setattr(NetworkBackbone, "_pass", counted)
    report = embed_source(jpegs, network(weights, batch_size=8), tmp_path / "out", batch_size=2)
    assert (report.records, len(report.skipped)) == (17, 3)
    assert passed == [8, 8, 1]


def test_features_are_the_same_however_many_threads_and_whatever_batch(
    weights: Path, jpegs: Path, tmp_path: Path
) -> None:
    backbone = network(weights, batch_size=8)
    embed_source(jpegs, backbone, tmp_path / "one", threads=1)
    embed_source(jpegs, backbone, tmp_path / "five", threads=5, batch_size=16)
    one, five = Shard.open(tmp_path / "one"), Shard.open(tmp_path / "five")
    rows = [
        {name: row.tobytes() for name, row in zip(shard.sources, np.asarray(shard.features), strict=True)}
        for shard in (one, five)
    ]
    assert rows[0] == rows[1]


def test_images_are_loaded_ahead_in_order_and_only_so_far() -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def load(index: int) -> LoadedImage:
        with lock:
            begun.append(index)
        return LoadedImage(index, None if index % 5 == 0 else np.zeros(1, np.uint8), None, "")

    batches = loaded_batches(load, range(1000), batch_size=10, threads=3)
    first = next(batches)
    assert [item.index for item in first] == list(range(13))
    assert sum(item.pixels is not None for item in first) == 10
    assert len(begun) <= 13 + 2 * 10 + 4 * 8
    rest = [item.index for batch in batches for item in batch]
    assert rest == list(range(13, 1000))


# A private shard that is brought up to date with its source


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in each forward pass."""
    counts: list[int] = []
    embed = PixelBackbone.embed_prepared

    def counted(self: PixelBackbone, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        counts.append(len(prepared))
        return embed(self, prepared)

    monkeypatch.setattr(PixelBackbone, "embed_prepared", counted)
    return counts


def updated(photos: Path, out: Path, **more: Any) -> EmbedReport:
    return embed_source(photos, PixelBackbone(size=4), out, classes=["cat", "dog", "owl"], update=True, **more)


def ids_by_source(out: Path) -> dict[str, int]:
    shard = Shard.open(out)
    return {shard.sources[row]: int(shard.record_ids[row]) for row in shard.rows}


def test_an_update_embeds_what_is_new_and_equals_a_shard_made_from_nothing(
    photos: Path, tmp_path: Path, passed: list[int]
) -> None:
    shutil.copy(photos / "cat/0.png", photos / "cat/again.png")
    shutil.copy(photos / "dog/9.png", photos / "owl/wrong.png")
    updated(photos, tmp_path / "out", max_records=100)
    claim(tmp_path / "out", agent_id="a", journal="1" * 64)
    before = ids_by_source(tmp_path / "out")
    passed.clear()
    (photos / "cat/0.png").unlink()  # its copy becomes the record
    (photos / "owl/wrong.png").unlink()  # what it contradicted is a record again
    (photos / "cat/1.png").rename(photos / "cat/moved.png")
    (photos / "cat/2.png").rename(photos / "dog/relabelled.png")
    write_pictures(photos, ["owl/new.png"], size=(7, 7))
    updated(photos, tmp_path / "out")
    updated(photos, tmp_path / "whole")
    shard, after = Shard.open(tmp_path / "out"), ids_by_source(tmp_path / "out")
    assert by_source(shard) == by_source(Shard.open(tmp_path / "whole"))
    assert sum(passed) == 2 + len(shard), "the new one, and one of which no record was kept; then the whole"
    stays = before.keys() - {"cat/0.png", "cat/1.png", "cat/2.png"}
    assert {name: after[name] for name in stays} == {name: before[name] for name in stays}
    assert (after["cat/moved.png"], after["cat/again.png"]) == (before["cat/1.png"], before["cat/0.png"])
    assert after["dog/relabelled.png"] not in before.values(), "another label makes it another record"
    assert (list(shard.record_ids), shard.max_records) == (sorted(shard.record_ids), 100)
    assert (tmp_path / "out" / MARK_NAME).exists()
    assert {file.name for file in (tmp_path / "out").glob("*.npy")} == {
        f"{name}.1.npy" for name in ("features", "labels", "record_ids", "image_digests")
    }


def test_what_was_embedded_before_a_kill_is_used_though_the_folder_has_changed(
    photos: Path, tmp_path: Path, passed: list[int]
) -> None:
    class Killed(BaseException):
        """The process is gone."""

    def die(done: int, total: int) -> None:
        if done >= 10:
            raise Killed

    for number in range(2):
        with pytest.raises(Killed):
            updated(photos, tmp_path / "out", batch_size=5, progress=die)
        write_pictures(photos, [f"cat/a{number}.png"], size=(6, 5 + number))
    report = updated(photos, tmp_path / "out")
    assert (report.records, sum(passed)) == (32, 32)
    assert [file.name for file in tmp_path.iterdir() if ".writing" in file.name] == []


@pytest.mark.parametrize("death", range(6))
def test_a_crash_at_any_step_of_an_update_leaves_the_shard_of_before_or_of_after(
    photos: Path, tmp_path: Path, passed: list[int], death: int
) -> None:
    class Killed(BaseException):
        """The process is gone."""

    updated(photos, tmp_path / "out")
    before = ids_by_source(tmp_path / "out")
    write_pictures(photos, ["owl/new.png"], size=(7, 7))
    passed.clear()
    steps = count()

    def die(_: str) -> None:
        if next(steps) == death:
            raise Killed

    with listening(die), contextlib.suppress(Killed):
        updated(photos, tmp_path / "out")
    found = ids_by_source(tmp_path / "out")
    assert found == before or found.keys() == before.keys() | {"owl/new.png"}
    updated(photos, tmp_path / "out")
    assert ids_by_source(tmp_path / "out").items() > before.items()
    assert sum(passed) == (2 if death == 0 else 1), "what was not durable yet is embedded again"


def test_a_deletion_during_an_update_is_not_undone(photos: Path, tmp_path: Path, passed: list[int]) -> None:
    updated(photos, tmp_path / "out")
    write_pictures(photos, ["owl/new.png"], size=(7, 7))
    passed.clear()

    def delete(done: int, total: int) -> None:
        if done == total:
            (photos / "cat/3.png").unlink()
            shard = Shard.open(tmp_path / "out")
            shard.delete(shard.record_ids[[shard.sources.index("cat/3.png")]])
            erase_deleted(tmp_path / "out")

    with pytest.raises(OutputInUse, match="give the same command again"):
        updated(photos, tmp_path / "out", progress=delete)
    assert len(Shard.open(tmp_path / "out")) == 29
    updated(photos, tmp_path / "out")
    assert ids_by_source(tmp_path / "out").keys() >= {"owl/new.png"}
    assert "cat/3.png" not in ids_by_source(tmp_path / "out")
    assert sum(passed) == 1


@pytest.mark.parametrize("change", [{"classes": ["owl", "dog", "cat"]}, {"max_records": 99}, {"size": 8}])
def test_a_shard_is_not_brought_up_to_date_under_other_settings(
    photos: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"classes": ["cat", "dog", "owl"], "max_records": 50}
    embed_source(photos, PixelBackbone(size=4), tmp_path / "out", **settings)
    settings |= {name: value for name, value in change.items() if name != "size"}
    with pytest.raises(InvalidSetting, match="another backbone, class list, bound on records or site key"):
        embed_source(photos, PixelBackbone(size=change.get("size", 4)), tmp_path / "out", update=True, **settings)
    assert len(Shard.open(tmp_path / "out")) == 30


def _embed_again(photos: Path, out: Path, **more: Any) -> EmbedReport:
    return embed_source(photos, PixelBackbone(size=4), out, classes=["cat", "dog", "owl"], **more)


@pytest.mark.parametrize("public", [True, False])
def test_a_mended_image_is_embedded_by_the_next_call(photos: Path, tmp_path: Path, public: bool) -> None:
    damaged = next(photos.rglob("*damaged*"), None) or sorted((photos / "cat").iterdir())[0]
    damaged.write_bytes(b"no image")
    first = _embed_again(photos, tmp_path / "out", public=public)
    assert [one.source for one in first.skipped] == [damaged.relative_to(photos).as_posix()]
    before = by_source(Shard.open(tmp_path / "out"))
    Image.new("L", (9, 9), 77).save(damaged, "PNG")
    second = _embed_again(photos, tmp_path / "out", public=public)
    assert (second.records, second.skipped) == (first.records + 1, ())
    after = by_source(Shard.open(tmp_path / "out"))
    whole = _embed_again(photos, tmp_path / "whole", public=public)
    assert whole.records == second.records
    assert by_source(Shard.open(tmp_path / "whole")) == after
    assert before.items() <= after.items()
    version = Shard.open(tmp_path / "out").version
    assert _embed_again(photos, tmp_path / "out", public=public).records == second.records
    assert Shard.open(tmp_path / "out").version == version


def test_public_images_that_changed_in_place_are_embedded_again_with_their_pictures(
    photos: Path, tmp_path: Path
) -> None:
    _embed_again(photos, tmp_path / "out", public=True)
    for number, file in enumerate(sorted(photos.rglob("*.png"))):
        before = file.stat()
        Image.new("L", (9, 9), number).save(file, "PNG")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    _embed_again(photos, tmp_path / "out", public=True)
    _embed_again(photos, tmp_path / "whole", public=True)
    ours, whole = Shard.open(tmp_path / "out"), Shard.open(tmp_path / "whole")
    assert by_source(ours) == by_source(whole)
    assert list(ours.thumbnails(ours.record_ids).values()) == list(whole.thumbnails(whole.record_ids).values())


def test_images_that_change_while_a_run_is_interrupted_are_embedded_as_they_are(photos: Path, tmp_path: Path) -> None:
    calls = 0

    def stop(done: int, _: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _embed_again(photos, tmp_path / "out", batch_size=5, progress=stop)
    Image.new("L", (9, 9), 77).save(sorted((photos / "cat").iterdir())[0], "PNG")
    _embed_again(photos, tmp_path / "out", batch_size=5)
    _embed_again(photos, tmp_path / "whole")
    assert by_source(Shard.open(tmp_path / "out")) == by_source(Shard.open(tmp_path / "whole"))


@pytest.mark.parametrize("public", [True, False])
def test_where_no_image_can_be_read_each_is_listed_and_mending_one_is_enough(tmp_path: Path, public: bool) -> None:
    photos = tmp_path / "photos"
    for name in ("cat/a.png", "cat/b.png", "dog/c.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" if "a.png" in name else b"")
    with pytest.raises(NoUsableImage, match="no image of it can be used") as caught:
        _embed_again(photos, tmp_path / "out", public=public)
    assert [name for name, _ in caught.value.left_out] == ["cat/a.png", "cat/b.png", "dog/c.png"]
    assert "git lfs pull" in caught.value.left_out[0][1]
    told = str(caught.value)
    assert ("2 an empty file; 1 a pointer of Git LFS" in told) is public
    assert public or not any(character.isdigit() for character in told), "an agent logs it"
    Image.new("L", (9, 9), 77).save(photos / "cat/a.png")
    report = _embed_again(photos, tmp_path / "out", public=public)
    assert (report.records, len(report.skipped)) == (1, 2)


def test_a_changed_source_does_not_bring_deleted_records_back(photos: Path, tmp_path: Path) -> None:
    _embed_again(photos, tmp_path / "out")
    shard = Shard.open(tmp_path / "out")
    shard.delete(shard.record_ids[:1])
    version = shard.version
    Image.new("L", (9, 9), 77).save(sorted((photos / "cat").iterdir())[0], "PNG")
    with pytest.raises(InvalidSetting, match="records of it were deleted"):
        _embed_again(photos, tmp_path / "out")
    assert Shard.open(tmp_path / "out").version == version


@pytest.mark.parametrize("public", [True, False])
def test_what_is_left_out_is_said_as_it_is_today_by_a_second_embed(photos: Path, tmp_path: Path, public: bool) -> None:
    """No image changed, so the shard was left as it was, and what else lay in the folder was said by nobody."""
    (photos / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (photos / "old.cr2").write_bytes(b"II*\0")
    first = _embed_again(photos, tmp_path / "out", public=public)
    ids = Shard.open(tmp_path / "out").record_ids.tolist()
    (photos / "old.cr2").unlink()
    (photos / "dog" / "camera.nef").write_bytes(b"II*\0")
    (photos / "cat" / "broken.png").write_bytes(b"<html>no such page</html>")
    second = _embed_again(photos, tmp_path / "out", public=public)
    assert {one.source for one in first.skipped} == {"old.cr2", "cat/broken.png"}
    assert {one.source: one.reason.split(";")[0] for one in second.skipped} == {
        "dog/camera.nef": "a camera's raw file",
        "cat/broken.png": "a web page and no image",
    }
    shard = Shard.open(tmp_path / "out")
    assert (shard.skipped, second.records) == (second.skipped, first.records)
    assert public or sorted(shard.record_ids) == sorted(ids)
    assert _embed_again(photos, tmp_path / "out", public=public).skipped == second.skipped


def test_a_copy_that_became_a_copy_of_another_class_is_a_contradiction_after_a_second_embed(
    photos: Path, tmp_path: Path
) -> None:
    """The copy has no record of its own, and its new bytes are known: so the record that it contradicts stayed."""
    shutil.copy(photos / "cat/0.png", photos / "cat/copy.png")
    assert _embed_again(photos, tmp_path / "out").records == 30
    shutil.copy(photos / "dog/0.png", photos / "cat/copy.png")
    second = _embed_again(photos, tmp_path / "out")
    assert (second.records, second.contradictions) == (29, 2)
    assert "dog/0.png" not in Shard.open(tmp_path / "out").sources
    whole = _embed_again(photos, tmp_path / "whole")
    assert by_source(Shard.open(tmp_path / "out")) == by_source(Shard.open(whole.path))
    assert _embed_again(photos, tmp_path / "out").records == 29
