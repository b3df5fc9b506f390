"""The keys of one party: it signs what it sends, and opens what was sealed to it. No other module uses PyNaCl.

    sign   Ed25519 over the header, which binds kind, parties, task, round, number and digest of the body.
    seal   X25519 and XSalsa20-Poly1305 to the recipient's public key, from a fresh key each time.

A sealed box alone does not prove who made it. A relay could cut another party's sealed share out of its message and
send it on under the relay's own name and signature, and the receiver would count it as the relay's. So sealed content
begins with SHA-256 of sender, recipient, kind, task and round. A box whose beginning does not match the header around
it is refused. The relay cannot change that beginning without opening the box.

A signature says who wrote a message, not that it is new: the receiver's journal keeps the highest sequence number of
each sender.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn, SupportsIndex

from nacl.bindings import crypto_core_ed25519_is_valid_point
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox
from nacl.signing import SigningKey, VerifyKey

from labeler.errors import BadData, Forged, InvalidSetting, LabelerError, PrivacyRefusal
from labeler.messages import (
    VERSION,
    Header,
    Kind,
    Message,
)
from labeler.system.files import replace_file
from labeler.untrusted import canonical_json, read_object

_FILE_VERSION = "labeler-keys/1"
_MAX_FILE_BYTES = 4096
_CONTEXT_BYTES = 32
_STATEMENT = b"labeler-statement/1\n"
_HEX_KEY = re.compile(r"[0-9a-f]{64}")
_KEYS_REMEMBERED = 4096
"""Cache of valid public keys: a party's key is checked once, and not at each of its messages."""


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a party; an administrator enrols exactly these.

    Attributes:
        verify_key: Ed25519, 64 hexadecimal digits; checks its signatures.
        seal_key: X25519, 64 hexadecimal digits; encrypts so that only the party can read.

    Raises:
        InvalidSetting: invalid keys, or weak ones (zero or of low order) with which anybody could sign or read.
    """

    verify_key: str
    seal_key: str

    def __post_init__(self) -> None:
        _verifier(self.verify_key)
        _sealer(self.seal_key)

    @property
    def fingerprint(self) -> str:
        """Return the first 16 hexadecimal digits of SHA-256 over both keys, for people to compare by telephone."""
        return hashlib.sha256(f"labeler-keys/1\n{self.verify_key}\n{self.seal_key}".encode()).hexdigest()[:16]


class PartyKeys:
    """The secret keys of one party. They do not print, and cannot be copied or pickled."""

    __slots__ = ("_public", "_sealing", "_signing")

    def __init__(self, signing: bytes, sealing: bytes) -> None:
        self._signing = SigningKey(signing)
        self._sealing = PrivateKey(sealing)
        self._public = PublicKeys(bytes(self._signing.verify_key).hex(), bytes(self._sealing.public_key).hex())

    @classmethod
    def generate(cls) -> PartyKeys:
        """Return new keys from the operating system's randomness."""
        return cls(os.urandom(32), os.urandom(32))

    @classmethod
    def load(cls, path: Path) -> PartyKeys:
        """Read keys that `save` wrote.

        Raises:
            InvalidSetting: there is no such file, or users other than its owner may read or change it.
            BadData: it holds no keys, or keys that do not match.
        """
        try:
            with path.open("rb") as file:
                # Ask about the open file, so that it cannot be replaced between the check and the read.
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise InvalidSetting(
                        f"key file {path.name!r} has permissions {mode:04o}; others than its owner must not read it "
                        "(0600). Make new keys if anybody may have, else: chmod 600"
                    )
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidSetting(
                f"key file {path.name!r} cannot be read ({error.strerror}); `labeler keys` makes one"
            ) from None
        try:
            if len(data) > _MAX_FILE_BYTES:
                raise BadData(f"more than {_MAX_FILE_BYTES} bytes")
            names = ("signing_key", "sealing_key", "verify_key", "seal_key")
            content = read_object(data, "a key file", fields=names, version=_FILE_VERSION)
            keys = cls(*(_key_bytes(content[name], name) for name in names[:2]))
            if keys.public != PublicKeys(content["verify_key"], content["seal_key"]):
                raise BadData("secret and public keys do not belong together")
        except LabelerError as error:
            raise BadData(
                f"key file {path.name!r} is damaged: {error}; restore it, or make new keys and enrol them"
            ) from None
        return keys

    def save(self, path: Path) -> None:
        """Write the keys so that only their owner may read them (0600), whole or not at all."""
        content = {
            "version": _FILE_VERSION,
            "signing_key": bytes(self._signing).hex(),
            "sealing_key": bytes(self._sealing).hex(),
            "verify_key": self._public.verify_key,
            "seal_key": self._public.seal_key,
        }
        replace_file(path, json.dumps(content, indent=2).encode() + b"\n", mode=0o600)

    @property
    def public(self) -> PublicKeys:
        """Return the public halves."""
        return self._public

    def message(
        self,
        kind: Kind,
        *,
        sender: str,
        recipient: str,
        task_digest: str = "",
        round_digest: str = "",
        sequence: int,
        body: bytes,
        seal_to: str | None = None,
        is_sealed: bool = False,
    ) -> Message:
        """Seal a body if asked to, and sign the message.

        Args:
            kind: what the body holds.
            sender: this party's id.
            recipient: party id.
            task_digest: of the task it belongs to, or empty.
            round_digest: of the round it belongs to, or empty.
            sequence: one more than the last this party has sent, stored durably before sending.
            body: in clear, or as `seal_body` returned it.
            seal_to: the recipient's enrolled seal key; None sends the body as it is.
            is_sealed: True if the body was sealed before, for exactly this sender, recipient, kind, task and round.

        Raises:
            ProtocolViolation: a field is outside its bounds, or a secret share is not sealed.
            TooLarge: larger than a message may be.
            InvalidSetting: the seal key is invalid or weak.
        """
        if seal_to is not None:
            body = seal_body(
                kind,
                sender=sender,
                recipient=recipient,
                task_digest=task_digest,
                round_digest=round_digest,
                body=body,
                seal_to=seal_to,
            )
        header = Header(
            kind=kind,
            sender=sender,
            recipient=recipient,
            task_digest=task_digest,
            round_digest=round_digest,
            sequence=sequence,
            body_digest=hashlib.sha256(body).hexdigest(),
            is_sealed=is_sealed or seal_to is not None,
        )
        return Message(header, self._signing.sign(_signed_bytes(header)).signature, body)

    def open(self, message: Message) -> bytes:
        """Return the body in clear. Check the signature first: `verify`.

        Raises:
            Forged: the body is not the one the header names. Or it was sealed to another party, by another sender, or
                for another kind, task or round than the header says.
        """
        _check_body(message)
        header = message.header
        if not header.is_sealed:
            return message.body
        try:
            opened = SealedBox(self._sealing).decrypt(message.body)
        except (CryptoError, ValueError, TypeError):
            raise Forged(
                f"the body of a message from {header.sender!r} cannot be opened: it was sealed to another key or "
                "changed; if this party's keys were rotated, the sender must use the new ones"
            ) from None
        expected = _context(header.sender, header.recipient, header.kind, header.task_digest, header.round_digest)
        if opened[:_CONTEXT_BYTES] != expected:
            raise Forged(
                f"the body of a message from {header.sender!r} was sealed by another party or for another round; "
                "whoever sent it has taken it from somebody else's message"
            )
        return opened[_CONTEXT_BYTES:]

    def sign_statement(self, statement: bytes) -> str:
        """Return a signature over a statement that is not a message, in hexadecimal; `verify_statement` checks it.

        Args:
            statement: begins with the name of its kind, so that no statement passes for another kind.
        """
        return self._signing.sign(_STATEMENT + statement).signature.hex()

    def __repr__(self) -> str:
        return f"PartyKeys(fingerprint={self._public.fingerprint!r}, <redacted>)"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PrivacyRefusal("the secret keys of a party cannot be copied or pickled; load them from their file")


