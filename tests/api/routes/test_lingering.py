"""Who is refused while still sending hears why."""

from __future__ import annotations

import socket

import pytest

from tests.api.routes.conftest import Service

HALF = b"x" * 2**20


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/tasks"])
def test_a_refusal_waits_for_a_sender_who_has_not_finished(service: Service, path: str) -> None:
    host, port = service.url.split("//")[1].split(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.tokens['viewer']}\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {2 * len(HALF)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + HALF)
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        connection.sendall(HALF)
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")
