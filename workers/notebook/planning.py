"""What a job would cost, from a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from labeler.methods import Method, ReleaseKind
from labeler.task import StatedLevel


@dataclass(frozen=True)
class Plan:
    """The price of a setting.

    Attributes:
        epsilon: per private image, at `delta`; None where nothing is bounded.
        agent_epsilon: per agent; None where nothing is bounded.
        sigma_votes: the noise nobody can subtract, in votes; None for methods whose noise is the agents' own.
        queries: how many questions.
        k: neighbours that vote.
        delta: at which the epsilons hold.
        holds_against: for whom, in words.
        document: everything `labeler plan --json` says.
        expected_accuracy: the shares of labels, from and to, that can be expected to be right; None where nothing can
            be said beforehand (labeler.expectation).
        warning: where noise drowns the votes: which price or number of records would do; empty otherwise.
    """

    epsilon: float | None
    agent_epsilon: float | None
    sigma_votes: float | None
    queries: int
    k: int
    delta: float
    holds_against: str
    document: dict[str, Any]
    expected_accuracy: tuple[float, float] | None = None
    warning: str = ""

    def __str__(self) -> str:
        from labeler.budget import say_epsilon

        agent = "no bound" if self.agent_epsilon is None else f"epsilon {say_epsilon(self.agent_epsilon)}"
        image = "no bound" if self.epsilon is None else f"epsilon {say_epsilon(self.epsilon)}"
        price = f"{self.queries} questions: {image} per private image, {agent} per agent (delta {self.delta:g})"
        right = (
            ""
            if self.expected_accuracy is None
            else "; {:.0%} to {:.0%} of labels right".format(*self.expected_accuracy)
        )
        return price + right + (f". WARNING: {self.warning}" if self.warning else "")


def plan(
    *,
    method: Method = "reverse-knn",
    queries: int = 20,
    agents: int = 2,
    epsilon: float | None = None,
    sigma: float | None = None,
    delta: float = 1e-5,
    k: int = 1,
    classes: int = 10,
    release: ReleaseKind = "histogram",
    colluding_agents: int | None = None,
    max_dropouts: int = 0,
    dishonest_talliers: Literal[1, 2] | None = None,
    max_agent_records: int | None = None,
    attributes_per_record: int | None = None,
    records_per_person: int | None = None,
    ballot_radius: int | Literal["auto"] | None = None,
    records: int | None = None,
    images: PathLike[str] | str | None = None,
    level: StatedLevel = "instance",
    solve: Literal["sigma", "queries", "k"] = "sigma",
) -> Plan:
    """The price of a setting (give `sigma`), or the setting for a price (give `epsilon`). Reads nothing, asks nobody.

    Args:
        method, k, queries, agents, delta, release, colluding_agents, max_dropouts, max_agent_records,
            attributes_per_record, records_per_person, ballot_radius: as in a task file (docs/task-file.md); "auto" has
            a radius proposed from `images`.
        dishonest_talliers: how many of three talliers may be dishonest; given, whoever costs less accuracy adds the
            noise, agents or talliers (`labeler.solving`).
        epsilon: the price wanted; `solve` says what is found for it.
        sigma: the noise, in votes; with `epsilon` only where `solve` is another.
        classes: how many.
        level: whose price `epsilon` is.
        records: private images of all agents together, as far as you know, for `expected_accuracy`.
        images: the public images as a shard, whose geometry makes that narrower.

    Raises:
        InvalidSetting: the request is incomplete, contradicts itself, or has no solution.
    """
    from feature_store.named_files import named_path
    from workers.plan import PlanRequest, make_plan, solve_request, with_radius

    public = None if images is None else named_path(images, "images")
    request = PlanRequest(
        method=method,
        k=k,
        queries=queries,
        sigma=sigma,
        delta=delta,
        agents=agents,
        colluding_agents=colluding_agents,
        max_dropouts=max_dropouts,
        dishonest_talliers=dishonest_talliers,
        classes=classes,
        max_agent_records=max_agent_records,
        release=release,
        epsilon=epsilon,
        solve=None if epsilon is None else solve,
        level=level,
        attributes_per_record=attributes_per_record,
        records_per_person=records_per_person,
        ballot_radius=ballot_radius,
        records=records,
    )
    request = with_radius(request, public)
    task = solve_request(request)
    document = make_plan(request, public=public)
    expected = document["expected_accuracy"]
    return Plan(
        epsilon=document["instance"]["epsilon"],
        agent_epsilon=document["agent"]["epsilon"],
        sigma_votes=task.sigma_votes,
        queries=task.max_queries,
        k=task.k,
        delta=task.delta,
        holds_against=document["holds_against"],
        document=document,
        expected_accuracy=None if expected["low"] is None else (expected["low"], expected["high"]),
        warning=document["warning"],
    )
