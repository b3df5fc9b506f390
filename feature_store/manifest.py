"""The manifest of a shard: what it holds, for whom, made by which backbone, and checksums of every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from labeler.errors import BadData, DamagedShard
from labeler.system.files import replace_file

MANIFEST_NAME = "manifest.json"
FEATURES_NAME = "features.npy"
_READ_BYTES = 1 << 24


def part_name(number: int) -> str:
    """File name of a part of the features."""
    return f"features-{number:05d}.int16"


class FileSum(BaseModel):
    """Size in bytes and SHA-256 of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What a shard says about itself.

    Attributes:
        format: of the folder; another number is another layout.
        role: private (an agent's records; labels are secret) or public (queries; labels, if any, only for scoring).
        fingerprint: of the backbone that made the features.
        backbone: its description, for people.
        dimension: numbers in a feature.
        classes: public class list, in label order; may be empty for public images.
        records: rows in the files, deleted ones included.
        job: digest of the source and settings it was made from; empty if unknown.
        files: checksum per file name.
        deleted: record ids that must never be used again, ascending.
        part_records: rows in each part but the last, which has the rest; None where features are one file.
        max_records: a public bound on `records`, declared before they were counted; writing more is refused. None where
            nothing was declared.
        attributes: whether a record may have any number of the classes (feature_store.sources), and not just one.
        site_key: which key its digests of persons and images are under (labeler.system.site_key); None without any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    format: Literal["labeler-shard/1"] = "labeler-shard/1"
    role: Literal["private", "public"]
    fingerprint: Annotated[str, Field(min_length=1)]
    backbone: dict[str, Any]
    dimension: Annotated[int, Field(ge=1, le=1_000_000)]
    classes: tuple[str, ...]
    records: Annotated[int, Field(ge=1)]
    job: str = ""
    files: dict[str, FileSum]
    deleted: tuple[int, ...] = ()
    site_key: str | None = None
    part_records: Annotated[int, Field(ge=1)] | None = None
    max_records: Annotated[int, Field(ge=1)] | None = None
    attributes: bool = False

    @model_validator(mode="after")
    def _check_bound(self) -> Manifest:
        if self.max_records is not None and (self.role != "private" or self.records > self.max_records):
            raise ValueError("a bound on records is kept by private shards, and by all of them that state one")
        return self

    @property
    def feature_files(self) -> tuple[str, ...]:
        """Names of the files that hold the features, in the order of rows."""
        if self.part_records is None:
            return (FEATURES_NAME,)
        return tuple(part_name(number) for number in range(-(-self.records // self.part_records)))

    @property
    def version(self) -> str:
        """SHA-256 over everything above: it changes with every deletion, so an index built before can be told apart."""
        return hashlib.sha256(_canonical(self)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        BadData: the folder is no shard, or one that was never finished.
        DamagedShard: the manifest's own checksum or fields are wrong.
    """
    folder = folder.absolute()  # `.` has no name of its own
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise BadData(f"{folder.name!r} is no finished shard: it has no {MANIFEST_NAME}; make one with labeler embed")
    try:
        fields = json.loads(path.read_bytes())
        stated = fields.pop("sha256")
        manifest = Manifest.model_validate(fields)
    except (ValueError, KeyError, AttributeError, RecursionError, ValidationError):
        raise DamagedShard(f"the manifest of shard {folder.name!r} is damaged; embed the images again") from None
    if stated != manifest.version:
        raise DamagedShard(f"the manifest of shard {folder.name!r} does not match its checksum; embed the images again")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in one durable step; that of a private shard is its owner's alone."""
    text = json.dumps(json.loads(_canonical(manifest)) | {"sha256": manifest.version}, indent=1, ensure_ascii=False)
    replace_file(folder / MANIFEST_NAME, text.encode(), mode=0o600 if manifest.role == "private" else 0o644)


def sum_file(path: Path) -> FileSum:
    """Size and SHA-256 of a file, read in blocks."""
    sha256 = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            sha256.update(block)
            size += len(block)
    return FileSum(bytes=size, sha256=sha256.hexdigest())


def _canonical(manifest: Manifest) -> bytes:
    fields = manifest.model_dump(mode="json")
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
