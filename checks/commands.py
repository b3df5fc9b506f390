"""Commands that check: `doctor` this machine, and `audit` a task by attacking its real pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from checks.doctor.checkup import CheckUp
from labeler.setting import StatedLevel
from workers.commands.console import Json, cell, one_of, print_json
from workers.progress import say_seconds

_STYLES: Final = {"well": "green", "look": "yellow", "wrong": "bold red"}


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Check CUDA devices too; a machine without one fails.")] = False,
    home: Annotated[Path, typer.Option(help="Folder of a party's home; it need not exist yet.")] = Path(),
    only: Annotated[list[str] | None, typer.Option(help="A step, as --json names it; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Check that this machine is ready and exact, and how fast it is; say how to fix problems.

    Each step runs in a separate process with a time limit, so that a crash or a hang is found too. Exits with 0 if
    nothing is wrong, otherwise with 1. Nothing is changed, and nothing private is read.

    Examples:

    `labeler doctor`

    `labeler doctor --home federation/agents/a --only disk --only journal`

    `labeler doctor --gpu --json > this-machine.json`
    """
    from checks.doctor.checkup import check_up, steps
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        found = check_up(steps(home, gpu=gpu), only=only or (), progress=progress)
    if as_json:
        print_json(found.as_json())
    else:
        _tell_checkup(found)
    if not found.is_well:
        raise typer.Exit(1)


def _tell_checkup(found: CheckUp) -> None:
    table = Table(show_edge=False, box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=20, overflow="fold")
    table.add_column(overflow="fold")
    for _, finding in found.findings:
        state = cell(finding.state)
        state.stylize(_STYLES[finding.state])
        table.add_row(state, cell(finding.what), cell(finding.found))
        if finding.to_do:
            table.add_row("", "", cell(f"To do: {finding.to_do}."))
    Console(highlight=False).print(table)
    states = [finding.state for _, finding in found.findings]
    counts = [f"{states.count('well')} well"]
    counts += [f"{states.count(state)} {words}" for state, words in _COUNTED if state in states]
    typer.echo(f"\n{', '.join(counts)}; {say_seconds(found.seconds)}")


_COUNTED: Final = (("look", "to look at"), ("wrong", "wrong"))


def audit(
    task: Annotated[
        Path, typer.Argument(metavar="TASK", help="Task file (TOML), folder of a run, or a job's task as JSON.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for audit.json, audit.html and the runs; the same command resumes in it.")
    ] = Path("audit"),
    adversary: Annotated[
        list[str] | None,
        typer.Option(
            help="natural, natural-chosen, poisoned, poisoned-chosen, one-run; many-jobs for votes for life. "
            "All if left out."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Runs of each adversary, half of them with the canary.")] = 1000,
    level: Annotated[str, typer.Option(help="The canary: instance (one record), person or agent.")] = "instance",
    view: Annotated[str, typer.Option(help="The observed result: release, or a student's labels.")] = "release",
    records: Annotated[
        Path | None, typer.Option(help="Labeled shard of natural records; scikit-learn's digits when left out.")
    ] = None,
    agents: Annotated[
        int | None, typer.Option(min=1, help="For a task file: how many agents; 3 when left out.")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="For a task file: how many questions; its count, or 100.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Joint confidence of all stated bounds.")] = 0.99,
    seed: Annotated[int, typer.Option(min=0, help="Seed of records, questions and coins.")] = 0,
    noise_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed to reproduce the noise, too; by default it is drawn as in production."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack a task's real pipeline, and say how much of its promise the attacks prove.

    Every run is a whole job: index, votes, integer noise, shares, journal, release. Adversaries are those of Chadha et
    al. (2024): natural or poisoned records, questions chosen or not; and one run with many canaries. Bounds are exact,
    at a stated confidence. Exits with 1 if the promise is broken. Canaries are made up. Other records are public, or
    those of --records: counts about a private shard stay at the site, out of evidence. "moved" is how far the canary
    moves the observed result, measured without noise. The attack cannot prove a larger epsilon than that, whatever the
    number of runs. If the promise is larger, its bound is loose, or the attack is weak.

    Examples:

    `labeler audit task.toml --agents 3 --queries 206`

    `labeler audit job --adversary poisoned-chosen --runs 4000 --out job-audit`

    `labeler audit task.json --level person --runs 200 --noise-seed 1 --json`
    """
    from checks.audit.adversaries import read_task
    from checks.audit.run import PAGE_FILE, Audit, default_adversaries, digits_pool, render_page, run_audit, shard_pool
    from feature_store.shard import Shard
    from labeler.system.files import replace_file
    from workers.progress import progress_bars

    pool = digits_pool(seed=seed) if records is None else shard_pool(Shard.open(records), seed=seed)
    asked = read_task(task, agents=agents, queries=queries, classes=pool.classes)
    asked_level: StatedLevel = one_of("level", level, ("instance", "person", "agent"))
    wanted = Audit(
        task=asked,
        adversaries=tuple(adversary) if adversary else default_adversaries(asked, asked_level),
        runs=runs,
        level=asked_level,
        view=one_of("view", view, ("release", "student")),
        confidence=confidence,
        seed=seed,
        noise_seed=noise_seed,
        features=pool.features,
        labels=pool.labels,
        is_private=pool.is_private,
    )
    with progress_bars(quiet=as_json) as progress:
        document = run_audit(wanted, out, progress=progress)
    replace_file(out / PAGE_FILE, render_page(document).encode())
    if as_json:
        print_json(document)
    else:
        _show(document, out / PAGE_FILE)
    if document["findings"]["is_above"]:
        raise typer.Exit(1)


def _show(document: dict[str, Any], page: Path) -> None:
    from checks.audit.run import STAYS_HERE, in_words, read_document

    facts, findings = document["facts"], document["findings"]
    task = facts["task"]
    # No lines between the columns, so that all eight fit into 80 characters.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("adversary", no_wrap=True)
    for heading in (
        "wrong\nwithout",
        "wrong\nwith",
        "advan-\ntage",
        "mu at\nleast",
        "epsilon\nat least",
        "at most\n(moved)",
        "of\npromise",
    ):
        table.add_column(heading, justify="right")
    for one, found in zip(facts["attempts"], findings["findings"], strict=True):
        table.add_row(
            one["adversary"],
            f"{one['false_positives'] / one['absent']:.1%}",
            f"{one['false_negatives'] / one['present']:.1%}",
            f"{found['advantage']:.3f}",
            f"{found['mu']:.3f}",
            f"{found['epsilon']:.3f}",
            f"{found['moved_epsilon']:.3f}" if "moved_epsilon" in found else "",
            f"{found['epsilon'] / findings['promised_epsilon']:.0%}" + (" !" if found["is_above"] else ""),
        )
    table.add_section()
    table.add_row(
        "promised", "", "", f"{findings['promised_advantage']:.3f}", f"{findings['promised_mu']:.3f}",
        f"{findings['promised_epsilon']:.3f}", "", "",
    )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"Task      {task['method']}, {task['max_queries']:,} questions, {task['release']}, delta {task['delta']:g}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"Holds     all together with confidence {facts['confidence']:g}", soft_wrap=True)
    console.print(f"Found     {in_words(read_document(document)[1])}", markup=False)
    if document["private"]:
        console.print(f"Private   {STAYS_HERE}", soft_wrap=True)
    console.print(f"Report    {page}", markup=False, soft_wrap=True)
