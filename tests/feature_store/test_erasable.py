"""Keys that can be erased: durable together, one slot each, and no byte left of those that were erased."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from feature_store import key_slots
from feature_store.erasable import SLOTS_FILE, ErasableKeys, KeyFolder, KeysInMemory, keys_in
from feature_store.key_slots import SLOT_BYTES, KeySlots
from labeler.errors import BadData, InvalidSetting, StorageFull, UnsafeStorage

ONE, OTHER = "a" * 64, "b" * 64
MANY = [f"{number:064x}" for number in range(200)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "erasable"


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The files that were synced."""
    found: list[int] = []

    def count(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(handle: int) -> None:
            found.append(handle)
            real(handle)

        return sync

    monkeypatch.setattr(key_slots, "_sync", count(key_slots._sync))
    monkeypatch.setattr(os, "fsync", count(os.fsync))
    return found


def left_of(key: bytes, folder: Path) -> list[str]:
    """Files in which any eight bytes of a key stand in a row."""
    parts = [key[at : at + 8] for at in range(len(key) - 7)]
    found = [(path.name, path.read_bytes()) for path in folder.rglob("*") if path.is_file()]
    return [name for name, data in found if any(part in data for part in parts)]


@pytest.mark.parametrize("make", [KeyFolder, lambda _: KeysInMemory()], ids=["folder", "memory"])
def test_a_name_has_one_key_until_it_is_erased(folder: Path, make: Callable[[Path], ErasableKeys]) -> None:
    keys = make(folder)
    first = keys.draw(ONE)
    keys.draw_all([ONE, OTHER])
    assert len(first) == 32
    assert keys.draw(ONE) == keys.read(ONE) == first != keys.read(OTHER)
    assert keys.names() == [ONE, OTHER]
    keys.erase_all([ONE, "c" * 64])
    assert keys.read(ONE) is None
    assert keys.draw(ONE) != first
    keys.erase_all([ONE, OTHER])
    keys.erase(ONE)
    assert keys.names() == []


def test_keys_are_found_by_a_process_that_was_started_again(folder: Path) -> None:
    keys = KeyFolder(folder)
    keys.draw_all(MANY)
    drawn = {name: keys.read(name) for name in MANY}
    assert len(set(drawn.values())) == len(MANY)
    again = KeyFolder(folder)
    assert {name: again.read(name) for name in again.names()} == drawn == keys_in(folder)


def test_nothing_is_left_of_erased_keys_in_any_file_and_the_others_stay(folder: Path) -> None:
    keys = KeyFolder(folder)
    keys.draw_all(MANY)
    drawn = keys_in(folder)
    keys.erase_all(MANY[::3])
    for name in MANY:
        is_erased = name in MANY[::3]
        assert left_of(drawn[name], folder) == ([] if is_erased else [SLOTS_FILE])
        assert KeyFolder(folder).read(name) == (None if is_erased else drawn[name])
    keys.erase_all(MANY)
    data = (folder / SLOTS_FILE).read_bytes()
    assert not any(data[SLOT_BYTES:])
    assert len(data) > len(MANY) * SLOT_BYTES


def test_an_erased_key_is_overwritten_where_it_lies(folder: Path, tmp_path: Path) -> None:
    """A second name of the same file shows what becomes of its bytes: it is never written anew or copied."""
    keys = KeyFolder(folder)
    keys.draw(ONE)
    os.link(folder / SLOTS_FILE, tmp_path / "same file")
    first = keys.draw(ONE)
    assert set(left_of(first, tmp_path)) == {SLOTS_FILE, "same file"}
    keys.erase(ONE)
    assert left_of(first, tmp_path) == []
    assert (tmp_path / "same file").stat().st_ino == (folder / SLOTS_FILE).stat().st_ino


def test_many_keys_are_drawn_and_erased_with_one_sync_each_time(folder: Path, syncs: list[int]) -> None:
    keys = KeyFolder(folder)
    keys.draw_all(MANY)
    keys.erase_all(MANY)
    for step in (keys.draw_all, keys.erase_all):
        syncs.clear()
        step(MANY)
        assert len(syncs) == 1
    # What is there already, or not there any more, costs none.
    keys.draw_all(MANY)
    syncs.clear()
    keys.draw_all(MANY[::2])
    keys.erase("c" * 64)
    assert syncs == []


def test_slots_are_used_again_so_the_file_is_as_long_as_most_keys_at_once(folder: Path) -> None:
    keys = KeyFolder(folder)
    for name in MANY * 3:
        keys.draw(name)
        keys.erase(name)
    assert (folder / SLOTS_FILE).stat().st_size == (1 + 64) * SLOT_BYTES


@pytest.mark.parametrize("step", ["erase('a' * 64)", "erase_all(['a' * 64])"])
def test_a_process_that_dies_before_an_erased_key_is_synced_leaves_no_key(folder: Path, step: str) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from feature_store import key_slots\n"
        "from feature_store.erasable import KeyFolder\n"
        "keys = KeyFolder(Path(sys.argv[1])); keys.draw_all(['a' * 64, 'b' * 64]); keys.draw('c' * 64)\n"
        "print(keys.read('a' * 64).hex(), flush=True)\n"
        "key_slots._sync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"keys.{step}"
    )
    command = [sys.executable, "-c", code, str(folder)]
    died = subprocess.run(command, cwd=Path(__file__).parents[2], check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL
    assert left_of(bytes.fromhex(died.stdout.decode()), folder) == []
    assert KeyFolder(folder).names() == [OTHER, "c" * 64]


@pytest.mark.parametrize("written", [1, 60, 110, 140])
def test_a_slot_that_is_half_written_is_no_key_and_is_overwritten_before_the_next_write(
    folder: Path, written: int
) -> None:
    keys = KeyFolder(folder)
    kept = keys.draw(ONE)
    key = bytes(range(1, 33))
    with (folder / SLOTS_FILE).open("r+b") as file:
        file.seek(17 * SLOT_BYTES)
        file.write(key_slots._slot(OTHER, key)[:written])
    again = KeyFolder(folder)
    assert again.names() == [ONE]
    assert again.read(OTHER) is None
    again.draw("c" * 64)
    assert left_of(key, folder) == []
    assert again.read(ONE) == kept


def test_a_key_that_was_refused_its_sync_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFolder(folder)
    keys.draw(ONE)

    def refuse(_: int) -> None:
        raise OSError("the disk does not write")

    with monkeypatch.context() as broken:
        broken.setattr(key_slots, "_sync", refuse)
        with pytest.raises(OSError, match="does not write"):
            keys.draw(OTHER)
        with pytest.raises(OSError, match="does not write"):
            keys.erase(ONE)
    # The file is looked at again, and says what it holds.
    assert {name: keys.read(name) for name in keys.names()} == keys_in(folder)
    keys.erase_all([ONE, OTHER])
    assert keys_in(folder) == {}


def test_a_key_for_which_there_is_no_room_is_no_key_and_nothing_but_a_full_disk_is_said(folder: Path) -> None:
    keys = KeyFolder(folder)
    known = keys.draw("first")
    size = (folder / SLOTS_FILE).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = [f"round-{number}" for number in range(200)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, limits[1]))
    try:
        with pytest.raises(StorageFull):
            keys.draw_all(names)
        assert keys.read("first") == known
        assert keys.names() == KeyFolder(folder).names() == ["first"]
        keys.erase("first")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    keys.draw_all(names)
    assert KeyFolder(folder).names() == sorted(names)


