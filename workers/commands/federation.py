"""Commands of an operator: `up` runs a whole federation, `serve` the coordinator, `embedder` embeds for it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from labeler.errors import InvalidSetting
from labeler.system.files import check_folder
from workers.commands.console import Home, Json, complain, print_json, tell
from workers.serve import Certificates, Edge

if TYPE_CHECKING:
    from workers.up.up import Running


def up(
    home: Annotated[Path, typer.Option(help="Folder of the federation; made if missing.")] = Path("federation"),
    agents: Annotated[int | None, typer.Option(min=1, help="How many agents. Default: 5.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Loopback port; 0 takes a free one.")] = 8080,
    shard: Annotated[
        list[Path] | None, typer.Option(help="A private shard per agent; repeat. Default: real handwritten digits.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="What embeds images to be labeled. Default: pixels:8, which starts in seconds.")
    ] = None,
    instance_epsilon: Annotated[
        str | None, typer.Option(help="Budget per private image at delta 1e-5: a number (default 10), or unlimited.")
    ] = None,
    life_epsilon: Annotated[
        float | None,
        typer.Option(min=0, help="Part of that budget to set aside for votes for life. Default: none."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a whole federation here: coordinator, embedder, agents, talliers and redis-server, each a process.

    Made at the first start, reopened later. Without --shard the agents hold real handwritten digits, whose features are
    their pixels, so that it starts in seconds; --backbone takes another. Ctrl-C stops everything in order.
    With --json one line {"url", "token", "home", ...} is printed as soon as jobs can be taken.

    Example: `labeler up --agents 5 --port 8080 --home federation`
    """
    from workers.up import FederationPlan
    from workers.up.up import run_up

    check_folder(home, "--home")
    logging.getLogger("labeler").addHandler(logging.NullHandler())
    plan = FederationPlan(
        agents=agents,
        shards=tuple(shard or ()),
        backbone=backbone,
        instance_epsilon=_epsilon(instance_epsilon),
        life_epsilon=life_epsilon,
    )

    if not as_json:
        typer.echo(f"Starting the federation in {home} ...", err=True)
    run_up(
        home,
        plan,
        port=port,
        stop=stop_signal(),
        on_ready=_tell_json if as_json else _tell_people,
        complain=complain,
    )


def stop_signal() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _tell_json(running: Running) -> None:
    federation = running.federation
    print_json(
        {
            "url": running.url,
            "token": running.token,
            "dashboard": _dashboard(running),
            "home": str(federation.home),
            "agents": list(federation.agents),
            "talliers": list(federation.talliers),
            "examples": None if federation.examples is None else str(federation.examples),
            "pid": os.getpid(),
        }
    )


def _tell_people(running: Running) -> None:
    from workers.up.home import TOKEN_FILE

    federation, url = running.federation, running.url
    lines = [
        f"Ready      {url}   ({len(federation.agents)} agents, {len(federation.talliers)} talliers)",
        f"Dashboard  {_dashboard(running)}",
    ]
    since = "made now" if running.is_token_new else "as before"
    lines.append(f"Token      {running.token}   (administrator's, {since}; kept in {federation.home / TOKEN_FILE})")
    lines += [f"Logs       {federation.logs}", "", "Try, in another terminal:", ""]
    lines += [f"  {line}" for line in _examples(running)]
    lines += ["", "Ctrl-C stops everything."]
    typer.echo("\n".join(lines))


def _dashboard(running: Running) -> str:
    # After the #, so that no server or proxy ever sees it.
    return f"{running.url}/dashboard#token={running.token}"


def _examples(running: Running) -> list[str]:
    url, examples = running.url, running.federation.examples
    lines = [
        f"export LABELER_URL={url} LABELER_TOKEN={running.token}",
        'curl -s $LABELER_URL/v1/budget -H "Authorization: Bearer $LABELER_TOKEN"',
    ]
    if examples is None:
        return [*lines, "labeler submit IMAGES --task TASK.toml --wait --out labels.parquet"]
    return [*lines, f"labeler submit {examples}/digits.zip --task {examples}/task.toml --wait --out labels.parquet"]


def _epsilon(text: str | None) -> float | Literal["unlimited"] | None:
    if text is None or text == "unlimited":
        return None if text is None else "unlimited"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1000:
        raise InvalidSetting(
            f"--instance-epsilon must be a number above 0 and at most 1000, or unlimited; found {text!r}"
        )
    return value


def serve(
    home: Home,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Behind a proxy it may be another than this machine's own.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    edge: Annotated[
        str | None,
        typer.Option(
            metavar="DOMAIN", help="Run Caddy in front, which serves this name over HTTPS (several with commas)."
        ),
    ] = None,
    edge_port: Annotated[int, typer.Option(min=1, max=65535, help="Where the edge listens.")] = 443,
    edge_tls: Annotated[
        Certificates,
        typer.Option(help="Certificates: of a public authority, of an authority made here, or off (loopback only)."),
    ] = "acme",
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of the edge, instead of --edge-tls.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Another proxy stands in front: trusted_proxies names it.")
    ] = False,
    log_file: Annotated[
        Path | None,
        typer.Option(help="Log into this file, not to standard error. At 16 MiB a new one begins; three are kept."),
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a commented coordinator.toml and keys into the home, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the coordinator of a home; with --init make that home first.

    Example: `labeler serve --home coordinator --edge labels.example.org`
    """
    if init:
        from workers.homes.new import make_coordinator_home

        public = make_coordinator_home(home)
        tell(
            public,
            f"Coordinator's home is {home}; fill in {home / 'coordinator.toml'} before the first start.",
            f"Fingerprint {public['fingerprint']}: read it to every site over the phone.",
            f"Then make the first token, an administrator's: labeler keys token --home {home} --name NAME --role admin",
            "With it, make a requester's once the coordinator runs: labeler keys token --name NAME --role requester",
            as_json=as_json,
        )
        return
    from workers.serve import run_coordinator

    if (tls_cert is None) != (tls_key is None) or (tls_cert is not None and edge is None):
        raise InvalidSetting("--tls-cert and --tls-key are the edge's: give both, and --edge")
    files = None if tls_cert is None or tls_key is None else (tls_cert.absolute(), tls_key.absolute())
    run_coordinator(
        home,
        host=host,
        port=port,
        edge=None if edge is None else Edge(edge, edge_port, edge_tls, files),
        is_behind_proxy=behind_proxy,
        log_file=log_file,
        # Without a terminal it goes into a log, whose lines are JSON.
        on_ready=lambda url: tell(
            {"level": "INFO", "url": url},
            f"Listening at {url}, until Ctrl-C.",
            as_json=as_json or not sys.stdout.isatty(),
        ),
    )


def embedder(home: Home) -> None:
    """Run the embedder, which turns uploaded images into questions. Uses the coordinator's home.

    Example: `labeler embedder --home coordinator`
    """
    from workers.embedder.service import run_embedder
    from workers.serve import read_settings
    from workers.service_process import configure_logging

    configure_logging()
    settings = read_settings(home)
    backbones = {fingerprint: settings.backbone(fingerprint) or "" for fingerprint in settings.backbones}
    run_embedder(settings.home, settings.redis_url, backbones, stop=stop_signal())
