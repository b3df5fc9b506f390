"""Keys that can be erased: durable together, and in no file any more once they are erased."""

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

from labeler.errors import BadData, InvalidSetting, StorageFull, UnsafeStorage
from labeler.system.erasable import KEYS_FILE, ErasableKeys, KeyFolder, KeysInMemory, keys_in

ONE, OTHER = "a" * 64, "b" * 64
MANY = [f"{number:064x}" for number in range(200)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "erasable"


def left_of(key: bytes, folder: Path) -> list[str]:
    """Files that hold any eight bytes of a key in a row, as they are or in hexadecimal digits."""
    parts = [form for at in range(len(key) - 7) for form in (key[at : at + 8], key[at : at + 8].hex().encode())]
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
    keys.erase_all([ONE])
    assert keys.names() == []
    for name in ("", "../up", "a/b", ".hidden", "A" * 64, "n" * 101):
        with pytest.raises(InvalidSetting):
            keys.draw(name)


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
        assert left_of(drawn[name], folder) == ([] if is_erased else [KEYS_FILE])
        assert KeyFolder(folder).read(name) == (None if is_erased else drawn[name])


@pytest.mark.parametrize(("step", "left"), [("erase_all(['a'])", ["a", "b"]), ("draw('c')", ["a", "b"])])
@pytest.mark.process
def test_a_process_that_dies_before_the_new_file_has_its_name_changes_nothing_and_leaves_nothing(
    folder: Path, step: str, left: list[str]
) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from labeler.system.erasable import KeyFolder\n"
        "keys = KeyFolder(Path(sys.argv[1])); keys.draw_all(['a', 'b'])\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"keys.{step}"
    )
    died = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parents[2], check=False)
    assert died.returncode == -signal.SIGKILL
    keys = KeyFolder(folder)
    assert keys.names() == left
    keys.erase_all(left)
    assert [path.name for path in folder.iterdir()] == [KEYS_FILE], "what the dead process wrote is gone, too"


def test_a_key_for_which_there_is_no_room_is_no_key_and_nothing_but_a_full_disk_is_said(folder: Path) -> None:
    keys = KeyFolder(folder)
    known = keys.draw("first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = [f"round-{number}" for number in range(200)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageFull):
            keys.draw_all(names)
        assert keys.read("first") == known
        assert keys.names() == KeyFolder(folder).names() == ["first"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    keys.draw_all(names)
    assert KeyFolder(folder).names() == sorted(["first", *names])


def test_a_change_that_was_refused_its_sync_is_no_change_and_can_be_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyFolder(folder)
    keys.draw(ONE)

    def refuse(_: int) -> None:
        raise OSError("the disk does not write")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        for step in (lambda: keys.draw(OTHER), lambda: keys.erase_all([ONE])):
            with pytest.raises(OSError, match=r"keys\.json"):
                step()
    assert keys.names() == list(keys_in(folder)) == [ONE]
    keys.erase_all([ONE, OTHER])
    assert keys_in(folder) == {}


def test_keys_are_for_their_owner_only(folder: Path) -> None:
    KeyFolder(folder).draw(ONE)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / KEYS_FILE).stat().st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(UnsafeStorage):
        KeyFolder(folder)


@pytest.mark.parametrize("data", [b"something else" * 100, b"[]", b'{"a": 1}', b'{"a": "xx"}', b'{"../a": "00"}'])
def test_a_file_that_holds_something_else_is_refused_and_kept(folder: Path, data: bytes) -> None:
    KeyFolder(folder)
    (folder / KEYS_FILE).write_bytes(data)
    for step in (KeyFolder(folder).names, lambda: KeyFolder(folder).draw(ONE)):
        with pytest.raises(BadData, match="holds something else"):
            step()
    assert (folder / KEYS_FILE).read_bytes() == data


class SeveralObjects(RuleBasedStateMachine):
    """Objects over one folder, of which each may be started again, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.path = Path(self.place.name) / "keys"
        self.open = [KeyFolder(self.path) for _ in range(3)]
        self.model: dict[str, bytes] = {}
        self.erased: list[bytes] = []

    def teardown(self) -> None:
        self.place.cleanup()

    @rule(who=st.integers(0, 2), names=st.sets(st.integers(0, 90).map(str), max_size=70))
    def draw(self, who: int, names: set[str]) -> None:
        self.open[who].draw_all(names)
        drawn = {name: self.open[who].read(name) or b"" for name in names}
        assert {name: drawn[name] for name in names & self.model.keys()} == {
            name: self.model[name] for name in names & self.model.keys()
        }
        self.model |= drawn

    @rule(who=st.integers(0, 2), names=st.sets(st.integers(0, 90).map(str), max_size=70))
    def erase(self, who: int, names: set[str]) -> None:
        self.open[who].erase_all(names)
        self.erased += [self.model.pop(name) for name in names if name in self.model]

    @rule(who=st.integers(0, 2))
    def begin_anew(self, who: int) -> None:
        self.open[who] = KeyFolder(self.path)

    @invariant()
    def everybody_sees_the_model(self) -> None:
        for keys in self.open:
            assert {name: keys.read(name) for name in keys.names()} == self.model
        assert not any(left_of(key, self.path) for key in self.erased[-5:])


TestSeveralObjects = SeveralObjects.TestCase
TestSeveralObjects.settings = settings(max_examples=15, stateful_step_count=12, derandomize=True)
