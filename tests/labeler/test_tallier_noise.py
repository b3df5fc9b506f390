"""Noise by the talliers: the price against exact convolution, one draw for one set, and what a dishonest one can do.

Laws are enumerated, so nothing is sampled but where a test says so; that one has fixed seeds and would reject a right
implementation for one seed in a million.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from feature_store.query_selection import model_rows
from feature_store.rows import quantize
from labeler.errors import InvalidSetting, InvalidTask, PrivacyRefusal, ProtocolViolation, UnsafeGrid, WrongDigest
from labeler.messages.bodies import OpenRound
from labeler.methods.blind_average import weight_sum
from labeler.methods.sensitivity import integer_event
from labeler.noise import DiscreteGaussian, noise_source
from labeler.planning import price, resolve_colluding_agents
from labeler.randomness import ByteSource, os_source, seeded_source
from labeler.records import Records
from labeler.release import check_round, contribution, input_shares, on_grid, open_histogram, open_winner
from labeler.sharing import split, unshard
from labeler.solving import hint, noise_choices
from labeler.tally import AggregateShare, QueryBatch, Round, add_shares, round_of, round_with
from labeler.task import Task, parse_task
from tests.one_round import tallied
from tests.oracles.integers import discrete_gaussian, hockey_stick, shifted, sum_of
from tests.workers.answer import answer as answer_of

KEYS = tuple(bytes([number]) * 32 for number in range(3))


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "name": "t", "classes": ["a", "b", "c"], "method": "knn", "k": 2, "sigma_votes": 25.0, "delta": 1e-4,
        "max_queries": 206, "agents": 3, "colluding_agents": 2,
    } | changes  # fmt: skip


def task_of(**changes: Any) -> Task:
    return parse_task(fields(dishonest_talliers=1) | changes)


def batch_of(task: Task, queries: int) -> QueryBatch:
    return QueryBatch(np.ones((queries, 4), np.int16), first_query=0)


def sums_of(task: Task, ballots: dict[str, NDArray[np.int64]], *, seed: int = 0) -> list[AggregateShare]:
    """What three talliers send of a round, through sharing and tally."""
    queries = len(next(iter(ballots.values())))
    round = round_of(task, batch_of(task, queries))
    return tallied(
        round,
        [
            input_shares(own, task, round, agent_id=name, source=seeded_source(f"{seed} {name}".encode()))
            for name, own in ballots.items()
        ],
        keys=KEYS,
    )


def noise_of(task: Task, number: int, queries: int, names: set[str]) -> NDArray[np.int64]:
    digest = round_of(task, batch_of(task, queries)).digest
    source = noise_source(KEYS[number], digest, names, is_seeded=False)
    return DiscreteGaussian(task.share_sigma_grid).sample(source, (queries, task.num_classes))


# The task.


def test_three_talliers_of_whom_one_is_dishonest_add_half_of_the_noise_that_three_agents_need_against_two() -> None:
    agents, one, two = parse_task(fields()), task_of(), task_of(dishonest_talliers=2)
    assert price(one).instance.epsilon == pytest.approx(price(agents).instance.epsilon, rel=1e-6)
    assert one.total_sigma_votes**2 == pytest.approx(agents.total_sigma_votes**2 / 2, rel=1e-12)
    assert two.total_sigma_votes**2 == pytest.approx(3 * 25.0**2, rel=1e-12)
    assert (one.noise_contributors, two.noise_contributors, one.noise_parties) == (2, 1, 3)
    # Whoever colludes or drops out, and however many agents there are.
    for changes in ({"colluding_agents": 0}, {"agents": 40}, {"max_dropouts": 2}, {"agents": 1, "colluding_agents": 0}):
        other = task_of(**changes)
        assert other.total_sigma_votes == one.total_sigma_votes
        assert price(other).instance.charge_nano == price(one).instance.charge_nano


def test_it_holds_against_all_participants_and_says_what_two_talliers_can_do() -> None:
    cost, two = price(task_of()), price(task_of(dishonest_talliers=2))
    assert cost.instance.participant_epsilon == cost.instance.epsilon
    # Half of the noise is left of two that pool: mu^2 twice as large.
    pooled = price(task_of(sigma_votes=25.0 / math.sqrt(2))).instance.epsilon
    assert f"epsilon is {pooled:.2f}"[:15] in cost.holds_against
    assert "all other participants and one of the three talliers" in cost.holds_against
    assert "and two of the three talliers" in two.holds_against
    assert "Should two talliers" not in two.holds_against
    assert cost.to_json()["noise_by"] == "talliers"
    assert cost.to_json()["dishonest_talliers"] == 1
    assert "dishonest_talliers" not in price(parse_task(fields())).to_json()
    assert resolve_colluding_agents(None, agents=5, dishonest_talliers=1) == 4


# The price.


@pytest.mark.parametrize("dishonest", [1, 2])
@pytest.mark.parametrize(("sigma", "level"), [(1.0, "agent"), (3.0, "agent"), (1.5, "instance")])
def test_the_price_is_what_the_honest_talliers_noise_gives_by_exact_convolution(
    dishonest: int, sigma: float, level: str
) -> None:
    """One vote of a model: at agent level one count moves by a vote, at instance level two do."""
    task = task_of(method="ensemble", k=1, sigma_votes=sigma, max_queries=1, dishonest_talliers=dishonest, delta=1e-3)
    # As coarse as a task may be, so that the oracle is quick; what the honest talliers draw and nobody else.
    task = task.model_copy(update={"grid_scale": math.ceil(100 * math.sqrt(3 - dishonest) / sigma)})
    one = discrete_gaussian(task.share_sigma_grid, math.ceil(9 * task.share_sigma_grid))
    p, q = shifted(sum_of(one, 3 - dishonest), task.scale)
    claimed = price(task).statement("agent" if level == "agent" else "instance").epsilon

    def delta_at(epsilon: float) -> float:
        if level == "agent":
            return hockey_stick(p, q, epsilon)
        # Two independent counts, one up and one down: the chance of each loss of one, against those of the other.
        kept = p > 1e-18
        loss = np.log(np.maximum(p[kept], 1e-300) / np.maximum(q[kept], 1e-300))
        order = np.argsort(loss)
        loss, weight = loss[order], p[kept][order]
        above = np.concatenate((np.cumsum(weight[::-1])[::-1], [0.0]))
        other = np.concatenate((np.cumsum((weight * np.exp(-loss))[::-1])[::-1], [0.0]))
        first = np.searchsorted(loss, epsilon - loss, side="right")
        return float((weight * (above[first] - math.exp(epsilon) * np.exp(-loss) * other[first])).sum())

    assert delta_at(claimed) <= task.delta
    assert delta_at(claimed * 0.99) > task.delta, "more than a percent is charged for nothing"


@settings(max_examples=40)
@given(
    agents=st.integers(1, 60), colluding=st.integers(0, 60), dropouts=st.integers(0, 59), sigma=st.floats(0.5, 200.0),
    dishonest=st.sampled_from([1, 2]), release=st.sampled_from(["histogram", "winner"]),
    method=st.sampled_from(["knn", "reverse-knn", "ensemble"]),
)  # fmt: skip
def test_agents_move_neither_the_price_nor_the_noise_and_every_sum_fits(
    agents: int, colluding: int, dropouts: int, sigma: float, dishonest: int, release: str, method: str
) -> None:
    try:
        task = task_of(
            agents=agents, colluding_agents=min(colluding, agents), max_dropouts=min(dropouts, agents - 1),
            sigma_votes=sigma, dishonest_talliers=dishonest, release=release, method=method, k=1,
        )  # fmt: skip
    except UnsafeGrid:
        assert release == "winner", "every histogram of these fits"
        return
    h = 3 - dishonest
    assert task.share_sigma_grid == pytest.approx(task.scale * sigma / math.sqrt(h))
    assert task.total_sigma_votes == pytest.approx(sigma * math.sqrt(3 / h))
    assert task.sum_sigma_votes(1) == task.total_sigma_votes
    charge = price(task).instance.charge_nano
    assert charge is not None
    squared = price(task).instance.squared_sensitivity
    assert charge / 1e9 == pytest.approx(float(squared or 0) / sigma**2, rel=1e-3)
    if task.winner_terms is not None:
        most = task.agents * (task.vote_clip or task.k) * task.scale + 3 * task.noise_reach
        assert most <= task.winner_terms.highest
        assert task.winner_terms.lowest <= -3 * task.noise_reach
        assert price(task).instance.histogram_epsilon is None, "winners are charged as the sums they are read from"


# What is added.


def ballots_for(task: Task, queries: int, number: int) -> NDArray[np.int64]:
    ballots = np.zeros((queries, task.num_classes), dtype=np.int64)
    ballots[:, number % task.num_classes] = task.k
    return ballots


def test_agents_share_bare_ballots_and_the_talliers_three_draws_are_in_what_is_opened() -> None:
    task = task_of(max_queries=4000)
    ballots = {f"agent-{number}": ballots_for(task, 4000, number) for number in range(3)}
    assert np.array_equal(contribution(ballots["agent-0"], task, source=os_source()), ballots["agent-0"] * task.scale)
    shares = sums_of(task, ballots)
    opened = open_histogram(shares, task)
    assert opened.noisy_votes is not None
    assert opened.is_seeded
    exact = sum(ballots.values(), np.zeros((4000, 3), np.int64))
    drawn = [noise_of(task, number, 4000, set(ballots)) for number in range(3)]
    assert np.array_equal(np.rint(opened.noisy_votes * task.scale), exact * task.scale + sum(drawn))
    # The sum carries 1.5 sigma^2; whoever knows one tallier's draw still faces sigma^2. Both within chance.
    for rest, variance in ((opened.noisy_votes - exact, 1.5), (opened.noisy_votes - exact - drawn[2] / task.scale, 1)):
        statistic = float((rest**2).sum()) / (variance * task.sigma_votes**2)
        assert 1e-6 < stats.chi2.cdf(statistic, rest.size) < 1 - 1e-6


@pytest.mark.parametrize(
    "changes", [{"ballot_radius": 20}, {"ballot_radius": 20, "release": "winner"}, {"max_agent_records": 30}, {}]
)
def test_every_way_of_counting_reaches_the_talliers_bare_and_is_opened_under_their_noise(
    changes: dict[str, Any],
) -> None:
    task = task_of(method="reverse-knn", k=1, max_queries=4, **changes)
    ballots = {name: ballots_for(task, 4, number) * 7 for number, name in enumerate("xyz")}
    sums = sums_of(task, ballots)
    field = None if task.winner_terms is None else task.winner_terms.field
    exact = sum(on_grid(own, task) for own in ballots.values())
    drawn = sum(noise_of(task, number, 4, set(ballots)) for number in range(3))
    assert np.array_equal(unshard([share.words for share in sums], field=field), exact + drawn)


def test_one_set_has_one_noise_and_another_set_round_or_tallier_an_independent_one() -> None:
    def draws(key: bytes, digest: str, names: list[str]) -> bytes:
        return noise_source(key, digest, names, is_seeded=False).bytes(64)

    base = draws(KEYS[0], "a" * 64, ["x", "y"])
    assert draws(KEYS[0], "a" * 64, ["y", "x"]) == base
    others = {
        draws(KEYS[1], "a" * 64, ["x", "y"]),
        draws(KEYS[0], "b" * 64, ["x", "y"]),
        draws(KEYS[0], "a" * 64, ["x", "y", "z"]),
        draws(KEYS[0], "a" * 64, ["x,y"]),
    }
    assert len(others | {base}) == 5


@pytest.mark.parametrize(("sigma", "source"), [(1600.0, None), (None, os_source())])
def test_nothing_is_summed_without_the_noise_that_the_round_promises(
    sigma: float | None, source: ByteSource | None
) -> None:
    round = Round("a" * 64, "b" * 64, 2, 3, 1, tallier_sigma_grid=sigma)
    share = split(np.zeros((2, 3), np.int64), num_talliers=3, source=os_source())[0]
    with pytest.raises(PrivacyRefusal, match="nothing is summed without the noise that was promised"):
        add_shares(0, round, {"x": share}, noise=source)


def test_what_two_talliers_send_besides_the_noisy_sum_is_uniform() -> None:
    """One of them alone: its numbers look the same whatever the votes are (chi-square of their leading bits)."""
    task = task_of(max_queries=4000, max_dropouts=1)
    for number in (0, 1):
        shares = sums_of(task, {"x": ballots_for(task, 4000, number), "y": ballots_for(task, 4000, 2)}, seed=number)
        for share in shares:
            counts = np.bincount((share.words >> np.uint64(60)).astype(np.int64).ravel(), minlength=16)
            assert stats.chisquare(counts).pvalue > 1e-6


# The round, and its wire.


def opening(round: Round) -> OpenRound:
    return OpenRound(round, 0, {"agent-1": "1a" * 32}, 1.8e9)


def test_a_round_with_other_noise_than_its_tasks_is_refused_by_every_agent() -> None:
    task = task_of()
    round = round_with(task, "b" * 64, 2)
    check_round(round, task)
    assert OpenRound.decode(opening(round).encode()).round == round
    for sigma in (None, 100.0, task.share_sigma_grid * (1 + 1e-12)):
        other = replace(round, tallier_sigma_grid=sigma)
        assert other.digest != round.digest
        with pytest.raises(WrongDigest, match="other noise of the talliers"):
            check_round(other, task)


@pytest.mark.parametrize("sigma", [0.0, -1600.0, 99.0, 1e9, float("nan"), float("inf"), "1600", None, True, [1.0]])
def test_no_coordinator_can_write_another_noise_into_a_round(sigma: object) -> None:
    content = json.loads(opening(round_with(task_of(), "b" * 64, 2)).encode())
    content["round"]["tallier_sigma_grid"] = sigma
    body = json.dumps(content).encode()
    if sigma is None:
        assert OpenRound.decode(body).round.tallier_sigma_grid is None  # another round, of which no agent sends a share
        return
    with pytest.raises(ProtocolViolation):
        OpenRound.decode(body)


# A dishonest tallier.


def test_an_offset_is_found_out_where_the_histogram_leaves_its_range_and_is_post_processing_elsewhere() -> None:
    task = task_of()
    ballots = {name: ballots_for(task, 2, number) for number, name in enumerate("xyz")}
    honest = sums_of(task, ballots)
    for offset, is_refused in ((5 * task.scale, False), (2**40, True), (2**63, True)):
        words = honest[0].words + np.uint64(offset)
        corrupt = [replace(honest[0], words=words), *honest[1:]]
        if is_refused:
            with pytest.raises(ProtocolViolation, match="beyond what contributions"):
                open_histogram(corrupt, task)
        else:
            found, clean = open_histogram(corrupt, task), open_histogram(honest, task)
            assert found.noisy_votes is not None
            assert clean.noisy_votes is not None
            assert np.allclose(found.noisy_votes - clean.noisy_votes, 5.0)


def test_winners_are_those_of_the_noisy_sums_and_cost_what_those_cost() -> None:
    task, sums = task_of(release="winner", abstain_below=1, max_queries=40), task_of(max_queries=40)
    assert price(task).instance == price(sums).instance
    assert (
        price(parse_task(fields(release="winner", max_queries=40))).instance.charge_nano
        < price(sums).instance.charge_nano
    )
    ballots = {name: ballots_for(task, 40, number) for number, name in enumerate("xyz")}
    shares = sums_of(task, ballots)
    terms = task.winner_terms
    assert terms is not None
    total = unshard([share.words for share in shares], field=terms.field)
    drawn = sum(noise_of(task, number, 40, set(ballots)) for number in range(3))
    assert np.array_equal(total, task.scale * sum(ballots.values()) + drawn)
    expected = np.where(total.max(axis=1) < task.scale, -1, total.argmax(axis=1))
    assert open_winner(shares, task).labels.tolist() == expected.tolist()


# Who should add it.


@pytest.mark.parametrize(
    ("changes", "dishonest", "by", "variance"),
    [
        ({"colluding_agents": 2}, 1, "talliers", 1.5),
        ({"colluding_agents": 1}, 1, "agents", 1.5),
        ({"colluding_agents": 1}, 2, "agents", 1.5),
        ({"colluding_agents": 2}, 2, "agents", 3.0),
        ({"colluding_agents": 1, "max_dropouts": 1}, 1, "talliers", 1.5),
        ({"colluding_agents": 1, "max_dropouts": 2}, 2, "talliers", 3.0),
        ({"agents": 100, "colluding_agents": 1}, 1, "agents", 100 / 99),
        ({"agents": 100, "colluding_agents": 40}, 1, "talliers", 1.5),
        ({"agents": 1, "colluding_agents": 0}, 1, "agents", 1.0),
        ({"talliers": 2}, 1, "agents", 3.0),
    ],
)
def test_who_costs_less_accuracy_under_the_stated_trust_adds_the_noise(
    changes: dict[str, Any], dishonest: int, by: str, variance: float
) -> None:
    chosen, *rest = noise_choices(fields(**changes), dishonest)
    assert (chosen.by, chosen.variance) == (by, pytest.approx(variance))
    assert all(chosen.cost <= one.cost for one in rest)


def test_a_winners_lower_price_counts_for_the_agents() -> None:
    """With N = 5 and two colluding the agents' noise is larger, and still the winner is clearer at one price."""
    stated = fields(agents=5, colluding_agents=2, max_queries=200)
    assert [one.by for one in noise_choices(stated, 1)] == ["talliers", "agents"]
    assert [one.by for one in noise_choices(stated | {"release": "winner"}, 1)] == ["agents", "talliers"]


