"""An agent's small network for `ensemble`: one hidden layer on fixed features, on its own or fitted to the questions.

    x  -->  h = max(0, U (x - m) + u)  -->  V h + v        one class: the largest score;  attributes: each above 0.

m is the mean of the agent's records. U has HIDDEN rows. Training takes STEPS steps of Adam, each on BATCH records that
a public seed draws, over all classes of the task. It minimizes the cross-entropy: of a softmax, or of a yes and a no
for each attribute. A class without records is closed, as for a linear head (`workers.learning.linear`).

**Fitted to the questions.** Sites and requesters may have other cameras, and so other features. Two means and two
covariances are then made alike, without a label of a question:

* Questions are moved by their own mean in place of m.
* Let a and b be the hidden vectors of BATCH records and of BATCH questions. E is the mean of |h|^2 over both, held
  fixed. To the loss of a step is added

      s (|mean a - mean b|^2 / 2 E + |cov a - cov b|^2 / 2 E^2).

  It is the loss of Deep CORAL (Sun, Saenko 2016) with the means next to the covariances. s grows from 0 to 1 along the
  schedule of Ganin et al. (2016). Their adversary of the same size labeled 0 to 9 points fewer right on photographs,
  with seed 1000 (`benchmarks.learning.learners`), and was not kept.

**Privacy.** The price does not depend on the model: whatever it says, an agent casts one vote per question, or t for
attributes (`labeler.methods.ensemble.squared`). Questions are public. So fitting to them costs nothing.

**Time tells nothing.** Steps, batches, classes and questions are public. A step works on BATCH records whatever there
are; with few some come often, and with none a row of zeros comes that no class is predicted from. Only reading the
records takes longer for more of them, up to the public cap. Steps do not stop early. A requester chooses questions, so
gradients are made steady (`labeler.steady`), and no branch looks at a number.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from labeler.records import FEATURE_ONE, Rows, block_rows
from labeler.steady import steady
from workers.learning.descent import logistic_slopes, softmax_slopes
from workers.learning.linear import truth_of
from workers.learning.steps import steps

HIDDEN: Final = 64
"""Width of the hidden layer."""

STEPS: Final = 200
"""Steps of every training."""

BATCH: Final = 64
"""Records, and questions, of a step."""

RATE: Final = 4e-3
"""Adam's rate at the start; it falls to zero along a cosine."""

SEED: Final = 20210
"""Public: of the starting weights, and of the places of the records of each step."""

GRID: Final = 2.0**24
"""Weights become integers in this unit."""

_DECAYS: Final = (0.9, 0.99)
_CLOSED: Final = -(2.0**38)
_MOST: Final = 2.0**36

Array = NDArray[np.float64]


def train(
    records: Rows, questions: NDArray[np.int16] | None, *, num_classes: int, is_several: bool = False
) -> NDArray[np.int64]:
    """Train a network as integers: a function of the records, the questions and public constants.

    Args:
        records: finite features and labels, as for `workers.learning.linear.train_head`. All are held in memory.
        questions: to which it is fitted, shape (num_queries, dimension); None: to none.
        num_classes: C, of the task.
        is_several: classes are attributes; labels have shape (n, num_classes).

    Returns:
        Shape (dimension + 1 + num_classes, HIDDEN + 1): the columns of U over u, with a column of zeros at their side.
        Below them lie the rows of V, each with its number of v.
    """
    rows, labels = _held(records, num_classes if is_several else None)
    count, dimension = rows.shape
    rng, scale = np.random.default_rng(SEED), math.sqrt(dimension)
    slopes_of = logistic_slopes if is_several else softmax_slopes
    is_present = truth_of(labels[: records.count], num_classes).any(axis=0)
    closed = np.where(is_present, 0.0, -np.inf)
    own_mean = rows.mean(axis=0, dtype=np.float64)
    asked_mean = own_mean if questions is None else questions.mean(axis=0, dtype=np.float64) / FEATURE_ONE
    weights = [
        rng.normal(size=(dimension, HIDDEN)) * math.sqrt(2 / dimension),
        np.zeros(HIDDEN),
        rng.normal(size=(HIDDEN, num_classes)) * math.sqrt(1 / HIDDEN),
        np.zeros(num_classes),
    ]
    optimizer = _Adam(weights)
    for step in steps(STEPS):
        places = (rng.random((2, BATCH)) * [[count], [1 if questions is None else len(questions)]]).astype(np.int64)
        shown = (rows[places[0]] - own_mean) * scale
        if questions is not None:
            asked = (questions[places[1]] / FEATURE_ONE - asked_mean) * scale
            shown = np.concatenate([shown, asked])
        sums = shown @ weights[0] + weights[1]
        hidden = np.maximum(sums, 0)
        own = hidden[:BATCH]
        slopes = slopes_of(own @ weights[2] + weights[3] + closed, truth_of(labels[places[0]], num_classes)) / BATCH
        back = steady(slopes @ weights[2].T)
        if questions is not None:
            back = np.concatenate([back, np.zeros_like(back)]) + strength_at(step / STEPS) * _apart(hidden)
        back = steady(back * (sums > 0))
        gradients = [shown.T @ back, back.sum(axis=0), own.T @ slopes, slopes.sum(axis=0)]
        optimizer.step([steady(one) for one in gradients], RATE / 2 * (1 + math.cos(math.pi * step / STEPS)))
    first = np.vstack([weights[0] * scale, weights[1] - scale * asked_mean @ weights[0]])
    last = np.column_stack([weights[2].T, np.where(is_present, weights[3], _CLOSED)])
    packed = np.vstack([np.column_stack([first, np.zeros(dimension + 1)]), last])
    return np.asarray(np.rint(np.clip(packed, _CLOSED, _MOST) * GRID), dtype=np.int64)


