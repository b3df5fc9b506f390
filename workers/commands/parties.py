"""Commands of a site: `agent` and `tallier` run there, and what their people look at and decide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labeler.errors import InvalidSetting
from workers.commands import site
from workers.commands.console import Json, tell
from workers.commands.exposure import exposure
from workers.commands.federation import stop_signal
from workers.commands.invitations import agent_join, tallier_join

Home = Annotated[Path, typer.Option(help="Home folder of this party.")]
OptionalHome = Annotated[Path | None, typer.Option(help="Home folder of this party.")]
CoordinatorUrl = Annotated[str, typer.Option(help="Where the coordinator is: https://..., or http:// on this machine.")]

agent_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")
tallier_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")

agent_app.command("join")(agent_join)
tallier_app.command("join")(tallier_join)
site.add_to_agent(agent_app)
agent_app.command("exposure")(exposure)


@agent_app.callback(invoke_without_command=True)
def agent(context: typer.Context, home: OptionalHome = None) -> None:
    """Run an agent, and see and decide what it answers.

    Example: `labeler agent --home hospital-a` is short for `labeler agent run --home hospital-a`
    """
    if context.invoked_subcommand is None:
        agent_run(_needed(home))


@agent_app.command("run")
def agent_run(home: Home) -> None:
    """Answer questions of the coordinator within the site's policy, until stopped.

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
    shard: Annotated[Path, typer.Option(help="The private shard it answers from (`labeler embed --max-records`).")],
    engine: Annotated[str, typer.Option(help="Index engine; see `labeler run`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Make an agent's home: keys, agent.toml, and a policy.toml that refuses everything until it is filled in.

    Example: `labeler agent init --home hospital-a --id hospital-a --coordinator https://labels.example.org
    --shard a.shard`
    """
    from workers.homes.new import make_agent_home

    public = make_agent_home(home, agent_id=agent_id, coordinator_url=coordinator, shard=shard, engine=engine)
    next_step = f"Fill in {home / 'policy.toml'}; until then it refuses everything."
    _tell_made(home, public, next_step=next_step, as_json=as_json)


@tallier_app.callback(invoke_without_command=True)
def tallier(context: typer.Context, home: OptionalHome = None) -> None:
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
    from feature_store.keys import PublicKeys
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
    """Give a tallier that is there an address and a certificate, so that it can find winners with the others.

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
    """Name the hospitals that this tallier sums; it refuses rounds with anybody else. Restart it afterwards.

    Example: `labeler tallier agents hospital-a.public.json hospital-b.public.json --home tallier`
    """
    from workers.homes.named_agents import name_agents
    from workers.homes.new import read_public

    documents = [read_public(path) for path in files]
    named = name_agents(home, documents)
    tell(
        named,
        "Compare with each hospital over the phone, then restart this tallier:",
        *(f"  {document['party_id']}: {document['fingerprint']}" for document in documents),
        f"It sums {len(named)} agents and nobody else: {', '.join(named)}.",
        as_json=as_json,
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
