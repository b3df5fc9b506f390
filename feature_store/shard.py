"""A shard: the features of one party's images on disk, memory-mapped, checked, and deletable record by record.

A shard is a folder:

    manifest.json        role, backbone, classes, checksums, deleted records (`Manifest`)
    deletions.txt        when records were deleted, if any ever were (`deletions`)
    features.npy         int16 (n, d): each row has length 2048 but for rounding (feature_store.rows)
    labels.npy           int16 (n,): place in the class list; -1 unknown (public shards only). Of a shard of attributes
                         int16 (n, C): 1 where a record has the attribute and 0 where not; -1 unknown, in whole rows
    record_ids.npy       int64 (n,): random, unique, for life; ties between neighbors are broken by them
    sources.jsonl        one JSON string per row: the image's name within its source
    skipped.jsonl        one [name, reason] per image that could not be read
    persons.npy          int64 (n, 2): digest of its person under the site's key; private shards that know persons
    image_digests.npy    int64 (n, 2): digest of the image, likewise; under a key that everybody has in public shards
    answers-for.json     private shards that answer: {"version", "agent", "journal": hash of the first entry of its
                         ledger, which is salted}

Once deleted records were erased, or the shard was brought up to date (`feature_store.shard_writer`), the files of rows
have a number in their names: `features.1.npy`. The manifest says which, so its rename alone goes over from the old
files to the new.

Rows of a private shard are in random order, so that a row number says nothing about the source's order. Its folder and
files are their owner's alone (labeler.system.files).

**The mark** in a private shard says for which journal it answers: two homes on one shard would have two budgets. An
agent's journal counts what its records have told. A second home on the same shard counts from nothing, so each
record would get a second budget. So the first home that answers from a shard writes its journal into the shard's
folder, and any other is refused. A copy of the folder takes the mark along; a home that is moved keeps its journal.

It catches mistakes, not intent: embedding the same images again, or deleting the mark, gives a shard without a history.
`labeler run` has no journal that lasts, and neither reads nor writes the mark.
More than 600 lines: the layout of a shard, its manifest and its checks must be read together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feature_store.decode import Skipped
from feature_store.rows import largest_square_length, quantize, refuse_other_probes
from labeler.errors import BadData, DamagedShard, InvalidSetting, MixedShards, NotThere, OutputInUse
from labeler.settings import one_spelling, same_names
from labeler.system.clock import now_utc
from labeler.system.files import exclusive, keep_private, replace_file
from labeler.system.site_key import DIGEST_WORDS, PUBLIC_KEY

_ARRAYS: dict[str, type[np.generic]] = {"features.npy": np.int16, "labels.npy": np.int16, "record_ids.npy": np.int64}

OF_OTHER_RECORDS = (
    "The guarantee covers the records that answer. It says nothing about the other private records that the backbone "
    "was fitted on."
)

_DIGESTS = ("persons.npy", "image_digests.npy")
"""Arrays that a private shard may have."""


class Shard:
    """One finished shard, opened for reading; make one with `Shard.open`.

    Arrays hold every row, deleted ones included, so that row numbers stay; use `alive` or `rows`.

    Attributes:
        features: int16, shape (n, dimension), memory-mapped, read-only.
        labels: int16, shape (n,), or (n, C) where `has_attributes`. Secret in a private shard; in a public one only for
            scoring.
        record_ids: int64, shape (n,).
        persons: int64, shape (n, 2), equal for records of one person; None where the shard knows none. Secret.
        image_digests: int64, shape (n, 2), equal for equal images; None where they were not compared. Secret.
        classes, fingerprint, backbone, dimension, erasures, job: see `Manifest`.
        has_attributes: whether a record may have any number of the classes, rather than exactly one.
        knows_persons: whether it was set up with the person of each record; a public fact.
        max_records: a public bound on its records, declared when it was set up; None where nothing was declared.
        site_key: name of the key of its digests; those of two shards compare only where it is the same.
    """

    def __init__(self, path: Path, manifest: Manifest, arrays: dict[str, NDArray[Any]]) -> None:
        self.path = path
        self._manifest = manifest
        self._arrays = arrays
        self.features: NDArray[np.int16] = arrays["features.npy"]
        self.labels: NDArray[np.int16] = arrays["labels.npy"]
        self.record_ids: NDArray[np.int64] = arrays["record_ids.npy"]
        self.persons: NDArray[np.int64] | None = arrays.get("persons.npy")
        self.image_digests: NDArray[np.int64] | None = arrays.get("image_digests.npy")
        self.is_public = manifest.role == "public"
        self.classes = manifest.classes
        self.has_attributes = manifest.attributes
        self.fingerprint = manifest.fingerprint
        self.backbone = manifest.backbone
        self.dimension = manifest.dimension
        self.knows_persons = self.persons is not None
        self.max_records = manifest.max_records
        self.site_key = manifest.site_key
        self.erasures = manifest.erasures
        self.job = manifest.job

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Shard:
        """Open a shard.

        Args:
            verify: read every file once and compare checksums; without it only names, sizes, types and shapes
                are checked, which is fast and enough for a shard this process has verified before.

        Raises:
            BadData: the folder is no finished shard.
            DamagedShard: a file is missing, truncated, altered, or of the wrong shape.
        """
        folder = Path(path)
        folder = folder if folder.name else folder.absolute()  # messages name it
        while True:
            manifest = read_manifest(folder)
            try:
                shard = cls._opened(folder, manifest)
                if verify:
                    shard.verify()
                return shard
            except (DamagedShard, FileNotFoundError):
                # Another process may have erased deleted records since: then there are other files by now.
                if read_manifest(folder) == manifest:
                    raise

    @classmethod
    def _opened(cls, folder: Path, manifest: Manifest) -> Shard:
        _check_files(folder, manifest)
        if manifest.role == "private":
            keep_private(folder, [*map(manifest.stored, manifest.files), MANIFEST_NAME])
        kinds = _ARRAYS | {name: np.int64 for name in _DIGESTS if name in manifest.files}
        arrays = {name: _map_array(folder, manifest.stored(name), kind) for name, kind in kinds.items()}
        shard = cls(folder, manifest, arrays)
        shard._check_shapes()
        return shard

    def verify(self) -> None:
        """Read every file once, and compare checksums and values.

        Raises:
            DamagedShard: a file was altered.
        """
        for name, stated in self._manifest.files.items():
            if sum_file(self.path / self._manifest.stored(name)) != stated:
                raise DamagedShard(
                    f"shard {self.path.name!r}: the bytes of {name} do not match its checksum; embed the images again"
                )
        self._check_values()

    @property
    def not_covered(self) -> str:
        """Private records that the guarantee does not cover, in a sentence; empty where there are none."""
        return OF_OTHER_RECORDS if self.backbone.get("fitted_on") == "other-records" else ""

    @property
    def probe(self) -> str | None:
        """A public probe's features as its maker embedded them (feature_store.rows); None where this program did."""
        return str(self.backbone.get("probe", "")) if self.backbone.get("kind") == "features" else None

    @cached_property
    def version(self) -> str:
        """A digest that changes when a record is deleted.

        A bound that is declared later changes no record, and no noise that is drawn for them.
        """
        return self._manifest.model_copy(update={"max_records": None}).version

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """Rows that are not deleted, shape (n,)."""
        # Not isin, which goes another way where few are deleted. No record has the id behind the last one.
        deleted = np.append(np.sort(np.array(self._manifest.deleted, dtype=np.int64)), -1)
        alive: NDArray[np.bool_] = deleted[np.searchsorted(deleted[:-1], self.record_ids)] != self.record_ids
        return alive

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Row numbers that are not deleted, ascending."""
        return np.flatnonzero(self.alive)

    def labels_as(self, classes: Sequence[str]) -> NDArray[np.int16]:
        """Return the labels of all rows as places in another class list, matched by name; -1 where it has none.

        Returns:
            Shape (n,); of attributes (n, len(classes)), all unknown unless the shard has each of these attributes.
        """
        labels = np.asarray(self.labels)
        if same_names(classes, self.classes):
            return labels
        names, wanted = list(map(one_spelling, self.classes)), list(map(one_spelling, classes))
        if not self.has_attributes:
            places = [wanted.index(name) if name in wanted else -1 for name in names]
            return np.array([*places, -1], dtype=np.int16)[labels]
        if not set(wanted) <= set(names):
            return np.full((len(labels), len(wanted)), -1, dtype=np.int16)
        return labels[:, [names.index(name) for name in wanted]]

    @cached_property
    def sources(self) -> list[str]:
        """Name of each row's image within its source, deleted rows included."""
        lines = self._lines("sources.jsonl")
        if len(lines) != self._manifest.records or not all(isinstance(line, str) for line in lines):
            raise DamagedShard(f"shard {self.path.name!r}: sources.jsonl does not hold one name per record")
        return lines

    @cached_property
    def skipped(self) -> tuple[Skipped, ...]:
        """Images that were left out when the shard was made."""
        return tuple(Skipped(*line) for line in self._lines("skipped.jsonl"))

    def __len__(self) -> int:
        """Records that are not deleted."""
        return self._manifest.records - len(self._manifest.deleted)

    def __repr__(self) -> str:
        if not self.is_public:
            return f"<private shard {self.path.name!r}: dimension {self.dimension}, records and labels not shown>"
        return f"<public shard {self.path.name!r}: {len(self)} records, dimension {self.dimension}, labels not shown>"

    def drawn(self, records: int) -> Shard:
        """Return a shard in memory with the public facts of this one and drawn rows; it reads none of its records."""
        rng, classes = np.random.default_rng(records), len(self.classes)
        shape, values = ((records, classes), 2) if self.has_attributes else ((records,), classes)
        arrays: dict[str, NDArray[Any]] = {
            "features.npy": quantize(rng.normal(size=(records, self.dimension))),
            "labels.npy": rng.integers(0, values, size=shape, dtype=np.int16),
            "record_ids.npy": rng.permutation(records),
        }
        for name in _DIGESTS:
            if name in self._arrays:
                arrays[name] = rng.integers(0, 2**62, size=(records, DIGEST_WORDS))
        manifest = self._manifest.model_copy(update={"records": records, "deleted": (), "job": "drawn"})
        return Shard(Path("drawn"), manifest, arrays)

    def thumbnails(self, record_ids: Sequence[int] | NDArray[np.int64]) -> dict[int, bytes]:
        """PNG bytes per record id, for those that have a picture; empty for a shard made without."""
        path = self.path / self._manifest.stored("thumbnails.parquet")
        if not path.exists():
            return {}
        wanted = [int(record_id) for record_id in record_ids]
        table = pq.read_table(path, filters=[("record_id", "in", wanted)]) if wanted else None
        if table is None:
            return {}
        return dict(zip(table["record_id"].to_pylist(), table["png"].to_pylist(), strict=True))

    def delete(self, record_ids: Sequence[int] | NDArray[np.int64]) -> int:
        """Delete records for good: they are marked in the manifest in one atomic step, and `version` changes.

        No index built from `rows` sees a marked row; its bytes stay until `feature_store.shard_writer.erase_deleted`.
        Repeating a deletion changes nothing.

        Returns:
            How many were not deleted before.

        Raises:
            BadData: an id this shard never held.
            InvalidSetting: nothing would be left; delete the folder instead.
            OutputInUse: another process is deleting, or has erased deleted records since this shard was opened.
        """
        asked = np.unique(np.asarray(record_ids, dtype=np.int64))
        unknown = int((~np.isin(asked, self.record_ids)).sum())
        if unknown:
            raise BadData(
                f"{unknown} of {len(asked)} record ids are not in shard {self.path.name!r}; nothing was deleted"
            )
        with exclusive(self.path / ".lock", f"shard {self.path.name!r}"):
            manifest = read_manifest(self.path)
            if manifest.erasures != self._manifest.erasures:
                raise OutputInUse(f"another process erased records of shard {self.path.name!r}; try again")
            deleted = np.union1d(np.array(manifest.deleted, dtype=np.int64), asked)
            if len(deleted) >= manifest.records:
                raise InvalidSetting(
                    f"deleting these would leave shard {self.path.name!r} without a record; remove its folder instead"
                )
            changed = manifest.model_copy(update={"deleted": tuple(deleted.tolist())})
            if len(deleted) > len(manifest.deleted):
                # The moment first: on a full disk nothing is deleted, and no deletion is without its moment.
                lines = [*deletions(self.path), now_utc().isoformat(timespec="seconds")]
                mode = 0o600 if manifest.role == "private" else 0o644
                replace_file(self.path / DELETIONS_NAME, "".join(f"{one}\n" for one in lines).encode(), mode=mode)
                write_manifest(self.path, changed)
        self._manifest = changed
        for known in ("alive", "rows", "version"):
            self.__dict__.pop(known, None)
        return len(deleted) - len(manifest.deleted)

    def _lines(self, name: str) -> list[Any]:
        path = self.path / self._manifest.stored(name)
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            raise DamagedShard(f"shard {self.path.name!r}: {name} cannot be read; embed the images again") from None

    def _check_shapes(self) -> None:
        records = self._manifest.records
        shapes = (self.features.shape, self.labels.shape, self.record_ids.shape)
        labels = (records, len(self.classes)) if self.has_attributes else (records,)
        if shapes != ((records, self.dimension), labels, (records,)):
            raise DamagedShard(
                f"shard {self.path.name!r}: its manifest states {records} records of dimension {self.dimension}, "
                f"its arrays have the shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
            )
        for digests in (self.persons, self.image_digests):
            if digests is not None and digests.shape != (records, DIGEST_WORDS):
                raise DamagedShard(
                    f"shard {self.path.name!r}: its manifest states {records} records, and digests of persons or "
                    f"images have the shape {digests.shape}"
                )
        if len(self._manifest.deleted) >= records:
            raise DamagedShard(f"shard {self.path.name!r} states more deletions than leave a record")

    def _check_values(self) -> None:
        name = self.path.name
        check_labels(np.asarray(self.labels), self.classes, public=self.is_public, error=DamagedShard)
        if len(np.unique(self.record_ids)) != len(self.record_ids) or self.record_ids.min() < 0:
            raise DamagedShard(f"shard {name!r}: record ids are not unique and non-negative")
        if not np.isin(np.array(self._manifest.deleted, dtype=np.int64), self.record_ids).all():
            raise DamagedShard(f"shard {name!r} states deletions of records it does not hold")
        # Features were checked when they were written, their bytes match the checksum, and every index checks them
        # again at its own door: a third reading of the largest file would only cost time.


