"""Three talliers in one process find winners as three that distrust each other would, over TLS with certificates.

For `labeler run --winner secure` and for measuring. It protects nothing from whoever reads this process's memory,
where all three shares lie; it shows that the computation between hospitals gives the very same labels.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.winner import WinnerTerms, winner_time_limit_s
from workers.winner.certificates import issue_certificate
from workers.winner.engine import NUM_PARTIES, Address, WinnerJob, WinnerOrder
from workers.winner.session import SecureEngine

LOOPBACK = "127.0.0.1"


class ThreeTalliers:
    """Finds winners by secure computation among three threads; see `labeler.release.WinnerEngine`."""

    def winners(self, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> NDArray[np.int16]:
        """See `labeler.release.WinnerEngine.winners`."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=NUM_PARTIES) as pool:
            jobs = three_jobs(Path(folder), num_queries=len(shares[0]), num_classes=shares[0].shape[1], terms=terms)
            orders = [WinnerOrder(job, share) for job, share in zip(jobs, shares, strict=True)]
            outcomes = [found[0] for found in pool.map(lambda order: SecureEngine().winners([order]), orders)]
        failures = [one for one in outcomes if isinstance(one, LabelerError)]
        if failures:
            # Where one breaks off the others find it gone: what happened is what the one says.
            raise next((error for error in failures if not isinstance(error, Unavailable)), failures[0])
        first, *others = [one for one in outcomes if not isinstance(one, LabelerError)]
        if any(not np.array_equal(first, other) for other in others):
            raise ProtocolViolation("the three talliers have opened different winners; the round is void")
        return first


def three_jobs(folder: Path, *, num_queries: int, num_classes: int, terms: WinnerTerms) -> list[WinnerJob]:
    """One job at its three talliers, with new certificates in this folder and free ports of this machine."""
    paths = [folder / f"tallier-{party}.pem" for party in range(NUM_PARTIES)]
    certificates = tuple(issue_certificate(path.stem, path=path, now=datetime.now(UTC)) for path in paths)
    addresses = tuple(Address(LOOPBACK, port) for port in free_ports(NUM_PARTIES))
    return [
        WinnerJob(
            job_id="in-process",
            agreement="0" * 64,
            party=party,
            addresses=addresses,
            certificates=certificates,
            identity_path=path,
            num_queries=num_queries,
            num_classes=num_classes,
            lowest=terms.lowest,
            highest=terms.highest,
            threshold=terms.threshold,
            time_limit_s=winner_time_limit_s(num_queries, num_classes),
        )
        for party, path in enumerate(paths)
    ]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free; all are held at once, so that they differ."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]
