"""An invitation: one signed file with all that a site needs to join, and a phrase by which two people compare it.

    the coordinator, for one name and one role        the site
    invitation, signed, with a one-use token  ----->  its people type the phrase they hear; makes its keys
    checks token and signature                <-----  enrolment: its public keys, signed by them
    the token is used, permanently by these keys      a poll, signed and sealed both ways, shows that all of it fits.

Anybody may read everything in the file except the token: the first to have it can enrol keys under that one name and
role. The site is then refused and says so, and the administrator revokes the name; nothing of a site leaves before its
own keys are enrolled. The danger is an exchange of the file on its way, because the site pins the coordinator's and the
talliers' keys from it. So a person there types the phrase that the operator reads out by telephone. The site does not
show the file's phrase first, since people agree to what they see without listening.

**The work of an attacker who exchanges the file.** The phrase is 60 bits of scrypt (16 MiB a guess) over the signed
content. The exchanged file must have the same phrase, so the attacker has to find a second preimage: about 2^60
evaluations of scrypt, not of a plain hash. The content holds a token of 256 random bits that nobody knows before the
file is made, so nothing can be computed beforehand. A pair of files with one phrase (2^30 evaluations) does not help:
one of the two is not the attacker's. The signature alone would not help either: the attacker can sign with other keys.
That is why the coordinator's key in the file is believed because of the phrase and not the other way round.

An invitation gives a coordinator no new power. It decided who is enrolled as an agent before. The agents that the
tallier pins itself (`[agents]`), which no invitation names, bound what a tallier sums. The site's own policy
(`max_noise_contributors`) says how many agents' noise a site counts on.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from labeler.errors import BadData, ProtocolViolation
from labeler.task import Printable, describe_validation
from labeler.untrusted import ENROLLED_NAME, canonical_json, read_object

VERSION = "labeler-invitation/1"
MAX_INVITATION_BYTES = 512 * 1024
MAX_CERTIFICATES = 64 * 1024
"""Most characters of the certificates of an authority, PEM."""

PHRASE_BITS = 60
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's alphabet: no I, L, O and U, which are misread or misheard."""
_MISREAD = str.maketrans("OIL", "011")
_GROUP = 4
_SALT = b"labeler-invitation-phrase/1"

Role = Literal["agent", "tallier"]
HexKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PartyName = Annotated[str, Field(pattern=ENROLLED_NAME)]
TOKEN_PATTERN = r"^inv_[A-Za-z0-9_-]{43}$"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class RosterTallier(_Part):
    """One tallier of the federation.

    Attributes:
        number: of the tallier, from 0.
    """

    party_id: PartyName
    number: Annotated[int, Field(ge=0, le=2)]
    verify_key: HexKey
    seal_key: HexKey


class Invitation(_Part):
    """The content of an invitation; see the module.

    Attributes:
        url: of the coordinator.
        ca_certificates: PEM certificates that its certificate is checked against; empty: the system's.
        verify_key, seal_key: of the coordinator.
        role: role for which the site is invited.
        tallier: number of the tallier it would be; None for an agent.
        is_rotation: the party is enrolled and gets new keys.
        talliers: all enrolled talliers, by number; if an agent is invited, all that are needed.
        talliers_needed: number of talliers that share a task's ballots.
        roster_digest: of coordinator and talliers; invitations of one moment share it.
        backbones: fingerprints of those that images are embedded with.
        issued_at, expires_at: unix time in whole seconds.
        token: the one-use token; redacted in every repr.

    Raises:
        pydantic.ValidationError: a field is outside its bounds, or the parts do not match.
    """

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$", max_length=2000)]
    ca_certificates: Annotated[str, Field(max_length=MAX_CERTIFICATES)]
    verify_key: HexKey
    seal_key: HexKey
    role: Role
    party_id: PartyName
    tallier: Annotated[int, Field(ge=0, le=2)] | None
    is_rotation: bool
    talliers: Annotated[tuple[RosterTallier, ...], Field(max_length=3, strict=False)]
    talliers_needed: Literal[2, 3]
    roster_digest: HexKey
    backbones: Annotated[tuple[Annotated[Printable, Field(max_length=200)], ...], Field(max_length=1000, strict=False)]
    issued_at: Annotated[int, Field(ge=0, le=2**40)]
    expires_at: Annotated[int, Field(ge=0, le=2**40)]
    token: Annotated[str, Field(pattern=TOKEN_PATTERN, repr=False)]

    @model_validator(mode="after")
    def _check(self) -> Invitation:
        if (self.role == "tallier") != (self.tallier is not None):
            raise ValueError("a tallier has a number, and an agent has none")
        numbers = [one.number for one in self.talliers]
        if numbers != sorted(set(numbers)) or any(number >= self.talliers_needed for number in numbers):
            raise ValueError("talliers must be given by number, each once")
        if self.role == "agent" and len(self.talliers) != self.talliers_needed:
            raise ValueError("an agent is invited once all talliers are enrolled, and all of them must be named")
        keys = [key for one in self.talliers for key in (one.verify_key, one.seal_key)]
        if len(set(keys)) != len(keys):
            raise ValueError("two talliers have one key, so one party would hold two shares")
        if self.roster_digest != roster_digest(self.verify_key, self.seal_key, self.talliers):
            raise ValueError("roster_digest is not that of the coordinator and the talliers named")
        return self

    @property
    def statement(self) -> bytes:
        """Return the bytes that the coordinator signs and the phrase is made from: every field, in one spelling."""
        return VERSION.encode() + b"\n" + canonical_json(self.model_dump(mode="json"))

    @property
    def phrase(self) -> str:
        """Return the phrase that two people compare: 60 bits in three groups of four; see the module."""
        return phrase_of(self.statement)

    def document(self, signature: str) -> dict[str, Any]:
        """Return the file's content; `read_document` reads it back."""
        return {"version": VERSION, **self.model_dump(mode="json"), "signature": signature}


