"""A home copied between the charge of a round of votes for life and its answer, and put back once that has left."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from labeler.errors import JournalBehind, JournalBroken
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.schema import agent_rounds
from labeler.messages.bodies import Ask, Settled
from labeler.sharing import unshard
from labeler.task import Task
from tests.workers.test_agent_service import AGENT, NOW
from tests.workers.test_votes_for_life import RECORDS, LifeSite, life_site
from workers.agent.agent import Agent
from workers.homes.journals import verify_journal


@pytest.fixture
def site(tmp_path: Path, make_shard: Any, relay: Any, start: Any) -> LifeSite:
    return life_site(tmp_path, make_shard, relay, start)


def copy_after_the_charge(site: LifeSite, copy: Path, *asks: Ask) -> None:
    for ask in asks:
        site.send(ask)
    site.killed_at("agent.charged")
    shutil.copytree(site.home, copy, symlinks=True)


def votes(site: LifeSite, ask: Ask, which: int = 0) -> np.ndarray[Any, Any]:
    """An answer with its noise."""
    return unshard([share.expand() for share in site.shares(ask, which + 1)[which]]) / ask.task.scale


def put_back(site: LifeSite, copy: Path) -> None:
    shutil.rmtree(site.home)
    shutil.copytree(copy, site.home, symlinks=True)


def charged(home: Path) -> int:
    with open_database(home / "journal.db", read_only=True) as database, database.read() as connection:
        return len(connection.execute(select(agent_rounds).where(agent_rounds.c.state == "charged")).all())


def test_a_witness_has_seen_the_spends_of_an_answer_that_left(site: LifeSite, tmp_path: Path) -> None:
    """The relay keeps no record of journals, as a coordinator that wants spends undone."""
    (tmp_path / "elsewhere").mkdir()
    site.make(witness_file=str(tmp_path / "elsewhere" / "agent.head"))
    first = site.ask_for_life(nonce="first")
    copy_after_the_charge(site, tmp_path / "copy", first)
    running = site.run()
    assert votes(site, first).sum() > 30
    running.end()
    put_back(site, tmp_path / "copy")
    site.relay.forget_mail(AGENT)
    second = site.ask_for_life(nonce="second")
    site.send(second)
    try:
        site.start_once()
    except JournalBehind as error:
        assert "agent.head has seen entry" in str(error)  # noqa: PT017  # the other way is the attack
        return
    running = site.run()
    again = float(votes(site, second).sum())
    running.end()
    pytest.fail(f"after an answer of {RECORDS} votes, all that an image may cast, the copy cast {again:.0f} more")


def test_while_an_answer_cannot_be_made_no_other_round_of_votes_for_life_is_charged(
    site: LifeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.make()
    stuck, other = site.ask_for_life(nonce="stuck"), site.ask_for_life(nonce="other")
    computed, tries = Agent.computed, []

    def failing(self: Agent, task: Task, batch: Any, **options: Any) -> Any:
        if task.digest == stuck.task.digest and self.agent_id != "probe":
            tries.append(task)
            raise OSError("trouble of the site")
        return computed(self, task, batch, **options)

    monkeypatch.setattr(Agent, "computed", failing)
    running = site.run()
    site.send(stuck)
    end = time.monotonic() + 60
    while len(tries) < 2:
        assert time.monotonic() < end, "waited 60 s for the second try"
        time.sleep(0.02)
    site.send(other)
    polls = len(site.relay.polls)
    site.relay.wait_for_poll(polls + 3)
    assert charged(site.home) == 1
    assert not site.relay.received("answered")
    # Nobody misses the first any more; the other is asked for again, as a coordinator does.
    site.relay.send("answered", AGENT, Settled().encode(), task=stuck.task.digest, round=stuck.round.digest)
    site.send(other)
    assert votes(site, other).sum() > 30
    running.end()
    assert charged(site.home) == 0


@pytest.mark.parametrize("more", [0, 20])
def test_the_coordinator_has_seen_them_and_tells_the_agent(
    site: LifeSite, tmp_path: Path, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    """Also a copy that has grown longer than what was seen: promises that end are entries, too."""
    site.make()
    first = site.ask_for_life(nonce="first")
    copy_after_the_charge(site, tmp_path / "copy", first)
    site.relay.is_witness = True
    running = site.run()
    assert votes(site, first).sum() > 30
    site.relay.wait_for("answered")
    running.end()
    put_back(site, tmp_path / "copy")
    with open_database(site.home / "journal.db", anchor=site.home / "journal.head") as database:
        for number in range(more):
            Ledger(database, clock=lambda: NOW).open_account("other", "instance", number)
    second = site.ask_for_life(nonce="second")
    site.relay.forget_mail(AGENT)
    site.send(second)
    site.send(first)
    before = len(site.relay.mail_of("tallier-0"))
    polls = len(site.relay.polls)
    running = site.run()
    site.relay.wait_for_poll(polls + 1)
    time.sleep(1.0)  # an answer takes a tenth of it
    running.end()
    sent = len(site.relay.mail_of("tallier-0")) - before
    assert sent == 0, f"the copy sent {sent} answers more"
    said = " ".join(str(vars(one).get("sentence")) for one in caplog.records)
    assert "the coordinator has seen" in said
    assert ("has another entry" if more else "this is an older copy") in said


def test_every_answer_moves_the_head_whatever_it_spent_and_no_entry_tells(site: LifeSite) -> None:
    site.make()
    running = site.run()
    asks = [site.ask_for_life(nonce=str(number)) for number in range(3)]
    found = [abs(site.answer(ask)) > 30 for ask in asks]
    running.end()
    assert found == [True, False, False]
    with open_database(site.home / "journal.db", read_only=True) as database:
        entries = [one for one in Ledger(database, clock=lambda: NOW).entries() if one.kind == "answer"]
    assert [one.reservation_id for one in entries] == [ask.round.digest for ask in asks]
    assert {(one.account, one.level, one.amount) for one in entries} == {(f"agent:{AGENT}", "instance", 0)}
    said = [str(one.detail["spends"]) for one in entries]
    assert {len(one) for one in said} == {32 + 1 + 64}
    assert len(set(said)) == len(said)


def test_spends_that_somebody_edits_are_found_by_the_chain(site: LifeSite) -> None:
    site.make()
    running = site.run()
    site.answer(site.ask_for_life())
    running.end()
    verify_journal(site.home)
    with closing(sqlite3.connect(site.home / "journal.db")) as connection, connection:
        connection.execute("DROP TRIGGER life_spends_grow")
        connection.execute("UPDATE life_spends SET spent = 0")
    with pytest.raises(JournalBroken, match="what images have spent on votes for life is not what"):
        verify_journal(site.home)
    with pytest.raises(JournalBroken):
        site.start_once()


def test_of_rounds_asked_at_once_one_is_charged_and_not_stored_so_none_is_answered_twice_under_one_noise(
    site: LifeSite, tmp_path: Path
) -> None:
    """Without any witness: the second round, silent at first, is asked first of the copy."""
    site.make()
    asks = [site.ask_for_life(nonce=str(number)) for number in range(3)]
    copy_after_the_charge(site, tmp_path / "copy", *asks)
    open_rounds = charged(tmp_path / "copy")
    running = site.run()
    before = {ask.round.digest: votes(site, ask) for ask in asks}
    running.end()
    silent = [ask for ask in asks if abs(before[ask.round.digest].sum()) < 16]
    assert len(silent) == 2
    put_back(site, tmp_path / "copy")
    # Its mail starts again, in the other order.
    site.relay.forget_mail(AGENT)
    for ask in reversed(asks):
        site.send(ask)
    running = site.run()
    found = {ask.round.digest: votes(site, ask, 1) for ask in asks}
    running.end()
    for ask in silent:
        difference = found[ask.round.digest] - before[ask.round.digest]
        is_of_votes = float(np.abs(difference - np.round(difference)).max()) < 1e-9
        # Two draws of noise differ by whole votes in all 27 places at chance far below 1e-9 (a grid of 1/scale).
        assert not (is_of_votes and difference.any()), (
            f"one noise, two ballots: {int(difference.sum())} votes are read off without noise"
        )
    assert open_rounds == 1
