"""The row check among three talliers: commit, reveal, combine, compare; before anything is opened.

What it proves stands in labeler.tally; here are its three exchanges over the connections of a job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from labeler.randomness import os_source
from labeler.tally import (
    NONCE_BYTES,
    check_commitment,
    coefficients,
    combine,
    commitment,
    misshapen,
    refuse_misshapen,
)
from workers.winner.engine import WinnerJob

Share = Callable[[bytes], Awaitable[list[bytes]]]
"""Sends the same bytes to both others, and gives everybody's, as long, in tallier order."""


async def check_rows(share: Share, job: WinnerJob, rows: NDArray[np.uint64]) -> None:
    """Compare what the rows of every contributor sum to at all talliers together.

    Args:
        share: with the two others, on the channel of the job.
        job: names the contributors, in the order of the rows.
        rows: this tallier's row sums, residues, shape (contributors, num_queries).

    Raises:
        ProtocolViolation: a tallier revealed another nonce than it had committed to or sent something else, or rows
            do not add up: then the error names the agents.
    """
    field = job.field
    nonce = os_source().bytes(NONCE_BYTES)
    committed = await share(commitment(nonce, agreement=job.agreement, tallier=job.party))
    revealed = await share(nonce)
    for tallier, said in enumerate(committed):
        check_commitment(said, revealed[tallier], agreement=job.agreement, tallier=tallier)
    factors = coefficients(revealed, agreement=job.agreement, num_queries=job.num_queries, field=field)
    combinations = [
        np.frombuffer(data, dtype="<u8").astype(np.uint64)
        for data in await share(combine(rows, factors, field).astype("<u8").tobytes())
    ]
    for combination in combinations:
        field.check(combination, "a combination of row sums")
    refuse_misshapen(misshapen(combinations, job.contributors, field))
