"""Parties: enrolment, the facts that each reports about itself, and the readiness of the service.

Facts are checked strictly on arrival and read leniently from storage. They come from other organizations and end up in
tasks, lists and pages, so only known facts are accepted: an agent's backbone, the dimension of its features, its result
for the public probe, the classes of its records, the digest of a tallier's winner group, and the program's version.
A poll with any other fact is refused, and its facts are not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from api.coordinator.budgets import open_accounts
from api.coordinator.config import CoordinatorConfig
from api.coordinator.stores import Stores
from api.schema import Check, KeysRequest, PartiesView, PartyRequest, PartyRole, PartyView, ReadinessView
from feature_store.rows import probe_rows
from labeler.driver.mail import Mailbox
from labeler.errors import BadData, JournalBehind, LabelerError, NotReady, ProtocolViolation, TryAgain
from labeler.ledger.ledger import Ledger
from labeler.ledger.parties import PartyRecord
from labeler.system.clock import Clock
from labeler.system.keys import PublicKeys
from labeler.task import MOST_CLASSES
from labeler.untrusted import MOST_PROBE_CHARACTERS, check_digest, check_list, check_mapping, check_text

if TYPE_CHECKING:  # the mailroom reads facts
    from api.coordinator.invitations import Invitations
    from api.coordinator.mailroom import Mailroom, Witnesses


class Roster:
    """See the module.

    Args:
        own: the coordinator's public keys.
        mailroom: knows when each party was last heard from.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        stores: Stores,
        own: PublicKeys,
        mailroom: Mailroom,
        invitations: Invitations,
        *,
        clock: Clock,
    ) -> None:
        self._config = config
        self._stores = stores
        self._own = own
        self._mailroom = mailroom
        self._invitations = invitations
        self._clock = clock

    def enrol(self, request: PartyRequest) -> PartyView:
        """Enrol an agent or tallier; an agent gets its accounts."""
        keys = PublicKeys(request.verify_key, request.seal_key)
        record = self._stores.parties.enrol(
            request.party_id,
            request.role,
            tallier=request.tallier,
            verify_key=keys.verify_key,
            seal_key=keys.seal_key,
        )
        if record.role == "agent":
            open_accounts(self._stores.ledger, self._config, [record.party_id])
        return self._view(record)

    def rotate(self, party_id: str, request: KeysRequest) -> PartyView:
        """Give a party new keys; messages signed with the old ones are refused from now on."""
        keys = PublicKeys(request.verify_key, request.seal_key)
        return self._view(self._stores.parties.rotate(party_id, verify_key=keys.verify_key, seal_key=keys.seal_key))

    def revoke(self, party_id: str) -> PartyView:
        """Revoke a party."""
        # First, so that no earlier invitation brings the party back.
        self._invitations.withdraw(party_id)
        record = self._stores.parties.revoke(party_id)
        self._mailroom.witnesses.forget(party_id)
        return self._view(record)

    def party_list(self, *, to_the_minute: bool = False) -> PartiesView:
        """Return all enrolled parties, and whether enough are live.

        Args:
            to_the_minute: round times for requesters: the exact time of a poll reveals when the turn before it ended.
        """
        views = tuple(self._view(one) for one in self._stores.parties.list())
        if to_the_minute:
            views = tuple(view.model_copy(update={"last_contact": _to_the_minute(view.last_contact)}) for view in views)
        live = Counter(view.role for view in views if view.is_live and view.state == "active")
        needed = self._config.talliers
        return PartiesView(
            coordinator_verify_key=self._own.verify_key,
            coordinator_seal_key=self._own.seal_key,
            parties=views,
            live_agents=live["agent"],
            live_talliers=live["tallier"],
            talliers_needed=needed,
            has_quorum=live["tallier"] >= needed and live["agent"] >= 1,
            key_changes=self._invitations.key_changes(),
        )

    def known(self, role: PartyRole) -> list[PartyRecord]:
        """Return parties with their last contact as this process knows it, which is fresher than the stored one."""
        return [self._mailroom.fresh(one) for one in self._stores.parties.list(role=role)]

    def _view(self, record: PartyRecord) -> PartyView:
        fresh = self._mailroom.fresh(record)
        facts = facts_of(fresh.facts)
        age_s = None if fresh.last_contact is None else (self._clock() - fresh.last_contact).total_seconds()
        return PartyView(
            party_id=fresh.party_id,
            role=fresh.role,
            tallier=fresh.tallier,
            verify_key=fresh.verify_key,
            seal_key=fresh.seal_key,
            fingerprint=PublicKeys(fresh.verify_key, fresh.seal_key).fingerprint,
            state=fresh.state,
            enrolled_at=fresh.enrolled_at,
            last_contact=fresh.last_contact,
            is_live=fresh.state == "active" and age_s is not None and age_s <= self._config.timing.live_s,
            backbone_fingerprint=facts.backbone_fingerprint,
            classes=facts.classes,
            version=facts.version,
            claim=self._mailroom.witnesses.claim(fresh.party_id),
        )


