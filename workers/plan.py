"""Compute the price of a setting before anybody pays it, or the setting that a price allows (`labeler plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from labeler.accounting.lifetime import set_aside_nano
from labeler.budget import budget_for
from labeler.errors import InvalidSetting
from labeler.expectation import RECORDS_EACH, Expectation, expect, questions_for
from labeler.methods import METHODS
from labeler.methods.sensitivity import unit_in_words
from labeler.planning import price, resolve_colluding_agents
from labeler.solving import hint, noise_choices, solve_k, solve_queries, solve_sigma
from labeler.task import MOST_CLASSES, Life, StatedLevel, Task, parse_task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_RECORDS: Final = 2**60


@dataclass(frozen=True)
class PlanRequest:
    """A setting to price, with at most one field left open: with `epsilon`, sigma or the field that `solve` names.

    Attributes:
        task: fields of a task, but classes and noise. If `colluding_agents` is None, it gets the value of a new task
            (`resolve_colluding_agents`), and k that of its method. If `ballot_radius` is "auto", `with_radius` proposes
            one from public images.
        classes: how many there are, since names do not change the price.
        sigma: the noise, in votes.
        epsilon: the price wanted, at this `level`.
        dishonest_talliers: of three talliers. If given, the plan chooses who adds the noise (labeler.solving). Else the
            agents add it.
        records: of all agents together, as far as their number is public. It serves to estimate accuracy.
        life_epsilon: set aside for votes for life (reverse-knn), for all such jobs together, ever.
    """

    task: Mapping[str, Any]
    classes: int
    sigma: float | None
    epsilon: float | None
    solve: Literal["sigma", "queries", "k"] | None
    level: StatedLevel
    dishonest_talliers: Literal[1, 2] | None = None
    records: int | None = None
    life_epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.task["k"] is None and (method := METHODS.get(self.task["method"])) is not None:
            object.__setattr__(self, "task", {**self.task, "k": method.default_k})
        # These checks concern the request alone; the task checks its own fields.
        _check_word("solve", self.solve, (None, "sigma", "queries", "k"))
        if self.epsilon is not None and self.sigma is None and self.solve is None:
            object.__setattr__(self, "solve", "sigma")
        _check_word("level", self.level, ("instance", "person", "agent"))
        _check_word("dishonest_talliers", self.dishonest_talliers, (None, 1, 2))
        _check_count("classes", self.classes, 2, MOST_CLASSES)
        if self.records is not None:
            _check_count("records", self.records, 1, _MOST_RECORDS)


def _check_word(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        words = ", ".join(str(one) for one in allowed if one is not None)
        raise InvalidSetting(f"plan refused: {name}: must be one of {words}; found {value!r}")


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidSetting(f"plan refused: {name}: must be a whole number from {least} to {most:,}; found {value!r}")


def make_plan(request: PlanRequest, *, public: Path | None = None) -> dict[str, Any]:
    """Solve a request if it asks for that, price it, and estimate how many labels will be right.

    Args:
        public: a public shard. Its geometry tells how well its images fall into groups.

    Returns:
        The document of `labeler plan --json`.

    Raises:
        InvalidSetting: the request is incomplete, contradicts itself, or has no solution.
    """
    request = with_radius(request, public)
    task = solve_request(request)
    expected = _expected(task, request, public)
    return price(task).to_json() | {
        "k": task.k,
        "agents": task.agents,
        "max_dropouts": task.max_dropouts,
        **({} if task.ballot_radius is None else {"ballot_radius": task.ballot_radius}),
        **({"unit": unit_in_words(task)} if task.traits.is_sampled else {}),
        "expected_accuracy": expected.to_json(),
        "warning": expected.warning,
        "noise_hint": "" if request.dishonest_talliers is not None else hint(task),
        "advised_queries": _advised(task, request, public),
        **_choices(task, request.dishonest_talliers),
    }


def _choices(task: Task, dishonest_talliers: int | None) -> dict[str, Any]:
    if dishonest_talliers is None:
        return {}
    found = noise_choices(task.model_dump(exclude={"dishonest_talliers"}), dishonest_talliers)
    return {"noise_choices": [one.to_json() for one in found]}


def _expected(task: Task, request: PlanRequest, public: Path | None) -> Expectation:
    if public is None:
        return expect(task, records=request.records)
    from feature_store.students.labeling import expect_on

    return expect_on(task, _public_features(public), records=request.records)


def with_radius(request: PlanRequest, public: Path | None) -> PlanRequest:
    """Return the request, with a radius proposed from its public images if it asks for one.

    Raises:
        InvalidSetting: it asks for a radius, and there are no public images or too few.
    """
    asked = request.task
    if asked.get("ballot_radius") != "auto":
        return request
    if public is None:
        raise InvalidSetting(
            "a radius is proposed from the public images: name their shard (`images`), or give a whole number"
        )
    from feature_store.students.labeling import propose_radius

    radius = propose_radius(
        _public_features(public),
        questions=asked["max_queries"],
        num_classes=request.classes,
        k=asked["k"],
        records=RECORDS_EACH if request.records is None else max(1, request.records // asked["agents"]),
    )
    return replace(request, task={**asked, "ballot_radius": radius})


def _public_features(public: Path) -> NDArray[np.int16]:
    from feature_store.shard import Shard

    shard = Shard.open(public)
    if not shard.is_public:
        raise InvalidSetting(
            f"{public} is a private shard; the images to be labeled are wanted, embedded with --public"
        )
    features: NDArray[np.int16] = shard.features[shard.rows]
    return features


def _advised(task: Task, request: PlanRequest, public: Path | None) -> int | None:
    """Return the number of clusters to ask about; None if the task asks for a model or evaluates one."""
    if task.traits.asks_for_a_model or task.traits.evaluates:
        return None
    images = None
    if public is not None:
        from feature_store.shard import Shard

        images = len(Shard.open(public, verify=False))
    return questions_for(task, public_images=images, records=request.records)


def _life(request: PlanRequest) -> Life | None:
    """Return the lifetime budget of a record, made from the epsilon that the request sets aside.

    Raises:
        InvalidSetting: the request also asks to solve for sigma.
    """
    if request.life_epsilon is None:
        return None
    if request.solve == "sigma":
        raise InvalidSetting(
            "life_epsilon is the price whatever the noise: give `sigma`, which decides how many votes a record has"
        )
    budget = set_aside_nano(budget_for(request.life_epsilon, request.task["delta"]))
    return Life(budget_nano=budget, least_similarity=-1.0)


def solve_request(request: PlanRequest) -> Task:
    """Return the task that a request describes, after solving for its open field."""
    if request.epsilon is not None and request.sigma is not None and request.solve is None:
        raise InvalidSetting(
            "give the price (`epsilon`) or the noise (`sigma`), or both and what to find: `solve` queries or k"
        )
    if (request.epsilon is None) != (request.solve is None):
        raise InvalidSetting("`epsilon` (the price wanted) and `solve` (what to find for it) go together")
    if request.solve == "sigma" and request.sigma is not None:
        raise InvalidSetting("`solve` sigma finds the noise for `epsilon`, so do not give `sigma` as well")
    if request.solve != "sigma" and request.sigma is None:
        if request.solve is None:
            raise InvalidSetting("give a price as `epsilon`, or the noise as `sigma`")
        raise InvalidSetting(f"`solve` {request.solve} finds what `epsilon` pays for: give the noise (`sigma`), too")
    asked = request.task
    fields = {
        **asked,
        "name": "plan",
        "classes": [f"class {number}" for number in range(request.classes)],
        "sigma_votes": 1.0 if request.sigma is None else request.sigma,
        "colluding_agents": resolve_colluding_agents(
            asked["colluding_agents"],
            agents=asked["agents"],
            max_dropouts=asked["max_dropouts"],
            method=asked["method"],
        ),
        "lifetime_budget": _life(request),
    }
    if request.dishonest_talliers is None:
        task = parse_task(fields)
    else:
        task = noise_choices(fields, request.dishonest_talliers)[0].task
    if request.epsilon is None:
        return task
    found: dict[str, float | int]
    match request.solve:
        case "sigma":
            found = {"sigma_votes": solve_sigma(task, request.epsilon, level=request.level)}
        case "queries":
            found = {"max_queries": solve_queries(task, request.epsilon, level=request.level)}
        case _:
            found = {"k": solve_k(task, request.epsilon, level=request.level)}
    return parse_task(task.model_dump() | found)
