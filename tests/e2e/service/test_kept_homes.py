"""Federations and runs that earlier versions left half done, taken up by today's programs."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from api.client import Client
from tests.e2e.service.conftest import running, wait_until
from tests.homes import CUTS, VERSIONS, WINNER_CUTS, CutHome, unpack, unpack_cut
from workers.homes.keys import make_token_offline

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

SINCE_VERSION_2 = 'max_noise_contributors = 3\nreleases = ["histogram", "winner"]\n'
"""What a site's policy must say since version 2, and each hospital decides for itself."""

ACCOUNTS = {
    "coordinator": ("agent:agent-1", "agent:agent-2", "federation"),
    "agents/agent-1": ("agent:agent-1",),
    "agents/agent-2": ("agent:agent-2",),
}
PRICE = (375_000_440, 30_000_036)
"""Of each job of the homes before machines, about an agent and about an instance, as their own version charged it."""


def rows(cut: CutHome, role: str, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(cut.federation / role / "journal.db")) as db:
        return db.execute(query).fetchall()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_federation_finishes_the_job_that_was_charged_and_charges_no_more(version: int, tmp_path: Path) -> None:
    kept = unpack(version, tmp_path / "kept")
    if version == 1:
        for policy in kept.federation.glob("agents/*/policy.toml"):
            text = policy.read_text()
            assert "max_noise_contributors" not in text
            policy.write_text(re.sub(r"^\[allow\]\n", f"[allow]\n{SINCE_VERSION_2}", text, flags=re.MULTILINE))
    coordinator = kept.federation / "coordinator"
    token = make_token_offline(coordinator, name="the test", role="admin")["token"]
    with running(kept.federation) as service, Client(service.url, token) as client:
        wait_until(lambda: client.job(kept.half_done).state == "completed", seconds=60, what="the half-done job")
        assert len(pq.read_table(client.labels(kept.half_done, tmp_path / "labels.parquet", of="questions"))) == 6
        accounts = {(one.account, one.level): one for one in client.budget().accounts}
        for account, level, cap, spent, posted in kept.facts["coordinator"]["accounts"]:
            now = accounts[account, level]
            assert (now.cap_nano, now.posted_nano, now.reserved_nano) == (cap, posted, spent - posted)
    for role in kept.facts:
        assert list((kept.federation / role).glob(f"journal.db.v{version}-*"))


@pytest.mark.parametrize("place", CUTS)
def test_a_home_of_the_version_before_machines_finishes_its_job_with_one_charge(place: str, tmp_path: Path) -> None:
    cut = unpack_cut(place, tmp_path / "kept")
    token = make_token_offline(cut.federation / "coordinator", name="the test", role="admin")["token"]
    with running(cut.federation, agents=2) as service, Client(service.url, token) as client:
        wait_until(lambda: client.job(cut.half_done).state == "completed", seconds=60, what="the half-done job")
        votes = {
            job: pq.read_table(client.labels(job, tmp_path / f"{job}.parquet", of="questions"))["noisy_votes"]
            for job in (cut.done, cut.half_done)
        }
        assert [len(one) for one in votes.values()] == [6, 6]
    if place != "agent.charged":  # both agents were charged, and with the charge their noise is fixed
        assert votes[cut.half_done].to_pylist() == cut.release
    assert rows(cut, "coordinator", "SELECT job_id, number, 'opened', round_digest FROM rounds ORDER BY 1, 2") == [
        (job, number, "opened", digest) for job, number, _, digest in cut.rounds
    ]
    check_paid_twice(cut)


@pytest.mark.parametrize("place", WINNER_CUTS)
def test_a_home_of_winners_of_the_version_before_machines_finds_the_same_winners_with_one_charge(
    place: str, tmp_path: Path
) -> None:
    cut = unpack_cut(place, tmp_path / "kept", winner=True)
    token = make_token_offline(cut.federation / "coordinator", name="the test", role="admin")["token"]
    with running(cut.federation, agents=2) as service, Client(service.url, token) as client:
        wait_until(lambda: client.job(cut.half_done).state == "completed", seconds=60, what="the half-done job")
        table = pq.read_table(client.labels(cut.half_done, tmp_path / "labels.parquet", of="questions"))
        assert table["label"].to_pylist() == cut.release
    check_paid_twice(cut)


def check_paid_twice(cut: CutHome) -> None:
    """Each account has paid for the completed job, and once as much for the other."""
    for role, accounts in ACCOUNTS.items():
        paid = rows(cut, role, "SELECT account, posted, spent FROM ledger_accounts ORDER BY account, level")
        assert [account for account, *_ in paid] == [account for account in accounts for _ in range(2)]
        for (account, posted, spent), price in zip(paid, PRICE * len(accounts), strict=True):
            assert posted == spent == 2 * price, account
