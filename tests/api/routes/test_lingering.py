"""Who is refused while still sending hears why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.routes.conftest import Service


def slowly_sent(size: int) -> Iterator[bytes]:
    for _ in range(size // 65_536):
        yield b"x" * 65_536


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/tasks", "/v1/messages"])
def test_a_refusal_reaches_a_sender_who_has_not_finished(service: Service, path: str) -> None:
    with service.http("viewer") as http:
        for _ in range(3):
            answer = http.post(path, content=slowly_sent(20 * 2**20), headers={"Content-Type": "text/plain"})
            assert answer.status_code in (403, 413, 415, 429)
            assert answer.json()["detail"]
