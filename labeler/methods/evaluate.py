"""Private evaluation (ours): each record votes for the one cell into which a public model's answer to it falls.

A released model, a student or the model of a blind average, is scored where the labels are: at the sites. Each record
falls into one cell of (true class, predicted class, band of confidence), and an agent answers with the histogram of its
records. `labeler.evaluation` states what follows from the noised sum.

**The cell depends on that record alone, bit for bit.** A batch of rows in one matrix product may round each of them
differently when another row is missing, and near a band's edge move its cell. So the model scores one row at a
time, in code that saw no other record. A model of no numbers (NaN) is refused before the charge; were it not, each
record would fall into the first cell of its class: nothing about a record raises. Band edges, the model and the layout
of cells are public.

**Its time depends on no record.** A stranger may have made the model. So its numbers are bounded before the charge, and
its arithmetic computes no number that a processor handles slowly (`labeler.steady`).

**The question is the model itself.** A model's file is sent as rows that look like features (`Scored.rows`), so that a
round, its digest and its messages are those of every other method. Rows have no meaning for the histogram: its cells
fill the table of (questions, classes) from its beginning, and the rest stays zero.

**Layouts.** A count carries the same noise however many cells there are, and a sum over cells the noise of all of them.
So a layout may leave out unneeded details: "confusion" (predicted, band, true), "classes" (right or wrong, band,
true), "bands" (right or wrong, band).

References:
    The histogram and its noise are those of `labeler.methods.reverse_knn` with k = 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, PrivacyRefusal
from labeler.methods import reverse_knn
from labeler.methods.sensitivity import CountedVotes, Method
from labeler.records import check_labels
from labeler.setting import LEAST, StatedLevel

if TYPE_CHECKING:
    from labeler.records import Learner, Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task

Layout = Literal["confusion", "classes", "bands"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
"""From the finest to the coarsest."""

DEFAULT_EPSILON: Final = 0.1
"""The price of an evaluation that names none."""

MOST_BANDS: Final = 50
ROWS_AT_ONCE: Final = 256
"""Rows that are read from a shard in one step, few so that memory does not grow with them; each is scored alone."""

_LENGTH: Final = 2048
"""Length of a stored feature, so that rows which carry a model have valid lengths."""

_MAGIC: Final = b"labeler-scored/1\n"


def squared(task: Task, level: StatedLevel, queries: int) -> int | None:
    """Squared L2 sensitivity of the histogram: that of reverse-knn with k = 1 (`labeler.methods.reverse_knn.squared`).

    **Instance.** The cell of a record is a function of that record, of its label and of the public question alone.
    So a record that comes or goes changes one count by one vote: 1. With a cap, `max_agent_records` or
    `records_per_person`, one that leaves may let another in: two counts by one vote each, 2.

    **Person.** At most g = min(m, n) of the person's records leave, each with one vote, at worst in one cell: g^2,
    doubled by a cap n on all records.

    **Agent.** All n votes may lie in one cell: n^2; without a public n there is no bound.

    The bound is the same for every model, every layout and every number of cells. They decide where a vote falls, and
    never how many votes a record has. A model may have been fitted to the very records that it is scored on. What it
    knows of them was released and paid for, and this histogram is one more release about them, so the prices add up.
    """
    del queries
    return reverse_knn.squared(task, level, 1)  # type: ignore[return-value]  # whole without a ball


@dataclass(frozen=True, eq=False)
class Scored:
    """A model to score, and the cells that records fall into. All of it public.

    Attributes:
        model: the bytes of its file (feature_store.results.models).
        edges: confidences between bands, ascending, each above 0 and below 1; without edges there is one band.
        layout: see the module.

    Raises:
        BadData: edges are not ascending within (0, 1), or too many; or there is no such layout.
    """

    model: bytes = field(repr=False)
    edges: tuple[float, ...]
    layout: Layout = "confusion"

    def __post_init__(self) -> None:
        inside = all(isinstance(edge, float) and LEAST <= edge < 1 for edge in self.edges)
        if not inside or list(self.edges) != sorted(set(self.edges)) or len(self.edges) >= MOST_BANDS:
            raise BadData(
                f"edges of bands are different numbers between 0 and 1, ascending, at most {MOST_BANDS - 1}; "
                f"found {str(self.edges)[:100]}"
            )
        if self.layout not in LAYOUTS:
            raise BadData(f"layout is one of {', '.join(LAYOUTS)}; found {str(self.layout)[:40]!r}")

    @property
    def bands(self) -> int:
        """Return the number of bands of confidence."""
        return len(self.edges) + 1

    def shape(self, num_classes: int) -> tuple[int, ...]:
        """Return the shape: (predicted, band, true), (wrong or right, band, true) or (wrong or right, band)."""
        if self.layout == "confusion":
            return num_classes, self.bands, num_classes
        return (2, self.bands, num_classes) if self.layout == "classes" else (2, self.bands)

    def cells(
        self,
        truth: NDArray[np.integer],
        predicted: NDArray[np.integer],
        confidence: NDArray[np.float64],
        *,
        num_classes: int,
    ) -> NDArray[np.int64]:
        """Return the cell of each record, by its place in the flat histogram; record by record.

        Args:
            truth, predicted: shape (n,), classes.
            confidence: shape (n,); NaN lies in the first band.
        """
        band = (confidence[:, None] >= np.array(self.edges)[None, :]).sum(axis=1)
        first = predicted if self.layout == "confusion" else predicted == truth
        cell = first.astype(np.int64) * self.bands + band
        return np.asarray(cell if self.layout == "bands" else cell * num_classes + truth.astype(np.int64))

    def histogram(self, table: NDArray[np.generic], *, num_classes: int) -> NDArray[np.generic]:
        """Return the cells of a table of (questions, classes), in their shape.

        Raises:
            BadData: the table has fewer cells.
        """
        shape = self.shape(num_classes)
        if table.size < math.prod(shape):
            raise BadData(f"{table.size} counts do not hold a histogram of shape {shape}")
        return table.ravel()[: math.prod(shape)].reshape(shape)

    def rows(self, dimension: int, *, num_classes: int) -> NDArray[np.int16]:
        """Return the question: rows that carry the model and have the form of features; int16, shape (questions,
        dimension).

        Bytes become digits with few enough bits that a row of them is shorter than a feature; its last number fills up
        the length. There are at least as many rows as the histogram needs.

        Raises:
            BadData: features have fewer than 2 numbers.
        """
        bits = _digit_bits(dimension)
        header = {"edges": list(self.edges), "layout": self.layout, "bytes": len(self.model)}
        data = _MAGIC + json.dumps(header, separators=(",", ":")).encode() + b"\n" + self.model
        stream = np.unpackbits(np.frombuffer(data, np.uint8))
        each = bits * (dimension - 1)
        count = max(-(-len(stream) // each), -(-math.prod(self.shape(num_classes)) // num_classes))
        padded = np.zeros(count * each, np.uint8)
        padded[: len(stream)] = stream
        digits = padded.reshape(count, dimension - 1, bits) @ (1 << np.arange(bits)[::-1]) - (1 << (bits - 1))
        left = _LENGTH**2 - np.einsum("ij,ij->i", digits, digits)
        last = np.array([(math.isqrt(4 * int(one)) + 1) // 2 for one in left])  # rounded to the nearest
        return np.ascontiguousarray(np.column_stack([digits, last]).astype(np.int16))

    @classmethod
    def of_rows(cls, rows: NDArray[np.int16]) -> Scored:
        """Read what `rows` wrote.

        Raises:
            BadData: they carry no model.
        """
        wrong = BadData("the questions of an evaluation carry a released model, and these do not; submit the model")
        bits = _digit_bits(rows.shape[1])
        digits = rows[:, :-1].astype(np.int64) + (1 << (bits - 1))
        if digits.min() < 0 or digits.max() >= 1 << bits:
            raise wrong
        data = np.packbits((digits[:, :, None] >> np.arange(bits)[::-1] & 1).astype(np.uint8)).tobytes()
        magic, _, rest = data.partition(b"\n")
        try:
            if magic + b"\n" != _MAGIC:
                raise wrong
            written, _, model = rest.partition(b"\n")
            header = json.loads(written)
            size, edges, layout = header["bytes"], header["edges"], header["layout"]
            if type(size) is not int or not 0 < size <= len(model):
                raise wrong
            return cls(model[:size], tuple(map(float, edges)), layout)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise wrong from None


def _digit_bits(dimension: int) -> int:
    """Return the most bits of a digit such that all digits of a row are no longer than a feature."""
    if dimension < 2:
        raise BadData(f"a model is scored on features of at least 2 numbers, found {dimension}")
    return math.isqrt(_LENGTH**2 // (dimension - 1)).bit_length()


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return the histogram of an agent's records, in the table of (questions, classes).

    Raises:
        BadData, PrivacyRefusal: see `check_questions`, which raised them before the charge.
    """
    asked = _question(task, batch, context.learner)
    if task.max_agent_records is not None:
        records = records.first(task.max_agent_records)
    counts = np.zeros(len(batch) * task.num_classes, dtype=np.int64)
    for features, labels in records.blocks(ROWS_AT_ONCE):
        check_labels(labels, task.num_classes, least=0)
        predicted, confidence = context.learner.opinions(asked.model, features)
        cells = asked.cells(labels, predicted, confidence, num_classes=task.num_classes)
        counts += np.bincount(cells, minlength=counts.size)
    return counts.reshape(len(batch), task.num_classes)


