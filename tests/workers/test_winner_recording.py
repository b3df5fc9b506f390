"""All that the coordinator receives in a winner round, recorded: it relays what it cannot open, and receives labels."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from safetensors.numpy import load
from scipy import stats

from labeler.errors import Forged
from labeler.messages import Message
from labeler.messages.bodies import Poll, holdings_from_bytes
from labeler.system.keys import PartyKeys
from tests.workers import test_winner_service as service
from tests.workers.test_winner_service import AGENTS, CLASSES, TALLIERS, K, Trio

ALARM = 1e-6
"""How often a test for distribution fails by chance; there are two of them."""

QUERIES = 40

trio = service.trio
"""Three real talliers, three agents, and a relay that keeps every byte that goes through it."""


def ballots_with_winners(winners: np.ndarray) -> np.ndarray:
    ballots = np.zeros((len(winners), CLASSES), dtype=np.int64)
    ballots[np.arange(len(winners)), winners] = K
    return ballots


def test_the_coordinator_relays_sealed_shares_and_is_told_labels_contributors_and_digests_only(trio: Trio) -> None:
    round = trio.round(QUERIES)
    winners = np.arange(QUERIES) % CLASSES
    trio.open(round)
    for agent in AGENTS:
        trio.vote(agent, round, ballots_with_winners(winners))
    trio.ask(round)
    running = trio.run()
    trio.winners(3)
    for one in running:
        one.end()

    relayed = [message for name in TALLIERS for message in trio.relay.mail_of(name)]
    shares = [message for message in relayed if message.header.kind == "input-share"]
    assert len(shares) == len(AGENTS) * len(TALLIERS)
    for message in shares:
        check_closed(message, trio.relay.keys)

    # Talliers send it holdings, winners and polls; nothing that they compute goes through it.
    assert {message.header.kind for message in trio.relay.inbox} == {"holdings", "winner"}
    sharing_ids = set()
    for message in trio.relay.received("holdings"):
        held = holdings_from_bytes(message.body)
        assert set(held) <= set(AGENTS)
        sharing_ids |= set(held.values())
        assert set(json.loads(message.body)) == {"version", "holdings"}
    # 16 bytes of a hash per agent, the same from all talliers: nothing of a share.
    assert len(sharing_ids) == len(AGENTS)
    answers = [trio.relay.keys.open(message) for message in trio.relay.received("winner")]
    assert len(answers) == 3
    digests = {check_answer(body, round.digest, winners) for body in answers}
    assert len(digests) == 1
    for poll in trio.relay.polls:
        check_poll(poll)


def check_closed(message: Message, coordinator: PartyKeys) -> None:
    """The coordinator cannot open it, and its bytes are as good as random."""
    assert message.header.is_sealed
    with pytest.raises(Forged, match="cannot be opened"):
        coordinator.open(message)


def check_answer(body: bytes, round_digest: str, winners: np.ndarray) -> str:
    """The exact fields of a body "winner", each accounted for; what is left is the digest of the sharings."""
    line, _, rest = body.partition(b"\n")
    content = json.loads(line)
    assert set(content) == {"version", "tallier", "round_digest", "contributors", "sharings_digest", "is_seeded"}
    assert content["version"] == "labeler-winner/1"
    assert content["tallier"] in range(3)
    assert content["round_digest"] == round_digest
    assert content["contributors"] == list(AGENTS)
    assert content["is_seeded"] is False
    arrays = load(rest)
    assert set(arrays) == {"labels"}
    assert arrays["labels"].dtype == np.int16
    np.testing.assert_array_equal(arrays["labels"], winners)
    digest = content["sharings_digest"]
    assert isinstance(digest, str)
    assert len(bytes.fromhex(digest)) == 32
    return digest


def check_poll(poll: Poll) -> None:
    """A poll is about mail and journals, and the one fact of a tallier is with whom it finds winners."""
    assert {one.name for one in fields(poll)} == {
        "after",
        "wait_s",
        "journal_seq",
        "journal_hash",
        "coordinator_seq",
        "coordinator_hash",
        "program",
        "facts",
    }
    assert set(poll.facts) == {"winner_group"}
    assert len(bytes.fromhex(poll.facts["winner_group"])) == 32


def test_sealed_shares_are_the_same_noise_to_the_coordinator_whatever_is_voted(trio: Trio) -> None:
    """Bytes of what it relays, for ballots that differ everywhere; a body in clear is found by the same test."""
    lots = []
    for number, shift in enumerate((0, 1)):
        round = trio.round(QUERIES * 5, number=number)
        trio.vote("a", round, ballots_with_winners((np.arange(QUERIES * 5) + shift) % CLASSES))
        lots.append(b"".join(trio.relay.mail_of(name)[number].body for name in TALLIERS))
    sizes = [[len(message.body) for message in trio.relay.mail_of(name)] for name in TALLIERS]
    assert all(len(set(of_one)) == 1 for of_one in sizes)
    counts = [np.bincount(np.frombuffer(lot, dtype=np.uint8), minlength=256) for lot in lots]
    assert stats.chisquare(counts[0]).pvalue > ALARM
    assert stats.chi2_contingency(np.array(counts)).pvalue > ALARM
    in_clear = np.bincount(np.frombuffer(lots[0] + bytes(200), dtype=np.uint8), minlength=256)
    assert stats.chisquare(in_clear).pvalue < ALARM
