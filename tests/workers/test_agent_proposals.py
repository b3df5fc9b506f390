"""An agent's word before it is asked: free, durable, from public things alone, and no search for its budget."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from labeler.ledger import promises as told
from labeler.messages.bodies import Willing, Withdrawn
from labeler.planning import price
from labeler.system.keys import PartyKeys
from tests.workers.agent_site import AGENT, NOW, UNTIL, Site
from workers.agent import driver
from workers.agent.service import run_agent


def entries(site: Site) -> list[tuple[str, str, int]]:
    """Kind, first word of the reservation, and amount of every charge in the agent's own ledger."""
    with site.ledger() as ledger:
        found = [one for one in ledger.entries(limit=1000) if one.level == "instance"]
    return [(e.kind, e.reservation_id.split("-")[0], e.amount) for e in found if e.kind not in ("open", "cap")]


def test_a_yes_sets_the_price_aside_and_the_answer_posts_it_once(site: Site) -> None:
    made = site.proposal()
    charge = price(made.task).instance.charge_nano
    site.propose(made)
    with site.run():
        assert site.willing(1) == [Willing("job-1", UNTIL)]
        assert site.spent() == charge
        assert entries(site) == [("reserve", "promise", charge)]
        ask = site.ask(expires_at=UNTIL)
        site.shares_of(ask)
        site.relay.wait_for("answered")
        site.send(ask)
        site.relay.wait_for("answered", 2)
    assert entries(site) == [("reserve", "promise", charge), ("post", "promise", charge)]


def test_what_was_promised_counts_once_among_the_queries_of_the_day(site: Site) -> None:
    site.write_policy(max_queries_per_day=9)
    site.propose(site.proposal())
    with site.run():
        site.willing(1)
        site.propose(site.proposal("job-2", nonce="other"))
        (no,) = site.declined(1)
        assert "9 were answered or promised and 9 more asked" in no.refusal.sentence
        ask = site.ask(expires_at=UNTIL)
        site.shares_of(ask)
    assert site.relay.received("refused") == []


def test_budget_is_set_aside_for_31_days_at_most(site: Site) -> None:
    most = timedelta(days=31).total_seconds()
    with site.run():
        site.propose(site.proposal(until=NOW.timestamp() + most + 1))
        site.propose(site.proposal("job-2", nonce="2", until=NOW.timestamp() + 1e9))
        first, second = (no.refusal for no in site.declined(2))
        assert "32 days away, and a site sets budget aside for at most 31" in first.sentence
        assert "11575 days away" in second.sentence
        assert first.is_final
        assert entries(site) == []
        site.propose(site.proposal("job-3", nonce="3", until=NOW.timestamp() + most))
        assert site.willing(1) == [Willing("job-3", NOW.timestamp() + most)]
    assert [kind for kind, _, _ in entries(site)] == ["reserve"]


