"""An audit finds a mechanism that is broken, whichever promise it breaks.

Noise is seeded, so nothing here fails by chance; unseeded, a sound pipeline would be called broken with probability at
most what the confidence leaves. Whatever the seed, 99 of 100 audits find too little noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import labeler.methods.knn
import labeler.noise
import labeler.release
import workers.learning.linear
from labeler.methods import METHODS
from labeler.noise import noise_share
from labeler.task import Task
from tests.checks.audit.conftest import audited_task, cap_forgotten, findings
from tests.checks.audit.test_attacks import BALL, BOUNDED, HEADS, MEANS, TASKS, model_task, steps_task

Plant = Callable[[pytest.MonkeyPatch], None]


def noise_over(divisor: int) -> Plant:
    return lambda patch: patch.setattr(labeler.release, "noise_share", lambda *args: noise_share(*args) // divisor)


def noise_of_heads_over_six(patch: pytest.MonkeyPatch) -> None:
    spoken = labeler.noise.VectorSum.contribution

    def quieter(self: labeler.noise.VectorSum, vector: NDArray[np.float64], **given: object) -> NDArray[np.int64]:
        bare = self.quantize(vector)
        return bare + (spoken(self, vector, **given) - bare) // 6

    patch.setattr(labeler.noise.VectorSum, "contribution", quieter)


def colluders_counted_as_unknown(patch: pytest.MonkeyPatch) -> None:
    """Shares are sized as if all three added noise that nobody knows, where two tell theirs."""
    patch.setattr(Task, "noise_contributors", property(lambda self: self.agents))


def cap_per_person_forgotten(patch: pytest.MonkeyPatch) -> None:
    """All records of a person vote where two may: its canary has eight."""
    patch.setattr("workers.voting.first_of_each_person", lambda persons, *_: np.ones(len(persons), bool))


def four_times_as_many_votes(patch: pytest.MonkeyPatch) -> None:
    method = METHODS["reverse-knn"]

    def ballots(task: Task, *given: Any) -> NDArray[np.int64]:
        return method.ballots(task.model_copy(update={"k": 8}), *given)

    patch.setitem(METHODS, "reverse-knn", replace(method, ballots=ballots))


def ball_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(labeler.release, "project", lambda ballots, radius, scale: ballots * scale)  # noqa: ARG005


def clip_of_features_forgotten(patch: pytest.MonkeyPatch) -> None:
    def unclipped(features: NDArray[np.float64], terms: workers.learning.linear.LinearTerms) -> NDArray[np.float64]:
        bias = np.full((*features.shape[:-1], 1), terms.bias_feature)
        return np.concatenate([features.astype(np.float64), bias], axis=-1)

    patch.setattr(workers.learning.linear, "augmented", unclipped)


def attributes_beyond_those_that_may_vote(patch: pytest.MonkeyPatch) -> None:
    """With the check of what leaves an agent forgotten as well: it refuses them."""
    patch.setattr(labeler.release, "check_ballots", lambda *_: None)
    cast = labeler.methods.knn.attribute_ballots
    patch.setattr(labeler.methods.knn, "attribute_ballots", lambda labels, most: cast(labels, most=9 * most))


WINNER = audited_task(release="winner", k=15, agents=3, sigma_votes=6.0, max_queries=72)
"""As many questions as make a winner worth something, votes that one vote decides, and a third class far behind. A
winner tells less of each vote, so its promise is refuted later and with less confidence."""

SUMS = audited_task(method="blind-average", k=1, max_queries=9, sigma_votes=1.0, training=MEANS)
PERSON = audited_task(method="reverse-knn", k=2, sigma_votes=1.4, records_per_person=2)
CLIPPED = model_task(**BOUNDED | {"regularisation": 0.03}, learner="svm", clip_norm=0.25)
ONE_OF_TEN = audited_task(classes=tuple("abcdefghij"), attributes_per_record=1, sigma_votes=4.0)

PLANTED: dict[str, tuple[Plant, Task, dict[str, Any]]] = {
    "a cap that is forgotten": (cap_per_person_forgotten, PERSON, {"runs": 50, "confidence": 0.9, "level": "person"}),
    "a ball that is forgotten": (ball_forgotten, BALL, {"runs": 25, "confidence": 0.9, "level": "agent"}),
}
PLANTED_LONG: dict[str, tuple[Plant, Task, dict[str, Any]]] = {
    # Half the noise of votes is found by `tests/e2e/test_audit.py`, in twenty thousand answers.
    "a third of the noise of weights": (noise_over(3), SUMS, {"runs": 60, "confidence": 0.9}),
    "half the noise of winners": (noise_over(2), WINNER, {"runs": 320, "confidence": 0.9}),
    "a sixth of the noise of heads": (noise_of_heads_over_six, HEADS, {"runs": 40, "confidence": 0.9}),
    "a third of the noise of steps": (noise_over(3), steps_task(1.0), {"runs": 60, "confidence": 0.95}),
    "colluders whose noise is counted as unknown": (
        colluders_counted_as_unknown, SUMS.model_copy(update={"agents": 3, "colluding_agents": 2}), {"runs": 600},
    ),
    "a cap of an account that is forgotten": (cap_forgotten, TASKS["knn"], {"runs": 120}),
    "votes beyond k": (four_times_as_many_votes, TASKS["reverse-knn"], {"runs": 120}),
    "a clip of features that is forgotten": (clip_of_features_forgotten, CLIPPED, {"runs": 30, "confidence": 0.9}),
    "attributes beyond those that may vote": (
        attributes_beyond_those_that_may_vote, ONE_OF_TEN, {"runs": 80, "confidence": 0.9},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PLANTED, *(pytest.param(name, marks=pytest.mark.long) for name in PLANTED_LONG)])
def test_a_defect_that_is_planted_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, task, settings = (PLANTED | PLANTED_LONG)[name]
    plant(monkeypatch)
    found = findings(task, tmp_path / "audit", **settings)
    assert found.is_above
    if plant is clip_of_features_forgotten:
        [one] = found.findings
        assert one.moved_epsilon is not None
        assert one.moved_epsilon > found.promised_epsilon  # it shows without a single noisy run
