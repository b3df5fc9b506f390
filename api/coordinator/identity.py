"""The keys by which every site knows this coordinator: made once, and never silently anew.

Sites pin the coordinator's public keys in their own policies. A coordinator that lost them and made others would sign
what nobody believes, and its parties would refuse it one by one with words about forgeries. So where a party was ever
enrolled, missing keys are a reason not to start.
"""

from __future__ import annotations

from pathlib import Path

from feature_store.keys import PartyKeys
from labeler.errors import InvalidSetting

KEYS_FILE = "keys.json"


def own_keys(home: Path, *, is_known: bool) -> PartyKeys:
    """The keys in a coordinator's home; made at the first start.

    Args:
        is_known: whether a party was ever enrolled here, and so has pinned keys of this coordinator.

    Raises:
        InvalidSetting: there are none although parties know some, or they cannot be read.
        BadData: the file holds no keys.
    """
    path = home / KEYS_FILE
    if not path.exists():
        if is_known:
            raise InvalidSetting(
                f"{KEYS_FILE} is missing from the coordinator's home {home.name!r}, and parties are enrolled in its "
                "journal, who know this coordinator by the keys in it. Put the file back from a backup. If it is lost "
                "for good, make new keys (labeler keys make --home), and have every site pin them: verify_key in "
                "policy.toml, coordinator_verify_key and coordinator_seal_key in tallier.toml"
            )
        PartyKeys.generate().save(path)
    return PartyKeys.load(path)
