"""The command `prune`: what homes keep beyond its use, removed or only counted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labeler.errors import InvalidSetting
from workers.commands.console import Json, print_json
from workers.commands.service import CaFile, MaybeToken, MaybeUrl


def prune(
    older_than: Annotated[str, typer.Option(help="Age since the end of a job: 30d, 12h, 45m.")],
    home: Annotated[Path | None, typer.Option(help="Home of a stopped coordinator, agent or tallier.")] = None,
    url: MaybeUrl = None,
    token: MaybeToken = None,
    ca_file: CaFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what ended jobs have left: images, questions, labels. Charges and digests stay; the journal verifies.

    Of a running service with --url, of a stopped home with --home.

    Examples:

    `labeler prune --older-than 30d --url https://labels.example.org --dry-run`

    `labeler prune --older-than 30d --home talliers/tallier-0`
    """
    from workers.homes.pruning import parse_age, prune_home
    from workers.progress import progress_bars

    age = parse_age(older_than)
    with progress_bars(quiet=as_json) as progress:
        if home is not None:
            # A home that is named counts more than an address in the environment.
            found = prune_home(home, age, dry_run=dry_run, progress=progress)
        elif url is not None and token is not None:
            from workers.commands.service import prune_service

            found = prune_service(url, token, ca_file, age, dry_run=dry_run, progress=progress)
        else:
            raise InvalidSetting("name a home (--home), or a service and a token (--url, --token)")
    if as_json:
        print_json(found)
        return
    _tell(found)


def _tell(found: dict[str, Any]) -> None:
    would = "would go" if found["dry_run"] else "went"
    typer.echo(f"Jobs    {len(found['jobs'])} {would}: what they sent, asked and got; their charges stay")
    if found.get("rounds"):
        typer.echo(f"Rounds  {found['rounds']} {would}: shares and sums that expired")
    if found.get("files"):
        typer.echo(f"Files   {', '.join(found['files'])} {would}")
    if not found["dry_run"] and "bytes" in found:
        typer.echo(f"Room    {found['bytes']} bytes")
