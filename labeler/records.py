"""An agent's records, their rows for a learner, a public map before a model, and a cache of models in memory.

**Records** as the methods see them. Private; they do not print. Every method answers with the same records: those that
were not deleted and, if the task bounds them, no more than m of one person. The proofs of `labeler.methods` are about
this cut, and about no other. Records are read in blocks, so that any number of them can answer.

**Rows** are a learner's view of records: blocks, read as often as wanted, with labels. A block is read, adds to what is
learned, and is forgotten; the first KEPT_NUMBERS are kept between steps. So memory does not grow with the number of
records, and the treatment of a block follows from its place alone.

**Axes.** A public map before a linear model: features less a public center, along public axes, scaled to one length.

    x -> z = A (x - m) -> z / |z|            rows of A and m are sent as the questions of a blind-average task.

Features of a network are positive and share a large mean, along which noise on a model's weights moves all images
together. Most of their directions say nothing about classes, but carry noise like all others. The requester chooses the
axes from public images (`feature_store.query_selection.axis_rows`). They are sent as the rows that are asked about, so
that every party's digest of the round covers them. The model's weights are one row per axis and one for the constant.

**Privacy.** The map is public and fixed before any record is looked at, and it maps each record separately. Whatever it
is, a mapped record has length one, or zero. So the bounds of `labeler.methods.blind_average` are those of rows of such
a norm.

**No rounding depends on other records.** A, m and stored features are whole numbers. For d <= 2^20 numbers every sum of
products in A (x - m) is below (2^11 + 2^15 sqrt(d)) 2^15 sqrt(d) < 2^53: exact in double precision in any order. A
square root of a sum of squares and a division remain, off by (rows + 3) 2^-53 at most. That is below the 2^-34 that
`labeler.descent` has room for, for every number of weights that it allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.descent import BLOCK_ROWS, LEAST_BLOCK_ROWS
from labeler.errors import BadData, InvalidSetting
from labeler.randomness import ByteSource, os_source

if TYPE_CHECKING:
    from labeler.methods.aux_distill import LocalHeadTerms
    from labeler.methods.blind_average import LinearTerms, MeanTerms
    from labeler.methods.ensemble import VoterTerms
    from labeler.methods.federated import StepTerms
    from labeler.setting import Training
    from labeler.task import Task

_MANY_NEIGHBORS = 2**12
"""Number of neighbors asked for even of fewer records, if no bound on their number is declared."""

Selection = tuple[str, int | None]
"""Version of a shard, and m of the task if it bounds the records of a person."""

UNDECLARED_RECORDS: Final = 1 << 16
"""Replaces the number of records if no bound on it is declared: sizes and devices are chosen for this number."""

FEATURE_ONE: Final = 2048.0
"""Stored value of a feature of 1."""


@dataclass(frozen=True, eq=False)
class Records:
    """The arrays of a shard, and which of its rows take part.

    Attributes:
        all_features: int16, shape (n, dimension), quantized; may be memory-mapped.
        all_record_ids: int64, shape (n,), unique, random.
        all_labels: int16, shape (n,), classes; or (n, C), which attributes each has.
        version: of the shard; changes whenever a record comes or goes.
        records_per_person: m of the task that they were selected for; None if it does not bound them.
        rows: int64, ascending: the rows that take part; all of them by default. It is used even if it holds all
            rows, so that the first deletion does not change how records are read.
        max_records: the shard's public bound on n; None if nothing was declared.
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
        """Return features of the records that take part, all in memory; `blocks` needs less."""
        return self.all_features[self.rows]

    @property
    def record_ids(self) -> NDArray[np.int64]:
        """Return ids of the records that take part."""
        return self.all_record_ids[self.rows]

    @property
    def labels(self) -> NDArray[np.int16]:
        """Return labels of the records that take part."""
        return self.all_labels[self.rows]

    @property
    def selection(self) -> Selection:
        """Return the key of an index over these records: equal for equal records."""
        return self.version, self.records_per_person

    def __len__(self) -> int:
        return len(self.rows)

    def neighbors(self, k: int) -> int:
        """Return how many neighbors to ask for if a task says k; follows from public numbers.

        With fewer than k records, missing neighbors are NO_RECORD. The number of records matters only if no bound was
        declared and k is extremely large.
        """
        return min(k, self.max_records or max(_MANY_NEIGHBORS, len(self)))

    def first(self, most: int) -> Records:
        """Return the records of smallest id, at most `most`.

        Ids are random and permanent, so the cut does not depend on what a record holds. If the cut binds, a record that
        leaves lets the next one in: one more or one less becomes a replacement, and the caller has to charge for that.
        """
        kept = self.rows[np.argsort(self.record_ids)[:most]]
        return replace(self, rows=np.sort(kept))

    def blocks(self, at_once: int, skip: int = 0) -> Iterator[tuple[NDArray[np.int16], NDArray[np.int16]]]:
        """Yield features and labels of the records that take part, in the order of rows, at most `at_once` at a time.

        Args:
            skip: number of blocks to leave out at the beginning.
        """
        for start in range(skip * max(1, at_once), len(self), max(1, at_once)):
            part = self.rows[start : start + max(1, at_once)]
            yield self.all_features[part], self.all_labels[part]

    def trainable(self, most: int | None) -> Rows:
        """Return the first `most`, or all, as a learner reads them: features of norm about 1, in blocks."""
        chosen = self if most is None else self.first(most)
        return Rows(len(chosen), chosen.all_features.shape[1], chosen._read)

    def _read(self, at_once: int, skip: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int16]]]:
        return ((features.astype(np.float32) / FEATURE_ONE, labels) for features, labels in self.blocks(at_once, skip))

    def absent_ids(self) -> NDArray[np.int64]:
        """Return ids of the rows that do not take part."""
        absent = np.ones(len(self.all_record_ids), dtype=np.bool_)
        absent[self.rows] = False
        return np.asarray(self.all_record_ids[absent])

    def __repr__(self) -> str:
        return "Records(<private>)"


