"""The price of a job that somebody thinks of, and whether the budgets would cover it now. Nothing is charged."""

from __future__ import annotations

from collections.abc import Mapping

from api.coordinator.config import CoordinatorConfig
from api.coordinator.long_prices import LongPrices, takes_long
from api.coordinator.ownership import Owners, Reader
from api.coordinator.pricing import estimate
from api.coordinator.stores import Stores
from api.coordinator.tasks import describe_task
from api.schema import EstimateRequest, EstimateView
from labeler.ledger.chain import Head
from labeler.ledger.ledger import Balance
from labeler.task import Level


class Estimates:
    """See the module."""

    def __init__(self, config: CoordinatorConfig, stores: Stores, owners: Owners, long_prices: LongPrices) -> None:
        self._config = config
        self._stores = stores
        self._owners = owners
        self._long = long_prices
        self._known: tuple[Head | None, Mapping[tuple[str, Level], Balance]] = (None, {})

    def takes_long(self, request: EstimateRequest, *, reader: Reader) -> bool:
        """Whether it may take seconds of a processor."""
        if request.task is not None:
            return takes_long(request.task.method, request.task.release)
        assert request.task_id is not None  # noqa: S101  # the request's own validator
        task = self._owners.task(reader, request.task_id).task
        return self._long.is_long(task, request.queries or task.max_queries)

    def estimate(self, request: EstimateRequest, *, reader: Reader) -> EstimateView:
        """The price of a job; charges nothing."""
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
        self._long.note(task, queries)
        return view

    def _balances(self) -> Mapping[tuple[str, Level], Balance]:
        """Every account, read again when the ledger has another entry. Only answers to people rest on it."""
        head = self._stores.ledger.known_head()  # before what is kept under it, which is then as new or newer
        known_at, known = self._known
        if known_at != head:
            known = {(one.account, one.level): one for one in self._stores.ledger.balances()}
            self._known = (head, known)
        return known
