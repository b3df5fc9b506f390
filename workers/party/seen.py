"""What a party has seen of the coordinator's journal: how far it had come, and the coordinator's own word for it.

A coordinator whose journal was replaced by an older copy believes itself. What its own key has signed, it believes too:
a party sends the signed answer that told it the furthest head along with every poll, and a head in it that the journal
does not hold stops the service until the newest journal is back (api.coordinator.mailroom). The word is public to
whoever may poll, and holds nothing of any record.

    coordinator.head    the head (labeler.ledger.anchor)
    coordinator.proof   one answer to a poll, as it came

Both are overwritten in place, where a kill takes nothing of them: a new file under the old name would have the disk
written at every answer. They are synced at most once a second, when this party begins to wait for mail, so that no sync
stands between an ask and its answer; without a rest by the first answer that comes a second later. What was seen
within a second of the last sync is synced at the next rest, which is after the poll that then waits: so after a power
cut they may be as old as one poll, which only makes them milder. A word that is half written is none, and the next
answer is kept in its place.
"""

from __future__ import annotations

import errno
import math
import os
import time
from pathlib import Path
from typing import Final

from labeler.errors import LabelerError, Unavailable
from labeler.ledger.anchor import Anchor, read_small
from labeler.ledger.chain import EMPTY, Head
from labeler.messages import Message, frame, frame_sizes, read_frames
from labeler.messages.envelope import FRAME_HEAD_BYTES, SIGNATURE_BYTES
from workers.party.home import PROOF_FILE

MAX_PROOF_BYTES: Final = 16 * 1024
SYNC_EVERY_S: Final = 1.0


class Seen:
    """See the module. Used by one thread; what a person puts into the files counts from the next look.

    Args:
        path: of the head; the word lies beside it. Their folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._anchor = Anchor(path, sync_every_s=math.inf)
        self._path = path.with_name(PROOF_FILE)
        self._proven = 0
        self._data = self._sound = b""
        self._unsynced_since: float | None = None
        self._synced_at = -math.inf

    def head(self) -> Head:
        """The furthest head that was seen.

        Raises:
            JournalBehind: the file holds none.
        """
        return self._anchor.read() or EMPTY

    def proof(self) -> bytes:
        """The coordinator's word as a frame; empty where none is kept, or a damaged one."""
        try:
            data = read_small(self._path, MAX_PROOF_BYTES)
        except OSError:
            return b""
        if data != self._data:  # what was looked at before need not be again
            self._data, self._sound = data, _sound(data)
        return self._sound

    def keep(self, head: Head, signed: Message) -> None:
        """Keep a head that goes further than the one that was seen, or for which this process has kept no word yet.

        Args:
            signed: the answer that states it; its signature was checked.

        Raises:
            Unavailable: a file cannot be written.
        """
        if head.seq > self._proven:
            # Before the head: what this party says it has seen, it can prove.
            self._keep_proof(frame([signed]))
            self._proven = head.seq
        if head.seq > self.head().seq:
            self._anchor.remember(head)
            self._is_new()

    def rest(self) -> None:
        """This party begins to wait: what was kept reaches the disk, unless something did within the last second.

        Raises:
            Unavailable: it does not.
        """
        if self._unsynced_since is not None and time.monotonic() - self._synced_at >= SYNC_EVERY_S:
            self._sync()

    def _sync(self) -> None:
        for path in (self._path, self._anchor.path):
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unwritten(path, error) from error
        self._unsynced_since = None
        self._synced_at = time.monotonic()

    def _keep_proof(self, data: bytes) -> None:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.pwrite(handle, data, 0) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if os.fstat(handle).st_size > len(data):
                    os.ftruncate(handle, len(data))
            finally:
                os.close(handle)
        except OSError as error:
            raise _unwritten(self._path, error) from error
        self._data = self._sound = data
        self._is_new()

    def _is_new(self) -> None:
        now = time.monotonic()
        if self._unsynced_since is None:
            self._unsynced_since = now
        elif now - self._unsynced_since >= SYNC_EVERY_S:
            self._sync()


def _sound(data: bytes) -> bytes:
    """The frame that bytes begin with: behind it there may be the end of a longer one that it was written over."""
    try:
        header, body = frame_sizes(data[:FRAME_HEAD_BYTES])
        end = FRAME_HEAD_BYTES + header + SIGNATURE_BYTES + body
        if end > MAX_PROOF_BYTES:
            return b""
        [message] = read_frames(data[:end], max_messages=1)
    except LabelerError:
        return b""
    return data[:end] if message.is_whole else b""


def _unwritten(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{path.name} cannot be written ({error.strerror}); make room")
