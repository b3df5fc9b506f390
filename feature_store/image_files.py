"""The rule of what an image file is, for every way in: folder, link, zip, form, Parquet, and the Python client.

A name and the first bytes of a file decide. In this order:

    leftover      a system or a tool leaves it behind, by a part of its path (LEFTOVERS, or a leading dot).
                  A copy or download that has not ended, by its ending.
    camera's raw  by its ending. Many begin as a TIFF does, whose first picture is a small preview.
    image         by its first bytes, whatever its ending; or by its ending, whatever its bytes. A damaged image is one,
                  and its reader says what is wrong.
    text          a description, a table, a program.
    other         anything else.

Leftovers and texts are passed over, and named. Others are left out, and named as what could not be read: some of them
might be pictures. An image by its name needs no look at its bytes, so a list of a million of them is quick.

**A class is a folder by its name alone.** If its content decided, a class would come and go with one private image,
and the class list would tell of it.

**Links are followed**, each folder once: a link to a folder that is listed already leads to nothing new. A folder that
cannot be read, or a link to nothing, is an error with its path. What is missing for a moment must not pass for removed.

**Names in a zip** are bytes. They are UTF-8 where the zip says so, where its Info-ZIP field says so (APPNOTE 4.6.9), or
where they are valid UTF-8: macOS writes that without saying so. Otherwise they were written in a code page of Windows
or DOS. The zip does not say which, so it is the first of LEGACY in which the fewest letters are strange.

This module imports the standard library alone: the Python client begins with it.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from labeler.errors import UnreadableFile

HEAD_BYTES: Final = 4096
"""How many first bytes of a file decide."""

SHOWN: Final = 10
"""How many files a sentence names."""


@dataclass(frozen=True)
class Skipped:
    """A file that is no image of a source, or an image that was left out, and why.

    Attributes:
        source: its name within the source.
        reason: a short sentence.
    """

    source: str
    reason: str


@dataclass(frozen=True)
class Format:
    """A format of images that is read.

    Attributes:
        name: for people.
        endings: of its files, lower case, with the dot.
        is_begun_by: tells it by the first bytes of a file.
        pillow: its name in Pillow; "" if another library reads it.
        extra: the extra of our package that reads it; "" if none is needed.
        library: what that extra brings.
    """

    name: str
    endings: frozenset[str]
    is_begun_by: Callable[[bytes], bool]
    pillow: str = ""
    extra: str = ""
    library: str = ""

    def missing(self) -> str | None:
        """Return a sentence if what reads it is not installed here."""
        if not self.extra or find_spec(self.library) is not None:
            return None
        return f"a {self.name} image, which needs the extra {self.extra!r}: install private-labeler[{self.extra}]"


_BMP_HEADERS: Final = (12, 16, 40, 52, 56, 64, 108, 124)
_PPM: Final = re.compile(rb"P[1-6](\s+|#[^\n]*\n)+\d+(\s+|#[^\n]*\n)+\d+\s")
_HEIC_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_DICOM_PREAMBLE: Final = 128


def is_dicom(head: bytes) -> bool:
    """Tell whether the first 132 bytes are those of a DICOM file."""
    return head[_DICOM_PREAMBLE : _DICOM_PREAMBLE + 4] == b"DICM"


def is_heic(head: bytes) -> bool:
    """Tell whether the first 12 bytes are those of a HEIC or HEIF file."""
    return head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS


def _endings(text: str) -> frozenset[str]:
    return frozenset(f".{one}" for one in text.split())


def _begins(*signatures: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(signatures)


FORMATS: Final = (
    Format(
        "AVIF", _endings("avif avifs"), lambda head: head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"), "AVIF"
    ),
    Format(
        "BMP",
        _endings("bmp dib"),
        lambda head: head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS,
        "BMP",
    ),
    Format("GIF", _endings("gif"), _begins(b"GIF87a", b"GIF89a"), "GIF"),
    Format("JPEG", _endings("jpg jpeg jpe jfif jfi jif"), _begins(b"\xff\xd8\xff"), "JPEG"),
    Format(
        "JPEG 2000",
        _endings("jp2 j2k jpc jpf jpx j2c"),
        _begins(b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"),
        "JPEG2000",
    ),
    Format("JPEG of several pictures", _endings("mpo"), lambda _: False, "MPO"),  # it begins as a JPEG does
    Format("PNG", _endings("png apng"), _begins(b"\x89PNG\r\n\x1a\n"), "PNG"),
    Format("PPM", _endings("ppm pgm pbm pnm pfm"), lambda head: _PPM.match(head) is not None, "PPM"),
    Format("TIFF", _endings("tif tiff"), _begins(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF"),
    Format("WebP", _endings("webp"), lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP", "WEBP"),
    Format("DICOM", _endings("dcm dicom dic ima"), is_dicom, extra="dicom", library="pydicom"),
    Format("HEIC", _endings("heic heif hif"), is_heic, extra="heic", library="pillow_heif"),
)
"""The formats that docs/images.md promises."""

ENDINGS: Final = frozenset().union(*(one.endings for one in FORMATS))

_RAW: Final = _endings(
    "3fr arw cr2 cr3 crw dcr dng erf iiq kdc mef mos mrw nef nrw orf pef raf raw rw2 rwl sr2 srf srw x3f"
)

_PARTIAL: Final = _endings("part partial filepart crdownload download opdownload aria2 tmp temp")
_HAS_NOT_ENDED: Final = "a copy or download that has not ended"

LEFTOVERS: Final = {
    "a Synology disk station keeps it": ("@eadir", "@tmp", "#snapshot"),
    "a QNAP disk station keeps it": ("@recycle", "@recently-snapshot", "@__thumb", "@sharebin", "@transcode"),
    "a bin of deleted files": ("#recycle", "$recycle.bin", "recycler"),
    "snapshots of a disk": ("~snapshot",),
    "macOS keeps it": ("__macosx", "icon\r", "network trash folder", "temporary items"),
    "Windows keeps it": (
        "thumbs.db", "thumbs.db:encryptable", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini",
        "system volume information",
    ),
    "a check of a disk keeps it": ("lost+found", "lost.dir"),
    "a viewer of pictures keeps it": ("picasa.ini", "zbthumbnail.info", "pspbrwse.jbf"),
    "the directory of a DICOM medium": ("dicomdir",),
    "a tool of programmers keeps it": (
        "__pycache__", "node_modules", "site-packages", "venv", "wandb", "mlruns", "lightning_logs",
    ),
}  # fmt: skip
"""Names that systems and tools leave behind, of files and folders in lower case, by the reason to pass over them."""

_LEFTOVER: Final = {name: reason for reason, names in LEFTOVERS.items() for name in names}
_PATTERNS: Final = (
    (re.compile(r"found\.\d{3}"), "a check of a disk keeps it"),
    (re.compile(r".+@syno(eastream|resource)"), "a Synology disk station keeps it"),
    (re.compile(r".+:zone\.identifier"), "Windows keeps it"),
    (re.compile(r"~\$.+"), "an office program keeps it"),
    (re.compile(r".+~"), "an editor's backup"),
)
_HIDDEN: Final = {
    ".ds_store": "macOS keeps it",
    ".trashes": "a bin of deleted files",
    ".thumbnails": "a viewer of pictures keeps it",
    ".ipynb_checkpoints": "Jupyter keeps it",
    ".git": "a tool of programmers keeps it",
}

_NO_TEXT: Final = frozenset(range(32)) - frozenset(b"\t\n\f\r")
_WIDE_TEXT: Final = (b"\xff\xfe", b"\xfe\xff")  # a text in UTF-16 begins with one of them

UNKNOWN: Final = "not an image of a known format"

_SIGNS: Final = (
    (rb"version https://(git-lfs|hawser)", "a pointer of Git LFS and not the image; run `git lfs pull` where it lies"),
    (rb"(\.\./)*(\.git/annex|/annex)/objects/", "a pointer of git-annex and not the image; run `git annex get` on it"),
    (rb"II\*\0|MM\0\*", "a TIFF of a kind that is not read; save it with 8 or 16 bits, or as PNG"),
    (rb"(\xef\xbb\xbf)?\s*<svg|(\xef\xbb\xbf)?\s*<\?xml", "a text of XML or SVG and no image of pixels"),
    (rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|html|head|!--)", "a web page and no image; a download may have failed"),
    (rb"(\xef\xbb\xbf)?\s*[{\[]", "a text of JSON and no image; a download may have failed"),
    (rb"%PDF", "a PDF; save its pictures as files"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "a PostScript file, which is a program and not read"),
    (
        rb"PK\x03\x04.{26}(\[Content_Types\]|_rels/|mimetype|word/|xl/|ppt/)",
        "an office document; save its pictures as files",
    ),
    (rb"PK[\x03\x05]|\x1f\x8b|7z\xbc|Rar!|BZh|\xfd7zXZ|.{257}ustar", "an archive; unpack it"),
    (rb"....ftyp(?!avi|he|mif|msf)|\x1aE\xdf\xa3|RIFF....AVI ", "a video; save the frame that is the image"),
    (rb"PF\s", "a color PFM, whose floating-point pixels have no known range; save it with 8 or 16 bits"),
    (rb"8BPS", "a Photoshop file; save it as PNG or TIFF"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "a JPEG XL, which is not read; save it as PNG"),
    (
        rb"P7\n|\0\0\x01\0|v/1\x01|#\?RADIANCE",
        "a PAM, ICO, OpenEXR or Radiance file, which is not read; save it as PNG",
    ),
    (rb"\x93NUMPY|\x89HDF", "an array of numbers (numpy or HDF5) and no image"),
    (rb"\xff\xd8\xff.*\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb]\0.[\x09-\x10]", "a JPEG of more than 8 bits; save it with 8"),
    (rb"\0+$", "nothing but zeros; copy it again"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|BM|RIFF....WEBP|....ftypavi", "damaged: its header cannot be read"),
)
"""Beginnings of files that people take for images, and what they are."""


def what_it_is(head: bytes) -> str:
    """Return what a file is that no decoder knows, by its first bytes."""
    if not head:
        return "an empty file"
    found = (words for sign, words in _SIGNS if re.match(sign, head, re.DOTALL))
    is_text = head.startswith(_WIDE_TEXT) or _NO_TEXT.isdisjoint(head)
    return next(found, f"{UNKNOWN}, but a text" if is_text else UNKNOWN)


@dataclass(frozen=True)
class NoImage(Skipped):
    """A file that is no image.

    Attributes:
        is_passed_over: nobody would take it for a picture, so it is named and no fault.
    """

    is_passed_over: bool


def leftover(name: str) -> NoImage | None:
    """Return what a system left behind: the path as far as the part that tells, or None.

    A whole folder is named once, with a slash at its end.
    """
    parts = name.split("/")
    for place, part in enumerate(parts):
        if reason := _left_by(part):
            is_folder = place + 1 < len(parts)
            return NoImage("/".join(parts[: place + 1]) + "/" * is_folder, reason, is_passed_over=True)
    return None


def leftover_row(name: str, path: str | None = None) -> NoImage | None:
    """Return what a row of a table is if it is a leftover or a copy that has not ended, or None.

    Args:
        name: counts where it is a path; other names are ids, and say nothing.
        path: where `datasets` says that the image came from. Of a path from the root only the end counts: a data set
            may have lain in a hidden cache.
    """
    is_path = "/" in name or "." in name[1:] or name.lower() in (_LEFTOVER | _HIDDEN)
    found = _leftover_file(name) if is_path else None
    if found is None and path:
        path = path.replace("\\", "/")
        found = _leftover_file(path.rsplit("/", 1)[-1] if path.startswith("/") or ":" in path else path)
    return found


def _leftover_file(name: str) -> NoImage | None:
    if found := leftover(name):
        return found
    return NoImage(name, _HAS_NOT_ENDED, is_passed_over=True) if _ending(name) in _PARTIAL else None


def _left_by(part: str) -> str:
    if part in ("", ".", ".."):
        return ""
    small = part.lower()
    if part.startswith("."):
        return _HIDDEN.get(small) or (
            "macOS keeps it" if part.startswith("._") else "hidden, by the dot it begins with"
        )
    if reason := _LEFTOVER.get(small):
        return reason
    return next((reason for pattern, reason in _PATTERNS if pattern.fullmatch(small)), "")


def format_of(head: bytes) -> Format | None:
    """Return the format that the first bytes of a file are of."""
    return next((one for one in FORMATS if one.is_begun_by(head)), None)


def no_image(name: str, head: Callable[[], bytes]) -> NoImage | None:
    """Return why a file is no image, or None if it is one; see the module.

    Args:
        name: its path within the source, with slashes.
        head: gives its first HEAD_BYTES bytes; called only where the name does not decide. If it raises OSError, the
            file counts as an image: its reader says why it cannot.
    """
    if found := _leftover_file(name):
        return found
    ending = _ending(name)
    if ending in _RAW:
        return NoImage(name, "a camera's raw file; save it as TIFF, PNG or JPEG", is_passed_over=False)
    if ending in ENDINGS:
        return None
    try:
        first = head()
    except OSError:
        return None
    if format_of(first):
        return None
    if first.startswith(_WIDE_TEXT) or _NO_TEXT.isdisjoint(first):
        return NoImage(name, "a text" if first else "an empty file", is_passed_over=True)
    return NoImage(name, what_it_is(first), is_passed_over=False)


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  (a name in a zip is no path, and there are many)


@dataclass(frozen=True)
class Listing:
    """The files of a folder.

    Attributes:
        images: names of the image files, relative to the folder and in order.
        folders: names of the folders right in it, in order, that are no leftovers.
        passed_over: leftovers and texts.
        left_out: what else is no image, or no file.
    """

    images: tuple[str, ...]
    folders: tuple[str, ...]
    passed_over: tuple[Skipped, ...]
    left_out: tuple[Skipped, ...]


def list_images(folder: Path) -> Listing:
    """List the image files in a folder and below it, through links; see the module.

    Raises:
        UnreadableFile: the folder, or folders or links in it, cannot be read or followed; with their paths.
    """
    return _Walk(folder).listing()


class _Walk:
    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._images: list[str] = []
        self._folders: list[str] = []
        self._no_images: list[NoImage] = []
        self._unreadable: list[Skipped] = []
        self._seen: dict[tuple[int, int], str] = {}
        self._links: list[str] = []

    def listing(self) -> Listing:
        self._below("")
        while self._links:  # after all that lies here itself, so that no order of names decides what is a link's
            links, self._links = sorted(self._links, key=_parts), []
            for name in links:
                self._below(name)
        if self._unreadable:
            count = len(self._unreadable)
            raise UnreadableFile(
                f"folder {self._root.name!r} cannot be read whole ({count} of its folders and links): "
                f"{in_words(self._unreadable)}. Mount what is missing, let this user read it, or take it out"
            )
        passed_over = [one for one in self._no_images if one.is_passed_over]
        left_out = [one for one in self._no_images if not one.is_passed_over]
        return Listing(
            tuple(sorted(self._images, key=_parts)),
            tuple(sorted(self._folders)),
            *(tuple(sorted(some, key=lambda one: _parts(one.source))) for some in (passed_over, left_out)),
        )

    def _below(self, name: str) -> None:
        waiting = [name]
        while waiting:
            name = waiting.pop()
            path = self._root / name
            try:
                status = path.stat()
                known = self._seen.setdefault((status.st_dev, status.st_ino), name)
                if known != name:
                    reason = f"a link to a folder that is listed already ({known or '.'})"
                    self._no_images.append(NoImage(f"{name}/", reason, is_passed_over=True))
                    continue
                with os.scandir(path) as entries:
                    found = list(entries)
            except OSError as error:
                self._unreadable.append(Skipped(name or ".", error.strerror or type(error).__name__))
                continue
            if name and "/" not in name:
                self._folders.append(name)
            for entry in found:
                self._take(entry, f"{name}/{entry.name}" if name else entry.name, waiting)

    def _take(self, entry: os.DirEntry[str], name: str, waiting: list[str]) -> None:
        if left := leftover(name):
            is_folder = entry.is_dir(follow_symlinks=False)
            self._no_images.append(NoImage(name + "/" * is_folder, left.reason, is_passed_over=True))
            return
        try:
            mode = entry.stat().st_mode if entry.is_symlink() else 0
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            self._unreadable.append(Skipped(name, "a link to nothing" if missing else error.strerror or "a link"))
            return
        if entry.is_dir(follow_symlinks=False):
            waiting.append(name)
        elif stat.S_ISDIR(mode):
            self._links.append(name)
        elif not (stat.S_ISREG(mode) or entry.is_file(follow_symlinks=False)):
            reason = "is no file, but a pipe, a socket or a device"
            self._no_images.append(NoImage(name, reason, is_passed_over=False))
        elif found := no_image(name, lambda: _head(entry.path)):
            self._no_images.append(found)
        else:
            self._images.append(name)


def _parts(name: str) -> list[str]:
    return name.split("/")


def _head(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123  (an entry of scandir has a text)
        return file.read(HEAD_BYTES)


def in_words(files: Sequence[Skipped]) -> str:
    """Name files with their reasons: the first SHOWN of them, and how many more there are."""
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return ", ".join(f"{one.source} ({one.reason})" for one in files[:SHOWN]) + more


@dataclass(frozen=True)
class Member:
    """A file in a zip.

    Attributes:
        name: as a person wrote it.
        info: its entry in the zip's directory.
    """

    name: str
    info: zipfile.ZipInfo

    def no_image(self, archive: zipfile.ZipFile) -> NoImage | None:
        """Return why it is no image, or None if it is one; reads its first bytes where its name does not decide."""

        def head() -> bytes:
            with archive.open(self.info) as file:
                return file.read(HEAD_BYTES)

        return no_image(self.name, head)


def zip_members(archive: zipfile.ZipFile) -> list[Member]:
    """List the files in a zip, in its order, without its folders; see the module for their names."""
    raw = [_raw_name(info) for info in archive.infolist()]
    page = _code_page(one for one in raw if isinstance(one, bytes))
    named = [one if isinstance(one, str) else one.decode(page) for one in raw]
    members = (
        Member(name.partition("\0")[0].replace("\\", "/"), info)
        for name, info in zip(named, archive.infolist(), strict=True)
    )
    return [one for one in members if not one.name.endswith("/")]


LEGACY: Final = ("cp437", "cp1252", "cp850", "cp866", "cp1251", "cp932", "gbk")
"""Code pages in which programs of Windows and DOS wrote names, the likeliest first."""

_UTF8_FLAG: Final = 0x800
_UNICODE_PATH: Final = 0x7075


def _raw_name(info: zipfile.ZipInfo) -> str | bytes:
    """Return the name of a zip's entry, or its bytes where only a code page can tell."""
    if info.flag_bits & _UTF8_FLAG:
        return info.orig_filename
    raw = info.orig_filename.encode("cp437")  # as zipfile decoded it; each byte has a character there
    extra = info.extra
    while len(extra) >= 4:
        kind, size = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        is_of_this_name = field[:1] == b"\1" and int.from_bytes(field[1:5], "little") == zlib.crc32(raw)
        if kind == _UNICODE_PATH and is_of_this_name:
            raw = field[5:]
            break
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _code_page(names: Iterable[bytes]) -> str:
    """Return the code page in which the names of one zip have the fewest strange letters."""
    listed = list(names)
    best, fewest = LEGACY[0], None
    for page in LEGACY:
        try:
            strange = sum(_strangeness(name.decode(page)) for name in listed)
        except UnicodeDecodeError:
            continue
        if fewest is None or strange < fewest:
            best, fewest = page, strange
    return best


