"""The tallier's process: which shares it takes, that it sums once, and that killing it changes nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labeler.errors import JournalBehind
from labeler.messages import Message
from labeler.messages.bodies import (
    OpenRound,
    RefusalBody,
    SumRequest,
    aggregate_from_bytes,
    holdings_from_bytes,
    share_to_bytes,
)
from labeler.noise import DiscreteGaussian, noise_source
from labeler.randomness import keyed_source, os_source, seeded_source
from labeler.rounds import tallier as machine
from labeler.sharing import ShareVector, split
from labeler.system.erasable import keys_in
from labeler.system.keys import PartyKeys, verify
from labeler.tally import AggregateShare, Round
from tests.processes import wait_until
from workers.homes.journals import accept_restored_journal, backup_home
from workers.party.home import create_tallier_home, read_tallier_config
from workers.tallier.service import run_tallier

ME = "tallier-1"
AGENTS = ("a", "b", "c")
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
EXPIRES = NOW.timestamp() + 3600


@dataclass
class Table:
    """One tallier's home, three agents with keys, a round of a quorum of two, and the relay between them."""

    home: Path
    relay: Any
    start: Callable[..., Any]
    agents: dict[str, PartyKeys]
    now: datetime = NOW
    sequence: int = 0

    def round(self, number: int = 0) -> Round:
        return Round("a" * 64, f"{number:064x}", num_queries=2, num_classes=3, quorum=2)

    def open(self, round: Round, *, expires_at: float = EXPIRES, **changes: Any) -> None:
        self.relay.open_round(ME, round, self.agents, tallier=1, expires_at=expires_at, **changes)

    def share_of(self, agent: str, round: Round, *, is_marked: bool = False) -> ShareVector:
        seeded = seeded_source(f"{agent} {round.digest}".encode())
        # Repeatable, and not marked as such: a tallier takes no share that is.
        source = seeded if is_marked else keyed_source(seeded.bytes(32), is_seeded=False)
        return split(np.full((2, 3), ord(agent), dtype=np.int64), num_talliers=3, source=source)[1]

    def share(self, agent: str, round: Round, *, is_marked: bool = False, **changes: Any) -> Message:
        self.sequence += 1
        body = changes.pop("body", None) or share_to_bytes(self.share_of(agent, round, is_marked=is_marked))
        fields = {"sender": agent, "sequence": self.sequence, "seal_to": self.relay.enrolled[ME].seal_key} | changes
        keys = fields.pop("keys", self.agents[agent])
        return self.relay.send_as(keys, "input-share", ME, body, round=round, **fields)

    def opened(self, round: Round, agents: Iterable[str] = AGENTS, **changes: Any) -> Round:
        """Open a round, and send these agents' shares of it."""
        self.open(round, **changes)
        for agent in agents:
            self.share(agent, round)
        return round

    def sum(self, round: Round, contributors: tuple[str, ...]) -> None:
        self.relay.ask_sum(ME, round, contributors)

    def run(self) -> Any:
        return self.start(lambda stop: run_tallier(self.home, stop=stop, clock=lambda: self.now, wait_s=0.1))

    def through(self, work: Callable[[], None] = lambda: None) -> None:
        """Run until all mail that is there was handled: a marker round is opened last and waited for."""
        work()
        marker = self.round(10**6 + self.sequence)
        self.sequence += 1
        self.open(marker, expires_at=1e11 - 1)
        with self.run():
            self.relay_holdings(marker)
            self.relay.wait_for_rest(ME)  # else it would take all of it again

    def relay_holdings(self, round: Round) -> dict[str, bytes]:
        """The last report on a round, once there is one."""
        count = 1
        while True:
            for message in reversed(self.relay.wait_for("holdings", count)):
                if message.header.round_digest == round.digest:
                    verify(message, self.relay.enrolled[ME].verify_key)
                    return dict(holdings_from_bytes(message.body))
            count = len(self.relay.received("holdings")) + 1

    def sums(self, count: int) -> list[AggregateShare]:
        found = self.relay.wait_for("aggregate-share", count)
        return [aggregate_from_bytes(self.relay.keys.open(message)) for message in found]


@pytest.fixture
def table(tmp_path: Path, relay: Any, start: Any) -> Table:
    relay.make_tallier(tmp_path / "tallier", ME)
    return Table(tmp_path / "tallier", relay, start, {name: PartyKeys.generate() for name in AGENTS})


def expected_words(table: Table, round: Round, agents: str) -> np.ndarray:
    return sum((table.share_of(agent, round).expand() for agent in agents), np.zeros((2, 3), np.uint64))