def read_document(data: bytes) -> tuple[Invitation, str]:
    """Return an invitation and its signature, which the caller has to check.

    Raises:
        BadData: it is not an invitation, or its parts do not match.
    """
    if len(data) > MAX_INVITATION_BYTES:
        raise BadData(f"an invitation has at most {MAX_INVITATION_BYTES} bytes; is this the file that was sent?")
    try:
        content = read_object(data, "an invitation", fields=(*Invitation.model_fields, "signature"), version=VERSION)
        signature = content.pop("signature")
        if not isinstance(signature, str) or not re.fullmatch("[0-9a-f]{128}", signature):
            raise ProtocolViolation("the signature of an invitation is 128 hexadecimal digits")
        return Invitation.model_validate(content), signature
    except ProtocolViolation as error:
        raise BadData(f"this is no invitation: {error}. Ask for the file again") from None
    except ValidationError as error:
        raise BadData(describe_validation(error, "the invitation") + ". Ask for the file again") from None


def roster_digest(verify_key: str, seal_key: str, talliers: tuple[RosterTallier, ...]) -> str:
    """Return SHA-256 over the keys of the coordinator and of every tallier, in hexadecimal."""
    members = [[one.number, one.party_id, one.verify_key, one.seal_key] for one in talliers]
    return hashlib.sha256(b"labeler-roster/1\n" + canonical_json([verify_key, seal_key, members])).hexdigest()


def phrase_of(statement: bytes) -> str:
    """Return the phrase of a statement: 12 letters and digits in three groups; see the module on forging it."""
    stretched = hashlib.scrypt(hashlib.sha256(statement).digest(), salt=_SALT, n=2**14, r=8, p=1, dklen=8)
    number = int.from_bytes(stretched) >> (64 - PHRASE_BITS)
    digits = "".join(_ALPHABET[(number >> shift) & 31] for shift in range(PHRASE_BITS - 5, -1, -5))
    return "-".join(digits[start : start + _GROUP] for start in range(0, len(digits), _GROUP))


def same_phrase(one: str, other: str) -> bool:
    """Return whether two people mean one phrase; small letters, spaces and the usual misreadings (O for 0, I and L for
    1) are accepted."""
    return hmac.compare_digest(_heard(one), _heard(other))


def token_digest(token: str) -> str:
    """Return the stored form of a token: SHA-256, in hexadecimal. It has 256 random bits, so that suffices."""
    return hashlib.sha256(b"labeler-invitation-token/1\n" + token.encode("utf-8", "surrogatepass")).hexdigest()


def enrolment_statement(
    *,
    coordinator_key: str,
    token: str,
    role: str,
    party_id: str,
    tallier: int | None,
    verify_key: str,
    seal_key: str,
) -> bytes:
    """Return the bytes that a site signs with its new key to be enrolled: so nobody enrols a key of another holder.

    Args:
        coordinator_key: verify key of the coordinator it is meant for.
        token: of the invitation; it enters as its digest.
        role, party_id, tallier: as invited.
        verify_key, seal_key: the new public keys.
    """
    content = [coordinator_key, token_digest(token), role, party_id, tallier, verify_key, seal_key]
    return b"labeler-enrolment/1\n" + canonical_json(content)


def _heard(phrase: str) -> bytes:
    letters = "".join(letter for letter in phrase.upper() if letter.isalnum())
    return letters.translate(_MISREAD).encode("utf-8", "surrogatepass")