def seal_body(
    kind: Kind, *, sender: str, recipient: str, task_digest: str, round_digest: str, body: bytes, seal_to: str
) -> bytes:
    """Seal a body for one message, or for several that differ only in their number.

    A fresh key each time, so two boxes around one body have only their length in common.

    Args:
        kind, sender, recipient, task_digest, round_digest: as in the header; a box in another message is refused.
        body: in clear.
        seal_to: the recipient's enrolled seal key.

    Raises:
        InvalidSetting: the seal key is invalid or weak.
    """
    return bytes(_sealer(seal_to).encrypt(_context(sender, recipient, kind, task_digest, round_digest) + body))


def verify(message: Message, verify_key: str) -> None:
    """Check that the holder of a key signed exactly this message, body included.

    Args:
        message: as received.
        verify_key: of the party the header names as sender, from the enrolment and never from the message.

    Raises:
        Forged: it did not.
        InvalidSetting: the key is invalid or weak.
    """
    verify_header(message.header, message.signature, verify_key)
    _check_body(message)


def verify_header(header: Header, signature: bytes, verify_key: str) -> None:
    """Check that the holder of a key signed this header, before its body has arrived.

    Args:
        header: as received; its digest binds the body.
        signature: 64 bytes.
        verify_key: see `verify`.

    Raises:
        Forged: it did not.
        InvalidSetting: the key is invalid or weak.
    """
    try:
        _verifier(verify_key).verify(_signed_bytes(header), signature)
    except (BadSignatureError, CryptoError):
        raise Forged(
            f"the signature of a message in the name of {header.sender!r} does not hold; it was changed on "
            "its way, or its sender's keys are not the ones enrolled"
        ) from None


