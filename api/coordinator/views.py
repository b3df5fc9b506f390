"""Views of jobs for requesters: the progress of each round, and in plain words what the job waits for.

A view shows when a round ends, never when an agent answered, because an agent's answering time depends on its records.
While shares come in, a round shows only which agents it asked and which refused, whatever talliers report.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal

from api.coordinator.pricing import price_view, round_prices
from api.coordinator.stores import Stores
from api.schema import FINISHED, CostView, JobState, JobView, Problem, Refusal, RoundView, Selection, WaitingFor
from feature_store.results.questions import read_progress
from labeler.budget import UNBOUNDED_NANO, epsilon_spent
from labeler.errors import AwaitingApproval
from labeler.ledger.database import Connection
from labeler.ledger.jobs import Answers, JobRecord, RoundRecord
from labeler.ledger.tasks import TaskRecord
from labeler.rounds.coordinator import printable
from labeler.rounds.effects import ProposalReply
from labeler.setting import LEVELS

_DONE = {"posted": "charged", "void": "given back", "reserved": "reserved"}


def _job_view(
    job: JobRecord,
    rounds: Sequence[RoundRecord],
    task: TaskRecord,
    answers: Answers,
    forgotten_at: datetime | None,
) -> JobView:
    """Return the view of a job, its rounds and its price.

    Args:
        rounds: in order; none for a refused job.
        answers: the agents' replies to the proposal.
    """
    views = tuple(_round_view(one, task, answers, job.state) for one in rounds)
    return JobView(
        job_id=job.job_id,
        task_id=job.task_digest,
        name=job.name,
        task_name=task.task.name,
        evaluates=task.task.traits.labels is None,
        state=job.state,
        stage=_stage(job, rounds, views, task, answers),
        queries=job.num_queries,
        queries_done=sum(one.num_queries for one in rounds if one.state == "opened"),
        images=job.images,
        selection=_selection(job),
        price=price_view(task.task, job.num_queries),
        cost=cost_view(job, rounds, task),
        created_at=job.created_at,
        updated_at=job.updated_at,
        expires_at=job.expires_at,
        created_by=job.created_by,
        rounds=views,
        waiting_for=() if job.is_finished else waiting_for(job, views, task, answers),
        declined=_declined(answers),
        problem=None if job.problem is None else Problem.model_validate(job.problem),
        refusals=refusals(views),
        ledger_seq=ledger_seq(rounds),
        ledger=ledger_in_words(rounds),
        version=job.version,
        forgotten_at=forgotten_at,
    )


def read_views(jobs: Sequence[JobRecord], stores: Stores, *, connection: Connection | None = None) -> list[JobView]:
    """Read jobs with their rounds, prices and answers, in a fixed number of statements."""
    ids = [job.job_id for job in jobs]
    with stores.database.reading(connection) as connection:
        rounds = stores.jobs.rounds_of(ids, connection=connection)
        tasks = stores.tasks.get_all([job.task_digest for job in jobs], connection=connection)
        said = stores.jobs.willingness.answers_of(ids, connection=connection)
        gone = stores.forgotten.at(ids, connection=connection)
    return [
        _job_view(one, rounds[one.job_id], tasks[one.task_digest], said.get(one.job_id, {}), gone.get(one.job_id))
        for one in jobs
    ]


def read_view(job_id: str, stores: Stores) -> JobView:
    """Read the present view of one job.

    Raises:
        NotFound: there is no such job.
    """
    with stores.database.read() as connection:
        return read_views([stores.jobs.get(job_id, connection=connection)], stores, connection=connection)[0]


class ViewCache:
    """A cache of the views of unfinished jobs: a view is kept until its job's version changes.

    Whatever a view shows of an unfinished job raises its version in the same transaction (`labeler.driver.storing`).

    Args:
        most: views that are kept.
    """

    def __init__(self, stores: Stores, *, most: int = 512) -> None:
        self._stores = stores
        self._most = most
        self._views: dict[str, JobView] = {}
        self._lock = threading.Lock()

    def view(self, job: JobRecord, *, connection: Connection | None = None) -> JobView:
        """Return the view of a job that was just read; not for a transaction that writes, as it may be undone."""
        with self._lock:
            known = self._views.get(job.job_id)
        if known is not None and known.version == job.version and not job.is_finished:
            return known
        found = read_views([job], self._stores, connection=connection)[0]
        with self._lock:
            self._views.pop(job.job_id, None)
            if not job.is_finished:
                self._views[job.job_id] = found
            if len(self._views) > self._most:
                del self._views[next(iter(self._views))]
        return found


def cost_view(job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> CostView:
    """Return the cost of a job's posted rounds, from the journal's charges."""
    posted = [one.charge is not None and one.charge.state == "posted" for one in rounds]
    prices = round_prices(task, [one.num_queries for one in rounds], job.num_queries)
    nano = {level: sum(one[level] for one, is_paid in zip(prices, posted, strict=True) if is_paid) for level in LEVELS}
    price, delta = price_view(task.task, job.num_queries), task.task.delta
    of_life = task.task.lifetime_budget is not None and nano["instance"] > 0
    return CostView(
        questions=sum(one.num_queries for one, is_paid in zip(rounds, posted, strict=True) if is_paid),
        instance_nano=_finite(nano["instance"]),
        agent_nano=_finite(nano["agent"]),
        instance_epsilon=price.instance_epsilon if of_life else _epsilon(nano["instance"], delta),
        agent_epsilon=_epsilon(nano["agent"], delta),
    )


def _finite(nano: int) -> int | None:
    return None if nano >= UNBOUNDED_NANO else nano


_epsilon = lru_cache(maxsize=4096)(epsilon_spent)


def _selection(job: JobRecord) -> Selection:
    """Return the selected questions; all images if agents are asked for a model that labels every image."""
    if job.strategy == "weights":
        return Selection()
    return Selection.model_validate({"strategy": job.strategy, "count": job.count, "seed": job.seed})


def waiting_for(
    job: JobRecord, views: Sequence[RoundView], task: TaskRecord, answers: Answers
) -> tuple[WaitingFor, ...]:
    """Return the agents that an unfinished job waits for, each with a reason."""
    if job.state == "queued":
        open_answers = {agent: answers.get(agent) for agent in task.participants}
        return tuple(
            WaitingFor(agent_id=agent, reason="answer" if said is None else _reason(said))
            for agent, said in open_answers.items()
            if said is None or said.answer == "later"
        )
    current = next((one for one in views if one.state == "asked"), None)
    return tuple(WaitingFor(agent_id=agent, reason="share") for agent in (current.waiting_for if current else ()))


def _reason(said: ProposalReply) -> Literal["approval", "later"]:
    return "approval" if said.reason == AwaitingApproval.problem_type else "later"


def _declined(answers: Answers) -> dict[str, str]:
    return {agent: printable(said.sentence) for agent, said in sorted(answers.items()) if said.answer == "declined"}


def with_progress(view: JobView, home: Path) -> JobView:
    """Return a view whose stage says what is done of the work that a process does on the job; see `read_progress`."""
    folder = home / "jobs" / view.job_id
    percent = read_progress(folder) if view.state in ("queued", "completed") else None
    if percent is None:
        return view
    # While it is queued the stage begins with what is being prepared.
    doing, *rest = view.stage.split("; ")
    parts = [f"{doing}: {percent} % done", *rest]
    if view.state == "completed":
        parts = [view.stage, f"{view.images} images are being labeled: {percent} % done"]
    return view.model_copy(update={"stage": "; ".join(parts)})


def _preparing(job: JobRecord) -> str:
    is_embedded = job.source == "images"
    count, what, verb = (job.images, "image", "embedded") if is_embedded else (job.num_queries, "question", "chosen")
    return f"1 {what} is being {verb}" if count == 1 else f"{count} {what}s are being {verb}"


def _stage(
    job: JobRecord, rounds: Sequence[RoundRecord], views: Sequence[RoundView], task: TaskRecord, answers: Answers
) -> str:
    """Say in words what a job is waiting for: "waiting for 2 of 5 agents: north, south"."""
    done = sum(one.num_queries for one in rounds if one.state == "opened")
    match job.state:
        case "queued":
            is_prepared = any(one.round_digest for one in rounds)
            parts = ["questions are ready" if is_prepared else _preparing(job), *_agreement(task, answers)]
            return "; ".join(parts)
        case "completed":
            return f"done: {done} of {job.num_queries} answered"
        case "refused":
            asked = "refused before anybody was asked"
            declined = _declined(answers)
            return f"{asked}; nothing was charged. Declined: {listed(list(declined))}" if declined else asked
        case "failed" | "cancelled" | "expired":
            how = "the deadline passed" if job.state == "expired" else job.state
            asked_of = sum(one.state != "waiting" for one in rounds)
            if not asked_of:
                return f"{how} before anybody was asked; nothing was charged"
            batches = "batch" if len(rounds) == 1 else "batches"
            return f"{how}; {asked_of} of {len(rounds)} {batches} had been asked"
        case _:
            current = next((one for one in rounds if one.state != "opened"), None)
            if current is None:
                return "all batches are opened"
            where = f"batch {current.number + 1} of {len(rounds)}: " if len(rounds) > 1 else ""
            return where + _round_stage(current, views[rounds.index(current)], task)


def _agreement(task: TaskRecord, answers: Answers) -> list[str]:
    """Describe agents without a final reply (waiting for approval, "later", silent), and those that declined."""
    later = {agent: _reason(said) for agent, said in sorted(answers.items()) if said.answer == "later"}
    approving = [agent for agent, reason in later.items() if reason == "approval"]
    others = [agent for agent in later if agent not in approving]
    silent = [agent for agent in task.participants if agent not in answers] if answers else []
    parts = []
    if approving:
        parts.append(f"waiting for approval by a person at {listed(approving)}")
    if others:
        parts.append(f"waiting for {listed(others)}, who cannot say now")
    if silent:
        total = len(task.participants)
        parts.append(f"waiting for {len(silent)} of {total} agents to say whether they will: {listed(silent)}")
    if _declined(answers):
        parts.append(f"declined: {listed(list(_declined(answers)))}")
    return parts


def answered_by(one: RoundRecord, task: TaskRecord, state: JobState) -> tuple[str, ...]:
    """Return the contributors once they are fixed; if the round ended at its deadline, those in time.

    Return none before that, and none if the requester chose the moment of the stop.
    """
    if one.contributors:
        return tuple(sorted(one.contributors))
    if state != "expired":
        return ()
    # An agent was in time if every tallier holds a share of the same split from it.
    reports = list(one.holdings.values())
    if len(reports) < task.task.talliers:
        return ()
    common = set(reports[0].items()).intersection(*(report.items() for report in reports[1:]))
    return tuple(sorted(agent for agent, _ in common))


def _round_view(one: RoundRecord, task: TaskRecord, answers: Answers, state: JobState) -> RoundView:
    is_over = state in FINISHED
    answered = answered_by(one, task, state)
    is_open = one.state in ("waiting", "asked") and not is_over
    refusals = _declined(answers) | {agent: printable(sentence) for agent, sentence in sorted(one.refusals.items())}
    refused = {agent: sentence for agent, sentence in refusals.items() if agent not in answered}
    asked = [agent for agent in task.participants if agent in one.participants] or task.participants
    waiting = [agent for agent in asked if agent not in answered and agent not in refused]
    ended: Literal["not-asked", "given-up"] = "not-asked" if one.state == "waiting" else "given-up"
    return RoundView(
        number=one.number,
        queries=one.num_queries,
        state=ended if is_over and one.state != "opened" else one.state,
        answered=answered,
        waiting_for=tuple(waiting) if is_open else (),
        refused=refused,
    )


def _round_stage(one: RoundRecord, view: RoundView, task: TaskRecord) -> str:
    if one.state == "waiting":
        return "questions are ready; agents are about to be asked"
    if one.state == "asked":
        total = len(one.participants) or len(task.participants)
        refused = f"; refused: {listed(sorted(view.refused))}" if view.refused else ""
        if not view.waiting_for:
            return f"none of {total} agents answers{refused}"
        return f"waiting for shares of {len(view.waiting_for)} of {total} agents: {listed(view.waiting_for)}{refused}"
    if one.state == "agreed":
        return f"{len(view.answered)} agents have answered; the charge is being posted"
    if task.task.release == "winner":
        stuck = sorted(set(one.refusals) - set(task.participants))
        tried = f"; not at the first attempt, see what {listed(stuck)} said" if stuck else ""
        return f"talliers are finding the winners of {len(view.answered)} agents' votes{tried}"
    return f"talliers are adding up the shares of {len(view.answered)} agents"


def listed(names: Sequence[str]) -> str:
    """Join names for a sentence: the first five, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def ledger_seq(rounds: Sequence[RoundRecord]) -> int | None:
    """Return the last entry that posted the charge of a round; None if none was posted."""
    posted = [one.charge.seq for one in rounds if one.charge is not None and one.charge.state == "posted"]
    return max(posted, default=None)


def ledger_in_words(rounds: Sequence[RoundRecord]) -> str:
    """Say how a job was charged: "charged by entry 47", or "2 of 3 batches charged, last by entry 47; ..."."""
    charges = [one.charge for one in rounds if one.charge is not None]
    if not charges:
        return "no entry: nothing was reserved"
    parts = []
    for state, done in _DONE.items():
        seqs = [charge.seq for charge in charges if charge.state == state]
        if seqs and len(charges) == 1:
            parts.append(f"{done} by entry {seqs[0]}")
        elif seqs:
            parts.append(f"{len(seqs)} of {len(charges)} batches {done}, last by entry {max(seqs)}")
    return "; ".join(parts)


def refusals(rounds: Sequence[RoundView]) -> tuple[Refusal, ...]:
    """Return the refusals: each reason of a party once, however many batches it was given for."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in rounds:
        for party_id, reason in sorted(one.refused.items()):
            found.setdefault((party_id, reason), []).append(one.number)
    return tuple(
        Refusal(party_id=party_id, reason=reason, rounds=tuple(numbers))
        for (party_id, reason), numbers in found.items()
    )