def check_questions(task: Task, batch: QueryBatch, learner: Learner) -> None:
    """Refuse a question that carries no model for this task, by public facts alone.

    Raises:
        BadData: it carries no model, or one of other classes, another backbone or another dimension.
        PrivacyRefusal: the histogram does not fit.
    """
    _question(task, batch, learner)


def _question(task: Task, batch: QueryBatch, learner: Learner) -> Scored:
    asked = Scored.of_rows(batch.features)
    if math.prod(asked.shape(task.num_classes)) > len(batch) * task.num_classes:
        raise PrivacyRefusal("an evaluation has more cells than its task has counts; make the task for its question")
    learner.check_model(
        asked.model,
        classes=task.classes,
        fingerprint=task.backbone_fingerprint,
        dimension=batch.features.shape[1],
    )
    return asked


def even_edges(num_classes: int, bands: int) -> tuple[float, ...]:
    """Return edges of bands of equal width between 1/C, the least confidence of a predicted class, and 1."""
    least = 1 / num_classes
    return tuple(least + (1 - least) * number / bands for number in range(1, bands))


def edges_of(confidences: Sequence[float] | NDArray[np.floating], num_classes: int, bands: int) -> tuple[float, ...]:
    """Return edges between bands of equally many public images, by the model's confidence; even ones without images."""
    stated = np.asarray(confidences, dtype=np.float64)
    stated = stated[np.isfinite(stated)]
    if bands < 2 or not len(stated):
        return even_edges(num_classes, bands)
    found = np.quantile(stated, np.arange(1, bands) / bands)
    return tuple(sorted({float(round(edge, 6)) for edge in found if 0 < round(edge, 6) < 1}))


METHOD: Final = Method(
    "private evaluation",
    "how many of its records fall into each cell of true class, predicted class and stated confidence",
    sums="records",
    ballots=ballots,
    stated=CountedVotes(squared, reverse_knn.largest, reverse_knn.per_cell),
    takes=frozenset({"max_agent_records"}),
    single_round=True,
    labels=None,
    check_questions=check_questions,
)
