"""The conductor: the thread in which the coordinator's driver takes its turns, and where it gets the questions of jobs.

What a job needs next says the machine (labeler.rounds.coordinator); many jobs' steps are carried out together by the
driver (labeler.driver.coordinator). Here they meet the rest of the service: its settings, its home, its prices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from api.coordinator.labels import release_to_bytes
from api.coordinator.preparation import Preparation
from api.coordinator.stores import Stores
from feature_store.results.questions import FAILURE, QUESTIONS, read_failure, read_questions
from labeler.driver.coordinator import CoordinatorDriver
from labeler.driver.intake import Delivery, Errand
from labeler.driver.mail import Mailbox
from labeler.driver.sending import PostOffice, Sender
from labeler.ledger.jobs import JobRecord
from labeler.rounds.effects import Patience
from labeler.system.keys import PartyKeys
from labeler.task import Task

log = logging.getLogger("labeler.conductor")

_AFTER_DEFECT_S = 1.0
_MOST_ASKED = 10_000
_KEPT_BYTES, _KEPT_JOBS = 4 * 2**20, 64
"""Of questions in memory, at most; of more, those read first are read again."""


class PreparedQuestions:
    """Questions as `Preparation` leaves them beside a job; asked for again where they are missing.

    Args:
        ask_again_s: pause between two requests for one thing.
        steady: seconds that never run backwards.
    """

    def __init__(
        self, home: Path, preparation: Preparation, *, ask_again_s: float, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home
        self._preparation = preparation
        self._ask_again_s = ask_again_s
        self._steady = steady
        self._asked: dict[str, tuple[str, float]] = {}
        self._known: OrderedDict[str, NDArray[np.int16]] = OrderedDict()
        self._known_bytes = 0

    def look(self, job: JobRecord, task: Task) -> NDArray[np.int16] | None:
        """The questions of a job; None while there are none.

        Raises:
            LabelerError: there are none to be had; TryAgain where there may be later.
        """
        path = self._home / "jobs" / job.job_id / QUESTIONS
        self._check_failure(job)
        if not path.exists():
            self._ask(job, task)
        if not path.exists():
            return None
        self._asked.pop(job.job_id, None)
        return self.read(job.job_id)

    def has_features(self, job: JobRecord, task: Task) -> bool:
        """Whether what a job was sent is decoded; asks for it where it is not.

        Raises:
            LabelerError: it cannot be; TryAgain where it may be later.
        """
        self._check_failure(job)
        is_there = self._preparation.step(job) != "features"
        if not is_there:
            self._ask(job, task)
        return is_there

    def _check_failure(self, job: JobRecord) -> None:
        failure = self._home / "jobs" / job.job_id / FAILURE
        if failure.exists():
            self._asked.pop(job.job_id, None)
            raise read_failure(failure)

    def _ask(self, job: JobRecord, task: Task) -> None:
        step, now_s = self._preparation.step(job), self._steady()
        known = self._asked.get(job.job_id)
        if known is None or known[0] != step or now_s - known[1] >= self._ask_again_s:
            if len(self._asked) >= _MOST_ASKED:
                self._asked.pop(next(iter(self._asked)))
            # Once it was asked: a request that failed (a full disk) is made again at the job's next look.
            self._preparation.ask(job, task)
            self._asked[job.job_id] = (step, now_s)

    def read(self, job_id: str) -> NDArray[np.int16]:
        """The questions of a job that has them.

        Raises:
            BadData: they cannot be read.
        """
        known = self._known.get(job_id)
        if known is None:
            known = read_questions(self._home / "jobs" / job_id / QUESTIONS)
            self._remember(job_id, known)
        return known

    def _remember(self, job_id: str, features: NDArray[np.int16]) -> None:
        """For the moment between their making and their asking: they never change."""
        if features.nbytes > _KEPT_BYTES:
            return
        features.flags.writeable = False
        self._known[job_id] = features
        self._known_bytes += features.nbytes
        while self._known_bytes > _KEPT_BYTES or len(self._known) > _KEPT_JOBS:
            _, dropped = self._known.popitem(last=False)
            self._known_bytes -= dropped.nbytes


class Conductor:
    """See the module. One per service; `run` is its thread.

    Args:
        steady: seconds that never run backwards.
        requester_of: the name of whoever holds a token, by its id; sites are told it with a proposal.
    """

    def __init__(
        self,
        *,
        home: Path,
        stores: Stores,
        keys: PartyKeys,
        mailbox: Mailbox,
        patience: Patience,
        preparation: Preparation | None = None,
        steady: Callable[[], float] = time.monotonic,
        requester_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.preparation = preparation or Preparation(
            home, is_wanted=lambda job_id: stores.jobs.get(job_id).state == "queued", on_end=self.wake
        )
        self.post_office = PostOffice(keys=keys, sequences=stores.sequences)
        questions = PreparedQuestions(home, self.preparation, ask_again_s=patience.ask_again_s, steady=steady)
        self.driver = CoordinatorDriver(
            database=stores.database,
            ledger=stores.ledger,
            tasks=stores.tasks,
            jobs=stores.jobs,
            aggregates=stores.aggregates,
            parties=stores.parties,
            sequences=stores.sequences,
            sender=Sender(self.post_office, questions),
            mailbox=mailbox,
            questions=questions,
            settlement=stores.settlement,
            encode_release=release_to_bytes,
            patience=patience,
            clock=stores.clock,
            steady=steady,
            requester_of=requester_of,
        )

    def wake(self, job_id: str) -> None:
        """Look at a job soon: something about it was changed beside the driver."""
        self.driver.wake(job_id)

    def deliver(self, delivery: Delivery) -> None:
        """Take messages at the next turn."""
        self.driver.deliver(delivery)

    def hand_in(self, errand: Errand) -> None:
        """Write something in the next turn's transaction."""
        self.driver.hand_in(errand)

    def ring(self) -> None:
        """Let `run` see at once that it is to stop."""
        self.driver.ring()

    def run(self, stop: threading.Event) -> None:
        """Take turns until told to stop."""
        while not stop.is_set():
            self.tick()
            if not stop.is_set():
                self.driver.wait()
        self.driver.close()

    def tick(self) -> None:
        """One turn, and those that follow from what it made durable."""
        try:
            while self.driver.turn():
                pass
        except Exception:
            # What met a defect is asked for again; the thread must not end.
            log.exception("a turn met a defect")
            time.sleep(_AFTER_DEFECT_S)
