"""The bytes of every message, as parties of earlier versions write and read them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from labeler.errors import ProtocolViolation
from labeler.messages import Header, Message, frame
from labeler.messages.bodies import Proposal
from tests.labeler.messages.examples import BODIES

HEADER = Header("poll", "agent-\u00e9", "coordinator", "a" * 64, "", 2**40, "b" * 64, False)
MADE = {name: body for name, (body, *_) in BODIES.items()} | {
    "header": HEADER.to_bytes(),
    "frames": frame([Message(HEADER, bytes(64), b"body"), Message(HEADER, bytes(range(64)), b"")]),
}
DIGESTS = {
    "ask": "83b2fdb9b54bb7722997182b66435a6c05fbc32ee6164fcd1527639aa9c2d890",
    "open-round": "71ee9d0e441d8a523bff212a5e77a7f4b9aa490bd0a2b196152cb0edb420cad6",
    "winner open-round": "9564b1d21445f9294a3afb12b05ad7e09d6a0bea8b0346d362480f4fb19b127f",
    "sum": "7dfd7d24996ee7e4f0a04fe765d1401563b2d26ad29e97f1384a7fa504f773e0",
    "refused": "03e8f402d100c68cf8a7b3701aa466e4e6a7c1875f3a02f24057f0986c494564",
    "answered": "cfa3db40c9b1cceacb6d16ffe9d5782fb4775c2df4094ea02f6d865e1708c706",
    "settled": "52417583b6af94eb1337bb0bb2bd03ce5cab4c552e51d5af5f355e512a948ea7",
    "poll": "8d96e580a4a978e775071e06f892a9b20929ed2c52e2ebf5200d0180a8419a58",
    "whole-second poll": "afa370b87b55da0c80cc63e15a000fc40cc206525c9a0b2f34315d9f768e1b9d",
    "mail": "88d216a002a9213450b5c0b317ae5df934faa71b8573bdcffbcb4a0bfbd3f924",
    "a party's own mail": "ea8735b3ba4bf2dd93342760e6f81444d148ccc2953044d95380917d08787a85",
    "proposal": "a773223b41492c9cda02a8008291c2fef9b1fcff56768c0c24cbe6cb44d5d81a",
    "willing": "3a389322ec5af6b4a8a8315efd08085e0bac3af9b3af10ad561df271afd4c8c0",
    "declined": "55462425e8e446f9ba857f19795590cebe4882449bc64bddb97db29a0fa4fb18",
    "withdrawn": "33c380d01a69fd77afd77745757f5df5d3e3e6f52ba9de6f4bcb704ca2126d4a",
    "seed share": "9cf65b59be6764579318d8086a481d11458fa56f71acee18a599a784584af979",
    "word share": "d0309c55daffadfaddd94e6cfa17a3527c7e5f3b2e67d0351588cbf73eae808d",
    "ballot seed share": "44c980029a2bde8aaa4c0ff419959976d0316fd2c0ed8ae6c4f9f173bdc45a18",
    "ballot word share": "7922fd081900cc33c04aca87d1866432a9993d78607645809db4ee35e47166a0",
    "holdings": "6ce634804622f324355e9de5f67c1b203e815b07e631c15ebc9a32b07041195c",
    "aggregate-share": "9421932c60ef672fcb3eb6a59671f24a3a0a8002fee9b5a858d1cb6f3ff8ce84",
    "winner aggregate-share": "7b14a3b4ebe1d2c8fc3a9cc9093d429b59f5c42361c37057ac4112ef0792a154",
    "field share": "9d31956749e9c07bfdfdbc5576699b8d608d9b1ecc3bf0f7234314422a8a16e8",
    "winner": "228eefe21db0214551fb36860502401baef9a93ecc8285ef259a3694bedde7bd",
    "header": "4c5e76f7b9b64551391b8966aefc494c0def66f11898e2f91e2aaa4f145eecf5",
    "frames": "7cd96a269d8283bf35b27b1f6c6016314f1e58bb024063caa749e1e6e664ff40",
}
PROPOSAL = "5546422cd8e5e7b29b82f40e1ec4af76da9200903892a999ed702a60b4a3e367"


@pytest.mark.parametrize("name", MADE | DIGESTS)
def test_a_message_keeps_its_bytes(name: str) -> None:
    assert hashlib.sha256(MADE[name]).hexdigest() == DIGESTS[name]


def test_a_proposal_that_says_who_asks_is_the_same_proposal_and_others_keep_their_bytes() -> None:
    """Agents know a proposal again by its digest."""
    told = replace(Proposal.decode(MADE["proposal"]), requester="data team")
    assert Proposal.decode(MADE["proposal"]).digest == PROPOSAL
    read = Proposal.decode(told.encode())
    assert (read, read.digest) == (told, PROPOSAL)
    assert replace(read, requester="").encode() == MADE["proposal"]
    for name in ("two\nlines", "x" * 101, 7):
        with pytest.raises(ProtocolViolation):
            Proposal.decode(told.encode().replace(b'"data team"', json.dumps(name).encode()))
