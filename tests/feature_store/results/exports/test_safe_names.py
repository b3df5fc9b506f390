"""Names in exports: nothing is written elsewhere, no two share a name, and every image and class is found again."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from feature_store.results import exports
from feature_store.results.exports import ExportOrder, export_images
from feature_store.results.image_labels import ImageStamp, image_label_table
from labeler.errors import BadData, InvalidSetting

CLASSES = (
    "a/b", "a\\b", "a_b", "A_B", "a_b-2", "\ufb01sh", "fish", "caf\u00e9", "cafe\u0301", "CON", "con", "nul.txt",
    "com1 .x", "..", ".", "", " ", "-rf", ".hidden", "x" * 300, "x" * 300 + "y", "\u00e4" * 200, "\u00e4" * 201, "end.",
    "end ", "end", "labels.csv", "line\nbreak", "line\rbreak", "C:", "/", "/tmp/elsewhere",
    "stra\u00dfe", "STRASSE", "~",
)  # fmt: skip
"""Names that meet on some system, that mean something else there, or that are too long for a file."""


def table_of(classes: tuple[str, ...], sources: list[str]) -> pa.Table:
    """One image after the other has one class after the other."""
    stamp = ImageStamp(
        task_digest="d" * 64, job_id="job-1", classes=classes, privacy={"delta": 1e-5, "instance": {"epsilon": 0.5}},
        is_seeded=False, created_at="2026-01-02T03:04:05+00:00",
    )  # fmt: skip
    probabilities = np.eye(len(classes))[np.arange(len(sources)) % len(classes)]
    return image_label_table(
        stamp, sources=sources, probabilities=probabilities, asked=np.zeros(len(sources), np.bool_)
    )


def pictures(root: Path, names: list[str]) -> None:
    """A picture under each name, of a color of its own."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number // 256, number % 256, 7)).save(path, "PNG")


def number_in(path: Path) -> int:
    """Return which of `pictures` a file is."""
    red, green, _ = Image.open(path).convert("RGB").getpixel((0, 0))  # type: ignore[misc]
    return int(red) * 256 + int(green)


def read_back(out: Path) -> dict[int, str]:
    """The class of each picture, as torchvision finds it and NAMES_FILE names it."""
    torchvision = pytest.importorskip("torchvision.datasets")
    with (out / "labels.csv").open(newline="", encoding="utf-8") as file:
        true = {row["file_name"]: row["label"] for row in csv.DictReader(file)}
    data = torchvision.ImageFolder(str(out))
    assert len(data) == len(true)
    found: dict[int, str] = {}
    folders: dict[int, set[str]] = {}
    for path, label in data.samples:
        name = Path(path).relative_to(out).as_posix()
        found[number_in(Path(path))] = true[name]
        folders.setdefault(label, set()).add(true[name])
    assert all(len(names) == 1 for names in folders.values())
    return found


@pytest.mark.parametrize("copy", [False, True])
def test_classes_of_every_name_have_folders_of_their_own_and_keep_their_names(tmp_path: Path, copy: bool) -> None:
    sources = [f"{number}.png" for number in range(2 * len(CLASSES))]
    pictures(tmp_path / "images", sources)
    before = set(tmp_path.iterdir())
    out = export_images(
        "image-folder", ExportOrder(table_of(CLASSES, sources), tmp_path / "out", tmp_path / "images", "", copy)
    )
    assert read_back(out) == {number: CLASSES[number % len(CLASSES)] for number in range(len(sources))}
    folders = [path.name for path in out.iterdir() if path.is_dir()]
    assert len(folders) == len(CLASSES)
    assert max(len(name.encode()) for name in folders) <= 255
    # No two of them meet on a system that knows neither case nor composition.
    assert len({unicodedata.normalize("NFKC", name).casefold() for name in folders}) == len(folders)
    assert not any(name.startswith((".", "-", "~")) or name.endswith((".", " ")) for name in folders)
    assert {"a_b", "a_b-2", "end"} <= set(folders)  # what needs no change has none
    assert set(tmp_path.iterdir()) - before == {out}


def test_separators_in_classes_do_not_merge_them(tmp_path: Path) -> None:
    pictures(tmp_path / "images", ["0.png", "1.png", "2.png"])
    table = table_of(("a/b", "a\\b", "a_b"), ["0.png", "1.png", "2.png"])
    out = export_images("image-folder", ExportOrder(table, tmp_path / "out", tmp_path / "images"))
    assert read_back(out) == {0: "a/b", 1: "a\\b", 2: "a_b"}
    assert number_in(out / "a_b" / "2.png") == 2


def test_an_image_of_an_absolute_name_goes_into_its_class_folder(tmp_path: Path) -> None:
    pictures(tmp_path / "images", ["0.png"])
    out = export_images(
        "image-folder",
        ExportOrder(table_of(("one",), [str(tmp_path / "images" / "0.png")]), tmp_path / "out", tmp_path / "images"),
    )
    assert read_back(out) == {0: "one"}


