"""Who may call what: one table from route to the least role, and the gate that reads it before a body is read.

A token is looked up by its SHA-256 (in feature_store.journal), never compared here, never logged. Routes for agents and
talliers carry no token: every message is signed by its sender, and the coordinator checks that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.connections import address_group
from api.coordinator.ownership import Reader
from api.rate_limit import RateLimits
from api.schema import Role
from labeler.errors import NotAllowed, NotAuthenticated

if TYPE_CHECKING:
    from feature_store.journal.tokens import TokenRecord, TokenStore

Need = Literal["open", "optional", "scraper", "signed", "invited", "viewer", "auditor", "requester", "admin"]
"""`open`: anybody. `optional`: anybody; whoever shows a token is told more. `scraper`: an auditor, or anybody where the
settings open /metrics. `signed`: a party, by its signature. `invited`: whoever has the one-use token of an invitation,
which stands in the body with a signature. `auditor`: a viewer or an administrator, and no requester: what names the
jobs of all requesters is not for one of them."""

ACCESS: dict[tuple[str, str], Need] = {
    ("GET", "/healthz"): "open",
    ("GET", "/readyz"): "optional",
    ("GET", "/openapi.json"): "open",
    ("GET", "/api"): "open",
    ("GET", "/"): "open",
    ("GET", "/dashboard"): "open",
    ("GET", "/dashboard/{asset:path}"): "open",
    ("GET", "/metrics"): "scraper",
    ("POST", "/v1/messages"): "signed",
    ("POST", "/v1/messages:poll"): "signed",
    ("GET", "/v1/whoami"): "viewer",
    ("GET", "/v1/tasks"): "viewer",
    ("GET", "/v1/tasks/{task_id}"): "viewer",
    ("POST", "/v1/tasks"): "requester",
    ("POST", "/v1/tasks/{task_id}/shares"): "requester",
    ("DELETE", "/v1/tasks/{task_id}/shares/{token_id}"): "requester",
    ("POST", "/v1/jobs:estimate"): "viewer",
    ("POST", "/v1/jobs"): "requester",
    ("GET", "/v1/jobs"): "viewer",
    ("GET", "/v1/jobs/{job_id}"): "viewer",
    ("DELETE", "/v1/jobs/{job_id}"): "requester",
    ("DELETE", "/v1/jobs/{job_id}/data"): "requester",
    ("GET", "/v1/jobs/{job_id}/labels"): "requester",
    ("GET", "/v1/jobs/{job_id}/model"): "requester",
    ("GET", "/v1/jobs/{job_id}/student"): "requester",
    ("POST", "/v1/jobs/{job_id}:thumbnails"): "requester",
    ("GET", "/v1/jobs/{job_id}/events"): "viewer",
    ("POST", "/v1/labels"): "requester",
    ("GET", "/v1/budget"): "viewer",
    ("GET", "/v1/budget/agents/{agent_id}"): "viewer",
    ("GET", "/v1/ledger"): "viewer",
    ("GET", "/v1/evidence"): "auditor",
    ("GET", "/v1/parties"): "viewer",
    ("POST", "/v1/parties"): "admin",
    ("POST", "/v1/parties/{party_id}:rotate"): "admin",
    ("DELETE", "/v1/parties/{party_id}"): "admin",
    ("POST", "/v1/invitations"): "admin",
    ("DELETE", "/v1/invitations/{party_id}"): "admin",
    ("POST", "/v1/enrolments"): "invited",
    ("GET", "/v1/tokens"): "admin",
    ("POST", "/v1/tokens"): "admin",
    ("DELETE", "/v1/tokens/{token_id}"): "admin",
}
"""The dashboard's files hold no data: the page asks its reader for a token and calls /v1 with it. Whose a task or a job
is, and what a viewer sees of it, is decided behind the gate (api.coordinator.ownership). A price is free, so a viewer
may ask for it."""

NO_TOKEN: frozenset[Need | None] = frozenset({"open", "optional", "invited"})
"""Of a stranger: neither a token nor an enrolled key stands behind the request."""

_RANK: dict[Role, int] = {"viewer": 0, "requester": 1, "admin": 2}
MAX_TOKEN_CHARS = 200


def reaches(role: Role, need: Role) -> bool:
    """Whether a token of `role` may do what needs `need`."""
    return _RANK[role] >= _RANK[need]


class Gate:
    """Lets a request through, or says why not.

    Args:
        limits: how often one token may call, and how often one address may fail to show a good one.
        is_metrics_open: whether /metrics takes no token. Where a request comes from says nothing: behind a proxy on
            this machine every stranger comes from this machine.
    """

    def __init__(self, tokens: TokenStore, limits: RateLimits, *, is_metrics_open: bool = False) -> None:
        self._tokens = tokens
        self._limits = limits
        self._is_metrics_open = is_metrics_open

    async def admit(self, request: Request, path: str) -> None:
        """Check a request against the table, and count it; leaves its token's record in `request.state.token`.

        Raises:
            NotAuthenticated: no token, or one that is unknown or revoked.
            NotAllowed: the role of the token does not reach this route, or the table has no row for it.
            RateLimited: too many requests of this token, or too many failures or enrolments of this address.
        """
        request.state.token = None
        need = ACCESS.get((request.method, path))
        if need is None:
            raise NotAllowed(f"{request.method} {path} has no row in the table of roles, so nobody may call it")
        if need == "invited":
            # Before its body is read: who has no token pays for an attempt, not for what stands in it.
            self._limits.enrol(client_address(request))
        if need in ("open", "signed", "invited") or (need == "scraper" and self._is_metrics_open):
            return
        if need == "optional" and "authorization" not in request.headers:
            return
        secret = _bearer(request)
        record: TokenRecord | None = None
        if secret is not None:
            record = self._tokens.remembered(secret) or await run_in_threadpool(self._tokens.find, secret)
        if record is None or record.revoked_at is not None:
            self._limits.failed(client_address(request))
            raise NotAuthenticated(
                "this needs a bearer token: send the header 'Authorization: Bearer lab_...'. "
                + ("None was sent." if secret is None else "The one that was sent is unknown or was revoked.")
            )
        request.state.token = record
        self._limits.spend(record.token_id)
        least: Role = "viewer" if need in ("optional", "scraper", "auditor") else cast(Role, need)
        role = record.role
        if need in ("auditor", "scraper") and role == "requester":
            raise NotAllowed(
                f"{request.method} {path} tells of every requester's jobs, so it is for an auditor's token (role "
                "viewer) or an administrator's; this token is a requester's"
            )
        if not reaches(role, least):
            raise NotAllowed(
                f"{request.method} {path} needs a token of role {least} or higher; this token is a {role}. "
                "Ask an administrator for another token."
            )


async def reader(request: Request) -> Reader:
    """Who asks: the token the request came with, by its id and role. On the event loop, as nothing is looked up."""
    record: TokenRecord = request.state.token
    return Reader(record.token_id, record.role)


async def caller(request: Request) -> str:
    """Id of the token a request came with: what a job's `created_by` says."""
    record: TokenRecord = request.state.token
    return record.token_id


def _bearer(request: Request) -> str | None:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret or len(secret) > MAX_TOKEN_CHARS or not secret.isascii():
        return None
    return secret


def client_address(request: Request) -> str:
    """The address a request is counted under: the peer's, or what a trusted proxy says it is."""
    return "" if request.client is None else address_group(request.client.host)
