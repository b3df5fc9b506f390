"""Compute the price of a setting before anybody pays it, or the setting that a price or an accuracy allows.

**The least epsilon for an accuracy** (`least_epsilon`). Each epsilon of RUNGS gets its noise, and that noise a range of
the share of right labels. The range comes from what is at hand:

    labeled public images    rehearsals of the job (workers.rehearsal): a range for the next job
    public images            rehearsals with natural groups for classes (feature_store.students.labeling)
    none                     the noise and the number of votes alone (labeler.expectation)

The ranges are made to grow with epsilon, since less noise does no harm. Then `possible` is the least epsilon whose
upper end reaches the accuracy, `enough` the least whose lower end does, and `middle` that of the mean of rehearsals.
Between two rungs lies a straight line along log epsilon. Only labeled images have a mean. Without them both ends
follow from two assumptions on how alike private and public images are, so that nothing is
promised. All of this reads public facts alone, and is not charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from labeler.accounting.lifetime import set_aside_nano
from labeler.budget import budget_for
from labeler.errors import InvalidSetting, InvalidTask
from labeler.expectation import (
    ALIKE,
    RECORDS_EACH,
    UNLIKE,
    Expectation,
    assumed_records,
    expect,
    questions_for,
    voting_records,
)
from labeler.methods import unit_in_words
from labeler.planning import price, resolve_colluding_agents
from labeler.setting import PLANNED_AGENTS, PLANNED_CLASSES, PLANNED_QUERIES
from labeler.settings import describe_validation
from labeler.solving import at_price, hint, noise_choices, solve_k, solve_queries
from labeler.system.files import named_path
from labeler.task import (
    MOST_CLASSES,
    Life,
    Participants,
    Queries,
    Sigma,
    StatedLevel,
    Task,
    Terms,
    parse_task,
)
from workers.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.rehearsal import RehearsalImages

RUNGS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Epsilons of the table of `labeler plan --accuracy`."""

_BETWEEN: Final = 3
"""Further epsilons from one rung to the next, where a range is a formula."""

_ROWS: Final = 6
"""Rows of the table, around the epsilon that was found."""


