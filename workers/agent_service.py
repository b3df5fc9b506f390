"""The agent process: asks its coordinator for work, refuses what its site does not allow, answers the rest.

    proposal -> policy -> set aside (durable) -> willing
                   |          |
                   v          v
                declined, or not yet: a signed sentence that follows from public things alone

    ask -> policy -> charge (durable) -> vote, add noise, split -> seal each share to its tallier -> store -> post
             |          |                     |
             v          v                     v
          refused: a signed sentence that follows from public things alone, or one that says nothing

    ask again       -> policy -> what was stored -> post, whatever the records are by now
    nobody misses it any more, or its deadline passed -> key and answer erased; asked again: refused, for ever

After the charge there is no refusal: whether and what it answers would be a statement about its records. It tries until
it can, or until the round is over.

Killed anywhere, it answers once: what it has sent lies in its journal from before the first byte left, encrypted under
a key of the round that no backup holds (feature_store.journal.agent_rounds), and its journal knows what was charged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from feature_store.erasable import ERASABLE_FOLDER, KeyFolder
from feature_store.faults import fault_point
from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.agent_models import forget_models
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.erasable_home import check_home, mark_home
from feature_store.journal.ledger import Ledger
from feature_store.journal.migrations.opening import open_upgraded
from feature_store.journal.promises import PromiseStore
from feature_store.journal.sequences import Sequences
from feature_store.keys import PartyKeys, seal_body
from feature_store.shard import Shard
from labeler.bodies import Ask, Refusal, Settled
from labeler.errors import (
    BudgetExceeded,
    Forged,
    Interrupted,
    InvalidSetting,
    JournalBehind,
    JournalBroken,
    LabelerError,
    NotEnrolled,
    ProtocolViolation,
    Replayed,
    TooLarge,
    WrongDigest,
)
from labeler.messages import COORDINATOR, Kind, Message
from labeler.proposals import Willing
from workers.agent import Agent
from workers.agent_proposals import Admission, Proposals
from workers.agent_words import PUBLIC_ERRORS, cause, said, silent, told
from workers.durable_ledger import DurableLedger
from workers.party import Draft, PartyLink, converse
from workers.party_home import (
    ANCHOR_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    POLICY_FILE,
    SEEN_FILE,
    AgentConfig,
    check_journal_kept,
    read_agent_config,
    retire_noise_secret,
)
from workers.policy import read_policy
from workers.voting.model_store import InMemoryModels

log = logging.getLogger("labeler.agent")

_TAKEN = ("ask", "answered", "proposal", "withdrawn")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts at an answer that was charged, the first time and in the end."""


