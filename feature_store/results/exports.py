"""Labeled images as other tools want them: a Hugging Face data set, Croissant, folders by class, or one file.

`label_files` writes the formats that are one file.

Every export takes the labels of all public images (feature_store.results.image_labels), says in its own way what they
reveal at most, and is read back in the tests by the tool it is for. An interrupted one leaves no file under its name.

Croissant (mlcommons.org/croissant, 1.0) tells tools where the columns are, how many bytes each file has and what its
SHA-256 is. `datasets.load_dataset(folder)` reads the Hugging Face folder without any further word.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from feature_store.results import EXPORT_FORMATS, ExportFormat, current_format
from feature_store.results.image_labels import ImageStamp, are_attributes, stamp_of
from feature_store.results.label_files import FILE_WRITERS, csv_lines, label_studio_config, label_studio_task
from feature_store.results.questions import write_parquet
from labeler.budget import short_epsilon
from labeler.errors import BadData, InvalidSetting
from labeler.system.files import replace_file, replacing, sync_folder


@dataclass(frozen=True)
class ExportOrder:
    """An export to write.

    Attributes:
        table: labels of every image.
        out: the folder or file to write.
        images: the folder that was embedded, whose names the table has; needed where pictures are linked or carried.
        image_root: put before each name, percent-encoded, where a tool fetches images itself (Label Studio).
        copy: copy pictures into class folders instead of linking them.
    """

    table: pa.Table
    out: Path
    images: Path | None = None
    image_root: str = ""
    copy: bool = False


def export_images(format: ExportFormat, wanted: ExportOrder) -> Path:
    """Write labels in a format.

    Raises:
        InvalidSetting: no such format, the folder of images is needed, or the place is taken.
        BadData: an image is not there, or the table is no table of image labels.
    """
    name = current_format(format)
    if name in _WRITERS:
        return _WRITERS[name](wanted)
    if name not in FILE_WRITERS:
        raise InvalidSetting(f"unknown format {format!r}; choose one of {', '.join(EXPORT_FORMATS)}")
    check_new(wanted.out)
    if not are_attributes(wanted.table):
        stamp_of(wanted.table)
    replace_file(wanted.out, b"".join(FILE_WRITERS[name](wanted.table)))
    return wanted.out


def config_beside(out: Path) -> Path:
    """Return the path of the labeling configuration of Label Studio tasks."""
    return out.with_suffix(".config.xml")


def write_label_studio(wanted: ExportOrder) -> Path:
    """A JSON array of tasks; each label is a prediction with its score, so that a person can accept or correct it.

    Tasks come least certain first: Label Studio shows them in this order. `config_beside` names the labeling
    configuration of the project.
    """
    stamp = stamp_of(wanted.table)
    config = config_beside(wanted.out)
    check_new(wanted.out)
    check_new(config)
    replace_file(config, label_studio_config(wanted.table))
    rows = sorted(wanted.table.to_pylist(), key=lambda row: row["confidence"])
    tasks = [label_studio_task(row, stamp.task_name, image_root=wanted.image_root) for row in rows]
    replace_file(wanted.out, json.dumps(tasks, ensure_ascii=False, indent=1).encode())
    return wanted.out


NAMES_FILE = "labels.csv"


def write_image_folder(wanted: ExportOrder) -> Path:
    """One folder for each class with a link (or a copy) of each of its images, as torchvision's ImageFolder reads it.

    Names keep the folders they were in, with "-" for "/"; `safe_names` decides the rest. NAMES_FILE, next to the
    folders, says of each file which image it is, and the name of its class.
    """
    stamp = stamp_of(wanted.table)
    check_new(wanted.out, as_folder=True)
    sources, labels = wanted.table["source"].to_pylist(), wanted.table["label_name"].to_pylist()
    found = pictures(wanted.images, sources)
    classes = list(dict.fromkeys([*stamp.classes, *labels]))
    folders = dict(zip(classes, safe_names([NAMES_FILE, *classes])[1:], strict=True))
    files = safe_names("-".join(part for part in PurePosixPath(source).parts if part != "/") for source in sources)
    wanted.out.mkdir(parents=True, exist_ok=True)
    for folder in folders.values():
        (wanted.out / folder).mkdir()
    names = [f"{folders[label]}/{file}" for label, file in zip(labels, files, strict=True)]
    for path, name in zip(found, names, strict=True):
        target = wanted.out / name
        if wanted.copy:
            # A new file, never one that somebody has put there, nor what a link there names.
            with path.open("rb") as picture, target.open("xb") as copied:
                shutil.copyfileobj(picture, copied)
        else:
            target.symlink_to(os.path.relpath(path.resolve(), target.parent.resolve()))
    rows = [("file_name", "label", "source"), *zip(names, labels, sources, strict=True)]
    replace_file(wanted.out / NAMES_FILE, csv_lines(rows))
    sync_folder(wanted.out)
    return wanted.out


MOST_NAME_BYTES: Final = 255
"""Of a file's name, in UTF-8, on the usual file systems."""

