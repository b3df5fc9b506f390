"""What became of a job's charge, and who refused it: computed once here, and only rendered by whoever shows it."""

from __future__ import annotations

from collections.abc import Sequence

from api.schema import Refusal, RoundView
from feature_store.journal.jobs import RoundRecord

_DONE = {"posted": "charged", "void": "given back", "reserved": "reserved"}


def ledger_seq(rounds: Sequence[RoundRecord]) -> int | None:
    """The last entry that posted the charge of a round; None where none was posted."""
    posted = [one.charge.seq for one in rounds if one.charge is not None and one.charge.state == "posted"]
    return max(posted, default=None)


def ledger_in_words(rounds: Sequence[RoundRecord]) -> str:
    """What the ledger says of a job: "charged by entry 47", or "2 of 3 batches charged, last by entry 47; ..."."""
    charges = [one.charge for one in rounds if one.charge is not None]
    if not charges:
        return "no entry: nothing was reserved"
    parts = []
    for state, done in _DONE.items():
        seqs = [charge.seq for charge in charges if charge.state == state]
        if seqs and len(charges) == 1:
            parts.append(f"{done} by entry {seqs[0]}")
        elif seqs:
            parts.append(f"{len(seqs)} of {len(charges)} batches {done}, last by entry {max(seqs)}")
    return "; ".join(parts)


def refusals(rounds: Sequence[RoundView]) -> tuple[Refusal, ...]:
    """Who refused and why, each reason of a party once, whatever number of batches it was given for."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in rounds:
        for party_id, reason in sorted(one.refused.items()):
            found.setdefault((party_id, reason), []).append(one.number)
    return tuple(
        Refusal(party_id=party_id, reason=reason, rounds=tuple(numbers))
        for (party_id, reason), numbers in found.items()
    )
