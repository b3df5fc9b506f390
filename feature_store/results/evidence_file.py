"""An evidence document as a file: its canonical bytes with an Ed25519 signature of the party that made it.

    {"evidence": {...}, "signature": "...", "verify_key": "...", "version": "labeler-signed-evidence/1"}

The file has one spelling, so equal documents are equal files. The key in it says with what the signature was checked,
not whose it is: a reader gives the party's key, or compares its fingerprint with the one it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from labeler.errors import Forged, ProtocolViolation, TooLarge
from labeler.evidence.document import FORMAT, Evidence, canonical_bytes, parse_evidence
from labeler.system.keys import PartyKeys, verify_statement
from labeler.untrusted import canonical_json, check_public_key, hex_bytes, read_object

VERSION = "labeler-signed-evidence/1"
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class SignedEvidence:
    """A document and who says to have made it.

    Attributes:
        signature: 128 hexadecimal digits.
        verify_key: of the party, by its own word.
    """

    evidence: Evidence
    signature: str
    verify_key: str

    def to_bytes(self) -> bytes:
        """The file."""
        content = {
            "version": VERSION,
            "evidence": self.evidence.model_dump(mode="json"),
            "signature": self.signature,
            "verify_key": self.verify_key,
        }
        return canonical_json(content) + b"\n"

    def check(self, verify_key: str | None = None) -> None:
        """Check the signature, with the key of the file or with one that the reader knows.

        Raises:
            Forged: it does not hold, or the file was signed with another key.
        """
        if verify_key is not None and verify_key != self.verify_key:
            raise Forged(
                "the evidence was signed with another key than the one given; it is another party's, or the party has "
                "changed its keys since"
            )
        verify_statement(_statement(self.evidence), self.signature, self.verify_key)


def sign_evidence(evidence: Evidence, keys: PartyKeys) -> SignedEvidence:
    """Sign a document with the keys of the party whose journal it was read from."""
    return SignedEvidence(evidence, keys.sign_statement(_statement(evidence)), keys.public.verify_key)


def read_signed(data: bytes) -> SignedEvidence:
    """A file, read strictly; nothing is checked yet.

    Raises:
        TooLarge: longer than MAX_BYTES.
        ProtocolViolation: it is no evidence of this version, or not in its one spelling.
    """
    if len(data) > MAX_BYTES:
        raise TooLarge(f"a file of evidence has at most {MAX_BYTES} bytes, found {len(data)}")
    content = read_object(data, "a file of evidence", fields=("evidence", "signature", "verify_key"), version=VERSION)
    signed = SignedEvidence(
        parse_evidence(canonical_json(content["evidence"])),
        hex_bytes(content["signature"], 64, "the signature of evidence").hex(),
        check_public_key(content["verify_key"], "the key of evidence"),
    )
    if signed.to_bytes() != data:
        raise ProtocolViolation(
            "the file is not in the one spelling that evidence has (keys sorted, no blanks, one line break at its "
            "end); it was written again by something else. Take it from where it was made"
        )
    return signed


def _statement(evidence: Evidence) -> bytes:
    return FORMAT.encode() + b"\n" + canonical_bytes(evidence)
