"""Commands that run a whole job in one process, and use what it gave: `demo`, `run`, `student`, `predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from labeler.errors import InvalidSetting
from labeler.rounds.effects import STUDENT_KINDS
from workers.commands.console import Json, check_file, escaped, one_of, print_json, tell, tell_warning
from workers.commands.service import CaFile, MaybeToken, MaybeUrl, connect

if TYPE_CHECKING:
    from workers.progress import StageClock

Engine = Annotated[
    str,
    typer.Option(help="Index: auto, numpy, int16, torch, torch-gpu, ray, ray:HOST:PORT; equal neighbours."),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(min=1, help="MiB an index may take; a larger shard is searched in blocks."),
]


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
    from workers.progress import StageClock, progress_bars
    from workers.run.demo import run_demo

    clock = StageClock()
    with progress_bars(quiet=as_json) as progress:
        summary = run_demo(out, seed=seed, clock=clock, progress=progress)
    _finish(summary, out, clock, as_json=as_json)


def run(
    task: Annotated[Path, typer.Argument(help="Task file (TOML); every field is in docs/task-file.md.")],
    shard: Annotated[list[Path], typer.Option(help="An agent's shard; repeat for each agent.")],
    images: Annotated[
        Path,
        typer.Option("--images", "--queries", help="Public shard, or public images to label (then name --backbone)."),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; an interrupted run continues in it.")],
    test: Annotated[Path | None, typer.Option(help="Labelled public shard on which to score the student.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Backbone for --images when it is a folder of images rather than a shard.")
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
        str, typer.Option(help="How winners are found: plain, or secure, as three talliers do; equal labels.")
    ] = "plain",
    as_json: Json = False,
) -> None:
    """Label public images with private shards: a batch labelling job in one process.

    Example: `labeler run task.toml --shard a.shard --shard b.shard --images public.shard --out job`
    """
    from workers.progress import StageClock, progress_bars
    from workers.run.labelling import run_job
    from workers.run.preparation import LabellingJob
    from workers.run.task_file import read_task_file

    job = LabellingJob(
        file=read_task_file(task),
        shards=tuple(shard),
        queries=images,
        out=out,
        test=test,
        backbone=backbone,
        allow_small_shards=allow_small_shards,
        seed=seed,
        engine=engine,
        memory_limit_bytes=None if memory_limit is None else memory_limit * 2**20,
        winner=one_of("winner", winner, ("plain", "secure")),
    )
    clock = StageClock()
    with progress_bars(quiet=as_json) as progress:
        summary = run_job(job, clock=clock, progress=progress, warn=tell_warning)
    _finish(summary, out, clock, as_json=as_json)


def student(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="Output folder of a finished job; or --job of a service.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(help=f"{', '.join(STUDENT_KINDS)} or finetune."),
    ] = "planned",
    test: Annotated[
        Path | None, typer.Option(help="Labelled public shard to score on; for finetune, labelled images.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="finetune only: the source of public images the job asked about.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="finetune only: the network to start from (file, checkpoint or timm name).")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="finetune only: processes that train together, one for each GPU or a few cores.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, max=4_294_967_295, help="Public seed.")] = 0,
    job: Annotated[str | None, typer.Option(help="Of a service: the id of a completed job.")] = None,
    out: Annotated[
        Path, typer.Option(help="Of a service: the file for the student that labelled the job's images.")
    ] = Path("student.safetensors"),
    url: MaybeUrl = None,
    token: MaybeToken = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Train a student on the released answers of a job, or fetch a service's; score it where truth is known.

    Costs no privacy: it learns from public images and from what was released.

    Examples:

    `labeler student job --kind pooled --test test.shard`

    `labeler student job --kind finetune --images scans/ --backbone efficientnet-lite0 --processes 2`

    `labeler student --job job_5c1e --url https://labels.example.org --out student.safetensors`
    """
    from workers.progress import progress_bars

    if (folder is None) == (job is None):
        raise InvalidSetting("name the folder of a finished job, or a service's job with --job and --url; not both")
    if job is not None:
        if url is None or token is None:
            raise InvalidSetting("for a job of a service say which: --url and --token (or LABELER_URL, LABELER_TOKEN)")
        if kind != "planned" or images is not None or backbone is not None or seed:
            raise InvalidSetting(
                "a service trains one student per job, of the kind that suits its answers; leave out --kind, --images, "
                "--backbone and --seed"
            )
        from workers.run.student import score_student

        check_file(out)
        with connect(url, token, ca_file) as service:
            service.student(job, out)
        result = score_student(out, test=test)
    else:
        from workers.run.student import train_student
        from workers.students.ranks import is_first_process, run_in_ranks

        if processes > 1 and kind != "finetune":
            raise InvalidSetting("--processes is for --kind finetune; other students are trained in seconds")
        if processes > 1:
            options = {"--images": images, "--backbone": backbone, "--test": test, "--seed": seed}
            given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
            arguments = ["student", str(folder), "--kind", kind, *given, *(["--json"] if as_json else [])]
            sys.exit(run_in_ranks(arguments, processes))
        with progress_bars(quiet=as_json or not is_first_process()) as progress:
            result = train_student(
                cast(Path, folder), kind=kind, test=test, images=images, backbone=backbone, seed=seed, progress=progress
            )
        if not is_first_process():
            return
    score = "no truth to score against" if result.get("accuracy") is None else f"{result['accuracy']:.1%} right"
    tell(result, f"Student {result['kind']}: {score}; saved to {result['path']}", as_json=as_json)


