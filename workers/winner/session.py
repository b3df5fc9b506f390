"""Sessions in which three talliers compute winners, over links or in one process.

A session is one computation with the two other talliers. It covers every job that all three were given, each with its
own outcome. It has four steps.

    meet       both connections open, and each tallier says its jobs; those given to all three alike go on, in the order
               of their names (workers.winner.links); the dealer sends the seeds, and talliers 0 and 1 share a key.
    rows       where jobs check rows: one exchange for all of them, which decides the jobs that go on.
    compute    chunk after chunk of all jobs (workers.winner.tournament).
    open       the dealer opens the winners of all jobs, except those with a sum out of its range.

A job that fails a step is left out of the next ones at all three talliers, and costs the others nothing: all jobs share
the waits. A fault of a connection ends the computation for all of its jobs; all can be tried again. Nothing is kept:
seeds, masks and parts are gone with the computation, and the next one draws new ones.

`ThreeTalliers` runs three talliers in one process, over TLS with certificates, for `labeler run --winner secure` and
for measurements. It gives no protection from a reader of this process's memory, which holds all three shares. It shows
that the computation between hospitals gives the very same labels.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.randomness import os_source
from labeler.sharing import WinnerTerms, winner_time_limit_s
from workers.winner.certificates import issue_certificate
from workers.winner.engine import ABSTAINED, NUM_PARTIES, Address, Outcome, WinnerJob, WinnerOrder
from workers.winner.links import CLOSE_LIMIT_S, OPENING, Channel, Links, Record
from workers.winner.tournament import (
    DEALER,
    SEED_BYTES,
    Finished,
    Room,
    answer_bytes,
    check_rows,
    deal_chunk,
    find_chunk,
    levels,
    masked_answer,
    open_answers,
    queries_of_a_chunk,
)

_SESSION: Final[Channel] = (2**32 - 3, 0)
"""The channel of messages about all jobs."""

_WHOLE_JOB: Final = 2**32 - 1
"""The chunk number of messages about a whole job."""

_STOP_POLL_S: Final = 0.02

_PASSED: Final = b"\x01"
_VOID: Final = b"\x00"


class SecureEngine:
    """An engine that finds winners in the calling thread, by messages to the two others; see `WinnerEngine`.

    Args:
        record: told everything that arrives; tests only.
    """

    def __init__(self, *, record: Record | None = None) -> None:
        self._record = record

    def winners(
        self,
        orders: Sequence[WinnerOrder],
        stop: threading.Event | None = None,
        *,
        met: threading.Event | None = None,
    ) -> list[Outcome]:
        """See `WinnerEngine.winners`."""
        try:
            return asyncio.run(_compute(orders, stop, met, self._record))
        except LabelerError as error:
            return [error for _ in orders]
        except MemoryError:
            problem = Unavailable("the memory of this tallier does not suffice; ask in smaller batches")
        # The error's words are not passed on: they could quote a share.
        except Exception as error:
            problem = Unavailable(f"the computation broke off ({type(error).__name__}); it can be tried again")
        return [problem for _ in orders]


async def _compute(
    orders: Sequence[WinnerOrder], stop: threading.Event | None, met: threading.Event | None, record: Record | None
) -> list[Outcome]:
    """Compute, while watching the clock, the connections and the stop event."""
    own = _secrets(orders[0].job.party)
    links = Links([order.job for order in orders], opening=own, record=record)
    work = asyncio.ensure_future(_Session(links, orders, own, met).run())
    watch = asyncio.ensure_future(_until(stop))
    ends: set[asyncio.Future[Any]] = {work, watch, links.failed}
    try:
        limit_s = sum(order.job.time_limit_s for order in orders)
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.exception() is None:
            return work.result()
        if links.failed.done():
            problem: BaseException | None = links.problem
        elif work.done():
            problem = work.exception()
        elif watch.done():
            problem = Unavailable("the winner job was stopped; it can be tried again with the same shares")
        else:
            problem = Unavailable(
                f"the winner job ran out of time ({links.waiting_for()}); try again with the same shares"
            )
        # The third tallier must learn of a broken connection too, unless the whole computation is tried again.
        is_told = links.failed.done() and not isinstance(problem, Unavailable)
        await links.abandon(CLOSE_LIMIT_S, late_limit_s=CLOSE_LIMIT_S if is_told else 0.0)
        raise problem or Unavailable("the winner job ended without an answer")
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def _secrets(party: int) -> dict[int, bytes]:
    """Draw what a tallier sends each peer first: the dealer's seeds, and the key that the dealer must not have."""
    return {peer: os_source().bytes(SEED_BYTES) for peer in ((0, 1) if party == DEALER else (1,) if party == 0 else ())}


