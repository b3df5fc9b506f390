"""`labeler evidence` in the homes of a whole federation, as people type it: made, printed, verified, refused."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from feature_store.results.evidence import read_signed, sign_evidence
from labeler.evidence.derive import derive
from labeler.system.keys import PartyKeys
from tests.command_line import Labeler
from tests.e2e.service.conftest import Stopped


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def federation(stopped: Stopped, tmp_path: Path) -> Path:
    """A copy of its homes that a test may harm."""
    wanted = tmp_path / "federation"
    shutil.copytree(stopped.home, wanted, ignore=shutil.ignore_patterns("redis", "logs", "*.sock"))
    return wanted


def key_of(home: Path) -> str:
    return PartyKeys.load(home / "keys.json").public.verify_key


def test_a_coordinators_evidence_is_made_and_holds(federation: Path, labeler: Labeler, tmp_path: Path) -> None:
    home, out = federation / "coordinator", tmp_path / "evidence.json"
    told = labeler("evidence", "--home", home, "--out", out, "--json")
    assert told.code == 0, told.err
    with closing(sqlite3.connect(home / "journal.db")) as journal:
        entries = journal.execute("SELECT count(*) FROM ledger_entries").fetchone()[0]
    assert told.document["entries"] == entries > 12
    page = (tmp_path / "evidence.html").read_text()
    assert "Evidence of privacy" in page
    for arguments in ((), ("--home", home), ("--key", key_of(home))):
        checked = labeler("evidence", "verify", out, *arguments, "--json")
        assert checked.code == 0, checked.out
        assert checked.document["wrong"] == []
    assert len(checked.document["confirmed"]) == 2
    assert "the journal says the same" in labeler("evidence", "verify", out, "--home", home).out


def test_one_task_has_a_document_of_its_own(federation: Path, labeler: Labeler, tmp_path: Path) -> None:
    home, out = federation / "coordinator", tmp_path / "one.json"
    assert labeler("evidence", "--home", home, "--out", out).code == 0
    digest = read_signed(out.read_bytes()).evidence.facts.tasks[0].digest
    assert labeler("evidence", "--home", home, "--task", digest, "--out", out).code == 0
    evidence = read_signed(out.read_bytes()).evidence
    assert [task.digest for task in evidence.facts.tasks] == [digest]
    assert evidence.tasks[0].promised[0].epsilon is not None
    missing = labeler("evidence", "--home", home, "--task", "0" * 64, "--out", tmp_path / "none.json")
    assert missing.code == 1
    assert "there is no task" in missing.err
    assert not (tmp_path / "none.json").exists()


REGISTRY: dict[str, set[str]] = {
    "basic": {"name", "data_curators", "intended_use", "data_product_type", "data_product_region", "description"}
    | {"publication_date"},
    "dp_variant": {"variant_name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {"privacy_unit", "privacy_unit_details", "privacy_parameters", "privacy_parameters_details"},
    "deployment_model": {"model_name", "model_name_details", "actors", "release_type", "release_type_details"}
    | {"access_type", "access_type_details"},
    "accounting": {"post_processing", "composition"},
    "implementation": {"preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"},
    "administrative": {"sources", "notes", "registry_authors"},
}
"""Fields of the registry's schema (opendp/deployments-registry-data, July 2026) that a record fills."""


def test_a_record_for_the_registry_says_what_the_evidence_says_and_names_nobody(
    federation: Path, labeler: Labeler, tmp_path: Path
) -> None:
    home, out = federation / "coordinator", tmp_path / "one.json"
    several = labeler("evidence", "--home", home, "--out", out, "--format", "dp-registry")
    assert several.code == 2
    assert "this evidence is about 2; name one (--task)" in several.err
    digest = read_signed(out.read_bytes()).evidence.facts.tasks[0].digest
    arguments = ("--task", digest, "--out", out, "--format", "dp-registry", "--json")
    told = labeler("evidence", "--home", home, *arguments)
    assert told.code == 0, told.err
    evidence = read_signed(out.read_bytes()).evidence
    text = (tmp_path / "one.yaml").read_text()
    record = yaml.safe_load(text)
    assert record.keys() == {"url_slug", "status", "tier", "deployment"}
    assert (record["status"], record["tier"]) == ("Draft", 3)
    assert {name: set(fields) for name, fields in record["deployment"].items()} == REGISTRY
    said = record["deployment"]
    [found] = evidence.tasks
    promised = {one.unit: one for one in found.promised}
    loss = said["privacy_loss"]["privacy_parameters"]
    assert f"epsilon: {promised['image'].epsilon}\n" in text  # every digit, rounded up
    assert loss == {"epsilon": float(promised["image"].epsilon or "nan"), "delta": 1e-5}
    details = said["privacy_loss"]["privacy_parameters_details"]
    assert all(str(one.epsilon) in details for one in (*found.promised, *found.spent) if one.epsilon is not None)
    assert said["deployment_model"]["model_name"] == "Federated"
    assert said["dp_variant"]["variant_name"] == "Approximate DP"
    assert said["deployment_model"]["release_type"] == "One release"
    assert f"Questions charged: {found.cadence.questions_charged};" in said["administrative"]["notes"]
    assert evidence.facts.journal.head in said["administrative"]["sources"]
    assert said["basic"]["publication_date"] == found.cadence.first_at[:10]
    assert "NIST SP 800-226" in said["administrative"]["notes"]
    named = {*evidence.facts.tasks[0].participants, *(job.job_id for job in evidence.facts.tasks[0].jobs)}
    assert not any(name in text for name in named), "a registry is public"
    # An agent's own evidence is no deployment.
    mine = labeler("evidence", "--home", federation / "agents" / "agent-1", *arguments)
    assert mine.code == 2
    assert "from a coordinator's journal" in mine.err


