"""The hospitals a tallier sums, named from the files of public keys that they have sent: `[agents]` of tallier.toml.

No invitation fills this table: it is what bounds a coordinator that invents agents, so it is the tallier's own word,
given after comparing fingerprints with each hospital.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feature_store.durable import replace_file
from labeler.errors import InvalidSetting
from workers.party.home import TALLIER_FILE, read_tallier_config, settings_toml


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
