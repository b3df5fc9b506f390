"""The agent's process: what it answers, what it refuses in which words, and that killing it changes nothing."""

from __future__ import annotations

import re
import shutil
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting, JournalBehind, PolicyRefusal, Unavailable
from labeler.messages.bodies import Ask, Settled
from labeler.planning import price
from labeler.rounds.agent import NOT_KEPT
from labeler.sharing import unshard
from labeler.system.erasable import ERASABLE_FOLDER, keys_in
from labeler.system.keys import PartyKeys
from labeler.task import Task
from tests.processes import wait_until
from tests.workers.agent_site import AGENT, NOW, Site, same
from workers.agent.agent import Agent
from workers.agent.decisions import approve, revoke_approval
from workers.agent.driver import AgentDriver
from workers.agent.service import run_agent
from workers.homes.journals import accept_restored_journal, backup_home
from workers.party.home import KEYS_FILE
from workers.party.link import converse


def test_each_tallier_can_open_its_share_and_together_they_are_votes_and_noise(site: Site) -> None:
    ask = site.ask()
    for _ in range(3):  # which pile up for one round, and have one answer
        site.send(ask)
    with site.run():
        (shares,) = site.shares(ask, 1)
        (answered,) = site.relay.wait_for("answered")
    assert len(site.relay.mail_of("tallier-0")) == 1
    noisy = unshard([share.expand() for share in shares])
    assert noisy.shape == (9, 3)
    assert 0.4 < noisy.std() / ask.task.share_sigma_grid < 1.8
    assert not any(share.is_seeded for share in shares)
    assert (answered.header.task_digest, answered.header.round_digest) == (ask.task.digest, ask.round.digest)
    assert site.spent() == price(ask.task).instance.charge_nano


def test_a_task_waits_for_approval_and_is_answered_after_it(site: Site) -> None:
    site.write_policy(approval=True)
    ask = site.ask()
    site.send(ask)
    with site.run():
        (refusal,) = site.refusals(1)
        assert (refusal.reason, refusal.is_final) == ("awaiting-approval", False)
        assert ask.task.digest in refusal.sentence
        assert site.waiting() == [ask.task.digest]
        approve(site.home, ask.task.digest)
        site.shares_of(ask)
        # Taken back after the charge, it is about what comes: the stored bytes are sent again.
        revoke_approval(site.home, ask.task.digest)
        site.send(ask)
        first, second = site.shares(ask, 2)
        assert same(first, second)
        site.send(site.ask(nonce="another task"))
        assert not site.refusals(2)[1].is_final


def test_a_task_that_does_not_fit_the_records_never_waits_for_a_person(site: Site) -> None:
    site.write_policy(approval=True)
    site.send(site.ask(classes=[f"{number:05d}" for number in range(30_000)]))
    site.send(site.ask(backbone_fingerprint="0" * 64))
    with site.run():
        assert [refusal.reason for refusal in site.refusals(2)] == ["mixed-shards", "mixed-shards"]
    assert site.waiting() == []


