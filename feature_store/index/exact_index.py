"""The index: records searched part by part by an engine, exact under deletions and memory limits.

Where everything fits there is one part, loaded when the index is built and kept. Under a memory limit below the shard's
size, or on a device with less room, parts are loaded from the features during a search, one at a time, and dropped
again. So a limit decides how often the shard is read, and never whether it can be answered from.

Removed records are gone at once: the kept parts load again without them when they are removed, so that a search does
not know of them.

**Sizes follow from public numbers**: the limit, the dimension, the count asked for, and a public number of rows. That
is the bound that the shard's site declared (`max_records`), else UNDECLARED_RECORDS. Under a limit
nothing is kept of a shard that declared nothing. Only how many parts there are follows from the number of records. No
limit refuses a number of records, which would tell that number: whether it suffices follows from the dimension alone,
and `rows_under_limit` says so before there is anything to answer.

**The limit** bounds the anonymous memory that building and searching an index add at any moment. It does not count the
arrays passed in, a mark for every record, and the Neighbors returned. Nor does it count the fixed workspace that a
matrix library keeps per thread (a few MiB, whatever the size of the shard). Pages of a memory-mapped shard are page
cache, which the system can take back at any time; they are given back all the same. On a CUDA device the same parts
bound what lies there; and what it has free bounds them, limit or not.

**Checked.** Every record is checked once to be found when the index is built: four random queries over each part, in
full. Recomputing the similarity of what an engine returned cannot see a record that it did not return. Such a record
may be lost on the way to a device, in a tile, or by a selection that is wrong for some shape. Two of the queries are
records of the part, whose similarity to themselves is the largest there is. Two are random vectors of nearly the
largest norm, so that 24 bits are needed. An engine that fails, is full or does not compute exactly is left for numpy,
at whatever time: an answer that is charged is given.

**Engines.** An engine loads records, and a block of them finds first keys. A block compares similarity and place in the
order of ids as one number (`definition`, "Keys"), so no engine ever chooses among tied records. The order in which an
engine meets the records does not change what it finds; it may change for how long it searches. So that order is no
requester's to choose: private records lie in the order of their random ids, and public questions in a secret one
(`in_this_order`).

**Operations.** Which operations a search runs follows from public numbers: the dimension, the number of queries, the
count asked for. The number of records decides how many tiles there are. One thing more depends on records: FAISS
settles a query in full if too many records tie at its last place (`engine_faiss`). The public clock's plan of a
search counts that for every query (`every_query_tied`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import (
    NO_KEY,
    NO_RECORD,
    NO_SIMILARITY,
    Neighbors,
    check_count,
    check_features,
    check_record_ids,
    pack,
    ranks_of,
    similarities_of,
)
from feature_store.rows import CHUNK_BYTES, GatheredRows, unmap_pages
from labeler.errors import InvalidSetting, UnsafeIndex
from labeler.records import UNDECLARED_RECORDS

NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)

_SCRATCH_BYTES: Final = 512 << 20
"""Working memory of one search when no limit is set."""

_REFUGE_BYTES: Final = 2 << 30
"""What a shard that its engine was left with may add to memory, where nobody set a limit."""

_USABLE: Final = 0.75
"""Share of the limit that is planned with; the rest is for the allocator's slack."""

_BYTES_PER_RECORD: Final = 48
"""Id and row of each record of a part, with what sorting them needs for a moment."""

_BYTES_PER_COORDINATE: Final = 6
"""float32 beside the int16, or float16, that it is made of."""

_BYTES_PER_FOUND: Final = 168
"""Of each query and neighbor: its key while keys are sorted, then what it is decoded to and merged with."""

_BYTES_PER_SCORE: Final = 24
"""Similarity and key of a query and a record of a tile, with what a library keeps of them for a moment."""

