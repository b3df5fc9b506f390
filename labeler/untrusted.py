"""Values that came from another party, read strictly: each is returned as what it should be, or refused.

What JSON calls a value is not enough: in Python `true` is a number, `1e999` reads as infinity, and an id may
hold a line break that forges a line of a log. Every function here names the value in its error and never
repeats it, because it may be long or hostile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from labeler.errors import ProtocolViolation
from labeler.wire_versions import other_version

MAX_ID_CHARACTERS = 200
ENROLLED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""What a party may be enrolled under: it becomes part of a file's name, an address and a line of a log."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
LARGEST_INTEGER = 2**62
LATEST_S = 1e11


def canonical_json(content: object) -> bytes:
    """JSON in one spelling: keys sorted, no spaces, ASCII; numbers that are not finite are refused."""
    return _CANONICAL.encode(content).encode()


def read_object(
    data: bytes, what: str, *, fields: Iterable[str], version: str, optional: Iterable[str] = ()
) -> dict[str, Any]:
    """Read one JSON object that has exactly these fields and this version, which is left out of the answer.

    Args:
        data: the JSON; the caller has bounded its size.
        what: what it is, for the error: "a header".
        fields: the names it must have, no more and no fewer.
        version: what its field "version" must say.
        optional: names it may have besides.

    Raises:
        ProtocolViolation: no JSON object, NaN or infinity in it, a key twice, or other fields.
        WrongVersion: it is such an object of another version.
    """
    try:
        content = _STRICT.decode(data.decode())
    except (ValueError, RecursionError):
        raise ProtocolViolation(
            f"{what} must be JSON in UTF-8, not nested deeply, without NaN, infinity or a key twice"
        ) from None
    if not isinstance(content, dict):
        raise ProtocolViolation(f"{what} must be a JSON object")
    if (found := content.pop("version", None)) != version:
        raise other_version(what, found, version)
    expected = set(fields)
    if content.keys() - set(optional) != expected:
        missing = sorted(expected - content.keys())
        raise ProtocolViolation(
            f"{what} must have exactly the fields {', '.join(sorted(expected))}; "
            f"missing {', '.join(missing) or 'none'}, unknown {len(content.keys() - expected)}"
        )
    return content


def check_party_id(value: object, what: str) -> str:
    """A party id, or refused: 1 to 200 printable characters, no line break, no control character."""
    return check_text(value, what, most=MAX_ID_CHARACTERS)


def check_digest(value: object, what: str) -> str:
    """A SHA-256 in lower-case hexadecimal, or refused."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ProtocolViolation(f"{what} must be a SHA-256, 64 lower-case hexadecimal digits")
    return value


def check_public_key(value: object, what: str) -> str:
    """A public key in lower-case hexadecimal, or refused; whether it is a usable key says `feature_store.keys`."""
    return hex_bytes(value, 32, what).hex()


def check_text(value: object, what: str, *, most: int) -> str:
    """Printable text of 1 to `most` characters on one line, or refused."""
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        raise ProtocolViolation(f"{what} must be 1 to {most} printable characters")
    return value


def hex_bytes(value: object, count: int, what: str) -> bytes:
    """Exactly `count` bytes, written in lower-case hexadecimal, or refused."""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * count}}}", value):
        raise ProtocolViolation(f"{what} must be {count} bytes, {2 * count} lower-case hexadecimal digits")
    return bytes.fromhex(value)


def check_list(value: object, what: str) -> list[Any]:
    """A list, or refused."""
    if not isinstance(value, list):
        raise ProtocolViolation(f"{what} must be a list")
    return value


def check_mapping(value: object, what: str) -> dict[str, Any]:
    """A copy of a mapping, or refused."""
    if not isinstance(value, Mapping):
        raise ProtocolViolation(f"{what} must be an object with named fields")
    return dict(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key twice")
    return content


# Made once: a party reads and writes some hundred small objects a second.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
