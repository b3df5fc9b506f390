"""The coordinator behind its HTTP server, and the edge in front of it.

It loads no learning library, so the process that everybody talks to stays small; a test checks this in a fresh
interpreter.

**The edge** is Caddy in front of the coordinator, for everything that is reached from other machines. It speaks HTTPS,
ends slow heads and idle connections, refuses ambiguous requests, and passes on one clean request at a time; the
coordinator listens on this machine alone. Certificates are Caddy's own (ACME) unless files are given. Caddy does not
limit one client's connections and bodies; `api.limits` does, by the forwarded address.

Learned by trying (each has a test):

* options of `servers :PORT` together with `bind` silently apply to nothing; so `servers` names no address here
* a slow body never ends while `read_body_idle` has its default; `read_body` is the total, so it is generous
* a request for an unknown host is answered with an empty 200, unless a last site aborts it
* uvicorn's keep-alive must be longer than Caddy's to its upstream, else requests meet a connection that just closed
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from labeler.errors import InvalidSetting, Unavailable
from labeler.system.http_client import is_loopback
from workers.service_process import tell_ready
from workers.up.supervisor import die_with_parent, end_process

if TYPE_CHECKING:
    from api.coordinator.config import CoordinatorConfig
    from labeler.ledger.tokens import TokenRecord

log = logging.getLogger("labeler.coordinator")

_SWITCH_S = 0.0002


def read_settings(home: Path) -> CoordinatorConfig:
    """Read a coordinator's settings.

    Raises:
        InvalidSetting: a field is unknown, missing or out of bounds.
    """
    from api.coordinator.config import read_config
    from workers.party.home import COORDINATOR_FILE

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
        edge: the proxy in front, for other machines.
        is_behind_proxy: another proxy is in front, which the settings name as trusted.
        log_file: takes the log instead of standard error; rotated by size.
        on_ready: called with the URL once requests are taken.

    Raises:
        InvalidSetting: the address is reached from other machines, and no proxy is in front.
        JournalInUse: another coordinator owns home or journal.
        LabelerError: the settings, the keys, the journal or the address cannot be used.
    """
    from api.coordinator.service import Coordinator
    from api.limits import FORM_OVERHEAD_BYTES, MAX_STRANGERS_BYTES
    from api.logs import configure_logging
    from api.server import listen, serve_at, url_of

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

    # Clients that come while the journal is opened and checked wait, and are not sent away to try again later.
    with listen(host, port) as listening:
        coordinator = Coordinator.open(settings)
        for missing in missing_steps(settings, coordinator.tokens.list(), edge=edge):
            log.warning(missing)
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


def missing_steps(settings: CoordinatorConfig, tokens: Sequence[TokenRecord], *, edge: Edge | None) -> list[str]:
    """Return what an operator has yet to do before anybody can use the service: its address, and the first token."""
    from workers.party.home import EXAMPLE_URL

    found = []
    if settings.public_url.rstrip("/") == EXAMPLE_URL and (edge is None or f"https://{edge.domain}" != EXAMPLE_URL):
        found.append(
            f"public_url in coordinator.toml is still the example, {EXAMPLE_URL}: invitations would lead there; write "
            "the address at which sites and people reach this service, and start again"
        )
    if not any(one.revoked_at is None for one in tokens):
        found.append(
            "nobody has a token, so nobody can use this service: stop it, make the first token with `labeler keys "
            f"token --home {settings.home} --name NAME --role admin`, and start again"
        )
    return found


