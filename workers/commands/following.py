"""How a command follows a job: a bar on a terminal, a line for each change of state where nobody sees a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from labeler.errors import Interrupted
from workers.commands.console import escaped


class Job(Protocol):
    """A job as a service tells it."""

    @property
    def job_id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def queries(self) -> int: ...
    @property
    def queries_done(self) -> int: ...


J = TypeVar("J", bound=Job)
J_co = TypeVar("J_co", bound=Job, covariant=True)


class Waits(Protocol[J_co]):
    """The client of a service, as far as it waits."""

    def wait(self, job_id: str, on_change: Callable[[J_co], Any] | None = None) -> J_co: ...


def wait_for(service: Waits[J], job: J, *, quiet: bool) -> J:
    """Wait until a job has ended, and tell on standard error how far it is.

    Raises:
        Interrupted: the user pressed Ctrl-C; the job goes on.
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


def standing(job: Job) -> str:
    """Where a job stands, in words."""
    return job.stage or job.state


@contextmanager
def _bar(console: Console, job: Job) -> Iterator[Callable[[Job], None]]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(escaped(standing(job)), total=job.queries)
        yield lambda now: bars.update(bar, completed=now.queries_done, description=escaped(standing(now)))


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[Job], None]]:
    """For logs and pipes, in which a bar would be thousands of lines or none."""
    said = ""

    def show(now: Job) -> None:
        nonlocal said
        line = f"{now.state}: {standing(now)}" if standing(now) != now.state else now.state
        if line != said:
            said = line
            done = f" ({now.queries_done} of {now.queries} questions answered)"
            console.print(escaped(line + done), markup=False, emoji=False, soft_wrap=True)

    yield show
