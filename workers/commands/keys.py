"""Commands about keys and tokens: `keys make | show | rotate | enrol | revoke | token`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labeler.errors import InvalidSetting
from workers.commands import service
from workers.commands.console import Json, one_of, tell
from workers.commands.service import CaFile, MaybeUrl

Home = Annotated[Path, typer.Option(help="Home folder of the party.")]

keys_app = typer.Typer(
    help="Make, show, enrol, rotate and revoke keys; make access tokens.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


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
    said = f"{view['party_id']} is enrolled as {view['role']} with fingerprint {view['fingerprint']}."
    tell(view, said, as_json=as_json)


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
    with service.connect(url, token, ca_file) as client:
        view = client.revoke_party(party_id)
    tell(view.model_dump(mode="json"), f"{view.party_id} is revoked.", as_json=as_json)


@keys_app.command()
def token(
    name: Annotated[str, typer.Option(help="Whose token it is.")],
    role: Annotated[str, typer.Option(help="admin, requester or viewer.")],
    home: Annotated[
        Path | None, typer.Option(help="The coordinator's home, while the coordinator is stopped: for the first token.")
    ] = None,
    url: MaybeUrl = None,
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
        with service.connect(url, access, ca_file) as client:
            made = client.create_token(name, wanted).model_dump(mode="json")
    else:
        raise InvalidSetting("name the coordinator's home (--home), or a running service (--url and --token)")
    said = f"Token of {made['name']} ({made['role']}), shown now and never again:"
    tell(made, said, made["token"], as_json=as_json)


def _tell(document: dict[str, Any], home: Path, *, as_json: bool) -> None:
    tell(
        document,
        f"{document['party_id']} ({document['role']})",
        f"fingerprint  {document['fingerprint']}",
        f"verify_key   {document['verify_key']}",
        f"seal_key     {document['seal_key']}",
        f"Both keys are in {home / 'keys.public.json'}, to be sent to others.",
        as_json=as_json,
    )
