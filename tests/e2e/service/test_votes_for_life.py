"""Votes for life among real processes: a job that every image can pay for, and jobs after it that few can."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from api.client import Client
from api.schema import LifeRequest, TaskRequest, TaskView
from labeler.planning import FOR_LIFE
from tests.e2e.conftest import SharedFederations
from tests.e2e.service.conftest import Service, running
from tests.processes import wait_until

QUERIES = 40


@pytest.fixture
def for_life(federations: SharedFederations, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A federation that promises epsilon 5 for life, all of its budget."""
    home = tmp_path_factory.mktemp("life") / "federation"
    return federations.get("for life", lambda: running(home, "--instance-epsilon", 5, "--life-epsilon", 5))


def make_task(client: Client) -> TaskView:
    """A task in which an image has one vote for its whole life."""
    request = TaskRequest(
        name="digits", method="reverse-knn", sigma_votes=1.0, delta=1e-5, max_queries=QUERIES, colluding_agents=1,
        lifetime_budget=LifeRequest(least_similarity=-1.0),
    )  # fmt: skip
    return client.create_task(request)


def released_votes(client: Client, task: TaskView, features: np.ndarray, out: Path) -> float:
    """How many votes a job released, up to noise; it completes."""
    fingerprint = task.task["backbone_fingerprint"]
    job = client.submit(task.task_id, features=features, backbone_fingerprint=fingerprint).job_id
    done = client.wait(job)
    assert done.state == "completed", done
    table = pq.read_table(client.labels(job, out, of="questions"))
    privacy = json.loads(table.schema.metadata[b"privacy"])
    assert FOR_LIFE in privacy["holds_against"]
    assert privacy["instance"]["epsilon"] == task.price.instance_epsilon
    return float(np.sum(table["noisy_votes"].to_pylist()))


@pytest.mark.long
def test_every_image_votes_once_in_its_life_and_jobs_are_answered_on_and_on(
    for_life: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    with for_life.client() as client:
        tasks = [make_task(client) for _ in range(3)]
        # One job that would take all that an image has: sites refuse it before a charge, until they say otherwise.
        fingerprint = tasks[0].task["backbone_fingerprint"]
        sent = client.submit(tasks[0].task_id, features=digit_features[:QUERIES], backbone_fingerprint=fingerprint)
        refused = client.wait(sent.job_id)
        assert refused.state == "refused"
        # The job ends some seconds after the first no, and who says no later is heard all the same.
        wait_until(lambda: len(client.job(sent.job_id).declined) == 3, what="the no of everybody")
        assert all("allow.life_job_share" in why for why in client.job(sent.job_id).declined.values())
        for policy in for_life.home.glob("agents/*/policy.toml"):
            policy.write_text(policy.read_text().replace("life_job_share = 0.25", "life_job_share = 1.0"))
        for task in tasks:
            assert task.price.life is not None
            assert (task.price.life.votes, task.price.instance_charge_nano) == (1, 1)
        before = {one.account: one for one in client.budget().accounts if one.level == "instance"}
        found = [
            released_votes(client, task, digit_features[number * QUERIES :][:QUERIES], tmp_path / f"{number}.parquet")
            for number, task in enumerate(tasks)
        ]
        after = {one.account: one for one in client.budget().accounts if one.level == "instance"}
        budgets = list(client.query_budgets())
    life = tasks[0].price.life
    assert life is not None
    assert {(one.share_kind, one.share_nano, one.charge_nano) for one in budgets[: QUERIES * len(tasks)]} == {
        ("life", life.vote_nano, 1)
    }
    assert {(one.share_nano, one.charge_nano) for one in budgets[QUERIES * len(tasks) :]} == {(0, 0)}, "refused"
    # Standard deviation of a sum: sigma sqrt(3 / 2) sqrt(QUERIES * 10) = 25 votes; the agents hold some 700 images.
    assert found[0] > 500
    assert np.allclose(found[1:], 0, atol=150)
    for account, one in after.items():
        assert one.life_nano == before[account].life_nano > 0
        assert one.posted_nano == before[account].posted_nano + len(tasks)
        assert one.spent_epsilon is not None
        assert one.spent_epsilon <= 5.0
