"""HEAD: whatever GET answers, without its body.

One place for all routes: the request goes on as a GET, so access, limits, headers and refusals are those of GET, and
nothing that is known of routes (the table of roles, the document) has to name HEAD. What is refused to GET is refused.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Head:
    """An application for HEAD requests; see the module.

    Args:
        app: answers GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HEAD request."""
        scope.setdefault("state", {})  # one for both: whose token it was is read from it afterwards
        asked = {**scope, "method": "GET"}

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # The answer is whole: of a stream that would go on, the server now says that nobody listens.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await self._app(asked, receive, without_body)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]
