"""The row check among three talliers: commit, reveal, combine, compare; before anything is opened.

What it proves stands in labeler.wellformed; here are its three exchanges over the connections of a job. A
commitment and a nonce are 32 bytes, sent as eight words of 32 bits, because a connection carries residues only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import ProtocolViolation
from labeler.randomness import os_source
from labeler.wellformed import (
    NONCE_BYTES,
    check_commitment,
    coefficients,
    combine,
    commitment,
    misshapen,
    refuse_misshapen,
)
from workers.winner.engine import NUM_PARTIES, WinnerJob
from workers.winner.links import Links

_COMMITMENT, _NONCE, _COMBINATION = (-(2**63) + step for step in range(3))
"""Labels of the three messages; MPyC's are hashes, of which one is equal with probability 2^-64."""

_HALF_WORDS: Final = NONCE_BYTES // 4


async def check_rows(links: Links, job: WinnerJob, rows: NDArray[np.uint64]) -> None:
    """Compare what the rows of every contributor sum to at all talliers together.

    Args:
        links: open connections of the job.
        job: names the contributors, in the order of the rows.
        rows: this tallier's row sums, residues, shape (contributors, num_queries).

    Raises:
        ProtocolViolation: a tallier revealed another nonce than it had committed to or sent something else, or rows
            do not add up: then the error names the agents.
    """
    party, field = job.party, job.field
    nonce = os_source().bytes(NONCE_BYTES)
    committed = await _exchange(links, _COMMITMENT, _pack(commitment(nonce, agreement=job.agreement, tallier=party)))
    revealed = [_unpack(words) for words in await _exchange(links, _NONCE, _pack(nonce))]
    for tallier, words in enumerate(committed):
        check_commitment(_unpack(words), revealed[tallier], agreement=job.agreement, tallier=tallier)
    factors = coefficients(revealed, agreement=job.agreement, num_queries=job.num_queries, field=field)
    combinations = await _exchange(links, _COMBINATION, combine(rows, factors, field))
    refuse_misshapen(misshapen(combinations, job.contributors, field))


async def _exchange(links: Links, label: int, own: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    """Send the same words to both others; everybody's words, in tallier order."""
    for link in links.peers.values():
        link.send(label, own.astype("<u8").tobytes())
    everybody = []
    for tallier in range(NUM_PARTIES):
        if tallier == links.party:
            everybody.append(own)
            continue
        payload = links.peers[tallier].receive(label)
        data = payload if isinstance(payload, bytes) else await payload
        everybody.append(np.frombuffer(data, dtype="<u8").astype(np.uint64))
    return everybody


def _pack(data: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(data, dtype="<u4").astype(np.uint64)


def _unpack(words: NDArray[np.uint64]) -> bytes:
    if words.shape != (_HALF_WORDS,) or int(words.max()) >= 2**32:
        raise ProtocolViolation("a tallier sent something that is no commitment and no nonce of a row check")
    return words.astype("<u4").tobytes()
