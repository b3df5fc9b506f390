"""A thief of everything, with every backup and replica, later learns nothing of a round that is over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import text

from labeler.errors import ProtocolViolation
from labeler.ledger.database import open_database
from labeler.messages.bodies import Settled, share_from_bytes
from labeler.randomness import derive_key
from labeler.system.erasable import is_locked_away, keys_in, take_out
from tests.processes import wait_until
from tests.workers.agent_site import AGENT, Site
from workers.homes.journals import backup_home

MARK = b"labeler-erasable/1\n"


def locked_away(journal: Path) -> list[bytes]:
    """Every answer that a copy of an agent's journal holds."""
    with open_database(journal, read_only=True) as database, database.read() as connection:
        found = connection.execute(text("SELECT answer FROM agent_rounds WHERE answer IS NOT NULL")).scalars().all()
    return [bytes(one) for one in found]


def everything(*folders: Path) -> list[bytes]:
    return [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]


def opens(key: bytes, data: bytes, context: str) -> bool:
    body = data[len(MARK) :]
    try:
        AESGCM(derive_key(key, b"locked away")).decrypt(body[:12], body[12:], context.encode())
    except InvalidTag:
        return False
    return True


def any_opens(loot: list[bytes], data: bytes, context: str) -> bool:
    """Try every 32 bytes in a row that lie anywhere in the loot."""
    tried = {one[at : at + 32] for one in loot for at in range(len(one) - 31)}
    return any(opens(key, data, context) for key in tried)


@pytest.mark.parametrize("method", ["knn", "ensemble"])
def test_yesterdays_backup_and_todays_disk_together_open_nothing_of_a_settled_round(
    site: Site, tmp_path: Path, method: str
) -> None:
    site.write_policy(methods=[method])
    ask = site.ask(method=method, k=5 if method == "knn" else 1)
    site.send(ask)
    with site.run():
        site.relay.wait_for("answered")
        backup_home(site.home, tmp_path / "yesterday")
        # What a replica has: every file as it is, write-ahead log included, without the folder that nothing may copy.
        shutil.copytree(site.home, tmp_path / "replica", ignore=shutil.ignore_patterns("erasable"))
        in_time = keys_in(site.home / "erasable")[ask.round.digest]
        site.relay.send("answered", AGENT, Settled().encode(), task=ask.task.digest, round=ask.round.digest)
        wait_until(lambda: ask.round.digest not in keys_in(site.home / "erasable"))
        shutil.copytree(site.home, tmp_path / "today")

    (answer,) = locked_away(tmp_path / "yesterday" / "journal.db")
    assert is_locked_away(answer)
    assert locked_away(tmp_path / "today" / "journal.db") == []
    # Who was there in time has the sealed bodies, which the talliers' keys open.
    assert any_opens([in_time], answer, ask.round.digest)
    _, *bodies = take_out(in_time, ask.round.digest, answer)  # the first part says when it may leave
    sent = [site.relay.mail_of(name)[0].body for name in site.talliers]
    assert list(bodies) == sent
    for body in bodies:  # who has both key and journal in time has nothing without the talliers' keys
        with pytest.raises(ProtocolViolation):
            share_from_bytes(body, max_entries=10_000)
    # Who comes later has everything else.
    loot = everything(tmp_path / "yesterday", tmp_path / "replica", tmp_path / "today")
    assert len(b"".join(loot)) > 100_000
    assert not any_opens(loot, answer, ask.round.digest)
    assert not any(in_time in one or body[:64] in one for one in loot for body in bodies)
