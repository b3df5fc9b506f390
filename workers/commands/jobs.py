"""Commands of a job: `plan` its price, run it in one process (`demo`, `run`), use it (`student`, `predict`).

More than 600 lines: one command after the other, each with its options and what it prints.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from labeler.errors import InvalidSetting
from labeler.methods import METHODS
from labeler.rounds.effects import STUDENT_KINDS
from labeler.setting import PLANNED_QUERIES, Sampled, Training
from labeler.settings import given
from labeler.solving import WantedTask
from labeler.system.files import check_file, check_folder
from workers.commands.console import (
    JOB,
    CaFile,
    Json,
    MaybeToken,
    MaybeUrl,
    connect,
    escaped,
    folder_of,
    one_of,
    option,
    print_json,
    tell,
    tell_warning,
    waiting,
    with_options_of,
)
from workers.plan import PlanRequest
from workers.run.task_file import StudentTable

if TYPE_CHECKING:
    from workers.progress import StageClock


def demo(
    out: Annotated[Path, typer.Option(help="Output folder, made if missing.")] = Path("demo"),
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Reproduce a run bit for bit. Noise from a seed protects nobody; the report says so."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the whole pipeline on real handwritten digits, without any download.

    Five agents hold labeled digits of scikit-learn; the public digits have no labels. A SimCLR backbone is
    pretrained on the public ones, the agents vote, and a student learns from the noisy answers.

    Example: `labeler demo --out demo`
    """
    from workers.progress import StageClock, progress_bars

    check_folder(out)
    from workers.run.demo import run_demo

    clock = StageClock()
    with progress_bars(quiet=as_json) as progress:
        summary = run_demo(out, seed=seed, clock=clock, progress=progress)
    _finish(summary, out, clock, as_json=as_json)


