"""Decisions of people beside their running agent: refuse, stop, go on; and what they see of it all."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labeler.budget import budget_for
from labeler.errors import BudgetExceeded, InvalidSetting, NotFound
from labeler.planning import price
from tests.workers.test_agent_proposals import declined, proposal, propose, willing
from tests.workers.test_agent_service import NOW, Site, same, site  # noqa: F401  # the fixture
from workers.agent import decisions
from workers.agent.policy import BudgetTable, policy_toml
from workers.agent.site import SiteConsole, answered_jobs, answered_rounds, as_csv, percent
from workers.commands.site import approve as approve_by_command
from workers.commands.site import waiting as say_waiting
from workers.homes.journals import backup_home


def test_a_stop_refuses_what_is_not_charged_and_answers_what_is(site: Site) -> None:  # noqa: F811
    charged, new = site.ask(), site.ask(nonce="new")
    site.send(charged)
    running = site.run()
    (first,) = site.shares(charged, 1)
    spent = site.spent()
    decisions.stop(site.home, "maintenance")
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
    site.send(new)
    site.shares(new, 1)
    running.end()
    assert site.spent() == 2 * spent


def test_a_stopped_site_says_not_now_to_proposals_and_sets_nothing_aside(site: Site) -> None:  # noqa: F811
    decisions.stop(site.home)
    made = proposal(site)
    propose(site, made)
    running = site.run()
    (no,) = declined(site, 1)
    assert (no.refusal.reason, no.refusal.is_final) == ("site-stopped", False)
    assert site.spent() == 0
    decisions.resume(site.home)
    propose(site, made)
    willing(site, 1)
    running.end()


def test_a_refused_task_is_declined_for_good_in_the_words_of_a_person(site: Site) -> None:  # noqa: F811
    site.write_policy(approval=True)
    made = proposal(site)
    propose(site, made)
    running = site.run()
    declined(site, 1)
    desk = SiteConsole(site.home)
    digest = made.task.digest
    desk.refuse(digest, "no ethics vote yet")
    propose(site, made)
    no = declined(site, 2)[1].refusal
    assert (no.reason, no.is_final) == ("refused-by-person", True)
    assert no.sentence.endswith("has refused task " + digest[:12] + ": no ethics vote yet")
    shown = desk.overview()
    assert shown["waiting"] == []
    assert [(one["decision"], one["reason"]) for one in shown["decided"]] == [("refused", "no ethics vote yet")]
    # Approved after all, also where both files are left for a moment: until then it is refused.
    (site.home / "approved").mkdir(exist_ok=True)
    (site.home / "approved" / digest).touch()
    propose(site, made)
    assert declined(site, 3)[2].refusal.is_final
    desk.approve(digest)
    propose(site, made)
    willing(site, 1)
    running.end()
    assert [one["decision"] for one in desk.overview()["decided"]] == ["approved"]


def test_a_card_says_what_an_approval_takes_of_the_budget_and_what_cannot_be_paid_is_not_approved(
    site: Site,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    def limit(epsilon: float) -> int:
        budget = BudgetTable(instance_epsilon=epsilon, agent_epsilon="unlimited", delta=1e-5)
        (site.home / "policy.toml").write_text(
            policy_toml(site.policy(approval=True).model_copy(update={"budget": budget}))
        )
        return budget_for(epsilon, 1e-5)

    limit(5.0)
    first, second = proposal(site), proposal(site, "job-2", nonce="second")
    cost = price(first.task).instance.charge_nano
    cap = next(limit(one) for one in (0.01 * n for n in range(1, 500)) if budget_for(one, 1e-5) >= 1.5 * cost)
    propose(site, first)
    running = site.run()
    declined(site, 1)
    desk = SiteConsole(site.home)

    def waiting() -> dict[str, Any]:
        (found,) = desk.overview()["waiting"]
        return found

    (takes,) = waiting()["takes"]
    part, rest = percent(cost / cap), percent((cap - cost) / cap)
    assert takes["words"] == f"takes {part} of your budget per image, {rest} remains"
    assert (takes["asked_nano"], takes["left_nano"], takes["cap_nano"]) == (cost, cap, cap)
    desk.approve(first.task.digest)
    propose(site, first)
    willing(site, 1)
    # What was promised for a task is not counted a second time when its approval is taken back and given again.
    desk.refuse(first.task.digest, "wait")
    desk.approve(first.task.digest)
    propose(site, second)
    declined(site, 2)
    digest = second.task.digest
    assert waiting()["unpayable"].startswith(
        f"it takes {part} of your budget per image, of which {rest} is left; raise "
    )
    with pytest.raises(BudgetExceeded, match=r"cannot be approved: it takes .*raise budget.instance_epsilon in policy"):
        desk.approve(digest)
    with pytest.raises(BudgetExceeded):
        approve_by_command(digest, site.home)
    assert not decisions.is_approved(site.home, digest)
    say_waiting(site.home)
    assert "cannot be approved" in capsys.readouterr().out
    limit(5.0)
    assert waiting()["unpayable"] == ""
    approve_by_command(digest, site.home)
    propose(site, second)
    willing(site, 2)
    running.end()


def test_a_refusal_after_the_charge_changes_nothing_of_what_was_charged(site: Site) -> None:  # noqa: F811
    ask = site.ask()
    site.send(ask)
    running = site.run()
    (first,) = site.shares(ask, 1)
    decisions.refuse(site.home, ask.task.digest, "changed our mind")
    site.send(ask)
    assert same(first, site.shares(ask, 2)[1])
    running.end()
    assert site.relay.received("refused") == []


def test_people_are_told_who_asks_as_the_coordinator_says(site: Site) -> None:  # noqa: F811
    site.write_policy(approval=True)
    made = proposal(site)
    running = site.run()
    for turn, name in enumerate(["data team", "", "<b>x</b>", *(f"number {n}" for n in range(30))], 1):
        propose(site, replace(made, requester=name))
        declined(site, turn)
    desk = SiteConsole(site.home)
    (waiting,) = desk.overview()["waiting"]
    assert {"data team", "<b>x</b>"} < set(waiting["requesters"])
    assert len(waiting["requesters"]) == 20, "what a coordinator says does not fill a disk"
    desk.approve(made.task.digest)
    propose(site, replace(made, requester="data team"))
    willing(site, 1)
    ask = site.ask(expires_at=NOW.timestamp() + 3600)
    site.send(ask)
    site.shares(ask, 1)
    running.end()
    (told,) = answered_rounds(site.home)
    assert told["requesters"] == waiting["requesters"]


@pytest.mark.parametrize("content", ["", "{", '{"reason": 7}', '{"reason": "x\\u001b[2J", "at": ""}', "x" * 10_000])
def test_a_file_that_cannot_be_read_still_decides(site: Site, content: str) -> None:  # noqa: F811
    (site.home / "stopped").write_text(content)
    no = decisions.stopped(site.home)
    assert no is not None
    assert no.reason in ("", "7")
    digest = "ab" * 32
    (site.home / "refused").mkdir()
    (site.home / "refused" / digest).write_text(content)
    assert decisions.refused(site.home, digest) is not None


@pytest.mark.parametrize("reason", ["", "  ", "x" * 301, "a\x1b[2Jb", "two\nlines"])
def test_a_reason_is_a_short_printable_line(site: Site, reason: str) -> None:  # noqa: F811
    with pytest.raises(InvalidSetting):
        decisions.refuse(site.home, "ab" * 32, reason)
    assert decisions.refused(site.home, "ab" * 32) is None
    if reason.strip():
        with pytest.raises(InvalidSetting):
            decisions.stop(site.home, reason)
        assert decisions.stopped(site.home) is None


def test_nobody_decides_about_a_task_that_nobody_asked_for(site: Site) -> None:  # noqa: F811
    site.run().end()
    desk = SiteConsole(site.home)
    for digest in ("ab" * 32, "../../keys.json", ""):
        with pytest.raises(NotFound):
            desk.approve(digest)
        with pytest.raises(NotFound):
            desk.refuse(digest, "no")
    assert not (site.home / "approved").exists()


def test_what_was_answered_is_told_with_its_task_and_price(site: Site) -> None:  # noqa: F811
    made = proposal(site, name='=HYPERLINK("x")')
    propose(site, made)
    running = site.run()
    willing(site, 1)
    ask = site.ask(name='=HYPERLINK("x")', expires_at=NOW.timestamp() + 3600)
    site.send(ask)
    site.shares(ask, 1)
    other = site.ask(nonce="without a proposal")
    site.send(other)
    site.shares(other, 1)
    # From another connection, while the agent runs.
    rounds = answered_rounds(site.home)
    running.end()
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
    site: Site,  # noqa: F811
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


def test_a_home_whose_agent_never_ran_says_so_and_shows_the_rest(site: Site) -> None:  # noqa: F811
    shown = SiteConsole(site.home).overview()
    assert shown["agent_id"] == "hospital-1"
    assert any("start it once" in one for one in shown["problems"])
    assert shown["policy"]
    json.dumps(shown)


def test_the_shell_does_the_same_at_80_columns(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import sys

    from workers.cli import main

    def labeler(*arguments: object) -> Any:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["labeler", "agent", *map(str, arguments), "--home", str(site.home)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        if end.value.code not in (0, None):
            return end.value.code, printed.err
        lines = [] if "--json" in arguments else printed.out.splitlines()
        assert all(len(line) <= 80 for line in lines if str(site.home.parent) not in line), printed.out
        assert "\x1b" not in printed.out
        return 0, printed.out

    site.write_policy(approval=True)
    made = proposal(site, name="a name with [red]markup[/red] and " + "many words " * 12)
    propose(site, made)
    running = site.run()
    declined(site, 1)
    digest = made.task.digest
    shown = labeler("waiting")[1]
    for words in (digest, "[red]markup[/red]", "cat, dog, eel", "per image", "no price per person", "reason WHY"):
        assert words in shown, shown
    assert labeler("refuse", digest[:8], "--reason", "not this one")[0] == 0
    assert decisions.refused(site.home, digest) is not None
    assert "No task waits" in labeler("waiting")[1]
    assert labeler("approve", digest[:8])[0] == 0
    assert labeler("stop", "--reason", "lunch")[0] == 0
    assert "stopped answering" in labeler("waiting")[1]
    assert json.loads(labeler("resume", "--json")[1]) == {"stopped": False}
    propose(site, made)
    willing(site, 1)
    ask = site.ask(name=made.task.name, expires_at=NOW.timestamp() + 3600)
    site.send(ask)
    site.shares(ask, 1)
    running.end()
    shown = labeler("history")[1]
    assert "9 questions in 1 round, by knn" in shown
    assert "job-1" in shown
    (told,) = json.loads(labeler("history", "--json")[1])
    assert told["round"] == ask.round.digest
    out = site.home.parent / "answered.csv"
    assert labeler("history", "--format", "csv", "--out", out)[0] == 0
    assert ask.round.digest in out.read_text()
    shown = labeler("budget")[1]
    [account] = [one for one in json.loads(labeler("budget", "--json")[1]) if one["level"] == "instance"]
    spent = 1 - account["left_nano"] / account["cap_nano"]
    assert 0 < spent < 1
    assert f"{spent:.1%}" in shown  # the share beside a bar says what the bar shows
    assert f"{1 - spent:.1%}" not in shown
    assert labeler("refuse", digest[:8], "--reason", "")[0] == 2
