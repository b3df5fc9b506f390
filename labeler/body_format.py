"""How the body of a message is written: one JSON object, or one JSON object, a line feed and one safetensors array.

    body = {"version":"labeler-share/1", ...}                       words and numbers
    body = {"version":"labeler-share/1", ...} | line feed | array   where an array belongs to them

Sizes are bounded before anything is read: parsed JSON takes many times the memory of its text. An array is
taken only if it is the one that was expected, of exactly its type. Nothing here can run code (no pickle).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from labeler.errors import ProtocolViolation, TooLarge
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.untrusted import canonical_json, read_object

MAX_JSON_BYTES = 8 * 1024 * 1024
"""Largest JSON part of a body."""


def write_json(content: Mapping[str, Any]) -> bytes:
    """A body without an array.

    Raises:
        TooLarge: more than 8 MiB.
    """
    data = canonical_json(content)
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(
            f"the JSON of a body has at most {MAX_JSON_BYTES} bytes, found {len(data)}; ask for less at once"
        )
    return data


def write_with_array(content: Mapping[str, Any], name: str, array: NDArray[Any]) -> bytes:
    """A body with one array."""
    return write_json(content) + b"\n" + save({name: np.ascontiguousarray(array)})


def read_json(data: bytes, what: str, names: Collection[str], version: str) -> dict[str, Any]:
    """Read a body without an array.

    Args:
        data: the body.
        what: what it is, for the error: "a share".
        names: the fields it must have, no more and no fewer.
        version: what its field "version" must say.

    Raises:
        TooLarge: more than 8 MiB.
        ProtocolViolation: not such JSON.
    """
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(f"the JSON of {what} has at most {MAX_JSON_BYTES} bytes, found {len(data)}")
    return read_object(data, what, fields=names, version=version)


def read_with_array(
    data: bytes, what: str, names: Collection[str], version: str, dtypes: Mapping[str, type[np.generic]]
) -> tuple[dict[str, Any], str, NDArray[Any]]:
    """Read a body with one array.

    Args:
        data, what, names, version: as for `read_json`.
        dtypes: the arrays that are expected, with their types; exactly one of them must be there.

    Returns:
        The fields, the name of the array, and the array. Its shape is for the caller to check.

    Raises:
        TooLarge: larger than a message may be.
        ProtocolViolation: malformed, or another array.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"{what} has at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}")
    end = data.find(b"\n", 0, MAX_JSON_BYTES + 1)
    if end < 0:
        raise ProtocolViolation(f"{what} must begin with one line of JSON, at most {MAX_JSON_BYTES} bytes long")
    content = read_json(data[:end], what, names, version)
    try:
        arrays = load(data[end + 1 :])
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError):
        raise ProtocolViolation(f"the array of {what} is not in safetensors format, or of an unknown type") from None
    if len(arrays) != 1 or not arrays.keys() <= dtypes.keys():
        raise ProtocolViolation(
            f"{what} must hold exactly one array, {' or '.join(map(repr, dtypes))}; found {len(arrays)}, or another"
        )
    ((name, array),) = arrays.items()
    if array.dtype != dtypes[name]:
        raise ProtocolViolation(f"{name} of {what} must be {np.dtype(dtypes[name])}, found {array.dtype}")
    return content, name, array
