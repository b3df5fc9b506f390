"""Creation of tasks: everything that the price depends on is fixed before any agent is asked.

A request may leave out what the federation knows: the participants, the classes, the backbone, the noise for a price.
Each is filled in from the enrolled agents or the configuration, or refused with the name of the agent that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from api.coordinator.config import CoordinatorConfig
from api.coordinator.pricing import price_view
from api.coordinator.roster import facts_of
from api.coordinator.stores import Stores
from api.coordinator.views import listed
from api.schema import LifeRequest, TaskRequest, TaskView
from labeler.budget import LEAST_DELTA_OF_WINNERS, budget_for, epsilon_spent, say_epsilon
from labeler.errors import InvalidTask
from labeler.ledger.parties import PartyRecord, PartyStore
from labeler.ledger.tasks import TaskRecord
from labeler.methods import METHODS
from labeler.settings import misspelt, same_names
from labeler.task import Task

Fact = TypeVar("Fact")

NUM_WINNER_TALLIERS = 3

MAX_PARTICIPANTS = 4_999
"""One round charges two levels of every participant and of the federation, at most 10,000 charges at once."""


def create_task(
    request: TaskRequest,
    *,
    by: str,
    config: CoordinatorConfig,
    stores: Stores,
    nonce: str,
) -> TaskRecord:
    """Make and store a task. Two equal requests make two tasks, each with its own noise and price.

    Args:
        config: default classes, number of talliers.
        nonce: a new random text.

    Raises:
        InvalidTask, InvalidSetting, UnsafeGrid: a field is out of bounds, no noise reaches the price, the talliers
            cannot find winners, or a named agent is unknown or revoked.
    """
    task, participants = describe_task(request, config=config, parties=stores.parties, nonce=nonce)
    # Before it is stored for good: a task without a computable price would break every list that contains it.
    price_view(task, task.max_queries)
    return stores.tasks.add(TaskRecord(task, participants, stores.clock(), by))


def describe_task(
    request: TaskRequest, *, config: CoordinatorConfig, parties: PartyStore, nonce: str = ""
) -> tuple[Task, tuple[str, ...]]:
    """Return the task that a request describes, and its participants' ids; nothing is stored.

    Raises:
        As `create_task`.
    """
    agents = _participants(request, parties)
    decided: dict[str, Any] = {
        "classes": _classes(request, config, agents),
        "backbone_fingerprint": _fingerprint(request, agents),
        "talliers": config.talliers,
        "nonce": nonce,
    }
    if request.lifetime_budget is not None:
        decided["lifetime_budget"] = _life(request.lifetime_budget, config, request.delta)
    METHODS[request.method].check_k(request.k, request.max_queries)
    task = request.settled(decided, agents=len(agents))
    if task.sampled is not None:
        _check_delta_of_winners(config)
    if task.release == "winner":
        _check_winner_group(parties)
        _check_delta_of_winners(config)
    return task, tuple(agent.party_id for agent in agents)


def task_view(record: TaskRecord, *, returned: int = 0, shared_with: Sequence[str] = ()) -> TaskView:
    """Return a task as requesters see it, with the price of all its queries.

    Args:
        returned: how many of its queries were claimed, came back unasked, and can be asked again.
        shared_with: token ids; empty for readers who may not know them.
    """
    return TaskView(
        task_id=record.digest,
        task=record.task.model_dump(mode="json"),
        participants=record.participants,
        created_at=record.created_at,
        queries_left=record.queries_left + returned,
        price=price_view(record.task, record.task.max_queries),
        created_by=record.created_by,
        shared_with=tuple(shared_with),
    )


def _life(request: LifeRequest, config: CoordinatorConfig, delta: float) -> dict[str, Any]:
    """Return an image's budget: no more than was set aside in every account that the task charges.

    Raises:
        InvalidTask: nothing was set aside, or less than requested.
        InvalidSetting: the epsilon buys less than votes for life need, or more than their proof covers.
    """
    aside = [caps.set_aside_nano(config.delta) for caps in (config.federation, config.agents)]
    most = min((0 if nano is None else nano for nano in aside), default=0)
    if most == 0:
        raise InvalidTask(
            "lifetime_budget: this federation has set nothing aside for votes for life; its operator does so with "
            "life_epsilon in [federation] and [agents] of coordinator.toml, and each site with life_epsilon in its "
            "policy"
        )
    budget = most if request.budget_nano is None else request.budget_nano
    if request.epsilon is not None:
        # Imported here: few federations cast votes for life.
        from labeler.accounting.lifetime import set_aside_nano

        # Computed like the amount set aside, so that equal epsilons give equal budgets.
        budget = set_aside_nano(budget_for(request.epsilon, delta))
    if budget > most:
        if request.epsilon is not None:
            raise InvalidTask(
                f"lifetime_budget.epsilon: {request.epsilon:g} for the life of an image, but the federation has set "
                f"aside epsilon {say_epsilon(epsilon_spent(most, delta))} (at delta {delta:g}; {most} nano-units "
                "of mu^2); ask for less, or leave it out for all of it"
            )
        raise InvalidTask(
            f"lifetime_budget.budget_nano: {budget} nano-units a record, but the federation has set aside {most}"
        )
    return request.model_dump(exclude={"epsilon"}) | {"budget_nano": budget}


def _participants(request: TaskRequest, parties: PartyStore) -> list[PartyRecord]:
    active = {party.party_id: party for party in parties.list(role="agent") if party.state == "active"}
    named = sorted(active) if request.agents is None else sorted(request.agents)
    unknown = [name for name in named if name not in active]
    if unknown:
        raise InvalidTask(
            f"agents: {listed(unknown)} are not enrolled, or were revoked; enrol their keys first, or leave them out. "
            f"Enrolled are {listed(sorted(active)) or 'none'}; GET /v1/parties lists everybody"
        )
    if len(set(named)) != len(named):
        raise InvalidTask("agents: each agent takes part once; the list names one twice")
    if not named:
        raise InvalidTask("no agent is enrolled, so nobody could answer; enrol agents first")
    if len(named) > MAX_PARTICIPANTS:
        raise InvalidTask(f"{len(named)} agents are more than the {MAX_PARTICIPANTS} that one task may have")
    return [active[name] for name in named]


def _classes(request: TaskRequest, config: CoordinatorConfig, agents: Sequence[PartyRecord]) -> tuple[str, ...]:
    reported = {agent.party_id: told for agent in agents if (told := facts_of(agent.facts).classes)}
    chosen = request.classes or config.classes or _first("classes", reported, agents)
    different = [name for name, classes in reported.items() if not same_names(classes, chosen)]
    if different:
        raise InvalidTask(
            f"classes: agents {listed(different)} have other classes, or the same in another order, than the task "
            f"({len(chosen)} classes, beginning with {listed(chosen)}); leave these agents out, or name the classes "
            "that all of them were set up with" + misspelt(chosen, reported[different[0]])
        )
    return chosen


def _fingerprint(request: TaskRequest, agents: Sequence[PartyRecord]) -> str:
    reported = {agent.party_id: told for agent in agents if (told := facts_of(agent.facts).backbone_fingerprint)}
    chosen = request.backbone_fingerprint
    if chosen is None:
        chosen = _first("backbone_fingerprint", reported, agents)
    different = [f"{name} ({print_[:20]})" for name, print_ in reported.items() if print_ != chosen]
    if different:
        raise InvalidTask(
            f"backbone_fingerprint: agents {listed(different)} made their features with another backbone than "
            f"{chosen[:20]}; votes of different backbones do not add up. Embed again, or leave these agents out"
        )
    return chosen


def _first(field: str, reported: Mapping[str, Fact], agents: Sequence[PartyRecord]) -> Fact:
    """Return what the first agent reported, if all of them have reported."""
    silent = [agent.party_id for agent in agents if agent.party_id not in reported]
    if silent:
        raise InvalidTask(
            f"{field}: name {'them' if field == 'classes' else 'it'}, because agents {listed(silent)} have not "
            "reported theirs yet; they do when they first reach the coordinator"
        )
    return reported[agents[0].party_id]


def _check_delta_of_winners(config: CoordinatorConfig) -> None:
    if config.delta < LEAST_DELTA_OF_WINNERS:
        raise InvalidTask(
            f"release, method: this coordinator's accounts are kept at delta {config.delta:g}, and winners and sampled "
            f"training are charged only at {LEAST_DELTA_OF_WINNERS:g} or more (labeler.budget). Use release "
            '"histogram", and a method that is not sampled'
        )


def _check_winner_group(parties: PartyStore) -> None:
    """Check that all three talliers report the same group: only talliers that pinned each other can find winners.

    Raises:
        InvalidTask: one reports no group, or they pinned different certificates.
    """
    talliers = sorted(
        (one for one in parties.list(role="tallier") if one.state == "active"), key=lambda one: one.tallier or 0
    )
    told = {one.party_id: facts_of(one.facts).winner_group for one in talliers}
    silent = [name for name, group in told.items() if group is None]
    if silent or len(told) < NUM_WINNER_TALLIERS:
        who = f"{listed(silent)} cannot" if silent else f"only {len(told)} talliers are enrolled"
        raise InvalidTask(
            f"release: the winner is found by {NUM_WINNER_TALLIERS} talliers together, and {who}; their sites exchange "
            'addresses and certificates first (`labeler tallier peers`). Or use release "histogram", which costs more'
        )
    if len(set(told.values())) != 1:
        raise InvalidTask(
            f"release: talliers {listed(list(told))} have pinned certificates that do not match each other's, or run "
            "versions that find winners in different ways, so they cannot find one together. Run the same version at "
            "their sites; if that does not help, exchange certificates again (`labeler tallier peers`)"
        )