def first_of_each_person(persons: NDArray[np.int64], record_ids: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Return which records are among the first of their person, by record id, so a random and permanent choice.

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
"""Most numbers of one block (32 MiB), but at least LEAST_BLOCK_ROWS rows."""

KEPT_NUMBERS = 2**25
"""Prepared rows that are kept between steps, 256 MiB; further ones are prepared again at every step."""

Block = tuple[Array, Any]
"""Rows as the learner sees them, shape (..., r, d), and their labels, as its slopes need them."""

Blocks = Callable[[], Iterable[Block]]
"""Reads all rows once, block by block; the same at every call."""


class NearestRecords(Protocol):
    """The k nearest of each query, nearest first; -1 if there are fewer. Shapes (num_queries, k)."""

    @property
    def rows(self) -> NDArray[np.int64]: ...

    @property
    def record_ids(self) -> NDArray[np.int64]: ...

    @property
    def similarities(self) -> NDArray[np.int32]: ...


class Index(Protocol):
    """An exact index of features (`feature_store.index`)."""

    def search(self, queries: NDArray[np.int16], k: int) -> NearestRecords: ...


class Indexes(Protocol):
    """Builds exact indexes over an agent's records and over public questions."""

    def of_records(self, records: Records) -> Index:
        """Return an index over records; it finds none of those that do not take part."""

    def of_questions(self, questions: NDArray[np.int16], *, order: ByteSource) -> Index:
        """Return an index over questions, by their number, that meets them in the order of a source."""


class Slopes(Protocol):
    """A loss, as the steps see it."""

    def __call__(self, scores: Array, truth: Any, /) -> Array:
        """Return the loss's derivative by each score, shape (..., r, columns)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Records' features and labels, read as often as wanted. Private if the records are; does not print.

    Attributes:
        count: number of records.
        dimension: numbers of a feature.
        read: yields all of them in one order, given the block size and the number of blocks to skip: features
            (r, dimension), any scale, and labels (r,).
    """

    count: int
    dimension: int
    read: Callable[[int, int], Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]]

    @classmethod
    def of(cls, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Rows:
        """Return rows of arrays in memory."""

        def read(most: int, skip: int) -> Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]:
            for start in range(skip * most, len(labels), most):
                yield features[start : start + most], labels[start : start + most]

        return cls(len(labels), features.shape[1], read)

    def __repr__(self) -> str:
        return "Rows(<private>)"


