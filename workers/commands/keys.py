"""Commands about keys and tokens: `keys make | show | rotate | enrol | revoke | token`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labeler.errors import InvalidSetting
from workers.commands import service
from workers.commands.console import Json, one_of, print_json
from workers.commands.service import CaFile

Home = Annotated[Path, typer.Option(help="Home folder of the party.")]
OptionalUrl = Annotated[str | None, typer.Option(envvar="LABELER_URL", help="Of a running service.")]
OptionalToken = Annotated[str | None, typer.Option(envvar="LABELER_TOKEN", help="An administrator's access token.")]

keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(keys_app, name="keys", help="Make, show, enrol, rotate and revoke keys; make access tokens.")


@keys_app.command()
def make(home: Home, as_json: Json = False) -> None:
    """Make keys for a home that has none, and write its public ones to keys.public.json.

    Example: `labeler keys make --home coordinator`
    """
    from workers.homes.keys import make_missing_keys

    _tell(make_missing_keys(home), home, as_json=as_json)


@keys_app.command()
def show(home: Home, as_json: Json = False) -> None:
    """Show the public keys of a home and their fingerprint, and write them to keys.public.json.

    Example: `labeler keys show --home hospital-a`
    """
    from workers.homes.keys import show_keys

    _tell(show_keys(home), home, as_json=as_json)


@keys_app.command()
def rotate(home: Home, as_json: Json = False) -> None:
    """Replace the keys of a home; stop its process first, then have the new ones enrolled with --rotate.

    The old keys stay beside the new ones, as keys.json.SOME_DATE, until you delete them.

    Example: `labeler keys rotate --home hospital-a`
    """
    from workers.homes.keys import rotate_keys

    _tell(rotate_keys(home), home, as_json=as_json)


@keys_app.command()
def enrol(
    public: Annotated[Path, typer.Argument(help="The party's keys.public.json.")],
    url: service.Url,
    token: service.Token,
    rotated: Annotated[bool, typer.Option("--rotate", help="The party is enrolled; give it these new keys.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="The fingerprint was compared already; do not ask.")] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Enrol an agent or a tallier at a running service, after comparing its fingerprint over the phone.

    Example: `labeler keys enrol hospital-a.public.json --url https://labels.example.org`
    """
    from workers.homes.new import read_public

    party = read_public(public)
    if not yes:
        question = f"Does {party['party_id']} ({party.get('role')}) read out the fingerprint {party['fingerprint']}?"
        typer.confirm(question, abort=True, err=True)
    view = service.enrol_party(url, token, party, rotated=rotated, ca_file=ca_file)
    if as_json:
        print_json(view)
    else:
        typer.echo(f"{view['party_id']} is enrolled as {view['role']} with fingerprint {view['fingerprint']}.")


@keys_app.command()
def revoke(
    party_id: Annotated[str, typer.Argument(help="Name the party is enrolled under.")],
    url: service.Url,
    token: service.Token,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Take nothing from a party any more, at once and for good.

    Example: `labeler keys revoke hospital-a --url https://labels.example.org`
    """
    view = service.revoke_party(url, token, party_id, ca_file=ca_file)
    if as_json:
        print_json(view)
    else:
        typer.echo(f"{view['party_id']} is revoked.")


@keys_app.command()
def token(
    name: Annotated[str, typer.Option(help="Whose token it is.")],
    role: Annotated[str, typer.Option(help="admin, requester or viewer.")],
    home: Annotated[
        Path | None, typer.Option(help="The coordinator's home, while the coordinator is stopped: for the first token.")
    ] = None,
    url: OptionalUrl = None,
    access: Annotated[
        str | None, typer.Option("--token", envvar="LABELER_TOKEN", help="An administrator's token, with --url.")
    ] = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Make an access token. It is shown now and never again: only its hash is kept.

    Example: `labeler keys token --home coordinator --name "data team" --role requester`
    """
    wanted = one_of("role", role, service.ROLES)
    if home is not None:
        from workers.homes.keys import make_token_offline

        made: dict[str, Any] = make_token_offline(home, name=name, role=wanted)
    elif url is not None and access is not None:
        made = service.make_token(url, access, name=name, role=wanted, ca_file=ca_file)
    else:
        raise InvalidSetting("name the coordinator's home (--home), or a running service (--url and --token)")
    if as_json:
        print_json(made)
    else:
        typer.echo(f"Token of {made['name']} ({made['role']}), shown now and never again:")
        typer.echo(made["token"])


def _tell(document: dict[str, Any], home: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    typer.echo(f"{document['party_id']} ({document['role']})")
    typer.echo(f"fingerprint  {document['fingerprint']}")
    typer.echo(f"verify_key   {document['verify_key']}")
    typer.echo(f"seal_key     {document['seal_key']}")
    typer.echo(f"Both keys are in {home / 'keys.public.json'}, to be sent to others.")
