"""Decisions of people beside their running agent: refuse, stop, go on; and what they see of it all."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.results.evidence import render_page
from feature_store.shard import Shard, deletions
from labeler.budget import budget_for, epsilon_left, epsilon_spent, say_epsilon, say_epsilon_left
from labeler.errors import BudgetExceeded, InvalidSetting, NotFound
from labeler.evidence.derive import bound
from labeler.ledger.evidence import EvidenceScope
from labeler.planning import price
from tests.command_line import Labeler, Outcome
from tests.workers.agent_site import UNTIL, Site, same
from tests.workers.builders import shard_of_rows
from workers.agent import decisions
from workers.agent.policy import BudgetTable, policy_toml
from workers.agent.site import SiteConsole, answered_jobs, answered_rounds, as_csv, percent, site_budget
from workers.commands.site import approve as approve_by_command
from workers.commands.site import waiting as say_waiting
from workers.homes.evidence import make_evidence
from workers.homes.journals import backup_home
from workers.party.home import path_in_home, read_agent_config


def test_a_stop_or_a_refusal_refuses_what_is_not_charged_and_answers_what_is(site: Site) -> None:
    charged, new = site.ask(), site.ask(nonce="new")
    with site.run():
        first = site.shares_of(charged)
        spent = site.spent()
        decisions.refuse(site.home, charged.task.digest, "changed our mind")
        decisions.stop(site.home, "maintenance")
        site.propose(site.proposal(nonce="new"))
        no = site.declined(1)[0].refusal
        assert (no.reason, no.is_final) == ("site-stopped", False)
        site.send(new)
        (refusal,) = site.refusals(1)
        assert (refusal.reason, refusal.is_final) == ("site-stopped", False)
        assert "stopped answering for now" in refusal.sentence
        assert refusal.sentence.endswith(": maintenance")
        site.send(charged)
        again = site.shares(charged, 2)[1]
        assert same(first, again), "what was charged is answered, the same bytes"
        assert site.spent() == spent
        # Asked again by itself, it goes on where the site lets it.
        decisions.resume(site.home)
        site.shares_of(new)
    assert site.spent() == 2 * spent


def test_a_refused_task_is_declined_for_good_in_the_words_of_a_person(site: Site) -> None:
    site.write_policy(approval=True)
    made = site.proposal()
    site.propose(made)
    with site.run():
        site.declined(1)
        desk = SiteConsole(site.home)
        digest = made.task.digest
        desk.refuse(digest, "no ethics vote yet")
        site.propose(made)
        no = site.declined(2)[1].refusal
        assert (no.reason, no.is_final) == ("refused-by-person", True)
        assert no.sentence.endswith("has refused task " + digest[:12] + ": no ethics vote yet")
        shown = desk.overview()
        assert shown["waiting"] == []
        assert [(one["decision"], one["reason"]) for one in shown["decided"]] == [("refused", "no ethics vote yet")]
        # Approved after all, also where both files are left for a moment: until then it is refused.
        (site.home / "approved").mkdir(exist_ok=True)
        (site.home / "approved" / digest).touch()
        site.propose(made)
        assert site.declined(3)[2].refusal.is_final
        desk.approve(digest)
        site.propose(made)
        site.willing(1)
    assert [one["decision"] for one in desk.overview()["decided"]] == ["approved"]


def test_a_card_says_what_an_approval_takes_of_the_budget_and_what_cannot_be_paid_is_not_approved(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    def limit(epsilon: float) -> int:
        budget = BudgetTable(instance_epsilon=epsilon, agent_epsilon="unlimited", delta=1e-5)
        policy = site.policy(approval=True).model_copy(update={"budget": budget})
        (site.home / "policy.toml").write_text(policy_toml(policy))
        return budget_for(epsilon, 1e-5)

    limit(5.0)
    first, second = site.proposal(), site.proposal("job-2", nonce="second")
    cost = price(first.task).instance.charge_nano
    cap = next(limit(one) for one in (0.01 * n for n in range(1, 500)) if budget_for(one, 1e-5) >= 1.5 * cost)
    site.propose(first)
    with site.run():
        site.declined(1)
        desk = SiteConsole(site.home)

        def waiting() -> dict[str, Any]:
            (found,) = desk.overview()["waiting"]
            return found

        (takes,) = waiting()["takes"]
        part, rest = percent(cost / cap), percent((cap - cost) / cap)
        assert takes["words"] == f"takes {part} of your budget per image, {rest} remains"
        assert (takes["asked_nano"], takes["left_nano"], takes["cap_nano"]) == (cost, cap, cap)
        desk.approve(first.task.digest)
        site.propose(first)
        site.willing(1)
        # What was promised for a task is not counted a second time when its approval is taken back and given again.
        desk.refuse(first.task.digest, "wait")
        desk.approve(first.task.digest)
        site.propose(second)
        site.declined(2)
        digest = second.task.digest
        assert waiting()["unpayable"].startswith(
            f"it takes {part} of your budget per image, of which {rest} is left; raise "
        )
        with pytest.raises(
            BudgetExceeded, match=r"cannot be approved: it takes .*raise budget.instance_epsilon in policy"
        ):
            desk.approve(digest)
        with pytest.raises(BudgetExceeded):
            approve_by_command(digest, site.home)
        assert not decisions.is_approved(site.home, digest)
        say_waiting(site.home)
        assert "cannot be approved" in capsys.readouterr().out
        limit(5.0)
        assert waiting()["unpayable"] == ""
        approve_by_command(digest, site.home)
        site.propose(second)
        site.willing(2)


def test_people_are_told_who_asks_as_the_coordinator_says(site: Site) -> None:
    site.write_policy(approval=True)
    made = site.proposal()
    with site.run():
        for turn, name in enumerate(["data team", "", "<b>x</b>", *(f"number {n}" for n in range(30))], 1):
            site.propose(replace(made, requester=name))
            site.declined(turn)
        desk = SiteConsole(site.home)
        (waiting,) = desk.overview()["waiting"]
        assert {"data team", "<b>x</b>"} < set(waiting["requesters"])
        assert len(waiting["requesters"]) == 20, "what a coordinator says does not fill a disk"
        desk.approve(made.task.digest)
        site.propose(replace(made, requester="data team"))
        site.willing(1)
        ask = site.ask(expires_at=UNTIL)
        site.shares_of(ask)
    (told,) = answered_rounds(site.home)
    assert told["requesters"] == waiting["requesters"]


@pytest.mark.parametrize("content", ["", "{", '{"reason": 7}', '{"reason": "x\\u001b[2J", "at": ""}', "x" * 10_000])
def test_a_file_that_cannot_be_read_still_decides(site: Site, content: str) -> None:
    (site.home / "stopped").write_text(content)
    no = decisions.stopped(site.home)
    assert no is not None
    assert no.reason in ("", "7")
    digest = "ab" * 32
    (site.home / "refused").mkdir()
    (site.home / "refused" / digest).write_text(content)
    assert decisions.refused(site.home, digest) is not None


@pytest.mark.parametrize("reason", ["", "  ", "x" * 301, "a\x1b[2Jb", "two\nlines"])
def test_a_reason_is_a_short_printable_line(site: Site, reason: str) -> None:
    with pytest.raises(InvalidSetting):
        decisions.refuse(site.home, "ab" * 32, reason)
    assert decisions.refused(site.home, "ab" * 32) is None
    if reason.strip():
        with pytest.raises(InvalidSetting):
            decisions.stop(site.home, reason)
        assert decisions.stopped(site.home) is None


def test_nobody_decides_about_a_task_that_nobody_asked_for(site: Site) -> None:
    site.run().end()
    desk = SiteConsole(site.home)
    for digest in ("ab" * 32, "../../keys.json", ""):
        with pytest.raises(NotFound):
            desk.approve(digest)
        with pytest.raises(NotFound):
            desk.refuse(digest, "no")
    assert not (site.home / "approved").exists()


def test_what_was_answered_is_told_with_its_task_and_price(site: Site) -> None:
    made = site.proposal(name='=HYPERLINK("x")')
    site.propose(made)
    with site.run():
        site.willing(1)
        ask = site.ask(name='=HYPERLINK("x")', expires_at=UNTIL)
        site.shares_of(ask)
        other = site.ask(nonce="without a proposal")
        site.shares_of(other)
        # From another connection, while the agent runs.
        rounds = answered_rounds(site.home)
    assert rounds == answered_rounds(site.home)
    assert [one["round"] for one in rounds] == [ask.round.digest, other.round.digest]
    assert [one["job_id"] for one in rounds] == ["job-1", ""]
    charge = price(ask.task).instance.charge_nano
    assert [one["instance_nano"] for one in rounds] == [charge, charge]
    assert rounds[0]["classes"] == ["cat", "dog", "eel"]
    assert rounds[0]["instance_epsilon"] == pytest.approx(price(ask.task).instance.epsilon, rel=1e-6)
    jobs = answered_jobs(rounds)
    assert {(job["job_id"], job["queries"], job["rounds"]) for job in jobs} == {("job-1", 9, 1), ("", 9, 1)}
    lines = list(csv.DictReader(io.StringIO(as_csv(rounds))))
    assert lines[0]["name"] == '\'=HYPERLINK("x")', "no spreadsheet obeys a name from elsewhere"
    assert lines[0]["instance_nano"] == str(charge)
    (left,) = (one for one in SiteConsole(site.home).overview()["budget"] if one["level"] == "instance")
    assert left["spent_nano"] == sum(one["instance_nano"] for one in rounds)


def test_a_backup_keeps_what_people_have_decided_so_a_home_that_comes_back_does_not_answer_what_they_refused(
    site: Site,
    tmp_path: Path,
) -> None:
    site.run().end()
    decisions.stop(site.home, "audit")
    decisions.refuse(site.home, "a" * 64, "no ethics vote yet")
    decisions.approve(site.home, "b" * 64)
    backup_home(site.home, tmp_path / "copy")
    assert decisions.stopped(tmp_path / "copy") == decisions.stopped(site.home)
    assert decisions.refused(tmp_path / "copy", "a" * 64) == decisions.refused(site.home, "a" * 64) is not None
    assert decisions.is_approved(tmp_path / "copy", "b" * 64)


def test_a_home_whose_agent_never_ran_says_so_and_shows_the_rest(site: Site) -> None:
    shown = SiteConsole(site.home).overview()
    assert shown["agent_id"] == "hospital-1"
    assert any("start it once" in one for one in shown["problems"])
    assert shown["policy"]
    json.dumps(shown)


def test_the_shell_does_the_same_at_80_columns(site: Site, labeler: Labeler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def agent(*arguments: object) -> Outcome:
        done = labeler("agent", *arguments, "--home", site.home)
        lines = [] if "--json" in arguments else done.out.splitlines()
        assert all(len(line) <= 80 for line in lines if str(site.home.parent) not in line), done.out
        assert "\x1b" not in done.out
        return done

    site.write_policy(approval=True)
    made = site.proposal(name="a name with [red]markup[/red] and " + "many words " * 12)
    site.propose(made)
    with site.run():
        site.declined(1)
        digest = made.task.digest
        shown = agent("waiting").out
        for words in (digest, "[red]markup[/red]", "cat, dog, eel", "per image", "no price per person", "reason WHY"):
            assert words in shown, shown
        assert agent("refuse", digest[:8], "--reason", "not this one").code == 0
        assert decisions.refused(site.home, digest) is not None
        assert "No task waits" in agent("waiting").out
        assert agent("approve", digest[:8]).code == 0
        assert agent("stop", "--reason", "lunch").code == 0
        assert "stopped answering" in agent("waiting").out
        assert json.loads(agent("resume", "--json").out) == {"stopped": False}
        site.propose(made)
        site.willing(1)
        ask = site.ask(name=made.task.name, expires_at=UNTIL)
        site.shares_of(ask)
    shown = agent("history").out
    assert "9 questions in 1 round, by knn" in shown
    assert "job-1" in shown
    (told,) = json.loads(agent("history", "--json").out)
    assert told["round"] == ask.round.digest
    out = site.home.parent / "answered.csv"
    assert agent("history", "--format", "csv", "--out", out).code == 0
    assert ask.round.digest in out.read_text()
    assert json.loads(agent("history", "--json", "--out", out).out) == {"rounds": 1, "out": str(out)}
    assert json.loads(out.read_text()) == [told]
    shown = agent("budget").out
    [account] = [one for one in json.loads(agent("budget", "--json").out) if one["level"] == "instance"]
    spent = 1 - account["left_nano"] / account["cap_nano"]
    assert 0 < spent < 1
    assert f"{spent:.1%}" in shown  # the share beside a bar says what the bar shows
    assert f"{1 - spent:.1%}" not in shown
    assert agent("refuse", digest[:8], "--reason", "").code == 2


def test_a_deletion_is_on_the_page_and_in_the_history_with_its_moment_alone(site: Site, labeler: Labeler) -> None:
    with site.run():
        site.shares_of(site.ask())
    assert SiteConsole(site.home).overview()["deleted"] == []
    assert "Records deleted" not in labeler("agent", "history", "--home", site.home).out
    shard = Shard.open(path_in_home(site.home, read_agent_config(site.home).shard))
    shard.delete(shard.record_ids[:2])
    shard.delete(shard.record_ids[:2])  # again: no change
    (at,) = deletions(shard.path)
    assert SiteConsole(site.home).overview()["deleted"] == [{"at": at, "rounds_before": 1}]
    told = " ".join(labeler("agent", "history", "--home", site.home).out.split())
    assert f"Records deleted {at[:16].replace('T', ' ')} UTC after 1 round; those stay released and charged" in told


def test_what_a_person_cost_over_all_jobs_is_the_sum_that_the_ledger_of_images_bears_out(site: Site) -> None:
    rng = np.random.default_rng(7)
    site.shard = shard_of_rows(
        site.home.parent / "named.shard",
        site.shard.features[:],
        np.asarray(site.shard.labels[:]),
        classes=site.shard.classes,
        fingerprint=site.shard.fingerprint,
        persons=rng.integers(1, 5, (len(site.shard.features), 1)).repeat(2, axis=1),
        site_key="k",
        max_records=1000,
    )
    site.home = site.home.parent / "named"
    site.make()
    asks = [site.ask(method="reverse-knn", k=1, records_per_person=1, nonce=name, sigma_votes=40.0) for name in "ab"]
    shown = SiteConsole(site.home)
    with site.run():
        for ask in asks:
            site.shares_of(ask)
    overview = shown.overview()
    charged = sum(one["instance_nano"] for one in overview["jobs"])
    # Where one image votes, its removal lets the next one in: two votes change. A person's removal changes one.
    assert overview["person"]["person_nano"] == pytest.approx(charged / 2, abs=2)
    assert overview["person"]["person_epsilon"] == epsilon_spent(overview["person"]["person_nano"], 1e-5)
    rows = list(csv.DictReader(io.StringIO(shown.rounds_csv())))
    assert sum(int(row["person_nano"]) for row in rows) == overview["person"]["person_nano"]
    (instance,) = (one for one in overview["budget"] if one["level"] == "instance")
    assert instance["left_epsilon"] == epsilon_left(instance["cap_nano"] - charged, 1e-5)
    document = make_evidence(site.home, EvidenceScope()).evidence
    assert document.person is not None
    assert document.person.epsilon == bound(overview["person"]["person_epsilon"])
    with site.run():
        site.shares_of(site.ask(nonce="no bound per person"))
    person = shown.overview()["person"]
    assert person["person_epsilon"] is None
    assert "1 of 3 answered rounds do not limit how many images of one person vote" in person["words"]
    assert make_evidence(site.home, EvidenceScope()).evidence.person.epsilon is None


def test_what_a_waiting_job_takes_is_not_spent(site: Site) -> None:
    site.write_policy()
    site.propose(site.proposal())
    with site.run():
        site.willing(1)
        (one,) = (one for one in site_budget(site.home) if one["level"] == "instance")
    assert one["posted_epsilon"] == 0
    assert one["words"].startswith(
        f"at most 0 so far; {say_epsilon(one['spent_epsilon'])} if all that waits is answered"
    )


def test_the_shell_and_the_page_of_the_evidence_count_no_waiting_job_as_spent(site: Site, labeler: Labeler) -> None:
    site.propose(site.proposal())
    with site.run():
        site.willing(1)
    (one,) = (one for one in site_budget(site.home) if one["level"] == "instance")
    row = next(line for line in labeler("agent", "budget", "--home", site.home).out.splitlines() if " image " in line)
    assert [part.strip() for part in row.split("│")][2:5] == ["0", "5", say_epsilon_left(one["left_epsilon"])]
    page = render_page(make_evidence(site.home, EvidenceScope()).evidence)
    assert one["words"] in page
    assert "one more job of up to" in one["words"]
