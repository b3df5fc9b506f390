"""What a running federation tells about a job is the same whatever its agents hold, but for what was released.

Two federations answer the same job; in one of them each agent has 20,000 records more, which never are among the
nearest. Every page of the service, the metadata of the labels and the coordinator's log are compared with all that is
random by design put aside: ids, keys, hashes, moments, the released labels and noisy votes, and the counters of polls.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow.parquet as pq
import pytest

from api.client import Client
from api.schema import LabelsRequest, TaskRequest
from feature_store.backbones import load_backbone
from feature_store.shard_writer import ShardWriter
from tests.e2e.service.conftest import Service, running

pytestmark = [pytest.mark.slow, pytest.mark.long]

CLASSES = ("cat", "dog", "eel")
DIMENSION = 64
RANDOM = re.compile(
    r"[0-9a-f]{12,}|\d{4}-\d\d-\d\dT[\d:.]+(?:\+00:00|Z)?|127\.0\.0\.1:\d+|\b(?:job|tok)-[\w-]+", flags=re.IGNORECASE
)
VARYING = {"version", "label", "label_name", "confidence", "noisy_votes"}
"""Of a job how often it was looked at; the released answers, which were paid for, and what is inferred from them."""


def _shard(path: Path, *, far: int, seed: int) -> Path:
    backbone = load_backbone("pixels:8")
    rng = np.random.default_rng(seed)
    labels = np.arange(90) % len(CLASSES)
    near = np.abs(5 + np.random.default_rng(7).normal(size=(len(CLASSES), DIMENSION)))[labels]
    features = np.concatenate([near + 0.1 * rng.normal(size=near.shape), -1 - rng.random((far, DIMENSION))])
    every = np.concatenate([labels, np.arange(far) % len(CLASSES)]).astype(np.int16)
    with ShardWriter(
        path,
        classes=CLASSES,
        fingerprint=backbone.fingerprint,
        dimension=DIMENSION,
        public=False,
        backbone=backbone.spec,
        max_records=100_000,
    ) as writer:
        writer.append(features, every, [f"{number}.png" for number in range(len(every))])
        writer.finish()
    return path


def _same(value: Any) -> Any:
    """A document without what is random by design."""
    if isinstance(value, dict):
        return {RANDOM.sub("*", key): _same(one) for key, one in sorted(value.items()) if key not in VARYING}
    if isinstance(value, list):
        return [_same(one) for one in value]
    return RANDOM.sub("*", value) if isinstance(value, str) else value


def _published(service: Service, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with service.client() as client:
        request = TaskRequest(name="animals", method="knn", k=5, sigma_votes=60.0, delta=1e-5, max_queries=16)
        task = client.create_task(request)
        questions = np.abs(5 + np.random.default_rng(3).normal(size=(16, DIMENSION)))
        asked = LabelsRequest(
            task_id=task.task_id,
            features=questions.tolist(),
            backbone_fingerprint=load_backbone("pixels:8").fingerprint,
            wait_s=60,
        )
        job_id = client.ask(asked).job_id
        job = client.wait(job_id)
        assert job.state == "completed"
        client.labels(job_id, folder / "labels.parquet", of="questions")
        rows = client.labels(job_id, folder / "rows.jsonl", format="jsonl").read_text().splitlines()
        found["rows"] = [_same({**json.loads(row), "created_at": ""}) for row in rows]
        _collect(client, service, job_id, found)
    found["labels"] = {
        name.decode(): _same(json.loads(text)) if text[:1] in b"{[" else _same(text.decode())
        for name, text in (pq.read_schema(folder / "labels.parquet").metadata or {}).items()
    }
    return found


def _collect(client: Client, service: Service, job_id: str, found: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {service.token}"}
    with httpx2.Client(base_url=service.url, headers=headers, timeout=240) as http:
        for page in ("parties", "tasks", "jobs", f"jobs/{job_id}", "ledger?limit=200", "budget", "readiness"):
            answer = http.get(f"/v1/{page}")
            if answer.status_code != 404:
                found[RANDOM.sub("*", page)] = _same(answer.json())
        # Which series there are, and the values of those that follow from jobs: requests and polls go on by themselves.
        series = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        found["budgets"] = sorted((_same(name), value) for name, value in series if name.startswith("labeler_budget"))
        # A slow machine asks for a share again, and the second one may be too late: it is refused, in one run of two.
        found["metrics"] = sorted({name.split("{")[0] for name, _ in series} - {"labeler_messages_refused_total"})
    log = next(iter(sorted(service.home.rglob("coordinator.log"))), None)
    assert log is not None
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    # Requests stand there with their milliseconds, as of any web server: polls, which wait, and posts of sealed bytes.
    told = [{key: one for key, one in line.items() if key not in ("at", "ms")} for line in lines]
    found["log"] = sorted(
        {json.dumps(_same(line), sort_keys=True) for line in told if line.get("message") != "request"}
    )


def test_a_federation_tells_the_same_of_a_job_however_many_records_its_agents_hold(tmp_path: Path) -> None:
    told = []
    for name, far in (("small", 0), ("large", 20_000)):
        folder = tmp_path / name
        folder.mkdir()
        shards = [_shard(folder / f"{number}.shard", far=far, seed=number) for number in range(2)]
        arguments = [part for shard in shards for part in ("--shard", shard)]
        with running(folder / "home", *arguments, agents=2) as service:
            told.append(_published(service, folder))
    small, large = told
    assert small.keys() == large.keys()
    assert {"parties", "jobs", "ledger?limit=200", "budget", "labels", "rows", "log"} <= small.keys()
    for page in small:
        assert small[page] == large[page], page
