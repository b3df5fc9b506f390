"""An agent's records as those who vote see them. Private; does not print.

Whatever way an agent answers, it answers with the same records: those that were not deleted and, where the task bounds
them, no more than m of one person. The proofs of `labeler.methods` are about this cut, and about no other. Records
are read in blocks, so that no number of them is too many to answer from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from feature_store.index.exact_index import UNDECLARED_RECORDS
from feature_store.shard import Shard
from labeler.descent import MOST_RECORDS
from labeler.errors import MixedShards, PrivacyRefusal
from labeler.methods.sensitivity import kept_bound
from labeler.task import Task
from workers.learning.blocks import Rows

_MANY_NEIGHBORS = 2**12
"""As many are asked for also of fewer records, where nobody declared how many there may be."""

Selection = tuple[str, int | None]
"""Version of a shard, and m of the task where it bounds the records of a person."""

FEATURE_ONE = np.float32(2048)
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


def select_records(shard: Shard, *, records_per_person: int | None) -> Records:
    """The records that an agent answers a task with.

    The cut of a person comes before any other: it hangs on that person's records alone, so that nobody else's vote
    depends on how many there are. A cap on all of an agent's records comes after it.

    Raises:
        PrivacyRefusal: the task bounds records of one person, and the shard does not know whose they are.
    """
    chosen = shard.alive
    if records_per_person is not None:
        if shard.persons is None:
            raise PrivacyRefusal(NO_PERSONS)
        kept = first_of_each_person(shard.persons[chosen], shard.record_ids[chosen], records_per_person)
        chosen = chosen.copy()
        chosen[np.flatnonzero(chosen)] = kept
    rows = np.flatnonzero(chosen)
    return Records(
        shard.features, shard.record_ids, shard.labels, shard.version, records_per_person, rows, shard.max_records
    )


def most_trained(task: Task) -> int:
    """How many records an agent trains with at most.

    Where the task counts on a bound that sites keep, that bound; no shard that an agent answers such a task from
    holds more (`check_bound`), so that it never binds.
    """
    return kept_bound(task) or MOST_RECORDS


def check_labels_fit(task: Task, shard: Shard) -> None:
    """Refuse a task about attributes at a shard of classes, and the other way round: facts of how both were set up.

    Raises:
        MixedShards: the message says which is which.
    """
    asked = task.attributes_per_record is not None
    if asked != shard.has_attributes:
        raise MixedShards(
            "the task asks about attributes, of which a record may have any number (attributes_per_record), and the "
            "shard holds one class per record"
            if asked
            else "the shard holds attributes, any number per record, and the task asks for one class; give the task "
            "attributes_per_record"
        )


def check_bound(task: Task, shard: Shard) -> None:
    """Refuse a task that counts on a bound on records which this shard was not declared to keep.

    From what was declared alone, whatever the shard holds: said before anything is charged.

    Raises:
        PrivacyRefusal: nothing was declared, or more than the task allows.
    """
    most = None if task.training is None else kept_bound(task)
    if most is None or (shard.max_records is not None and shard.max_records <= most):
        return
    kept = "nothing was declared of this shard" if shard.max_records is None else f"this one keeps {shard.max_records}"
    raise PrivacyRefusal(
        f"the task counts on shards that keep a public bound of at most {most} records (training.max_records), and "
        f"{kept}; embed it again with --max-records, or ask for a task without that bound"
    )


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


NO_PERSONS = (
    "the task bounds how many records of one person vote (records_per_person), and this shard was not told whose "
    "records it holds; embed it again with --person-level, --persons or --person-column"
)
"""Why a shard without a person column cannot answer: a fact of how it was set up, the same whatever it holds."""
