"""Commands for the people of a hospital: waiting tasks, approve, refuse, stop, budget and history.

They call the same functions as the desk in the browser (workers.agent.site, workers.agent.decisions). Output fits 80
columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from labeler.budget import short_epsilon
from labeler.errors import InvalidSetting, NotFound
from labeler.system.files import check_file
from workers.commands.console import (
    Home,
    Json,
    MaybeHome,
    budget_table,
    escaped,
    filled,
    one_of,
    print_json,
    tell,
    wrapped,
)
from workers.commands.federation import stop_signal

Named = Annotated[
    str, typer.Argument(help="The task, or as many of its first digits as tell it apart.", metavar="TASK")
]
_LABEL = 12
FORMATS = ("table", "json", "csv")


def add_to_agent(app: typer.Typer) -> None:
    """Add these commands to `labeler agent`."""
    for command in (waiting, approve, refuse, stop, resume, budget, history, embed, predict, desk):
        app.command()(command)


def waiting(home: Home, as_json: Json = False) -> None:
    """List the tasks that wait for a person's approval, with what each would cost.

    Example: `labeler agent waiting --home hospital-a`
    """
    from workers.agent.decisions import stopped
    from workers.agent.site import waiting_tasks

    found = waiting_tasks(home)
    if as_json:
        print_json(found)
        return
    if no := stopped(home):
        wrapped(
            f"This agent has stopped answering since {_minute(no.at)}. To go on: labeler agent resume --home {home}"
        )
    if not found:
        typer.echo("No task waits for approval.")
    for task in found:
        typer.echo("")
        _say_task(task, home)


def approve(
    digest: Named,
    home: Home,
    revoke: Annotated[bool, typer.Option("--revoke", help="Withdraw an approval.")] = False,
    as_json: Json = False,
) -> None:
    """Approve a task that the budget can pay, so that the agent answers it. Works while the agent runs.

    Example: `labeler agent approve 3f9c0a12 --home hospital-a`
    """
    from workers.agent import decisions, site

    whole = _known(digest, home)
    (decisions.revoke_approval if revoke else site.approve)(home, whole)
    said = "is no longer approved." if revoke else "is approved; the agent answers it from now on."
    tell({"task_id": whole, "approved": not revoke}, f"Task {whole}", said, as_json=as_json)


def refuse(
    digest: Named,
    home: Home,
    reason: Annotated[str, typer.Option(help="Why, in a few words; whoever asks is told.")],
    as_json: Json = False,
) -> None:
    """Refuse a task, with a reason. Charged questions are still answered. Works while the agent runs.

    Example: `labeler agent refuse 3f9c0a12 --reason "no ethics vote yet" --home hospital-a`
    """
    from workers.agent import decisions

    whole = _known(digest, home)
    decisions.refuse(home, whole, reason)
    said = filled(f"is refused: {reason}. Approving it takes this back.")
    tell({"task_id": whole, "refused": True, "reason": reason}, f"Task {whole}", said, as_json=as_json)


def stop(
    home: Home,
    reason: Annotated[str, typer.Option(help="Why, in a few words; whoever asks is told.")] = "",
    as_json: Json = False,
) -> None:
    """Answer nothing new from now on. Charged questions are still answered. Works while the agent runs.

    Example: `labeler agent stop --reason "maintenance" --home hospital-a`
    """
    from workers.agent import decisions

    _check_agents(home)
    no = decisions.stop(home, reason)
    said = filled(f"Stopped: nothing new is answered. To go on: labeler agent resume --home {home}")
    tell({"stopped": True, "reason": no.reason, "at": no.at}, said, as_json=as_json)


def resume(home: Home, as_json: Json = False) -> None:
    """Answer again after a stop; jobs whose deadline has not passed continue.

    Example: `labeler agent resume --home hospital-a`
    """
    from workers.agent import decisions

    _check_agents(home)
    decisions.resume(home)
    tell({"stopped": False}, "Answering again, within the policy.", as_json=as_json)


def budget(home: Home, as_json: Json = False) -> None:
    """Show what this agent has spent and what is left, from its own ledger; only for the site.

    Example: `labeler agent budget --home hospital-a`
    """
    from workers.agent.site import shares_taken, site_budget, site_person

    accounts = site_budget(home)
    if as_json:
        print_json(accounts)
        return
    Console(highlight=False).print(budget_table(accounts))
    for one in accounts:
        wrapped(f"{'Per image' if one['level'] == 'instance' else 'Per site'}: {one['words']}.")
    wrapped(site_person(home)["words"])
    for name, part in shares_taken(home):
        who = name or "Whoever asks without a name"
        typer.echo(f"{who} has taken {100 * part:.1f} % of one requester's share.")


def history(
    home: Home,
    format: Annotated[
        str, typer.Option(help="table: one line per job. json, csv: every round, as machines want it.")
    ] = "table",
    out: Annotated[Path | None, typer.Option(help="File to write json or csv to; the screen otherwise.")] = None,
    as_json: Json = False,
) -> None:
    """Show all answers of this agent, with their prices.

    Example: `labeler agent history --format csv --out answered.csv --home hospital-a`
    """
    from workers.agent.site import (
        answered_jobs,
        answered_rounds,
        as_csv,
        deleted_at,
        site_budget,
        site_person,
        site_refusals,
    )

    check_file(out)
    chosen = "json" if as_json else one_of("format", format, FORMATS)
    rounds = answered_rounds(home)
    if chosen == "table":
        if out is not None:
            raise InvalidSetting("--out needs --format json or csv")
        _say_history(answered_jobs(rounds))
        typer.echo("\nAll jobs together")
        for one in site_budget(home):
            _line("per image" if one["level"] == "instance" else "per site", one["words"])
        wrapped(site_person(home)["words"], start="  ")
        if refused := site_refusals(home):
            typer.echo("\nRefused by the policy or the budget, without asking a person")
        for no in refused:
            by = f", by {no['requester']}" if no["requester"] else ""
            wrapped(f"{_minute(no['at'])}  {no['name']}{by}")
            _line("task", no["task_id"])
            _line("refused", no["sentence"])
        if gone := deleted_at(home):
            typer.echo("\nRecords deleted")
        for one in gone:
            wrapped(f"{_minute(one['at'])}  after {_rounds(one['rounds_before'])}; those stay released and charged")
        return
    text = as_csv(rounds) if chosen == "csv" else json.dumps(rounds, indent=1, allow_nan=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        said = f"{_rounds(len(rounds))} written to {out}"
        tell({"rounds": len(rounds), "out": str(out)}, said, as_json=as_json)


def embed(
    home: Home,
    check: Annotated[bool, typer.Option("--check", help="Only say what has changed in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Embed what has changed in the agent's folder of images: new files come in, records of removed files go.

    Works while the agent runs; it goes over to the new records by itself. Continues after an interruption and embeds no
    image twice. `labeler agent run` embeds a folder that was never embedded, and only tells about later changes.

    Example: `labeler agent embed --home hospital-a`
    """
    from workers.agent.images import ImageFolder
    from workers.commands.shards import naming_skipped, print_embed
    from workers.party.home import read_agent_config
    from workers.progress import progress_bars

    _check_agents(home)
    config = read_agent_config(home)
    folder = ImageFolder(home, config)
    if check:
        counts = folder.look().counts()
        words = {"new": "new", "changed": "changed", "removed": "removed", "deleted": "deleted before and still there"}
        found = ", ".join(f"{counts[name]:,} {said}" for name, said in words.items() if counts[name])
        tell(counts, f"{folder.path}: {counts['files']:,} files; {found or 'nothing has changed'}.", as_json=as_json)
        return
    with naming_skipped(as_json=as_json), progress_bars(quiet=as_json) as progress:
        result = folder.embed(progress=progress)
    if not as_json:
        typer.echo(f"Records of {folder.path}: {result['added']:,} added, {result['dropped']:,} removed")
    backbone = "" if config.embedding is None else Path(config.embedding.backbone).name
    print_embed(result, backbone, as_json=as_json)


