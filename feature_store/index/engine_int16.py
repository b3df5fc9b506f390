"""Exact search on the shard itself: int16 as it is stored, no float32 copy, keys as they are found.

Records are not loaded at all. A search packs two MiB of them at a time for each thread, from the mapped shard or
memory, and multiplies them with all queries by `pair_kernel`. Of each query it keeps the keys that can still be among
the first: those before the worst key kept. Similarities are compared first, many at once, and keys only where a
similarity reaches that of the worst one.

**What is kept is cleared out on a public schedule**: after the first k + e records, with e = 24 sqrt(k) + 256. Then it
is cleared whenever as many again have been looked at as before. Between two of these a query gets about k keys more.
The exact number depends on the order of the records, and on nothing they hold. That order is random: private records
lie in the order of their ids, and public questions in a secret order (`workers.voting.NeighborIndexes.of_questions`).
Of the records in question each that is before the k-th is as likely to be among the new half as among the old. So k + e
of 2 k + e are new with a chance of at most exp(-e^2 / (4 k + 2 e)) < 2^-200 (Hoeffding). Only then queries are cleared
in between, so that every order is answered rightly.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NO_KEY, RANK_BITS, nearest_by_definition
from feature_store.index.exact_index import Engine
from feature_store.rows import GatheredRows, unmap_pages
from labeler.errors import InvalidSetting

if TYPE_CHECKING:
    from feature_store.index.pair_kernel import PairKernel

_PACKED_BYTES: Final = 2 << 20
"""Records packed at a time, for each thread: threads wait for each other after every piece."""

_CACHED_BYTES: Final = 1 << 18
"""Records that one thread takes through all its queries while they are in its cache."""

_MOST_CACHED_ROWS: Final = 512
_SPARE_KEYS: Final = 256
_SPARE_DEVIATIONS: Final = 24
_PARTS: Final = 4
"""Of the queries for each thread, so that a thread whose processor is busy elsewhere holds up the others less."""

_QUERIES_OF_A_PART: Final = 32
"""At least, where every thread has a part: handing one to a thread takes as long as some queries of it."""

_SMALL_WORK: Final = 1 << 26
"""Multiplications for which one more thread is worth starting."""

_OTHER_SIDE: Final = 1 << 12
"""Stands for the number of queries where threads are counted."""

_LOWEST: Final = np.iinfo(np.int32).min
_HIGHEST: Final = np.iinfo(np.int32).max

log = logging.getLogger(__name__)


class Int16Block:
    """Records where they lie; see Block."""

    def __init__(self, kernel: PairKernel, rows: GatheredRows, most_rows: int) -> None:
        self._kernel, self._rows, self._most_rows = kernel, rows, most_rows

    def __len__(self) -> int:
        return len(self._rows)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        kernel, pairs = self._kernel, (self._rows.dimension + 1) // 2
        panel_bytes = 4 * pairs * kernel.rows_per_panel
        most = min(_CACHED_BYTES // panel_bytes, _MOST_CACHED_ROWS // kernel.rows_per_panel)
        most_panels = -(-self._most_rows // kernel.rows_per_panel)
        at_once = max(1, min(most, most_panels))
        # A block under a memory limit may have fewer records than that, and then no more can be found.
        spare = min(count + _SPARE_DEVIATIONS * math.isqrt(count) + _SPARE_KEYS, most_panels * kernel.rows_per_panel)
        # Not of how many queries there are: where records look for queries, that is how many records there are.
        threads = max(1, min(num_threads(), self._most_rows * _OTHER_SIDE * 2 * pairs // _SMALL_WORK))
        packed_rows = kernel.rows_per_panel * max(at_once, threads * _PACKED_BYTES // panel_bytes)
        parts = 1 if threads == 1 else max(threads, min(_PARTS * threads, len(queries) // _QUERIES_OF_A_PART))
        # At most `parts` parts, of whole groups.
        step = kernel.queries_per_group * -(-len(queries) // (kernel.queries_per_group * parts))
        with _threads(threads) as each:
            lanes = each(
                lambda first: _Lane(kernel, queries[first : first + step], count, at_once, spare),
                range(0, len(queries), step),
            )
            for start in range(0, len(self), packed_rows):
                stop = min(len(self), start + packed_rows)
                part = self._rows.part(start, stop)
                packed = _pack(kernel, part.features, part.rows, kernel.rows_per_panel, each, threads)
                each(partial(_Lane.take, packed=packed, ranks=part.ranks), lanes)
            unmap_pages(self._rows.features)
            return np.concatenate(each(_Lane.first, lanes))


class _Lane:
    """Some queries, and what is kept for each of them: one thread's work."""

    def __init__(self, kernel: PairKernel, queries: NDArray[np.int16], count: int, at_once: int, spare: int) -> None:
        self._kernel, self._count, self._at_once = kernel, count, at_once
        self._capacity = count + spare + at_once * kernel.rows_per_panel
        self._seen, self._clears_at = 0, spare // kernel.rows_per_panel
        self._num_queries, dimension = queries.shape
        self._pairs = (dimension + 1) // 2
        self._packed = _pack(kernel, queries, np.arange(len(queries)), kernel.queries_per_group)
        padded = len(self._packed) // self._pairs
        self._groups = padded // kernel.queries_per_group
        self._keys = np.full((padded, self._capacity), NO_KEY, dtype=np.int64)
        # What is kept lies in front, the worst of it last; what comes is put behind.
        self._counts = np.full(padded, count, dtype=np.int64)
        self._thresholds = np.full(padded, _LOWEST, dtype=np.int32)
        self._is_padding = np.arange(padded) >= self._num_queries
        self._thresholds[self._is_padding] = _HIGHEST  # what fills up the last group finds nothing

    def take(self, packed: NDArray[np.int32], ranks: NDArray[np.int64]) -> None:
        """Go on with the next records, and clear out where the schedule says so; see the module."""
        width = self._kernel.rows_per_panel
        panels, done = len(packed) // self._pairs // width, 0
        while done < panels:
            some = min(panels - done, self._clears_at - self._seen)
            rows = slice(done * width, (done + some) * width)
            self._score(packed[rows.start * self._pairs : rows.stop * self._pairs], ranks[rows], some)
            done, self._seen = done + some, self._seen + some
            if self._seen == self._clears_at:
                self._clear_out(slice(None))
                self._clears_at *= 2

    def _score(self, packed: NDArray[np.int32], ranks: NDArray[np.int64], panels: int) -> None:
        last, step = -(-panels // self._at_once) * self._groups, 0
        while True:
            step = self._kernel.score(
                packed.ctypes.data, panels, self._at_once, self._packed.ctypes.data, self._groups, self._pairs,
                len(ranks), ranks.ctypes.data, self._thresholds.ctypes.data, self._counts.ctypes.data,
                self._keys.ctypes.data, self._capacity, step, self._count,
            )  # fmt: skip
            if step == last:
                return
            # Never but by a miracle; see the module.
            self._clear_out(np.flatnonzero(self._counts > self._count))

    def _clear_out(self, some: slice | NDArray[np.int64]) -> None:
        """Keep the first keys of some queries; what comes later must be before the last of them."""
        kept = self._keys[some]
        kept.partition(self._count - 1, axis=1)
        kept[:, self._count :] = NO_KEY
        self._keys[some] = kept
        self._counts[some] = self._count
        # Of queries that fill up the last group there is nothing to find, and nothing was found.
        below = (1 << 24) - 1 - (kept[:, self._count - 1] >> RANK_BITS)
        lowest = np.where(self._is_padding[some], _HIGHEST, _LOWEST)
        self._thresholds[some] = np.where(kept[:, self._count - 1] == NO_KEY, lowest, below)

    def first(self) -> NDArray[np.int64]:
        """Keys of the first records, int64 (nq, count), ascending."""
        keys = self._keys[: self._num_queries]
        keys.partition(self._count - 1, axis=1)
        first = np.ascontiguousarray(keys[:, : self._count])
        first.sort(axis=1)
        return first


class Int16Engine(Engine):
    """See the module.

    Raises:
        InvalidSetting: this machine cannot: llvmlite is missing, the processor lacks the instructions, or the kernel
            did not find what the definition finds.
    """

    def __init__(self) -> None:
        kernel = probed_kernel()
        if isinstance(kernel, str):
            raise InvalidSetting(f"engine int16 cannot be used here: {kernel}; use engine numpy or auto")
        self._kernel = kernel

    def bytes_per_query(self, block_rows: int) -> int:
        # Some times what it is asked for is counted with what is found; then _SPARE_KEYS, and what one step may add.
        rows = -(-block_rows // self._kernel.rows_per_panel) * self._kernel.rows_per_panel
        return 8 * (min(rows, _SPARE_KEYS) + min(rows, _MOST_CACHED_ROWS))

    def load(self, rows: GatheredRows, most_rows: int) -> Int16Block:
        return Int16Block(self._kernel, rows, most_rows)


@cache
def probed_kernel() -> PairKernel | str:
    """The kernel if it finds what the definition finds on rows that would show an error, else why not."""
    try:
        from feature_store.index.pair_kernel import compile_kernel

        kernel = compile_kernel()
    except ImportError:
        return "llvmlite is not installed"
    except OSError as error:
        return str(error)
    for dimension in (1, 7, 192):
        rng = np.random.default_rng(dimension)
        vectors = rng.standard_normal((200, dimension))
        vectors *= 4090 / np.linalg.norm(vectors, axis=1, keepdims=True)
        records = np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)
        records[150:] = records[:50]
        queries, ids = records[rng.permutation(200)[:21]], np.arange(200)
        block = Int16Block(kernel, GatheredRows(records, ids, 1 << 18), len(ids))
        for k in (1, 60, 200):
            expected = nearest_by_definition(records, ids, queries, k)
            keys = ((1 << 24) - expected.similarities.astype(np.int64) << RANK_BITS) | expected.record_ids
            if not np.array_equal(block.first_keys(queries, k), keys):
                log.error("the int16 kernel does not find what the definition finds; it is not used")
                return f"{kernel.instructions} did not find what the definition finds: report this"
    return kernel


def num_threads() -> int:
    """Threads of a search: what OMP_NUM_THREADS says, as for the other engines, else the processors there are."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pack(
    kernel: PairKernel,
    features: NDArray[np.int16],
    rows: NDArray[np.int64],
    width: int,
    each: Callable[..., object] | None = None,
    parts: int = 1,
) -> NDArray[np.int32]:
    """Rows in panels of `width`, the last one filled up with the last row; int32, as long as all panels."""
    dimension = features.shape[1]
    if features.strides[1] != 2 or features.strides[0] % 2:
        features, rows = np.ascontiguousarray(features[rows]), np.arange(len(rows))
    panels, pairs = -(-len(rows) // width), (dimension + 1) // 2
    rows = np.pad(rows, (0, panels * width - len(rows)), mode="edge")
    out = np.empty(panels * width * pairs, dtype=np.int32)

    def some(start: int, stop: int) -> None:
        kernel.pack(
            features.ctypes.data, features.strides[0] // 2, rows[start * width :].ctypes.data, stop - start, width,
            dimension // 2, dimension % 2, out[start * width * pairs :].ctypes.data,
        )  # fmt: skip

    step = -(-panels // parts)
    pieces = [(start, min(panels, start + step)) for start in range(0, panels, step)]
    if each is None or len(pieces) == 1:
        some(0, panels)
    else:
        each(lambda piece: some(*piece), pieces)
    return out


@contextmanager
def _threads(count: int) -> Iterator[Callable[..., list]]:  # type: ignore[type-arg]
    """`map` in `count` threads, done when it returns."""
    if count == 1:
        yield lambda work, items: [work(item) for item in items]
        return
    with ThreadPoolExecutor(count) as pool:
        yield lambda work, items: list(pool.map(work, items))