def run_agent(
    home: Path, *, stop: threading.Event, clock: Callable[[], datetime] | None = None, wait_s: float = 20.0
) -> None:
    """Serve as an agent until told to stop.

    Args:
        home: the agent's home (workers.party_home).
        stop: ends it within a moment; nothing is lost.
        clock: times with a time zone; the system's where absent.
        wait_s: how long the coordinator may hold a poll.

    Raises:
        LabelerError: the home, the shard, the policy or the journal cannot be used.
    """
    clock = clock or _now
    config = read_agent_config(home)
    policy = read_policy(home / POLICY_FILE)
    with ExitStack() as owned:
        database = open_upgraded(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE)
        owned.callback(database.close)
        ledger = Ledger(database, clock=clock)
        keys = KeyFolder(home / ERASABLE_FOLDER)
        has_entries = ledger.verify().seq > 0
        check_journal_kept(home, has_entries=has_entries)
        check_home(database, keys, has_entries=has_entries)
        memory, promises = AgentMemory(database, ledger), PromiseStore(database, ledger)
        rounds = JournalRounds(database, keys)
        site = DurableLedger(
            database,
            memory,
            rounds,
            ledger,
            promises,
            account=account_of(config.agent_id),
            read_policy=lambda: read_policy(home / POLICY_FILE),
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
        records = _Records(home, config, site, rounds)
        link = PartyLink(
            url=config.coordinator_url,
            party_id=config.agent_id,
            keys=PartyKeys.load(home / KEYS_FILE),
            coordinator_key=policy.coordinator.verify_key,
            database=database,
            sequences=Sequences(database),
            journal_head=ledger.head,
            seen=home / SEEN_FILE,
            facts=records.facts,
            stop=stop,
            ca_file=config.ca_file,
            wait_s=wait_s,
        )
        owned.callback(link.close)
        log.info("agent ready", extra={"agent": config.agent_id})
        admission = Admission(
            home,
            memory,
            read_policy=lambda: read_policy(home / POLICY_FILE),
            coordinator_key=link.coordinator_key,
            clock=clock,
        )
        proposals = Proposals(records.agent, admission, site, promises, clock=clock)
        desk = _Desk(link, records, memory, rounds, admission, proposals, clock, stop)
        converse(link, desk.handle, stop, tidy=desk.tidy)
    log.info("agent stopped", extra={"agent": config.agent_id})


def account_of(agent_id: str) -> str:
    """The name of an agent's account, in its own journal and in the coordinator's."""
    return f"agent:{agent_id}"


class _Records:
    """The agent over its shard as it is now: a record deleted by another process no longer votes."""

    def __init__(self, home: Path, config: AgentConfig, ledger: DurableLedger, rounds: JournalRounds) -> None:
        self._path = home / config.shard  # an absolute path stays what it is
        self._config = config
        self._ledger = ledger
        self._rounds = rounds
        # In memory only: of what is trained on private records, nothing without noise outlives its round.
        self._models = InMemoryModels()
        self._stamp = self._manifest_stamp()
        self._open(verify=True)

    def facts(self) -> Mapping[str, Any]:
        """What the coordinator may know of the records; never how many there are."""
        return {"backbone_fingerprint": self._shard.fingerprint, "classes": list(self._shard.classes)}

    def agent(self) -> Agent:
        stamp = self._manifest_stamp()
        if stamp != self._stamp:
            self._open(verify=False)
            self._stamp = stamp
        return self._agent

    def forget_models(self) -> None:
        """Forget what was trained so far."""
        self._models.clear()

    def _open(self, *, verify: bool) -> None:
        shard = Shard.open(self._path, verify=verify)
        if shard.is_public:
            raise InvalidSetting(f"shard {self._path.name!r} is a public one; an agent answers from private records")
        self._shard = shard
        self._agent = Agent(
            self._config.agent_id,
            shard,
            ledger=self._ledger,
            rounds=self._rounds,
            models=self._models,
            engine=self._config.engine,
            memory_limit_bytes=self._config.memory_limit_bytes,
        )

    def _manifest_stamp(self) -> tuple[int, int, int]:
        try:
            status = (self._path / "manifest.json").stat()
        except OSError:
            return (0, 0, 0)
        return (status.st_ino, status.st_size, status.st_mtime_ns)


class _Desk:
    """Handles what a poll brought."""

    def __init__(
        self,
        link: PartyLink,
        records: _Records,
        memory: AgentMemory,
        rounds: JournalRounds,
        admission: Admission,
        proposals: Proposals,
        clock: Callable[[], datetime],
        stop: threading.Event,
    ) -> None:
        self._link = link
        self._records = records
        self._memory = memory
        self._rounds = rounds
        self._admission = admission
        self._proposals = proposals
        self._clock = clock
        self._stop = stop

    def tidy(self) -> None:
        """Give back promises that have ended, and erase what nobody may ask for any more."""
        self._proposals.release()
        for round_digest in self._rounds.expire(self._clock()):
            self._records.forget_models()
            log.info("round is over, nothing is kept of it", extra={"round_digest": round_digest})

    def handle(self, mail: Sequence[Message]) -> None:
        """Answer everything, of asks for one round the last, since all have one answer; erase what is settled."""
        self.tidy()
        taken: list[tuple[Message, bytes]] = []
        for message in mail:
            try:
                body = self._link.open(message, self._link.coordinator_key)
                if message.header.sender != COORDINATOR or message.header.kind not in _TAKEN:
                    raise ProtocolViolation(f"an agent takes no message of kind {message.header.kind!r}")
                taken.append((message, body))
            except Replayed:
                continue
            except (Forged, ProtocolViolation) as error:
                log.warning("message skipped", extra={"message_id": message.message_id} | said(error))
        last = {one.header.round_digest: one for one, _ in taken if one.header.kind == "ask"}
        for message, body in taken:
            if message.header.kind == "answered":
                self._settle(message, body)
            elif message.header.kind != "ask":
                self._consider(message, body)
            elif last[message.header.round_digest] is message:
                self._answer(message, body)
            self._link.taken([message])

    def _settle(self, message: Message, body: bytes) -> None:
        about = {"task_digest": message.header.task_digest, "round_digest": message.header.round_digest}
        try:
            Settled.decode(body)
        except ProtocolViolation as error:
            log.warning("message skipped", extra=about | said(error))
            return
        self._rounds.erase(message.header.round_digest)
        self._records.forget_models()
        log.info("round is settled, nothing is kept of it", extra=about)

    def _consider(self, message: Message, body: bytes) -> None:
        """Say to a proposal whether this agent will, or take note that one was withdrawn."""
        about = {"task_digest": message.header.task_digest}
        try:
            if message.header.kind == "withdrawn":
                log.info("proposal withdrawn", extra=about | {"rounds_given_back": self._proposals.withdrawn(body)})
                return
            answer, trouble = self._proposals.answer(message.header, body)
            about |= {"job_id": answer.job_id}
            if isinstance(answer, Willing):
                self._link.post([self._draft(message, "willing", answer.encode())])
                log.info("willing", extra=about)
            else:
                what = "declined" if answer.refusal.is_final else "not yet"
                log.warning(what, extra=about | ({} if trouble is None else cause(trouble)))
                self._link.post([self._draft(message, "declined", answer.encode())])
        except (JournalBroken, JournalBehind, NotEnrolled, Forged):
            raise
        except (ProtocolViolation, InvalidSetting) as error:
            # The job is over, or the proposal was none: there is nobody to say it to.
            log.warning("proposal not answered", extra=about | said(error))

    def _answer(self, message: Message, body: bytes) -> None:
        header = message.header
        about = {"task_digest": header.task_digest, "round_digest": header.round_digest}
        try:
            drafts = self._drafts(message, body)
            if drafts:
                self._link.post(drafts)
            if any(draft.kind == "input-share" for draft in drafts):
                # Only what was taken, and only shares: a refusal was written down as one.
                fault_point("agent.sent")
                log.info("answered", extra=about)
        except (JournalBroken, JournalBehind, NotEnrolled, Forged):
            raise
        except (ProtocolViolation, TooLarge) as error:
            # The round is over, or the ask was none: there is nothing to say it to.
            log.warning("answer not taken", extra=about | said(error))

    def _drafts(self, message: Message, body: bytes) -> list[Draft]:
        """Everything to be sent for one ask: shares and a receipt, or a refusal."""
        header = message.header
        try:
            ask = Ask.decode(body)
            if (header.task_digest, header.round_digest) != (ask.task.digest, ask.round.digest):
                raise WrongDigest("an ask names another task or round than it holds")
            is_charged = self._memory.is_charged(ask.round.digest)
            if not is_charged:
                # Before a person is asked, and the task kept for it: what does not fit these records never waits.
                self._records.agent().check(ask.task, ask.batch)
            self._admission.check(ask)
            fault_point("agent.asked")
            recipients = tuple((tallier.tallier_id, tallier.seal_key) for tallier in ask.talliers)
            # Before the records are touched: what was stored is sent, or refused, whatever they are now.
            bodies = self._rounds.stored(ask.round.digest, recipients)
            if bodies is None:
                self._records.agent().charge(ask.task, ask.batch, recipients=recipients, expires_at=ask.expires_at)
        except PUBLIC_ERRORS as error:
            return self._refused(message, error)
        except LabelerError as error:
            if isinstance(error, JournalBroken | JournalBehind):
                raise
            return self._refused(message, silent(error), trouble=error)
        if bodies is None:
            fault_point("agent.charged")
            # From here on it answers or is silent: a refusal now, or its words, could depend on the records.
            bodies = self._until_answered(
                ask,
                lambda: self._records.agent().bodies(
                    ask.task, ask.batch, recipients=recipients, seal=partial(self._seal, ask)
                ),
            )
            if bodies is None:
                return []
            fault_point("agent.stored")
        shares = [
            Draft(
                "input-share",
                tallier.tallier_id,
                body,
                task_digest=ask.task.digest,
                round_digest=ask.round.digest,
                is_sealed=True,
            )
            for tallier, body in zip(ask.talliers, bodies, strict=True)
        ]
        return [*shares, self._draft(message, "answered", b"{}")]

    def _until_answered(self, ask: Ask, answer: Callable[[], tuple[bytes, ...]]) -> tuple[bytes, ...] | None:
        """Try until there is an answer, the round's own deadline has passed (None), or the process is told to stop.

        Nothing that follows from records fails (workers.agent); what does is trouble of the site, such as a full disk,
        and nobody outside hears of it: whoever asked sees an agent that does not answer, as when it was switched off.

        Raises:
            JournalBroken, JournalBehind: the journal cannot be used any more.
            Interrupted: told to stop; asked again, it answers.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return answer()
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                log.error("an answer that was charged could not be made; trying again", extra=cause(error))
            if ask.expires_at < self._clock().timestamp():
                log.error("the round is over, and was not answered", extra={"round_digest": ask.round.digest})
                return None
            if self._stop.wait(pause_s):
                raise Interrupted("stopped while an answer could not be made")
            self.tidy()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _seal(self, ask: Ask, number: int, body: bytes) -> bytes:
        fault_point("agent.computed")
        tallier = ask.talliers[number]
        return seal_body(
            "input-share",
            sender=self._link.party_id,
            recipient=tallier.tallier_id,
            task_digest=ask.task.digest,
            round_digest=ask.round.digest,
            body=body,
            seal_to=tallier.seal_key,
        )

    def _refused(self, message: Message, error: LabelerError, *, trouble: Exception | None = None) -> list[Draft]:
        about = {"task_digest": message.header.task_digest, "round_digest": message.header.round_digest}
        log.warning("refused", extra=about | (said(error) if trouble is None else cause(trouble)))
        return (
            [self._draft(message, "refused", Refusal.of(told(error)).encode())] if message.header.round_digest else []
        )

    def _draft(self, message: Message, kind: Kind, body: bytes) -> Draft:
        header = message.header
        return Draft(kind, COORDINATOR, body, task_digest=header.task_digest, round_digest=header.round_digest)


def _now() -> datetime:
    return datetime.now(UTC)
