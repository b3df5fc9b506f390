"""Groups of similar public images by spectral clustering: along the graph of nearest neighbours, not around centres.

A digit or a kind of object fills a bent region of feature space. K-means cuts such a region where a ball ends; a walk
over nearest neighbours stays in it. So each image is joined with its `neighbors` nearest images, A is the symmetric
adjacency of that graph and D its degrees, and images are told apart by the leading eigenvectors of D^-1/2 A D^-1/2,
MORE_AXES more than there are groups, as rows of unit length (Ng, Jordan, Weiss 2001, "On spectral clustering");
k-means divides those rows.

**Islands.** Eigenvectors of a graph in several pieces are those of its pieces, and each piece has the eigenvalue 1: a
solver that starts from one vector may find it too rarely. They are solved apart, and the largest values of all are
taken. Where there are more pieces than groups (eleven photographs of one scene make a piece), the pieces themselves
are grouped, each at its mean, as heavy as its images are many.

**Small sets.** An edge to an image of another class is a bridge for the walk, and where a group holds few images most
of an image's nearest are others'. So the number of neighbours follows from the images that there are for each group, a
public number: LEAST_NEIGHBORS and one for each ten images, NEIGHBORS at most. Where there are fewer than FEW_IMAGES
for each group no number of neighbours told classes apart as well as k-means of the images themselves, which then is
what is done. All three were chosen on digits of USPS, 3 to 50 images for each of 10 and 20 groups.

**Large sets.** Above MOST_LANDMARKS images a random sample of so many is grouped, and every other image joins the group
of most of its nearest landmarks: time and memory stay those of the sample, plus one search.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_matrix, diags
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, eigsh
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.neighbors import KNeighborsClassifier, kneighbors_graph

from labeler.errors import InvalidSetting
from labeler.rounds.effects import MOST_SPECTRAL_GROUPS

NEIGHBORS: Final = 10
LEAST_NEIGHBORS: Final = 3
FEW_IMAGES: Final = 12
MORE_AXES: Final = 2
"""Chosen on digits of USPS and on training images held out."""

MOST_LANDMARKS: Final = 10_000
_DENSE_IMAGES: Final = 500
_STEPS: Final = 4

Progress = Callable[[str, int, int], None]
Floats = NDArray[np.floating]


def spectral_groups(
    directions: Floats, count: int, *, seed: int, progress: Progress | None = None
) -> NDArray[np.int64]:
    """Of each image, its group: 0 to count - 1. The same arguments give the same groups.

    Reads public features and a public seed alone, before anybody is asked, and so is no part of what is priced.

    Args:
        directions: shape (num_images, dimension), unit rows of different images.
        count: how many groups; fewer come out where there are fewer images.
        seed: public.
        progress: called with what is done, the steps done, and their number.

    Raises:
        InvalidSetting: more groups than are offered, or the eigenvectors of this graph are not found.
    """
    if not 1 <= count <= MOST_SPECTRAL_GROUPS:
        raise InvalidSetting(
            f"strategy 'spectral' makes 1 to {MOST_SPECTRAL_GROUPS} groups, found {count}; strategy 'clustered' makes "
            "more"
        )
    if len(directions) <= count:
        return np.arange(len(directions), dtype=np.int64)
    if len(directions) <= MOST_LANDMARKS:
        return _groups(directions, count, seed, progress)
    landmarks = np.sort(np.random.default_rng(seed).choice(len(directions), size=MOST_LANDMARKS, replace=False))
    of_landmarks = _groups(directions[landmarks], count, seed, progress)
    groups: NDArray[np.int64] = (
        KNeighborsClassifier(NEIGHBORS).fit(directions[landmarks], of_landmarks).predict(directions).astype(np.int64)
    )
    groups[landmarks] = of_landmarks
    return groups


def neighbors(images: int, count: int) -> int:
    """How many nearest images each of so many is joined with, for so many groups; 0 where there is no walk."""
    for_each = images // count
    return 0 if for_each < FEW_IMAGES else min(NEIGHBORS, LEAST_NEIGHBORS + for_each // 10)


def _groups(directions: Floats, count: int, seed: int, progress: Progress | None) -> NDArray[np.int64]:
    def told(done: int) -> None:
        if progress is not None:
            progress("Grouping public images", done, _STEPS)

    told(0)
    joined = neighbors(len(directions), count)
    if joined == 0:
        groups = _k_means(directions, count, seed)
        told(_STEPS)
        return groups
    graph = kneighbors_graph(directions, joined, mode="connectivity")
    graph = csr_matrix(graph.maximum(graph.T))
    told(1)
    pieces, piece_of = connected_components(graph, directed=False)
    told(2)
    if pieces > count:
        sizes = np.bincount(piece_of)
        means = np.zeros((pieces, directions.shape[1]))
        np.add.at(means, piece_of, directions)
        groups = _k_means(means / sizes[:, None], count, seed, weights=sizes)[piece_of]
    else:
        rows = _leading_vectors(graph, piece_of, count + MORE_AXES, seed)
        told(3)
        groups = _k_means(rows, count, seed)
    told(_STEPS)
    return groups


def _leading_vectors(graph: csr_matrix, piece_of: NDArray[np.integer], wanted: int, seed: int) -> NDArray[np.float64]:
    """The eigenvectors of the largest eigenvalues of all pieces, as rows of unit length."""
    values: list[NDArray[np.float64]] = []
    columns: list[NDArray[np.float64]] = []
    for piece in range(int(piece_of.max()) + 1):
        members = np.flatnonzero(piece_of == piece)
        own_values, own_vectors = _solve(graph[members][:, members], min(wanted, len(members)), seed)
        vectors = np.zeros((len(piece_of), len(own_values)))
        vectors[members] = own_vectors
        values.append(own_values)
        columns.append(vectors)
    order = np.argsort(-np.concatenate(values), kind="stable")[:wanted]
    rows = np.hstack(columns)[:, order]
    unit: NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _solve(graph: Any, wanted: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest eigenvalues of one piece, and their vectors: exactly where it is small, else by Lanczos."""
    size = graph.shape[0]
    if size == 1:
        return np.ones(1), np.ones((1, 1))
    inverse = diags(1 / np.sqrt(np.asarray(graph.sum(axis=1)).ravel()))
    normalised = inverse @ graph @ inverse
    if size <= max(_DENSE_IMAGES, 3 * wanted):
        values, vectors = eigh(normalised.toarray(), subset_by_index=(size - wanted, size - 1))
        return values, vectors
    start = np.random.default_rng(seed).uniform(-1, 1, size)
    try:
        values, vectors = eigsh(normalised, k=wanted, which="LA", v0=start)
    except ArpackNoConvergence:
        raise InvalidSetting(
            f"the {wanted} leading eigenvectors of the graph of {size} public images are not found; use strategy "
            "'clustered', or fewer groups"
        ) from None
    return values, vectors


def _k_means(rows: Floats, count: int, seed: int, *, weights: NDArray[np.integer] | None = None) -> NDArray[np.int64]:
    with warnings.catch_warnings():
        # Fewer different rows than groups: some groups stay empty, which the coverage tells.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = KMeans(count, n_init=10 if len(rows) <= 5000 else 2, random_state=seed).fit(rows, sample_weight=weights)
    labels: NDArray[np.int64] = found.labels_.astype(np.int64)
    return labels
