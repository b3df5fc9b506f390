"""A tallier's certificate: written once, for its owner's eyes, and accepted only where it is pinned."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest

from labeler.errors import InvalidSetting
from tests.workers.winner.conftest import Identities
from workers.winner.certificates import fingerprint, issue_certificate, pinned_context, read_certificate

NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> bytes | None:
    """A byte from the server to the client over TLS; None where either end refused the other."""
    near, far = socket.socketpair()
    near.settimeout(10.0)
    far.settimeout(10.0)

    def serve() -> None:
        try:
            with server.wrap_socket(far, server_side=True) as end:
                end.sendall(b"x")
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(near) as end:
            # In TLS 1.3 a client learns only with the first byte whether its own certificate was accepted.
            return end.recv(1) or None
    except (ssl.SSLError, OSError):
        return None
    finally:
        near.close()
        thread.join()


def test_a_certificate_is_read_back_without_its_key(identities: Identities) -> None:
    for certificate, path in zip(identities.certificates, identities.paths, strict=True):
        assert read_certificate(path) == certificate
        assert "PRIVATE" not in certificate
        assert path.stat().st_mode & 0o777 == 0o600
    assert len({fingerprint(certificate) for certificate in identities.certificates}) == 3


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    issue_certificate("tallier", path=tmp_path / "key.pem", now=NOW)
    with pytest.raises(InvalidSetting, match="exists"):
        issue_certificate("tallier", path=tmp_path / "key.pem", now=NOW)


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="name"):
        issue_certificate("", path=tmp_path / "key.pem", now=NOW)
    with pytest.raises(InvalidSetting, match="PEM"):
        fingerprint("-----BEGIN NONSENSE-----")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(InvalidSetting, match="no certificate"):
        read_certificate(tmp_path / "empty.pem")
    with pytest.raises(InvalidSetting, match="cannot be read"):
        pinned_context(tmp_path / "empty.pem", trusted=[], is_server=True)


def test_pinned_ends_talk_and_others_do_not(identities: Identities) -> None:
    first, second, third = identities.certificates
    server = pinned_context(identities.paths[1], trusted=[first], is_server=True)
    assert handshake(pinned_context(identities.paths[0], trusted=[second], is_server=False), server) == b"x"
    assert handshake(pinned_context(identities.paths[0], trusted=[third], is_server=False), server) is None
    assert handshake(pinned_context(identities.paths[2], trusted=[second], is_server=False), server) is None
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname = False
    plain.verify_mode = ssl.CERT_NONE
    assert handshake(plain, server) is None
