"""The edge: Caddy in front of the coordinator, for everything that is reached from other machines.

It speaks HTTPS, ends slow heads and idle connections, refuses requests that can be read in two ways, and hands on one
clean request at a time; the coordinator listens on this machine alone. Certificates are Caddy's own (ACME) unless files
are given. What Caddy does not bound, connections and bodies of one client, `api.limits` does, by the forwarded address.

Learned by trying (each is held by a test):

* options of `servers :PORT` together with `bind` apply to nothing, in silence; so `servers` names no address here
* a slow body never ends while `read_body_idle` has its default; `read_body` is the total, so it is generous
* a request for an unknown host is answered with an empty 200, unless a last site aborts it
* uvicorn's keep-alive must be longer than Caddy's to its upstream, else requests meet a connection that just closed
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from labeler.errors import InvalidSetting, Unavailable
from workers.up.supervisor import die_with_parent

FOLDER: Final = "edge"
"""Of a coordinator's home: the Caddyfile, and what Caddy keeps (keys of its certificates)."""
BODY_MINUTES: Final = 30
UPSTREAM_KEEP_ALIVE_S: Final = 60
"""Shorter than `api.server.KEEP_ALIVE_S`."""
START_S: Final = 15.0
STOP_S: Final = 5.0

Certificates = Literal["acme", "internal", "off"]
"""Caddy's own from a public authority; of an authority that Caddy makes here, for rehearsals; or none at all, on
loopback alone, for tests."""


@dataclass(frozen=True)
class Edge:
    """An edge as an operator asks for it.

    Attributes:
        domain: the name under which the coordinator is reached; or several, the first for people, with commas between.
        port: at which the edge listens.
        tls_files: certificate and key, PEM, instead of Caddy's own.
    """

    domain: str
    port: int = 443
    certificates: Certificates = "acme"
    tls_files: tuple[Path, Path] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it speaks in clear."""
        return self.certificates == "off" and self.tls_files is None

    @property
    def url(self) -> str:
        """Its address, as its clients call it."""
        scheme, usual = ("http", 80) if self.is_plain else ("https", 443)
        return f"{scheme}://{self.domain.partition(',')[0]}{'' if self.port == usual else f':{self.port}'}"


def caddyfile(edge: Edge, upstream: str, *, folder: Path, max_stranger_bytes: int, max_bytes: int) -> str:
    """Write the configuration of an edge.

    Args:
        upstream: host and port of the coordinator.
        folder: for what Caddy keeps.
        max_stranger_bytes: of a body that anybody may send.
        max_bytes: of any other body.

    Raises:
        InvalidSetting: a name or path cannot stand in it, or plain HTTP would leave this machine.
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
    # Redirects would come from port 80 by a server of Caddy's own, for which none of these bounds hold.
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
		request_buffers {max_stranger_bytes}
	}}
	reverse_proxy {upstream} {{
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
    # A process group of its own: a Ctrl-C ends it last, after the coordinator that stands behind it.
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
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
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
