"""Own features: rows of numbers that a party made itself, as a source for a shard like any other.

A file holds the rows and, if it likes, what belongs to them:

    .npz, .h5       arrays `features` (n, d), and `ids`, `labels`, `persons` of n each
    .parquet        columns of those names; a feature is a list of numbers
    .npy            the rows alone

A separate process reads the file, and nothing outside of it (feature_store.array_reader). Ids, labels and persons may
also come in files of their own: an array (.npy), or text, one a line.

The program neither sees the images or texts nor loads the backbone, so a backbone is only declared: its name, and what
it was fitted on. A name proves nothing. So everybody who takes part embeds one public probe. Its features are kept in
each shard, and compared before anything is paid for (feature_store.rows.refuse_other_probe).

Features that were fitted on records that vote void the guarantee: when one record leaves, every feature moves, and not
only its own. Such a shard is never made.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.array_reader import FEATURES, Values, read_arrays
from feature_store.backbones.backbone import Backbone, fingerprint_of
from feature_store.backbones.spec import Transform
from feature_store.decode import MAX_PIXELS, Skipped
from feature_store.embedding import Embedded, LoadedImage
from feature_store.rows import probe_text, quantize, usable_rows
from feature_store.sources import row_names
from labeler.errors import BadData, InvalidSetting
from labeler.system.files import read_named
from labeler.untrusted import MOST_PROBE_NUMBERS

FittedOn = Literal["public", "other-records", "voting-records"]
"""What a backbone was fitted on: public data; private records that never vote; or records that do."""

Column = str | Path | Sequence[Any]
"""An array or column of the features' file by name, a file of its own, or the values."""

_MOST_COLUMN_BYTES: Final = 2**30
"""Of a text of ids, labels or persons."""

_ROWS_AT_ONCE = 4096
_SEEN: Final = np.empty(0, dtype=np.uint8)
"""Stands for the pixels of an image that somebody else has seen."""


@dataclass(frozen=True, eq=False)
class DeclaredBackbone:
    """A backbone that its owner runs, by name; it satisfies `Backbone`, and embeds nothing here.

    Args:
        name: what parties call it; one name for all.
        fitted_on: what it was fitted on; see the module.
        dimension: numbers in a feature.
        probe: features of the published probe, shape (n, dimension).
    """

    name: str
    fitted_on: FittedOn
    dimension: int
    probe: NDArray[np.floating] = field(repr=False)
    batch_size: int = 1
    transform: Transform = field(default=Transform(resize=1, crop=1, mean=(0.5,), std=(1.0,)), repr=False)

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable() or len(self.name) > 100:
            raise InvalidSetting("name the backbone that made the features in 1 to 100 characters (--backbone-name)")
        if self.fitted_on == "voting-records":
            raise InvalidSetting(
                "features fitted on records that vote void the guarantee: when one record leaves, all features move. "
                "Fit the backbone on public data, or on records that are in no shard, and embed again"
            )
        if self.probe.ndim != 2 or self.probe.shape[1] != self.dimension:
            raise BadData(
                f"the probe has features of shape {self.probe.shape}, and the features have {self.dimension} entries "
                "each; embed the published probe with the same backbone"
            )

    @property
    def spec(self) -> dict[str, Any]:
        declared = {"kind": "features", "architecture": self.name, "fitted_on": self.fitted_on}
        return declared | {"probe": probe_text(self.probe)}

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.spec)

    def embed_prepared(self, *_: object, **__: object) -> NoReturn:
        """Refuse: nothing is embedded here."""
        raise InvalidSetting(
            f"backbone {self.name!r} is run by its owner; give the features that it makes (labeler embed --features)"
        )

    embed = embed_prepared