def test_it_adds_up_the_agents_it_is_asked_for(table: Table) -> None:
    round = table.opened(table.round())
    table.through()
    assert table.relay_holdings(round) == {agent: table.share_of(agent, round).sharing_id for agent in AGENTS}
    table.through(lambda: table.sum(round, ("a", "c")))
    (aggregate,) = table.sums(1)
    assert aggregate.contributors == {"a", "c"}
    assert aggregate.tallier == 1
    assert np.array_equal(aggregate.words, expected_words(table, round, "ac"))


def test_no_more_rounds_are_open_than_a_tallier_has_room_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_OPEN_ROUNDS", 2)
    first, second, third = table.opened(table.round(0)), table.round(1), table.round(2)
    table.open(second)
    with table.run():
        table.relay_holdings(second)
        table.open(third)
        (told,) = table.relay.wait_for("refused")
        assert (RefusalBody.decode(told.body).reason, RefusalBody.decode(told.body).is_final) == ("unavailable", False)
        # One is summed, so there is room when the coordinator asks again.
        table.sum(first, AGENTS)
        table.sums(1)
        table.open(third)
        table.relay_holdings(third)
    assert len(table.relay.received("refused")) == 1


def test_a_tallier_that_knows_its_agents_sums_nobody_the_coordinator_has_invented(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    known = {name: keys.public.verify_key for name, keys in table.agents.items()}
    create_tallier_home(table.home, read_tallier_config(table.home).model_copy(update={"agents": known}))
    invented, impostor = table.round(1), table.round(2)
    table.open(invented, participants={"a": known["a"], "x": PartyKeys.generate().public.verify_key})
    table.open(impostor, participants=known | {"b": PartyKeys.generate().public.verify_key})
    table.share("a", invented)
    table.through()
    sentences = [record.sentence for record in caplog.records if record.message == "message refused"]
    assert "names 3 agents and their keys, and the round names 'x' with the key" in sentences[0]
    assert "the round names 'b' with the key" in sentences[1]
    # The asker gets a final refusal, so that its job does not wait for a deadline.
    told = table.relay.received("refused")
    assert [one.header.round_digest for one in told] == [invented.digest, impostor.digest]
    assert [RefusalBody.decode(one.body) for one in told] == [
        RefusalBody("privacy-refusal", sentence, True) for sentence in sentences[:2]
    ]
    round = table.round()
    table.opened(round, "ab", participants={name: known[name] for name in "ab"})
    table.through(lambda: table.sum(round, ("a", "b")))
    assert [aggregate.contributors for aggregate in table.sums(1)] == [frozenset({"a", "b"})]


def test_an_opening_that_cannot_be_read_is_declined_for_good(table: Table) -> None:
    round, other = table.round(1), table.round(2)
    table.relay.send("open-round", ME, b"{}", task=round.task_digest, round=round.digest)
    whole = OpenRound(round, 1, {"a": table.agents["a"].public.verify_key}, EXPIRES).encode()
    table.relay.send("open-round", ME, whole, task=other.task_digest, round=other.digest)
    table.through()
    told = table.relay.received("refused")
    assert [one.header.round_digest for one in told] == [round.digest, other.digest]
    found = [RefusalBody.decode(one.body) for one in told]
    assert [(one.reason, one.is_final) for one in found] == [("protocol-violation", True), ("wrong-digest", True)]


def test_an_impostor_with_the_highest_number_does_not_silence_an_agent(table: Table) -> None:
    round = table.round(1)
    impostor = PartyKeys.generate()
    table.open(round, participants={"b": impostor.public.verify_key})
    table.share("b", round, keys=impostor, sequence=2**62)
    table.through()
    assert set(table.relay_holdings(round)) == {"b"}
    second = table.opened(table.round(2))
    table.through()
    assert set(table.relay_holdings(second)) == set(AGENTS)


@pytest.mark.parametrize(
    "bad",
    [
        {"keys": PartyKeys.generate()},
        {"task_digest": "c" * 64},
        {"seal_to": PartyKeys.generate().public.seal_key},
        {"body": b"no share"},
        {"sender": "stranger"},
        {"sender": "b"},
        {"is_marked": True},
    ],
    ids=["forged", "other task", "sealed to another", "malformed", "no participant", "another's name", "known seed"],
)
def test_a_bad_share_is_skipped_and_the_next_is_taken(table: Table, bad: dict[str, Any]) -> None:
    round = table.round()
    table.open(round)
    table.share("a", round, **bad)
    table.share("c", round)
    table.through()
    assert set(table.relay_holdings(round)) == {"c"}


def test_who_sends_two_different_shares_is_shut_out_also_after_a_restart(table: Table) -> None:
    round = table.opened(table.round(), "ab")
    other = split(np.zeros((2, 3), dtype=np.int64), num_talliers=3, source=os_source())[1]
    table.share("a", round, body=share_to_bytes(other))
    table.through()
    table.share("a", round)
    table.through()
    assert set(table.relay_holdings(round)) == {"b"}


def test_a_share_of_a_round_that_is_not_open_is_not_taken_and_may_come_again(table: Table) -> None:
    round = table.round()
    message = table.share("a", round)
    table.through()
    table.open(round)
    table.relay.put(ME, message)
    table.through()
    assert set(table.relay_holdings(round)) == {"a"}


def test_only_the_coordinator_opens_and_sums(table: Table) -> None:
    round = table.opened(table.round(), "ab")
    body = SumRequest(("a", "b"), ledger_seq=5, ledger_hash="e" * 64).encode()
    for sender, keys in (("a", table.agents["a"]), ("coordinator", table.agents["a"])):
        table.relay.send_as(keys, "sum", ME, body, round=round, sender=sender, sequence=10**6)
    table.through()
    assert table.relay.received("aggregate-share") == []


@pytest.mark.parametrize("is_revoked", [False, True])
def test_shares_of_an_expired_round_are_deleted_whether_or_not_the_coordinator_can_be_reached(
    table: Table, is_revoked: bool, impatient: None
) -> None:
    round = table.opened(table.round(), "a")
    table.through()
    key = f"{round.digest}.shares"
    with table.run():
        table.relay.turn_away(is_revoked=is_revoked)
        assert key in keys_in(table.home / "erasable")
        table.now += timedelta(hours=2)
        wait_until(lambda: key not in keys_in(table.home / "erasable"))


def test_an_older_copy_of_its_journal_is_refused(table: Table) -> None:
    """It would have forgotten which rounds were summed."""
    round = table.opened(table.round(), "ab")
    table.through()
    older = (table.home / "journal.db").read_bytes()
    table.through(lambda: table.sum(round, ("a", "b")))
    for name in ("journal.db-wal", "journal.db-shm"):
        (table.home / name).unlink(missing_ok=True)
    (table.home / "journal.db").write_bytes(older)
    with pytest.raises(JournalBehind):
        run_tallier(table.home, stop=threading.Event())


# The talliers' noise (labeler.noise).


def noisy(number: int = 0) -> Round:
    return Round("a" * 64, f"{number:064x}", num_queries=2, num_classes=3, quorum=2, tallier_sigma_grid=1600.0)


def with_noise(table: Table, round: Round, agents: str, key: bytes) -> np.ndarray:
    source = noise_source(key, round.digest, agents, is_seeded=False)
    drawn = DiscreteGaussian(1600.0).sample(source, (2, 3))
    return expected_words(table, round, agents) + drawn.view(np.uint64)


def test_its_noise_is_drawn_once_for_one_set_of_agents_and_sent_again_bit_for_bit(table: Table) -> None:
    round = table.opened(noisy())
    table.through()
    key = keys_in(table.home / "erasable")[round.digest + ".shares"]
    table.through(lambda: table.sum(round, ("a", "b")))
    assert round.digest + ".shares" not in keys_in(table.home / "erasable")
    # Another set, more agents, and the same again, in one process and after restarts.
    for asked in (("a", "c"), ("a", "b", "c"), ("a", "b")):
        table.through(lambda asked=asked: table.sum(round, asked))
    sent = [table.relay.keys.open(message) for message in table.relay.received("aggregate-share")]
    assert len(sent) == 2
    assert sent[0] == sent[1]
    (first, _) = table.sums(2)
    assert first.contributors == {"a", "b"}
    assert np.array_equal(first.words, with_noise(table, round, "ab", key))
    assert not np.array_equal(first.words, expected_words(table, round, "ab"))


def test_a_tallier_that_came_back_from_a_backup_serves_nothing_until_a_person_gives_its_rounds_up(
    table: Table, tmp_path: Path
) -> None:
    round, later = table.opened(table.round(1), "ab"), table.round(2)
    table.through()
    backup_home(table.home, tmp_path / "backup")
    table.home.rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "backup", table.home)
    with pytest.raises(JournalBehind, match="restored from a backup, which holds none"):
        run_tallier(table.home, stop=threading.Event())
    accept_restored_journal(table.home, reason="disk lost")
    table.opened(later, "ab")
    table.through(lambda: table.sum(round, ("a", "b")))
    table.through(lambda: table.sum(later, ("a", "b")))
    (summed,) = table.sums(1)
    assert summed.round == later
    assert len(table.relay.received("aggregate-share")) == 1
