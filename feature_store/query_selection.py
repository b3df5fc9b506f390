"""Which public questions to ask. Choosing costs no privacy: only public features and a public seed are read.

Four strategies. `all` asks about every public image, `random` about a sample of them. `clustered` and `spectral` ask
about the centers of groups of similar images: a center is a synthetic feature, no image, and one answer labels the
whole group. Fewer, better questions buy more than any accounting. Where agents are asked for a
linear model there is nothing to choose: `weights` are the rows at which the scores of such a model are its weights.

No strategy has a price. Agents answer whatever is asked, and a task's price holds for any questions that were fixed
before an answer was known. These are: they are a function of public images, a count and a public seed.

Clusters are k-means cells of the directions of the leading principal components: the small
components of a backbone's features are mostly noise, and leaving them out makes the groups purer
(measured on photos of 10 classes: 95.8 instead of 95.1 % and 86.9 instead of 83.7 % of the images
share their group's class at 10 groups). The center itself is the mean direction of its images in
the **original** space, because that is where private records measure their similarity to it.
**Spectral** groups lie along the graph of nearest neighbors, not around centers; what is asked about a group and what
its answer labels is the same.

A digit or a kind of object fills a bent region of feature space. K-means cuts such a region where a ball ends; a walk
over nearest neighbors stays in it. So each image is joined with its `neighbors` nearest images. A is the symmetric
adjacency of that graph and D its degrees. The leading eigenvectors of D^-1/2 A D^-1/2, MORE_AXES more than there are
groups, distinguish images, as rows of unit length (Ng, Jordan, Weiss 2001, "On spectral clustering"); k-means divides
those rows.

**Islands.** Eigenvectors of a graph in several pieces are those of its pieces, and each piece has the eigenvalue 1: a
solver that starts from one vector may find it too rarely. They are solved apart, and the largest values of all are
taken. Where there are more pieces than groups (eleven photographs of one scene make a piece), the pieces themselves
are grouped, each at its mean, as heavy as its images are many.

**Small sets.** An edge to an image of another class is a bridge for the walk, and where a group holds few images most
of an image's nearest are others'. So the number of neighbors follows from the images that there are for each group, a
public number: LEAST_NEIGHBORS and one for each ten images, NEIGHBORS at most. Where there are fewer than FEW_IMAGES
for each group no number of neighbors told classes apart as well as k-means of the images themselves, which then is
what is done. All three were chosen on digits of USPS, 3 to 50 images for each of 10 and 20 groups.

**Large sets.** Of more than MOST_LANDMARKS images a random sample of that size gives the principal components, and
k-means reads the images in batches (Sculley 2010, "Web-scale k-means clustering"). For `spectral` the sample is
grouped, and every other image joins the group of most of its nearest landmarks: time and memory stay those of the
sample, plus one search. The sample follows from the public seed alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.rows import FEATURE_SCALE, quantize
from labeler.errors import BadData, InvalidSetting
from labeler.rounds.effects import MOST_SPECTRAL_GROUPS, Strategy

_MIN_DIRECTIONS, _MAX_DIRECTIONS = 20, 128
_BLOCK_ROWS = 4096
_BATCH_ROWS = 4096
_LEAST_VARIANCE = 1e-6

GROUPING: Final = "Grouping public images"
Progress = Callable[[str, int, int], None]
"""Told what is being done, the steps done, and their number."""


def silent(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


WHITENING = 0.7
"""Of public axes, as chosen for `labeler bench papers dp-helmet` on other users' records."""


@dataclass(frozen=True, eq=False)
class QuerySet:
    """Public questions, ready to be asked.

    Attributes:
        features: int16, shape (num_queries, dimension), quantized like shards.
        rows: int64, shape (num_answers,), the public image each answer is about, or -1 for a center. There are as many
            answers as queries, but for `weights`: then every image is labeled with the model that was asked for.
        assignment: int64, shape (num_images,), the answer that stands for each public image.
        strategy: how they were chosen.
        seed: the public seed they were chosen with.
    """

    features: NDArray[np.int16]
    rows: NDArray[np.int64]
    assignment: NDArray[np.int64]
    strategy: Strategy
    seed: int

    def __len__(self) -> int:
        return len(self.features)


