"""One of several coordinators, served until it is told to stop or has lost its lease; see `api.leading`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import uvicorn

from api.coordinator.config import CoordinatorConfig
from api.leading import SideBySide
from api.server import Door, serve_app


def serve_side_by_side(
    door: Door,
    settings: CoordinatorConfig,
    *,
    peer_url: str | None,
    on_ready: Callable[[str], None],
) -> None:
    """Serve as the one that leads, or as one that follows it, and change from the second to the first.

    Args:
        peer_url: where the others reach this one; its own address where absent.
        on_ready: called with the URL once requests are taken.

    Raises:
        JournalInUse: the lease was lost.
        LabelerError: journal, keys or settings cannot be used.
    """
    servers: list[uvicorn.Server] = []
    guard = threading.Lock()

    def end() -> None:
        with guard:
            for server in servers:
                server.should_exit = True

    def begun(server: uvicorn.Server) -> None:
        with guard:
            servers.append(server)

    one = SideBySide(settings, url=peer_url or door.url, on_lost=end)
    serve_app(
        door,
        one,
        settings,
        start=one.start,
        stop=one.stop,
        end_streams=one.end_streams,
        on_ready=on_ready,
        on_server=begun,
    )
    if one.failure is not None:
        raise one.failure
