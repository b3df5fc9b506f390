"""A redis-server of each kind, for tests of mailboxes, and a mailbox as they use it: one letter at a time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import pytest

from labeler.driver.mail import Letter, Mailbox
from workers.up.redis_server import RedisServer

T = TypeVar("T")


def send(mailbox: Mailbox, recipient: str, data: bytes, *, message_id: str) -> None:
    """Put one message into a party's mail."""
    mailbox.send_all([Letter(recipient, data, message_id)])


def pending(mailbox: Mailbox, recipient: str) -> int:
    """Return how many messages lie in a party's mail."""
    return mailbox.all_pending([recipient])[recipient]


@dataclass(frozen=True)
class Box:
    """One box: a mailbox, another view of the same (`open`), and a way to lose all it holds."""

    mailbox: Mailbox
    open: Callable[[], Mailbox]
    empty: Callable[[], object]

    def waiting(self, task: Callable[[Mailbox], Awaitable[T]]) -> T:
        """Run a coroutine with a mailbox for its event loop."""

        async def run() -> T:
            mailbox = self.open()
            try:
                return await task(mailbox)
            finally:
                await mailbox.aclose()

        return asyncio.run(run())

    def received(self, recipient: str, after: str = "", wait_s: float = 0.0) -> list[tuple[str, bytes]]:
        return self.waiting(lambda mailbox: mailbox.receive(recipient, after, wait_s))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """Servers by kind, for the tests of one file; each is started when it is first asked for."""
    running: dict[str, RedisServer] = {}
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:

        def server(kind: str) -> RedisServer:
            if kind not in running:
                if kind == "the wheel's valkey":
                    patch.setenv("PATH", "")
                elif not (shutil.which("redis-server") or shutil.which("valkey-server")):
                    pytest.skip("there is no redis-server on PATH")
                running[kind] = held.enter_context(RedisServer(tmp_path_factory.mktemp("redis")))
                patch.undo()
            return running[kind]

        yield server
