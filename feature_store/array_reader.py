"""A reader of own features, labels, ids and persons (.npz, .npy, .parquet, .h5) in a separate process.

A damaged file can keep HDF5 busy without end, and a few bytes of run lengths unpack to gigabytes in Arrow. Nothing in
the same process can stop either. So the system bounds the memory and the time of a process that reads one file and
ends.

    caller   starts the reader with the open file as its input  ----->  limits itself, checks what the file declares.
             Checks every length, then takes the values         <-----  head (JSON), then the bytes of the numbers.

**Nothing leads out of the file.** What is read becomes a shard and its published probe, so the bytes of another file
must not come in. A file that points anywhere is refused whole, also where the pointer is not needed. Groups inside an
.h5 are not opened, whatever they hold.

    .npz        plain members, each once; no link, password, pickle, or name that leads out of a folder.
    .npy        numbers or text, as many bytes as the header declares.
    .parquet    column chunks of the file itself, not encrypted; columns of numbers, of lists of them, or of text.
    .h5         hard links to data sets that lie in the file; no soft, external or user-defined link, external storage,
                virtual data set, reference, or filter that a plugin brings.

Declared shapes are checked before anything is allocated, and against what the file then holds.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting, LabelerError
from labeler.system.files import open_regular
from labeler.system.process_pool import Frames, UnsoundProcess, bound_process, serve_process, start_process, write_frame

SUFFIXES: Final = (".npz", ".npy", ".parquet", ".h5", ".hdf5")

FEATURES: Final = "features"
"""The array of this name, or else the only one of two dimensions."""

MOST_BYTES: Final = 2**35
"""Most bytes of one array."""

MAX_RATIO: Final = 200
"""Largest ratio of an array's bytes to those of its file; not checked up to `SMALL_BYTES`."""

SMALL_BYTES: Final = 2**24
SMALL_LETTERS: Final = 2**26
"""Characters of all texts together that are read of any file; of a large one `MAX_RATIO` times its bytes."""

MOST_LETTERS: Final = 1000
"""Most characters of a text."""

ROOM_BYTES: Final = 2**30
"""Memory of the reader, besides four times the size of the file."""

CPU_S: Final = 20
"""Seconds of the reader, besides one for each mebibyte of the file."""

Values = NDArray[Any] | list[Any]

_SILENCE_S = 300.0
_BLOCK_BYTES = 2**22
_BLOCK_ROWS = 1024
_MOST_VALUES = 2**28
_MOST_HEAD_BYTES = 2**24  # room for a block of the longest texts, each character written as twelve
_NUMBERS = re.compile(r"[<>|][biuf](1|2|4|8|16)")
_REFUSALS: dict[str, type[LabelerError]] = {one.problem_type: one for one in (BadData, InvalidSetting)}
MODULE = "feature_store.array_reader"


def read_arrays(path: Path, wanted: Sequence[Sequence[str]]) -> list[Values | None]:
    """Return arrays of a file.

    Args:
        path: its suffix says its format.
        wanted: for each array the names that it may have, the first that is there; see also `FEATURES`.

    Returns:
        Numbers as an array, everything else as a list of texts, numbers and None; None where no name is there.

    Raises:
        InvalidSetting: no such file, another kind of file, no features in it, or h5py is not installed.
        BadData: the file is damaged, points elsewhere, or holds what is neither numbers nor text.
    """
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        raise InvalidSetting(f"features come as {', '.join(SUFFIXES)}; found {path.name!r}")
    try:
        with open_regular(path) as file:
            process = start_process(MODULE, suffix, json.dumps(wanted), stdin=file, answers=True)
    except OSError as error:
        raise InvalidSetting(f"there is no file {path.name!r} of features to read ({error.strerror})") from None
    try:
        frames = Frames(process.stdout, most_head_bytes=_MOST_HEAD_BYTES, silence_s=_SILENCE_S)
        return [_taken(frames, path.name) for _ in wanted]
    except MemoryError:
        raise BadData(f"{path.name!r} holds more than this machine has memory for; give fewer rows at once") from None
    except UnsoundProcess:
        raise BadData(
            f"{path.name!r} is damaged, or reading it takes more than is given to a file of its size "
            f"({ROOM_BYTES >> 20} MiB and four times the file; {CPU_S} s and one for each MiB); write it again"
        ) from None
    finally:
        process.kill()
        process.communicate()


