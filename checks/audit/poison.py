"""Poison: records and questions for which a canary moves as much as the method lets it, the strongest setting there is.

The adversary does all that a promise allows. It knows and chooses every record but the canary. It chooses the
questions, or chooses records for questions that it does not choose. The promise itself stays: one canary comes or goes.
Sets on which a trained model moves far come last.

Directions are unit vectors of the task's dimension. A record near a direction has a stated inner product with it.

**Models.** Neighboring sets on which a trained model moves far: what an adversary of a model poisons it with.

A vote moves by one whatever the others are. A model moves as far as the other records let it. `labeler.descent` bounds
that by L/(n lambda), or by twice as much where one record may replace another. Sets that come close are special:

* **The canary's gradient is as long as it can be**: the others have taught the model that it is certainly wrong.
* **Nothing pulls back.** The curvature of the others' losses resists the move. Suppose that the others are spread over
  m directions and the canary is their sum. Its score is then sqrt(m) times theirs. Each of them is still unsure, so
  together they push hard. Each is curved along the canary by 1/m of what it would be at the canary.
* **Where a mean is taken over all records** (no public denominator), an added record takes weight from the others. It
  pushes further where they pushed the other way, at most to the bound for a replacement. It reaches that bound only
  where gradients do not fade (the svm while every margin is violated).

`worst_sets` tries numbers of directions, numbers of records and labels, and measures without noise. That costs the
adversary nothing, because all of it is public to it. If no tried set reaches the bound, the rest is the bound's slack,
or a better adversary's. An audit says how far its canary moves (`labeler.auditing.Attempt.moved_mu`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from checks.audit.pipeline import LabeledRecords, Scene
from feature_store.query_selection import model_rows
from feature_store.rows import FEATURE_SCALE, quantize
from labeler.errors import InvalidSetting
from labeler.methods.aux_distill import NEGATIVES_EVERY, head_terms
from labeler.methods.blind_average import linear_terms
from labeler.methods.sensitivity import answers_with_a_model, kept_bound, records_of_a_person, sums_means, training_of
from labeler.records import Rows
from labeler.setting import StatedLevel
from labeler.task import Task
from workers.learning.linear import train_rows
from workers.learning.private_heads import fit_rows, public_maps

DIMENSION = 64
"""Dimension of made-up features, where the task does not say."""

_NEAREST, _FARTHEST = 0.97, 0.80
_MOST_COPIES = 200
_MOST_OF_AN_AGENT = 5_000
_FAINT = 0.015
"""The part of a question that lies in the space that heads read. A map makes ten times as much of it; there, no answer
is so sure that rounding hides it.
"""

Directions = NDArray[np.float64]


def dimension_of(task: Task) -> int:
    """Return the number of components of this task's features; any will do, except for methods that say."""
    if (rows := task.traits.model_rows(task)) is not None:
        return rows - 1
    # One component more than heads look at, for questions that lie almost elsewhere.
    return max(DIMENSION, training_of(task).dimension + 1) if answers_with_a_model(task) else DIMENSION


def poisoned(
    task: Task, level: StatedLevel, *, canaries: int, rng: np.random.Generator, queries: NDArray[np.int16] | None
) -> Scene:
    """Return the scene in which canaries move most.

    Args:
        task: any method's.
        level: what a canary is: one record, the records of a person, or an agent.
        rng: public randomness.
        queries: those that are asked anyway; None lets the adversary choose them.
    """
    dimension, of_model = dimension_of(task), model_queries(task)
    if task.sampled is not None:
        return _of_steps(task, dimension)
    if answers_with_a_model(task) and not sums_means(task):
        return _of_models(task, level, dimension, rng, queries if of_model is None else of_model)
    directions = _directions(canaries, dimension, rng)
    if of_model is not None:
        queries = of_model
    elif queries is None:
        queries = _chosen(task, directions, rng)
    elif not task.traits.choosing(1) and canaries == 1:
        # Nearer to all queries than anything on the other side is.
        mean = queries.astype(np.float64).mean(axis=0)
        directions = mean[None, :] / (np.linalg.norm(mean) or 1.0)
    elif task.traits.choosing(1):
        own = rng.choice(len(queries), size=canaries, replace=len(queries) < canaries)
        directions = queries[own] / np.linalg.norm(queries[own].astype(np.float64), axis=1, keepdims=True)
    units = tuple(
        LabeledRecords(
            quantize(np.repeat(one[None, :], _records_of(task, level), axis=0)), _labels(_records_of(task, level), 1)
        )
        for one in directions
    )
    agents = [_background(task, number, directions, rng) for number in range(task.agents)]
    if level == "agent":
        agents[0] = LabeledRecords(agents[0].features[:0], agents[0].labels[:0])
    return Scene(
        task,
        level,
        agents=tuple(agents),
        canaries=units,
        queries=queries,
        is_level=_colluders_level(task),
    )


