"""What a site refuses without asking a person is kept once, within bounds, charges nothing, and is told everywhere."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from feature_store.results.evidence import render_page
from labeler.ledger import promises
from labeler.ledger.database import Database, insert_rows, open_database
from labeler.ledger.evidence import EvidenceScope
from labeler.ledger.promises import (
    MAX_REFUSALS_OF_ONE,
    MAX_REFUSALS_PER_DAY,
    SiteRefusal,
    note_refusal,
    refused_by_site,
)
from labeler.ledger.schema import site_refusals
from labeler.messages.bodies import Proposal
from tests.command_line import Labeler
from tests.full_disk import no_room
from tests.workers.agent_site import NOW, Site
from workers.agent.policy import BudgetTable, policy_toml
from workers.agent.site import SiteConsole, answered_rounds
from workers.homes.evidence import check_evidence, make_evidence

REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str]] = {
    "policy": ({}, {"releases": ["winner"]}, {}, "allow.releases", "policy-refusal"),
    "budget of an image": ({}, {}, {"sigma_votes": 0.5}, "the site's budget does not cover", "budget-exceeded"),
    "budget of the site": ({"agent_epsilon": 0.01}, {}, {}, "the site's budget does not cover", "budget-exceeded"),
    "share of a requester": ({"per_requester": 1e-6}, {}, {}, "budget.per_requester", "policy-refusal"),
    "no price for the site": (
        {"agent_epsilon": 1.0}, {}, {"method": "reverse-knn", "k": 1}, "no finite agent-level price", "privacy-refusal",
    ),
}  # fmt: skip
"""Budget and rules of a policy, a task that they refuse, words of the refusal, and its reason."""


def allow(site: Site, budget: dict[str, Any], rules: dict[str, Any]) -> None:
    limits = BudgetTable.model_validate({"instance_epsilon": 5.0, "agent_epsilon": "unlimited", "delta": 1e-5} | budget)
    policy = site.policy(**rules).model_copy(update={"budget": limits})
    (site.home / "policy.toml").write_text(policy_toml(policy))


@pytest.mark.parametrize(("budget", "rules", "task", "words", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_what_was_refused_is_in_page_history_and_evidence_once_as_it_was_sent_and_costs_nothing(
    site: Site,
    labeler: Labeler,
    budget: dict[str, Any],
    rules: dict[str, Any],
    task: dict[str, Any],
    words: str,
    reason: str,
) -> None:
    allow(site, budget, rules)
    made = replace(site.proposal(name="asks too much", **task), requester="ada")
    site.propose(made)
    with site.run():
        (declined,) = site.declined(1)
        site.propose(made)
        site.declined(2)
        site.send(site.ask(name="asks too much", **task))
        (refusal,) = site.refusals(1)
    assert words in declined.refusal.sentence
    assert site.spent() == 0
    listed = SiteConsole(site.home).overview()["refused"]
    found = {one["job_id"]: one for one in listed}
    assert sorted(found) == ["", "job-1"]
    assert len(listed) == 2
    assert (found["job-1"]["requester"], found["job-1"]["reason"]) == ("ada", reason)
    assert found["job-1"]["sentence"] == declined.refusal.sentence
    assert found[""]["sentence"] == refusal.sentence
    shown = " ".join(labeler("agent", "history", "--home", site.home).out.split())
    assert words in shown
    assert shown.count("asks too much, by ada") == 1
    signed = make_evidence(site.home, EvidenceScope())
    said = [one for facts in signed.evidence.facts.tasks for job in facts.jobs for one in job.refusals]
    assert Counter((one.said, one.sentence) for one in said) == Counter(
        [("declined", declined.refusal.sentence), ("refused", refusal.sentence)]
    )
    assert {one.reason for one in said} == {reason}
    assert "asks too much" not in json.dumps(answered_rounds(site.home))
    page = render_page(signed.evidence)
    assert "not known" not in page
    assert check_evidence(signed, home=site.home).wrong == ()


def test_a_cap_that_was_lowered_below_what_is_spent_refuses_and_is_told(site: Site) -> None:
    with site.run():
        site.shares_of(site.ask())
        spent = site.spent()
        allow(site, {"instance_epsilon": 0.01}, {})
        site.propose(site.proposal(nonce="next"))
        (declined,) = site.declined(1)
    (refused,) = SiteConsole(site.home).overview()["refused"]
    assert refused["sentence"] == declined.refusal.sentence
    assert site.spent() == spent


def test_a_refusal_that_cannot_be_stored_refuses_all_the_same_and_charges_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def insert(connection: Any, table: Any, *rows: Any) -> None:
        if table is site_refusals:
            raise no_room()
        insert_rows(connection, table, *rows)

    made = site.proposal("job-1", sigma_votes=0.5)
    site.propose(made)
    site.send(site.ask(sigma_votes=0.5))
    with monkeypatch.context() as patch:
        patch.setattr(promises, "insert_rows", insert)
        with site.run():
            (declined,), (refusal,) = site.declined(1), site.refusals(1)
            assert site.spent() == 0
    assert not declined.refusal.is_final
    assert not refusal.is_final
    assert SiteConsole(site.home).overview()["refused"] == []
    site.propose(made)
    with site.run():
        (_, declined) = site.declined(2)
    assert "budget does not cover" in declined.refusal.sentence
    assert len(SiteConsole(site.home).overview()["refused"]) == 2, "the job, and the round that was asked again"
    assert site.spent() == 0


def test_a_day_that_is_full_is_told_with_its_job(site: Site) -> None:
    allow(site, {}, {"max_queries_per_day": len(site.batch)})
    with site.run():
        site.propose(site.proposal())
        site.willing(1)
        site.propose(site.proposal("job-2", nonce="2"))
        (declined,) = site.declined(1)
    (refused,) = SiteConsole(site.home).overview()["refused"]
    assert (refused["job_id"], refused["sentence"]) == ("job-2", declined.refusal.sentence)
    assert "9 were answered or promised and 9 more asked" in refused["sentence"]


@pytest.fixture
def journal(tmp_path: Path) -> Database:
    return open_database(tmp_path / "journal.db", anchor=tmp_path / "journal.head", allow_unsynced=True)


def test_nobody_fills_the_disk_and_one_name_leaves_room_for_what_others_were_refused(journal: Database) -> None:
    def refuse(number: int, requester: str, days: float = 0) -> None:
        at = NOW + timedelta(days=days)
        no = SiteRefusal("d" * 64, f"job-{number}", "a task", requester, "policy-refusal", "no", at)
        note_refusal(journal, no, f"{number:064x}")

    def kept() -> Counter[str]:
        with journal.read() as connection:
            return Counter(one.requester for one in refused_by_site(connection))

    with closing(journal):
        for number in range(2 * MAX_REFUSALS_OF_ONE):
            refuse(number, "mallory")
            refuse(number, "mallory")
        assert kept() == {"mallory": MAX_REFUSALS_OF_ONE}
        refuse(1000, "ada")
        for number in range(2000, 2000 + 2 * MAX_REFUSALS_PER_DAY):
            refuse(number, f"name {number}")
        assert kept()["ada"] == 1
        assert kept().total() == MAX_REFUSALS_PER_DAY
        refuse(3000, "mallory", days=1.001)
        assert kept()["mallory"] == MAX_REFUSALS_OF_ONE + 1


def test_a_job_that_is_let_in_after_a_refusal_is_in_the_evidence_with_both(site: Site) -> None:
    allow(site, {"per_requester": 1e-6}, {})
    made: Proposal = site.proposal()
    site.propose(made)
    with site.run():
        site.declined(1)
        allow(site, {}, {})
        site.propose(made)
        site.willing(1)
        site.shares_of(site.ask())
    signed = make_evidence(site.home, EvidenceScope())
    (facts,) = signed.evidence.facts.tasks
    assert [len(job.refusals) for job in facts.jobs] == [0, 1]
    assert check_evidence(signed, home=site.home).wrong == ()