def verify_statement(statement: bytes, signature: str, verify_key: str) -> None:
    """Check that the holder of a key signed a statement (`PartyKeys.sign_statement`).

    Args:
        statement: as the checking side knows it, never as the signer states it.
        signature: in hexadecimal, as received.
        verify_key: of the party that should have signed, pinned or enrolled.

    Raises:
        Forged: it did not.
        InvalidSetting: the key is invalid or weak.
    """
    verifier = _verifier(verify_key)
    try:
        verifier.verify(_STATEMENT + statement, bytes.fromhex(signature))
    except (BadSignatureError, CryptoError, ValueError):
        raise Forged(
            "the signature of a statement does not hold: it is about something else, or its sender's keys are not the "
            "ones known here"
        ) from None


def _check_body(message: Message) -> None:
    if not message.is_whole:
        raise Forged(f"the body of a message in the name of {message.header.sender!r} is not the one that was signed")


def _signed_bytes(header: Header) -> bytes:
    return VERSION.encode() + b"\n" + header.to_bytes()


def _context(sender: str, recipient: str, kind: str, task_digest: str, round_digest: str) -> bytes:
    parts = canonical_json([sender, recipient, kind, task_digest, round_digest])
    return hashlib.sha256(b"labeler-seal/1\n" + parts).digest()


def _key_bytes(key: object, what: str) -> bytes:
    if not isinstance(key, str) or not _HEX_KEY.fullmatch(key):
        raise InvalidSetting(f"{what} must be 64 lower-case hexadecimal digits; `labeler keys` prints it")
    return bytes.fromhex(key)


@lru_cache(maxsize=_KEYS_REMEMBERED)
def _verifier(key: str) -> VerifyKey:
    data = _key_bytes(key, "verify_key")
    if not crypto_core_ed25519_is_valid_point(data):
        raise InvalidSetting("verify_key is no Ed25519 key, or a weak one; `labeler keys` makes good ones")
    return VerifyKey(data)


@lru_cache(maxsize=_KEYS_REMEMBERED)
def _sealer(key: str) -> SealedBox[PublicKey]:
    box = SealedBox(PublicKey(_key_bytes(key, "seal_key")))
    try:
        # A key of low order makes the shared secret zero for everybody; the library notices this only when it encrypts.
        box.encrypt(b"")
    except CryptoError:
        raise InvalidSetting(
            "seal_key is a weak X25519 key, which anybody can open; `labeler keys` makes good ones"
        ) from None
    return box