@pytest.mark.parametrize("step", ["erase", "draw"])
def test_a_key_whose_erasure_was_refused_its_sync_is_overwritten_again_by_whoever_writes_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The file then reads as zeros, and the disk may hold the key: what was not synced is not written a second time."""
    keys = KeyFolder(folder)
    keys.draw_all([ONE, OTHER])
    place = (folder / SLOTS_FILE).read_bytes().index(ONE.encode()) // SLOT_BYTES * SLOT_BYTES
    done: list[tuple[str, int]] = []
    write, sync = os.pwrite, key_slots._sync

    def pwrite(handle: int, data: bytes, at: int) -> int:
        done.append(("zeros" if not any(data) else "other", at))
        return write(handle, data, at)

    def refuse(_: int) -> None:
        raise OSError("the disk does not write")

    with monkeypatch.context() as broken:
        broken.setattr(key_slots, "_sync", refuse)
        with pytest.raises(OSError, match="does not write"):
            keys.erase(ONE)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(key_slots, "_sync", lambda handle: (done.append(("sync", 0)), sync(handle)))
    keys.erase(ONE) if step == "erase" else keys.draw("c" * 64)
    assert ("sync", 0) in done[done.index(("zeros", place)) :]
    done.clear()
    keys.erase(ONE)
    assert done == [], "once is enough"


def test_keys_of_a_version_with_a_file_for_each_are_read_and_erased_where_they_lie(
    folder: Path, tmp_path: Path
) -> None:
    folder.mkdir(mode=0o700)
    for name, key in ((ONE, b"k" * 32), ("home", b"h" * 32), (OTHER, bytes(32)), ("d" * 64, b"short")):
        (folder / name).write_bytes(key)
    (folder / f".{OTHER}").write_bytes(b"u" * 32)
    os.link(folder / ONE, tmp_path / "same file")
    keys = KeyFolder(folder)
    assert {name: keys.read(name) for name in keys.names()} == {ONE: b"k" * 32, "home": b"h" * 32}
    assert keys.draw(ONE) == b"k" * 32
    assert keys.read(OTHER) is None
    keys.draw_all([ONE, OTHER])
    keys.erase_all([ONE])
    assert (tmp_path / "same file").read_bytes() == bytes(32)
    assert not (folder / ONE).exists()
    assert not (folder / f".{OTHER}").exists()
    assert KeyFolder(folder).names() == [OTHER, "home"]


def test_keys_are_for_their_owner_only(folder: Path) -> None:
    KeyFolder(folder).draw(ONE)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / SLOTS_FILE).stat().st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(UnsafeStorage):
        KeyFolder(folder)


def test_a_file_that_holds_something_else_is_refused(folder: Path) -> None:
    KeyFolder(folder)
    (folder / SLOTS_FILE).write_bytes(b"something else" * 100)
    for step in (KeyFolder(folder).names, lambda: KeyFolder(folder).draw(ONE)):
        with pytest.raises(BadData, match="holds something else"):
            step()
    assert (folder / SLOTS_FILE).read_bytes() == b"something else" * 100


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "A" * 64, SLOTS_FILE])
def test_a_key_is_named_by_a_plain_name(folder: Path, name: str) -> None:
    with pytest.raises(InvalidSetting):
        KeyFolder(folder).draw(name)


@pytest.mark.parametrize(("name", "key"), [("", b"k" * 32), ("n" * 101, b"k" * 32), ("n", b"k" * 31), ("n", bytes(32))])
def test_a_slot_holds_a_name_and_a_key_that_fit(tmp_path: Path, name: str, key: bytes) -> None:
    with pytest.raises(InvalidSetting):
        KeySlots(tmp_path / "slots").put({name: key})


class SeveralObjects(RuleBasedStateMachine):
    """Objects over one file, of which each may be started anew, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.path = Path(self.place.name) / "slots"
        self.open = [KeySlots(self.path) for _ in range(3)]
        self.model: dict[str, bytes] = {}
        self.erased: list[bytes] = []

    def teardown(self) -> None:
        self.place.cleanup()

    @rule(who=st.integers(0, 2), names=st.sets(st.integers(0, 90).map(str), max_size=70))
    def put(self, who: int, names: set[str]) -> None:
        drawn = {name: os.urandom(32) for name in names}
        kept = self.open[who].put(drawn)
        assert kept == {name: self.model.get(name, key) for name, key in drawn.items()}
        self.model |= kept

    @rule(who=st.integers(0, 2), names=st.sets(st.integers(0, 90).map(str), max_size=70))
    def erase(self, who: int, names: set[str]) -> None:
        self.open[who].erase(names)
        self.erased += [self.model.pop(name) for name in names if name in self.model]
        for other in {0, 1, 2} - {who}:
            self.open[other] = KeySlots(self.path)  # one process writes; the others begin with what it leaves

    @rule(who=st.integers(0, 2))
    def begin_anew(self, who: int) -> None:
        self.open[who] = KeySlots(self.path)

    @invariant()
    def the_file_holds_the_model(self) -> None:
        assert {name: KeySlots(self.path).get(name) for name in KeySlots(self.path).names()} == self.model
        if self.path.exists():
            data = self.path.read_bytes()
            assert not any(key[:8] in data for key in self.erased)


TestSeveralObjects = SeveralObjects.TestCase
TestSeveralObjects.settings = settings(max_examples=15, stateful_step_count=12, deadline=None, derandomize=True)