def test_of_a_budget_the_coordinator_hears_only_that_it_does_not_cover_the_round(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.send(site.ask(sigma_votes=0.5))
    with site.run():
        (refusal,) = site.refusals(1)
    assert refusal.sentence == (
        "account 'agent:hospital-1', instance level: the site's budget does not cover this round; how much is left the "
        "site alone sees (labeler agent budget)"
    )
    assert refusal.reason == "budget-exceeded"
    (logged,) = [record.sentence for record in caplog.records if record.message == "refused"]
    assert re.search(r"\d{6}", logged)


def test_an_agent_without_its_journal_does_not_start_with_a_full_budget(site: Site) -> None:
    ask = site.ask()
    site.send(ask)
    with site.run():
        site.relay.wait_for("answered")
    for path in site.home.glob("journal*"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(JournalBehind, match=r"journal\.db was lost, and with it what this party has spent"):
            run_agent(site.home, stop=threading.Event())


def test_a_policy_that_cannot_be_read_refuses_everything_until_it_can(site: Site) -> None:
    with site.run():
        site.relay.wait_for_poll()
        (site.home / "policy.toml").write_text("[budget")
        ask = site.ask()
        site.send(ask)
        (refusal,) = site.refusals(1)
        assert "allows nothing as it is" in refusal.sentence
        site.write_policy()
        site.shares_of(ask)


def test_it_does_not_start_without_a_policy(site: Site) -> None:
    (site.home / "policy.toml").unlink()
    with pytest.raises(PolicyRefusal, match="cannot be read"):
        run_agent(site.home, stop=threading.Event())


def test_poisoned_messages_are_refused_or_skipped_and_the_next_is_answered(site: Site) -> None:
    ask = site.ask()
    stranger = PartyKeys.generate()
    forged = {"sender": "coordinator", "sequence": 10**6}
    site.relay.send_as(stranger, "ask", AGENT, ask.encode(), round=ask.round, **forged)
    site.relay.send("ask", AGENT, b"\x00 no ask", task=ask.task.digest, round=ask.round.digest)
    site.relay.send("ask", AGENT, ask.encode(), task="b" * 64, round="b" * 64)
    site.relay.send("sum", AGENT, b"{}", task=ask.task.digest, round=ask.round.digest)
    site.relay.send("ask", AGENT, b"no digest")
    good = site.ask(nonce="good")
    with site.run():
        site.shares_of(good)
    reasons = {refusal.reason for refusal in site.refusals(2)}
    assert reasons == {"protocol-violation", "wrong-digest"}
    assert site.spent() == price(good.task).instance.charge_nano


def test_a_memory_limit_without_room_for_a_record_is_found_at_the_start_and_not_when_asked(site: Site) -> None:
    text = (site.home / "agent.toml").read_text()
    (site.home / "agent.toml").write_text(text + "memory_limit_bytes = 1\n")
    with pytest.raises(InvalidSetting, match="too small for records of dimension"):
        run_agent(site.home, stop=threading.Event())


def test_an_answer_that_cannot_be_made_is_tried_until_the_round_is_over_while_others_go_on_and_then_silence(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("labeler.rounds.agent.FIRST_PAUSE_S", 0.01)
    tries = []
    troubles = [MemoryError(), OSError("disk full"), BadData("27291 records")]

    def ballots(agent: Agent, task: Task, *_: Any) -> Any:
        if agent.agent_id != AGENT:
            return real(agent, task, *_)  # over drawn rows
        tries.append(task.digest)
        if tries.count(hopeless.task.digest) == 3:
            site.now += timedelta(seconds=90)
        if task.nonce == "hopeless":
            raise troubles.pop()
        return real(agent, task, *_)

    real = Agent.ballots
    monkeypatch.setattr(Agent, "ballots", ballots)
    hopeless = site.ask(nonce="hopeless", expires_at=NOW.timestamp() + 60)
    good = site.ask(nonce="good")
    for ask in (hopeless, good):  # in one mail, whatever the machine does meanwhile
        site.send(ask)
    with site.run():
        site.relay.wait_for("answered")
        wait_until(lambda: "the round is over, and was not answered" in caplog.text, what="the end of the round")
    # The coordinator cannot tell that an attempt failed, nor when the next is made.
    assert {poll.wait_s for poll in site.relay.polls[1:]} == {0.5}
    # The other round was answered before the hopeless one was tried again.
    assert tries == [hopeless.task.digest, good.task.digest, *[hopeless.task.digest] * 2]
    assert "disk full" not in caplog.text
    assert site.relay.received("refused") == []
    assert {message.header.round_digest for message in site.relay.mail_of("tallier-0")} == {good.round.digest}


def test_what_could_not_be_erased_by_the_clock_is_erased_by_the_same_process_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full at the one moment: memory must not believe what the journal does not."""
    first, found = threading.Event(), []
    ask = site.ask(expires_at=NOW.timestamp() + 60)
    site.send(ask)
    folder, key = site.home / ERASABLE_FOLDER, ask.round.digest

    def then_tidy(link: Any, driver: AgentDriver, stop: threading.Event, **_: Any) -> None:
        converse(link, driver, first)
        found.append(key in keys_in(folder))
        site.now += timedelta(days=1)
        with monkeypatch.context() as full:

            def refuse(*_: Any, **__: Any) -> None:
                raise Unavailable("the disk is full")

            full.setattr("labeler.ledger.agent_memory.JournalRounds.erase_in", refuse)
            with pytest.raises(Unavailable):
                driver.tidy()
        found.append(key in keys_in(folder))
        driver.tidy()
        found.append(key in keys_in(folder))

    monkeypatch.setattr("workers.agent.service.converse", then_tidy)
    with site.run(wait_s=0.2):
        site.relay.wait_for("answered")
        first.set()
        wait_until(lambda: len(found) == 3)
    assert found == [True, True, False]


def settle(site: Site, ask: Ask) -> None:
    site.relay.send("answered", AGENT, Settled().encode(), task=ask.task.digest, round=ask.round.digest)


def keys_of(site: Site) -> list[str]:
    return sorted(keys_in(site.home / "erasable"))


@pytest.mark.parametrize(
    ("how", "has_changed"),
    [("settled", False), ("settled", True), ("expired", False), ("expired", True), ("far away", False)],
)
def test_what_nobody_misses_any_more_is_erased_and_refused_for_ever_in_the_same_words(
    site: Site, how: str, has_changed: bool
) -> None:
    """A deadline far away keeps nothing for longer than a month."""
    ask = site.ask(expires_at=1e11 - 1 if how == "far away" else NOW.timestamp() + 60)
    site.send(ask)
    with site.run():
        site.relay.wait_for("answered")
        assert keys_of(site) == sorted([ask.round.digest, "home"])
        if has_changed:
            other = Shard.open(site.shard.path)
            other.delete(other.record_ids[:7])
        if how == "settled":
            settle(site, ask)
        else:
            site.now += timedelta(days=1 if how == "expired" else 32)
            ask = replace(ask, expires_at=max(ask.expires_at, site.now.timestamp() + 60))
        site.send(ask)
        site.refusals(1)
    with site.run():
        site.send(ask)
        for refusal in site.refusals(2):
            assert (refusal.sentence, refusal.reason, refusal.is_final) == (NOT_KEPT, "privacy-refusal", True)
        assert keys_of(site) == ["home"]
    assert site.spent() == price(ask.task).instance.charge_nano


@pytest.mark.parametrize("is_revoked", [False, True])
def test_a_settlement_that_never_comes_costs_an_hour_whether_or_not_the_coordinator_can_be_reached(
    site: Site, is_revoked: bool, impatient: None
) -> None:
    ask = site.ask(expires_at=NOW.timestamp() + 60)
    site.send(ask)
    with site.run(wait_s=0.1):
        site.relay.wait_for("answered")
        site.now = NOW + timedelta(minutes=61)
        site.relay.turn_away(is_revoked=is_revoked)
        assert ask.round.digest in keys_of(site), "until an hour after its deadline it may be asked again"
        site.now = NOW + timedelta(minutes=61, seconds=1)
        wait_until(lambda: keys_of(site) == ["home"])


def test_a_settlement_of_a_round_it_was_not_charged_for_or_that_is_none_changes_nothing(site: Site) -> None:
    ask = site.ask()
    settle(site, ask)
    site.relay.send("answered", AGENT, b"{}", task=ask.task.digest, round=ask.round.digest)
    stranger = PartyKeys.generate()
    site.send(ask)
    with site.run():
        site.relay.wait_for("answered")
        forged = {"sender": "coordinator", "sequence": 10**6}
        site.relay.send_as(stranger, "answered", AGENT, Settled().encode(), round=ask.round, **forged)
        site.relay.send("answered", AGENT, b"{}", task=ask.task.digest, round=ask.round.digest)
        site.send(ask)
        first, again = site.shares(ask, 2)
    assert same(first, again)


def test_a_home_that_came_back_from_a_backup_serves_nothing_until_all_that_is_left_is_written_off(
    site: Site, tmp_path: Path
) -> None:
    ask = site.ask()
    with site.run():
        site.shares_of(ask)
    backup_home(site.home, tmp_path / "backup")
    assert not (tmp_path / "backup" / "erasable").exists()
    site.home.rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "backup", site.home)
    for _ in range(2):
        with pytest.raises(JournalBehind, match="restored from a backup, which holds none"):
            run_agent(site.home, stop=threading.Event())
    accept_restored_journal(site.home, reason="disk lost")
    with site.run():
        site.send(ask)
        assert site.refusals(1)[0].sentence == NOT_KEPT
        site.send(site.ask(nonce="new"))
        assert "budget does not cover" in site.refusals(2)[1].sentence


def test_facts_hold_the_classes_and_no_number_of_records(site: Site) -> None:
    with site.run():
        site.relay.wait_for_poll(2)
    assert dict(site.relay.polls[1].facts) == {
        "backbone_fingerprint": site.shard.fingerprint,
        "classes": list(site.shard.classes),
        "dimension": site.shard.dimension,
    }


def test_nothing_secret_is_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    ask = site.ask()
    site.send(ask)
    with site.run():
        site.relay.wait_for("answered")
        # The relay has it before the agent hears that it has, and says so.
        wait_until(lambda: "answered" in [record.getMessage() for record in caplog.records])
    written = " ".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    key = keys_in(site.home / "erasable")[ask.round.digest]
    assert key.hex() not in written
    assert repr(key)[2:-1] not in written
    assert (site.home / KEYS_FILE).read_text().split('"signing_key": "')[1][:64] not in written
