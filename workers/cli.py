"""The `labeler` command line: the one place that may import everything, and wires it.

Commands stay thin: they read options, call one function, and render. Heavy libraries are imported
inside commands, so that `labeler --help` and `labeler plan` answer at once.

Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 75 try again (an interrupted run continues).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from labeler.errors import Interrupted, InvalidSetting, LabelerError
from labeler.task import ReleaseKind

app = typer.Typer(
    name="labeler",
    help="Label public images with the private images of several organisations, under a proven privacy bound.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

T = TypeVar("T", bound=str)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines, nothing else.")]
Engine = Annotated[
    str,
    typer.Option(help="Index engine: auto, numpy, faiss, faiss-gpu, torch, torch-gpu. All give equal neighbours."),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(min=1, help="MiB an index may take; a larger shard is searched in blocks."),
]


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        app()
    except LabelerError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        _complain(f"cannot read or write {error.filename or 'a file'}: {error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(Interrupted.exit_code)


def _complain(sentence: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("labeler:", style="bold red", end=" ")
    console.print(sentence, markup=False, emoji=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Output folder, made if missing.")] = Path("demo"),
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Reproduce a run bit for bit. Noise from a seed protects nobody; the report says so."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the whole pipeline on real handwritten digits, without any download.

    Five agents hold labelled digits of scikit-learn, the public digits have none. A SimCLR backbone is
    pretrained on the public ones, the agents vote, a student learns from the noisy answers.

    Example: `labeler demo --out demo`
    """
    from workers.demo import run_demo
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        summary = run_demo(out, seed=seed, progress=progress)
    _finish(summary, out, as_json=as_json)


@app.command()
def plan(
    queries: Annotated[int, typer.Option(min=1, help="How many queries are asked.")] = 100,
    method: Annotated[str, typer.Option(help="knn, reverse-knn or one-hot.")] = "knn",
    k: Annotated[int, typer.Option(help="Neighbours that vote.")] = 1,
    sigma: Annotated[float | None, typer.Option(help="Noise nobody can subtract, in votes.")] = None,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee.")] = 1e-4,
    agents: Annotated[int, typer.Option(help="How many agents take part.")] = 3,
    colluding_agents: Annotated[int, typer.Option(help="How many of them may pool what they know.")] = 0,
    max_dropouts: Annotated[int, typer.Option(help="How many may fail to answer.")] = 0,
    classes: Annotated[int, typer.Option(min=2, help="How many classes there are; hardly moves the price.")] = 10,
    max_agent_records: Annotated[
        int | None, typer.Option(help="Public bound on an agent's records (reverse-knn, agent level).")
    ] = None,
    release: Annotated[str, typer.Option(help="histogram or winner.")] = "histogram",
    epsilon: Annotated[float | None, typer.Option(help="The price wanted; needs --solve.")] = None,
    solve: Annotated[str | None, typer.Option(help="What to find for --epsilon: sigma, queries or k.")] = None,
    level: Annotated[str, typer.Option(help="Level at which --epsilon holds: instance or agent.")] = "instance",
    as_json: Json = False,
) -> None:
    """Say what a setting costs before anything is asked, or which setting a price buys.

    Examples:

    `labeler plan --method knn --k 50 --queries 206 --sigma 25 --delta 1e-4 --agents 3 --colluding-agents 1`

    `labeler plan --method knn --k 50 --queries 206 --epsilon 1 --solve sigma --agents 3`
    """
    from workers.plan import PlanRequest, make_plan

    request = PlanRequest(
        method=_one_of("method", method, ("knn", "reverse-knn", "one-hot")),
        k=k,
        queries=queries,
        sigma=sigma,
        delta=delta,
        agents=agents,
        colluding_agents=colluding_agents,
        max_dropouts=max_dropouts,
        classes=classes,
        max_agent_records=max_agent_records,
        release=cast(ReleaseKind, _one_of("release", release, ("histogram", "winner"))),
        epsilon=epsilon,
        solve=None if solve is None else cast(Any, _one_of("solve", solve, ("sigma", "queries", "k"))),
        level=_one_of("level", level, ("instance", "agent")),
    )
    result = make_plan(request)
    if as_json:
        print_json(result)
        return
    _print_plan(result)


