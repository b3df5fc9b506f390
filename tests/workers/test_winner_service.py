"""Three talliers find winners together: what they open, what they refuse to, and whom their refusal names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from labeler.errors import Forged
from labeler.ledger.database import open_database
from labeler.ledger.tallier_memory import TallierMemory
from labeler.messages.bodies import (
    Poll,
    RefusalBody,
    holdings_from_bytes,
    share_to_bytes,
    winner_from_bytes,
)
from labeler.randomness import os_source
from labeler.sharing import WinnerTerms
from labeler.system.erasable import KeyFolder
from labeler.system.keys import PartyKeys
from labeler.tally import Round, split_ballots
from tests.processes import wait_until
from workers.tallier.peers import read_group, read_peers
from workers.tallier.service import run_tallier
from workers.up.home import introduce_talliers

pytestmark = pytest.mark.process

TALLIERS = ("tallier-0", "tallier-1", "tallier-2")
AGENTS = ("a", "b", "c")
CLASSES = 4
K = 2
EXPIRES = 1e11 - 1

Votes = Mapping[str, np.ndarray]


@dataclass
class Trio:
    """Three talliers that have pinned each other, three agents, and the relay between them."""

    homes: dict[str, Path]
    relay: Any
    start: Callable[..., Any]
    agents: dict[str, PartyKeys]
    sequence: int = 0

    def round(self, queries: int, *, threshold: int | None = None, number: int = 0) -> Round:
        terms = WinnerTerms(scale=10, lowest=-3_000, highest=3_000, row_total=K, threshold=threshold)
        return Round("a" * 64, f"{number:064x}", queries, CLASSES, quorum=2, terms=terms)

    def open(self, round: Round) -> None:
        for number, name in enumerate(TALLIERS):
            self.relay.open_round(name, round, self.agents, tallier=number, expires_at=EXPIRES)

    def vote(
        self, agent: str, round: Round, ballots: np.ndarray, noise: np.ndarray | None = None, total: int = K
    ) -> None:
        """Send an agent's shares; `total` is what its rows sum to, which only a dishonest one chooses."""
        assert round.terms is not None
        noise = np.zeros_like(ballots) if noise is None else noise
        shares = split_ballots(
            ballots, noise, row_total=total, num_talliers=3, source=os_source(), field=round.terms.field
        )
        for name, share in zip(TALLIERS, shares, strict=True):
            self.sequence += 1
            fields = {"sender": agent, "sequence": self.sequence, "seal_to": self.relay.enrolled[name].seal_key}
            body = share_to_bytes(share)
            self.relay.send_as(self.agents[agent], "input-share", name, body, round=round, **fields)

    def vote_all(self, round: Round, ballots: Any) -> None:
        for agent in AGENTS:
            self.vote(agent, round, np.array(ballots, dtype=np.int64))

    def ask(self, round: Round, contributors: Mapping[str, tuple[str, ...]] | tuple[str, ...] = AGENTS) -> None:
        for name in TALLIERS:
            told = contributors if isinstance(contributors, tuple) else contributors[name]
            self.relay.ask_sum(name, round, told)

    def run(self) -> list[Any]:
        return [
            self.start(lambda stop, home=home: run_tallier(home, stop=stop, wait_s=0.5)) for home in self.homes.values()
        ]

    def winners(self, count: int) -> list[np.ndarray]:
        messages = self.relay.wait_for("winner", count)
        return [winner_from_bytes(self.relay.keys.open(message)).labels for message in messages]

    def winners_asked_again_for(self, round: Round) -> list[np.ndarray]:
        """Winners where the others may meet a tallier that has not turned yet: who is refused for the time being is
        asked again, as the coordinator does."""
        asked = 0

        def are_there() -> bool:
            nonlocal asked
            refused = self.relay.received("refused")
            assert not any(RefusalBody.decode(message.body).is_final for message in refused)
            if len(refused) > asked:
                asked = len(refused)
                self.ask(round)
            return len(self.relay.received("winner")) >= len(TALLIERS)

        wait_until(are_there, what="three winners")
        return self.winners(len(TALLIERS))

    def refusals(self, count: int) -> dict[str, RefusalBody]:
        messages = self.relay.wait_for("refused", count)
        return {message.header.sender: RefusalBody.decode(message.body) for message in messages}


