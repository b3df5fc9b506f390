"""The folder in which an upload lies until its job takes it over: cleared when a coordinator starts.

What is in it then was cut off by a crash. Only whoever holds the home (api.coordinator.home_lock) may clear it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from labeler.errors import InvalidSetting

INCOMING = "incoming"
"""Its name in the coordinator's home."""


def clear_incoming(home: Path) -> None:
    """Remove what a crash left half-received.

    Raises:
        InvalidSetting: it is no folder, or cannot be removed; every upload would fail later, in front of a requester.
    """
    path = home / INCOMING
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise InvalidSetting(
                f"{INCOMING!r} in the coordinator's home {home.name!r} is not a folder, so no upload could be kept; "
                "look what it is and move it away; the coordinator makes the folder itself"
            )
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidSetting(
            f"what a crash left in {INCOMING!r} of the coordinator's home {home.name!r} cannot be removed "
            f"({error.strerror}); look at the owner and the permissions of the folder"
        ) from None