def check_features(features: NDArray[np.int16]) -> None:
    """Refuse rows that `quantize` cannot have made: inner products of longer ones would not be exact in float32."""
    wide = features.astype(np.int64)
    squares = np.einsum("ij,ij->i", wide, wide)
    limit = largest_square_length(features.shape[1])
    if squares.size and (squares.min() == 0 or squares.max() > limit):
        raise BadData(f"features must be rows of length 2048, rounded (squared length from 1 to {limit}); use quantize")


def check_labels(
    labels: NDArray[np.integer], classes: Sequence[str], *, public: bool, error: type[BadData] = BadData
) -> None:
    """Refuse a label outside the class list without saying which, and unlabeled private records.

    Args:
        labels: shape (n,), places in the list; or (n, C), which of the classes a record has.
        classes, public, error: of the shard, and what to raise.
    """
    lowest = -1 if public else 0
    if labels.ndim == 2:
        unknown = (labels < 0).any(axis=1)
        if labels.shape[1] != len(classes) or (
            labels.size and (labels.min() < lowest or labels.max() > 1 or (labels[unknown] != -1).any())
        ):
            raise error(
                f"a record has 0 or 1 for each of {len(classes)} attributes"
                + ("; every private record needs all" if not public else ", or -1 for all of them where it is unknown")
            )
        return
    if labels.size and (labels.min() < lowest or labels.max() >= max(len(classes), 0 if public else 1)):
        unlabelled = "; every private record needs one" if not public else " or -1 where the truth is unknown"
        raise error(f"a label is outside the class list: labels must be from 0 to {len(classes) - 1}{unlabelled}")


