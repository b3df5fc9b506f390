"""A linear head per attribute, read off noisy votes; and what it says of every public image.

Of attribute a, question q was answered with n_qa, the number of its M = k N nearest records that have the attribute,
and noise of a known sigma. So y_qa = n_qa / M is the **share** of them. It estimates the probability that an image
there has the attribute (nearest-neighbor regression), with noise of standard deviation s = sigma / M. Shares follow
the public features along their leading axes z, and beyond those vary from question to question. This is Bayesian
linear regression whose noise is known:

    y_qa = 1/2 + <w_a, (1, z_q)> + r_qa + noise,    w_a ~ N(0, alpha_a I),    r_qa ~ N(0, rho_a),    noise ~ N(0, s^2).



The values alpha_a and rho_a maximize the likelihood of the released numbers
themselves (empirical Bayes, over a grid), and the weights are their posterior means. An image that was asked about is
read together with its own answer: what is left of it there counts rho / (rho + s^2). The result, cut to 0 to 1, is the
probability that the attribute holds; it does where that is at least one half, the majority of its neighbors.

One decomposition serves all attributes. Everything but n is public and n is released: post-processing, at no price.
Attributes need no prior of being frequent: a rare one has small shares everywhere, and so it is read.

References:
    MacKay 1992, "Bayesian interpolation" (evidence); Stone 1977 (nearest-neighbour regression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import Forms, Projection, fit_projection, most_axes
from labeler.errors import BadData
from labeler.task import Task

_SLOPES: Final = np.geomspace(1e-4, 1e2, 13)
_RESTS: Final = np.concatenate([[0.0], np.geomspace(1e-4, 0.25, 8)])
_LEAST_NOISE: Final = 1e-6


@dataclass(frozen=True, eq=False)
class AttributeHeads:
    """P(attribute a | x) = 1/2 + <weight_a, project(x)> + bias_a, cut to 0 to 1.

    Attributes:
        projection: fitted on public features.
        weights: float64, shape (num_attributes, reduced).
        biases: float64, shape (num_attributes,).
    """

    kind: ClassVar[str] = "attributes"
    FORMS: ClassVar[Forms] = {
        "mean": (np.float64, ("dimension",)),
        "components": (np.float64, ("dimension", "reduced")),
        "model_weights": (np.float64, ("classes", "reduced")),
        "model_biases": (np.float64, ("classes",)),
    }

    projection: Projection
    weights: NDArray[np.float64]
    biases: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Return the probability of each attribute, shape (n, num_attributes); any number of them may hold."""
        return np.asarray(np.clip(0.5 + self.projection(features) @ self.weights.T + self.biases, 0.0, 1.0))

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All numbers of the student, by name."""
        return {
            "mean": self.projection.mean,
            "components": self.projection.components,
            "model_weights": self.weights,
            "model_biases": self.biases,
        }

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> AttributeHeads:
        """The student of what `arrays` gave.

        Raises:
            KeyError: it is none.
        """
        axes = Projection(arrays["mean"], arrays["components"])
        return cls(axes, arrays["model_weights"], arrays["model_biases"])


@dataclass(frozen=True, eq=False)
class LabeledAttributes:
    """The attributes of every public image, given a release.

    Attributes:
        student: which learnt from it.
        probabilities: float64, shape (num_images, num_attributes), each from 0 to 1; of what holds at least ON.
        asked: shape (num_images,), which images were questions themselves.
    """

    student: AttributeHeads
    probabilities: NDArray[np.float64]
    asked: NDArray[np.bool_]


def label_attributes(
    noisy_votes: NDArray[np.float64],
    questions: NDArray[np.generic],
    public_features: NDArray[np.generic],
    *,
    most_votes: int,
    sigma: float,
    rows: NDArray[np.int64],
    seed: int = 0,
) -> LabeledAttributes:
    """Read the votes, and label every public image.

    Args:
        noisy_votes: the release, in votes, shape (num_questions, num_attributes).
        questions: features of what was asked, shape (num_questions, dimension).
        public_features: shape (num_images, dimension).
        most_votes: M: neighbors of all agents that voted at a question.
        sigma: of the noise in a sum, votes.
        rows: shape (num_questions,), the image that each question is, or -1 for the center of a cluster.
        seed: of the public axes.

    Raises:
        BadData: shapes do not fit, or a number is not finite.
    """
    if noisy_votes.shape[:1] != (len(questions),) or rows.shape != (len(questions),):
        raise BadData(f"{len(questions)} questions go with votes of shape {noisy_votes.shape}; the release is damaged")
    if not np.isfinite(noisy_votes).all():
        raise BadData("noisy votes hold NaN or infinity; the release is damaged, export it again")
    axes = fit_projection(public_features, dimensions=most_axes(noisy_votes.shape[1]), seed=seed)
    shares, noise = noisy_votes / most_votes, max((sigma / most_votes) ** 2, _LEAST_NOISE)
    student, rests = _fit(axes, axes(questions), shares, noise)
    probabilities = student.predict_proba(public_features)
    asked = np.zeros(len(public_features), dtype=np.bool_)
    own = np.flatnonzero(rows >= 0)
    asked[rows[own]] = True
    said = probabilities[rows[own]]
    probabilities[rows[own]] = np.clip(said + rests / (rests + noise) * (shares[own] - said), 0.0, 1.0)
    return LabeledAttributes(student, probabilities, asked)


def attributes_of(
    task: Task,
    noisy_votes: NDArray[np.float64] | Sequence[Sequence[float]],
    contributors: NDArray[np.integer],
    questions: NDArray[np.generic],
    public_features: NDArray[np.generic],
    *,
    rows: NDArray[np.int64],
    seed: int = 0,
) -> LabeledAttributes:
    """Read the releases of a task: of agents that did not answer, neither votes nor noise are in a sum.

    Args:
        task: about attributes.
        noisy_votes: shape (num_questions, num_attributes), in votes.
        contributors: shape (num_questions,), of how many agents each question's sum was opened; 0: of none.
        questions, public_features, rows, seed: see `label_attributes`.

    Raises:
        BadData: no question was answered, or shapes do not fit.
    """
    votes = np.asarray(noisy_votes, dtype=np.float64)
    if contributors.shape != (len(questions),) or len(votes) != len(questions) or not contributors.any():
        raise BadData(
            "no question was answered, so there is nothing to learn from; see the job's report for the reason"
        )
    most, answered = int(contributors.max()), contributors > 0
    shares = votes[answered] * (most / contributors[answered])[:, None]
    return label_attributes(
        shares,
        questions[answered],
        public_features,
        most_votes=task.k * most,
        # Where fewer answered the noise is a little more than this, as part of the whole.
        sigma=task.sum_sigma_votes(most),
        rows=rows[answered],
        seed=seed,
    )


def _fit(
    axes: Projection, along: NDArray[np.float64], shares: NDArray[np.float64], noise: float
) -> tuple[AttributeHeads, NDArray[np.float64]]:
    """The heads, and rho of each attribute.

    Let X be the rows (1, z) = U diag(d) V^T, and v = rho + s^2 all variance except that of the slopes. The released
    numbers have variance alpha d^2 + v along each column of U and v across all of them.
    """
    rows = np.column_stack([np.ones(len(along)), along])
    left, scales, right = np.linalg.svd(rows, full_matrices=False)
    centred = shares - 0.5
    inside = left.T @ centred
    outside = np.maximum((centred**2).sum(axis=0) - (inside**2).sum(axis=0), 0.0)
    best = np.full(shares.shape[1], -np.inf)
    slopes, rests = np.zeros_like(best), np.zeros_like(best)
    for slope in _SLOPES:
        for rest in _RESTS:
            across = rest + noise
            within = slope * scales**2 + across
            evidence = -np.log(within).sum() - (len(rows) - len(scales)) * np.log(across)
            fits = evidence - (inside**2 / within[:, None]).sum(axis=0) - outside / across
            better = fits > best
            best, slopes, rests = (
                np.where(better, fits, best),
                np.where(better, slope, slopes),
                np.where(better, rest, rests),
            )
    ridge = (rests + noise) / slopes
    weights = (right.T @ (scales[:, None] / (scales[:, None] ** 2 + ridge) * inside)).T
    return AttributeHeads(axes, np.ascontiguousarray(weights[:, 1:]), np.ascontiguousarray(weights[:, 0])), rests
