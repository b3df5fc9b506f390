"""What the Python client sends with a job: vectors as numbers or as a Parquet file, images as parts of a form.

A form is read from its files while it is sent, and can be sent again from the start.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labeler.errors import InvalidSetting
from labeler.settings import check_names_are_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, repr=False)
class Part:
    """One part of a form.

    Attributes:
        content: its bytes, or the file that holds them; a file is open only while it is sent.
        file_name: what the service shall call it; "" for a plain field.
    """

    field: str
    content: bytes | Path
    file_name: str = ""

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


class FormBody:
    """Parts as one body of known length.

    Args:
        parts: in the order in which they are sent.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._boundary = f"labeler-{secrets.token_hex(16)}"

    @property
    def headers(self) -> dict[str, str]:
        """Content-Type with the boundary, and Content-Length."""
        ending = len(self._end())
        length = sum(len(self._head(part)) + part.size + 2 for part in self._parts) + ending
        return {
            "Content-Type": f"multipart/form-data; boundary={self._boundary}",
            "Content-Length": str(length),
        }

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield self._head(part)
            if isinstance(part.content, bytes):
                yield part.content
            else:
                with part.content.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            yield b"\r\n"
        yield self._end()

    def _head(self, part: Part) -> bytes:
        disposition = f'Content-Disposition: form-data; name="{_quoted(part.field)}"'
        kind = ""
        if part.file_name:
            disposition += f'; filename="{_quoted(part.file_name)}"'
            kind = "\r\nContent-Type: application/octet-stream"
        return f"--{self._boundary}\r\n{disposition}{kind}\r\n\r\n".encode()

    def _end(self) -> bytes:
        return f"--{self._boundary}--\r\n".encode()


def _quoted(name: str) -> str:
    # A quoted string of HTTP, which is read back as it was; what browsers write for a quote, %22, may be a name's own.
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return quoted.replace("\r", "%0D").replace("\n", "%0A")


IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

BYTES_OF_A_GROUP = 8 * 1024 * 1024
_ROWS_LOOKED_AT = 4096


def vectors_of(features: ArrayLike) -> NDArray[np.float64]:
    """Feature vectors as numbers, none of them guessed from something else.

    Raises:
        InvalidSetting: they are no array of finite real numbers with a row for each query.
    """
    import numpy as np  # here: a look at a job needs no arrays, and would wait for them

    try:
        given = np.asarray(features)
    except ValueError:
        raise InvalidSetting("features: the vectors of one job have one length each") from None
    if np.ma.isMaskedArray(features) or given.dtype.kind not in "fiu":
        found = "a masked array" if np.ma.isMaskedArray(features) else f"dtype {given.dtype}"
        raise InvalidSetting(f"features are real numbers, in an array of floats; found {found}")
    if given.ndim != 2:
        raise InvalidSetting(f"features have shape (queries, dimension), found {given.shape}")
    vectors = given.astype(np.float64, copy=False)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
        raise InvalidSetting(
            f"features: {bad.size} of {len(vectors)} vectors have NaN or infinite numbers, the first in row {bad[0]}; "
            "leave them out"
        )
    return vectors


def parquet_of(features: NDArray[np.float64], names: Sequence[str] | None) -> bytes:
    """Feature vectors as a Parquet file, named as the service names vectors of a request."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if names is not None and len(names) != len(features):
        raise InvalidSetting(f"{len(features)} feature vectors came with {len(names)} query_ids; give one for each")
    known = [f"query-{number:06d}" for number in range(len(features))] if names is None else list(names)
    written = _short(features)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(written.reshape(-1)), features.shape[1])
    rows_of_a_group = max(1, BYTES_OF_A_GROUP // max(1, features.shape[1] * written.itemsize))
    with io.BytesIO() as file:
        # Packed, equal vectors would look to the service like a bomb.
        table = pa.table({"name": pa.array(known, pa.string()), "feature": rows})
        pq.write_table(table, file, compression="none", use_dictionary=False, row_group_size=rows_of_a_group)
        return file.getvalue()


def _short(features: NDArray[np.float64]) -> NDArray[np.float64 | np.int16]:
    """The same vectors in a quarter of the bytes where all are quantised; the service keeps those as they are."""
    from feature_store.rows import on_grid

    starts = range(0, len(features), _ROWS_LOOKED_AT)
    if features.shape[1] and all(on_grid(features[start : start + _ROWS_LOOKED_AT]).all() for start in starts):
        return features.astype("int16")
    return features


def images_in(folder: Path) -> list[str]:
    """Names of the images in a folder and below it, as the service will know them."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    return [path.relative_to(folder).as_posix() for path in found]


def image_parts(images: Path | Sequence[Path], leave_out: Collection[str]) -> list[Part]:
    """A folder, an archive, a Parquet file or single images, as parts of a form; nothing is read yet.

    Raises:
        InvalidSetting: there is no image, or two of one name.
    """
    if not isinstance(images, Path):
        if wrong := [one for one in images if not isinstance(one, Path)]:
            raise InvalidSetting(f"images are a Path, or several; found {type(wrong[0]).__name__}")
        return _parts([(path, path.name) for path in images])
    if images.is_dir():
        return _parts([(images / name, name) for name in images_in(images) if name not in leave_out])
    if not images.is_file():
        raise InvalidSetting(f"there is no file or folder {images.name!r}")
    field = {".zip": "archive", ".parquet": "parquet"}.get(images.suffix.lower(), "images")
    return [Part(field, images, images.name)]


def _parts(files: list[tuple[Path, str]]) -> list[Part]:
    if not files:
        raise InvalidSetting(f"there is no image to send; known endings are {', '.join(sorted(IMAGE_SUFFIXES))}")
    names = [name for _, name in files]
    check_names_are_text(names)
    if len(set(names)) != len(names):
        raise InvalidSetting("two images have the same name; names tell the labels apart, so give a folder instead")
    return [Part("images", path, name) for path, name in files]