def predict(
    images: Annotated[str, typer.Argument(help="Folder or other source of images, a shard, or a file of features.")],
    home: MaybeHome = None,
    task: Annotated[
        str | None, typer.Option(help="The task whose model is used: its name, or the first digits of its digest.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A released model.safetensors, in place of the one that the home keeps.")
    ] = None,
    shard: Annotated[
        Path | None, typer.Option(help="With --model, in place of --home: private records, as of labeler run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File of predictions. Default: predictions.parquet at the home.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="What makes features, where neither home nor model names it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Label images at the site with its own model: made of the shared one and of its records, and never sent.

    For tasks of method federated with `training.personal`. The model is trained now, from the shared model that the
    home kept when it answered, and is not stored. It works offline, whether the agent runs or not. Predictions follow
    from private records without noise: the file must stay at the site.

    Example: `labeler agent predict new-scans/ --home hospital-a`
    """
    from labeler.system.process_pool import least_priority
    from workers.agent.personal import MUST_STAY, PREDICTIONS_FILE, predict_at_site, write_predictions
    from workers.progress import progress_bars

    target = out or (home or (Path() if shard is None else shard.parent)) / PREDICTIONS_FILE
    check_file(target)
    with progress_bars(quiet=as_json) as progress, least_priority():
        found = predict_at_site(
            images, home=home, shard=shard, task=task, model=model, backbone=backbone, progress=progress
        )
    write_predictions(found, target)
    if as_json:
        skipped = [{"source": one.source, "reason": one.reason} for one in found.skipped]
        told = {"images": found.table.num_rows, "counts": found.counts, "skipped": skipped, "helper": found.helper}
        told |= {"alpha": found.alpha, "scores": found.scores, "accuracy": found.accuracy}
        print_json(told | {"out": str(target), "stays": f"This file {MUST_STAY}."})
        return
    for one in found.skipped:
        typer.echo(f"not labeled: {escaped(one.source)}: {escaped(one.reason)}", err=True)
    for name, count in found.counts.items():
        typer.echo(f"{count:8d}  {escaped(name)}")
    if found.alpha is not None:
        chosen = ", chosen on this site's records" if found.scores else ""
        wrapped(f"Model     {found.helper}, alpha {found.alpha:g}{chosen} (1: the shared model, 0: the site's own)")
    if found.accuracy is not None:
        typer.echo(f"Right     {found.accuracy:.1%} of the images whose class is known")
    typer.echo(f"{found.table.num_rows} images labeled; labels are in {target}")
    wrapped(f"This file {MUST_STAY}.")


def desk(
    home: Home,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """Open this site's own page, only on this machine: waiting tasks, approve or refuse, budget, stop.

    Works while the agent runs. From another machine, forward the port: `ssh -L 8600:127.0.0.1:8600 HOST`.

    Example: `labeler agent desk --home hospital-a --port 8600`
    """
    from api.console.site import serve_desk
    from workers.agent.site import SiteConsole

    def ready(address: str) -> None:
        said = "The desk is open, until Ctrl-C, for whoever has this address:"
        tell({"url": address}, said, f"  {address}", as_json=as_json)

    with closing(SiteConsole(home)) as console:
        serve_desk(console, host="127.0.0.1", port=port, stop=stop_signal(), on_ready=ready)


def _check_agents(home: Path) -> None:
    """Refuse a folder that is not an agent's home, before its possibly broken settings are read."""
    from workers.party.home import AGENT_FILE

    if not (home / AGENT_FILE).is_file():
        raise InvalidSetting(f"{home} is not an agent's home: it has no {AGENT_FILE}; nothing was changed")


def _known(digest: str, home: Path) -> str:
    """Return the whole digest of a requested task, given its first digits."""
    _check_agents(home)
    if len(digest) == 64:
        return digest
    from workers.agent.site import decided_tasks, waiting_tasks

    asked = {str(task["task_id"]) for task in (*waiting_tasks(home), *decided_tasks(home))}
    found = [one for one in asked if digest and one.startswith(digest)]
    if len(found) != 1:
        many = f"{len(found)} tasks here begin" if found else "no task here begins"
        raise NotFound(f"{many} with {digest!r}; labeler agent waiting lists those that wait for approval")
    return found[0]


def _say_task(task: Mapping[str, Any], home: Path) -> None:
    typer.echo(f"task {task['task_id']}")
    classes = task["classes"]
    shown = ", ".join(classes[:8]) + (f", ... ({len(classes)} in all)" if len(classes) > 8 else "")
    person = (
        "no price per person"
        if task["records_per_person"] is None
        else f"{_epsilon(task['person_epsilon'])} per person (at most {task['records_per_person']} images of one)"
    )
    _line("name", task["name"])
    _line("asks", f"{task['queries']} questions, answered by {task['method']}; the {task['release']} is opened")
    most = task.get("attributes_per_record")
    _line("classes" if most is None else "has any of", shown)
    if most is not None:
        _line("", f"an image votes for {min(most, len(classes))} of those that it has at most")
    _line("epsilon", f"{_epsilon(task['instance_epsilon'])} per image, {person}")
    _line("", f"{_epsilon(task['agent_epsilon'])} for this site as a whole (delta {task['delta']:g})")
    for number, taken in enumerate(task["takes"]):
        _line("" if number else "budget", taken["words"])
    parties = "3 talliers; this site adds none" if task["noise_by"] == "talliers" else f"{task['agents']} agents"
    _line("noise", f"sigma {task['sigma_votes']:.4g} votes, from {task['noise_contributors']} of {parties}")
    _line("", f"{task['colluding_agents']} may collude. {task['holds_against']}")
    by = f", by {', '.join(task['requesters'])}" if task["requesters"] else ""
    _line("asked", f"{_minute(task['asked_at'])}{by}")
    if task["unpayable"]:
        _line("decide", f"cannot be approved: {task['unpayable']}")
    else:
        _line("decide", f"labeler agent approve {task['task_id'][:12]} --home {home}")
    _line("", f"labeler agent refuse {task['task_id'][:12]} --reason WHY --home {home}")


def _say_history(jobs: Sequence[Mapping[str, Any]]) -> None:
    if not jobs:
        typer.echo("Nothing was answered yet.")
    for job in jobs:
        wrapped(f"{_minute(job['last_at'])}  {job['name'] or 'a task of an earlier version'}")
        _line("job", job["job_id"] or "not told")
        _line("task", str(job["task_id"]))
        _line(
            "answered",
            f"{job['queries']} questions in {_rounds(job['rounds'])}, by {job['method'] or 'not kept'}",
        )
        per_site, most = _epsilon(job["agent_epsilon"]), job["records_per_person"]
        voting = f" (at most {most} voting image{'' if most == 1 else 's'})" if job["person_nano"] is not None else ""
        _line("epsilon", f"{_epsilon(job['instance_epsilon'])} per image")
        _line("", f"{_epsilon(job['person_epsilon'])} per patient{voting}")
        _line("", f"{per_site} for this site (delta {job['delta']:g})")


def _line(label: str, text: str) -> None:
    wrapped(text, start=f"  {label}".ljust(_LABEL))


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _minute(moment: object) -> str:
    return f"{str(moment)[:16].replace('T', ' ')} UTC" if moment else "an unknown time"


def _epsilon(value: object) -> str:
    return "no bound" if value is None else short_epsilon(float(str(value)), digits=3)
