"""Deleting records of a shard by what its owner knows of them: whose they are, or the names of their images.

A running agent sees the change at its next ask. What was charged for before is answered with the stored bytes, and what
was released before stays covered by its price; spends of votes for life stay with the image, should it come back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_store.persons import one_name
from feature_store.shard import Shard
from feature_store.site_key import SITE_KEY_FILE, site_key
from labeler.errors import BadData, InvalidSetting


def delete_records(
    path: Path, *, persons: Sequence[str] = (), images: Sequence[str] = (), key: Path | None = None
) -> dict[str, Any]:
    """Delete all records of some people, and those of some images; all that was named, or nothing.

    Args:
        path: the shard.
        persons: names, as they were given when it was embedded.
        images: names within its source.
        key: the file of the site's key; beside the shard where None.

    Returns:
        {"shard", "deleted", "left"}: how many were not deleted before, and how many there are now.

    Raises:
        InvalidSetting: nobody and nothing is named, the shard does not know people, or nothing would be left.
        BadData: a name that the shard never held, or another site's key. No name is repeated.
    """
    if not persons and not images:
        raise InvalidSetting("name people (--persons) or images (--images) to delete")
    shard = Shard.open(path, verify=False)
    rows = _of_persons(shard, persons, key) | _of_images(shard, images)
    deleted = shard.delete(shard.record_ids[rows])
    return {"shard": str(path), "deleted": deleted, "left": len(shard.rows)}


def lines_of(path: Path) -> list[str]:
    """The names in a file, one a line; of the standard input where the file is called "-".

    Raises:
        InvalidSetting: it cannot be read, or is no text.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} cannot be read as names, one a line in UTF-8 ({type(error).__name__})") from None
    return [line for line in text.splitlines() if line.strip()]


def _of_persons(shard: Shard, persons: Sequence[str], key: Path | None) -> NDArray[np.bool_]:
    found = np.zeros(len(shard.record_ids), dtype=np.bool_)
    if not persons:
        return found
    if shard.persons is None:
        raise InvalidSetting(
            f"shard {shard.path.name!r} was not told whose records it holds; name images (--images), or embed it again "
            "with --person-level, --persons or --person-column"
        )
    file = shard.path.parent / SITE_KEY_FILE if key is None else key
    if not file.exists():
        raise InvalidSetting(f"there is no site's key {file}; name the one that the shard was made with (--site-key)")
    known = site_key(file)
    if known.name != shard.site_key:
        raise BadData(f"{file} is not the key that shard {shard.path.name!r} was made with; name that one (--site-key)")
    unknown = 0
    for digest in known.digests("person", [one_name(person).encode() for person in persons]):
        theirs = (shard.persons == digest).all(axis=1)
        unknown += not theirs.any()
        found |= theirs
    if unknown:
        raise BadData(
            f"{unknown} of {len(persons)} people never had an image in shard {shard.path.name!r}; nothing was deleted. "
            "Write each name as it was when the shard was embedded, one a line"
        )
    return found


def _of_images(shard: Shard, images: Sequence[str]) -> NDArray[np.bool_]:
    held = shard.sources if images else []
    known = set(held)
    unknown = [number for number, name in enumerate(images, 1) if name not in known]
    if unknown:
        # By its place: a folder is often named after a person.
        raise BadData(
            f"{len(unknown)} of {len(images)} images are not in shard {shard.path.name!r}, the first of them the one "
            f"named at place {unknown[0]}; nothing was deleted"
        )
    wanted = set(images)
    return np.array([name in wanted for name in held] if images else [False] * len(shard.record_ids), dtype=np.bool_)
