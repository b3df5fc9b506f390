"""Commands of the operator's own domain: `serve` runs the coordinator, `embedder` embeds for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labeler.errors import InvalidSetting
from workers.commands.console import Json, print_json, tell
from workers.commands.federation import stop_signal
from workers.edge import Certificates, Edge

Home = Annotated[Path, typer.Option(help="Home folder of this role.")]


def serve(
    home: Home,
    host: Annotated[
        str, typer.Option(help="Address to listen on: this machine's own, but behind a proxy.")
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
        Path | None, typer.Option(help="Log here instead of to standard error; put aside at 16 MiB, three are kept.")
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
        on_ready=lambda url: print_json({"url": url}) if as_json else None,
    )


def embedder(home: Home) -> None:
    """Run the embedder beside the coordinator: it turns uploaded images into questions. Uses the coordinator's home.

    Example: `labeler embedder --home coordinator`
    """
    from workers.serve import run_home_embedder
    from workers.service_process import configure_logging

    configure_logging()
    run_home_embedder(home, stop=stop_signal())
