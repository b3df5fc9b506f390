"""Names of images and vectors: only names, which never become paths."""

from __future__ import annotations

import unicodedata

from labeler.errors import InvalidSetting

MAX_NAME_LENGTH = 500
_APART = frozenset("/\\")
_NOWHERE = ("", ".", "..")


def tidy_name(name: str) -> str:
    """A name that is only a name: no way up, no backslash, nothing that does not print.

    Raises:
        InvalidSetting: nothing is left of it, or it is too long.
    """
    # Fifty thousand vectors come with names that are tidy already.
    is_tidy = name.isascii() and name.isprintable() and not _APART.intersection(name)
    tidied = name if is_tidy and name.strip() not in _NOWHERE else _tidied(name)
    if not tidied or len(tidied) > MAX_NAME_LENGTH:
        raise InvalidSetting(
            f"every image or vector needs a name of 1 to {MAX_NAME_LENGTH} characters, found {name[:100]!r}"
        )
    return tidied


def _tidied(name: str) -> str:
    written = unicodedata.normalize("NFC", name).replace("\\", "/")
    parts = [part for part in written.split("/") if part.strip() not in _NOWHERE]
    return "".join(letter if letter.isprintable() else "_" for letter in "/".join(parts))
