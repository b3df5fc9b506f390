"""The command `simulate`: what a round costs among a thousand agents and more, and how good its labels are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from labeler.errors import InvalidSetting
from labeler.methods import Method
from workers.commands.console import Json, check_file, one_of, print_json

METHODS: Final[tuple[Method, ...]] = ("knn", "reverse-knn", "ensemble", "blind-average")


def simulate(
    agents: Annotated[str, typer.Option(help="How many agents; several numbers with commas between.")] = (
        "1000,10000,100000"
    ),
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}.")] = "knn",
    shard: Annotated[
        Path | None,
        typer.Option("--shard", "--data", help="Labelled shard to deal to agents; else scikit-learn's digits."),
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="Records of each agent.")] = 20,
    queries: Annotated[int, typer.Option(min=1, help="Public images asked about; not for blind-average.")] = 100,
    k: Annotated[int, typer.Option(min=1, help="Neighbours that vote (knn, reverse-knn).")] = 1,
    ballot_radius: Annotated[
        int | None, typer.Option(min=1, help="Draw ballots onto a ball of so many votes (reverse-knn).")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The price the noise is chosen for; 1 if absent.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Instead: noise nobody can subtract, in votes.")] = None,
    level: Annotated[str, typer.Option(help="Whose price it is: instance or agent.")] = "agent",
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee.")] = 1e-6,
    talliers: Annotated[int, typer.Option(min=2, max=3, help="How many hold a share.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of deal, questions, noise and shares.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="How many compute. Equal sums whatever it is.")] = 1,
    engine: Annotated[str, typer.Option(help="Index engine, as of `labeler run`.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Keep each finished size in this file; the same command goes on from it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a round among very many agents: seconds, bytes per party, memory, and how many labels are right.

    Real ballots, noise and secret shares, added up by talliers as in the service, in one process tree and without a
    network. All randomness follows from the seed, so what comes out protects nobody: use records that may be seen.
    (`labeler bench simulate` is something else: schedules of crashes, loss and delay.)

    Examples:

    `labeler simulate --agents 1000,10000,100000 --processes 2`

    `labeler simulate --agents 1000 --method ensemble --epsilon 1 --queries 50`

    `labeler simulate --agents 1000,100000 --shard photos.shard --records 50 --out scale.json`
    """
    from feature_store.shard import Shard
    from workers.progress import progress_bars
    from workers.simulated.federation import digits_pool, shard_pool
    from workers.simulated.run import Simulation
    from workers.simulated.run import simulate as run_rounds

    if epsilon is not None and sigma is not None:
        raise InvalidSetting("give the noise as --sigma, or the price it is chosen for as --epsilon; not both")
    check_file(out)
    wanted = Simulation(
        agents=_sizes(agents),
        method=one_of("method", method, METHODS),
        k=k,
        records=records,
        queries=queries,
        epsilon=1.0 if epsilon is None and sigma is None else epsilon,
        sigma=sigma,
        level=one_of("level", level, ("instance", "agent")),
        delta=delta,
        talliers=talliers,
        seed=seed,
        processes=processes,
        engine=engine,
        ballot_radius=ballot_radius,
    )
    pool = digits_pool(seed=seed) if shard is None else shard_pool(Shard.open(shard), seed=seed)
    with progress_bars(quiet=as_json) as progress:
        document = run_rounds(wanted, pool, out=out, progress=progress)
    if as_json:
        print_json(document)
    else:
        _show(document)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise InvalidSetting(
            f"--agents takes whole numbers with commas between, as 1000,10000; found {text[:100]!r}"
        ) from None


def _show(document: dict[str, Any]) -> None:
    settings, rows = document["settings"], document["rows"]
    pool = settings["pool"]
    console = Console(highlight=False)
    table = Table(show_edge=False, padding=(0, 1))
    for name in (
        "agents",
        "seconds",
        "CPU µs\neach",
        "agent\ngets",
        "agent\nsends",
        "tallier\ngets",
        "peak\nMiB",
        "right",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        sent = row["bytes"]
        table.add_row(
            f"{row['agents']:,}",
            f"{row['seconds']:.1f}",
            f"{1e6 * sum(row['cpu_seconds'].values()) / row['agents']:.0f}",
            _bytes(sent["agent_receives"]),
            _bytes(sent["agent_sends"]),
            _bytes(sent["tallier_receives"]),
            f"{row['peak_mib']:.0f}",
            f"{row['labels_right']:.1%}",
        )
    console.print(table)
    console.print(f"Asked     {settings['method']}, {settings['queries']} queries x {pool['classes']} classes")
    console.print(f"Records   {settings['records']} per agent of {pool['name']}", soft_wrap=True)
    if (copies := rows[-1]["copies_of_a_record"]) > 1:
        console.print(
            f"          each is held by {copies:.1f} of {rows[-1]['agents']:,} agents: such sizes are for cost"
        )
    console.print(f"Noise     {_noise(rows)}, delta {settings['delta']:g}", soft_wrap=True)
    if document["exponent"] is not None:
        grow = f"{document['exponent']:.3f}, CPU seconds to that of {document['cpu_exponent']:.3f}"
        console.print(f"Cost      seconds grow as agents to the power of {grow}")
    console.print("Seeded    whoever knows the seed can subtract all noise: this protects nobody")


def _noise(rows: list[dict[str, Any]]) -> str:
    from labeler.budget import say_epsilon

    found = {
        f"epsilon {say_epsilon(row['epsilon']['instance'], digits=3)} per record, "
        f"{say_epsilon(row['epsilon']['agent'], digits=3)} per agent"
        for row in rows
    }
    return " or ".join(sorted(found))


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
