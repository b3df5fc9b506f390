"""Whether a file is the whole copy of a PostgreSQL journal that `pg_dump` wrote, as of a head of its ledger.

An upgrade wants a backup that was made before it. A journal in PostgreSQL is copied by PostgreSQL's own tool, whose
version and whose access rights are the operator's; here is looked whether that was done. pg_dump writes its last line
when all is written, and a dump that holds the hash of the ledger's last entry is not older than that entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from feature_store.journal.chain import Head
from labeler.errors import InvalidSetting

ENDING = "-- PostgreSQL database dump complete"
_PIECE = 1 << 20


def check_dump(path: Path, head: Head) -> None:
    """Refuse a file that is no complete dump of the journal as it is now.

    Args:
        path: what `pg_dump --file PATH URL` wrote, in its plain format.
        head: the end of the ledger.

    Raises:
        InvalidSetting: it is not there, is cut off, or ends before this head.
    """
    try:
        has_ending, has_head = _look(path, (ENDING.encode(), head.hash.encode()))
    except OSError as error:
        raise InvalidSetting(f"the dump {path.name} cannot be read: {error.strerror}. {_DO}") from None
    if not has_ending:
        raise InvalidSetting(f"{path.name} is no complete dump in pg_dump's plain format. {_DO}")
    if head.seq and not has_head:
        raise InvalidSetting(
            f"{path.name} does not hold entry {head.seq}, the last one of the ledger: it is older than the journal, or "
            f"another's. {_DO}"
        )


_DO = "Stop the coordinator, run `pg_dump --file FILE URL`, and name that file with --dump"


def _look(path: Path, wanted: tuple[bytes, ...]) -> tuple[bool, ...]:
    found = [False] * len(wanted)
    keep = max(map(len, wanted)) - 1
    before = b""
    for piece in _pieces(path):
        window = before + piece
        found = [had or word in window for had, word in zip(found, wanted, strict=True)]
        before = window[-keep:]
    return tuple(found)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