def test_an_agents_evidence_is_its_own_and_names_nobody_else(
    federation: Path, labeler: Labeler, tmp_path: Path
) -> None:
    home, out = federation / "agents" / "agent-1", tmp_path / "mine.json"
    assert labeler("evidence", "--home", home, "--out", out).code == 0
    data = out.read_bytes()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert b"agent-2" not in data
    with closing(sqlite3.connect(home / "journal.db")) as journal:
        versions = {row[0] for row in journal.execute("SELECT shard_version FROM answered_rounds")}
    assert versions
    assert not any(version.encode() in data for version in versions), "it would tell when records changed"
    evidence = read_signed(data).evidence
    assert "shown to nobody else" in dict(evidence.meaning)["agent"]
    assert sum(found.cadence.rounds_charged for found in evidence.tasks) == 2
    assert all(one.spent_epsilon is not None for one in evidence.accounts if one.level == "instance")
    assert labeler("evidence", "verify", out, "--home", home).code == 0


def test_evidence_of_one_party_does_not_pass_for_anothers(federation: Path, labeler: Labeler, tmp_path: Path) -> None:
    home, out = federation / "coordinator", tmp_path / "evidence.json"
    assert labeler("evidence", "--home", federation / "agents" / "agent-1", "--out", out).code == 0
    checked = labeler("evidence", "verify", out, "--home", home, "--json")
    assert checked.code == 1
    assert any("another key" in line for line in checked.document["wrong"])


def test_a_document_that_was_edited_and_signed_again_is_named_field_by_field(
    federation: Path, labeler: Labeler, tmp_path: Path
) -> None:
    home, out = federation / "coordinator", tmp_path / "evidence.json"
    assert labeler("evidence", "--home", home, "--out", out).code == 0
    evidence = read_signed(out.read_bytes()).evidence
    task = evidence.facts.tasks[0]
    jobs = tuple(job.model_copy(update={"refusals": (), "submitted_at": "", "asked": ()}) for job in task.jobs)
    edited = task.model_copy(update={"jobs": jobs, "participants": ("agent-1",)})
    facts = evidence.facts.model_copy(update={"tasks": (edited, *evidence.facts.tasks[1:])})
    out.write_bytes(sign_evidence(derive(facts, evidence.software), PartyKeys.load(home / "keys.json")).to_bytes())
    checked = labeler("evidence", "verify", out, "--home", home)
    assert checked.code == 1
    for place in ("facts.tasks[0].participants", "facts.tasks[0].jobs[0].submitted_at", "facts.tasks[0].jobs[0].asked"):
        assert f"Does not hold: {place}" in checked.out


def test_an_agents_journal_that_forgot_a_round_gives_no_evidence(
    federation: Path, labeler: Labeler, tmp_path: Path
) -> None:
    home = federation / "agents" / "agent-1"
    with closing(sqlite3.connect(home / "journal.db")) as journal, journal:
        for (name,) in journal.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            journal.execute(f'DROP TRIGGER "{name}"')
        journal.execute("DELETE FROM answered_rounds WHERE ledger_seq = (SELECT max(ledger_seq) FROM answered_rounds)")
    told = labeler("evidence", "--home", home, "--out", tmp_path / "evidence.json")
    assert told.code == 1
    assert "this agent has forgotten" in told.err


def test_a_tallier_has_no_evidence_and_nothing_else_is_taken_for_it(
    federation: Path, labeler: Labeler, tmp_path: Path
) -> None:
    told = labeler("evidence", "--home", federation / "talliers" / "tallier-0", "--out", tmp_path / "evidence.json")
    assert told.code == 2
    assert "a tallier keeps sums but no prices" in told.err
    assert labeler("evidence", "--since", "2027-03-01").code == 2
    assert labeler("evidence", "--home", federation / "coordinator", "--since", "last week").code == 2
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert labeler("evidence", "verify", other).code == 1


@pytest.mark.long
def test_an_audit_of_a_task_goes_into_its_evidence_and_of_another_does_not(
    federation: Path, labeler: Labeler, tmp_path: Path
) -> None:
    home, out = federation / "coordinator", tmp_path / "evidence.json"
    labeler("evidence", "--home", home, "--out", out)
    [task, *_] = json.loads(out.read_text())["evidence"]["facts"]["tasks"]
    (tmp_path / "task.json").write_text(json.dumps(task["task"]))
    asked = ["audit", "--runs", 4, "--adversary", "poisoned-chosen", "--noise-seed", 1]
    assert labeler(*asked, tmp_path / "task.json", "--out", tmp_path / "audit").code == 0
    document = tmp_path / "audit" / "audit.json"
    assert labeler("evidence", "--home", home, "--out", out, "--audit", document).code == 0
    evidence = json.loads(out.read_text())["evidence"]
    assert [one["task"] for one in evidence["audits"]] == [task["digest"]]
    assert labeler("evidence", "verify", out, "--home", home).code == 0
    other = json.loads((tmp_path / "task.json").read_text()) | {"name": "another", "max_queries": 3}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert labeler(*asked, tmp_path / "other.json", "--out", tmp_path / "other").code == 0
    refused = labeler("evidence", "--home", home, "--out", out, "--audit", tmp_path / "other" / "audit.json")
    assert refused.code == 2
    assert "none of those in this evidence" in refused.err
