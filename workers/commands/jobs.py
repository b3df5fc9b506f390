"""Commands that run a whole job in one process: `demo`, `run`, `student`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from workers.commands.console import Json, one_of, print_json

if TYPE_CHECKING:
    from workers.progress import StageClock

Engine = Annotated[
    str,
    typer.Option(help="Index engine: auto, numpy, faiss, faiss-gpu, torch, torch-gpu. All give equal neighbours."),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(min=1, help="MiB an index may take; a larger shard is searched in blocks."),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (demo, run, student):
        app.command()(command)


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
    from workers.jobs.demo import run_demo
    from workers.progress import StageClock, progress_bars

    clock = StageClock()
    with progress_bars(quiet=as_json) as progress:
        summary = run_demo(out, seed=seed, clock=clock, progress=progress)
    _finish(summary, out, clock, as_json=as_json)


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
    winner: Annotated[
        str, typer.Option(help="How winners are found: plain, or mpyc in three processes; equal labels.")
    ] = "plain",
    as_json: Json = False,
) -> None:
    """Label public images with private shards: a batch labelling job in one process.

    Example: `labeler run task.toml --shard a.shard --shard b.shard --queries public.shard --out job`
    """
    from workers.jobs.labelling import run_job
    from workers.jobs.preparation import LabellingJob
    from workers.jobs.task_file import read_task_file
    from workers.progress import StageClock, progress_bars

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
        winner=one_of("winner", winner, ("plain", "mpyc")),
    )
    clock = StageClock()
    with progress_bars(quiet=as_json) as progress:
        summary = run_job(job, clock=clock, progress=progress)
    _finish(summary, out, clock, as_json=as_json)


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
    from workers.jobs.student import train_student
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        result = train_student(
            job, kind=kind, test=test, images=images, backbone=backbone, seed=seed, progress=progress
        )
    if as_json:
        print_json(result)
        return
    score = "no truth to score against" if result.get("accuracy") is None else f"{result['accuracy']:.1%} right"
    typer.echo(f"Student {result['kind']}: {score}; saved to {result['path']}")


def _finish(summary: dict[str, Any], out: Path, clock: StageClock, *, as_json: bool) -> None:
    # To standard error and nowhere else: how long a stage took tells how many private records there are.
    Console(highlight=False, stderr=True, quiet=as_json, soft_wrap=True).print(f"Seconds   {clock.in_words()}")
    if as_json:
        print_json(summary)
        return
    from labeler.epsilon_words import say_epsilon

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
    console.print(f"          {privacy['holds_against']}", soft_wrap=True)
    console.print(f"Report    {out / 'report.html'}", markup=False, emoji=False, soft_wrap=True)
