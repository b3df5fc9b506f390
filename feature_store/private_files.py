"""Folders that are their owner's alone: who else may sign in on a machine may not read a site's records.

New private shards are written so (feature_store.shard_writer). Those of earlier versions were readable by everybody on
the machine. They are narrowed when their owner opens them, because nobody else was ever meant to read them; where this
is not possible (another owner, a read-only disk) the log says so at each opening and the shard is used all the same:
refusing would stop a site, and hide nothing that is not readable already.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("labeler.storage")

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_private(folder: Path, names: Iterable[str]) -> bool:
    """Take from everybody but the owner what they may do with a folder and its files.

    Args:
        folder: of a private shard.
        names: its files; what is not there is passed over.

    Returns:
        Whether it is the owner's alone now.
    """
    # The folder last: it shuts out everybody, and files come first in case the folder stays open.
    paths = [path for name in names if (path := folder / name).exists()] + [folder]
    wide = [path for path in paths if stat.S_IMODE(path.stat().st_mode) & _OTHERS]
    try:
        for path in wide:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
    except OSError as error:
        log.warning(
            "others on this machine may read a private shard; run chmod -R go= on its folder, as its owner",
            extra={"shard": folder.name, "reason": error.strerror},
        )
        return False
    if wide:
        log.warning("a private shard was readable by others; now it is its owner's alone", extra={"shard": folder.name})
    return True