def test_where_no_way_is_allowed_it_says_why() -> None:
    with pytest.raises(InvalidTask, match="leave no agent whose noise they cannot subtract"):
        noise_choices(fields(colluding_agents=3, talliers=2), 1)
    with pytest.raises(InvalidSetting):
        DiscreteGaussian(0.1)


# Models: the same sum of vectors of integers.

MODEL = {"method": "blind-average", "k": 1, "max_queries": 5, "sigma_votes": 2.0}
LEARNERS: tuple[dict[str, Any], ...] = (
    {"min_records": 20, "regularisation": 0.1},
    {"min_records": 20, "max_records": 40, "regularisation": 0.3, "learner": "svm", "radius": 0.7, "iterations": 9},
    {"learner": "means", "axes": 4},
)


@pytest.mark.parametrize("training", LEARNERS)
@pytest.mark.parametrize("dishonest", [1, 2])
def test_a_model_costs_under_the_talliers_noise_what_it_costs_under_as_many_unknown_agents(
    training: dict[str, Any], dishonest: int
) -> None:
    task = task_of(**MODEL, training=training, dishonest_talliers=dishonest, agents=40, max_dropouts=7)
    as_many = parse_task(fields(**MODEL, training=training, agents=3, colluding_agents=dishonest))
    for level in ("instance", "agent"):
        mine, other = (integer_event(one, level, 5) for one in (task, as_many))
        assert mine == other
        assert mine is not None
        assert mine.noise_contributors == 3 - dishonest
        assert mine.share_sigma_grid == task.share_sigma_grid == task.tallier_sigma_grid
    assert weight_sum(task).scale == task.scale
    assert task.total_sigma_votes == pytest.approx(2.0 * math.sqrt(3 / (3 - dishonest)))
    assert price(task).instance.participant_epsilon == price(task).instance.epsilon
    assert "they read every agent's weights" in price(task).holds_against
    assert "votes" not in price(task).holds_against


