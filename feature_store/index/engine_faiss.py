"""FAISS as an engine on the processor, for `labeler run` and benchmarks: exact, with ties settled by record id.

Only this module of the product imports faiss.

FAISS keeps whichever of tied records it met first, so its own answer is no function of the set of records. Here it
answers two other questions about every query, whether it ties or not:

1. how similar is the k-th record? (`IndexFlatIP.search`, of which the similarities are kept and the ids are not)
2. which records are at least as similar? (`IndexFlatIP.range_search`. Every record has one number more, 1, and every
   query minus that similarity, so that one radius serves all queries.)

The second answer holds every record that may count, and a few more: the radius leaves room for rounding, which only
vectors far longer than `quantize` makes them can meet. Their similarities are computed again, exactly, and compared as
keys with all ids. Both questions are asked of tiles whose sizes are fixed, so that memory does not follow from ties.
Time does: a query takes longer that ties with thousands of records, so agents of a service refuse this engine.
"""

from __future__ import annotations

from typing import Final

import faiss
import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NO_KEY, pack
from feature_store.index.exact_index import Engine
from feature_store.rows import GatheredRows

_TILE_ROWS: Final = 1 << 16
_TILE_QUERIES: Final = 256
"""At most so many records are found for so many queries at once: 200 MiB, where all are equal."""

_GATHERED: Final = 1 << 14
"""Found records whose similarities are computed at a time."""

_LEAST: Final = -float(2**24)
"""Below every similarity."""


class FaissBlock:
    """Records in tiles, each an `IndexFlatIP` of (x, 1); see engine.Block."""

    def __init__(self, rows: GatheredRows) -> None:
        self._tiles = []
        for start in range(0, len(rows), _TILE_ROWS):
            part = rows.part(start, min(start + _TILE_ROWS, len(rows)))
            floats = np.ones((len(part), rows.dimension + 1), dtype=np.float32)
            for place, some in part.chunks():
                floats[place, :-1] = some
            index = faiss.IndexFlatIP(rows.dimension + 1)
            index.add(floats)
            self._tiles.append((index, part.ranks))

    def __len__(self) -> int:
        return sum(index.ntotal for index, _ in self._tiles)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        found = np.full((len(queries), count), NO_KEY, dtype=np.int64)
        for start in range(0, len(queries), _TILE_QUERIES):
            some = np.zeros((len(queries[start : start + _TILE_QUERIES]), queries.shape[1] + 1), dtype=np.float32)
            some[:, :-1] = queries[start : start + _TILE_QUERIES]
            some[:, -1] = -self._last_similarities(some, count)
            best = found[start : start + len(some)]
            for index, ranks in self._tiles:
                _keep_first(best, *_reached(index, some, ranks))
        return found

    def _last_similarities(self, queries: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        best = np.full((len(queries), count), _LEAST, dtype=np.float32)
        for index, _ in self._tiles:
            similarities, _ = index.search(queries, count)  # where there are fewer records, far below _LEAST
            best = np.concatenate([best, similarities], axis=1)
            best.partition(count, axis=1)
            best = best[:, count:]
        return np.asarray(best.min(axis=1))


class FaissEngine(Engine):
    """See the module."""

    def bytes_per_query(self, block_rows: int) -> int:
        # For at most _TILE_QUERIES at once: places, similarities and keys of all records of a tile.
        return 48 * min(block_rows, _TILE_ROWS)

    def load(self, rows: GatheredRows, most_rows: int) -> FaissBlock:  # noqa: ARG002
        return FaissBlock(rows)


def _reached(
    index: faiss.IndexFlatIP, queries: NDArray[np.float32], ranks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys of all records that may count, and whose query each is about, ascending."""
    limits, _, places = index.range_search(queries, -float(index.d))
    whose = np.repeat(np.arange(len(queries)), np.subtract(limits[1:], limits[:-1], dtype=np.int64))
    records = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)[:, :-1]
    similarities = np.empty(len(places), dtype=np.float32)
    for start in range(0, len(places), _GATHERED):
        part = slice(start, start + _GATHERED)
        np.einsum("ij,ij->i", records[places[part]], queries[whose[part], :-1], out=similarities[part])
    return pack(similarities, ranks[places]), whose


def _keep_first(best: NDArray[np.int64], keys: NDArray[np.int64], whose: NDArray[np.int64]) -> None:
    """Put the first keys of each query in place of what was found before, in order."""
    count = best.shape[1]
    keys = np.concatenate([best.reshape(-1), keys])
    whose = np.concatenate([np.repeat(np.arange(len(best)), count), whose])
    order = np.lexsort((keys, whose))
    # Every query has at least `count` keys: what stood there before.
    firsts = np.searchsorted(whose[order], np.arange(len(best)))
    best[:] = keys[order][firsts[:, None] + np.arange(count)]