class FeatureSource:
    """Rows of features with their ids, labels and persons: a source (feature_store.sources) without pictures.

    Args:
        rows: shape (n, d), numbers.
        ids: names of the rows, all different; `ROW#number` where None.
        labels: a name or a whole number each; None, "" or a negative number where unknown.
        persons: whose record each is.
        name: of the file, for messages and ids.

    Raises:
        BadData: rows of no direction, columns of other lengths, ids that are there twice.
    """

    names_are_declared = False
    max_pixels = MAX_PIXELS
    left_out: tuple[Skipped, ...] = ()
    passed_over: tuple[Skipped, ...] = ()

    def __init__(
        self,
        rows: NDArray[Any],
        *,
        ids: Sequence[Any] | None = None,
        labels: Sequence[Any] | None = None,
        persons: Sequence[Any] | None = None,
        name: str = "features",
    ) -> None:
        self.rows = as_rows(rows, name)
        ids, labels, persons = (
            None if column is None else self._checked(column, what, name)
            for column, what in ((ids, "ids"), (labels, "labels"), (persons, "persons"))
        )
        count = len(self.rows)
        self.names = [f"{name}#{row}" for row in range(count)]
        if ids is not None:
            self.names = row_names(ids, name)
        said = [None] * count if labels is None else [_label(one, name) for one in labels]
        present = {one for one in said if one is not None}
        # Numbers of an array are places, as in every tool that makes such arrays; numbers written as text are names.
        self.labels_are_places = labels is not None and not any(isinstance(one, str) for one in labels)
        order = sorted(present, key=int) if all(one.isdecimal() for one in present) else sorted(present)
        place = {one: number for number, one in enumerate(order)}
        self.label_names = tuple(order)
        self.labels = [None if one is None else place[one] for one in said]
        self._persons = None if persons is None else [_text(one) for one in persons]

    def _checked(self, column: Sequence[Any], what: str, name: str) -> list[Any]:
        """One plain value for each row: numpy's own numbers are none."""
        values = np.empty(len(column), dtype=object)
        try:
            plain = (one.item() if isinstance(one, np.generic) else one for one in column)
            values[:] = [one.decode() if isinstance(one, bytes) else one for one in plain]
        except UnicodeDecodeError:
            raise BadData(f"{name!r}: one of the {what} is no text in UTF-8; write it as text") from None
        if len(values) != len(self.rows) or any(isinstance(one, list | tuple | np.ndarray) for one in values):
            raise BadData(
                f"{name!r} has {len(self.rows)} rows of features and {len(values)} {what}; give one for each, in the "
                "same order"
            )
        if any(isinstance(one, str) and not _is_text(one) for one in values):
            raise BadData(f"{name!r}: one of the {what} is no text in Unicode: half of a surrogate pair; rename it")
        return values.tolist()

    @property
    def rows_digest(self) -> str:
        """SHA-256 of the rows, so that changed features under the same ids are another source."""
        return hashlib.sha256(np.ascontiguousarray(self.rows, dtype="<f4").data).hexdigest()

    @property
    def has_persons(self) -> bool:
        return self._persons is not None

    def column(self, name: str) -> list[str | None]:
        """The person of each record; the only column there is."""
        if name != "persons" or self._persons is None:
            raise InvalidSetting(f"these features came without {name!r}; name the array or file (--persons)")
        return [one or None for one in self._persons]

    def read(self, _: int) -> Image.Image:
        """A blank picture: there is none of a feature, and a record that is there is no unreadable image."""
        return Image.new("RGB", (1, 1))

    def file(self, index: int) -> bytes:
        """The row of one record, as it is stored."""
        return quantize(self.rows[index : index + 1]).astype("<i2").tobytes()

    def embedded(self, _: Backbone, __: Callable[[int], LoadedImage], indices: range) -> Generator[Embedded]:
        """The rows as batches of a source, for `embed_source`."""
        for start in range(indices.start, indices.stop, _ROWS_AT_ONCE):
            some = range(start, min(start + _ROWS_AT_ONCE, indices.stop))
            yield Embedded([LoadedImage(row, _SEEN, None, "") for row in some], self.rows[some.start : some.stop])


