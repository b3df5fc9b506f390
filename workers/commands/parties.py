"""The commands `agent` and `tallier` of a site: they make its home, run it, and let its people review and decide."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labeler.errors import InvalidSetting
from workers.commands import site
from workers.commands.console import Home, Json, MaybeHome, escaped, print_json, tell, wrapped
from workers.commands.federation import stop_signal
from workers.commands.shards import (
    ArchitectureOption,
    BackboneOption,
    ClassesOption,
    MaxRecordsOption,
    PersonLevelOption,
)

if TYPE_CHECKING:
    from labeler.invitation import Invitation
    from workers.party.home import EmbedSettings

CoordinatorUrl = Annotated[str, typer.Option(help="Where the coordinator is: https://..., or http:// on this machine.")]

Invited = Annotated[Path, typer.Argument(help="The invitation that the operator has sent.", metavar="FILE")]
Phrase = Annotated[
    str | None,
    typer.Option(
        help="The phrase as the operator reads it out by telephone; without it you are asked.", metavar="WORDS"
    ),
]

ImagesOption = Annotated[
    Path | None,
    typer.Option(help="Folder of private images, one folder per class: the agent embeds it (with --max-records)."),
]
ShardOption = Annotated[
    Path | None,
    typer.Option(help="Or a private shard that is embedded already (`labeler embed --max-records`)."),
]
PersonsOption = Annotated[
    Path | None, typer.Option(help="CSV file with the columns file and person: whose image each is.")
]

agent_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")
tallier_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")

site.add_to_agent(agent_app)


@agent_app.callback(invoke_without_command=True)
def agent(context: typer.Context, home: MaybeHome = None) -> None:
    """Run an agent, and review and decide its answers.

    Example: `labeler agent --home hospital-a` is short for `labeler agent run --home hospital-a`
    """
    if context.invoked_subcommand is None:
        agent_run(_needed(home))


@agent_app.command("run")
def agent_run(home: Home) -> None:
    """Answer questions of the coordinator within the site's policy, until stopped.

    A home that names a folder of images embeds it first, once; a later change is shown, and embedded when you ask
    (`labeler agent embed`, or the site's page).

    Example: `labeler agent run --home hospital-a`
    """
    from workers.agent.service import run_agent
    from workers.service_process import configure_logging

    configure_logging()
    run_agent(home, stop=stop_signal())


@agent_app.command("init")
def agent_init(
    home: Home,
    agent_id: Annotated[str, typer.Option("--id", help="Name to be enrolled under, for example hospital-a.")],
    coordinator: CoordinatorUrl,
    images: ImagesOption = None,
    shard: ShardOption = None,
    backbone: BackboneOption = None,
    architecture: ArchitectureOption = None,
    classes: ClassesOption = None,
    person_level: PersonLevelOption = None,
    persons: PersonsOption = None,
    max_records: MaxRecordsOption = None,
    engine: Annotated[str, typer.Option(help="Index engine; see `labeler run`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Make an agent's home: keys, agent.toml, and a policy.toml that refuses everything until it is filled in.

    Example: `labeler agent init --home hospital-a --id hospital-a --coordinator https://labels.example.org
    --images scans/ --classes healthy,ill --max-records 10000`
    """
    from workers.homes.new import make_agent_home

    public = make_agent_home(
        home,
        agent_id=agent_id,
        coordinator_url=coordinator,
        shard=shard,
        images=images,
        embedding=_embedding(images, backbone, architecture, classes, person_level, persons, max_records),
        engine=engine,
    )
    next_step = f"Fill in {home / 'policy.toml'}; until then it refuses everything."
    _tell_made(home, public, next_step=next_step, as_json=as_json)


@tallier_app.callback(invoke_without_command=True)
def tallier(context: typer.Context, home: MaybeHome = None) -> None:
    """Run a tallier, which adds up secret shares.

    Example: `labeler tallier --home tallier-0` is short for `labeler tallier run --home tallier-0`
    """
    if context.invoked_subcommand is None:
        tallier_run(_needed(home))


@tallier_app.command("run")
def tallier_run(home: Home) -> None:
    """Hold one secret share of every ballot and add them up, until stopped.

    Example: `labeler tallier run --home tallier-0`
    """
    from workers.service_process import configure_logging
    from workers.tallier.service import run_tallier

    configure_logging()
    run_tallier(home, stop=stop_signal())


@tallier_app.command("init")
def tallier_init(
    home: Home,
    tallier_id: Annotated[str, typer.Option("--id", help="Name to be enrolled under, for example registry.")],
    number: Annotated[int, typer.Option(min=0, max=2, help="Which tallier it is, from 0.")],
    coordinator: CoordinatorUrl,
    coordinator_keys: Annotated[Path, typer.Option(help="The coordinator's keys.public.json.")],
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where the two other talliers reach this one, to find winners together."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a tallier's home: keys and tallier.toml.

    Example: `labeler tallier init --home t0 --id registry --number 0 --coordinator https://labels.example.org
    --coordinator-keys coordinator.public.json`
    """
    from labeler.system.keys import PublicKeys
    from workers.homes.new import make_tallier_home, read_public

    known = read_public(coordinator_keys)
    public = make_tallier_home(
        home,
        tallier_id=tallier_id,
        number=number,
        coordinator_url=coordinator,
        coordinator=PublicKeys(known["verify_key"], known["seal_key"]),
        listen=listen,
    )
    next_step = f"Compare the coordinator's fingerprint {known['fingerprint']} over the phone before it starts."
    if listen is not None:
        next_step += " Send the file to the two other talliers too, and pin theirs: labeler tallier peers."
    _tell_made(home, public, next_step=next_step, as_json=as_json)


@tallier_app.command("listen")
def tallier_listen(
    address: Annotated[str, typer.Argument(help="HOST:PORT where the two other talliers reach this one.")],
    home: Home,
    as_json: Json = False,
) -> None:
    """Give an existing tallier an address and a certificate, so that it can find winners with the others.

    Example: `labeler tallier listen t0.example.org:7700 --home t0`
    """
    from workers.homes.new import add_winner_identity
    from workers.winner.certificates import fingerprint

    public = add_winner_identity(home, listen=address)
    said = f"Send {home / 'keys.public.json'} to the two other talliers, and read out its certificate:"
    tell(public, said, f"  {fingerprint(public['certificate'])}", as_json=as_json)


@tallier_app.command("peers")
def tallier_peers(
    files: Annotated[list[Path], typer.Argument(help="keys.public.json of the two other talliers.")],
    home: Home,
    as_json: Json = False,
) -> None:
    """Pin the two other talliers, with which this one finds winners. Restart it afterwards.

    Example: `labeler tallier peers university.public.json auditor.public.json --home t0`
    """
    from workers.homes.new import read_public
    from workers.tallier.peers import pin_peers
    from workers.winner.certificates import fingerprint

    peers = pin_peers(home, [read_public(path) for path in files])
    pinned = [
        {"tallier": number, "party_id": peer.tallier_id, "listen": peer.listen}
        | {"certificate_sha256": fingerprint(peer.certificate)}
        for number, peer in sorted(peers.items())
    ]
    tell(
        pinned,
        "Compare over the phone, then restart this tallier:",
        *("  tallier {tallier}, {party_id} at {listen}: {certificate_sha256}".format_map(peer) for peer in pinned),
        as_json=as_json,
    )


@tallier_app.command("agents")
def tallier_agents(
    files: Annotated[list[Path], typer.Argument(help="keys.public.json of hospitals.")],
    home: Home,
    as_json: Json = False,
) -> None:
    """Name the hospitals that this tallier sums; it refuses rounds with others. Restart it afterwards.

    Example: `labeler tallier agents hospital-a.public.json hospital-b.public.json --home tallier`
    """
    from workers.homes.new import name_agents, read_public

    documents = [read_public(path) for path in files]
    named = name_agents(home, documents)
    tell(
        named,
        "Compare with each hospital over the phone, then restart this tallier:",
        *(f"  {document['party_id']}: {document['fingerprint']}" for document in documents),
        f"It sums {len(named)} agents and nobody else: {', '.join(named)}.",
        as_json=as_json,
    )


@agent_app.command("join")
def agent_join(
    invitation: Invited,
    home: Annotated[Path, typer.Option(help="Home folder to make.")] = Path("agent"),
    images: ImagesOption = None,
    shard: ShardOption = None,
    backbone: BackboneOption = None,
    architecture: ArchitectureOption = None,
    classes: ClassesOption = None,
    person_level: PersonLevelOption = None,
    persons: PersonsOption = None,
    max_records: MaxRecordsOption = None,
    phrase: Phrase = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Most that all answers together may cost one image. Default: 1.0.")
    ] = None,
    noise_contributors: Annotated[
        int | None,
        typer.Option(min=1, help="Agents known to be real and honest, with this one. Default: 1. docs/policy.md."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Index engine; see `labeler run`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Join as a hospital: make home, policy and keys, enrol the keys, test the connection.

    The agent answers from a folder of images, which it embeds when it runs first, or from a shard that is there. The
    bound on records is public: a round number, with room, chosen before you count.

    With an invitation for new keys (`labeler invite --rotate`), name the existing home, without a folder or a shard,
    and stop its process first.

    Examples:

    `labeler agent join hospital-a.invitation.json --images scans/ --classes healthy,ill --max-records 10000`

    `labeler agent join hospital-a.invitation.json --shard a.shard --home agent`
    """
    from workers.agent.policy import read_policy
    from workers.agent.site import policy_in_words
    from workers.homes.joining import join_agent, pinned_changes
    from workers.party.home import POLICY_FILE

    embedding = _embedding(images, backbone, architecture, classes, person_level, persons, max_records)
    asked = _agree(invitation, "agent", phrase, quiet=as_json, more=lambda found: pinned_changes(home, found))
    wanted: dict[str, Any] = {"instance_epsilon": epsilon, "max_noise_contributors": noise_contributors}
    joined = join_agent(
        home,
        asked,
        shard=shard,
        images=images,
        embedding=embedding,
        engine=engine,
        wanted=wanted,
    )
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
        wrapped(line, start="- ")
    if not joined.backbone_known:
        typer.echo("")
        wrapped(
            "Attention: the service embeds images with other backbones than this agent, so it cannot ask it. Ask the "
            "operator which backbone to use, and name it (--backbone)."
        )
    typer.echo("")
    typer.echo("Next:")
    does = "answers, until it is stopped" if images is None else "embeds the images, then answers"
    typer.echo(f"  labeler agent --home {home}            {does}")
    typer.echo(f"  labeler agent desk --home {home}       what was asked, and what you decide")
    wrapped(
        f"Talliers that name their agents need {home / 'keys.public.json'}: send it to them, and read out the "
        "fingerprint (labeler tallier agents)."
    )


@tallier_app.command("join")
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
    """Join as a tallier: make home and keys, enrol the keys, test the connection.

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
    wrapped("Name them from the keys.public.json that each hospital sends, before you sum anything that matters.")
    if listen is not None:
        wrapped(
            f"Send {home / 'keys.public.json'} to the two other talliers too, and pin theirs: labeler tallier peers."
        )


def _embedding(
    images: Path | None,
    backbone: str | None,
    architecture: str | None,
    classes: str | None,
    person_level: int | None,
    persons: Path | None,
    max_records: int | None,
) -> EmbedSettings | None:
    """Return the settings by which an agent embeds its folder; None where it answers from a shard."""
    from feature_store.backbones.spec import DEFAULT_BACKBONE
    from workers.commands.shards import names_of
    from workers.party.home import EmbedSettings

    if images is None:
        named: dict[str, object] = {"backbone": backbone, "architecture": architecture, "classes": classes}
        named |= {"person-level": person_level, "persons": persons, "max-records": max_records}
        if given := [f"--{name}" for name, value in named.items() if value is not None]:
            raise InvalidSetting(f"{', '.join(given)} says how a folder is embedded: name it with --images")
        return None
    if max_records is None:
        raise InvalidSetting(
            "name a public bound on the records (--max-records), because the time of an answer would tell how many "
            "there are: a round number, with room for images that come, chosen before you count"
        )
    weights = Path(backbone or DEFAULT_BACKBONE)
    return EmbedSettings(
        max_records=max_records,
        backbone=str(weights.resolve()) if weights.exists() else backbone or DEFAULT_BACKBONE,
        architecture=architecture,
        classes=names_of(classes),
        person_level=person_level,
        persons=None if persons is None else str(persons.resolve()),
    )


def _agree(
    path: Path,
    role: str,
    phrase: str | None,
    *,
    quiet: bool,
    more: Any = lambda _: (),
) -> Invitation:
    """Read an invitation, show its terms, and check the phrase that a person types.

    Raises:
        InvalidSetting: the phrase differs.
    """
    from labeler.invitation import same_phrase
    from workers.homes.joining import read_invitation, terms_of

    asked = read_invitation(path, role="tallier" if role == "tallier" else "agent", now=datetime.now(UTC))
    if not quiet:
        terms = terms_of(asked)
        width = max(len(about) for about, _ in terms) + 2
        for about, says in terms:
            typer.echo(f"{escaped(about).ljust(width)}{escaped(says)}")
        changes: Sequence[str] = more(asked)
        for change in changes:
            typer.echo(f"{'Changes'.ljust(width)}{escaped(change)}")
        typer.echo("")
    if phrase is None:
        # People confirm a shown phrase without listening, so the file's own phrase is hidden until it is typed.
        typer.echo("Call the operator, by a number you know, and have the phrase read out to you.", err=True)
        phrase = typer.prompt("Phrase", err=True)
    if not same_phrase(phrase, asked.phrase):
        raise InvalidSetting(
            f"this is not the phrase of {path.name}: you misheard, or the file was exchanged on its way, or is an "
            "older one. Nothing was done. Have the phrase read out again; if it differs again, ask for the file by "
            "another way"
        )
    return asked


def _say_joined(home: Path, public: Any, roster_changed: bool) -> None:
    typer.echo(f"{escaped(public['party_id'])} has joined: its keys are enrolled, and the coordinator answers it.")
    typer.echo(f"Home {home}; fingerprint of its keys {public['fingerprint']}: read it to the operator.")
    if roster_changed:
        wrapped(
            "Attention: the talliers have changed since the invitation was made, so tasks will be refused here. Ask "
            "the operator for a new one (labeler invite --rotate)."
        )


def _tell_made(home: Path, public: dict[str, object], *, next_step: str, as_json: bool) -> None:
    tell(
        public,
        f"The home of {public['party_id']} is {home}. {next_step}",
        f"Send {home / 'keys.public.json'} to the coordinator's administrator, and read out its fingerprint:",
        f"  {public['fingerprint']}",
        as_json=as_json,
    )


def _needed(home: Path | None) -> Path:
    if home is None:
        raise InvalidSetting("name the home: --home DIR")
    return home