async def _until(stop: threading.Event | None) -> None:
    while stop is None or not stop.is_set():
        await asyncio.sleep(_STOP_POLL_S if stop is not None else 3600.0)


class _Wire:
    """Messages of one chunk; see `workers.winner.tournament.Wire`."""

    def __init__(self, links: Links, channel: Channel) -> None:
        self._links = links
        self._channel = channel

    def send(self, peer: int, data: bytes) -> None:
        self._links.send(peer, self._channel, data)

    async def receive(self, peer: int, size: int) -> bytes:
        return await self._links.receive(peer, self._channel, size)


class _Session:
    """One session; see the module. A lane is the place of a job among those that all three do."""

    def __init__(
        self, links: Links, orders: Sequence[WinnerOrder], own: dict[int, bytes], met: threading.Event | None
    ) -> None:
        self._links = links
        self._party = links.party
        self._orders = orders
        self._own = own
        self._met = met
        self._outcomes: dict[str, Outcome] = {}

    async def run(self) -> list[Outcome]:
        links, meeting_limit_s = self._links, max(order.job.meeting_limit_s for order in self._orders)
        try:
            await asyncio.wait_for(links.connect(), meeting_limit_s)
        except TimeoutError:
            raise Unavailable(
                f"not all talliers came to the winner job ({links.waiting_for()}); try again with the same shares"
            ) from None
        if self._met is not None:
            self._met.set()
        lanes = []
        for order in sorted(self._orders, key=lambda order: order.job.job_id):
            problem = links.disagreement(order.job)
            if problem is None:
                lanes.append(order)
            else:
                self._outcomes[order.job.job_id] = problem
        if lanes:
            await self._find(lanes)
        await links.finish()
        return [self._outcomes[order.job.job_id] for order in self._orders]

    async def _find(self, lanes: list[WinnerOrder]) -> None:
        links = self._links
        if self._party == DEALER:
            seeds, key = (self._own[0], self._own[1]), b""
        else:
            seed = await links.receive(DEALER, OPENING, SEED_BYTES)
            seeds = (seed, seed)  # each of the two knows only its own
            key = self._own[1] if self._party == 0 else await links.receive(0, OPENING, SEED_BYTES)
        if any(order.rows is not None for order in lanes):
            lanes = await self._check_rows(lanes)
        await self._open(lanes, await self._chunks(lanes, seeds), key)

    async def _check_rows(self, lanes: list[WinnerOrder]) -> list[WinnerOrder]:
        """Check the rows of the jobs that ask for it; return the jobs with which all three go on."""

        async def check(lane: int, order: WinnerOrder, rows: NDArray[np.uint64]) -> None:
            try:
                await check_rows(lambda own: self._everybody(own, (lane, _WHOLE_JOB)), order.job, rows)
            except ProtocolViolation as error:
                self._outcomes[order.job.job_id] = error

        checks = (check(lane, order, order.rows) for lane, order in enumerate(lanes) if order.rows is not None)
        await asyncio.gather(*checks)
        own = bytes(order.job.job_id not in self._outcomes for order in lanes)
        told = await self._everybody(own, _SESSION)
        going = []
        for lane, order in enumerate(lanes):
            stopped = [peer for peer in range(NUM_PARTIES) if told[peer][lane] != 1]
            if not stopped:
                going.append(order)
            elif order.job.job_id not in self._outcomes:
                self._outcomes[order.job.job_id] = Unavailable(
                    f"tallier {stopped[0]} did not go on with this job; it can be tried again with the same shares"
                )
        return going

    async def _chunks(self, lanes: list[WinnerOrder], seeds: tuple[bytes, bytes]) -> list[list[Finished]]:
        """Compute all chunks of all jobs, started in the same order at all three; returned by lane."""
        room = Room()
        work: list[Coroutine[Any, Any, Finished | None]] = []
        counts = []
        for lane, order in enumerate(lanes):
            height = queries_of_a_chunk(order.job)
            starts = range(0, order.job.num_queries, height)
            counts.append(len(starts))
            for chunk, start in enumerate(starts):
                wire = _Wire(self._links, (lane, chunk))
                work.append(self._chunk(room, order.job, order.share[start : start + height], chunk, seeds, wire))
        found = await _all(work)
        parts = iter(one for one in found if one is not None)
        return [] if self._party == DEALER else [[next(parts) for _ in range(count)] for count in counts]

    async def _chunk(
        self,
        room: Room,
        job: WinnerJob,
        share: NDArray[np.uint64],
        chunk: int,
        seeds: tuple[bytes, bytes],
        wire: _Wire,
    ) -> Finished | None:
        async with room.of(len(share) * max(levels(job))):
            if self._party == DEALER:
                await deal_chunk(job, share, chunk, seeds, wire)
                return None
            return await find_chunk(job, share, chunk, seeds[self._party], wire)

    async def _open(self, lanes: list[WinnerOrder], finished: list[list[Finished]], key: bytes) -> None:
        """Open the winners of every job whose differences were in range; the dealer combines and announces them."""
        found = await asyncio.gather(
            *(self._open_one(lane, order, finished[lane] if finished else [], key) for lane, order in enumerate(lanes))
        )
        for order, winners in zip(lanes, found, strict=True):
            self._outcomes[order.job.job_id] = _checked(winners, order.job)

    async def _open_one(
        self, lane: int, order: WinnerOrder, chunks: list[Finished], key: bytes
    ) -> NDArray[np.int16] | None:
        links, job, channel = self._links, order.job, (lane, _WHOLE_JOB)
        if self._party != DEALER:
            links.send(DEALER, channel, masked_answer(job, chunks, key))
            has_passed = await links.receive(DEALER, channel, 1)
            if has_passed != _PASSED:
                return None
            opened = await links.receive(DEALER, channel, 2 * job.num_queries)
            return np.frombuffer(opened, dtype="<i2").astype(np.int16)
        winners = open_answers(*[await links.receive(peer, channel, answer_bytes(job)) for peer in (0, 1)])
        for peer in (0, 1):
            links.send(peer, channel, _PASSED if winners is not None else _VOID)
            if winners is not None:
                links.send(peer, channel, winners.astype("<i2").tobytes())
        return winners

    async def _everybody(self, own: bytes, channel: Channel) -> list[bytes]:
        """Send the same bytes to both others, and return everybody's in tallier order."""
        others = [peer for peer in range(NUM_PARTIES) if peer != self._party]
        for peer in others:
            self._links.send(peer, channel, own)
        theirs = {peer: await self._links.receive(peer, channel, len(own)) for peer in others}
        return [own if peer == self._party else theirs[peer] for peer in range(NUM_PARTIES)]