_WORD: Final = re.compile(r"[^\W\d_]+")


def _strangeness(name: str) -> int:
    """Count what people do not write: signs that are no letters, words of two scripts, capitals inside a word."""
    strange = 3 * sum(not one.isascii() and not one.isalpha() for one in unicodedata.normalize("NFC", name))
    for found in _WORD.finditer(name):
        word = found[0]
        if word.isascii():
            continue
        scripts = {_script(one) for one in word}
        if len(scripts) > 1 or "OTHER" in scripts:
            strange += 3 * len(word)
        if "LATIN" in scripts:  # most letters of a word are plain, and the others are of the west
            strange += sum(ord(one) > 0xFF or one in "\u00de\u00fe\u00d0\u00f0" for one in word)
            strange += max(0, sum(not one.isascii() for one in word) - max(3, len(word) // 2))
        if "CJK" not in scripts and not (word.islower() or word.isupper() or word.istitle()):
            strange += 1
    return strange


@cache
def _script(letter: str) -> Literal["LATIN", "CYRILLIC", "CJK", "OTHER"]:
    name = unicodedata.name(letter, "")
    if name.startswith(("CJK", "HIRAGANA", "KATAKANA")):
        return "CJK"
    return "LATIN" if name.startswith("LATIN") else "CYRILLIC" if name.startswith("CYRILLIC") else "OTHER"