_RESERVED: Final = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$) *(\.|$)", re.IGNORECASE)
_LONGEST_SUFFIX = 16


def safe_names(names: Iterable[str]) -> list[str]:
    """Return a name for a file or folder for each name: safe on every system, all different, as they were if possible.

    Two names are different if they are on every system: whatever their case and however their letters are composed.
    Where some meet, the first that needed no change keeps its name, or else the first; the others get a number. The
    same names give the same result.
    """
    wanted = list(names)
    found = [folder_name(name) for name in wanted]
    taken, numbers, later = set[str](), dict[str, int](), []
    for place in sorted(range(len(wanted)), key=lambda place: found[place] != wanted[place]):
        if (key := _key(found[place])) in taken:
            later.append((place, key))
        taken.add(key)
    for place, key in later:
        suffix = _suffix(found[place])
        stem = found[place].removesuffix(suffix)
        while _key(found[place]) in taken:
            numbers[key] = numbers.get(key, 1) + 1
            tail = f"-{numbers[key]}{suffix}"
            found[place] = _cut(stem, MOST_NAME_BYTES - len(tail.encode())) + tail
        taken.add(_key(found[place]))
    return found


def folder_name(name: str) -> str:
    """Return a name as that of a file or folder; see `safe_names`, which makes several different.

    Separators and control characters become "_". Spaces and dots at its end fall away, as Windows drops them. What is
    hidden, an option, a drive or a device elsewhere begins with "_". At most 255 bytes: the end is cut, but a suffix.
    """
    plain = "".join(
        "_" if letter in "/\\" or unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") else letter
        for letter in name
    )
    plain = re.sub(r"^([A-Za-z]):", r"\1_", plain.strip(" ").rstrip(". "))
    if not plain or plain[0] in ".-~" or _RESERVED.match(plain):
        plain = "_" + plain
    suffix = _suffix(plain)
    return _cut(plain.removesuffix(suffix), MOST_NAME_BYTES - len(suffix.encode())) + suffix


def _suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return suffix if len(suffix.encode()) <= _LONGEST_SUFFIX else ""


def _cut(text: str, most_bytes: int) -> str:
    """As much of a text as its UTF-8 has room for, without blanks or dots at its end."""
    if len(text.encode()) <= most_bytes:
        return text
    return text.encode()[:most_bytes].decode("utf-8", "ignore").rstrip(". ")


