"""Routes of administrators: parties and their keys, one-use invitations for sites, and access tokens.

A token is shown once and stored as a hash; a site that joins by an invitation enrols its own keys.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Request, Response

from api import examples
from api.access import Route, client_address
from api.documentation import After, Limit, PartyId, TokenId, Who, answers, problem
from api.schema import (
    EnrolmentRequest,
    EnrolmentView,
    InvitationRequest,
    InvitationView,
    KeysRequest,
    PartiesView,
    PartyRequest,
    PartyView,
    TokenPage,
    TokenRequest,
    TokenView,
    WithdrawnView,
)
from labeler.errors import Forged, InvalidSetting, NotAuthenticated

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator
    from labeler.ledger.tokens import TokenRecord


def party_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/parties."""
    router = APIRouter(tags=["parties"], route_class=Route)

    @router.get(
        "/v1/parties",
        summary="List agents and talliers",
        description="Everybody enrolled, with public keys and last contact (for requesters to the minute), and whether "
        "enough of them are live.",
        responses=answers("All parties", examples.PARTIES),
    )
    def list_parties(who: Who) -> PartiesView:
        return coordinator.roster.party_list(to_the_minute=who.role == "requester")

    @router.post(
        "/v1/parties",
        status_code=201,
        summary="Enrol an agent or a tallier",
        description="Compare the fingerprint with the one its own site shows before you enrol it.",
        responses=answers("The party", examples.PARTY, status=201, problems=(409, 413, 415, 422)),
    )
    def enrol_party(
        request: Annotated[PartyRequest, Body(examples=[examples.PARTY_REQUEST])], response: Response
    ) -> PartyView:
        view = coordinator.roster.enrol(request)
        response.headers["Location"] = "/v1/parties"
        return view

    @router.post(
        "/v1/parties/{party_id}:rotate",
        summary="Give a party new keys",
        description="From now on only messages signed with the new key are taken.",
        responses=answers("The party with its new keys", examples.PARTY, problems=(404, 409, 413, 415, 422)),
    )
    def rotate_party_keys(
        party_id: PartyId, request: Annotated[KeysRequest, Body(examples=[examples.KEYS_REQUEST])]
    ) -> PartyView:
        return coordinator.roster.rotate(party_id, request)

    @router.delete(
        "/v1/parties/{party_id}",
        summary="Revoke a party",
        description="Nothing it sends is taken any more. What it was charged for stays charged.",
        responses=answers("The party, revoked", examples.PARTY_REVOKED, problems=(404, 422)),
    )
    def revoke_party(party_id: PartyId) -> PartyView:
        return coordinator.roster.revoke(party_id)

    return router


def invitation_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/invitations, and /v1/enrolments."""
    router = APIRouter(tags=["parties"], route_class=Route)

    @router.post(
        "/v1/invitations",
        status_code=201,
        summary="Invite a site",
        description="Makes one signed file with all that the site needs, and a phrase to compare by telephone. An "
        "earlier invitation of the same name that was not used opens nothing any more.",
        responses=answers("The invitation", examples.INVITATION, status=201, problems=(404, 409, 413, 415, 422)),
    )
    def create_invitation(
        request: Annotated[InvitationRequest, Body(examples=[examples.INVITATION_REQUEST])],
        who: Who,
    ) -> InvitationView:
        return coordinator.invitations.invite(request, by=who.token_id)

    @router.delete(
        "/v1/invitations/{party_id}",
        summary="Withdraw an invitation",
        description="Invitations of this name that were not used open nothing any more. Whoever joined stays enrolled.",
        responses=answers("How many were withdrawn", examples.WITHDRAWN, problems=(422,)),
    )
    def withdraw_invitation(party_id: PartyId) -> WithdrawnView:
        return coordinator.invitations.withdraw(party_id)

    @router.post(
        "/v1/enrolments",
        summary="Join by an invitation",
        description="The one-use token of an invitation, with the site's own public keys, signed by them. Sent again "
        "with the same keys it is answered the same; other keys are refused.",
        responses=answers(
            "The enrolment",
            examples.ENROLMENT,
            is_open=True,
            problems=(401, 409, 413, 415, 422, 429, 503),
            status_403=problem(
                403, slug="forged", title="The signature or seal is not valid", detail="the signature does not hold"
            ),
        ),
    )
    def join_by_invitation(
        request: Annotated[EnrolmentRequest, Body(examples=[examples.ENROLMENT_REQUEST])], http: Request
    ) -> EnrolmentView:
        try:
            return coordinator.invitations.enrol(request)
        except (NotAuthenticated, Forged):
            http.app.state.limits.failures.hit(client_address(http))
            raise

    return router


def token_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/tokens, and /v1/whoami."""
    router = APIRouter(tags=["tokens"], route_class=Route)

    @router.get(
        "/v1/whoami",
        summary="Read who I am",
        description="Name and role of the token the request came with.",
        responses=answers("The token, without its secret", examples.TOKEN),
    )
    def read_whoami(request: Request) -> TokenView:
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
    def create_token(request: Annotated[TokenRequest, Body(examples=[examples.TOKEN_REQUEST])]) -> TokenView:
        record, secret = coordinator.tokens.create(request.name, request.role)
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