def _taken(frames: Frames, name: str) -> Values | None:
    """Take one array from the reader, trusting nothing that it sends."""
    values: list[Any] = []
    array, data, filled = np.empty(0), memoryview(b""), 0
    while True:
        match frames.head():
            case {"kind": "refused", "problem": problem, "sentence": sentence}:
                raise _REFUSALS.get(str(problem), BadData)(f"{name!r}{str(sentence)[:2000]}")
            case {"kind": "none"}:
                return None
            case {"kind": "numbers", "dtype": str(kind), "shape": [*shape]} if (
                _NUMBERS.fullmatch(kind)
                and all(type(side) is int and side >= 0 for side in shape)
                and math.prod(shape) * np.dtype(kind).itemsize <= MOST_BYTES
            ):
                array = np.empty(shape, np.dtype(kind))
                data = memoryview(array.reshape(-1).view(np.uint8).data)
            case {"kind": "block", "size": int(size)} if 0 < size <= len(data) - filled:
                data[filled : filled + size] = frames.exactly(size)
                filled += size
            case {"kind": "values", "values": [*some]} if len(values) + len(some) <= _MOST_VALUES and all(
                isinstance(one, _PLAIN) for one in some
            ):
                values += some
            case {"kind": "end", "numbers": bool(numbers), "turned": bool(turned)} if filled == len(data):
                return values if not numbers else array.T if turned else array
            case _:
                raise UnsoundProcess


_PLAIN: Final = (str, int, float, type(None))


# The reader's side.


@dataclass(frozen=True)
class _Array:
    """An array as its file declares it.

    Attributes:
        shape: as declared; the width of a list comes from its first row.
        numbers: its type where it is numbers, else None.
        blocks: gives its content in order: bytes of numbers, or lists of values.
        turned: whether the numbers come column after column.
    """

    shape: tuple[int, ...]
    numbers: np.dtype[Any] | None
    blocks: Callable[[], Iterator[bytes | list[Any]]]
    turned: bool = False


_Found = dict[str, _Array | None]
"""The arrays of a file by name; None: neither numbers nor text."""


