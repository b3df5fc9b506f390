"""An invitation as a site receives it: read, checked, shown in words, and its certificates kept.

That the file is whole and signed says nothing yet, because whoever exchanged it would have signed it too: a person
compares its phrase with the administrator by telephone (labeler.invitation).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from ssl import PEM_cert_to_DER_cert
from typing import Any

from feature_store.durable import replace_file
from feature_store.keys import PublicKeys, verify_statement
from labeler.errors import BadData, Forged, InvalidSetting
from labeler.invitation import MAX_INVITATION_BYTES, Invitation, Role, read_document
from workers.party.home import CA_FILE


@dataclass(frozen=True)
class Term:
    """One line of what is agreed to: what it is about, and what it says."""

    about: str
    says: str


def read_invitation(path: Path, *, role: Role, now: datetime) -> Invitation:
    """Read an invitation and check all that can be checked without a telephone.

    Raises:
        BadData: it is none, was changed after it was signed, or is for another role.
        InvalidSetting: it has expired.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INVITATION_BYTES + 1)
    except OSError as error:
        raise BadData(f"{path.name} cannot be read: {error.strerror}") from None
    invitation, signature = read_document(data)
    try:
        verify_statement(invitation.statement, signature, invitation.verify_key)
    except (Forged, InvalidSetting):
        raise BadData(
            f"{path.name} was changed after the coordinator signed it; ask for the file again, by another way"
        ) from None
    if invitation.role != role:
        raise BadData(
            f"{path.name} invites {invitation.party_id!r} as {invitation.role}: labeler {invitation.role} join {path}"
        )
    if invitation.expires_at <= now.timestamp():
        until = datetime.fromtimestamp(invitation.expires_at, UTC)
        raise InvalidSetting(f"{path.name} expired at {until:%Y-%m-%d %H:%M} UTC; ask for a new invitation")
    return invitation


def write_invitation(path: Path, document: dict[str, Any]) -> None:
    """Write the file that is sent to a site; its token is a secret until it is used, so only its owner may read it."""
    replace_file(path, json.dumps(document, indent=1).encode() + b"\n", mode=0o600)


def terms_of(invitation: Invitation) -> list[Term]:
    """What a site agrees to with an invitation: with whom it would be, under which name and with which keys."""
    as_what = "an agent" if invitation.tallier is None else f"tallier {invitation.tallier}"
    until = datetime.fromtimestamp(invitation.expires_at, UTC)
    terms = [
        Term("You would be", f"{invitation.party_id}, {as_what}" + (", with new keys" * invitation.is_rotation)),
        Term("Coordinator", invitation.url),
        Term("its keys", PublicKeys(invitation.verify_key, invitation.seal_key).fingerprint),
        Term("its certificate", f"checked against {_authority(invitation.ca_certificates)}"),
    ]
    for one in invitation.talliers:
        keys = PublicKeys(one.verify_key, one.seal_key).fingerprint
        terms.append(Term(f"Tallier {one.number}", f"{one.party_id}, keys {keys}"))
    return [
        *terms,
        Term("Roster", invitation.roster_digest[:16]),
        Term("Valid until", f"{until:%Y-%m-%d %H:%M} UTC"),
        Term("Phrase", invitation.phrase),
    ]


def keep_certificates(home: Path, invitation: Invitation) -> str | None:
    """Keep the authority of an invitation in a home; what its settings say as `ca_file`, None for the system's."""
    if not invitation.ca_certificates:
        return None
    replace_file(home / CA_FILE, invitation.ca_certificates.encode(), mode=0o600)
    return CA_FILE


def _authority(certificates: str) -> str:
    if not certificates:
        return "the authorities of this machine"
    begin = "-----BEGIN CERTIFICATE-----"
    try:
        prints = [
            sha256(PEM_cert_to_DER_cert((begin + one).strip())).hexdigest()[:16]
            for one in certificates.split(begin)[1:]
        ]
    except ValueError:
        raise BadData("the certificates in the invitation cannot be read; ask for the file again") from None
    return f"an authority of its own, {', '.join(prints)}"
