"""Before the router: what is asked most is answered without it.

FastAPI looks through its routes one by one, opens contexts for files and dependencies, and solves those of the
endpoint; for an answer out of memory that is several times the answer itself. A route whose endpoint has a short way
(`api.strict_route.at_once`) is found here by its path. Access, the kind of the body, limits and refusals are those of
the router's way: the same functions, called from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.routing import APIRouter
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api import refusals
from api.access import Gate
from api.strict_route import ENTERED, StrictRequest, StrictRoute


class Front:
    """ASGI middleware; see the module.

    Args:
        app: what is asked where there is no short way, or it does not answer.
        routers: their routes of `StrictRoute` whose endpoints have a short way are served here.
    """

    def __init__(self, app: ASGIApp, *, routers: Iterable[APIRouter], gate: Gate) -> None:
        self._app = app
        self._gate = gate
        self._exact: dict[tuple[str, str], StrictRoute] = {}
        self._below: dict[tuple[str, str], tuple[StrictRoute, str]] = {}
        for router in routers:
            for route in router.routes:
                if isinstance(route, StrictRoute) and route.short is not None:
                    self._add(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        found = self._find(scope) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        route, scope["path_params"] = found
        scope["route"] = route
        request = Request(scope, receive)
        try:
            entered = await route.enter(request, self._gate)
            scope[ENTERED] = True
            response = None if route.short is None else await route.short(entered)
        except refusals.REFUSED as error:
            response = await refusals.answer(request, error)
        if response is not None:
            await response(scope, receive, send)
            return
        again = entered.receive_again if isinstance(entered, StrictRequest) else receive
        await self._app(scope, again, send)

    def _add(self, route: StrictRoute) -> None:
        for method in route.methods or ():
            before, brace, name = route.path.partition("{")
            if not brace:
                self._exact[method, route.path] = route
            elif name.endswith("}") and "{" not in name and before.endswith("/"):
                self._below[method, before] = (route, name[:-1])
            else:
                raise ValueError(f"{route.path} cannot be found by its beginning; give it no short way")

    def _find(self, scope: Scope) -> tuple[StrictRoute, dict[str, str]] | None:
        method, path = scope["method"], scope["path"]
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact, {}
        before, slash, last = path.rpartition("/")
        below = self._below.get((method, before + slash)) if last else None
        return None if below is None else (below[0], {below[1]: last})
