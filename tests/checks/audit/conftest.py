"""Small tasks, and natural records without a meaning, for audits that take seconds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from checks.audit.adversaries import STRONGEST, Surroundings
from checks.audit.run import Audit, run_audit
from feature_store.rows import quantize
from labeler.auditing import AuditFacts, AuditFindings, findings_of
from labeler.ledger.ledger import Ledger
from labeler.task import Level, Task
from tests.labeler.tasks import make_task

audited_task = partial(
    make_task, name="audit", k=3, sigma_votes=2.0, max_queries=8, agents=2, colluding_agents=1,
    backbone_fingerprint="audit",
)  # fmt: skip


def natural_records(count: int = 120, dimension: int = 64) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    rng = np.random.default_rng(5)
    return quantize(rng.normal(size=(count, dimension))), rng.integers(0, 3, count).astype(np.int16)


def audit_of(task: Task, *, runs: int = 100, adversaries: tuple[str, ...] = (STRONGEST,), **changes: object) -> Audit:
    features, labels = natural_records()
    return Audit(task, adversaries, runs, noise_seed=1, features=features, labels=labels, **changes)


def findings(task: Task, folder: Path, **changes: object) -> AuditFindings:
    document = run_audit(audit_of(task, **changes), folder)
    return findings_of(AuditFacts.model_validate_json(json.dumps(document["facts"])))


def cap_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An account is opened without its cap: so five lives are answered, which are worth sqrt(5) mu."""
    opened = Ledger.open_account

    def without_cap(self: Ledger, name: str, level: Level, cap: int | None, **more: Any) -> object:
        return opened(self, name, level, None, **more)

    patch.setattr(Ledger, "open_account", without_cap)


@pytest.fixture
def around(tmp_path: Path):
    """Makes surroundings of a task, seeded."""

    def make(task: Task, **changes: object) -> Surroundings:
        features, labels = natural_records()
        fields = {
            "task": task, "level": "instance", "features": features, "labels": labels, "view": "release",
            "folder": tmp_path / f"scene-{len(list(tmp_path.iterdir()))}", "seed": 0, "noise_seed": 1,
        }  # fmt: skip
        fields |= changes
        fields["folder"].mkdir(parents=True)
        return Surroundings(**fields)

    return make
