"""The coordinator that is looked at: the service's own, without its server and threads (`workers.serve`)."""

from __future__ import annotations

from pathlib import Path

from labeler.driver.mail import Mailbox
from labeler.driver.mail_memory import MemoryMailbox
from tests.simulation.contract import Coordinator, Subject, VirtualClock
from workers.serve import stepwise_coordinator


def service() -> Subject:
    """The coordinator of this version."""
    return Subject(_boot, _complete)


def _boot(home: Path, mailbox: Mailbox, clock: VirtualClock) -> Coordinator:
    return stepwise_coordinator(home, mailbox, clock=clock.utc, steady=clock.steady_s)


def _complete(home: Path) -> None:
    clock = VirtualClock()
    stepwise_coordinator(home, MemoryMailbox(now=clock.unix_s), clock=clock.utc, steady=clock.steady_s).close()
