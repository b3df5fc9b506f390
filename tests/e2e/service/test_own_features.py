"""Own features among real processes: a probe finds the site with another backbone before anything is paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import labeler
from api.client import Client, ServiceProblem
from api.schema import TaskRequest
from feature_store.shard import Shard
from labeler.errors import InvalidSetting
from tests.e2e.service.conftest import running
from tests.feature_store.test_own_features import CLASSES, DECLARED, PROBE, rows


def _task(client: Client, *agents: str) -> str:
    fields = {"name": "letters", "method": "reverse-knn", "epsilon": 5.0, "delta": 1e-5, "max_queries": 40}
    return client.create_task(TaskRequest.model_validate(fields | {"agents": agents})).task_id


@pytest.mark.long
def test_a_site_with_another_backbone_is_named_and_the_others_label_what_a_requester_brings(tmp_path: Path) -> None:
    made = []
    for seed, name in enumerate(("site-a", "site-b", "odd", "public")):
        own: dict[str, Any] = {} if name == "public" else {"max_records": 1000}
        made.append(
            labeler.embed(
                features=rows(40 if name == "public" else 300, seed=seed),
                labels=[CLASSES[row % 2] for row in range(40 if name == "public" else 300)],
                classes=CLASSES,
                out=tmp_path / f"{name}.shard",
                probe=PROBE[:, ::-1] if name == "odd" else PROBE,
                public=name == "public",
                **DECLARED,
                **own,
            )
        )
    *sites, public = made
    arguments = [part for site in sites for part in ("--shard", site.path)]
    with (
        running(tmp_path / "federation", *arguments, "--instance-epsilon", "unlimited") as service,
        service.client() as client,
    ):
        everybody, two = _task(client, "agent-1", "agent-2", "agent-3"), _task(client, "agent-1", "agent-2")
        before = client.budget()
        with pytest.raises(ServiceProblem, match="agent 'agent-3' embedded the probe otherwise than"):
            client.submit(everybody, images=public.path)
        shard = Shard.open(public.path)
        vectors, prints = shard.features, shard.fingerprint
        with pytest.raises(ServiceProblem, match="the request embedded no probe"):
            client.submit(two, features=vectors, backbone_fingerprint=prints)
        with pytest.raises(InvalidSetting, match="private shard"):
            client.submit(two, images=sites[0].path)
        assert client.budget() == before
        job = client.wait(client.submit(two, images=public.path).job_id)
        assert job.state == "completed", job
        found = pq.read_table(client.labels(job.job_id, tmp_path / "labels.parquet"))
        # The student's evaluation sends no feature; the sites' probes are compared with one another.
        evaluated = client.wait(client.evaluate(job.job_id, epsilon=5.0, records=600).job_id)
        assert evaluated.state == "completed", evaluated
    assert found["source"].to_pylist() == shard.sources
    right = [label == number % 2 for number, label in enumerate(found["label"].to_pylist())]
    assert sum(right) > 30
