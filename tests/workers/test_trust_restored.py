"""A site's consent to a coordinator's restored journal: to one head, kept beside what was seen before."""

from __future__ import annotations

from pathlib import Path

import pytest

from labeler.errors import InvalidSetting
from labeler.ledger.chain import Anchor, Head
from workers.homes.journals import trust_restored_journal

SEEN, ACCEPTED = Head(40, "a" * 64), Head(12, "b" * 64)
TEXT = f"12:{ACCEPTED.hash}"


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """As much of an agent's home as consent needs."""
    (tmp_path / "agent.toml").write_text("")
    Anchor(tmp_path / "coordinator.head").remember(SEEN)
    return tmp_path


def test_what_was_seen_is_kept_beside_what_is_accepted(hospital: Path) -> None:
    told = trust_restored_journal(hospital, TEXT)
    assert told["seen"] == {"entries": 40, "hash": SEEN.hash}
    assert Anchor(hospital / "coordinator.head").read() == ACCEPTED
    assert Anchor(Path(told["kept"])).read() == SEEN
    with pytest.raises(InvalidSetting, match="nothing to consent to"):
        trust_restored_journal(hospital, TEXT)


def test_what_was_seen_may_be_damaged(hospital: Path) -> None:
    (hospital / "coordinator.head").write_bytes(b"half a rec")
    assert trust_restored_journal(hospital, TEXT)["seen"] is None
    assert Anchor(hospital / "coordinator.head").read() == ACCEPTED


@pytest.mark.parametrize(
    "head", ["", "12", "12:abc", f"0:{'b' * 64}", f"-1:{'b' * 64}", f"12:{'B' * 64}", f"1e3:{'b' * 64}"]
)
def test_a_head_that_is_none_is_refused_and_changes_nothing(hospital: Path, head: str) -> None:
    with pytest.raises(InvalidSetting, match="ENTRY:HASH"):
        trust_restored_journal(hospital, head)
    assert Anchor(hospital / "coordinator.head").read() == SEEN


def test_only_a_party_that_has_seen_something_consents(hospital: Path, tmp_path: Path) -> None:
    (hospital / "coordinator.head").unlink()
    with pytest.raises(InvalidSetting, match="seen nothing"):
        trust_restored_journal(hospital, TEXT)
    (hospital / "agent.toml").unlink()
    with pytest.raises(InvalidSetting, match="not the home of an agent or a tallier"):
        trust_restored_journal(hospital, TEXT)