def select_queries(
    public_features: NDArray[np.int16],
    *,
    strategy: Strategy = "clustered",
    count: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> QuerySet:
    """Choose questions about a public set. The same arguments give the same questions.

    Args:
        public_features: int16, shape (num_images, dimension), quantized, no zero rows.
        strategy: all, random, clustered or spectral; weights for the rows of a linear model.
        count: how many questions; not more than there are images. Needed unless strategy is `all`. For `weights`: along
            how many public axes the model looks; None for features as they are.
        seed: public; two parties with the same public images and seed choose the same questions.
        progress: told of the steps of `clustered` and `spectral`, which may take a minute.

    Raises:
        BadData: the features are not quantized public features.
        InvalidSetting: unknown strategy, a count outside 1 to the number of images, or `spectral` cannot make it.
    """
    _check_features(public_features)
    if strategy not in get_args(Strategy):
        raise InvalidSetting(f"unknown strategy {strategy!r}; choose one of {', '.join(get_args(Strategy))}")
    num_images = len(public_features)
    if strategy == "weights":
        images = np.arange(num_images, dtype=np.int64)
        asked = model_rows(public_features.shape[1]) if count is None else axis_rows(public_features, count)
        return QuerySet(asked, images, images, strategy, seed)
    if strategy == "all" or count == num_images:
        rows = np.arange(num_images, dtype=np.int64)
        return QuerySet(np.ascontiguousarray(public_features), rows, rows, strategy, seed)
    if count is None or not 1 <= count < num_images:
        raise InvalidSetting(
            f"strategy {strategy!r} needs a count between 1 and the {num_images} public images, found {count}"
        )
    if strategy == "random":
        rows = np.sort(np.random.default_rng(seed).choice(num_images, size=count, replace=False)).astype(np.int64)
        features = public_features[rows]
        return QuerySet(features, rows, _nearest(public_features, features), strategy, seed)
    if strategy == "spectral":
        assignment = _along_neighbors(public_features, count, seed, progress)
    else:
        progress(GROUPING, 0, _STEPS)
        directions = _leading_directions(public_features, count // 4, seed)
        progress(GROUPING, 1, _STEPS)
        assignment = _k_means(directions, count, seed)
        progress(GROUPING, _STEPS, _STEPS)
    features = _centres(public_features, assignment, count)
    return QuerySet(features, np.full(count, -1, dtype=np.int64), assignment, strategy, seed)


def model_rows(dimension: int) -> NDArray[np.int16]:
    """The unit vectors of feature space, then zero: there a linear model's scores are its weights and its intercept.

    Returns:
        int16, shape (dimension + 1, dimension), quantized like shards.
    """
    return np.eye(dimension + 1, dimension, dtype=np.int16) * np.int16(FEATURE_SCALE)


def axis_rows(public_features: NDArray[np.int16], count: int) -> NDArray[np.int16]:
    """The first principal axes of public images, then their mean: the map of `labeler.linear_model`.

    Each axis is divided by its standard deviation to the power WHITENING: axes that tell classes apart are rarely the
    longest. All are scaled so that the longest row is as long as a feature.

    Args:
        public_features: int16, shape (num_images, dimension).
        count: how many axes.

    Returns:
        int16, shape (count + 1, dimension).

    Raises:
        InvalidSetting: the images have fewer axes.
    """
    mean, covariance = _spread(public_features)
    variances, axes = np.linalg.eigh(covariance)
    known = _known(variances)
    if not 1 <= count <= known:
        raise InvalidSetting(
            f"training.axes asks for {count} axes of the public images, which have {known}; ask for fewer, or submit "
            "more images"
        )
    kept = slice(None, -count - 1, -1)
    lengths = variances[kept] ** (-WHITENING / 2)
    basis = (axes[:, kept] * (lengths / lengths.max())).T
    return np.asarray(np.rint(np.vstack([FEATURE_SCALE * basis, mean])), dtype=np.int16)


def known_axes(public_features: NDArray[np.int16]) -> int:
    """Return the number of axes along which public images differ: the most that `axis_rows` takes."""
    return _known(np.linalg.eigvalsh(_spread(public_features)[1]))


def _spread(public_features: NDArray[np.int16]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean of public images and their covariance."""
    rows = public_features.astype(np.float64)
    mean = rows.mean(axis=0)
    rows -= mean
    return mean, rows.T @ rows / len(rows)


def _known(variances: NDArray[np.floating]) -> int:
    """Return how many of the ascending variances are no rounding."""
    return int((variances > _LEAST_VARIANCE * max(float(variances[-1]), 1.0)).sum())


def _check_features(features: NDArray[np.int16]) -> None:
    if features.dtype != np.int16 or features.ndim != 2 or not features.size:
        raise BadData(
            "public features must be an int16 array of shape (num_images, dimension), at least one of each; "
            f"found {features.dtype} of shape {features.shape}"
        )
    empty = ~features.any(axis=1)
    if empty.any():
        raise BadData(f"{int(empty.sum())} public features are all zero; embed these images again or leave them out")


def _unit(rows: NDArray[np.int16]) -> NDArray[np.float32]:
    floats = rows.astype(np.float32)
    return cast(NDArray[np.float32], floats / np.linalg.norm(floats, axis=1, keepdims=True))


def _leading_directions(features: NDArray[np.int16], wanted: int, seed: int) -> NDArray[np.float32]:
    """Unit vectors along the leading principal components, one row per image."""
    unit = _unit(features)
    dimensions = min(max(wanted, _MIN_DIRECTIONS), _MAX_DIRECTIONS, *(size - 1 for size in unit.shape))
    if dimensions < 2:
        return unit
    small = min(unit.shape) <= 500
    from sklearn.decomposition import PCA

    axes = PCA(dimensions, svd_solver="full" if small else "randomized", random_state=seed)
    is_large = len(unit) > MOST_LANDMARKS
    reduced = axes.fit(unit[_landmarks(len(unit), seed)]).transform(unit) if is_large else axes.fit_transform(unit)
    norms = np.linalg.norm(reduced, axis=1, keepdims=True)
    return cast(NDArray[np.float32], (reduced / np.maximum(norms, np.finfo(np.float32).tiny)).astype(np.float32))


def _along_neighbors(features: NDArray[np.int16], count: int, seed: int, progress: Progress) -> NDArray[np.int64]:
    """Spectral groups of the different images, in the order in which they come; copies are where their image is."""
    _, first, copy_of = np.unique(features, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    # Where there are too few images for a walk, along the components in which `clustered` groups them.
    wanted = 4 * count if neighbors(len(order), count) else count // 4
    directions = _leading_directions(features[first[order]], wanted, seed)
    groups = spectral_groups(directions, count, seed=seed, progress=progress)
    return groups[place[copy_of.ravel()]]


def _centres(features: NDArray[np.int16], assignment: NDArray[np.int64], count: int) -> NDArray[np.int16]:
    """Quantised mean direction of every group; an empty or cancelling group takes the overall mean."""
    members = np.zeros((count, features.shape[1]), dtype=np.float64)
    order = np.argsort(assignment, kind="stable")
    groups, starts = np.unique(assignment[order], return_index=True)
    members[groups] = np.add.reduceat(_unit(features[order]).astype(np.float64), starts, axis=0)
    norms = np.linalg.norm(members, axis=1, keepdims=True)
    overall = members.sum(axis=0) if np.any(members.sum(axis=0)) else features[0].astype(np.float64)
    members = np.where(norms > 1e-9, members, overall)
    return quantize(members)


def _nearest(features: NDArray[np.int16], queries: NDArray[np.int16]) -> NDArray[np.int64]:
    """The query each image is most similar to; the lowest number among equals. Products are exact integers."""
    columns = queries.astype(np.float32).T
    blocks = [
        np.argmax(features[start : start + _BLOCK_ROWS].astype(np.float32) @ columns, axis=1)
        for start in range(0, len(features), _BLOCK_ROWS)
    ]
    return np.concatenate(blocks).astype(np.int64)


NEIGHBORS: Final = 10
LEAST_NEIGHBORS: Final = 3
FEW_IMAGES: Final = 12
MORE_AXES: Final = 2
"""Chosen on digits of USPS and on training images held out."""

MOST_LANDMARKS: Final = 10_000
_DENSE_IMAGES: Final = 500
_STEPS: Final = 4

Floats = NDArray[np.floating]


def _landmarks(images: int, seed: int) -> NDArray[np.int64]:
    """Return the images that stand for all of a large set, in order."""
    return np.sort(np.random.default_rng(seed).choice(images, size=MOST_LANDMARKS, replace=False))


def spectral_groups(directions: Floats, count: int, *, seed: int, progress: Progress = silent) -> NDArray[np.int64]:
    """Of each image, its group: 0 to count - 1. The same arguments give the same groups.

    Reads public features and a public seed alone, before anybody is asked, and so is no part of what is priced.

    Args:
        directions: shape (num_images, dimension), unit rows of different images.
        count: how many groups; fewer come out where there are fewer images.
        seed: public.

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
    from sklearn.neighbors import KNeighborsClassifier

    landmarks = _landmarks(len(directions), seed)
    of_landmarks = _groups(directions[landmarks], count, seed, progress)
    groups: NDArray[np.int64] = (
        KNeighborsClassifier(NEIGHBORS).fit(directions[landmarks], of_landmarks).predict(directions).astype(np.int64)
    )
    groups[landmarks] = of_landmarks
    return groups


def neighbors(images: int, count: int) -> int:
    """Return how many nearest images each image is joined with; 0 where there is no walk."""
    for_each = images // count
    return 0 if for_each < FEW_IMAGES else min(NEIGHBORS, LEAST_NEIGHBORS + for_each // 10)


def _groups(directions: Floats, count: int, seed: int, progress: Progress) -> NDArray[np.int64]:
    def told(done: int) -> None:
        progress(GROUPING, done, _STEPS)

    told(0)
    joined = neighbors(len(directions), count)
    if joined == 0:
        groups = _k_means(directions, count, seed)
        told(_STEPS)
        return groups
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import kneighbors_graph

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


def _leading_vectors(graph: Any, piece_of: NDArray[np.integer], wanted: int, seed: int) -> NDArray[np.float64]:
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
    from scipy.linalg import eigh
    from scipy.sparse import diags
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

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
    # Loaded where it is wanted: many an embedder never clusters, and starts seconds earlier without.
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Fewer different rows than groups: some groups stay empty, which the coverage tells.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = (
            KMeans(count, n_init=10 if len(rows) <= 5000 else 2, random_state=seed)
            if len(rows) <= MOST_LANDMARKS
            else MiniBatchKMeans(count, n_init=1, batch_size=max(_BATCH_ROWS, 2 * count), random_state=seed)
        )
        clusters.fit(rows, sample_weight=weights)
    labels: NDArray[np.int64] = clusters.labels_.astype(np.int64)
    return labels
