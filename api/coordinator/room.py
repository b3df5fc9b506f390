"""Whether the home has room: a small file, written, synced and removed, and a row in the journal.

A service that can only read takes no job. What was found is told again for a few seconds, so that whoever asks for
readiness often makes no work; and the file is large enough that the next journal entry fits where it fitted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from feature_store.journal.database import Database
from feature_store.room import is_full, storage_full
from labeler.errors import LabelerError, Unavailable

PROBE_BYTES = 256 * 1024
TOLD_AGAIN_S = 5.0
PROBE_FILE = ".write-probe"


class RoomProbe:
    """See the module.

    Args:
        now: seconds, going up.
    """

    def __init__(self, home: Path, journal: Database, *, now: Callable[[], float] = time.monotonic) -> None:
        self._path = home / PROBE_FILE
        self._journal = journal
        self._now = now
        self._lock = threading.Lock()
        self._found: tuple[float, LabelerError | None] | None = None

    def check(self) -> str:
        """Write, or tell what was found a moment ago.

        Raises:
            StorageFull: there is no room.
            Unavailable: it cannot be written for another reason.
        """
        with self._lock:
            if self._found is None or self._now() - self._found[0] >= TOLD_AGAIN_S:
                self._found = (self._now(), self._write())
            problem = self._found[1]
        if problem is not None:
            raise type(problem)(str(problem))
        return "the home and the journal take writes"

    def _write(self) -> LabelerError | None:
        try:
            self._write_file()
            self._journal.probe()
        except LabelerError as error:
            return error
        except OSError as error:
            if is_full(error):
                return storage_full("what comes next")
            return Unavailable(f"the home cannot be written ({error.strerror}); look at its disk and its permissions")
        return None

    def _write_file(self) -> None:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                # Random, so that no file system stores it as nothing.
                data = memoryview(os.urandom(PROBE_BYTES))
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            finally:
                os.close(handle)
        finally:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
