"""Linear discriminants from noisy counts, with the covariance of the public images, shrunk exactly as noise asks for.

Where there are many records, or classes overlap so that no grouping of the public images tells them apart, the class
means hold more than components do. On the leading principal axes j of the public images (rows z of unit length, centred
again), with z_q the mean of the images that question q stands for and M_c the votes of class c,

    u_cj = sum_q n_qc z_qj      is M_c m_cj, m_c the mean of class c, and noise of variance

    v_j = sigma^2 sum_q z_qj^2,     known exactly.

What varies between classes on axis j beyond that is signal,

    t_j = max(0, sum_c (u_cj^2 - v_j)) / sum_c M_c^2      for the mean square of m_cj,

and the best linear guess of m_cj (Wiener) is u_cj / M_c times t_j M_c^2 / (t_j M_c^2 + v_j): axes that are noise only
drop out, all of them stay where there is none, and **a class of few votes falls back to the mean of all images**,
alone: it takes no axis from the others. Then, S the covariance of the public images with a ridge, classes alike
beforehand,

    weight_c = S^-1 m_c,      bias_c = -<m_c, weight_c> / 2,

so a class that noise has drowned gets what the others do not claim.

M_c is known with noise as well. Beforehand the classes' votes vary as much as the released sums do beyond their noise;
M_c is the mean afterwards, of a normal law cut off at zero: equal for all where sums differ by no more than noise, the
sum itself where noise is small, and never zero or less.

S is public, so it is exact and free: least squares with a private covariance would pay for it. Post-processing of the
release throughout.

References:
    Wiener 1949; Fisher 1936; Mehta et al. 2023, "Large scale transfer learning for differentially private image
    classification" (least squares whose covariance is private).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from feature_store.students.answers import NoisyAnswers
from feature_store.students.centred import group_means, noise_of_counts, released_counts
from feature_store.students.linear_probe import LinearProbe
from feature_store.students.projection import fit_projection

AXES: Final = 128
RIDGE: Final = 0.1
"""Added to the covariance, as a share of its mean eigenvalue."""

_LEAST = 1e-12


class DiscriminantLearner:
    """Learns a `LinearProbe` from a release; see the module.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: for the projection.
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=max(AXES, min(4 * num_classes, 512)), seed=seed)
        rows = self._projection(public_features)
        self._mean = rows.mean(axis=0)
        self._rows = rows - self._mean
        covariance = self._rows.T @ self._rows / len(rows)
        self._covariance = covariance + (RIDGE * np.trace(covariance) / len(covariance) + _LEAST) * np.eye(
            len(covariance)
        )

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> LinearProbe:
        """Fit to a release.

        Args:
            answers: the release; of winners each counts as one vote.
            assignment: shape (num_images,), the answer that stands for each public image.
        """
        counts = released_counts(answers)
        supported = (counts != 0).any(axis=0)
        supported |= not supported.any()  # where nothing speaks for any, nothing speaks against any either
        centres = group_means(self._rows, assignment, len(counts))
        variance = noise_of_counts(answers) ** 2
        votes = np.ones(answers.num_classes)
        votes[supported] = votes_of_classes(counts[:, supported], variance * int(answers.answered.sum()))
        sums = counts.T @ centres
        noise = variance * (centres[answers.answered] ** 2).sum(axis=0)
        between = np.maximum((sums[supported] ** 2 - noise).sum(axis=0), 0.0) / (votes[supported] ** 2).sum()
        signal = between * votes[:, None] ** 2
        means = sums / votes[:, None] * signal / np.maximum(signal + noise, _LEAST)
        weights = np.linalg.solve(self._covariance, means.T).T
        biases = -0.5 * np.einsum("cd,cd->c", weights, means) - weights @ self._mean
        return LinearProbe(self._projection, weights, np.where(supported, biases, -np.inf))


def votes_of_classes(counts: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Votes of each class, more than zero, as far as noise lets them differ; see the module.

    Args:
        counts: shape (num_queries, classes).
        noise: variance of the noise in one column's sum.
    """
    sums = counts.sum(axis=0)
    mean = max(float(sums.mean()), float(np.sqrt(noise)), _LEAST)
    between = max(float(((sums - mean) ** 2).mean()) - noise, 0.0)
    kept = between / max(between + noise, _LEAST)
    expected = mean + kept * (sums - mean)
    spread = float(np.sqrt(kept * noise))
    if spread > _LEAST:
        apart = expected / spread
        # The mean of a normal law above zero: phi / Phi, in logarithms since both vanish far below.
        expected = expected + spread * np.exp(-0.5 * apart**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(apart))
    votes: NDArray[np.float64] = np.maximum(expected, _LEAST)
    return votes
