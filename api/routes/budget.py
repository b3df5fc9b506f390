"""Budgets and the ledger: what was spent, what is left, and every entry behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query

from api import examples
from api.access import Route
from api.documentation import answers
from api.routes.parameters import AgentId, Limit, Who
from api.schema import BudgetView, LedgerPage

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator


def budget_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/budget, and /v1/ledger."""
    router = APIRouter(tags=["budget"], route_class=Route)

    @router.get(
        "/v1/budget",
        summary="Read all budgets",
        description="Every account at both levels: its cap, what is spent, what is left.",
        responses=answers("All accounts", examples.BUDGET),
    )
    def read_budget() -> BudgetView:
        return coordinator.budget()

    @router.get(
        "/v1/budget/agents/{agent_id}",
        summary="Read an agent's budget",
        description="The agent's accounts at the coordinator. The agent's own ledger may be stricter.",
        responses=answers("The agent's accounts", examples.AGENT_BUDGET, problems=(404, 422)),
    )
    def read_agent_budget(agent_id: AgentId) -> BudgetView:
        return coordinator.agent_budget(agent_id)

    @router.get(
        "/v1/ledger",
        summary="Read the ledger",
        description="Entries in ascending order after a sequence number, optionally of one account or with a text. "
        "A requester reads jobs of others without their names, and finds none of them by a text.",
        responses=answers("One page of entries", examples.LEDGER_PAGE, problems=(422,)),
    )
    def read_ledger(
        who: Who,
        after: Annotated[int, Query(ge=0, lt=2**63, examples=[0], description="entries after this number")] = 0,
        limit: Limit = 100,
        account: Annotated[
            str | None, Query(max_length=300, examples=["federation"], description="only of this account")
        ] = None,
        search: Annotated[
            str | None, Query(max_length=300, examples=[examples.JOB_ID], description="only with this text")
        ] = None,
    ) -> LedgerPage:
        return coordinator.ledger_page(after, limit, account or None, search or None, reader=who)

    return router