def test_two_images_never_write_over_each_other_whatever_their_folders(tmp_path: Path) -> None:
    images = tmp_path / "images"
    sources = [
        "a/b.png", "a-b.png", "a\\b.png", "A-B.png", "c/a-b.png", "c-a/b.png", "-rf.png", "con.png", "x\ny.png",
        "d" * 150 + "/" + "e" * 200 + ".png", "d" * 150 + "/" + "e" * 200 + "f.png",
        "\u00e4" * 100 + "/" + "\u00e4" * 60 + ".png", "caf\u00e9.png", "cafe\u0301.png",
    ]  # fmt: skip
    pictures(images, sources)
    absolute = [*sources[:-1], str(images / sources[-1])]
    for copy in (False, True):
        out = export_images(
            "image-folder", ExportOrder(table_of(("one",), absolute), tmp_path / f"out {copy}", images, "", copy)
        )
        assert len(read_back(out)) == len(sources)
        with (out / "labels.csv").open(newline="", encoding="utf-8") as file:
            said = {row["source"]: number_in(out / row["file_name"]) for row in csv.DictReader(file)}
        assert said == {name: number for number, name in enumerate(absolute)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out False", "out True"]


@pytest.mark.parametrize("source", ["../outside.png", "/{}/outside.png", "C:\\outside.png", "https://127.0.0.1/x.png",
                                    "x" * 300 + ".png", "a\0b.png", "", "link.png"])  # fmt: skip
def test_a_source_outside_the_folder_is_refused_and_nothing_is_written(tmp_path: Path, source: str) -> None:
    images = tmp_path / "images"
    pictures(images, ["in.png"])
    pictures(tmp_path, ["outside.png"])
    (images / "link.png").symlink_to(tmp_path / "outside.png")
    name = source.format(str(tmp_path).strip("/"))
    for kind in ("image-folder", "hf"):
        with pytest.raises(BadData, match="there is no image"):
            export_images(kind, ExportOrder(table_of(("one",), ["in.png", name]), tmp_path / "out", images, "", True))  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["image-folder", "hf", "croissant", "csv", "label-studio"])
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str) -> None:
    pictures(tmp_path / "images", ["0.png"])
    (tmp_path / "elsewhere").mkdir()
    table = table_of(("one",), ["0.png"])
    for place, leads_to in (("link", "elsewhere/new"), ("out/one", "elsewhere"), ("out/data", "elsewhere")):
        link = tmp_path / place
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / leads_to)
        with pytest.raises(InvalidSetting, match="is there already"):
            export_images(kind, ExportOrder(table, tmp_path / place.split("/")[0], tmp_path / "images", "", True))  # type: ignore[arg-type]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    if kind in ("csv", "label-studio"):
        (tmp_path / "empty").mkdir()
        with pytest.raises(InvalidSetting, match="is there already"):
            export_images(kind, ExportOrder(table, tmp_path / "empty"))  # type: ignore[arg-type]


def test_a_csv_holds_every_name_whatever_ends_a_line_in_it(tmp_path: Path) -> None:
    sources = ["a\rb.png", "a\nb.png", "a\r\nb.png", 'a"b,c.png', "=cmd|' /C calc'!A0", "\u2028.png", "\ttab"]
    classes = ("one\rclass", "=1+1")
    out = export_images("csv", ExportOrder(table_of(classes, sources), tmp_path / "metadata.csv"))
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file_name"] for row in rows] == sources
    assert [row["label"] for row in rows] == [classes[number % 2] for number in range(len(sources))]
    pandas = pytest.importorskip("pandas")
    assert pandas.read_csv(out)["file_name"].tolist() == sources


def test_a_data_set_names_its_pictures_within_itself(tmp_path: Path) -> None:
    images = tmp_path / "images"
    pictures(images, ["a/0.png", "1.png"])
    sources = ["a/0.png", str(images / "1.png")]
    out = export_images("hf", ExportOrder(table_of(("one\x85class", "two"), sources), tmp_path / "set", images))
    cells = pq.read_table(next((out / "data").iterdir()))["image"].to_pylist()
    assert [cell["path"] for cell in cells] == ["a/0.png", "1.png"]
    yaml = pytest.importorskip("yaml")
    _, head, _ = (out / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    (_, label, *_) = yaml.safe_load(head)["dataset_info"]["features"]
    assert label["dtype"]["class_label"]["names"] == {"0": "one\x85class", "1": "two"}


def test_a_class_that_xml_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="XML"):
        export_images("label-studio", ExportOrder(table_of(("one\x01", "two"), ["0.png"]), tmp_path / "tasks.json"))
    assert list(tmp_path.iterdir()) == []
    export_images("label-studio", ExportOrder(table_of(CLASSES, ["0.png"]), tmp_path / "tasks.json"))
    choices = ElementTree.parse(tmp_path / "tasks.config.xml").getroot().iter("Choice")
    assert [choice.get("value") for choice in choices] == list(CLASSES)


def test_a_table_whose_classes_are_no_text_is_refused(tmp_path: Path) -> None:
    table = table_of(("one",), ["0.png"])
    for classes in (["\ud800"], [1], {"a": 1, "b": None}.values()):
        metadata = table.schema.metadata | {b"classes": json.dumps(list(classes)).encode()}
        with pytest.raises(BadData, match="no labels of images"):
            export_images("hf", ExportOrder(table.replace_schema_metadata(metadata), tmp_path / "set"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=300), st.sampled_from(CLASSES)), max_size=40))
def test_whatever_the_names_are_safe_and_all_different(names: list[str]) -> None:
    found = exports.safe_names(names)
    assert found == exports.safe_names(names)
    assert len({unicodedata.normalize("NFKC", name).casefold() for name in found}) == len(names)
    for name in found:
        assert 0 < len(name.encode()) <= 255
        assert not set(name) & set("/\\\0\r\n")
        assert name == name.rstrip(". ")
        assert not name.startswith((".", "-"))
        assert name.split(".")[0].strip().casefold() not in ("con", "prn", "aux", "nul", "com1", "lpt9")


def test_a_name_that_needs_no_change_has_none() -> None:
    names = ["Würger", "雀", "Ἁλκυών 🐦", "ill: “stage 1”", "a.b.png", "condor", "1"]
    assert exports.safe_names(names) == names
