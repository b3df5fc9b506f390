"""An agent's word before it is asked: free, durable, from public things alone, and no search for its budget."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from labeler.ledger import promises as told
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.messages.bodies import Ask, Declined, Proposal, Willing, Withdrawn
from labeler.planning import price
from tests.workers.test_agent_service import AGENT, NOW, Site, site  # noqa: F401  # the fixture
from workers.agent import driver
from workers.agent.decisions import approve
from workers.agent.service import run_agent

UNTIL = NOW.timestamp() + 3600


def proposal(site: Site, job_id: str = "job-1", *, until: float = UNTIL, **changes: Any) -> Proposal:  # noqa: F811
    ask = site.ask(**changes)
    return Proposal(job_id, ask.task, (len(site.batch),), ask.talliers, until)


def propose(site: Site, made: Proposal) -> None:  # noqa: F811
    site.relay.send("proposal", AGENT, made.encode(), task=made.task.digest)


def willing(site: Site, count: int) -> list[Willing]:  # noqa: F811
    return [Willing.decode(message.body) for message in site.relay.wait_for("willing", count)]


def declined(site: Site, count: int) -> list[Declined]:  # noqa: F811
    return [Declined.decode(message.body) for message in site.relay.wait_for("declined", count)]


def entries(site: Site) -> list[tuple[str, str, int]]:  # noqa: F811
    """Kind, first word of the reservation, and amount of every charge in the agent's own ledger."""
    with open_database(site.home / "journal.db", read_only=True) as database:
        found = Ledger(database, clock=lambda: NOW).entries(limit=1000)
    charges = [entry for entry in found if entry.level == "instance" and entry.kind not in ("open", "cap")]
    return [(entry.kind, entry.reservation_id.split("-")[0], entry.amount) for entry in charges]


def test_a_yes_sets_the_price_aside_and_the_answer_posts_it_once(site: Site) -> None:  # noqa: F811
    made = proposal(site)
    charge = price(made.task).instance.charge_nano
    propose(site, made)
    running = site.run()
    assert willing(site, 1) == [Willing("job-1", UNTIL)]
    assert site.spent() == charge
    assert entries(site) == [("reserve", "promise", charge)]
    ask = site.ask(expires_at=UNTIL)
    site.send(ask)
    site.shares(ask, 1)
    site.relay.wait_for("answered")
    site.send(ask)
    site.relay.wait_for("answered", 2)
    running.end()
    assert entries(site) == [("reserve", "promise", charge), ("post", "promise", charge)]


def test_what_was_promised_counts_once_among_the_queries_of_the_day(site: Site) -> None:  # noqa: F811
    site.write_policy(max_queries_per_day=9)
    propose(site, proposal(site))
    running = site.run()
    willing(site, 1)
    propose(site, proposal(site, "job-2", nonce="other"))
    (no,) = declined(site, 1)
    assert "9 were answered or promised and 9 more asked" in no.refusal.sentence
    ask = site.ask(expires_at=UNTIL)
    site.send(ask)
    site.shares(ask, 1)
    running.end()
    assert site.relay.received("refused") == []


def test_budget_is_set_aside_for_31_days_at_most(site: Site) -> None:  # noqa: F811
    most = timedelta(days=31).total_seconds()
    running = site.run()
    propose(site, proposal(site, until=NOW.timestamp() + most + 1))
    propose(site, proposal(site, "job-2", nonce="2", until=NOW.timestamp() + 1e9))
    first, second = (no.refusal for no in declined(site, 2))
    assert "32 days away, and a site sets budget aside for at most 31" in first.sentence
    assert "11575 days away" in second.sentence
    assert first.is_final
    assert entries(site) == []
    propose(site, proposal(site, "job-3", nonce="3", until=NOW.timestamp() + most))
    assert willing(site, 1) == [Willing("job-3", NOW.timestamp() + most)]
    running.end()
    assert [kind for kind, _, _ in entries(site)] == ["reserve"]


@pytest.mark.parametrize(
    ("policy", "changes", "said"),
    [
        ({"methods": ["reverse-knn"]}, {}, "allow.methods"),
        ({"tasks": ["0" * 64]}, {}, "allow.tasks"),
        ({"max_queries_per_day": 8}, {}, "allow.max_queries_per_day"),
        ({}, {"sigma_votes": 0.5}, "account 'agent:hospital-1', instance level: the site's budget does not cover"),
        ({}, {"classes": ("ant", "bee", "cow")}, "the task's classes"),
        ({}, {"attributes_per_record": 2}, "the shard holds one class per record"),
        ({}, {"until": NOW.timestamp() - 1}, "the proposal has expired"),
    ],
)
def test_a_no_names_its_reason_as_a_refusal_does_and_costs_nothing(
    site: Site,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    policy: dict[str, Any],
    changes: dict[str, Any],
    said: str,
) -> None:
    caplog.set_level("INFO")
    site.write_policy(**policy)
    propose(site, proposal(site, **changes))
    running = site.run()
    (no,) = declined(site, 1)
    running.end()
    assert no.job_id == "job-1"
    assert no.refusal.is_final
    assert said in no.refusal.sentence
    assert site.spent() == 0
    assert {"willing", "answered"}.isdisjoint(record.message for record in caplog.records)


