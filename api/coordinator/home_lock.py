"""One coordinator per home, taken before anything in the home is read or changed.

A coordinator removes what an earlier one left half-written when it starts: uploads whose requests have ended. A second
one on the same home would so remove the first one's uploads under way, and both would write the same files. The
journal's own lock comes too late for that, and with PostgreSQL it guards a database and no folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from feature_store.durable import exclusive
from feature_store.journal.storage import create_private
from labeler.errors import InvalidSetting, JournalInUse, OutputInUse

LOCK_FILE = ".coordinator.lock"


@contextmanager
def owning_home(home: Path) -> Iterator[None]:
    """Hold a coordinator's home; the system frees it if the process dies.

    Raises:
        JournalInUse: another coordinator runs on it.
        InvalidSetting: the folder is not there, or cannot be written.
    """
    lock = home / LOCK_FILE
    try:
        create_private(lock)
    except OSError as error:
        raise InvalidSetting(f"the coordinator's home {home.name!r} cannot be used: {error.strerror}") from None
    with ExitStack() as held:
        try:
            held.enter_context(exclusive(lock, f"the home {home.name!r}"))
        except OutputInUse:
            raise JournalInUse(
                f"another coordinator runs on the home {home.name!r}; one at a time may. Stop it "
                "first, or start this one on a home of its own"
            ) from None
        yield
