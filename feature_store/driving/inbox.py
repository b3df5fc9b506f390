"""What others say to the coordinator's driver between two turns; any thread may say it.

Deliveries and errands have somebody who waits for what becomes of them, so they are told also when the driver ends.
A wake has nobody: a job that was changed is found by looking, too, only later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from feature_store.driving.errands import Errand
from feature_store.driving.intake import Delivery
from labeler.errors import LabelerError, Unavailable
from labeler.rounds.effects import Event


class Inbox:
    """See the module."""

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self.deliveries: list[Delivery] = []
        self.errands: list[Errand] = []
        self.told: list[tuple[str, Event]] = []
        self.woken: dict[str, None] = {}
        self._rung = False
        self._closed = False

    def deliver(self, delivery: Delivery) -> None:
        """Have messages taken at the next turn; `delivery.done` is told what became of them."""
        with self._bell:
            if not self._closed:
                self.deliveries.append(delivery)
                self._bell.notify()
                return
        delivery.done(_stopping())

    def hand_in(self, errand: Errand) -> None:
        """Have something written in the next turn's transaction; `errand.done` is told what became of it."""
        with self._bell:
            if not self._closed:
                self.errands.append(errand)
                self._bell.notify()
                return
        errand.settle(_stopping())

    def tell(self, job_id: str, event: Event) -> None:
        """Have an event of a job taken at the next turn, from a party of this process."""
        with self._bell:
            self.told.append((job_id, event))
            self._bell.notify()

    def wake(self, job_id: str) -> None:
        """Something about a job was changed in the journal, or around it: read it again at the next turn."""
        with self._bell:
            self.woken[job_id] = None
            self._bell.notify()

    def wake_again(self, job_ids: Iterable[str]) -> None:
        """Jobs that a turn could not look at; they come before those that were woken since."""
        with self._bell:
            self.woken = dict.fromkeys(job_ids) | self.woken

    def ring(self) -> None:
        """End a `wait` at once."""
        with self._bell:
            self._rung = True
            self._bell.notify()

    def take(self) -> tuple[list[Delivery], list[Errand], list[tuple[str, Event]], dict[str, None]]:
        """Everything that was said since the last turn."""
        with self._bell:
            deliveries, self.deliveries = self.deliveries, []
            errands, self.errands = self.errands, []
            told, self.told = self.told, []
            woken, self.woken = self.woken, {}
        return deliveries, errands, told, woken

    def close(self) -> None:
        """Take nothing more; whoever waits is told to send again."""
        with self._bell:
            self._closed = True
        deliveries, errands, _, _ = self.take()
        for delivery in deliveries:
            delivery.done(_stopping())
        for errand in errands:
            errand.settle(_stopping())

    def wait(self, pause_s: Callable[[], float]) -> None:
        """Wait until there is something to do, or `ring`.

        Args:
            pause_s: for how long at most; asked once nothing is there.
        """
        with self._bell:
            waiting = (self.deliveries, self.errands, self.told, self.woken)
            if self._rung or self._closed or any(waiting):
                self._rung = False
                return
            longest_s = pause_s()
            if longest_s > 0:
                self._bell.wait(longest_s)
            self._rung = False

    def gather(self, is_worth: Callable[[list[Delivery]], bool], *, gap_s: float, longest_s: float) -> None:
        """Wait for more messages of a step of which some are here.

        Args:
            is_worth: whether what is here waits for others; asked again whenever something comes.
            gap_s: for how long nothing may come.
            longest_s: for how long in all.
        """
        end_s = time.monotonic() + longest_s
        with self._bell:
            while not (self._rung or self._closed or self.errands or self.told or self.woken):
                left_s = min(gap_s, end_s - time.monotonic())
                known = len(self.deliveries)
                if left_s <= 0 or not self.deliveries or not is_worth(self.deliveries):
                    return
                if not self._bell.wait_for(lambda known=known: self._is_changed(known), left_s):  # type: ignore[misc]
                    return

    def _is_changed(self, deliveries: int) -> bool:
        return len(self.deliveries) != deliveries or bool(
            self._rung or self._closed or self.errands or self.told or self.woken
        )


def _stopping() -> LabelerError:
    return Unavailable("the coordinator is stopping; send again in a moment")