def scores(network: NDArray[np.int64], questions: Array) -> Array:
    """Return the scores of each class, shape (num_queries, num_classes).

    Args:
        network: of `train`.
        questions: in the unit of stored features, shape (num_queries, dimension).
    """
    first, last = np.split(network / GRID, [questions.shape[1] + 1])
    hidden = np.maximum(questions / FEATURE_ONE @ first[:-1, :-1] + first[-1, :-1], 0)
    return np.asarray(hidden @ last[:, :-1].T + last[:, -1])


def strength_at(progress: float) -> float:
    """Return 2 / (1 + exp(-10 p)) - 1 at the finished share p of training: 0 at first, as features form."""
    return 2 / (1 + math.exp(-10 * progress)) - 1


def _held(records: Rows, attributes: int | None) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return features, shape (max(1, n), dimension), and labels: all records, or one row of zeros of class 0."""
    rows = np.zeros((max(1, records.count), records.dimension), dtype=np.float32)
    labels = np.zeros(len(rows) if attributes is None else (len(rows), attributes), dtype=np.int16)
    done = 0
    for features, own in records.read(block_rows(records.dimension), 0):
        rows[done : done + len(own)], labels[done : done + len(own)] = features, own
        done += len(own)
    return rows, labels


def _apart(hidden: Array) -> Array:
    """Return the slopes of what is added to the loss, by each hidden number; see the module. Shape of `hidden`."""
    length = 1e-6 + np.square(hidden).mean() * HIDDEN
    halves = hidden.reshape(2, BATCH, HIDDEN)
    means = halves.mean(axis=1, keepdims=True)
    around = halves - means
    apart = (around[0].T @ around[0] - around[1].T @ around[1]) / BATCH
    signs = np.array([1.0, -1.0])[:, None, None]
    slopes = signs / BATCH * ((means[0] - means[1]) / length + 2 * (around @ apart) / length**2)
    return np.asarray(slopes.reshape(hidden.shape))


class _Adam:
    """Adam (Kingma, Ba 2015), on arrays that it changes."""

    def __init__(self, weights: list[Array]) -> None:
        self._weights, self._done = weights, 0
        self._moments = [(np.zeros_like(one), np.zeros_like(one)) for one in weights]

    def step(self, gradients: list[Array], rate: float) -> None:
        """Take a step of this rate against these gradients."""
        self._done += 1
        fresh = [1 - decay**self._done for decay in _DECAYS]
        for weight, (first, second), gradient in zip(self._weights, self._moments, gradients, strict=True):
            first += (1 - _DECAYS[0]) * (gradient - first)
            second += (1 - _DECAYS[1]) * (gradient * gradient - second)
            weight -= rate * (first / fresh[0]) / (np.sqrt(second / fresh[1]) + 1e-8)
