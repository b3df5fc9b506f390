"""Connections that stay open between the transactions of a journal: beginning one should cost its BEGIN.

A pool checks every connection out and in, and resets it, for each transaction; to a party that begins hundreds of small
ones a second that is most of what a transaction costs. So a connection that has ended its transaction in order is kept
as it is and used again; one whose transaction ended with an error goes back to the pool, which looks after it.

To SQLite the BEGIN and the COMMIT are said here, to the driver itself: what the library does around each of them costs
twice as much as SQLite takes for both. The library believes that one transaction is open for as long as the connection
is kept; it begins none of its own, and undoes what is open when the connection goes back to the pool.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool


class Connections:
    """The connections of one engine; shared by all threads of a process.

    Args:
        begin: how a transaction of SQLite begins; they stay open between transactions, as nobody cuts them. Absent
            where a server may have closed one meanwhile: there the pool looks at each before it is used.
    """

    def __init__(self, engine: Engine, *, begin: str | None) -> None:
        self._engine = engine
        self._begin = begin
        self._idle: deque[Connection] = deque()
        pool = engine.pool
        # Whoever finds all of them at work waits here: an idle one never comes back to the pool, where nobody may wait.
        self._free = threading.Semaphore(pool.size()) if begin and isinstance(pool, QueuePool) else None
        self._wait_s = pool.timeout() if isinstance(pool, QueuePool) else 0.0

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One transaction: kept when the block ends, undone if it raises.

        Raises:
            TimeoutError: of the pool: every connection is at work for longer than it lets anybody wait.
        """
        if self._begin is None:
            with self._engine.connect() as connection, connection.begin():
                yield connection
            return
        with self._place():
            connection = self._taken()
            raw: Any = connection.connection.driver_connection
            try:
                self._say(raw, self._begin)
                yield connection
                self._say(raw, "COMMIT")
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    @contextmanager
    def outside(self) -> Iterator[Connection]:
        """A connection outside of any transaction."""
        with self._place(), self._taken() as connection:
            yield connection

    def close(self) -> None:
        """Let go of those that are idle."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._free is None:
            yield
            return
        if not self._free.acquire(timeout=self._wait_s):
            raise PoolTimeout("every connection is at work")
        try:
            yield
        finally:
            self._free.release()

    def _taken(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            connection = self._engine.connect()
            if self._begin is not None:
                connection.begin()
            return connection

    def _say(self, raw: Any, statement: str) -> None:
        try:
            raw.execute(statement)
        except sqlite3.Error as error:
            raise DBAPIError.instance(statement, None, error, sqlite3.Error, dialect=self._engine.dialect) from error
