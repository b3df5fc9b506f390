"""Models are attacked where their bounds are reached, and the loose part of a bound is measured and said.

Noise is seeded, so nothing here fails by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import labeler.noise
import labeler.release
import workers.learning.linear
from labeler.auditing import promised_mu
from labeler.noise import noise_share
from labeler.task import Task
from tests.workers.audit.conftest import audited_task
from tests.workers.audit.test_audit import findings
from workers.audit.adversaries import ADVERSARIES, STRONGEST, Attack, Surroundings

TRAINING = {"min_records": 50, "regularisation": 0.1}
BOUNDED = TRAINING | {"max_records": 200}


def model_task(**training: object) -> Task:
    return audited_task(method="blind-average", k=1, max_queries=65, sigma_votes=0.6, training=training)


def heads_task(**training: object) -> Task:
    return audited_task(method="aux-distill", k=1, max_queries=200, sigma_votes=0.6, training=training)


REACHED = {
    "softmax, records bounded": (model_task(**BOUNDED), 0.75),
    "svm, records bounded": (model_task(**BOUNDED, learner="svm"), 0.85),
    "svm whose margins never close": (model_task(**TRAINING | {"regularisation": 1.2}, learner="svm"), 0.95),
    "aux-distill, records bounded": (heads_task(**BOUNDED, dimension=32), 0.65),
}
"""How much of the charged mu a canary moves at least."""

LOOSE = {
    "softmax": (model_task(**TRAINING), 0.3, 0.55),
    "aux-distill": (heads_task(**TRAINING, dimension=8), 0.3, 0.5),
}
"""The same where a price covers that one record replaces another, and a canary only comes or goes."""


def strongest(task: Task, around: Callable[..., Surroundings]) -> Attack:
    return ADVERSARIES[STRONGEST].prepare(around(task))


@pytest.mark.parametrize("name", REACHED)
def test_a_canary_moves_a_model_nearly_as_far_as_is_charged_and_no_further(
    name: str, around: Callable[..., Surroundings]
) -> None:
    task, least = REACHED[name]
    moved, promised = strongest(task, around).moved_mu, promised_mu(task, "instance")
    assert moved is not None
    assert least * promised < moved <= promised


@pytest.mark.parametrize("name", LOOSE)
def test_a_bound_that_covers_replacing_is_not_reached_by_who_only_comes_or_goes(
    name: str, around: Callable[..., Surroundings]
) -> None:
    task, least, most = LOOSE[name]
    moved, promised = strongest(task, around).moved_mu, promised_mu(task, "instance")
    assert moved is not None
    assert least * promised < moved < most * promised


@pytest.mark.long
def test_scores_of_soft_labels_are_as_far_apart_as_is_said_and_as_their_noise(
    around: Callable[..., Surroundings],
) -> None:
    """The likelihood ratio of two Gaussians mu apart has means -+mu^2/2 and deviation mu in both worlds."""
    task, _ = REACHED["aux-distill, records bounded"]
    attack = strongest(task, around)
    scores = np.array([[attack.trial(number, present=present) for number in range(24)] for present in (False, True)])
    mu = attack.moved_mu
    assert mu is not None
    # Four standard errors of a mean, and of a deviation; seeded.
    assert scores.mean(axis=1) == pytest.approx([-(mu**2) / 2, mu**2 / 2], abs=4 * mu / np.sqrt(24))
    assert scores.std(axis=1, ddof=1) == pytest.approx([mu, mu], rel=4 / np.sqrt(2 * 23))


SUMS = audited_task(
    method="blind-average", k=1, max_queries=9, sigma_votes=1.0, training={"learner": "means", "axes": 8}
)
"""Class means, whose canary moves exactly what is charged."""


def test_noise_of_weights_that_is_too_little_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the seed, 99 of 100 audits find it."""
    monkeypatch.setattr(labeler.release, "noise_share", lambda *args: noise_share(*args) // 3)
    assert findings(SUMS, tmp_path / "audit", runs=60, confidence=0.9).is_above


@pytest.mark.long
def test_noise_of_heads_that_is_too_little_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the seed, 99 of 100 audits find it."""
    spoken = labeler.noise.VectorSum.contribution

    def quieter(self: labeler.noise.VectorSum, vector: NDArray[np.float64], **given: object) -> NDArray[np.int64]:
        bare = self.quantize(vector)
        return bare + (spoken(self, vector, **given) - bare) // 6

    monkeypatch.setattr(labeler.noise.VectorSum, "contribution", quieter)
    task, _ = REACHED["aux-distill, records bounded"]
    assert findings(task, tmp_path / "audit", runs=40, confidence=0.9).is_above


@pytest.mark.long
@pytest.mark.timeout(900)
def test_colluders_whose_noise_is_counted_as_unknown_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are sized as if all three added noise that nobody knows, where two tell theirs."""
    monkeypatch.setattr(Task, "noise_contributors", property(lambda self: self.agents))
    task = SUMS.model_copy(update={"agents": 3, "colluding_agents": 2})
    assert findings(task, tmp_path / "audit", runs=600).is_above


@pytest.mark.long
def test_a_clip_of_features_that_is_forgotten_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unclipped(features: NDArray[np.float64], terms: workers.learning.linear.LinearTerms) -> NDArray[np.float64]:
        bias = np.full((*features.shape[:-1], 1), terms.bias_feature)
        return np.concatenate([features.astype(np.float64), bias], axis=-1)

    monkeypatch.setattr(workers.learning.linear, "augmented", unclipped)
    task = model_task(**BOUNDED | {"regularisation": 0.03}, learner="svm", clip_norm=0.25)
    found = findings(task, tmp_path / "audit", runs=30, confidence=0.9)
    assert found.is_above
    [one] = found.findings
    assert one.moved_epsilon is not None
    assert one.moved_epsilon > found.promised_epsilon  # it shows without a single noisy run
