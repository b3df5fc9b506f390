"""A writer of shards, batch by batch. An interrupted job resumes where it stopped, and nobody sees half a shard.

A hidden folder next to the shard gathers the rows. After each batch a small state file records how many bytes of each
file are valid. A crash may leave more bytes; resuming cuts them off. `finish` turns the rows into the shard's files in
another hidden folder and renames that folder. So a shard is complete or absent. Only their owner can read the folders
and files of a private shard, even half-written ones.

A writer with `update` may also replace a finished shard. Its files go into the folder of that shard under the
next number, and one rename of the manifest switches to them. Ids and features of images that are there
already stay. Rows that an interrupted writer gathered of another listing are set aside and used again.

`erase_deleted` rewrites a shard without its deleted records, so that their bytes are in none of its files.
More than 600 lines: the three ways in which files of a shard are written must be read together.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from feature_store.decode import Skipped
from feature_store.rows import quantize
from feature_store.shard import (
    FileSum,
    Manifest,
    Shard,
    check_features,
    check_labels,
    read_manifest,
    sum_file,
    write_manifest,
)
from labeler.errors import BadData, DamagedShard, InvalidSetting, NoUsableImage, OutputInUse
from labeler.settings import one_spelling
from labeler.system.files import PRIVATE_FILE, PRIVATE_FOLDER, exclusive, replace_file, sync_folder
from labeler.system.site_key import DIGEST_WORDS, Digests
from labeler.task import can_name_a_class

_PARTS = (
    "features", "labels", "sources", "skipped", "thumbnails", "thumbnail_sizes", "persons", "image_digests",
)  # fmt: skip
_STATE = "state.json"
_OF_FEATURES = ("fingerprint", "dimension", "site_key")
"""The parts of a writer's identity on which features and digests of images depend."""

_ROWS_PER_BLOCK = 8192
_SCANNED_BYTES = 1 << 24
_NEWLINE = ord("\n")


@dataclass(frozen=True, eq=False)
class Gathered:
    """The rows that a writer has gathered so far, in their order. Private; does not print.

    Attributes:
        features: int16, shape (n, dimension), memory-mapped.
        labels: int16, shape (n,), or (n, C) of attributes.
        persons: int64, shape (n, 2), or None.
        image_digests: int64, shape (n, 2), or None.
    """

    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    persons: Digests | None = field(repr=False)
    image_digests: Digests | None = field(repr=False)


