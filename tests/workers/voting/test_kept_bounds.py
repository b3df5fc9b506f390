"""A public bound on records: declared when images are embedded, kept by the import, and asked for by tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feature_store.query_selection import model_rows
from feature_store.shard import MANIFEST_NAME, Manifest, Shard
from feature_store.shard_writer import ShardWriter
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.workers.builders import agent_of, shard_of_rows
from workers.embedder.shards import embed_images

DIMENSION, CLASSES = 4, ("ill", "well")


def _shard(path: Path, count: int, *, max_records: int | None = None) -> Shard:
    random = np.random.default_rng(1)
    features, labels = random.normal(size=(50, DIMENSION))[:count], (np.arange(count) % 2).astype(np.int16)
    return shard_of_rows(path, features, labels, classes=CLASSES, max_records=max_records)


def _task(method: str = "blind-average", **changes: Any) -> Task:
    training = {"min_records": 20, "max_records": 40, "regularisation": 0.5, "dimension": 2}
    queries = DIMENSION + 1 if method == "blind-average" else 15
    fields = {"classes": CLASSES, "max_queries": queries, "backbone_fingerprint": "f", "training": training}
    return make_task(method=method, agents=1, **fields | changes)


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    rng = np.random.default_rng(8)
    for label in CLASSES:
        (tmp_path / "scans" / label).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / label / f"{number}.png")
    return tmp_path / "scans"


def test_an_import_beyond_the_declared_bound_is_refused_and_a_larger_one_embeds_nothing_anew(
    scans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.shard"
    with pytest.raises(InvalidSetting, match="at most 5") as refusal:
        embed_images(scans, "pixels:4", out, classes=CLASSES, max_records=5)
    assert "--max-records" in str(refusal.value)
    assert not out.exists()
    result = embed_images(scans, "pixels:4", out, classes=CLASSES, max_records=6)
    assert (result["records"], result["resumed_from"]) == (6, 6)
    assert Shard.open(out).max_records == 6
    again = embed_images(scans, "pixels:4", out, classes=CLASSES, max_records=6)
    assert again["records"] == 6
    with pytest.raises(InvalidSetting, match="not declared to hold at most 7"):
        embed_images(scans, "pixels:4", out, classes=CLASSES, max_records=7)


def test_a_manifest_that_breaks_its_own_bound_is_no_manifest(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "a", 6, max_records=6)
    fields = json.loads((shard.path / MANIFEST_NAME).read_text())
    del fields["sha256"]
    with pytest.raises(ValueError, match="bound on records"):
        Manifest.model_validate(fields | {"max_records": 5})
    with pytest.raises(InvalidSetting, match="private shard"):
        ShardWriter(tmp_path / "b", classes=(), fingerprint="f", dimension=4, public=True, max_records=5)


def test_a_deletion_keeps_the_bound(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "a", 6, max_records=9)
    shard.delete(shard.record_ids[:2].copy())
    assert Shard.open(tmp_path / "a").max_records == 9
    assert _shard(tmp_path / "b", 6).max_records is None


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
@pytest.mark.parametrize("declared", [None, 41, 100])
def test_an_agent_whose_site_keeps_no_such_bound_refuses_before_it_is_charged(
    tmp_path: Path, method: str, declared: int | None
) -> None:
    """Whatever the shard holds: in the same words with one record and with many."""
    said = set()
    for count in (1, 30):
        agent = agent_of(_shard(tmp_path / str(count), count, max_records=declared))
        task = _task(method)
        with pytest.raises(PrivacyRefusal, match="at most 40 records") as refusal:
            agent.check_task(task, (task.max_queries,))
        said.add(str(refusal.value))
    assert len(said) == 1
    assert ("declares no bound" if declared is None else f"keeps {declared}") in said.pop()


@pytest.mark.parametrize("declared", [25, 40])
def test_an_agent_whose_site_keeps_the_bound_answers(tmp_path: Path, declared: int) -> None:
    agent = agent_of(_shard(tmp_path / "a", 25, max_records=declared))
    agent.check(_task(), QueryBatch(model_rows(DIMENSION)))
    assert agent.ballots(_task(), QueryBatch(model_rows(DIMENSION))).any()


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
def test_a_shard_that_was_embedded_anew_without_the_bound_answers_nothing_that_was_charged_before(
    tmp_path: Path, method: str
) -> None:
    """Charged, then killed, and started again over another shard: a cut at 40 of 50 would let one record replace
    another, at half the noise that this needs.
    """
    task = _task(method)
    batch = QueryBatch(_shard(tmp_path / "asked", task.max_queries, max_records=40).features[:].copy())
    agent = agent_of(_shard(tmp_path / "anew", 50))
    with pytest.raises(PrivacyRefusal, match="at most 40 records"):
        agent.computed(task, batch, key=b"k" * 32, seal=lambda _, body: body)


def test_a_cap_per_person_needs_no_bound_since_it_is_priced_without_one(tmp_path: Path) -> None:
    task = _task(records_per_person=2)
    agent = agent_of(_shard(tmp_path / "a", 30))
    with pytest.raises(PrivacyRefusal, match="whose records it holds"):
        agent.check_task(task, (task.max_queries,))
