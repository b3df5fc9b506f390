"""The agent's process: what it answers, what it refuses in which words, and that killing it changes nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting, JournalBehind, PolicyRefusal, Unavailable
from labeler.ledger.agent_memory import AgentMemory
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.messages import Message
from labeler.messages.bodies import Ask, Refusal, Settled, TallierKey, share_from_bytes
from labeler.planning import price
from labeler.rounds.agent import NOT_KEPT
from labeler.sharing import ShareVector, unshard
from labeler.system.erasable import ERASABLE_FOLDER, keys_in
from labeler.system.keys import PartyKeys, verify
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.workers.builders import killed_at, policy_of
from workers.agent.agent import Agent
from workers.agent.decisions import approve, revoke_approval
from workers.agent.driver import AgentDriver
from workers.agent.policy import Policy, policy_toml
from workers.agent.service import run_agent
from workers.embedder.shards import delete_records
from workers.homes.journals import accept_restored_journal, backup_home
from workers.party.home import KEYS_FILE, AgentConfig, create_agent_home
from workers.party.link import converse

AGENT = "hospital-1"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


PROCESS = (
    "from workers.agent.service import run_agent; run_agent(Path(sys.argv[1]), stop=threading.Event(), wait_s=0.5)"
)


@dataclass
class Site:
    """One agent's home, its talliers' keys, and the relay it talks to."""

    home: Path
    shard: Shard
    relay: Any
    batch: QueryBatch
    start: Callable[..., Any]
    now: datetime = NOW
    talliers: dict[str, PartyKeys] = field(
        default_factory=lambda: {f"tallier-{number}": PartyKeys.generate() for number in range(3)}
    )

    def make(self, policy: Policy | None = None, **settings: Any) -> None:
        """Make its home, or give it other settings, and let the relay know it."""
        fields = {"coordinator_url": self.relay.url, "shard": str(self.shard.path), "engine": "numpy"} | settings
        config = AgentConfig(agent_id=AGENT, **fields)
        self.relay.enrolled[AGENT] = create_agent_home(self.home, config, policy or self.policy())

    def start_once(self) -> None:
        """Start its process and stop it at once: what keeps it from starting is raised."""
        stopped = threading.Event()
        stopped.set()
        run_agent(self.home, stop=stopped, clock=lambda: self.now)

    def policy(self, **changes: Any) -> Policy:
        return policy_of(
            budget={"instance_epsilon": 5.0},
            talliers={name: keys.public.seal_key for name, keys in self.talliers.items()},
            verify_key=self.relay.keys.public.verify_key,
            **({"backbones": [self.shard.fingerprint], "releases": ["histogram", "winner"]} | changes),
        )

    def write_policy(self, **changes: Any) -> None:
        (self.home / "policy.toml").write_text(policy_toml(self.policy(**changes)))

    def ask(self, *, expires_at: float = 2e9, talliers: dict[str, str] | None = None, **changes: Any) -> Ask:
        facts = {"classes": self.shard.classes, "backbone_fingerprint": self.shard.fingerprint}
        fields = {"k": 5, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": len(self.batch)}
        task = make_task(**(facts | fields | changes))
        keys = {name: keys.public for name, keys in self.talliers.items()}
        seal_keys = {name: key.seal_key for name, key in keys.items()} | (talliers or {})
        named = tuple(TallierKey(name, seal_keys[name], keys[name].verify_key) for name in keys)
        return Ask(task, self.batch, named, expires_at)

    def send(self, ask: Ask) -> Message:
        return self.relay.send("ask", AGENT, ask.encode(), task=ask.task.digest, round=ask.round.digest)

    def run(self) -> Any:
        return self.start(lambda stop: run_agent(self.home, stop=stop, clock=lambda: self.now, wait_s=0.5))

    def killed_at(self, point: str) -> None:
        """Run the agent in a separate process, which ends itself by SIGKILL where it comes to that step."""
        killed_at(point, self.home.parent / "fault", PROCESS, self.home)

    def shares(self, ask: Ask, count: int) -> list[tuple[ShareVector, ...]]:
        """Return the shares that the talliers can open of answers to one ask, one tuple per answer."""
        end = time.monotonic() + 60
        sent: dict[str, list[ShareVector]] = {name: [] for name in self.talliers}
        while min(len(found) for found in sent.values()) < count:
            assert time.monotonic() < end, "waited 60 s for shares"
            time.sleep(0.02)
            for name, keys in self.talliers.items():
                sent[name] = []
                for message in self.relay.mail_of(name):
                    if message.header.round_digest == ask.round.digest:
                        verify(message, self.relay.enrolled[AGENT].verify_key)
                        sent[name].append(share_from_bytes(keys.open(message), max_entries=10_000))
        return list(zip(*sent.values(), strict=False))[:count]

    def refusals(self, count: int) -> list[Refusal]:
        return [Refusal.decode(message.body) for message in self.relay.wait_for("refused", count)]

    def is_stored(self, ask: Ask) -> bool:
        """Return True if an answer lies in the journal."""
        with open_database(self.home / "journal.db", read_only=True) as database, database.read() as connection:
            states = text("SELECT state FROM agent_rounds WHERE round_digest = :digest")
            return connection.execute(states, {"digest": ask.round.digest}).scalar() == "stored"

    def spent(self) -> int:
        with open_database(self.home / "journal.db", read_only=True) as database:
            return sum(balance.spent for balance in Ledger(database, clock=lambda: NOW).balances() if balance.cap)


@pytest.fixture
def site(tmp_path: Path, make_shard: Any, relay: Any, start: Any) -> Site:
    batch = QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])
    site = Site(tmp_path / "agent", make_shard("own"), relay, batch, start)
    site.make()
    return site


def same(first: tuple[ShareVector, ...], second: tuple[ShareVector, ...]) -> bool:
    return [share.fingerprint() for share in first] == [share.fingerprint() for share in second]


def test_each_tallier_can_open_its_share_and_together_they_are_votes_and_noise(site: Site) -> None:
    ask = site.ask()
    site.send(ask)
    running = site.run()
    (shares,) = site.shares(ask, 1)
    (answered,) = site.relay.wait_for("answered")
    running.end()
    noisy = unshard([share.expand() for share in shares])
    assert noisy.shape == (9, 3)
    assert 0.4 < noisy.std() / ask.task.share_sigma_grid < 1.8
    assert not any(share.is_seeded for share in shares)
    assert (answered.header.task_digest, answered.header.round_digest) == (ask.task.digest, ask.round.digest)
    assert site.spent() == price(ask.task).instance.charge_nano


def test_asks_that_pile_up_for_one_round_are_answered_once(site: Site) -> None:
    ask = site.ask()
    for _ in range(5):
        site.send(ask)
    other = site.ask(nonce="other")
    site.send(other)
    running = site.run()
    site.shares(other, 1)
    running.end()
    assert len(site.shares(ask, 1)) == len(site.relay.mail_of("tallier-0")) - 1 == 1


@pytest.mark.parametrize(
    ("policy", "changes", "said"),
    [
        ({"methods": ["reverse-knn"]}, {}, "allow.methods"),
        ({"max_queries_per_day": 8}, {}, "allow.max_queries_per_day"),
        ({}, {"talliers": {"tallier-1": PartyKeys.generate().public.seal_key}}, "talliers.tallier-1"),
        ({}, {"sigma_votes": 0.5}, "account 'agent:hospital-1', instance level"),
        ({}, {"classes": ("ant", "bee", "cow")}, "the task's classes"),
        ({}, {"expires_at": 1e9}, "expired"),
    ],
)
def test_what_it_may_not_do_is_refused_with_the_reason_and_costs_nothing(
    site: Site, policy: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    site.write_policy(**policy)
    site.send(site.ask(**changes))
    running = site.run()
    (refusal,) = site.refusals(1)
    running.end()
    assert said in refusal.sentence
    assert refusal.is_final
    assert site.spent() == 0
    assert site.relay.mail_of("tallier-0") == []


def test_a_task_waits_for_approval_and_is_answered_after_it(site: Site) -> None:
    site.write_policy(approval=True)
    ask = site.ask()
    site.send(ask)
    running = site.run()
    (refusal,) = site.refusals(1)
    assert (refusal.reason, refusal.is_final) == ("awaiting-approval", False)
    assert ask.task.digest in refusal.sentence
    with open_database(site.home / "journal.db", read_only=True) as database:
        memory = AgentMemory(database, Ledger(database, clock=lambda: NOW))
        assert [(digest, task.digest) for digest, task, _ in memory.waiting()] == [(ask.task.digest, ask.task.digest)]
    approve(site.home, ask.task.digest)
    site.send(ask)
    site.shares(ask, 1)
    # Taken back after the charge, it is about what comes: the stored bytes are sent again.
    revoke_approval(site.home, ask.task.digest)
    site.send(ask)
    first, second = site.shares(ask, 2)
    assert same(first, second)
    site.send(site.ask(nonce="another task"))
    assert not site.refusals(2)[1].is_final
    running.end()


def test_a_coordinator_and_one_tallier_cannot_collect_the_shares_of_one_answer(site: Site) -> None:
    """Every order of the talliers would hand each of them another share of the same split."""
    ask = site.ask()
    site.send(ask)
    running = site.run()
    site.shares(ask, 1)
    for turn in (1, 2):
        site.send(replace(ask, talliers=ask.talliers[turn:] + ask.talliers[:turn]))
        assert "in another order" in site.refusals(turn)[-1].sentence
    site.send(ask)
    site.relay.wait_for("answered", 2)
    running.end()
    spy = site.talliers["tallier-0"]
    held = [share_from_bytes(spy.open(message), max_entries=10_000) for message in site.relay.mail_of("tallier-0")]
    assert len({share.fingerprint() for share in held}) == 1
    assert len(held) == 2


def test_no_two_sets_of_talliers_get_shares_of_one_round(site: Site) -> None:
    first = dict(site.talliers)
    more = first | {f"tallier-{number}": PartyKeys.generate() for number in range(3, 6)}
    ask = site.ask()
    site.send(ask)
    running = site.run()
    site.shares(ask, 1)
    site.talliers = more
    site.write_policy()
    everybody = [TallierKey(name, keys.public.seal_key, keys.public.verify_key) for name, keys in more.items()]
    for number, named in enumerate((everybody[:3], everybody[3:]), start=1):
        site.send(replace(ask, talliers=tuple(named)))
        assert "talliers: the site's policy allows shares among all of" in site.refusals(number)[-1].sentence
    # Also after the site itself has changed whom it trusts.
    site.talliers = {name: more[name] for name in list(more)[3:]}
    site.write_policy()
    site.send(replace(ask, talliers=tuple(everybody[3:])))
    assert "answered for other talliers" in site.refusals(3)[-1].sentence
    running.end()
    assert site.relay.mail_of("tallier-3") == []


def test_a_task_that_does_not_fit_the_records_never_waits_for_a_person(site: Site) -> None:
    site.write_policy(approval=True)
    site.send(site.ask(classes=[f"{number:05d}" for number in range(30_000)]))
    site.send(site.ask(backbone_fingerprint="0" * 64))
    running = site.run()
    assert [refusal.reason for refusal in site.refusals(2)] == ["mixed-shards", "mixed-shards"]
    running.end()
    with open_database(site.home / "journal.db", read_only=True) as database:
        assert AgentMemory(database, Ledger(database, clock=lambda: NOW)).waiting() == []


def test_of_a_budget_the_coordinator_hears_only_that_it_does_not_cover_the_round(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.send(site.ask(sigma_votes=0.5))
    running = site.run()
    (refusal,) = site.refusals(1)
    running.end()
    assert refusal.sentence == (
        "account 'agent:hospital-1', instance level: the site's budget does not cover this round; how much is left the "
        "site alone sees (labeler agent budget)"
    )
    assert refusal.reason == "budget-exceeded"
    (logged,) = [record.sentence for record in caplog.records if record.message == "refused"]
    assert re.search(r"\d{6}", logged)


def test_an_agent_without_its_journal_does_not_start_with_a_full_budget(site: Site) -> None:
    ask = site.ask()
    site.send(ask)
    running = site.run()
    site.relay.wait_for("answered")
    running.end()
    for path in site.home.glob("journal*"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(JournalBehind, match=r"journal\.db was lost, and with it what this party has spent"):
            run_agent(site.home, stop=threading.Event())


def test_a_policy_that_cannot_be_read_refuses_everything_until_it_can(site: Site) -> None:
    running = site.run()
    site.relay.wait_for_poll()
    (site.home / "policy.toml").write_text("[budget")
    ask = site.ask()
    site.send(ask)
    (refusal,) = site.refusals(1)
    assert "allows nothing as it is" in refusal.sentence
    site.write_policy()
    site.send(ask)
    site.shares(ask, 1)
    running.end()


def test_it_does_not_start_without_a_policy(site: Site) -> None:
    (site.home / "policy.toml").unlink()
    with pytest.raises(PolicyRefusal, match="cannot be read"):
        run_agent(site.home, stop=threading.Event())


def test_poisoned_messages_are_refused_or_skipped_and_the_next_is_answered(site: Site) -> None:
    ask = site.ask()
    stranger = PartyKeys.generate()
    site.relay.put(
        AGENT, stranger.message("ask", sender="coordinator", recipient=AGENT, sequence=10**6, body=ask.encode())
    )
    site.relay.send("ask", AGENT, b"\x00 no ask", task=ask.task.digest, round=ask.round.digest)
    site.relay.send("ask", AGENT, ask.encode(), task="b" * 64, round="b" * 64)
    site.relay.send("sum", AGENT, b"{}", task=ask.task.digest, round=ask.round.digest)
    site.relay.send("ask", AGENT, b"no digest")
    good = site.ask(nonce="good")
    site.send(good)
    running = site.run()
    site.shares(good, 1)
    running.end()
    reasons = {refusal.reason for refusal in site.refusals(2)}
    assert reasons == {"protocol-violation", "wrong-digest"}
    assert site.spent() == price(good.task).instance.charge_nano


def test_a_replayed_ask_is_dropped(site: Site) -> None:
    ask = site.ask()
    message = site.send(ask)
    running = site.start(lambda stop: run_agent(site.home, stop=stop, clock=lambda: site.now, wait_s=0.2))
    site.shares(ask, 1)
    polls, end = len(site.relay.polls), time.monotonic() + 60
    while len(site.relay.polls) == polls:  # until then a stop may repeat the message, whose stored answer is sent again
        assert time.monotonic() < end
        time.sleep(0.01)
    running.end()
    site.relay.put(AGENT, message)
    other = site.ask(nonce="other")
    site.send(other)
    running = site.run()
    site.shares(other, 1)
    running.end()
    assert len([m for m in site.relay.mail_of("tallier-0") if m.header.round_digest == ask.round.digest]) == 1


def test_a_memory_limit_without_room_for_a_record_is_found_at_the_start_and_not_when_asked(site: Site) -> None:
    text = (site.home / "agent.toml").read_text()
    (site.home / "agent.toml").write_text(text + "memory_limit_bytes = 1\n")
    with pytest.raises(InvalidSetting, match="too small for records of dimension"):
        run_agent(site.home, stop=threading.Event())


def test_trouble_after_the_charge_is_tried_again_and_never_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal then would say something of the records; so would its words."""
    monkeypatch.setattr("labeler.rounds.agent.FIRST_PAUSE_S", 0.01)
    real, failures = Agent.ballots, [MemoryError(), BadData("27291 records"), OSError("disk full")]

    def ballots(agent: Agent, *asked: Any) -> Any:
        if failures and agent.agent_id == AGENT:
            raise failures.pop()
        return real(agent, *asked)

    monkeypatch.setattr(Agent, "ballots", ballots)
    ask = site.ask()
    site.send(ask)
    running = site.run()
    site.shares(ask, 1)
    site.relay.wait_for("answered")
    running.end()
    assert failures == []
    assert site.relay.received("refused") == []
    assert site.spent() == price(ask.task).instance.charge_nano
    assert "disk full" not in caplog.text