def _to_the_minute(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(second=0, microsecond=0)


MAX_CLASS_CHARACTERS = 200
MAX_FINGERPRINT_CHARACTERS = 200

MAX_DIMENSION = 2**20

_KNOWN = ("backbone_fingerprint", "classes", "dimension", "probe", "winner_group")


@dataclass(frozen=True)
class Facts:
    """Facts that a party reported about itself.

    Attributes:
        backbone_fingerprint: of the backbone that made its features; None if not reported.
        classes: class names of its records, in order; empty if not reported.
        dimension: entries of one of this backbone's features; None if not reported.
        probe: features of the published probe (feature_store.rows), if the site made its features itself.
        winner_group: for a tallier, the digest of the three talliers that find winners together; None for one that
            does not find winners.
    """

    backbone_fingerprint: str | None = None
    classes: tuple[str, ...] = ()
    dimension: int | None = None
    probe: str | None = None
    winner_group: str | None = None
    version: str = ""


def check_facts(facts: object) -> dict[str, Any]:
    """Check the facts of a poll: only known names, each with bounded printable text.

    Raises:
        ProtocolViolation: an unknown name, a value of another type, too long, or with characters that do not print.
    """
    told = check_mapping(facts, "facts of a poll")
    unknown = len(told.keys() - set(_KNOWN))
    if unknown:
        raise ProtocolViolation(
            f"facts of a poll are {' and '.join(_KNOWN)}, and {unknown} other(s) were sent; coordinator and party must "
            "run matching versions"
        )
    if "backbone_fingerprint" in told:
        check_text(told["backbone_fingerprint"], "backbone_fingerprint of a poll", most=MAX_FINGERPRINT_CHARACTERS)
    if "classes" in told:
        _check_classes(told["classes"])
    if "dimension" in told and not _is_dimension(told["dimension"]):
        raise ProtocolViolation(f"dimension of a poll is a whole number from 1 to {MAX_DIMENSION}")
    if "probe" in told:
        _check_probe(told["probe"], told.get("dimension"))
    if "winner_group" in told:
        check_digest(told["winner_group"], "winner_group of a poll")
    return told


def facts_of(kept: Mapping[str, Any]) -> Facts:
    """Read stored facts, which `check_facts` accepted on arrival with the version of the party's program."""
    return Facts(**dict(kept) | {"classes": tuple(kept.get("classes", ()))})


def _check_classes(value: object) -> None:
    names = check_list(value, "classes of a poll")
    if len(names) > MOST_CLASSES:
        raise ProtocolViolation(f"classes of a poll are at most {MOST_CLASSES}, found {len(names)}")
    for name in names:
        check_text(name, "a class of a poll", most=MAX_CLASS_CHARACTERS)


def _check_probe(value: object, dimension: object) -> None:
    probe = check_text(value, "probe of a poll", most=MOST_PROBE_CHARACTERS)
    try:
        probe_rows(probe, dimension if isinstance(dimension, int) else 1)
    except BadData:
        raise ProtocolViolation("probe of a poll holds rows of the dimension that comes with it") from None


def _is_dimension(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_DIMENSION


Probe = Callable[[], str]
"""Checks one part; returns its finding in words; raises LabelerError if the part is not ready."""


def readiness(probes: Mapping[str, Probe]) -> ReadinessView:
    """Run every probe once.

    Args:
        probes: by name, in display order: for example "journal", "redis", "talliers", "agents".
    """
    checks = tuple(_checked(name, probe) for name, probe in probes.items())
    return ReadinessView(ready=all(check.ok for check in checks), checks=checks, version=version("private-labeler"))


def talliers_live(talliers: Collection[PartyRecord], needed: int, *, now: datetime, live_s: float) -> str:
    """Check that every tallier is live, because sums need the share of each.

    Args:
        live_s: a party heard from within this time counts as live.

    Raises:
        NotReady: one is not enrolled, or silent.
    """
    active = {party.tallier: party for party in talliers if party.state == "active"}
    missing = [str(number) for number in range(needed) if number not in active]
    if missing:
        raise NotReady(f"tallier number {', '.join(missing)} of {needed} is not enrolled")
    silent = [
        active[number].party_id for number in range(needed) if not is_live(active[number], now=now, live_s=live_s)
    ]
    if silent:
        raise NotReady(f"talliers not heard from for {live_s:g} s: {', '.join(silent)}")
    return f"{needed} of {needed} are there"


def agents_live(agents: Collection[PartyRecord], quorum: int, *, now: datetime, live_s: float) -> str:
    """Check that enough agents are live.

    Args:
        quorum: least number needed; of all active agents unless a task says otherwise.
        live_s: an agent heard from within this time counts as live.

    Raises:
        NotReady: fewer than the quorum.
    """
    active = [party for party in agents if party.state == "active"]
    there = [party for party in active if is_live(party, now=now, live_s=live_s)]
    if not active or len(there) < quorum:
        silent = sorted({party.party_id for party in active} - {party.party_id for party in there})
        named = ", ".join(silent[:5]) + (" ..." if len(silent) > 5 else "")
        raise NotReady(
            f"{len(there)} of {len(active)} agents are there, {quorum} are needed"
            + (f"; silent: {named}" if named else "")
        )
    return f"{len(there)} of {len(active)} are there"


def embedder_there(is_there: bool, waiting: int) -> str:
    """Check that an embedder is live if jobs wait for features.

    Args:
        is_there: whether an embedder was heard from lately.
        waiting: jobs whose images have no features yet.

    Raises:
        NotReady: jobs wait, and no embedder is live.
    """
    if is_there:
        return "is there"
    if waiting:
        jobs = "1 job waits" if waiting == 1 else f"{waiting} jobs wait"
        raise NotReady(f"no embedder was heard from lately, and {jobs} for questions; start `labeler embedder`")
    return "not heard from lately; the next job will wait until one is started (labeler embedder)"


def is_live(party: PartyRecord, *, now: datetime, live_s: float) -> bool:
    """Return whether a party was heard from within `live_s`."""
    return party.last_contact is not None and now - party.last_contact <= timedelta(seconds=live_s)


def _checked(name: str, probe: Probe) -> Check:
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabelerError as error:
        return Check(name=name, ok=False, detail=str(error))


READY = "jobs can be taken"
NOT_READY = "no job can be taken now; an administrator's token gets the reason"
"""The only reason shown without an administrator's token."""


def for_strangers(view: ReadinessView) -> ReadinessView:
    """Strip the reasons from a readiness: they count jobs and charges, and name the journal's place."""
    said = READY if view.ready else NOT_READY
    return ReadinessView(ready=view.ready, checks=(Check(name="service", ok=view.ready, detail=said),))


class Health:
    """See the module.

    Args:
        witnesses: compares the heads that parties have seen with the journal.
        room: raises if the disk is full.
        waiting_for_embedder: how many jobs cannot continue without one.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        ledger: Ledger,
        *,
        witnesses: Witnesses,
        roster: Roster,
        mailbox: Mailbox,
        room: Probe,
        waiting_for_embedder: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._witnesses = witnesses
        self._roster = roster
        self._mailbox = mailbox
        self._room = room
        self._waiting_for_embedder = waiting_for_embedder
        self._clock = clock

    def readiness(self) -> ReadinessView:
        """Return whether jobs can be taken, and what is missing: for an administrator."""
        needed, live_s = self._config.talliers, self._config.timing.live_s
        probes: dict[str, Probe] = {
            "journal": self._journal_probe,
            "storage": self._room,
            "redis": self._redis_probe,
            "embedder": self._embedder_probe,
            "talliers": lambda: talliers_live(self._roster.known("tallier"), needed, now=self._clock(), live_s=live_s),
            "agents": lambda: agents_live(self._roster.known("agent"), 1, now=self._clock(), live_s=live_s),
        }
        return readiness(probes)

    def _journal_probe(self) -> str:
        self.check_trusted()
        found = f"{self._ledger.head().seq} entries, chain checked at the start"
        doubters = self._witnesses.doubters
        if doubters:
            found += f"; these parties claim without proof to have seen more: {', '.join(doubters[:5])}"
        return found

    def _redis_probe(self) -> str:
        self._mailbox.check()
        return "answers, and evicts nothing"

    def _embedder_probe(self) -> str:
        try:
            is_there = self._mailbox.is_alive("embedder")
        except TryAgain:
            return "not known while redis cannot be reached"
        return embedder_there(is_there, self._waiting_for_embedder())

    def check_trusted(self) -> None:
        """Refuse jobs while a party has proven that charges are missing from the journal.

        Raises:
            JournalBehind: charges are missing, so no bound can be promised.
        """
        behind = self._witnesses.sentence
        if behind:
            raise JournalBehind(f"{behind}. No job is taken until the newest journal is restored; see docs/backup.md")
