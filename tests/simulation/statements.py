"""The journals of a process share the statements that were compiled for the first of them.

A compiled statement belongs to a dialect, and each engine makes one of its own. A service opens one journal; a schedule
opens dozens, and would compile everything for each of them, which takes longer than what they execute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from sqlalchemy import Engine, create_engine


@contextmanager
def shared_statements() -> Iterator[None]:
    """Let SQLite journals that are opened meanwhile share what they compile."""
    first = _first()

    def alike(url: str, **options: Any) -> Engine:
        engine = create_engine(url, **options)
        engine.dialect = first.dialect
        engine._compiled_cache = first._compiled_cache
        return engine

    with patch("labeler.ledger.database.create_engine", alike):
        yield


@cache
def _first() -> Engine:
    """Connected once, to nothing: a dialect learns on its first connection which SQLite it speaks to."""
    engine = create_engine("sqlite://")
    engine.connect().close()
    engine.dispose()
    return engine
