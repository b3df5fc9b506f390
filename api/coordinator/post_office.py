"""The post office: the coordinator's signed messages to parties, and the keys they are enrolled with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from feature_store.journal.jobs import RoundRecord
from feature_store.journal.parties import PartyRecord, PartyStore
from feature_store.journal.sequences import Sequences
from feature_store.journal.tasks import TaskRecord
from feature_store.keys import PartyKeys
from feature_store.mailbox import Mailbox
from labeler.bodies import TallierKey
from labeler.errors import Unavailable
from labeler.messages import COORDINATOR, Kind, Message, frame


class PostOffice:
    """Signs what the coordinator says and puts it into the mailbox of the party it is for."""

    def __init__(self, *, keys: PartyKeys, sequences: Sequences, parties: PartyStore, mailbox: Mailbox) -> None:
        self._keys = keys
        self._sequences = sequences
        self._parties = parties
        self._mailbox = mailbox

    def send(self, kind: Kind, recipient: str, current: RoundRecord | None, task: TaskRecord, body: bytes) -> None:
        """Send one message of a round, or of a job that has no rounds yet.

        Raises:
            Unavailable: Redis cannot be reached; ask again later.
        """
        round_digest = "" if current is None else current.round_digest
        message = self.sign(kind, recipient, body, task_digest=task.task.digest, round_digest=round_digest)
        self._mailbox.send(recipient, frame([message]), message_id=message.message_id)

    def sign(
        self, kind: Kind, recipient: str, body: bytes, *, task_digest: str = "", round_digest: str = ""
    ) -> Message:
        """A message of the coordinator, with the next sequence number for its recipient."""
        return self._keys.message(
            kind,
            sender=COORDINATOR,
            recipient=recipient,
            task_digest=task_digest,
            round_digest=round_digest,
            sequence=self._sequences.next(recipient),
            body=body,
        )

    def talliers(self, count: int) -> list[PartyRecord]:
        """The active talliers number 0 to count - 1, in that order.

        Raises:
            Unavailable: one of them is not enrolled.
        """
        active = {one.tallier: one for one in self._parties.list(role="tallier") if one.state == "active"}
        missing = [number for number in range(count) if number not in active]
        if missing:
            raise Unavailable(
                f"tallier {missing[0]} of {count} is not enrolled; an administrator has to enrol its keys"
            )
        return [active[number] for number in range(count)]

    def tallier_keys(self, count: int) -> tuple[TallierKey, ...]:
        """What an agent needs to seal its shares; it compares the keys with those its own site has pinned."""
        return tuple(
            TallierKey(tallier_id=one.party_id, seal_key=one.seal_key, verify_key=one.verify_key)
            for one in self.talliers(count)
        )

    def verify_keys(self, agents: Collection[str]) -> Mapping[str, str]:
        """Agent id -> its verify key, of those that are active."""
        return {agent: record.verify_key for agent, record in self.agents(agents).items()}

    def agents(self, agents: Collection[str]) -> Mapping[str, PartyRecord]:
        """Those of these agents that are active."""
        active = {one.party_id: one for one in self._parties.list(role="agent") if one.state == "active"}
        return {agent: active[agent] for agent in agents if agent in active}