def _key(name: str) -> str:
    """A name as a system sees it that knows neither case nor composition."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def picture(root: Path, name: str) -> Path:
    """Return the file of an image.

    Raises:
        BadData: it is not there, or lies outside of the folder.
    """
    path = root / name
    # A name that is longer than any file's has none.
    with suppress(OSError):
        if path.is_file() and path.resolve().is_relative_to(root.resolve()):
            return path
    raise BadData(f"there is no image {name!r} in {root}; name the folder that was embedded")


def pictures(root: Path | None, names: Iterable[str]) -> list[Path]:
    """Return the files of all images, looked for before anything is written.

    Raises:
        InvalidSetting: no folder was named.
        BadData: one is not there.
    """
    if root is None:
        raise InvalidSetting("name the folder of images that was embedded (`images`), since the pictures go along")
    return [picture(root, name) for name in names]


def check_new(out: Path, *, as_folder: bool = False) -> None:
    """Refuse to write over something.

    Args:
        as_folder: whether a folder is written, for which an empty one may be there.

    Raises:
        InvalidSetting: it is there, also a link that leads nowhere.
    """
    is_free_folder = as_folder and out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not is_free_folder:
        raise InvalidSetting(f"{out} is there already; name a new place")


LABELS_FILE = "labels.parquet"
CROISSANT_FILE = "croissant.json"

_TERMS = (
    "@language", "@vocab", "citeAs", "column", "conformsTo", "cr", "rai", "prov", "data", "dataType", "dct",
    "equivalentProperty", "examples", "extract", "field", "fileProperty", "fileObject", "fileSet", "format", "includes",
    "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex", "repeated",
    "replace", "samplingRate", "sc", "separator", "source", "subField", "transform",
)  # fmt: skip
_CONTEXT: dict[str, Any] = {term: f"cr:{term}" for term in _TERMS} | {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "prov": "http://www.w3.org/ns/prov#",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "sc": "https://schema.org/",
}
_COLUMNS = (
    ("source", "sc:Text", "Name of the image, as it was sent."),
    ("label", "sc:Integer", "Number of the class, from 0."),
    ("label_name", "sc:Text", "Name of the class."),
    ("confidence", "sc:Float", "Probability that the label is right, as far as votes or public images tell it."),
    ("origin", "sc:Text", "asked: a question itself; inferred: the label follows from other answers."),
)


def write_croissant(wanted: ExportOrder) -> Path:
    """Write `labels.parquet` and `croissant.json` into a folder; the description last."""
    stamp = stamp_of(wanted.table)
    check_new(wanted.out, as_folder=True)
    wanted.out.mkdir(parents=True, exist_ok=True)
    labels = wanted.out / LABELS_FILE
    write_parquet(wanted.table, labels)
    digest = hashlib.sha256(labels.read_bytes()).hexdigest()
    document = describe(stamp, count=len(wanted.table), sha256=digest, size=labels.stat().st_size)
    replace_file(wanted.out / CROISSANT_FILE, json.dumps(document, ensure_ascii=False, indent=1).encode())
    return wanted.out


def describe(stamp: ImageStamp, *, count: int, sha256: str, size: int) -> dict[str, Any]:
    """The Croissant document of a table of labels."""
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": f"labels-{stamp.job_id}",
        "description": f"Labels of {count} public images, given by private images that stay with their owners. "
        f"Classes: {', '.join(stamp.classes)}.",
        "version": "1.0.0",
        "datePublished": stamp.created_at[:10],
        "url": f"urn:labeler:job:{stamp.job_id}",
        "citeAs": f"private-labeler, job {stamp.job_id}, {_task_in_words(stamp)}",
        "rai:personalSensitiveInformation": _guarantee_in_words(stamp),
        "prov:wasGeneratedBy": {
            "@type": "prov:Activity",
            "@id": f"urn:labeler:job:{stamp.job_id}#labelling",
            "prov:label": "Private labelling: noised votes of several owners' records, then a student",
            "prov:endedAtTime": stamp.created_at,
            "prov:used": {
                "@type": "prov:Entity",
                "@id": f"urn:labeler:task:{stamp.task_digest}",
                "prov:label": stamp.task_name,
            },
            "sc:additionalProperty": [
                {"@type": "sc:PropertyValue", "name": name, "value": value} for name, value in _properties(stamp)
            ],
        },
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": "labels",
                "name": LABELS_FILE,
                "contentUrl": LABELS_FILE,
                "contentSize": f"{size} B",
                "encodingFormat": "application/x-parquet",
                "sha256": sha256,
            }
        ],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "images",
                "name": "images",
                "description": "One row for each public image.",
                "field": [
                    {
                        "@type": "cr:Field",
                        "@id": f"images/{name}",
                        "name": name,
                        "description": words,
                        "dataType": kind,
                        "source": {"fileObject": {"@id": "labels"}, "extract": {"column": name}},
                    }
                    for name, kind, words in _COLUMNS
                ],
            }
        ],
    }


def _properties(stamp: ImageStamp) -> list[tuple[str, object]]:
    """The privacy card, flat: `instance.epsilon`, `delta`, ...; what has no bound says so."""
    found: list[tuple[str, object]] = []
    for name, value in sorted(stamp.privacy.items()):
        if isinstance(value, dict):
            found += [(f"{name}.{key}", "no bound" if one is None else one) for key, one in sorted(value.items())]
        else:
            found.append((name, "no bound" if value is None else value))
    return [*found, ("simulation with a known seed", stamp.is_seeded)]


def _epsilon(stamp: ImageStamp) -> float | None:
    """Return the price per private image; None where nothing bounds it."""
    instance: Any = stamp.privacy.get("instance", {})
    return instance.get("epsilon") if isinstance(instance, dict) else None


def _guarantee_in_words(stamp: ImageStamp) -> str:
    epsilon = _epsilon(stamp)
    bound = (
        "no bound"
        if epsilon is None
        else f"epsilon {short_epsilon(epsilon, digits=6)} at delta {stamp.privacy.get('delta')}"
    )
    return (
        "No private image is in this data set. What its labels reveal about any one of them is bounded by differential "
        f"privacy: {bound} per private image. {stamp.privacy.get('holds_against', '')}"
    ).strip()


ROWS_PER_FILE = 10_000
ROWS_PER_GROUP = 100
"""Pictures are read a group at a time, so that memory does not grow with the data set."""

_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_data_set(wanted: ExportOrder) -> Path:
    """Write the folder; the card last, so that a folder with a card is whole."""
    stamp = stamp_of(wanted.table)
    check_new(wanted.out, as_folder=True)
    names = wanted.table["source"].to_pylist()
    found = pictures(wanted.images, names) if wanted.images is not None else None
    data = wanted.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    count = len(names)
    files = max(1, -(-count // ROWS_PER_FILE))
    # `datasets` decodes a column of type Image with Pillow alone, and fails on the first row that Pillow cannot read.
    kind: Pictures = "none" if found is None else "images" if all(map(_is_of_pillow, found)) else "bytes"
    schema, size = _schema(stamp, kind), 0
    for number in range(files):
        start, stop = number * count // files, (number + 1) * count // files
        path = data / f"train-{number:05d}-of-{files:05d}.parquet"
        with (
            replacing(path) as temporary,
            temporary.open("wb") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for rows in _groups(wanted, found, start, stop, schema):
                writer.write_table(rows)
                size += rows.nbytes
    sync_folder(data)
    replace_file(wanted.out / "README.md", card(stamp, count, size, kind).encode())
    return wanted.out


Pictures = Literal["images", "bytes", "none"]
"""The pictures of a data set: as images, as bytes because Pillow cannot read some of them, or only their names."""


def _is_of_pillow(path: Path) -> bool:
    """Return whether Pillow by itself knows a picture by its first bytes."""
    try:
        with Image.open(path) as image:
            return image.format not in _OF_PLUGINS
    except Exception:  # Pillow raises almost anything on a file that it does not know
        return False


_OF_PLUGINS: Final = frozenset({"HEIF"})


def card(stamp: ImageStamp, count: int, size: int, pictures: Pictures) -> str:
    """The README card: YAML that the hub reads (JSON strings are YAML too), then words for people.

    Args:
        count: of rows.
        size: of all rows in memory, in bytes; `datasets` takes no note of a split without it.
    """
    classes = "\n".join(f"          '{number}': {_quoted(name)}" for number, name in enumerate(stamp.classes))
    picture = {
        "images": "name: image\n    dtype: image",
        "bytes": "name: image\n    struct:\n"
        "    - name: bytes\n      dtype: binary\n    - name: path\n      dtype: string",
        "none": "name: file_name\n    dtype: string",
    }[pictures]
    undecoded = (
        "\nThe column `image` holds the bytes of each file and its name, undecoded: some files are of formats that "
        "`datasets` cannot decode, such as DICOM. Read those with pydicom, for example.\n"
        if pictures == "bytes"
        else ""
    )
    guarantee, epsilon = stamp.privacy, _epsilon(stamp)
    said = "no bound" if epsilon is None else f"epsilon {short_epsilon(epsilon, digits=4)}"
    # A name from elsewhere inside a table of Markdown, in which it marks nothing up.
    task = stamp.task_name.replace("`", "'").replace("|", "/")
    seeded = (
        "\n**This is a simulation: its noise came from a known seed and protects nobody.**\n" if stamp.is_seeded else ""
    )
    return f"""---