def check_compatible(shards: Sequence[Shard]) -> None:
    """Check that shards can take part in one task.

    Raises:
        MixedShards: two differ in backbone, dimension or class list; the message names them.
        InvalidSetting: no shard at all.
    """
    if not shards:
        raise InvalidSetting("at least one shard is needed, found none")
    first = shards[0]
    private = [shard for shard in shards if not shard.is_public]
    has_attributes = any(shard.has_attributes for shard in private or shards)
    # The labels of public images only score. They are matched by name (`labels_as`), so their list may be another one.
    named = next((shard for shard in private if shard.classes), first)
    for shard in shards:
        # Public images without attributes can be asked about, only not scored.
        if shard.has_attributes != has_attributes and (shard.has_attributes or not shard.is_public):
            raise MixedShards(
                f"shard {shard.path.name!r} holds {'attributes' if shard.has_attributes else 'one class per record'}, "
                "and others do not; embed all of them from one kind of labels"
            )
        pair = f"shards {first.path.name!r} and {shard.path.name!r}"
        if shard.fingerprint != first.fingerprint:
            raise MixedShards(
                f"{pair} come from different backbones (fingerprints {first.fingerprint[:12]} and "
                f"{shard.fingerprint[:12]}); embed both with "
                + (
                    "one --backbone-name, and one word for what it was fitted on"
                    if first.probe is not None and shard.probe is not None
                    else "the same weights, options and transform"
                )
            )
        if shard.dimension != first.dimension:
            raise MixedShards(f"{pair} have different dimensions: {first.dimension} and {shard.dimension}")
        if not shard.is_public and shard.classes and not same_names(shard.classes, named.classes):
            raise MixedShards(
                f"shards {named.path.name!r} and {shard.path.name!r} have different class lists "
                f"({len(named.classes)} and {len(shard.classes)} names, or another order); embed both with one list"
            )
    if any(shard.probe is not None for shard in shards):
        try:
            refuse_other_probes([(f"shard {one.path.name!r}", one.probe or "") for one in shards], first.dimension)
        except BadData as error:
            raise MixedShards(str(error)) from None


