"""A tallier's self-signed certificate, and connections that accept pinned certificates only.

No authority vouches for anybody: the talliers of a task exchange their full certificates once, like any public key. A
connection belongs to a tallier because the other end proved that it holds the private key of that tallier's certificate
(TLS 1.3, both ways). Names, validity and issuers play no part.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from labeler.errors import InvalidSetting
from labeler.system.files import replace_file

_YEARS_VALID = 20


def issue_certificate(name: str, *, path: Path, now: datetime.datetime) -> str:
    """Make a key and its certificate, and write both into one file.

    Args:
        name: of the tallier, for people; at most 64 characters.
        path: where the private key and the certificate are written, readable by the owner only; must not exist.
        now: with a time zone.

    Returns:
        The certificate, PEM: public, for the two other talliers.

    Raises:
        InvalidSetting: there is a file at that path, or the name is empty or too long.
    """
    if not 1 <= len(name) <= 64:
        raise InvalidSetting(f"the name in a certificate has 1 to 64 characters, found {len(name)}")
    if path.exists():
        raise InvalidSetting(f"{path.name!r} exists; a tallier's key is never replaced silently")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS_VALID))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(path, secret + public, mode=0o600)
    return public.decode("ascii")


def read_certificate(path: Path) -> str:
    """The certificate in a file that `issue_certificate` wrote, PEM, without the key.

    Raises:
        InvalidSetting: the file cannot be read or holds no certificate.
    """
    try:
        return (
            x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(serialization.Encoding.PEM).decode("ascii")
        )
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{path.name!r} cannot be read, or holds no certificate of a tallier") from error


def fingerprint(certificate: str) -> str:
    """SHA-256 of a certificate, in hexadecimal.

    Raises:
        InvalidSetting: it is not one certificate in PEM.
    """
    try:
        der = ssl.PEM_cert_to_DER_cert(certificate)
    except ValueError as error:
        raise InvalidSetting("a tallier's certificate must be one certificate in PEM") from error
    return hashlib.sha256(der).hexdigest()


def pinned_context(identity_path: Path, *, trusted: Sequence[str], is_server: bool) -> ssl.SSLContext:
    """Return a TLS 1.3 context in which both ends show a certificate and only the trusted ones are accepted.

    Args:
        identity_path: own key and certificate, as `issue_certificate` wrote them.
        trusted: certificates that the other end may show, PEM.
        is_server: True for the end that listens.

    Raises:
        InvalidSetting: certificate and key cannot be read or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate itself identifies the peer, so a host name adds nothing.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # A pinned certificate is trusted as it is, without an authority above it.
    context.verify_flags = ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    try:
        context.load_cert_chain(identity_path)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSetting("this tallier's certificate and key cannot be read, or do not belong together") from error
    context.load_verify_locations(cadata="\n".join(trusted))
    return context
