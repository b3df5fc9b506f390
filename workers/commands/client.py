"""Commands of a requester: `submit` images, look at `status` and `budget`, `export` the labels.

Only this module and `workers.commands.console`, which other commands use, may import the service's client.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from feature_store.image_files import Skipped, in_words, list_images
from feature_store.results import EXPORT_FORMATS, FILE_FORMATS, FOLDER_FORMATS, RENAMED, current_format
from labeler.accounting.events import NANO
from labeler.budget import short_epsilon
from labeler.errors import Interrupted, InvalidSetting, UnreadableImage
from labeler.system.files import check_file, check_folder
from workers.commands.console import (
    JOB,
    CaFile,
    Json,
    MaybeToken,
    MaybeUrl,
    Token,
    Url,
    budget_table,
    connect,
    escaped,
    folder_of,
    one_of,
    print_json,
    tell,
    tell_warning,
    waiting,
    wrapped,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from api.client import Client
    from api.schema import JobView, QueryBudgetView, Selection, TaskView


LABELS_OF: tuple[Literal["images", "questions"], ...] = ("images", "questions")
MODELS = ("student", "model")
MADE_HERE = (*FOLDER_FORMATS, "label-studio", "csv")
_TASK_ID = re.compile("[0-9a-f]{64}")


def submit(
    images: Annotated[Path, typer.Argument(help="Folder of images, zip, Parquet file, one image, or a public shard.")],
    task: Annotated[str, typer.Option(help="Task file as for `labeler run` (docs/task-file.md), or a task's id.")],
    url: Url,
    token: Token,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job has ended, and show each change of its state.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the labels of all images; implies --wait.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job, for people.")] = "",
    strategy: Annotated[
        str | None, typer.Option(help="all, random, clustered or spectral. Default: the task file's.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="How many questions. Default: the task file's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Public seed of the choice of questions.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same command again is then the same job, not another.")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="List images of the folder that cannot be read; send the others.")
    ] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Send images to a running service for labeling. The price is reserved before any agent is asked.

    Example: `labeler submit scans/ --task task.toml --url https://labels.example.org --wait --out labels.parquet`
    """
    from api.client import is_shard, not_sent

    check_file(out)
    left_out = () if is_shard(images) else not_sent(images)
    if left_out:
        tell_warning(f"{len(left_out)} files are no images, and are not labeled: {in_words(left_out)}")
    skipped = unreadable_images(images) if skip_unreadable else {}
    for one, reason in skipped.items():
        typer.echo(f"not sent: {escaped(one)}: {escaped(reason)}", err=True)
    with connect(url, token, ca_file) as service:
        chosen = {"strategy": strategy, "count": count, "seed": seed}
        task_id, selection = _task(service, task, images, chosen, left_out=skipped)
        _warn_of_noise(service, task_id, selection)
        asked: dict[str, Any] = {"images": images, "selection": selection, "name": name}
        asked |= {"idempotency_key": key, "leave_out": {*skipped, *(one.source for one in left_out)}}
        job = _submit(service, task_id, asked, is_task_new=task != task_id)
        if job.passed_over and not left_out:  # the service looked into a file that this command did not open
            files = [Skipped(one.source, one.reason) for one in job.passed_over_files]
            tell_warning(f"{job.passed_over} files are no images, and are not labeled: {in_words(files)}")
        if wait or out is not None:
            job = wait_for(service, job, quiet=as_json)
            if job.state == "completed" and out is not None:
                with waiting(quiet=as_json) as on_wait:
                    service.labels(job.job_id, out, on_wait=on_wait)
        out = out if job.state == "completed" else None
        _tell_job(job, out=out, as_json=as_json, skipped=skipped if skip_unreadable else None)
        if _is_over(job) and job.state != "completed":
            sys.exit(1)


