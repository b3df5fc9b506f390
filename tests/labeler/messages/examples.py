"""One message of every kind, and what reads and writes its body; tests/golden keeps the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from labeler.messages.bodies import (
    AnswerSent,
    Ask,
    Body,
    Declined,
    Mail,
    OpenRound,
    Poll,
    Proposal,
    RefusalBody,
    Settled,
    SumRequest,
    TallierKey,
    Willing,
    Withdrawn,
    aggregate_from_bytes,
    aggregate_to_bytes,
    holdings_from_bytes,
    holdings_to_bytes,
    share_from_bytes,
    share_to_bytes,
    winner_from_bytes,
    winner_to_bytes,
)
from labeler.randomness import seeded_source
from labeler.sharing import ShareVector, Winner, WinnerTerms, split
from labeler.tally import AggregateShare, BallotShare, QueryBatch, split_ballots
from labeler.task import parse_task

TASK = parse_task(
    {
        "name": "birds",
        "method": "knn",
        "classes": ["finch", "w\u00fcrger", "wren"],
        "k": 5,
        "sigma_votes": 25,
        "delta": 1e-4,
        "max_queries": 100,
        "agents": 3,
        "backbone_fingerprint": "f" * 64,
    }
)
WINNER_TASK = TASK.model_copy(update={"release": "winner", "abstain_below": 2})
REVERSE_TASK = TASK.model_copy(update={"release": "winner", "method": "reverse-knn", "max_agent_records": 9})
BATCH = QueryBatch(np.arange(-20, 20, dtype=np.int16).reshape(5, 8), first_query=10)
TALLIERS = tuple(TallierKey(f"tallier-{i}", f"{i}a" * 32, f"{i}b" * 32) for i in range(3))
ASK = Ask(TASK, BATCH, TALLIERS, 1.8e9)
ROUND = ASK.round
WINNER_ROUND = replace(ROUND, terms=WINNER_TASK.winner_terms)
REVERSE_ROUND = replace(ROUND, terms=REVERSE_TASK.winner_terms)
assert WINNER_ROUND.terms is not None
assert REVERSE_ROUND.terms is not None
VOTES = np.arange(15, dtype=np.int64).reshape(5, 3)
SHARES = split(VOTES, num_talliers=3, source=seeded_source(1))
PAIRS = split_ballots(
    np.eye(5, 3, dtype=np.int64),
    VOTES - 7,
    row_total=5,
    num_talliers=3,
    source=seeded_source(2),
    field=WINNER_ROUND.terms.field,
)
FIELD_SHARES = split(VOTES, num_talliers=3, source=seeded_source(3), field=REVERSE_ROUND.terms.field)
AGENTS = frozenset({"agent-1", "agent-2"})
AGGREGATE = AggregateShare(2, ROUND, AGENTS, "c" * 64, SHARES[2].expand(), True)
WINNER_AGGREGATE = replace(
    AGGREGATE, round=WINNER_ROUND, words=PAIRS[2].noise.expand(), row_sums=PAIRS[2].ballots.expand()[:, :2].T.copy()
)
WINNER = Winner(1, WINNER_ROUND.digest, AGENTS, "c" * 64, np.array([0, -1, 2, 1, 0], np.int16), True)
POLL = Poll("1790000000000-3", 20.0, 7, "a" * 64, 0, "", "0.1.0", {"classes": ["a"], "b": 1})
OPEN = OpenRound(ROUND, 1, {"agent-1": "1a" * 32, "agent-2": "2a" * 32}, 1.8e9)
REFUSAL = RefusalBody("budget-exceeded", "The price is higher than what is left.", True)
PROPOSAL = Proposal("job-1", TASK, (3, 5), TALLIERS, 1.8e9)

WORDS: dict[str, Body] = {
    "ask": ASK,
    "open-round": OPEN,
    "winner open-round": OpenRound(WINNER_ROUND, 0, {"agent-1": "1a" * 32}, 1.8e9 + 0.25),
    "sum": SumRequest(("agent-1", "agent-2"), 5, "d" * 64),
    "refused": REFUSAL,
    "answered": AnswerSent(9, "e" * 64),
    "settled": Settled(),
    "poll": POLL,
    "whole-second poll": Poll("", 5, 0, "", 3, "c" * 64, "0.1.0", {}),
    "mail": Mail("1790000000000-3", 7, "a" * 64),
    "a party's own mail": Mail("", 0, "", 9, "e" * 64),
    "proposal": PROPOSAL,
    "willing": Willing("job-1", 1_800_000_000),
    "declined": Declined("job-1", REFUSAL),
    "withdrawn": Withdrawn("job-1"),
}
SHARED: dict[str, tuple[ShareVector | BallotShare, WinnerTerms | None]] = {
    "seed share": (SHARES[0], None),
    "word share": (SHARES[2], None),
    "ballot seed share": (PAIRS[0], WINNER_ROUND.terms),
    "ballot word share": (PAIRS[2], WINNER_ROUND.terms),
    "field share": (FIELD_SHARES[2], REVERSE_ROUND.terms),
}
Decode = Callable[[bytes], Any]


def of_share(terms: WinnerTerms | None) -> tuple[Decode, Callable[[Any], bytes]]:
    return lambda data: share_from_bytes(data, max_entries=15, terms=terms), share_to_bytes


HOLDINGS = {"agent-2": bytes(range(16)), "agent-1": bytes(16)}
BODIES: dict[str, tuple[bytes, Decode, Callable[[Any], bytes]]] = {
    "holdings": (holdings_to_bytes(HOLDINGS), holdings_from_bytes, holdings_to_bytes),
    "aggregate-share": (aggregate_to_bytes(AGGREGATE), aggregate_from_bytes, aggregate_to_bytes),
    "winner aggregate-share": (aggregate_to_bytes(WINNER_AGGREGATE), aggregate_from_bytes, aggregate_to_bytes),
    "winner": (winner_to_bytes(WINNER), winner_from_bytes, winner_to_bytes),
}
BODIES |= {name: (share_to_bytes(share), *of_share(terms)) for name, (share, terms) in SHARED.items()}
BODIES |= {name: (body.encode(), type(body).decode, type(body).encode) for name, body in WORDS.items()}
