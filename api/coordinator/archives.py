"""Images out of zip files that strangers made: sizes are bounded before and while unpacking.

A zip is refused whole where it is encrypted, declares more than is taken, or packs like a bomb. Its directory is read
through a gauge, so that a file of nothing but directory entries cannot fill the memory.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from api.coordinator.config import LimitsTable
from labeler.errors import BadData, InvalidSetting, LabelerError, TooLarge

MAX_RATIO = 200
"""No photograph unpacks to more times its packed size; what is smaller than a mebibyte may."""

_SMALL_BYTES = 2**20
_DIRECTORY_BYTES_PER_IMAGE = 512
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError, IndexError, KeyError,
    OverflowError,
)  # fmt: skip
"""What the reader raises on damaged files, found by damaging many."""

_HIDDEN = ("__MACOSX", "Thumbs.db", "desktop.ini")


def zip_images(file: BinaryIO, limits: LimitsTable) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file in a zip, in the zip's order.

    Raises:
        BadData: no zip, damaged, encrypted, packed in a way that is not taken, or like a bomb.
        TooLarge: its directory, a file in it, or all of it.
        InvalidSetting: no file in it.
    """
    gauge = _Gauge(file, 64 * 1024 + _DIRECTORY_BYTES_PER_IMAGE * limits.max_images)
    try:
        with zipfile.ZipFile(gauge) as archive:
            gauge.limit = None
            members = [info for info in archive.infolist() if not info.is_dir() and not _is_hidden(info.filename)]
            _check_members(members, limits)
            for info in members:
                with archive.open(info) as member:
                    data = member.read(limits.max_image_bytes + 1)
                if len(data) > limits.max_image_bytes:
                    raise _too_large(info.filename, limits)
                yield info.filename, data
    except LabelerError:
        raise
    except _DAMAGE as error:
        raise BadData(f"the zip cannot be read: it is damaged, or no zip ({type(error).__name__})") from None


class _Gauge:
    """A file of which only so much may be read at once while a limit is set."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self.limit: int | None = limit

    def read(self, size: int = -1) -> bytes:
        if self.limit is None:
            return self._file.read(size)
        # What goes on to the end is read one byte beyond the limit at most.
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
        """The file belongs to the caller."""


def _check_members(members: list[zipfile.ZipInfo], limits: LimitsTable) -> None:
    if not members:
        raise InvalidSetting("the zip holds no file")
    if len(members) > limits.max_images:
        raise TooLarge(f"the zip holds {len(members)} files; one job takes at most {limits.max_images} images")
    if sum(info.file_size for info in members) > limits.max_upload_bytes:
        raise TooLarge(f"the zip unpacks to more than the {limits.max_upload_bytes} bytes that one job takes")
    for info in members:
        shown = info.filename[:100]
        if info.flag_bits & 1:
            raise BadData(f"{shown!r} in the zip is encrypted; send it without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadData(f"{shown!r} in the zip is packed in an unusual way; use the ordinary one (deflate)")
        if info.file_size > limits.max_image_bytes:
            raise _too_large(info.filename, limits)
        if info.file_size > max(_SMALL_BYTES, MAX_RATIO * info.compress_size):
            raise BadData(
                f"{shown!r} unpacks from {info.compress_size} to {info.file_size} bytes, over {MAX_RATIO} times as "
                "much, as decompression bombs do; send it as an image file by itself if it is none"
            )


def _too_large(name: str, limits: LimitsTable) -> TooLarge:
    return TooLarge(f"{name[:100]!r} in the zip has more than the {limits.max_image_bytes} bytes one image may have")


def _is_hidden(name: str) -> bool:
    return any((part.startswith(".") and part not in (".", "..")) or part in _HIDDEN for part in name.split("/"))
