"""What an agent keeps of a round between the charge and the moment at which no tallier can miss anything any more.

The rules are those of `labeler.answered`: the round's key and the stored answer, in three places that pass the same
tests. In a site's journal (`feature_store.journal.agent_rounds`), in the folder of a `run`, or in memory for tests and
simulations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from feature_store.durable import replace_file
from feature_store.erasable import KeyFolder, KeysInMemory, lock_away, take_out
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


class RoundFolder:
    """Two folders of one agent in a job's output: its rounds' keys, and its answers encrypted under them.

    Args:
        keys: folder of the keys.
        answers: folder of the answers; an empty file stands for one that is erased.
        secret: the key of every round instead, of a job that is seeded or was begun by a version with one secret.

    Raises:
        InvalidSetting: the secret has another length.
    """

    def __init__(self, keys: Path, answers: Path, *, secret: bytes | None = None) -> None:
        self._secret = _checked(secret)
        self._keys = None if secret is not None else KeyFolder(keys)
        self._answers = answers

    def stored(self, round_digest: str, recipients: Recipients) -> tuple[bytes, ...] | None:
        """See RoundStore."""
        path = self._answers / round_digest
        if not path.exists():
            return None
        if not (data := path.read_bytes()):
            raise PrivacyRefusal(NOT_KEPT)
        sent_to, *bodies = take_out(self.key(round_digest), round_digest, data)
        if sent_to != _written(recipients):
            raise PrivacyRefusal(ANSWERED_TO_OTHERS)
        return tuple(bodies)

    def key(self, round_digest: str) -> bytes:
        """See RoundStore."""
        path = self._answers / round_digest
        is_stored = path.exists()
        if is_stored and not path.stat().st_size:
            raise PrivacyRefusal(NOT_KEPT)
        if self._keys is None:
            return self._secret or b""
        key = self._keys.read(round_digest) if is_stored else self._keys.draw(round_digest)
        if key is None:
            raise PrivacyRefusal(NOT_KEPT)
        return key

    def has_key(self, round_digest: str) -> bool:
        """Whether the round was begun here and its noise can be replayed."""
        return self._keys is None or self._keys.read(round_digest) is not None

    def store(self, round_digest: str, recipients: Recipients, bodies: Sequence[bytes]) -> tuple[bytes, ...]:
        """See RoundStore."""
        stored = self.stored(round_digest, recipients)
        if stored is None:
            stored = tuple(bodies)
            self._answers.mkdir(mode=0o700, parents=True, exist_ok=True)
            locked = lock_away(self.key(round_digest), round_digest, (_written(recipients), *stored))
            replace_file(self._answers / round_digest, locked, mode=0o600)
        return stored

    def erase(self, round_digest: str) -> None:
        """See RoundStore."""
        self._answers.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._answers / round_digest, b"", mode=0o600)
        if self._keys is not None:
            self._keys.erase(round_digest)

    def __repr__(self) -> str:
        return f"RoundFolder({self._answers.name!r})"


def _written(recipients: Recipients) -> bytes:
    return json.dumps([list(recipient) for recipient in recipients]).encode()


def _checked(secret: bytes | None) -> bytes | None:
    if secret is not None and len(secret) != KEY_BYTES:
        raise InvalidSetting(f"a noise secret is {KEY_BYTES} bytes long, found {len(secret)}")
    return secret
