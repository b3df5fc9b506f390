"""The agent process. It asks its coordinator for work, refuses what its site does not allow, and answers the rest.

A state machine (labeler.rounds.agent) decides what the agent does about a round, and in which order.
`workers.agent.driver` carries this out for all the mail of a poll at once. This module gives both what they need:
journal, keys, shard, policy and the link to the coordinator.

The agent answers a round once, even if it is killed at any point. An answer is in the journal before its first byte
leaves. It is encrypted under a key of the round that no backup holds (labeler.ledger.agent_memory). The journal also
records what was charged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from feature_store.shard import MANIFEST_NAME, MARK_NAME, Shard, check_served, claim, deletions
from labeler.errors import BudgetExceeded, LabelerError, PolicyRefusal, Unavailable
from labeler.ledger.agent_memory import AgentMemory, JournalRounds
from labeler.ledger.backup import mark_home
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.promises import PromiseStore
from labeler.ledger.rounds import agent_account
from labeler.system.clock import Clock, now_utc
from labeler.system.keys import PartyKeys
from workers.agent.agent import Agent
from workers.agent.decisions import Admission
from workers.agent.driver import AgentDriver
from workers.agent.images import embed_before_answering, first_poll_s
from workers.agent.ledger import DurableLedger
from workers.agent.personal import keep_shared_model
from workers.agent.policy import Policy, read_policy
from workers.agent.public_clock import TICK_S, DrawnProbe, PublicClock
from workers.party.coordinator import CoordinatorDoor
from workers.party.home import KEYS_FILE, POLICY_FILE, AgentConfig, path_in_home, read_agent_config, witness_of
from workers.party.link import PartyLink, cause, converse, open_journal, said

LOOK_EVERY_S: Final = 1.0
"""Seconds between two checks that the shard is unchanged."""

log = logging.getLogger("labeler.agent")

AFFECTED: Final = (
    "rounds that are asked from now on are answered without them, and they cast no more votes for life; what was "
    "answered before stays released and charged"
)


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
        stop: when set, the agent ends within a moment; nothing is lost.
        wait_s: how long the coordinator may hold a poll.
        ticks: a clock in seconds that never goes back; answers leave by it (workers.agent.public_clock).

    Raises:
        LabelerError: the home, the shard, the policy or the journal cannot be used.
    """
    began = ticks()
    if read_agent_config(home).pad:
        log.warning(
            "pad = true does nothing now: it did not hide how many records there are where they take longer than drawn "
            "rows. Remove it from agent.toml; a larger max_records or a machine of its own makes late work rarer"
        )
    read_policy(home / POLICY_FILE)  # what is wrong with it is said before hours of embedding
    has_images = embed_before_answering(home, stop=stop)
    if has_images and stop.is_set():
        return
    with open_agent(home, stop=stop, clock=clock or now_utc, wait_s=wait_s, ticks=ticks) as (link, driver, records):
        if has_images:
            elapsed_s = ticks() - began
            stop.wait(first_poll_s(elapsed_s) - elapsed_s)
        log.info("agent ready", extra={"agent": link.party_id})
        with records.watched():
            converse(link, driver, stop, held_s=driver.held_s)
            link.mail.settle()
    log.info("agent stopped", extra={"agent": link.party_id})


@contextmanager
def open_agent(
    home: Path,
    *,
    stop: threading.Event,
    clock: Clock,
    wait_s: float,
    ticks: Callable[[], float],
    read: Callable[[], Policy] | None = None,
    door: CoordinatorDoor | None = None,
    public_clock: PublicClock | None = None,
    journal: str | None = None,
    allow_unsynced: bool = False,
) -> Iterator[tuple[PartyLink, AgentDriver, _Records]]:
    """Make an agent from its home: its link, its driver, and its records.

    The optional parts are for simulations.

    Args:
        stop, wait_s, ticks: see `run_agent`.
        read: returns the site's policy; reads the file in the home by default.
        door: see PartyLink.
        public_clock: by default the clock of the settings, with a probe of drawn rows.
        journal: the id of the journal that the shard answers for; this home's by default.
        allow_unsynced: see `open_database`.
    """
    config = read_agent_config(home)
    read = read or partial(read_policy, home / POLICY_FILE)
    policy = read()
    opened = open_journal(home, clock=clock, elsewhere=witness_of(home, config), allow_unsynced=allow_unsynced)
    with opened as (database, ledger, keys):
        spends = LifetimeSpends(database)
        spends.verify()
        memory, promises = AgentMemory(database, ledger), PromiseStore(database, ledger)
        rounds = JournalRounds(database, keys)
        site = DurableLedger(
            database,
            memory,
            ledger,
            promises,
            account=agent_account(config.agent_id),
            read_policy=read,
            clock=clock,
        )
        try:
            site.open_accounts()
        except (BudgetExceeded, PolicyRefusal) as error:
            log.warning("the policy promises less than what was spent; nothing new is answered", extra=said(error))
        mark_home(database, keys)
        rounds.sweep()
        records = _Records(home, config, spends, journal=journal or ledger.journal_id())
        link = PartyLink(
            url=config.coordinator_url,
            party_id=config.agent_id,
            keys=PartyKeys.load(home / KEYS_FILE),
            coordinator_key=policy.coordinator.verify_key,
            home=home,
            ledger=ledger,
            facts=records.facts,
            stop=stop,
            ca_file=path_in_home(home, config.ca_file),
            wait_s=wait_s,
            door=door,
            clock=clock,
            ticks=ticks,
        )
        with closing(link):
            probe = DrawnProbe(
                records.shard,
                engine=config.engine,
                memory_limit_bytes=config.memory_limit_bytes,
                now=lambda: clock().timestamp(),
            )
            admission = Admission(home, memory, read_policy=read, coordinator_key=link.coordinator_key, clock=clock)
            driver = AgentDriver(
                link.mail,
                coordinator_key=link.coordinator_key,
                records=records,
                database=database,
                rounds=rounds,
                promises=promises,
                ledger=site,
                admission=admission,
                clock=clock,
                keep=partial(keep_shared_model, home),
                public_clock=public_clock
                or PublicClock(
                    tick_s=TICK_S if config.tick_s is None else config.tick_s,
                    estimate_s=probe.seconds,
                    started=lambda: link.polled_at,
                    ticks=ticks,
                ),
            )
            yield link, driver, records


