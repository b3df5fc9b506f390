"""How parties whose programs are of different versions understand each other.

Two numbers, and neither is that of the program:

    wire version   N of "labeler-NAME/N" in every header and body. The bytes of a version are fixed for ever
                   (tests/golden): another number is another format, which nobody guesses at. Who gets one is told in
                   a sentence which of the two programs is older (`WrongVersion`), and nothing else happens.
    dialect        "labeler/MAJOR.MINOR", which a party says in every poll: which kinds of messages its program reads.
                   The coordinator sends a party only what its dialect knows, and takes what is older; so a newer
                   coordinator serves older sites, and newer sites speak to an older coordinator what it knows: it
                   tells them its own, if they read that.

A new kind of message, or a new field that may be left out, raises the minor dialect and has a row in `SINCE`. A changed
format raises the wire version of that body; a program reads the version before it for two releases (docs/upgrades.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from labeler.errors import ProtocolViolation, WrongVersion

DIALECT: Final = "labeler/0.5"
"""Of this program."""

Ability = Literal["proposals", "requesters", "posts-that-poll", "dimensions", "own-heads"]

SINCE: Final[Mapping[Ability, tuple[int, int]]] = {
    "proposals": (0, 2),
    "requesters": (0, 3),
    "posts-that-poll": (0, 4),
    "dimensions": (0, 4),
    "own-heads": (0, 5),
}
"""From which dialect on a program reads what there was not always: a party proposals; in a proposal, who submitted the
job; in the answer to a poll, the coordinator's own dialect, and how far the party's journal was when it answered. A
coordinator posts that end with a poll; in a poll, the length of an agent's features."""

_DIALECT: Final = re.compile(r"labeler/(\d{1,6})\.(\d{1,6})")
_MAX_DIALECT_CHARACTERS: Final = 200
_FORMAT: Final = re.compile(r"(labeler-[a-z-]{1,40})/([0-9]{1,6})")


def knows(told: object, ability: Ability) -> bool:
    """Whether a program that said this of itself reads a kind of message; or not: it said nothing known."""
    if not isinstance(told, str) or len(told) > _MAX_DIALECT_CHARACTERS:
        return False
    found = _DIALECT.match(told)
    return found is not None and (int(found[1]), int(found[2])) >= SINCE[ability]


def other_version(what: str, found: object, expected: str) -> ProtocolViolation:
    """The refusal of something that is not written as it is read here.

    Args:
        what: what it is: "a header".
        found: what its field "version" says.
        expected: what is read.
    """
    said = _FORMAT.fullmatch(found) if isinstance(found, str) else None
    ours = _FORMAT.fullmatch(expected)
    if said is None or ours is None or said[1] != ours[1]:
        return ProtocolViolation(
            f"{what} must have version {expected!r}; sender and receiver must run matching versions"
        )
    is_newer = int(said[2]) > int(ours[2])
    older, newer = ("this party", "its sender") if is_newer else ("its sender", "this party")
    return WrongVersion(
        f"{what} is written in version {int(said[2])} of its format and version {ours[2]} is read here: the program "
        f"of {older} is older than {newer}'s; upgrade the older one (docs/upgrades.md says in which order)"
    )
