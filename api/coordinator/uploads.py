"""Uploads: a requester's images or vectors, checked and written to a Parquet file in bounded memory before any charge.

    images     {name: text, image: bytes}                     files of a form, a zip, or Parquet.
    features   {name: text, feature: fixed list of int16}     vectors of the task's backbone, quantized.

Every image's header is read: it must have a known format and not too many pixels. Names never become paths. A refused
upload leaves nothing behind. The digest covers the content, so a repeated upload under the same idempotency key is
recognized.

Vectors are quantized here, unless they are on the grid already: quantizing twice would move entries by a unit, and ask
a different question.

A whole zip is refused if it is encrypted, declares too many files or bytes, or compresses like a bomb. Its directory is
read through a size gauge, so that a file full of directory entries cannot exhaust memory.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import stat
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from api.coordinator.config import LimitsTable
from api.coordinator.parquet_reader import MAX_RATIO, SMALL_BYTES, FeatureRows, parquet_rows
from feature_store.decode import open_image
from feature_store.image_files import (
    HEAD_BYTES,
    Member,
    NoImage,
    Skipped,
    format_of,
    in_words,
    leftover,
    leftover_row,
    no_image,
    what_it_is,
    zip_members,
)
from feature_store.results.questions import job_pixels_refusal
from feature_store.rows import on_grid, quantize
from feature_store.shard import check_features
from labeler.errors import BadData, InvalidSetting, LabelerError, NotReady, TooLarge, Unavailable, UnreadableImage
from labeler.settings import check_names_have_no_controls, one_spelling
from labeler.system.files import is_full, storage_full, sync_folder

MAX_NAME_LENGTH = 500
_NOWHERE = ("", ".", "..")


def tidy_name(name: str) -> str:
    """Reduce a file name to a safe one: no parent folders, no backslashes.

    Letters stay as they came, composed or not, with every blank and joiner: labels are found by the names of the
    requester's files.

    Raises:
        InvalidSetting: nothing remains, it is too long, or it has a control character.
    """
    written = name.replace("\\", "/")
    parts = [part for part in written.split("/") if part.strip() not in _NOWHERE]
    tidied = "/".join(parts)
    check_names_have_no_controls([tidied])
    if not tidied or len(tidied) > MAX_NAME_LENGTH:
        raise InvalidSetting(
            f"every image or vector needs a name of 1 to {MAX_NAME_LENGTH} characters, found {name[:100]!r}"
        )
    return tidied


_SMALLER = "send it smaller, or leave it out; the operator can raise limits.max_image_bytes"
MAX_BAD = 10
"""The most bad images that one refusal names."""

Source = Literal["images", "features"]

_GROUP_BYTES = 8 * 2**20
_GROUP_ROWS = 1024
_LEFTOVER = ".upload-"


@dataclass(frozen=True)
class Upload:
    """A complete upload that has no job yet.

    Attributes:
        path: its present file, which the owner of this object moves or discards.
        digest: SHA-256 of names and content, in hexadecimal.
        dimension: entries of a feature vector; None for images.
        passed_over: files that came and are no images.
    """

    path: Path
    count: int
    source: Source
    digest: str
    dimension: int | None = None
    passed_over: tuple[Skipped, ...] = ()

    def move_to(self, target: Path) -> None:
        """Move it durably to its final place."""
        # Make one folder at a time: `mkdir` would not give implicit parents the private mode.
        for folder in (target.parent.parent, target.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        self.path.replace(target)
        sync_folder(target.parent)

    def discard(self) -> None:
        """Remove it unless it was moved; may be called twice."""
        self.path.unlink(missing_ok=True)


class UploadWriter:
    """Writes the pieces of one upload, in order; `finish` returns the upload.

    Any refusal ends the upload and removes its file. Leaving a `with` block without `finish` does the same.

    Args:
        folder: where the file is written; it is created if missing.
        on_bytes: called with the bytes of all content before more of it is written; may refuse it.
    """

    def __init__(self, folder: Path, limits: LimitsTable, *, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(dir=folder, prefix=_LEFTOVER, suffix=".parquet")
        os.close(handle)
        self._path = Path(path)
        self._limits = limits
        self._on_bytes = on_bytes
        self._writer: pq.ParquetWriter | None = None
        self._source: Source | None = None
        self._dimension: int | None = None
        self._names: set[str] = set()
        self._pending: list[tuple[str, bytes]] = []
        self._pending_bytes = 0
        self._total_bytes = 0
        self._total_pixels = 0
        self._bad: list[str] = []
        self._passed_over: dict[NoImage, None] = {}
        self._sha256 = hashlib.sha256(b"labeler-upload/1\n")
        self._ended = False

    def __enter__(self) -> UploadWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self.discard()

    @property
    def count(self) -> int:
        """Return the number of images or vectors taken so far."""
        return len(self._names)

    def add_image(self, name: str, data: bytes) -> None:
        """Take one image file; its name is never used as a path.

        Raises:
            TooLarge: the file, all files together, or their number is above its limit.
            InvalidSetting: the name is empty or repeated, or vectors came before.
            UnreadableImage: this is the tenth bad image. If there are fewer, `finish` names them together.
        """
        with self._refusing():
            self._take_file(name, data)

    def add_base64(self, name: str, text: str) -> None:
        """Take one image file that came as base64; raises as `add_image`."""
        with self._refusing():
            if len(text) > 4 * (self._limits.max_image_bytes // 3 + 1):
                raise self._image_too_large(name)
            try:
                data = base64.b64decode(text, validate=True)
            except ValueError:  # also raised by letters that are not ASCII
                self._begin("images", None)
                self._note_bad(name, "its data is not base64 with padding, without line breaks and without a prefix")
            else:
                self._take_file(name, data)

    def add_zip(self, file: BinaryIO) -> None:
        """Take every image file of a zip; a nested zip is not an image.

        Raises:
            As `add_image`; BadData: not a zip, damaged, encrypted, or a decompression bomb.
        """
        with self._refusing():
            for name, data in zip_images(file, self._limits):
                self._take_file(name, data)

    def add_parquet(self, file: BinaryIO) -> None:
        """Take every row of a Parquet file, which has a column `image` (bytes, or a struct with them) or `feature`.

        Raises:
            As `add_image` and `add_features`; BadData: not Parquet, damaged, or without such a column.
            Unavailable: another file was being read for too long.
        """
        with self._refusing():
            for rows in parquet_rows(file, self._limits):
                if isinstance(rows, FeatureRows):
                    self._take_features(rows.names, rows.features)
                else:
                    for (image_name, data), path in zip(rows.images, rows.paths, strict=True):
                        if left := leftover_row(image_name, path):
                            self._passed_over[left] = None
                        else:
                            self._take_image(image_name, data)

    def add_features(self, features: Sequence[Sequence[float]], ids: Sequence[str] | None = None) -> None:
        """Take the feature vectors of a request, and quantize those that `quantize` has not made already.

        Args:
            features: n rows of one length.
            ids: one name per vector; by default the vectors are numbered.

        Raises:
            InvalidSetting: rows of different lengths, a wrong number of ids, a repeated id, or images came before.
            BadData: a vector is zero or not finite, or consists of integers that `quantize` cannot have made.
            TooLarge: there are too many vectors, or they are too long.
        """
        with self._refusing():
            lengths = {len(row) for row in features}
            if len(lengths) != 1:
                raise InvalidSetting(f"feature vectors of one job have one length; found {sorted(lengths)[:5]}")
            rows = np.array(features, dtype=np.float64)
            names = [f"query-{number:06d}" for number in range(self.count, self.count + len(rows))]
            if ids is not None and len(ids) != len(rows):
                raise InvalidSetting(f"{len(rows)} feature vectors came with {len(ids)} query_ids; give one for each")
            self._take_features(names if ids is None else list(ids), rows)

    def finish(self) -> Upload:
        """Close the file and make it durable.

        Raises:
            UnreadableImage: some images were bad; up to ten are named.
            InvalidSetting: the upload is empty.
        """
        with self._refusing():
            if self._bad:
                raise self._unreadable()
            if self._source is None or not self._names:
                no_images = f"; it came with {in_words(list(self._passed_over))}" if self._passed_over else ""
                raise InvalidSetting(
                    f"the job came without images: send files, a zip, a Parquet file, or feature vectors{no_images}"
                )
            self._flush()
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
            self._ended = True
            digest, passed_over = self._sha256.hexdigest(), tuple(self._passed_over)
            return Upload(self._path, self.count, self._source, digest, self._dimension, passed_over)

    def discard(self) -> None:
        """Abandon the upload and remove its file."""
        self._ended = True
        self._pending.clear()
        if self._writer is not None:
            with suppress(OSError):  # closing writes, and the disk may be full
                self._writer.close()
            self._writer = None
        self._path.unlink(missing_ok=True)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        if self._ended:
            raise NotReady("this upload has ended; start another one")
        try:
            yield
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError) and is_full(error):
                raise storage_full("the upload") from error
            if isinstance(error, OSError):
                raise Unavailable(
                    f"the upload cannot be kept now ({error.strerror or type(error).__name__}); send it again later, "
                    "and tell the operator if that does not help"
                ) from error
            raise

    def _take_file(self, name: str, data: bytes) -> None:
        """Take an image, or pass over what a system left behind, and a text."""
        found = no_image(name.replace("\\", "/"), lambda: data[:HEAD_BYTES])
        if found is not None and found.is_passed_over:
            self._passed_over[found] = None
        elif found is None or len(data) > self._limits.max_image_bytes:
            self._take_image(name, data)
        else:
            self._begin("images", None)
            self._note_bad(name, found.reason)

    def _take_image(self, name: str, data: bytes) -> None:
        if len(data) > self._limits.max_image_bytes:
            raise self._image_too_large(name)
        self._begin("images", None)
        reason, pixels = look_at_header(data, max_pixels=self._limits.max_pixels)
        if reason is not None:
            self._note_bad(name, reason)
            return
        self._total_pixels += pixels
        if self._total_pixels > self._limits.max_job_pixels:
            raise TooLarge(job_pixels_refusal(self.count + 1, self._total_pixels, self._limits.max_job_pixels))
        self._append([(tidy_name(name), data)])

    def _image_too_large(self, name: str) -> TooLarge:
        return TooLarge(
            f"image {name[:100]!r} has more than the {self._limits.max_image_bytes} bytes one image may have; "
            + _SMALLER
        )

    def _note_bad(self, name: str, reason: str) -> None:
        self._bad.append(f"{name[:100]!r} ({reason})")
        if len(self._bad) >= MAX_BAD:
            raise self._unreadable()

    def _take_features(self, names: Sequence[str], features: NDArray[np.floating | np.int16]) -> None:
        if features.ndim != 2 or not features.shape[1]:
            raise BadData(f"features must have shape (n, dimension), found {features.shape}")
        if features.shape[1] > self._limits.max_feature_dimension:
            raise TooLarge(
                f"feature vectors have {features.shape[1]} entries, more than {self._limits.max_feature_dimension}; "
                "use a backbone of fewer, or ask the operator to raise limits.max_feature_dimension"
            )
        self._begin("features", features.shape[1])
        if features.dtype == np.int16:
            quantised = features.astype(np.int16, copy=False)
            check_features(quantised)
        else:
            given = features.astype(np.float64, copy=False)
            ready = on_grid(given)
            quantised = np.empty(given.shape, dtype=np.int16)
            quantised[ready] = given[ready].astype(np.int16)
            if not ready.all():
                quantised[~ready] = quantize(given[~ready])
        content = quantised.astype("<i2", copy=False).tobytes()
        size = 2 * features.shape[1]
        self._append([(tidy_name(name), content[n * size : (n + 1) * size]) for n, name in enumerate(names)])

    def _begin(self, source: Source, dimension: int | None) -> None:
        if self._source is None:
            self._source, self._dimension = source, dimension
            self._sha256.update(f"{source} {dimension}\n".encode())
        if self._source != source:
            raise InvalidSetting("one job takes images or feature vectors, not both; make two jobs of it")
        if self._dimension != dimension:
            raise InvalidSetting(
                f"feature vectors of one job have one length; found {self._dimension} and {dimension} entries"
            )

    def _append(self, rows: list[tuple[str, bytes]]) -> None:
        """Add tidy names and their bytes to the digest and to the file."""
        self._count_in([name for name, _ in rows], sum(len(data) for _, data in rows))
        for name, data in rows:
            encoded = name.encode()
            self._sha256.update(b"%d %d\n%b" % (len(encoded), len(data), encoded))
            self._sha256.update(data)
        self._pending += rows
        if self._pending_bytes >= _GROUP_BYTES or len(self._pending) >= _GROUP_ROWS:
            self._flush()

    def _count_in(self, names: list[str], size: int) -> None:
        """Count tidy names and their bytes against the limits."""
        spelled = list(map(one_spelling, names))
        new = set(spelled)
        if len(new) != len(names) or not self._names.isdisjoint(new):
            repeated = [name for name, count in Counter(spelled).items() if count > 1 or name in self._names]
            raise InvalidSetting(
                f"two images or vectors are called {repeated[0][:100]!r}; labels are matched by name, so rename one"
            )
        if len(self._names) + len(new) > self._limits.max_images:
            raise TooLarge(
                f"one job takes at most {self._limits.max_images} images or vectors, and at least "
                f"{len(self._names) + len(new)} came; make several jobs of it"
            )
        self._total_bytes += size
        if self._total_bytes > self._limits.max_upload_bytes:
            raise TooLarge(
                f"one job takes at most {self._limits.max_upload_bytes} bytes, and at least {self._total_bytes} came; "
                "make several jobs of it"
            )
        self._on_bytes(self._total_bytes)
        self._names |= new
        self._pending_bytes += size

    def _flush(self) -> None:
        if not self._pending:
            return
        names = pa.array([name for name, _ in self._pending], pa.string())
        if self._dimension is None:
            table = pa.table({"name": names, "image": pa.array([data for _, data in self._pending], pa.binary())})
        else:
            entries = np.frombuffer(b"".join(data for _, data in self._pending), "<i2").astype(np.int16, copy=False)
            table = pa.table({"name": names, "feature": pa.FixedSizeListArray.from_arrays(entries, self._dimension)})
        if self._writer is None:
            # Image files are compressed already.
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="none", use_dictionary=False)
        self._writer.write_table(table)
        self._pending.clear()
        self._pending_bytes = 0

    def _unreadable(self) -> UnreadableImage:
        more = "at least " if len(self._bad) >= MAX_BAD else ""
        return UnreadableImage(
            f"{more}{len(self._bad)} of the images cannot be used: {'; '.join(self._bad)}. Nothing was kept; leave "
            "them out or repair them, and send the job again"
        )


def look_at_header(data: bytes, *, max_pixels: int) -> tuple[str | None, int]:
    """Return the reason to refuse a file as an image (None if it is accepted), and its number of pixels."""
    kind = format_of(data[:HEAD_BYTES])
    if kind is not None and kind.extra:
        # Its pixels are counted by the process that decodes it, in bounded memory: its header alone can unpack to much.
        return kind.missing(), 0
    try:
        with open_image(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > max_pixels:
                return f"{width} x {height} pixels, at most {max_pixels} are taken", width * height
            return "floating-point pixels, whose range is unknown" if image.mode == "F" else None, width * height
    except UnreadableImage as error:
        return str(error), 0
    except UnidentifiedImageError:
        return what_it_is(data[:HEAD_BYTES]), 0
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return f"more than {max_pixels} pixels", 0
    # Pillow's parsers raise almost any exception on damaged headers; all mean the same here.
    except Exception as error:
        return f"damaged ({type(error).__name__})", 0


def upload_of_features(
    features: Sequence[Sequence[float]], ids: Sequence[str] | None, *, folder: Path, limits: LimitsTable
) -> Upload:
    """Make an upload of feature vectors from the request itself; raises as `UploadWriter.add_features`."""
    with UploadWriter(folder, limits) as writer:
        writer.add_features(features, ids)
        return writer.finish()


def upload_of_images(images: Sequence[tuple[str, str]], *, folder: Path, limits: LimitsTable) -> Upload:
    """Make an upload of names and base64 from the request itself; raises as `UploadWriter.add_image`."""
    with UploadWriter(folder, limits) as writer:
        for name, text in images:
            writer.add_base64(name, text)
        return writer.finish()


_DIRECTORY_BYTES_PER_IMAGE = 512
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError, IndexError, KeyError,
    OverflowError,
)  # fmt: skip
"""Exceptions that zipfile raises on damaged files; found by damaging many files."""


def zip_images(file: BinaryIO, limits: LimitsTable) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every file in a zip, in the zip's order; of a leftover no bytes.

    Raises:
        BadData: not a zip, damaged, encrypted, of an unsupported compression, or a decompression bomb.
        TooLarge: its directory, a file in it, or the whole zip is above its limit.
        InvalidSetting: it holds no file.
    """
    gauge = _Gauge(file, 64 * 1024 + _DIRECTORY_BYTES_PER_IMAGE * limits.max_images)
    try:
        with zipfile.ZipFile(gauge) as archive:
            gauge.limit = None
            members = zip_members(archive)
            _check_members(archive, [one for one in members if leftover(one.name) is None], limits)
            for one in members:
                if leftover(one.name):
                    yield one.name, b""
                    continue
                with archive.open(one.info) as member:
                    data = member.read(limits.max_image_bytes + 1)
                if len(data) > max(limits.max_image_bytes, one.info.file_size):
                    raise _too_large(one.name, limits)
                yield one.name, data
    except LabelerError:
        raise
    except _DAMAGE as error:
        raise BadData(f"the zip cannot be read: it is damaged, or not a zip ({type(error).__name__})") from None


