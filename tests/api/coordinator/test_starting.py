"""What a coordinator finds in its home when it starts: keys that parties know, and what a crash left half-received."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from api.coordinator.config import CoordinatorConfig
from api.coordinator.service import Coordinator
from labeler.errors import InvalidSetting
from labeler.system.keys import PartyKeys
from tests.api.conftest import config_fields


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return CoordinatorConfig.model_validate(config_fields(home))


def test_keys_are_made_once_and_kept(config: CoordinatorConfig) -> None:
    for _ in range(2):
        Coordinator.open(config).stop()
        made = PartyKeys.load(config.home / "keys.json").public
    assert PartyKeys.load(config.home / "keys.json").public == made


def test_a_coordinator_that_parties_know_never_makes_itself_other_keys(config: CoordinatorConfig) -> None:
    first = Coordinator.open(config)
    first.stores.parties.enrol("hospital-a", "agent", secrets.token_hex(32), secrets.token_hex(32))
    first.stop()
    path = config.home / "keys.json"
    path.rename(config.home / "elsewhere.json")
    for _ in range(2):  # not at the second try either
        with pytest.raises(InvalidSetting, match=r"keys\.json is missing .* from a backup.*every site pin them"):
            Coordinator.open(config)
        assert not path.exists()
    (config.home / "elsewhere.json").rename(path)
    Coordinator.open(config).stop()


def test_a_party_that_was_revoked_has_known_the_coordinator_too(config: CoordinatorConfig) -> None:
    first = Coordinator.open(config)
    first.stores.parties.enrol("hospital-a", "agent", secrets.token_hex(32), secrets.token_hex(32))
    first.stores.parties.revoke("hospital-a")
    first.stop()
    (config.home / "keys.json").unlink()
    with pytest.raises(InvalidSetting, match="parties are enrolled"):
        Coordinator.open(config)


def test_what_a_crash_left_half_received_is_gone_at_the_next_start(config: CoordinatorConfig) -> None:
    left = config.home / "incoming" / "cut-off"
    left.mkdir(parents=True)
    (left / ".upload-1.parquet").write_bytes(b"half of an image")
    Coordinator.open(config).stop()
    assert not (config.home / "incoming").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_home_in_which_no_upload_could_be_kept_is_refused_at_the_start(config: CoordinatorConfig, kind: str) -> None:
    path, elsewhere = config.home / "incoming", config.home.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "photograph.png").write_bytes(b"somebody's")
    path.write_bytes(b"") if kind == "file" else path.symlink_to(elsewhere)
    with pytest.raises(InvalidSetting, match="'incoming' in the coordinator's home 'home' is not a folder"):
        Coordinator.open(config)
    assert (elsewhere / "photograph.png").exists()
    path.unlink()
    Coordinator.open(config).stop()
