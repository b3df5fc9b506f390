"""The lease of who drives, on a real PostgreSQL; and what a process remembers that only reads what another writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from feature_store.clock import now_utc
from feature_store.journal.database import READER_FRESH_S, open_database
from feature_store.journal.leases import Leases
from feature_store.journal.ledger import Charge, Ledger
from feature_store.journal.parties import PartyStore
from feature_store.journal.tokens import TokenStore
from labeler.errors import InvalidSetting, JournalInUse
from tests.postgres_server import PostgresServer

SHORT_S = 0.4


@pytest.fixture
def journal(postgres_server: PostgresServer) -> Iterator[str]:
    url = postgres_server.new_database()
    yield url
    postgres_server.give_back(url)


@contextmanager
def candidate(journal: str, name: str, lease_s: float = 600.0) -> Iterator[Leases]:
    one = Leases(journal, url=f"http://{name}", lease_s=lease_s)
    try:
        yield one
    finally:
        one.close()


def test_one_has_the_lease_until_it_is_over_or_given_back(journal: str) -> None:
    with candidate(journal, "a") as first, candidate(journal, "b") as second:
        assert first.holder() is None
        assert (first.take(), second.take(), first.take()) == (True, False, False)
        holder = second.holder()
        assert holder is not None
        assert (holder.owner, holder.url, holder.term) == (first.owner, "http://a", 1)
        assert first.renew()
        assert not second.renew(), "another's lease is not renewed"
        second.give_back()
        assert first.renew(), "nor given back"
        first.give_back()
        assert not first.renew(), "it is over"
        assert second.take()
        holder = first.holder()
        assert holder is not None
        assert (holder.url, holder.term) == ("http://b", 2)


def test_a_lease_that_is_not_renewed_is_taken_by_another_and_cannot_be_renewed_any_more(journal: str) -> None:
    with candidate(journal, "a", SHORT_S) as first, candidate(journal, "b") as second:
        assert first.take()
        while not second.take():
            time.sleep(0.02)
        assert not first.renew()
        assert not first.take()


def test_who_comes_while_another_is_taking_it_does_not_wait(journal: str) -> None:
    with candidate(journal, "a") as first, psycopg.connect(journal) as taking:
        taking.execute("SELECT term FROM coordinator_leases FOR UPDATE")
        assert not first.take(), "the row is locked, and skipped"
        taking.rollback()
        assert first.take()


def test_the_owner_before_is_ended_only_where_it_shares(journal: str, tmp_path: Path) -> None:
    with candidate(journal, "a") as one:
        assert one.take()
        with open_database(journal, side_by_side=True) as hanging:
            with pytest.raises(JournalInUse):
                open_database(journal, side_by_side=True)
            assert one.end_owner()
            with open_database(journal, side_by_side=True) as following:
                Ledger(following, clock=now_utc)  # whose first write leaves its name
                with pytest.raises(JournalInUse), hanging.write():
                    pass
        with open_database(journal):
            assert not one.end_owner()


def test_who_hung_while_it_opened_the_journal_does_not_end_who_leads_by_now(journal: str) -> None:
    with candidate(journal, "a", SHORT_S) as hung, candidate(journal, "b") as leading:
        assert hung.take()
        while not leading.take():
            time.sleep(0.02)
        with open_database(journal, side_by_side=True) as following:
            assert not hung.end_owner()
            Ledger(following, clock=now_utc)  # writes
        assert not hung.renew()


def test_a_file_has_no_lease(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="share a journal in PostgreSQL"):
        Leases(str(tmp_path / "journal.db"), url="http://a", lease_s=1.0)


def test_who_only_reads_remembers_balances_for_a_second_and_tokens_and_parties_not_at_all(journal: str) -> None:
    with open_database(journal, side_by_side=True) as written:
        ledger, tokens, parties = Ledger(written, clock=now_utc), TokenStore(written), PartyStore(written)
        ledger.open_account("federation", "instance", 1000)
        record, secret = tokens.create("somebody", "requester")
        with open_database(journal, read_only=True) as read:
            known = Ledger(read, clock=now_utc, anchored=False)
            readers, enrolled = TokenStore(read), PartyStore(read)
            assert known.known_balances.all()["federation", "instance"].spent == 0
            ledger.reserve("job-1", [Charge("federation", "instance", 7)])
            while known.known_balances.all()["federation", "instance"].spent != 7:
                time.sleep(0.02)
            assert known.balance("federation", "instance").spent == 7
            assert known.known_head() == ledger.head()
            assert known.known_balances._until_s <= time.monotonic() + READER_FRESH_S
            assert readers.find(secret) is not None
            assert readers.remembered(secret) is None
            tokens.revoke(record.token_id)
            assert readers.find(secret) is None, "at once"
            assert enrolled.all() == ()
            parties.enrol("east", "agent", verify_key="1" * 64, seal_key="2" * 64)
            assert [one.party_id for one in enrolled.all()] == ["east"]
