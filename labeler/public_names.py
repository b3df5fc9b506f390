"""Names of public images leave: in Parquet, JSON, CSV and pages, where a text is UTF-8. So they are looked at first.

A file system of Linux takes any bytes for a name. One that is no UTF-8, as of an archive that was packed elsewhere,
can be opened and not written down; found out once answers are opened, they are paid for and cannot be published.
"""

from __future__ import annotations

from collections.abc import Iterable

from labeler.errors import InvalidSetting

_SHOWN = 3


def check_names_are_text(names: Iterable[str]) -> None:
    """Refuse names of files that are no text, before anything is sent or asked.

    Raises:
        InvalidSetting: the first few are named, with what is no text in them as numbers.
    """
    bad = [name for name in names if not _is_text(name)]
    if bad:
        shown = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidSetting(
            f"the names of {len(bad)} public images are no text in UTF-8, so no label could be written beside them: "
            f"{shown}{more}; rename these files, or the folders they are in"
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
