"""What serves over HTTP: the coordinator behind its server, with the embedder beside it, and a hospital's desk.

This is the one module of `workers` that may import `api`: coordinator and embedder share a home and settings, and the
desk's page is an application like the coordinator's.
It loads no learning library, so the process that everybody talks to stays small; a test starts a fresh interpreter
and looks. The embedder loads what its backbones need, when they are needed.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.coordinator.config import CoordinatorConfig, read_config
from labeler.errors import InvalidSetting
from labeler.system.http_client import is_loopback
from workers.homes.settings_file import COORDINATOR_FILE
from workers.service_process import tell_ready

if TYPE_CHECKING:
    from api.coordinator.stepwise import StepwiseCoordinator
    from labeler.driver.mail import Mailbox
    from labeler.system.clock import Clock
    from workers.edge import Edge

_SWITCH_S = 0.0002


def read_settings(home: Path) -> CoordinatorConfig:
    """A coordinator's settings.

    Raises:
        InvalidSetting: a field is unknown, missing or out of bounds.
    """
    return read_config(home / COORDINATOR_FILE)


def run_coordinator(
    home: Path,
    *,
    host: str,
    port: int,
    edge: Edge | None = None,
    is_behind_proxy: bool = False,
    log_file: Path | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve a coordinator's home until SIGINT or SIGTERM.

    Args:
        port: 0 takes a free one.
        edge: what stands in front, for other machines.
        is_behind_proxy: another proxy stands in front, which the settings name as trusted.
        log_file: takes the log instead of standard error; rotated by size.
        on_ready: called with the URL once requests are taken.

    Raises:
        InvalidSetting: the address is reached from other machines, and nothing stands in front.
        JournalInUse: another coordinator owns home or journal.
        LabelerError: the settings, the keys, the journal or the address cannot be used.
    """
    from api.coordinator.service import Coordinator
    from api.limits import FORM_OVERHEAD_BYTES, MAX_STRANGERS_BYTES
    from api.logs import configure_logging
    from api.server import listen, serve_at, url_of
    from workers.edge import running

    try:
        configure_logging(file=log_file)
    except OSError as error:
        raise InvalidSetting(f"--log-file cannot be written: {error.strerror}") from None
    settings = read_settings(home)
    refuse_open_doors(host, settings, edge=edge, is_behind_proxy=is_behind_proxy)
    if edge is not None:
        settings = settings.model_copy(update={"trusted_proxies": (*settings.trusted_proxies, "127.0.0.1")})
    servers: list[Any] = []

    def ready(url: str) -> None:
        tell_ready()
        on_ready(url if edge is None else edge.url)

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    # Whoever comes while the journal is opened and checked waits at the door, and is not sent away to try again later.
    with listen(host, port) as listening:
        coordinator = Coordinator.open(settings)
        _settle_in()
        with ExitStack() as front:
            if edge is not None:
                address = url_of(listening).removeprefix("http://")
                sizes = {
                    "max_stranger_bytes": MAX_STRANGERS_BYTES,
                    "max_bytes": settings.limits.max_upload_bytes + FORM_OVERHEAD_BYTES,
                }
                front.enter_context(running(edge, address, home=settings.home, on_end=stop, **sizes))
            serve_at(listening, coordinator, on_ready=ready, on_server=servers.append)


def refuse_open_doors(host: str, settings: CoordinatorConfig, *, edge: Edge | None, is_behind_proxy: bool) -> None:
    """Refuse to serve other machines without an edge or another proxy in front; raises InvalidSetting."""
    if edge is not None and is_behind_proxy:
        raise InvalidSetting("--edge and --behind-proxy are two answers to one question; give one of them")
    if edge is not None and not is_loopback(host):
        raise InvalidSetting(f"with --edge the coordinator listens on this machine alone; leave --host {host} away")
    if edge is None and not is_behind_proxy and not is_loopback(host):
        raise InvalidSetting(
            f"--host {host} is reached from other machines, and this server speaks no HTTPS there and does not end "
            "slow senders: give --edge DOMAIN, or --behind-proxy where a proxy of yours does both"
        )
    if is_behind_proxy and not settings.trusted_proxies:
        raise InvalidSetting(
            "--behind-proxy needs the proxy's address in trusted_proxies (coordinator.toml): else everybody behind it "
            "counts as one client, and shares its limits"
        )


def _settle_in() -> None:
    """Set this process up for many short requests beside a thread that works.

    What was imported stays for life, so no collection looks at it again: it is most of the heap. And whoever answers
    requests waits a 25th of what is usual for a thread that computes: a look into the journal takes the lock of the
    interpreter some twenty times.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)


def stepwise_coordinator(
    home: Path, mailbox: Mailbox, *, clock: Clock, steady: Callable[[], float]
) -> StepwiseCoordinator:
    """The coordinator without server and threads, for simulations; see `api.coordinator.stepwise`."""
    from api.coordinator.stepwise import StepwiseCoordinator

    return StepwiseCoordinator(home, mailbox, clock=clock, steady=steady)


def run_desk(
    home: Path, *, host: str, port: int, stop: threading.Event, on_ready: Callable[[str], None] = lambda _: None
) -> None:
    """Open the desk of an agent's home for this machine, until told to stop; beside the agent, or without it.

    Raises:
        InvalidSetting: the folder is no agent's home, or the address is not this machine's alone.
        Unavailable: the address is taken.
    """
    from api.console.site.server import serve_desk
    from workers.agent.site import SiteConsole

    serve_desk(SiteConsole(home), host=host, port=port, stop=stop, on_ready=on_ready)


def run_home_embedder(home: Path, *, stop: threading.Event) -> None:
    """Embed what the coordinator of this home asks for, until told to stop.

    Raises:
        InvalidSetting: the settings cannot be used.
    """
    from workers.embedder.service import run_embedder

    settings = read_settings(home)
    backbones = {fingerprint: settings.backbone(fingerprint) or "" for fingerprint in settings.backbones}
    run_embedder(settings.home, settings.redis_url, backbones, stop=stop)
