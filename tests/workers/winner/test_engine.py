"""A job states its bounds, and its digest changes with everything the talliers must agree on.

A tallier's certificate is written once, for its owner's eyes, and accepted only where it is pinned.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labeler.errors import InvalidSetting
from tests.workers.winner.conftest import HIGHEST, LOWEST, Identities
from workers.winner.certificates import fingerprint, issue_certificate, pinned_context, read_certificate
from workers.winner.engine import Address, WinnerJob

MakeJobs = Callable[..., list[WinnerJob]]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"num_classes": 1}, "2 to"),
        ({"num_classes": 40_000}, "2 to"),
        ({"num_queries": 0}, "at least 1 query"),
        ({"num_queries": 2**31}, "smaller batches"),
        ({"lowest": 1}, "contain zero"),
        ({"highest": 2**21}, "smaller grid_scale"),
    ],
)
def test_settings_outside_their_bounds_are_refused(make_jobs: MakeJobs, changed: dict[str, Any], match: str) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match=match):
        replace(job, **changed)


def test_two_talliers_are_refused_with_the_reason(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match="one alone could open everything"):
        replace(job, addresses=job.addresses[:2], certificates=job.certificates[:2])


def test_two_talliers_with_one_certificate_are_refused(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match="same certificate"):
        replace(job, certificates=(job.certificates[0], job.certificates[1], job.certificates[1]))
    with pytest.raises(InvalidSetting, match="PEM"):
        replace(job, certificates=(*job.certificates[:2], "no certificate"))


@pytest.mark.parametrize(
    ("host", "port"), [("0.0.0.0", 1), ("::", 1), ("", 1), ("127.0.0.1", 0), ("127.0.0.1", 70_000)]
)
def test_an_address_is_one_host_and_one_port(host: str, port: int) -> None:
    with pytest.raises(InvalidSetting, match=r"address|port"):
        Address(host, port)


def test_the_digest_binds_all_that_must_be_equal_and_nothing_else(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(2, 3)
    assert len({job.digest for job in jobs}) == 1
    assert replace(jobs[0], time_limit_s=1.0).digest == jobs[0].digest
    changes: list[dict[str, Any]] = [
        {"job_id": "other"},
        {"agreement": "1" * 64},
        {"num_queries": 3},
        {"num_classes": 4},
        {"lowest": LOWEST - 1},
        {"highest": HIGHEST + 1},
        {"threshold": 0},
        {"certificates": (*jobs[0].certificates[1:], jobs[0].certificates[0])},
    ]
    digests = {replace(jobs[0], **changed).digest for changed in changes}
    assert len(digests) == len(changes)
    assert jobs[0].digest not in digests


def test_the_field_is_the_smallest_that_holds_a_masked_difference(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    assert job.comparison_bits == 16
    assert job.field.bits == 16 + 41 + 2
    assert replace(job, threshold=10**9).clipped_threshold == HIGHEST + 1
    assert replace(job, threshold=-(10**9)).clipped_threshold == LOWEST
    assert job.clipped_threshold is None


NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> bytes | None:
    """A byte from the server to the client over TLS; None where either end refused the other."""
    near, far = socket.socketpair()

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
