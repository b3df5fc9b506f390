"""A home that is put back whole, erasable keys and all: its witness outside the home refuses it at every ask."""

from __future__ import annotations

import re
import shlex
import shutil
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from labeler.accounting.lifetime import vote_nano
from labeler.budget import budget_for
from labeler.errors import InvalidSetting, JournalBehind, JournalBroken, Unavailable
from labeler.ledger.chain import Anchor, Head
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.schema import agent_rounds
from labeler.messages.bodies import Ask, Settled
from labeler.sharing import unshard
from labeler.task import Task
from tests.command_line import Labeler
from tests.processes import wait_until
from tests.workers import test_votes_for_life
from tests.workers.agent_site import AGENT, NOW
from tests.workers.test_votes_for_life import RECORDS, LifeSite
from workers.agent.agent import Agent
from workers.agent.policy import read_policy
from workers.homes.journals import verify_journal
from workers.party.home import read_agent_config, witness_of

site = test_votes_for_life.site


@pytest.fixture
def witness(site: LifeSite, tmp_path: Path) -> Path:
    """A file on another disk, which the site's home names."""
    witness = tmp_path / "else where" / "agent.head"
    witness.parent.mkdir()
    site.make(witness_file=str(witness))
    return witness


def put_back_after_an_answer(site: LifeSite, copy: Path) -> int:
    """An answer, a copy of the home, another answer; then the copy replaces it. Return the spends of before."""
    with site.run():
        site.answer(site.ask_for_life(votes=4, nonce="first"))
    shutil.copytree(site.home, copy, symlinks=True)
    with site.run():
        site.answer(site.ask_for_life(votes=4, nonce="second"))
    spent = sum(site.spends())
    shutil.rmtree(site.home)
    copy.rename(site.home)
    return spent


def test_a_home_that_is_put_back_whole_is_refused_though_the_coordinator_would_let_it_answer(
    site: LifeSite, witness: Path, tmp_path: Path
) -> None:
    """The relay keeps no record of journals, as a coordinator that wants spends undone."""
    put_back_after_an_answer(site, tmp_path / "copy")
    with pytest.raises(JournalBehind, match=r"agent\.head has seen entry .*older copy"):
        site.start_once()
    # Nor where the witness is gone, or its disk: nobody could tell.
    witness.unlink()
    with pytest.raises(JournalBehind, match=r"agent\.head is missing"):
        site.start_once()
    witness.parent.rmdir()
    with pytest.raises(InvalidSetting, match="mount its disk"):
        site.start_once()


@pytest.mark.process
def test_who_goes_on_with_a_restored_home_is_told_what_its_witness_needs(
    site: LifeSite, witness: Path, tmp_path: Path, labeler: Labeler
) -> None:
    put_back_after_an_answer(site, tmp_path / "copy")
    accepted = labeler("journal", "accept-restored", "--home", site.home, "--reason", "x")
    assert accepted.code == 0
    with pytest.raises(JournalBehind, match=r"agent\.head has"):
        site.start_once()
    ledger = read_policy(site.home / "policy.toml").budget
    cap = budget_for(float(ledger.instance_epsilon), ledger.delta)
    for left, raised in re.findall(r"([\d.]+) was left: ([\d.]+)", accepted.out.split("instance_epsilon: if")[1]):
        more = budget_for(float(raised), ledger.delta) - cap
        assert more <= budget_for(float(left), ledger.delta), "a cap that gives back more than was left"
        assert more > 0.99 * budget_for(float(left), ledger.delta) - 1e-3 * cap
    [copy] = [line for line in accepted.out.splitlines() if line.startswith("  cp ")]
    subprocess.run(shlex.split(copy), check=True)
    site.start_once()


def test_without_a_witness_the_coordinator_alone_could_tell(site: LifeSite, tmp_path: Path) -> None:
    """As docs/backup.md says, such a coordinator gets the same votes twice."""
    spent = put_back_after_an_answer(site, tmp_path / "copy")
    assert 2 * sum(site.spends()) == spent
    with site.run():
        assert site.answer(site.ask_for_life(votes=4, nonce="third")) > 30


def test_a_home_gets_a_witness_later_by_a_copy_of_its_own_head(site: LifeSite, tmp_path: Path) -> None:
    with site.run():
        site.answer(site.ask_for_life(votes=4, nonce="first"))
    witness = tmp_path / "agent.head"
    site.make(witness_file=str(witness))
    with pytest.raises(JournalBehind, match=r"agent\.head is missing"):
        site.start_once()
    shutil.copy(site.home / "journal.head", witness)
    with site.run():
        site.answer(site.ask_for_life(votes=4, nonce="second"))
    assert witness.read_bytes() == (site.home / "journal.head").read_bytes()


@pytest.mark.parametrize("where", ["agent.head", "../agent.head", "HOME/agent.head", "HOME/../agent/deeper/head"])
def test_a_witness_in_the_home_is_none(site: LifeSite, where: str) -> None:
    (site.home / "deeper").mkdir()
    site.make(witness_file=where.replace("HOME", str(site.home)))
    with pytest.raises(InvalidSetting, match="an absolute path outside the home"):
        witness_of(site.home, read_agent_config(site.home))


