"""The vectors of the wire format, good and bad: each is read, or refused by its name and with its sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labeler.errors import LabelerError
from labeler.messages import SIGNATURE_BYTES, Header, read_frames
from labeler.messages.bodies import Mail, Poll

VECTORS: dict[str, list[dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("wire_vectors.toml").read_text())


def _frames(data: bytes) -> object:
    return read_frames(data, max_messages=4)


READ: dict[str, Callable[[bytes], Any]] = {
    "header": Header.parse,
    "poll": Poll.decode,
    "mail": Mail.decode,
    "frames": _frames,
}
CASES = [pytest.param(kind, one, id=f"{kind}: {one['name']}") for kind, found in VECTORS.items() for one in found]


@pytest.mark.parametrize(("kind", "vector"), CASES)
def test_a_vector_is_read_or_refused_as_it_says(kind: str, vector: dict[str, Any]) -> None:
    data = vector["text"].encode() if "text" in vector else bytes.fromhex(vector["hex"])
    if "then" in vector:
        header = VECTORS["header"][0]["text"].encode()
        data = len(header).to_bytes(4, "big") + data[4:] + header + bytes(SIGNATURE_BYTES)
        assert vector["hex"] == data[:12].hex()
    if "refused" not in vector:
        read = READ[kind](data)
        written = read.to_bytes() if kind == "header" else read.encode() if kind != "frames" else data
        assert written == data
        return
    problem, sentence = vector["refused"]
    with pytest.raises(LabelerError) as refused:
        READ[kind](data)
    assert refused.value.problem_type == problem
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 400


def test_every_kind_of_vector_has_good_and_bad_ones() -> None:
    for found in VECTORS.values():
        assert {"refused" in one for one in found} == {True, False}
