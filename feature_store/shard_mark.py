"""A mark in a private shard that says for which journal it answers: two homes on one shard would have two budgets.

An agent's journal counts what its records have told. A second home on the same shard counts from nothing, so each
record would get a second budget. So the first home that answers from a shard writes its journal into the shard's
folder, and any other is refused. A copy of the folder takes the mark along; a home that is moved keeps its journal.

It catches mistakes, not intent: whoever embeds the same images again, or deletes the mark, has a shard of which nothing
is known. `labeler run` has no journal that lasts, and neither reads nor writes the mark.

    answers-for.json     {"version", "agent", "journal": hash of the first entry of its ledger, which is salted}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from feature_store.durable import exclusive, replace_file
from labeler.errors import BadData

MARK_NAME: Final = "answers-for.json"

_VERSION: Final = "labeler-shard-mark/1"


def claim(folder: Path, *, agent_id: str, journal: str) -> None:
    """Mark a private shard as answering for one journal, or refuse it; see the module.

    Once it is marked it is only read, so its folder may be read-only from then on.

    Args:
        folder: of the shard.
        agent_id: whose journal it is; for people.
        journal: hash of the first entry of the agent's ledger.

    Raises:
        BadData: it answers for another journal, or its mark cannot be read or written.
        OutputInUse: another process marks it at this moment, or deletes records of it.
    """
    if _is_marked(folder, journal):
        return
    mark = {"version": _VERSION, "agent": agent_id, "journal": journal}
    try:
        with exclusive(folder / ".lock", f"shard {folder.name!r}"):
            if not _is_marked(folder, journal):
                replace_file(folder / MARK_NAME, (json.dumps(mark) + "\n").encode(), mode=0o600)
    except OSError as error:
        raise BadData(
            f"shard {folder.name!r} cannot be marked ({error.strerror}), so another home could answer from it with a "
            "budget of its own. Let this agent write to its folder once; when it has started, the folder may be "
            "read-only"
        ) from error


def _is_marked(folder: Path, journal: str) -> bool:
    """Whether a shard answers for this journal; False where it answers for none yet."""
    try:
        mark = json.loads((folder / MARK_NAME).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        mark = None
    if not isinstance(mark, dict) or mark.get("version") != _VERSION or not isinstance(mark.get("journal"), str):
        raise BadData(
            f"{MARK_NAME} in shard {folder.name!r} cannot be read, so nobody knows which home answers from it. "
            f"{_HAND_OVER}"
        )
    if mark["journal"] != journal:
        raise BadData(
            f"shard {folder.name!r} answers for another home, of agent {mark.get('agent')!r} (journal "
            f"{mark['journal'][:16]}): with a second home each of its records would have a second budget. {_HAND_OVER}"
        )
    return True


_HAND_OVER = (
    "To hand it over: stop the old home for good, have its keys revoked (`labeler keys revoke`), write off what it has "
    "left (`labeler journal write-off --home OLD --account agent:NAME`), give the new policy no more than was left, "
    f"and then delete {MARK_NAME} from the shard's folder"
)
