"""Three talliers find winners together: what they open, what they refuse to, and whom their refusal names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labeler.ledger.database import open_database
from labeler.ledger.tallier_memory import TallierMemory
from labeler.messages.bodies import OpenRound, Refusal, SumRequest, share_to_bytes, winner_from_bytes
from labeler.randomness import os_source
from labeler.sharing import WinnerTerms
from labeler.system.erasable import KeyFolder
from labeler.system.keys import PartyKeys
from labeler.tally import Round, split_ballots
from workers.party.home import TallierConfig, create_tallier_home
from workers.tallier.peers import read_group, read_peers
from workers.tallier.service import run_tallier
from workers.up.home import introduce_talliers
from workers.winner.session import SecureEngine

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
        participants = {name: keys.public.verify_key for name, keys in self.agents.items()}
        for number, name in enumerate(TALLIERS):
            body = OpenRound(round=round, tallier=number, participants=participants, expires_at=EXPIRES).encode()
            self.relay.send("open-round", name, body, task=round.task_digest, round=round.digest)

    def vote(
        self, agent: str, round: Round, ballots: np.ndarray, noise: np.ndarray | None = None, total: int = K
    ) -> None:
        """Send an agent's shares; `total` is what its rows sum to, which only a dishonest one chooses."""
        assert round.terms is not None
        if noise is None:
            noise = np.zeros((round.num_queries, CLASSES), dtype=np.int64)
        shares = split_ballots(
            ballots, noise, row_total=total, num_talliers=3, source=os_source(), field=round.terms.field
        )
        for name, share in zip(TALLIERS, shares, strict=True):
            self.sequence += 1
            message = self.agents[agent].message(
                "input-share",
                sender=agent,
                recipient=name,
                task_digest=round.task_digest,
                round_digest=round.digest,
                sequence=self.sequence,
                body=share_to_bytes(share),
                seal_to=self.relay.enrolled[name].seal_key,
            )
            self.relay.put(name, message)

    def ask(self, round: Round, contributors: Mapping[str, tuple[str, ...]] | tuple[str, ...] = AGENTS) -> None:
        for name in TALLIERS:
            told = contributors if isinstance(contributors, tuple) else contributors[name]
            body = SumRequest(told, ledger_seq=5, ledger_hash="e" * 64).encode()
            self.relay.send("sum", name, body, task=round.task_digest, round=round.digest)

    def run(self) -> list[Any]:
        return [
            self.start(lambda stop, home=home: run_tallier(home, stop=stop, wait_s=0.5)) for home in self.homes.values()
        ]

    def winners(self, count: int) -> list[np.ndarray]:
        messages = self.relay.wait_for("winner", count, seconds=40.0)
        return [winner_from_bytes(self.relay.keys.open(message)).labels for message in messages]

    def winners_asked_again_for(self, round: Round) -> list[np.ndarray]:
        """Winners where the others may meet a tallier that has not turned yet: who is refused for the time being is
        asked again, as the coordinator does."""
        asked = 0
        end = time.monotonic() + 60.0
        while len(self.relay.received("winner")) < len(TALLIERS):
            assert time.monotonic() < end, self.relay.inbox
            refused = self.relay.received("refused")
            assert not any(Refusal.decode(message.body).is_final for message in refused)
            if len(refused) > asked:
                asked = len(refused)
                self.ask(round)
            time.sleep(0.02)
        return self.winners(len(TALLIERS))

    def refusals(self, count: int) -> dict[str, Refusal]:
        messages = self.relay.wait_for("refused", count, seconds=40.0)
        return {message.header.sender: Refusal.decode(message.body) for message in messages}


