"""Parties: enrolment, the facts that each reports about itself, and the readiness of the service.

Facts come from other organizations and end up in tasks, lists and pages. So a poll with any fact but those of
`PartyFacts` is refused, and its facts are not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
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
    from api.coordinator.mailroom import Witnesses


class Roster:
    """See the module.

    Args:
        own: the coordinator's public keys.
        witnesses: knows what parties claim about the journal.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        stores: Stores,
        own: PublicKeys,
        witnesses: Witnesses,
        invitations: Invitations,
        *,
        clock: Clock,
    ) -> None:
        self._config = config
        self._stores = stores
        self._own = own
        self._witnesses = witnesses
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
        self._witnesses.forget(party_id)
        return self._view(record)

    def party_list(self, *, to_the_minute: bool = False) -> PartiesView:
        """Return all enrolled parties, and whether enough are live.

        Args:
            to_the_minute: round times for requesters: the exact time of a poll reveals when the turn before it ended.
        """
        views = tuple(self._view(one) for one in self._stores.parties.list())
        if to_the_minute:
            minutes = [view.last_contact and view.last_contact.replace(second=0, microsecond=0) for view in views]
            views = tuple(view.model_copy(update={"last_contact": at}) for view, at in zip(views, minutes, strict=True))
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

    def active(self, role: PartyRole) -> list[PartyRecord]:
        """Return active parties."""
        return [party for party in self._stores.parties.list(role=role) if party.state == "active"]

    def is_live(self, party: PartyRecord) -> bool:
        """Return whether a party was heard from lately."""
        age = None if party.last_contact is None else self._clock() - party.last_contact
        return age is not None and age <= timedelta(seconds=self._config.timing.live_s)

    def _view(self, record: PartyRecord) -> PartyView:
        facts = facts_of(record.facts)
        return PartyView(
            party_id=record.party_id,
            role=record.role,
            tallier=record.tallier,
            verify_key=record.verify_key,
            seal_key=record.seal_key,
            fingerprint=PublicKeys(record.verify_key, record.seal_key).fingerprint,
            state=record.state,
            enrolled_at=record.enrolled_at,
            last_contact=record.last_contact,
            is_live=record.state == "active" and self.is_live(record),
            backbone_fingerprint=facts.backbone_fingerprint,
            classes=facts.classes,
            version=facts.version,
            claim=self._witnesses.claim(record.party_id),
        )


MAX_CLASS_CHARACTERS = 200
MAX_FINGERPRINT_CHARACTERS = 200

MAX_DIMENSION = 2**20

_KNOWN = ("backbone_fingerprint", "classes", "dimension", "probe", "winner_group")


@dataclass(frozen=True)
class PartyFacts:
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
        names = check_list(told["classes"], "classes of a poll")
        if len(names) > MOST_CLASSES:
            raise ProtocolViolation(f"classes of a poll are at most {MOST_CLASSES}, found {len(names)}")
        for name in names:
            check_text(name, "a class of a poll", most=MAX_CLASS_CHARACTERS)
    dimension = told.get("dimension", 1)
    if type(dimension) is not int or not 1 <= dimension <= MAX_DIMENSION:
        raise ProtocolViolation(f"dimension of a poll is a whole number from 1 to {MAX_DIMENSION}")
    if "probe" in told:
        probe = check_text(told["probe"], "probe of a poll", most=MOST_PROBE_CHARACTERS)
        try:
            probe_rows(probe, dimension)
        except BadData:
            raise ProtocolViolation("probe of a poll holds rows of the dimension that comes with it") from None
    if "winner_group" in told:
        check_digest(told["winner_group"], "winner_group of a poll")
    return told


def facts_of(kept: Mapping[str, Any]) -> PartyFacts:
    """Read stored facts, which `check_facts` accepted on arrival with the version of the party's program."""
    return PartyFacts(**dict(kept) | {"classes": tuple(kept.get("classes", ()))})


