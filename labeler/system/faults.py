"""Fault points: places in the round at which a test can kill a process, to show that nothing is lost or paid twice.

    echo tallier.stored > /somewhere/fault && LABELER_FAULTS=/somewhere/fault labeler tallier ...

LABELER_FAULTS names a file whose first line is the name of a fault point. The process that reaches that point removes
the file and kills itself with SIGKILL, as a power cut would. If the second line is a process number, it kills that
process instead and continues. Only the process that removes the file kills, so one file is one death. Without the
variable a fault point does nothing. The file must appear whole (write it elsewhere, then rename it).

A simulation runs many parties in one process, and ends one of them instead of killing the process. It listens
(`listening`) to the fault points and to every moment between two durable effects (`between`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labeler.errors import InvalidSetting

FAULTS_VARIABLE = "LABELER_FAULTS"

FAULT_POINTS: dict[str, str] = {
    "coordinator.reserved": "The worst-case charge is reserved in the ledger, before anybody is asked.",
    "coordinator.proposed": "The job's proposals are in the agents' mail, before anybody is asked.",
    "coordinator.asked": "The agents' asks and the talliers' rounds are in the mail.",
    "coordinator.agreed": "The contributors are agreed on and stored; nothing is charged yet.",
    "coordinator.posted": "The charge is posted durably; no tallier has been asked for its sum.",
    "coordinator.sum-asked": "The talliers' requests for their sums are in the mail.",
    "coordinator.opened": "The sums are put together in memory; the release is not stored.",
    "coordinator.released": "The release is stored durably, before anybody hears of it.",
    "embedder.claimed": "The embedder holds the turn of a requester; no feature is computed.",
    "embedder.embedded": "The features are written; the work is not marked as done.",
    "agent.willing": "The agent has set the job's price aside durably; it has not said yes.",
    "agent.asked": "The agent has checked an ask; nothing is charged.",
    "agent.charged": "The agent has charged its own ledger durably; nothing is computed.",
    "agent.computed": "The agent has computed its shares; nothing is stored of them, and nothing has left it.",
    "agent.stored": "The agent has stored its sealed shares durably; nothing has left it.",
    "agent.sent": "The agent's shares were taken by the coordinator; the agent has not noted it.",
    "tallier.received": "A share has reached the tallier; it is not stored.",
    "tallier.stored": "The share is stored durably; it is not confirmed.",
    "tallier.reported": "The tallier has said which shares it holds.",
    "tallier.fixed": "The set of agents to sum is stored durably and never changed, before anything is summed.",
    "tallier.summed": "The sum is stored durably; it has not been sent.",
    "tallier.computed": "The talliers have opened the winners; this one has not said so, and stores nothing of it.",
}
"""Every fault point, and the event just before it."""


_listener: Callable[[str], None] | None = None


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Listen to every fault point and every moment between two effects, in this process, until the block ends.

    Args:
        listener: called with the name of each; an exception it raises ends the code that reached the point.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def between(name: str) -> None:
    """Mark a moment between two effects that outlive this process: nothing happens, unless a simulation listens.

    Args:
        name: the next or the last effect, in a word or two.
    """
    if _listener is not None:
        _listener(name)


def fault_point(name: str) -> None:
    """Kill the process here if a test asks for it; see the module.

    Args:
        name: one of `FAULT_POINTS`.

    Raises:
        InvalidSetting: no such fault point, or the file names no process that may be killed.
    """
    if name not in FAULT_POINTS:
        raise InvalidSetting(f"there is no fault point {name!r}; the known ones are {', '.join(FAULT_POINTS)}")
    between(name)
    # Read each time, about a microsecond: the variable may be set after this module was loaded.
    file_name = os.environ.get(FAULTS_VARIABLE)
    if not file_name:
        return
    path = Path(file_name)
    try:
        lines = path.read_text().split()
        if lines[:1] != [name]:
            return
        victim = _victim(lines[1:])
        path.unlink()
    except FileNotFoundError:
        return
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)


def _victim(lines: list[str]) -> int:
    if not lines:
        return os.getpid()
    # 0 and negative numbers are groups of processes; 1 belongs to the system.
    if len(lines) > 1 or not lines[0].isdigit() or int(lines[0]) < 2:
        raise InvalidSetting(f"the second line of the file in {FAULTS_VARIABLE} must be the number of one process")
    return int(lines[0])
