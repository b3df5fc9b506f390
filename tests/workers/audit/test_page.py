"""The page of an audit says what its document says, escaped, and loads nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tests.workers.audit.conftest import audited_task
from tests.workers.audit.test_audit import audit_of
from workers.audit.run import render_page, run_audit


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
