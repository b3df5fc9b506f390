"""How the body of a message is written: one JSON object, or one JSON object, a line feed and safetensors arrays.

    body = {"version":"labeler-share/1", ...}                       words and numbers
    body = {"version":"labeler-share/1", ...} | line feed | arrays  where arrays belong to them

Sizes are bounded before anything is read: parsed JSON takes many times the memory of its text. Arrays are
taken only if they are those that were expected, of exactly their types. Nothing here can run code (no pickle).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from labeler.errors import ProtocolViolation, TooLarge
from labeler.messages.envelope import MAX_MESSAGE_BYTES
from labeler.messages.strict import names_of, tuples_of
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
    return write_with_arrays(content, {name: array})


def write_with_arrays(content: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """A body with arrays, each under its name."""
    return write_json(content) + b"\n" + save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def read_json(
    data: bytes, what: str, names: Collection[str], version: str, *, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Read a body without an array.

    Args:
        data: the body.
        what: what it is, for the error: "a share".
        names: the fields it must have, no more and no fewer.
        version: what its field "version" must say.
        optional: fields it may have besides.

    Raises:
        TooLarge: more than 8 MiB.
        ProtocolViolation: not such JSON.
    """
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(f"the JSON of {what} has at most {MAX_JSON_BYTES} bytes, found {len(data)}")
    return read_object(data, what, fields=names, version=version, optional=optional)


def read_with_array(
    data: bytes,
    what: str,
    names: Collection[str],
    version: str,
    dtypes: Mapping[str, type[np.generic]],
    *,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[dict[str, Any], str, NDArray[Any]]:
    """Read a body with one array.

    Args:
        data, what, names, version: as for `read_json`.
        dtypes: the arrays that are expected, with their types; exactly one of them must be there.
        most_bytes: see `read_with_arrays`.

    Returns:
        The fields, the name of the array, and the array. Its shape is for the caller to check.

    Raises:
        TooLarge: larger than a message may be.
        ProtocolViolation: malformed, or another array.
    """
    choices = [{name: dtype} for name, dtype in dtypes.items()]
    content, arrays = read_with_arrays(data, what, names, version, choices, most_bytes=most_bytes)
    ((name, array),) = arrays.items()
    return content, name, array


def read_with_arrays(
    data: bytes,
    what: str,
    names: Collection[str],
    version: str,
    choices: Sequence[Mapping[str, type[np.generic]]],
    *,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a body with arrays.

    Args:
        data, what, names, version: as for `read_json`.
        choices: sets of arrays, with their types; exactly those of one set must be there.
        most_bytes: largest body taken; more than a message may have only for one that never travelled.

    Returns:
        The fields, and the arrays by name. Their shapes are for the caller to check.

    Raises:
        TooLarge: larger than a message may be.
        ProtocolViolation: malformed, or other arrays.
    """
    if len(data) > most_bytes:
        raise TooLarge(f"{what} has at most {most_bytes} bytes, found {len(data)}")
    end = data.find(b"\n", 0, MAX_JSON_BYTES + 1)
    if end < 0:
        raise ProtocolViolation(f"{what} must begin with one line of JSON, at most {MAX_JSON_BYTES} bytes long")
    content = read_json(data[:end], what, names, version)
    try:
        arrays = load(data[end + 1 :])
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError):
        raise ProtocolViolation(f"the array of {what} is not in safetensors format, or of an unknown type") from None
    expected = next((choice for choice in choices if choice.keys() == arrays.keys()), None)
    if expected is None:
        named = " or ".join(" and ".join(map(repr, choice)) for choice in choices)
        many = "exactly one array" if all(len(choice) == 1 for choice in choices) else "exactly the arrays"
        raise ProtocolViolation(f"{what} must hold {many}, {named}; found {len(arrays)}, or another")
    for name, array in arrays.items():
        if array.dtype != expected[name]:
            raise ProtocolViolation(f"{name} of {what} must be {np.dtype(expected[name])}, found {array.dtype}")
    return content, arrays


class Body:
    """A model that travels as one JSON object; `version` says how it is written."""

    version: ClassVar[str]
    what: ClassVar[str]

    def content(self) -> dict[str, Any]:
        """Its fields, as JSON knows them."""
        return {name: getattr(self, name) for name in names_of(type(self))}

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(self.content() | {"version": self.version})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read such a body.

        Raises:
            ProtocolViolation: malformed, or see the class.
            TooLarge: larger than is taken.
        """
        return cls(**as_fields(cls, read_json(data, cls.what, names_of(cls), cls.version)))


def as_fields(model: type[Any], content: dict[str, Any]) -> dict[str, Any]:
    """Content of JSON as a model takes it: a list where it has a tuple."""
    for name in tuples_of(model):
        if isinstance(content[name], list):
            content[name] = tuple(content[name])
    return content
