"""Connections to SQLite files that outlive those who opened them: for simulations, in which parties die by the hundred.

A new connection reads the whole schema, and prepares every statement anew: most of what opening a journal takes. A
party that dies in a simulation takes nothing with it but what it had in memory: its connection undoes what was not
committed, as SQLite does for a process that was killed, and is handed to whoever opens the file next. Its settings were
checked when it was made. No process of the service keeps any.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_shelf: Shelf | None = None


class Shelf:
    """Connections that nobody uses, by the address of their file."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Kept]] = {}

    def take(self, uri: str) -> sqlite3.Connection | None:
        """One that is idle, as good as new; None where there is none."""
        idle = self._idle.get(uri)
        return idle.pop() if idle else None

    def put(self, kept: _Kept) -> None:
        """Keep one whose owner has let go of it."""
        self._idle.setdefault(kept.uri, []).append(kept)

    def clear(self) -> None:
        """Close all of them: writers first, so that none of them is the last, which would empty the log."""
        every = sorted((kept for idle in self._idle.values() for kept in idle), key=lambda kept: "mode=ro" in kept.uri)
        self._idle.clear()
        for kept in every:
            kept.shelf = None
            kept.close()


class _Kept(sqlite3.Connection):
    """A connection that goes back to its shelf where it would be closed."""

    shelf: Shelf | None = None
    uri: str = ""

    def close(self) -> None:
        if self.shelf is None:
            super().close()
            return
        self.rollback()
        self.shelf.put(self)


@contextmanager
def keeping_connections() -> Iterator[None]:
    """Keep what is closed until the block ends."""
    global _shelf
    before, _shelf = _shelf, Shelf()
    try:
        yield
    finally:
        _shelf.clear()
        _shelf = before


def kept_connection(uri: str) -> sqlite3.Connection | None:
    """A connection whose owner has let go of it, where somebody keeps them."""
    return None if _shelf is None else _shelf.take(uri)


def connect(uri: str, **settings: Any) -> sqlite3.Connection:
    """`sqlite3.connect`; what it gives is kept where somebody keeps connections."""
    if _shelf is None:
        plain: sqlite3.Connection = sqlite3.connect(uri, uri=True, **settings)
        return plain
    made: _Kept = sqlite3.connect(uri, uri=True, factory=_Kept, **settings)
    made.shelf, made.uri = _shelf, uri
    return made
