"""The bound on its records that a private shard declares, without which no agent of a service answers from it."""

from __future__ import annotations

from pathlib import Path

from feature_store.durable import exclusive
from feature_store.manifest import read_manifest, write_manifest
from feature_store.shard import Shard
from labeler.errors import InvalidSetting


def check_served(shard: Shard) -> None:
    """Refuse a shard that no agent of a service may answer from.

    Raises:
        InvalidSetting: it is public, or declares no bound on its records.
    """
    name = shard.path.name
    if shard.is_public:
        raise InvalidSetting(f"{name!r} is a public shard; an agent answers from private records")
    if shard.max_records is None:
        raise InvalidSetting(
            f"shard {name!r} declares no public bound on its records, and how long an agent takes would tell how many "
            f"there are. Choose a round number before you count, with room for records that come: labeler declare "
            f"{name} --max-records 10000"
        )


def declare_most(path: Path, max_records: int) -> bool:
    """Write a public bound on its records into the manifest of a private shard, once; False where it stands there.

    Raises:
        InvalidSetting: the shard is public, declares another bound, or holds more.
        OutputInUse: another process changes the shard.
    """
    with exclusive(path / ".lock", f"shard {path.name!r}"):
        manifest = read_manifest(path)
        if manifest.role != "private":
            raise InvalidSetting(f"shard {path.name!r} is a public one; a bound is declared of private records")
        if manifest.max_records == max_records:
            return False
        if manifest.max_records is not None:
            raise InvalidSetting(
                f"shard {path.name!r} declares at most {manifest.max_records} records, and others may count on it; "
                "embed the images again to declare another bound"
            )
        if max_records < manifest.records:
            raise InvalidSetting(
                f"shard {path.name!r} holds more records than that; nothing was declared. Choose a round number with "
                "room"
            )
        write_manifest(path, manifest.model_copy(update={"max_records": max_records}))
    return True