def block_rows(numbers: int) -> int:
    """Return how many rows of `numbers` numbers are read at once."""
    return max(LEAST_BLOCK_ROWS, min(BLOCK_ROWS, BLOCK_NUMBERS // max(1, numbers)))


def kept(read: Callable[[int], Iterator[Block]]) -> Blocks:
    """Return the blocks that `read` prepares, the first KEPT_NUMBERS of them prepared only once.

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
    """A cache of integers by (version of the records, name), for one agent: as long as this object.

    No result depends on it: an answer is stored before it leaves and never computed a second time after that.
    So models, which hold private records and no noise, live in memory only, and end with the round.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[Made, Task | None]] = {}

    def once(self, version: str, name: str, make: Callable[[], Made], *, task: Task | None = None) -> Made:
        """Return what is kept under the name; make and keep it if there is nothing yet.

        Results for another version of the records are forgotten: a deleted record must not live on in a model.

        Args:
            task: the task it is made for, if further rounds of the task need it again.
        """
        if (version, name) not in self._kept:
            self._kept = {key: made for key, made in self._kept.items() if key[0] == version}
            self._kept[version, name] = make(), task
        return self._kept[version, name][0]

    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks whose further rounds need something that is kept."""
        return tuple(task for _, task in list(self._kept.values()) if task is not None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __repr__(self) -> str:
        return "ModelStore(<private>)"


@dataclass(frozen=True, eq=False)
class PublicAxes:
    """The public map; see the module.

    Attributes:
        rows: int16, shape (axes + 1, dimension): the axes, then the center; in the unit of stored features.

    Raises:
        BadData: there is no axis.
    """

    rows: NDArray[np.int16]

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int16 or self.rows.ndim != 2 or len(self.rows) < 2:
            raise BadData(f"a public map is an int16 array of axes and a centre, found shape {self.rows.shape}")

    @property
    def count(self) -> int:
        """Return the number of axes."""
        return len(self.rows) - 1

    @property
    def dimension(self) -> int:
        """Return the number of values of a feature that it maps."""
        return int(self.rows.shape[1])

    def along(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return A (x - m), whole numbers and exact, shape (n, axes); features as for a call."""
        whole = np.rint(features.astype(np.float64) * FEATURE_ONE)
        along: NDArray[np.float64] = (whole - self.rows[-1].astype(np.float64)) @ self.rows[:-1].T.astype(np.float64)
        return along

    def __call__(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return rows of length one, or zero for a feature that equals the center; float64, shape (n, axes).

        Args:
            features: as stored, divided by 2048: shape (n, dimension).
        """
        along = self.along(features)
        lengths = np.sqrt(np.einsum("ij,ij->i", along, along))[:, None]
        # An integer row that is not zero is at least one long.
        mapped: NDArray[np.float64] = along / np.maximum(lengths, 1.0)
        return mapped


def axes_of(task: Task, asked: NDArray[np.int16] | None) -> PublicAxes | None:
    """Return the public map of a task whose rows were asked about; None if it has none.

    Raises:
        BadData: it has one, and the rows are missing.
    """
    if task.training is None or task.training.axes is None:
        return None
    if asked is None or len(asked) != task.rows:
        raise BadData(f"the model looks along {task.training.axes} public axes, and the rows of them are missing")
    return PublicAxes(asked)


class Learner(Protocol):
    """Fits models to an agent's records; computes what `labeler.methods` proves (`workers.learning`)."""

    def voter(self, records: Rows, questions: NDArray[np.int16] | None, *, terms: VoterTerms) -> NDArray[np.int64]:
        """Fit the classifier of these terms as integers; only to a learner that reads questions are they given."""

    def predictions(
        self, voter: NDArray[np.int64], questions: NDArray[np.int16], *, terms: VoterTerms
    ) -> NDArray[np.int64]:
        """Return the class of each question, shape (num_queries,); of attributes 1 or 0, (num_queries, num_classes)."""

    def weights(self, records: Rows, *, terms: LinearTerms, axes: PublicAxes | None) -> NDArray[np.float64]:
        """Fit the linear model of these terms, shape (rows of the model, num_classes)."""

    def class_sums(self, records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.float64]:
        """Sum records by class, shape (axes + 1, num_classes)."""

    def soft_votes(
        self, records: Rows, questions: NDArray[np.int16], *, terms: LocalHeadTerms, source: ByteSource
    ) -> NDArray[np.float64]:
        """Fit two heads, add their noise, and return soft votes, shape (num_queries, num_classes)."""

    def check_negatives(self, questions: NDArray[np.int16], terms: LocalHeadTerms) -> None:
        """Refuse questions from which no public map can be made, by public numbers alone."""

    def step(
        self,
        records: Rows,
        model: NDArray[np.float64],
        *,
        terms: StepTerms,
        axes: PublicAxes | None,
        training: Training,
        source: ByteSource,
    ) -> NDArray[np.float64]:
        """Return what an agent adds to one step of training, shape (rows, num_classes)."""

    def check_model(self, model: bytes, *, classes: Sequence[str], fingerprint: str, dimension: int) -> None:
        """Refuse a file that is not a model of these classes and this backbone, by public facts alone."""

    def opinions(self, model: bytes, features: NDArray[np.int16]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the class a model gives to each feature, and its confidence: row by row, and never raise."""


@dataclass(frozen=True)
class RunnerContext:
    """An agent's index, learner and source of chance, with which a method finds its ballots.

    Attributes:
        indexes: finds neighbors among records and questions.
        models: cache of models while a round is open.
        local_noise: returns the agent's secret source of chance for this batch, at its beginning: for noise, or
            for who takes part in a step.
        learner: fits models.
        order: returns the secret source of the order in which public questions are searched, for this batch. A
            requester chooses the questions, and could else choose an order in which one record takes long to search.
    """

    indexes: Indexes = field(repr=False)
    models: ModelStore = field(repr=False)
    local_noise: Callable[[], ByteSource] = field(repr=False)
    learner: Learner = field(repr=False)
    order: Callable[[], ByteSource] = field(default=os_source, repr=False)


def check_labels(labels: NDArray[np.integer], num_classes: int, *, least: int) -> None:
    """Refuse labels that are not classes of the task."""
    if labels.size and (labels.min() < least or labels.max() >= num_classes):
        raise InvalidSetting(
            f"a record carries a label outside the {num_classes} classes of the task; "
            "shards and task must list the same classes in the same order"
        )
