"""Prices that take seconds of a processor: one after the other in a thread of their own, in turns, and few may wait.

A certified price of winners, or of sampled steps, takes a second where nobody has asked for its setting before; the
noise for such a price some ten. Anybody with a token may ask for any. So they wait in a line apart: other prices, and
whoever only looks, wait for none of them, and who asks for many waits behind its own. What was computed is remembered
by the accounting, so that whoever waits for the same setting, or asks again after a refusal, has it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waited
from threading import Lock
from typing import Final, TypeVar

from api.limits import Slots
from labeler.errors import Unavailable
from labeler.methods import METHODS, Method, ReleaseKind
from labeler.task import Task

EACH: Final = 12
TOTAL: Final = 15
"""Prices in the line, of one token and of all; fewer than threads that take submissions, which wait here too."""

WAIT_S: Final = 30.0
RETRY_AFTER_S: Final = 10
_MOST_KNOWN: Final = 4096
_NAMES: Final = {"name", "classes", "nonce", "backbone_fingerprint"}

Answer = TypeVar("Answer")


class PricesWait(Unavailable):
    """A price was not computed in time; `retry_after_s` says when to ask again."""

    retry_after_s = RETRY_AFTER_S


class LongPrices:
    """See the module. Used by any thread; whoever waits keeps its own."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._slots = Slots("long prices", each=EACH, total=TOTAL)
        self._line = ThreadPoolExecutor(1, thread_name_prefix="prices")
        self._turns: dict[str, Lock] = {}
        self._known: set[tuple[object, ...]] = set()

    def is_long(self, task: Task, queries: int, sizes: tuple[int, ...] = ()) -> bool:
        """Whether a price may take seconds: of such a kind, and of a setting that was not priced before.

        Args:
            sizes: of the rounds, where each of them is priced.
        """
        return takes_long(task.method, task.release) and not self.was_priced(task, queries, sizes)

    def was_priced(self, task: Task, queries: int, sizes: tuple[int, ...] = ()) -> bool:
        """Whether it was priced before."""
        return _numbers(task, queries, sizes) in self._known

    def note(self, task: Task, queries: int, sizes: tuple[int, ...] = ()) -> None:
        """It was priced: from now on that takes a millisecond."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(_numbers(task, queries, sizes))

    def run(self, name: str, piece: Callable[[], Answer]) -> Answer:
        """Compute when it is its turn, and wait for it.

        Args:
            name: of whoever asks.

        Raises:
            TooManyRequests: too many wait, of this name or in all.
            PricesWait: it took too long. What is being computed goes on, and is remembered.
        """
        until_s = time.monotonic() + self._wait_s
        with self._slots.hold(name):
            turn = self._turns.setdefault(name, Lock())
            if not turn.acquire(timeout=self._wait_s):
                raise self._not_in_time()
            try:
                future = self._line.submit(piece)
                return future.result(max(0.0, until_s - time.monotonic()))
            except Waited:
                future.cancel()
                raise self._not_in_time() from None
            finally:
                turn.release()

    def _not_in_time(self) -> PricesWait:
        return PricesWait(
            "this price takes long to compute, others came before it, and it was not done within "
            f"{self._wait_s:.0f} s; what was computed is kept. Ask again, or for fewer queries, or give sigma_votes "
            "instead of epsilon"
        )

    def stop(self) -> None:
        """Begin no other; what is being computed ends by itself."""
        self._line.shutdown(wait=False, cancel_futures=True)


def takes_long(method: Method, release: ReleaseKind) -> bool:
    """Whether the price of such a task is found by a certified computation, not in closed form."""
    return release == "winner" or METHODS[method].is_sampled


def _numbers(task: Task, queries: int, sizes: tuple[int, ...]) -> tuple[object, ...]:
    """All that decides a price: everything but names.

    A field that is left out would let a requester have a price of seconds worked out by the loop that serves
    everybody: with another grid, or another number of dropouts.
    """
    deciding = task.model_dump_json(exclude=_NAMES)
    return (deciding, task.num_classes, queries, tuple(sorted(set(sizes))))