READY = "jobs can be taken"
NOT_READY = "no job can be taken now; an administrator's token gets the reason"
"""The only reason shown without an administrator's token."""


def for_strangers(view: ReadinessView) -> ReadinessView:
    """Strip the reasons from a readiness: they count jobs and charges, and name the journal's place."""
    said = READY if view.ready else NOT_READY
    return ReadinessView(ready=view.ready, checks=(Check(name="service", ok=view.ready, detail=said),))


class Health:
    """Readiness of the service, part by part.

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
        room: Callable[[], str],
        waiting_for_embedder: Callable[[], int],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._witnesses = witnesses
        self._roster = roster
        self._mailbox = mailbox
        self._room = room
        self._waiting_for_embedder = waiting_for_embedder

    def readiness(self) -> ReadinessView:
        """Return whether jobs can be taken, and what is missing: for an administrator."""
        parts: dict[str, Callable[[], str]] = {
            "journal": self._journal,
            "storage": self._room,
            "redis": self._redis,
            "embedder": self._embedder,
            "talliers": self._talliers,
            "agents": self._agents,
        }
        checks = []
        for name, look in parts.items():
            try:
                checks.append(Check(name=name, ok=True, detail=look()))
            except LabelerError as error:
                checks.append(Check(name=name, ok=False, detail=str(error)))
        is_ready = all(check.ok for check in checks)
        return ReadinessView(ready=is_ready, checks=tuple(checks), version=version("private-labeler"))

    def check_trusted(self) -> None:
        """Refuse jobs while a party has proven that charges are missing from the journal.

        Raises:
            JournalBehind: charges are missing, so no bound can be promised.
        """
        behind = self._witnesses.sentence
        if behind:
            raise JournalBehind(f"{behind}. No job is taken until the newest journal is restored; see docs/backup.md")

    def _journal(self) -> str:
        self.check_trusted()
        found = f"{self._ledger.head().seq} entries, the last of them checked at the start"
        doubters = self._witnesses.doubters
        if doubters:
            found += f"; these parties claim without proof to have seen more: {', '.join(doubters[:5])}"
        return found

    def _redis(self) -> str:
        self._mailbox.check()
        return "answers, and evicts nothing"

    def _embedder(self) -> str:
        try:
            if self._mailbox.is_alive("embedder"):
                return "is there"
        except TryAgain:
            return "not known while redis cannot be reached"
        waiting = self._waiting_for_embedder()
        if waiting:
            jobs = "1 job waits" if waiting == 1 else f"{waiting} jobs wait"
            raise NotReady(f"no embedder was heard from lately, and {jobs} for questions; start `labeler embedder`")
        return "not heard from lately; the next job will wait until one is started (labeler embedder)"

    def _talliers(self) -> str:
        """Check that every tallier is live, because sums need the share of each."""
        needed = self._config.talliers
        active = {party.tallier: party for party in self._roster.active("tallier")}
        missing = [str(number) for number in range(needed) if number not in active]
        if missing:
            raise NotReady(f"tallier number {', '.join(missing)} of {needed} is not enrolled")
        silent = [active[number].party_id for number in range(needed) if not self._roster.is_live(active[number])]
        if silent:
            raise NotReady(f"talliers not heard from for {self._config.timing.live_s:g} s: {', '.join(silent)}")
        return f"{needed} of {needed} are there"

    def _agents(self) -> str:
        active = self._roster.active("agent")
        silent = sorted(party.party_id for party in active if not self._roster.is_live(party))
        if not active:
            raise NotReady("no agent is enrolled; invite one (labeler invite)")
        there = f"{len(active) - len(silent)} of {len(active)}"
        if len(silent) == len(active):
            named = ", ".join(silent[:5]) + (" ..." if len(silent) > 5 else "")
            raise NotReady(f"{there} agents are there, 1 is needed" + (f"; silent: {named}" if named else ""))
        return f"{there} are there"