def test_a_person_is_waited_for_and_the_yes_comes_after_the_approval(site: Site) -> None:  # noqa: F811
    site.write_policy(approval=True)
    made = proposal(site)
    propose(site, made)
    running = site.run()
    (not_yet,) = declined(site, 1)
    assert (not_yet.refusal.reason, not_yet.refusal.is_final) == ("awaiting-approval", False)
    approve(site.home, made.task.digest)
    propose(site, made)
    assert willing(site, 1) == [Willing("job-1", UNTIL)]
    running.end()


def test_a_yes_is_the_same_after_the_policy_changed_and_the_round_is_still_refused(site: Site) -> None:  # noqa: F811
    """A promise stays said until its deadline; whether the site still lets it happen is read at the ask."""
    made = proposal(site)
    propose(site, made)
    running = site.run()
    willing(site, 1)
    site.write_policy(methods=["reverse-knn"])
    propose(site, made)
    assert len(willing(site, 2)) == 2
    site.send(site.ask(expires_at=UNTIL))
    (refusal,) = site.refusals(1)
    running.end()
    assert "allow.methods" in refusal.sentence
    assert len(entries(site)) == 1


def test_a_proposal_that_cannot_be_judged_is_declined_in_silence_and_the_next_one_is_heard(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = driver.round_charges

    def charges(task: Any, size: int, **more: Any) -> Any:
        return real(task, size, **more) if task.nonce == "good" else size // 0

    monkeypatch.setattr(driver, "round_charges", charges)
    propose(site, proposal(site, "job-1", nonce="bad"))
    propose(site, proposal(site, "job-2", nonce="good"))
    running = site.run()
    (no,) = declined(site, 1)
    assert (no.job_id, no.refusal.sentence) == (
        "job-1",
        "this agent cannot answer this round; its operator finds the reason in its log",
    )
    assert willing(site, 1) == [Willing("job-2", UNTIL)]
    running.end()


def test_a_promise_that_was_withdrawn_or_has_ended_is_given_back(site: Site) -> None:  # noqa: F811
    now = [NOW]
    first, second = proposal(site), proposal(site, "job-2", nonce="2")
    running = site.start(lambda stop: run_agent(site.home, stop=stop, clock=lambda: now[0], wait_s=0.2))
    propose(site, first)
    propose(site, second)
    willing(site, 2)
    both = site.spent()
    site.relay.send("withdrawn", AGENT, Withdrawn("job-1").encode(), task=first.task.digest)
    propose(site, proposal(site, "job-3", nonce="3"))
    willing(site, 3)
    assert site.spent() == both
    propose(site, first)
    (over,) = declined(site, 1)
    assert "has ended" in over.refusal.sentence
    now[0] += timedelta(hours=2)
    propose(site, proposal(site, "job-4", nonce="4", until=UNTIL + 7200))
    willing(site, 4)
    running.end()
    assert 2 * site.spent() == both
    kinds = [kind for kind, _, _ in entries(site)]
    assert (kinds.count("reserve"), kinds.count("void"), kinds.count("post")) == (4, 3, 0)


def test_free_questions_about_the_budget_end_after_some(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(told, "MOST_OF_ONE", 3)
    running = site.run()
    propose(site, proposal(site, "job-0", nonce="0"))
    willing(site, 1)
    site.relay.send("withdrawn", AGENT, Withdrawn("job-0").encode(), task=site.ask(nonce="0").task.digest)
    for number in range(1, 3):
        propose(site, proposal(site, f"job-{number}", sigma_votes=0.4 + number / 10))
    assert all("does not cover" in one.refusal.sentence for one in declined(site, 2))
    # Between what was covered and what was not nothing more is said.
    propose(site, proposal(site, "job-3", sigma_votes=0.62))
    propose(site, proposal(site, "job-4", nonce="4"))
    propose(site, proposal(site, "job-5", sigma_votes=0.45))
    fourth, fifth = declined(site, 4)[2:]
    assert "at most 3 times in 24 hours for nothing" in fourth.refusal.sentence
    assert "does not cover" in fifth.refusal.sentence, "as follows from what was said before"
    assert willing(site, 2)[1] == Willing("job-4", UNTIL)
    running.end()


def test_killed_at_its_yes_it_says_the_same_and_sets_the_price_aside_once(site: Site, tmp_path: Path) -> None:  # noqa: F811
    until = float(int(max(time.time(), NOW.timestamp()))) + 86_400
    made = proposal(site, until=until)
    propose(site, made)
    site.killed_at("agent.willing")
    assert site.relay.received("willing") == []
    running = site.run()
    assert willing(site, 1) == [Willing("job-1", until)]
    running.end()
    assert entries(site) == [("reserve", "promise", price(made.task).instance.charge_nano)]


def test_the_log_says_answered_of_shares_that_were_taken_and_of_nothing_else(
    site: Site,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    running = site.run()
    site.send(site.ask(sigma_votes=0.5))
    site.refusals(1)
    propose(site, proposal(site, "job-2", classes=("ant", "bee", "cow")))
    declined(site, 1)
    good: Ask = site.ask()
    site.send(good)
    site.shares(good, 1)
    end = time.monotonic() + 60
    while not any(record.message == "answered" for record in caplog.records):  # written after the shares were taken
        assert time.monotonic() < end
        time.sleep(0.02)
    running.end()
    said = [(record.message, record.__dict__.get("round_digest")) for record in caplog.records]
    assert [one for one in said if one[0] == "answered"] == [("answered", good.round.digest)]
    words = [word for word, _ in said]
    assert words.index("refused") < words.index("declined") < words.index("answered")