def serve(arguments: Sequence[str], file: BinaryIO, out: BinaryIO) -> int:
    """Send the arrays that are wanted of a file; the arguments are its suffix, and the names in JSON."""
    suffix, wanted = arguments[0], json.loads(arguments[1])
    size = os.fstat(file.fileno()).st_size
    bound_process(ROOM_BYTES + 4 * size, CPU_S + size // 2**20)
    try:
        found = _FORMATS[suffix](file, size)
        for names in wanted:
            name = _chosen(found, names)
            if name is None:
                write_frame(out, {"kind": "none"})
                continue
            array = found[name]
            if array is None:
                raise BadData(f", {_shown(name)}: it is neither numbers nor text, and nothing else is read")
            _check_declared(name, array.shape, array.numbers, size)
            if array.numbers is not None:
                shape = array.shape[::-1] if array.turned else array.shape
                write_frame(out, {"kind": "numbers", "dtype": array.numbers.str, "shape": shape})
            letters = 0
            for block in array.blocks():
                if isinstance(block, bytes):
                    write_frame(out, {"kind": "block", "size": len(block)}, block)
                else:
                    values = [_plain(one, name) for one in block]
                    letters += sum(len(one) for one in values if isinstance(one, str))
                    if letters > max(SMALL_LETTERS, MAX_RATIO * size):
                        raise BadData(
                            f", {_shown(name)}: its texts have more than {max(SMALL_LETTERS, MAX_RATIO * size)} "
                            f"characters in all, in a file of {size} bytes; write it without compression"
                        )
                    write_frame(out, {"kind": "values", "values": values})
            write_frame(out, {"kind": "end", "numbers": array.numbers is not None, "turned": array.turned})
    except LabelerError as error:
        write_frame(out, {"kind": "refused", "problem": error.problem_type, "sentence": str(error)})
    # The libraries raise almost anything on damaged files; all of it means the same here.
    except Exception as error:
        said = f" cannot be read ({type(error).__name__}); write arrays of numbers and of text, no objects"
        write_frame(out, {"kind": "refused", "problem": BadData.problem_type, "sentence": said})
    return 0


def _chosen(found: _Found, names: list[str]) -> str | None:
    name = next((one for one in names if one in found), None)
    if name is None and FEATURES in names:
        wide = [key for key, one in found.items() if one is not None and len(one.shape) == 2]
        if len(wide) != 1:
            holds = ", ".join(map(_shown, list(found)[:20])) or "nothing"
            raise InvalidSetting(f" needs an array {FEATURES} of shape (n, width); it holds {holds}")
        return wide[0]
    return name


def _check_declared(name: str, shape: tuple[int, ...], kind: np.dtype[Any] | None, size: int) -> None:
    """Refuse an array by its declared shape.

    Raises:
        BadData: it has more bytes than are read of a file of this size.
    """
    most = min(MOST_BYTES, max(SMALL_BYTES, MAX_RATIO * size))
    count = math.prod(shape) * (1 if kind is None else max(kind.itemsize, 1))
    if count > most:
        raise BadData(
            f", {_shown(name)}: it declares the shape {shape}, which is {count} bytes or more, and {most} are read of "
            f"a file of {size} bytes; write it without compression, or check what wrote it"
        )


def _plain(value: Any, name: str) -> Any:
    try:
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise BadData(f", {_shown(name)}: a text that is not UTF-8; write it as Unicode") from None
    if isinstance(text, str) and len(text) > MOST_LETTERS:
        raise BadData(f", {_shown(name)}: a text of {len(text)} characters, and at most {MOST_LETTERS} are taken")
    return text


def _shown(name: str) -> str:
    return (name if name.isprintable() else ascii(name))[:100]


def _npy(file: IO[bytes], size: int, *, name: str = FEATURES, again: Callable[[], IO[bytes]] | None = None) -> _Found:
    """An array in numpy's own format.

    Args:
        size: of the content in all, header and array.
        again: opens the content where `file` is only good for its header.
    """
    start = npy.read_magic(file)
    if start not in ((1, 0), (2, 0)):
        return {name: None}
    read = npy.read_array_header_1_0 if start == (1, 0) else npy.read_array_header_2_0
    shape, turned, kind = read(file)
    if kind.hasobject:
        raise BadData(f", {_shown(name)}: it holds objects of Python, which only run as code; write numbers and text")
    if kind.kind not in "biufUS":
        return {name: None}
    if not all(type(side) is int and side >= 0 for side in shape):
        raise BadData(f", {_shown(name)}: it declares the shape {str(shape)[:100]}")
    bytes_in_all = math.prod(shape) * kind.itemsize
    header = file.tell()
    if header + bytes_in_all != size:
        raise BadData(
            f", {_shown(name)}: it declares the shape {shape} of {kind}, which is {bytes_in_all} bytes after the "
            f"header, and has {size - header}; write it again"
        )

    is_text = kind.kind in "US"
    block = kind.itemsize * max(1, min(_BLOCK_ROWS if is_text else _BLOCK_BYTES, _BLOCK_BYTES // max(kind.itemsize, 1)))

    def content() -> Iterator[bytes]:
        with file if again is None else again() as opened:
            opened.seek(header)
            for start in range(0, bytes_in_all, block):
                data = opened.read(min(block, bytes_in_all - start))
                if len(data) < min(block, bytes_in_all - start):
                    raise EOFError
                yield data
            if opened.read(1):  # at its end a member's checksum is compared
                raise EOFError

    def texts() -> Iterator[list[Any]]:
        if not kind.itemsize:
            yield from ([""] * min(_BLOCK_ROWS, shape[0] - start) for start in range(0, shape[0], _BLOCK_ROWS))
        else:
            yield from (np.frombuffer(data, kind).tolist() for data in content())

    if is_text:
        return {name: _Array(shape, None, texts) if len(shape) == 1 else None}
    return {name: _Array(shape, kind, content, turned=bool(turned) and len(shape) > 1)}


_LEADS_OUT: Final = re.compile(r"^/|^[A-Za-z]:|\\|\0|(^|/)\.\.(/|$)")


def _npz(file: BinaryIO, _: int) -> _Found:
    archive, found = zipfile.ZipFile(file), _Found()
    for member in archive.infolist():
        name = member.orig_filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        wrong = (
            "is a folder or a link" if member.is_dir() or kind not in (0, stat.S_IFREG)
            else "leads out of a folder" if _LEADS_OUT.search(name)
            else "is encrypted" if member.flag_bits & 0x41
            else "is packed by another method than deflate" if member.compress_type not in (0, zipfile.ZIP_DEFLATED)
            else "is no array (.npy)" if not name.endswith(".npy")
            else "is there twice" if name.removesuffix(".npy") in found
            else ""
        )  # fmt: skip
        if wrong:
            raise BadData(f": its member {_shown(name)} {wrong}; write it with numpy.savez")
        again = partial(archive.open, member)
        with again() as opened:
            found |= _npy(opened, member.file_size, name=name.removesuffix(".npy"), again=again)
    return found


def _parquet(file: BinaryIO, size: int) -> _Found:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**16)
    metadata, schema, types = parquet.metadata, parquet.schema_arrow, pa.types
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if any(group.column(column).file_path for group in groups for column in range(group.num_columns)):
        raise BadData(" names other files that hold its columns, and none is followed; give the file that holds them")
    if len(set(schema.names)) != len(schema.names):
        raise BadData(" has two columns of one name; rename one")
    count = metadata.num_rows
    _check_declared("rows", (count,), None, size)

    def cells(name: str) -> Iterator[Any]:
        rows = 0
        for batch in parquet.iter_batches(batch_size=_BLOCK_ROWS, columns=[name], use_threads=False):
            if batch.schema.names != [name]:
                raise ValueError
            rows += len(batch)
            if rows > count:
                raise EOFError
            yield batch.column(0)
        if rows != count:
            raise EOFError

    def values(name: str) -> Iterator[list[Any]]:
        names = class_names(schema, name)
        return ([_named(one, names, name) for one in some.to_pylist()] for some in cells(name))

    def numbers(name: str, width: int, kind: np.dtype[Any]) -> Iterator[bytes]:
        row = 0
        for some in cells(name):
            lengths = _lengths(some)
            if len(wrong := np.flatnonzero(lengths != width)):
                had = f"{lengths[wrong[0]]} numbers" if lengths[wrong[0]] >= 0 else "none"
                raise BadData(f", {_shown(name)}: row 0 has {width} numbers, row {row + int(wrong[0])} has {had}")
            row += len(some)
            yield some.flatten().to_numpy(zero_copy_only=False).astype(kind, copy=False).tobytes()

    def _lengths(some: Any) -> NDArray[np.int64]:
        """Numbers in each row; -1 where there is no list."""
        if types.is_fixed_size_list(some.type):
            return np.where(some.is_valid().to_numpy(zero_copy_only=False), some.type.list_size, -1)
        lengths: NDArray[Any] = some.value_lengths().to_numpy(zero_copy_only=False)
        found: NDArray[np.int64] = np.nan_to_num(lengths, nan=-1).astype(np.int64)
        return found

    found = _Found()
    for field in schema:
        kind = field.type
        inner = kind.value_type if types.is_dictionary(kind) else kind
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if is_list and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
            first = next(cells(field.name), None)
            width = max(int(_lengths(first)[0]), 0) if first is not None and len(first) else 0
            # A number that is missing becomes NaN, which is refused as a feature.
            floats = types.is_floating(kind.value_type)
            stored = np.dtype(f"f{kind.value_type.bit_width // 8}" if floats else np.float64)
            found[field.name] = _Array(
                (count, width), stored, partial(numbers, field.name, width, stored)
            )  # fmt: skip
        elif any(
            check(inner)
            for check in (
                types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean,
                types.is_binary, types.is_large_binary, types.is_null, types.is_string_view, types.is_binary_view,
            )
        ):  # fmt: skip
            found[field.name] = _Array((count,), None, partial(values, field.name))
        else:
            found[field.name] = None
    return found


def class_names(schema: Any, column: str) -> tuple[str, ...]:
    """Return the names that `datasets` gave to the numbers of a column, in a Parquet file's metadata; () where none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):  # any other content simply means that there are none
        return ()


def _named(value: Any, names: tuple[str, ...], column: str) -> Any:
    """Return the name of a number; -1 is none, as `datasets` writes it."""
    if not names or value is None or isinstance(value, str) or value == -1 or value != value:
        return None if names and not isinstance(value, str) else value
    if not 0 <= value < len(names) or value != int(value):
        raise BadData(
            f", {_shown(column)}: a number outside the {len(names)} names in its own metadata; mend the numbers, "
            "or the names"
        )
    return names[int(value)]


_OWN_FILTERS: Final = frozenset({1, 2, 3, 4, 5, 6, 32_000})
"""HDF5's own (deflate, shuffle, fletcher32, szip, nbit, scale-offset), and LZF, which h5py holds. Plugins bring all
others: code that the file chooses."""


def _hdf5(file: BinaryIO, _: int) -> _Found:
    try:
        import h5py
    except ImportError:
        raise InvalidSetting(
            " is HDF5, which needs h5py: pip install private-labeler[hdf5], or write the arrays as .npz"
        ) from None
    root, found = h5py.File(file, "r"), _Found()
    for raw in root.id:
        name = raw.decode("utf-8", "replace")
        if root.id.links.get_info(raw).type != h5py.h5l.TYPE_HARD:
            raise BadData(f", {_shown(name)}: it is a link, and none is followed; write the data itself")
        one = h5py.h5o.open(root.id, raw)
        if not isinstance(one, h5py.h5d.DatasetID):
            continue
        settings = one.get_create_plist()
        filters = {settings.get_filter(number)[0] for number in range(settings.get_nfilters())}
        wrong = (
            "its bytes lie in other files" if settings.get_external_count()
            else "it is virtual, made of other data sets" if settings.get_layout() == h5py.h5d.VIRTUAL
            else "it holds references to other places" if one.get_type().detect_class(h5py.h5t.REFERENCE)
            else f"it needs the filter {min(filters - _OWN_FILTERS)}, a plugin" if filters - _OWN_FILTERS
            else ""
        )  # fmt: skip
        if wrong:
            raise BadData(f", {_shown(name)}: {wrong}; copy the data into a plain data set (h5repack, h5py)")
        found[name] = _data_set(h5py.Dataset(one), is_text=h5py.check_string_dtype(one.dtype) is not None)
    return found


def _data_set(one: Any, *, is_text: bool) -> _Array | None:
    shape = one.shape
    if not shape or not (is_text or one.dtype.kind in "biuf") or (is_text and len(shape) != 1):
        return None
    row = 1 if is_text else one.dtype.itemsize * math.prod(shape[1:])
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(row, 1)))

    def rows() -> Iterator[Any]:
        return (one[start : start + step] for start in range(0, shape[0], step))

    if is_text:
        return _Array(shape, None, lambda: (some.tolist() for some in rows()))
    return _Array(shape, one.dtype, lambda: (some.tobytes() for some in rows()))


_FORMATS: Final[dict[str, Callable[[BinaryIO, int], _Found]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".parquet": _parquet,
    ".h5": _hdf5,
    ".hdf5": _hdf5,
}


if __name__ == "__main__":
    # Arrow would import pandas (0.3 s) only to find that a column of numbers does not use it.
    sys.modules["pandas"] = None  # type: ignore[assignment]
    serve_process(serve)
