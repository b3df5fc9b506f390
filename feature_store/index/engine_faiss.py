"""FAISS on the processor: `IndexFlatIP`, with ties settled by record id.

FAISS returns the right similarities and an undefined choice among ties: its heap, its reservoir and its blocks keep
different ones. So `first_keys` asks for more places than it needs and decides by keys (`definition`, "Keys").

1. Ask for m = count + WINDOW places. A place is mapped to its rank before anything is compared, and each pair of
   similarity and rank becomes one key. A missing place becomes NO_KEY.
2. Sort the keys, and cut them to `count`.
3. If the m-th similarity equals that of the last key kept, more records may tie there than FAISS returned. Such a query
   is settled in full by the definition (`NumpyBlock`), over the same rows, all such queries of a search together. Once
   many are to be settled, those that were not searched yet are settled without steps 1 and 2.

**Exact.** FAISS returns the m largest similarities, so a record that it left out is at most as similar as the m-th. If
that is below the last similarity kept, everything tied there was returned, and the first `count` keys are those of the
definition. The same holds where fewer than m records exist: then all were returned.

**Time.** Steps 1 and 2 take the same operations whatever the records are. Step 3 depends on ties, so the plan of an
agent's public clock counts the most that they can cost. Let F be the time of steps 1 and 2 for all queries, and S that
of step 3 for all. A search of which a part x is searched and a part s is settled takes F x + S s. A probe times two
searches, one without ties and one with nothing else (`exact_index.every_query_tied`): F, and F / 8 + S. Where S is
above 8/7 F, no search takes longer than the second. One piece more costs F / 8 more, and saves at least (1/8 - 1/64) S.
Elsewhere none takes longer than F + (1/8 + 1/64) S, the last piece being all ties: a sixth more than F, at most. The
room of a plan is a half (`workers.agent.public_clock.ROOM`).

Every query takes one path, however many there are: FAISS's other path for few queries is off. The number of threads is
that of the machine (OMP_NUM_THREADS). Only BLAS decides not to share the product of a tile below a fixed size, some
tens of microseconds.

No other module of the product imports faiss, but `engine_gpu`.
"""

from __future__ import annotations

from typing import Any, Final

import faiss
import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NO_KEY, RANK_BITS, pack
from feature_store.index.exact_index import TILE_QUERIES, Engine, EngineFault, NumpyBlock, are_all_tied
from feature_store.rows import GatheredRows

WINDOW: Final = 8
"""Places beyond those asked for. Of 10,000 photos at most 0.02 % tie at the last place, and none beyond two more."""

_PIECES, _MANY = 8, 64
"""Queries are searched in so many pieces, and no more pieces once more than one query in so many is to be settled."""

faiss.cvar.distance_compute_blas_threshold = 0


class FaissBlock(NumpyBlock):
    """Records in an `IndexFlatIP`, in their order; see Block. The definition reads the same memory."""

    def __init__(self, rows: GatheredRows) -> None:
        self._index = faiss.IndexFlatIP(rows.dimension)
        # `add` would hold the records twice while it grows.
        self._index.codes.resize(4 * len(rows) * rows.dimension)
        self._index.ntotal = len(rows)
        floats = faiss.rev_swig_ptr(self._index.get_xb(), len(rows) * rows.dimension).reshape(len(rows), rows.dimension)
        super().__init__(rows.copy_to(floats), rows.ranks)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        found = np.empty((len(queries), count), dtype=np.int64)
        is_open = np.zeros(len(queries), dtype=np.bool_)
        step = max(TILE_QUERIES, -(-len(queries) // _PIECES))
        for start in range(0, len(queries), step):
            if np.count_nonzero(is_open) * _MANY > len(queries):
                is_open[start:] = True
                break
            some = slice(start, start + step)
            found[some], is_open[some] = self._searched(queries[some], count)
        found[is_open] = super().first_keys(queries[is_open], count)
        return found

    def _searched(self, queries: NDArray[np.int16], count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the first keys among those that FAISS returns, and which queries may tie with others."""
        try:
            similarities, places = self._index.search(np.asarray(queries, np.float32, order="C"), count + WINDOW)
        except RuntimeError as error:
            raise EngineFault(type(error).__name__) from None
        is_missing = places < 0
        similarities[is_missing] = 0  # else FAISS's largest float, which is no integer
        keys = pack(similarities, self._ranks[places])
        keys[is_missing] = NO_KEY
        keys.sort(axis=1)
        return keys[:, :count], may_tie(keys, count)


def may_tie(keys: Any, count: int) -> Any:
    """Return which queries step 3 settles: the last key that FAISS gave is as similar as the last one kept.

    Args:
        keys: int64 (nq, count + WINDOW), ascending; an array, or a tensor of a device.

    Returns:
        bool (nq,), of the same kind.
    """
    kept, last = keys[:, count - 1], keys[:, -1]
    return (kept >> RANK_BITS == last >> RANK_BITS) & (last != NO_KEY) | are_all_tied()


class FaissEngine(Engine):
    """See the module."""

    name = "faiss"

    def load(self, rows: GatheredRows) -> FaissBlock:
        return FaissBlock(rows)
