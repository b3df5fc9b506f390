"""A thief in every process of a federation that tests start: it copies each erasable key when it is drawn.

A test that looks at the files of keys from outside may come too late: a key lives for a fraction of a second, and a
busy machine may give the test none of it. The server that federations are forked from imports this module
(`tests/forked_command.py`), so the copy is made where the key is, and before the key lasts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from labeler.system import erasable

VARIABLE = "TESTS_STOLEN_KEYS"
"""The environment variable that names the file of copies; without it nothing is copied."""

_replace = erasable.replace_file


def _copied(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file of keys, and first a line with them into the file of copies."""
    copies = os.environ.get(VARIABLE)
    if copies:
        line = json.dumps({"home": path.parent.parent.name, "keys": json.loads(data)}) + "\n"
        with Path(copies).open("ab", buffering=0) as file:
            file.write(line.encode())
    _replace(path, data, mode=mode)


erasable.replace_file = _copied


def stolen_keys(copies: Path) -> dict[tuple[str, str], set[bytes]]:
    """Return every key that was drawn, by the name of its home and its own; of each name all that there ever were."""
    found: dict[tuple[str, str], set[bytes]] = {}
    for line in copies.read_text().splitlines():
        one = json.loads(line)
        for name, key in one["keys"].items():
            found.setdefault((one["home"], name), set()).add(bytes.fromhex(key))
    return found
