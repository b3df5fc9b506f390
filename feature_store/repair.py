"""From an image file whose metadata are broken to one that Pillow reads, with the same pixels.

Metadata never decide whether pixels are read. A file comes back without what its pixels do not need. A PNG
loses chunks, a JPEG segments, a WebP its profile and XMP, a TIFF the tags that point beyond its end. Transparency and
a sound orientation are needed, too. Damage to pixels, or to the sizes and tables that they need, stays damage.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Final

from labeler.errors import UnreadableImage

MAX_BYTES: Final = 256 << 20
"""Larger files are not repaired: a repair holds the whole file in memory."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK: Final = struct.Struct(">I4s")
_CRC_BYTES: Final = 4

_SOS: Final = 0xDA
_APP0, _APP14, _APP15, _COMMENT = 0xE0, 0xEE, 0xEF, 0xFE
_ADOBE_BYTES: Final = 14

_OF_PIXELS: Final = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF")
_HAS_PROFILE, _HAS_EXIF, _HAS_XMP = 0x20, 0x08, 0x04

_BYTE_ORDERS: Final = {b"II*\0": "<", b"MM\0*": ">"}
_BYTES_OF_KIND: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_TAGS_OF_PIXELS: Final = frozenset(
    {256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 332, 336, 338}
    | {339, 347, 529, 530, 531, 532}
)


def without_metadata(file: Path | io.BytesIO) -> io.BytesIO | None:
    """Return a PNG, a JPEG or a WebP without what its pixels do not need.

    None if it has nothing else, if what its pixels need is cut short, and for any other file.
    """
    with at_start(file) as opened:
        head = opened.read(12)
        kept = next((kept for begins, kept in _KEPT.items() if head.startswith(begins)), None)
        size = opened.seek(0, io.SEEK_END)
        if kept is None or size > MAX_BYTES:
            return None
        opened.seek(0)
        data = opened.read()
    sound = kept(data)
    return None if sound is None or sound == data else io.BytesIO(sound)


def _png(data: bytes) -> bytes:
    """Keep the critical chunks, transparency, and an orientation whose checksum is right (PNG, third edition, 13.1)."""
    kept, end = [_PNG], len(_PNG)
    while end + _CHUNK.size <= len(data):
        start = end
        length, kind = _CHUNK.unpack_from(data, start)
        end = start + _CHUNK.size + length + _CRC_BYTES
        checked = data[start + 4 : end]
        is_sound = zlib.crc32(checked[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "big") == checked[-_CRC_BYTES:]
        if not kind[0] & 0x20 or kind == b"tRNS" or (kind == b"eXIf" and is_sound):
            kept.append(data[start:end])
    return b"".join(kept)


def _jpeg(data: bytes) -> bytes | None:
    """Keep tables and scans, EXIF, and the whole mark of Adobe, which says how colors are to be read."""
    kept, start = [data[:2]], 2
    while data[start : start + 1] == b"\xff" and start + 4 <= len(data):
        marker = data[start + 1]
        if marker == 0xFF:  # a fill byte
            start += 1
            continue
        if marker == _SOS:
            return b"".join([*kept, data[start:]])
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        is_mark = marker == _APP14 and end - start - 2 >= _ADOBE_BYTES
        is_metadata = _APP0 <= marker <= _APP15 or marker == _COMMENT
        if not is_metadata or is_mark or data[start + 4 : start + 10] == b"Exif\0\0":
            kept.append(data[start:end])
        start = end
    return None


def _webp(data: bytes) -> bytes | None:
    """Keep the chunks of pixels and a whole EXIF, and say in the header that the others are gone."""
    kept: list[bytes] = []
    end, flags = 12, 0
    while end + 8 <= len(data):
        start, name = end, data[end : end + 4]
        whole = start + 8 + int.from_bytes(data[start + 4 : start + 8], "little")
        end = whole + whole % 2
        if name in _OF_PIXELS and whole > len(data):
            return None
        if name in _OF_PIXELS or (name == b"EXIF" and whole <= len(data)):
            kept.append(data[start:end].ljust(end - start, b"\0"))
            flags |= _HAS_EXIF * (name == b"EXIF")
    if kept and kept[0].startswith(b"VP8X"):
        flags |= kept[0][8] & ~(_HAS_PROFILE | _HAS_EXIF | _HAS_XMP)
        kept[0] = kept[0][:8] + bytes([flags]) + kept[0][9:]
    body = b"WEBP" + b"".join(kept)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


_KEPT: Final[dict[bytes, Callable[[bytes], bytes | None]]] = {_PNG: _png, b"\xff\xd8\xff": _jpeg, b"RIFF": _webp}


def without_broken_tags(file: Path | io.BytesIO) -> Path | io.BytesIO:
    """Return a TIFF without the metadata of its first page that point beyond the file; any other file as it is.

    Pillow stops at the first such tag, and then misses those of the pixels that follow it.

    Raises:
        UnreadableImage: a tag that the pixels need points beyond the file.
    """
    with at_start(file) as opened, suppress(struct.error):
        order = _BYTE_ORDERS.get(opened.read(4))
        if order is None:
            return file
        (start,) = struct.unpack(f"{order}I", opened.read(4))
        opened.seek(start)
        (count,) = struct.unpack(f"{order}H", opened.read(2))
        entries = bytearray(opened.read(12 * count))
        size = opened.seek(0, io.SEEK_END)
        whole = bytes(entries)
        for at in range(0, len(entries) - 11, 12):
            tag, kind, number, value = struct.unpack_from(f"{order}HHII", entries, at)
            length = _BYTES_OF_KIND.get(kind, size) * number
            if length <= 4 or value + length <= size:
                continue
            if tag in _TAGS_OF_PIXELS:
                raise UnreadableImage(f"damaged or truncated (TIFF tag {tag} points beyond the file)")
            struct.pack_into(f"{order}HHII", entries, at, tag, 1, 1, 0)
        if entries != whole:
            opened.seek(0)
            data = opened.read()
            return io.BytesIO(data[: start + 2] + entries + data[start + 2 + len(entries) :])
    return file


@contextmanager
def at_start(file: Path | io.BytesIO) -> Iterator[BinaryIO]:
    """A file to read from its first byte; its place is the first byte afterwards."""
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
        opened.seek(0)
        try:
            yield opened
        finally:
            opened.seek(0)
