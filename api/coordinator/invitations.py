"""Invite sites, and enrol the keys of those that join. labeler.invitation states the security argument.

An administrator may invite a party if and only if it could be enrolled. The checks of `PartyStore` run when an
invitation is made, so that the administrator sees a refusal at once. They run again when it is used. An enrolment is
one transaction: it marks the token as used and stores the keys, or it does neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from api.coordinator.config import CoordinatorConfig
from api.schema import (
    EnrolmentRequest,
    EnrolmentView,
    InvitationRequest,
    InvitationView,
    KeyChangeView,
    WithdrawnView,
)
from labeler.errors import InvalidSetting, NotAuthenticated, NotReady, ProtocolViolation
from labeler.invitation import Invitation, RosterTallier, enrolment_statement, roster_digest
from labeler.ledger.database import Connection, Database
from labeler.ledger.parties import InvitationRecord, InvitationStore, PartyRecord, PartyStore
from labeler.messages import COORDINATOR
from labeler.system.clock import Clock
from labeler.system.keys import PartyKeys, PublicKeys, verify_statement

log = logging.getLogger("labeler.coordinator")

LATELY = timedelta(days=7)
"""The list of parties shows a change of keys for this long."""

_NO_INVITATION = (
    "the token of this invitation is not known, was withdrawn or has expired; ask the administrator for a new one"
)


class Invitations:
    """The invitations of a coordinator, and the enrolment of the sites that use them; see the module.

    Args:
        config: the coordinator's settings: its address and backbones.
        open_accounts: opens an agent's accounts; a repeated call changes nothing.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        database: Database,
        parties: PartyStore,
        keys: PartyKeys,
        *,
        open_accounts: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._database = database
        self._parties = parties
        self._keys = keys
        self._open_accounts = open_accounts
        self._clock = clock
        self._store = InvitationStore(database, clock=clock)

    def invite(self, request: InvitationRequest, *, by: str) -> InvitationView:
        """Make an invitation; it voids an unused one for the same name.

        Args:
            by: id of the access token that asks for it.

        Raises:
            NotReady: an agent is invited before all talliers are enrolled; the message says which are missing.
            NotFound: new keys are for a party that is not enrolled.
            ProtocolViolation: the name or the tallier's number is taken.
            InvalidSetting: an agent is given a number; no number is free; or the text holds no certificates.
        """
        certificates = _certificates(request.ca_certificates)
        now = self._clock()
        expires_at = (now + timedelta(days=request.valid_days)).replace(microsecond=0)
        with self._database.write() as connection:
            tallier = self._place(request, connection)
            talliers = self._roster(connection)
            if request.role == "agent":
                self._check_complete(talliers, request.party_id, connection)
            record, token = self._store.create(
                request.party_id,
                request.role,
                tallier=tallier,
                is_rotation=request.rotate,
                expires_at=expires_at,
                created_by=by,
                connection=connection,
            )
        own = self._keys.public
        invitation = Invitation(
            url=self._config.public_url,
            ca_certificates=certificates,
            verify_key=own.verify_key,
            seal_key=own.seal_key,
            role=record.role,
            party_id=record.party_id,
            tallier=tallier,
            is_rotation=record.is_rotation,
            talliers=talliers,
            talliers_needed=self._config.talliers,
            roster_digest=roster_digest(own.verify_key, own.seal_key, talliers),
            backbones=tuple(sorted(self._config.backbones)),
            issued_at=int(now.timestamp()),
            expires_at=int(expires_at.timestamp()),
            token=token,
        )
        log.info("invitation made", extra=_audit(record) | {"by": by})
        return InvitationView(
            invitation_id=record.invitation_id,
            party_id=record.party_id,
            role=record.role,
            expires_at=record.expires_at,
            phrase=invitation.phrase,
            document=invitation.document(self._keys.sign_statement(invitation.statement)),
        )

    def key_changes(self) -> tuple[KeyChangeView, ...]:
        """Return open and recently used invitations: the keys that may change or have changed."""
        now = self._clock()
        changes = self._store.lately(now, used_since=now - LATELY)
        return tuple(KeyChangeView.model_validate(one, from_attributes=True) for one in changes)

    def withdraw(self, party_id: str) -> WithdrawnView:
        """Withdraw the unused invitations for a name."""
        count = self._store.withdraw(party_id)
        if count:
            log.info("invitation withdrawn", extra={"party": party_id, "invitations": count})
        return WithdrawnView(party_id=party_id, withdrawn=count)

    def enrol(self, request: EnrolmentRequest) -> EnrolmentView:
        """Enrol the keys of an invited site; a repeated request gets the same answer.

        Raises:
            NotAuthenticated: the token belongs to no open invitation, or to one for another name or role.
            Forged: the keys did not sign this enrolment.
            ProtocolViolation: the invitation was used with other keys; the keys are another party's; or the party's
                place was taken or its keys revoked meanwhile.
            InvalidSetting: the keys are malformed or weak.
        """
        keys = PublicKeys(request.verify_key, request.seal_key)
        with self._database.write() as connection:
            record = self._store.find(request.token, connection=connection)
            if record is None:
                raise NotAuthenticated(_NO_INVITATION)
            self._check_named(record, request)
            statement = enrolment_statement(
                coordinator_key=self._keys.public.verify_key,
                token=request.token,
                role=record.role,
                party_id=record.party_id,
                tallier=record.tallier,
                verify_key=keys.verify_key,
                seal_key=keys.seal_key,
            )
            verify_statement(statement, request.signature, keys.verify_key)
            is_new = record.used_at is None
            party = self._admit(record, keys, connection) if is_new else self._again(record, keys, connection)
            if is_new:
                self._store.use(record.invitation_id, keys.verify_key, keys.seal_key, connection=connection)
            talliers = self._roster(connection)
        if party.role == "agent":
            self._open_accounts(party.party_id)
        log.info(
            "party enrolled by invitation" if is_new else "enrolment answered again",
            extra=_audit(record) | {"fingerprint": keys.fingerprint, "by": record.created_by},
        )
        own = self._keys.public
        return EnrolmentView(
            party_id=party.party_id,
            role=party.role,
            tallier=party.tallier,
            fingerprint=keys.fingerprint,
            roster_digest=roster_digest(own.verify_key, own.seal_key, talliers),
        )

    def _check_named(self, record: InvitationRecord, request: EnrolmentRequest) -> None:
        named = (request.party_id, request.role, request.tallier)
        if named != (record.party_id, record.role, record.tallier):
            raise NotAuthenticated(
                "this invitation is for another name, role or number; use it as it was sent, or ask for another one"
            )
        if record.used_at is None and not record.is_open(self._clock()):
            raise NotAuthenticated(_NO_INVITATION)

    def _admit(self, record: InvitationRecord, keys: PublicKeys, connection: Connection) -> PartyRecord:
        """Enrol or rotate the keys of a party whose invitation is open."""
        if record.is_rotation:
            # This makes a revoked party active again. Revoking withdraws its invitations, so this one was made later.
            return self._parties.rotate(record.party_id, keys.verify_key, keys.seal_key, connection=connection)
        return self._parties.enrol(
            record.party_id,
            record.role,
            keys.verify_key,
            keys.seal_key,
            tallier=record.tallier,
            connection=connection,
        )

    def _again(self, record: InvitationRecord, keys: PublicKeys, connection: Connection) -> PartyRecord:
        """Answer a party that repeats its enrolment because an answer was lost."""
        if (record.verify_key, record.seal_key) != (keys.verify_key, keys.seal_key):
            raise ProtocolViolation(
                "this invitation was used before, with other keys. If that was not this site, somebody else has the "
                f"file: call the administrator, who revokes them (labeler keys revoke {record.party_id}) and invites "
                "this site under a new name"
            )
        party = self._parties.get(record.party_id, connection=connection)
        if (party.state, party.verify_key, party.seal_key) != ("active", keys.verify_key, keys.seal_key):
            raise ProtocolViolation(
                "the keys that this invitation enrolled were replaced or revoked since; ask for a new invitation"
            )
        return party

    def _place(self, request: InvitationRequest, connection: Connection) -> int | None:
        """Return the number of an invited tallier, None for an agent. Refuse a party that could not be enrolled."""
        known = {one.party_id: one for one in self._parties.list(connection=connection)}
        party = known.get(request.party_id)
        if request.party_id == COORDINATOR:
            raise InvalidSetting(f"the name {COORDINATOR!r} is the coordinator's own; choose another")
        if request.rotate:
            party = self._parties.get(request.party_id, connection=connection)
            if party.role != request.role or request.tallier not in (None, party.tallier):
                raise ProtocolViolation(
                    f"{request.party_id!r} is enrolled as {_as_what(party)}; new keys change neither role nor number"
                )
            return party.tallier
        if party is not None:
            raise ProtocolViolation(
                f"{request.party_id!r} is enrolled already, as {_as_what(party)} ({party.state}). Give it new keys "
                "with --rotate, or choose another name"
            )
        if request.role == "agent":
            if request.tallier is not None:
                raise InvalidSetting("an agent has no number; it is for talliers")
            return None
        enrolled = {one.tallier: one.party_id for one in known.values() if one.state == "active"}
        # Open invitations reserve their numbers, because usually all talliers are invited before the first one joins.
        held = self._open_numbers(connection)
        invited = {number: party_id for number, party_id in held.items() if party_id != request.party_id}
        numbers = range(self._config.talliers)
        free = [number for number in numbers if number not in enrolled.keys() | invited.keys()]
        number = request.tallier if request.tallier is not None else next(iter(free), None)
        if number in free:
            return number
        if number is None:
            raise InvalidSetting(
                f"all {len(numbers)} talliers are enrolled or invited: "
                f"{', '.join((invited | enrolled)[one] for one in numbers)}; revoke one (labeler keys revoke NAME), or "
                "withdraw an invitation (labeler invite NAME --withdraw)"
            )
        if number in enrolled:
            raise ProtocolViolation(f"tallier {number} is {enrolled[number]!r}; revoke it first (labeler keys revoke)")
        if number in invited:
            raise ProtocolViolation(
                f"tallier {number} is invited as {invited[number]!r}; withdraw that invitation first (labeler invite "
                f"{invited[number]} --withdraw)"
            )
        raise ProtocolViolation(f"this service has talliers 0 to {len(numbers) - 1}")

    def _roster(self, connection: Connection) -> tuple[RosterTallier, ...]:
        """Return the enrolled talliers, sorted by number."""
        talliers = [one for one in self._parties.list("tallier", connection=connection) if one.state == "active"]
        return tuple(
            RosterTallier(
                party_id=one.party_id, number=one.tallier or 0, verify_key=one.verify_key, seal_key=one.seal_key
            )
            for one in sorted(talliers, key=lambda one: one.tallier or 0)
        )

    def _check_complete(self, talliers: tuple[RosterTallier, ...], party_id: str, connection: Connection) -> None:
        missing = sorted(set(range(self._config.talliers)) - {one.number for one in talliers})
        if missing:
            have = ", ".join(f"{one.number} ({one.party_id})" for one in talliers) or "none"
            open_ = self._open_numbers(connection)
            invited = [f"{open_[number]} has the invitation of {number}" for number in missing if number in open_]
            free = [number for number in missing if number not in open_]
            first = f"invite them first (labeler invite NAME --role tallier --number {free[0]}), " if free else ""
            raise NotReady(
                f"not all {self._config.talliers} talliers are enrolled; enrolled: {have}; missing: "
                f"{', '.join(map(str, missing))}{''.join(f'; {one}' for one in invited)}. A hospital pins all of them "
                f"when it joins, so {first}wait until they have joined, and then invite {party_id!r} again"
            )

    def _open_numbers(self, connection: Connection) -> dict[int | None, str]:
        """Return the parties of open invitations by the number that each reserves."""
        return {
            one.tallier: one.party_id for one in self._store.list(connection=connection) if one.is_open(self._clock())
        }


def _as_what(party: PartyRecord) -> str:
    return "an agent" if party.tallier is None else f"tallier {party.tallier}"


def _audit(record: InvitationRecord) -> dict[str, object]:
    """Return the log fields of an admitted party; never its token."""
    return {
        "invitation": record.invitation_id,
        "party": record.party_id,
        "role": record.role,
        "is_rotation": record.is_rotation,
    }


def _certificates(written: str) -> str:
    """Return only the certificates of a PEM text, so that nothing else in it is distributed.

    Raises:
        InvalidSetting: the text is not empty and holds no certificate, or holds a private key.
    """
    if not written:
        return ""
    if "PRIVATE KEY" in written:
        raise InvalidSetting(
            "the file of certificates holds a private key, which must stay secret; name only the authority's "
            "certificate (ca.pem)"
        )
    try:
        found = x509.load_pem_x509_certificates(written.encode())
    except ValueError:
        raise InvalidSetting("the authority's certificates cannot be read; give them in PEM, as in ca.pem") from None
    return "".join(one.public_bytes(Encoding.PEM).decode() for one in found)
