"""Which folder of erasable keys a journal belongs to, so that a home that came back from a backup is found out.

A backup holds no erasable keys (feature_store.erasable), so what is restored from it cannot open what rounds had
stored, and may have forgotten charges of which nobody who is asked now knows. Therefore the folder has a key that is
none of any round, the journal keeps a value that only this key gives, and where the two do not belong together nothing
is served. The way on is `labeler journal accept-restored`: all that is left counts as spent, nothing is kept of any
round, and the home gets a new key.
"""

from __future__ import annotations

import hmac

from sqlalchemy import Column, Connection, Text, delete, insert

from feature_store.erasable import ErasableKeys, check_value
from feature_store.journal.database import Database, strict_table
from feature_store.journal.prepared import Prepared
from labeler.errors import JournalBehind

HOME_KEY = "home"
"""The name of the folder's own key."""

erasable_home = strict_table(
    "erasable_home",
    Column("check_value", Text, primary_key=True),
)
_CHECK_VALUES = Prepared("SELECT check_value FROM erasable_home")


def check_home(database: Database, keys: ErasableKeys, *, has_entries: bool) -> None:
    """Refuse a journal that does not belong to these keys; to be called before anything is written.

    Args:
        has_entries: whether its ledger holds anything.

    Raises:
        JournalBehind: the keys are there and the journal is new, or the journal is there and its keys are not.
    """
    database.create(erasable_home)
    with database.read() as connection:
        wanted = _value(connection)
    key = keys.read(HOME_KEY)
    if wanted is None and key is not None and not has_entries:
        raise JournalBehind(
            "this home has a folder of erasable keys, and the journal beside it is empty: journal.db was lost, and "
            "with it what this party has spent and answered. Restore journal.db and journal.head from the newest "
            "backup of this home. If they are lost for good, retire this party: enrol a new one with a new home, whose "
            "policy allows only what the old one had left, and no votes for life (life_epsilon): nobody knows what its "
            "images have spent on them"
        )
    if wanted is not None and (key is None or not hmac.compare_digest(check_value(key), wanted)):
        raise JournalBehind(
            "the folder of erasable keys is missing or belongs to another journal, so this home was restored from a "
            "backup, which holds none: rounds since then may be missing, and what was kept of the others cannot be "
            "opened. If this is a move to another machine, copy the folder from the old one. Else `labeler journal "
            "accept-restored` goes on: all that is left counts as spent until a person raises a cap, and no round from "
            "before is answered or summed any more"
        )


def mark_home(database: Database, keys: ErasableKeys) -> None:
    """Tie a journal to these keys, once; to be called when its ledger holds something.

    Where the process dies between the key and the row, the next start takes the key that is there.
    """
    key = keys.draw(HOME_KEY)
    with database.write() as connection:
        if _value(connection) is None:
            connection.execute(insert(erasable_home), {"check_value": check_value(key)})


def _value(connection: Connection) -> str | None:
    row = _CHECK_VALUES.first(connection)
    return None if row is None else str(row[0])


def renew_home(database: Database, keys: ErasableKeys) -> None:
    """Tie a journal to a new key and erase every other one; the journal was accepted as it is."""
    for name in keys.names():
        keys.erase(name)
    database.create(erasable_home)
    with database.write() as connection:
        connection.execute(delete(erasable_home))
    mark_home(database, keys)