@pytest.fixture
def trio(tmp_path: Path, relay: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> Trio:
    # They wait for each other as long as a busy machine takes; nobody here asks again.
    monkeypatch.setattr("workers.tallier.winners.MEETING_LIMIT_S", 600.0)
    homes = {name: tmp_path / name for name in TALLIERS}
    for name, home in homes.items():
        relay.make_tallier(home, name)
    introduce_talliers(homes)
    return Trio(homes, relay, start, {name: PartyKeys.generate() for name in AGENTS})


def test_the_winners_of_planted_votes_are_opened_with_ties_to_the_lowest_class_and_nothing_else_leaves(
    trio: Trio,
) -> None:
    round = trio.round(4, threshold=25)
    trio.open(round)
    trio.vote("a", round, np.array([[2, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]))
    trio.vote("b", round, np.array([[0, 0, 2, 0], [0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]]))
    # Noise lifts query 3 of class 3 by one unit, so that what was a tie is none.
    noise = np.zeros((4, CLASSES), dtype=np.int64)
    noise[3, 3] = 1
    trio.vote("c", round, np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]]), noise)
    trio.ask(round)
    trio.run()
    # Query 0: classes 0 and 2 tie at 30. Query 2: the best is 20, below the threshold of 25.
    for labels in trio.winners(3):
        assert labels.tolist() == [0, 1, -1, 3]
    assert trio.relay.received("aggregate-share") == []
    kinds = {message.header.kind for message in trio.relay.inbox}
    assert kinds == {"holdings", "winner"}
    # Asked again, all three answer the same again.
    trio.ask(round)
    assert [labels.tolist() for labels in trio.winners(6)[3:]] == [[0, 1, -1, 3]] * 3
    with open_database(trio.homes["tallier-1"] / "journal.db", read_only=True) as database:
        kept = TallierMemory(database, KeyFolder(trio.homes["tallier-1"] / "erasable")).load(round.digest)
    assert all(share.data is None for share in kept.shares.values())