def refuse_open_doors(host: str, settings: CoordinatorConfig, *, edge: Edge | None, is_behind_proxy: bool) -> None:
    """Refuse to serve other machines without an edge or another proxy in front; raises InvalidSetting."""
    if edge is not None and is_behind_proxy:
        raise InvalidSetting("give --edge or --behind-proxy, not both")
    if edge is not None and not is_loopback(host):
        raise InvalidSetting(f"with --edge the coordinator listens only on this machine; leave out --host {host}")
    if edge is None and not is_behind_proxy and not is_loopback(host):
        raise InvalidSetting(
            f"other machines reach --host {host}, but this server has no HTTPS there and does not end slow senders: "
            "give --edge DOMAIN, or --behind-proxy if your own proxy does both"
        )
    if is_behind_proxy and not settings.trusted_proxies:
        raise InvalidSetting(
            "--behind-proxy needs the proxy's address in trusted_proxies (coordinator.toml): otherwise all its clients "
            "count as one, and share its limits"
        )


def _settle_in() -> None:
    """Set this process up for many short requests alongside a thread that works.

    Imported modules stay for good and are most of the heap, so no collection scans them again. A thread that answers
    requests waits a 25th of the usual time for a thread that computes: one look into the journal takes the
    interpreter's lock some twenty times.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)


FOLDER: Final = "edge"
"""The folder in a coordinator's home for the Caddyfile and Caddy's own files (keys of its certificates)."""
BODY_MINUTES: Final = 30
UPSTREAM_KEEP_ALIVE_S: Final = 60
"""Shorter than `api.server.KEEP_ALIVE_S`."""
HSTS_S: Final = 365 * 86_400
"""How long a browser goes to this name by HTTPS alone, once it was there."""
START_S: Final = 15.0
STOP_S: Final = 5.0

Certificates = Literal["acme", "internal", "off"]
"""From a public authority by Caddy itself; from an authority that Caddy makes here, for rehearsals; or none at all, on
loopback alone, for tests.
"""


@dataclass(frozen=True)
class Edge:
    """An edge as an operator asks for it.

    Attributes:
        domain: the name under which the coordinator is reached; or several, the first for people, with commas between.
        port: on which the edge listens.
        tls_files: certificate and key, PEM, instead of Caddy's own.
    """

    domain: str
    port: int = 443
    certificates: Certificates = "acme"
    tls_files: tuple[Path, Path] | None = None

    @property
    def is_plain(self) -> bool:
        """True if it speaks unencrypted."""
        return self.certificates == "off" and self.tls_files is None

    @property
    def url(self) -> str:
        """Its address, as its clients call it."""
        scheme, usual = ("http", 80) if self.is_plain else ("https", 443)
        return f"{scheme}://{self.domain.partition(',')[0]}{'' if self.port == usual else f':{self.port}'}"


def caddyfile(edge: Edge, upstream: str, *, folder: Path, max_stranger_bytes: int, max_bytes: int) -> str:
    """Return the configuration of an edge.

    Args:
        upstream: host and port of the coordinator.
        folder: for what Caddy keeps.
        max_stranger_bytes: of a body that anybody may send.
        max_bytes: of any other body.

    Raises:
        InvalidSetting: a name or path cannot be written in it, or plain HTTP would leave this machine.
    """
    names, port, tls_files, is_plain = edge.domain.split(","), edge.port, edge.tls_files, edge.is_plain
    for written in (str(folder), *map(str, tls_files or ())):
        if not written or any(letter in written for letter in '"`{}\\\n\r') or not written.isprintable():
            raise InvalidSetting(f"the edge's configuration cannot hold the path {written[:100]!r}; take another")
    if not all(re.fullmatch(r"[A-Za-z0-9.-]{1,253}", name) for name in names):
        raise InvalidSetting(
            f"--edge takes the name of a host, such as labels.example.org; found {edge.domain[:100]!r}"
        )
    if is_plain and not {"localhost", "127.0.0.1"}.issuperset(names):
        raise InvalidSetting("an edge without certificates is for this machine alone: name it localhost or 127.0.0.1")
    scheme = "http" if is_plain else "https"
    tls = "\ttls internal\n" if edge.certificates == "internal" else ""
    if tls_files is not None:
        tls = f'\ttls "{tls_files[0]}" "{tls_files[1]}"\n'
    bind = "\tbind 127.0.0.1\n" if is_plain else ""
    hsts = "" if is_plain else f'\t\theader_down Strict-Transport-Security "max-age={HSTS_S}"\n'
    # A separate server of Caddy's would send redirects from port 80, and none of these limits hold for it.
    https = "off" if is_plain else "disable_redirects"
    return f"""\
{{
	admin off
	persist_config off
	skip_install_trust
	auto_https {https}
	storage file_system "{folder / "kept"}"
	log {{
		output stderr
		level WARN
	}}
	servers {{
		protocols h1 h2
		strict_sni_host on
		timeouts {{
			read_header 10s
			read_body {BODY_MINUTES}m
			read_body_idle -1s
			write_idle 60s
			idle 75s
		}}
		max_header_size 16KB
	}}
}}
{", ".join(f"{scheme}://{name}:{port}" for name in names)} {{
{bind}{tls}\
	@open path /v1/enrolments
	@rest not path /v1/enrolments
	request_body @open {{
		max_size {max_stranger_bytes}
	}}
	request_body @rest {{
		max_size {max_bytes}
	}}
	reverse_proxy @open {upstream} {{
{hsts}\
		request_buffers {max_stranger_bytes}
	}}
	reverse_proxy {upstream} {{
{hsts}\
		flush_interval -1
		transport http {{
			versions 1.1
			keepalive {UPSTREAM_KEEP_ALIVE_S}s
			keepalive_idle_conns_per_host 512
			dial_timeout 5s
		}}
	}}
}}
{scheme}://:{port} {{
{bind}	abort
}}
"""


def program() -> str:
    """Return the path of caddy: the one on PATH, else that of the extra `edge`.

    Raises:
        InvalidSetting: there is none.
    """
    beside = Path(sys.executable).with_name("caddy")
    found = shutil.which("caddy") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        raise InvalidSetting(
            "--edge needs caddy, and there is none on PATH: install it, or `pip install 'private-labeler[edge]'`; or "
            "put another proxy in front and say --behind-proxy"
        )
    return found


@contextlib.contextmanager
def running(
    edge: Edge,
    upstream: str,
    *,
    home: Path,
    max_stranger_bytes: int,
    max_bytes: int,
    on_end: Callable[[], None],
) -> Iterator[None]:
    """Run an edge until the block ends.

    Args:
        home: of the coordinator; the configuration is written into a folder of it. For the others see `caddyfile`.
        on_end: called from a thread where the edge ends by itself.

    Raises:
        InvalidSetting: there is no caddy, or it refuses the configuration.
        Unavailable: it does not listen, or it ended by itself meanwhile.
    """
    caddy = program()
    folder = home / FOLDER
    text = caddyfile(edge, upstream, folder=folder, max_stranger_bytes=max_stranger_bytes, max_bytes=max_bytes)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "Caddyfile"
    path.write_text(text, encoding="utf-8")
    where = {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    command = [caddy, "run", "--adapter", "caddyfile", "--config", str(path)]
    adapted = subprocess.run(
        [caddy, "adapt", *command[2:]], env=os.environ | where, capture_output=True, text=True, check=False
    )
    if adapted.returncode:
        raise InvalidSetting(f"caddy refuses its configuration: {adapted.stderr.strip()[-500:]}")
    # A separate process group: a Ctrl-C ends it last, after the coordinator behind it.
    process = subprocess.Popen(
        command, env=os.environ | where, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent()
    )
    is_over = threading.Event()

    def watch() -> None:
        process.wait()
        if not is_over.is_set():
            on_end()

    watcher = threading.Thread(target=watch, name="edge", daemon=True)
    watcher.start()
    try:
        _wait_until_it_listens(edge.port, process)
        yield
        if process.poll() is not None:
            raise Unavailable(f"the edge has ended by itself (caddy, status {process.returncode}); its log says why")
    finally:
        is_over.set()
        end_process(process, within_s=STOP_S)
        watcher.join()


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise Unavailable(
        f"the edge (caddy) does not listen at port {port}: is it free, and may this user take it (--edge-port)?"
    )
