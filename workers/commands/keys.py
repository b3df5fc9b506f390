"""Commands of who may take part: `keys make | show | rotate | enrol | revoke | token`, and `invite`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labeler.errors import InvalidSetting
from workers.commands import service
from workers.commands.console import Json, check_file, escaped, one_of, print_json, tell, wrapped
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


def invite(
    name: Annotated[str, typer.Argument(help="Name the site is to be enrolled under, for example hospital-a.")],
    url: service.Url,
    token: service.Token,
    role: Annotated[str, typer.Option(help="agent (a hospital) or tallier.")] = "agent",
    number: Annotated[
        int | None, typer.Option(min=0, max=2, help="Which tallier; the lowest that is free otherwise.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="It is enrolled: new keys for it, and the talliers as they are now.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=30, help="How long the invitation can be used.")] = 7,
    out: Annotated[Path | None, typer.Option(help="File to write; NAME.invitation.json otherwise.")] = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Let an invitation of this name that was not used open nothing.")
    ] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Invite a site: one signed file with all it needs, and a phrase to compare by telephone.

    The certificate of your own authority (--ca-file) goes along. Invite the talliers first: a hospital pins all of
    them when it joins.

    Example: `labeler invite hospital-a --url https://labels.example.org`
    """
    from workers.homes.joining import write_invitation

    if withdraw:
        with service.connect(url, token, ca_file) as client:
            gone = client.withdraw_invitation(name)
        said = f"{gone.withdrawn} invitations of {escaped(name)} were withdrawn."
        tell(gone.model_dump(mode="json"), said, as_json=as_json)
        return
    chosen = one_of("role", role, ("agent", "tallier"))
    fields = {"party_id": name, "role": chosen, "tallier": number, "rotate": rotate, "valid_days": days}
    path = out or Path(f"{name}.invitation.json")
    check_file(path)
    made = service.make_invitation(url, token, fields, ca_file=ca_file)
    write_invitation(path, made["document"])
    if as_json:
        print_json(
            {key: made[key] for key in ("invitation_id", "party_id", "role", "expires_at", "phrase")}
            | {"file": str(path)}
        )
        return
    what = "--shard SHARD --home HOME" if chosen == "agent" else "--home HOME"
    wrapped(f"Send {path} to {escaped(name)}, and to nobody else. Its people run")
    typer.echo(f"  labeler {chosen} join {path.name} {what}")
    typer.echo("and ask you by telephone for the phrase that they are shown:")
    typer.echo(f"  {made['phrase']}")
    typer.echo(f"It can be used once, until {made['expires_at'][:16].replace('T', ' ')} UTC.")
