"""Where a command will write, looked at before its work: else hours of work, or a price, end with no place for them."""

from __future__ import annotations

import os
from pathlib import Path

from labeler.errors import InvalidSetting


def check_file(out: Path | None, option: str = "--out") -> None:
    """Refuse a file that could not be written at the end.

    Args:
        out: the file; None where nothing is written.
        option: that named it.

    Raises:
        InvalidSetting: its folder is not there or not writable, or a folder has its name.
    """
    if out is None:
        return
    if not out.parent.is_dir():
        raise InvalidSetting(f"{option} names a file in {out.parent}, which is no folder; make it first")
    _check_writable(out.parent, f"{option} names a file in")
    if out.is_dir():
        raise InvalidSetting(f"{option} names a file to write, and {out} is a folder")


def check_folder(out: Path | None, option: str = "--out") -> None:
    """Refuse a folder that could not be made, or written into, at the end; see `check_file`."""
    if out is None:
        return
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not there.is_dir():
        raise InvalidSetting(f"{option} names a folder to write, and {there} is a file")
    _check_writable(there, f"{option} names a folder in")


def _check_writable(folder: Path, what: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidSetting(f"{what} {folder}, where this user cannot write")
