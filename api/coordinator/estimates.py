"""Price estimates for requesters, which also say whether the budgets would cover the price now. Nothing is charged.

A short price has a closed form and takes a millisecond. A long price is a certified one, of winners or of sampled
steps. It takes a second at a new setting; finding the noise for such a price takes about ten seconds. Any token may ask
for any price. So short and long prices have separate threads, and requesters take turns in each (api.fair_pool). Only a
few long prices may wait. Other requests to the service wait for neither kind.

The accounting keeps what it certified (labeler.accounting.losses), and only it knows what it has. So a price begins
among the short ones. If something must be certified again, the price stops and waits among the long ones. A second
request for the same setting, or a retry after a refusal, is immediate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from api.coordinator.budgets import Budgets
from api.coordinator.config import CoordinatorConfig
from api.coordinator.ownership import Owners, Reader
from api.coordinator.pricing import estimate
from api.coordinator.stores import Stores
from api.coordinator.tasks import describe_task
from api.fair_pool import FairPool
from api.limits import Slots
from api.schema import EstimateRequest, EstimateView
from labeler.accounting.losses import NotCertified, only_certified
from labeler.errors import Unavailable
from labeler.solving import WantedTask
from labeler.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS: Final = 2
"""Threads for prices in closed form; long ones are computed one at a time."""

EACH: Final = 12
TOTAL: Final = 15
"""The most long prices that may wait, per token and in all.

Submission threads wait here too, so the total is smaller than their number."""

WAIT_S: Final = 30.0
RETRY_AFTER_S: Final = 10

Answer = TypeVar("Answer")


class PricesWait(Unavailable):
    """A price was not ready in time; `retry_after_s` says when to ask again."""

    retry_after_s = RETRY_AFTER_S


class Prices:
    """Two queues of price requests, one for short prices and one for long ones."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._slots = Slots("long prices", each=EACH, total=TOTAL)
        self._short = FairPool("prices", threads=THREADS)
        self._long = FairPool("long prices", threads=1)

    async def run(self, name: str, piece: Callable[[], Answer], *, is_long: bool = False) -> Answer:
        """Compute a price when its turn comes, without blocking the event loop.

        Args:
            name: the token's id.
            piece: may be begun twice, so it writes only once its prices are known.
            is_long: it waits among long prices at once.

        Raises:
            TooManyRequests, PricesWait: see `run_long`.
        """
        if not is_long:
            with suppress(NotCertified):
                return await asyncio.wrap_future(self._short.submit(name, only_certified()(piece)))
        with self._in_time(name):
            return await asyncio.wait_for(asyncio.wrap_future(self._long.submit(name, piece)), self._wait_s)

    def run_long(self, name: str, piece: Callable[[], Answer]) -> Answer:
        """Compute a long price when its turn comes; blocks the calling thread.

        Raises:
            TooManyRequests: too many prices wait, of this name or in all.
            PricesWait: it took too long. The computation continues, and its result is cached.
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
                    f"this price was not ready within {self._wait_s:.0f} s: it takes long to compute, and others were "
                    "before it. Finished parts are kept. Ask again, ask for fewer queries, or give sigma_votes instead "
                    "of epsilon"
                ) from None

    def stop(self) -> None:
        """Start no other computation; running ones finish."""
        self._short.stop(wait_s=0)
        self._long.stop(wait_s=0)


def takes_long(task: Task | WantedTask) -> bool:
    """Return whether such a task's price needs a certified computation rather than a closed form."""
    return task.release == "winner" or (task.training is not None and task.training.sampled is not None)


class Estimates:
    """Answers requests for the price of a job."""

    def __init__(
        self, config: CoordinatorConfig, stores: Stores, owners: Owners, prices: Prices, budgets: Budgets
    ) -> None:
        self._config = config
        self._stores = stores
        self._owners = owners
        self._prices = prices
        self._budgets = budgets

    async def price(self, request: EstimateRequest, *, reader: Reader) -> EstimateView:
        """Return the price of a job when the reader's turn comes; charges nothing.

        Raises:
            TooManyRequests, PricesWait: see `Prices.run_long`.
        """
        return await self._prices.run(reader.token_id, partial(self._estimate, request, reader))

    def _estimate(self, request: EstimateRequest, reader: Reader) -> EstimateView:
        if request.task_id is not None:
            record = self._owners.task(reader, request.task_id)
            task, participants = record.task, record.participants
        else:
            assert request.task is not None  # noqa: S101  # the request's own validator
            task, participants = describe_task(request.task, config=self._config, parties=self._stores.parties)
        queries = request.queries or task.max_queries
        return estimate(
            task, participants, queries, self._budgets.balances(), delta=self._config.delta, records=request.records
        )
