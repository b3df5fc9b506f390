"""Signed evidence from the coordinator's own journal, while it runs."""

from __future__ import annotations

from importlib.metadata import version

from feature_store.clock import Clock
from feature_store.evidence_file import SignedEvidence, sign_evidence
from feature_store.journal.database import Database
from feature_store.journal.evidence import Wanted, coordinator_facts
from feature_store.keys import PartyKeys
from labeler.evidence.derive import derive, software


def signed_evidence(
    wanted: Wanted, *, database: Database, keys: PartyKeys, delta: float, clock: Clock
) -> SignedEvidence:
    """Verify the journal from its first entry, in one moment of it, and sign what it says of a task or a period.

    Args:
        delta: of its settings.

    Raises:
        JournalBroken: the journal does not hold; nothing is evidence of it.
        NotFound: there is no such task.
        TooLarge: too many jobs for one document.
    """
    with database.read() as connection:
        facts = coordinator_facts(connection, wanted, delta=delta, read_at=clock())
    return sign_evidence(derive(facts, software(version("private-labeler"))), keys)
