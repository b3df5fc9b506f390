"""FAISS on the processor: `IndexFlatIP`, with ties settled by record id.

FAISS returns the right similarities and an undefined choice among ties: its heap, its reservoir and its blocks keep
different ones. So `first_keys` asks for more places than it needs and decides by keys (`definition`, "Keys").

1. Ask for m = count + WINDOW places. A place is mapped to its rank before anything is compared, and each pair of
   similarity and rank becomes one key. A missing place becomes NO_KEY.
2. Sort the keys, and cut them to `count`.
3. If the m-th similarity equals that of the last key kept, more records may tie there than FAISS returned. Such a query
   is settled in full by the definition (`NumpyBlock`), over the same rows, all such queries of a search together.

**Exact.** FAISS returns the m largest similarities, so a record that it left out is at most as similar as the m-th. If
that is below the last similarity kept, everything tied there was returned, and the first `count` keys are those of the
definition. The same holds where fewer than m records exist: then all were returned.

**Time.** Steps 1 and 2 take the same operations whatever the records are. Step 3 depends on ties alone. The plan of an
agent's public clock counts it for every query (`exact_index.every_query_tied`), so it cannot make an answer late. Each
query takes one path, however many there are: FAISS's other path for few queries is off. The number of threads is that
of the machine (OMP_NUM_THREADS); only BLAS decides not to share the product of a tile below a fixed size, some tens of
microseconds.

No other module of the product imports faiss, but `engine_faiss_gpu`.
"""

from __future__ import annotations

from typing import Final

import faiss
import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NO_KEY, RANK_BITS, pack
from feature_store.index.exact_index import Engine, EngineFault, NumpyBlock, are_all_tied
from feature_store.rows import GatheredRows

WINDOW: Final = 8
"""Places beyond those asked for. Of 10,000 photos at most 0.02 % tie at the last place, and none beyond two more."""

faiss.cvar.distance_compute_blas_threshold = 0


class FaissBlock(NumpyBlock):
    """Records in an `IndexFlatIP`, in their order; see Block. The definition reads the same memory."""

    def __init__(self, rows: GatheredRows) -> None:
        self._index = faiss.IndexFlatIP(rows.dimension)
        # `add` would hold the records twice while it grows.
        self._index.codes.resize(4 * len(rows) * rows.dimension)
        self._index.ntotal = len(rows)
        floats = faiss.rev_swig_ptr(self._index.get_xb(), len(rows) * rows.dimension).reshape(len(rows), rows.dimension)
        for where, chunk in rows.chunks():
            floats[where] = chunk
        super().__init__(floats, rows.ranks)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        try:
            similarities, places = self._index.search(queries.astype(np.float32, order="C"), count + WINDOW)
        except RuntimeError as error:
            raise EngineFault(type(error).__name__) from None
        is_missing = places < 0
        similarities[is_missing] = 0  # else FAISS's largest float, which is no integer
        keys = pack(similarities, self._ranks[places])
        keys[is_missing] = NO_KEY
        del similarities, places, is_missing
        keys.sort(axis=1)
        is_open = (keys[:, count - 1] >> RANK_BITS == keys[:, -1] >> RANK_BITS) & (keys[:, -1] != NO_KEY)
        is_open |= are_all_tied()
        found = np.ascontiguousarray(keys[:, :count])
        del keys
        found[is_open] = super().first_keys(queries[is_open], count)
        return found


class FaissEngine(Engine):
    """See the module."""

    name = "faiss"

    def load(self, rows: GatheredRows) -> FaissBlock:
        return FaissBlock(rows)
