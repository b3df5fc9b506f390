"""The bytes of every message, as parties of earlier versions write and read them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from labeler.errors import ProtocolViolation
from labeler.messages import Header, Message, frame, read_frames
from labeler.messages.bodies import (
    AnswerSent,
    Ask,
    Declined,
    Mail,
    OpenRound,
    Poll,
    Proposal,
    Refusal,
    Settled,
    SumRequest,
    TallierKey,
    Willing,
    Withdrawn,
    aggregate_to_bytes,
    holdings_to_bytes,
    share_to_bytes,
    winner_to_bytes,
)
from labeler.randomness import seeded_source
from labeler.sharing import Winner, split
from labeler.system.keys import PartyKeys
from labeler.tally import AggregateShare, QueryBatch, split_ballots
from labeler.task import parse_task

TASK = parse_task(
    {
        "name": "birds", "classes": ["finch", "w\u00fcrger", "wren"], "k": 5, "sigma_votes": 25, "delta": 1e-4,
        "max_queries": 100, "agents": 3, "backbone_fingerprint": "f" * 64,
    }
)  # fmt: skip
WINNER_TASK = TASK.model_copy(update={"release": "winner", "abstain_below": 2})
TALLIERS = tuple(TallierKey(f"tallier-{i}", f"{i}a" * 32, f"{i}b" * 32) for i in range(3))
ASK = Ask(TASK, QueryBatch(np.arange(-20, 20, dtype=np.int16).reshape(5, 8), first_query=10), TALLIERS, 1.8e9)
VOTES = np.arange(15, dtype=np.int64).reshape(5, 3)
SHARES = split(VOTES, num_talliers=3, source=seeded_source(1))
WINNER_ROUND = replace(ASK.round, terms=WINNER_TASK.winner_terms)
assert WINNER_ROUND.terms is not None
PAIRS = split_ballots(
    np.eye(5, 3, dtype=np.int64), VOTES - 7, row_total=5, num_talliers=3, source=seeded_source(2),
    field=WINNER_ROUND.terms.field,
)  # fmt: skip
AGENTS = frozenset({"agent-1", "agent-2"})
AGGREGATE = AggregateShare(2, ASK.round, AGENTS, "c" * 64, SHARES[2].expand(), True)
REFUSAL = Refusal("budget-exceeded", "The price is higher than what is left.", True)
HEADER = Header("poll", "agent-\u00e9", "coordinator", "a" * 64, "", 2**40, "b" * 64, False)

MADE = {
    "ask": ASK.encode(),
    "open-round": OpenRound(ASK.round, 1, {"agent-1": "1a" * 32, "agent-2": "2a" * 32}, 1.8e9).encode(),
    "open-round of winners": OpenRound(WINNER_ROUND, 0, {"agent-1": "1a" * 32}, 1.8e9 + 0.25).encode(),
    "sum": SumRequest(("agent-1", "agent-2"), 5, "d" * 64).encode(),
    "refused": REFUSAL.encode(),
    "answered": AnswerSent(9, "e" * 64).encode(),
    "settled": Settled().encode(),
    "poll": Poll("1790000000000-3", 20.0, 7, "a" * 64, 0, "", "0.1.0", {"classes": ["a"], "b": 1}).encode(),
    "poll in whole seconds": Poll("", 5, 0, "", 3, "c" * 64, "0.1.0", {}).encode(),
    "mail": Mail("1790000000000-3", 7, "a" * 64).encode(),
    "mail that tells a party its own head": Mail("", 0, "", 9, "e" * 64).encode(),
    "proposal": Proposal("job-1", TASK, (3, 5), TALLIERS, 1.8e9).encode(),
    "willing": Willing("job-1", 1_800_000_000).encode(),
    "declined": Declined("job-1", REFUSAL).encode(),
    "withdrawn": Withdrawn("job-1").encode(),
    "seed share": share_to_bytes(SHARES[0]),
    "word share": share_to_bytes(SHARES[2]),
    "ballot seed share": share_to_bytes(PAIRS[0]),
    "ballot word share": share_to_bytes(PAIRS[2]),
    "holdings": holdings_to_bytes({"agent-2": bytes(range(16)), "agent-1": bytes(16)}),
    "aggregate-share": aggregate_to_bytes(AGGREGATE),
    "winner": winner_to_bytes(
        Winner(1, WINNER_ROUND.digest, AGENTS, "c" * 64, np.array([0, -1, 2, 1, 0], np.int16), True)
    ),
    "header": HEADER.to_bytes(),
    "frames": frame([Message(HEADER, bytes(64), b"body"), Message(HEADER, bytes(range(64)), b"")]),
}
DIGESTS = {
    "ask": "83b2fdb9b54bb7722997182b66435a6c05fbc32ee6164fcd1527639aa9c2d890",
    "open-round": "71ee9d0e441d8a523bff212a5e77a7f4b9aa490bd0a2b196152cb0edb420cad6",
    "open-round of winners": "9564b1d21445f9294a3afb12b05ad7e09d6a0bea8b0346d362480f4fb19b127f",
    "sum": "7dfd7d24996ee7e4f0a04fe765d1401563b2d26ad29e97f1384a7fa504f773e0",
    "refused": "03e8f402d100c68cf8a7b3701aa466e4e6a7c1875f3a02f24057f0986c494564",
    "answered": "cfa3db40c9b1cceacb6d16ffe9d5782fb4775c2df4094ea02f6d865e1708c706",
    "settled": "52417583b6af94eb1337bb0bb2bd03ce5cab4c552e51d5af5f355e512a948ea7",
    "poll": "8d96e580a4a978e775071e06f892a9b20929ed2c52e2ebf5200d0180a8419a58",
    "poll in whole seconds": "afa370b87b55da0c80cc63e15a000fc40cc206525c9a0b2f34315d9f768e1b9d",
    "mail": "88d216a002a9213450b5c0b317ae5df934faa71b8573bdcffbcb4a0bfbd3f924",
    "mail that tells a party its own head": "ea8735b3ba4bf2dd93342760e6f81444d148ccc2953044d95380917d08787a85",
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
    "winner": "228eefe21db0214551fb36860502401baef9a93ecc8285ef259a3694bedde7bd",
    "header": "4c5e76f7b9b64551391b8966aefc494c0def66f11898e2f91e2aaa4f145eecf5",
    "frames": "7cd96a269d8283bf35b27b1f6c6016314f1e58bb024063caa749e1e6e664ff40",
}
PROPOSAL = "5546422cd8e5e7b29b82f40e1ec4af76da9200903892a999ed702a60b4a3e367"


@pytest.mark.parametrize("name", MADE)
def test_a_message_keeps_its_bytes(name: str) -> None:
    assert hashlib.sha256(MADE[name]).hexdigest() == DIGESTS[name]


def test_a_proposal_that_says_who_asks_is_the_same_proposal_and_others_keep_their_bytes() -> None:
    told = replace(Proposal.decode(MADE["proposal"]), requester="data team")
    read = Proposal.decode(told.encode())
    assert (read, read.digest) == (told, PROPOSAL)
    assert replace(read, requester="").encode() == MADE["proposal"]
    for name in ("two\nlines", "x" * 101, 7):
        with pytest.raises(ProtocolViolation):
            Proposal.decode(told.encode().replace(b'"data team"', json.dumps(name).encode()))


def test_the_digest_of_a_proposal_stays() -> None:
    """Agents know a proposal again by it."""
    assert Proposal("job-1", TASK, (3, 5), TALLIERS, 1.8e9).digest == PROPOSAL
    assert Proposal.decode(MADE["proposal"]).digest == PROPOSAL


def test_a_signed_message_is_read_as_it_was_written() -> None:
    keys = PartyKeys.generate()
    message = keys.message(
        "poll",
        sender="agent-1",
        recipient="coordinator",
        sequence=1,
        body=MADE["poll"],
        task_digest="",
        round_digest="",
    )
    assert read_frames(frame([message]), max_messages=1)[0].header == message.header
