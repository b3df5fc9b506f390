"""An agent's records, the public map in front of a model, and what is kept while a round is open.

An agent's records as those who vote see them. Private; does not print.

Whatever way an agent answers, it answers with the same records: those that were not deleted and, where the task bounds
them, no more than m of one person. The proofs of `labeler.methods` are about this cut, and about no other. Records
are read in blocks, so that no number of them is too many to answer from.

What a learner sees of records: rows in blocks, read as often as wanted, and the truth about them.

A block is read, adds to what is learned, and is forgotten; the first KEPT_NUMBERS are kept between steps. So memory
does not follow the number of records, and what is done with a block follows from its place alone.

A public map in front of a linear model: features less a public centre, along public axes, brought to one length.

    x -> z = A (x - m) -> z / |z|            rows of A and m travel as the questions of a blind-average task

Features of a network are positive and share a large mean, along which noise on a model's weights moves all images
together; and most of their directions say nothing about classes, but carry noise like all others. Axes are chosen by
whoever asks, from public images (`feature_store.query_selection.axis_rows`). They travel as the rows that are asked
about, so that everybody's digest of the round is of them, and the model's weights are one row per axis and one for the
constant.

**Privacy.** The map is public and fixed before any record is looked at, and it maps each record by itself; whatever it
is, a mapped record has length one, or zero. So the bounds of `labeler.methods.blind_average` are those of rows of such
a norm.

**No rounding depends on other records.** A, m and stored features are whole numbers, and every sum of products in
A (x - m) is below (2^11 + 2^15 sqrt(d)) 2^15 sqrt(d) < 2^53 for d <= 2^20 numbers: exact in double precision in any
order. What is left is a square root of a sum of squares and a division, off by (rows + 3) 2^-53 at most, which is
below the 2^-34 that `labeler.descent` has room for, for every number of weights that it allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.descent import BLOCK_ROWS, LEAST_BLOCK_ROWS
from labeler.errors import BadData
from labeler.setting import Setting

if TYPE_CHECKING:
    from labeler.task import Task

_MANY_NEIGHBORS = 2**12
"""As many are asked for also of fewer records, where nobody declared how many there may be."""

Selection = tuple[str, int | None]
"""Version of a shard, and m of the task where it bounds the records of a person."""

UNDECLARED_RECORDS: Final = 1 << 16
"""Stands for the number of records wherever nobody declared a bound on it: engines, tiles, threads and devices are
those that are right for so many."""

FEATURE_ONE: Final = 2048.0
"""What a stored feature of 1 is."""


@dataclass(frozen=True, eq=False)
class Records:
    """The arrays of a shard, and which of its rows take part.

    Attributes:
        all_features: int16, shape (n, dimension), quantised; may be memory-mapped.
        all_record_ids: int64, shape (n,), unique, random.
        all_labels: int16, shape (n,), classes; or (n, C), which attributes each has.
        version: of the shard: another whenever a record came or went.
        records_per_person: m of the task that they were selected for; None where it does not bound them.
        rows: int64, ascending: the rows that take part; all of them by default. Records are read by it also where it is
            all of them, so that the first deletion changes nothing about how.
        max_records: the shard's public bound on n; None where nothing was declared.
    """

    all_features: NDArray[np.int16] = field(repr=False)
    all_record_ids: NDArray[np.int64] = field(repr=False)
    all_labels: NDArray[np.int16] = field(repr=False)
    version: str
    records_per_person: int | None = None
    rows: NDArray[np.int64] = field(default=None, repr=False)  # type: ignore[arg-type]  # see __post_init__
    max_records: int | None = None

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(self.all_labels)))

    @property
    def features(self) -> NDArray[np.int16]:
        """Of the records that take part, all in memory; `blocks` needs less."""
        return self.all_features[self.rows]

    @property
    def record_ids(self) -> NDArray[np.int64]:
        """Of the records that take part."""
        return self.all_record_ids[self.rows]

    @property
    def labels(self) -> NDArray[np.int16]:
        """Of the records that take part."""
        return self.all_labels[self.rows]

    @property
    def selection(self) -> Selection:
        """What an index over these records was built from: equal for equal records."""
        return self.version, self.records_per_person

    def __len__(self) -> int:
        return len(self.rows)

    def neighbors(self, k: int) -> int:
        """How many neighbours are asked for where a task says k: what follows from public numbers.

        Those there are none of, where there are fewer than k records, are NO_RECORD. Only where nothing was declared
        and k is beyond all measure, the number of records decides.
        """
        return min(k, self.max_records or max(_MANY_NEIGHBORS, len(self)))

    def first(self, most: int) -> Records:
        """The records of smallest id, at most so many.

        Ids are random and stay for life, so who is cut off does not depend on what a record holds. Where the cut
        binds, a record that leaves lets the next one in: one more or one less becomes a replacement, and whoever cuts
        has to charge for that.
        """
        kept = self.rows[np.argsort(self.record_ids)[:most]]
        return replace(self, rows=np.sort(kept))

    def blocks(self, at_once: int, skip: int = 0) -> Iterator[tuple[NDArray[np.int16], NDArray[np.int16]]]:
        """Features and labels of the records that take part, in the order of rows, at most so many at once.

        Args:
            skip: how many blocks to leave out at the beginning.
        """
        for start in range(skip * max(1, at_once), len(self), max(1, at_once)):
            part = self.rows[start : start + max(1, at_once)]
            yield self.all_features[part], self.all_labels[part]

    def trainable(self, most: int | None) -> Rows:
        """The first `most`, or all, as a learner reads them: features of norm about 1, in blocks."""
        chosen = self if most is None else self.first(most)
        public = self.max_records or UNDECLARED_RECORDS
        if most is not None:
            public = min(public, most)
        return Rows(len(chosen), chosen.all_features.shape[1], chosen._read, public)

    def _read(self, at_once: int, skip: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int16]]]:
        return ((features.astype(np.float32) / FEATURE_ONE, labels) for features, labels in self.blocks(at_once, skip))

    def absent_ids(self) -> NDArray[np.int64]:
        """Ids of the rows that do not take part."""
        absent = np.ones(len(self.all_record_ids), dtype=np.bool_)
        absent[self.rows] = False
        return np.asarray(self.all_record_ids[absent])

    def __repr__(self) -> str:
        return "Records(<private>)"


def first_of_each_person(persons: NDArray[np.int64], record_ids: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Which records are among the first of their person, by record id: ids are random and for life, so the choice is.

    Args:
        persons: shape (n, words), equal rows for one person.
        record_ids: shape (n,), unique.
        most: m, at least 1.

    Returns:
        Shape (n,): at most m rows of each person are True, those of the smallest ids.
    """
    order = np.lexsort((record_ids, *persons.T))
    ordered = persons[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    places = np.arange(len(order))
    rank = places - np.maximum.accumulate(np.where(begins, places, 0))
    kept = np.empty(len(order), dtype=bool)
    kept[order] = rank < most
    return kept


Array = NDArray[np.float64]

BLOCK_NUMBERS = 2**22
"""Of one block, at most, but for LEAST_BLOCK_ROWS rows: 32 MiB."""

KEPT_NUMBERS = 2**25
"""Prepared rows that are kept between steps, 256 MiB; those behind them are prepared anew at every step."""

Block = tuple[Array, Any]
"""Rows as the learner sees them, shape (..., r, d), and the truth about them, as its slopes want it."""

Blocks = Callable[[], Iterable[Block]]
"""Reads all rows once, block by block; the same at every call."""


class Neighbors(Protocol):
    """The k nearest of each query, nearest first; -1 where there are fewer. Shapes (num_queries, k)."""

    @property
    def rows(self) -> NDArray[np.int64]: ...

    @property
    def record_ids(self) -> NDArray[np.int64]: ...

    @property
    def similarities(self) -> NDArray[np.int32]: ...


class Index(Protocol):
    """An exact index of features (`feature_store.index`)."""

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors: ...


class Indexes(Protocol):
    """Builds exact indexes over an agent's records and over public questions."""

    def of_records(self, records: Records) -> Index:
        """Return an index over records; it finds none of those that do not take part."""

    def of_questions(self, questions: NDArray[np.int16], *, searches: int) -> Index:
        """Return an index over questions, by their number, for about so many searches."""


class Slopes(Protocol):
    """A loss, as the steps see it."""

    def __call__(self, scores: Any, truth: Any, xp: Any = np, /) -> Any:
        """The loss's derivative by each score, shape (..., r, columns); `xp` is numpy, or torch for its tensors."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Records' features and labels, read as often as wanted. Private where the records are; does not print.

    Attributes:
        count: how many.
        dimension: numbers of a feature.
        read: all of them in one order, given at most how many at once and how many blocks to skip: features
            (r, dimension), any scale, and labels (r,).
        public_count: a public number that stands for how many, by which devices are chosen.
    """

    count: int
    dimension: int
    read: Callable[[int, int], Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]]
    public_count: int

    @classmethod
    def of(cls, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Rows:
        """Rows of arrays in memory."""

        def read(most: int, skip: int) -> Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]:
            for start in range(skip * most, len(labels), most):
                yield features[start : start + most], labels[start : start + most]

        return cls(len(labels), features.shape[1], read, len(labels))

    def __repr__(self) -> str:
        return "Rows(<private>)"