def test_winners_that_are_asked_for_again_and_again_are_given_up(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tallier.winners.MAX_ATTEMPTS", 1)
    round = trio.round(2)
    trio.open(round)
    trio.vote_all(round, [[2, 0, 0, 0], [0, 2, 0, 0]])
    trio.ask(round)
    trio.run()
    assert [labels.tolist() for labels in trio.winners(3)] == [[0, 1]] * 3
    trio.ask(round)
    said = trio.refusals(3).values()
    assert all(refusal.is_final and "given up" in refusal.sentence for refusal in said)
    assert len(trio.relay.received("winner")) == 3


def test_talliers_told_different_contributors_open_nothing_and_say_who_differs(trio: Trio) -> None:
    round = trio.round(2)
    trio.open(round)
    trio.vote_all(round, [[2, 0, 0, 0], [0, 2, 0, 0]])
    trio.ask(round, {"tallier-0": AGENTS, "tallier-1": ("a", "b"), "tallier-2": AGENTS})
    trio.run()
    said = trio.refusals(3)
    assert trio.relay.received("winner") == []
    for name, refusal in said.items():
        assert refusal.is_final
        assert "was told other contributors than this tallier" in refusal.sentence
        assert ("only it has 'c'" if name == "tallier-1" else "tallier 1 was told") in refusal.sentence


def test_an_agent_whose_ballots_sum_to_more_than_allowed_voids_the_round_and_is_named(trio: Trio) -> None:
    round = trio.round(3)
    trio.open(round)
    for agent in ("a", "c"):
        trio.vote(agent, round, np.array([[2, 0, 0, 0]] * 3))
    trio.vote("b", round, np.array([[0, 2, 0, 0], [0, 2, 0, 0], [0, 50, 0, 0]]), total=50)
    trio.ask(round)
    trio.run()
    for refusal in trio.refusals(3).values():
        assert refusal.is_final
        assert "the ballots of 1 agents do not sum to what their task allows: 'b'" in refusal.sentence
    assert trio.relay.received("winner") == []


def test_asked_for_another_round_meanwhile_a_tallier_turns_to_that_one(trio: Trio) -> None:
    # Nobody comes to the first round, and it would be waited for longer than this test may take.
    lonely, wanted = trio.round(2, number=1), trio.round(2, number=2)
    for round in (lonely, wanted):
        trio.open(round)
        trio.vote_all(round, [[0, 2, 0, 0], [0, 0, 2, 0]])
    trio.relay.ask_sum("tallier-1", lonely, AGENTS)
    trio.run()
    trio.relay.wait_for("holdings", 6)
    trio.ask(wanted)
    for labels in trio.winners_asked_again_for(wanted):
        assert labels.tolist() == [1, 2]


def test_a_tallier_without_peers_says_that_it_finds_no_winners_and_refuses_for_the_time_being(trio: Trio) -> None:
    round = trio.round(1)
    home = trio.homes["tallier-1"]
    (home / "peers.toml").unlink()
    trio.open(round)
    trio.vote_all(round, [[2, 0, 0, 0]])
    trio.ask(round)
    trio.start(lambda stop: run_tallier(home, stop=stop, wait_s=0.5))
    (refusal,) = trio.refusals(1).values()
    assert not refusal.is_final
    assert "this tallier's site has pinned no other talliers" in refusal.sentence
    assert dict(trio.relay.polls[-1].facts) == {}


def test_talliers_that_have_pinned_each_other_tell_the_same_group_and_move_together(trio: Trio) -> None:
    def groups() -> list[Any]:
        return [
            read_group(home, own_verify_key=trio.relay.enrolled[name].verify_key) for name, home in trio.homes.items()
        ]

    before = groups()
    assert len({group.digest for group in before}) == 1
    assert [group.number for group in before] == [0, 1, 2]
    assert len({group.addresses for group in before}) == 1
    # Every start of a local federation moves all three.
    introduce_talliers(trio.homes)
    moved = groups()
    assert len({group.addresses for group in moved}) == 1
    assert moved[0].addresses != before[0].addresses
    assert {group.digest for group in moved} == {group.digest for group in before}
    known = read_peers(trio.homes["tallier-0"])
    assert known is not None
    assert sorted(known.peers) == ["1", "2"]


# All that the coordinator receives: it relays what it cannot open, and receives labels


QUERIES = 40


def test_the_coordinator_relays_sealed_shares_and_is_told_labels_contributors_and_digests_only(trio: Trio) -> None:
    round = trio.round(QUERIES)
    winners = np.arange(QUERIES) % CLASSES
    trio.open(round)
    trio.vote_all(round, K * np.eye(CLASSES, dtype=np.int64)[winners])
    trio.ask(round)
    trio.run()
    trio.winners(3)

    relayed = [message for name in TALLIERS for message in trio.relay.mail_of(name)]
    shares = [message for message in relayed if message.header.kind == "input-share"]
    assert len(shares) == len(AGENTS) * len(TALLIERS)
    for message in shares:
        assert message.header.is_sealed
        with pytest.raises(Forged, match="cannot be opened"):
            trio.relay.keys.open(message)

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
    # A poll is about mail and journals, and the one fact of a tallier is with whom it finds winners.
    assert {one.name for one in fields(Poll)} == {
        "after", "wait_s", "journal_seq", "journal_hash", "coordinator_seq", "coordinator_hash", "program", "facts",
    }  # fmt: skip
    for poll in trio.relay.polls:
        assert set(poll.facts) == {"winner_group"}
        assert len(bytes.fromhex(poll.facts["winner_group"])) == 32


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
