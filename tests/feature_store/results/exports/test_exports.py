"""Exports are read back by the tool that each is for; where a tool is not installed its test says so."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feature_store.results import EXPORT_FORMATS
from feature_store.results.exports import ExportOrder, export_images
from feature_store.results.image_labels import BUDGET_FIELDS, IMAGE_SCHEMA, ImageStamp, image_label_table, stamp_of
from labeler.errors import BadData, InvalidSetting

CLASSES = ("healthy", "ill: “stage 1”", "# größer/kleiner")
NASTY = (
    "a+b.png", "scans.parquet#7.png", "x&y=z.png", "100%.png", "%41.png", "a b?.png", "me\u0301lanome.png",
    "m\u00e9lanome.png", 'quote " and \'.png', "semi;colon, comma.png", "雀.png", " edges .png",
    "new\nline.png", "tab\t.png", "Screenshot 3.04\u202fPM.png", "\U0001f468\u200d\U0001f467.png", "-dash.png",
    "=1+1.png", "x" * 250 + ".png", "Case.png", "case.png", "line\u2028.png", "cr\r.png", "back\\slash.png",
    "[a]{b}*.png",
)  # fmt: skip
COUNT = 40


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in two folders, with one name in both."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(1)
    for name in _names():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(root / name)
    return root


@pytest.fixture(scope="module")
def table() -> pa.Table:
    probabilities = np.random.default_rng(2).dirichlet(np.ones(len(CLASSES)), COUNT)
    stamp = ImageStamp(
        task_digest="d" * 64,
        job_id="job-17",
        classes=CLASSES,
        privacy={
            "delta": 1e-5,
            "instance": {"epsilon": 0.5, "method": "exact"},
            "agent": {"epsilon": None, "method": "exact"},
            "holds_against": "Holds against whoever reads the release.",
        },
        is_seeded=False,
        created_at="2026-01-02T03:04:05+00:00",
        task_name="cats | `dogs`",
    )
    asked = np.arange(COUNT) % 5 == 0
    return image_label_table(stamp, sources=_names(), probabilities=probabilities, asked=asked)


def test_a_table_keeps_its_schema_and_says_whose_it_is(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "labels.parquet")
    read = pq.read_table(tmp_path / "labels.parquet")
    assert read.schema.remove_metadata().equals(pa.schema(list(IMAGE_SCHEMA)[: -len(BUDGET_FIELDS)]))
    assert stamp_of(read) == stamp_of(table)
    assert set(read["origin"].to_pylist()) == {"asked", "inferred"}
    with pytest.raises(BadData, match="nothing is asked or charged twice"):
        stamp_of(read.replace_schema_metadata({}))
    with pytest.raises(BadData, match=f"{COUNT} images"):
        image_label_table(stamp_of(table), sources=_names(), probabilities=np.ones((2, 3)), asked=np.zeros(2, bool))


def test_every_export_that_has_room_for_it_says_the_name_of_the_task(table: pa.Table, tmp_path: Path) -> None:
    card = (export_images("hf", ExportOrder(table, tmp_path / "set")) / "README.md").read_text()
    assert "| task | `cats / 'dogs'` `dddd" in card
    croissant = export_images("croissant", ExportOrder(table, tmp_path / "croissant"))
    assert "task cats | `dogs`" in json.loads((croissant / "croissant.json").read_text())["citeAs"]
    (first, *_) = json.loads(export_images("label-studio", ExportOrder(table, tmp_path / "tasks.json")).read_text())
    assert first["data"]["task"] == "cats | `dogs`"
    # A table of an earlier version has no name, and is read all the same.
    metadata = {key: value for key, value in table.schema.metadata.items() if key != b"task_name"}
    assert stamp_of(table.replace_schema_metadata(metadata)).task_name == ""


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.process
def test_datasets_reads_pictures_and_class_names(
    table: pa.Table, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    out = export_images("hf", ExportOrder(table, tmp_path / "set", images))
    builder = datasets.load_dataset_builder(str(out), cache_dir=str(tmp_path / "cache"))
    assert builder.info.splits["train"].num_examples == COUNT
    assert "Ignoring part of dataset_info" not in capfd.readouterr().err
    data = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert data.features["label"].names == list(CLASSES)
    assert data["label"] == table["label"].to_pylist()
    assert [data.features["label"].int2str(label) for label in data["label"]] == table["label_name"].to_pylist()
    first = Image.open(images / _names()[0])
    assert np.array_equal(np.asarray(data[0]["image"]), np.asarray(first))
    assert data["confidence"] == pytest.approx(table["confidence"].to_pylist())


def test_without_pictures_the_data_set_names_them(table: pa.Table, tmp_path: Path) -> None:
    out = export_images("hf", ExportOrder(table, tmp_path / "set"))
    written = pq.read_table(next((out / "data").iterdir()))
    assert written["file_name"].to_pylist() == _names()
    features = json.loads(written.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": list(CLASSES), "_type": "ClassLabel"}
    card = (out / "README.md").read_text()
    assert "epsilon 0.5 per private image at delta 1e-05" in card
    assert "'1': \"ill: “stage 1”\"" in card


def test_pictures_that_pillow_cannot_read_are_bytes_and_the_card_says_so(table: pa.Table, tmp_path: Path) -> None:
    images = tmp_path / "images"
    for name in _names():
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).write_bytes(bytes(128) + b"DICM" + name.encode())
    out = export_images("hf", ExportOrder(table, tmp_path / "set", images))
    written = pq.read_table(next((out / "data").iterdir()))
    assert written["image"].to_pylist() == [{"bytes": (images / name).read_bytes(), "path": name} for name in _names()]
    features = json.loads(written.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {
        "bytes": {"dtype": "binary", "_type": "Value"},
        "path": {"dtype": "string", "_type": "Value"},
    }
    card = (out / "README.md").read_text()
    assert "undecoded" in card
    assert "dtype: image" not in card


def test_keys_of_an_object_store_stay_letter_for_letter(table: pa.Table, tmp_path: Path) -> None:
    out = export_images("label-studio", ExportOrder(table, tmp_path / "tasks.json", image_root="s3://bucket/scans"))
    found = {task["data"]["image"] for task in json.loads(out.read_bytes())}
    assert found == {f"s3://bucket/scans/{name}" for name in _names()}


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.process
def test_croissant_is_valid_and_its_records_can_be_read(table: pa.Table, tmp_path: Path) -> None:
    croissant = pytest.importorskip("mlcroissant")
    out = export_images("croissant", ExportOrder(table, tmp_path / "described"))
    data = croissant.Dataset(jsonld=out / "croissant.json")
    assert not data.metadata.ctx.issues.errors
    records = list(data.records("images"))
    assert [_text(one["images/source"]) for one in records] == _names()
    assert [_text(one["images/label_name"]) for one in records] == table["label_name"].to_pylist()
    document = json.loads((out / "croissant.json").read_bytes())
    assert document["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    said = {one["name"]: one["value"] for one in document["prov:wasGeneratedBy"]["sc:additionalProperty"]}
    assert said["instance.epsilon"] == 0.5
    assert said["agent.epsilon"] == "no bound"


def test_label_studio_gets_predictions_with_scores_the_least_certain_first(table: pa.Table, tmp_path: Path) -> None:
    out = export_images(
        "label-studio", ExportOrder(table, tmp_path / "tasks.json", image_root="/data/local-files/?d=scans/")
    )
    tasks = json.loads(out.read_bytes())
    scores = [task["predictions"][0]["score"] for task in tasks]
    assert scores == sorted(scores)
    # As Django, on which Label Studio stands, reads the query of local files.
    found = [parse_qs(urlsplit(task["data"]["image"]).query)["d"] for task in tasks]
    assert sorted(found) == [[f"scans/{name}"] for name in sorted(_names())]
    assert {task["data"]["source"] for task in tasks} == set(_names())
    chosen = {task["predictions"][0]["result"][0]["value"]["choices"][0] for task in tasks}
    assert chosen == set(table["label_name"].to_pylist())


def test_label_studio_gets_the_setup_that_its_predictions_refer_to(table: pa.Table, tmp_path: Path) -> None:
    out = export_images("label-studio", ExportOrder(table, tmp_path / "tasks.json"))
    view = ElementTree.parse(tmp_path / "tasks.config.xml").getroot()
    (choices,), (image,) = view.iter("Choices"), view.iter("Image")
    assert [choice.get("value") for choice in choices] == list(CLASSES)
    assert choices.get("choice") == "single"
    for task in json.loads(out.read_bytes()):
        (result,) = task["predictions"][0]["result"]
        assert (result["from_name"], result["to_name"]) == (choices.get("name"), choices.get("toName"))
        assert result["to_name"] == image.get("name")
        assert (image.get("value") or "").removeprefix("$") in task["data"]
    with pytest.raises(InvalidSetting, match="is there already"):
        export_images("label-studio", ExportOrder(table, tmp_path / "tasks.jsonl"))


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_label_studio_takes_the_setup_and_every_task_with_its_prediction(table: pa.Table, tmp_path: Path) -> None:
    interface = pytest.importorskip("label_studio_sdk.label_interface")
    objects = pytest.importorskip("label_studio_sdk.label_interface.objects")
    out = export_images("label-studio", ExportOrder(table, tmp_path / "tasks.json"))
    project = interface.LabelInterface((tmp_path / "tasks.config.xml").read_text(encoding="utf-8"))
    project.validate()
    for task in json.loads(out.read_bytes()):
        (prediction,) = task["predictions"]
        assert objects.PredictionValue.model_validate(prediction).score == prediction["score"]
        assert project.validate_task({"data": task["data"]}), task
        assert not project.validate_prediction(prediction, return_errors=True)
    (result,) = prediction["result"]
    assert project.validate_prediction({"result": [result | {"value": {"choices": ["no such"]}}]}, return_errors=True)


def test_torchvision_reads_the_folders(table: pa.Table, images: Path, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision.datasets")
    out = export_images("image-folder", ExportOrder(table, tmp_path / "sorted", images))
    data = torchvision.ImageFolder(str(out))
    assert len(data) == COUNT
    counts = {name: table["label_name"].to_pylist().count(name) for name in CLASSES}
    found = {name: len(list((out / name.replace("/", "_")).iterdir())) for name in CLASSES}
    assert found == counts
    with (out / "labels.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["file_name"]: row for row in csv.DictReader(file)}
    # Each file that torchvision finds is one image of the table, with its label and its pixels.
    read = [(rows[str(Path(path).relative_to(out))], path) for path, _ in data.samples]
    assert sorted(row["source"] for row, _ in read) == sorted(_names())
    assert {row["source"]: row["label"] for row, _ in read} == dict(
        zip(_names(), table["label_name"].to_pylist(), strict=True)
    )
    assert all(Path(path).read_bytes() == (images / row["source"]).read_bytes() for row, path in read)
    copied = export_images("image-folder", ExportOrder(table, tmp_path / "copied", images, copy=True))
    assert not any(path.is_symlink() for path in copied.rglob("*"))


def test_every_table_reader_reads_the_csv_and_the_labels(table: pa.Table, tmp_path: Path) -> None:
    out = export_images("csv", ExportOrder(table, tmp_path / "metadata.csv"))
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == table["label_name"].to_pylist()
    assert [row["file_name"] for row in rows] == _names()
    pq.write_table(table, tmp_path / "labels.parquet")
    names = table["label_name"].to_pylist()
    parquet = str(tmp_path / "labels.parquet")
    pandas = pytest.importorskip("pandas")
    assert pandas.read_csv(out)["label"].tolist() == pandas.read_parquet(parquet)["label_name"].tolist() == names
    assert pandas.read_csv(out)["file_name"].tolist() == pandas.read_parquet(parquet)["source"].tolist() == _names()


@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_nothing_is_written_over_and_nothing_half(table: pa.Table, images: Path, tmp_path: Path, format: Any) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("kept")
    with pytest.raises(InvalidSetting, match="is there already"):
        export_images(format, ExportOrder(table, taken, images))
    assert [path.name for path in taken.iterdir()] == ["mine"]
    if format in ("hf", "image-folder"):
        with pytest.raises(BadData, match="name the folder that was embedded"):
            export_images(format, ExportOrder(table, tmp_path / "new", tmp_path))
        assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_a_name_that_leaves_the_folder_is_refused(table: pa.Table, images: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"x")
    names = ["../secret.png", *_names()[1:]]
    moved = table.set_column(0, "source", pa.array(names))
    with pytest.raises(BadData, match="no image"):
        export_images("image-folder", ExportOrder(moved, tmp_path / "out", images))
    with pytest.raises(InvalidSetting, match="choose one of hf, croissant"):
        export_images("excel", ExportOrder(table, tmp_path / "x"))  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="`images`"):
        export_images("image-folder", ExportOrder(table, tmp_path / "y"))


def _names() -> list[str]:
    plain = [f"ward {number % 2}/{number // 2:03d}.png" for number in range(COUNT - len(NASTY))]
    return [*plain, *(f"ward 0/{name}" for name in NASTY)]


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