pretty_name: {_quoted(f"Labels of job {stamp.job_id}, {_task_in_words(stamp)}")}
task_categories:
- image-classification
tags:
- differential-privacy
- pseudo-labels
dataset_info:
  features:
  - {picture}
  - name: label
    dtype:
      class_label:
        names:
{classes}
  - name: confidence
    dtype: float32
  - name: origin
    dtype: string
  splits:
  - name: train
    num_bytes: {size}
    num_examples: {count}
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---

# Privately labelled images
{seeded}
{count} public images, labelled with the private images of several owners, none of which is in here. `confidence` is
the probability that `label` is right, as far as released votes tell it, or of a released model public images alone;
`labeler evaluate` measures it. `origin` says whether an image was asked about itself or its label follows from other
answers.
{undecoded}
**What the labels reveal at most**: {said} per private image at delta {guarantee.get("delta")}, for the integer noise
that ran (differential privacy). {guarantee.get("holds_against", "")}

| | |
|---|---|
| task | {f"`{task}`" if task else ""} `{stamp.task_digest}` |
| job | `{stamp.job_id}` |
| made | {stamp.created_at} |

The licence of the images is that of their source.
"""


def _task_in_words(stamp: ImageStamp) -> str:
    return f"task {stamp.task_name} ({stamp.task_digest[:12]})" if stamp.task_name else f"task {stamp.task_digest}"


def _schema(stamp: ImageStamp, pictures: Pictures) -> pa.Schema:
    kinds: dict[Pictures, dict[str, Any]] = {
        "images": {"image": {"_type": "Image"}},
        "bytes": {"image": {"bytes": _value("binary"), "path": _value("string")}},
        "none": {"file_name": _value("string")},
    }
    features = kinds[pictures] | {
        "label": {"names": list(stamp.classes), "_type": "ClassLabel"},
        "confidence": _value("float32"),
        "origin": _value("string"),
    }
    metadata = stamp.metadata() | {"huggingface": json.dumps({"info": {"features": features}}, ensure_ascii=False)}
    first = pa.field("file_name", pa.string()) if pictures == "none" else pa.field("image", _PICTURE)
    fields = [first, ("label", pa.int64()), ("confidence", pa.float32()), ("origin", pa.string())]
    return pa.schema(fields, metadata=metadata)


def _groups(
    wanted: ExportOrder, found: list[Path] | None, start: int, stop: int, schema: pa.Schema
) -> Iterator[pa.Table]:
    table, root = wanted.table, wanted.images or Path()
    for begin in range(start, stop, ROWS_PER_GROUP):
        rows = table.slice(begin, min(ROWS_PER_GROUP, stop - begin))
        names = rows["source"].to_pylist()
        first = pa.array(names, pa.string())
        if found is not None:
            values = [
                # Relative, also where the name is not: a tool may write the picture under it.
                {"bytes": path.read_bytes(), "path": Path(os.path.relpath(path, root)).as_posix()}
                for path in found[begin : begin + len(names)]
            ]
            first = pa.array(values, _PICTURE)
        columns = [first, rows["label"].cast(pa.int64()), rows["confidence"], rows["origin"]]
        yield pa.Table.from_arrays(columns, schema=schema)


def _value(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "_type": "Value"}


def _quoted(text: str) -> str:
    """A text of YAML, which takes a JSON text but for characters that do not print."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)


_WRITERS: Final[dict[str, Callable[[ExportOrder], Path]]] = {
    "hf": write_data_set,
    "croissant": write_croissant,
    "image-folder": write_image_folder,
    "label-studio": write_label_studio,
}
"""Of folders, and of tasks with the setup beside them; every other format is one file (`FILE_WRITERS`)."""