def model_queries(task: Task) -> NDArray[np.int16] | None:
    """Return the questions for a linear model, the unit vectors of feature space and zero; None where none is asked."""
    rows = task.traits.model_rows(task)
    return None if rows is None else model_rows(rows - 1)


def most_canaries(task: Task) -> int:
    """Return how many canaries can each have separate numbers of the sum."""
    if task.traits.choosing(1):
        return min(task.max_queries // task.traits.reach(task), 20 if task.release == "winner" else 200)
    return min(task.traits.searches(task.max_queries), 200) or 1


def _records_of(task: Task, level: StatedLevel) -> int:
    """Return the records of one canary. A person has four times as many as may vote, so that a forgotten cap shows."""
    if level == "instance":
        return 1
    if level == "agent":
        return _records_of_an_agent(task)
    if task.records_per_person is None:
        raise InvalidSetting("a person is attacked only where the task has records_per_person, which its price is for")
    return min(4 * task.records_per_person, _MOST_COPIES)


def _records_of_an_agent(task: Task) -> int:
    """Return the records of an agent: all alike, and four times as many as a cap lets vote, so that a forgotten cap
    shows.
    """
    if answers_with_a_model(task):
        most: float = kept_bound(task) or training_of(task).radius
    elif task.traits.choosing(1):
        # Each votes at k questions, so this many reach the edge of the ball.
        ball = math.inf if task.ballot_radius is None else task.ballot_radius / math.sqrt(task.k) + 1
        most = 4 * min(task.max_agent_records or math.inf, ball)
    else:
        most = task.k
    return math.ceil(min(most, _MOST_OF_AN_AGENT))


def _of_models(
    task: Task, level: StatedLevel, dimension: int, rng: np.random.Generator, queries: NDArray[np.int16] | None
) -> Scene:
    """Poison the first agent's model by `worst_sets`; the others' models are known, whatever they are."""
    if queries is None:
        queries = _questions_of_heads(task, dimension, rng)
    copies = 1 if level == "agent" else _records_of(task, level)
    found = worst_sets(task, level, copies=copies, dimension=dimension, queries=queries)
    one = LabeledRecords(quantize(np.eye(dimension)[:1]), _labels(1, 0))
    others = (one,) * (task.agents - 1)
    return Scene(task, level, agents=(found.stay, *others), canaries=(found.unit,), queries=queries)


def _of_steps(task: Task, dimension: int) -> Scene:
    """Return a canary whose gradient is as long as the clip, and others whose gradients are orthogonal to it at every
    model.

    Gradients are slopes times rows (x, 1), and the rows of x and -x are orthogonal. So no other agent's secret samples
    hide the canary's.
    """
    one = LabeledRecords(quantize(np.eye(dimension)[:1]), _labels(1, 1))
    other = LabeledRecords(-one.features, _labels(1, 0))
    queries = model_rows(dimension)
    return Scene(task, "instance", agents=(other,) * task.agents, canaries=(one,), queries=queries)


def _questions_of_heads(task: Task, dimension: int, rng: np.random.Generator) -> NDArray[np.int16]:
    """Return public negatives that make the map plain, and questions that read every weight."""
    axes = np.eye(dimension)[: training_of(task).dimension]
    both = np.concatenate([axes, -axes])
    rows = np.empty((task.max_queries, dimension))
    negatives = len(rows[::NEGATIVES_EVERY])
    rows[::NEGATIVES_EVERY] = both[np.arange(negatives) % len(both)]
    asked = np.flatnonzero(np.arange(len(rows)) % NEGATIVES_EVERY)
    directions = np.concatenate([both, rng.normal(size=(len(asked), len(axes))) @ axes / math.sqrt(len(axes))])
    rows[asked] = math.sqrt(1 - _FAINT**2) * np.eye(dimension)[-1] + _FAINT * directions[: len(asked)]
    return quantize(rows)


def _directions(count: int, dimension: int, rng: np.random.Generator) -> Directions:
    if count <= dimension:
        return np.eye(dimension)[:count]
    drawn = rng.normal(size=(count, dimension))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def _chosen(task: Task, directions: Directions, rng: np.random.Generator) -> NDArray[np.int16]:
    """Return as many questions near each canary as it can answer, and the rest elsewhere."""
    count, asked = len(directions), task.max_queries
    if task.traits.choosing(1):
        each = min(task.k, asked // count)
        elsewhere = -np.abs(rng.normal(size=(asked - count * each, directions.shape[1])))
        rows = np.concatenate([np.repeat(directions, each, axis=0), elsewhere])
    else:
        rows = directions[np.arange(asked) % count]
    return quantize(rows)


def _background(task: Task, agent: int, directions: Directions, rng: np.random.Generator) -> LabeledRecords:
    if task.traits.choosing(1):
        return _level_counts(task, agent, directions)
    if task.traits.searches(1):
        return _neighbours(task, agent, directions, rng)
    if not answers_with_a_model(task):
        return _one_sided(agent, directions)
    return LabeledRecords(quantize(directions[:1]), _labels(1, 0))


def _neighbours(task: Task, agent: int, directions: Directions, rng: np.random.Generator) -> LabeledRecords:
    """Return k records near each direction, of the first two classes, in numbers for which one vote decides the winner.

    The farthest at the first agent is of class 0: a canary displaces it. Agents that collude and keep classes level
    have equally many of each class.
    """
    agents, k = task.quorum, min(task.k, 1000)
    if _colluders_level(task):
        agents -= task.colluding_agents
    near = np.linspace(_NEAREST, _FARTHEST, k) if k > 1 else np.array([_FARTHEST])
    ones = agents * k // 2
    # The last agents vote for class 1; a lone agent does so with its nearest records.
    labels = (np.arange(agents * k) >= agents * k - ones).astype(np.int16).reshape(agents, k)
    own = labels[agent] if agent < agents else (np.arange(k) % 2).astype(np.int16)
    own = own[::-1] if agents == 1 else own
    rows = [_beside(direction, near, rng) for direction in directions]
    return LabeledRecords(quantize(np.concatenate(rows)), np.tile(own, len(directions)))


def _colluders_level(task: Task) -> bool:
    """True where colluders can keep classes level: winners of knn, where two other agents vote against each other."""
    return (
        task.release == "winner"
        and task.traits.searches(1) > 0
        and task.noise_by == "agents"
        and task.quorum - task.colluding_agents >= 2
    )


def _level_counts(task: Task, agent: int, directions: Directions) -> LabeledRecords:
    """Return the first two classes far ahead and level at each direction if the winner is released; else one record."""
    if task.release == "winner" and agent == 0 and task.max_agent_records is None:
        lead = min(max(1, math.ceil(3 * task.total_sigma_votes)), _MOST_COPIES)
        each = np.repeat(np.array([0, 1], np.int16), lead)
        return LabeledRecords(quantize(np.repeat(directions, len(each), axis=0)), np.tile(each, len(directions)))
    return LabeledRecords(quantize(-directions[:1] - 0.01), _labels(1, 0))


def _one_sided(agent: int, directions: Directions) -> LabeledRecords:
    """Return records that teach the first agent's model class 0 alone, on the other side; the others are level, each
    one class.
    """
    label = 0 if agent == 0 else agent % 2
    rows = -np.repeat(directions, 3, axis=0)
    return LabeledRecords(quantize(rows), _labels(len(rows), label))


def _beside(direction: NDArray[np.float64], near: NDArray[np.float64], rng: np.random.Generator) -> Directions:
    across = rng.normal(size=(len(near), len(direction)))
    across -= (across @ direction)[:, None] * direction
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    return np.asarray(near[:, None] * direction + np.sqrt(1 - near[:, None] ** 2) * across)


def _labels(count: int, label: int) -> NDArray[np.int16]:
    return np.full(count, label, np.int16)


MOST_RECORDS: Final = 1_000
"""Records of one agent in a set that is tried: a whole job trains on them."""

_SPREADS: Final = (1, 4, 16, 32, 64)

Measure = Callable[[LabeledRecords], NDArray[np.float64]]
"""Returns what an agent with these records adds without noise, as one row, in units of the charged noise."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The records of an agent that stay, and the canary's.

    Attributes:
        stay: of the agent; none where the agent is the canary.
        moved: how far the canary moves the model without noise, in units of sigma.
    """

    stay: LabeledRecords = field(repr=False)
    unit: LabeledRecords = field(repr=False)
    moved: float


def worst_sets(
    task: Task, level: StatedLevel, *, copies: int, dimension: int, queries: NDArray[np.int16]
) -> Neighbours:
    """Return the set whose canary moves the agent's model furthest, of those tried.

    Args:
        task: of a method that trains what it is priced by.
        copies: the number of records of the canary; not used for an agent.
    """
    measure = _measure(task, queries)
    votes = copies if level != "person" else min(copies, records_of_a_person(task))
    best = Neighbours(_of(np.zeros((0, dimension)), []), _of(np.eye(dimension)[:1], [0]), -1.0)
    for stay, canaries in _candidates(task, level, dimension):
        without = np.zeros(1) if level == "agent" else measure(stay)
        for one in canaries:
            moved = float(np.linalg.norm(measure(one if level == "agent" else _joined(stay, one, votes)) - without))
            if moved > best.moved:
                best = Neighbours(stay, one if level == "agent" else _repeated(one, copies), moved)
    return best


def _measure(task: Task, queries: NDArray[np.int16]) -> Measure:
    if task.traits.model_rows(task) is not None:
        terms = linear_terms(task)
        return lambda records: train_rows(_rows(records), terms=terms).ravel() / (terms.sensitivity * task.sigma_votes)
    heads = head_terms(task)
    negatives = queries[::NEGATIVES_EVERY].astype(np.float32) / FEATURE_SCALE
    maps = public_maps(negatives, terms=heads)

    def both(records: LabeledRecords) -> NDArray[np.float64]:
        fitted = fit_rows(_rows(records), negatives, terms=heads, maps=maps)
        parts = [fitted.head.ravel() / heads.head_noise]
        return np.concatenate(parts if fitted.scores is None else [*parts, fitted.scores / heads.score_noise])

    return both


def _candidates(
    task: Task, level: StatedLevel, dimension: int
) -> Iterator[tuple[LabeledRecords, list[LabeledRecords]]]:
    """Yield sets of records, each with canaries to try next to it; for an agent, whole agents."""
    training, most = training_of(task), kept_bound(task)
    reach = training.dimension if task.traits.model_rows(task) is None else dimension
    nobody = _of(np.zeros((0, dimension)), [])
    room = MOST_RECORDS if most is None else min(MOST_RECORDS, most)
    if level == "agent":
        for count in sorted({min(training.min_records, room), room}):
            yield nobody, [_of(np.repeat(np.eye(dimension)[:1], count, axis=0), np.zeros(count))]
        return
    own = 1 if level == "instance" else records_of_a_person(task)
    # Where no public bound is kept, records above the minimum only dilute one.
    wanted = [1, training.min_records - own, training.min_records, *([] if most is None else [most - own])]
    counts = sorted({max(1, min(one, room - own)) for one in wanted})
    for spread in sorted({min(one, reach) for one in _SPREADS}):
        directions = np.eye(dimension)[:spread]
        canary = directions.sum(axis=0)[None] / math.sqrt(spread)
        # One with another label, and one on the other side with the same label.
        canaries = [_of(canary, [1]), _of(-canary, [0])]
        for count in counts:
            for opposed in (False, True):
                place = np.arange(count)
                signs = np.where(opposed & ((place // spread) % 2 == 1), -1.0, 1.0)
                yield _of(signs[:, None] * directions[place % spread], signs < 0), canaries


def _of(rows: NDArray[np.float64], labels: ArrayLike) -> LabeledRecords:
    return LabeledRecords(quantize(rows), np.asarray(labels, dtype=np.int16))


def _repeated(one: LabeledRecords, copies: int) -> LabeledRecords:
    return LabeledRecords(np.repeat(one.features, copies, axis=0), np.repeat(one.labels, copies))


def _joined(stay: LabeledRecords, one: LabeledRecords, copies: int) -> LabeledRecords:
    more = _repeated(one, copies)
    return LabeledRecords(np.concatenate([stay.features, more.features]), np.concatenate([stay.labels, more.labels]))


def _rows(records: LabeledRecords) -> Rows:
    return Rows.of(records.features.astype(np.float32) / np.float32(FEATURE_SCALE), records.labels)