@pytest.mark.parametrize(
    ("policy", "changes", "said"),
    [
        ({"methods": ["reverse-knn"]}, {}, "allow.methods"),
        ({"tasks": ["0" * 64]}, {}, "allow.tasks"),
        ({"max_queries_per_day": 8}, {}, "allow.max_queries_per_day"),
        ({}, {"talliers": {"tallier-1": PartyKeys.generate().public.seal_key}}, "talliers.tallier-1"),
        ({}, {"sigma_votes": 0.5}, "account 'agent:hospital-1', instance level: the site's budget does not cover"),
        ({}, {"classes": ("ant", "bee", "cow")}, "the task's classes"),
        ({}, {"attributes_per_record": 2}, "the shard holds one class per record"),
        ({}, {"until": NOW.timestamp() - 1}, "expired"),
    ],
)
def test_what_it_may_not_do_is_declined_or_refused_with_one_reason_and_costs_nothing(
    site: Site, caplog: pytest.LogCaptureFixture, policy: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    caplog.set_level("INFO")
    site.write_policy(**policy)
    site.propose(site.proposal(**changes))
    asked = {name: value for name, value in changes.items() if name != "until"}
    site.send(site.ask(expires_at=changes.get("until", UNTIL), **asked))
    with site.run():
        ((no,), (refusal,)) = site.declined(1), site.refusals(1)
    assert no.job_id == "job-1"
    for one in (no.refusal, refusal):
        assert one.is_final
        assert said in one.sentence
    assert site.spent() == 0
    assert site.relay.mail_of("tallier-0") == []
    assert {"willing", "answered"}.isdisjoint(record.message for record in caplog.records)


def test_a_yes_is_the_same_after_the_policy_changed_and_the_round_is_still_refused(site: Site) -> None:
    """A promise stays said until its deadline; whether the site still lets it happen is read at the ask."""
    made = site.proposal()
    site.propose(made)
    with site.run():
        site.willing(1)
        site.write_policy(methods=["reverse-knn"])
        site.propose(made)
        assert len(site.willing(2)) == 2
        site.send(site.ask(expires_at=UNTIL))
        (refusal,) = site.refusals(1)
    assert "allow.methods" in refusal.sentence
    assert len(entries(site)) == 1


def test_a_proposal_that_cannot_be_judged_is_declined_in_silence_and_the_next_one_is_heard(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = driver.round_charges

    def charges(task: Any, size: int, **more: Any) -> Any:
        return real(task, size, **more) if task.nonce == "good" else size // 0

    monkeypatch.setattr(driver, "round_charges", charges)
    site.propose(site.proposal("job-1", nonce="bad"))
    site.propose(site.proposal("job-2", nonce="good"))
    with site.run():
        (no,) = site.declined(1)
        assert (no.job_id, no.refusal.sentence) == (
            "job-1",
            "this agent cannot answer this round; its operator finds the reason in its log",
        )
        assert site.willing(1) == [Willing("job-2", UNTIL)]


def test_a_promise_that_was_withdrawn_or_has_ended_is_given_back(site: Site) -> None:
    now = [NOW]
    first, second = site.proposal(), site.proposal("job-2", nonce="2")
    with site.start(lambda stop: run_agent(site.home, stop=stop, clock=lambda: now[0], wait_s=0.2)):
        site.propose(first)
        site.propose(second)
        site.willing(2)
        both = site.spent()
        site.relay.send("withdrawn", AGENT, Withdrawn("job-1").encode(), task=first.task.digest)
        site.propose(site.proposal("job-3", nonce="3"))
        site.willing(3)
        assert site.spent() == both
        site.propose(first)
        (over,) = site.declined(1)
        assert "has ended" in over.refusal.sentence
        now[0] += timedelta(hours=2)
        site.propose(site.proposal("job-4", nonce="4", until=UNTIL + 7200))
        site.willing(4)
    assert 2 * site.spent() == both
    kinds = [kind for kind, _, _ in entries(site)]
    assert (kinds.count("reserve"), kinds.count("void"), kinds.count("post")) == (4, 3, 0)


def test_free_questions_about_the_budget_end_after_some(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "MOST_OF_ONE", 3)
    with site.run():
        site.propose(site.proposal("job-0", nonce="0"))
        site.willing(1)
        site.relay.send("withdrawn", AGENT, Withdrawn("job-0").encode(), task=site.ask(nonce="0").task.digest)
        for number in range(1, 3):
            site.propose(site.proposal(f"job-{number}", sigma_votes=0.4 + number / 10))
        assert all("does not cover" in one.refusal.sentence for one in site.declined(2))
        # Between what was covered and what was not nothing more is said.
        site.propose(site.proposal("job-3", sigma_votes=0.62))
        site.propose(site.proposal("job-4", nonce="4"))
        site.propose(site.proposal("job-5", sigma_votes=0.45))
        fourth, fifth = site.declined(4)[2:]
        assert "at most 3 times in 24 hours for nothing" in fourth.refusal.sentence
        assert "does not cover" in fifth.refusal.sentence, "as follows from what was said before"
        assert site.willing(2)[1] == Willing("job-4", UNTIL)


@pytest.mark.process
def test_killed_at_its_yes_it_says_the_same_and_sets_the_price_aside_once(site: Site, tmp_path: Path) -> None:
    site.now = datetime.now(UTC)  # as the separate process sees it, so that the price is set aside for a day
    until = float(int(site.now.timestamp())) + 86_400
    made = site.proposal(until=until)
    site.propose(made)
    site.killed_at("agent.willing")
    assert site.relay.received("willing") == []
    with site.run():
        assert site.willing(1) == [Willing("job-1", until)]
    assert entries(site) == [("reserve", "promise", price(made.task).instance.charge_nano)]
