"""Making a task: everything the price depends on, fixed before anybody is asked.

A request leaves out what the federation knows: who takes part, the classes, the backbone, the noise for a price. Each
is filled in from the enrolled agents or the configuration, or refused with the name of the agent that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from api.coordinator.config import CoordinatorConfig
from api.coordinator.pricing import price_view
from api.schema import TaskRequest, TaskView
from feature_store.journal.parties import PartyRecord, PartyStore
from feature_store.journal.tasks import TaskRecord, TaskStore
from labeler.errors import InvalidTask, NotEnrolled
from labeler.planning import solve_sigma
from labeler.task import Task, parse_task

MAX_PARTICIPANTS = 4_999
"""One round charges two levels of every participant and of the federation, at most 10,000 charges at once."""


def create_task(
    request: TaskRequest,
    *,
    by: str,
    config: CoordinatorConfig,
    tasks: TaskStore,
    parties: PartyStore,
    clock: Callable[[], datetime],
    nonce: Callable[[], str],
) -> TaskRecord:
    """Make a task and keep it. Two equal requests make two tasks, each with its own noise and its own price.

    Args:
        request: what is asked.
        by: token id of who asks.
        config: default classes, number of talliers.
        tasks, parties: the stores.
        clock: the time now.
        nonce: a new random text each time, such as secrets.token_hex(16).

    Raises:
        InvalidTask, InvalidSetting, UnsafeGrid: a field is out of bounds, or no noise reaches the price.
        NotEnrolled: an agent that was named is unknown or revoked.
    """
    task, participants = describe_task(request, config=config, parties=parties, nonce=nonce())
    return tasks.add(TaskRecord(task, participants, clock(), by))


def describe_task(
    request: TaskRequest, *, config: CoordinatorConfig, parties: PartyStore, nonce: str = ""
) -> tuple[Task, tuple[str, ...]]:
    """The task that a request describes, and its participants by id; nothing is kept.

    Raises:
        As `create_task`.
    """
    if request.release == "winner":
        raise InvalidTask(
            "release: this service opens the noisy histogram only; opening nothing but the winner needs the secure "
            'computation among the talliers, which is not part of it yet. Use "histogram"; the price is the same'
        )
    agents = _participants(request, parties)
    fields: dict[str, Any] = request.model_dump(exclude={"epsilon", "agents"}, exclude_none=True)
    fields |= {
        "classes": _classes(request, config, agents),
        "backbone_fingerprint": _fingerprint(request, agents),
        "agents": len(agents),
        "talliers": config.talliers,
        "nonce": nonce,
    }
    if request.method == "reverse-knn" and request.k > request.max_queries:
        raise InvalidTask(f"k is {request.k} queries per record, but max_queries is only {request.max_queries}")
    if request.epsilon is not None:
        draft = parse_task(fields | {"sigma_votes": 1.0})
        fields["sigma_votes"] = solve_sigma(draft, request.epsilon)
    return parse_task(fields), tuple(agent.party_id for agent in agents)


def task_view(record: TaskRecord) -> TaskView:
    """A task as requesters see it, with the price of all its queries."""
    return TaskView(
        task_id=record.digest,
        task=record.task.model_dump(mode="json"),
        participants=record.participants,
        created_at=record.created_at,
        queries_left=record.task.max_queries - record.next_query,
        price=price_view(record.task, record.task.max_queries),
    )


def _participants(request: TaskRequest, parties: PartyStore) -> list[PartyRecord]:
    active = {party.party_id: party for party in parties.list(role="agent") if party.state == "active"}
    named = sorted(active) if request.agents is None else sorted(request.agents)
    unknown = [name for name in named if name not in active]
    if unknown:
        raise NotEnrolled(
            f"agents {_listed(unknown)} are not enrolled, or were revoked; enrol their keys first, or leave them out. "
            f"Enrolled are {_listed(sorted(active)) or 'none'}"
        )
    if len(set(named)) != len(named):
        raise InvalidTask("agents: each agent takes part once; the list names one twice")
    if not named:
        raise InvalidTask("no agent is enrolled, so nobody could answer; enrol agents first")
    if len(named) > MAX_PARTICIPANTS:
        raise InvalidTask(f"{len(named)} agents are more than the {MAX_PARTICIPANTS} that one task may have")
    return [active[name] for name in named]


def _classes(request: TaskRequest, config: CoordinatorConfig, agents: Sequence[PartyRecord]) -> tuple[str, ...]:
    reported = {
        agent.party_id: tuple(str(name) for name in agent.facts["classes"])
        for agent in agents
        if agent.facts.get("classes")
    }
    chosen = request.classes or config.classes
    if chosen is None:
        silent = [agent.party_id for agent in agents if agent.party_id not in reported]
        if silent:
            raise InvalidTask(
                f"classes: name them, because agents {_listed(silent)} have not reported theirs yet; "
                "they do when they first reach the coordinator"
            )
        chosen = reported[agents[0].party_id]
    different = [name for name, classes in reported.items() if classes != chosen]
    if different:
        raise InvalidTask(
            f"classes: agents {_listed(different)} have other classes, or the same in another order, than the task "
            f"({len(chosen)} classes, beginning with {_listed(chosen)}); leave these agents out, or name the classes "
            "that all of them were set up with"
        )
    return chosen


def _fingerprint(request: TaskRequest, agents: Sequence[PartyRecord]) -> str:
    reported = {
        agent.party_id: str(agent.facts["backbone_fingerprint"])
        for agent in agents
        if agent.facts.get("backbone_fingerprint")
    }
    chosen = request.backbone_fingerprint
    if chosen is None:
        silent = [agent.party_id for agent in agents if agent.party_id not in reported]
        if silent:
            raise InvalidTask(
                f"backbone_fingerprint: name it, because agents {_listed(silent)} have not reported theirs yet; "
                "they do when they first reach the coordinator"
            )
        chosen = reported[agents[0].party_id]
    different = [f"{name} ({print_[:20]})" for name, print_ in reported.items() if print_ != chosen]
    if different:
        raise InvalidTask(
            f"backbone_fingerprint: agents {_listed(different)} made their features with another backbone than "
            f"{chosen[:20]}; votes of different backbones do not add up. Embed again, or leave these agents out"
        )
    return chosen


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
