"""The coordinator's own signed word for how far its journal had come, kept by a party.

A coordinator whose journal was replaced by an older copy believes itself. What its own key has signed, it believes too:
a party sends this along with every poll, and a head in it that the journal does not hold stops the service until the
newest journal is back (api.coordinator.witnesses). It is public to whoever may poll, and holds nothing of any record.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from labeler.errors import LabelerError, Unavailable
from labeler.messages import Message, frame, read_frames

MAX_PROOF_BYTES = 16 * 1024
SYNC_EVERY_S = 1.0


class Proof:
    """One signed answer to a poll, in a file.

    Args:
        path: the file; its folder must exist.

    Attributes:
        seq: the entry that the kept answer states, of those this process has kept; 0 before the first.
    """

    def __init__(self, path: Path) -> None:
        self.seq = 0
        self._sound = b""
        self._path = path
        self._new = path.with_name(f".{path.name}.new")
        self._synced_at = -SYNC_EVERY_S

    def read(self) -> bytes:
        """The answer as a frame; empty where none is kept, or a damaged one."""
        try:
            data = self._path.read_bytes()
            if data != self._sound:  # what was looked at before need not be again
                self._sound = data if len(data) <= MAX_PROOF_BYTES and read_frames(data, max_messages=1) else b""
        except (OSError, LabelerError):
            self._sound = b""
        return self._sound

    def keep(self, answer: Message, seq: int) -> None:
        """Keep an answer in place of the one before; synced to disk at most once a second, as the head beside it.

        Raises:
            Unavailable: the file cannot be written.
        """
        new = self._new
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(frame([answer]))
                if time.monotonic() - self._synced_at >= SYNC_EVERY_S:
                    file.flush()
                    os.fsync(file.fileno())
                    self._synced_at = time.monotonic()
            new.replace(self._path)
        except OSError as error:
            raise Unavailable(f"{self._path.name} cannot be written ({error.strerror}); make room") from error
        self.seq = seq
