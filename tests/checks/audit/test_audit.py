"""`labeler audit` goes on where it was stopped, and leaves alone what is not its own; its page says what it found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import checks.audit.adversaries
from checks.audit.adversaries import ADVERSARIES
from checks.audit.run import ONE_RUN, default_adversaries, render_page, run_audit, shard_pool
from labeler.auditing import read_audit
from labeler.errors import BadData, PrivacyRefusal
from labeler.records import FEATURE_ONE
from tests.checks.audit.conftest import audit_of, audited_task, findings, natural_records
from tests.workers.builders import shard_of_rows


def test_one_run_with_many_canaries_proves_something_and_nothing_too_much(tmp_path: Path) -> None:
    task = audited_task(method="reverse-knn", k=1, sigma_votes=0.5, max_queries=200)
    document = run_audit(audit_of(task, adversaries=(ONE_RUN,), confidence=0.95), tmp_path / "audit")
    [attempt], [found] = document["facts"]["attempts"], document["findings"]["findings"]
    assert attempt["canaries"] == attempt["absent"] + attempt["present"] == 200
    promised = document["findings"]["promised_epsilon"]
    assert 0.4 * promised < found["epsilon"] <= promised
    assert 0 < found["any_epsilon"] < found["epsilon"]


@pytest.mark.long
def test_an_audit_goes_on_where_it_was_stopped_and_comes_to_the_same(tmp_path: Path) -> None:
    task = audited_task()
    whole = run_audit(audit_of(task, runs=12), tmp_path / "whole")
    run_audit(audit_of(task, runs=4), tmp_path / "parts")
    runs = tmp_path / "parts" / "runs.jsonl"
    runs.write_text(runs.read_text() + '{"adversary": "poiso')  # cut off by a crash
    asked: list[int] = []
    parts = run_audit(audit_of(task, runs=12), tmp_path / "parts", progress=lambda _, done, __: asked.append(done))
    assert parts["facts"] == whole["facts"]
    assert asked == list(range(4, 13))
    with pytest.raises(BadData, match="another audit"):
        run_audit(audit_of(audited_task(method="reverse-knn", k=2), runs=4), tmp_path / "parts")


def test_an_adversary_that_was_added_is_a_row_of_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Perfect:
        moved_mu = None

        def trial(self, number: int, *, present: bool) -> float:  # noqa: ARG002  # as every attack
            return 1.0 if present else -1.0

    own = checks.audit.adversaries.Adversary("perfect", "knows", lambda _: Perfect())
    monkeypatch.setitem(ADVERSARIES, "perfect", own)
    assert "perfect" in default_adversaries(audited_task())
    found = findings(audited_task(), tmp_path / "audit", runs=200, adversaries=("perfect",))
    assert found.is_above


def test_counts_of_private_records_go_into_no_document_that_leaves(tmp_path: Path) -> None:
    task = audited_task()
    private = run_audit(audit_of(task, runs=2), tmp_path / "private")
    public = run_audit(audit_of(task, runs=2, is_private=False), tmp_path / "public")
    assert read_audit((tmp_path / "public" / "audit.json").read_bytes()).task_digest == task.digest
    assert "keep this folder at the site" in render_page(private)
    assert "keep this folder at the site" not in render_page(public)
    unmarked = {name: value for name, value in public.items() if name != "private"}
    for document in (private, unmarked, public | {"private": 0}, public | {"private": None}):
        with pytest.raises(PrivacyRefusal, match="stay at the site"):
            read_audit(json.dumps(document).encode())
    # What private records gave is not called public by going on with public ones, nor mixed with others'.
    with pytest.raises(BadData, match="another audit"):
        run_audit(audit_of(task, runs=2, is_private=False), tmp_path / "private")
    mixed = audit_of(task, runs=2)
    with pytest.raises(BadData, match="another audit"):
        run_audit(dataclasses.replace(mixed, labels=mixed.labels[::-1].copy()), tmp_path / "private")


@pytest.mark.parametrize("is_public", [False, True])
def test_a_pool_knows_whether_its_shard_is_private(is_public: bool, tmp_path: Path) -> None:
    features, labels = natural_records()
    shard = shard_of_rows(tmp_path / "a.shard", features / FEATURE_ONE, labels, public=is_public)
    assert shard_pool(shard, seed=0).is_private is not is_public


def test_an_audit_writes_into_no_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadData, match="holds no audit of ours"):
        run_audit(audit_of(audited_task()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["no JSON\n", "{identity}\n{}\n", "{identity}\n7\n", "[" * 100_000 + "\n", "\xff"])
def test_runs_that_are_damaged_are_refused_and_left_as_they_are(tmp_path: Path, text: str) -> None:
    audit = audit_of(audited_task())
    damaged = text.replace("{identity}", json.dumps(audit.identity)).encode("latin-1")
    (tmp_path / "runs.jsonl").write_bytes(damaged)
    with pytest.raises(BadData, match=r"damaged|another audit"):
        run_audit(audit, tmp_path)
    assert (tmp_path / "runs.jsonl").read_bytes() == damaged


def test_the_page_shows_every_finding_and_the_promise_and_escapes_names(tmp_path: Path) -> None:
    task = audited_task(name="<b>name</b>")
    document = run_audit(audit_of(task, runs=4, adversaries=("poisoned", "poisoned-chosen")), tmp_path / "audit")
    page = render_page(document)
    assert "&lt;b&gt;name" in page
    assert "<b>" not in page
    assert "default-src 'none'" in page
    for found in document["findings"]["findings"]:
        assert page.count(f"<strong>{found['adversary']}</strong>") == 1
        assert f"{found['epsilon']:.3f}" in page
    assert f"{document['findings']['promised_epsilon']:.3f}" in page
    assert "Nothing contradicts the promise" in page
    assert not any(word in page for word in ("http://", "https://", "<script", "url("))


def test_a_promise_that_is_refuted_is_the_first_thing_said(tmp_path: Path) -> None:
    document = run_audit(audit_of(audited_task(), runs=4), tmp_path / "audit")
    broken = json.loads(json.dumps(document))
    broken["findings"]["is_above"] = broken["findings"]["findings"][0]["is_above"] = True
    assert "The promise is broken: poisoned-chosen" in render_page(broken)
