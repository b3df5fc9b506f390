"""A job as requesters see it: how far each round has come, and in plain words what is being waited for."""

from __future__ import annotations

from collections.abc import Sequence

from api.coordinator.accounting_words import ledger_in_words, ledger_seq, refusals
from api.coordinator.pricing import price_view
from api.schema import JobView, Problem, RoundView, Selection
from feature_store.journal.jobs import JobRecord, RoundRecord
from feature_store.journal.tasks import TaskRecord

_NAMES = 5
MAX_REASON_CHARACTERS = 300
"""Of what a party gave as its reason: a sentence, not a document."""


def job_view(job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> JobView:
    """A job, its rounds and its price.

    Args:
        job: as it is kept.
        rounds: its rounds in order; none for a job that was refused.
        task: what it asks.
    """
    views = tuple(_round_view(one, task) for one in rounds)
    return JobView(
        job_id=job.job_id,
        task_id=job.task_digest,
        name=job.name,
        state=job.state,
        stage=stage(job, rounds, task),
        queries=job.num_queries,
        queries_done=sum(one.num_queries for one in rounds if one.state == "opened"),
        images=job.images,
        selection=_selection(job),
        price=price_view(task.task, job.num_queries),
        created_at=job.created_at,
        updated_at=job.updated_at,
        expires_at=job.expires_at,
        created_by=job.created_by,
        rounds=views,
        problem=None if job.problem is None else Problem.model_validate(job.problem),
        refusals=refusals(views),
        ledger_seq=ledger_seq(rounds),
        ledger=ledger_in_words(rounds),
        version=job.version,
    )


def _selection(job: JobRecord) -> Selection:
    """What was asked about; everything, where agents are asked for a model that labels every image."""
    if job.strategy == "weights":
        return Selection()
    return Selection.model_validate({"strategy": job.strategy, "count": job.count, "seed": job.seed})


def stage(job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> str:
    """What a job is waiting for, in words: "waiting for 2 of 5 agents: north, south"."""
    done = sum(one.num_queries for one in rounds if one.state == "opened")
    match job.state:
        case "queued":
            what = "images are being embedded" if job.source == "images" else "questions are being chosen"
            return f"{job.images} {what}"
        case "completed":
            return f"done: {done} of {job.num_queries} answered"
        case "refused":
            return "refused before anybody was asked"
        case "failed":
            return _ended("failed", rounds)
        case "cancelled":
            return _ended("cancelled", rounds)
        case "expired":
            return _ended("the deadline passed", rounds)
        case _:
            current = next((one for one in rounds if one.state != "opened"), None)
            if current is None:
                return "all batches are opened"
            where = f"batch {current.number + 1} of {len(rounds)}: " if len(rounds) > 1 else ""
            return where + _waiting_for(current, task)


def answered_by(one: RoundRecord, task: TaskRecord) -> tuple[str, ...]:
    """Agents of which every tallier holds a share of one and the same split; the contributors once they are fixed."""
    if one.contributors:
        return tuple(sorted(one.contributors))
    reports = list(one.holdings.values())
    if len(reports) < task.task.talliers:
        return ()
    common = set(reports[0].items()).intersection(*(report.items() for report in reports[1:]))
    return tuple(sorted(agent for agent, _ in common))


def printable(sentence: str) -> str:
    """Words of another party as they may be shown: on one line, bounded, nothing that moves a terminal's cursor."""
    start = " ".join(sentence[: 4 * MAX_REASON_CHARACTERS].split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in start)
    return shown if len(shown) <= MAX_REASON_CHARACTERS else shown[: MAX_REASON_CHARACTERS - 3] + "..."


def _round_view(one: RoundRecord, task: TaskRecord) -> RoundView:
    answered = answered_by(one, task)
    is_open = one.state in ("waiting", "asked")
    refused = {agent: printable(sentence) for agent, sentence in one.refusals.items() if agent not in answered}
    waiting = [agent for agent in task.participants if agent not in answered and agent not in refused]
    return RoundView(
        number=one.number,
        queries=one.num_queries,
        state=one.state,
        answered=answered,
        waiting_for=tuple(waiting) if is_open else (),
        refused=refused,
    )


def _waiting_for(one: RoundRecord, task: TaskRecord) -> str:
    view = _round_view(one, task)
    if one.state == "waiting":
        return "questions are ready; agents are about to be asked"
    if one.state == "asked":
        total = len(task.participants)
        refused = f"; refused: {_listed(sorted(view.refused))}" if view.refused else ""
        if not view.waiting_for:
            return f"{len(view.answered)} of {total} agents have answered{refused}"
        return f"waiting for {len(view.waiting_for)} of {total} agents: {_listed(view.waiting_for)}{refused}"
    if one.state == "agreed":
        return f"{len(view.answered)} agents have answered; the charge is being posted"
    if task.task.release == "winner":
        stuck = sorted(set(one.refusals) - set(task.participants))
        tried = f"; not at the first attempt, see what {_listed(stuck)} said" if stuck else ""
        return f"talliers are finding the winners of {len(view.answered)} agents' votes{tried}"
    return f"talliers are adding up the shares of {len(view.answered)} agents"


def _ended(how: str, rounds: Sequence[RoundRecord]) -> str:
    asked = sum(one.state != "waiting" for one in rounds)
    if not asked:
        return f"{how} before anybody was asked; nothing was charged"
    return f"{how}; {asked} of {len(rounds)} {'batch' if len(rounds) == 1 else 'batches'} had been asked"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
