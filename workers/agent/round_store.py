"""What an agent keeps of a round between the charge and the moment at which no tallier can miss anything any more.

The rules are those of `labeler.answered`: the round's key and the stored answer, in two places that pass the same
tests. In a site's journal (`feature_store.journal.agent_rounds`), or in memory for tests and simulations. A `run` keeps
them of all its agents together (`workers.jobs.kept_rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from feature_store.erasable import KeysInMemory
from labeler.answered import ANSWERED_TO_OTHERS, NOT_KEPT, Recipients
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.randomness import KEY_BYTES


class RoundStore(Protocol):
    """See the module. A round comes into it once its price is taken (workers.agent.ledger)."""

    def stored(self, round_digest: str, recipients: Recipients) -> tuple[bytes, ...] | None:
        """What was stored of a round, one body per recipient; None where nothing is stored yet.

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
        """Forget key and answer of a round for ever; it is refused from now on."""
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
        self._keys.erase(round_digest)
        self._answers.pop(round_digest, None)

    def __repr__(self) -> str:
        return "RoundsInMemory(<secret>)"


def _checked(secret: bytes | None) -> bytes | None:
    if secret is not None and len(secret) != KEY_BYTES:
        raise InvalidSetting(f"a noise secret is {KEY_BYTES} bytes long, found {len(secret)}")
    return secret
