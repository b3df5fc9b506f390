"""Invitations: an administrator makes one, a site uses it once to enrol keys of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Request, Response

from api import examples
from api.access import Route, client_address
from api.documentation import answers, problem
from api.routes.parameters import Caller, PartyId
from api.schema import EnrolmentRequest, EnrolmentView, InvitationRequest, InvitationView, WithdrawnView
from labeler.errors import Forged, NotAuthenticated

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator


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
    def invite(
        request: Annotated[InvitationRequest, Body(examples=[examples.INVITATION_REQUEST])],
        by: Caller,
        response: Response,
    ) -> InvitationView:
        response.headers["Cache-Control"] = "no-store"
        return coordinator.invitations.invite(request, by=by)

    @router.delete(
        "/v1/invitations/{party_id}",
        summary="Withdraw an invitation",
        description="Invitations of this name that were not used open nothing any more. Whoever joined stays enrolled.",
        responses=answers("How many were withdrawn", examples.WITHDRAWN, problems=(422,)),
    )
    def withdraw(party_id: PartyId) -> WithdrawnView:
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
                403, slug="forged", title="Signature or seal does not hold", detail="the signature does not hold"
            ),
        ),
    )
    def enrol(
        request: Annotated[EnrolmentRequest, Body(examples=[examples.ENROLMENT_REQUEST])], http: Request
    ) -> EnrolmentView:
        try:
            return coordinator.invitations.enrol(request)
        except (NotAuthenticated, Forged):
            http.app.state.limits.failed(client_address(http))
            raise

    return router