@settings(max_examples=30)
@given(
    agents=st.integers(1, 200), sigma=st.sampled_from([0.05, 2.0, 500.0]), dishonest=st.sampled_from([1, 2]),
    training=st.sampled_from(LEARNERS), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_bare_models_of_any_length_that_is_allowed_are_opened_under_the_talliers_three_draws(
    agents: int, sigma: float, dishonest: int, training: dict[str, Any], seed: int
) -> None:
    changes = {"agents": agents, "colluding_agents": 0, "sigma_votes": sigma, "dishonest_talliers": dishonest}
    try:
        task = task_of(**MODEL | changes, training=training)
        spec = weight_sum(task)
    except UnsafeGrid:
        assert sigma < 1, "noise far below what one record moves"
        return
    rng, names = np.random.default_rng(seed), [f"agent-{number}" for number in range(min(agents, 3))]
    vectors = [rng.normal(size=spec.dimension) for _ in names]
    models = {
        name: spec.quantize(one * spec.largest_norm / np.linalg.norm(one)).reshape(5, 3)
        for name, one in zip(names, vectors, strict=True)
    }
    for own in models.values():
        assert np.array_equal(contribution(own, task, source=os_source()), own), "nothing but shares hides it"
    if agents > 3:
        return
    drawn = sum((noise_of(task, number, 5, set(models)) for number in range(3)), np.zeros((5, 3), np.int64))
    opened = open_histogram(sums_of(task, models, seed=seed), task).noisy_votes
    assert opened is not None
    assert np.array_equal(np.rint(opened * task.scale), sum(models.values(), drawn))


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), training=st.sampled_from(LEARNERS), dishonest=st.sampled_from([1, 2]))
def test_one_record_moves_a_bare_model_by_no_more_than_the_talliers_noise_is_charged_for(
    seed: int, training: dict[str, Any], dishonest: int
) -> None:
    """Neighbouring records, trained by the product, as they reach the talliers: bare, on the grid."""
    task = task_of(**MODEL, training=training, dishonest_talliers=dishonest)
    rng = np.random.default_rng(seed)
    features = quantize(rng.normal(size=(25, 4)))
    ids, labels = np.arange(25, dtype=np.uint64), rng.integers(0, 3, 25).astype(np.int16)
    batch = QueryBatch(model_rows(4))
    found = []
    for kept in (slice(None), slice(0, 24)):
        records = Records(features[kept], ids[kept], labels[kept], f"{kept}")
        found.append(contribution(answer_of(task, batch, records), task, source=os_source()))
    event = integer_event(task, "instance", 5)
    assert event is not None
    assert 0 < int(np.square(found[0] - found[1]).sum()) <= event.squared_sensitivity
    assert np.abs(found[0] - found[1]).max() <= event.largest_change


def test_who_plans_a_model_is_told_which_noise_costs_less() -> None:
    training = {"min_records": 100, "regularisation": 0.1}
    asked = fields(**MODEL, training=training)
    assert [choice.by for choice in noise_choices(asked, 1)] == ["talliers", "agents"]
    assert [choice.by for choice in noise_choices(asked | {"colluding_agents": 1}, 1)] == ["agents", "talliers"]
    assert "dishonest_talliers = 1" in hint(parse_task(asked))
    with_heads = fields(method="aux-distill", k=1, training=training | {"dimension": 2})
    assert hint(parse_task(with_heads)) == ""