_MARKED_AT_ONCE: Final = 1 << 16
_RECOMPUTED_QUERIES: Final = 16
_CHECKED_FOUND: Final = 100
_CHECKED_NORM: Final = 4090.0

log = logging.getLogger(__name__)


def remove_records(
    alive: NDArray[np.bool_], record_ids: NDArray[np.int64], removed: NDArray[np.int64], *, missing_ok: bool
) -> int:
    """Mark records as removed, and return how many; see NeighborIndex.remove.

    Args:
        alive: bool (n,), marks of the records that were not removed; changed.
        record_ids: int64 (n,), unique; in memory or memory-mapped.
        removed: int64 (m,), ids of those to remove.
    """
    if not isinstance(removed, np.ndarray) or removed.dtype != np.int64 or removed.ndim != 1:
        raise InvalidSetting("the record ids to remove must be an int64 array of shape (m,)")
    # Not isin, which goes another way where few are removed. No record has the id behind the last one.
    wanted = np.append(np.unique(removed), -1)
    hits = np.empty_like(alive)
    for start in range(0, len(record_ids), _MARKED_AT_ONCE):
        part = slice(start, start + _MARKED_AT_ONCE)
        ids = np.asarray(record_ids[part])
        hits[part] = alive[part] & (wanted[np.searchsorted(wanted[:-1], ids)] == ids)
    gone = int(np.count_nonzero(hits))
    missing = len(wanted) - 1 - gone
    if missing and not missing_ok:
        raise InvalidSetting(
            f"{missing} of {len(wanted) - 1} record ids to remove are not in the index (never added, or removed "
            "before); nothing was removed. Pass missing_ok=True to remove the others."
        )
    alive &= ~hits
    return gone


