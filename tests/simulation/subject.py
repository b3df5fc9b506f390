"""The coordinator that is looked at: the service's parts without its server and threads, one turn at a time.

The parts are wired as in `api.coordinator.service`. A job comes with its questions prepared and its rounds as
wished, so that a few queries already make several rounds; everything else about it is `submission`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from api.coordinator import submission
from api.coordinator.coordinator_thread import CoordinatorThread
from api.coordinator.mailroom import Mailroom
from api.coordinator.stores import Stores
from api.schema import JobView
from feature_store.results.questions import QUESTIONS
from labeler.driver.mail import Mailbox
from labeler.driver.mail_memory import MemoryMailbox
from labeler.errors import NotReady, Unavailable
from labeler.ledger.database import open_database
from labeler.ledger.jobs import JobRecord
from labeler.rounds.effects import Patience
from labeler.system.faults import fault_point
from labeler.system.files import replace_file
from labeler.system.keys import PartyKeys
from tests.simulation.contract import VirtualClock

T = TypeVar("T")
PATIENCE = Patience(patience_s=1.0, ask_again_s=2.0)
_MOST_UNASKED = 1_000_000


class AtOnce:
    """Of one thread that does one thing after the other; `run` what waits so."""

    async def aside(self, work: Callable[[], T]) -> T:
        """See Waiting."""
        return work()

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """See Waiting."""
        outcomes: list[T] = []
        ask(outcomes.append)
        return outcomes[0]

    @staticmethod
    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what comes of something that never waits, without an event loop."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        coroutine.close()
        raise RuntimeError("nobody is there to wait for what this waits for")


class StepwiseCoordinator:
    """See the module.

    Args:
        home: with keys.json and a journal; it may lie in memory.
    """

    def __init__(self, home: Path, mailbox: Mailbox, clock: VirtualClock) -> None:
        self._home = home
        self._clock = clock.utc
        database = open_database(home / "journal.db", anchor=home / "journal.head", allow_unsynced=True)
        self._database = database
        try:
            self._stores = Stores.over(database, clock=clock.utc)
            self._stores.ledger.verify()
            keys = PartyKeys.load(home / "keys.json")
            self._thread = CoordinatorThread(
                home=home, stores=self._stores, keys=keys, mailbox=mailbox, patience=PATIENCE, steady=clock.steady_s
            )
            self._driver = self._thread.driver
            self._mailroom = Mailroom(
                keys=keys,
                stores=self._stores,
                mailbox=mailbox,
                post_office=self._thread.post_office,
                deliver=self._deliver,
                relays=self._driver.relays,
                steady=clock.steady_s,
                waiting=AtOnce(),
            )
        except BaseException:
            database.close()
            raise

    def tick(self) -> None:
        """One turn, and those that follow from what it made durable."""
        while self._driver.turn():
            pass

    def take(self, data: bytes) -> bytes:
        """Messages of a party, in a turn of their own, with whatever else is due; the mail it asks for with them."""
        taken = AtOnce.run(self._mailroom.take(data))
        return b"" if taken.asking is None else AtOnce.run(self._mailroom.mail_after(taken.asking)) or b""

    def poll(self, data: bytes) -> bytes:
        """Return what waits for a party."""
        return AtOnce.run(self._mailroom.poll(data))

    def submit(
        self,
        name: str,
        task_digest: str,
        questions: NDArray[np.int16],
        *,
        sizes: Sequence[int],
        deadline_s: float,
        by: str,
    ) -> str:
        """Take a job whose questions are prepared.

        Args:
            name: of the job, also its id.
            questions: int16, shape (queries, dimension).
            sizes: queries of each round.
            deadline_s: after which it expires.

        Returns:
            Its id.

        Raises:
            LabelerError: it is not taken.
        """
        now, count = self._clock(), sum(sizes)
        job = JobRecord(
            job_id=name,
            task_digest=task_digest,
            name=name,
            state="queued",
            images=len(questions),
            num_queries=count,
            first_query=0,
            strategy="all",
            count=None,
            seed=0,
            source="features",
            created_at=now,
            updated_at=now,
            expires_at=now + timedelta(seconds=deadline_s),
            created_by=by,
        )
        folder = self._home / "jobs" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(folder / QUESTIONS, save({"features": questions}))
        order = submission._Order(job, self._stores.tasks.get(task_digest), tuple(sizes), None)
        if not isinstance(submission._accept(order, self._stores, most=_MOST_UNASKED), JobView):
            raise Unavailable("the job is known already")
        fault_point("coordinator.reserved")
        self._driver.wake(name)
        return name

    def cancel(self, job_id: str) -> None:
        """Cancel a job; nothing happens where it has ended."""
        with contextlib.suppress(NotReady):
            submission.cancel(job_id, stores=self._stores)
        self._driver.wake(job_id)

    def enrol_anew(self, party_id: str, verify_key: str, seal_key: str) -> None:
        """Give a party other keys."""
        self._stores.parties.rotate(party_id, verify_key, seal_key)

    def close(self) -> None:
        """Let go of everything; what is not on disk is lost."""
        self._driver.close()
        self._database.close()

    def _deliver(self, delivery: Any) -> None:
        self._driver.deliver(delivery)
        self.tick()


def complete(home: Path) -> None:
    """Make in a home what the coordinator makes at its first start."""
    clock = VirtualClock()
    StepwiseCoordinator(home, MemoryMailbox(now=clock.unix_s), clock).close()