def block_rows(numbers: int) -> int:
    """How many rows of so many numbers are read at once."""
    return max(LEAST_BLOCK_ROWS, min(BLOCK_ROWS, BLOCK_NUMBERS // max(1, numbers)))


def kept(read: Callable[[int], Iterator[Block]]) -> Blocks:
    """The blocks that `read` prepares, the first KEPT_NUMBERS of them once.

    Args:
        read: prepares all blocks in one order, given how many to skip.
    """
    first: list[Block] = []
    room = KEPT_NUMBERS
    for rows, truth in read(0):
        first.append((rows, truth))
        room -= rows.size + sum(np.size(part) for part in (truth if isinstance(truth, tuple) else (truth,)))
        if room < 0:
            break

    def blocks() -> Iterator[Block]:
        yield from first
        yield from read(len(first))

    return blocks


Made = NDArray[np.int64]


class ModelStore:
    """Keeps integers under (version of the records, name), for one agent: as long as this object.

    Nothing depends on its being kept: an answer is stored before it leaves and never computed a second time after that.
    So models, which hold private records and no noise, live in memory only, and end with the round.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[Made, Task | None]] = {}

    def once(self, version: str, name: str, make: Callable[[], Made], *, task: Task | None = None) -> Made:
        """Return what is kept under the name; make and keep it where there is nothing yet.

        What was made of another version of the records is forgotten: a deleted record must not live on in a model.

        Args:
            task: for which it is made, where further rounds of the task need it again.
        """
        if (version, name) not in self._kept:
            self._kept = {key: made for key, made in self._kept.items() if key[0] == version}
            self._kept[version, name] = make(), task
        return self._kept[version, name][0]

    def tasks(self) -> tuple[Task, ...]:
        """The tasks for which something is kept that their further rounds need."""
        return tuple(task for _, task in list(self._kept.values()) if task is not None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __repr__(self) -> str:
        return "ModelStore(<private>)"


@dataclass(frozen=True, eq=False)
class PublicAxes:
    """The map.

    Attributes:
        rows: int16, shape (axes + 1, dimension): the axes, then the centre; in the unit of stored features.

    Raises:
        BadData: there is no axis.
    """

    rows: NDArray[np.int16]

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int16 or self.rows.ndim != 2 or len(self.rows) < 2:
            raise BadData(f"a public map is an int16 array of axes and a centre, found shape {self.rows.shape}")

    @property
    def count(self) -> int:
        """How many axes."""
        return len(self.rows) - 1

    @property
    def dimension(self) -> int:
        """Numbers of a feature that it maps."""
        return int(self.rows.shape[1])

    def along(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """A (x - m), whole numbers and exact, shape (n, axes); features as for a call."""
        whole = np.rint(features.astype(np.float64) * FEATURE_ONE)
        along: NDArray[np.float64] = (whole - self.rows[-1].astype(np.float64)) @ self.rows[:-1].T.astype(np.float64)
        return along

    def __call__(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Rows of length one, or zero for a feature that is the centre; float64, shape (n, axes).

        Args:
            features: as stored, divided by 2048: shape (n, dimension).
        """
        along = self.along(features)
        lengths = np.sqrt(np.einsum("ij,ij->i", along, along))[:, None]
        # An integer row that is not zero is at least one long.
        mapped: NDArray[np.float64] = along / np.maximum(lengths, 1.0)
        return mapped


def axes_of(task: Setting, asked: NDArray[np.int16] | None) -> PublicAxes | None:
    """The public map of a task whose rows were asked about; None where it has none.

    Raises:
        BadData: it has one, and the rows are not there.
    """
    if task.training is None or task.training.axes is None:
        return None
    if asked is None or len(asked) != task.rows:
        raise BadData(f"the model looks along {task.training.axes} public axes, and the rows of them are missing")
    return PublicAxes(asked)
