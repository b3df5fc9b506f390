"""Two coordinators: the second is refused before it touches anything of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import CoordinatorConfig
from api.coordinator.home import LOCK_FILE, owning_home
from api.coordinator.service import Coordinator
from labeler.errors import InvalidSetting, JournalInUse
from tests.api.conftest import config_fields


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labeler.ledger.database.PATIENCE_S", 0.0)


@pytest.fixture(params=["sqlite", "postgresql"])
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
    first = Coordinator.open(config(home, journal))
    upload = home / "incoming" / "upload"
    upload.mkdir(parents=True)
    (upload / "half").write_bytes(b"half of an image")
    before = contents(home)
    with pytest.raises(JournalInUse, match=r"another coordinator runs on the home 'home'.*Stop it first"):
        Coordinator.open(config(home, journal))
    assert contents(home) == before
    first.stop()
    Coordinator.open(config(home, journal)).stop()


def test_a_second_home_on_the_database_of_a_running_coordinator_is_refused_without_its_url(
    tmp_path: Path, postgres_server: Any, impatient: None
) -> None:
    url = postgres_server.new_database()
    first = Coordinator.open(config(tmp_path / "one", url))
    with pytest.raises(JournalInUse, match=r"another process holds the journal .*a database of its own") as refused:
        Coordinator.open(config(tmp_path / "two", url))
    assert "password" not in str(refused.value)
    first.stop()
    Coordinator.open(config(tmp_path / "one", url)).stop()


def test_a_home_is_free_again_after_an_opening_that_failed(tmp_path: Path, impatient: None) -> None:
    home = tmp_path / "home"
    broken = config(home, "nowhere/journal.db")
    with pytest.raises(InvalidSetting, match="folder does not exist"):
        Coordinator.open(broken)
    with owning_home(home):
        pass


def test_the_lock_is_the_owners_alone_and_a_missing_home_is_told(tmp_path: Path) -> None:
    with owning_home(tmp_path):
        assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
        with pytest.raises(JournalInUse), owning_home(tmp_path):
            pass
    with pytest.raises(InvalidSetting, match="cannot be used"), owning_home(tmp_path / "nowhere"):
        pass
