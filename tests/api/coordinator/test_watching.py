"""Who watches a job is told of changes that follow each other at once together, and of its end without delay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from api.coordinator import service
from api.coordinator.service import Coordinator
from labeler.driver.mail_memory import MemoryMailbox


def test_changes_are_told_together_and_the_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEAST_BETWEEN_S", 25.0)
    monkeypatch.setattr(service, "WATCH_S", 20.0)
    mailbox = MemoryMailbox()

    async def watched() -> tuple[bool, str]:
        of = cast(Coordinator, SimpleNamespace(_mailbox=mailbox))
        change = asyncio.create_task(Coordinator._next_change(of, "job-1", ""))
        for _ in range(3):
            mailbox.send_all([], tell=["job-1"])
            for _ in range(50):
                await asyncio.sleep(0)
        waits = not change.done()
        mailbox.send_all([], tell=["job-1"], ended=["job-1"])
        return waits, await asyncio.wait_for(change, 30.0)

    async def all_of_it() -> list[tuple[str, bool]]:
        return await mailbox.watch("job-1", "", 0.0)

    waits, position = asyncio.run(watched())
    events = asyncio.run(all_of_it())
    assert waits
    assert position == events[-1][0]
    assert [has_ended for _, has_ended in events] == [False, False, False, True]


def test_a_job_that_goes_on_is_told_of_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEAST_BETWEEN_S", 0.01)
    mailbox = MemoryMailbox()
    mailbox.send_all([], tell=["job-1"])
    of = cast(Coordinator, SimpleNamespace(_mailbox=mailbox))
    assert asyncio.run(Coordinator._next_change(of, "job-1", ""))
