"""The journal's head that a party has seen: kept in place, synced when nobody waits, whole or not at all."""

import os
from pathlib import Path

import pytest

from labeler.errors import Unavailable
from labeler.ledger.chain import EMPTY, Anchor, Head
from labeler.messages import COORDINATOR, Message, frame
from labeler.messages.bodies import Mail
from labeler.system.keys import PartyKeys
from workers.party.coordinator import SYNC_EVERY_S, Seen

KEYS = PartyKeys.generate()


def answer(head: Head, *, after: str = "") -> Message:
    body = Mail(after, head.seq, head.hash).encode()
    return KEYS.message("poll", sender=COORDINATOR, recipient="hospital", sequence=1, body=body)


def head(seq: int) -> Head:
    return Head(seq, f"{seq % 15 + 1:x}" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.head"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were synced, in order."""
    found: list[str] = []
    real = os.fsync

    def noted(handle: int) -> None:
        found.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_head_and_word_are_kept_in_place_and_found_by_the_next_process(path: Path) -> None:
    seen = Seen(path)
    assert seen.head() == EMPTY
    assert seen.proof() == b""
    seen.keep(head(1), answer(head(1)))
    files = [path.stat().st_ino, path.with_name("coordinator.proof").stat().st_ino]
    for seq in range(2, 12):
        seen.keep(head(seq), answer(head(seq)))
        for one in (seen, Seen(path)):
            assert one.head() == head(seq)
            assert one.proof() == frame([answer(head(seq))])
    assert files == [path.stat().st_ino, path.with_name("coordinator.proof").stat().st_ino]


def test_a_shorter_word_over_a_longer_one_leaves_nothing_of_it_also_where_it_was_not_cut(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = answer(head(1), after="9" * 20 + "-" + "9" * 20), answer(head(2))
    Seen(path).keep(head(1), long)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # killed in between
    Seen(path).keep(head(2), short)
    word = path.with_name("coordinator.proof")
    assert word.stat().st_size == len(frame([long]))
    assert Seen(path).proof() == frame([short])
    monkeypatch.undo()
    Seen(path).keep(head(3), answer(head(3)))
    assert word.read_bytes() == frame([answer(head(3))])


def test_half_of_one_word_and_half_of_another_is_none(path: Path) -> None:
    Seen(path).keep(head(1), answer(head(1)))
    word = path.with_name("coordinator.proof")
    old, new = frame([answer(head(1))]), frame([answer(head(2))])
    begins = len(new) - len(answer(head(2)).body)
    for cut in (begins, begins + 50, new.index(b"coordinator_hash") + 40):
        word.write_bytes(new[:cut] + old[cut:])
        assert Seen(path).proof() == b""
    word.write_bytes(new)
    assert Seen(path).proof() == new


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("workers.party.coordinator.time.monotonic", lambda: now[0])
    return now


BOTH = ["coordinator.proof", "coordinator.head"]


def test_nothing_is_synced_while_somebody_may_wait_and_all_of_it_when_this_party_waits(
    path: Path, synced: list[str], clock: list[float]
) -> None:
    seen = Seen(path)
    seen.keep(head(1), answer(head(1)))
    seen.rest()
    synced.clear()
    clock[0] += 60.0
    seen.keep(head(2), answer(head(2)))
    seen.keep(head(3), answer(head(3)))
    assert synced == []
    seen.rest()
    seen.rest()
    assert synced == BOTH
    seen.keep(head(4), answer(head(4)))
    seen.rest()
    assert synced == BOTH, "once a second is enough"
    clock[0] += SYNC_EVERY_S
    seen.rest()
    assert synced == 2 * BOTH


def test_what_a_person_consented_to_counts_from_the_next_look(path: Path) -> None:
    seen = Seen(path)
    seen.keep(head(7), answer(head(7)))
    Anchor(path).replace(head(3))
    assert seen.head() == head(3)
    seen.keep(head(4), answer(head(4)))
    assert seen.head() == head(4)


def test_a_word_that_cannot_be_written_is_said_and_the_head_waits_for_it(path: Path) -> None:
    path.with_name("coordinator.proof").mkdir()
    seen = Seen(path)
    with pytest.raises(Unavailable, match=r"coordinator\.proof cannot be written"):
        seen.keep(head(1), answer(head(1)))
    assert seen.head() == EMPTY


def test_a_word_for_half_of_which_there_is_room_is_none_and_the_head_waits_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[: len(data) // 2], at))
    seen = Seen(path)
    with pytest.raises(Unavailable, match=r"coordinator\.proof cannot be written \(No space left on device\)"):
        seen.keep(head(1), answer(head(1)))
    assert seen.proof() == b""
    assert seen.head() == EMPTY
    monkeypatch.undo()
    seen.keep(head(1), answer(head(1)))
    assert seen.proof() == frame([answer(head(1))])
    assert seen.head() == head(1)
