"""The command `agent exposure`: tells a site what a task would tell of the images that it holds. For its eyes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Home = Annotated[Path, typer.Option(help="Home folder of this agent.")]


def exposure(
    task: Annotated[Path, typer.Argument(metavar="TASK", help="The task, as JSON or as a task file.")],
    home: Home,
    queries: Annotated[Path, typer.Option(help="Public shard whose images would be asked about.")],
    agents: Annotated[
        int | None, typer.Option(min=1, help="For a task file: how many agents; 3 when left out.")
    ] = None,
) -> None:
    """Tell this site what a task would tell of the images it holds: less than its price, which covers any image.

    The numbers depend on the site's images. They are shown here and written nowhere; nobody else is told them, because
    no private summary of them can be below the price (docs/math/audit.md). Nothing is asked, nothing is charged.

    Example: `labeler agent exposure task.json --home hospital-a --queries scans.shard`
    """
    from feature_store.shard import Shard
    from labeler.batch import QueryBatch
    from labeler.budget import say_epsilon
    from labeler.errors import InvalidSetting
    from workers.audit.tasks import read_task
    from workers.party.home import path_in_home, read_agent_config
    from workers.voting.own_loss import own_losses
    from workers.voting.records import select_records

    config = read_agent_config(home)
    own, public = Shard.open(path_in_home(home, config.shard)), Shard.open(queries)
    if not public.is_public:
        raise InvalidSetting(f"{queries} is a private shard; questions are about public images")
    features = public.features[public.rows]
    asked = read_task(task, agents=agents, queries=None, classes=own.classes, fingerprint=own.fingerprint)
    features = features[: asked.max_queries]
    batch = QueryBatch(features)
    records = select_records(own, records_per_person=None)
    losses = own_losses(config.agent_id, asked, batch, records, engine=config.engine)
    told = losses.told_to(config.agent_id)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Asked       {len(batch):,} of {asked.max_queries:,} questions, {asked.method}", markup=False)
    console.print(f"Your images {told.records:,}; of {told.untouched:,} the answers would tell nothing")
    console.print(f"Most told   epsilon at most {say_epsilon(told.largest_epsilon, digits=3)}, of one image")
    console.print(f"Half of them at most {say_epsilon(told.median_epsilon, digits=3)}")
    priced = say_epsilon(told.priced_epsilon, digits=3)
    console.print(f"The price   {priced}, for any image there could be (delta {asked.delta:g})")
    console.print("For your eyes alone: these numbers depend on your images. Tell others the price.")
