"""A home that is put back whole, erasable keys and all: its witness outside the home refuses it at every ask."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from labeler.accounting.lifetime import vote_nano
from labeler.errors import InvalidSetting, JournalBehind, Unavailable
from labeler.ledger.chain import Anchor, Head
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.sharing import unshard
from tests.workers.test_agent_service import NOW
from tests.workers.test_votes_for_life import RECORDS, LifeSite, life_site
from workers.cli import main
from workers.party.home import read_agent_config, witness_of


@pytest.fixture
def site(tmp_path: Path, make_shard: Any, relay: Any, start: Any) -> LifeSite:
    return life_site(tmp_path, make_shard, relay, start)


def put_back_after_an_answer(site: LifeSite, copy: Path) -> int:
    """An answer, a copy of the home, another answer; then the copy replaces it. Return the spends of before."""
    running = site.run()
    site.answer(site.ask_for_life(votes=4, nonce="first"))
    running.end()
    shutil.copytree(site.home, copy, symlinks=True)
    running = site.run()
    site.answer(site.ask_for_life(votes=4, nonce="second"))
    running.end()
    spent = sum(site.spends())
    shutil.rmtree(site.home)
    copy.rename(site.home)
    return spent


def test_a_home_that_is_put_back_whole_is_refused_though_the_coordinator_would_let_it_answer(
    site: LifeSite, tmp_path: Path
) -> None:
    """The relay keeps no record of journals, as a coordinator that wants spends undone."""
    witness = tmp_path / "elsewhere" / "agent.head"
    witness.parent.mkdir()
    site.make(witness_file=str(witness))
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


def test_who_goes_on_with_a_restored_home_is_told_what_its_witness_needs(
    site: LifeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    witness = tmp_path / "else where" / "agent.head"
    witness.parent.mkdir()
    site.make(witness_file=str(witness))
    put_back_after_an_answer(site, tmp_path / "copy")
    line = ["labeler", "journal", "accept-restored", "--home", str(site.home), "--reason", "x"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    with pytest.raises(JournalBehind, match=r"agent\.head has"):
        site.start_once()
    [copy] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cp ")]
    subprocess.run(shlex.split(copy), check=True)
    site.start_once()


def test_without_a_witness_the_coordinator_alone_could_tell(site: LifeSite, tmp_path: Path) -> None:
    """As docs/backup.md says, such a coordinator gets the same votes twice."""
    site.make()
    spent = put_back_after_an_answer(site, tmp_path / "copy")
    assert 2 * sum(site.spends()) == spent
    running = site.run()
    assert site.answer(site.ask_for_life(votes=4, nonce="third")) > 30
    running.end()


def test_a_home_gets_a_witness_later_by_a_copy_of_its_own_head(site: LifeSite, tmp_path: Path) -> None:
    site.make()
    running = site.run()
    site.answer(site.ask_for_life(votes=4, nonce="first"))
    running.end()
    witness = tmp_path / "agent.head"
    site.make(witness_file=str(witness))
    with pytest.raises(JournalBehind, match=r"agent\.head is missing"):
        site.start_once()
    shutil.copy(site.home / "journal.head", witness)
    running = site.run()
    site.answer(site.ask_for_life(votes=4, nonce="second"))
    running.end()
    assert witness.read_bytes() == (site.home / "journal.head").read_bytes()


@pytest.mark.parametrize("where", ["agent.head", "../agent.head", "HOME/agent.head", "HOME/../agent/deeper/head"])
def test_a_witness_in_the_home_is_none(site: LifeSite, where: str) -> None:
    site.home.mkdir(mode=0o700)
    (site.home / "deeper").mkdir()
    site.make(witness_file=where.replace("HOME", str(site.home)))
    with pytest.raises(InvalidSetting, match="an absolute path outside the home"):
        witness_of(site.home, read_agent_config(site.home))


def test_nothing_is_answered_whose_charge_the_witness_was_not_told_of_however_often_it_is_asked(
    site: LifeSite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = tmp_path / "elsewhere" / "agent.head"
    witness.parent.mkdir()
    site.make(witness_file=str(witness))
    running = site.run()
    site.answer(site.ask_for_life(votes=4, nonce="first"))
    # Its disk is there and takes nothing any more.
    witness.rename(tmp_path / "aside")
    witness.mkdir()
    ask = site.ask_for_life(votes=4, nonce="second")
    site.send(ask)
    assert not site.refusals(1)[0].is_final
    site.send(ask)  # charged by now: what is asked again would be answered
    end = time.monotonic() + 60
    while not any("could not be handled" in one.getMessage() for one in caplog.records):
        assert time.monotonic() < end, "waited 60 s for the agent to wait"
        mail = [one for name in site.talliers for one in site.relay.mail_of(name)]
        assert ask.round.digest not in {one.header.round_digest for one in mail}
        time.sleep(0.02)
    witness.rmdir()
    (tmp_path / "aside").rename(witness)
    site.shares(ask, 1)
    running.end()
    assert witness.read_bytes() == (site.home / "journal.head").read_bytes()


def test_no_answer_leaves_whose_spends_the_witness_was_not_told_of(
    site: LifeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is lost between the charge and the answer, which is stored by then: that one leaves later, no other."""
    witness = tmp_path / "elsewhere" / "agent.head"
    witness.parent.mkdir()
    site.make(witness_file=str(witness))
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
    running = site.run()
    end = time.monotonic() + 60
    while len(tries) < 3:
        assert time.monotonic() < end, "waited 60 s for the agent to tell its witness"
        assert not [one for name in site.talliers for one in site.relay.mail_of(name)]
        time.sleep(0.02)
    lost.clear()
    (shares,) = site.shares(ask, 1)
    running.end()
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
