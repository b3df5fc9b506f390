"""A private shard is its owner's alone: new ones are written so, older ones become so when they are opened."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter


def _write(path: Path, *, public: bool) -> Shard:
    previous = os.umask(0)
    try:
        with ShardWriter(path, classes=("a", "b"), fingerprint="f", dimension=4, public=public) as writer:
            half = path.with_name(f".{path.name}.writing")
            modes = [_mode(half), *(_mode(file) for file in half.iterdir())]
            writer.append(np.eye(4), np.array([0, 1, 0, 1]), list("wxyz"))
            writer.finish()
    finally:
        os.umask(previous)
    assert public or not any(mode & 0o077 for mode in modes[:1]), "others may look into a shard that is being written"
    return Shard.open(path)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_shard_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    shard = _write(tmp_path / "a.shard", public=False)
    assert _mode(shard.path) == 0o700
    assert {_mode(file) for file in shard.path.iterdir()} == {0o600}
    shard.delete(shard.record_ids[:1])
    assert {_mode(file) for file in shard.path.iterdir() if file.suffix} == {0o600}


def test_a_public_shard_stays_readable(tmp_path: Path) -> None:
    shard = _write(tmp_path / "p.shard", public=True)
    assert _mode(shard.path) == 0o755
    assert {_mode(file) for file in shard.path.iterdir()} == {0o644}


def test_a_shard_of_an_earlier_version_becomes_its_owners_alone_when_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path / "old.shard", public=False).path
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "labeler.storage"):
        Shard.open(path, verify=False)
    assert _mode(path) == 0o700
    assert {_mode(file) for file in path.iterdir()} == {0o600}
    assert "readable by others" in caplog.text
    caplog.clear()
    Shard.open(path)
    assert caplog.text == ""


def test_where_permissions_cannot_be_narrowed_the_log_says_so_and_the_shard_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "theirs.shard", public=False).path
    path.chmod(0o755)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with caplog.at_level(logging.WARNING, "labeler.storage"):
        assert len(Shard.open(path)) == 4
    assert "chmod -R go=" in caplog.text
