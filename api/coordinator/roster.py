"""Who takes part: agents and talliers, their keys, and whether they are there."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from api.coordinator.budgets import open_accounts
from api.coordinator.config import CoordinatorConfig
from api.coordinator.facts import facts_of
from api.coordinator.invitations import Invitations
from api.coordinator.mailroom import Mailroom
from api.coordinator.stores import Stores
from api.schema import KeysRequest, PartiesView, PartyRequest, PartyRole, PartyView
from labeler.ledger.parties import PartyRecord
from labeler.system.clock import Clock
from labeler.system.keys import PublicKeys


class Roster:
    """See the module.

    Args:
        own: the coordinator's public keys.
        mailroom: knows when a party was last heard of.
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
        """Give a party new keys; what its old keys signed is refused from now on."""
        keys = PublicKeys(request.verify_key, request.seal_key)
        return self._view(self._stores.parties.rotate(party_id, verify_key=keys.verify_key, seal_key=keys.seal_key))

    def revoke(self, party_id: str) -> PartyView:
        """Take nothing more from a party."""
        # First, so that no invitation from before brings the party back.
        self._invitations.withdraw(party_id)
        record = self._stores.parties.revoke(party_id)
        self._mailroom.witnesses.forget(party_id)
        return self._view(record)

    def party_list(self, *, to_the_minute: bool = False) -> PartiesView:
        """Everybody enrolled, and whether enough are there.

        Args:
            to_the_minute: for requesters, whom the moment of a poll would tell when the turn before it had ended.
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
        """Parties with their last contact as this process knows it, which is fresher than what is written down."""
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