class PlanRequest(Terms):
    """A setting to price, with at most one field left open: with `epsilon`, sigma or the field that `solve` names.

    `labeler.plan` and the command `plan` take their arguments from it.
    """

    queries: Queries | None = None
    """How many questions are asked. Default: 20; with `accuracy` as many as suit it. For blind-average and federated it
    is the number of rows of the model."""
    agents: Participants = PLANNED_AGENTS
    """How many agents take part."""
    classes: Annotated[int, Field(ge=2, le=MOST_CLASSES)] | None = None
    """How many classes there are; hardly moves the price. Default: those of the public images, or 10."""
    ballot_radius: Annotated[int, Field(strict=True, ge=1, le=2**40)] | Literal["auto"] | None = None
    """Longest ballot, in votes (reverse-knn), for a finite price of an agent; auto proposes one from public images."""
    sigma: Sigma | None = None
    """Noise that nobody can subtract, in votes."""
    epsilon: float | None = None
    """The price that you want; `solve` says what to find for it."""
    solve: Literal["sigma", "queries", "k"] | None = None
    """What to find for `epsilon`. Default: sigma."""
    level: StatedLevel = "instance"
    """Level at which `epsilon` holds."""
    records: Annotated[int, Field(ge=1, le=2**60)] | None = None
    """Private images of all agents together, as far as you know; for the estimate of right labels."""
    life_epsilon: Annotated[float, Field(ge=0)] | None = None
    """Set aside for votes for life (reverse-knn). All such jobs together, ever, never cost more."""
    images: PathLike[str] | str | None = None
    """The public images as a shard, for a closer estimate of right labels; closest if some are labeled."""
    accuracy: float | None = None
    """The share of right labels that you want, such as 0.9: finds the least `epsilon` for it, with a range."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> PlanRequest:
        """Return the request of these fields; None stands for the default.

        Raises:
            InvalidTask: a field is unknown or out of bounds.
        """
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise InvalidTask(describe_validation(error, "plan", model=cls)) from None

    @property
    def wanted(self) -> Literal["sigma", "queries", "k"] | None:
        """Return what is solved for: what was named, or the noise for a price alone."""
        return "sigma" if self.solve is None and self.epsilon is not None and self.sigma is None else self.solve

    def changed(self, **changes: Any) -> PlanRequest:
        """Return the request with some fields changed."""
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _check_accuracy(self) -> PlanRequest:
        if self.accuracy is None:
            return self
        chance = 0.0 if self.classes is None else 1 / self.classes
        if not chance < self.accuracy < 1:
            raise ValueError(
                f"accuracy: a share of right labels lies above chance, {chance:.3g}, and below 1, as 0.9; found "
                f"{self.accuracy:g}"
            )
        instead = ("epsilon", "sigma", "solve", "life_epsilon")
        if wrong := [name for name in instead if getattr(self, name) is not None]:
            raise ValueError(
                f"{wrong[0]}: accuracy asks which epsilon is needed, so leave {' and '.join(wrong)} out; epsilon alone "
                "asks how many labels will be right"
            )
        return self


def make_plan(request: PlanRequest, *, progress: ProgressCallback = silent) -> dict[str, Any]:
    """Solve a request if it asks for that, price it, and estimate how many labels will be right.

    The geometry of the public images tells how well they fall into groups, and their labels, if there are some, how
    well each noise does.

    Returns:
        The document of `labeler plan --json`.

    Raises:
        InvalidSetting: the request is incomplete, contradicts itself, or has no solution.
    """
    images = None if request.images is None else _PublicShard.open(named_path(request.images, "images"))
    request = _with_classes(request, images)
    least = None
    if request.accuracy is not None:
        least = least_epsilon(request, images, progress=progress)
        epsilon = least.possible if least.middle is None else least.middle
        request = request.changed(accuracy=None, epsilon=epsilon, solve="sigma", queries=least.queries)
    request = with_radius(request)
    task = solve_request(request)
    expected = _expected(task, request, images)
    return price(task).to_json() | {
        "k": task.k,
        "agents": task.agents,
        "max_dropouts": task.max_dropouts,
        **({} if task.ballot_radius is None else {"ballot_radius": task.ballot_radius}),
        **({} if task.offset_share is None else {"offset_share": task.offset_share}),
        **({} if task.sampled is None else {"unit": unit_in_words(task)}),
        **({} if images is None or images.labeled is None else {"rehearsed_on": images.labeled.known}),
        "expected_accuracy": expected.to_json(),
        "warning": expected.warning,
        **({} if expected.stability is None else {"stability": expected.stability}),
        "noise_hint": "" if request.dishonest_talliers is not None else hint(task),
        "advised_queries": None
        if task.traits.no_choice
        else questions_for(task, public_images=_count(images), records=request.records),
        **({} if least is None else {"least_epsilon": least.to_json()}),
        **_choices(task, request.dishonest_talliers),
    }


@dataclass(frozen=True, eq=False)
class _PublicShard:
    """A public shard: features, and labels if some are known.

    Attributes:
        features: int16, shape (n, dimension).
        classes: their names; empty if it has none.
        labeled: None if no class is known, or images have attributes.
    """

    features: NDArray[np.int16]
    classes: tuple[str, ...]
    labeled: RehearsalImages | None

    @classmethod
    def open(cls, path: Path) -> _PublicShard:
        from feature_store.shard import Shard

        shard = Shard.open(path)
        if not shard.is_public:
            raise InvalidSetting(
                f"{path} is a private shard; the images to be labeled are wanted, embedded with --public"
            )
        features: NDArray[np.int16] = np.ascontiguousarray(shard.features[shard.rows])
        labels = np.asarray(shard.labels)[shard.rows]
        if shard.has_attributes or not (labels >= 0).any():
            return cls(features, shard.classes, None)
        # Imported on use: a plan without labels needs no learner.
        from workers.rehearsal import MOST_IMAGES, RehearsalImages

        labeled = RehearsalImages(features, labels)
        labeled.check(shard.classes)
        return cls(features, shard.classes, labeled.sample(MOST_IMAGES, seed=0))


def _with_classes(request: PlanRequest, images: _PublicShard | None) -> PlanRequest:
    """Return the request with the number of classes of its public images, and of questions if any number costs more."""
    named = images.classes if images is not None else ()
    if request.classes is None:
        request = request.changed(classes=len(named) if len(named) >= 2 else PLANNED_CLASSES)
    elif images is not None and images.labeled is not None and request.classes != len(named):
        raise InvalidSetting(
            f"plan refused: classes: the labeled public images have {len(named)} classes, found {request.classes}; "
            "leave it out"
        )
    if request.queries is None and request.accuracy is None:
        request = request.changed(queries=PLANNED_QUERIES)
    return request


@dataclass(frozen=True)
class LeastEpsilon:
    """The least epsilon for a share of right labels; see the module.

    Attributes:
        wanted: the share.
        level: whose epsilon it is.
        possible: below it the share is out of reach.
        middle: of the mean of rehearsals; None without them, or where it does not get there.
        enough: from it on the lower end of the range is above the share; None if that is nowhere.
        queries: the questions of a job at `middle`, or `possible`.
        rows: (epsilon, sigma_votes, questions, low, high) of some rungs.
        assumed, wide, narrower: sentences on what is assumed, on what keeps the range wide and on what narrows it.
    """

    wanted: float
    level: StatedLevel
    possible: float
    middle: float | None
    enough: float | None
    queries: int
    rows: tuple[tuple[float, float, int, float, float], ...]
    assumed: str
    wide: str
    narrower: str

    def to_json(self) -> dict[str, Any]:
        """Return the shape of `least_epsilon`."""
        names = ("epsilon", "sigma_votes", "queries", "low", "high")
        return {
            "wanted": self.wanted,
            "level": self.level,
            "low": self.possible,
            "middle": self.middle,
            "high": self.enough,
            "table": [dict(zip(names, row, strict=True)) for row in self.rows],
            "assumed": self.assumed,
            "wide": self.wide,
            "narrower": self.narrower,
        }


def least_epsilon(
    request: PlanRequest, images: _PublicShard | None, *, progress: ProgressCallback = silent
) -> LeastEpsilon:
    """Return the least epsilon for the accuracy of a request, with its range.

    Raises:
        InvalidSetting: nothing can be said of the method, or no epsilon up to the largest rung gets there.
    """
    assert request.accuracy is not None  # noqa: S101  # the caller looks
    between = 0 if images is not None else _BETWEEN
    steps = np.arange((len(RUNGS) - 1) * (between + 1) + 1) / (between + 1)
    epsilons = np.exp(np.interp(steps, np.arange(len(RUNGS)), np.log(RUNGS)))
    epsilons[:: between + 1] = RUNGS
    tasks = [_at(request, float(epsilon), images) for epsilon in epsilons]
    low, middle, high = _ranges(tasks, request, images, progress)
    possible, enough = (_crossing(epsilons, values, request.accuracy) for values in (high, low))
    about = None if middle is None else _crossing(epsilons, middle, request.accuracy)
    labeled = None if images is None else images.labeled
    if possible is None:
        raise InvalidSetting(
            f"plan refused: accuracy: no epsilon up to {RUNGS[-1]:g} gets {request.accuracy:.3%} of the labels right; "
            f"at {RUNGS[-1]:g} it is {low[-1]:.1%} to {high[-1]:.1%}"
            + ("" if labeled is not None else f", where a class gets at most {ALIKE:.0%} of the votes, as assumed")
            + ". Ask for less; "
            + ("another backbone, or more agents, may do more" if labeled is not None else _LABEL.format("(`images`)"))
        )
    place = int(np.searchsorted(RUNGS, possible if about is None else about))
    first = max(0, min(place - _ROWS // 2, len(RUNGS) - _ROWS))
    rows = tuple(
        (RUNGS[at], tasks[at * (between + 1)].sigma_votes, tasks[at * (between + 1)].max_queries,
         round(float(low[at * (between + 1)]), 3), round(float(high[at * (between + 1)]), 3))
        for at in range(first, min(first + _ROWS, len(RUNGS)))
    )  # fmt: skip
    priced = possible if about is None else about
    return LeastEpsilon(
        wanted=request.accuracy,
        level=request.level,
        possible=_rounded(possible, up=False),
        middle=None if about is None else _rounded(about, up=True),
        enough=None if enough is None else _rounded(enough, up=True),
        queries=_at(request, priced, images).max_queries,
        rows=rows,
        **_reasons(tasks[0], request, images),
    )


def _at(request: PlanRequest, epsilon: float, images: _PublicShard | None) -> Task:
    """Return the task at an epsilon, with as many questions as the request says or as are advised."""
    given = request.queries
    if request.ballot_radius == "auto":
        raise InvalidSetting(
            "plan refused: accuracy: give ballot_radius as a whole number; a plan with an epsilon proposes one"
        )
    queries = PLANNED_QUERIES if given is None else given
    one = request.changed(accuracy=None, epsilon=epsilon, solve="sigma", queries=queries)
    found = solve_request(one)
    if given is not None or voting_records(found) is None:
        return found
    advised = questions_for(found, public_images=_count(images), records=request.records)
    return solve_request(one.changed(queries=advised))


def _ranges(
    tasks: Sequence[Task], request: PlanRequest, images: _PublicShard | None, progress: ProgressCallback
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, NDArray[np.float64]]:
    """Return low, mean and high of each task's share of right labels, made to grow with epsilon; see the module."""
    _check_can_be_said(tasks[0], request)
    middle = None
    if images is not None and images.labeled is not None:
        low, mean, high = _rehearsed(tasks, request, images.labeled, progress)
        middle = np.minimum.accumulate(mean[::-1])[::-1]
    else:
        found = [_expected(task, request, images) for task in tasks]
        low, high = np.array([one.low for one in found]), np.array([one.high for one in found])
    # The lower end holds from an epsilon on if no larger one has a lower; the upper one likewise.
    return np.minimum.accumulate(low[::-1])[::-1], middle, np.maximum.accumulate(high)


