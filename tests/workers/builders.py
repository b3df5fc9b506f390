"""Builders for tests of parties: a policy, a shard of given rows, its agent, a process that dies at a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from tests.answering import AnsweringAgent
from workers.agent.policy import Policy


def policy_of(
    *,
    budget: Mapping[str, object] | None = None,
    talliers: Mapping[str, str] | None = None,
    verify_key: str = "0" * 64,
    **allow: object,
) -> Policy:
    """A policy that limits nothing but a day's thousand queries, unless told otherwise."""
    allowed = {
        "backbones": ["backbone"], "tasks": "any", "methods": ["knn", "reverse-knn"], "max_queries_per_day": 1000,
        "releases": ["histogram"], "max_noise_contributors": 3, "approval": False,
    }  # fmt: skip
    limits = {"instance_epsilon": "unlimited", "agent_epsilon": "unlimited", "delta": 1e-5}
    return Policy.model_validate(
        {
            "budget": limits | dict(budget or {}),
            "allow": allowed | allow,
            "talliers": dict(talliers or {}),
            "coordinator": {"verify_key": verify_key},
        }
    )


def shard_of_rows(
    path: Path,
    features: np.ndarray,
    labels: np.ndarray | None = None,
    *,
    classes: tuple[str, ...] = ("a", "b", "c"),
    fingerprint: str = "f",
    public: bool = False,
    names: Sequence[str] | None = None,
    persons: np.ndarray | None = None,
    image_digests: np.ndarray | None = None,
    **options: Any,
) -> Shard:
    """A shard of these rows, 0.png and so on: private, but public where that is said or they have no labels."""
    with ShardWriter(
        path, classes=() if labels is None else classes, fingerprint=fingerprint, dimension=features.shape[1],
        public=public or labels is None, **options,
    ) as writer:  # fmt: skip
        names = names or [f"{row}.png" for row in range(len(features))]
        told = np.full(len(features), -1, np.int16) if labels is None else labels
        writer.append(features, told, names, persons=persons, image_digests=image_digests)
        writer.finish()
    return Shard.open(path)


def agent_of(shard: Shard) -> AnsweringAgent:
    """An agent with a known secret."""
    return AnsweringAgent("a", shard, noise_secret=b"s" * 32, is_seeded=True, engine="numpy")


def killed_at(point: str, fault: Path, code: str, *arguments: object) -> None:
    """Run code as a separate process, which ends itself by SIGKILL where it comes to that step.

    Args:
        fault: a file to name the step in.
        code: with sys, threading and Path.
    """
    fault.write_text(point)
    died = subprocess.run(
        [sys.executable, "-c", f"import sys, threading; from pathlib import Path; {code}", *map(str, arguments)],
        env=os.environ | {"LABELER_FAULTS": str(fault)},
        cwd=Path(__file__).parents[2],
        timeout=200,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