def rows_under_limit(limit_bytes: int, dimension: int) -> int:
    """Return the most records of a part under a limit; see the module.

    A part takes at most half of what is planned with, and leaves room for a query that finds all of it. So a limit that
    has room for one record serves every number of records, and every count.

    Raises:
        InvalidSetting: the limit has no room for one record and one query.
    """
    usable, each = _usable_bytes(limit_bytes), _record_bytes(dimension)
    rows = min(usable // 2 // each, (usable - _query_bytes(_TILE_ROWS, dimension)) // (each + _BYTES_PER_FOUND))
    if rows < 1:
        raise InvalidSetting(
            f"memory_limit_bytes {limit_bytes} is too small for records of dimension {dimension}: not even one record "
            "and one query fit; raise it"
        )
    return rows


def _usable_bytes(limit_bytes: int) -> int:
    return int(_USABLE * limit_bytes) - CHUNK_BYTES


def _record_bytes(dimension: int) -> int:
    return _BYTES_PER_RECORD + _BYTES_PER_COORDINATE * dimension


def _query_bytes(rows: int, dimension: int) -> int:
    """Return the working memory of one query beside what it finds; every engine scores tile by tile."""
    return 4 * dimension + _BYTES_PER_SCORE * min(rows, _TILE_ROWS)


_Part = tuple["Block", NDArray[np.int64]]
"""Loaded records that were not removed; and int64 (m + 1,), their rows in the order of their ids, then NO_RECORD."""


class ExactIndex:
    """A NeighborIndex over features that stay where they are.

    Args:
        engine: what scores a part. All others: see `build_index`.

    Attributes:
        engine: what searches now: another one than at the beginning where that one failed.
        fault: why an engine was left for numpy; None where none was. For tests of engines: neighbors are equal.

    Raises:
        BadData: see check_features and check_record_ids.
        InvalidSetting: a limit out of bounds.
        UnsafeIndex: numpy's matrix product is not exact.
    """

    def __init__(
        self,
        features: NDArray[np.int16],
        record_ids: NDArray[np.int64],
        engine: Engine,
        *,
        memory_limit_bytes: int | None = None,
        max_records: int | None = None,
        removed: NDArray[np.int64] = NO_IDS,
        in_this_order: bool = False,
    ) -> None:
        check_features(features)
        check_record_ids(record_ids, len(features))
        if memory_limit_bytes is not None:
            check_count(memory_limit_bytes, "memory_limit_bytes")
        self._features = features
        self._ids = record_ids
        self._alive = np.ones(len(record_ids), dtype=np.bool_)
        remove_records(self._alive, record_ids, removed, missing_ok=False)
        self._limit = memory_limit_bytes
        self._max_records = max_records
        # Without a limit everything is kept that fits; what a device has no room for cannot be, declared or not.
        self._kept_rows = max_records if memory_limit_bytes else max(max_records or UNDECLARED_RECORDS, len(features))
        self._in_this_order = in_this_order
        self._step: int | None = None
        self._kept: list[_Part] | None = None
        self.engine = engine
        self.fault: str | None = None
        self._settle()

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    @property
    def is_kept(self) -> bool:
        """True if the records stay loaded between searches."""
        return self._kept is not None

    def __len__(self) -> int:
        return int(np.count_nonzero(self._alive))

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        try:
            return self._search(queries, k)
        except EngineFault as fault:
            self._leave_engine(fault)
            return self._search(queries, k)

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove. Everything loads again: a search must not know how many were removed."""
        removed = remove_records(self._alive, self._ids, record_ids, missing_ok=missing_ok)
        self._settle()
        return removed

    def _settle(self) -> None:
        """Load and check every record, and keep them where they fit."""
        self._unload()  # first: two copies might not fit
        try:
            under_limit = self._limit and rows_under_limit(self._limit, self.dimension)
            self._step = min(filter(None, (under_limit, self.engine.room_rows(self.dimension))), default=None)
            if self._step is None or (self._kept_rows is not None and self._kept_rows <= self._step):
                self._kept = [part] if (part := self._loaded(slice(None), is_checked=False)) else []
            else:
                deque(self._each_loaded(is_checked=False), maxlen=0)
        except EngineFault as fault:
            self._leave_engine(fault)

    def _leave_engine(self, fault: EngineFault) -> None:
        """Go on with numpy, for as long as this index lives."""
        told = {"engine": self.engine.name, "cause": str(fault)}
        log.error("an engine failed; neighbors are found by numpy from now on", extra=told)
        self.fault = str(fault)
        self._unload()
        # The plain engine: whatever else is installed, it is there, and has no switch.
        self.engine = NumpyEngine()
        self._limit = self._limit or _REFUGE_BYTES
        self._settle()

    def _unload(self) -> None:
        for block, _ in self._kept or []:
            self.engine.free(block)
        self._kept = None

    def _search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        best = Neighbors.none(len(queries), k)
        # No part has more, from public numbers; where there is none, of fewer records there are keys of none.
        count = min(filter(None, (k, self._max_records, self._step)))
        rows = min(filter(None, (self._max_records, self._step)), default=UNDECLARED_RECORDS)
        room = _SCRATCH_BYTES
        if self._limit is not None:
            room = _usable_bytes(self._limit) - rows * _record_bytes(self.dimension)
        at_once = max(1, room // (_query_bytes(rows, self.dimension) + _BYTES_PER_FOUND * k))
        add = best.put
        for part in self._each_loaded() if self._kept is None else self._kept:
            for start in range(0, len(queries), at_once):
                some = slice(start, start + at_once)
                add(some, self._decoded(part[0].first_keys(queries[some], count), part[1]))
            add = best.merge
            del part  # before the next one is loaded
        self._check_recomputed(queries, best)
        return best

    def _each_loaded(self, *, is_checked: bool = True) -> Iterator[_Part]:
        """Load part after part; one is gone before the next one is made."""
        step = self._step or 1
        for start in range(0, len(self._features), step):
            part = self._loaded(slice(start, start + step), is_checked=is_checked)
            if part is not None:
                try:
                    yield part
                finally:
                    self.engine.free(part[0])
                    del part

    def _loaded(self, where: slice, *, is_checked: bool) -> _Part | None:
        """Return the living records of some rows as a part; None where none lives."""
        rows = np.flatnonzero(self._alive[where]) + (where.start or 0)
        if not len(rows):
            return None
        by_id = np.argsort(self._ids[rows])
        places = np.arange(len(rows)) if self._in_this_order else by_id
        ranks = np.empty_like(places)
        ranks[by_id] = np.arange(len(rows))
        gathered = GatheredRows(self._features, rows[places], ranks[places])
        block = self.engine.load(gathered)
        if not is_checked:
            self._check_found(block, gathered)
        return block, np.append(rows[by_id], NO_RECORD)

    def _check_found(self, block: Block, rows: GatheredRows) -> None:
        """Compare the first keys of four random queries with those of the definition, over every record of a part.

        Similarities are taken in float64, whose products and sums of admitted rows are exact with 29 bits to spare,
        whatever a process allows float32.
        """
        rng = np.random.default_rng()
        own = [next(rows.part(number, number + 1).chunks())[1] for number in rng.integers(len(rows), size=2)]
        vectors = rng.standard_normal((2, self.dimension))
        vectors *= _CHECKED_NORM / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        queries = np.concatenate([*own, np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)])
        asked = queries.astype(np.float64)
        expected = np.empty((len(queries), 0), dtype=np.int64)
        for where, chunk in rows.chunks():
            keys = pack(asked @ chunk.astype(np.float64).T, rows.ranks[where])
            expected = np.concatenate([expected, keys], axis=1)
            expected.sort(axis=1)
            expected = expected[:, :_CHECKED_FOUND]
        if not np.array_equal(block.first_keys(queries, expected.shape[1]), expected):
            self.engine.free(block)
            raise self._inexact("neighbours of four random queries are not those of the definition")

    def _check_recomputed(self, queries: NDArray[np.int16], found: Neighbors) -> None:
        """Recompute a few similarities in integers.

        Catches what no check at the door can see: a library told elsewhere in the process to multiply with
        less precision. Its neighbors would be plausible, and the guarantee void.
        """
        some = np.linspace(0, len(queries) - 1, min(len(queries), _RECOMPUTED_QUERIES)).astype(np.int64)
        last = np.maximum((found.rows[some] != NO_RECORD).sum(axis=1) - 1, 0)
        for column in (0, last):
            rows = found.rows[some, column]
            present = rows != NO_RECORD
            exact = np.vecdot(queries[some[present]].astype(np.int64), self._features[rows[present]].astype(np.int64))
            unmap_pages(self._features)
            if not np.array_equal(exact, found.similarities[some, column][present]):
                raise self._inexact("similarities are not exact integers")

    def _inexact(self, what: str) -> EngineFault | UnsafeIndex:
        if not isinstance(self.engine, NumpyEngine):
            return EngineFault(what)
        return UnsafeIndex(
            "neighbours that engine numpy found are not exact: matrix products are being rounded, or records are "
            "missed, which voids the privacy proof. Look for a reduced precision set in this process (similarities are "
            "not exact integers), or for features changed since the index was built"
        )

    def _decoded(self, keys: NDArray[np.int64], rows_by_rank: NDArray[np.int64]) -> Neighbors:
        # NO_KEY's rank becomes the place behind all records.
        rows = rows_by_rank[np.minimum(ranks_of(keys), len(rows_by_rank) - 1)]
        is_there = keys != NO_KEY
        return Neighbors(
            record_ids=np.where(is_there, self._ids[rows], NO_RECORD),
            similarities=np.where(is_there, similarities_of(keys), NO_SIMILARITY).astype(np.int32),
            rows=rows,
        )


_TILE_ROWS: Final = 2048
TILE_QUERIES: Final = 256
"""A tile's similarities and keys stay in a core's cache."""


class EngineFault(Exception):
    """An engine failed, has too little memory, or is not exact.

    The index catches it and goes on with numpy. An answer that is charged is given, and whether a device had room may
    depend on the number of records.
    """


class Block(Protocol):
    """Some records, loaded. The rank of a record in its keys is its place in the order of their ids, from 0."""

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        """Return keys of the exact first records, int64 (nq, count), ascending; NO_KEY where there are fewer records.

        Args:
            queries: int16 (nq, d), nq at least 1.
            count: at least 1; may exceed the number of records.

        Raises:
            EngineFault: the engine failed; the records can be searched by numpy instead.
        """


class Engine:
    """A library behind the index; on the processor unless it says how much room its device has.

    Attributes:
        name: the name by which it is asked for.
    """

    name: str

    def room_rows(self, dimension: int) -> int | None:  # noqa: ARG002  # of a device
        """Return most records of one block there is room for now; None where the process's memory is all there is.

        Raises:
            EngineFault: the device does not answer.
        """
        return None

    def load(self, rows: GatheredRows) -> Block:
        """Return a block of at least one row, searched in the order of `rows`, which say their ranks.

        Raises:
            EngineFault: there was no room after all, or the engine failed.
        """
        raise NotImplementedError

    def free(self, block: Block) -> None:  # of a device
        """Give back what a block holds on a device. Called before the next one is loaded; never raises."""


_EVERY_QUERY_TIED: Final[ContextVar[bool]] = ContextVar("every query is settled as if it tied", default=False)


@contextlib.contextmanager
def every_query_tied() -> Iterator[None]:
    """Let engines settle every query in full, as if too many records tied: the most work that ties can cause.

    For probes that time a search over drawn rows, which never tie (`workers.agent.public_clock`). Neighbors are equal.
    """
    token = _EVERY_QUERY_TIED.set(True)
    try:
        yield
    finally:
        _EVERY_QUERY_TIED.reset(token)


def are_all_tied() -> bool:
    """Return True within `every_query_tied`."""
    return _EVERY_QUERY_TIED.get()


class NumpyBlock:
    """Records as a float32 matrix; see Block.

    Args:
        ranks: int64 (n,), of the rows.
    """

    def __init__(self, rows: NDArray[np.float32], ranks: NDArray[np.int64]) -> None:
        self._rows = rows
        self._ranks = ranks

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        floats = queries.astype(np.float32, order="C")
        found = np.full((len(floats), count), NO_KEY, dtype=np.int64)
        kept = np.empty((min(len(floats), TILE_QUERIES), count + min(_TILE_ROWS, len(self._rows))), dtype=np.int64)
        for first in range(0, len(floats), TILE_QUERIES):
            some = floats[first : first + TILE_QUERIES]
            best = kept[: len(some)]
            best[:, :count] = NO_KEY
            for start in range(0, len(self._rows), _TILE_ROWS):
                scores = self.scores(some, slice(start, start + _TILE_ROWS))
                width = count + scores.shape[1]
                best[:, count:width] = pack(scores, self._ranks[start : start + _TILE_ROWS])
                best[:, :width].partition(count - 1, axis=1)
            found[first : first + TILE_QUERIES] = best[:, :count]
        found.sort(axis=1)
        return found

    def scores(self, queries: NDArray[np.float32], tile: slice) -> NDArray[np.float32]:
        """Return similarities to a tile of the records, float32 (nq, rows of the tile)."""
        scores: NDArray[np.float32] = queries @ self._rows[tile].T
        return scores


class NumpyEngine(Engine):
    """The definition, tile by tile: a matrix product, keys, and a partition. It takes the same time whatever ties."""

    name = "numpy"

    def load(self, rows: GatheredRows) -> NumpyBlock:
        return NumpyBlock(rows.copy_to(np.empty((len(rows), rows.dimension), dtype=np.float32)), rows.ranks)
