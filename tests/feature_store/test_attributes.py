"""Several labels per image: tables in CelebA's layout and as CSV files, and shards that hold what they say."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from feature_store.backbones.backbone import PixelBackbone
from feature_store.embedding import embed_source
from feature_store.same_images import find_same_images
from feature_store.shard import Shard, check_compatible, read_manifest
from feature_store.shard_writer import ShardWriter
from feature_store.sources import AttributeSource, PersonColumn, celeba_source, open_source, read_attributes
from labeler.errors import BadData, DamagedShard, IdenticalImages, InvalidSetting, LabelerError, MixedShards
from labeler.randomness import seeded_source
from tests.feature_store.conftest import write_pictures
from workers.embedder.shards import embed_images

NAMES = ("Bald", "Smiling", "Young")
TRUTH = {
    "000001.jpg": (1, 1, 0), "000002.jpg": (0, 0, 0), "000003.jpg": (0, 1, 1),
    "000004.jpg": (1, 0, 1), "000005.jpg": (0, 1, 0), "000006.jpg": (1, 1, 1),
}  # fmt: skip
SPLIT = {"000001.jpg": 0, "000002.jpg": 0, "000003.jpg": 0, "000004.jpg": 1, "000005.jpg": 2, "000006.jpg": 2}


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    """Six small pictures in the layout in which CelebA is downloaded."""
    folder = tmp_path / "celeba"
    write_pictures(folder / "img_align_celeba", TRUTH)
    lines = [str(len(TRUTH)), " ".join(NAMES) + " "]
    for name, row in TRUTH.items():
        lines.append(f"{name} " + " ".join(" 1" if has else "-1" for has in row))
    (folder / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    (folder / "list_eval_partition.txt").write_text("".join(f"{name} {part}\n" for name, part in SPLIT.items()))
    return folder


def _csv(folder: Path, *, no: str = "0") -> Path:
    path = folder / "table.csv"
    rows = [",".join((name, *("1" if has else no for has in row))) for name, row in TRUTH.items()]
    path.write_text("\n".join([",".join(("file", *NAMES)), *rows]) + "\n")
    return path


def _embedded(source: AttributeSource | Path, out: Path, **changes: object) -> Shard:
    embed_source(source, PixelBackbone(size=4), out, **changes)  # type: ignore[arg-type]
    return Shard.open(out)


def _said(shard: Shard) -> dict[str, tuple[int, ...]]:
    return {name: tuple(row) for name, row in zip(shard.sources, np.asarray(shard.labels).tolist(), strict=True)}


def test_celebas_own_layout_becomes_a_shard_with_every_attribute_of_every_image(celeba: Path, tmp_path: Path) -> None:
    shard = _embedded(celeba, tmp_path / "all.shard")
    assert shard.has_attributes
    assert shard.classes == NAMES
    assert _said(shard) == TRUTH
    assert shard.labels.dtype == np.int16
    assert "Bald" not in repr(shard)
    (celeba / "img_align_celeba").rename(celeba / "images")
    with pytest.raises(InvalidSetting, match="no folder 'img_align_celeba'"):
        open_source(celeba)


def test_a_split_has_the_images_that_celebas_list_puts_there(celeba: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("train", "valid", "test")):
        shard = _embedded(celeba_source(celeba, split=name), tmp_path / name)
        assert set(shard.sources) == {image for image, part in SPLIT.items() if part == number}
    with pytest.raises(InvalidSetting, match="train, valid, test"):
        celeba_source(celeba, split="validation")


@pytest.mark.parametrize("no", ["0", "-1"])
def test_a_csv_file_says_the_same_in_the_order_of_the_public_list(celeba: Path, tmp_path: Path, no: str) -> None:
    source = AttributeSource(celeba / "img_align_celeba", _csv(tmp_path, no=no))
    shard = _embedded(source, tmp_path / "two.shard", classes=("Young", "Bald"))
    assert shard.classes == ("Young", "Bald")
    assert _said(shard) == {name: (young, bald) for name, (bald, _, young) in TRUTH.items()}


def test_names_of_images_may_hold_whatever_ends_a_line(tmp_path: Path) -> None:
    """The table was cut into lines first, so that a quoted name was in two of them."""
    truth = {"a\nb.png": (1, 0, 0), "a\u2028b.png": (0, 1, 0), 'a"b,c.png': (0, 0, 1), "a\x0cb.png": (1, 1, 1)}
    write_pictures(tmp_path / "images", truth)
    with (tmp_path / "table.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["file", *NAMES])
        for name, row in truth.items():
            table.writerow([name, *row])
    shard = _embedded(AttributeSource(tmp_path / "images", tmp_path / "table.csv"), tmp_path / "s", classes=NAMES)
    assert _said(shard) == truth


def test_a_site_may_keep_the_whole_table_and_has_a_row_for_each_of_its_own_images(celeba: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("000002.jpg", "000006.jpg"):
        (celeba / "img_align_celeba" / name).rename(own / name)
    assert set(_said(_embedded(AttributeSource(own, _csv(tmp_path)), tmp_path / "own.shard"))) == {
        "000002.jpg", "000006.jpg",
    }  # fmt: skip
    (celeba / "img_align_celeba" / "000001.jpg").rename(own / "secret.jpg")
    source = AttributeSource(own, _csv(tmp_path))
    with pytest.raises(BadData, match="1 of 3 private images are not in the table") as refused:
        _embedded(source, tmp_path / "more.shard")
    assert "secret" not in str(refused.value)
    public = _embedded(source, tmp_path / "public.shard", public=True)
    assert _said(public)["secret.jpg"] == (-1, -1, -1)


def test_a_table_among_the_images_is_none_of_them(celeba: Path, tmp_path: Path) -> None:
    images = celeba / "img_align_celeba"
    source = AttributeSource(images, _csv(images))
    assert source.passed_over == ()
    assert _said(_embedded(source, tmp_path / "own.shard")).keys() == TRUTH.keys()
    (tmp_path / "alone").mkdir()
    with pytest.raises(BadData, match="holds no image"):
        AttributeSource(tmp_path / "alone", _csv(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("file,A,B\nsecret.jpg,1,0\nx.jpg,1\n", 3, "1 values for 2 attributes"),
        ("file,A,B\nsecret.jpg,1,yes\n", 2, "1 and 0, or 1 and -1"),
        ("file,A,B\nx.jpg,1,0\nsecret.jpg,1,-1\n", 3, "one way in the whole file"),
        ("file,A,B\nsecret.jpg,1,0\n\nsecret.jpg,0,0\n", 4, "line 2 is about already"),
        ("file,A,B\n,1,0\n", 2, "no image"),
        ("file;A;B\nsecret.jpg;1;0\n", 1, "separated by semicolons; save it with commas"),
        ("name,A,B\nsecret.jpg,1,0\n", 1, "first heading"),
        ('file,A,B\n"secret.jpg,1,0\n', 2, "no comma-separated text"),
    ],
)
def test_a_malformed_csv_is_refused_by_its_line_and_no_image_is_named(
    tmp_path: Path, text: str, line: int, what: str
) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(BadData, match=what) as refused:
        read_attributes(tmp_path / "table.csv", frozenset({"secret.jpg"}))
    assert f"line {line}:" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Bald Young\nsecret.jpg 1 1\n", "line 1: the number of images"),
        ("2\nBald Young\nsecret.jpg 1 -1\n", "states 2 images in its first line and has 1"),
        ("1\nBald Young\nsecret.jpg 1 -1 1\n", "line 3: 3 values for 2 attributes"),
        ("1\nBald Bald\nsecret.jpg 1 -1\n", "all different"),
        ("9" * 5000 + "\nBald Young\nsecret.jpg 1 -1\n", "and has 1; it was cut short"),
        ("", "line 1: the number of images"),
    ],
)
def test_a_malformed_table_of_celebas_kind_is_refused_likewise(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "list_attr_celeba.txt").write_text(text)
    with pytest.raises(BadData, match=what) as refused:
        read_attributes(tmp_path / "list_attr_celeba.txt", frozenset({"secret.jpg"}))
    assert "secret" not in str(refused.value)


def test_a_table_that_is_missing_and_an_attribute_that_it_lacks_are_refused(celeba: Path, tmp_path: Path) -> None:
    images = celeba / "img_align_celeba"
    with pytest.raises(InvalidSetting, match=r"'nowhere\.csv' cannot be read"):
        AttributeSource(images, tmp_path / "nowhere.csv")
    with pytest.raises(BadData, match="no attribute 'Happy'"):
        _embedded(celeba, tmp_path / "x.shard", classes=("Happy", "Bald"))
    (celeba / "list_eval_partition.txt").write_text("000001.jpg 7\n")
    with pytest.raises(BadData, match="line 1: the name of an image and 0, 1 or 2"):
        celeba_source(celeba, split="train")
    with pytest.raises(InvalidSetting, match="--split goes with a table"):
        embed_images(tmp_path, "pixels:4", tmp_path / "y.shard", split="train")


def test_people_bounds_and_equal_images_go_on_as_they_are(celeba: Path, tmp_path: Path) -> None:
    images = celeba / "img_align_celeba"
    rows = {(("ann/" if name < "000003" else "bob/") + name): row for name, row in TRUTH.items()}
    for name in rows:
        (images / name).parent.mkdir(exist_ok=True)
        (images / Path(name).name).rename(images / name)
    table = tmp_path / "table.csv"
    lines = [",".join((name, *map(str, row))) for name, row in rows.items()]
    table.write_text("\n".join([",".join(("file", *NAMES)), *lines]))
    people = PersonColumn(level=1)
    shard = _embedded(AttributeSource(images, table), tmp_path / "a.shard", persons=people, max_records=6)
    assert shard.knows_persons
    assert shard.max_records == 6
    assert len({tuple(row) for row in np.asarray(shard.persons).tolist()}) == 2
    assert not find_same_images(shard)
    (images / "bob" / "twin.jpg").write_bytes((images / "ann" / "000001.jpg").read_bytes())
    table.write_text(table.read_text() + "\nbob/twin.jpg,0,1,0\n")
    with pytest.raises(IdenticalImages) as refused:
        _embedded(AttributeSource(images, table), tmp_path / "b.shard", duplicates="refuse")
    assert refused.value.groups == ((("ann/000001.jpg", "bob/twin.jpg"), "under different labels"),)


def test_the_same_images_with_other_attributes_are_another_job(celeba: Path, tmp_path: Path) -> None:
    table, images = _csv(tmp_path), celeba / "img_align_celeba"
    _embedded(AttributeSource(images, table), tmp_path / "a.shard")
    _embedded(AttributeSource(images, table), tmp_path / "a.shard")  # finished, and left as it is
    table.write_text(table.read_text().replace("000002.jpg,0,0,0", "000002.jpg,0,0,1"))
    with pytest.raises(InvalidSetting, match="another source"):
        _embedded(AttributeSource(images, table), tmp_path / "a.shard")


def _written(path: Path, *, attributes: bool, public: bool = False) -> Shard:
    source = seeded_source(b"golden")
    labels = np.array([[1, 0], [0, 0], [1, 1]] if attributes else [0, 1, 1])
    with ShardWriter(
        path,
        classes=("a", "b"),
        fingerprint="f",
        dimension=2,
        public=public,
        random_bytes=source.bytes,
        attributes=attributes,
    ) as writer:
        writer.append(np.array([[1.0, 0], [0, 1.0], [1.0, 1.0]]), labels, ["x", "y", "z"])
        writer.finish()
    return Shard.open(path)


def test_attributes_that_are_no_attributes_are_refused(tmp_path: Path) -> None:
    private = [([[1, 2]], False), ([[1, -1]], False), ([[-1, -1]], False), ([[1, 0, 1]], False), ([1], False)]
    for labels, public in [*private, ([[1, -1]], True)]:
        out = tmp_path / f"public {public}"
        with (
            ShardWriter(
                out, classes=("a", "b"), fingerprint="f", dimension=2, public=public, attributes=True
            ) as writer,
            pytest.raises(LabelerError, match="-1 for all of them" if public else None),
        ):
            writer.append(np.ones((1, 2)), np.array(labels), ["x"])
    shard = _written(tmp_path / "damaged", attributes=True)
    np.save(shard.path / "labels.npy", np.array([0, 1, 1], dtype=np.int16))
    manifest = read_manifest(shard.path)
    assert manifest.attributes
    with pytest.raises(DamagedShard):
        Shard.open(shard.path)


def test_attributes_and_classes_do_not_mix_but_public_images_without_labels_can_be_asked_about(tmp_path: Path) -> None:
    attributes, classes = _written(tmp_path / "a", attributes=True), _written(tmp_path / "c", attributes=False)
    unlabelled = _written(tmp_path / "p", attributes=False, public=True)
    scored = _written(tmp_path / "q", attributes=True, public=True)
    for order in ([attributes, classes], [classes, attributes], [unlabelled, attributes, classes], [classes, scored]):
        with pytest.raises(MixedShards):
            check_compatible(order)
    check_compatible([attributes, unlabelled, scored])
    check_compatible([unlabelled, scored])


def test_the_command_takes_a_table_or_celebas_folder_and_tells_its_attributes(celeba: Path, tmp_path: Path) -> None:
    own, out = celeba / "img_align_celeba", tmp_path / "csv.shard"
    told = embed_images(own, "pixels:4", out, attributes=_csv(tmp_path), classes=("Young", "Bald"))
    assert told["classes"] == ["Young", "Bald"]
    assert told["records"] == 6
    told = embed_images(celeba, "pixels:4", tmp_path / "train.shard", split="train")
    assert (told["records"], told["classes"]) == (3, list(NAMES))
    assert Shard.open(tmp_path / "train.shard").has_attributes
    with pytest.raises(InvalidSetting, match="goes with a folder of images"):
        embed_images(tmp_path / "table.csv", "pixels:4", tmp_path / "x.shard", attributes=tmp_path / "table.csv")