@pytest.fixture
def trio(tmp_path: Path, relay: Any, start: Any) -> Trio:
    homes = {name: tmp_path / name for name in TALLIERS}
    for name, home in homes.items():
        config = TallierConfig(
            tallier_id=name,
            coordinator_url=relay.url,
            coordinator_verify_key=relay.keys.public.verify_key,
            coordinator_seal_key=relay.keys.public.seal_key,
        )
        relay.enrolled[name] = create_tallier_home(home, config)
    introduce_talliers(homes)
    return Trio(homes, relay, start, {name: PartyKeys.generate() for name in AGENTS})


def ballots_of(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_the_winners_of_planted_votes_are_opened_with_ties_to_the_lowest_class_and_nothing_else_leaves(
    trio: Trio,
) -> None:
    round = trio.round(4, threshold=25)
    trio.open(round)
    trio.vote("a", round, ballots_of([[2, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]))
    trio.vote("b", round, ballots_of([[0, 0, 2, 0], [0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]]))
    # Noise lifts query 3 of class 3 by one unit, so that what was a tie is none.
    noise = np.zeros((4, CLASSES), dtype=np.int64)
    noise[3, 3] = 1
    trio.vote("c", round, ballots_of([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]]), noise)
    trio.ask(round)
    running = trio.run()
    # Query 0: classes 0 and 2 tie at 30. Query 2: the best is 20, below the threshold of 25.
    for labels in trio.winners(3):
        assert labels.tolist() == [0, 1, -1, 3]
    assert trio.relay.received("aggregate-share") == []
    kinds = {message.header.kind for message in trio.relay.inbox}
    assert kinds == {"holdings", "winner"}
    # Asked again, all three answer the same again.
    trio.ask(round)
    assert [labels.tolist() for labels in trio.winners(6)[3:]] == [[0, 1, -1, 3]] * 3
    for one in running:
        one.end()
    with open_database(trio.homes["tallier-1"] / "journal.db", read_only=True) as database:
        kept = TallierMemory(database, KeyFolder(trio.homes["tallier-1"] / "erasable")).load(round.digest)
    assert all(share.data is None for share in kept.shares.values())


def test_winners_that_are_asked_for_again_and_again_are_given_up(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tallier.winners.MAX_ATTEMPTS", 1)
    round = trio.round(2)
    trio.open(round)
    for agent in AGENTS:
        trio.vote(agent, round, ballots_of([[2, 0, 0, 0], [0, 2, 0, 0]]))
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
    for agent in AGENTS:
        trio.vote(agent, round, ballots_of([[2, 0, 0, 0], [0, 2, 0, 0]]))
    trio.ask(round, {"tallier-0": AGENTS, "tallier-1": ("a", "b"), "tallier-2": AGENTS})
    trio.run()
    said = trio.refusals(2)
    assert trio.relay.received("winner") == []
    final = {name: refusal for name, refusal in said.items() if refusal.is_final}
    assert final
    for name, refusal in final.items():
        assert "was told other contributors than this tallier" in refusal.sentence
        assert ("only it has 'c'" if name == "tallier-1" else "tallier 1 was told") in refusal.sentence


def test_an_agent_whose_ballots_sum_to_more_than_allowed_voids_the_round_and_is_named(trio: Trio) -> None:
    round = trio.round(3)
    trio.open(round)
    for agent in ("a", "c"):
        trio.vote(agent, round, ballots_of([[2, 0, 0, 0]] * 3))
    trio.vote("b", round, ballots_of([[0, 2, 0, 0], [0, 2, 0, 0], [0, 50, 0, 0]]), total=50)
    trio.ask(round)
    trio.run()
    for refusal in trio.refusals(3).values():
        assert refusal.is_final
        assert "the ballots of 1 agents do not sum to what their task allows: 'b'" in refusal.sentence
    assert trio.relay.received("winner") == []


@pytest.mark.long
def test_a_tallier_that_does_not_come_is_waited_for_and_the_round_is_computed_when_it_does(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tallier.winners.MEETING_LIMIT_S", 3.0)
    round = trio.round(2)
    trio.open(round)
    for agent in AGENTS:
        trio.vote(agent, round, ballots_of([[2, 0, 0, 0], [0, 0, 0, 2]]))
    first, second, third = trio.homes.values()
    trio.ask(round)
    for home in (first, third):
        trio.start(lambda stop, home=home: run_tallier(home, stop=stop, wait_s=0.5))
    said = trio.refusals(2)
    assert not any(refusal.is_final for refusal in said.values())
    # Who gives up first says why; the other finds that one gone.
    reason = "not all talliers came to the winner job (no connection with tallier 1"
    assert any(reason in refusal.sentence for refusal in said.values())
    trio.start(lambda stop: run_tallier(second, stop=stop, wait_s=0.5))
    trio.ask(round)
    for labels in trio.winners(3):
        assert labels.tolist() == [0, 3]


def test_asked_for_another_round_meanwhile_a_tallier_turns_to_that_one(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody comes to the first round, and it would be waited for longer than this test may take.
    monkeypatch.setattr("workers.tallier.winners.MEETING_LIMIT_S", 600.0)
    lonely, wanted = trio.round(2, number=1), trio.round(2, number=2)
    for round in (lonely, wanted):
        trio.open(round)
        for agent in AGENTS:
            trio.vote(agent, round, ballots_of([[0, 2, 0, 0], [0, 0, 2, 0]]))
    body = SumRequest(AGENTS, ledger_seq=5, ledger_hash="e" * 64).encode()
    trio.relay.send("sum", "tallier-1", body, task=lonely.task_digest, round=lonely.digest)
    trio.run()
    trio.relay.wait_for("holdings", 6)
    trio.ask(wanted)
    for labels in trio.winners_asked_again_for(wanted):
        assert labels.tolist() == [1, 2]


def test_rounds_asked_for_together_are_computed_together_and_a_misshapen_ballot_voids_its_own_alone(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve rounds of different sizes, one of them with a cheat; each tallier makes one computation of them."""
    computed: list[int] = []
    true = SecureEngine.winners

    def counted(engine: SecureEngine, orders: Any, *arguments: Any, **named: Any) -> Any:
        found = true(engine, orders, *arguments, **named)
        computed.append(sum(isinstance(one, np.ndarray) for one in found))
        return found

    monkeypatch.setattr(SecureEngine, "winners", counted)
    rounds = [trio.round(1 + number, number=number, threshold=5 if number % 2 else None) for number in range(12)]
    for number, round in enumerate(rounds):
        trio.open(round)
        for agent in AGENTS:
            is_cheat = number == 7 and agent == "b"
            ballots = np.zeros((round.num_queries, CLASSES), dtype=np.int64)
            ballots[:, number % CLASSES] = 50 if is_cheat else K
            trio.vote(agent, round, ballots, total=50 if is_cheat else K)
    for round in rounds:
        trio.ask(round)
    trio.run()
    places = {round.digest: number for number, round in enumerate(rounds)}
    messages = trio.relay.wait_for("winner", 33, seconds=60.0)
    for message in messages:
        winner = winner_from_bytes(trio.relay.keys.open(message))
        number = places[winner.round_digest]
        assert number != 7
        assert winner.labels.tolist() == [number % CLASSES] * (number + 1)
    for refusal in trio.refusals(3).values():
        assert refusal.is_final
        assert "the ballots of 1 agents do not sum to what their task allows: 'b'" in refusal.sentence
    # Asked for in as many messages as rounds, they are computed in a few goes, however the messages came.
    assert sum(computed) == 33
    assert len([count for count in computed if count]) <= 9


def test_a_tallier_without_peers_says_that_it_finds_no_winners_and_refuses_for_the_time_being(trio: Trio) -> None:
    round = trio.round(1)
    home = trio.homes["tallier-1"]
    (home / "peers.toml").unlink()
    trio.open(round)
    for agent in AGENTS:
        trio.vote(agent, round, ballots_of([[2, 0, 0, 0]]))
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
