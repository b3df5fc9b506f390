"""Which public questions to ask. Choosing costs no privacy: only public features and a public seed are read.

Four strategies. `all` asks about every public image, `random` about a sample of them, `clustered` and `spectral`
about the centres of groups of similar images: a centre is a synthetic feature, no image, and one
answer labels the whole group. Fewer, better questions buy more than any accounting. Where agents are asked for a linear
model there is nothing to choose: `weights` are the rows at which the scores of such a model are its weights.

Why no strategy has a price: agents answer whatever is asked, and a task's price holds for any questions that were
fixed before an answer was known, as these are: they are a function of public images, a count and a public seed.

Clusters are k-means cells of the directions of the leading principal components: the small
components of a backbone's features are mostly noise, and leaving them out makes the groups purer
(measured on photos of 10 classes: 95.8 instead of 95.1 % and 86.9 instead of 83.7 % of the images
share their group's class at 10 groups). The centre itself is the mean direction of its images in
the **original** space, because that is where private records measure their similarity to it.
`spectral` finds the groups along the graph of nearest neighbours (`feature_store.spectral_groups`); what is asked
about a group and what its answer labels is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.quantize import FEATURE_SCALE, quantize
from labeler.errors import BadData, InvalidSetting
from labeler.rounds.effects import Strategy

_MIN_DIRECTIONS, _MAX_DIRECTIONS = 20, 128
_BLOCK_ROWS = 4096
_LEAST_VARIANCE = 1e-6

WHITENING = 0.7
"""Of public axes, as chosen for `labeler bench papers dp-helmet` on other users' records."""


@dataclass(frozen=True, eq=False)
class QuerySet:
    """Public questions, ready to be asked.

    Attributes:
        features: int16, shape (num_queries, dimension), quantised like shards.
        rows: int64, shape (num_answers,), the public image each answer is about, or -1 for a centre. There are as many
            answers as queries, but for `weights`: then every image is labelled with the model that was asked for.
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
    progress: Callable[[str, int, int], None] | None = None,
) -> QuerySet:
    """Choose questions about a public set. The same arguments give the same questions.

    Args:
        public_features: int16, shape (num_images, dimension), quantised, no zero rows.
        strategy: all, random, clustered or spectral; weights for the rows of a linear model.
        count: how many questions; not more than there are images. Needed unless strategy is `all`. For `weights`: along
            how many public axes the model looks; None for features as they are.
        seed: public; two parties with the same public images and seed choose the same questions.
        progress: told of the steps of `spectral`, which may take a minute.

    Raises:
        BadData: the features are not quantised public features.
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
        directions = _leading_directions(public_features, count // 4, seed)
        # Loaded where it is wanted: many an embedder never clusters, and starts seconds earlier without.
        from sklearn.cluster import KMeans

        clusters = KMeans(count, n_init=10 if num_images <= 5000 else 2, random_state=seed).fit(directions)
        assignment = clusters.labels_.astype(np.int64)
    features = _centres(public_features, assignment, count)
    return QuerySet(features, np.full(count, -1, dtype=np.int64), assignment, strategy, seed)


def model_rows(dimension: int) -> NDArray[np.int16]:
    """The unit vectors of feature space, then zero: there a linear model's scores are its weights and its intercept.

    Args:
        dimension: of the features.

    Returns:
        int16, shape (dimension + 1, dimension), quantised like shards.
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
        InvalidSetting: the images do not have so many axes.
    """
    rows = public_features.astype(np.float64)
    mean = rows.mean(axis=0)
    rows -= mean
    variances, axes = np.linalg.eigh(rows.T @ rows / len(rows))
    known = int((variances > _LEAST_VARIANCE * max(float(variances[-1]), 1.0)).sum())
    if not 1 <= count <= known:
        raise InvalidSetting(
            f"training.axes asks for {count} axes of the public images, which have {known}; ask for fewer, or submit "
            "more images"
        )
    kept = slice(None, -count - 1, -1)
    lengths = variances[kept] ** (-WHITENING / 2)
    basis = (axes[:, kept] * (lengths / lengths.max())).T
    return np.asarray(np.rint(np.vstack([FEATURE_SCALE * basis, mean])), dtype=np.int16)


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

    reduced = PCA(dimensions, svd_solver="full" if small else "randomized", random_state=seed).fit_transform(unit)
    norms = np.linalg.norm(reduced, axis=1, keepdims=True)
    return cast(NDArray[np.float32], (reduced / np.maximum(norms, np.finfo(np.float32).tiny)).astype(np.float32))


def _along_neighbors(
    features: NDArray[np.int16], count: int, seed: int, progress: Callable[[str, int, int], None] | None
) -> NDArray[np.int64]:
    """Spectral groups of the different images, in the order in which they come; copies are where their image is."""
    from feature_store.spectral_groups import neighbors, spectral_groups

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
