"""Signed evidence from the coordinator's own journal, while it runs."""

from __future__ import annotations

from importlib.metadata import version

from feature_store.results.evidence import SignedEvidence, sign_evidence
from labeler.evidence.derive import derive, software
from labeler.ledger.database import Database
from labeler.ledger.evidence import Wanted, coordinator_facts
from labeler.system.clock import Clock
from labeler.system.keys import PartyKeys


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
