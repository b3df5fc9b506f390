"""Threads that work for many owners in turns, one piece of each owner at a time (labeler.rounds.queues).

An owner with many pieces waits only behind its own; the next owner waits for at most one piece of each other.
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
    """See the module. Threads start with the first piece.

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
        """Queue a piece for its owner's turn.

        Args:
            key: its name; a piece that waits or runs under this name is not started twice.
            first: before all others.

        Returns:
            Its future; cancelled if the pool stops first. A piece cancelled before its turn does not run.
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
        """Start no other piece, and wait a while for the running ones."""
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
        """Wait for the piece whose turn it is; None once the pool stops."""
        with self._bell:
            while not self._stopping:
                self._queue, taken = self._queue.take(0.0, most=1)
                if taken:
                    return taken[0]
                self._bell.wait()
        return None
