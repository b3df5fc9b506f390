"""`labeler evaluate`: measures a released model on private records, in one process or by a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labeler.errors import InvalidSetting, JobNotCompleted
from labeler.methods.evaluate import DEFAULT_EPSILON, LAYOUTS
from labeler.setting import DEFAULT_DELTA
from labeler.solving import WantedTask
from workers.commands.console import (
    CaFile,
    Json,
    MaybeToken,
    MaybeUrl,
    connect,
    folder_of,
    one_of,
    option,
    print_json,
    tell_warning,
)
from workers.run.task_file import EvaluationTable


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A job's student.safetensors or model.safetensors, or its folder here; or its id at a service."
        ),
    ],
    shard: Annotated[list[Path] | None, typer.Option(help="An agent's shard; repeat for each agent.")] = None,
    epsilon: Annotated[float, option(WantedTask, "epsilon", default=DEFAULT_EPSILON)] = DEFAULT_EPSILON,
    delta: Annotated[float, option(WantedTask, "delta", default=DEFAULT_DELTA)] = DEFAULT_DELTA,
    out: Annotated[Path, typer.Option(help="Output folder; an interrupted run continues in it.")] = Path("evaluation"),
    layout: Annotated[str | None, option(EvaluationTable, "layout")] = None,
    bands: Annotated[int | None, option(EvaluationTable, "bands")] = None,
    records: Annotated[int | None, option(EvaluationTable, "records")] = None,
    colluding_agents: Annotated[int | None, option(WantedTask, "colluding_agents")] = None,
    records_per_person: Annotated[int | None, option(WantedTask, "records_per_person")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Simulation: reproducible noise that protects nobody; the files say so.")
    ] = None,
    url: MaybeUrl = None,
    token: MaybeToken = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Measure how good a released model is on private records: every number with two intervals.

    Writes evaluation.json, and measured.safetensors: the model, which now states for each band of confidence the share
    of right answers there.

    Examples:

    `labeler evaluate job/student.safetensors --shard a.shard --shard b.shard --epsilon 0.1`

    `labeler evaluate job-5c1e09ab74d2f3186e0a --url https://labels.example.org --epsilon 0.1`
    """
    price: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "colluding_agents": colluding_agents,
        "records_per_person": records_per_person,
    }
    counted: dict[str, Any] = {
        "layout": None if layout is None else one_of("layout", layout, LAYOUTS),
        "bands": bands,
        "records": records,
    }
    here = Path(model) if Path(model).is_file() else folder_of(model, url, token)
    if here is not None:
        if not shard:
            raise InvalidSetting("name a --shard for each agent, on whose records the model is scored")
        path = here / "student.safetensors" if here.is_dir() else here
        from workers.progress import progress_bars
        from workers.run.labeling import run_job
        from workers.run.preparation import evaluation_job

        job = evaluation_job(path, shard, out, task=price, evaluation=counted, seed=seed)
        with progress_bars(quiet=as_json) as progress:
            found = run_job(job, progress=progress, warn=tell_warning)
    else:
        if shard or seed is not None:
            raise InvalidSetting(
                "a service scores the student of its job at its own agents; leave --shard and --seed out"
            )
        from feature_store.results.evaluations import evaluation_bytes
        from labeler.system.files import check_folder, replace_file

        check_folder(out)
        out.mkdir(exist_ok=True)

        with connect(str(url), str(token), ca_file) as service:
            asked = service.wait(service.evaluate(model, **price, **counted).job_id)
            if asked.state != "completed":
                why = asked.stage if asked.problem is None else asked.problem.detail
                raise JobNotCompleted(f"the evaluation {asked.job_id} is {asked.state}: {why}")
            found = service.evaluation(asked.job_id)
            service.student(asked.job_id, out / "measured.safetensors")
            replace_file(out / "evaluation.json", evaluation_bytes(found))
    tell_evaluation(found, out, as_json=as_json)


def tell_evaluation(found: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """Print evaluation.json in words: each number with its intervals, its price, and the files."""
    if as_json:
        print_json(found)
        return
    from labeler.budget import say_epsilon
    from labeler.evaluation import say

    card = found["privacy"]
    each = {level: one["epsilon"] for level, one in card["guarantees"].items()}
    agent = "no bound" if each["agent"] is None else say_epsilon(each["agent"])
    lines = (
        *say(found),
        f"Privacy   epsilon {say_epsilon(each['instance'])} per private image, {agent} per agent "
        f"(delta {card['delta']:g}), on top of the model's own cost",
        f"          {card['holds_against']}",
        f"Files     {out / 'evaluation.json'}, {out / 'measured.safetensors'}",
    )
    typer.echo("\n".join(lines))