def read_features(
    path: Path, *, ids: Column | None = None, labels: Column | None = None, persons: Column | None = None
) -> FeatureSource:
    """Read a file of features.

    Args:
        path: see the module.
        ids, labels, persons: where else than in the file's own arrays they are; persons may also be given as
            `PersonColumn`, then not here.

    Raises:
        InvalidSetting: no such file or array, or another kind of file.
        BadData: the file is damaged, or its rows cannot be used.
    """
    columns = {"id": ids, "label": labels, "person": persons}
    names = [
        [f"{what}s", what] if given is None else [str(given)] if isinstance(given, str | Path) else []
        for what, given in columns.items()
    ]
    rows, *found = read_arrays(path, [[FEATURES], *names])
    values = {
        f"{what}s": _column(given, one, what, path) for (what, given), one in zip(columns.items(), found, strict=True)
    }
    return FeatureSource(np.asarray(rows), **values, name=path.name)


def read_probe(path: Path) -> NDArray[np.float32]:
    """The features of the published probe, from a file like any other.

    Raises:
        As `read_features`.
    """
    (rows,) = read_arrays(path, [[FEATURES]])
    return as_rows(np.asarray(rows), path.name)


def refuse_private_probe(source: FeatureSource, probe: NDArray[np.floating]) -> None:
    """A probe is public: none of its rows may be a private record.

    Raises:
        BadData: one is.
    """
    public, found = {row.tobytes() for row in quantize(probe)}, set[bytes]()
    for start in range(0, len(source.rows), _ROWS_AT_ONCE):
        found |= public & {row.tobytes() for row in quantize(source.rows[start : start + _ROWS_AT_ONCE])}
    if found:
        raise BadData(
            f"{len(found)} rows of the probe are private records of these features, and a probe is public; embed the "
            "probe that was published, and nothing else"
        )


def as_rows(rows: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Rows as float32, each with a direction.

    Raises:
        BadData: they are no numbers of shape (n, d), too wide, or one is zero or not finite.
    """
    found = np.asarray(rows)
    if found.ndim != 2 or not found.size or not (np.issubdtype(found.dtype, np.number) and np.isrealobj(found)):
        raise BadData(f"{name!r} needs features as numbers of shape (n, width); found {found.dtype} of {found.shape}")
    if found.shape[1] > MOST_PROBE_NUMBERS:
        raise BadData(
            f"{name!r} has features of {found.shape[1]} entries, and at most {MOST_PROBE_NUMBERS} are taken; reduce "
            "them first, with a projection fitted on public data"
        )
    try:
        with np.errstate(over="ignore"):
            floats = found.astype(np.float32, copy=False)
        usable = usable_rows(floats)
    except MemoryError:
        raise BadData(
            f"{name!r} has features of shape {found.shape}, more than this machine has memory for; give fewer rows"
        ) from None
    if not usable.all():
        raise BadData(
            f"{int((~usable).sum())} of {len(usable)} rows of {name!r} are zero or not finite, the first of them row "
            f"{int(np.argmin(usable))}; take them out, or mend what made them"
        )
    return floats


def _column(given: Column | None, found: Values | None, what: str, path: Path) -> Sequence[Any] | None:
    """One value per row: from the file's array, or from where else it was said."""
    if found is not None:
        return found.tolist() if isinstance(found, np.ndarray) else found
    if given is None:
        return None
    if not isinstance(given, str | Path):
        return list(given)
    file = Path(given)
    try:
        if file.suffix.lower() == ".npy":
            (values,) = read_arrays(file, [[FEATURES]])
            return _column(None, values, what, file)
        text = read_named(file, most_bytes=_MOST_COLUMN_BYTES).decode("utf-8-sig")
        return io.StringIO(text, newline=None).read().removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidSetting(
            f"--{what}s: {str(given)!r} is neither an array of {path.name!r} nor a file of them, one a line or .npy "
            f"({why})"
        ) from None


def _is_text(value: str) -> bool:
    try:
        return bool(value.encode()) or True
    except UnicodeEncodeError:
        return False


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _label(value: Any, name: str) -> str | None:
    """A label as text; None where it is unknown."""
    if isinstance(value, float):
        if np.isnan(value):
            return None
        if not value.is_integer():
            raise BadData(f"{name!r}: labels are names or whole numbers; found a fraction")
        value = int(value)
    if isinstance(value, int) and value < 0:
        return None
    return _text(value) or None