def test_an_answer_that_cannot_be_made_is_tried_until_the_round_is_over_while_others_go_on_and_then_silence(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("labeler.rounds.agent.FIRST_PAUSE_S", 0.01)
    now, tries = [NOW], []

    def ballots(agent: Agent, task: Task, *_: Any) -> Any:
        if agent.agent_id != AGENT:
            return real(agent, task, *_)  # over drawn rows
        tries.append(task.digest)
        if tries.count(hopeless.task.digest) == 3:
            now[0] += timedelta(seconds=90)
        if task.nonce == "hopeless":
            raise BadData("the records are no good")
        return real(agent, task, *_)

    real = Agent.ballots
    monkeypatch.setattr(Agent, "ballots", ballots)
    hopeless = site.ask(nonce="hopeless", expires_at=NOW.timestamp() + 60)
    good = site.ask(nonce="good")
    site.send(hopeless)
    site.send(good)
    running = site.start(lambda stop: run_agent(site.home, stop=stop, clock=lambda: now[0], wait_s=0.5))
    site.shares(good, 1)
    site.relay.wait_for("answered")
    end = time.monotonic() + 60
    while "the round is over, and was not answered" not in caplog.text:
        assert time.monotonic() < end, "waited 60 s for the end of the round"
        time.sleep(0.02)
    running.end()
    # The coordinator cannot tell that an attempt failed, nor when the next is made.
    assert {poll.wait_s for poll in site.relay.polls[1:]} == {0.5}
    # The other round was answered before the hopeless one was tried again.
    assert tries == [hopeless.task.digest, good.task.digest, *[hopeless.task.digest] * 2]
    assert site.relay.received("refused") == []
    assert {message.header.round_digest for message in site.relay.mail_of("tallier-0")} == {good.round.digest}


def test_what_could_not_be_erased_by_the_clock_is_erased_by_the_same_process_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full at the one moment: memory must not believe what the journal does not."""
    now, first, found = [NOW], threading.Event(), []
    ask = site.ask(expires_at=NOW.timestamp() + 60)
    site.send(ask)
    folder, key = site.home / ERASABLE_FOLDER, ask.round.digest

    def then_tidy(link: Any, driver: AgentDriver, stop: threading.Event, **_: Any) -> None:
        converse(link, driver, first)
        found.append(key in keys_in(folder))
        now[0] += timedelta(days=1)
        with monkeypatch.context() as full:

            def refuse(*_: Any, **__: Any) -> None:
                raise Unavailable("the disk is full")

            full.setattr("labeler.ledger.agent_memory.JournalRounds.erase_in", refuse)
            with pytest.raises(Unavailable):
                driver.tidy()
        found.append(key in keys_in(folder))
        driver.tidy()
        found.append(key in keys_in(folder))

    monkeypatch.setattr("workers.agent.service.converse", then_tidy)
    running = site.start(lambda stop: run_agent(site.home, stop=stop, clock=lambda: now[0], wait_s=0.2))
    site.shares(ask, 1)
    site.relay.wait_for("answered")
    first.set()
    end = time.monotonic() + 30
    while len(found) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    running.end()
    assert found == [True, True, False]


def settle(site: Site, ask: Ask) -> None:
    site.relay.send("answered", AGENT, Settled().encode(), task=ask.task.digest, round=ask.round.digest)


def keys_of(site: Site) -> list[str]:
    return sorted(keys_in(site.home / "erasable"))


@pytest.mark.parametrize("has_changed", [False, True])
@pytest.mark.parametrize("how", ["settled", "expired"])
def test_what_nobody_misses_any_more_is_erased_and_refused_for_ever_in_the_same_words(
    site: Site, how: str, has_changed: bool
) -> None:
    ask = site.ask(expires_at=NOW.timestamp() + 60)
    site.send(ask)
    running = site.run()
    site.relay.wait_for("answered")
    assert keys_of(site) == sorted([ask.round.digest, "home"])
    if has_changed:
        other = Shard.open(site.shard.path)
        other.delete(other.record_ids[:7])
    if how == "settled":
        settle(site, ask)
    else:
        site.now += timedelta(days=1)
        ask = replace(ask, expires_at=site.now.timestamp() + 60)
    for turn in (1, 2):
        site.send(ask)
        refusal = site.refusals(turn)[-1]
        assert (refusal.sentence, refusal.reason, refusal.is_final) == (NOT_KEPT, "privacy-refusal", True)
        running.end()
        running = site.run()
    assert keys_of(site) == ["home"]
    running.end()
    assert site.spent() == price(ask.task).instance.charge_nano


def test_an_agent_process_goes_on_while_records_are_erased_and_closes_their_files(site: Site) -> None:
    first, second = site.ask(), site.ask(sigma_votes=41.0)
    site.send(first)
    code = f"import sys, threading; from pathlib import Path; {PROCESS}"
    with subprocess.Popen([sys.executable, "-c", code, str(site.home)], cwd=Path(__file__).parents[2]) as agent:
        try:
            site.shares(first, 1)
            images = site.shard.sources[:7]
            delete_records(site.shard.path, images=images)
            until, maps = time.monotonic() + 60, Path(f"/proc/{agent.pid}/maps")
            while "features.npy" in (mapped := maps.read_text()) or "features.1.npy" not in mapped:
                assert time.monotonic() < until, "it never closed the files of those who left"
                time.sleep(0.1)
            site.send(second)
            site.shares(second, 1)
            assert agent.poll() is None
        finally:
            agent.kill()
    charges = [price(ask.task).instance.charge_nano for ask in (first, second)]
    assert site.spent() == sum(charges), "a deletion gives no budget back"


def test_a_deadline_far_away_keeps_nothing_for_longer_than_a_month(site: Site) -> None:
    ask = site.ask(expires_at=1e11 - 1)
    site.send(ask)
    running = site.run()
    site.relay.wait_for("answered")
    site.now += timedelta(days=32)
    site.send(ask)
    assert site.refusals(1)[0].sentence == NOT_KEPT
    running.end()
    assert keys_of(site) == ["home"]


def turn_away(relay: Any, how: str) -> None:
    """From now on the coordinator is not there, or does not know this party."""
    status, problem = {"away": (503, b""), "revoked": (403, b'{"type": "urn:labeler:problem:not-enrolled"}')}[how]
    relay.failures.extend((status, {}, problem) for _ in range(10_000))


def erased(site: Site) -> bool:
    end = time.monotonic() + 60
    while keys_of(site) != ["home"] and time.monotonic() < end:
        time.sleep(0.02)
    return keys_of(site) == ["home"]


@pytest.mark.parametrize("how", ["away", "revoked"])
def test_a_settlement_that_never_comes_costs_an_hour_whether_or_not_the_coordinator_can_be_reached(
    site: Site, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.party.link._LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr("workers.party.link._pause", lambda *_, **__: time.sleep(0.05))
    ask = site.ask(expires_at=NOW.timestamp() + 60)
    site.send(ask)
    running = site.start(lambda stop: run_agent(site.home, stop=stop, clock=lambda: site.now, wait_s=0.1))
    site.relay.wait_for("answered")
    turn_away(site.relay, how)
    site.now = NOW + timedelta(minutes=61)
    polls = len(site.relay.failures)
    while polls - len(site.relay.failures) < 4:
        time.sleep(0.02)
    assert keys_of(site) == sorted([ask.round.digest, "home"]), "until an hour after its deadline it may be asked again"
    site.now = NOW + timedelta(minutes=61, seconds=1)
    assert erased(site)
    running.end()


def test_a_settlement_of_a_round_it_was_not_charged_for_or_that_is_none_changes_nothing(site: Site) -> None:
    ask = site.ask()
    settle(site, ask)
    site.relay.send("answered", AGENT, b"{}", task=ask.task.digest, round=ask.round.digest)
    stranger = PartyKeys.generate()
    site.send(ask)
    running = site.run()
    site.relay.wait_for("answered")
    body = Settled().encode()
    site.relay.put(
        AGENT,
        stranger.message(
            "answered", sender="coordinator", recipient=AGENT, sequence=10**6, body=body, round_digest=ask.round.digest
        ),
    )
    site.relay.send("answered", AGENT, b"{}", task=ask.task.digest, round=ask.round.digest)
    site.send(ask)
    first, again = site.shares(ask, 2)
    running.end()
    assert same(first, again)


def test_a_home_that_came_back_from_a_backup_serves_nothing_until_all_that_is_left_is_written_off(
    site: Site, tmp_path: Path
) -> None:
    ask = site.ask()
    site.send(ask)
    running = site.run()
    site.shares(ask, 1)
    running.end()
    backup_home(site.home, tmp_path / "backup")
    assert not (tmp_path / "backup" / "erasable").exists()
    site.home.rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "backup", site.home)
    for _ in range(2):
        with pytest.raises(JournalBehind, match="restored from a backup, which holds none"):
            run_agent(site.home, stop=threading.Event())
    accept_restored_journal(site.home, reason="disk lost")
    running = site.run()
    site.send(ask)
    assert site.refusals(1)[0].sentence == NOT_KEPT
    site.send(site.ask(nonce="new"))
    assert "budget does not cover" in site.refusals(2)[1].sentence
    running.end()


def test_facts_hold_the_classes_and_no_number_of_records(site: Site) -> None:
    running = site.run()
    site.relay.wait_for_poll(2)
    running.end()
    assert dict(site.relay.polls[1].facts) == {
        "backbone_fingerprint": site.shard.fingerprint,
        "classes": list(site.shard.classes),
        "dimension": site.shard.dimension,
    }


def test_nothing_secret_is_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    ask = site.ask()
    site.send(ask)
    running = site.run()
    site.relay.wait_for("answered")
    # The relay has it before the agent hears that it has, and says so.
    end = time.monotonic() + 60
    while not any(record.getMessage() == "answered" for record in caplog.records) and time.monotonic() < end:
        time.sleep(0.02)
    running.end()
    written = " ".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "answered" in written
    key = keys_in(site.home / "erasable")[ask.round.digest]
    assert key.hex() not in written
    assert repr(key)[2:-1] not in written
    assert (site.home / KEYS_FILE).read_text().split('"signing_key": "')[1][:64] not in written