@app.command()
def embed(
    source: Annotated[str, typer.Argument(help="Folder of class folders, Parquet file, or torchvision:NAME?root=DIR.")],
    backbone: Annotated[str, typer.Option(help="Backbone file (TOML), SimCLR checkpoint, timm name, or pixels.")],
    out: Annotated[Path, typer.Option(help="The shard to write.")],
    classes: Annotated[
        str | None, typer.Option(help="Public class names, comma separated, in label order. Default: folder names.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="These are public images: keep thumbnails for reports.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images embedded at a time.")] = 32,
    as_json: Json = False,
) -> None:
    """Turn images into a shard of features. Continues where it was interrupted.

    Unreadable images are listed and skipped, and the command then ends with exit code 1.

    Example: `labeler embed hospital-a/ --backbone resnet50 --out hospital-a.shard --classes healthy,ill`
    """
    from workers.embedder import embed_images
    from workers.progress import progress_bars

    names = tuple(name.strip() for name in classes.split(",")) if classes is not None else None
    with progress_bars(quiet=as_json) as progress:
        result = embed_images(
            source, backbone, out, classes=names, public=public, batch_size=batch_size, progress=progress
        )
    _print_embed(result, as_json=as_json)
    if result["skipped"]:
        sys.exit(1)


@app.command()
def pretrain(
    source: Annotated[str, typer.Argument(help="Public images: folder, Parquet file, or torchvision:NAME?root=DIR.")],
    out: Annotated[Path, typer.Option(help="The backbone to write.")],
    architecture: Annotated[str, typer.Option(help="small-conv or any timm architecture.")] = "small-conv",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Public seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Pretrain a SimCLR backbone on public images. Continues from its last checkpoint.

    Example: `labeler pretrain public-images/ --out backbone --architecture small-conv --epochs 200`
    """
    from workers.embedder import pretrain_backbone
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        result = pretrain_backbone(source, out, architecture=architecture, epochs=epochs, seed=seed, progress=progress)
    if as_json:
        print_json(result)
    else:
        typer.echo(f"Backbone {result['fingerprint'][:12]} ({result['dimension']} features) is in {out}")


@app.command()
def run(
    task: Annotated[Path, typer.Argument(help="Task file (TOML); every field is in docs/task-file.md.")],
    shard: Annotated[list[Path], typer.Option(help="An agent's shard; repeat for each agent.")],
    queries: Annotated[Path, typer.Option(help="Public shard, or public images (then name --backbone).")],
    out: Annotated[Path, typer.Option(help="Output folder; an interrupted run continues in it.")],
    test: Annotated[Path | None, typer.Option(help="Labelled public shard on which to score the student.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Backbone for --queries when it is a folder of images rather than a shard.")
    ] = None,
    allow_small_shards: Annotated[
        bool, typer.Option("--allow-small-shards", help="Let an agent with fewer than k records vote with what it has.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Simulation: reproducible noise that protects nobody; the release says so."),
    ] = None,
    engine: Engine = "auto",
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Label public images with private shards: a batch labelling job in one process.

    Example: `labeler run task.toml --shard a.shard --shard b.shard --queries public.shard --out job`
    """
    from workers.labelling import run_job
    from workers.preparation import LabellingJob
    from workers.progress import progress_bars
    from workers.task_file import read_task_file

    job = LabellingJob(
        file=read_task_file(task),
        shards=tuple(shard),
        queries=queries,
        out=out,
        test=test,
        backbone=backbone,
        allow_small_shards=allow_small_shards,
        seed=seed,
        engine=engine,
        memory_limit_bytes=None if memory_limit is None else memory_limit * 2**20,
    )
    with progress_bars(quiet=as_json) as progress:
        summary = run_job(job, progress=progress)
    _finish(summary, out, as_json=as_json)


@app.command()
def student(
    job: Annotated[Path, typer.Argument(help="Output folder of a finished job.")],
    kind: Annotated[str, typer.Option(help="auto, prototypes, spreading, linear-probe or finetune.")] = "auto",
    test: Annotated[
        Path | None, typer.Option(help="Labelled public shard to score on; for finetune, labelled images.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="finetune only: the source of public images the job asked about.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="finetune only: the network to start from (file, checkpoint or timm name).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Public seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a student on the pseudo-labels of a job, and score it where truth is known. Costs no privacy.

    Example: `labeler student job --kind linear-probe --test test.shard`
    """
    from workers.progress import progress_bars
    from workers.student_command import train_student

    with progress_bars(quiet=as_json) as progress:
        result = train_student(
            job, kind=kind, test=test, images=images, backbone=backbone, seed=seed, progress=progress
        )
    if as_json:
        print_json(result)
        return
    score = "no truth to score against" if result.get("accuracy") is None else f"{result['accuracy']:.1%} right"
    typer.echo(f"Student {result['kind']}: {score}; saved to {result['path']}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="office-caltech, digits or speed.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the real data sets.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All repetitions, as in BENCHMARKS.md.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a paper's table or measure speed.

    Example: `labeler bench speed`
    """
    from workers.bench import run_bench
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        result = run_bench(name, data=data, full=full, progress=progress)
    if as_json:
        print_json(result)
    else:
        _print_bench(result)


def print_json(document: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(document, allow_nan=False))


def _finish(summary: dict[str, Any], out: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    from workers.report.words import say_epsilon

    labels, privacy = summary["labels"], summary["privacy"]
    console = Console(highlight=False)
    console.print()
    accuracy = f", {labels['accuracy']:.1%} of them right" if labels.get("accuracy") is not None else ""
    console.print(f"Labels    {labels['answered']} of {labels['asked']} questions answered{accuracy}")
    if summary.get("student", {}).get("accuracy") is not None:
        console.print(f"Student   {summary['student']['accuracy']:.1%} right on unseen images")
    agent = privacy["agent"]["epsilon"]
    console.print(
        f"Privacy   epsilon {say_epsilon(privacy['instance']['epsilon'])} per private image, "
        f"{say_epsilon(agent) if agent is not None else 'none'} per agent (delta {privacy['delta']:g})"
    )
    console.print(f"Report    {out / 'report.html'}", markup=False, emoji=False, soft_wrap=True)


def _print_plan(result: dict[str, Any]) -> None:
    from workers.report.words import say_epsilon, say_estimate

    table = Table(title=None, show_edge=False)
    for heading in ("", "per private image", "per agent"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, key in (
        ("epsilon, exact (guaranteed)", None),
        ("as computed in the papers", "as_in_paper"),
    ):
        levels = result if key is None else result[key]
        say = say_epsilon if key is None else say_estimate
        table.add_row(name, *(say(levels[level]["epsilon"], digits=4) for level in ("instance", "agent")))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"\n{result['queries']} queries, sigma {result['sigma_votes']:.6g} votes, delta {result['delta']:g}; "
        f"each agent adds noise of {result['noise_share_sigma']:.4g} votes, "
        f"the sum carries {result['total_sigma_votes']:.4g}."
    )
    for level in ("instance", "agent"):
        if result[level].get("reason"):
            console.print(f"Per {level}: {result[level]['reason']}")


def _print_embed(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    typer.echo(f"{result['records']} images are in {result['out']}")
    for note in result["notes"]:
        typer.echo(note)
    for skipped in result["skipped"]:
        typer.echo(f"skipped {skipped['source']}: {skipped['reason']}", err=True)
    if result["skipped"]:
        typer.echo(f"{len(result['skipped'])} images could not be read and were skipped", err=True)


def _print_bench(result: dict[str, Any]) -> None:
    table = Table(title=result["name"])
    columns = ("case", "method", "metric", "value", "sd", "epsilon", "delta", "level", "reference", "seconds")
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "method", "metric", "level") else "right")
    for row in result["rows"]:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(width=160).print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _one_of(name: str, value: str, allowed: tuple[T, ...]) -> T:
    if value not in allowed:
        raise InvalidSetting(f"--{name} must be one of {', '.join(allowed)}; found {value!r}")
    return value
