"""Access tokens: made by an administrator, shown once, kept as a hash."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Request, Response

from api import examples
from api.access import Route
from api.documentation import answers
from api.routes.parameters import After, Limit, TokenId
from api.schema import TokenPage, TokenRequest, TokenView
from labeler.errors import InvalidSetting

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator
    from feature_store.journal.tokens import TokenRecord


def token_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/tokens, and /v1/whoami."""
    router = APIRouter(tags=["tokens"], route_class=Route)

    @router.get(
        "/v1/whoami",
        summary="Read who I am",
        description="Name and role of the token the request came with.",
        responses=answers("The token, without its secret", examples.TOKEN),
    )
    def who_am_i(request: Request) -> TokenView:
        return _view(request.state.token)

    @router.get(
        "/v1/tokens",
        summary="List tokens",
        description="All tokens without their secrets, oldest first.",
        responses=answers("One page of tokens", examples.TOKEN_PAGE, problems=(422,)),
    )
    def list_tokens(after: After = None, limit: Limit = 50) -> TokenPage:
        records = sorted(coordinator.tokens.list(), key=_place)
        if after is not None:
            start = _cursor(after)
            records = [record for record in records if _place(record) > start]
        more = records[limit:]
        page = records[:limit]
        return TokenPage(items=tuple(map(_view, page)), next=_next(page[-1]) if more else None)

    @router.post(
        "/v1/tokens",
        status_code=201,
        summary="Make a token",
        description="The secret is in this answer and nowhere else: the service keeps only its SHA-256.",
        responses=answers("The token with its secret", examples.TOKEN_MADE, status=201, problems=(413, 415, 422)),
    )
    def create_token(
        request: Annotated[TokenRequest, Body(examples=[examples.TOKEN_REQUEST])], response: Response
    ) -> TokenView:
        record, secret = coordinator.tokens.create(request.name, request.role)
        response.headers["Cache-Control"] = "no-store"
        return _view(record).model_copy(update={"token": secret})

    @router.delete(
        "/v1/tokens/{token_id}",
        summary="Revoke a token",
        description="The token is refused from now on. Revoking it again changes nothing.",
        responses=answers(
            "The token, revoked", {**examples.TOKEN, "revoked_at": "2027-03-02T08:00:00Z"}, problems=(404, 422)
        ),
    )
    def revoke_token(token_id: TokenId) -> TokenView:
        return _view(coordinator.tokens.revoke(token_id))

    return router


def _view(record: TokenRecord) -> TokenView:
    return TokenView.model_validate(record, from_attributes=True)


def _place(record: TokenRecord) -> tuple[str, str]:
    return (record.created_at.isoformat(), record.token_id)


def _next(record: TokenRecord) -> str:
    return base64.urlsafe_b64encode("|".join(_place(record)).encode()).decode()


def _cursor(after: str) -> tuple[str, str]:
    try:
        at, token_id = base64.b64decode(after, altchars=b"-_", validate=True).decode().split("|")
    except (binascii.Error, ValueError):
        raise InvalidSetting("`after` must be the `next` of the page before") from None
    return (at, token_id)
