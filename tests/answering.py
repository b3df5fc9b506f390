"""An agent that answers by itself, round after round, without a coordinator: for benches and tests of single answers.

The product's agents are asked by a machine, and its driver keeps keys and answers of many rounds together
(workers.agent.driver, workers.run.parties). Here a store keeps them round by round, under the same rules
(`labeler.rounds.agent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.batching import round_charges
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.randomness import KEY_BYTES
from labeler.rounds.agent import ANSWERED_TO_OTHERS, NOT_KEPT, Recipients
from labeler.system.erasable import KeysInMemory
from labeler.tally import InputShare, QueryBatch, round_of
from labeler.task import Task
from workers.agent.agent import NO_SPENDS, Agent, Seal, as_it_is, shares_of
from workers.agent.ledger import priced


class Charges(Protocol):
    """A ledger that takes the price of a round; see `workers.agent.ledger.DurableLedger.charge_in`."""

    def charge(self, **about: Any) -> None:
        """Take the price of a round once, or raise."""
        ...


class RoundStore(Protocol):
    """See the module. A round comes into it once its price is taken (workers.agent.ledger)."""

    def stored(self, round_digest: str, recipients: Recipients) -> tuple[bytes, ...] | None:
        """Return what was stored of a round, one body per recipient; None where nothing is stored yet.

        Raises:
            PrivacyRefusal: it was stored for other recipients, or erased.
        """
        ...

    def key(self, round_digest: str) -> bytes:
        """The round's own 32 secret bytes: of noise, masks, and what is stored. The same until they are erased.

        Raises:
            PrivacyRefusal: they are erased.
        """
        ...

    def store(self, round_digest: str, recipients: Recipients, bodies: Sequence[bytes]) -> tuple[bytes, ...]:
        """Keep an answer, durably, before anything of it leaves; what was stored first stands, and is returned.

        Raises:
            PrivacyRefusal: see `stored`.
        """
        ...

    def erase(self, round_digest: str) -> None:
        """Forget key and answer of a round; it is refused from now on."""
        ...


class RoundsInMemory:
    """Kept as long as this object.

    Args:
        secret: the key of every round, for simulations whose noise is to follow from a seed; random keys where absent.

    Raises:
        InvalidSetting: the secret has another length.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = _checked(secret)
        self._keys = KeysInMemory()
        self._answers: dict[str, tuple[Recipients, tuple[bytes, ...]]] = {}
        self._erased: set[str] = set()

    def stored(self, round_digest: str, recipients: Recipients) -> tuple[bytes, ...] | None:
        """See RoundStore."""
        if round_digest in self._erased:
            raise PrivacyRefusal(NOT_KEPT)
        answered_to, bodies = self._answers.get(round_digest, (recipients, None))
        if answered_to != recipients:
            raise PrivacyRefusal(ANSWERED_TO_OTHERS)
        return bodies

    def key(self, round_digest: str) -> bytes:
        """See RoundStore."""
        if round_digest in self._erased:
            raise PrivacyRefusal(NOT_KEPT)
        return self._keys.draw(round_digest) if self._secret is None else self._secret

    def store(self, round_digest: str, recipients: Recipients, bodies: Sequence[bytes]) -> tuple[bytes, ...]:
        """See RoundStore."""
        stored = self.stored(round_digest, recipients)
        if stored is None:
            stored = tuple(bodies)
            self._answers[round_digest] = (recipients, stored)
        return stored

    def erase(self, round_digest: str) -> None:
        """See RoundStore."""
        self._erased.add(round_digest)
        self._keys.erase_all([round_digest])
        self._answers.pop(round_digest, None)

    def __repr__(self) -> str:
        return "RoundsInMemory(<secret>)"


def _checked(secret: bytes | None) -> bytes | None:
    if secret is not None and len(secret) != KEY_BYTES:
        raise InvalidSetting(f"a noise secret is {KEY_BYTES} bytes long, found {len(secret)}")
    return secret


class AnsweringAgent(Agent):
    """See the module.

    Args:
        agent_id, shard, settings: see Agent.
        rounds: the keys of its rounds, and what it has answered.
        noise_secret: instead of `rounds`, 32 bytes that serve every round while this object lives.
        ledger: takes the price of each round; without one every round is paid for.

    Attributes:
        charged: digests of the rounds that were charged, in order; from then on no answer may be refused.

    Raises:
        InvalidSetting: neither of the first two, or both.
    """

    def __init__(
        self,
        agent_id: str,
        shard: Shard,
        *,
        rounds: RoundStore | None = None,
        noise_secret: bytes | None = None,
        ledger: Charges | None = None,
        **settings: Any,
    ) -> None:
        if (rounds is None) == (noise_secret is None):
            raise InvalidSetting("an agent has either a store of rounds or a noise secret")
        self._rounds = RoundsInMemory(noise_secret) if rounds is None else rounds
        self._ledger = ledger
        self.charged: list[str] = []
        super().__init__(agent_id, shard, **settings)

    def answer(self, task: Task, batch: QueryBatch, *, recipients: Recipients = ()) -> tuple[InputShare, ...]:
        """Check the task, charge the round, vote, add noise, split into one share per tallier.

        Raises:
            LabelerError: see `charge` and `bodies`.
        """
        self.charge(task, batch, recipients=recipients)
        bodies = self.bodies(task, batch, recipients=recipients, seal=as_it_is)
        return shares_of(self.agent_id, round_of(task, batch), bodies)

    def charge(self, task: Task, batch: QueryBatch, *, recipients: Recipients = ()) -> None:
        """Check a round and take its price, in the order of an agent's machine.

        Raises:
            LabelerError: it does not fit, or one record has no finite price; see also `Charges`.
        """
        self.check(task, batch)
        digest, charges = round_of(task, batch).digest, round_charges(task, len(batch))
        priced(charges, "instance")
        if self._ledger is not None:
            self._ledger.charge(
                round_digest=digest, shard_version=self.shard_version, charges=charges,
                task=task, num_queries=len(batch), recipients=recipients,
            )  # fmt: skip
        self.charged.append(digest)

    def bodies(self, task: Task, batch: QueryBatch, *, recipients: Recipients, seal: Seal) -> tuple[bytes, ...]:
        """The answer itself, sealed: one body per recipient, stored before this returns and the same ever after.

        Args:
            task, batch: of a round that `charge` has accepted.
            recipients: who gets the shares, in this order.
            seal: seals the body of one recipient, by its number; called once in the life of a round.
        """
        digest = round_of(task, batch).digest
        stored = self._rounds.stored(digest, recipients)
        if stored is not None:
            return stored
        if task.lifetime_budget is not None:
            # A store of answers alone would forget what this one spends.
            raise PrivacyRefusal(f"agent {self.agent_id}: {NO_SPENDS}")
        # Nothing of this round has left, so whatever the records are now, this is its first answer.
        found = self.computed(task, batch, key=self._rounds.key(digest), seal=seal)
        return self._rounds.store(digest, recipients, found.bodies)

    def ballots(self, task: Task, batch: QueryBatch, key: bytes | None = None) -> NDArray[np.int64]:
        """See Agent; under the round's key as this agent keeps it, where none is given."""
        return super().ballots(task, batch, self._rounds.key(round_of(task, batch).digest) if key is None else key)