@dataclass(eq=False, repr=False)
class ShardWriter:
    """Gathers records and makes a shard of them. Use it in a `with` block, which locks the folder for this process.

    Attributes:
        path: the folder that becomes the shard; it must not exist yet.
        classes: public class list in label order; at least two names for a private shard.
        fingerprint: the fingerprint of the backbone that made the features.
        dimension: numbers in a feature.
        public: True for a public shard, False for a private one.
        backbone: the backbone's description, for people.
        job: digest of what is being embedded; only a writer with the same digest may resume.
        site_key: name of the key that makes the digests of persons and images; required if there are any.
        max_records: a public bound on the records of a private shard; `finish` refuses more.
        attributes: True if a record may have any number of classes, False if it has exactly one.
        update: take the place of a finished shard of this path, if there is one.
        random_bytes: source of record ids and of the order of private rows.
        records: rows appended so far, those of an interrupted writer included.
        position: how far the caller had read its source (see `append`).
    """

    path: Path
    _: KW_ONLY
    classes: Sequence[str]
    fingerprint: str
    dimension: int
    public: bool
    backbone: Mapping[str, Any] = field(default_factory=dict)
    job: str = ""
    site_key: str | None = None
    max_records: int | None = None
    attributes: bool = False
    update: bool = False
    random_bytes: Callable[[int], bytes] = os.urandom
    records: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._work = half_written(self.path)
        self._replaced: Shard | None = None
        self._sizes = dict.fromkeys(_PARTS, 0)
        self._open = contextlib.ExitStack()
        check_classes(tuple(self.classes), public=self.public)
        if self.dimension < 1 or not self.fingerprint:
            raise InvalidSetting(f"a shard needs a fingerprint and a dimension of at least 1, found {self.dimension}")
        if self.max_records is not None and (self.public or self.max_records < 1):
            raise InvalidSetting(f"a private shard keeps a bound of at least 1 record; found {self.max_records}")
        self._refuse_existing()

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        self._open.enter_context(exclusive(lock, f"the output {self.path.name!r}"))
        try:
            # Another writer may have finished between our first look and the lock.
            self._refuse_existing()
            if self.update and self.path.exists():
                self._replaced = Shard.open(self.path)
                self.max_records = self.max_records or self._replaced.max_records
            self._work.mkdir(mode=self._folder_mode, exist_ok=True)
            self._work.chmod(self._folder_mode)
            self._resume()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def append(
        self,
        features: NDArray[np.floating] | NDArray[np.int16],
        labels: NDArray[np.integer],
        sources: Sequence[str],
        *,
        thumbnails: Sequence[bytes] | None = None,
        persons: Digests | None = None,
        image_digests: Digests | None = None,
        skipped: Sequence[Skipped] = (),
        position: int | None = None,
    ) -> None:
        """Add one batch. Once this returns, the batch survives a crash.

        Args:
            features: floats, which are quantized here, or int16 made by `quantize`; shape (n, dimension).
            labels: positions in the class list, shape (n,); -1 for unknown, in public shards only. For attributes, 1
                and 0 of shape (n, C).
            sources: name of each image within its source.
            thumbnails: PNG bytes per record; public shards only, and for all batches or none.
            persons: the person of each record, as a digest under the site's key, shape (n, 2); private shards only, and
                for all batches or none.
            image_digests: a digest of each image, shape (n, 2); for all batches or none.
            skipped: images of this batch that were left out.
            position: how far the caller has read its source; a resumed writer reports it.

        Raises:
            BadData: shapes that do not match, features without direction, labels outside the class list.
            InvalidSetting: thumbnails of private images.
        """
        rows = features if features.dtype == np.int16 else quantize(features.astype(np.float64, copy=False))
        of_a_record = labels.shape[1:] == ((len(self.classes),) if self.attributes else ())
        if rows.shape != (len(labels), self.dimension) or len(sources) != len(labels) or not of_a_record:
            raise BadData(
                f"a batch needs as many features of dimension {self.dimension} as labels and sources; found "
                f"features {features.shape}, labels {labels.shape} and {len(sources)} sources"
            )
        check_features(rows.astype(np.int16, copy=False))
        check_labels(labels, self.classes, public=self.public)
        if thumbnails is not None and not self.public:
            raise InvalidSetting("pictures are kept in public shards only; a private shard holds features and no image")
        if thumbnails is not None and len(thumbnails) != len(labels):
            raise BadData(f"found {len(thumbnails)} thumbnails for {len(labels)} records")
        if self.public and persons is not None:
            raise InvalidSetting("digests of persons are kept in private shards only")
        for digests in (persons, image_digests):
            if digests is not None and (digests.shape != (len(labels), DIGEST_WORDS) or digests.dtype != np.int64):
                raise BadData(f"found digests of shape {digests.shape} for {len(labels)} records")
            if digests is not None and self.site_key is None:
                raise InvalidSetting("digests of persons and images are kept with the name of the key they are under")
        self._extend("features", np.ascontiguousarray(rows, dtype="<i2").tobytes())
        self._extend("labels", np.ascontiguousarray(labels, dtype="<i2").tobytes())
        self._extend("sources", _json_lines(sources))
        self._extend("skipped", _json_lines([[each.source, each.reason] for each in skipped]))
        if thumbnails is not None:
            self._extend("thumbnails", b"".join(thumbnails))
            self._extend("thumbnail_sizes", np.array([len(png) for png in thumbnails], dtype="<i8").tobytes())
        for part, digests in (("persons", persons), ("image_digests", image_digests)):
            if digests is not None:
                self._extend(part, np.ascontiguousarray(digests, dtype="<i8").tobytes())
        self.records += len(labels)
        self.position = self.position + len(labels) if position is None else position
        self._commit()

    def gathered(self) -> Gathered:
        """Return everything appended so far, including the rows of an interrupted writer.

        Raises:
            BadData: only some batches had persons, or digests of images.
        """
        return Gathered(self._features(), self._labels(), self._digests("persons"), self._digests("image_digests"))

    def check_replaced(self, *, knows_persons: bool) -> None:
        """Refuse to bring a shard up to date under other settings than it was made with.

        Raises:
            InvalidSetting: its backbone, class list, site key or bound differs, or only one of both knows people.
        """
        shard = self._replaced
        if shard is None:
            return
        theirs = (shard.is_public, shard.fingerprint, shard.classes, shard.has_attributes, shard.knows_persons)
        ours = (self.public, self.fingerprint, tuple(self.classes), self.attributes, knows_persons)
        if theirs != ours or shard.site_key != self.site_key or shard.max_records != self.max_records:
            raise InvalidSetting(
                f"shard {self.path.name!r} was made with another backbone, class list, bound on records or site key, "
                "or with other words about people. Go back to those settings; or move the shard away, and everything "
                "is embedded again"
            )

    def known_rows(self) -> dict[bytes, NDArray[np.int16]]:
        """Return the features of images that were embedded already, by the digest of the image.

        They come from the shard that is there, and from interrupted writers of other listings.
        """
        known: dict[bytes, NDArray[np.int16]] = {}
        if self._replaced is not None and self._replaced.image_digests is not None:
            for row in self._replaced.rows.tolist():
                known[self._replaced.image_digests[row].astype("<i8").tobytes()] = self._replaced.features[row]
        for folder in set_aside(self.path):
            state = _read_state(folder, self.path.name)
            ours = self._identity()
            if state is None or any(state.identity.get(name) != ours[name] for name in _OF_FEATURES):
                continue
            shape = (state.records, self.dimension)
            if state.records and state.sizes["image_digests"]:
                rows = np.memmap(folder / "features", dtype="<i2", mode="r", shape=shape)
                digests = np.fromfile(folder / "image_digests", dtype="<i8").reshape(-1, DIGEST_WORDS)
                known |= {key.tobytes(): row for key, row in zip(digests[: state.records], rows, strict=True)}
        return known

    def finish(self, *, keep: NDArray[np.bool_] | None = None) -> bool:
        """Write the shard in one atomic step and remove the working folder.

        Args:
            keep: one entry per appended record, in order: True if the shard keeps it. By default it keeps all.

        Returns:
            False if the shard that is there holds all of this and nothing else; it is left as it is.

        Raises:
            NoUsableImage: no record was appended.
            BadData: only some batches had thumbnails, persons or digests of images.
        """
        if keep is not None and self.public:
            raise InvalidSetting("every public image is kept: a question must not vanish")
        kept = np.arange(self.records) if keep is None else np.flatnonzero(keep)
        if not len(kept):
            left_out = [(one.source, one.reason) for one in self.skipped()]
            message = f"nothing to keep: shard {self.path.name!r} would be empty, since no image of it can be used"
            if self.public and left_out:  # an agent logs the message, and numbers and sizes of private files are secret
                reasons = Counter(reason for _, reason in left_out).most_common(5)
                message += ": " + "; ".join(f"{count} {reason}" for reason, count in reasons)
            raise NoUsableImage(message, left_out=left_out)
        if self.max_records is not None and len(kept) > self.max_records:
            raise InvalidSetting(
                f"shard {self.path.name!r} would hold {len(kept)} records, and was declared to hold at most "
                f"{self.max_records} (--max-records), which tasks count on; take some out, or declare a larger bound: "
                "nothing is embedded anew. Choose it in advance, in round numbers: whoever sees it should learn nothing"
            )
        final = self._work / "final"
        if final.exists():
            shutil.rmtree(final)
        final.mkdir(mode=self._folder_mode)
        ids = self._ids(kept)
        # A public shard keeps the source's order. In a private shard that order would reveal which records were
        # neighbors in a folder, so it is sorted by random id. Sorting lets an index read the file front to back.
        order = np.arange(len(kept)) if self.public else np.argsort(ids)
        ids, order = ids[order], kept[order]
        if self._is_there(ids, order):
            self._remove_work()
            return False
        _write_features(final / "features.npy", self._features(), order)
        np.save(final / "labels.npy", self._labels()[order])
        np.save(final / "record_ids.npy", ids)
        _reorder_lines(self._work / "sources", final / "sources.jsonl", order)
        shutil.copyfile(self._work / "skipped", final / "skipped.jsonl")
        if self._sizes["thumbnail_sizes"]:
            self._write_thumbnails(final, ids)
        has_digests = False
        for part in ("persons", "image_digests"):
            digests = self._digests(part)
            if digests is not None:
                np.save(final / f"{part}.npy", digests[order])
                has_digests = True
        manifest = Manifest(
            role="public" if self.public else "private",
            fingerprint=self.fingerprint,
            backbone=dict(self.backbone),
            dimension=self.dimension,
            classes=tuple(self.classes),
            records=len(kept),
            job=self.job,
            site_key=self.site_key if has_digests else None,
            max_records=self.max_records,
            attributes=self.attributes,
            files={file.name: sum_file(file) for file in sorted(final.iterdir())},
            erasures=0 if self._replaced is None else self._replaced.erasures + 1,
        )
        for file in final.iterdir():
            file.chmod(self._file_mode)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if self._replaced is None:
            write_manifest(final, manifest)
            final.rename(self.path)
            sync_folder(self.path.parent)
        else:
            self._take_place(self._replaced, final, manifest)
        self._remove_work()
        return True

    def _remove_work(self) -> None:
        for folder in (self._work, *set_aside(self.path)):
            (folder / _STATE).unlink(missing_ok=True)  # first: what a kill leaves then holds no rows for anybody
            shutil.rmtree(folder)

    def _is_there(self, ids: NDArray[np.int64], order: NDArray[np.int64]) -> bool:
        """Tell whether the shard that is there holds exactly these rows, made of this listing."""
        shard, names = self._replaced, self.sources()
        return (
            shard is not None
            and shard.job == self.job
            and len(shard) == len(shard.record_ids)
            and np.array_equal(shard.record_ids, ids)
            and np.array_equal(shard.labels, self._labels()[order])
            and np.array_equal(shard.features, self._features()[order])
            and shard.sources == [names[row] for row in order.tolist()]
            and shard.skipped == self.skipped()
        )

    def begin_again(self) -> None:
        """Set aside what an interrupted writer gathered: `known_rows` finds its rows by their images."""
        number = 1 + max((int(folder.suffix[1:]) for folder in set_aside(self.path)), default=0)
        self._work.rename(self._work.with_name(f"{self._work.name}.{number}"))
        self._work.mkdir(mode=self._folder_mode)
        self.records, self.position, self._sizes = 0, 0, dict.fromkeys(_PARTS, 0)
        for part in _PARTS:
            (self._work / part).touch(mode=self._file_mode)

    def _take_place(self, shard: Shard, final: Path, manifest: Manifest) -> None:
        """Move finished files into the folder of a shard, and go over to them by its manifest."""
        with exclusive(self.path / ".lock", f"shard {self.path.name!r}"):
            now = Shard.open(self.path, verify=False)
            if (now.version, now.max_records) != (shard.version, self.max_records):
                raise OutputInUse(
                    f"shard {self.path.name!r} was changed while it was brought up to date, by a deletion for example; "
                    "give the same command again, nothing is embedded a second time"
                )
            try:
                for name in manifest.files:
                    (final / name).rename(self.path / manifest.stored(name))
                sync_folder(self.path)
                write_manifest(self.path, manifest)
            finally:
                _remove_unlisted(self.path, read_manifest(self.path))

    def _ids(self, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return an id for each kept row: that of the same image, label and person in the shard it replaces, or a new
        one that nothing ever had."""
        shard, persons, digests = self._replaced, self._digests("persons"), self._digests("image_digests")
        ids = _unique_ids(len(kept), self.random_bytes)
        if shard is None or shard.image_digests is None or digests is None:
            return ids
        while np.isin(ids, shard.record_ids).any():
            ids = _unique_ids(len(kept), self.random_bytes)
        known: dict[bytes, list[int]] = {}
        theirs = _identities(shard.rows, shard.image_digests, shard.labels, shard.persons)
        for row, key in zip(shard.rows, theirs, strict=True):
            known.setdefault(key, []).append(int(shard.record_ids[row]))
        for place, key in enumerate(_identities(kept, digests, self._labels(), persons)):
            if same := known.get(key):
                ids[place] = same.pop(0)
        return ids

    def sources(self) -> list[str]:
        """Return the names of the images appended so far, in their order."""
        return [json.loads(line) for line in (self._work / "sources").read_text(encoding="utf-8").splitlines()]

    def skipped(self) -> tuple[Skipped, ...]:
        """Return the images left out so far, including those of an interrupted writer."""
        lines = (self._work / "skipped").read_text(encoding="utf-8").splitlines()
        return tuple(Skipped(*json.loads(line)) for line in lines)

    def _features(self) -> NDArray[np.int16]:
        shape = (self.records, self.dimension)
        if not self.records:
            return np.empty(shape, dtype=np.int16)
        return np.memmap(self._work / "features", dtype="<i2", mode="r", shape=shape)

    def _write_thumbnails(self, final: Path, ids: NDArray[np.int64]) -> None:
        sizes = np.fromfile(self._work / "thumbnail_sizes", dtype="<i8")
        if len(sizes) != self.records:
            raise BadData(f"only {len(sizes)} of {self.records} records have a thumbnail; give all or none")
        schema = pa.schema([("record_id", pa.int64()), ("png", pa.binary())])
        with (
            (self._work / "thumbnails").open("rb") as pictures,
            pq.ParquetWriter(final / "thumbnails.parquet", schema) as parquet,
        ):
            for start in range(0, self.records, _ROWS_PER_BLOCK):
                block = [pictures.read(int(size)) for size in sizes[start : start + _ROWS_PER_BLOCK]]
                columns = {"record_id": ids[start : start + _ROWS_PER_BLOCK], "png": block}
                parquet.write_table(pa.table(columns, schema=schema))

    def _labels(self) -> NDArray[np.int16]:
        labels = np.fromfile(self._work / "labels", dtype="<i2").astype(np.int16)
        return labels.reshape(self.records, len(self.classes)) if self.attributes else labels

    def _digests(self, part: str) -> Digests | None:
        if not self._sizes[part]:
            return None
        found = np.fromfile(self._work / part, dtype="<i8").astype(np.int64)
        if len(found) != DIGEST_WORDS * self.records:
            raise BadData(
                f"only {len(found) // DIGEST_WORDS} of {self.records} records came with {part}; give all or none"
            )
        return found.reshape(self.records, DIGEST_WORDS)

    @property
    def _folder_mode(self) -> int:
        return 0o755 if self.public else PRIVATE_FOLDER

    @property
    def _file_mode(self) -> int:
        return 0o644 if self.public else PRIVATE_FILE

    def _extend(self, part: str, data: bytes) -> None:
        if not data:
            return
        with (self._work / part).open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._sizes[part] += len(data)

    def _refuse_existing(self) -> None:
        if self.path.exists() and not self.update:
            raise InvalidSetting(f"{self.path.name!r} exists already; choose another output, or delete it first")

    def _identity(self) -> dict[str, Any]:
        return {
            "classes": list(self.classes),
            "fingerprint": self.fingerprint,
            "dimension": self.dimension,
            "public": self.public,
            "job": self.job,
            "site_key": self.site_key,
            "attributes": self.attributes,
            **({} if self._replaced is None else {"replaces": self._replaced.version}),
        }

    def _commit(self) -> None:
        state = {
            "identity": self._identity(),
            "records": self.records,
            "position": self.position,
            "sizes": self._sizes,
        }
        replace_file(self._work / _STATE, json.dumps(state, ensure_ascii=False).encode(), mode=self._file_mode)

    def _resume(self) -> None:
        state = _read_state(self._work, self.path.name)
        if state is not None and state.identity != self._identity():
            if not self.update:
                raise InvalidSetting(
                    f"an interrupted job for {self.path.name!r} had another source, backbone or class list, or site "
                    f"key; finish that one, or delete the folder {self._work.name!r} and begin again"
                )
            self.begin_again()
        elif state is not None:
            self.records, self.position, self._sizes = state.records, state.position, dict(state.sizes)
        for part in _PARTS:
            (self._work / part).touch(mode=self._file_mode)
            with (self._work / part).open("ab") as file:
                if file.tell() < self._sizes[part]:
                    raise DamagedShard(
                        f"the interrupted output {self.path.name!r} lost bytes of {part}; "
                        f"delete the folder {self._work.name!r} and begin again"
                    )
                file.truncate(self._sizes[part])


@dataclass(frozen=True)
class _State:
    """The valid part of a half-written shard.

    Attributes:
        identity: what is written; only a writer of the same may go on.
        records, position: see `ShardWriter`.
        sizes: valid bytes of each part.
    """

    identity: Mapping[str, Any]
    records: int
    position: int
    sizes: Mapping[str, int]


def _read_state(work: Path, name: str) -> _State | None:
    try:
        state = json.loads((work / _STATE).read_bytes())
        sizes = {part: int(state["sizes"][part]) for part in _PARTS}
        return _State({"site_key": None} | state["identity"], int(state["records"]), int(state["position"]), sizes)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise DamagedShard(
            f"the state of the interrupted output {name!r} is damaged; delete the folder {work.name!r} and begin again"
        ) from None


def written_so_far(path: Path) -> int | None:
    """Return how far an interrupted or a running writer of a shard has read its source; None where there is none."""
    state = _read_state(half_written(path), path.name)
    return None if state is None else state.position


def _identities(
    rows: NDArray[np.int64], digests: Digests, labels: NDArray[np.int16], persons: Digests | None
) -> Iterator[bytes]:
    """Yield what makes a record the same record for life: its image, its label and its person."""
    for row in rows:
        yield digests[row].tobytes() + labels[row].tobytes() + (b"" if persons is None else persons[row].tobytes())


def set_aside(path: Path) -> list[Path]:
    """Return the folders of interrupted writers of a shard whose listing has changed since."""
    pattern = re.compile(re.escape(half_written(path).name) + r"\.[0-9]+")
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(one for one in found if pattern.fullmatch(one.name))


def half_written(path: Path) -> Path:
    """Return the folder in which a writer gathers the shard of a path."""
    return path.with_name(f".{path.name}.writing")


_FILE_OF_ROWS = re.compile(
    r"(features|labels|record_ids|persons|image_digests|sources|skipped|thumbnails)(\.\d+)?\.(npy|jsonl|parquet)"
    r"|\.manifest\.json\..+"
)
"""A pattern for the names of a shard's files that hold record data, including a half-written manifest."""


def erase_deleted(folder: Path) -> int:
    """Rewrite a shard without its deleted records, and remove the files that hold them.

    However this process ends, a reader finds the whole old shard or the whole new one. The next call removes the
    leftovers. A process that has mapped the old files keeps them until it opens the shard again. Record ids stay, and
    so does the mark of the journal that the shard answers for.

    Two texts that describe no row are also removed, because they could name a person who left. They are the reasons why
    images of a private shard could not be read, and the digest of the source's names.

    Returns:
        How many records were erased.

    Raises:
        DamagedShard: a file was altered; nothing was erased.
        OutputInUse: another process changes the shard.
        OSError: there was no room; nothing was erased, and deleted records stay marked.
    """
    with exclusive(folder / ".lock", f"shard {folder.name!r}"):
        manifest = read_manifest(folder)
        _remove_unlisted(folder, manifest)
        if not manifest.deleted:
            return 0
        shard = Shard.open(folder)
        after = manifest.model_copy(
            update={"erasures": manifest.erasures + 1, "records": len(shard), "deleted": (), "job": ""}
        )
        try:
            files = dict(_written_anew(shard, manifest, after))
            sync_folder(folder)
            write_manifest(folder, after.model_copy(update={"files": files}))
        finally:
            _remove_unlisted(folder, read_manifest(folder))
    return len(manifest.deleted)


def remove_leftovers(folder: Path) -> bool:
    """Remove files of rows that the manifest does not list, as an interrupted erasure leaves them."""
    with exclusive(folder / ".lock", f"shard {folder.name!r}"):
        return _remove_unlisted(folder, read_manifest(folder))


def _remove_unlisted(folder: Path, manifest: Manifest) -> bool:
    listed = {manifest.stored(name) for name in manifest.files}
    found = [file for file in folder.iterdir() if _FILE_OF_ROWS.fullmatch(file.name) and file.name not in listed]
    for file in found:
        file.unlink()
    if found:
        sync_folder(folder)
    return bool(found)


def _written_anew(shard: Shard, manifest: Manifest, after: Manifest) -> Iterator[tuple[str, FileSum]]:
    """Write each file with the remaining rows durably, and yield its name and checksum."""
    arrays: dict[str, NDArray[Any] | None] = {
        "labels.npy": shard.labels,
        "record_ids.npy": shard.record_ids,
        "persons.npy": shard.persons,
        "image_digests.npy": shard.image_digests,
    }
    for name in after.files:
        path, before = shard.path / after.stored(name), shard.path / manifest.stored(name)
        path.touch(mode=PRIVATE_FILE if after.role == "private" else 0o644)
        if name == "features.npy":
            _write_features(path, shard.features, shard.rows)
        elif (array := arrays.get(name)) is not None:
            np.save(path, array[shard.rows])
        elif name == "sources.jsonl":
            _reorder_lines(before, path, shard.rows)
        elif name == "thumbnails.parquet":
            wanted = pa.array(shard.record_ids[shard.rows])
            with pq.ParquetFile(before) as file, pq.ParquetWriter(path, file.schema_arrow) as parquet:
                for batch in file.iter_batches(_ROWS_PER_BLOCK):
                    parquet.write_batch(batch.filter(pc.is_in(batch["record_id"], value_set=wanted)))
        elif after.role == "public":
            shutil.copyfile(before, path)
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        yield name, sum_file(path)


def _write_features(path: Path, features: NDArray[np.int16], order: NDArray[np.int64]) -> None:
    # The file is written, not memory-mapped: on a full disk, the system kills a process that touches a mapped page.
    with path.open("wb") as file:
        shape = (len(order), features.shape[1])
        write_array_header_1_0(file, {"descr": "<i2", "fortran_order": False, "shape": shape})
        for start in range(0, len(order), _ROWS_PER_BLOCK):
            file.write(np.ascontiguousarray(features[order[start : start + _ROWS_PER_BLOCK]]).tobytes())


def check_classes(classes: tuple[str, ...], *, public: bool) -> None:
    """Refuse a class list that no shard may have; a private one needs two names that a task can ask about."""
    if len(set(map(one_spelling, classes))) != len(classes) or any(not name for name in classes):
        raise InvalidSetting("class names must be different from each other and not empty")
    # Checked before anything is embedded, because a task takes its classes from the shards that answer it.
    unfit = [] if public else [name for name in classes if not can_name_a_class(name)]
    if unfit:
        raise InvalidSetting(
            f"no task could ask about a class that is called {unfit[0][:100]!r}: names of classes are printable, and "
            "begin and end with no space; rename it (its folder, or in the table or list that names it)"
        )
    if not public and len(classes) < 2:
        raise InvalidSetting(
            f"a one-class shard labels nothing: a private shard needs a public list of at least 2 classes, "
            f"found {len(classes)}"
        )
    if len(classes) > np.iinfo(np.int16).max:
        raise InvalidSetting(f"at most {np.iinfo(np.int16).max} classes fit, found {len(classes)}")


def _reorder_lines(source: Path, out: Path, order: NDArray[np.int64]) -> None:
    """Write the lines of a file in another order. Memory holds only where each line begins and ends."""
    with source.open("rb") as file, out.open("wb") as written:
        lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        blocks = range(0, len(lines), _SCANNED_BYTES)
        found = [
            np.flatnonzero(np.frombuffer(lines[at : at + _SCANNED_BYTES], np.uint8) == _NEWLINE) + at for at in blocks
        ]
        ends = np.concatenate(found) + 1
        starts = np.concatenate([[0], ends[:-1]])
        for start in range(0, len(order), _ROWS_PER_BLOCK):
            some = order[start : start + _ROWS_PER_BLOCK]
            pairs = zip(starts[some].tolist(), ends[some].tolist(), strict=True)
            written.write(b"".join(lines[first:end] for first, end in pairs))


def _json_lines(values: Sequence[Any]) -> bytes:
    # ASCII escapes, so that no character in a name is mistaken for the end of a line.
    return "".join(f"{json.dumps(value)}\n" for value in values).encode("ascii")


def _unique_ids(count: int, random_bytes: Callable[[int], bytes]) -> NDArray[np.int64]:
    """Return random 63-bit numbers. Two equal ones are so unlikely that drawing all again costs nothing."""
    while True:
        ids = (np.frombuffer(random_bytes(8 * count), dtype="<u8") >> np.uint64(1)).astype(np.int64)
        if len(np.unique(ids)) == count:
            return ids