class _Records:
    """The agent and its shard. If another process deletes a record, the record soon stops voting.

    The index is built when the agent starts. The clock decides when the shard is checked, never a request. After a
    change, a new index and new models are built while the old ones still answer. Otherwise the first answer after a
    deletion would be late, and reveal the deletion.
    """

    def __init__(self, home: Path, config: AgentConfig, spends: LifetimeSpends, *, journal: str) -> None:
        self._path = home / config.shard  # joining leaves an absolute path unchanged
        self._config = config
        self._spends = spends
        self._journal = journal
        manifest = self._stamp_of(MANIFEST_NAME)
        self._agent = self._open(verify=True)
        self._stamp = (manifest, self._stamp_of(MARK_NAME))  # opening may have made the mark just now
        self._problem: LabelerError | None = None
        self._deletions = len(deletions(self._path))

    def facts(self) -> Mapping[str, Any]:
        """Return the facts about the records that the coordinator may know, never their number."""
        shard = self._shard
        return {
            "backbone_fingerprint": shard.fingerprint,
            "classes": list(shard.classes),
            "dimension": shard.dimension,
            **({} if shard.probe is None else {"probe": shard.probe}),
        }

    def shard(self) -> Shard:
        """Return the shard as it was last opened."""
        return self._shard

    def agent(self) -> Agent:
        """See driver.Records.

        Raises:
            LabelerError: the shard was changed, and cannot be opened now.
        """
        if self._problem is not None:
            raise self._problem
        return self._agent

    def forget_models(self) -> None:
        """Forget the models that were trained so far."""
        self._agent.forget_models()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check the shard every LOOK_EVERY_S in a separate thread, until the block ends."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_EVERY_S):
                self.look()

        thread = threading.Thread(target=watch, name="shard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look(self) -> None:
        """Switch to the shard as it is now, if it has changed."""
        stamp = (self._stamp_of(MANIFEST_NAME), self._stamp_of(MARK_NAME))
        if stamp == self._stamp:
            return
        before = self._agent
        try:
            agent = self._open(verify=False)
            agent.take_over(before)
            with before.answering:
                agent.take_over(before)  # take what was built during the first call
                self._agent, self._problem, self._stamp = agent, None, stamp
            known, self._deletions = self._deletions, len(deletions(self._path))
            for at in deletions(self._path)[known:]:
                log.info("records were deleted", extra={"deleted_at": at, "affects": AFFECTED})
        except Exception as error:
            # The next look tries again: a passing problem must not silence an agent until its restart.
            if self._problem is None:
                log.error("the changed shard cannot be used; trying again", extra=cause(error))
            unusable = Unavailable("the agent's shard cannot be used now")
            self._problem = error if isinstance(error, LabelerError) else unusable

    def _open(self, *, verify: bool) -> Agent:
        shard = Shard.open(self._path, verify=verify)
        check_served(shard)
        claim(self._path, agent_id=self._config.agent_id, journal=self._journal)
        self._shard = shard
        agent = Agent(
            self._config.agent_id,
            shard,
            engine=self._config.engine,
            memory_limit_bytes=self._config.memory_limit_bytes,
            spends=self._spends,
        )
        agent.build_index()
        return agent

    def _stamp_of(self, name: str) -> tuple[int, int, int]:
        try:
            status = (self._path / name).stat()
        except OSError:
            return (0, 0, 0)
        return (status.st_ino, status.st_size, status.st_mtime_ns)
