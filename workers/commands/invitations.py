"""Invitations: `labeler invite` at the operator; `agent join` and `tallier join` at a site."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labeler.errors import InvalidSetting
from workers.commands import service
from workers.commands.console import Json, escaped, one_of, print_json, tell
from workers.commands.places import check_file
from workers.commands.service import CaFile

if TYPE_CHECKING:
    from labeler.invitation import Invitation

Invited = Annotated[Path, typer.Argument(help="The invitation that the operator has sent.", metavar="FILE")]
Phrase = Annotated[
    str | None,
    typer.Option(
        help="The phrase as the operator read it out by telephone; without it you are asked.", metavar="WORDS"
    ),
]
ROLES = ("agent", "tallier")
_WIDTH = 80


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
    from workers.homes.invitations import write_invitation

    if withdraw:
        with service.connect(url, token, ca_file) as client:
            gone = client.withdraw_invitation(name)
        said = f"{gone.withdrawn} invitations of {escaped(name)} were withdrawn."
        tell(gone.model_dump(mode="json"), said, as_json=as_json)
        return
    chosen = one_of("role", role, ROLES)
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
    _wrapped(f"Send {path} to {escaped(name)}, and to nobody else. Its people run")
    typer.echo(f"  labeler {chosen} join {path.name} {what}")
    typer.echo("and ask you by telephone for the phrase that they are shown:")
    typer.echo(f"  {made['phrase']}")
    typer.echo(f"It can be used once, until {made['expires_at'][:16].replace('T', ' ')} UTC.")


def agent_join(
    invitation: Invited,
    home: Annotated[Path, typer.Option(help="Home folder to make.")] = Path("agent"),
    shard: Annotated[
        Path | None,
        typer.Option(help="The private shard it answers from (`labeler embed --max-records`); not for new keys."),
    ] = None,
    phrase: Phrase = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Most that all answers together may cost one image; 1.0 otherwise.")
    ] = None,
    noise_contributors: Annotated[
        int | None,
        typer.Option(min=1, help="Agents known to be real and honest, this one included; 1 otherwise. docs/policy.md."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Index engine; see `labeler run`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Join as a hospital: home, policy and keys are made, the keys enrolled, the connection tried.

    With an invitation for new keys (`labeler invite --rotate`), name the home that is there and stop its process first.

    Example: `labeler agent join hospital-a.invitation.json --shard a.shard --home agent`
    """
    from workers.agent.policy import read_policy
    from workers.agent.policy_words import policy_in_words
    from workers.homes.joining import join_agent, pinned_changes
    from workers.party.home import POLICY_FILE

    asked = _agree(invitation, "agent", phrase, quiet=as_json, more=lambda found: pinned_changes(home, found))
    wanted: dict[str, Any] = {"instance_epsilon": epsilon, "max_noise_contributors": noise_contributors}
    joined = join_agent(home, asked, shard=shard, engine=engine, wanted=wanted)
    words = policy_in_words(read_policy(home / POLICY_FILE))
    if as_json:
        print_json(
            {**joined.public, "home": str(home), "phrase": asked.phrase, "policy": words}
            | {"roster_changed": joined.roster_changed, "backbone_known": joined.backbone_known}
        )
        return
    _say_joined(home, joined.public, joined.roster_changed)
    typer.echo("")
    typer.echo(f"What this site allows, in {home / POLICY_FILE} (change it at any time):")
    for line in words:
        _wrapped(line, bullet=True)
    if not joined.backbone_known:
        typer.echo("")
        _wrapped(
            "Attention: the service embeds images with other backbones than this shard's, so it cannot ask about it. "
            "Ask the operator which backbone to use (`labeler embed --backbone`)."
        )
    typer.echo("")
    typer.echo("Next:")
    typer.echo(f"  labeler agent --home {home}            answers, until it is stopped")
    typer.echo(f"  labeler agent desk --home {home}       what was asked, and what you decide")
    _wrapped(
        f"Talliers that name their agents need {home / 'keys.public.json'}: send it to them, and read out the "
        "fingerprint (labeler tallier agents)."
    )


def tallier_join(
    invitation: Invited,
    home: Annotated[Path, typer.Option(help="Home folder to make.")] = Path("tallier"),
    phrase: Phrase = None,
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where the two other talliers reach this one, to find winners together."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Join as a tallier: home and keys are made, the keys enrolled, the connection tried.

    Example: `labeler tallier join registry.invitation.json --home tallier`
    """
    from workers.homes.joining import join_tallier

    asked = _agree(invitation, "tallier", phrase, quiet=as_json)
    joined = join_tallier(home, asked, listen=listen)
    if as_json:
        print_json(
            {**joined.public, "home": str(home), "phrase": asked.phrase, "roster_changed": joined.roster_changed}
        )
        return
    _say_joined(home, joined.public, roster_changed=False)
    typer.echo("")
    typer.echo("Next:")
    typer.echo(f"  labeler tallier --home {home}                  adds up shares, until it is stopped")
    typer.echo(f"  labeler tallier agents FILES --home {home}     names the hospitals that it sums")
    _wrapped("Name them from the keys.public.json that each hospital sends, before you sum anything that matters.")
    if listen is not None:
        _wrapped(
            f"Send {home / 'keys.public.json'} to the two other talliers too, and pin theirs: labeler tallier peers."
        )


def _agree(
    path: Path,
    role: str,
    phrase: str | None,
    *,
    quiet: bool,
    more: Any = lambda _: (),
) -> Invitation:
    """Read an invitation, show what is agreed to, and have its phrase compared.

    Raises:
        InvalidSetting: the phrase is another one.
    """
    from labeler.invitation import same_phrase
    from workers.homes.invitations import read_invitation, terms_of

    asked = read_invitation(path, role="tallier" if role == "tallier" else "agent", now=datetime.now(UTC))
    if not quiet:
        terms = terms_of(asked)
        width = max(len(term.about) for term in terms) + 2
        for term in terms:
            typer.echo(f"{escaped(term.about).ljust(width)}{escaped(term.says)}")
        changes: Sequence[str] = more(asked)
        for change in changes:
            typer.echo(f"{'Changes'.ljust(width)}{escaped(change)}")
        typer.echo("")
    if phrase is not None:
        if not same_phrase(phrase, asked.phrase):
            raise InvalidSetting(
                f"the phrase of {path.name} is {asked.phrase}, and --phrase is another one: the file was exchanged on "
                "its way, or is an older one. Nothing was done. Ask the operator for the file by another way"
            )
        return asked
    if quiet or not sys.stdin.isatty():
        typer.echo("Call the operator, by a number you know, and compare the phrase.", err=True)
    question = f"Does the operator, by telephone, read out {asked.phrase}?"
    typer.confirm(question, abort=True, err=True)
    return asked


def _say_joined(home: Path, public: Any, roster_changed: bool) -> None:
    typer.echo(f"{escaped(public['party_id'])} has joined: its keys are enrolled, and the coordinator answers it.")
    typer.echo(f"Home {home}; fingerprint of its keys {public['fingerprint']}: read it to the operator.")
    if roster_changed:
        _wrapped(
            "Attention: the talliers have changed since the invitation was made, so tasks will be refused here. Ask "
            "the operator for a new one (labeler invite --rotate)."
        )


def _wrapped(text: str, *, bullet: bool = False) -> None:
    from textwrap import fill

    indent = ("- ", "  ") if bullet else ("", "")
    typer.echo(fill(escaped(text), _WIDTH, initial_indent=indent[0], subsequent_indent=indent[1]))
