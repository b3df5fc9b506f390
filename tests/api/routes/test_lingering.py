"""Who is refused while still sending hears why."""

from __future__ import annotations

import socket

import pytest

from tests.api.routes.conftest import Service

PART = b" " * 2**20
PARTS = 20
"""As many MiB as no job in JSON may have, which its length says before any of it is read."""


def test_a_refusal_waits_for_a_sender_who_has_not_finished(service: Service) -> None:
    host, port = service.url.split("//")[1].split(":")
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.tokens['requester']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {PARTS * len(PART)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + PART)
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        for _ in range(PARTS - 1):
            connection.sendall(PART)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