def test_nothing_is_answered_whose_charge_the_witness_was_not_told_of_however_often_it_is_asked(
    site: LifeSite, witness: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with site.run():
        site.answer(site.ask_for_life(votes=4, nonce="first"))
        # Its disk is there and takes nothing any more.
        witness.rename(tmp_path / "aside")
        witness.mkdir()
        ask = site.ask_for_life(votes=4, nonce="second")
        site.send(ask)
        assert not site.refusals(1)[0].is_final
        site.send(ask)  # charged by now: what is asked again would be answered
        wait_until(lambda: [one for one in list(caplog.records) if "could not be handled" in one.getMessage()])
        mail = [one for name in site.talliers for one in site.relay.mail_of(name)]
        assert ask.round.digest not in {one.header.round_digest for one in mail}
        witness.rmdir()
        (tmp_path / "aside").rename(witness)
        site.shares(ask, 1)
    assert witness.read_bytes() == (site.home / "journal.head").read_bytes()


def test_no_answer_leaves_whose_spends_the_witness_was_not_told_of(
    site: LifeSite, witness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is lost between the charge and the answer, which is stored by then: that one leaves later, no other."""
    ask = site.ask_for_life(votes=4, nonce="first")
    lost = threading.Event()
    tries: list[int] = []
    commitment, remember = LifetimeSpends.commitment, Anchor.remember

    def storing(self: LifetimeSpends, **options: Any) -> dict[str, str]:
        if not tries:
            lost.set()
        return commitment(self, **options)

    def told(self: Anchor, head: Head) -> None:
        if self.path == witness and lost.is_set():
            tries.append(head.seq)
            raise Unavailable("its disk is away")
        remember(self, head)

    monkeypatch.setattr(LifetimeSpends, "commitment", storing)
    monkeypatch.setattr(Anchor, "remember", told)
    site.send(ask)
    with site.run():
        wait_until(lambda: len(tries) >= 3, what="the agent to tell its witness")
        assert not [one for name in site.talliers for one in site.relay.mail_of(name)]
        lost.clear()
        (shares,) = site.shares(ask, 1)
    assert abs(unshard([share.expand() for share in shares]).sum() / ask.task.scale - RECORDS) < 16
    assert site.spends() == [vote_nano(ask.task)] * RECORDS
    assert site.answers_in_the_chain() == 1
    assert witness.read_bytes() == (site.home / "journal.head").read_bytes()


def test_a_witness_that_was_out_of_reach_is_told_at_the_next_start(tmp_path: Path) -> None:
    witness = tmp_path / "elsewhere.head"
    with closing(open_database(tmp_path / "agent.db", anchor=tmp_path / "own.head", allow_unsynced=True)) as database:
        Ledger(database, clock=lambda: NOW, elsewhere=witness)
        Ledger(database, clock=lambda: NOW).open_account("agent:a", "instance", 100)
        assert witness.read_bytes() != (tmp_path / "own.head").read_bytes()
        Ledger(database, clock=lambda: NOW, elsewhere=witness)
        assert witness.read_bytes() == (tmp_path / "own.head").read_bytes()


def test_of_two_copies_that_run_at_once_one_takes_no_part(tmp_path: Path) -> None:
    """Each would else write its own head over the other's, and both would answer from one budget."""
    witness = tmp_path / "elsewhere" / "head"
    witness.parent.mkdir()
    homes = [tmp_path / "one", tmp_path / "other"]
    homes[0].mkdir()
    with closing(open_database(homes[0] / "journal.db", anchor=homes[0] / "anchor")) as database:
        Ledger(database, clock=lambda: NOW, elsewhere=witness).open_account("agent:a", "instance", 1000)
    shutil.copytree(*homes)
    databases = [open_database(home / "journal.db", anchor=home / "anchor") for home in homes]
    one, other = (Ledger(database, clock=lambda: NOW, elsewhere=witness) for database in databases)
    one.reserve("first", [Charge("agent:a", "instance", 10)])
    for _ in range(2):
        with pytest.raises(JournalBehind):
            other.remember()
    one.reserve("second", [Charge("agent:a", "instance", 10)])
    for database in databases:
        database.close()


# A home copied between the charge of a round and its answer, and put back once that has left


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


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(vars(one).get("sentence")) for one in list(caplog.records)]


def charged(home: Path) -> int:
    with open_database(home / "journal.db", read_only=True) as database, database.read() as connection:
        return len(connection.execute(select(agent_rounds).where(agent_rounds.c.state == "charged")).all())


def test_while_an_answer_cannot_be_made_no_other_round_of_votes_for_life_is_charged(
    site: LifeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = site.ask_for_life(nonce="stuck"), site.ask_for_life(nonce="other")
    computed, tries = Agent.computed, []

    def failing(self: Agent, task: Task, batch: Any, **options: Any) -> Any:
        if task.digest == stuck.task.digest and self.agent_id != "probe":
            tries.append(task)
            raise OSError("trouble of the site")
        return computed(self, task, batch, **options)

    monkeypatch.setattr(Agent, "computed", failing)
    with site.run():
        site.send(stuck)
        wait_until(lambda: len(tries) >= 2, what="the second try")
        site.send(other)
        polls = len(site.relay.polls)
        site.relay.wait_for_poll(polls + 3)
        assert charged(site.home) == 1
        assert not site.relay.received("answered")
        # Nobody misses the first any more; the other is asked for again, as a coordinator does.
        site.relay.send("answered", AGENT, Settled().encode(), task=stuck.task.digest, round=stuck.round.digest)
        site.send(other)
        assert votes(site, other).sum() > 30
    assert charged(site.home) == 0


@pytest.mark.process
@pytest.mark.parametrize("more", [0, 20])
def test_the_coordinator_has_seen_them_and_tells_the_agent(
    site: LifeSite, tmp_path: Path, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    """Also a copy that has grown longer than what was seen: promises that end are entries, too."""
    first = site.ask_for_life(nonce="first")
    copy_after_the_charge(site, tmp_path / "copy", first)
    site.relay.is_witness = True
    with site.run():
        assert votes(site, first).sum() > 30
        site.relay.wait_for("answered")
    put_back(site, tmp_path / "copy")
    with open_database(site.home / "journal.db", anchor=site.home / "journal.head") as database:
        for number in range(more):
            Ledger(database, clock=lambda: NOW).open_account("other", "instance", number)
    second = site.ask_for_life(nonce="second")
    site.relay.forget_mail(AGENT)
    site.send(second)
    site.send(first)
    before = len(site.relay.mail_of("tallier-0"))
    with site.run():
        # It hears so in the same answer that brings it the asks, before it looks at them.
        wait_until(lambda: [one for one in said_in(caplog) if "the coordinator has seen" in one])
    sent = len(site.relay.mail_of("tallier-0")) - before
    assert sent == 0, f"the copy sent {sent} answers more"
    assert ("has another entry" if more else "this is an older copy") in " ".join(said_in(caplog))


def test_every_answer_moves_the_head_whatever_it_spent_and_no_entry_tells(site: LifeSite) -> None:
    asks = [site.ask_for_life(nonce=str(number)) for number in range(3)]
    with site.run():
        found = [abs(site.answer(ask)) > 30 for ask in asks]
    assert found == [True, False, False]
    with site.ledger() as ledger:
        entries = [one for one in ledger.entries() if one.kind == "answer"]
    assert [one.reservation_id for one in entries] == [ask.round.digest for ask in asks]
    assert {(one.account, one.level, one.amount) for one in entries} == {(f"agent:{AGENT}", "instance", 0)}
    said = [str(one.detail["spends"]) for one in entries]
    assert {len(one) for one in said} == {32 + 1 + 64}
    assert len(set(said)) == len(said)


def test_spends_that_somebody_edits_are_found_by_the_chain(site: LifeSite) -> None:
    with site.run():
        site.answer(site.ask_for_life())
    verify_journal(site.home)
    with closing(sqlite3.connect(site.home / "journal.db")) as connection, connection:
        connection.execute("DROP TRIGGER life_spends_grow")
        connection.execute("UPDATE life_spends SET spent = 0")
    with pytest.raises(JournalBroken, match="what images have spent on votes for life is not what"):
        verify_journal(site.home)
    with pytest.raises(JournalBroken):
        site.start_once()


@pytest.mark.process
def test_of_rounds_asked_at_once_one_is_charged_and_not_stored_so_none_is_answered_twice_under_one_noise(
    site: LifeSite, tmp_path: Path
) -> None:
    """Without any witness: the second round, silent at first, is asked first of the copy."""
    asks = [site.ask_for_life(nonce=str(number)) for number in range(3)]
    copy_after_the_charge(site, tmp_path / "copy", *asks)
    open_rounds = charged(tmp_path / "copy")
    with site.run():
        before = {ask.round.digest: votes(site, ask) for ask in asks}
    silent = [ask for ask in asks if abs(before[ask.round.digest].sum()) < 16]
    assert len(silent) == 2
    put_back(site, tmp_path / "copy")
    # Its mail starts again, in the other order.
    site.relay.forget_mail(AGENT)
    for ask in reversed(asks):
        site.send(ask)
    with site.run():
        found = {ask.round.digest: votes(site, ask, 1) for ask in asks}
    for ask in silent:
        difference = found[ask.round.digest] - before[ask.round.digest]
        is_of_votes = float(np.abs(difference - np.round(difference)).max()) < 1e-9
        # Two draws of noise differ by whole votes in all 27 places at chance far below 1e-9 (a grid of 1/scale).
        assert not (is_of_votes and difference.any()), (
            f"one noise, two ballots: {int(difference.sum())} votes are read off without noise"
        )
    assert open_rounds == 1
