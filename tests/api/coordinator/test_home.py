"""The home of a coordinator: one at a time, keys that parties know, and what a crash left half-received."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import CoordinatorConfig
from api.coordinator.service import Coordinator
from api.coordinator.stores import LOCK_FILE, owning_home
from labeler.driver.mail_memory import MemoryMailbox
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import InvalidSetting, JournalInUse
from labeler.system.keys import PartyKeys
from tests.api.conftest import config_fields


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labeler.ledger.database.PATIENCE_S", 0.0)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def journal(request: pytest.FixtureRequest) -> str:
    return "journal.db" if request.param == "sqlite" else request.getfixturevalue("postgres_server").new_database()


def config(home: Path, journal: str) -> CoordinatorConfig:
    home.mkdir(mode=0o700, exist_ok=True)
    return CoordinatorConfig.model_validate(config_fields(home) | {"journal": journal})


def contents(home: Path) -> dict[str, Any]:
    """Every file but the journal's own, which its owner may be writing."""
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file() and not path.name.startswith("journal.db")
    }


def test_a_second_coordinator_of_a_home_is_refused_and_leaves_uploads_under_way_alone(
    tmp_path: Path, journal: str
) -> None:
    home = tmp_path / "home"
    first = Coordinator.open(config(home, journal), mailbox=MemoryMailbox())
    upload = home / "incoming" / "upload"
    upload.mkdir(parents=True)
    (upload / "half").write_bytes(b"half of an image")
    before = contents(home)
    with pytest.raises(JournalInUse, match=r"another coordinator runs on the home 'home'.*Stop it first"):
        Coordinator.open(config(home, journal), mailbox=MemoryMailbox())
    assert contents(home) == before
    first.stop()
    Coordinator.open(config(home, journal), mailbox=MemoryMailbox()).stop()


def test_a_home_is_free_again_after_an_opening_that_failed(tmp_path: Path, impatient: None) -> None:
    home = tmp_path / "home"
    broken = config(home, "nowhere/journal.db")
    with pytest.raises(InvalidSetting, match="folder does not exist"):
        Coordinator.open(broken, mailbox=MemoryMailbox())
    with owning_home(home):
        pass


def test_the_lock_is_the_owners_alone_and_a_missing_home_is_told(tmp_path: Path) -> None:
    with owning_home(tmp_path):
        assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
        with pytest.raises(JournalInUse), owning_home(tmp_path):
            pass
    with pytest.raises(InvalidSetting, match="cannot be used"), owning_home(tmp_path / "nowhere"):
        pass


@pytest.fixture
def plain(tmp_path: Path) -> CoordinatorConfig:
    return config(tmp_path / "home", "journal.db")


def test_keys_are_made_once_and_kept(plain: CoordinatorConfig) -> None:
    for _ in range(2):
        Coordinator.open(plain, mailbox=MemoryMailbox()).stop()
        made = PartyKeys.load(plain.home / "keys.json").public
    assert PartyKeys.load(plain.home / "keys.json").public == made


@pytest.mark.parametrize("is_revoked", [False, True])
def test_a_coordinator_that_parties_know_or_have_known_never_makes_itself_other_keys(
    plain: CoordinatorConfig, is_revoked: bool
) -> None:
    first = Coordinator.open(plain, mailbox=MemoryMailbox())
    first.stores.parties.enrol("hospital-a", "agent", secrets.token_hex(32), secrets.token_hex(32))
    if is_revoked:
        first.stores.parties.revoke("hospital-a")
    first.stop()
    path = plain.home / "keys.json"
    path.rename(plain.home / "elsewhere.json")
    for _ in range(2):  # not at the second try either
        with pytest.raises(InvalidSetting, match=r"keys\.json is missing .* from a backup.*every site pin them"):
            Coordinator.open(plain, mailbox=MemoryMailbox())
        assert not path.exists()
    (plain.home / "elsewhere.json").rename(path)
    Coordinator.open(plain, mailbox=MemoryMailbox()).stop()


def test_what_a_crash_left_half_received_is_gone_at_the_next_start(plain: CoordinatorConfig) -> None:
    left = plain.home / "incoming" / "cut-off"
    left.mkdir(parents=True)
    (left / ".upload-1.parquet").write_bytes(b"half of an image")
    Coordinator.open(plain, mailbox=MemoryMailbox()).stop()
    assert not (plain.home / "incoming").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_home_in_which_no_upload_could_be_kept_is_refused_at_the_start(plain: CoordinatorConfig, kind: str) -> None:
    path, elsewhere = plain.home / "incoming", plain.home.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "photograph.png").write_bytes(b"somebody's")
    path.write_bytes(b"") if kind == "file" else path.symlink_to(elsewhere)
    with pytest.raises(InvalidSetting, match="'incoming' in the coordinator's home 'home' is not a folder"):
        Coordinator.open(plain, mailbox=MemoryMailbox())
    assert (elsewhere / "photograph.png").exists()
    path.unlink()
    Coordinator.open(plain, mailbox=MemoryMailbox()).stop()


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        ("redis://127.0.0.1:1/0", True),
        ("redis://someone@127.0.0.1:1/0", True),  # a name alone is no secret
        ("redis://:@127.0.0.1:1/0", True),
        ("rediss://127.0.0.1:1/0", True),  # encrypted, and open to everybody
        ("rediss://127.0.0.1:1/0?ssl_ca_certs=ca.pem", True),
        ("redis://:secret@127.0.0.1:1/0", False),
        ("redis://127.0.0.1:1/0?password=secret", False),
        ("rediss://127.0.0.1:1/0?ssl_certfile=own.pem&ssl_keyfile=own.key", False),
        ("unix:///nowhere/redis.sock", False),
    ],
)
def test_redis_that_everybody_may_use_who_reaches_it_is_warned_of_in_the_log(
    plain: CoordinatorConfig,
    url: str,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RedisMailbox, "check", lambda _: None)
    coordinator = Coordinator.open(plain.model_copy(update={"redis_url": url}))
    coordinator.stop()
    warned = [one.getMessage() for one in caplog.records if "without a password" in one.getMessage()]
    assert len(warned) == is_warned
    assert "secret" not in caplog.text
