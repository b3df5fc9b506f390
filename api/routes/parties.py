"""Agents and talliers: enrol with public keys, rotate them, revoke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Response

from api import examples
from api.access import Route
from api.documentation import answers
from api.routes.parameters import PartyId, Who
from api.schema import KeysRequest, PartiesView, PartyRequest, PartyView

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator


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
    def enrol(
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
    def rotate(party_id: PartyId, request: Annotated[KeysRequest, Body(examples=[examples.KEYS_REQUEST])]) -> PartyView:
        return coordinator.roster.rotate(party_id, request)

    @router.delete(
        "/v1/parties/{party_id}",
        summary="Revoke a party",
        description="Nothing it sends is taken any more. What it was charged for stays charged.",
        responses=answers("The party, revoked", examples.PARTY_REVOKED, problems=(404, 422)),
    )
    def revoke(party_id: PartyId) -> PartyView:
        return coordinator.roster.revoke(party_id)

    return router
