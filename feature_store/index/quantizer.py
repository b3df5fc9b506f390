"""Inverted lists whose cells were fixed on public data: approximate search with the exact guarantee.

A public quantizer is a table of centroids. A record belongs to the list of its nearest centroid; a query
looks only into the lists of its nearest few centroids and takes the first k records it finds there, by
(similarity descending, record id ascending).

Guarantee (instance level, per query). Let c be the centroids, a(x) the list of record x, P(q) the lists
probed by query q. a(x) is a function of x and c; P(q) is a function of q and c; c is public. So the records q can
see, V(D) = {x in D : a(x) in P(q)}, satisfy V(D + {x}) = V(D) or V(D) + {x}: one record more or less changes V
by that record at most, and a replacement by at most one record out and one in. The neighbours are the first k
of V(D) in a fixed total order, so one vote moves at most, exactly as without lists (see `protocol`). Both a
and P are decided on integer similarities with ties to the lowest list number, so they, too, never change
with rounding.

The premise is that c does not depend on private data. Train it on private records and one record moves
centroids, hence the lists of many others and the votes of all of them: there is no bound. No function here
trains on the features it indexes, and `refuse_training_data` catches the plainest mistake; that the training
data really was public is the caller's declaration, kept in `provenance`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine_numpy import NumpyBlock
from feature_store.index.geometry import MAX_COORDINATE, check_count, check_features
from feature_store.index.keys import ranks_of
from feature_store.index.mapped import row_chunks
from feature_store.index.ties import first_keys
from labeler.errors import BadData, InvalidSetting, UnsafeIndex

_SCORES_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Probes:
    """Which lists each query looks into.

    Attributes:
        order: int64, queries repeated once per list they probe, grouped by list.
        lists: int64, the list of each entry of `order`, ascending.
    """

    order: NDArray[np.int64]
    lists: NDArray[np.int64]

    def queries_of(self, list_number: int) -> NDArray[np.int64]:
        """The queries that look into a list, ascending."""
        start, stop = np.searchsorted(self.lists, [list_number, list_number + 1])
        return self.order[start:stop]


@dataclass(frozen=True, eq=False)
class PublicQuantizer:
    """Centroids that depend on public data only.

    Attributes:
        centroids: int16 (lists, d), quantised as features are.
        provenance: what public data they were trained on, in words; kept with the index for auditors.
        training_digest: SHA-256 of the features they were trained on, empty if unknown.

    Raises:
        BadData: centroids that are no valid features, or none of them.
        UnsafeIndex: no provenance: nobody has said that the training data was public.
    """

    centroids: NDArray[np.int16]
    provenance: str
    training_digest: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_features(self.centroids, what="centroids")
        if not len(self.centroids):
            raise BadData("a quantizer needs at least one centroid")
        if not isinstance(self.provenance, str) or not self.provenance.strip():
            raise UnsafeIndex(
                "a quantizer without provenance is refused: say which public data its centroids were trained on; "
                "centroids that depend on private records let one record move any number of votes"
            )
        own = self.centroids.copy()
        own.flags.writeable = False
        object.__setattr__(self, "centroids", own)

    @property
    def num_lists(self) -> int:
        return len(self.centroids)

    def assign(self, features: NDArray[np.int16]) -> NDArray[np.int32]:
        """The list of each record: most similar centroid, lowest number among equals. int32 (n,)."""
        self._check_dimension(features)
        centroids = self.centroids.astype(np.float32)
        lists = np.empty(len(features), dtype=np.int32)
        for rows in row_chunks(features, 4 * (self.num_lists + features.shape[1]), _SCORES_BYTES):
            lists[rows] = (features[rows].astype(np.float32) @ centroids.T).argmax(axis=1)
        return lists

    def probe(self, queries: NDArray[np.int16], probes: int) -> Probes:
        """The `probes` most similar lists of each query, lowest numbers among equals."""
        self._check_dimension(queries)
        block = NumpyBlock(self.centroids.astype(np.float32))
        numbers = np.arange(self.num_lists, dtype=np.int64)
        count = min(probes, self.num_lists)
        lists = np.empty((len(queries), count), dtype=np.int64)
        for rows in row_chunks(queries, 4 * (4 * self.num_lists + queries.shape[1]), _SCORES_BYTES):
            keys = first_keys(block, numbers, queries[rows].astype(np.float32), count, scratch_bytes=_SCORES_BYTES)
            lists[rows] = ranks_of(keys)
        flat = lists.ravel()
        order = np.argsort(flat, kind="stable")
        return Probes(order // count, flat[order])

    def refuse_training_data(self, features: NDArray[np.int16]) -> None:
        """Refuse to index the very features the centroids were trained on.

        Raises:
            UnsafeIndex: they are the same array, byte for byte. Other overlaps are not looked for: a refusal that
                depends on single private records would itself reveal them.
        """
        if self.training_digest and self.training_digest == _digest(features):
            raise UnsafeIndex(
                "the quantizer was trained on the features it is to index; train it on public features, "
                "or use exact search (leave the quantizer out)"
            )

    def _check_dimension(self, features: NDArray[np.int16]) -> None:
        if features.shape[1] != self.centroids.shape[1]:
            raise BadData(
                f"features have dimension {features.shape[1]}, the quantizer {self.centroids.shape[1]}; "
                "both must come from the same backbone"
            )


def train_public_quantizer(
    public_features: NDArray[np.int16], *, num_lists: int, provenance: str, iterations: int = 20, seed: int = 0
) -> PublicQuantizer:
    """Spherical k-means on public features.

    Args:
        public_features: int16 (n, d). Public: nothing about them is protected.
        num_lists: at most n.
        provenance: what data this is, in words, for example "public part of task digits-1, backbone 3f2a".
        iterations: of k-means.
        seed: of its initialisation; nothing private depends on it.

    Raises:
        BadData: features outside the exact range.
        InvalidSetting: num_lists below 1 or above n.
        UnsafeIndex: no provenance.
    """
    import faiss

    check_features(public_features, what="public features")
    num_lists = check_count(num_lists, "num_lists")
    if num_lists > len(public_features):
        raise InvalidSetting(
            f"num_lists is {num_lists}, at most the {len(public_features)} public features are possible"
        )
    means = faiss.Kmeans(
        public_features.shape[1],
        num_lists,
        niter=check_count(iterations, "iterations"),
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(public_features),
    )
    means.train(public_features.astype(np.float32))
    centroids = np.asarray(means.centroids, dtype=np.float64)
    norms = np.linalg.norm(centroids, axis=1, keepdims=True)
    centroids = np.rint(MAX_COORDINATE * centroids / np.maximum(norms, np.finfo(np.float64).tiny))
    return PublicQuantizer(centroids.astype(np.int16), provenance, _digest(public_features))


def _digest(features: NDArray[np.int16]) -> str:
    """SHA-256 of the features' shape and bytes."""
    digest = hashlib.sha256(repr(features.shape).encode())
    for rows in row_chunks(features, 2 * features.shape[1], _SCORES_BYTES):
        digest.update(features[rows].astype("<i2").tobytes())
    return digest.hexdigest()
