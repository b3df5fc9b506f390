"""Kinds of index that would void the guarantee, each with the reason.

Instance level means: one record more or less moves at most one vote of a query. That holds if the order of
two records depends on no third one. These structures break it: what they return for a query depends on how the
other records happened to be arranged, so one record can change any number of neighbours.
"""

from __future__ import annotations

from typing import Final

from labeler.errors import UnsafeIndex

_GRAPH: Final = (
    "a graph index links records to each other, so removing one record reroutes searches and can change many "
    "neighbours of a query at once"
)
_TRAINED: Final = (
    "its codebook or transform is fitted to the indexed records, so one record changes the codes, and with them the "
    "distances, of all others"
)
_LISTS: Final = (
    "lists around centroids trained on the indexed records move when one record does, and take other records' votes "
    "with them"
)
_HASHES: Final = (
    "its tables are laid out by what else is stored, so whether a record is found depends on the other records"
)

_REASONS: Final[dict[str, str]] = {
    "hnsw": _GRAPH,
    "nsg": _GRAPH,
    "cagra": _GRAPH,
    "nndescent": _GRAPH,
    "vamana": _GRAPH,
    "diskann": _GRAPH,
    "graph": _GRAPH,
    "pq": _TRAINED,
    "opq": _TRAINED,
    "rq": _TRAINED,
    "lsq": _TRAINED,
    "itq": _TRAINED,
    "pca": _TRAINED,
    "sq": _TRAINED,
    "scann": _TRAINED,
    "whitening": _TRAINED,
    "lsh": _HASHES,
    "ivf": _LISTS,
}


def refuse_unsafe(kind: str) -> None:
    """Refuse an index that depends on private data beyond the records themselves.

    Args:
        kind: a name or a FAISS factory string, such as "hnsw", "HNSW32" or "IVF256,PQ16". Anything that names
            no unsafe structure passes.

    Raises:
        UnsafeIndex: with the reason, and what to use instead.
    """
    for structure, reason in _REASONS.items():
        if structure in kind.lower():
            raise UnsafeIndex(
                f"index {kind!r} is refused for instance-level privacy: {reason}. "
                "Use an exact engine (auto, numpy, int16, torch, torch-gpu)."
            )
