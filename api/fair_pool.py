"""Threads that work for many owners in turns: of each owner one piece at a time (labeler.rounds.queues).

Whoever asks for much waits behind its own, and the next owner has its turn after one piece of each other at most.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar
from uuid import uuid4

from labeler.rounds.queues import FairQueue

Answer = TypeVar("Answer")


class FairPool:
    """See the module. Its threads begin with the first piece.

    Args:
        name: of its threads.
    """

    def __init__(self, name: str, *, threads: int) -> None:
        self._name, self._most_threads = name, threads
        self._threads: list[threading.Thread] = []
        self._bell = threading.Condition()
        self._queue = FairQueue(places=1, held_s=math.inf)
        self._pieces: dict[str, tuple[Callable[[], Any], Future[Any]]] = {}
        self._stopping = False

    def submit(self, owner: str, piece: Callable[[], Answer], *, key: str = "", first: bool = False) -> Future[Answer]:
        """Have a piece done when it is its owner's turn.

        Args:
            key: its name; one that waits or is at work under this name is not done twice.
            first: before all others.

        Returns:
            What becomes of it; cancelled where the pool stops first. A piece that is cancelled before its turn is not
            begun.
        """
        key = key or uuid4().hex
        with self._bell:
            if self._stopping:
                refused: Future[Answer] = Future()
                refused.cancel()
                return refused
            _, future = self._pieces.setdefault(key, (piece, Future()))
            self._queue = self._queue.put(owner, key, first=first)
            if len(self._threads) < self._most_threads:
                self._threads.append(threading.Thread(target=self._work, name=self._name, daemon=True))
                self._threads[-1].start()
            self._bell.notify()
        return future

    def stop(self, *, wait_s: float = 5.0) -> None:
        """Begin no other piece, and wait a while for those at work."""
        with self._bell:
            self._stopping = True
            for _, future in self._pieces.values():
                future.cancel()
            self._bell.notify_all()
        for thread in self._threads:
            thread.join(wait_s)

    def _work(self) -> None:
        while (key := self._next()) is not None:
            piece, future = self._pieces[key]
            answer, error = None, None
            if is_wanted := future.set_running_or_notify_cancel():
                try:
                    answer = piece()
                except BaseException as raised:
                    error = raised
            with self._bell:
                del self._pieces[key]
                self._queue = self._queue.leave(key)
                self._bell.notify()
            if is_wanted and error is not None:
                future.set_exception(error)
            elif is_wanted:
                future.set_result(answer)

    def _next(self) -> str | None:
        """The piece whose turn it is; None at the end."""
        with self._bell:
            while not self._stopping:
                self._queue, taken = self._queue.take(0.0, most=1)
                if taken:
                    return taken[0]
                self._bell.wait()
        return None
