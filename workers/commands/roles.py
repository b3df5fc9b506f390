"""Commands of the operator's own domain: `serve` runs the coordinator, `embedder` embeds for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workers.commands.console import Json, print_json, tell
from workers.commands.federation import stop_signal

Home = Annotated[Path, typer.Option(help="Home folder of this role.")]


def serve(
    home: Home,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate; without it put a TLS proxy in front.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Log here instead of to standard error; put aside at 16 MiB, three are kept.")
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a commented coordinator.toml and keys into the home, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the coordinator of a home; with --init make that home first.

    Example: `labeler serve --home coordinator --host 0.0.0.0 --port 8443 --tls-cert cert.pem --tls-key key.pem`
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

    run_coordinator(
        home,
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_file=log_file,
        on_ready=lambda url: print_json({"url": url}) if as_json else None,
    )


def embedder(home: Home) -> None:
    """Run the embedder beside the coordinator: it turns uploaded images into questions. Uses the coordinator's home.

    Example: `labeler embedder --home coordinator`
    """
    from workers.logs import configure_logging
    from workers.serve import run_home_embedder

    configure_logging()
    run_home_embedder(home, stop=stop_signal())
