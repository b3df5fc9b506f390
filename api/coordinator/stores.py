"""The coordinator's journal, opened with all its stores, and its home: the lock, the keys, and room on the disk.

**The lock** of a home is taken before anything in the home is read or changed. On start, a coordinator removes an
earlier one's half-written uploads. A second coordinator would remove the first one's uploads in progress, and both
would write the same files. The journal's own lock comes too late for that, and with PostgreSQL it guards a database,
not a folder.

**The keys** by which every site knows this coordinator are made once and never silently replaced. Sites pin the public
keys in their own policies. A coordinator that lost its keys and made new ones would sign messages that no site
believes. So if a party was ever enrolled, missing keys prevent the start.

**Room**: a service that cannot write takes no job. A result is reused for a few seconds, so frequent readiness checks
cost little. The probe file is large enough that if it fits, the next journal entry fits.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from api.coordinator.budgets import check_delta, open_accounts
from api.coordinator.config import CoordinatorConfig
from api.coordinator.pricing import charges_of, round_prices
from api.problems import problem_of
from labeler.driver.settlement import Settlement
from labeler.errors import InvalidSetting, JournalInUse, LabelerError, OutputInUse, Unavailable
from labeler.ledger.database import Database, open_database
from labeler.ledger.jobs import ForgottenJobs, JobStore
from labeler.ledger.ledger import Ledger
from labeler.ledger.parties import PartyStore
from labeler.ledger.sequences import Sequences
from labeler.ledger.tasks import TaskStore
from labeler.ledger.tokens import TokenStore
from labeler.system.clock import Clock
from labeler.system.clock import now_utc as utc_now
from labeler.system.files import create_private, exclusive, is_full, replacing, storage_full
from labeler.system.keys import PartyKeys


@dataclass(frozen=True)
class Stores:
    """Everything in the coordinator's journal, over one database."""

    database: Database
    ledger: Ledger
    tasks: TaskStore
    jobs: JobStore
    forgotten: ForgottenJobs
    parties: PartyStore
    sequences: Sequences
    tokens: TokenStore
    clock: Clock

    @classmethod
    def over(cls, database: Database, *, clock: Clock) -> Stores:
        """Build the stores over an open journal."""
        return cls(
            database=database,
            ledger=Ledger(database, clock=clock),
            tasks=TaskStore(database, clock=clock),
            jobs=JobStore(database, clock=clock),
            forgotten=ForgottenJobs(database, clock=clock),
            parties=PartyStore(database, clock=clock),
            sequences=Sequences(database, clock=clock),
            tokens=TokenStore(database, clock=clock),
            clock=clock,
        )

    @classmethod
    def open(cls, config: CoordinatorConfig, *, clock: Clock = utc_now) -> Stores:
        """Open the journal and check its last entries and every balance (labeler.ledger.verification.verify_recent).

        `labeler journal verify` reads it from its first entry.

        Raises:
            JournalBroken, JournalBehind, UnsafeStorage, JournalInUse: see labeler.ledger.
            InvalidSetting: see `check_delta`.
        """
        database = open_database(config.journal_target, anchor=config.home / "journal.head")
        try:
            stores = cls.over(database, clock=clock)
            stores.ledger.verify(is_whole=False)
            check_delta(stores.tasks, config.delta)
            open_accounts(stores.ledger, config, [one.party_id for one in stores.parties.list(role="agent")])
        except BaseException:
            database.close()
            raise
        return stores

    @property
    def settlement(self) -> Settlement:
        """Return the settlement of jobs in this journal."""
        return Settlement(
            self.database,
            self.ledger,
            self.jobs,
            self.tasks,
            price_rounds=round_prices,
            charges_of=charges_of,
            problem_of=problem_of,
        )


LOCK_FILE = ".coordinator.lock"


@contextmanager
def owning_home(home: Path) -> Iterator[None]:
    """Hold a coordinator's home; the system frees it if the process dies.

    Raises:
        JournalInUse: another coordinator uses it.
        InvalidSetting: the folder is missing or not writable.
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
                f"another coordinator runs on the home {home.name!r}; only one may at a time. Stop it "
                "first, or start this one on another home"
            ) from None
        yield


KEYS_FILE = "keys.json"


def own_keys(home: Path, *, is_known: bool) -> PartyKeys:
    """Return the keys in a coordinator's home; make them at the first start.

    Args:
        is_known: whether a party was ever enrolled here, and so has pinned this coordinator's keys.

    Raises:
        InvalidSetting: they are missing although a party pinned them, or cannot be read.
        BadData: the file holds no keys.
    """
    path = home / KEYS_FILE
    if not path.exists():
        if is_known:
            raise InvalidSetting(
                f"{KEYS_FILE} is missing from the coordinator's home {home.name!r}, and parties are enrolled in its "
                "journal, who know this coordinator by the keys in it. Put the file back from a backup. If it is lost "
                "for good, make new keys (labeler keys make --home), and have every site pin them: verify_key in "
                "policy.toml, coordinator_verify_key and coordinator_seal_key in tallier.toml"
            )
        PartyKeys.generate().save(path)
    return PartyKeys.load(path)


INCOMING = "incoming"
"""Name of the folder for unfinished uploads, in the coordinator's home."""


def clear_incoming(home: Path) -> None:
    """Remove uploads that a crash left half-received.

    Raises:
        InvalidSetting: not a folder, or not removable. Found now, because otherwise every later upload would fail.
    """
    path = home / INCOMING
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise InvalidSetting(
                f"{INCOMING!r} in the coordinator's home {home.name!r} is not a folder, so no upload could be kept; "
                "check what it is and move it away; the coordinator makes the folder itself"
            )
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidSetting(
            f"what a crash left in {INCOMING!r} of the coordinator's home {home.name!r} cannot be removed "
            f"({error.strerror}); look at the owner and the permissions of the folder"
        ) from None


PROBE_BYTES = 256 * 1024
TOLD_AGAIN_S = 5.0
PROBE_FILE = ".write-probe"


class RoomProbe:
    """See the module.

    Args:
        now: seconds that never run backwards.
    """

    def __init__(self, home: Path, journal: Database, *, now: Callable[[], float] = time.monotonic) -> None:
        self._path = home / PROBE_FILE
        self._journal = journal
        self._now = now
        self._lock = threading.Lock()
        self._found: tuple[float, LabelerError | None] | None = None

    def check(self) -> str:
        """Write the probe file, or repeat the last result if it is fresh.

        Raises:
            StorageFull: there is no room.
            Unavailable: writing fails for another reason.
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
            with replacing(self._path, mode=0o600) as temporary:
                # Random, so that no file system compresses it away.
                temporary.write_bytes(os.urandom(PROBE_BYTES))
            self._path.unlink(missing_ok=True)
            self._journal.probe()
        except LabelerError as error:
            return error
        except OSError as error:
            if is_full(error):
                return storage_full("what comes next")
            return Unavailable(f"the home cannot be written ({error.strerror}); look at its disk and its permissions")
        return None