async def _all(work: Sequence[Coroutine[Any, Any, Finished | None]]) -> list[Finished | None]:
    """Run everything, started in this order; if one fails, stop the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return [task.result() for task in tasks]


def _checked(winners: NDArray[np.int16] | None, job: WinnerJob) -> Outcome:
    if winners is None:
        return ProtocolViolation(
            "the noisy sums of this round lie outside the range that its task allows, so they were not opened and "
            "the round is void: an agent has sent noise or votes that its task does not allow, or a share of a "
            "tallier was damaged. Find out which, and submit the task again without it"
        )
    least = 0 if job.threshold is None else ABSTAINED
    if winners.min() >= least and winners.max() < job.num_classes:
        return winners
    return ProtocolViolation("what was opened is no class of the job, so a share was damaged or of another job")


LOOPBACK = "127.0.0.1"


class ThreeTalliers:
    """An engine that runs the secure computation among three threads; see `labeler.release.WinnerEngine`."""

    def winners(self, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> NDArray[np.int16]:
        """See `labeler.release.WinnerEngine.winners`."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=NUM_PARTIES) as pool:
            jobs = three_jobs(Path(folder), num_queries=len(shares[0]), num_classes=shares[0].shape[1], terms=terms)
            orders = [WinnerOrder(job, share) for job, share in zip(jobs, shares, strict=True)]
            outcomes = [found[0] for found in pool.map(lambda order: SecureEngine().winners([order]), orders)]
        failures = [one for one in outcomes if isinstance(one, LabelerError)]
        if failures:
            # When one tallier breaks off, the others only find it gone: its own error says what happened.
            raise next((error for error in failures if not isinstance(error, Unavailable)), failures[0])
        first, *others = [one for one in outcomes if not isinstance(one, LabelerError)]
        if any(not np.array_equal(first, other) for other in others):
            raise ProtocolViolation("the three talliers have opened different winners; the round is void")
        return first


def three_jobs(folder: Path, *, num_queries: int, num_classes: int, terms: WinnerTerms) -> list[WinnerJob]:
    """Return one job at its three talliers, with new certificates in this folder and free ports of this machine."""
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
    """Return free ports of loopback; all are held at once, so that they differ."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]
