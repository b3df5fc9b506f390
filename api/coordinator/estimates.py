"""Prices that people ask for, worked out in turns, and whether the budgets would cover them now. Nothing is charged.

A price in closed form takes a millisecond. A certified price of winners, or of sampled steps, takes a second where
nobody has asked for its setting before; the noise for such a price some ten. Anybody with a token may ask for any. So
both kinds have threads of their own, requesters take turns in each (api.fair_pool), few may wait for the long ones, and
whoever only looks waits for neither. What was computed is remembered by the accounting, so that whoever waits for the
same setting, or asks again after a refusal, has it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from api.coordinator.config import CoordinatorConfig
from api.coordinator.ownership import Owners, Reader
from api.coordinator.pricing import estimate
from api.coordinator.stores import Stores
from api.coordinator.tasks import describe_task
from api.fair_pool import FairPool
from api.limits import Slots
from api.schema import EstimateRequest, EstimateView
from labeler.errors import Unavailable
from labeler.ledger.chain import Head
from labeler.ledger.ledger import Balance
from labeler.methods import METHODS, MethodName, ReleaseKind
from labeler.task import Level, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS: Final = 2
"""For prices in closed form; long ones are computed one after the other."""

EACH: Final = 12
TOTAL: Final = 15
"""Long prices that wait, of one token and of all; fewer than threads that take submissions, which wait here too."""

WAIT_S: Final = 30.0
RETRY_AFTER_S: Final = 10
_MOST_KNOWN: Final = 4096
_NAMES: Final = {"name", "classes", "nonce", "backbone_fingerprint"}

Answer = TypeVar("Answer")


class PricesWait(Unavailable):
    """A price was not computed in time; `retry_after_s` says when to ask again."""

    retry_after_s = RETRY_AFTER_S


class Prices:
    """The turns of those who ask for prices; see the module."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._slots = Slots("long prices", each=EACH, total=TOTAL)
        self._short = FairPool("prices", threads=THREADS)
        self._long = FairPool("long prices", threads=1)
        self._known: set[tuple[object, ...]] = set()

    def is_long(self, task: Task, queries: int, sizes: tuple[int, ...] = ()) -> bool:
        """Whether a price may take seconds: of such a kind, and of a setting that was not priced before.

        Args:
            sizes: of the rounds, where each of them is priced.
        """
        return takes_long(task.method, task.release) and _numbers(task, queries, sizes) not in self._known

    def note(self, task: Task, queries: int, sizes: tuple[int, ...] = ()) -> None:
        """It was priced: from now on that takes a millisecond."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(_numbers(task, queries, sizes))

    async def run(self, name: str, piece: Callable[[], Answer], *, is_long: bool = False) -> Answer:
        """Compute a price when it is its turn, while the event loop goes on.

        Args:
            name: of whoever asks.

        Raises:
            TooManyRequests, PricesWait: see `run_long`.
        """
        if not is_long:
            return await asyncio.wrap_future(self._short.submit(name, piece))
        with self._in_time(name):
            return await asyncio.wait_for(asyncio.wrap_future(self._long.submit(name, piece)), self._wait_s)

    def run_long(self, name: str, piece: Callable[[], Answer]) -> Answer:
        """Compute a long price when it is its turn; the thread that asks waits for it.

        Raises:
            TooManyRequests: too many wait, of this name or in all.
            PricesWait: it took too long. What is being computed goes on, and is remembered.
        """
        with self._in_time(name):
            future = self._long.submit(name, piece)
            try:
                return future.result(self._wait_s)
            finally:
                future.cancel()

    @contextmanager
    def _in_time(self, name: str) -> Iterator[None]:
        with self._slots.hold(name):
            try:
                yield
            except TimeoutError:
                raise PricesWait(
                    "this price takes long to compute, others came before it, and it was not done within "
                    f"{self._wait_s:.0f} s; what was computed is kept. Ask again, or for fewer queries, or give "
                    "sigma_votes instead of epsilon"
                ) from None

    def stop(self) -> None:
        """Begin no other; what is being computed ends by itself."""
        self._short.stop(wait_s=0)
        self._long.stop(wait_s=0)


def takes_long(method: MethodName, release: ReleaseKind) -> bool:
    """Whether the price of such a task is found by a certified computation, not in closed form."""
    return release == "winner" or METHODS[method].is_sampled


def _numbers(task: Task, queries: int, sizes: tuple[int, ...]) -> tuple[object, ...]:
    """All that decides a price: everything but names.

    A field that is left out would let a requester have a price of seconds worked out among those in closed form: with
    another grid, or another number of dropouts.
    """
    deciding = task.model_dump_json(exclude=_NAMES)
    return (deciding, task.num_classes, queries, tuple(sorted(set(sizes))))


class Estimates:
    """Answers to what a job would cost."""

    def __init__(self, config: CoordinatorConfig, stores: Stores, owners: Owners, prices: Prices) -> None:
        self._config = config
        self._stores = stores
        self._owners = owners
        self._prices = prices
        self._known: tuple[Head | None, Mapping[tuple[str, Level], Balance]] = (None, {})

    async def price(self, request: EstimateRequest, *, reader: Reader) -> EstimateView:
        """The price of a job, when it is the reader's turn; charges nothing.

        Raises:
            TooManyRequests, PricesWait: see `Prices.run_long`.
        """
        is_long = await self._prices.run(reader.token_id, partial(self._takes_long, request, reader))
        return await self._prices.run(reader.token_id, partial(self._estimate, request, reader), is_long=is_long)

    def _takes_long(self, request: EstimateRequest, reader: Reader) -> bool:
        if request.task is not None:
            return takes_long(request.task.method, request.task.release)
        assert request.task_id is not None  # noqa: S101  # the request's own validator
        task = self._owners.task(reader, request.task_id).task
        return self._prices.is_long(task, request.queries or task.max_queries)

    def _estimate(self, request: EstimateRequest, reader: Reader) -> EstimateView:
        if request.task_id is not None:
            record = self._owners.task(reader, request.task_id)
            task, participants = record.task, record.participants
        else:
            assert request.task is not None  # noqa: S101  # the request's own validator
            task, participants = describe_task(request.task, config=self._config, parties=self._stores.parties)
        queries = request.queries or task.max_queries
        view = estimate(
            task, participants, queries, self._balances(), delta=self._config.delta, records=request.records
        )
        self._prices.note(task, queries)
        return view

    def _balances(self) -> Mapping[tuple[str, Level], Balance]:
        """Every account, read again when the ledger has another entry. Only answers to people rest on it."""
        head = self._stores.ledger.known_head()  # before what is kept under it, which is then as new or newer
        known_at, known = self._known
        if known_at != head:
            known = {(one.account, one.level): one for one in self._stores.ledger.balances()}
            self._known = (head, known)
        return known