def predict(
    model: Annotated[Path, typer.Argument(help="student.safetensors or model.safetensors of a job.")],
    images: Annotated[str, typer.Argument(help="Folder of images, Parquet, torchvision:NAME?root=DIR, or a shard.")],
    out: Annotated[
        Path | None, typer.Option(help="Labels as .parquet or .csv, a row per image; only counts when left out.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="What loads the model's backbone, where its file names none.")
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="timm architecture, where --backbone is a safetensors file of weights.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Label new images with a student, or with the model that a job released. Asks nobody, costs no privacy.

    Images are embedded with the backbone that the model's file names; another one is refused by its fingerprint.

    Example: `labeler predict job/student.safetensors new-scans --out new-labels.parquet`
    """
    from feature_store.results.exports import Wanted, export_images
    from feature_store.results.exports.pictures import check_new
    from feature_store.results.models import read_model
    from workers.progress import progress_bars
    from workers.run.publishing import write_table
    from workers.run.student import predict_images

    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise InvalidSetting(f"--out is a .parquet or a .csv file, found {out.name!r}")
    check_file(out)
    if out is not None and out.suffix == ".csv":
        check_new(out)
    stored = read_model(model)
    with progress_bars(quiet=as_json) as progress:
        found = predict_images(stored, images, backbone=backbone, architecture=architecture, progress=progress)
    if out is not None and out.suffix == ".csv":
        export_images("csv", Wanted(found.table, out))
    elif out is not None:
        write_table(found.table, out)
    if as_json:
        skipped = [{"source": one.source, "reason": one.reason} for one in found.skipped]
        told = {"images": found.table.num_rows, "counts": found.counts, "skipped": skipped}
        print_json(told | {"out": None if out is None else str(out)})
        return
    for one in found.skipped:
        typer.echo(f"not labelled: {escaped(one.source)}: {escaped(one.reason)}", err=True)
    for name, count in found.counts.items():
        typer.echo(f"{count:8d}  {escaped(name)}")
    typer.echo(f"{found.table.num_rows} images labelled" + ("" if out is None else f"; labels are in {out}"))


def _finish(summary: dict[str, Any], out: Path, clock: StageClock, *, as_json: bool) -> None:
    # To standard error and nowhere else: how long a stage took tells how many private records there are.
    Console(highlight=False, stderr=True, quiet=as_json, soft_wrap=True).print(f"Seconds   {clock.in_words()}")
    if as_json:
        print_json(summary)
        return
    from labeler.budget import say_epsilon

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