def status(
    job: Annotated[
        str | None, typer.Argument(help=f"{JOB} Without it a service's newest jobs are listed.", show_default=False)
    ] = None,
    url: MaybeUrl = None,
    token: MaybeToken = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs to list.")] = 20,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Show one job, or the newest jobs.

    Examples:

    `labeler status job`

    `labeler status job-5c1e09ab74d2f3186e0a --url https://labels.example.org`
    """
    folder = folder_of(job, url, token)
    if folder is not None:
        from workers.commands.jobs import tell_summary
        from workers.notebook import open_job

        tell_summary(open_job(folder).report, folder, as_json=as_json)
        return
    with connect(str(url), str(token), ca_file) as service:
        if job is not None:
            _tell_job(service.job(job), out=None, as_json=as_json)
            return
        jobs = [found for found, _ in zip(service.jobs(), range(limit), strict=False)]
    if as_json:
        print_json([found.model_dump(mode="json") for found in jobs])
        return
    Console(highlight=False).print(jobs_table(jobs))


def share(
    task: Annotated[str, typer.Argument(help="Id of a task that your token made.")],
    with_token: Annotated[str, typer.Option("--with", help="Id of the other token, as /v1/whoami shows it.")],
    url: Url,
    token: Token,
    stop: Annotated[bool, typer.Option("--stop", help="Stop sharing with that token instead.")] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Let another requester submit jobs into a task of yours. Each sees its own jobs; the queries are shared.

    Example:

    `labeler share 3f9a0c51d27be846a1f3c09e5d7b82640e1c9f3a5b7d2468ace013579bdf2468
    --with tok_4be1d09a7c62f583 --url https://labels.example.org`
    """
    with connect(url, token, ca_file) as service:
        view = service.unshare_task(task, with_token) if stop else service.share_task(task, with_token)
    said = f"Task {escaped(view.task_id)} is shared with {', '.join(map(escaped, view.shared_with)) or 'nobody'}"
    tell(view.model_dump(mode="json"), said, as_json=as_json)


def budget(
    url: Url,
    token: Token,
    agent: Annotated[str | None, typer.Option(help="Only this agent's accounts.")] = None,
    queries: Annotated[
        bool, typer.Option("--queries", help="List what each query took instead, the newest first.")
    ] = False,
    job: Annotated[str | None, typer.Option(help="Only the queries of this job; implies --queries.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many queries to list.")] = 100,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Show what is spent and what is left, per account and level, or what every query took.

    Examples:

    `labeler budget --url https://labels.example.org --agent hospital-a`

    `labeler budget --queries --job job-5c1e09ab74d2f3186e0a --url https://labels.example.org`
    """
    if agent is not None and (queries or job is not None):
        raise InvalidSetting("--agent shows an agent's accounts, --queries the federation's account; give one of them")
    with connect(url, token, ca_file) as service:
        if queries or job is not None:
            rows = list(islice(service.query_budgets(job_id=job), limit))
            _tell_queries(rows, as_json=as_json)
            return
        view = service.budget() if agent is None else service.agent_budget(agent)
    document = view.model_dump(mode="json")
    if as_json:
        print_json(document)
        return
    console = Console(highlight=False)
    console.print(budget_table(document["accounts"]))
    for one in document["persons"]:
        wrapped(f"{one['account']}: {one['words']}")
    console.print(f"delta {view.delta:g}, ledger entry {view.head_seq}")


def _tell_queries(rows: Sequence[QueryBudgetView], *, as_json: bool) -> None:
    from labeler.query_budgets import share_words  # imported here: it loads numpy

    if as_json:
        print_json([one.model_dump(mode="json") for one in rows])
        return
    table = Table(show_edge=False)
    for heading in ("query", "status", "share", "mu²", "total epsilon"):
        table.add_column(heading, overflow="fold")
    for one in rows:
        share = "no bound" if one.share_nano is None else f"{one.share_nano / NANO:.3g}"
        named = "\n".join(escaped(part) for part in (one.source or one.query_id, one.job_id) if part)
        table.add_row(Text(named), one.status, one.share_kind, share, _say(one.total_epsilon))
    table.caption = "federation, per private image; the total is the account's after the query"
    console = Console(highlight=False)
    console.print(table)
    for kind in sorted({one.share_kind for one in rows}):
        console.print(f"{kind}: {share_words(kind)}", soft_wrap=True)


def export(
    job: Annotated[str, typer.Argument(help=JOB)],
    out: Annotated[Path, typer.Option(help="File or folder to write.")],
    url: MaybeUrl = None,
    token: MaybeToken = None,
    format: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(EXPORT_FORMATS)} (default of a folder: hf, of a service: parquet). Of a service also "
            "student, or model: what a blind-average or federated job released."
        ),
    ] = None,
    of: Annotated[
        str, typer.Option(help="Of a service: images, asked about or not, or the questions that were asked.")
    ] = "images",
    images: Annotated[Path | None, typer.Option(help="The images that were labeled, where pictures go along.")] = None,
    image_root: Annotated[
        str, typer.Option(help="label-studio: put before each name, for example /data/local-files/?d=scans/.")
    ] = "",
    copy: Annotated[bool, typer.Option("--copy", help="image-folder: copy pictures instead of linking them.")] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Write labels as other tools want them: those of every image of a local job, or those of a service's job.

    Examples:

    `labeler export job --format hf --images scans --out labelled`

    `labeler export job --format label-studio --image-root "/data/local-files/?d=scans/" --out tasks.json`

    `labeler export job-5c1e09ab74d2f3186e0a --format jsonl --out labels.jsonl --url https://labels.example.org`

    `labeler export job-5c1e09ab74d2f3186e0a --of questions --format jsonl --out asked.jsonl --url https://labels.example.org`

    `labeler export job-5c1e09ab74d2f3186e0a --format student --out student.safetensors --url https://labels.example.org`
    """
    import tempfile

    import pyarrow.parquet as pq

    what = one_of("of", of, LABELS_OF)
    if format in RENAMED:
        tell_warning(f"--format {format} is now {current_format(format)}")
        format = current_format(format)
    wanted = {"images": images, "image_root": image_root, "copy": copy}
    folder = folder_of(job, url, token)
    if folder is not None:
        from workers.notebook import open_job

        if what != "images":
            raise InvalidSetting(f"the questions of a job here are in {Path(job) / 'pseudo_labels.parquet'}")
        kind = one_of("format", format or "hf", EXPORT_FORMATS)
        _check_place(out, kind)
        _write_images(kind, job, open_job(job).labels("arrow"), out, wanted, as_json=as_json)
        return
    chosen = one_of("format", format or "parquet", (*EXPORT_FORMATS, *MODELS))
    _check_place(out, chosen)
    with connect(str(url), str(token), ca_file) as service, waiting(quiet=as_json) as on_wait:
        if chosen == "student":
            service.student(job, out, on_wait=on_wait)
        elif chosen in MODELS:
            service.model(job, out)
        elif chosen in MADE_HERE and what == "images":
            # Made here from the same table, as for a folder: with pictures, or with addresses of them.
            with tempfile.TemporaryDirectory() as place:
                table = pq.read_table(service.labels(job, Path(place) / "labels.parquet", on_wait=on_wait))
            _write_images(chosen, job, table, out, wanted, as_json=as_json)
            return
        else:
            service.labels(job, out, format=one_of("format", chosen, FILE_FORMATS), of=what, on_wait=on_wait)
    said = f"{f'The {chosen} is' if chosen in MODELS else f'Labels of {what} are'} in {out}"
    tell({"job_id": job, "out": str(out)}, said, as_json=as_json)


def _check_place(out: Path, format: str) -> None:
    (check_folder if format in FOLDER_FORMATS else check_file)(out)


def _write_images(kind: str, job: str, table: pa.Table, out: Path, wanted: dict[str, Any], *, as_json: bool) -> None:
    from feature_store.results.exports import ExportOrder, config_beside, export_images

    export_images(one_of("format", kind, EXPORT_FORMATS), ExportOrder(table, out, **wanted))
    document = {"job": job, "format": kind, "images": table.num_rows, "out": str(out)}
    said = f"Labels of {table.num_rows} images are in {out}"
    if kind == "label-studio":
        document["config"] = str(config_beside(out))
        said += f", the project's labeling configuration is in {config_beside(out)}"
    tell(document, said, as_json=as_json)


def jobs_table(jobs: Sequence[JobView]) -> Table:
    """Return a table of jobs, in 80 columns."""
    table = Table(show_edge=False)
    for heading in ("job", "state", "done", "epsilon", "created (UTC)"):
        table.add_column(heading, overflow="fold")
    for found in jobs:
        done = f"{found.queries_done}/{found.queries}"
        created = f"{found.created_at.astimezone(UTC):%Y-%m-%d %H:%M}"
        epsilon = found.price.instance_epsilon
        price = "no bound" if epsilon is None else short_epsilon(epsilon, digits=3)
        named = "\n".join(escaped(one) for one in (found.job_id, found.name, f"task {found.task_name}") if one)
        table.add_row(Text(named), found.state, done, price, created)
    table.caption = "epsilon per private image"
    return table


def _is_over(job: JobView) -> bool:
    from api.schema import FINISHED

    return job.state in FINISHED


def _warn_of_noise(service: Client, task_id: str, selection: Selection) -> None:
    """Warn, before anything is sent, if noise will drown the votes. Errors are left to the job's submission."""
    from api.schema import EstimateRequest
    from labeler.errors import LabelerError

    with suppress(LabelerError):
        estimate = service.estimate(EstimateRequest(task_id=task_id, queries=selection.count))
        if estimate.warning:
            tell_warning(estimate.warning)


def _task(
    service: Client, task: str, images: Path, changes: dict[str, Any], *, left_out: Mapping[str, str]
) -> tuple[str, Selection]:
    """Return the id of the task (made now if a file is named), and the selection of images."""
    from pydantic import ValidationError

    from api.client import image_parts, is_shard
    from api.schema import Selection, TaskRequest
    from labeler.task import describe_validation
    from workers.run.task_file import JobBudgetTable, read_task_file

    given = {field: value for field, value in changes.items() if value is not None}
    path = Path(task)
    if not path.suffix and not path.exists():
        selection = Selection.model_validate(given)
        if _TASK_ID.fullmatch(task) is None:
            raise InvalidSetting(f"--task {task!r} is neither a file nor a task's id, which has 64 hexadecimal digits")
        return task, selection
    file = read_task_file(path)
    selection = Selection.model_validate(file.queries.model_dump() | given)
    ours = file.task.model_fields_set & {"talliers", "grid_scale"}
    if file.budget != JobBudgetTable():
        ours |= {"[budget]"}
    if ours:
        raise InvalidSetting(
            f"{path.name}: {', '.join(sorted(ours))} is for `labeler run`; a service settles it for all its tasks. "
            "Take it out"
        )
    fields = file.task.model_dump(exclude_none=True, exclude={"talliers"})
    fields["max_queries"] = _count(images) - len(left_out) if selection.strategy == "all" else selection.count
    try:
        request = TaskRequest.model_validate(fields)
    except ValidationError as error:
        raise InvalidSetting(describe_validation(error, path.name)) from None
    if not is_shard(images):
        image_parts(images, left_out)  # no task is made for images that could not be sent
    return service.create_task(request).task_id, selection


_JOB_OF_KEY = re.compile(r"\(job (job-[0-9a-f]+)\)")


def _submit(service: Client, task_id: str, asked: dict[str, Any], *, is_task_new: bool) -> JobView:
    """Submit a job. The same command with the same idempotency key gives the same job.

    A task file makes a new task at every call, so a repeated request has another task id, and the service refuses it.
    If the job of the key has an equal task, the request is repeated with that task.
    """
    from api.client_http import ServiceProblem

    try:
        return service.submit(task_id, **asked)
    except ServiceProblem as refused:
        if not (is_task_new and refused.type.endswith(":idempotency-mismatch")):
            raise
        known = _JOB_OF_KEY.search(refused.detail)
        earlier = None if known is None else service.job(known[1]).task_id
        if earlier is None or not _are_equal(service.task(earlier), service.task(task_id)):
            raise
        return service.submit(earlier, **asked)


def _are_equal(one: TaskView, other: TaskView) -> bool:
    """Return whether two tasks differ in nothing but their nonce."""
    fields = [{**view.task, "nonce": "", "participants": view.participants} for view in (one, other)]
    return fields[0] == fields[1]


def _count(images: Path) -> int:
    """Count the questions if every image is asked about."""
    from api.client import is_shard, public_shard
    from workers.embedder.image_count import count_images

    if is_shard(images):
        return len(public_shard(images))
    return count_images(images)


def _tell_job(job: JobView, *, out: Path | None, as_json: bool, skipped: Mapping[str, str] | None = None) -> None:
    if as_json:
        not_sent = {} if skipped is None else {"skipped": [{"source": one, "reason": skipped[one]} for one in skipped]}
        print_json(job.model_dump(mode="json") | ({} if out is None else {"out": str(out)}) | not_sent)
        return
    is_told = job.state == "completed" or not _is_over(job)
    lines = [
        f"Job        {job.job_id}" + (f", {job.name}" if job.name else ""),
        f"Task       {job.task_name or job.task_id[:12]}",
        f"State      {job.state}" + (f": {job.stage}" if job.stage and is_told else ""),
        f"Questions  {job.queries_done} of {job.queries} answered, about {job.images} images",
        f"Price      epsilon {_say(job.price.instance_epsilon)} per private image, "
        + (f"{_say(job.price.person_epsilon)} per person, " if job.price.records_per_person is not None else "")
        + (f"{_say(job.price.group_epsilon)} per {job.price.group_size} images, " if job.price.group_size else "")
        + f"{_say(job.price.agent_epsilon)} per agent (delta {job.price.delta:g})",
    ]
    if job.price.holds_against:
        lines.append(f"           {job.price.holds_against}")
    lines += _costs(job)
    if job.ledger:
        lines.append(f"Ledger     {job.ledger}")
    if job.problem is not None:
        lines.append(f"Problem    {job.problem.title}: {job.problem.detail}")
    lines += [f"Waits for  {one.agent_id}: {_WAITING[one.reason]}" for one in job.waiting_for]
    told = "" if job.problem is None else job.problem.detail
    lines += [f"Refused    {one.party_id}: {one.reason}" for one in job.refusals if one.reason not in told]
    if out is not None:
        lines.append(f"Labels     {out}")
    elif job.state == "completed":
        lines.append(f"Labels     labeler export {job.job_id} --out labels.parquet")
    elif not _is_over(job):
        lines.append(f"Follow     labeler status {job.job_id}")
    typer.echo("\n".join(map(escaped, lines)))


def _costs(job: JobView) -> list[str]:
    """Return lines with the job's cost so far, and each question's share if the method has one."""
    if job.cost is None or not job.cost.questions:
        return []
    level, spent = job.price.instance_question_nano, job.cost
    share = (
        "the job is priced once, as a whole"
        if level is None
        else f"each question takes {level / NANO:.3g} of mu squared per private image"
    )
    return [
        f"Cost       so far epsilon {_say(spent.instance_epsilon)} per private image, {_say(spent.agent_epsilon)} per "
        f"agent, for {spent.questions} questions",
        f"           {share}",
    ]


_WAITING = {
    "approval": "a person there has to approve the task (labeler agent waiting, approve)",
    "answer": "it has not said yet whether it takes part",
    "later": "it cannot say now, and is asked again",
    "share": "its share is not there yet",
}


def _say(epsilon: float | None) -> str:
    return "without a finite bound" if epsilon is None else short_epsilon(epsilon, digits=3)


def wait_for(service: Client, job: JobView, *, quiet: bool) -> JobView:
    """Wait until a job has ended, and show its progress on standard error.

    Raises:
        Interrupted: the user pressed Ctrl-C; the job continues.
    """
    try:
        if quiet:
            return service.wait(job.job_id)
        console = Console(stderr=True, highlight=False)
        with _bar(console, job) if console.is_terminal else _lines(console) as show:
            return service.wait(job.job_id, on_change=show)
    except KeyboardInterrupt:
        raise Interrupted(
            f"the job goes on without you. Look at it with `labeler status {job.job_id}`, fetch its labels with "
            f"`labeler export {job.job_id} --out labels.parquet`"
        ) from None


@contextmanager
def _bar(console: Console, job: JobView) -> Iterator[Callable[[JobView], None]]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(escaped(job.stage or job.state), total=job.queries)
        yield lambda now: bars.update(bar, completed=now.queries_done, description=escaped(now.stage or now.state))


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[JobView], None]]:
    """Show progress as lines, for logs and pipes. There a bar would make thousands of lines, or none."""
    said = ""

    def show(now: JobView) -> None:
        nonlocal said
        line = f"{now.state}: {now.stage}" if now.stage else now.state
        if line != said:
            said = line
            done = "" if _is_over(now) else f" ({now.queries_done} of {now.queries} questions answered)"
            console.print(escaped(line + done), markup=False, emoji=False, soft_wrap=True)

    yield show


def unreadable_images(folder: Path) -> dict[str, str]:
    """Return the unreadable images of a folder and why, according to the embedder's own check.

    Raises:
        InvalidSetting: not a folder, or none of its images can be read.
    """
    from feature_store.decode import decode_image

    if not folder.is_dir():
        raise InvalidSetting(
            f"--skip-unreadable needs a folder of images, and {folder.name!r} is not one; unpack it first"
        )
    names, found = list_images(folder).images, {}
    for name in names:
        try:
            decode_image(folder / name).close()
        except UnreadableImage as error:
            found[name] = str(error)
    if names and len(found) == len(names):
        first = found[names[0]]
        raise InvalidSetting(f"no image in {folder.name!r} can be read ({len(names)} in all); of the first: {first}")
    return found
