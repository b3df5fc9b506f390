"""An agent's records as those who vote see them. Private; does not print.

Whatever way an agent answers, it answers with the same records: those that were not deleted and, where the task bounds
them, no more than m of one person. The proofs of `labeler.sensitivity` are about this cut, and about no other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.errors import PrivacyRefusal


@dataclass(frozen=True, eq=False)
class Records:
    """The records of a shard that were not deleted.

    Attributes:
        features: int16, shape (num_records, dimension), quantised.
        record_ids: int64, shape (num_records,), unique.
        labels: int16, shape (num_records,), classes.
        version: of the shard: another whenever a record came or went.
        records_per_person: m of the task that they were selected for; None where it does not bound them.
    """

    features: NDArray[np.int16] = field(repr=False)
    record_ids: NDArray[np.int64] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    version: str
    records_per_person: int | None = None

    @property
    def selection(self) -> tuple[str, int | None]:
        """What an index over these records was built from: equal for equal records."""
        return self.version, self.records_per_person

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return "Records(<private>)"


def select_records(shard: Shard, *, records_per_person: int | None) -> Records:
    """The records that an agent answers a task with.

    The cut of a person comes before any other: it hangs on that person's records alone, so that nobody else's vote
    depends on how many there are. A cap on all of an agent's records comes after it.

    Args:
        shard: the agent's.
        records_per_person: the task's.

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
    features, ids, labels = shard.features, shard.record_ids, shard.labels
    if not chosen.all():
        features, ids, labels = features[chosen], ids[chosen], labels[chosen]
    return Records(features, ids, labels, shard.version, records_per_person)


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
