"""The price of a job that somebody thinks of, and whether the budgets would cover it now. Nothing is charged."""

from __future__ import annotations

from typing import Final

from api.coordinator.config import CoordinatorConfig
from api.coordinator.ownership import Owners, Reader
from api.coordinator.pricing import estimate
from api.coordinator.stores import Stores
from api.coordinator.tasks import describe_task
from api.schema import EstimateRequest, EstimateView
from labeler.task import Task

_MOST_PRICED = 4096


class Estimates:
    """See the module."""

    def __init__(self, config: CoordinatorConfig, stores: Stores, owners: Owners) -> None:
        self._config = config
        self._stores = stores
        self._owners = owners
        self._priced: set[tuple[object, ...]] = set()

    def estimate(self, request: EstimateRequest, *, reader: Reader) -> EstimateView:
        """The price of a job; charges nothing."""
        if request.task_id is not None:
            record = self._owners.task(reader, request.task_id)
            task, participants = record.task, record.participants
        else:
            assert request.task is not None  # noqa: S101  # the request's own validator
            task, participants = describe_task(request.task, config=self._config, parties=self._stores.parties)
        queries = request.queries or task.max_queries
        balances = self._stores.ledger.known_balances.all()
        view = estimate(task, participants, queries, balances, delta=self._config.delta, records=request.records)
        if len(self._priced) >= _MOST_PRICED:
            self._priced.clear()
        self._priced.add(_numbers(task, queries))
        return view

    def estimate_at_once(self, request: EstimateRequest, *, reader: Reader) -> EstimateView | None:
        """`estimate` without a look into the journal; None where one is needed."""
        record = None if request.task_id is None else self._stores.tasks.made(request.task_id)
        balances = self._stores.ledger.known_balances.at_once()
        if record is None or balances is None or (reader.role == "requester" and record.created_by != reader.token_id):
            return None
        queries = request.queries or record.task.max_queries
        if _numbers(record.task, queries) not in self._priced or request.records is not None:
            return None  # the first time, a certified price takes long
        return estimate(record.task, record.participants, queries, balances, delta=self._config.delta)


def _numbers(task: Task, queries: int) -> tuple[object, ...]:
    """All that decides a price: where these were priced before, the next takes a millisecond.

    Everything but names. A field that is left out would let a requester have a price of seconds worked out by the
    loop that serves everybody: with another grid, or another number of dropouts.
    """
    deciding = task.model_dump_json(exclude=_NAMES)
    return (deciding, task.num_classes, queries)


_NAMES: Final = {"name", "classes", "nonce", "backbone_fingerprint"}
