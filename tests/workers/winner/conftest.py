"""Three talliers with certificates of their own, jobs among them, and a way to run all three at once."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from labeler.errors import LabelerError
from labeler.randomness import os_source
from labeler.sharing import split
from tests import doors
from tests.ports import kept_port
from workers.winner.certificates import issue_certificate
from workers.winner.engine import Address, Outcome, TallierWinnerEngine, WinnerJob, WinnerOrder
from workers.winner.session import LOOPBACK

LOWEST, HIGHEST = -15_150, 19_350
"""Sums of three agents with k = 50 and sigma = 25 on the usual grid: 16 bits."""

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Identities:
    """Certificates and the files with their keys, in tallier order."""

    certificates: tuple[str, ...]
    paths: tuple[Path, ...]


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    """Of three talliers."""
    return make_identities(tmp_path_factory.mktemp("identities"))


def make_identities(folder: Path) -> Identities:
    now = datetime.datetime.now(datetime.UTC)
    paths = tuple(folder / f"tallier-{party}.pem" for party in range(3))
    return Identities(tuple(issue_certificate(path.stem, path=path, now=now) for path in paths), paths)


def free_addresses() -> tuple[Address, ...]:
    """Three addresses, of doors (tests.doors), that nobody else listens at."""
    return tuple(Address(doors.HOST, doors.number()) for _ in range(3))


@pytest.fixture
def socket_addresses() -> Iterator[tuple[Address, ...]]:
    """Three addresses on loopback, for tests of sockets and processes, that nobody else listens on until they end."""
    with ExitStack() as kept:
        yield tuple(Address(LOOPBACK, kept.enter_context(kept_port())) for _ in range(3))


@pytest.fixture
def make_jobs(identities: Identities) -> Callable[..., list[WinnerJob]]:
    """One job at its three talliers; settings of `WinnerJob` may be given."""

    def make(queries: int, classes: int, **settings: Any) -> list[WinnerJob]:
        addresses = free_addresses()
        common: dict[str, Any] = {
            "job_id": "job",
            "agreement": "0" * 64,
            "addresses": addresses,
            "certificates": identities.certificates,
            "num_queries": queries,
            "num_classes": classes,
            "lowest": LOWEST,
            "highest": HIGHEST,
            "time_limit_s": 600.0,  # longer than a test may take: none depends on how fast a machine is
            "meeting_limit_s": 600.0,
        } | settings
        return [WinnerJob(party=party, identity_path=path, **common) for party, path in enumerate(identities.paths)]

    return make


def shares_of(sums: NDArray[np.int64], job: WinnerJob) -> list[Words]:
    """Fresh shares of these sums, one per tallier."""
    return [share.expand() for share in split(sums, num_talliers=3, source=os_source(), field=job.field)]


def run_three(
    engines: TallierWinnerEngine | Sequence[TallierWinnerEngine],
    jobs: Sequence[WinnerJob],
    shares: Sequence[Words],
    *,
    stops: Sequence[threading.Event | None] = (None, None, None),
) -> list[Outcome]:
    """All talliers of a job at the same time: what each answered, or the error it raised."""
    each = list(engines) if isinstance(engines, Sequence) else [engines] * len(jobs)

    def one(place: int) -> Outcome:
        try:
            return each[place].winners([WinnerOrder(jobs[place], shares[place])], stops[place])[0]
        except LabelerError as error:
            return error

    with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
        return list(pool.map(one, range(len(jobs))))
