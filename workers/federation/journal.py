"""What `labeler up` writes into its coordinator's journal before that coordinator starts: who may ask, who takes part.

Nobody else has the journal open at that time, so parties are enrolled without a request, and all roles can start at
once: none of them is turned away.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from feature_store.journal.database import Database, open_database
from feature_store.journal.parties import PartyStore
from feature_store.journal.tokens import TokenStore
from labeler.errors import BadData, JournalInUse, NotFound, ProtocolViolation
from workers.federation.home import LocalFederation
from workers.homes.keys import journal_of
from workers.party.home import ANCHOR_FILE

FIRST_TOKEN: Final = "first administrator"
OWN_TOKEN: Final = "labeler up"
"""Name of the tokens with which earlier versions enrolled the parties; one that was left behind is revoked."""

_ENDING_S = 5.0
_AGAIN_S = 0.05


@dataclass(frozen=True, repr=False)
class AdminToken:
    """The administrator's token of a federation.

    Attributes:
        secret: what opens everything.
        is_new: whether it was made now.
    """

    secret: str
    is_new: bool


def prepare_journal(federation: LocalFederation) -> AdminToken:
    """Enrol the federation's parties in its coordinator's journal, and find or make its administrator's token.

    The token is kept in a file of the home, so that a federation that is started again tells the same. The file opens
    nothing that the home's owner could not open: the keys of every party lie beside it.

    Raises:
        BadData: a party's keys are not those that were enrolled.
        JournalInUse: a coordinator runs on this home.
    """
    with closing(_journal(federation.coordinator)) as database:
        _enrol(federation, PartyStore(database), database)
        store = TokenStore(database)
        for known in store.list():
            if known.name == OWN_TOKEN and known.revoked_at is None:
                store.revoke(known.token_id)
        kept = federation.read_token()
        if kept is not None and store.find(kept) is not None:
            return AdminToken(kept, is_new=False)
        # One that was lost opens on; one that was revoked does not, and another file would tell it again.
        made = store.create(FIRST_TOKEN, "admin")[1]
        federation.keep_token(made)
        return AdminToken(made, is_new=True)


def _enrol(federation: LocalFederation, parties: PartyStore, database: Database) -> None:
    """Enrol who is not enrolled. Somebody that an administrator has revoked stays revoked, and is turned away."""
    with database.write() as connection:
        for party in federation.enrolments():
            try:
                if parties.get(party.party_id, connection=connection).state == "revoked":
                    continue
            except NotFound:
                pass
            try:
                parties.enrol(
                    party.party_id,
                    party.role,
                    party.keys.verify_key,
                    party.keys.seal_key,
                    tallier=party.tallier,
                    connection=connection,
                )
            except ProtocolViolation as error:
                raise BadData(f"{party.party_id} cannot be enrolled: {error}") from None


def _journal(home: Path) -> Database:
    """The coordinator's journal. Right after an earlier supervisor was killed, its coordinator may still be ending."""
    until = time.monotonic() + _ENDING_S
    while True:
        try:
            return open_database(journal_of(home), anchor=home / ANCHOR_FILE)
        except JournalInUse:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)
