"""Budgets, the ledger, and signed evidence of both from the verified journal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from api import examples
from api.access import Route
from api.documentation import MAX_ID_LENGTH, After, AgentId, Limit, Who, answers
from api.limits import Slots
from api.schema import BudgetView, LedgerPage, QueryBudgetPage
from labeler.ledger.evidence import EvidenceScope

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
        return coordinator.budget(agent_id)

    @router.get(
        "/v1/budget/queries",
        summary="Read the budget of every query",
        description="What each question took of the federation's budget, and the account's total after it: the last "
        "question of the newest job first, of one job or of all that the token may see. `share_kind` says what a share "
        "is; except for `life` those of a job add up to its charge in the ledger. A question has a row once its "
        "charge is final. While prices of a job's winners are computed, the list of all jobs names it in `waiting`, "
        "and the list of that job is a 503.",
        responses=answers("One page of queries", examples.QUERY_BUDGETS, problems=(404, 422)),
    )
    def read_query_budgets(
        who: Who,
        job_id: Annotated[
            str | None, Query(max_length=MAX_ID_LENGTH, examples=[examples.JOB_ID], description="only of this job")
        ] = None,
        after: After = None,
        limit: Limit = 100,
    ) -> QueryBudgetPage:
        return coordinator.query_budgets(job_id, after, limit, reader=who)

    @router.get(
        "/v1/ledger",
        summary="Read the ledger",
        description="Entries in ascending order after a sequence number, optionally of one account or with a text. "
        "A requester reads jobs of others without their names, and finds none of them by a text. A search looks "
        "through a part of the ledger: a page may be short or empty and still name the next one.",
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


_SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'"
_PERIOD = "jobs submitted from this time on, ISO 8601; without a zone UTC"


def evidence_routes(coordinator: Coordinator) -> APIRouter:
    """Route /v1/evidence."""
    router = APIRouter(tags=["evidence"], route_class=Route)
    slots = Slots("documents of evidence", each=1, total=2)

    @router.get(
        "/v1/evidence",
        response_class=Response,
        summary="Make signed evidence",
        description="One document per task or period, from the journal verified from its first entry: the guarantee "
        "and its proof, who was asked, who refused, what was charged and released, and the head of the chain. "
        "`labeler evidence verify` checks it. A viewer's or an administrator's token; format=html is a page to print.",
        responses=_documented(),
    )
    def read_evidence(
        who: Who,
        task: Annotated[
            str, Query(pattern="^([0-9a-f]{64})?$", examples=[examples.TASK_ID], description="digest of one task")
        ] = "",
        since: Annotated[datetime | None, Query(examples=["2027-03-01T00:00:00Z"], description=_PERIOD)] = None,
        until: Annotated[
            datetime | None, Query(examples=["2027-04-01T00:00:00Z"], description="and before this time")
        ] = None,
        format: Annotated[  # the name of the parameter in a URL
            Literal["json", "html"], Query(examples=["json"], description="the signed file, or a page to print")
        ] = "json",
    ) -> Response:
        with slots.hold(who.token_id):
            signed = coordinator.evidence(EvidenceScope(task, _with_zone(since), _with_zone(until)))
        headers = {"Content-Disposition": f'attachment; filename="evidence.{format}"'}
        if format == "json":
            return Response(signed.to_bytes(), media_type="application/json", headers=headers)
        from feature_store.results.evidence import render_page  # imported here: starting needs no templates

        page = render_page(signed.evidence, verify_key=signed.verify_key, signature=signed.signature)
        return Response(page, media_type="text/html", headers=headers | {"Content-Security-Policy": _SANDBOX})

    return router


def _with_zone(at: datetime | None) -> datetime | None:
    return at if at is None or at.tzinfo is not None else at.replace(tzinfo=UTC)


def _documented() -> dict[int | str, dict[str, Any]]:
    """Return the answers of the route; docs/evidence.md describes the document's fields."""
    documented = answers("The signed document", examples.EVIDENCE, problems=(404, 413, 422))
    documented[200]["content"]["text/html"] = {"schema": {"type": "string"}, "example": "<!doctype html>..."}
    return documented