def _check_can_be_said(task: Task, request: PlanRequest) -> None:
    if (known := expect(task, records=request.records)).low is None:
        raise InvalidSetting(
            f"plan refused: accuracy: nothing can be said of method {task.method} beforehand; {known.reason}. Ask for "
            "reverse-knn, knn or ensemble, or name an epsilon"
        )


def _crossing(epsilons: NDArray[np.float64], values: NDArray[np.float64], wanted: float) -> float | None:
    """Return the least epsilon at which growing values reach what is wanted; None if they do not."""
    place = int(np.searchsorted(values >= wanted, True))
    if place == len(values):
        return None
    if place == 0:
        return float(epsilons[0])
    share = (wanted - values[place - 1]) / (values[place] - values[place - 1])
    return float(epsilons[place - 1] * (epsilons[place] / epsilons[place - 1]) ** share)


def _rounded(epsilon: float, *, up: bool) -> float:
    """Return an epsilon to two digits."""
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 1)
    count = math.ceil(epsilon / step - 1e-9) if up else math.floor(epsilon / step + 1e-9)
    return float(f"{count * step:.6g}")


_LABEL: Final = (
    "label some of your public images and name their shard {}: jobs are then rehearsed on them, at no privacy cost"
)


def _reasons(task: Task, request: PlanRequest, images: _PublicShard | None) -> dict[str, str]:
    """Return sentences on what a range assumes, what keeps it wide and what narrows it."""
    labeled = None if images is None else images.labeled
    votes, told = "", ""
    if (records := voting_records(task, request.records)) is not None:
        votes = f"{records:,} private images vote in all"
        if request.records is None:
            votes += f" ({RECORDS_EACH:,} at each of {task.agents} agents)"
            told = "Say how many private images there are with --records: half as many need twice the epsilon. "
    if labeled is not None:
        alike = f"Private images are like the {labeled.known:,} labeled public ones, class by class as frequent"
        wide = (
            f"{labeled.known:,} labeled images leave open how right others are, and noise falls anew in each job. "
            "Where the range of epsilon is wide, accuracy grows slowly with epsilon."
        )
        if _holds_more(task, request, labeled):
            wide += (
                f" The rehearsal's agents hold {labeled.known // 2:,} images together and yours more: "
                "the upper end is therefore what noise alone allows."
            )
        narrower = (
            "More labeled public images narrow it. Private images of another kind are right less often than this."
        )
    else:
        alike = f"A class gets {UNLIKE:.0%} of the votes at its questions (lower end) to {ALIKE:.0%} (upper end)"
        wide = (
            "Nothing is known of how alike private and public images are, nor of how well their classes lie in groups, "
            "and that decides more than noise does. Where classes lie in no groups, labels stay below the lower end."
        )
        narrower = (_LABEL[0].upper() + _LABEL[1:] + ".").format("(--public; `images` in Python)")
    return {
        "assumed": f"{alike}{'; ' * bool(votes)}{votes}.",
        "wide": wide,
        "narrower": told + narrower,
    }