def run(
    shard: Annotated[list[Path], typer.Option(help="An agent's shard; repeat for each agent.")],
    images: Annotated[
        Path,
        typer.Option("--images", "--queries", help="Public shard, or public images to label (then name --backbone)."),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; an interrupted run continues in it.")],
    task: Annotated[
        Path | None,
        typer.Argument(help="Task file (TOML); every field is in docs/task-file.md. Or give --epsilon instead."),
    ] = None,
    epsilon: Annotated[float | None, option(WantedTask, "epsilon", lead="Instead of a task file: ")] = None,
    delta: Annotated[float | None, option(WantedTask, "delta", lead="With --epsilon: ")] = None,
    method: Annotated[str | None, option(WantedTask, "method", lead="With --epsilon: ")] = None,
    k: Annotated[int | None, option(WantedTask, "k", lead="With --epsilon: ")] = None,
    questions: Annotated[
        int | None,
        typer.Option(min=1, help="With --epsilon: how many groups of images to ask about. Default: what suits them."),
    ] = None,
    test: Annotated[Path | None, typer.Option(help="Labeled public shard on which to score the student.")] = None,
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
    engine: Annotated[
        str,
        typer.Option(
            help="Index: auto (FAISS; on the GPU if a large job meets one), faiss, faiss-gpu, numpy, torch-gpu, ray, "
            "ray:HOST:PORT; equal neighbors."
        ),
    ] = "auto",
    memory_limit: Annotated[
        int | None, typer.Option(min=1, help="MiB an index may take; a larger shard is searched in blocks.")
    ] = None,
    winner: Annotated[
        str, typer.Option(help="How winners are found: plain, or secure, as three talliers do; equal labels.")
    ] = "plain",
    as_json: Json = False,
) -> None:
    """Label public images with private shards: a batch labeling job in one process.

    A job in a folder that is finished is not asked again: its files are written again from the stored answers.

    Examples:

    `labeler run --epsilon 0.5 --shard a.shard --shard b.shard --images public.shard --out job`

    `labeler run task.toml --shard a.shard --shard b.shard --images public.shard --out job`
    """
    from workers.progress import StageClock, progress_bars
    from workers.run.task_file import make_task_file, read_task_file

    fields = {"epsilon": epsilon, "delta": delta, "method": method, "k": k}
    if task is None:
        if epsilon is None:
            raise InvalidSetting("nothing says what the job may cost; give --epsilon 0.5, or name a task file")
        file = make_task_file(fields, shards=shard, images=images, out=out, queries=questions)
    else:
        given = [f"--{name}" for name, value in (fields | {"questions": questions}).items() if value is not None]
        if given:
            raise InvalidSetting(
                f"{', '.join(given)} and a task file both say what is asked; write it into {task}, or leave the file "
                "out"
            )
        file = read_task_file(task)
    from workers.run.folder import JobFolder
    from workers.run.preparation import LabelingJob, open_shards

    is_finished = JobFolder(out).is_finished
    job = LabelingJob(
        file=file,
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
    open_shards(job)  # reports a wrong path or class before anything large is loaded
    from workers.run.labeling import run_job

    clock = StageClock()
    with progress_bars(quiet=as_json) as progress:
        summary = run_job(job, clock=clock, progress=progress, warn=tell_warning)
    if is_finished:
        typer.echo(
            f"This job was finished before. Its stored answers were used: nobody was asked and nothing was charged. "
            f"For new answers, at their own price, give another --out than {escaped(str(out))}.",
            err=True,
        )
    if job.file.evaluates:
        from workers.commands.evaluation import tell_evaluation

        tell_evaluation(summary, out, as_json=as_json)
        return
    _finish(summary, out, clock, as_json=as_json)


def student(
    job: Annotated[str, typer.Argument(help=JOB)],
    kind: Annotated[
        str,
        typer.Option(help=f"{', '.join(STUDENT_KINDS)} or finetune."),
    ] = "planned",
    test: Annotated[
        Path | None, typer.Option(help="Labeled public shard to score on; for finetune, labeled images.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="finetune only: the source of public images the job asked about.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="finetune only: the network to start from (file, checkpoint or timm name).")
    ] = None,
    seed: Annotated[int, option(StudentTable, "seed", default=0)] = 0,
    out: Annotated[
        Path, typer.Option(help="Of a service: the file for the student that labeled the job's images.")
    ] = Path("student.safetensors"),
    url: MaybeUrl = None,
    token: MaybeToken = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Train a student on a job's released answers, or fetch a service's; score it where truth is known.

    Costs no privacy: it learns from public images and released answers.

    Examples:

    `labeler student job --kind pooled --test test.shard`

    `labeler student job --kind finetune --images scans/ --backbone efficientnet-lite0`

    `labeler student job-5c1e09ab74d2f3186e0a --url https://labels.example.org --out student.safetensors`
    """
    from workers.progress import progress_bars

    folder = folder_of(job, url, token)
    if folder is None:
        if kind != "planned" or images is not None or backbone is not None or seed:
            raise InvalidSetting(
                "a service trains one student per job, of the kind that suits its answers; leave out --kind, --images, "
                "--backbone and --seed"
            )
        from workers.run.student import score_student

        check_file(out)
        with connect(str(url), str(token), ca_file) as service, waiting(quiet=as_json) as on_wait:
            service.student(job, out, on_wait=on_wait)
        result = score_student(out, test=test)
    else:
        from workers.run.student import train_student

        with progress_bars(quiet=as_json) as progress:
            result = train_student(
                folder,
                kind=kind,
                test=test,
                images=images,
                backbone=backbone,
                seed=seed,
                progress=progress,
                tell=(lambda _: None) if as_json else _tell_stage,
            )
    score = (
        "no truth to score against"
        if result.get("accuracy") is None
        else f"{result['accuracy']:.1%} right{_balanced(result)}"
    )
    use = _use_of(Path(result["path"]))
    said = f"Student {result['kind']}: {score}; saved to {result['path']}"
    tell(result, f"{said}\nLabel others with it: {use}" if use else said, as_json=as_json)


def _tell_stage(sentence: str) -> None:
    """Print how far a long command is, on standard error; a terminal shows a bar instead of each epoch."""
    if not (sentence.startswith("Epoch ") and sys.stderr.isatty()):
        typer.echo(f"{sentence}.", err=True)


def _use_of(path: Path) -> str:
    """Return the command that uses a student; empty for a network, which its owner's own code runs."""
    from feature_store.results.models import read_model
    from workers.run.student import FINETUNE, say_use

    return "" if path.stem.endswith(FINETUNE) else say_use(read_model(path), path)


def predict(
    model: Annotated[Path, typer.Argument(help="student.safetensors or model.safetensors of a job.")],
    images: Annotated[
        str,
        typer.Argument(
            help="Folder of images, Parquet, torchvision:NAME?root=DIR, or a shard; for a student of own features "
            ".npz, .npy, .h5, .parquet, or a shard."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Labels as .parquet or .csv, a row per image; only counts when left out.")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="The model's backbone, if its file names none.")] = None,
    architecture: Annotated[
        str | None, typer.Option(help="timm architecture, where --backbone is a safetensors file of weights.")
    ] = None,
    prefer: Annotated[
        str | None,
        typer.Option(help="A recall for the rarest class (recall=0.9), or for another (CLASS:recall=0.9)."),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="With --prefer: a shard of labeled public images to find its threshold on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Label new images with a student, or with the model that a job released. Asks nobody, costs no privacy.

    Images are embedded with the backbone that the model's file names; another one is refused by its fingerprint. If
    their truth is known (class folders, labels in a file of features, a labeled shard), the recall of each class is
    shown.

    A student of own features labels features: rows of an .npz, .npy, .h5 or .parquet file, as `labeler embed
    --features` reads them. Compute them with the backbone of the student's job; only their width is checked.

    A rare class is missed more often than others. `--prefer recall=0.9` moves its threshold until that share of its
    images is found: on labeled public images like the new ones (--like), or as far as the model's own probabilities are
    right.

    Examples:

    `labeler predict job/student.safetensors new-scans --out new-labels.parquet`

    `labeler predict job/student.safetensors new.npz --out new-labels.parquet`

    `labeler predict job/student.safetensors new-scans --prefer ill:recall=0.9 --like labeled.shard`
    """
    from feature_store.results.exports import ExportOrder, check_new, export_images
    from feature_store.results.models import read_model
    from feature_store.results.questions import write_parquet
    from feature_store.results.scores import Preference
    from workers.progress import progress_bars

    if like is not None and prefer is None:
        raise InvalidSetting("--like goes with --prefer, whose threshold is found on it")
    preference = None if prefer is None else Preference.parse(prefer)
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise InvalidSetting(f"--out is a .parquet or a .csv file, found {out.name!r}")
    check_file(out)
    if out is not None and out.suffix == ".csv":
        check_new(out)
    stored = read_model(model)
    from workers.run.student import predict_images

    with progress_bars(quiet=as_json) as progress:
        found = predict_images(
            stored,
            images,
            backbone=backbone,
            architecture=architecture,
            preference=preference,
            like=like,
            progress=progress,
        )
    if out is not None and out.suffix == ".csv":
        export_images("csv", ExportOrder(found.table, out))
    elif out is not None:
        write_parquet(found.table, out)
    if as_json:
        skipped = [{"source": one.source, "reason": one.reason} for one in found.skipped]
        told = {"images": found.table.num_rows, "counts": found.counts, "skipped": skipped}
        told |= {} if found.scores is None else found.scores.to_json()
        if found.threshold is not None:
            told["preferred"] = {"class": found.threshold[0], "threshold": found.threshold[1]}
        print_json(told | {"out": None if out is None else str(out)})
        return
    for one in found.skipped:
        typer.echo(f"not labeled: {escaped(one.source)}: {escaped(one.reason)}", err=True)
    for name, count in found.counts.items():
        typer.echo(f"{count:8d}  {escaped(name)}")
    if found.threshold is not None:
        typer.echo(f"an image is {escaped(found.threshold[0])} from a probability of {found.threshold[1]:.3g} on")
    if found.scores is not None:
        typer.echo("\n".join(escaped(line) for line in found.scores.in_lines()))
    typer.echo(f"{found.table.num_rows} images labeled" + ("" if out is None else f"; labels are in {out}"))


def _finish(summary: dict[str, Any], out: Path, clock: StageClock, *, as_json: bool) -> None:
    tell_summary(summary, out, as_json=as_json)
    # Only to standard error: the duration of a stage reveals the number of private records.
    Console(highlight=False, stderr=True, quiet=as_json, soft_wrap=True).print(f"Seconds   {clock.in_words()}")


def tell_summary(summary: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """Print the results of a job in a folder: first its labels' quality and price, then the rest.

    Args:
        summary: its report.json.
        out: the folder.
    """
    if as_json:
        print_json(summary)
        return
    from labeler.budget import say_epsilon

    labels, privacy = summary["labels"], summary["privacy"]
    console = Console(highlight=False)
    console.print()
    console.print(f"Labels    {_labeled(summary['images'], summary['task']['method'])}", soft_wrap=True)
    if summary.get("student", {}).get("accuracy") is not None:
        said = f"{summary['student']['accuracy']:.1%} right on unseen images{_balanced(summary['student'])}"
        console.print(f"Student   {said}", soft_wrap=True)
    agent = privacy["agent"]["epsilon"]
    console.print(
        f"Privacy   epsilon {say_epsilon(privacy['instance']['epsilon'])} per private image, "
        f"{say_epsilon(agent) if agent is not None else 'no bound'} per agent (delta {privacy['delta']:g})"
    )
    if "group" in privacy:
        group = privacy["group"]
        console.print(f"          Any {group['group_size']:,} images: epsilon {say_epsilon(group['epsilon'])}")
    console.print(f"          {privacy['holds_against']}", soft_wrap=True)
    right = f"; {labels['accuracy']:.1%} of these answers are right by themselves" if "accuracy" in labels else ""
    console.print(f"Questions {labels['answered']} of {labels['asked']} answered{right}")
    if "compared" in summary:
        _print_compared(console, summary)
    console.print(f"Report    {out / 'report.html'}", markup=False, emoji=False, soft_wrap=True)
    if summary.get("student") and (student := out / "student.safetensors").exists():
        console.print(f"Use it    {_use_of(student)}", markup=False, emoji=False, soft_wrap=True)


def _print_compared(console: Console, summary: dict[str, Any]) -> None:
    """Print what the methods made of the same questions, side by side."""
    from feature_store.results.report.page import compared_methods

    columns = compared_methods(summary)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("Methods", no_wrap=True)
    for one in columns:
        table.add_column(one["method"], ratio=1)
    for name, key in (
        ("labels right", "labels"),
        ("student right", "student"),
        ("epsilon per image", "epsilon"),
        ("one image moves", "one_record"),
    ):
        table.add_row(f"          {name}", *(one[key].replace(" %", "%") for one in columns))
    console.print(table)


def _balanced(scored: dict[str, Any]) -> str:
    """Return balanced accuracy in words if it differs from accuracy, and for two classes the AUROC."""
    from feature_store.results.scores import UNEQUAL

    balanced = scored.get("balanced_accuracy", scored.get("accuracy"))
    if "auroc" not in scored and abs(balanced - scored["accuracy"]) < UNEQUAL:
        return ""
    area = f", AUROC {scored['auroc']:.3f}" if "auroc" in scored else ""
    return f" (balanced accuracy {scored['balanced_accuracy']:.1%}{area})"


def _labeled(images: dict[str, Any], method: str) -> str:
    """Describe the quality of the labels of all images: the checked share, and their stated confidence."""
    if not images:
        return "no image is labeled, because nothing was answered"
    said = f"{images['labelled']:,} images labeled"
    if "accuracy" in images:
        checked = "" if images["checked"] == images["labelled"] else f" the {images['checked']:,} whose truth is known"
        said += f", {images['accuracy']:.1%} of {checked.strip() or 'them'} right{_balanced(images)}"
    claim = f"; they state a confidence of {images['mean_confidence']:.1%} on average"
    return said + METHODS[method].claim_confidence(claim)


_FOR_TRAINED = "blind-average, aux-distill: "


@with_options_of(PlanRequest, without=["training"], flags={"images": ("--public", "--queries-shard")})
def plan(
    min_records: Annotated[int | None, option(Training, "min_records", lead=_FOR_TRAINED)] = None,
    axes: Annotated[
        int | None,
        typer.Option(min=1, help="blind-average: compare class means along this many public axes; nothing is trained."),
    ] = None,
    max_records: Annotated[int | None, option(Training, "max_records", lead="With --min-records or --axes: ")] = None,
    regularisation: Annotated[float, option(Training, "regularisation", lead=_FOR_TRAINED)] = 0.01,
    learner: Annotated[str | None, option(Training, "learner", lead="With --min-records, or for ensemble: ")] = None,
    score_share: Annotated[float | None, option(Training, "score_share", lead="With --min-records: ")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="federated: number of steps, each a round; needs --rate.")
    ] = None,
    rate: Annotated[float | None, option(Sampled, "rate", lead="federated, with --steps: ")] = None,
    unit: Annotated[str, option(Sampled, "unit", lead="federated: ", default="record")] = "record",
    as_json: Json = False,
    **fields: Any,
) -> None:
    """Show the price of a setting before anything is asked, or the setting for a price.

    Examples:

    `labeler plan --epsilon 0.5`

    `labeler plan --accuracy 0.9 --records 5000`

    `labeler plan --accuracy 0.9 --records 5000 --public labeled.shard`

    `labeler plan --method knn --k 50 --queries 206 --sigma 25 --delta 1e-4 --agents 3 --colluding-agents 1`

    `labeler plan --method knn --k 50 --queries 206 --epsilon 1 --agents 3`

    `labeler plan --method knn --queries 206 --sigma 25 --colluding-agents 2 --dishonest-talliers 1`

    `labeler plan --method reverse-knn --queries 20 --sigma 8 --records-per-person 2 --agents 3`

    `labeler plan --method reverse-knn --queries 20 --ballot-radius 60 --sigma 280 --agents 100`

    `labeler plan --method reverse-knn --queries 20 --life-epsilon 1 --sigma 8.4 --agents 3`

    `labeler plan --method blind-average --queries 1281 --min-records 200 --epsilon 1 --agents 100`

    `labeler plan --method blind-average --queries 11 --axes 10 --epsilon 0.1 --agents 3`

    `labeler plan --method knn --k 20 --queries 200 --classes 40 --attributes-per-record 40 --epsilon 1 --agents 20`

    `labeler plan --method ensemble --learner adapted --epsilon 1 --level agent --agents 100`

    `labeler plan --method federated --queries 17 --steps 40 --rate 0.15 --epsilon 1 --agents 10`

    `labeler plan --method evaluate --classes 2 --epsilon 0.1 --solve sigma --delta 1e-5 --records 4800`

    For blind-average and federated, --queries is the number of rows of the model: one more than the features have
    numbers, or than the axes. Each step of federated asks for all of them.
    """
    if max_records is not None and min_records is None and axes is None:
        raise InvalidSetting("--max-records bounds the records that agents train with; give --min-records as well")
    if score_share is not None and (min_records is None or steps is not None):
        raise InvalidSetting("--score-share says how agents train: give --min-records too, and no --steps")
    if axes is not None and min_records is not None:
        raise InvalidSetting("--axes is for class means, which train nothing; leave --min-records out")
    if (steps is None) != (rate is None):
        raise InvalidSetting("--steps and --rate go together: a model is trained in steps over secret samples")

    training: dict[str, Any] | None = None
    if steps is not None:
        sampled = {"rate": rate, "unit": one_of("unit", unit, ("record", "agent"))}
        training = {"min_records": min_records or 1, "regularisation": 1e-4, "iterations": steps, "sampled": sampled}
        fields["queries"] = steps * (PLANNED_QUERIES if fields["queries"] is None else fields["queries"])
    elif axes is not None:
        training = {"learner": "means", "axes": axes, "max_records": max_records}
    elif min_records is not None:
        training = {"min_records": min_records, "max_records": max_records, "regularisation": regularisation}
        training |= given({"score_share": score_share})
    if learner is not None:
        training = (training or {}) | {"learner": learner}
    radius = fields["ballot_radius"]
    if radius is not None and radius.isascii() and radius.isdigit():
        fields["ballot_radius"] = int(radius)
    fields["training"] = None if training is None else Training.model_validate(training)
    request = PlanRequest.of(fields)
    from workers.plan import make_plan
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        result = make_plan(request, progress=progress)
    if as_json:
        print_json(result)
        return
    if request.accuracy is not None:
        _print_least(result["least_epsilon"], result.get("rehearsed_on"))
    _print_plan(result)


def _print_choices(console: Console, result: dict[str, Any]) -> None:
    """Print who adds the noise, and the noise if others added it."""
    choices = result.get("noise_choices", [])
    for one, begins in zip(choices, ("Chosen: noise by", "Not chosen: by"), strict=False):
        who = (
            f"{result['agents']} agents, {result['colluding_agents']} colluding"
            if one["noise_by"] == "agents"
            else f"3 talliers, {one['dishonest_talliers']} dishonest (dishonest_talliers in the task)"
        )
        console.print(
            f"{begins} {who}: {one['variance']:.4g} sigma^2 in the sum, a deviation of {one['total_sigma_votes']:.4g}."
        )


_HEADINGS = {"instance": "per private image", "person": "per person", "agent": "per agent"}


def _print_least(least: dict[str, Any], rehearsed_on: int | None) -> None:
    """Print the least epsilon for an accuracy: its range, a table, and the reasons for the range."""
    from workers.plan import RUNGS

    console = Console(highlight=False)
    low = f"{least['low']:g}"
    begin = f"{low} or less may do" if least["low"] <= RUNGS[0] else f"below {low} hardly a job gets there"
    if least["high"] is None:
        end = "no upper end is known: labels may stay below that at any price"
    elif rehearsed_on is None:
        end = f"{least['high']:g} where private images are of another kind, as assumed below"
    else:
        end = f"{least['high']:g} is enough in nine jobs of ten"
    about = "" if least["middle"] is None else f" about {least['middle']:g};"
    console.print(
        f"For a share of {least['wanted']:.3g} of right labels, epsilon {_HEADINGS[least['level']]}:{about} {begin}; "
        f"{end}."
    )
    table = Table(title=None, show_edge=False)
    for heading in ("epsilon", "noise (sigma, votes)", "questions", "labels right"):
        table.add_column(heading, justify="right")
    for row in least["table"]:
        numbers = f"{row['epsilon']:g}", f"{row['sigma_votes']:.4g}", str(row["queries"])
        table.add_row(*numbers, f"{row['low']:.0%} to {row['high']:.0%}")
    console.print(table)
    for heading, key in (("Assumed", "assumed"), ("Why the range is wide", "wide"), ("To narrow it", "narrower")):
        console.print(f"{heading}: {least[key]}")
    console.print()


def _print_plan(result: dict[str, Any]) -> None:
    from labeler.budget import say_epsilon, say_estimate
    from labeler.expectation import say_expected, say_stability

    table = Table(title=None, show_edge=False)
    stated = [level for level in _HEADINGS if level in result]
    for heading in ("", *(_HEADINGS[level] for level in stated)):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: list[tuple[str, str | None]] = [("epsilon, exact (guaranteed)", None)]
    rows.append(("as computed in the papers", "as_in_paper"))
    factors = result["noise_factors"]
    if factors["total"] > 1 and result["noise_by"] == "agents":
        rows.append(("with the papers' shares", "as_in_paper_shares"))
    for name, key in rows:
        levels = result if key is None else result[key]
        say = say_epsilon if key is None else say_estimate
        table.add_row(name, *(say(levels[level]["epsilon"], digits=4) for level in stated))
    if any("histogram_epsilon" in result[level] for level in stated):
        of_sums = (result[level].get("histogram_epsilon", result[level]["epsilon"]) for level in stated)
        table.add_row("of the histogram behind", *(say_epsilon(one, digits=4) for one in of_sums))
    console = Console(highlight=False)
    console.print(table)
    traits = METHODS[result["method"]]
    console.print(f"\n{result['queries']} queries, {traits.noise_of(result)}.")
    console.print(result["holds_against"])
    if "one_record" in result:
        said = result["one_record"]
        console.print(f"{said[0].upper()}{said[1:]}.")
    _print_choices(console, result)
    if factors["total"] > 1 and result["noise_by"] == "agents":
        console.print(
            f"The sum carries {factors['total']:.4g} times sigma, so that the price holds: "
            f"{factors['collusion']:.4g} for the {result['colluding_agents']} of {result['agents']} agents that may "
            f"read or collude, {factors['dropouts']:.4g} for the {result['max_dropouts']} that may drop out. "
            "The papers' shares are smaller, and the price would be higher."
        )
    if "life" in result:
        life = result["life"]
        alone = "" if life["most_votes"] == 1 else f"; of its {life['most_votes']} in a job it casts all or none"
        console.print(f"A record has {life['votes']} votes under this noise in its whole life{alone}.")
    if "ballot_radius" in result:
        console.print(f"Each agent draws its ballot onto a ball of {result['ballot_radius']} votes (ballot_radius).")
    if result["noise_hint"]:
        console.print(result["noise_hint"])
    if "person" in result:
        console.print(
            f"A person is all records of one person at one agent, of which at most "
            f"{result['person']['records_per_person']} vote; with records at two agents the two mus add. Budgets are "
            "charged per image and per agent."
        )
    if "group" in result:
        group = result["group"]
        console.print(
            f"Any {group['group_size']:,} images of all agents together: epsilon "
            f"{say_epsilon(group['epsilon'], digits=4)}. {group.get('reason', 'Nobody is charged for it.')}"
        )
    for level in stated:
        if result[level].get("reason"):
            console.print(f"Per {level}: {result[level]['reason']}")
    console.print(say_expected(result["expected_accuracy"]))
    if "stability" in result:
        console.print(say_stability(*result["stability"]))
    if result["advised_queries"] is not None:
        told = "; the price is the same for any number" if traits.choosing(1) else ""
        console.print(
            f"Advised: ask about {result['advised_queries']} clusters of public images{told}. How answers are read "
            "(student planned) follows from public images and released answers, at no price."
        )
    if "offset_share" in result:
        console.print(f"{result['offset_share']:.0%} of the price pays for each site's own offset (--offset-share).")
    if result["warning"]:
        console.print(f"Warning: {result['warning']}.", markup=False)
