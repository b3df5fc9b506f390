"""The agent process: asks its coordinator for work, refuses what its site does not allow, answers the rest.

What it does about a round, and in which order, says its machine (labeler.rounds.agent); `workers.agent.desk` carries it
out for all the mail of a poll at once. Here the two are given a home: journal, keys, shard, policy and the link.

Killed anywhere, it answers once: what it has sent lies in its journal from before the first byte left, encrypted under
a key of the round that no backup holds (feature_store.journal.agent_rounds), and its journal knows what was charged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from feature_store.clock import Clock, now_utc
from feature_store.declared import check_served
from feature_store.erasable import ERASABLE_FOLDER, KeyFolder
from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.agent_models import forget_models
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.asked_by import AskedBy
from feature_store.journal.erasable_home import check_home, mark_home
from feature_store.journal.ledger import Ledger
from feature_store.journal.lifetimes import LifetimeSpends
from feature_store.journal.migrations.opening import open_upgraded
from feature_store.journal.promises import PromiseStore
from feature_store.keys import PartyKeys
from feature_store.shard import Shard
from labeler.errors import BudgetExceeded
from workers.agent.admission import Admission
from workers.agent.agent import Agent
from workers.agent.desk import AgentDesk
from workers.agent.durable_ledger import DurableLedger
from workers.agent.policy import PolicyFile
from workers.agent.public_clock import TICK_S, DrawnProbe, PublicClock
from workers.agent.words import cause, said
from workers.party.conversation import converse
from workers.party.home import (
    ANCHOR_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    POLICY_FILE,
    AgentConfig,
    check_journal_kept,
    path_in_home,
    read_agent_config,
    retire_noise_secret,
    witness_of,
)
from workers.party.link import PartyLink
from workers.voting.model_store import InMemoryModels

log = logging.getLogger("labeler.agent")


WATCH_S: Final = 0.5
"""How often an agent looks whether its shard has changed, beside its turns."""


def run_agent(
    home: Path,
    *,
    stop: threading.Event,
    clock: Clock | None = None,
    wait_s: float = 20.0,
    ticks: Callable[[], float] = time.monotonic,
) -> None:
    """Serve as an agent until told to stop.

    Args:
        stop: ends it within a moment; nothing is lost.
        wait_s: how long the coordinator may hold a poll.
        ticks: seconds that only go up, by which turns leave (workers.agent.public_clock).

    Raises:
        LabelerError: the home, the shard, the policy or the journal cannot be used.
    """
    clock = clock or now_utc
    config = read_agent_config(home)
    policy_file = PolicyFile(home / POLICY_FILE)
    policy = policy_file.read()
    with ExitStack() as owned:
        database = open_upgraded(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE)
        owned.callback(database.close)
        ledger = Ledger(database, clock=clock, elsewhere=witness_of(home, config))
        keys = KeyFolder(home / ERASABLE_FOLDER)
        has_entries = ledger.verify().seq > 0
        check_journal_kept(home, has_entries=has_entries)
        check_home(database, keys, has_entries=has_entries)
        memory, promises = AgentMemory(database, ledger), PromiseStore(database, ledger)
        rounds = JournalRounds(database, keys)
        site = DurableLedger(
            database,
            memory,
            ledger,
            promises,
            account=account_of(config.agent_id),
            read_policy=policy_file.read,
            clock=clock,
        )
        try:
            site.open_accounts()
        except BudgetExceeded as error:
            log.warning("a cap of the policy is below what is spent; nothing new is answered", extra=said(error))
        mark_home(database, keys)
        # What older versions kept for life: the rounds they answered are settled by it.
        forget_models(database)
        retire_noise_secret(home)
        rounds.sweep()
        records = _Records(home, config, LifetimeSpends(database))
        link = PartyLink(
            url=config.coordinator_url,
            party_id=config.agent_id,
            keys=PartyKeys.load(home / KEYS_FILE),
            coordinator_key=policy.coordinator.verify_key,
            home=home,
            database=database,
            journal_head=ledger.known_head,
            facts=records.facts,
            stop=stop,
            ca_file=path_in_home(home, config.ca_file),
            wait_s=wait_s,
            ticks=ticks,
        )
        owned.callback(link.close)
        owned.callback(records.watch().set)
        probe = DrawnProbe(records.shard, engine=config.engine, memory_limit_bytes=config.memory_limit_bytes)
        log.info("agent ready", extra={"agent": config.agent_id})
        admission = Admission(
            home,
            memory,
            asked_by=AskedBy(database),
            read_policy=policy_file.read,
            coordinator_key=link.coordinator_key,
            clock=clock,
        )
        desk = AgentDesk(
            link.mail,
            coordinator_key=link.coordinator_key,
            records=records,
            database=database,
            rounds=rounds,
            promises=promises,
            ledger=site,
            admission=admission,
            clock=clock,
            public_clock=PublicClock(
                tick_s=TICK_S if config.tick_s is None else config.tick_s,
                estimate_s=probe.seconds,
                started=lambda: link.polled_at,
                ticks=ticks,
            ),
        )
        converse(link, desk, stop, held_s=desk.held_s)
        link.mail.settle()
    log.info("agent stopped", extra={"agent": config.agent_id})


def account_of(agent_id: str) -> str:
    """The name of an agent's account, in its own journal and in the coordinator's."""
    return f"agent:{agent_id}"


class _Records:
    """The agent over its shard as it is now: a record deleted by another process no longer votes.

    A shard that has changed is opened beside the turns (`watch`), or by the first turn that computes from records,
    which is on the public clock. A turn that leaves at once opens nothing: how long it takes would tell of a deletion.
    """

    def __init__(self, home: Path, config: AgentConfig, spends: LifetimeSpends) -> None:
        self._path = home / config.shard  # an absolute path stays what it is
        self._config = config
        self._spends = spends
        # In memory only: of what is trained on private records, nothing without noise outlives its round.
        self._models = InMemoryModels()
        self._agent: Agent | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._opening = threading.Lock()
        self._is_watched = False
        self._trouble: Exception | None = None
        self.agent()

    def facts(self) -> Mapping[str, Any]:
        """What the coordinator may know of the records; never how many there are."""
        shard = self._shard
        return {
            "backbone_fingerprint": shard.fingerprint,
            "classes": list(shard.classes),
            "dimension": shard.dimension,
        }

    def agent(self) -> Agent:
        """Over the shard as it is now."""
        with self._opening:
            stamp = self._manifest_stamp()
            if self._agent is None or stamp != self._stamp:
                self._agent = self._open(self._agent, verify=self._agent is None)
                self._stamp, self._trouble = stamp, None
            return self._agent

    def known(self) -> Agent:
        """Over the shard as it was opened last; as it is now where nobody watches.

        Raises:
            Exception: it has changed since, and could not be opened.
        """
        if not self._is_watched or self._agent is None:
            return self.agent()
        if self._trouble is not None:
            raise self._trouble.with_traceback(None)
        return self._agent

    def shard(self) -> Shard:
        """As it was opened last."""
        return self._shard

    def watch(self) -> threading.Event:
        """Open the shard anew whenever it changes, in a thread of its own, until the event is set."""
        ended, self._is_watched = threading.Event(), True

        def look() -> None:
            while not ended.wait(WATCH_S):
                try:
                    self.agent()
                except Exception as error:
                    if self._trouble is None:
                        log.error("the shard has changed and cannot be opened", extra=cause(error))
                    self._trouble = error

        threading.Thread(target=look, name="shard", daemon=True).start()
        return ended

    def forget_models(self) -> None:
        """Forget what was trained so far."""
        self._models.clear()

    def _open(self, before: Agent | None, *, verify: bool) -> Agent:
        shard = Shard.open(self._path, verify=verify)
        check_served(shard)
        self._shard = shard
        if before is not None:
            before.release()  # a device might not hold the old records and the new ones
        return Agent(
            self._config.agent_id,
            shard,
            models=self._models,
            engine=self._config.engine,
            memory_limit_bytes=self._config.memory_limit_bytes,
            spends=self._spends,
        )

    def _manifest_stamp(self) -> tuple[int, int, int]:
        try:
            status = (self._path / "manifest.json").stat()
        except OSError:
            return (0, 0, 0)
        return (status.st_ino, status.st_size, status.st_mtime_ns)