def _choices(task: Task, dishonest_talliers: int | None) -> dict[str, Any]:
    if dishonest_talliers is None:
        return {}
    found = noise_choices(task.model_dump(exclude={"dishonest_talliers"}), dishonest_talliers)
    return {"noise_choices": [one.to_json() for one in found]}


def _expected(task: Task, request: PlanRequest, images: _PublicShard | None) -> Expectation:
    known = expect(task, records=request.records)
    if images is None or known.low is None:
        return known
    if images.labeled is None:
        from feature_store.students.labeling import expect_on

        return expect_on(task, images.features, records=request.records)
    low, _, high = _rehearsed([task], request, images.labeled)
    return replace(known, low=round(float(low[0]), 3), high=round(float(high[0]), 3))


def _rehearsed(
    tasks: Sequence[Task], request: PlanRequest, labeled: RehearsalImages, progress: ProgressCallback = silent
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return low, mean and high of each task's share of right labels, as rehearsed."""
    from workers.rehearsal import prediction_interval, rehearse

    right = rehearse(tasks, labeled, records=request.records, progress=progress)
    low, high = prediction_interval(right, labeled=labeled.known)
    if _holds_more(tasks[0], request, labeled):
        # More records have nearer neighbors, or better models: what they gain is not rehearsed.
        high = np.maximum(high, [expect(task, records=request.records).high or 1.0 for task in tasks])
    return low, right.mean(axis=0), high


def _holds_more(task: Task, request: PlanRequest, labeled: RehearsalImages) -> bool:
    """Return whether agents hold more records than a rehearsal gives them, where it draws each only once."""
    return voting_records(task) is None and assumed_records(task, request.records) > labeled.known // 2


def _count(images: _PublicShard | None) -> int | None:
    return None if images is None else len(images.features)


def with_radius(request: PlanRequest) -> PlanRequest:
    """Return the request, with a radius proposed from its public images if it asks for one.

    Raises:
        InvalidSetting: it asks for a radius, and there are no public images or too few.
    """
    if request.ballot_radius != "auto":
        return request
    if request.images is None:
        raise InvalidSetting(
            "a radius is proposed from the public images: name their shard (`images`), or give a whole number"
        )
    from feature_store.students.labeling import propose_radius

    radius = propose_radius(
        _PublicShard.open(Path(request.images)).features,
        questions=PLANNED_QUERIES if request.queries is None else request.queries,
        num_classes=request.classes or PLANNED_CLASSES,
        k=request.k,
        records=RECORDS_EACH if request.records is None else max(1, request.records // request.agents),
    )
    return request.changed(ballot_radius=radius)


def _life(request: PlanRequest) -> Life | None:
    """Return the lifetime budget of a record, made from the epsilon that the request sets aside.

    Raises:
        InvalidSetting: the request also asks to solve for sigma.
    """
    if request.life_epsilon is None:
        return None
    if request.wanted == "sigma":
        raise InvalidSetting(
            "life_epsilon is the price whatever the noise: give `sigma`, which decides how many votes a record has"
        )
    budget = set_aside_nano(budget_for(request.life_epsilon, request.delta))
    return Life(budget_nano=budget, least_similarity=-1.0)


def solve_request(request: PlanRequest) -> Task:
    """Return the task that a request describes, after solving for its open field."""
    solve = request.wanted
    if request.epsilon is not None and solve is None:
        raise InvalidSetting(
            "give the price (`epsilon`) or the noise (`sigma`), or both and what to find: `solve` queries or k"
        )
    if (request.epsilon is None) != (solve is None):
        raise InvalidSetting("`epsilon` (the price wanted) and `solve` (what to find for it) go together")
    if solve == "sigma" and request.sigma is not None:
        raise InvalidSetting("`solve` sigma finds the noise for `epsilon`, so do not give `sigma` as well")
    if solve != "sigma" and request.sigma is None:
        if solve is None:
            raise InvalidSetting("give a price as `epsilon`, or the noise as `sigma`")
        raise InvalidSetting(f"`solve` {solve} finds what `epsilon` pays for: give the noise (`sigma`), too")
    fields = request.model_dump(
        include={*Terms.model_fields, "agents", "ballot_radius"}, exclude={"dishonest_talliers"}
    ) | {
        "name": "plan",
        "classes": [f"class {number}" for number in range(request.classes or PLANNED_CLASSES)],
        "sigma_votes": 1.0 if request.sigma is None else request.sigma,
        "max_queries": PLANNED_QUERIES if request.queries is None else request.queries,
        "colluding_agents": resolve_colluding_agents(
            request.colluding_agents,
            agents=request.agents,
            max_dropouts=request.max_dropouts,
            method=request.method,
        ),
        "lifetime_budget": _life(request),
    }
    if request.dishonest_talliers is None:
        task = parse_task(fields)
    else:
        task = noise_choices(fields, request.dishonest_talliers)[0].task
    if request.epsilon is None:
        return task
    found: dict[str, int]
    match solve:
        case "sigma":
            return at_price(task, request.epsilon, offset_share=request.offset_share, level=request.level)
        case "queries":
            found = {"max_queries": solve_queries(task, request.epsilon, level=request.level)}
        case _:
            found = {"k": solve_k(task, request.epsilon, level=request.level)}
    return parse_task(task.model_dump() | found)