def _check_files(folder: Path, manifest: Manifest) -> None:
    missing = (_ARRAYS.keys() | {"sources.jsonl", "skipped.jsonl"}) - manifest.files.keys()
    if missing:
        raise DamagedShard(f"the manifest of shard {folder.name!r} does not list {', '.join(sorted(missing))}")
    if manifest.role == "private" and "thumbnails.parquet" in manifest.files:
        raise DamagedShard(f"private shard {folder.name!r} holds pictures, which only a public shard may")
    if manifest.role == "public" and (
        "persons.npy" in manifest.files or manifest.site_key not in (None, PUBLIC_KEY.name)
    ):
        raise DamagedShard(
            f"public shard {folder.name!r} holds digests of persons or of a site, which only a private may"
        )
    for name, stated in manifest.files.items():
        path = folder / manifest.stored(name)
        if Path(name).name != name or not path.is_file():
            raise DamagedShard(f"shard {folder.name!r}: file {name!r} is missing; embed the images again")
        size = path.stat().st_size
        if size != stated.bytes:
            raise DamagedShard(
                f"shard {folder.name!r}: {name} has {size} bytes, its manifest states {stated.bytes}; it was "
                "truncated or replaced, embed the images again"
            )


def _map_array(folder: Path, name: str, kind: type[np.generic]) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(str(folder / name), mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise DamagedShard(f"shard {folder.name!r}: {name} is no array file; embed the images again") from None
    if array.dtype != np.dtype(kind):
        raise DamagedShard(f"shard {folder.name!r}: {name} holds {array.dtype}, {np.dtype(kind)} is needed")
    return array


def check_served(shard: Shard) -> None:
    """Refuse a shard that no agent of a service may answer from.

    Raises:
        InvalidSetting: it is public, declares no bound on its records, or its backbone knows other private records.
    """
    name = shard.path.name
    if shard.is_public:
        raise InvalidSetting(f"{name!r} is a public shard; an agent answers from private records")
    if shard.max_records is None:
        raise InvalidSetting(
            f"shard {name!r} declares no public bound on its records, and how long an agent takes would tell how many "
            f"there are. Choose a round number before you count, with room for records that come: labeler declare "
            f"{name} --max-records 10000"
        )
    if shard.not_covered:
        raise InvalidSetting(
            f"shard {name!r} has features of a backbone that was fitted on other private records, and a service states "
            "a guarantee for all of them; fit the backbone on public data and embed again"
        )


def declare_most(path: Path, max_records: int) -> bool:
    """Write a public bound on its records into the manifest of a private shard, once; return False where it has it.

    Raises:
        InvalidSetting: the shard is public, declares another bound, or holds more.
        OutputInUse: another process changes the shard.
    """
    read_manifest(path)
    with exclusive(path / ".lock", f"shard {path.name!r}"):
        manifest = read_manifest(path)
        if manifest.role != "private":
            raise InvalidSetting(f"shard {path.name!r} is a public one; a bound is declared of private records")
        if manifest.max_records == max_records:
            return False
        if manifest.max_records is not None:
            raise InvalidSetting(
                f"shard {path.name!r} declares at most {manifest.max_records} records, and others may count on it; "
                "embed the images again to declare another bound"
            )
        if max_records < manifest.records:
            raise InvalidSetting(
                f"shard {path.name!r} holds more records than that; nothing was declared. Choose a round number with "
                "room"
            )
        write_manifest(path, manifest.model_copy(update={"max_records": max_records}))
    return True


MARK_NAME: Final = "answers-for.json"

_VERSION: Final = "labeler-shard-mark/1"


def claim(folder: Path, *, agent_id: str, journal: str) -> None:
    """Mark a private shard as answering for one journal, or refuse it; see the module.

    Once it is marked it is only read, so its folder may be read-only from then on.

    Args:
        folder: of the shard.
        agent_id: whose journal it is; for people.
        journal: hash of the first entry of the agent's ledger.

    Raises:
        BadData: it answers for another journal, or its mark cannot be read or written.
        OutputInUse: another process marks it at this moment, or deletes records of it.
    """
    if _is_marked(folder, journal):
        return
    mark = {"version": _VERSION, "agent": agent_id, "journal": journal}
    try:
        with exclusive(folder / ".lock", f"shard {folder.name!r}"):
            if not _is_marked(folder, journal):
                replace_file(folder / MARK_NAME, (json.dumps(mark) + "\n").encode(), mode=0o600)
    except OSError as error:
        raise BadData(
            f"shard {folder.name!r} cannot be marked ({error.strerror}), so another home could answer from it with a "
            "budget of its own. Let this agent write to its folder once; when it has started, the folder may be "
            "read-only"
        ) from error


def _is_marked(folder: Path, journal: str) -> bool:
    """Return True if a shard answers for this journal, False if it answers for none yet."""
    try:
        mark = json.loads((folder / MARK_NAME).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        mark = None
    if not isinstance(mark, dict) or mark.get("version") != _VERSION or not isinstance(mark.get("journal"), str):
        raise BadData(
            f"{MARK_NAME} in shard {folder.name!r} cannot be read, so nobody knows which home answers from it. "
            f"{_HAND_OVER}"
        )
    if mark["journal"] != journal:
        raise BadData(
            f"shard {folder.name!r} answers for another home, of agent {mark.get('agent')!r} (journal "
            f"{mark['journal'][:16]}): with a second home each of its records would have a second budget. {_HAND_OVER}"
        )
    return True


_HAND_OVER = (
    "To hand it over: stop the old home for good, have its keys revoked (`labeler keys revoke`), write off what it has "
    "left (`labeler journal write-off --home OLD --account agent:NAME`), give the new policy no more than was left, "
    f"and then delete {MARK_NAME} from the shard's folder"
)


MANIFEST_NAME = "manifest.json"
_READ_BYTES = 1 << 24


class FileSum(BaseModel):
    """Size in bytes and SHA-256 of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The description of a shard.

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
        erasures: how often its files were rewritten, to erase deleted records or to bring it up to date with its
            source; the number in the names of files.
        max_records: a public bound on `records`, declared before they were counted; writing more is refused. None where
            nothing was declared.
        attributes: whether a record may have any number of the classes (feature_store.sources), and not just one.
        site_key: name of the key of its digests of persons and images (labeler.system.site_key); None without any.
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
    max_records: Annotated[int, Field(ge=1)] | None = None
    attributes: bool = False
    erasures: Annotated[int, Field(ge=0)] = 0

    def stored(self, name: str) -> str:
        """Name in the folder of a file of the layout."""
        stem, _, suffix = name.partition(".")
        return f"{stem}.{self.erasures}.{suffix}" if self.erasures else name

    @model_validator(mode="after")
    def _check_bound(self) -> Manifest:
        if self.max_records is not None and (self.role != "private" or self.records > self.max_records):
            raise ValueError("a bound on records is kept by private shards, and by all of them that state one")
        return self

    @property
    def version(self) -> str:
        """SHA-256 over everything above: it changes with every deletion, so an index built before can be told apart."""
        return hashlib.sha256(_canonical(self)).hexdigest()


DELETIONS_NAME = "deletions.txt"


def deletions(folder: Path) -> tuple[str, ...]:
    """Return when records of a shard were deleted, oldest first: moments (UTC), and nothing of which or how many."""
    with suppress(FileNotFoundError):
        return tuple((folder / DELETIONS_NAME).read_text().split())
    return ()


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        NotThere: there is no such folder.
        BadData: the folder is no shard, or one that was never finished.
        DamagedShard: the manifest's own checksum or fields are wrong.
    """
    folder = folder.absolute()  # `.` has an empty name
    path = folder / MANIFEST_NAME
    if not folder.exists():
        raise NotThere(f"{folder.name!r} is no finished shard: there is no such folder; make one with labeler embed")
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
    # Left out where there was none: manifests of before keep their checksum.
    fields = manifest.model_dump(mode="json", exclude=None if manifest.erasures else {"erasures"})
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
