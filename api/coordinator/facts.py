"""What a party says of itself, read strictly when it comes and leniently where it was kept.

Facts come from other organisations and end in tasks, lists and pages, so only what is known is taken: which backbone
made an agent's features and how many entries one has, which classes its records have, with which others a tallier finds
winners, and the version of its program. A poll with anything else is refused and its facts are not kept. Facts that an
older version kept are read as far as they hold, so that one party's nonsense never breaks what others look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labeler.errors import ProtocolViolation
from labeler.task import MOST_CLASSES
from labeler.untrusted import check_digest, check_list, check_mapping, check_text

MAX_CLASS_CHARACTERS = 200
MAX_FINGERPRINT_CHARACTERS = 200
MAX_VERSION_CHARACTERS = 100

MAX_DIMENSION = 2**20

_KNOWN = ("backbone_fingerprint", "classes", "dimension", "winner_group")


@dataclass(frozen=True)
class Facts:
    """What is known of a party by its own words.

    Attributes:
        backbone_fingerprint: of the backbone that made its features; None where it has not said.
        classes: names of the classes of its records, in order; empty where it has not said.
        dimension: entries of a feature that this backbone makes; None where it has not said.
        winner_group: of a tallier: digest of the three talliers it finds winners with; None where it does not.
    """

    backbone_fingerprint: str | None = None
    classes: tuple[str, ...] = ()
    dimension: int | None = None
    winner_group: str | None = None
    version: str = ""


def check_facts(facts: object) -> dict[str, Any]:
    """The facts of a poll, or refused: only known names, each with bounded printable text.

    Raises:
        ProtocolViolation: an unknown name, a value of another type, too long, or with characters that do not print.
    """
    told = check_mapping(facts, "facts of a poll")
    unknown = len(told.keys() - set(_KNOWN))
    if unknown:
        raise ProtocolViolation(
            f"facts of a poll are {' and '.join(_KNOWN)}, and {unknown} other(s) were sent; coordinator and party must "
            "run matching versions"
        )
    if "backbone_fingerprint" in told:
        check_text(told["backbone_fingerprint"], "backbone_fingerprint of a poll", most=MAX_FINGERPRINT_CHARACTERS)
    if "classes" in told:
        _check_classes(told["classes"])
    if "dimension" in told and not _is_dimension(told["dimension"]):
        raise ProtocolViolation(f"dimension of a poll is a whole number from 1 to {MAX_DIMENSION}")
    if "winner_group" in told:
        check_digest(told["winner_group"], "winner_group of a poll")
    return told


def facts_of(kept: Mapping[str, Any]) -> Facts:
    """The facts as they were kept; what does not hold is left out, as if the party had not said it."""
    return Facts(
        backbone_fingerprint=_text(kept.get("backbone_fingerprint"), MAX_FINGERPRINT_CHARACTERS),
        classes=_classes(kept.get("classes")),
        dimension=kept["dimension"] if _is_dimension(kept.get("dimension")) else None,
        winner_group=_text(kept.get("winner_group"), 64),
        version=_text(kept.get("version"), MAX_VERSION_CHARACTERS) or "",
    )


def _check_classes(value: object) -> None:
    names = check_list(value, "classes of a poll")
    if len(names) > MOST_CLASSES:
        raise ProtocolViolation(f"classes of a poll are at most {MOST_CLASSES}, found {len(names)}")
    for name in names:
        check_text(name, "a class of a poll", most=MAX_CLASS_CHARACTERS)


def _is_dimension(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_DIMENSION


def _text(value: object, most: int) -> str | None:
    try:
        return check_text(value, "a fact", most=most)
    except ProtocolViolation:
        return None


def _classes(value: object) -> tuple[str, ...]:
    try:
        _check_classes(value)
    except ProtocolViolation:
        return ()
    return tuple(value) if isinstance(value, list) else ()
