"""Keys of a home: make them, show the public ones, replace them; and access tokens of a coordinator that is stopped.

A tallier names the hospitals that it sums, `[agents]` of tallier.toml, from the files of public keys that they have
sent. No invitation fills this table: it is what bounds a coordinator that invents agents, so it is the tallier's own
word, given after comparing fingerprints with each hospital.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from labeler.errors import InvalidSetting, JournalInUse
from labeler.ledger.database import open_database
from labeler.ledger.tokens import TokenStore
from labeler.system.files import replace_file
from labeler.system.keys import PartyKeys
from workers.homes.new import PUBLIC_FILE, make_keys, public_document, read_public, write_public
from workers.homes.settings_file import COORDINATOR_FILE
from workers.party.home import (
    AGENT_FILE,
    ANCHOR_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    TALLIER_FILE,
    read_agent_config,
    read_tallier_config,
    settings_toml,
)


def make_missing_keys(home: Path) -> dict[str, Any]:
    """Make keys where there are none, and write the public ones beside them.

    Raises:
        InvalidSetting: the folder is no home.
    """
    party_id, role, tallier = _who(home)
    return make_keys(home, party_id=party_id, role=role, tallier=tallier)


def show_keys(home: Path) -> dict[str, Any]:
    """The public keys of a home; written beside them again.

    Raises:
        InvalidSetting: there are none, or the folder is no home.
    """
    party_id, role, tallier = _who(home)
    public = PartyKeys.load(home / KEYS_FILE).public
    return write_public(home, public_document(public, party_id=party_id, role=role, tallier=tallier))


def rotate_keys(home: Path) -> dict[str, Any]:
    """Replace the keys of a home; the old ones are kept in a file named by the time.

    Raises:
        InvalidSetting: there are none to replace, or the folder is no home.
        JournalInUse: the party's process runs; it would go on with the old keys.
    """
    party_id, role, tallier = _who(home)
    PartyKeys.load(home / KEYS_FILE)
    with ExitStack() as held:
        if isinstance(journal := journal_of(home), Path) and journal.exists():
            # Holding the journal, nobody else runs in this home.
            held.enter_context(closing(open_database(journal, anchor=home / ANCHOR_FILE)))
        _exchange(home)
    public = PartyKeys.load(home / KEYS_FILE).public
    return write_public(home, public_document(public, party_id=party_id, role=role, tallier=tallier))


def make_token_offline(home: Path, *, name: str, role: Literal["admin", "requester", "viewer"]) -> dict[str, Any]:
    """Make an access token in the journal of a coordinator that does not run.

    Raises:
        JournalInUse: it runs; ask it instead.
    """
    if not (home / COORDINATOR_FILE).exists():
        raise InvalidSetting(f"{home} is no coordinator's home: it has no {COORDINATOR_FILE}")
    try:
        database = open_database(journal_of(home), anchor=home / ANCHOR_FILE)
    except JournalInUse:
        raise JournalInUse(
            "the coordinator of this home is running; make the token through it (--url and --token), or stop it first"
        ) from None
    with closing(database):
        record, secret = TokenStore(database).create(name, role)
    return {"token_id": record.token_id, "name": record.name, "role": record.role, "token": secret}


def journal_of(home: Path) -> str | Path:
    """The journal of a home: a file, or for a coordinator perhaps the URL of a PostgreSQL database."""
    if not (home / COORDINATOR_FILE).exists():
        return home / JOURNAL_FILE
    from workers.serve import read_settings

    return read_settings(home).journal_target


def existing_journal(home: Path) -> str | Path:
    """`journal_of` a home, for whoever only looks at it.

    Raises:
        InvalidSetting: the file is not there.
    """
    target = journal_of(home)
    if isinstance(target, Path) and not target.is_file():
        raise InvalidSetting(f"there is no journal in {home}; is it the right home?")
    return target


def _exchange(home: Path) -> None:
    moment = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    replace_file(home / f"{KEYS_FILE}.{moment}", (home / KEYS_FILE).read_bytes(), mode=0o600)
    PartyKeys.generate().save(home / KEYS_FILE)


def _who(home: Path) -> tuple[str, str, int | None]:
    """Name and role of a home, and the number of a tallier where it is known."""
    if (home / AGENT_FILE).exists():
        return read_agent_config(home).agent_id, "agent", None
    if (home / TALLIER_FILE).exists():
        return read_tallier_config(home).tallier_id, "tallier", _number(home)
    if (home / COORDINATOR_FILE).exists():
        return "coordinator", "coordinator", None
    raise InvalidSetting(f"{home} is no home: it has no {AGENT_FILE}, {TALLIER_FILE} or {COORDINATOR_FILE}")


def _number(home: Path) -> int | None:
    """The number a tallier was made with: settings do not hold it, the file that is sent around does."""
    path = home / PUBLIC_FILE
    number = read_public(path).get("tallier") if path.exists() else None
    return number if isinstance(number, int) else None


def name_agents(home: Path, documents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Add agents to those a tallier sums, or give those that are named their new keys; restart it afterwards.

    Returns:
        All that are named now, with their public signing keys.

    Raises:
        InvalidSetting: a file is not an agent's, or two agents have one key.
    """
    config = read_tallier_config(home)
    named = dict(config.agents or {})
    for document in documents:
        if document["role"] != "agent":
            raise InvalidSetting(
                f"the file of {document['party_id']!r} is that of a {document['role']}, not an agent's"
            )
        named[document["party_id"]] = document["verify_key"]
    if len(set(named.values())) != len(named):
        raise InvalidSetting("two agents have one key, so one party would be counted twice")
    changed = config.model_copy(update={"agents": dict(sorted(named.items()))})
    replace_file(home / TALLIER_FILE, settings_toml(changed), mode=0o600)
    return dict(sorted(named.items()))
