"""Who may say that the journal is behind: whoever shows the coordinator's own signed word for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from api.coordinator.mailroom import Witnesses
from labeler.errors import JournalBehind
from labeler.ledger.chain import Head
from labeler.messages import COORDINATOR, Kind, Message
from labeler.messages.bodies import Mail, Poll
from labeler.system.keys import PartyKeys
from tests.api.conftest import House

LOST = Head(10**6, "a" * 64)


@dataclass
class Court:
    """Witnesses over a real ledger, and what parties may show them."""

    house: House
    keys: PartyKeys = field(default_factory=PartyKeys.generate)

    def __post_init__(self) -> None:
        self.witnesses = Witnesses(self.house.ledger, self.keys.public.verify_key)

    def signed(self, head: Head, *, keys: PartyKeys | None = None, kind: Kind = "poll") -> Message:
        body = Mail(after="", coordinator_seq=head.seq, coordinator_hash=head.hash).encode()
        return (keys or self.keys).message(kind, sender=COORDINATOR, recipient="east", sequence=1, body=body)

    def compare(self, head: Head, proof: Message | None = None, *, party: str = "east") -> None:
        poll = Poll(
            after="",
            wait_s=0.0,
            journal_seq=0,
            journal_hash="",
            coordinator_seq=head.seq,
            coordinator_hash=head.hash,
            program="0",
            facts={},
        )
        self.witnesses.compare(party, poll, proof)


@pytest.fixture
def court(house: House) -> Court:
    return Court(house)


def test_a_claim_without_proof_refuses_that_party_and_nobody_else(court: Court) -> None:
    with pytest.raises(JournalBehind, match="Only this party is refused"):
        court.compare(LOST)
    assert court.witnesses.sentence == ""
    assert court.witnesses.doubters == ("east",)
    assert "entry 1000000" in court.witnesses.claim("east")
    court.compare(court.house.ledger.head(), party="north")
    assert court.witnesses.claim("north") == ""


def test_what_the_coordinator_signed_and_its_journal_does_not_hold_stops_everything(court: Court) -> None:
    with pytest.raises(JournalBehind, match="No mail is delivered"):
        court.compare(LOST, court.signed(LOST))
    assert court.witnesses.sentence.startswith("east has seen entry 1000000 of the coordinator's journal")
    assert court.witnesses.doubters == ()


def test_another_history_of_the_same_length_is_found_out_too(court: Court) -> None:
    other = Head(court.house.ledger.head().seq, "b" * 64)
    with pytest.raises(JournalBehind):
        court.compare(other, court.signed(other))
    assert court.witnesses.sentence


def test_a_proof_may_state_less_than_is_claimed_and_counts_for_what_it_states(court: Court) -> None:
    with pytest.raises(JournalBehind):
        court.compare(LOST, court.signed(court.house.ledger.head()))
    assert court.witnesses.sentence == ""
    further = Head(court.house.ledger.head().seq + 1, "c" * 64)
    with pytest.raises(JournalBehind):
        court.compare(LOST, court.signed(further))
    assert f"entry {further.seq} " in court.witnesses.sentence


@pytest.mark.parametrize("forgery", ["other key", "other kind", "own name"])
def test_what_the_coordinator_did_not_sign_as_an_answer_proves_nothing(court: Court, forgery: str) -> None:
    proof = court.signed(LOST, keys=PartyKeys.generate() if forgery == "other key" else None)
    if forgery == "other kind":
        proof = court.signed(LOST, kind="ask")
    if forgery == "own name":
        body = Mail(after="", coordinator_seq=LOST.seq, coordinator_hash=LOST.hash).encode()
        proof = court.keys.message("poll", sender="east", recipient=COORDINATOR, sequence=1, body=body)
    with pytest.raises(JournalBehind, match="Only this party"):
        court.compare(LOST, proof)
    assert court.witnesses.sentence == ""


def test_a_party_that_has_consented_to_this_journal_or_was_revoked_is_a_witness_no_more(court: Court) -> None:
    proof = court.signed(LOST)
    for _ in range(2):
        with pytest.raises(JournalBehind):
            court.compare(LOST, proof)
    court.compare(court.house.ledger.head(), proof)
    assert court.witnesses.sentence == ""
    with pytest.raises(JournalBehind):
        court.compare(LOST, proof)
    court.witnesses.forget("east")
    assert court.witnesses.sentence == ""