class _Gauge:
    """A file that refuses reads above a limit while one is set."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self.limit: int | None = limit

    def read(self, size: int = -1) -> bytes:
        if self.limit is None:
            return self._file.read(size)
        # A read to the end asks for one byte more than the limit, enough to see that it is exceeded.
        data = self._file.read(size if 0 <= size <= self.limit else self.limit + 1)
        if len(data) > self.limit:
            raise TooLarge(f"the zip's directory has more than {self.limit} bytes; put fewer files into it")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""


def _check_members(archive: zipfile.ZipFile, members: list[Member], limits: LimitsTable) -> None:
    if not members:
        raise InvalidSetting("the zip holds no file to label")
    if len(members) > limits.max_images:
        raise TooLarge(
            f"the zip holds {len(members)} files; one job takes at most {limits.max_images} images; make "
            "several jobs of it"
        )
    if sum(one.info.file_size for one in members) > limits.max_upload_bytes:
        raise TooLarge(
            f"the zip unpacks to {sum(one.info.file_size for one in members)} bytes, and one job takes at most "
            f"{limits.max_upload_bytes}; make several jobs of it"
        )
    for one in members:
        info, shown = one.info, one.name[:100]
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
            raise BadData(f"{shown!r} in the zip is a link or a device, and no file; send the file itself")
        if info.flag_bits & 1:
            raise BadData(f"{shown!r} in the zip is encrypted; send it without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadData(f"{shown!r} in the zip is compressed by an unsupported method; use deflate")
        is_large = info.file_size > limits.max_image_bytes
        is_bomb = info.file_size > max(SMALL_BYTES, MAX_RATIO * info.compress_size)
        if (is_large or is_bomb) and (found := one.no_image(archive)) and found.is_passed_over:
            continue  # no more of it is read than of an image
        if is_large:
            raise _too_large(one.name, limits)
        if is_bomb:
            raise BadData(
                f"{shown!r} unpacks from {info.compress_size} to {info.file_size} bytes, over {MAX_RATIO} times as "
                "much, as decompression bombs do; if it is a real image, send it outside the zip"
            )


def _too_large(name: str, limits: LimitsTable) -> TooLarge:
    return TooLarge(
        f"{name[:100]!r} in the zip has more than the {limits.max_image_bytes} bytes one image may have; {_SMALLER}"
    )
